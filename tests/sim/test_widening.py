"""The page on the simulation names every kind of thing that others do in the simulation."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.simulation.widening import WIDENED, Widening

PAGE = Path(__file__).parents[2] / "docs" / "contributing" / "simulation.md"
BY_NAME = "The last five kinds of the table come by their name alone."


def kinds_of_the_page() -> list[str]:
    """The first column of the table of kinds, in its order."""
    lines = PAGE.read_text().splitlines()
    begin = lines.index("| kind | actions of others |") + 2
    cells = [line.split("|")[1] for line in lines[begin : lines.index("", begin)]]
    return [name.strip() for cell in cells for name in cell.split(",")]


@pytest.mark.parametrize("kind", sorted(Widening))
def test_a_kind_is_on_the_page(kind: Widening) -> None:
    assert kind in kinds_of_the_page()


def test_kinds_that_come_by_name_are_the_last_ones() -> None:
    assert BY_NAME in PAGE.read_text()
    assert set(kinds_of_the_page()[-5:]) == set(Widening) - WIDENED
