"""The rows of one write of the book, cut into statements."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement_worker.store import claims

GROUPS = st.tuples(*(st.integers(0, 8) for _ in claims.WRITTEN))


def group_of(part: list[list[object]], number: int) -> list[tuple[object, ...]]:
    ends = list(accumulate(claims.WRITTEN))
    return list(zip(*part[ends[number] - claims.WRITTEN[number] : ends[number]], strict=True))


@given(GROUPS)
def test_item_16_each_row_is_written_once_in_order_and_few_at_a_time(sizes: tuple[int, ...]) -> None:
    if not sizes[-1]:
        sizes = (*sizes[:-2], 0, 0)  # usage changes with its provider's generation
    columns: list[list[object]] = [
        [(group, column, row) for row in range(size)]
        for group, (size, width) in enumerate(zip(sizes, claims.WRITTEN, strict=True))
        for column in range(width)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "MAX_ROWS", 3)
        parts = list(claims._in_parts(columns))
    usage, generations = len(sizes) - 2, len(sizes) - 1
    written: list[tuple[int, tuple[object, ...]]] = []
    for part in parts:
        rows = [(group, row) for group in range(len(sizes)) for row in group_of(part, group)]
        if group_of(part, usage):
            assert group_of(part, generations)
        assert len(rows) <= 3 + 1
        written += [row for row in rows if row not in written or row[0] != generations]
    whole = [(group, row) for group in range(len(sizes)) for row in group_of(columns, group)]
    assert sorted(written, key=lambda row: row[0]) == sorted(whole, key=lambda row: row[0])
    before_usage = [row for row in written if row[0] < usage]
    assert before_usage == [row for row in whole if row[0] < usage]  # an old allocation goes before a new one comes
    assert len(parts) == max(1, -(-sum(sizes) // 3))
