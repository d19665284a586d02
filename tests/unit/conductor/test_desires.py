"""The table of desires is total."""

from __future__ import annotations

from cell_conductor.domain.desires import DESIRES
from cell_conductor.domain.instance import State


def test_every_state_has_a_desire() -> None:
    assert set(DESIRES) == set(State)
