"""Operators' objects in a scheduler: loaded at start and on each change, and changed on request. A change is one
transaction with its notification; every scheduler also reads the revision each RELOAD_S, in case that was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import structlog
from msgspec.structs import replace

from bus.bus import API
from bus.clock import Clock
from bus.consuming.outcome import never
from bus.contracts.base import MAX_REASON, Refusal
from bus.contracts.drains import DrainRecord
from bus.contracts.objects import (
    ChangedObject,
    FenceRecord,
    ObjectKind,
    ObjectLogPage,
    ObjectLogQuery,
    ObjectsChange,
    ObjectsChanged,
    ObjectsPage,
    ObjectsQuery,
    ObjectsRevision,
)
from bus.contracts.operations import HostAdminState, HostFence, SetAdminState
from bus.faults import Transient
from bus.persistence.outbox import OutboxMessage
from bus.retrying import OBJECTS, Retrying, is_transient
from bus.service.settings import SettingsError
from scheduler_worker import metrics as metrics_module
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.objects import cell_consequences, fence_rules, zone_consequences
from scheduler_worker.objects import fence_rules as fences
from scheduler_worker.objects.change_plan import plan
from scheduler_worker.objects.configured import SEEDED_BY, Configured, check_objects, configured
from scheduler_worker.objects.consistency import MAX_COUNTED, counted, named
from scheduler_worker.objects.effective_config import configuration_bodies, effective_config, seeds, unknown_class
from scheduler_worker.records import fence_record
from scheduler_worker.records.object_records import (
    IN_USE,
    INVALID,
    UNKNOWN,
    ZONE_CONFLICT,
    ChangeActor,
    ChangePlan,
    Key,
    Objects,
    RecordedObjects,
    applied,
    cells_of,
    disabled_cells,
    drains_of,
    fences_of,
    host_decisions,
)
from scheduler_worker.selection.flavor import FlavorInvalid
from scheduler_worker.selection.selector import Selector
from scheduler_worker.store.port import OperationUnit, SchedulerStore
from scheduler_worker.store.tables import clean


async def changed_within(changed: asyncio.Event, seconds: float | None) -> bool:
    """Wait for a change, at the longest so long (None: without limit); returns whether there was one, and clears it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(None if seconds is None else max(0.0, seconds)):
            await changed.wait()
    has_changed = changed.is_set()
    changed.clear()
    return has_changed


log = structlog.get_logger(__name__)

RELOAD_S = 10.0
RELOAD_CHECK_S = 0.5  # how soon after a reconnect the revision is read again
NOT_LOADED = -1
HANDLER = "scheduler.changes"

TOO_LATE = "request.too_late"  # its requester waits no longer

# The effect of a change on the objects that it holds, who made it and why; or why it is refused.
Made = tuple[Sequence[ChangedObject], ChangeActor]
MakeChange = Callable[[OperationUnit, RecordedObjects], Awaitable[Made | Refusal]]


def _too_late() -> Refusal:
    log.warning("objects.too_late")
    return Refusal(code=TOO_LATE, reason="the requester's time was over before the objects could be locked")


def _orders(after: Objects, hosts: Sequence[str]) -> Iterator[OutboxMessage]:
    """The commands about the fences of these hosts to their cells; `FencePublisher` notifies every cell of the rest."""
    decisions, known = host_decisions(after), fences_of(after)
    for uuid in hosts:
        if uuid in known and (cell := known[uuid].cell) is not None:
            yield OutboxMessage(cell, fences.command(uuid, known[uuid], decisions.get(uuid)), uuid)


