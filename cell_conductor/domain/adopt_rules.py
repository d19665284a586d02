"""Adoption: a doubted build's machine was found on a host that its record does not name, and is not built again.

Placement is requested to release what the build holds and to claim what its machine takes. Whatever the answer, the
machine stays and is the instance's: one without room in the book is the audit's (`unclaimed`).
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from bus.contracts.base import Allocations
from bus.contracts.build import BuildState
from bus.contracts.cell import FoundMachine, Selection

from . import rules, steps
from .events import BuildRequested, Claimed, ClaimRefused, HostRuns, MachineFound, Spawned
from .instance import Instance, State
from .steps import Step, StepContext

# Of a build that has a machine already which cannot be proved to be its project's: an operator decides about that.
MACHINE_EXISTS = "build.machine_exists"
MAX_SELECTIONS = 10  # of one record, as of one request


def is_searched(instance: Instance) -> bool:
    """Whether the cell's services are to be queried about it before another host is claimed for it."""
    return instance.doubted and instance.state is State.RECLAIMING


def forgotten_machines(instance: Instance, found: Sequence[FoundMachine]) -> tuple[FoundMachine, ...]:
    """Those of these that the record does not know: on other hosts than it has tried, or of later attempts."""
    tried = {selection.host_uuid for selection in instance.selections[: instance.position + 1]}
    return tuple(one for one in found if one.attempt > instance.last_attempt or one.host_uuid not in tried)


def start_or_adopt(instance: Instance, event: BuildRequested, context: StepContext) -> Step:
    """A build that is new here: its machine is adopted, where the cell was found to have one.

    One on its first host that is of its first attempt is no other: the command there is repeated, and answered.
    """
    requested = rules.with_request(instance, event)
    first = (1, requested.host_uuid)
    is_new = not event.found or any((one.attempt, one.host_uuid) == first for one in event.found)
    if event.given_up is not None or is_new:
        return rules.start_build(instance, event, context)
    return _adopt(replace(rules.numbered_on(requested), reused_from=1), event.found, event.at, context)


def adopt_machine(instance: Instance, event: MachineFound, context: StepContext) -> Step:
    """A record that was set back fails over, and its instance has a machine that it does not know."""
    found = forgotten_machines(instance, event.machines)
    if not instance.doubted or not found:
        return Step(instance)
    return _adopt(replace(instance, reused_from=instance.reused_from or 1), found, event.at, context)


def note_built(instance: Instance, event: Spawned | HostRuns, context: StepContext) -> Step:
    """The machine that is being adopted runs: complete by now, perhaps."""
    if not steps.is_ours(instance, event):
        return rules.destroy_orphan(instance, event, context)
    is_built = isinstance(event, Spawned) or event.built
    return Step(replace(steps.at_service(instance, event.service), found_built=is_built or instance.found_built))


def end_adopted(instance: Instance, event: Claimed | ClaimRefused, context: StepContext) -> Step:
    """Placement has answered: active, or building where the machine is not complete yet."""
    if event.attempt != instance.next_attempt:
        return Step(instance)
    held = event.consumer_generation if isinstance(event, Claimed) else None
    settled = replace(instance, newest=event.attempt, consumer_generation=held)
    if settled.found_built:
        here = settled.here
        up = Spawned(at=event.at, attempt=settled.attempt, host_uuid=here.host_uuid, service=here.service)
        return rules.come_up(settled, up, context)
    deadline = event.at + settled.build_timeout_s
    building = replace(settled, state=State.BUILDING, deadline=deadline, since=event.at, doubted=True, queried=False)
    return steps.announce(building, BuildState.BUILDING, event.at, context)


def _adopt(instance: Instance, found: Sequence[FoundMachine], at: float, context: StepContext) -> Step:
    """The machine that is complete, else the newest. The others stay, in quarantine (`reused_from`)."""
    assert instance.spec is not None
    best = max(found, key=lambda one: (one.built, one.attempt, one.host_uuid))
    allocations = _taken(instance, best)
    if best.project_id != instance.spec.project_id or allocations is None or best.attempt < 1:
        reason = f"host {best.host} has a machine of this instance, and it is not proved what or whose it is"
        passed = replace(instance, code=MACHINE_EXISTS, reason=steps.cut(reason), doubted=True)
        return Step(steps.ask(passed, State.GIVING_UP, at, context))
    here = Selection(host_uuid=best.host_uuid, host=best.host, service=best.service, allocations=allocations)
    others = tuple(one for one in instance.alternates_and_here if one.host_uuid != here.host_uuid)
    adopted = replace(
        instance,
        selections=(here, *others)[:MAX_SELECTIONS],
        position=0,
        attempt=best.attempt,
        newest=max(best.attempt, instance.last_attempt),
        found_built=best.built,
    )
    return Step(steps.ask(adopted, State.ADOPTING, at, context))


def _taken(instance: Instance, found: FoundMachine) -> Allocations | None:
    """What the machine takes: by its host, else as the build was chosen for that host, or for one without parts."""
    if found.allocations:
        return found.allocations
    for selection in instance.selections:
        if selection.host_uuid == found.host_uuid:
            return selection.allocations
    chosen = instance.here
    if chosen.allocations.keys() == {chosen.host_uuid}:
        return {found.host_uuid: chosen.allocations[chosen.host_uuid]}
    return None
