"""Keeps the leases of a cell's compute services: takes heartbeats, fails builds over, publishes who is down."""

# Every conductor receives every heartbeat, suspects by itself and moves builds (each under its row's lock, so twice
# does no harm). One of them, the leader (`lease.next_leader`), records the state of services, and publishes it. A
# service that an operator has stated to be gone for good is deleted: nothing waits for its answers.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import structlog
from msgspec import Struct

from bus.bus import Bus
from bus.clock import Clock, LogInterval
from bus.consuming.outcome import Done, Outcome, Received, Refuse
from bus.contracts.base import DatabaseMark
from bus.contracts.cell import (
    MAX_RING_MEMBERS,
    CellServiceDelete,
    CellServiceDeleted,
    Heartbeat,
    RingMembers,
    ServiceDown,
    ServiceRemoved,
    ServiceStates,
    ServiceSuperseded,
)
from bus.contracts.operations import HostFence
from bus.faults import Transient
from bus.transport import BusError
from cell_conductor import metrics
from cell_conductor.config import ConductorConfig
from cell_conductor.engine import Engine
from cell_conductor.hosts.lease_table import LISTEN_HEARTBEATS, MAX_SERVICES, STEP_S, LeaseTable
from cell_conductor.state.database_marks import Stated, is_behind
from cell_conductor.state.events import InstanceEvent, ServiceLost
from cell_conductor.state.lease import DEFAULT_HEARTBEAT_S, STOPPED, Lease, LeaseState
from cell_conductor.store.port import InstanceStore

log = structlog.get_logger(__name__)

TICK_S = 0.25  # between two checks of the leases; changes within it are published together
SERVICE_STATES_INTERVAL_S = (
    STEP_S / 2
)  # between two messages about service states when nothing has changed; conductors measure silence by them
LEADERSHIP_S = 5.0  # a leader that does not renew its lease is replaced after this
RENEW_LEADERSHIP_S = 2.0
FAIL_OVER_AGAIN_S = 5.0  # builds that came to a service that is down all the same are looked for this often
# For so long after the database may have lost commits: the results that they recorded come again first.
AFTER_DISCONNECT_S = 10.0
ASK_AGAIN_S = 30.0  # while no scheduler answers what they have heard of the database
FARTHEST_INCARNATION = 1000  # no database is restored more often than this between two of its copies
MAX_RECOVERIES_BY_ONE = (
    10  # recoveries that one service alone may begin while this process runs: it may be out of its mind
)
# Who states a later incarnation was commanded by it: its conductor, if it lives, is heard within this, also where
# another one takes over.
RIVAL_S = LEADERSHIP_S + 2 * RENEW_LEADERSHIP_S + SERVICE_STATES_INTERVAL_S
PER_PAGE = 1000
MAX_PAGES = 100
PURGE_BATCH = 1000
LOGGED_RINGS = 10
MAX_NAMED = 5  # instances that a refusal names
UP = "service.up"
STATE_UNKNOWN = "service.state_unknown"
HAS_INSTANCES = "service.has_instances"


class _Term(Struct):
    """This conductor is the leader."""

    term: int
    until: float  # certainly the leader until then (monotonic)
    number: int = 0  # number of the last service states that it has published
    rings: Mapping[str, tuple[str, ...]] | None = None  # rings as last published (None: not yet)
    ring_number: int = 0  # how often the rings have changed in this term
    rings_at: float = 0.0  # when the rings are published again


class _Listening(Struct):
    """What is asked and heard of one database server."""

    server: int
    since: float  # when it began to listen (monotonic)
    ask_at: float = 0.0  # when placement and the schedulers are asked
    may_act: bool = False  # whether enough was heard


