"""Compares a compute service's report with what is on record for its hosts, and says what a record proves about a
machine on a host: only a machine that is proved to be over is destroyed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import TypeAlias
from uuid import UUID, uuid5

from msgspec import Struct

from bus.contracts.cell import UNKNOWN_ATTEMPT, ComputeHosts, Running

from .desires import AT_REST, DELETE_REQUESTED, DESIRED, ENDED, EXPECTED, MachineTarget, desired_state_of, phase_to_text
from .events import Event, MachineMissing, MachineRunning
from .instance import MACHINE_EXISTS, BlockedReason, Instance, InstanceSummary, State

_RESCANS = UUID("6d1f7b0e-1c57-4f1b-9a57-3f6a1c6f2d11")


# What a proof is read of.
ProofInput: TypeAlias = Instance | InstanceSummary


def is_provably_ended(record: ProofInput, attempt: int, host_uuid: str) -> bool:
    """Whether the record proves that this attempt, run by this host, is not wanted any more."""
    # An attempt above all that were given out, or a machine's own attempt on another host, was commanded by a record
    # that this database does not have: that proves nothing, and the machine is kept. One from before the last recovery
    # proves only what the record names: its current attempt, and its source.
    # A build that was refused because of a machine that may be another project's proves nothing about that machine,
    # even after the build's own delete: an operator decides about it.
    if record.state is State.ABSENT or attempt == UNKNOWN_ATTEMPT:
        return False
    if record.code == MACHINE_EXISTS:
        return False
    if record.phase in DELETE_REQUESTED:
        return True
    if record.source_host_uuid is not None and attempt == record.source_attempt:
        return host_uuid == record.source_host_uuid and desired_state_of(record).source in ENDED
    if attempt == record.attempt:
        is_protected = is_desired_here(record) or desired_state_of(record).current is MachineTarget.NOT_COMMANDED
        return host_uuid == record.host_uuid and not is_protected
    return record.proves_from <= attempt <= record.last_attempt


def next_attempt_record(record: Instance) -> Instance:
    """What a record that begins anew keeps of this one: by what it tells late messages from new ones, above which
    numbers it goes on, and that it proves no more about machines.
    """
    # A machine that this record keeps for another reason than its number (`is_provably_ended`) may be of any attempt.
    return Instance(
        uuid=record.uuid,
        sequence=record.sequence,
        highest_attempt=record.next_attempt,  # a release has fenced it
        proves_from=record.next_attempt if record.machine_exists else record.proves_from,
        change_number=record.change_number,
        ended=record.ended,
        traceparent=record.traceparent,
    )


def is_desired_here(record: ProofInput) -> bool:
    """Whether the current attempt is wanted on its host."""
    desired = desired_state_of(record)
    is_source = bool(record.source_attempt) and record.source_host_uuid is None
    return desired.current in DESIRED or (is_source and desired.source is MachineTarget.PRESENT)


def rescan_id(record: ProofInput) -> str:
    """The id of the rescan to request while the record is as it is now: a scan that names it began no earlier."""
    return rescan_of(record.uuid, record.attempt, phase_to_text(record.phase), record.since)


def rescan_of(*facts: object) -> str:
    """The id of a rescan that is requested because of these facts, as long as they hold."""
    return str(uuid5(_RESCANS, " ".join(map(str, facts))))


def is_newer_scan(event: MachineMissing | MachineRunning, record: ProofInput) -> bool:
    """Whether the scan of this report began after the record became what it is."""
    # No clock shows that, nor the number of a scan: a host's may be minutes from the cell's, or be set, and scans of
    # two services have no common order. A scan that names the record's rescan began after the conductor had requested
    # it.
    return rescan_id(record) in event.rescans


def changed_recently(since: float, *, now: float, grace_s: float) -> bool:
    """Whether what was recorded at `since` changed within the grace, so that what a report lacks may be under way."""
    # A time that is still to come is of a clock that was ahead, by a day perhaps: it shows nothing, and counts as old.
    return 0.0 <= now - since <= grace_s


# How an attempt ended that the record has left, with a command to destroy it there.
ENDED_BY_COMMAND = frozenset({"failed", "timed_out"})


def is_commanded(instance: Instance, event: Event) -> bool:
    """Whether the record has commanded that destruction itself: of an attempt that failed or was out of time, or of a
    machine that a move has left. Then it is no difference of the report.
    """
    # The command waits in the queue of a service that is silent. When the service is back its first report may list the
    # machines before it has taken the commands. And a scan that began before a command was carried out lists what is
    # gone by now. A drain may end more machines at once than a breaker allows.
    if not isinstance(event, MachineRunning) or not is_provably_ended(instance, event.attempt, event.host_uuid):
        return False
    if (event.attempt, event.host_uuid) == (instance.source_attempt, instance.source_host_uuid):
        return True
    tried = instance.history if instance.action is None else (*instance.history, *instance.action.history)
    return event.attempt in instance.ended_attempts or any(
        one.attempt == event.attempt and one.outcome in ENDED_BY_COMMAND for one in tried
    )


def has_machine_at(instance: Instance, service: str, fenced: Container[str]) -> bool:
    """Whether it is on this service's hosts, or moves from one. Not on fenced ones: a machine there is stale."""
    places = (
        [] if desired_state_of(instance).current is MachineTarget.ABSENT else [(instance.service, instance.host_uuid)]
    )
    if instance.phase not in AT_REST and instance.action is not None and instance.action.source is not None:
        places.append((instance.action.source.service, instance.action.source.host_uuid))
    return any(name == service and host not in fenced for name, host in places)