class _ChangeRefused(Exception):
    """Rolls back a change, and that its message was handled: a redelivery would be answered as if it were made."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


class ObjectRegistry:
    """Keeps a scheduler's configuration and its host table up to date with the objects on record."""

    def __init__(
        self,
        store: SchedulerStore,
        selector: Selector,
        settings: SchedulerConfig,  # the scheduler's own, without objects
        *,
        clock: Clock,
        cells: Sequence[str] = (),  # the cells that it serves
    ) -> None:
        self._store = store
        self._selector = selector
        self._settings = settings
        self._clock = clock
        self.served = tuple(cells)  # the cells of the settings
        self._loading = asyncio.Lock()  # one load at a time, so that an older revision is not adopted after a newer one
        self._is_fresh = True  # False: notifications may have been lost
        self._in_force: tuple[dict[Key, dict[str, Any]], Configured] | None = None
        self._judged_last: tuple[dict[Key, dict[str, Any]], Configured] | None = None  # of a change, until it is loaded
        self.fences: Mapping[str, FenceRecord] = {}  # of hosts, by uuid, as they are in force here
        self.fences_changed = asyncio.Event()  # set when they change; `EvacuationController` clears it
        self.drains: Mapping[str, DrainRecord] = {}  # by id
        self.drains_changed = asyncio.Event()  # set when they change; `DrainController` clears it
        self.cells: cell_consequences.Decisions = {}  # by name
        self.cells_changed = asyncio.Event()  # set when they change; `CellConnections` clears it
        self.aggregates_changed = asyncio.Event()  # set when they change; `AggregateSync` clears it
        self.revision = NOT_LOADED  # of the objects in force here
        self._token: str | None = None  # of that revision

    async def open(self) -> None:
        """Seed an empty system from the settings, and load the objects. Waits while the database is unavailable."""
        await Retrying(OBJECTS, self._clock).call(self.reload, is_transient)

    async def run(self) -> None:
        """Read the revision every RELOAD_S, and soon after each reconnect."""
        due = self._clock.monotonic() + RELOAD_S
        while True:
            await self._clock.sleep(RELOAD_CHECK_S)
            if not self._is_fresh or self._clock.monotonic() >= due:
                self._is_fresh = True  # read before: a connection that is lost meanwhile has it read again
                try:
                    await self.reload()
                    due = self._clock.monotonic() + RELOAD_S
                except Transient as fault:
                    self._is_fresh = False
                    log.warning("objects.not_loaded", code=fault.code)

    def on_reconnected(self) -> None:
        """The private queue was deleted with the connection, and so were the notifications in it."""
        self._is_fresh = False

    async def reload(self) -> None:
        """Load the objects on record unless they are in force, by their token: after a restore others may have the same
        number. Raises Transient; SettingsError when none was loaded before and those on record cannot be used here.
        """
        async with self._loading:
            found = await self._store.objects(unless=self._token)
            if found is not None and found.revision == 0:
                # The written objects stay: corrected settings would not help.
                check_objects(self._settings)
                if first := seeds(self._settings):
                    found = await self._seed(first)
            if found is not None:
                self._load(found)

    async def recorded(self) -> RecordedObjects:
        """The objects on record. Raises Transient."""
        found = await self._store.objects()
        assert found is not None
        return found

    async def page(self, query: ObjectsQuery) -> ObjectsPage:
        """Objects on record, in order of kind and name. Raises Transient."""
        found = await self.recorded()
        wanted = [
            stored
            for key, stored in sorted(found.objects.items())
            if query.kind in (None, stored.kind)
            and query.name in (None, stored.name)
            and (query.after is None or key > query.after)
        ]
        return ObjectsPage(
            revision=found.revision, objects=tuple(wanted[: query.limit]), more=len(wanted) > query.limit
        )

    async def log(self, query: ObjectLogQuery) -> ObjectLogPage:
        """Entries of the log of changes, newest first. Raises Transient."""
        return ObjectLogPage(entries=tuple(await self._store.object_log(query)))

    async def change(
        self,
        change: ObjectsChange,
        message_id: str,
        *,
        decided: SetAdminState | None = None,
        is_late: Callable[[], bool] = never,
    ) -> ObjectsChanged | Refusal:
        """Change objects, all or none; in force here on return. message_id: a repeat changes nothing again. decided:
        the command about one host that this carries out (states a fence anew, ends one by force, names its cell).
        is_late: as for `write`. Raises Transient.
        """
        changed: tuple[ChangedObject, ...] = ()
        cell, is_forced = (None, False) if decided is None else (decided.cell, decided.force)

        async def make(unit: OperationUnit, present: RecordedObjects) -> Made | Refusal:
            nonlocal changed
            actor = ChangeActor(clean(change.actor), clean(change.reason), self._clock.time(), change.force)
            planned = await self._judged(change, present, restates_fences=decided is not None)
            if isinstance(planned, Refusal):
                return planned
            followed = fence_rules.fence_changes(
                present, planned, self._selector.table.last_cell_of, named=cell, settings=self.served, force=is_forced
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

        written = await self.write(make, is_late, message_id="" if change.dry_run else message_id)
        return written if isinstance(written, Refusal) else ObjectsChanged(revision=written.revision, changed=changed)

    async def _judged(
        self, change: ObjectsChange, present: RecordedObjects, *, restates_fences: bool
    ) -> ChangePlan | Refusal:
        planned = plan(change, present.objects, restates_fences=restates_fences)
        if isinstance(planned, Refusal):
            return planned
        made = cell_consequences.unknown_cell(self.served, planned.cells_decided) or self._checked(present, planned)
        if isinstance(made, Refusal):
            return made
        if (problem := self._zone_conflict(planned, made.config)) is not None:
            return Refusal(code=ZONE_CONFLICT, reason=problem[:MAX_REASON])
        impact = None if change.force else await self._impact(present, planned, made.config)
        return impact or planned

    async def write(
        self, make: MakeChange, is_late: Callable[[], bool] = never, *, message_id: str = ""
    ) -> RecordedObjects | Refusal:
        """Change objects in one transaction with the rows that `make` writes, and publish it; in force here on return.
        A refusal rolls all back. Returns the objects on record then. is_late: whether its requester waits no longer.
        message_id: of the operator's command ("": none). Raises Transient.
        """
        # is_late is asked once the objects are locked: a late command would undo what has been decided since. A copy of
        # a command changes nothing again, and a later change stays.
        async with self._loading:
            try:
                async with self._store.operation() as unit:
                    present = await unit.lock_objects()
                    if is_late():
                        return _too_late()
                    if message_id and not await unit.first_time(HANDLER, message_id):
                        return present
                    made = await make(unit, present)
                    if isinstance(made, Refusal):
                        raise _ChangeRefused(made)
                    changed, actor = made
                    if not changed:
                        return present
                    after = applied(present, changed, actor)
                    after = replace(after, token=await unit.write_objects(changed, actor))
                    unit.emit(OutboxMessage(API, ObjectsRevision(revision=after.revision)))
            except _ChangeRefused as refused:
                return refused.refusal
            self._load(after)
        log.info("objects.changed", revision=after.revision, actor=actor.name, objects=named(changed))
        return after

    async def record_fences(self, reports: Sequence[HostFence]) -> None:
        """Put cells' reports about fences on record, and publish them to every scheduler. Raises Transient.

        One that changes nothing of the fence in force here reads no objects under the lock of operators' changes.
        """
        reports = [one for one in reports if not fences.is_told(self.fences.get(one.host_uuid), one)]
        if not reports:
            return
        changed: dict[str, ChangedObject] = {}

        async def make(_unit: OperationUnit, present: RecordedObjects) -> Made | Refusal:
            for one in reports:
                stored = present.objects.get((ObjectKind.FENCE, one.host_uuid))
                if stored is None:
                    host = self._selector.name_of(one.host_uuid)
                    change = fences.unfence_unknown(one, present.revision, host)
                    if change is not None:
                        log.warning("host.fence_unknown", uuid=one.host_uuid, host=host, cell=one.cell)
                else:
                    change = fences.acknowledge(one.host_uuid, fence_record.fence_of(stored), one)
                if change is not None:
                    changed[one.host_uuid] = change  # the last of several reports about one fence
            cell, reason = f"cell {reports[0].cell}", "its report about the fence"
            return tuple(changed.values()), ChangeActor(cell, reason, self._clock.time())

        await self.write(make)
        for one in reports if changed else ():
            log.info(
                "host.fence",
                uuid=one.host_uuid,
                state=one.state.value,
                stale_machines=one.stale_machines,
                cell=one.cell,
            )

    def cells_in_use(self) -> Collection[str]:
        """The cells that workers connect to."""
        return cell_consequences.cells_in_use(self.served, self.cells)

    def decision_of(self, host_uuid: str) -> HostAdminState | None:
        """The decision in force about a host."""
        return self._selector.table.decision_of(host_uuid)

    async def _seed(self, first: Sequence[ChangedObject]) -> RecordedObjects | None:
        async with self._store.operation() as unit:
            if (await unit.lock_objects()).revision == 0:
                actor = ChangeActor(SEEDED_BY, "the settings of the first scheduler", self._clock.time())
                await unit.write_objects(first, actor)
        return await self._store.objects()

    def _load(self, found: RecordedObjects) -> None:
        try:
            made = self._configured(configuration_bodies(found.objects))
            self._apply(made, found)
        except (ValueError, SettingsError) as error:
            # Another scheduler, of another version or with other plug-ins, has accepted them: this one keeps its
            # present objects.
            log.error("objects.not_usable", revision=found.revision, reason=str(error))
            if self.revision == NOT_LOADED:
                raise SettingsError(INVALID, f"the objects on record cannot be used here: {error}") from error
            return
        log.info("objects.loaded", revision=found.revision, objects=len(found.objects))

    def _configured(self, bodies: dict[Key, dict[str, Any]]) -> Configured:
        """Raises ValueError or SettingsError."""
        for known in (self._in_force, self._judged_last):
            if known is not None and known[0] == bodies:
                return known[1]
        self._judged_last = bodies, configured(effective_config(self._settings, bodies))
        return self._judged_last[1]

    def _apply(self, made: Configured, found: RecordedObjects) -> None:
        """Raises ValueError for a decision about a host that is not valid, and then nothing is adopted."""
        decisions, disabled = host_decisions(found.objects), disabled_cells(found.objects)
        cells = cells_of(found.objects)
        if self._in_force is None or self._in_force[1] is not made:
            if any(one.hosts is not None for one in made.config.aggregates):
                self.aggregates_changed.set()
            self._selector.configure(
                made.config,
                flavors=made.flavors,
                filters=made.filters,
                weighings=made.weighings,
                revision=found.token,
            )
            self._in_force = configuration_bodies(found.objects), made
        self._selector.table.apply_decisions(decisions)
        # The hosts of a cell that is no longer in use stay in the table.
        there = cell_consequences.known_cells(self.served, cells)
        gone = set(self._selector.table.cells).difference(there) if self.served else set()
        self._selector.table.disabled_cells = disabled | gone
        if cells != self.cells:
            self.cells = cells
            self.cells_changed.set()
        if (known := fences_of(found.objects)) != self.fences:
            self.fences = known
            self.fences_changed.set()
        if (drains := drains_of(found.objects)) != self.drains:
            self.drains = drains
            self.drains_changed.set()
        self.revision, self._token = found.revision, found.token
        metrics_module.OBJECTS_REVISION.set(found.revision)

    def _checked(self, present: RecordedObjects, planned: ChangePlan) -> Configured | Refusal:
        """The configuration after a change: one that no scheduler could use is refused before it is written."""
        try:
            return self._configured(configuration_bodies(present.objects, planned.changed))
        except FlavorInvalid as error:
            return Refusal(code=error.code, reason=str(error)[:MAX_REASON])
        except SettingsError as error:
            return Refusal(code=error.code, reason=error.reason[:MAX_REASON])
        except ValueError as error:
            return Refusal(code=INVALID, reason=str(error)[:MAX_REASON])

    async def _impact(self, present: RecordedObjects, planned: ChangePlan, after: SchedulerConfig) -> Refusal | None:
        """The objections to a change that is not forced."""
        return (
            self._fenced_alive(planned)
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
        left = set(cell_consequences.known_cells(self.served, cells_of(after))) - disabled_cells(after)
        reason = "no cell would be left that takes builds: enable another first, or force the change"
        return None if left else Refusal(code=IN_USE, reason=reason)

    async def _occupied_cells(self, planned: ChangePlan) -> Refusal | None:
        """The machines of a cell that workers no longer connect to would be out of reach."""
        for name in cell_consequences.cells_after_removal(self.served, planned.cells_decided):
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
            found = self._selector.uuids_of(host)
            if len(found) != 1:
                which = (
                    f"{len(found)} hosts are called {host}: name one by its uuid"
                    if found
                    else f"there is no host {host}"
                )
                code = INVALID if found else UNKNOWN
                return Refusal(code=code, reason=f"aggregate {aggregate!r}: {which}"[:MAX_REASON])
        return None

    def _unknown_classes(self, planned: ChangePlan) -> Refusal | None:
        """A class that no provider can have: its name may be mistyped."""
        problem = unknown_class(planned.changed)
        return None if problem is None else Refusal(code=UNKNOWN, reason=problem[:MAX_REASON])

    def _fenced_alive(self, planned: ChangePlan) -> Refusal | None:
        """A fence states that a host is off. One that a service reports, or may report, may be running: a name may be
        mistyped.
        """
        table, now_s = self._selector.table, self._clock.monotonic()
        for uuid in planned.hosts_fenced:
            shown = table.last_cell_of(uuid)
            problem = table.reported(uuid, self.cells_in_use() if shown is None else (shown,), now_s)
            if problem is not None:
                reason = (
                    "an instance that is evacuated from a running host runs twice: switch it off first, and force the "
                    f"fence if this stays so; {problem.reason}"
                )
                return Refusal(code=problem.code, reason=reason[:MAX_REASON])
        return None

    async def _unlocatable(self, planned: ChangePlan, after: SchedulerConfig) -> Refusal | None:
        """Why a change would leave instances outside of the zone that they requested; None: it does not."""
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

    def _zone_conflict(self, planned: ChangePlan, after: SchedulerConfig) -> str | None:
        """Why a change that puts a host into a second zone is refused, also when it is forced."""
        if not any(one.kind is ObjectKind.AGGREGATE for one in planned.changed):
            return None
        before = zone_consequences.zones_in(self._selector.all_hosts())
        then = zone_consequences.zones_in(zone_consequences.zones_after(self._selector, after))
        return zone_consequences.zone_conflict(before, then, self._selector.name_of)
