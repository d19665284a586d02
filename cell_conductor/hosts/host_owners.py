"""Hosts that two compute services list: which of the two has them."""

# Placement keeps which service has a host and refuses the inventory of a second one; the conductor has the states and
# listings of the services. One conductor of the cell, the leader of its leases, notifies the owner of such a host, or
# releases the hosts.

from __future__ import annotations

import structlog
from msgspec.structs import replace

from bus.bus import Bus
from bus.contracts.cell import HostConflict, HostsReleased, HostStates
from bus.contracts.placement import COMPUTE_REPORTER, InventoryReleased
from cell_conductor.hosts.lease_controller import LeaseController
from cell_conductor.reports.listings import HostListings

log = structlog.get_logger(__name__)


class HostOwners:
    """One conductor's answers to services that were refused hosts."""

    def __init__(self, bus: Bus, listings: HostListings, leases: LeaseController) -> None:
        self._bus = bus
        self._listings = listings
        self._leases = leases

    async def answer(self, report: HostStates) -> HostStates:
        """Answer a report's statements about other services' hosts; returns the report without them."""
        conflicts: dict[str, list[str]] = {}
        for host in report.hosts:
            if host.owner is not None and host.owner != report.service:
                conflicts.setdefault(host.owner, []).append(host.uuid)
        if not conflicts:
            return report
        if self._leases.is_leader:
            for owner, hosts in conflicts.items():
                await self._answer(report, owner, hosts)
        own = tuple(replace(host, running=None) if host.owner is not None else host for host in report.hosts)
        return replace(report, hosts=own)

    def has_changed_owner(self, host: str, owner: str) -> bool:
        """Whether its owner has given this host up, or is gone for good. That knows the leader of the leases, and each
        conductor that the owner has listed hosts to.
        """
        knows = self._leases.is_leader or self._listings.has_report(owner)
        is_removed = knows and self._leases.is_removed(owner)
        return is_removed or not self._listings.may_have(owner, host)

    async def _answer(self, report: HostStates, owner: str, hosts: list[str]) -> None:
        released = [host for host in hosts if self.has_changed_owner(host, owner)]
        kept = [host for host in hosts if host not in set(released)]
        if released:
            # Placement first: the service's next report may follow at once, and is refused before this.
            proof = InventoryReleased(reporter=f"{COMPUTE_REPORTER}{owner}", roots=tuple(released))
            await self._bus.publish(proof, cause=report.service)
            log.warning("hosts.released", owner=owner, service=report.service, hosts=len(released), first=released[0])
            given = HostsReleased(service=report.service, owner=owner, hosts=tuple(released))
            await self._bus.publish(given, cause=report.service)
        if kept:
            contest = HostConflict(service=owner, other=report.service, hosts=tuple(kept))
            await self._bus.publish(contest, cause=report.service)
