"""Answers reports of hosts that the book has as another compute service's: notifies the owner, or releases the hosts.

The book keeps which service has a host and refuses the inventory of a second one; the conductor has the states and
listings of the services. One conductor of the cell answers, the keeper of its leases.
"""

from __future__ import annotations

from typing import Protocol

import structlog
from msgspec.structs import replace

from bus.bus import Bus
from bus.contracts.cell import ComputeHosts, HostsContested, HostsReleased
from bus.contracts.placement import COMPUTE_SOURCE, InventoryReleased

from .domain.listings import Listings

log = structlog.get_logger(__name__)


class Leases(Protocol):
    """The queries to the keeper of the leases."""

    @property
    def is_keeper(self) -> bool:
        """Whether this conductor is the keeper."""

    def is_gone(self, service: str) -> bool:
        """Whether a service is gone for good."""


class HostOwners:
    """One conductor's answers to services that were refused hosts."""

    def __init__(self, bus: Bus, listings: Listings, leases: Leases | None) -> None:
        self._bus = bus
        self._listings = listings
        self._leases = leases

    async def answer(self, report: ComputeHosts) -> ComputeHosts:
        """Answer a report's statements about other services' hosts; returns the report without them."""
        contested: dict[str, list[str]] = {}
        for host in report.hosts:
            if host.owner is not None and host.owner != report.service:
                contested.setdefault(host.owner, []).append(host.uuid)
        if not contested:
            return report
        if self._leases is not None and self._leases.is_keeper:
            for owner, hosts in contested.items():
                await self._answer(report, owner, hosts)
        own = tuple(replace(host, running=None) if host.owner is not None else host for host in report.hosts)
        return replace(report, hosts=own)

    def has_passed(self, host: str, owner: str) -> bool:
        """Whether its owner has given this host up, or is gone for good as the keeper of the leases knows."""
        leases = self._leases
        is_gone = leases is not None and leases.is_keeper and leases.is_gone(owner)
        return is_gone or not self._listings.may_have(owner, host)

    async def _answer(self, report: ComputeHosts, owner: str, hosts: list[str]) -> None:
        released = [host for host in hosts if self.has_passed(host, owner)]
        kept = [host for host in hosts if host not in set(released)]
        if released:
            # Placement first: the service's next report may follow at once, and is refused before this.
            proof = InventoryReleased(source=f"{COMPUTE_SOURCE}{owner}", roots=tuple(released))
            await self._bus.publish(proof, cause=report.service)
            log.warning("hosts.released", owner=owner, service=report.service, hosts=len(released), first=released[0])
            given = HostsReleased(service=report.service, cell=report.cell, owner=owner, hosts=tuple(released))
            await self._bus.publish(given, cause=report.service)
        if kept:
            contest = HostsContested(service=owner, cell=report.cell, other=report.service, hosts=tuple(kept))
            await self._bus.publish(contest, cause=report.service)
