"""Operators' objects in a scheduler: loaded at start and on each change, and written. A change is one transaction with
its notification; every scheduler also reads the revision each RELOAD_S, in case that was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import structlog
from msgspec.structs import replace

from bus.bus import API
from bus.clock import Clock
from bus.consuming.outcome import never
from bus.contracts.base import MAX_REASON, Refusal
from bus.contracts.drains import DrainRecord
from bus.contracts.objects import ChangedObject, FenceRecord, ObjectKind, ObjectsRevision
from bus.contracts.operations import HostAdminState, HostFence
from bus.faults import DatabaseUnavailable, RequestRefused, Transient
from bus.persistence.outbox import OutboxMessage
from bus.retrying import OBJECTS, Retrying, is_transient
from bus.service.settings import SettingsError
from scheduler_worker import metrics as metrics_module
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.objects import cell_consequences, fence_rules
from scheduler_worker.objects.configured import SEEDED_BY, check_objects, configured
from scheduler_worker.objects.consistency import named
from scheduler_worker.objects.effective_config import configuration_bodies, effective_config, seeds
from scheduler_worker.records.object_records import (
    INVALID,
    BodyInvalid,
    ChangeActor,
    Key,
    RecordedObjects,
    applied,
    cells_of,
    disabled_cells,
    drains_of,
    fence_of,
    fences_of,
    host_decisions,
)
from scheduler_worker.selection.selector import Selector
from scheduler_worker.selection.selector_config import SelectorConfig
from scheduler_worker.store.port import OperationUnit, SchedulerStore

log = structlog.get_logger(__name__)

RELOAD_S = 10.0
RELOAD_CHECK_S = 0.5  # how soon after a reconnect the revision is read again
NOT_LOADED = -1
HANDLER = "scheduler.changes"

TOO_LATE = "request.too_late"  # its requester waits no longer

# The effect of a change on the objects that it holds, who made it and why; or why it is refused.
Made = tuple[Sequence[ChangedObject], ChangeActor]
MakeChange = Callable[[OperationUnit, RecordedObjects], Awaitable[Made | Refusal]]


async def changed_within(changed: asyncio.Event, seconds: float | None) -> bool:
    """Wait for a change, at the longest so long (None: without limit); returns whether there was one, and clears it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(None if seconds is None else max(0.0, seconds)):
            await changed.wait()
    has_changed = changed.is_set()
    changed.clear()
    return has_changed


