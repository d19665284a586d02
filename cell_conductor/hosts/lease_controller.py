"""Keeps the leases of a cell's compute services: takes heartbeats, fails builds over, records who is down."""

# Every conductor receives every heartbeat, suspects by itself and moves builds (each under its row's lock, so twice
# does no harm). One of them, the leader (`lease.next_leader`), records the state of services, and publishes it. A
# service that an operator has stated to be gone for good is deleted: nothing waits for its answers.

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import structlog

from bus.bus import Bus
from bus.clock import Clock
from bus.consuming.outcome import Done, Outcome, Received, Refuse
from bus.contracts.cell import (
    CellServiceDelete,
    CellServiceDeleted,
    Heartbeat,
    ServiceDown,
    ServiceRemoved,
    ServiceStates,
)
from bus.contracts.operations import HostFence
from bus.faults import Transient
from bus.transport import BusError
from cell_conductor import metrics
from cell_conductor.config import ConductorConfig
from cell_conductor.engine import Engine
from cell_conductor.hosts.lease_table import LeaseTable
from cell_conductor.hosts.service_state_publisher import LeaderTerm, ServiceStatePublisher
from cell_conductor.hosts.stated_marks import StatedMarks
from cell_conductor.state.events import InstanceEvent, ServiceLost
from cell_conductor.state.lease import LEADERSHIP_S, RENEW_LEADERSHIP_S, STOPPED, Lease, LeaseState
from cell_conductor.store.port import InstanceStore

log = structlog.get_logger(__name__)

TICK_S = 0.25  # between two checks of the leases; changes within it are published together
FAIL_OVER_AGAIN_S = 5.0  # builds that came to a service that is down all the same are looked for this often
# For so long after the database may have lost commits: the results that they recorded come again first.
AFTER_DISCONNECT_S = 10.0
PURGE_BATCH = 1000
MAX_NAMED = 5  # instances that a refusal names
UP = "service.up"
STATE_UNKNOWN = "service.state_unknown"
HAS_INSTANCES = "service.has_instances"


