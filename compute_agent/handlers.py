"""A compute service's handling of its messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from bus.consuming.outcome import Done, Outcome, Received, Refuse
from bus.contracts.actions import ChangeMachine
from bus.contracts.base import ORDER_OUTDATED, DatabaseMark, Message
from bus.contracts.catalogue import MESSAGES
from bus.contracts.cell import (
    Destroy,
    Heartbeat,
    HostConflict,
    HostsReleased,
    LookUpMachines,
    MachineLookupResult,
    QueueBarrier,
    ReportHosts,
    RescanHosts,
    ReserveMachines,
    RingMembers,
    ServiceSuperseded,
    Spawn,
)
from bus.contracts.listing import ListMachines, MachinesPage
from bus.contracts.placement import InventoryConflict, InventoryStale
from bus.contracts.queues import CONDUCTOR
from compute_agent.attempts.agent import Agent
from compute_agent.driver import DriverUnavailable
from compute_agent.hosts.hash_ring import Ring
from compute_agent.hosts.host_conflicts import HostConflicts
from compute_agent.hosts.service_name import reporter_name
from compute_agent.records.records import Key

DONE = Done()
COMMANDS = (Spawn, Destroy, ChangeMachine, QueueBarrier, LookUpMachines, ListMachines)
# What conductors alone send, by an incarnation of the cell's database.
FROM_CONDUCTORS = frozenset(row.message for row in MESSAGES if row.publishers == (CONDUCTOR,))


class ComputeHandlers:
    """Queues `compute.{service}` and `compute.control.{service}`."""

    def __init__(
        self,
        agent: Agent,
        *,
        service: str,
        wait_for_capacity: Callable[[], Awaitable[None]],
        on_report_requested: Callable[[], None],
        on_heartbeat: Callable[[Heartbeat], None],
        superseded: Callable[..., None],
        on_barrier: Callable[[QueueBarrier, Sequence[Key]], None],
        pending_destroys: Callable[[], Sequence[Key]],
        reserve: Callable[[ReserveMachines], Awaitable[None]],
        on_rescan: Callable[[RescanHosts], None],
        look_up: Callable[[LookUpMachines], Awaitable[MachineLookupResult]],
        list_machines: Callable[[ListMachines], Awaitable[MachinesPage]],
        sync: Callable[[], Awaitable[None]],
        may_predate_restore: Callable[[DatabaseMark], bool],
        ring: Ring | None = None,
        host_conflicts: HostConflicts | None = None,
    ) -> None:
        self._agent = agent
        self._service = service
        self._wait_for_capacity = wait_for_capacity
        self._on_report_requested = on_report_requested
        self._on_heartbeat = on_heartbeat
        self._on_superseded = superseded
        self._on_barrier = on_barrier
        self._pending_destroys = pending_destroys
        self._reserve = reserve
        self._on_rescan = on_rescan
        self._look_up = look_up
        self._list_machines = list_machines
        self._sync = sync
        self._may_predate_restore = may_predate_restore
        self._ring = ring
        self._host_conflicts = host_conflicts

    async def commands(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """Spawn, Destroy and ChangeMachine: Done means remembered and started, not ended; the end is published."""
        # QueueBarrier: everything before it has been taken. LookUpMachines, ListMachines: answered when that is so.
        await self._wait_for_capacity()
        taken: list[Spawn | Destroy | ChangeMachine] = []
        barriers: list[QueueBarrier] = []
        queries: list[tuple[int, LookUpMachines | ListMachines]] = []
        outcomes: list[Outcome] = []
        for received in batch:
            message = received.message
            if not isinstance(message, COMMANDS):
                outcomes.append(Refuse("compute.not_a_command", type(message).__name__))
            elif message.service != self._service:
                outcomes.append(Refuse("compute.misrouted", f"for {message.service}, came to {self._service}"))
            elif (refused := self._refusal(received)) is not None:
                outcomes.append(refused)
            else:
                if isinstance(message, QueueBarrier):
                    barriers.append(message)
                elif isinstance(message, LookUpMachines | ListMachines):
                    queries.append((len(outcomes), message))
                else:
                    taken.append(message)
                outcomes.append(DONE)
        self._agent.handle(taken)
        await self._sync()
        for place, query in queries:
            outcomes[place] = await self._answer(query)
        for barrier in barriers:
            self._on_barrier(barrier, self._pending_destroys())
        return outcomes

    def _refusal(self, received: Received) -> Refuse | None:
        """Why a command is not carried out; None: it is. The cell's database was restored since it was decided, or a
        conductor lives on with an old copy of it.
        """
        number = received.meta.database_incarnation
        if type(received.message) not in FROM_CONDUCTORS or not self._may_predate_restore(received.meta.mark):
            return None
        return Refuse(ORDER_OUTDATED, f"by incarnation {number} of the cell's database, which has a later one")

    async def _answer(self, query: LookUpMachines | ListMachines) -> Outcome:
        try:
            if isinstance(query, ListMachines):
                return Done(await self._list_machines(query))
            return Done(await self._look_up(query))
        except DriverUnavailable as fault:  # no answer: the conductor repeats it
            return Refuse("driver.unavailable", str(fault))

    async def control(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """ReportHosts: one report answers all requests. Heartbeats show whether another process has this service's
        name.
        """
        # ServiceSuperseded, InventoryStale: the messages that the cell and placement have received under this name.
        # ReserveMachines: the quarantined machines on its hosts. RescanHosts: hosts to report by a scan that begins
        # after it.
        outcomes = [self._refusal(received) or DONE for received in batch]
        for received in (one for one, outcome in zip(batch, outcomes, strict=True) if outcome is DONE):
            message = received.message
            if isinstance(message, Heartbeat):
                self._on_heartbeat(message)
            elif isinstance(message, ServiceSuperseded) and message.service == self._service:
                self._on_superseded(epoch=message.epoch)
            elif isinstance(message, InventoryStale) and message.reporter == reporter_name(self._service):
                self._on_superseded(version=message.version)
            elif isinstance(message, ReserveMachines) and message.service == self._service:
                await self._reserve(message)
            elif isinstance(message, RescanHosts) and message.service == self._service:
                self._on_rescan(message)
            elif self._host_conflicts is not None:
                self._on_conflict(message, self._host_conflicts)
        if any(isinstance(received.message, ReportHosts) for received in batch):
            self._on_report_requested()
        await self._sync()
        return outcomes

    def _on_conflict(self, message: Message, host_conflicts: HostConflicts) -> None:
        """InventoryConflict, HostConflict, HostsReleased: hosts that another service has, too."""
        if isinstance(message, InventoryConflict) and message.reporter == reporter_name(self._service):
            host_conflicts.on_inventory_conflict(message)
        elif isinstance(message, HostConflict) and message.service == self._service:
            host_conflicts.on_host_conflict(message)
        elif isinstance(message, HostsReleased) and message.service == self._service:
            host_conflicts.on_released(message)

    async def ring_members(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """RingMembers: which services share the free nodes now."""
        outcomes = [self._refusal(received) or DONE for received in batch]
        for received, outcome in zip(batch, outcomes, strict=True):
            if isinstance(received.message, RingMembers) and self._ring is not None and outcome is DONE:
                self._ring.apply(received.message)
        return outcomes
