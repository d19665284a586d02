"""Decides whether every slot can have a member of its own: a bipartite matching (Kuhn's algorithm on bits)."""

from __future__ import annotations

from collections.abc import Sequence


def can_match(choices: Sequence[int]) -> bool:
    """Whether each slot can be given one of its choices (members as bits) and no member is used twice."""
    holders: dict[int, int] = {}  # member's bit -> the slot that has it
    taken = 0
    for slot, members in enumerate(choices):
        free = members & ~taken
        if free:
            bit = free & -free
            holders[bit] = slot
            taken |= bit
        elif not _augment(slot, choices, holders):
            return False
        else:
            taken = sum(holders)
    return True


def _augment(slot: int, choices: Sequence[int], holders: dict[int, int]) -> bool:
    """Find an augmenting path, breadth first: slots that each change to another member, so that the first slot gets
    one.
    """
    came_from: dict[int, int] = {}  # member's bit -> the slot that would take the member
    frontier = [slot]
    seen = 0
    while frontier:  # ends: each member is visited once
        onward = []
        for taker in frontier:
            fresh = choices[taker] & ~seen
            seen |= fresh
            while fresh:
                bit = fresh & -fresh
                fresh ^= bit
                came_from[bit] = taker
                if bit not in holders:
                    _flip_path(bit, slot, came_from, holders)
                    return True
                onward.append(holders[bit])
        frontier = onward
    return False


def _flip_path(bit: int, first: int, came_from: dict[int, int], holders: dict[int, int]) -> None:
    """Assign the members along the path: each slot takes its new member and leaves its former one to the slot before
    it.
    """
    while True:  # ends: a path visits a member once
        taker = came_from[bit]
        had = next((held for held, holder in holders.items() if holder == taker), None)
        holders[bit] = taker
        if taker == first or had is None:
            return
        del holders[had]
        bit = had
