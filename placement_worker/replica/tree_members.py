"""The members of trees that can give something to a request, tree by tree, best first, each with its signature."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from placement_worker.replica.book import Book
from placement_worker.replica.columns import Rows
from placement_worker.replica.trees import NO_ROW

# The slots of one word of a signature.
WORD_BITS = 62


class TreeMembers(Struct, frozen=True):
    """The properties of members, in any order. owners: the position of each one's tree among the roots, ascending.

    eligible: per slot, which of them can give it alone. limits: per contended class, the most that each can give in
    all. covers: the required traits each meets, as bits. trees: whose tree each is in, 0 for its owner's. room: how
    much of all that is requested it has.
    """

    rows: Rows
    owners: Rows
    eligible: NDArray[np.bool_]
    limits: NDArray[np.int64]
    covers: NDArray[np.int64] | None
    trees: NDArray[np.int64] | None
    room: NDArray[np.float64]


class OrderedMembers:
    """Members in order: tree by tree, ancestors before descendants, first those that can give most slots, like ones
    together, most room first.

    signatures: members with equal signatures are alike; where subtrees matter, a signature also has the position of the
    nearest ancestor.
    """

    def __init__(self, book: Book, members: TreeMembers, *, subtrees: bool) -> None:
        words = _signatures(members)
        nearest = _nearest_above(book, members.rows, members.owners) if subtrees else None
        order = _order(members, words, nearest)
        self.rows = members.rows[order]
        self.eligible = members.eligible[:, order]
        self.limits = members.limits[:, order]
        self.covers = None if members.covers is None else members.covers[order]
        self.trees = None if members.trees is None else members.trees[order]
        owners = members.owners[order]
        changes = (owners[1:] != owners[:-1]).nonzero()[0] + 1
        self._starts = np.concatenate([[0], changes])
        self._counts = np.concatenate([changes, [len(order)]]) - self._starts
        self._owners = owners[self._starts]
        columns = [word[order] for word in words]
        if nearest is not None:
            place = np.empty(len(order), dtype=np.intp)
            place[order] = np.arange(len(order)) - np.repeat(self._starts, self._counts)
            up = nearest[order]
            self._nearest = np.where(up == NO_ROW, NO_ROW, place[up])
            columns.append(self._nearest.astype(np.int64))
        self.signatures = columns[0][:, None] if len(columns) == 1 else np.stack(columns, axis=1)

    def alike(self) -> Iterator[tuple[bytes, Rows, NDArray[np.intp]]]:
        """Yield the groups of trees with equal members: a key, the positions of the trees, and for each tree the
        indices of its members.
        """
        if len(self._starts) == 1:
            yield self.signatures.tobytes(), self._owners, np.arange(len(self.rows))[None]
            return
        for many in sorted(set(self._counts.tolist())):
            trees = np.flatnonzero(self._counts == many)
            members = self._starts[trees][:, None] + np.arange(many)
            blob = np.ascontiguousarray(self.signatures[members]).tobytes()
            width = len(blob) // len(trees)
            groups: dict[bytes, list[int]] = {}
            for at in range(len(trees)):
                groups.setdefault(blob[at * width : (at + 1) * width], []).append(at)
            for key, chosen in groups.items():
                yield key, self._owners[trees[chosen]], members[chosen]

    def above(self, members: Rows) -> list[int]:
        """Per member of one tree, the bits of the member and of its ancestors that are members, too."""
        above: list[int] = []
        for at, up in enumerate(self._nearest[members].tolist()):  # ancestors come first
            above.append((1 << at) | (0 if up == NO_ROW else above[up]))
        return above


def kinds_of(signatures: NDArray[np.int64], above: Sequence[int]) -> list[int]:
    """Return the kind of each member. Members of one kind have equal signatures and, where subtrees matter, the same
    parent and no members below them.
    """
    with_some_below = 0
    for at, bits in enumerate(above):
        with_some_below |= bits & ~(1 << at)
    numbers: dict[object, int] = {}
    kinds = []
    for at, signature in enumerate(signatures.tolist()):
        key = (tuple(signature), at if with_some_below >> at & 1 else NO_ROW)
        kinds.append(numbers.setdefault(key, len(numbers)))
    return kinds


def _signatures(members: TreeMembers) -> list[NDArray[np.int64]]:
    """Return each member's signature as columns: the slots that it can give as bits, and all that it is like."""
    words = []
    for first in range(0, len(members.eligible), WORD_BITS):
        part = members.eligible[first : first + WORD_BITS]
        words.append((1 << np.arange(len(part))) @ part)
    return [*words, *members.limits, *(like for like in (members.covers, members.trees) if like is not None)]


def _order(members: TreeMembers, words: Sequence[NDArray[np.int64]], nearest: Rows | None) -> Rows:
    """Return the order of the members that OrderedMembers describes."""
    owners = members.owners
    keys = (members.rows, -members.room, *reversed(words), -members.eligible.sum(axis=0))
    if nearest is None:
        return np.lexsort((*keys, owners))
    depth = np.zeros(len(owners), dtype=np.int64)
    up = nearest
    while (deeper := up != NO_ROW).any():  # ends: each round goes up by one, and trees have no loops
        depth += deeper
        up = np.where(deeper, nearest[up], NO_ROW)
    rank = np.zeros(len(owners), dtype=np.int64)
    for level in range(int(depth.max(initial=0)) + 1):
        here = np.flatnonzero(depth == level)
        below = rank[nearest[here]] if level else np.zeros(len(here), dtype=np.int64)
        sorted_here = np.lexsort((*(key[here] for key in keys), below, owners[here]))
        rank[here[sorted_here]] = np.arange(len(here))
    return np.lexsort((rank, depth, owners))


def _nearest_above(book: Book, rows: Rows, owners: Rows) -> Rows:
    """Per member, the index of its nearest ancestor among the members of the same tree; NO_ROW when there is none."""
    keys = owners * book.size + rows
    order = np.argsort(keys)
    ordered = keys[order]
    nearest = np.full(len(rows), NO_ROW, dtype=np.intp)
    open_ones = np.arange(len(rows))
    up = book.parent[rows].astype(np.intp)
    for _ in range(len(book)):
        going = up != NO_ROW
        open_ones, up = open_ones[going], up[going]
        if not open_ones.size:
            break
        wanted = owners[open_ones] * book.size + up
        place = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
        hit = ordered[place] == wanted
        nearest[open_ones[hit]] = order[place[hit]]
        open_ones, up = open_ones[~hit], book.parent[up[~hit]].astype(np.intp)
    return nearest
