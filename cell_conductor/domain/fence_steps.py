"""The steps that the fences of an instance's hosts lead to, after each of its own steps."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from bus.contracts.base import Message
from bus.contracts.cell import Spawn
from bus.contracts.moves import ChangeKind, ChangeMachine

from .evacuations import relied_on
from .events import Event, HostFenced
from .fences import Loss, fenced_hosts, losses_of
from .instance import Instance
from .orders import change_of, change_order, numbered
from .steps import Step, StepContext
from .table import step

# How many steps in a row one fence may lead to: one for each host of the instance, and those that follow from undoing.
MAX_FENCE_STEPS = 4
# A machine runs after these states, and one whose answer is awaited may run in these.
STARTING = frozenset({ChangeKind.START, ChangeKind.REBUILD, ChangeKind.RESCUE, ChangeKind.UNRESCUE})


class FenceSteps:
    """The effects of fences in one transaction: the hosts, and their losses.

    proofs: those of the hosts from which an evacuation commands a destination.
    """

    def __init__(self) -> None:
        self.hosts: dict[str, None] = {}
        self.losses: list[Loss] = []
        self.proofs: dict[str, None] = {}

    def follow(self, before: Instance, stepped: Step, event: Event, context: StepContext) -> Step:
        """The step, and those that the fences of the instance's hosts lead to."""
        stepped = _with_stop(before, stepped, event, context)
        at, commands = event.at, stepped.commands
        after = stepped.instance
        if isinstance(event, HostFenced) and after is not before:
            self.hosts[event.host_uuid] = None
        for _ in range(MAX_FENCE_STEPS):
            for host in fenced_hosts(after, context.fences):
                then = step(after, HostFenced(at=at, host_uuid=host), context)
                if then.instance is not after:
                    self.hosts[host] = None
                    after, commands = then.instance, (*commands, *then.commands)
        if after is not before:
            self.proofs.update(dict.fromkeys(relied_on(before, after, context.fences)))
            self.hosts.update(self.proofs)
            for host in fenced_hosts(before, context.fences):
                self.losses += losses_of(before, after, host, at)
        self.hosts.update(dict.fromkeys(loss.host_uuid for loss in self.losses))
        return Step(after, _without_starts(commands, context))


def _with_stop(before: Instance, stepped: Step, event: Event, context: StepContext) -> Step:
    """If the fence ends a change that starts a machine, the change's order may wait in the queue: a later order stops
    the machine.
    """
    is_ended = change_of(before) in STARTING and change_of(stepped.instance) not in STARTING
    if not isinstance(event, HostFenced) or not is_ended:
        return stepped
    stopped = numbered(before, event.at)
    after = replace(stepped.instance, order=max(stepped.instance.order, stopped.order))
    return Step(after, (*stepped.commands, change_order(stopped, ChangeKind.STOP, context)))


def _without_starts(commands: Sequence[Message], context: StepContext) -> tuple[Message, ...]:
    """Nothing is started on a fenced host: it may be back before the fence is lifted, and its instances may be
    elsewhere.

    The machine is stopped under the same order, so that a command from before the fence is not carried out either.
    """
    kept: list[Message] = []
    for command in commands:
        is_fenced = isinstance(command, Spawn | ChangeMachine) and command.host_uuid in context.fences
        if not is_fenced:
            kept.append(command)
        elif isinstance(command, ChangeMachine):
            is_start = command.change in STARTING
            kept.append(replace(command, change=ChangeKind.STOP, rescue_password="") if is_start else command)
    return tuple(kept)
