"""What the reports of one compute service may destroy at once: its breaker, the hosts that it lists, and the machines
that it reserves. Pure.
"""

# A host may pass from one service of its cell to another: the first then leaves it out. While a service that is up goes
# on listing it, the report of another one proves nothing about the machines that the first one has there.

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import islice
from types import MappingProxyType

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.base import Allocations
from bus.contracts.cell import (
    MAX_RESERVED_AT_ONCE,
    MAX_RESERVED_MACHINES,
    ComputeHosts,
    ReservedMachine,
    ReservedOnHost,
    Running,
)

from .events import Event, MachineMissing
from .instance import Instance
from .report import UnknownMachine, UnknownMachineKind

# Machines named in the record of a breaker; the others are counted.
MAX_NAMED = 10_000


def key_of(uuid: str, host_uuid: str) -> str:
    """Names a machine in the record of a breaker."""
    return f"{uuid}@{host_uuid}"


class DestructiveDifference(Struct, frozen=True):
    """One event that ends or destroys a machine because of a report and not of a client's request."""

    uuid: str
    event: Event
    # The record has commanded this itself (`report.is_commanded`): the report only repeats it, and is not counted.
    commanded: bool = False

    @property
    def key(self) -> str:
        """Names the machine: its instance, on this host."""
        return key_of(self.uuid, getattr(self.event, "host_uuid", ""))


class CountedAs(StrEnum):
    """Why a machine counts for the breaker."""

    LOST = "lost"
    QUARANTINED = "quarantined"
    OVER = "over"


NONE_COUNTED: Mapping[str, CountedAs] = MappingProxyType({})


class Breaker(Struct, frozen=True, kw_only=True):
    """The record of one service's breaker: too many of its machines were lost, unknown or over within a short time."""

    service: str
    tripped_at: float  # when a report last named more machines than allowed
    lost: int = 0  # machines lost in the reports of the window that opened it and in those since
    quarantined: int = 0  # machines quarantined in those reports
    over: int = 0  # machines that a record proves over, in those reports
    # Keys of those that the newest reports have, without those of the window; after a reset, of those that it still
    # allows.
    machines: tuple[str, ...] = ()
    reset_at: float = 0.0  # when an operator reset it, for these machines and no others (0: not yet)
    reset_by: str = ""  # who reset it ("": it is not reset)

    @property
    def is_open(self) -> bool:
        """Whether it stops destruction."""
        return not self.reset_at

    def after_scan(self, hosts: Collection[str], found: Collection[str]) -> Breaker:
        """As it is after a scan of these hosts. found: the keys of the machines that it found to be lost, over or
        unknown, or that are scanned again. No reset allows the others: one that is found later is counted.
        """
        machines = (key for key in self.machines if key in found or key.rpartition("@")[2] not in hosts)
        return replace(self, machines=tuple(machines))


class BreakerAssessment(Struct, frozen=True):
    """The differences of one report that take effect."""

    effective: tuple[DestructiveDifference, ...] = ()
    blocked: int = 0
    tripped: Breaker | None = None  # the breaker to record, as it opens now, or is open and names too few
    counted: Mapping[str, CountedAs] = {}  # the machines that take effect and count for later reports of the window


def assess(
    service: str,
    differences: Sequence[DestructiveDifference],
    quarantined: Sequence[UnknownMachine],
    breaker: Breaker | None,
    *,
    limit: int,
    now: float,
    recent: Mapping[str, CountedAs] = NONE_COUNTED,
) -> BreakerAssessment:
    """Which differences of one report take effect: all, or none above the limit, as that suggests a wrong database.
    quarantined: machines that were put on record with this report. recent: what earlier reports of the window counted.
    """
    passed: Collection[str] = frozenset(breaker.machines) if breaker is not None else ()
    new = dict(_counted(differences, quarantined, passed))
    if breaker is not None and breaker.is_open:
        before, earlier = breaker, {}
    else:
        before = Breaker(service=service, tripped_at=now)
        earlier = {key: kind for key, kind in recent.items() if key not in new and key not in passed}
    if before is not breaker and (not new or len(new) + len(earlier) <= limit):
        return BreakerAssessment(effective=tuple(differences), counted=new)
    # Findings that were passed before count, too: one reset is for all that is lost, or the next report would need
    # another.
    named = {*before.machines, *(difference.key for difference in differences if not difference.commanded), *new}
    machines = tuple(sorted(named)[:MAX_NAMED])
    if machines == before.machines:
        return BreakerAssessment(blocked=len(differences))
    kinds = Counter([*new.values(), *earlier.values()])
    tripped = replace(
        before,
        tripped_at=now,
        lost=before.lost + kinds[CountedAs.LOST],
        quarantined=before.quarantined + kinds[CountedAs.QUARANTINED],
        over=before.over + kinds[CountedAs.OVER],
        machines=machines,
    )
    return BreakerAssessment(blocked=len(differences), tripped=tripped)


