"""One step of an instance: its rule by the table, less what a fence or an operator's protection forbids. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from msgspec.structs import replace

from bus.contracts.actions import ChangeKind, ChangeMachine
from bus.contracts.base import Message
from bus.contracts.cell import Destroy, Spawn
from bus.faults import BrokenInvariant
from cell_conductor.awaited_request import is_answered_by
from cell_conductor.rules import delete_rules
from cell_conductor.state.commands import change_command, change_of, commands_of, with_change_number, with_commands
from cell_conductor.state.desired_state import DESIRED_STATES
from cell_conductor.state.evacuation_proof import fences_relied_on
from cell_conductor.state.events import (
    Answer,
    ChangeEnded,
    DeleteRequested,
    Destroyed,
    Event,
    HostFenced,
    SourceAnswered,
    SpawnFailed,
)
from cell_conductor.state.fence import fenced_hosts, services_of_stale
from cell_conductor.state.instance import PROTECTED, Instance
from cell_conductor.state.ownership_proof import is_provably_ended
from cell_conductor.state.step import Step, StepContext
from cell_conductor.table import BLOCKED, TABLE, ByNextState


class IllegalStep(BrokenInvariant):
    """An event occurred that is impossible in this state. The reason carries the instance's history."""

    code = "instance.illegal_step"


def step(instance: Instance, event: Event, context: StepContext) -> Step:
    """The instance after an event, and the commands that follow. Raises IllegalStep with the history."""
    stepped = _stepped(instance, event, context)
    if stepped.instance.blocked_reason:
        return stepped
    return _without_protected(with_commands(instance, stepped, context), event.at, context)


def _without_protected(stepped: Step, at: float, context: StepContext) -> Step:
    """No host is commanded to destroy what an operator keeps there, nor to build another attempt in its place."""
    # A record does not wait for it, either: it goes on as if the host had answered. One case waits: the record still
    # wants the machine, and its host is to end it unless it is complete. Then the host's report ends the decision
    # (`ReportGuard.delete_resolved`).
    after, commands = stepped.instance, stepped.commands
    for order in [one for one in commands if _is_protected(one, after, context)]:
        commands = tuple(one for one in commands if one is not order)
        about: dict[str, Any] = {"attempt": order.attempt, "host_uuid": order.host_uuid, "service": order.service}
        if isinstance(order, Spawn):
            answer: Event = SpawnFailed(at=at, code=PROTECTED, **about)
        elif isinstance(order, ChangeMachine):
            answer = ChangeEnded(at=at, change_number=order.change_number, done=False, code=PROTECTED, **about)
        elif order in commands_of(after, context) and is_provably_ended(after, order.attempt, order.host_uuid):
            answer = Destroyed(at=at, **about)
        else:
            continue
        following = step(after, answer, context)
        after, commands = following.instance, (*commands, *following.commands)
    return replace(stepped, instance=after, commands=commands)


def _is_protected(
    order: Message, instance: Instance, context: StepContext
) -> TypeGuard[Spawn | Destroy | ChangeMachine]:
    """Whether it would end what an operator keeps there: it is destroyed, or another attempt is built, or is to be. The
    host of that very attempt has it, and only answers.
    """
    if not isinstance(order, Spawn | Destroy | ChangeMachine):
        return False
    kept = context.protected.get((order.host_uuid, instance.uuid))
    is_built = isinstance(order, Spawn) or (isinstance(order, ChangeMachine) and order.change is ChangeKind.CHECK)
    return kept is not None and (isinstance(order, Destroy) or (is_built and order.attempt != kept))


