"""Rules for a build, a query of one, or a delete that comes again: the answer is its progress, or its end once more."""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.actions import Condition
from bus.contracts.build import BuildState
from bus.contracts.cell import Selection
from cell_conductor.rules import build_rules
from cell_conductor.rules.machine_rules import DESTROY_CODES
from cell_conductor.state.desired_state import Work, desired_state_of
from cell_conductor.state.events import BuildRequested, ClaimRefused, DeleteRequested
from cell_conductor.state.instance import Instance
from cell_conductor.state.ownership_proof import next_attempt_record
from cell_conductor.state.step import Step, StepContext, emit_event


def is_allocated(selection: Selection, event: ClaimRefused) -> bool:
    """Whether the consumer holds just this already: the audit has claimed it, or a record that was deleted."""
    return event.consumer_generation is not None and event.allocations == selection.allocations


def restart_build(instance: Instance, event: BuildRequested, context: StepContext) -> Step:
    """The build has failed, and the scheduler had deleted its record before it came here: a newer request of it is
    built, a copy or a query is not. Nor is one whose claim was an alternate's of this build.
    """
    is_over = 1 < event.attempt <= instance.last_attempt
    if event.is_query or event.requested_at <= instance.requested_at or is_over:
        was_active = any(record.outcome == "active" for record in instance.history)
        return _reemit(instance, event, BuildState.FAILED, context, terminal=not was_active)
    kept = next_attempt_record(instance)
    again = replace(kept, highest_attempt=max(kept.highest_attempt, event.attempt))
    return build_rules.start_build(again, event, context)


def answer_build(instance: Instance, event: BuildRequested, context: StepContext) -> Step:
    """A second build, or a query of it, of an instance that is on record, by what the record has come to."""
    desired = desired_state_of(instance)
    if desired.condition is Condition.DELETED:
        return report_deleting(instance, event, context)
    if desired.work is Work.BUILD or desired.condition is Condition.FAILED:
        return report_building(instance, event, context)
    return _reemit(instance, event, BuildState.ACTIVE, context)


def report_building(instance: Instance, event: BuildRequested, context: StepContext) -> Step:
    """A query of a build that is under way is answered; a second command of it changes nothing."""
    if not event.is_query:
        return Step(instance)
    return emit_event(_numbered_above(instance, event), BuildState.BUILDING, event.at, context)


def report_deleting(instance: Instance, event: BuildRequested | DeleteRequested, context: StepContext) -> Step:
    """The delete is under way: it is published once more, with the reason if its host cannot carry it out now."""
    if isinstance(event, BuildRequested) and not event.is_query:
        return Step(instance)
    detail = (instance.code, instance.reason) if instance.code.startswith(DESTROY_CODES) else ("", "")
    return emit_event(_numbered_above(instance, event), BuildState.DELETING, event.at, context, detail=detail)


def reemit_deleted(instance: Instance, event: BuildRequested | DeleteRequested, context: StepContext) -> Step:
    """A build or a delete of a deleted instance: its schedulers may have lost the first, and wait. Its claim is
    left to the audit.
    """
    if instance.spec is None:
        return Step(instance)
    return _reemit(instance, event, BuildState.DELETED, context)


def _reemit(
    instance: Instance,
    event: BuildRequested | DeleteRequested,
    state: BuildState,
    context: StepContext,
    *,
    terminal: bool = True,
) -> Step:
    """Publish the last event of the build once more, under its number: it changes nothing where it is on record."""
    # Under a later number, which the end of an action may have taken since, clients would get a second terminal event.
    # Where schedulers wait for the event and have had that number, of a record that was restored since, it takes the
    # next one.
    number = instance.build_sequence or instance.sequence - 1
    if isinstance(event, BuildRequested) and event.is_query and number <= event.sequence:
        return emit_event(_numbered_above(instance, event), state, event.at, context, terminal=terminal)
    last = replace(instance, sequence=number, stage_times=None)
    return Step(instance, emit_event(last, state, instance.since, context, terminal=terminal).commands)


def _numbered_above(instance: Instance, event: BuildRequested | DeleteRequested) -> Instance:
    if isinstance(event, DeleteRequested):
        return instance
    return replace(instance, sequence=max(instance.sequence, event.sequence + 1))
