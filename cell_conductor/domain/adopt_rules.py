"""What a build finds that this cell may have had before: a machine, or its own record.

A doubted build's machine was found on a host that its record does not name, and is not built again; or an operator has
decided that a machine in quarantine is the instance's. Placement is requested to release the build's allocation and to
claim that of its machine. Whatever the answer, the machine stays and belongs to the instance. A claim that was refused
is left to the audit (`unclaimed`).

A build, a query of one, or a delete that comes again is answered how far it is, or by its end once more.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from bus.contracts.base import Allocations
from bus.contracts.build import BuildState
from bus.contracts.cell import FoundMachine, Selection
from bus.contracts.moves import Condition

from . import rules, steps
from .desires import Work, desire_of, in_text
from .events import (
    BuildRequested,
    Claimed,
    ClaimRefused,
    DeleteRequested,
    HostRuns,
    MachineFound,
    Spawned,
)
from .instance import MACHINE_EXISTS, Instance, State
from .report import Unexplained, followed_by, is_untried
from .rules import DESTROY_CODES
from .set_back import FORGOTTEN_ATTEMPTS, numbered_on
from .steps import Step, StepContext, announce

MAX_SELECTIONS = 10  # of one record, as of one request


def forgotten_machines(instance: Instance, found: Sequence[FoundMachine]) -> tuple[FoundMachine, ...]:
    """The machines among these that the record does not have: on hosts that it has not tried, or of later attempts. Nor
    has it the one on its own host once it was given up because that host was silent, nor one of a first attempt that it
    has never commanded.
    """
    is_known = instance.code != rules.OUTCOME_UNKNOWN
    tried = {selection.host_uuid for selection in instance.selections[: instance.position + is_known]}
    own = [one for one in found if not one.foreign]
    return tuple(
        one
        for one in own
        if one.attempt > instance.attempt or one.host_uuid not in tried or is_untried(instance, one.attempt)
    )


def start_or_adopt(instance: Instance, event: BuildRequested, context: StepContext) -> Step:
    """A build that is new here: its machine is adopted, if the cell was found to have one.

    A machine on its first host that is of its first attempt, and of none later, is no other machine: the command there
    is repeated, and answered; unless the record has had attempts, whose claims were released, or the build was given
    up, or would pass its first host over, and is not commanded. A query that no search has answered is awaited again.
    """
    if event.is_query and event.found is None:
        return Step(instance)
    requested = rules.with_request(instance, event)
    first = (requested.attempt, requested.host_uuid)
    is_held = event.given_up is None and not instance.last_attempt
    is_newest = all(one.attempt <= event.attempt for one in event.found or ())
    is_new = is_held and is_newest and any((one.attempt, one.host_uuid) == first for one in event.found or ())
    best = best_of(requested, event.found or ())
    if best is None or (is_new and rules.closed_to(requested, context) is None):
        return rules.start_build(instance, event, context)
    adopted = replace(numbered_on(requested, context.set_back, event), reused_from=1)
    return adopt_found(adopted, best, event.at, context)


def why_not_adoptable(instance: Instance | None) -> str:
    """Why no machine may be given to this record by an operator's word; "": it may."""
    if instance is None or instance.spec is None or not instance.selections:
        return "the cell has no record of it"
    if instance.machine_exists:
        return "its build was refused, because the machine may be another project's"
    if not desire_of(instance).takes_machine or instance.move is not None:
        now = in_text(instance.phase)
        return f"it is {now}: only what is active elsewhere by its record, or failed, takes a machine over"
    return ""


def why_not_its_machine(instance: Instance, kept: Unexplained, found: Sequence[FoundMachine]) -> str:
    """Why this machine in quarantine is not given to its instance though an operator has decided so; "": it is.

    found: every machine of the instance that the compute services have, those of other deployments included.
    """
    spec = instance.spec
    here = [one for one in found if (one.host_uuid, one.attempt) == (kept.host_uuid, kept.attempt) and not one.foreign]
    if not here:
        return f"host {kept.host_uuid} does not report it"
    if len(found) > 1:
        others = sorted(one.host for one in found if one is not here[0])
        return f"there is another machine of it on {', '.join(others)}"
    if spec is None or here[0].project_id not in (None, spec.project_id):
        return "it was built for another project"
    if here[0].attempt < 1 or taken_of(instance, here[0]) is None:
        return "what it takes of its host is not known"
    return ""