def _counted(
    differences: Sequence[DestructiveDifference], quarantined: Sequence[UnknownMachine], passed: Collection[str]
) -> Iterator[tuple[str, CountedAs]]:
    for difference in differences:
        if not difference.commanded and difference.key not in passed:
            yield difference.key, CountedAs.LOST if isinstance(difference.event, MachineMissing) else CountedAs.OVER
    for one in quarantined:
        yield key_of(one.uuid, one.host_uuid), CountedAs.QUARANTINED


class RecentDifferences:
    """The machines that the reports of each service have counted within the window, in one conductor's memory."""

    # A service reports a host as soon as it changes: machines that vanish within a minute come in many reports.

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._of: dict[str, dict[str, tuple[CountedAs, float]]] = {}  # {service: {machine: (why, when)}}

    def of(self, service: str, now_s: float) -> dict[str, CountedAs]:
        """The machines that count, by their keys. now_s: monotonic seconds."""
        since_s = now_s - self._window_s
        self._of = {
            name: kept
            for name, found in self._of.items()
            if (kept := {key: one for key, one in found.items() if one[1] > since_s})
        }
        return {key: kind for key, (kind, _) in self._of.get(service, {}).items()}

    def add(self, service: str, counted: Mapping[str, CountedAs], now_s: float) -> None:
        """Record what a report has counted."""
        self._of.setdefault(service, {}).update({key: (kind, now_s) for key, kind in counted.items()})

    def clear(self, service: str) -> None:
        """Its breaker has opened: an operator looks at the service, and counting begins anew."""
        self._of.pop(service, None)


class PageDifferences(Struct):
    """The differences of one page of a scan, and the machines that it has newly put in quarantine."""

    differences: Sequence[DestructiveDifference] = ()
    quarantined: tuple[UnknownMachine, ...] = ()


class ScanDifferences(Struct):
    """The differences of the pages of one scan of a service's hosts, by their sequences. It is assessed as a whole."""

    key: tuple[int, int]  # the epoch, and the sequence of the first page
    pages: dict[int, PageDifferences] = {}


def first_page_of(report: ComputeHosts) -> int:
    """The sequence of the first page of the report of all hosts that this page is of; 0: it is of none."""
    return report.first_sequence or (report.sequence if report.complete else 0)


def is_complete(report: ComputeHosts, pages: Collection[int]) -> bool:
    """Whether a report has come as a whole with this page. pages: the sequences of those that have come: one that comes
    again is no other page. One that is not of all hosts is whole by itself.
    """
    return not first_page_of(report) or (report.complete and len(pages) == report.pages)


# At most this many hosts of all services are remembered; one that lists more counts as not having listed all.
MAX_HOSTS = 1_000_000
NO_RING = (0, 0)


class _Listed(Struct):
    """The listing of one service."""

    epoch: int
    hosts: dict[str, int]  # by uuid, the first sequence of the last report that had it
    first: int = 0  # sequence of the first page of the report of all hosts that is being received
    pages: set[int] = set()  # sequences of the pages of that report that came
    complete: bool = False  # whether one report of all hosts has come completely
    ring: tuple[int, int] = NO_RING  # term and number of the ring members by which it shares its free hosts