def _too_late() -> Refusal:
    log.warning("objects.too_late")
    return Refusal(code=TOO_LATE, reason="the requester's time was over before the objects could be locked")


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
        self._in_force: tuple[dict[Key, dict[str, Any]], SelectorConfig] | None = None
        # Of a change, until it is loaded.
        self._judged_last: tuple[dict[Key, dict[str, Any]], SelectorConfig] | None = None
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
                    if present.revision == 0 < self.revision:
                        # Set back to before the first objects: one written now would keep those of the settings away.
                        self._is_fresh = False
                        raise DatabaseUnavailable("no objects are on record; those of the settings are about to be")
                    if is_late():
                        return _too_late()
                    if message_id and not await unit.first_time(HANDLER, message_id):
                        return present
                    made = await make(unit, present)
                    if isinstance(made, Refusal):
                        # Also rolls back that its message was handled: a redelivery would be answered as if it were
                        # made.
                        raise RequestRefused(made.reason, code=made.code)
                    changed, actor = made
                    if not changed:
                        return present
                    after = applied(present, changed, actor)
                    after = replace(after, token=await unit.write_objects(changed, actor))
                    unit.emit(OutboxMessage(API, ObjectsRevision(revision=after.revision)))
            except RequestRefused as refused:
                return Refusal(code=refused.code, reason=refused.reason[:MAX_REASON])
            self._load(after)
        log.info("objects.changed", revision=after.revision, actor=actor.name, objects=named(changed))
        return after

    async def record_fences(self, reports: Sequence[HostFence]) -> None:
        """Put cells' reports about fences on record, and publish them to every scheduler. Raises Transient.

        One that changes nothing of the fence in force here reads no objects under the lock of operators' changes.
        """
        reports = [one for one in reports if not fence_rules.is_told(self.fences.get(one.host_uuid), one)]
        if not reports:
            return
        changed: dict[str, ChangedObject] = {}

        async def make(_unit: OperationUnit, present: RecordedObjects) -> Made | Refusal:
            for one in reports:
                try:
                    change = self._fence_change(one, present)
                except BodyInvalid as fault:  # a scheduler of the version that wrote it records the repeat
                    log.warning("host.fence_not_usable", uuid=one.host_uuid, cell=one.cell, reason=str(fault))
                    continue
                if change is not None:
                    changed[one.host_uuid] = change  # the last of several reports about one fence
            cell, reason = f"cell {reports[0].cell}", "its report about the fence"
            return tuple(changed.values()), ChangeActor(cell, reason, self._clock.time())

        written = await self.write(make)
        for one in reports if changed and not isinstance(written, Refusal) else ():
            log.info(
                "host.fence",
                uuid=one.host_uuid,
                state=one.state.value,
                stale_machines=one.stale_machines,
                cell=one.cell,
            )

    def _fence_change(self, report: HostFence, present: RecordedObjects) -> ChangedObject | None:
        """Raises BodyInvalid: the fence on record cannot be used here."""
        stored = present.objects.get((ObjectKind.FENCE, report.host_uuid))
        if stored is not None:
            return fence_rules.acknowledge(report.host_uuid, fence_of(stored), report)
        host = self._selector.name_of(report.host_uuid)
        change = fence_rules.unfence_unknown(report, present.revision, host)
        if change is not None:
            log.warning("host.fence_unknown", uuid=report.host_uuid, host=host, cell=report.cell)
        return change

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
            made = self.configured(configuration_bodies(found.objects))
            self._apply(made, found)
        except (ValueError, SettingsError) as error:
            # Another scheduler, of another version or with other plug-ins, has accepted them: this one keeps its
            # present objects.
            log.error("objects.not_usable", revision=found.revision, reason=str(error))
            if self.revision == NOT_LOADED:
                raise SettingsError(INVALID, f"the objects on record cannot be used here: {error}") from error
            return
        log.info("objects.loaded", revision=found.revision, objects=len(found.objects))

    def configured(self, bodies: dict[Key, dict[str, Any]]) -> SelectorConfig:
        """The configuration with these objects; the one in force, and the last, are made once. Raises ValueError, or
        SettingsError.
        """
        for known in (self._in_force, self._judged_last):
            if known is not None and known[0] == bodies:
                return known[1]
        self._judged_last = bodies, configured(effective_config(self._settings, bodies))
        return self._judged_last[1]

    def _apply(self, made: SelectorConfig, found: RecordedObjects) -> None:
        """Raises ValueError for a body that is not valid, and then nothing is adopted."""
        decisions, disabled = host_decisions(found.objects), disabled_cells(found.objects)
        cells, fences, drains = cells_of(found.objects), fences_of(found.objects), drains_of(found.objects)
        if self._in_force is None or self._in_force[1] is not made:
            if any(one.hosts is not None for one in made.settings.aggregates):
                self.aggregates_changed.set()
            made.revision = found.token
            self._selector.config = made
            self._in_force = configuration_bodies(found.objects), made
        self._selector.table.apply_decisions(decisions)
        # The hosts of a cell that is no longer in use stay in the table.
        there = cell_consequences.known_cells(self.served, cells)
        gone = set(self._selector.table.cells).difference(there) if self.served else set()
        self._selector.table.disabled_cells = disabled | gone
        if cells != self.cells:
            self.cells = cells
            self.cells_changed.set()
        if fences != self.fences:
            self.fences = fences
            self.fences_changed.set()
        if drains != self.drains:
            self.drains = drains
            self.drains_changed.set()
        self.revision, self._token = found.revision, found.token
        metrics_module.OBJECTS_REVISION.set(found.revision)
