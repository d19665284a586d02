"""The differences of a provider's long lists are found without a comparison of each pair."""

from __future__ import annotations

from typing import ClassVar

from placement_worker.store import trees

MEMBERS = 2_000


class Member(str):
    """A name that counts the comparisons with others."""

    __slots__ = ()
    compared: ClassVar[list[int]] = [0]

    def __eq__(self, other: object) -> bool:
        self.compared[0] += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def members(first: int) -> list[Member]:
    return [Member(f"CUSTOM_{number}") for number in range(first, first + MEMBERS)]


def test_item_16_long_lists_of_members_are_not_compared_pair_by_pair() -> None:
    before, after = members(0), members(MEMBERS // 2)
    Member.compared[0] = 0
    gone, come = trees.difference([(1, before, after)], str)
    assert Member.compared[0] < 20 * MEMBERS
    assert [row["member"] for row in gone] == before[: MEMBERS // 2]
    assert [row["member"] for row in come] == after[MEMBERS // 2 :]
