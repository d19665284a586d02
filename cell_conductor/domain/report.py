"""Compare a compute service's report of what its hosts run with what is on record for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from bus.contracts.cell import ComputeHosts, Running

from .desires import DELETE_REQUESTED, EXPECTED, Wish, desire_of
from .events import Event, HostMissing, HostRuns
from .instance import ScanId, State
from .proof import (
    InstanceFacts,
    is_over,
    is_renumbered,
    is_unsure,
    is_untried,
    is_wanted_at_source,
    is_wanted_here,
    rescan_id,
)


class RecordedInstance(InstanceFacts, Protocol):
    """The part of an instance that the comparison reads."""

    @property
    def service(self) -> str:
        """The compute service that was last known to manage that host."""


class UnexplainedKind(StrEnum):
    """Why no record explains a machine."""

    FOREIGN = "foreign"  # it has no mark of this deployment: it is another deployment's, and never touched
    QUARANTINED = (
        "quarantined"  # it has our mark, and the record does not prove it over: kept until an operator decides
    )


class Unexplained(Struct, frozen=True):
    """A machine that a host carries and no record explains: reported, and left as it is. why: one of WHY."""

    uuid: str
    attempt: int
    host_uuid: str
    kind: UnexplainedKind
    why: str


NO_MARK = "no mark of this deployment"
NO_RECORD = "no record"
NEWER = "newer than its record"
ELSEWHERE = "its record has this attempt on another host"
UNTRIED = "its record has not tried this host"
UNSURE = "its build was given up in doubt, after the database was set back"
RENUMBERED = "the database was set back, and its record may have numbered it anew"


class Differences(Struct, frozen=True):
    """The disagreements: events for instances, and machines that are only reported.

    harmful: the events that end or destroy a machine although no client requested it; see `breaker`. rescans: (host,
    rescan) of machines that are missing by the report of a service that is not on record as the host's: to be scanned
    again.
    """

    events: tuple[tuple[str, Event], ...] = ()
    harmful: tuple[tuple[str, Event], ...] = ()
    unexplained: tuple[Unexplained, ...] = ()
    rescans: tuple[tuple[str, str], ...] = ()


def differences(
    report: ComputeHosts,
    recorded: Iterable[RecordedInstance],
    *,
    deployment: str,
    now: float,
    seen_at: float,
    grace_s: float,
    may_have: Callable[[str, str], bool] = lambda _service, _host: False,
) -> Differences:
    """The disagreements of a report and the record. The state machine decides about them; most reports agree.

    may_have(service, host): whether that service is up, and lists the host or has not listed all its hosts. Then the
    report of another service does not show which machines are missing there: they may have two hosts of one uuid.
    This reading takes no locks: the record may change meanwhile, so the state machine checks every event again.
    """
    by_uuid = {record.uuid: record for record in recorded}
    running_on = {host.uuid: host.running for host in report.hosts if host.running is not None}
    events: list[tuple[str, Event]] = []
    harmful: list[tuple[str, Event]] = []
    unexplained: list[Unexplained] = []
    for host_uuid, running in running_on.items():
        for one in running:
            record = by_uuid.get(one.instance_uuid)
            if one.deployment != deployment:
                if not _is_known_at(record, host_uuid):
                    unexplained.append(
                        Unexplained(one.instance_uuid, one.attempt, host_uuid, UnexplainedKind.FOREIGN, NO_MARK)
                    )
            elif not one.destroying and (why := _unexplained(record, one, host_uuid)):
                unexplained.append(
                    Unexplained(one.instance_uuid, one.attempt, host_uuid, UnexplainedKind.QUARANTINED, why)
                )
            elif record is not None and not one.destroying and not _agrees(record, host_uuid, one, report.service):
                unwanted = record.phase not in DELETE_REQUESTED and is_over(record, one.attempt, host_uuid)
                into = harmful if unwanted else events
                into.append((one.instance_uuid, _runs(report, one, host_uuid, now, seen_at)))
    anothers = {one.uuid for one in by_uuid.values() if _is_anothers(one, report.service, may_have)}
    missing, rescans = _not_listed(report, by_uuid.values(), running_on, seen_at, grace_s, anothers=anothers)
    for place, record in missing:
        into = harmful if desire_of(record).here is Wish.RUN else events
        into.append((record.uuid, _missing(report, place, now, seen_at)))
    return Differences(tuple(events), tuple(harmful), tuple(unexplained), tuple(rescans))


def _is_anothers(record: RecordedInstance, service: str, may_have: Callable[[str, str], bool]) -> bool:
    is_elsewhere = record.service != service and record.host_uuid is not None
    return is_elsewhere and may_have(record.service, record.host_uuid or "")


def _not_listed(
    report: ComputeHosts,
    records: Iterable[RecordedInstance],
    running_on: Mapping[str, Sequence[Running]],
    seen_at: float,
    grace_s: float,
    *,
    anothers: Collection[str],
) -> tuple[list[tuple[str, RecordedInstance]], list[tuple[str, str]]]:
    """([(host, record) of what is expected there and is not listed], [(host, rescan) that has to show it first])."""
    missing: list[tuple[str, RecordedInstance]] = []
    rescans: list[tuple[str, str]] = []
    listed = {(host_uuid, one.instance_uuid) for host_uuid, running in running_on.items() for one in running}
    for record in records:
        # The state machine knows the order of the times of the host's own service; another's clock may be minutes off.
        counts = seen_at > 0 if record.service == report.service else seen_at > record.since + grace_s
        places: tuple[tuple[str | None, bool], ...] = (
            (record.host_uuid, desire_of(record).here in EXPECTED),
            (record.source_host_uuid, desire_of(record).source in EXPECTED),
        )
        for place, is_expected in places:
            if place is None or not is_expected or not counts or place not in running_on:
                continue
            if (place, record.uuid) in listed or (place == record.host_uuid and record.uuid in anothers):
                continue
            if record.service != report.service and (rescan := rescan_id(record)) not in report.rescans:
                rescans.append((place, rescan))
                if place == record.host_uuid:
                    continue  # not ordered (`proof.is_unordered`); the brief names no service of a source
            missing.append((place, record))
    return missing, rescans


def _is_known_at(record: RecordedInstance | None, host_uuid: str) -> bool:
    """Whether a machine without our mark is the one on record here: an operator may have removed its mark.

    It is neither lost nor proved ours: it is left as it is, and a destroy of it is refused by its host.
    """
    if record is None:
        return False
    is_built = desire_of(record).here is not Wish.BUILD
    if record.host_uuid == host_uuid and is_built and (_is_deleting(record) or is_wanted_here(record)):
        return True
    return record.source_host_uuid == host_uuid


def _is_deleting(record: RecordedInstance) -> bool:
    """Whether its host was commanded to destroy it by a client's word, and may list it until it has."""
    return desire_of(record).here is Wish.DESTROY and record.phase in DELETE_REQUESTED