def adopt_decided(instance: Instance, event: MachineFound, context: StepContext) -> Step:
    """By an operator's word the machine is this instance's: it is recorded where the machine runs.

    Nothing is destroyed: other machines of the instance stay in quarantine. The forgotten history has numbered
    attempts, changes and announcements of its own, so these go on far above those on record.
    """
    found = event.machine
    if why_not_adoptable(instance) or taken_of(instance, found) is None:
        return Step(instance)
    assert instance.spec is not None
    is_here = (found.attempt, found.host_uuid) == (instance.attempt, instance.host_uuid)
    if instance.state is State.ACTIVE and is_here:
        return Step(instance)
    decided = replace(
        numbered_on(instance, context.set_back),
        newest=max(found.attempt, instance.last_attempt) + FORGOTTEN_ATTEMPTS,
        order=instance.order + FORGOTTEN_ATTEMPTS,
        reused_from=unproved_from(instance, context),
        consumer_generation=instance.consumer_generation if instance.state is State.ACTIVE else None,
        code="",
        reason="",
    )
    return adopt_found(decided, replace(found, project_id=instance.spec.project_id), event.at, context)


def note_built(instance: Instance, event: Spawned | HostRuns, context: StepContext) -> Step:
    """The machine that is being adopted runs; it may be complete by now."""
    if not steps.is_ours(instance, event):
        return rules.destroy_orphan(instance, event, context)
    is_built = isinstance(event, Spawned) or event.built
    return Step(replace(steps.followed(instance, event), found_built=is_built or instance.found_built))


def end_adopted(instance: Instance, event: Claimed | ClaimRefused, context: StepContext) -> Step:
    """Placement has answered: active, or building while the machine is not complete yet."""
    held = event.consumer_generation if isinstance(event, Claimed) or is_held(instance.here, event) else None
    settled = replace(instance, newest=event.attempt, consumer_generation=held)
    if settled.found_built:
        here = settled.here
        up = Spawned(at=event.at, attempt=settled.attempt, host_uuid=here.host_uuid, service=here.service)
        return rules.come_up(settled, up, context)
    deadline = event.at + settled.build_timeout_s
    building = replace(
        settled,
        state=State.BUILDING,
        then=None,
        deadline=deadline,
        since=event.at,
        queried=False,
    )
    return steps.announce(building, BuildState.BUILDING, event.at, context)


def is_held(selection: Selection, event: ClaimRefused) -> bool:
    """Whether the consumer holds just this already: the audit has claimed it, or a record that is forgotten."""
    return event.consumer_generation is not None and event.holding == selection.allocations


def by_worth(one: FoundMachine) -> tuple[bool, int, str]:
    """Which of several machines of one instance counts: one that is complete, else the newest."""
    return one.built, one.attempt, one.host_uuid


def best_of(instance: Instance, found: Sequence[FoundMachine]) -> FoundMachine | None:
    """Which of these is taken for the instance's own: one that is proved to be, if any is."""
    return max(found, key=lambda one: (proved_of(instance, one) is not None, *by_worth(one)), default=None)


def adopt_found(instance: Instance, best: FoundMachine, at: float, context: StepContext) -> Step:
    """The machine is the instance's, if it is proved to be. Any other stays, in quarantine (`reused_from`)."""
    if (here := proved_of(instance, best)) is None:
        reason = f"host {best.host} has a machine of this instance, and its project or size is not proved"
        passed = replace(instance, code=MACHINE_EXISTS, reason=steps.cut(reason), doubted=False)
        return Step(steps.releasing(passed, State.FAILED, at, context))
    others = tuple(one for one in instance.alternates_and_here if one.host_uuid != here.host_uuid)
    adopted = replace(
        instance,
        selections=(here, *others)[:MAX_SELECTIONS],
        position=0,
        attempt=best.attempt,
        newest=max(best.attempt, instance.last_attempt),
        found_built=best.built,
    )
    return Step(steps.claiming(adopted, State.ACTIVE, at, context))


def unproved_from(instance: Instance, context: StepContext) -> int:
    """From which attempt on a record that goes on with another machine proves nothing: the one on record stays, in
    quarantine, because the move that made the other may have been undone; but on a fenced host it is a loss. What
    proved nothing before goes on to do so.
    """
    first = instance.attempt + 1 if instance.host_uuid in context.fences else 1
    return min(first, instance.reused_from or first)


