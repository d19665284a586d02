"""Compares a compute service's report with what is on record for its hosts. Only a machine that is proved to be over is
destroyed. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct

from bus.contracts.cell import UNKNOWN_ATTEMPT, HostStates, Running
from cell_conductor.state.desired_state import DELETE_REQUESTED, EXPECTED, MachineTarget, desired_state_of
from cell_conductor.state.events import Event, MachineMissing, MachineRunning
from cell_conductor.state.instance import BlockedReason, InstanceSummary, State
from cell_conductor.state.ownership_proof import changed_recently, is_desired_here, is_provably_ended, rescan_id
from cell_conductor.state.unknown_machine import (
    NEWER,
    NO_OWNER_TAG,
    NO_RECORD,
    ON_OTHER_HOST,
    PROTECTED,
    REUSED_ATTEMPT,
    UNNUMBERED,
    UNREADABLE,
    UnknownMachine,
    UnknownMachineKind,
)

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
    report: HostStates,
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
    desired = desired_state_of(record)
    if desired.current is MachineTarget.UNKNOWN:
        return UNREADABLE if record.state is State.ABSENT else NO_RECORD
    if host_uuid in record.protected_hosts and is_provably_ended(record, one.attempt, host_uuid):
        return PROTECTED
    is_here = (one.attempt, host_uuid) == (record.attempt, record.host_uuid)
    is_commanded = is_here and desired.current is not MachineTarget.NOT_COMMANDED
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


def _running_event(report: HostStates, one: Running, host_uuid: str, now: float) -> MachineRunning:
    return MachineRunning(
        at=now,
        attempt=one.attempt,
        host_uuid=host_uuid,
        service=report.service,
        built=one.built,
        rescans=report.rescans,
    )


def _missing_event(report: HostStates, host_uuid: str, now: float) -> MachineMissing:
    return MachineMissing(at=now, host_uuid=host_uuid, service=report.service, rescans=report.rescans)