class LeaseController:
    """The leases of one cell as this conductor has them."""

    def __init__(
        self,
        store: InstanceStore,
        bus: Bus,
        *,
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
        self._table = LeaseTable(config.missed_heartbeats)
        self._leading: _Term | None = None
        self._recorded: Mapping[str, Lease] = {}
        self._published: Mapping[str, Lease] | None = None
        self._renew_at = self._service_states_at = self._fail_over_at = self._purge_at = 0.0
        self._connection_losses = 0  # connections to the database that have ended by themselves
        self._results_by = 0.0  # until when results come again that the database has lost
        self._failed_over: frozenset[str] = frozenset()
        self._unbelieved = LogInterval(clock)
        # What others state of the database. By service ("": placement and the schedulers), where that is above what it
        # has; the recoveries that followed from each one's statement alone; the incarnation that conductors go by.
        self._above: dict[str, DatabaseMark] = {}
        self._recoveries_by = Counter[str]()
        self._conductor = 0
        self._listening: _Listening | None = None
        self._newer_since = math.inf  # since when a later incarnation is stated

    def down(self) -> Mapping[str, Lease]:
        """Compute services that take no builds now."""
        return self._table.down

    def alive_services(self) -> Collection[str]:
        """Compute services that are certainly up."""
        return self._table.alive_services

    def up(self) -> Collection[str] | None:
        """Compute services that are up; None: this conductor does not know yet."""
        return self._table.up

    def stated(self) -> Stated:
        """What others state of the cell's database."""
        # A conductor that has just started, or whose database is on another server than before, listens first: its disk
        # may be an old one. A cell that never had a service has commanded nothing.
        now_s, table, listening = self._clock.monotonic(), self._table, self._listening
        if listening is not None and listening.server != self._store.servers:
            listening = self._listening = _Listening(self._store.servers, now_s)
            table.hear_anew()
            self._store.read_anew()
        is_newer = self._delete_recorded(now_s)
        listened_s = -1.0 if listening is None else now_s - listening.since
        is_known = table.is_listening and listened_s >= table.heartbeats_s and not self._above
        if listening is not None and is_known and self._store.is_read:
            listening.may_act = True
        # Also of a service that is not on record.
        listens_s = max(table.listening_s, table.heartbeats_s, LISTEN_HEARTBEATS * DEFAULT_HEARTBEAT_S)
        return Stated(
            marks=tuple(self._above.values()),
            conductor=self._conductor,
            is_known=listened_s >= listens_s and (not is_newer or now_s - self._newer_since >= RIVAL_S),
            is_whole=table.is_listening and not table.unheard,
            may_act=listening is not None and listening.may_act and not is_newer,
        )

    def _delete_recorded(self, now_s: float) -> bool:
        """Drop the marks that are on record by now. Whether one of those left is of a later incarnation."""
        recorded = self._store.recorded
        self._above = {by: mark for by, mark in self._above.items() if is_behind(recorded, mark)}
        own = recorded.own.database_incarnation
        is_newer = any(one.database_incarnation > own for one in self._above.values())
        self._newer_since = min(self._newer_since, now_s) if is_newer else math.inf
        return is_newer

    def marks_wanted_by(self) -> _Listening | None:
        """For whom the schedulers and placement are to be asked now, until they answer, for each server; None: not."""
        now_s, listening = self._clock.monotonic(), self._listening
        if listening is None or now_s < listening.ask_at:
            return None
        listening.ask_at = now_s + ASK_AGAIN_S
        return listening

    def hear_all(self, marks: Collection[DatabaseMark], listening: _Listening) -> None:
        """What the schedulers and placement have heard, asked for this one; none: they have not answered."""
        if marks:
            listening.ask_at = math.inf
        for mark in marks:
            self.hear(mark)

    def hear(self, mark: DatabaseMark, *, by: str = "") -> None:
        """A service states this of the cell's database; "": placement, or a scheduler. One that no database could have
        had, and one of a service on whose statement alone the cell has recovered again and again, counts for nothing.
        """
        recorded = self._store.recorded
        if not is_behind(recorded, mark) or len(self._above) >= MAX_SERVICES:
            return
        own, incarnation = recorded.own.database_incarnation, mark.database_incarnation
        is_believed = incarnation <= own + FARTHEST_INCARNATION and self._recoveries_by[by] < MAX_RECOVERIES_BY_ONE
        if incarnation > own and (is_believed or self._unbelieved.count()):
            log.warning("service.incarnation", by=by, incarnation=incarnation, own=own, believed=is_believed)
        if is_believed:
            self._above[by] = self._above.get(by, mark).joined(mark)

    def record_recovery(self) -> None:
        """The cell recovers by what is stated now."""
        if len(self._above) == 1:
            self._recoveries_by.update(self._above.keys() - {""})

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
                self.hear(DatabaseMark(message.database_incarnation, message.sent_sequences), by=message.service)
            else:
                self._conductor = max(self._conductor, received.meta.database_incarnation)
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
        self._listening = _Listening(self._store.servers, self._clock.monotonic())
        while True:
            await self._clock.sleep(TICK_S)
            self._assess()
            try:
                await self._fail_over(engine)
                await self._renew_leadership()
                await self._publish_service_states()
                await self._publish_rings()
                await self._publish_superseded()
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
                self._published = None
                if is_new:
                    log.info("leases.leader", term=term, services=len(recorded))
            if term is None:
                self._leading = None
            elif self._leading is None or term != own_term:
                self._leading = _Term(term, now_s + LEADERSHIP_S)
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

    async def _publish_service_states(self) -> None:
        """The service states, when they have changed, and periodically."""
        keeping, now_s = self._leading, self._clock.monotonic()
        if keeping is None or now_s >= keeping.until:
            return
        down = self._table.down
        if down == self._published and now_s < self._service_states_at:
            return
        keeping.number += 1
        pages = pages_of(down)
        for number, page in enumerate(pages, 1):
            await self._bus.publish(
                ServiceStates(
                    cell=self._cell,
                    term=keeping.term,
                    number=keeping.number,
                    page=number,
                    pages=len(pages),
                    down=page,
                    up=len(self._table) - len(down),
                )
            )
        self._published, self._service_states_at = down, now_s + SERVICE_STATES_INTERVAL_S * len(pages)

    async def _publish_rings(self) -> None:
        """The members of each ring, when they have changed, and periodically."""
        keeping, now_s = self._leading, self._clock.monotonic()
        if keeping is None or now_s >= keeping.until:
            return
        rings = self._table.rings()
        if rings is None or (rings == keeping.rings and now_s < keeping.rings_at):
            return
        if rings != keeping.rings:
            keeping.ring_number += 1
            keeping.rings = rings
            log.info("rings.changed", rings=dict(list(rings.items())[:LOGGED_RINGS]), of=len(rings))
        for ring, members in rings.items():
            await self._bus.publish(
                RingMembers(
                    ring=ring,
                    term=keeping.term,
                    number=keeping.ring_number,
                    members=members[:MAX_RING_MEMBERS],
                )
            )
        keeping.rings_at = now_s + SERVICE_STATES_INTERVAL_S

    async def _publish_superseded(self) -> None:
        """A service that runs under an epoch which the cell counts as over receives the epoch that it has to exceed."""
        superseded = self._table.superseded()
        if self._leading is not None:
            for service, epoch in superseded.items():
                await self._bus.publish(ServiceSuperseded(service=service, epoch=epoch))


def _lease_of(down: ServiceDown) -> Lease:
    state = LeaseState.STOPPED if down.code == STOPPED else LeaseState.SILENT
    return Lease(service=down.service, epoch=down.epoch, state=state, since=down.since, reason=down.reason)


def pages_of(down: Mapping[str, Lease]) -> list[tuple[ServiceDown, ...]]:
    """The services that are down, as pages; one page at least. Services beyond the last page are left out."""
    entries = [
        ServiceDown(service=service, epoch=lease.epoch, code=lease.code, reason=lease.reason, since=lease.since)
        for service, lease in sorted(down.items())
    ][: PER_PAGE * MAX_PAGES]
    return [tuple(entries[start : start + PER_PAGE]) for start in range(0, max(len(entries), 1), PER_PAGE)]
