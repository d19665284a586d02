"""docs/reference/features.md has every row of the feature map, and what it names exists."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.feature_plants import JUDGED, PAGE, PLANTS, ROOT, STATES, Row, read

ROWS = read(PAGE.read_text())
YES = [row for row in ROWS if row.state == "yes"]


def numbered(letter: str, first: int, last: int) -> list[str]:
    return [f"{letter}-{number}" for number in range(first, last + 1)]


# The feature map's ids; O, G, T and V number its opportunities, gaps, traps and figures. K: what it has no row for.
EXPECTED = [
    *numbered("F", 1, 22), "F-op", "F-once", "F-order", "F-plug", "F-log", "F-gone",
    *numbered("W", 0, 13), *numbered("R", 1, 15),
    *numbered("N", 1, 34), "N-rt", "N-upt", "N-33a", "N-33b",
    *numbered("C", 1, 24), *numbered("M", 1, 14), *numbered("I", 1, 19), *numbered("D", 1, 15), *numbered("B", 1, 11),
    *numbered("O", 1, 11), *numbered("G", 1, 11), *numbered("T", 1, 20), *numbered("V", 1, 8), *numbered("K", 1, 3),
]  # fmt: skip


def test_every_row_is_there_once() -> None:
    assert Counter(row.id for row in ROWS) == Counter(EXPECTED)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_row_names_where_it_is_and_what_it_lacks(row: Row) -> None:
    assert row.state in STATES, row
    assert row.what, row
    if row.state != "yes":
        assert row.lacks or (row.state == "no" and row.id[0] in "FWRNCMDOGV"), "name what lacks"
    if row.state == "no":
        assert not row.where, "what is not there is nowhere"
        return
    *code, test = row.where
    assert len(code) == 1, "one file of code (or a page of worked examples), one test"
    assert (ROOT / code[0]).is_file(), code
    path, _, name = test.partition("::")
    assert re.fullmatch(r"tests/([a-z_]+/)*test_[a-z_]+\.py", path) and name.startswith("test_"), "pytest collects it"
    defined = re.findall(rf"^(?:async )?def {re.escape(name)}\(", (ROOT / path).read_text(), re.MULTILINE)
    assert len(defined) == 1, test


def test_every_yes_is_planted_or_judged() -> None:
    assert Counter([*PLANTS, *JUDGED]) == Counter(row.id for row in YES)


@pytest.mark.parametrize("name", PLANTS)
def test_no_plant_is_stale(name: str) -> None:
    """`python -m tests.feature_plants` shows that the row's test fails without the feature."""
    file, old, new = PLANTS[name]
    assert old != new
    assert (ROOT / file).read_text().count(old) == 1, file