def proved_of(instance: Instance, found: FoundMachine) -> Selection | None:
    """Where the machine is, which is proved to be this instance's; None: it is not, or its size is not known."""
    assert instance.spec is not None
    is_its_own = found.project_id == instance.spec.project_id and found.attempt >= 1
    taken = taken_of(instance, found) if is_its_own else None
    return None if taken is None else selection_of(found, taken)


def selection_of(found: FoundMachine, taken: Allocations) -> Selection:
    """The place of a machine that takes so much there."""
    return Selection(host_uuid=found.host_uuid, host=found.host, service=found.service, allocations=taken)


def taken_of(instance: Instance, found: FoundMachine) -> Allocations | None:
    """The resources of the machine: by its host, else as the build was chosen for that host, or for a host without
    parts.
    """
    if found.allocations:
        return found.allocations
    for selection in instance.selections:
        if selection.host_uuid == found.host_uuid:
            return selection.allocations
    if not instance.selections:
        return None
    chosen = instance.here
    if chosen.allocations.keys() == {chosen.host_uuid}:
        return {found.host_uuid: chosen.allocations[chosen.host_uuid]}
    return None


def restart_build(instance: Instance, event: BuildRequested, context: StepContext) -> Step:
    """The build has failed, and the scheduler had forgotten it before it came here: a newer request of it is built, a
    copy or a query is not. Nor is one whose claim was an alternate's of this build; a machine of it that is found is
    claimed anew.
    """
    is_over = 1 < event.attempt <= instance.last_attempt and not event.found
    if event.is_query or event.requested_at <= instance.requested_at or is_over:
        was_active = any(record.outcome == "active" for record in instance.history)
        return _announce_again(instance, event, BuildState.FAILED, context, terminal=not was_active)
    kept = followed_by(instance)
    again = replace(kept, newest=max(kept.newest, event.attempt))
    return start_or_adopt(again, event, context)


def answer_build(instance: Instance, event: BuildRequested, context: StepContext) -> Step:
    """A second build, or a query of it, of an instance that is on record, by what the record has come to."""
    desire = desire_of(instance)
    if desire.condition is Condition.DELETED:
        return report_deleting(instance, event, context)
    if desire.work in (Work.BUILD, Work.ADOPTION) or desire.condition is Condition.FAILED:
        return report_building(instance, event, context)
    return _announce_again(instance, event, BuildState.ACTIVE, context)


def report_building(instance: Instance, event: BuildRequested, context: StepContext) -> Step:
    """A query of a build that is under way is answered; a second command of it changes nothing."""
    if not event.is_query:
        return Step(instance)
    return announce(_numbered_above(instance, event), BuildState.BUILDING, event.at, context)


def report_deleting(instance: Instance, event: BuildRequested | DeleteRequested, context: StepContext) -> Step:
    """The delete is under way: it is announced once more, with the reason if its host cannot carry it out now."""
    if isinstance(event, BuildRequested) and not event.is_query:
        return Step(instance)
    why = (instance.code, instance.reason) if instance.code.startswith(DESTROY_CODES) else ("", "")
    return announce(_numbered_above(instance, event), BuildState.DELETING, event.at, context, why=why)


def announce_deleted_again(instance: Instance, event: BuildRequested | DeleteRequested, context: StepContext) -> Step:
    """A build or a delete of a deleted instance: its schedulers may have forgotten the first, and wait. Its claim is
    left to the audit.
    """
    if instance.spec is None:
        return Step(instance)
    return _announce_again(instance, event, BuildState.DELETED, context)


def _announce_again(
    instance: Instance,
    event: BuildRequested | DeleteRequested,
    state: BuildState,
    context: StepContext,
    *,
    terminal: bool = True,
) -> Step:
    """Publish the last announcement of the build once more, under its number: it changes nothing where it is on record.

    Under a later one, which the end of a move may have taken since, clients would get a second terminal event. Where
    schedulers wait for it and have had that number, of a record that was set back since, it takes the next one.
    """
    number = instance.build_sequence or instance.sequence - 1
    if isinstance(event, BuildRequested) and event.is_query and number <= event.sequence:
        return announce(_numbered_above(instance, event), state, event.at, context, terminal=terminal)
    last = replace(instance, sequence=number, stamps=None)
    return Step(instance, announce(last, state, instance.since, context, terminal=terminal).commands)


def _numbered_above(instance: Instance, event: BuildRequested | DeleteRequested) -> Instance:
    if isinstance(event, DeleteRequested):
        return instance
    return replace(instance, sequence=max(instance.sequence, event.sequence + 1))
