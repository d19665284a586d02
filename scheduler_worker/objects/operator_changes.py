"""Operators' changes of objects: what follows from a change, and what stands against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bus.clock import Clock
from bus.consuming.outcome import never
from bus.contracts.base import MAX_REASON, Refusal
from bus.contracts.objects import ChangedObject, ObjectKind, ObjectsChange, ObjectsChanged
from bus.contracts.operations import SetAdminState
from bus.persistence.outbox import OutboxMessage
from bus.service.settings import SettingsError
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.objects import cell_consequences, fence_rules, zone_consequences
from scheduler_worker.objects.change_plan import plan
from scheduler_worker.objects.consistency import MAX_COUNTED, counted
from scheduler_worker.objects.effective_config import configuration_bodies, unknown_class
from scheduler_worker.objects.object_registry import Made, ObjectRegistry
from scheduler_worker.records.object_records import (
    IN_USE,
    INVALID,
    UNKNOWN,
    ZONE_CONFLICT,
    ChangeActor,
    ChangePlan,
    Objects,
    RecordedObjects,
    applied,
    cells_of,
    disabled_cells,
    fences_of,
    host_decisions,
)
from scheduler_worker.selection.flavor import FlavorInvalid
from scheduler_worker.selection.selector import Selector
from scheduler_worker.selection.selector_config import SelectorConfig
from scheduler_worker.store.port import OperationUnit, SchedulerStore
from scheduler_worker.store.tables import clean


def _orders(after: Objects, hosts: Sequence[str]) -> Iterator[OutboxMessage]:
    """The commands about the fences of these hosts to their cells; `FencePublisher` notifies every cell of the rest."""
    decisions, known = host_decisions(after), fences_of(after)
    for uuid in hosts:
        if uuid in known and (cell := known[uuid].cell) is not None:
            yield OutboxMessage(cell, fence_rules.command(uuid, known[uuid], decisions.get(uuid)), uuid)


class OperatorChanges:
    """Carries out operators' changes of objects, unless something stands against them. One per scheduler."""

    def __init__(self, registry: ObjectRegistry, store: SchedulerStore, selector: Selector, *, clock: Clock) -> None:
        self._registry = registry
        self._store = store
        self._selector = selector
        self._clock = clock

    async def apply(
        self,
        change: ObjectsChange,
        message_id: str,
        *,
        decided: SetAdminState | None = None,
        is_late: Callable[[], bool] = never,
    ) -> ObjectsChanged | Refusal:
        """Change objects, all or none; in force here on return. message_id: a repeat changes nothing again. decided:
        the command about one host that this carries out (states a fence anew, ends one by force, names its cell).
        is_late: as for `ObjectRegistry.write`. Raises Transient.
        """
        changed: tuple[ChangedObject, ...] = ()

        async def make(unit: OperationUnit, present: RecordedObjects) -> Made | Refusal:
            nonlocal changed
            actor = ChangeActor(clean(change.actor), clean(change.reason), self._clock.time(), change.force)
            planned = await self._judged(change, present, restates_fences=decided is not None)
            if isinstance(planned, Refusal):
                return planned
            followed = fence_rules.fence_changes(
                present,
                planned,
                self._selector.table.last_cell_of,
                named=None if decided is None else decided.cell,
                settings=self._registry.served,
                force=decided is not None and decided.force,
            )
            if isinstance(followed, Refusal):
                return followed
            changed = planned.changed
            if change.dry_run or not changed:
                return (), actor
            after = applied(present, (*changed, *followed), actor).objects
            for message in _orders(after, [one.name for one in followed]):
                unit.emit(message)
            return (*changed, *followed), actor

        written = await self._registry.write(make, is_late, message_id="" if change.dry_run else message_id)
        return written if isinstance(written, Refusal) else ObjectsChanged(revision=written.revision, changed=changed)

    async def _judged(
        self, change: ObjectsChange, present: RecordedObjects, *, restates_fences: bool
    ) -> ChangePlan | Refusal:
        planned = plan(change, present.objects, restates_fences=restates_fences)
        if isinstance(planned, Refusal):
            return planned
        unknown = cell_consequences.unknown_cell(self._registry.served, planned.cells_decided)
        made = unknown or self._checked(present, planned)
        if isinstance(made, Refusal):
            return made
        if (conflict := self._zone_conflict(planned, made.settings)) is not None:
            return conflict
        impact = None if change.force else await self._impact(present, planned, made.settings)
        return impact or planned

    def _checked(self, present: RecordedObjects, planned: ChangePlan) -> SelectorConfig | Refusal:
        """The configuration after a change: one that no scheduler could use is refused before it is written."""
        try:
            return self._registry.configured(configuration_bodies(present.objects, planned.changed))
        except FlavorInvalid as error:
            return Refusal(code=error.code, reason=str(error)[:MAX_REASON])
        except SettingsError as error:
            return Refusal(code=error.code, reason=error.reason[:MAX_REASON])
        except ValueError as error:
            return Refusal(code=INVALID, reason=str(error)[:MAX_REASON])

    async def _impact(self, present: RecordedObjects, planned: ChangePlan, after: SchedulerConfig) -> Refusal | None:
        """The objections to a change that is not forced."""
        return (
            self._fenced_alive(present, planned)
            or self._without_cells(present, planned)
            or await self._occupied_cells(planned)
            or self._unknown_hosts(planned)
            or self._unknown_classes(planned)
            or await self._unlocatable(planned, after)
        )

    def _without_cells(self, present: RecordedObjects, planned: ChangePlan) -> Refusal | None:
        """With its last cell disabled a system takes no build at all."""
        if not planned.cells_decided:
            return None
        after = applied(present, planned.changed, ChangeActor("", "", 0.0)).objects
        left = set(cell_consequences.known_cells(self._registry.served, cells_of(after))) - disabled_cells(after)
        reason = "no cell would be left that takes builds: enable another first, or force the change"
        return None if left else Refusal(code=IN_USE, reason=reason)

    async def _occupied_cells(self, planned: ChangePlan) -> Refusal | None:
        """The machines of a cell that workers no longer connect to would be out of reach."""
        for name in cell_consequences.cells_after_removal(self._registry.served, planned.cells_decided):
            advice = ", which would be out of reach: delete them first, or force the change"
            if refusal := await self._used(f"cell {name!r}", "instance", advice, cell_consequences.IN_USE, cell=name):
                return refusal
        return None

    async def _used(self, what: str, noun: str, advice: str, code: str = IN_USE, **of: Any) -> Refusal | None:
        """Why a change is refused of which so many machines would suffer; None: there are none."""
        count = await self._store.machines(MAX_COUNTED, **of)
        return Refusal(code=code, reason=f"{what} has {counted(count, noun)}{advice}"[:MAX_REASON]) if count else None

    def _unknown_hosts(self, planned: ChangePlan) -> Refusal | None:
        """Hosts that an aggregate is to have and that do not exist, or whose name several hosts have: a name may be
        mistyped.
        """
        for aggregate, host in planned.hosts_named:
            code, which, found = UNKNOWN, f"there is no host {host}", self._selector.uuids_of(host)
            if len(found) > 1:
                code, which = INVALID, f"{len(found)} hosts are called {host}: name one by its uuid"
            if len(found) != 1:
                return Refusal(code=code, reason=f"aggregate {aggregate!r}: {which}"[:MAX_REASON])
        return None

    def _unknown_classes(self, planned: ChangePlan) -> Refusal | None:
        """A class that no provider can have: its name may be mistyped."""
        problem = unknown_class(planned.changed)
        return None if problem is None else Refusal(code=UNKNOWN, reason=problem[:MAX_REASON])

    def _fenced_alive(self, present: RecordedObjects, planned: ChangePlan) -> Refusal | None:
        """A fence states that a host is off. One that a service reports, or may report, may be running: a name may be
        mistyped.
        """
        table, now_s = self._selector.table, self._clock.monotonic()
        for uuid in fence_rules.hosts_fenced(planned.changed, present.objects):
            shown = table.last_cell_of(uuid)
            problem = table.reported(uuid, self._registry.cells_in_use() if shown is None else (shown,), now_s)
            if problem is not None:
                reason = (
                    "an instance that is evacuated from a running host runs twice: switch it off first, and force the "
                    f"fence if this stays so; {problem.reason}"
                )
                return Refusal(code=problem.code, reason=reason[:MAX_REASON])
        return None

    async def _unlocatable(self, planned: ChangePlan, after: SchedulerConfig) -> Refusal | None:
        """Why a change would leave instances outside of the zone that they requested, or without the flavor or the
        server group that they have; None: it does not.
        """
        if any(one.kind is ObjectKind.AGGREGATE for one in planned.changed):
            problem = zone_consequences.zones_after_removal(self._selector, after)
            if problem is not None:
                return Refusal(code=IN_USE, reason=problem[:MAX_REASON])
        for name in planned.flavors_deleted:
            advice = ": delete or resize them first, or force the change"
            if refusal := await self._used(f"flavor {name!r}", "instance", advice, flavor=name):
                return refusal
        for name in planned.flavors_remade:
            advice = ", whose next moves would claim another size: "
            advice += "make a flavor of another name and resize them, or force the change"
            if refusal := await self._used(f"flavor {name!r}", "instance", advice, flavor=name):
                return refusal
        for name, was in planned.groups_changed:
            advice = ": delete them first, or force the change; they keep the rule that they were built under"
            of = (name.partition("/")[0], was.uuid)
            if refusal := await self._used(f"server group {name!r}", "member", advice, group=of):
                return refusal
        return None

    def _zone_conflict(self, planned: ChangePlan, after: SchedulerConfig) -> Refusal | None:
        """Why a change that puts a host into a second zone is refused, also when it is forced."""
        if not any(one.kind is ObjectKind.AGGREGATE for one in planned.changed):
            return None
        before = zone_consequences.zones_in(self._selector.all_hosts())
        then = zone_consequences.zones_in(zone_consequences.zones_after(self._selector, after))
        problem = zone_consequences.zone_conflict(before, then, self._selector.name_of)
        return None if problem is None else Refusal(code=ZONE_CONFLICT, reason=problem[:MAX_REASON])
