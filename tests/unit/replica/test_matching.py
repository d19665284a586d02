"""Matching slots to members, against all ways to do so."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from placement_worker.replica.matching import can_match


@given(st.lists(st.integers(0, 2**6 - 1), max_size=6))
def test_as_if_all_ways_were_tried(choices: list[int]) -> None:
    ways = permutations(range(6), len(choices))
    some = any(all(mask >> bit & 1 for mask, bit in zip(choices, way, strict=True)) for way in ways)
    assert can_match(choices) is some


def test_a_long_chain_moves_up_by_one() -> None:
    """Every slot wants its own member or the next; the last has only the first."""
    count = 60
    chain = [1 << at | 1 << (at + 1) for at in range(count)]
    assert can_match([*chain, 1])
    assert not can_match([*chain, 1, 1])