def _unexplained(record: RecordedInstance | None, one: Running, host_uuid: str) -> str:
    """Why the record does not explain a machine that carries our mark; "": it does."""
    if record is None or record.state is State.ABSENT:
        return NO_RECORD
    if is_untried(record, one.attempt) and not is_over(record, one.attempt, host_uuid):
        return UNTRIED
    if is_unsure(record, one.attempt, host_uuid):
        return UNSURE
    is_here = (one.attempt, host_uuid) == (record.attempt, record.host_uuid)
    is_commanded = is_here and desire_of(record).here is not Wish.UNCOMMANDED
    is_source = (one.attempt, host_uuid) == (record.source_attempt, record.source_host_uuid)
    if is_commanded or is_source or is_wanted_at_home(record, one.attempt, host_uuid):
        return ""
    if is_over(record, one.attempt, host_uuid):
        return ""
    if is_renumbered(record, one.attempt):
        return RENUMBERED
    return ELSEWHERE if one.attempt in (record.attempt, record.source_attempt) else NEWER


def is_wanted_at_home(record: RecordedInstance, attempt: int, host_uuid: str) -> bool:
    """Whether this is the machine that the record wants on its current host."""
    return (attempt, host_uuid) == (record.attempt, record.host_uuid) and is_wanted_here(record)


def _agrees(record: RecordedInstance, host_uuid: str, one: Running, service: str) -> bool:
    if (one.attempt, host_uuid) == (record.source_attempt, record.source_host_uuid):
        return is_wanted_at_source(record)
    if (one.attempt, host_uuid) != (record.attempt, record.host_uuid):
        return False
    if desire_of(record).here is Wish.BUILD:
        return not one.built  # its result has not arrived yet
    return (_is_deleting(record) or is_wanted_here(record)) and record.service == service


def _runs(report: ComputeHosts, one: Running, host_uuid: str, now: float, seen_at: float) -> HostRuns:
    return HostRuns(
        at=now,
        attempt=one.attempt,
        host_uuid=host_uuid,
        service=report.service,
        seen_at=seen_at,
        scan=_scan(report),
        built=one.built,
    )


def _missing(report: ComputeHosts, host_uuid: str, now: float, seen_at: float) -> HostMissing:
    return HostMissing(
        at=now, host_uuid=host_uuid, seen_at=seen_at, service=report.service, scan=_scan(report), rescans=report.rescans
    )


def _scan(report: ComputeHosts) -> ScanId | None:
    return ScanId(report.epoch, report.scan) if report.scan else None


# At most this many compute services are remembered; the one that has been quiet longest is dropped first.
MAX_SERVICES = 100_000


class Newest:
    """Which report of each compute service is the newest handled: older ones are ignored (they come late, or twice)."""

    def __init__(self) -> None:
        self._newest: dict[str, tuple[int, int]] = {}

    def is_newer(self, report: ComputeHosts) -> bool:
        """Whether it is newer than every report of its service that was handled."""
        last = self._newest.get(report.service)
        return last is None or (report.epoch, report.sequence) > last

    def epoch(self, service: str) -> int:
        """The sequence of the newest report of this service that was handled; 0 before there is one."""
        return self._newest.get(service, (0, 0))[0]

    def note(self, report: ComputeHosts) -> None:
        """Record that the report has been handled.

        Not earlier: a report that met an outage comes again, and is still new then.
        """
        at = (report.epoch, report.sequence)
        self._newest[report.service] = max(at, self._newest.pop(report.service, at))
        if len(self._newest) > MAX_SERVICES:
            del self._newest[next(iter(self._newest))]
