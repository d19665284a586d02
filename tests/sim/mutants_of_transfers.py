"""Deliberate defects of instances that leave their cell. FOUND_BY: the seed of `transfers` that finds each.

Four more were seen to fail tests of the rules: a late arrival that is taken, an arrival of what was deleted before, a
delete that does not follow a departure, and a silent next cell that is only queried.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from bus.contracts.moves import MoveEvent
from cell_conductor.domain import departure_rules
from cell_conductor.domain.steps import Step
from scheduler_worker.domain import announced_moves


def former_cell_keeps_it() -> AbstractContextManager[Any]:
    """A cell announces that an instance has left, and has it still."""
    original = departure_rules._depart

    def depart(instance: Any, *arguments: Any) -> Step:
        stepped = original(instance, *arguments)
        return Step(replace(instance, sequence=instance.sequence + 1), stepped.commands)

    return patch.object(departure_rules, "_depart", depart)


def map_names_the_former_cell() -> AbstractContextManager[Any]:
    """The map of instances to cells is not changed when one leaves."""
    original = announced_moves.transfer

    def transfer(event: MoveEvent, build: Any, move: Any) -> Any:
        gone = original(event, build, move)
        return replace(gone, build=replace(gone.build, cell=build.cell))

    return patch.object(announced_moves, "transfer", transfer)


MUTANTS_OF_TRANSFERS: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
    former_cell_keeps_it,
    map_names_the_former_cell,
)
FOUND_BY: dict[str, int] = {
    "former_cell_keeps_it": 1,
    "map_names_the_former_cell": 5,
}
