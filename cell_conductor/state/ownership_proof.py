"""What a record proves about a machine on a host, and whether a scan of the host is newer than the record. Pure."""

from __future__ import annotations

from collections.abc import Container
from typing import TypeAlias
from uuid import UUID, uuid5

from bus.contracts.cell import UNKNOWN_ATTEMPT
from cell_conductor.state.desired_state import (
    AT_REST,
    DELETE_REQUESTED,
    DESIRED,
    ENDED,
    MachineTarget,
    desired_state_of,
    phase_to_text,
)
from cell_conductor.state.events import Event, MachineMissing, MachineRunning
from cell_conductor.state.instance import Instance, InstanceSummary

_RESCANS = UUID("6d1f7b0e-1c57-4f1b-9a57-3f6a1c6f2d11")

# What a proof is read of.
ProofInput: TypeAlias = Instance | InstanceSummary


def is_provably_ended(record: ProofInput, attempt: int, host_uuid: str) -> bool:
    """Whether the record proves that this attempt, run by this host, is not wanted any more."""
    # An attempt above all that were given out, or a machine's own attempt on another host, was commanded by a record
    # that this database does not have: that proves nothing, and the machine is kept. One from before the last recovery
    # proves only what the record names: its current attempt, and its source.
    desired = desired_state_of(record)
    if desired.current is MachineTarget.UNKNOWN or attempt == UNKNOWN_ATTEMPT:
        return False
    if record.phase in DELETE_REQUESTED:
        return True
    if record.source_host_uuid is not None and attempt == record.source_attempt:
        return host_uuid == record.source_host_uuid and desired.source in ENDED
    if attempt == record.attempt:
        is_protected = is_desired_here(record) or desired.current is MachineTarget.NOT_COMMANDED
        return host_uuid == record.host_uuid and not is_protected
    return record.proves_from <= attempt <= record.last_attempt


def next_attempt_record(record: Instance) -> Instance:
    """What a record that begins anew keeps of this one: by what it tells late messages from new ones, above which
    numbers it goes on, and that it proves no more about machines.
    """
    return Instance(
        uuid=record.uuid,
        sequence=record.sequence,
        highest_attempt=record.next_attempt,  # a release has ended it
        proves_from=record.proves_from,
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