class UnknownMachineKind(StrEnum):
    """Why no record explains a machine."""

    FOREIGN = "foreign"  # it has no tag of this database: it is another database's, and never touched
    QUARANTINED = (
        "quarantined"  # with this database's tag, not proved over by the record: kept until an operator decides
    )


class UnknownMachine(Struct, frozen=True):
    """A machine that a host carries and no record explains: reported, and left as it is."""

    uuid: str
    attempt: int
    host_uuid: str
    kind: UnknownMachineKind
    reason: str  # one of WHY


NO_OWNER_TAG = "no tag of this database"
NO_RECORD = "no record"
UNREADABLE = "its record cannot be read"
PROTECTED = "an operator keeps it"
NEWER = "newer than its record"
UNNUMBERED = "its compute service does not know its attempt"
ON_OTHER_HOST = "its record has this attempt on another host"
REUSED_ATTEMPT = "it is from before the cell's database was restored"
CONTRADICTED = "what is known of its instance contradicts itself"


Rescans: TypeAlias = Mapping[tuple[str, str], str]  # {(host, instance): rescan}


class Differences(Struct, frozen=True):
    """The disagreements: events for instances, and machines that are only reported."""

    events: tuple[tuple[str, Event], ...] = ()
    # Events that end or destroy a machine although no client requested it; see `breaker`.
    destructive: tuple[tuple[str, Event], ...] = ()
    unknown_machines: tuple[UnknownMachine, ...] = ()
    # By (host, instance), of machines that are missing by a scan that may be older than the record: to be scanned
    # again.
    rescans: Rescans = {}
    # The same of machines that are missing, or over, and whose event would be destructive: while a breaker blocks
    # those, no scan ends the demand.
    destructive_rescans: Rescans = {}


