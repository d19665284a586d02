"""Deliberate defects of instances that leave their cell. FOUND_BY: the seed of `transfers` that finds each.

More were seen to fail tests of the rules: a late arrival that is taken, an arrival of what was deleted before, a delete
that does not follow a departure, a silent next cell that is only queried, attempts that begin anew in the next cell,
orders without an epoch, a record in doubt that starts its machine, and an arrival that is begun after a set-back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from bus.contracts.cell import CellDelete
from bus.contracts.moves import ChangeMachine, Departure, MoveEvent
from cell_conductor.domain import (
    change_rules,
    departure_rules,
    departure_steps,
    leave_rules,
    move_rules,
    move_steps,
    steps,
    undo_rules,
    way_back,
)
from cell_conductor.domain.events import MoveRequested, TimedOut
from cell_conductor.domain.instance import State
from cell_conductor.domain.steps import Step
from cell_conductor.domain.table import TABLE, Rule
from scheduler_worker.domain import transfers
from scheduler_worker.unanswered import UnansweredRequests
from tests.sim.mutants_of_disks import unwatched


def former_cell_keeps_it() -> AbstractContextManager[Any]:
    """A cell announces that an instance has left, and has it still."""
    original = departure_rules._depart

    def depart(instance: Any, *arguments: Any) -> Step:
        stepped = original(instance, *arguments)
        return Step(replace(instance, sequence=instance.sequence + 1), stepped.commands)

    return patch.object(departure_rules, "_depart", depart)


def map_names_the_former_cell() -> AbstractContextManager[Any]:
    """The map of instances to cells is not changed when one leaves."""
    original = transfers.transfer

    def transfer(event: MoveEvent, build: Any, move: Any) -> Any:
        gone = original(event, build, move)
        return replace(gone, build=replace(gone.build, cell=build.cell))

    return patch.object(transfers, "transfer", transfer)


def leaves_while_it_runs() -> AbstractContextManager[Any]:
    """An instance leaves without its host having stopped it."""
    original = leave_rules.begin_or_leave

    def begin(instance: Any, event: Any, context: Any) -> Step:
        begun = original(instance, event, context)
        if begun.instance.state is not State.LEAVING:
            return begun
        others = tuple(one for one in begun.commands if not isinstance(one, ChangeMachine))
        return Step(steps.claiming(begun.instance, State.KEPT, event.at, context), others)

    return in_table(State.ACTIVE, MoveRequested, begin, State.CLAIMING)


def kept_one_starts_when_time_is_over() -> AbstractContextManager[Any]:
    """The former cell starts the machine that it keeps when nothing has come for a while."""

    def start(instance: Any, event: Any, context: Any) -> Step:
        return leave_rules._stay(instance, event.at, context, "move.timeout", "")

    return in_table(State.KEPT, TimedOut, start, State.RESTARTING)


def kept_one_is_destroyed_too_early() -> AbstractContextManager[Any]:
    """The former cell is commanded to destroy what it keeps while the instance may still go back there."""

    def is_for_good(event: MoveEvent, handed: Departure, cell: str) -> bool:
        return handed.kept is not None and handed.cell == cell

    return patch.object(transfers, "is_for_good", is_for_good)


def allocation_is_released_before_the_machine_is_gone() -> AbstractContextManager[Any]:
    """The allocation of a kept machine is released, and its host is not commanded to destroy it."""
    original = leave_rules.follow_kept

    def follow(instance: Any, event: Any, context: Any) -> Step:
        stepped = original(instance, event, context)
        if stepped.instance.phase != (State.DESTROYING, State.DEPARTED):
            return stepped
        return Step(steps.released_after(stepped.instance, event.at, context))

    return in_table(State.KEPT, MoveRequested, follow, State.RELEASING)


def given_back_with_its_machine() -> AbstractContextManager[Any]:
    """The next cell gives an instance back while its destination has the machine."""
    original = undo_rules.revert_book

    def undo(instance: Any, at: float, context: Any, code: str, reason: str) -> Step:
        move = replace(instance.move, lost_code=code, lost_reason=reason)
        if move.kept is None:
            return kept_undo(instance, at, context, code, reason)
        return Step(original(replace(instance, move=move), at, context))

    kept_undo, planted = move_steps.undo, ExitStack()
    for module in (move_rules, way_back):
        planted.enter_context(patch.object(module, "undo", undo))
    return planted


def delete_does_not_go_back() -> AbstractContextManager[Any]:
    """An instance that is to be deleted is given back as one that is not, and the delete does not follow it.

    Without the watch of builds, which repeats a delete until it has ended, and so mends this.
    """
    original, sent = departure_steps.give_back, transfers.transfer

    def give_back(instance: Any, at: float, context: Any) -> Step:
        return original(replace(instance, move=replace(instance.move, delete=False)), at, context)

    def transfer(event: MoveEvent, *arguments: Any) -> Any:
        gone = sent(event, *arguments)
        return replace(gone, commands=tuple(one for one in gone.commands if not isinstance(one, CellDelete)))

    patches = ExitStack()
    patches.enter_context(patch.object(UnansweredRequests, "_open_builds", unwatched))
    patches.enter_context(patch.object(change_rules, "give_back", give_back))
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
    leaves_while_it_runs,
    kept_one_starts_when_time_is_over,
    kept_one_is_destroyed_too_early,
    allocation_is_released_before_the_machine_is_gone,
    given_back_with_its_machine,
    delete_does_not_go_back,
)
FOUND_BY: dict[str, int] = {
    "former_cell_keeps_it": 1,
    "map_names_the_former_cell": 5,
    "leaves_while_it_runs": 1,
    "kept_one_starts_when_time_is_over": 1,
    "kept_one_is_destroyed_too_early": 1,
    "allocation_is_released_before_the_machine_is_gone": 1,
    "given_back_with_its_machine": 5,
    "delete_does_not_go_back": 30,
}
