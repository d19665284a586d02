"""The parts that all rules share: a step, the limits and times that it depends on, and its smallest functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.base import MAX_REASON, Message
from bus.contracts.build import AttemptRecord, BuildEvent, BuildState
from bus.contracts.cell import Destroy, Selection
from bus.contracts.placement import ClaimOutcome
from cell_conductor.state.events import Destroyed, MachineMissing, MachineRunning, Spawned
from cell_conductor.state.fence import ClosedHosts, Fence
from cell_conductor.state.instance import Instance, State
from cell_conductor.state.lease import Lease
from cell_conductor.state.ownership_proof import is_newer_scan


class StepContext(Struct, frozen=True, kw_only=True):
    """The inputs of a step besides its instance and its event: time limits, and the state of the cell's hosts."""

    cell: str  # the cell's name, for events
    database_id: str | None = None  # identity of the cell's database, with which every machine is tagged
    up: Collection[str] = ()  # compute services that are certainly up
    # Those that take no builds now: none is started there while another host can be tried. A service that nothing is
    # known of yet is neither up nor down.
    down: Mapping[str, Lease] = {}
    fences: Mapping[str, Fence] = {}  # hosts on which nothing is started at all, by uuid
    quarantined: AbstractSet[str] = frozenset()  # instances of which a host has a machine that no record explains
    # {(host, instance): attempt} of those machines that an operator keeps: no command of a step (`transition.step`)
    # destroys them, or begins another one in their place.
    protected: Mapping[tuple[str, str], int] = {}
    claim_retry_s: float = 15.0
    answer_timeout_s: float = 10.0
    destroy_retry_s: float = 30.0
    destroy_retry_max_s: float = 600.0
    live_copy_mb_s: float = 0.0

    @property
    def closed(self) -> ClosedHosts:
        """The hosts on which nothing is started now."""
        return ClosedHosts(self.down, self.fences)

    def is_usable(self, where: Selection) -> bool:
        """Whether its service is certainly up, and the host is not fenced."""
        return where.service in self.up and where.host_uuid not in self.fences

    def is_off(self, host_uuid: str | None) -> bool:
        """Whether an operator has stated that the host is off. One whose fence is being ended is on, to destroy
        its stale machines.
        """
        fence = self.fences.get(host_uuid or "")
        return fence is not None and not fence.unfencing


class Step(Struct, frozen=True):
    """The instance after an event, and the messages to send once that is committed."""

    instance: Instance
    commands: tuple[Message, ...] = ()
    resend: bool = False  # every command of the record is sent as well, also those that were sent before


def await_placement(
    instance: Instance, state: State, at: float, context: StepContext, *, next_state: State | None = None
) -> Instance:
    """Enter a state that waits for placement; the sweep repeats the request when no answer is ever recorded."""
    return replace(instance, state=state, next_state=next_state, deadline=at + context.claim_retry_s, since=at)


def enter_claiming(instance: Instance, next_state: State, at: float, context: StepContext) -> Instance:
    """Placement is to claim for it. next_state: what it comes to when placement has."""
    return await_placement(instance, State.CLAIMING, at, context, next_state=next_state)


def enter_releasing(instance: Instance, next_state: State, at: float, context: StepContext) -> Instance:
    """Placement is to release what it, or its migration, holds."""
    return await_placement(instance, State.RELEASING, at, context, next_state=next_state)


def release_after_destroy(instance: Instance, at: float, context: StepContext) -> Instance:
    """The machines that were to be destroyed are gone: what they take is released, and what follows stays."""
    return await_placement(instance, State.RELEASING, at, context, next_state=instance.next_state)


def enter_destroying(instance: Instance, next_state: State, at: float, context: StepContext) -> Instance:
    """Its hosts are to destroy what the desired state of that row says (`commands.commands_of`)."""
    return replace(
        instance, state=State.DESTROYING, next_state=next_state, deadline=at + context.destroy_retry_s, since=at
    )


def emit_event(
    instance: Instance,
    state: BuildState,
    at: float,
    context: StepContext,
    *,
    terminal: bool = False,
    first: tuple[Message, ...] = (),
    detail: tuple[str, str] = ("", ""),
) -> Step:
    """Take the next number and publish the state; the history only with a terminal state. detail: code and reason."""
    assert instance.spec is not None
    code, reason = (instance.code, instance.reason) if state is BuildState.FAILED else detail
    build_event = BuildEvent(
        instance_uuid=instance.uuid,
        project_id=instance.spec.project_id,
        state=state,
        sequence=instance.sequence,
        terminal=terminal,
        cell=context.cell,
        host=instance.current.host if instance.selections else None,
        host_uuid=instance.host_uuid,
        attempt=instance.attempt,
        code=code,
        reason=reason,
        history=instance.history if state in _ENDS else (),
        at=at,
        stage_times=instance.stage_times if terminal and state is not BuildState.DELETED else None,
        zone=instance.current.zone if instance.selections else "",
    )
    stage_times = None if terminal else instance.stage_times  # published once, and of no further use
    emitted = replace(
        instance, sequence=instance.sequence + 1, build_sequence=instance.sequence, stage_times=stage_times
    )
    return Step(emitted, (*first, build_event))


