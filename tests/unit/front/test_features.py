"""docs/reference/features.md says of every row of the feature map what is there, and what it names exists."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from msgspec import Struct

ROOT = Path(__file__).parents[3]
STATES = ("yes", "partly", "no")


class Row(Struct, frozen=True):
    """One line of the page's tables."""

    id: str
    what: str
    state: str
    lacks: str
    where: tuple[str, ...]


def read(page: str) -> list[Row]:
    """Every row of every table."""
    found = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if re.fullmatch(r"[A-Z]-[0-9a-z]+", cells[0]):
            assert len(cells) == 4, line
            state, _, lacks = cells[2].partition(":")
            found.append(Row(cells[0], cells[1], state, lacks.strip(), tuple(re.findall(r"`([^`]+)`", cells[3]))))
    return found


ROWS = read((ROOT / "docs" / "reference" / "features.md").read_text())


def numbered(letter: str, first: int, last: int) -> list[str]:
    return [f"{letter}-{number}" for number in range(first, last + 1)]


# The feature map's ids; O, G, T and V number its opportunities, gaps, traps and figures.
EXPECTED = [
    *numbered("F", 1, 22), "F-op", "F-once", "F-order", "F-plug", "F-log", "F-gone",
    *numbered("W", 0, 13), *numbered("R", 1, 15),
    *numbered("N", 1, 34), "N-rt", "N-upt", "N-33a", "N-33b",
    *numbered("C", 1, 24), *numbered("M", 1, 14), *numbered("I", 1, 19), *numbered("D", 1, 15), *numbered("B", 1, 11),
    *numbered("O", 1, 11), *numbered("G", 1, 11), *numbered("T", 1, 20), *numbered("V", 1, 8),
]  # fmt: skip


def test_every_row_is_there_once() -> None:
    assert Counter(row.id for row in ROWS) == Counter(EXPECTED)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_row_says_where_it_is_and_what_it_lacks(row: Row) -> None:
    assert row.state in STATES, row
    assert row.what, row
    if row.state != "yes":
        assert row.lacks or (row.state == "no" and row.id[0] in "FWRNCMDOGV"), "say what lacks"
    if row.state == "no":
        assert not row.where, "what is not there is nowhere"
        return
    *code, test = row.where
    assert len(code) == 1, "one file of code (or a page of worked examples), one test"
    assert (ROOT / code[0]).is_file(), code
    path, _, name = test.partition("::")
    assert path.startswith("tests/"), test
    assert name, test
    assert re.search(rf"^(async )?def {re.escape(name)}\(", (ROOT / path).read_text(), re.MULTILINE), test