class LeaseController:
    """The leases of one cell as this conductor has them."""

    def __init__(
        self,
        store: InstanceStore,
        bus: Bus,
        table: LeaseTable,
        *,
        marks: StatedMarks,
        publisher: ServiceStatePublisher,
        clock: Clock,
        config: ConductorConfig,
        cell: str,
        process: str,
        on_fence: Callable[[HostFence], None] = lambda _fence: None,
    ) -> None:
        """`on_fence(report)`: a conductor of the cell has recorded a change of a fence."""
        self._store = store
        self._bus = bus
        self._clock = clock
        self._config = config
        self._cell = cell
        self._process = process
        self._on_fence = on_fence
        self._table = table
        self._marks = marks
        self._publisher = publisher
        self._leading: LeaderTerm | None = None
        self._recorded: Mapping[str, Lease] = {}
        self._renew_at = self._fail_over_at = self._purge_at = 0.0
        self._connection_losses = 0  # connections to the database that have ended by themselves
        self._results_by = 0.0  # until when results come again that the database has lost
        self._failed_over: frozenset[str] = frozenset()

    def down(self) -> Mapping[str, Lease]:
        """Compute services that take no builds now."""
        return self._table.down

    def alive_services(self) -> Collection[str]:
        """Compute services that are certainly up."""
        return self._table.alive_services

    def up(self) -> Collection[str] | None:
        """Compute services that are up; None: this conductor does not know yet."""
        return self._table.up

    def deleted(self) -> Collection[str]:
        """Compute services that are gone for good, as an operator has stated since this conductor started."""
        return self._table.deleted

    @property
    def is_leader(self) -> bool:
        """Whether this conductor is the one that records which services are up, and so has the whole record."""
        return self._leading is not None and self._clock.monotonic() < self._leading.until

    def is_removed(self, service: str) -> bool:
        """Whether this compute service is gone for good; meaningful at the leader."""
        return self._table.is_removed(service, self._clock.time(), self._config.takeover_s)

    def record_superseded(self, service: str, epoch: int) -> None:
        """A report came whose epoch is below this one of the same service."""
        self._table.record_superseded(service, epoch)

    async def handle(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """Queue conductor.leases.{process}: heartbeats, and the leader's service states, which prove that the bus
        delivers.
        """
        now_s, at = self._clock.monotonic(), self._clock.time()
        for received in batch:
            self._table.advance_clock(now_s)
            message = received.message
            if getattr(message, "cell", "") != self._cell:
                continue
            if isinstance(message, Heartbeat):
                self._marks.hear(message.mark, by=message.service)
            else:
                self._marks.hear_conductor(received.meta.mark)
            if isinstance(message, ServiceStates):
                self._table.apply_service_states(
                    (message.term, message.number), [_lease_of(one) for one in message.down]
                )
            elif isinstance(message, ServiceRemoved):
                self._delete(message)
            elif isinstance(message, HostFence):
                self._on_fence(message)
            elif isinstance(message, Heartbeat) and self._table.renew(message, at):
                lease = self._table.leases[message.service]
                log.info("service.state", service=message.service, state=lease.state, reason=lease.reason)
        return [Done()] * len(batch)

    def _delete(self, removed: ServiceRemoved) -> None:
        self._table.delete(removed.service)
        if self._leading is not None:
            # It may have been recorded since it was deleted, or be up after all: it is deleted or written again.
            self._recorded = {**self._recorded, removed.service: Lease(service=removed.service, epoch=0)}

    async def delete(self, command: CellServiceDelete) -> Outcome:
        """Drop the lease of a service that is gone for good, and notify the cell's conductors and the schedulers.
        Raises Transient.
        """
        # A conductor that ends between the two leaves the others with the service as down: the command is repeated.
        up = self.up()
        if up is None:
            return Refuse(
                STATE_UNKNOWN, "this conductor has not listened for long enough to know which services are up"
            )
        if command.service in up:
            return Refuse(UP, f"the compute service {command.service} is up")
        found = await self._store.at_service(command.service, MAX_NAMED + 1)
        if found:
            more = " and more" if len(found) > MAX_NAMED else ""
            reason = (
                f"instances are on record there, on hosts that are not fenced: {', '.join(found[:MAX_NAMED])}{more}"
            )
            return Refuse(HAS_INSTANCES, reason)
        removed = await self._store.leases.delete(command.service)
        at = self._clock.time()
        await self._bus.publish(ServiceRemoved(cell=self._cell, service=command.service, at=at), cause=command.service)
        log.warning(
            "service.deleted",
            service=command.service,
            by=command.by,
            reason=command.reason,
            removed=removed,
            cause=command.service,
        )
        return Done(reply=CellServiceDeleted(removed=removed, at=at))

    async def run(self, engine: Engine) -> None:
        """Until cancelled."""
        self._marks.listen()
        while True:
            await self._clock.sleep(TICK_S)
            self._assess()
            try:
                await self._fail_over(engine)
                await self._renew_leadership()
                await self._publisher.publish(self._leading)
            except (Transient, BusError) as fault:
                log.warning("leases.waiting", code=fault.code, reason=str(fault))

    def _assess(self) -> None:
        for lease in self._table.assess(self._clock.time()):
            metrics.SILENT.labels(lease.service).inc()
            log.warning("service.state", service=lease.service, state=lease.state, reason=lease.reason)
        metrics.DOWN.set(len(self._table.down))

    async def _fail_over(self, engine: Engine) -> None:
        """Builds under way at services that are not awaited go elsewhere, if they can. One whose result was published
        by a commit that a crash of the database took back does not: that result comes again first.
        """
        lost, now_s = self._table.abandoned, self._clock.monotonic()
        if self._store.is_recovering:
            return
        if self._store.connection_losses != self._connection_losses:
            self._connection_losses, self._results_by = self._store.connection_losses, now_s + AFTER_DISCONNECT_S
        if now_s < self._results_by:
            return
        if lost and (now_s >= self._fail_over_at or not self._failed_over.issuperset(lost)):
            found = await self._store.building_at(sorted(lost))
            at = self._clock.time()
            incoming = [
                InstanceEvent(
                    uuid, ServiceLost(at=at, service=service, code=lost[service].code, reason=lost[service].reason)
                )
                for uuid, service in found
            ]
            for start in range(0, len(incoming), self._config.max_batch):
                await engine.take(incoming[start : start + self._config.max_batch], source="leases")
            self._fail_over_at = now_s + FAIL_OVER_AGAIN_S
        self._failed_over = frozenset(lost)

    async def _renew_leadership(self) -> None:
        """Become the leader if no other conductor is, and record the changes. Each new leader reads the record, and so
        does each conductor that starts: a service that is down sends it nothing.
        """
        now_s = self._clock.monotonic()
        if now_s >= self._renew_at:
            self._renew_at = now_s + RENEW_LEADERSHIP_S
            own_term = None if self._leading is None else self._leading.term
            term = await self._store.leases.hold_leadership(self._process, LEADERSHIP_S, own_term)
            is_new = term is not None and term != own_term
            if is_new or not self._table.is_listening:
                recorded = {lease.service: lease for lease in await self._store.leases.leases()}
                self._table.load_record(recorded.values())
                known = self._table.leases.keys() | self._table.deleted
                self._recorded = {service: lease for service, lease in recorded.items() if service in known}
                self._publisher.publish_anew()
                if is_new:
                    log.info("leases.leader", term=term, services=len(recorded))
            if term is None:
                self._leading = None
            elif self._leading is None or term != own_term:
                self._leading = LeaderTerm(term, now_s + LEADERSHIP_S)
            else:
                self._leading.until = now_s + LEADERSHIP_S
        keeping = self._leading
        if keeping is None:
            return
        old = frozenset(self._old(now_s))
        leases = {name: one for name, one in self._table.leases.items() if name not in old}
        changed = [lease for service, lease in leases.items() if self._recorded.get(service) != lease]
        removed = self._recorded.keys() - leases.keys()
        if (changed or removed) and not await self._store.leases.record(keeping.term, changed, removed):
            self._leading = None
            return
        self._table.remove(old)
        self._recorded = leases

    def _old(self, now_s: float) -> Sequence[str]:
        """Services that are dropped, as they are down for long."""
        if now_s < self._purge_at:
            return ()
        self._purge_at = now_s + self._config.purge_interval_s
        return self._table.down_before(self._clock.time() - self._config.services_retention_s, PURGE_BATCH)


def _lease_of(down: ServiceDown) -> Lease:
    state = LeaseState.STOPPED if down.code == STOPPED else LeaseState.SILENT
    return Lease(service=down.service, epoch=down.epoch, state=state, since=down.since, reason=down.reason)
