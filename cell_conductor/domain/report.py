"""Compare a compute service's report of what its hosts run with what is on record for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from bus.contracts.cell import ComputeHosts, Running

from .desires import DELETE_REQUESTED, EXPECTED, Wish, desire_of
from .events import Event, HostMissing, HostRuns
from .instance import State
from .proof import (
    InstanceFacts,
    has_just_changed,
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
        """The compute service that was last known to manage the current host."""

    @property
    def source_service(self) -> str:
        """That of the source's host ("": it is none but the current one)."""


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
    rescan) of machines that are missing by a scan that may be older than the record: to be scanned again.
    harmful_rescans: the same of machines that are missing, or over, and whose event would be harmful: while a breaker
    holds those, no scan ends the demand.
    """

    events: tuple[tuple[str, Event], ...] = ()
    harmful: tuple[tuple[str, Event], ...] = ()
    unexplained: tuple[Unexplained, ...] = ()
    rescans: tuple[tuple[str, str], ...] = ()
    harmful_rescans: tuple[tuple[str, str], ...] = ()


def differences(
    report: ComputeHosts,
    recorded: Iterable[RecordedInstance],
    *,
    deployment: str,
    now: float,
    grace_s: float,
    may_have: Callable[[str, str], bool] = lambda _service, _host: False,
) -> Differences:
    """The disagreements of a report and the record. The state machine decides about them; most reports agree.

    may_have(service, host): whether that service is up, and lists the host or has not listed all its hosts. Then the
    report of another service shows nothing about the machines there: they may have two hosts of one uuid.
    grace_s: a record that is younger causes no scan, because most of what such a report lacks is under way.
    This reading takes no locks: the record may change meanwhile, so the state machine checks every event again.
    """
    by_uuid = {record.uuid: record for record in recorded}
    running_on = {host.uuid: host.running for host in report.hosts if host.running is not None}
    events: list[tuple[str, Event]] = []
    harmful: list[tuple[str, Event]] = []
    unexplained: list[Unexplained] = []
    rescans: list[tuple[str, str]] = []
    harmful_rescans: list[tuple[str, str]] = []

    def is_proof(record: RecordedInstance, host_uuid: str, demands: list[tuple[str, str]]) -> bool:
        rescan = rescan_id(record)
        if rescan not in report.rescans and not has_just_changed(record.since, now=now, grace_s=grace_s):
            demands.append((host_uuid, rescan))
        return rescan in report.rescans

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
            elif (
                record is not None
                and not one.destroying
                and not _agrees(record, host_uuid, one, report.service, may_have)
            ):
                event = (one.instance_uuid, _runs(report, one, host_uuid, now))
                if record.phase in DELETE_REQUESTED or not is_over(record, one.attempt, host_uuid):
                    events.append(event)
                elif is_proof(record, host_uuid, harmful_rescans):
                    harmful.append(event)
    for place, record in _not_listed(report.service, by_uuid.values(), running_on, may_have):
        is_harmful = desire_of(record).here is Wish.RUN
        if is_proof(record, place, harmful_rescans if is_harmful else rescans):
            into = harmful if is_harmful else events
            into.append((record.uuid, _missing(report, place, now)))
    return Differences(tuple(events), tuple(harmful), tuple(unexplained), tuple(rescans), tuple(harmful_rescans))


def _not_listed(
    service: str,
    records: Iterable[RecordedInstance],
    running_on: Mapping[str, Sequence[Running]],
    may_have: Callable[[str, str], bool],
) -> Iterator[tuple[str, RecordedInstance]]:
    """(host, record) of what is expected there, is not listed, and is not another service's to list."""
    listed = {(host_uuid, one.instance_uuid) for host_uuid, running in running_on.items() for one in running}
    for record in records:
        desire = desire_of(record)
        for place, owner, wish in (
            (record.host_uuid, record.service, desire.here),
            (record.source_host_uuid, record.source_service, desire.source),
        ):
            if place is None or wish not in EXPECTED or place not in running_on or (place, record.uuid) in listed:
                continue
            if owner == service or not may_have(owner, place):
                yield place, record


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


def _agrees(
    record: RecordedInstance,
    host_uuid: str,
    one: Running,
    service: str,
    may_have: Callable[[str, str], bool],
) -> bool:
    place = (one.attempt, host_uuid)
    is_source = place == (record.source_attempt, record.source_host_uuid)
    if not is_source and place != (record.attempt, record.host_uuid):
        return False
    owner = record.source_service if is_source else record.service
    if owner != service:
        # Followed at each report, the orders would go to one and to the other by turns.
        return may_have(owner, host_uuid)
    if is_source:
        return is_wanted_at_source(record)
    if desire_of(record).here is Wish.BUILD:
        return not one.built  # its result has not arrived yet
    return _is_deleting(record) or is_wanted_here(record)


def _runs(report: ComputeHosts, one: Running, host_uuid: str, now: float) -> HostRuns:
    return HostRuns(
        at=now,
        attempt=one.attempt,
        host_uuid=host_uuid,
        service=report.service,
        built=one.built,
        rescans=report.rescans,
    )


def _missing(report: ComputeHosts, host_uuid: str, now: float) -> HostMissing:
    return HostMissing(at=now, host_uuid=host_uuid, service=report.service, rescans=report.rescans)


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