def _stepped(instance: Instance, event: Event, context: StepContext) -> Step:
    row = BLOCKED if instance.blocked_reason else TABLE[instance.state]
    entry = row[type(event)]
    rule = entry.of(instance.next_state) if isinstance(entry, ByNextState) else entry
    if rule is None:
        raise IllegalStep(f"{type(event).__name__} while {instance.state}: {event!r} on {instance!r}")
    if isinstance(event, DeleteRequested) and delete_rules.is_other_project(instance, event):
        return Step(instance)
    if isinstance(event, Answer | SourceAnswered) and not is_answered_by(instance, event):
        return Step(instance)  # it comes late
    stepped = rule.apply(instance, event, context)
    after = stepped.instance.state
    assert after is instance.state or after in rule.to, (rule.name, instance.state, after)
    assert stepped.instance.phase in DESIRED_STATES, (rule.name, stepped.instance.phase)
    return stepped


# --- The steps that the fences of an instance's hosts lead to, after each of its own steps.

# How many steps in a row one fence may lead to: one for each host of the instance, and those that follow from a
# rollback.
MAX_FENCE_STEPS = 4
# A machine runs after these states, and one whose answer is awaited may run in these.
STARTING = frozenset(
    {
        ChangeKind.START,
        ChangeKind.REBOOT,
        ChangeKind.REBOOT_SOFT,
        ChangeKind.REBUILD,
        ChangeKind.RESCUE,
        ChangeKind.UNRESCUE,
    }
)


class FenceSteps:
    """The effects of fences in one transaction: the hosts, and by host the services of stale machines there.
    proofs: those of the hosts from which an evacuation commands a destination.
    """

    def __init__(self) -> None:
        self.hosts: dict[str, None] = {}
        self.stale: dict[str, list[str]] = {}
        self.proofs: dict[str, None] = {}

    def apply(self, before: Instance, stepped: Step, event: Event, context: StepContext) -> Step:
        """The step, and those that the fences of the instance's hosts lead to."""
        stepped = _stop_after_fence(before, stepped, event, context)
        after, commands, at = stepped.instance, stepped.commands, event.at
        if isinstance(event, HostFenced) and after is not before:
            self.hosts[event.host_uuid] = None
        for _ in range(MAX_FENCE_STEPS):
            for host in fenced_hosts(after, context.fences):
                following = step(after, HostFenced(at=at, host_uuid=host), context)
                if following.instance is not after:
                    self.hosts[host] = None
                    after, commands = following.instance, (*commands, *following.commands)
        if after is not before:
            self.proofs.update(dict.fromkeys(fences_relied_on(before, after, context)))
            self.hosts.update(self.proofs)
            for host in fenced_hosts(before, context.fences):
                if services := services_of_stale(before, after, host):
                    self.stale[host] = [*self.stale.get(host, ()), *services]
                    self.hosts[host] = None
        return Step(after, _without_starts(commands, context))


def _stop_after_fence(before: Instance, stepped: Step, event: Event, context: StepContext) -> Step:
    """If the fence ends a change that starts a machine, the change's command may wait in the queue: a later one stops
    the machine.
    """
    is_ended = change_of(before) in STARTING and change_of(stepped.instance) not in STARTING
    if not isinstance(event, HostFenced) or not is_ended:
        return stepped
    stopped = with_change_number(before, event.at)
    after = replace(stepped.instance, change_number=max(stepped.instance.change_number, stopped.change_number))
    return Step(after, (*stepped.commands, change_command(stopped, ChangeKind.STOP, context)))


def _without_starts(commands: Sequence[Message], context: StepContext) -> tuple[Message, ...]:
    """Nothing is started on a fenced host: it may be back before the fence is ended, and its instances may be
    elsewhere.
    """
    # The machine is stopped under the same number, so that a command from before the fence is not carried out either.
    kept: list[Message] = []
    for command in commands:
        is_fenced = isinstance(command, Spawn | ChangeMachine) and command.host_uuid in context.fences
        if not is_fenced:
            kept.append(command)
        elif isinstance(command, ChangeMachine):
            is_start = command.change in STARTING
            kept.append(replace(command, change=ChangeKind.STOP, rescue_password="") if is_start else command)
    return tuple(kept)