class Listings:
    """The listings of one cell, as one conductor has received them."""

    def __init__(self) -> None:
        self._services: dict[str, _Listed] = {}
        self._listers: dict[str, dict[str, None]] = {}  # by host

    def record(self, report: ComputeHosts) -> None:
        """Apply one page of a report, newer than all earlier ones of its service."""
        listed = self._services.get(report.service)
        if listed is None or listed.epoch != report.epoch:
            if listed is not None:
                self._drop(report.service, listed, list(listed.hosts))
            listed = self._services[report.service] = _Listed(report.epoch, {})
        listed.ring = (report.ring_term, report.ring_number)
        first = first_page_of(report)
        if first and first != listed.first:
            listed.first, listed.pages = first, set()
        for host in report.hosts:
            if host.uuid not in self._listers and len(self._listers) >= MAX_HOSTS:
                return  # the page does not count as received: its service may have what is not remembered
            listed.hosts[host.uuid] = listed.first
            self._listers.setdefault(host.uuid, {})[report.service] = None
        if not first:
            return
        listed.pages.add(report.sequence)
        if is_complete(report, listed.pages):
            listed.complete = True
            self._drop(report.service, listed, [uuid for uuid, at in listed.hosts.items() if at != first])

    def may_have(self, service: str, host: str) -> bool:
        """Whether the service lists the host, or has not listed all its hosts yet."""
        listed = self._services.get(service)
        return listed is None or not listed.complete or host in listed.hosts

    def has_report(self, service: str) -> bool:
        """Whether the service has listed any hosts to this conductor."""
        return service in self._services

    def listers(self, host: str) -> tuple[str, ...]:
        """The services that list this host."""
        return tuple(self._listers.get(host, ()))

    def conflicts(self, report: ComputeHosts, up: Collection[str]) -> dict[str, str]:
        """{host of this report: another service that is up and lists it}, unless both are in a ring."""
        found: dict[str, str] = {}
        shares = (report.ring_term, report.ring_number) != NO_RING
        for host in report.hosts:
            for other in self.listers(host.uuid):
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


Reserved = Mapping[str, Sequence[Running]]  # by host


def wrong_reservations(report: ComputeHosts, unknown: Sequence[UnknownMachine]) -> Reserved:
    """For each host where the report disagrees, all machines that are to be reserved; most reports agree."""
    # Machines in quarantine are reserved: none of their claims is proved, and they stay. A reserved machine stays
    # reserved while it is being destroyed, and when its tag is removed: it is still there. A machine that a record
    # explains has its claim.
    kind_of = {(one.host_uuid, one.uuid): one.kind for one in unknown}
    wrong: dict[str, Sequence[Running]] = {}
    for host in report.hosts:
        wanted = [
            one
            for one in host.running or ()
            if (kind := kind_of.get((host.uuid, one.instance_uuid))) is UnknownMachineKind.QUARANTINED
            or (one.reserved and (one.destroying or kind is not None))
        ]
        if {one.instance_uuid for one in wanted} != {one.instance_uuid for one in host.running or () if one.reserved}:
            wrong[host.uuid] = wanted
    return wrong


def pages(wrong: Reserved) -> list[list[str]]:
    """The hosts in order, in lists of at most so many machines as one message names."""
    found: list[list[str]] = []
    left = 0
    for host, machines in wrong.items():
        if not found or len(machines) > left:
            found.append([])
            left = MAX_RESERVED_AT_ONCE
        left -= len(machines)
        found[-1].append(host)
    return found


def reserved_on(host_uuid: str, machines: Sequence[Running], records: Mapping[str, Instance]) -> ReservedOnHost:
    """The reservations for the service: the resources that each machine takes, if its record has them."""
    return ReservedOnHost(
        host_uuid=host_uuid,
        machines=tuple(
            ReservedMachine(
                instance_uuid=one.instance_uuid,
                attempt=one.attempt,
                allocations=_allocations(records.get(one.instance_uuid), host_uuid),
            )
            for one in islice(machines, MAX_RESERVED_MACHINES)
        ),
    )


def _allocations(instance: Instance | None, host_uuid: str) -> Allocations | None:
    """The resources that an instance was to take of this host, if its record has the host among those chosen."""
    chosen = instance.selections if instance is not None else ()
    return next((selection.allocations for selection in chosen if selection.host_uuid == host_uuid), None)
