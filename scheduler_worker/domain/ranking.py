"""A ranking: the hosts that passed for one kind of request, best first, drawn from lazily.

Like requests of one batch share a ranking. Each pick is assumed in the book, so that the next one sees it (N-18),
and only the picked host is weighed again, on the scales of the ranking's start: a pick costs the same at 1,000 and
at 1,000,000 hosts.
"""

from __future__ import annotations

import heapq
from collections.abc import Container
from typing import Protocol

import numpy as np
from msgspec import Struct

from bus.contracts.build import FunnelStep
from bus.contracts.placement import ClaimOption
from placement_worker.replica.search import options
from scheduler_worker.domain.hosts import Rows
from scheduler_worker.domain.plugins import Weighing
from scheduler_worker.domain.view import HostsView
from scheduler_worker.domain.wanted import Wanted
from scheduler_worker.domain.weights import score, score_again

CHUNK = 128  # hosts sorted at a time; more are drawn in when these are used up
ALTERNATE_WALK = 64  # hosts looked at for alternates of the same cell; there may be fewer (C-7)


class Chance(Protocol):
    """A source of randomness, given by the caller."""

    def random(self) -> float:
        """Evenly in [0, 1)."""

    def randrange(self, stop: int, /) -> int:
        """Evenly in [0, stop)."""


class Candidate(Struct, frozen=True):
    """One host that fits, and what would be claimed there, best first."""

    row: int
    position: int
    score: float
    options: list[ClaimOption]


class Choice(Struct, frozen=True):
    """The host to claim, and those to try in its cell when the build fails there. `passed`: hosts to choose from."""

    selected: Candidate
    alternates: tuple[Candidate, ...]
    passed: int


class Ranking:
    """Hosts in order of weight; equal ones in an order of chance when `shuffle` (N-6), else as the book lists them."""

    def __init__(
        self,
        view: HostsView,
        wanted: Wanted,
        weighings: tuple[Weighing, ...],
        funnel: tuple[FunnelStep, ...],
        *,
        shuffle: bool,
        chance: Chance,
        max_options: int,
    ) -> None:
        self.view = view
        self.wanted = wanted
        self.funnel = funnel
        self._chance = chance
        self._shuffle = shuffle
        self._max_options = max_options
        self._cells = view.cell
        self._scores, self._scales = score(view, wanted, weighings)
        self._heap: list[tuple[float, float, int]] = []
        self._rest = self._start()
        self._threshold = np.inf if self._rest.size else -np.inf  # best score among the rest

    def __len__(self) -> int:
        return len(self.view)

    def pick(self, excluded: Container[int], *, subset: int, alternates: int) -> Choice | None:
        """The best host that still fits and is not excluded (rows of the book), with its alternates.

        `subset`: the choice is by chance among so many of the best (N-5).
        """
        drawn: list[tuple[float, float, int]] = []
        viable: list[Candidate] = []
        while len(viable) < subset and (found := self._next(excluded, drawn, self._max_options)):
            viable.append(found)
        if not viable:
            self._put_back(drawn)
            return None
        selected = viable.pop(self._chance.randrange(len(viable)) if len(viable) > 1 else 0)
        same_cell = self._alternates(selected, viable, excluded, drawn, alternates)
        self._put_back(drawn)
        return Choice(selected, same_cell, len(self.view))

    def consumed(self, candidate: Candidate) -> None:
        """A claim on this host was assumed in the book: weigh it again."""
        one = self.view.subset(np.array([candidate.position], dtype=np.intp))
        new = float(score_again(one, self.wanted, self._scales)[0])
        for at, (_, tie, position) in enumerate(self._heap):
            if position == candidate.position:
                self._heap[at] = (-new, tie, position)
                heapq.heapify(self._heap)
                break

    def _alternates(
        self,
        selected: Candidate,
        others: list[Candidate],
        excluded: Container[int],
        drawn: list[tuple[float, float, int]],
        wanted: int,
    ) -> tuple[Candidate, ...]:
        """Hosts of the selected one's cell, best first (C-7); not claimed, shared with other requests (C-8)."""
        cell = self._cells[selected.position]
        mine = [other for other in others if self._cells[other.position] == cell][:wanted]
        for _ in range(ALTERNATE_WALK):
            if len(mine) >= wanted:
                break
            found = self._next(excluded, drawn, 1, cell=int(cell))
            if found is None:
                break
            mine.append(found)
        return tuple(mine)

    def _next(
        self,
        excluded: Container[int],
        drawn: list[tuple[float, float, int]],
        limit: int,
        cell: int | None = None,
    ) -> Candidate | None:
        """Draw hosts until one fits; every host drawn is remembered, to be put back."""
        for _ in range(ALTERNATE_WALK if cell is not None else len(self.view) + 1):
            entry = self._draw()
            if entry is None:
                return None
            position = entry[2]
            row = int(self.view.rows[position])
            drawn.append(entry)
            if row in excluded or (cell is not None and self._cells[position] != cell):
                continue
            found = options(self.view.book, self.wanted.query, row, limit=limit)
            if found:
                return Candidate(row, position, -entry[0], found)
            drawn.pop()  # full by now, and within this batch it can only get fuller
        return None

    def _draw(self) -> tuple[float, float, int] | None:
        while not self._heap or -self._heap[0][0] < self._threshold:
            if not self._rest.size:
                break
            self._draw_in()
        return heapq.heappop(self._heap) if self._heap else None

    def _put_back(self, drawn: list[tuple[float, float, int]]) -> None:
        for entry in drawn:
            heapq.heappush(self._heap, entry)

    def _start(self) -> Rows:
        rest = np.arange(len(self.view), dtype=np.intp)
        if self._shuffle and len(self.view) > CHUNK:
            # Equal hosts beyond a chunk: where the list is cut must differ between schedulers, or all of them
            # race for the same chunk.
            rest = np.roll(rest, self._chance.randrange(len(self.view)))
        return rest

    def _draw_in(self) -> None:
        """Move the best chunk of the rest onto the heap."""
        rest = self._rest
        scores = self._scores[rest]
        if rest.size > CHUNK:
            cut = np.argpartition(scores, rest.size - CHUNK)
            best, self._rest = rest[cut[rest.size - CHUNK :]], rest[cut[: rest.size - CHUNK]]
            self._threshold = float(self._scores[self._rest].max())
        else:
            best, self._rest, self._threshold = rest, rest[:0], -np.inf
        for position in best.tolist():
            tie = self._chance.random() if self._shuffle else float(position)
            heapq.heappush(self._heap, (-float(self._scores[position]), tie, position))
