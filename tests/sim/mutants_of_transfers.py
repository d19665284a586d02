"""Deliberate defects of instances that leave their cell. FOUND_BY: the seed of `transfers` that finds each.

More were seen to fail tests of the rules: a late arrival that is taken, an arrival of what was deleted before, a silent
next cell that is only queried, attempts that a record from before can release, a departure that is announced before the
machine is gone, and an arrival that is built after a set-back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from bus.contracts.cell import CellDelete
from bus.contracts.moves import MoveEvent
from cell_conductor.domain import departure_rules, move_rules
from cell_conductor.domain.events import ChangeEnded
from cell_conductor.domain.instance import State
from cell_conductor.domain.move_steps import change, is_awaited
from cell_conductor.domain.steps import Step
from cell_conductor.domain.table import TABLE, Rule
from scheduler_worker.domain import transfers
from scheduler_worker.unanswered import UnansweredRequests
from tests.sim.mutants_of_disks import unwatched


def former_cell_keeps_it() -> AbstractContextManager[Any]:
    """A cell announces that an instance has left, and has it still."""
    original = departure_rules._depart

    def depart(instance: Any, at: float, context: Any) -> Step:
        stepped = original(instance, at, context)
        return Step(replace(instance, sequence=instance.sequence + 1), stepped.commands)

    return patch.object(departure_rules, "_depart", depart)


def map_names_the_former_cell() -> AbstractContextManager[Any]:
    """The map of instances to cells is not changed when one leaves."""
    original = transfers.transfer

    def transfer(event: MoveEvent, build: Any, move: Any) -> Any:
        gone = original(event, build, move)
        return replace(gone, build=replace(gone.build, cell=build.cell))

    return patch.object(transfers, "transfer", transfer)


def leaves_with_its_machine() -> AbstractContextManager[Any]:
    """An instance departs as soon as its next host has been checked, and its host is not commanded to destroy."""
    return patch.object(departure_rules, "give_away", departure_rules._depart)


def leaves_unchecked() -> AbstractContextManager[Any]:
    """Its machine is destroyed though no host of the other cell has shown that it reads its image."""
    original = move_rules.take_over

    def take_over(instance: Any, event: Any, context: Any) -> Step:
        is_stopped = event.done and instance.is_leaving and instance.move.source is not None
        if not is_stopped or not is_awaited(instance, event, instance.move.source, instance.source_attempt):
            return original(instance, event, context)
        return departure_rules.give_away(replace(instance, image=event.image), event.at, context)

    return in_table(State.HANDING_OVER, ChangeEnded, take_over, State.DESTROYING)


def leaves_without_an_image() -> AbstractContextManager[Any]:
    """The answer of its host that it is stopped is not waited for."""
    original = move_rules.change

    def begin(instance: Any, state: State, at: float, context: Any) -> Step:
        if state is State.HANDING_OVER and instance.is_leaving:
            return change(instance, State.PREPARING, at, context)
        return original(instance, state, at, context)

    return patch.object(move_rules, "change", begin)


def delete_does_not_follow() -> AbstractContextManager[Any]:
    """The delete of an instance that has left its cell meanwhile is not sent to its next cell.

    Without the watch of builds, which repeats a delete until it has ended, and so mends this.
    """
    original = transfers.transfer

    def transfer(event: MoveEvent, *arguments: Any) -> Any:
        gone = original(event, *arguments)
        return replace(gone, commands=tuple(one for one in gone.commands if not isinstance(one, CellDelete)))

    patches = ExitStack()
    patches.enter_context(patch.object(UnansweredRequests, "_open_builds", unwatched))
    patches.enter_context(patch.object(transfers, "transfer", transfer))
    return patches


def in_table(state: State, event: type[Any], rule: Callable[..., Step], *to: State) -> AbstractContextManager[Any]:
    """The table with another rule at one place."""
    row = TABLE[state]
    before = row[event]
    assert before is not None
    return patch.dict(row, {event: Rule(rule, (*before.to, *to))})  # type: ignore[arg-type]


MUTANTS_OF_TRANSFERS: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
    former_cell_keeps_it,
    map_names_the_former_cell,
    leaves_with_its_machine,
    leaves_unchecked,
    leaves_without_an_image,
    delete_does_not_follow,
)
FOUND_BY: dict[str, int] = {
    "former_cell_keeps_it": 1,
    "map_names_the_former_cell": 1,
    "leaves_with_its_machine": 1,
    "leaves_unchecked": 1,
    "leaves_without_an_image": 1,
    "delete_does_not_follow": 164,
}
