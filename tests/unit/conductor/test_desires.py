"""The table of desires: total, and the lists of states in the schema are those that are read from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import cell_conductor.store
from cell_conductor.domain.desires import DESIRES, EXPECTED_HERE, PURGED, PURGED_FAILED, in_sql
from cell_conductor.domain.instance import State

SCHEMA = (Path(cell_conductor.store.__file__).parent / "schema.sql").read_text()


def test_every_state_has_a_desire() -> None:
    assert list(DESIRES) and set(DESIRES) == set(State)


@pytest.mark.parametrize(
    ("index", "states"),
    [("instances_host", EXPECTED_HERE), ("instances_over", PURGED), ("instances_failed", PURGED_FAILED)],
)
def test_a_partial_index_has_the_states_that_are_searched_for(index: str, states: frozenset[State]) -> None:
    found = re.search(rf"CREATE INDEX {index} ON instances[^;]*?WHERE state (?:IN|=) ([^;]+);", SCHEMA)
    assert found is not None
    assert set(re.findall(r"'(\w+)'", found[1])) == set(re.findall(r"'(\w+)'", in_sql(states)))