_ENDS = (BuildState.ACTIVE, BuildState.FAILED, BuildState.DELETED)


def destroy_current(instance: Instance, context: StepContext) -> Destroy:
    """The command to destroy the current attempt."""
    return destroy_at(instance, instance.current, instance.attempt, context)


def destroy_at(
    instance: Instance, where: Selection, attempt: int, context: StepContext, *, keep_if_complete: bool = False
) -> Destroy:
    """The command to destroy an attempt there. keep_if_complete: a complete machine stays, and is reported."""
    return Destroy(
        instance_uuid=instance.uuid,
        attempt=attempt,
        host_uuid=where.host_uuid,
        service=where.service,
        database_id=context.database_id,
        keep_if_complete=keep_if_complete,
    )


def with_service(instance: Instance, service: str) -> Instance:
    """The current host is this service's: a host outlives its service, and its next service takes no commands sent to
    the previous one.
    """
    if instance.current.service == service:
        return instance
    selections = list(instance.selections)
    selections[instance.selection_index] = replace(instance.current, service=service)
    return replace(instance, selections=tuple(selections))


def is_source(instance: Instance, event: Spawned | MachineRunning) -> bool:
    """Whether its machine is that of the move's source, on a host of its own."""
    return (event.attempt, event.host_uuid) == (instance.source_attempt, instance.source_host_uuid)


def with_current_service(instance: Instance, event: Spawned | MachineRunning) -> Instance:
    """The record with the host of this machine, its current one or its source, under the service that lists it now."""
    if is_current_attempt(instance, event):
        return with_service(instance, event.service)
    if not is_source(instance, event) or instance.source_service == event.service:
        return instance
    action = instance.action
    assert action is not None and action.source is not None
    return replace(instance, action=replace(action, source=replace(action.source, service=event.service)))


def is_current(instance: Instance, attempt: int, host_uuid: str) -> bool:
    """Whether this attempt on this host is the current one."""
    return attempt == instance.attempt and host_uuid == instance.host_uuid


def is_current_attempt(instance: Instance, event: Spawned | MachineRunning) -> bool:
    """Whether it is the current attempt that runs."""
    return is_current(instance, event.attempt, event.host_uuid)


def current_destroyed(instance: Instance, event: Destroyed | MachineMissing) -> bool:
    """Whether no machine of the current attempt is left on its host."""
    return is_destroyed(instance, event, instance.current, instance.attempt)


def source_destroyed(instance: Instance, event: Destroyed | MachineMissing) -> bool:
    """Whether no machine of the move's source is left on its host."""
    action = instance.action
    assert action is not None
    return action.source is not None and is_destroyed(instance, event, action.source, action.source_attempt)


def is_destroyed(instance: Instance, event: Destroyed | MachineMissing, where: Selection, attempt: int) -> bool:
    """Whether the host has reported that no attempt up to this one is left there: by its answer, or by a scan from
    after the record became what it is.
    """
    # Only the service that has the host by the record answers for it: another one has had the host before, and the
    # machine runs under the one that has it now.
    if event.host_uuid != where.host_uuid:
        return False
    if isinstance(event, MachineMissing):
        return is_newer_scan(event, instance)
    return event.service == where.service and event.attempt >= attempt


def attempt_record(
    instance: Instance, attempt: int, outcome: str, at: float, *, code: str = "", reason: str = ""
) -> AttemptRecord:
    """How an attempt on the current host has ended, for the history of a build or an action."""
    return AttemptRecord(
        attempt=attempt, host=instance.current.host, outcome=outcome, code=code, reason=truncate(reason), at=at
    )


def with_attempt(instance: Instance, outcome: str, *, at: float, code: str = "", reason: str = "") -> Instance:
    """The instance with its current attempt on record as over, or active."""
    if not instance.selections:  # on record since a query only, which names no host
        return instance
    record = attempt_record(instance, instance.attempt, outcome, at, code=code, reason=reason)
    return replace(instance, history=(*instance.history, record))


def unclaimed_records(instance: Instance, outcomes: Sequence[ClaimOutcome], at: float) -> tuple[AttemptRecord, ...]:
    """The alternates that could not be claimed, for the same, so that it is complete."""
    return tuple(
        AttemptRecord(attempt=instance.next_attempt, host=one.host, outcome="not_claimed", code=outcome.value, at=at)
        for one, outcome in zip(instance.alternates, outcomes, strict=False)
    )


def truncate(reason: str) -> str:
    """At most as long as a reason may be."""
    return reason if len(reason) <= MAX_REASON else reason[: MAX_REASON - 1] + "…"