def differences(
    report: ComputeHosts,
    recorded: Iterable[InstanceSummary],
    *,
    database_id: str,
    now: float,
    grace_s: float,
    may_have: Callable[[str, str], bool] = lambda _service, _host: False,
    fenced: Container[str] = (),
) -> Differences:
    """The disagreements of a report and the record. fenced: hosts whose machines that are over are stale.
    may_have(service, host): whether that service may have the host still. grace_s: a younger record causes no scan.
    """
    # Most reports agree. Where a host may be another service's still, the report shows nothing about the machines
    # there: the two may have two hosts of one uuid. The end of a stale machine is no difference of the report. Most of
    # what a report lacks of young records is under way.
    # This reading takes no locks: the record may change meanwhile, so the state machine checks every event again.
    by_uuid = {record.uuid: record for record in recorded}
    running_on = {host.uuid: host.running for host in report.hosts if host.running is not None}
    events: list[tuple[str, Event]] = []
    destructive: list[tuple[str, Event]] = []
    unknown: list[UnknownMachine] = []
    rescans: dict[tuple[str, str], str] = {}
    destructive_rescans: dict[tuple[str, str], str] = {}

    def is_proof(record: InstanceSummary, host_uuid: str, demands: dict[tuple[str, str], str]) -> bool:
        rescan = rescan_id(record)
        if rescan not in report.rescans and not changed_recently(record.since, now=now, grace_s=grace_s):
            demands[host_uuid, record.uuid] = rescan
        return rescan in report.rescans

    for host_uuid, running in running_on.items():
        for one in running:
            record = by_uuid.get(one.instance_uuid)
            if record is not None and record.blocked_reason:  # a reconciliation judges it
                if record.blocked_reason == BlockedReason.CONFLICT and one.database_id == database_id:  # by a decision
                    unknown.append(_unknown_machine(one, host_uuid, UnknownMachineKind.QUARANTINED, CONTRADICTED))
                continue
            if one.database_id != database_id:
                if not _is_recorded_at(record, host_uuid):
                    unknown.append(_unknown_machine(one, host_uuid, UnknownMachineKind.FOREIGN, NO_OWNER_TAG))
            elif not one.destroying and (reason := _unknown_reason(record, one, host_uuid)):
                unknown.append(_unknown_machine(one, host_uuid, UnknownMachineKind.QUARANTINED, reason))
            elif (
                record is not None
                and not one.destroying
                and not _matches_record(record, host_uuid, one, report.service, may_have)
            ):
                event = (one.instance_uuid, _running_event(report, one, host_uuid, now))
                if record.phase in DELETE_REQUESTED or not is_provably_ended(record, one.attempt, host_uuid):
                    events.append(event)
                elif is_proof(record, host_uuid, rescans if host_uuid in fenced else destructive_rescans):
                    (events if host_uuid in fenced else destructive).append(event)
    for place, record in _missing_machines(report.service, by_uuid.values(), running_on, may_have):
        is_destructive = desired_state_of(record).current is MachineTarget.RUNNING
        if is_proof(record, place, destructive_rescans if is_destructive else rescans):
            into = destructive if is_destructive else events
            into.append((record.uuid, _missing_event(report, place, now)))
    return Differences(tuple(events), tuple(destructive), tuple(unknown), rescans, destructive_rescans)


def _unknown_machine(machine: Running, host_uuid: str, kind: UnknownMachineKind, reason: str) -> UnknownMachine:
    return UnknownMachine(machine.instance_uuid, machine.attempt, host_uuid, kind, reason)


def _missing_machines(
    service: str,
    records: Iterable[InstanceSummary],
    running_on: Mapping[str, Sequence[Running]],
    may_have: Callable[[str, str], bool],
) -> Iterator[tuple[str, InstanceSummary]]:
    """(host, record) of what is expected there, is not listed, and is not another service's to list."""
    listed = {(host_uuid, one.instance_uuid) for host_uuid, running in running_on.items() for one in running}
    for record in records:
        if record.blocked_reason:
            continue
        desired = desired_state_of(record)
        for place, owner, target in (
            (record.host_uuid, record.service, desired.current),
            (record.source_host_uuid, record.source_service, desired.source),
        ):
            if place is None or target not in EXPECTED or place not in running_on or (place, record.uuid) in listed:
                continue
            if owner == service or not may_have(owner, place):
                yield place, record


