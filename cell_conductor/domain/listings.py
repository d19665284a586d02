"""Which compute service lists which host, to detect two services that report the same host.

A host may pass from one service of its cell to another: the first then leaves it out. While a service that is up goes
on listing it, the report of another one proves nothing about the machines that the first one has there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct

from bus.contracts.cell import ComputeHosts

# At most this many hosts of all services are remembered; reports of hosts beyond them are never doubted.
MAX_HOSTS = 1_000_000
NO_RING = (0, 0)


class _Listed(Struct):
    """The listing of one service. hosts: by uuid, the first sequence of the last report that had it.

    first, pages: of the report of all its hosts that is being received, and the sequences of its pages that came.
    whole: one has come completely. ring: by which it shares its free hosts with others.
    """

    epoch: int
    hosts: dict[str, int]
    first: int = 0
    pages: set[int] = set()
    whole: bool = False
    ring: tuple[int, int] = NO_RING


class Listings:
    """The listings of one cell, as one conductor has received them."""

    def __init__(self) -> None:
        self._services: dict[str, _Listed] = {}
        self._listers: dict[str, dict[str, None]] = {}  # by host

    def note(self, report: ComputeHosts) -> None:
        """Apply one page of a report, newer than all earlier ones of its service."""
        listed = self._services.get(report.service)
        if listed is None or listed.epoch != report.epoch:
            if listed is not None:
                self._drop(report.service, listed, list(listed.hosts))
            listed = self._services[report.service] = _Listed(report.epoch, {})
        listed.ring = (report.ring_term, report.ring_number)
        first = report.first_sequence or (report.sequence if report.complete else 0)
        if first and first != listed.first:
            listed.first, listed.pages = first, set()
        for host in report.hosts:
            if host.uuid in self._listers or len(self._listers) < MAX_HOSTS:
                listed.hosts[host.uuid] = first or listed.first
                self._listers.setdefault(host.uuid, {})[report.service] = None
        if not first:
            return
        listed.pages.add(report.sequence)
        if report.complete and len(listed.pages) == report.pages:
            listed.whole = True
            self._drop(report.service, listed, [uuid for uuid, at in listed.hosts.items() if at != first])

    def may_have(self, service: str, host: str) -> bool:
        """Whether the service lists the host, or has not listed all its hosts yet."""
        listed = self._services.get(service)
        return listed is None or not listed.whole or host in listed.hosts

    def hosts_of(self, services: Collection[str]) -> set[str]:
        """The hosts that these services list."""
        return {host for service in services if service in self._services for host in self._services[service].hosts}

    def listers(self, host: str) -> tuple[str, ...]:
        """The services that list this host."""
        return tuple(self._listers.get(host, ()))

    def contested(self, report: ComputeHosts, up: Collection[str]) -> dict[str, str]:
        """{host of this report: another service that is up and lists it}, unless both are in a ring."""
        found: dict[str, str] = {}
        shares = (report.ring_term, report.ring_number) != NO_RING
        for host in report.hosts:
            listers: Mapping[str, None] = self._listers.get(host.uuid, {})
            if len(listers) < 2:
                continue
            for other in listers:
                in_a_ring = shares and self._services[other].ring != NO_RING
                if other != report.service and other in up and not in_a_ring:
                    found[host.uuid] = other
        return found

    def _drop(self, service: str, listed: _Listed, hosts: list[str]) -> None:
        for uuid in hosts:
            del listed.hosts[uuid]
            listers = self._listers[uuid]
            listers.pop(service, None)
            if not listers:
                del self._listers[uuid]
