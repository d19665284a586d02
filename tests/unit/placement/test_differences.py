"""The differences of a provider's long lists are found without a comparison of each pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest

from placement_worker.store import inventory, rest_trees

MEMBERS = 2_000


class Member(str):
    """A name that counts the comparisons with others."""

    __slots__ = ()
    compared: ClassVar[list[int]] = [0]

    def __eq__(self, other: object) -> bool:
        self.compared[0] += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


Difference = Callable[[list[Member], list[Member]], tuple[list[object], list[object]]]


def members(first: int) -> list[Member]:
    return [Member(f"CUSTOM_{number}") for number in range(first, first + MEMBERS)]


def of_rest(before: list[Member], after: list[Member]) -> tuple[list[object], list[object]]:
    gone, come = rest_trees.difference([(1, before, after)], str)
    return [row["member"] for row in gone], [row["member"] for row in come]  # type: ignore[index]


def of_reports(before: list[Member], after: list[Member]) -> tuple[list[object], list[object]]:
    gone, come = inventory._difference([(1, before, after)])
    return [row[1] for row in gone], [row[1] for row in come]


@pytest.mark.parametrize("difference", [of_rest, of_reports])
def test_item_16_long_lists_of_members_are_not_compared_pair_by_pair(difference: Difference) -> None:
    before, after = members(0), members(MEMBERS // 2)
    Member.compared[0] = 0
    gone, come = difference(before, after)
    assert Member.compared[0] < 20 * MEMBERS
    assert gone == before[: MEMBERS // 2]
    assert come == after[MEMBERS // 2 :]