def _is_recorded_at(record: InstanceSummary | None, host_uuid: str) -> bool:
    """Whether a machine without this database's tag is the one on record here: an operator may have removed its tag."""
    # It is neither lost nor proved to be this database's: it is left as it is, and a destroy of it is refused by its
    # host.
    if record is None:
        return False
    is_built = desired_state_of(record).current is not MachineTarget.BUILT
    if record.host_uuid == host_uuid and is_built and (_is_deleting(record) or is_desired_here(record)):
        return True
    return record.source_host_uuid == host_uuid


def _is_deleting(record: InstanceSummary) -> bool:
    """Whether its host was commanded to destroy it by a client's request, and may list it until it has."""
    return desired_state_of(record).current is MachineTarget.DESTROYED and record.phase in DELETE_REQUESTED


def _unknown_reason(record: InstanceSummary | None, one: Running, host_uuid: str) -> str:
    """Why the record does not explain a machine that carries our tag; "": it does."""
    if record is None:
        return NO_RECORD
    if record.state is State.ABSENT:
        return UNREADABLE
    if record.code == MACHINE_EXISTS:  # its build was refused because of this machine: it has commanded nothing
        return NO_RECORD
    if host_uuid in record.protected_hosts and is_provably_ended(record, one.attempt, host_uuid):
        return PROTECTED
    is_here = (one.attempt, host_uuid) == (record.attempt, record.host_uuid)
    is_commanded = is_here and desired_state_of(record).current is not MachineTarget.NOT_COMMANDED
    is_source = (one.attempt, host_uuid) == (record.source_attempt, record.source_host_uuid)
    if is_commanded or is_source or is_provably_ended(record, one.attempt, host_uuid):
        return ""
    if one.attempt == UNKNOWN_ATTEMPT:
        return UNNUMBERED
    if one.attempt < record.proves_from:
        return REUSED_ATTEMPT
    return ON_OTHER_HOST if one.attempt in (record.attempt, record.source_attempt) else NEWER


def _matches_record(
    record: InstanceSummary,
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
        # Followed at each report, the commands would go to one and to the other by turns.
        return may_have(owner, host_uuid)
    if is_source:
        return desired_state_of(record).source is MachineTarget.PRESENT
    if desired_state_of(record).current is MachineTarget.BUILT:
        return not one.built  # its result has not arrived yet
    return _is_deleting(record) or is_desired_here(record)


def _running_event(report: ComputeHosts, one: Running, host_uuid: str, now: float) -> MachineRunning:
    return MachineRunning(
        at=now,
        attempt=one.attempt,
        host_uuid=host_uuid,
        service=report.service,
        built=one.built,
        rescans=report.rescans,
    )


def _missing_event(report: ComputeHosts, host_uuid: str, now: float) -> MachineMissing:
    return MachineMissing(at=now, host_uuid=host_uuid, service=report.service, rescans=report.rescans)


# At most this many compute services are remembered; the one that has been quiet longest is dropped first.
MAX_SERVICES = 100_000


class NewestReports:
    """Which report of each compute service is the newest handled. Older ones are ignored: they come late, or twice."""

    def __init__(self) -> None:
        self._newest: dict[str, tuple[int, int]] = {}

    def is_newer(self, report: ComputeHosts) -> bool:
        """Whether it is newer than every report of its service that was handled."""
        last = self._newest.get(report.service)
        return last is None or (report.epoch, report.sequence) > last

    def epoch(self, service: str) -> int:
        """The sequence of the newest report of this service that was handled; 0 before there is one."""
        return self._newest.get(service, (0, 0))[0]

    def record(self, report: ComputeHosts) -> None:
        """Record that the report has been handled."""
        # Not earlier: a report that met an outage comes again, and is still new then.
        at = (report.epoch, report.sequence)
        self._newest[report.service] = max(at, self._newest.pop(report.service, at))
        if len(self._newest) > MAX_SERVICES:
            del self._newest[next(iter(self._newest))]
