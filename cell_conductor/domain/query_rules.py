"""The answers to a query of a build, and to a delete that comes again: its state, its end once more, or `build.lost`.

A cell whose database was set back may have forgotten what it has acknowledged. The schedulers then wait for the end of
a request that nothing will bring, so they query the cell; the answer follows from its record alone.
"""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.build import BuildState

from . import adopt_rules, delete_rules, rules, steps
from .departure_steps import announce_departure
from .events import BuildQueried, DeleteRequested
from .instance import FORGOTTEN_ATTEMPTS, Instance, State
from .repeat_rules import announce_again
from .steps import Step, StepContext

# The code of a build that its cell has no record and no machine of.
BUILD_LOST = "build.lost"
WHY_LOST = "its cell has no record of it: it never came there, or the cell's database was set back"


def answer_building(instance: Instance, event: BuildQueried, context: StepContext) -> Step:
    """It is under way here: its end will come."""
    return _answer(instance, event, BuildState.BUILDING, context)


def answer_adopted(instance: Instance, event: BuildQueried, context: StepContext) -> Step:
    """Its machine is being adopted; it was active before if placement has refused the claim."""
    answer = answer_active if instance.claims_refused else answer_building
    return answer(instance, event, context)


def answer_active(instance: Instance, event: BuildQueried, context: StepContext) -> Step:
    """The build has ended as active, whatever has been done with the instance since."""
    return _answer(instance, event, BuildState.ACTIVE, context, terminal=True)


def answer_elsewhere(instance: Instance, event: BuildQueried, context: StepContext) -> Step:
    """The build has ended as active, and another cell has the instance since: both are announced once more.

    The schedulers take no departure below a number that they have had, so neither gets a new one.
    """
    again = announce_again(instance, BuildState.ACTIVE, context)
    return Step(instance, (*again.commands, announce_departure(instance, event.at, context)))


def answer_failed(instance: Instance, event: BuildQueried, context: StepContext) -> Step:
    """The build has failed, or was active and is lost."""
    was_active = any(record.outcome == "active" for record in instance.history)
    return _answer(instance, event, BuildState.FAILED, context, terminal=not was_active)


def answer_deleted(instance: Instance, event: BuildQueried, context: StepContext) -> Step:
    """The instance is deleted."""
    return _answer(instance, event, BuildState.DELETED, context, terminal=True)


def answer_deleting(instance: Instance, event: BuildQueried | DeleteRequested, context: StepContext) -> Step:
    """The delete is under way. If its host cannot destroy it now, the event states why."""
    is_held = instance.code.startswith(rules.DESTROY_CODES)
    numbered = _numbered_above(instance, event)
    why = (instance.code, instance.reason) if is_held else ("", "")
    return steps.announce(numbered, BuildState.DELETING, event.at, context, why=why)


def end_lost(instance: Instance, event: BuildQueried, context: StepContext) -> Step:
    """Without a record nothing is known of its claims: it ends once it is certain that no machine of it is there.

    A machine of it is adopted, if it is proved to be its project's. If it is not it stays, and so does its claim: an
    operator decides about it.
    """
    if event.found is None:
        return Step(instance)
    numbered = rules.numbered_on(instance)
    queried = replace(
        numbered,
        sequence=max(numbered.sequence, event.sequence + 1),
        spec=event.spec,
        build_timeout_s=event.build_timeout_s,
        requested_at=event.at,  # a copy of its CellBuild that comes later was sent before: it is not begun
        cause=event.cause,
        newest=max((one.attempt for one in event.found), default=0) + FORGOTTEN_ATTEMPTS,
        reused_from=1,  # of its attempts nothing is known, so no number proves that a machine is over
    )
    if event.found:
        return adopt_rules.adopt_forgotten(queried, event, context) or Step(instance)
    # until: workers. Its claim is released by attempt: above any that a forgotten record can have claimed. By the name
    # of its run it will be released without a guess.
    lost = replace(queried, code=BUILD_LOST, reason=WHY_LOST)
    return Step(steps.ask(lost, State.GIVING_UP, event.at, context))


def end_deleted(instance: Instance, event: BuildQueried, context: StepContext) -> Step:
    """Its delete was here before it, and is carried out where the schedulers have forgotten that."""
    delete = DeleteRequested(at=event.at, cause=event.cause, project_id=event.spec.project_id, found=event.found)
    return Step(instance) if event.found is None else delete_rules.delete_unknown(instance, delete, context)


def _answer(
    instance: Instance, event: BuildQueried, state: BuildState, context: StepContext, *, terminal: bool = False
) -> Step:
    """Announce the state. An end that the schedulers have not had keeps its number; every other answer gets the next
    one, above all that they have had: to them a lower one is late.
    """
    last = instance.build_sequence or instance.sequence - 1
    if terminal and last > event.sequence:
        return announce_again(instance, state, context)
    return steps.announce(_numbered_above(instance, event), state, event.at, context, terminal=terminal)


def _numbered_above(instance: Instance, event: BuildQueried | DeleteRequested) -> Instance:
    sequence = event.sequence if isinstance(event, BuildQueried) else 0
    return replace(instance, sequence=max(instance.sequence, sequence + 1))
