"""What follows from the fences of an instance's hosts, after each of its own steps."""

from __future__ import annotations

from .events import Event, HostFenced
from .fences import Loss, fenced_hosts, losses_of
from .instance import Instance
from .steps import Step, StepContext
from .table import step

# How many steps in a row one fence makes an instance take: one for each of its hosts, and what follows from undoing.
MAX_FENCE_STEPS = 4


class FenceSteps:
    """What fences end in one transaction: on which hosts, and what these have lost by it."""

    def __init__(self) -> None:
        self.hosts: dict[str, None] = {}
        self.losses: list[Loss] = []

    def follow(self, before: Instance, stepped: Step, event: Event, context: StepContext) -> Step:
        """The step, and those that the fences of the instance's hosts lead to."""
        at, commands = event.at, stepped.commands
        fenced = {*fenced_hosts(before, context.fences), *fenced_hosts(stepped.instance, context.fences)}
        after = stepped.instance
        if isinstance(event, HostFenced) and after is not before:
            self.hosts[event.host_uuid] = None
        for _ in range(MAX_FENCE_STEPS):
            was = after
            for host in fenced_hosts(after, context.fences):
                then = step(after, HostFenced(at=at, host_uuid=host), context)
                if then.instance is not after:
                    self.hosts[host] = None
                    after, commands = then.instance, (*commands, *then.commands)
            if after is was:
                break
        if after is not before:
            for host in sorted(fenced):
                self.losses += losses_of(before, after, host, at)
        self.hosts.update(dict.fromkeys(loss.host_uuid for loss in self.losses))
        return Step(after, commands)
