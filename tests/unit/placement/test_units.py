"""The rule of units is one rule: for numbers, for columns and as SQL."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import placement_worker
from placement_worker.domain.units import is_in_units
from tests.kit.unit_rules import amounts_and_units

ROWS = amounts_and_units(4_000)
STORE = Path(placement_worker.__file__).parent / "store"


@pytest.mark.parametrize(
    ("amount", "allowed"), [(1, False), (2, True), (3, False), (6, True), (8, True), (10, False), (9, False)]
)
def test_from_the_least_to_the_most_in_steps(amount: int, allowed: bool) -> None:
    assert is_in_units(amount, 2, 8, 2) is allowed


def test_columns_are_judged_as_each_of_their_rows() -> None:
    amounts, low, high, step = np.array(ROWS, dtype=np.int64).T
    single = [is_in_units(*row) for row in ROWS]
    assert is_in_units(amounts, low, high, step).tolist() == single
    assert 500 < sum(single) < 3_500, "both answers are met often"


def test_neither_schema_nor_statements_have_the_rule_in_words_of_their_own() -> None:
    assert not re.search(r"%\s*\w+\.step_size", "".join(path.read_text() for path in STORE.rglob("*.sql")))
    assert "% i.step_size" not in "".join(path.read_text() for path in STORE.rglob("*.py"))
