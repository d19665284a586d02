"""What operators decide about hosts at run time: recorded once, told to every scheduler, read again after an outage."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog
from msgspec.structs import replace

from bus.bus import API, Bus
from bus.clock import Clock
from bus.consuming.outcome import Done, Outcome, Received, Refuse, Retry
from bus.contracts.catalogue import BY_QUEUE
from bus.contracts.operations import AdminStatesChanged, AdminStateSet, HostAdminState, SetAdminState
from bus.contracts.workers import WorkerHeartbeat
from bus.faults import Transient
from bus.persistence.outbox import OutboxMessage
from scheduler_worker.domain.hosts import HostTable
from scheduler_worker.domain.selector import Selector
from scheduler_worker.domain.workers import WorkerTable
from scheduler_worker.store.port import SchedulerStore

log = structlog.get_logger(__name__)

RETRIES = len(BY_QUEUE["scheduler.operations"].retry_s)
HANDLER = "scheduler.operations"
HOST_UNKNOWN = "host.unknown"
HOST_AMBIGUOUS = "host.ambiguous"
RELOAD_CHECK_S = 0.5  # how soon after a reconnect decisions are read again


class OperationsHandler:
    """Handles queue `scheduler.operations`. warm: whether every host should have been heard from by now."""

    def __init__(self, store: SchedulerStore, selector: Selector, *, clock: Clock, warmup_s: float) -> None:
        self._store = store
        self._selector = selector
        self._clock = clock
        self._warmup_s = warmup_s
        self._started_s: float | None = None

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """One after another: an operator's decisions are rare, and about one host the later one counts."""
        if self._started_s is None:
            self._started_s = self._clock.monotonic()
        return [await self._handle(received) for received in batch]

    async def _handle(self, received: Received) -> Outcome:
        command = received.message
        assert isinstance(command, SetAdminState), command
        found = self._find(command)
        if len(found) > 1:
            places = ", ".join(found)
            return Refuse(HOST_AMBIGUOUS, f"{len(found)} hosts are called {command.host}: name one of {places}")
        if not found:
            if self._is_warming_up() and received.meta.attempt < RETRIES:
                return Retry("hosts.unknown", "not every host has been announced yet")
            return Refuse(HOST_UNKNOWN, f"there is no host {command.host}")
        (uuid,) = found
        decided = HostAdminState(
            host_uuid=uuid,
            host=self._name_of(uuid),
            state=command.state,
            reason=command.reason,
            by=command.by,
            at=self._clock.time(),
        )
        recorded = await self._record(decided, received.meta.id)
        self._selector.table.decide(recorded)
        log.info("host.decided", host=recorded.host, uuid=uuid, state=recorded.state.value, by=recorded.by)
        return Done(reply=AdminStateSet(host=recorded))

    async def _record(self, decided: HostAdminState, message_id: str) -> HostAdminState:
        """Write the decision, unless this message was handled before; what is on record afterwards."""
        async with self._store.operation() as unit:
            known = (await unit.lock_admin_states([decided.host_uuid])).get(decided.host_uuid)
            if not await unit.first_time(HANDLER, message_id):
                # Delivered again; a later decision may have come since, and it stays.
                return known if known is not None else decided
            recorded = replace(decided, version=1 if known is None else known.version + 1)
            await unit.put_admin_states([recorded])
            unit.emit(OutboxMessage(API, AdminStatesChanged(hosts=(recorded,)), recorded.host_uuid))
        return recorded

    def _find(self, command: SetAdminState) -> list[str]:
        """The hosts (uuids) with this name, or the host with this uuid, in the cell that the command names."""
        found = self._selector.uuids_of(command.host)
        if command.cell is not None:
            found = [uuid for uuid in found if self._selector.cell_of(uuid) == command.cell]
        return found

    def _name_of(self, uuid: str) -> str:
        index = self._selector.table.index_of(uuid)
        return self._selector.name_of(uuid) if index is None else self._selector.table.names[index]

    def _is_warming_up(self) -> bool:
        assert self._started_s is not None
        return self._clock.monotonic() - self._started_s < self._warmup_s


class AdminListener:
    """Queue `scheduler.admin.{process}`: keeps the host table's decisions, and reads them all when some may be missed.

    again_s: how often they are read anyway, in case an announcement was lost.
    """

    def __init__(
        self, store: SchedulerStore, table: HostTable, workers: WorkerTable, bus: Bus, *, again_s: float
    ) -> None:
        self._store = store
        self._table = table
        self._workers = workers
        self._bus = bus
        self._clock = bus.clock
        self._again_s = again_s
        self._is_fresh = False
        self.loaded = asyncio.Event()  # every decision was read once

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """In any order: of each host the highest version counts."""
        for received in batch:
            if isinstance(received.message, AdminStatesChanged):
                for decision in received.message.hosts:
                    self._table.decide(decision)
            elif isinstance(received.message, WorkerHeartbeat):
                self._workers.apply(received.message, self._bus.name, self._clock.monotonic())
        return [Done()] * len(batch)

    def on_reconnected(self) -> None:
        """The private queue was deleted with the connection, and so were the announcements in it."""
        self._is_fresh = False

    async def run(self) -> None:
        """Read every decision at the start, soon after each reconnect, and periodically."""
        due = self._clock.monotonic()
        while True:
            if not self._is_fresh or self._clock.monotonic() >= due:
                try:
                    await self._load()
                    due = self._clock.monotonic() + self._again_s
                except Transient as fault:
                    log.warning("admin.waiting", code=fault.code, reason=str(fault))
            await self._clock.sleep(RELOAD_CHECK_S)

    async def _load(self) -> None:
        self._is_fresh = True  # before: a connection that is lost meanwhile has it read again
        try:
            for decision in await self._store.admin_states():
                self._table.decide(decision)
        except BaseException:
            self._is_fresh = False
            raise
        self.loaded.set()
