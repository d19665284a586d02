"""Publishes what the leader of the leases knows of the compute services: who is down, and the members of the rings."""

from __future__ import annotations

from collections.abc import Mapping

import structlog
from msgspec import Struct

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.cell import MAX_RING_MEMBERS, RingMembers, ServiceDown, ServiceStates, ServiceSuperseded
from cell_conductor.hosts.lease_table import STEP_S, LeaseTable
from cell_conductor.state.lease import Lease

log = structlog.get_logger(__name__)

# Between two messages about service states when nothing has changed; conductors measure silence by them.
SERVICE_STATES_INTERVAL_S = STEP_S / 2
PER_PAGE = 1000
MAX_PAGES = 100
LOGGED_RINGS = 10


class LeaderTerm(Struct):
    """This conductor is the leader."""

    term: int
    until: float  # certainly the leader until then (monotonic)
    number: int = 0  # number of the last service states that it has published
    rings: Mapping[str, tuple[str, ...]] | None = None  # rings as last published (None: not yet)
    ring_number: int = 0  # how often the rings have changed in this term
    rings_at: float = 0.0  # when the rings are published again


class ServiceStatePublisher:
    """One conductor's, while it is the leader."""

    def __init__(self, table: LeaseTable, bus: Bus, *, clock: Clock, cell: str) -> None:
        self._table = table
        self._bus = bus
        self._clock = clock
        self._cell = cell
        self._published: Mapping[str, Lease] | None = None
        self._service_states_at = 0.0

    def publish_anew(self) -> None:
        """The service states are due, whatever was published."""
        self._published = None

    async def publish(self, term: LeaderTerm | None) -> None:
        """What is due; None: this conductor is not the leader. Raises BusError."""
        await self._publish_service_states(term)
        await self._publish_rings(term)
        await self._publish_superseded(term)

    async def _publish_service_states(self, term: LeaderTerm | None) -> None:
        """The service states, when they have changed, and periodically."""
        now_s = self._clock.monotonic()
        if term is None or now_s >= term.until:
            return
        down = self._table.down
        if down == self._published and now_s < self._service_states_at:
            return
        term.number += 1
        pages = pages_of(down)
        for number, page in enumerate(pages, 1):
            await self._bus.publish(
                ServiceStates(
                    cell=self._cell,
                    term=term.term,
                    number=term.number,
                    page=number,
                    pages=len(pages),
                    down=page,
                    up=len(self._table) - len(down),
                )
            )
        self._published, self._service_states_at = down, now_s + SERVICE_STATES_INTERVAL_S * len(pages)

    async def _publish_rings(self, term: LeaderTerm | None) -> None:
        """The members of each ring, when they have changed, and periodically."""
        now_s = self._clock.monotonic()
        if term is None or now_s >= term.until:
            return
        rings = self._table.rings()
        if rings is None or (rings == term.rings and now_s < term.rings_at):
            return
        if rings != term.rings:
            term.ring_number += 1
            term.rings = rings
            log.info("rings.changed", rings=dict(list(rings.items())[:LOGGED_RINGS]), of=len(rings))
        for ring, members in rings.items():
            await self._bus.publish(
                RingMembers(
                    ring=ring,
                    term=term.term,
                    number=term.ring_number,
                    members=members[:MAX_RING_MEMBERS],
                )
            )
        term.rings_at = now_s + SERVICE_STATES_INTERVAL_S

    async def _publish_superseded(self, term: LeaderTerm | None) -> None:
        """A service that runs under an epoch which the cell counts as over receives the epoch that it has to exceed."""
        superseded = self._table.superseded()
        if term is not None:
            for service, epoch in superseded.items():
                await self._bus.publish(ServiceSuperseded(service=service, epoch=epoch))


def pages_of(down: Mapping[str, Lease]) -> list[tuple[ServiceDown, ...]]:
    """The services that are down, as pages; one page at least. Services beyond the last page are left out."""
    entries = [
        ServiceDown(service=service, epoch=lease.epoch, code=lease.code, reason=lease.reason, since=lease.since)
        for service, lease in sorted(down.items())
    ][: PER_PAGE * MAX_PAGES]
    return [tuple(entries[start : start + PER_PAGE]) for start in range(0, max(len(entries), 1), PER_PAGE)]
