"""The members of all trees that matter for a request, tree by tree, best first, each with its signature."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from placement_worker.replica.book import Book
from placement_worker.replica.columns import Rows
from placement_worker.replica.rows import NOBODY

# Bits of a signature's word that are used.
WORD_BITS = 62


class Members(Struct, frozen=True):
    """What is said of members, in any order. owners: the position of each one's tree among the roots.

    eligible: per slot, who can give it alone. limits: per contended class, the most that each can give in all.
    covers: the required traits each meets, as bits. trees: whose tree each is in, 0 for its owner's. room: how much
    of all that is asked it has. bits: how many bits of a signature a limit, a cover and a tree take.
    """

    rows: Rows
    owners: Rows
    eligible: NDArray[np.bool_]
    limits: NDArray[np.int64]
    covers: NDArray[np.int64]
    trees: NDArray[np.int64]
    room: NDArray[np.float64]
    bits: tuple[tuple[int, ...], int, int]


class Field:
    """Members in order: tree by tree, ancestors before descendants, like ones together, most room first.

    codes: what makes two members alike; where subtrees matter, also the place of the nearest ancestor.
    """

    def __init__(self, book: Book, members: Members, *, subtrees: bool) -> None:
        words = _packed(members)
        nearest = _nearest_above(book, members.rows, members.owners) if subtrees else None
        order = _order(members, words, nearest)
        self.rows = members.rows[order]
        self.eligible = members.eligible[:, order]
        self.limits = members.limits[:, order]
        self.covers = members.covers[order]
        self.trees = members.trees[order]
        owners = members.owners[order]
        first = np.ones(len(order), dtype=np.bool_)
        np.not_equal(owners[1:], owners[:-1], out=first[1:])
        self._starts = np.flatnonzero(first)
        self._counts = np.empty_like(self._starts)
        self._counts[:-1] = self._starts[1:] - self._starts[:-1]
        self._counts[-1] = len(order) - self._starts[-1]
        self._owners = owners[self._starts]
        columns = [word[order] for word in words]
        if nearest is not None:
            place = np.empty(len(order), dtype=np.intp)
            place[order] = np.arange(len(order)) - np.repeat(self._starts, self._counts)
            up = nearest[order]
            self._nearest = np.where(up == NOBODY, NOBODY, place[up])
            columns.append(self._nearest.astype(np.int64))
        self.codes = np.stack(columns, axis=1)

    def alike(self) -> Iterator[tuple[bytes, Rows, NDArray[np.intp]]]:
        """Trees that look the same: a key of the looks, the trees' positions, and per tree its members as indices."""
        for many in sorted(set(self._counts.tolist())):
            trees = np.flatnonzero(self._counts == many)
            members = self._starts[trees][:, None] + np.arange(many)
            blob = np.ascontiguousarray(self.codes[members]).tobytes()
            width = len(blob) // len(trees)
            groups: dict[bytes, list[int]] = {}
            for at in range(len(trees)):
                groups.setdefault(blob[at * width : (at + 1) * width], []).append(at)
            for key, chosen in groups.items():
                yield key, self._owners[trees[chosen]], members[chosen]

    def above(self, members: Rows) -> list[int]:
        """Per member of one tree, itself and those of its ancestors that are members too, as bits."""
        above: list[int] = []
        for at, up in enumerate(self._nearest[members].tolist()):  # ancestors come first
            above.append((1 << at) | (0 if up == NOBODY else above[up]))
        return above


def kinds_of(codes: NDArray[np.int64], above: Sequence[int]) -> list[int]:
    """Members alike in signature and, where it matters, in place: under the same parent, with nobody below."""
    with_some_below = 0
    for at, bits in enumerate(above):
        with_some_below |= bits & ~(1 << at)
    numbers: dict[object, int] = {}
    kinds = []
    for at, code in enumerate(codes.tolist()):
        key = (tuple(code), at if with_some_below >> at & 1 else NOBODY)
        kinds.append(numbers.setdefault(key, len(numbers)))
    return kinds


def _packed(members: Members) -> list[NDArray[np.int64]]:
    """Each member's signature, in as few words as hold it."""
    limit_bits, cover_bits, tree_bits = members.bits
    fields: list[tuple[NDArray[np.generic], int]] = [(flags, 1) for flags in members.eligible]
    fields += zip(members.limits, limit_bits, strict=True)
    fields += [(members.covers, cover_bits)] if cover_bits else []
    fields += [(members.trees, tree_bits)] if tree_bits else []
    words = [np.zeros(len(members.rows), dtype=np.int64)]
    used = 0
    for values, bits in fields:
        if used + bits > WORD_BITS:
            words.append(np.zeros(len(members.rows), dtype=np.int64))
            used = 0
        words[-1] |= values.astype(np.int64) << used
        used += bits
    return words


def _order(members: Members, words: Sequence[NDArray[np.int64]], nearest: Rows | None) -> Rows:
    """See Field."""
    owners = members.owners
    keys = (members.rows, -members.room, *reversed(words))
    if nearest is None:
        return np.lexsort((*keys, owners))
    depth = np.zeros(len(owners), dtype=np.int64)
    up = nearest
    while (deeper := up != NOBODY).any():  # ends: each round goes up by one, and trees have no loops
        depth += deeper
        up = np.where(deeper, nearest[up], NOBODY)
    rank = np.zeros(len(owners), dtype=np.int64)
    for level in range(int(depth.max(initial=0)) + 1):
        here = np.flatnonzero(depth == level)
        below = rank[nearest[here]] if level else np.zeros(len(here), dtype=np.int64)
        sorted_here = np.lexsort((*(key[here] for key in keys), below, owners[here]))
        rank[here[sorted_here]] = np.arange(len(here))
    return np.lexsort((rank, depth, owners))


def _nearest_above(book: Book, rows: Rows, owners: Rows) -> Rows:
    """Per member, the index of its nearest ancestor that is a member of the same tree too; NOBODY without one."""
    keys = owners * book.size + rows
    order = np.argsort(keys)
    ordered = keys[order]
    nearest = np.full(len(rows), NOBODY, dtype=np.intp)
    open_ones = np.arange(len(rows))
    up = book.parent[rows].astype(np.intp)
    for _ in range(len(book)):
        going = up != NOBODY
        open_ones, up = open_ones[going], up[going]
        if not open_ones.size:
            break
        wanted = owners[open_ones] * book.size + up
        place = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
        hit = ordered[place] == wanted
        nearest[open_ones[hit]] = order[place[hit]]
        open_ones, up = open_ones[~hit], book.parent[up[~hit]].astype(np.intp)
    return nearest
