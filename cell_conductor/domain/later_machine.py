"""A later machine of an instance than its record has: the cell's database was set back, and a move was lost with it.

The machine is the instance's if it is complete and proved to be. The one on record stays, in quarantine, because the
move that made the other may have been undone.
"""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.cell import FoundMachine
from bus.contracts.moves import MoveState

from .adopt_rules import adopt_found, best_of, proved_of, unproved_from
from .events import MoveRequested
from .instance import Instance, Power
from .move_events import IN_DOUBT, MoveEnd, after, answer_other, close, move_of, refuse_request
from .move_steps import over
from .report import is_over
from .set_back import doubted_from, is_outdated
from .steps import Step, StepContext
from .way_back import of_source

OLDER = "the cell's database was set back to before it was moved"


def take_over_later(instance: Instance, event: MoveRequested, context: StepContext) -> Step | None:
    """The cell has a machine of it that is later than its record: it was moved before the database was set back. The
    request is refused, and that machine is the instance's if it is complete and proved to be its own; a client repeats
    the request. None: there is none, and the request is begun.
    """
    own = instance.attempt, instance.host_uuid
    later = [
        one
        for one in (event.found or () if is_outdated(instance, context.set_back) else ())
        if one.attempt >= instance.attempt
        and (one.attempt, one.host_uuid) != own
        and not is_over(instance, one.attempt, one.host_uuid)
    ]
    if (best := best_of(instance, later)) is None:
        return None
    unsure = doubted_from(instance, context.set_back)
    refused = refuse_request(unsure, event, context, IN_DOUBT, f"host {best.host} has a later machine of it: {OLDER}")
    if best.built and best.attempt > instance.attempt and proved_of(instance, best) is not None:
        unsure = replace(refused.instance, doubted=len(later) > 1)  # another one may be later still
        return after(refused, _adopt(unsure, best, event.at, context))
    return refused


def adopt_moved(instance: Instance, found: FoundMachine, at: float, context: StepContext) -> Step:
    """The instance was moved on, after the move on record, which has failed or was over: it goes on from where that had
    begun, as one at rest does. Nothing is destroyed there, nor at its destination.
    """
    known = instance if instance.is_in_place else replace(instance, **of_source(move_of(instance)))
    ending = MoveEnd(MoveState.FAILED, IN_DOUBT, f"host {found.host} has a later machine of it: {OLDER}")
    ended = answer_other(over(known, at, context), ending, at, context)
    ended = after(ended, close(ended.instance, ending, at, context))
    return after(ended, _adopt(ended.instance, found, at, context))


def _adopt(instance: Instance, found: FoundMachine, at: float, context: StepContext) -> Step:
    runs = Power.RUNNING if instance.power is Power.SHELVED else instance.power
    awake = replace(instance, power=runs, image="", reused_from=unproved_from(instance, context))
    return adopt_found(awake, found, at, context)
