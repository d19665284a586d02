"""The hosts of one cell, best first, drawn lazily; alternates from different compute services first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from random import Random

import numpy as np

from scheduler_worker.hosts.host_table import Floats, Rows

LEAST_CHUNK = 16  # ... of one cell

# (minus the score, a tie-breaker, position in the view): the smallest is the best.
Entry = tuple[float, float, int]


class ServiceRotation:
    """The hosts of one compute service as alternates: best first, and each once before any is repeated. A named host is
    not claimed and keeps its score, so all builds would otherwise name the same few hosts.
    """

    def __init__(self, service: int, positions: Rows, scores: Floats, rng: Random | None) -> None:
        self.service = service
        self._positions = positions
        self._scores = scores
        self._rng = rng
        self._heap: HostHeap | None = None  # made when the first host is picked: most rankings have few picks
        self._named: list[Entry] = []

    def draw(self, count: int) -> Iterator[Entry]:
        """The next hosts, up to this many."""
        if self._heap is None:
            self._heap = HostHeap(self._positions, self._scores, LEAST_CHUNK, self._rng)
        for _ in range(min(count, len(self._positions))):
            if self._heap.is_empty:
                for named in self._named:
                    self._heap.push(named)
                self._named.clear()
            entry = self._heap.draw()
            assert entry is not None
            self._named.append(entry)
            yield entry


class HostHeap:
    """The hosts of one cell, best first: a heap of the best ones, refilled from the rest chunk by chunk.

    Nothing is sorted before a host is drawn: most cells' heaps only have to give their best score.
    """

    def __init__(self, positions: Rows, scores: Floats, chunk: int, rng: Random | None) -> None:
        self.entries: list[Entry] = []
        self._rest = positions
        self._scores = scores
        self._chunk = chunk
        self._rng = rng
        self._is_rolled = rng is None or len(positions) <= chunk
        self._threshold = float(scores[positions].max()) if positions.size else -np.inf  # best score among the rest

    @property
    def is_empty(self) -> bool:
        """Whether no host is left."""
        return not self.entries and not self._rest.size

    @property
    def best_score(self) -> float:
        """The score of the best host, of one that has any."""
        return max(-self.entries[0][0], self._threshold) if self.entries else self._threshold

    def top(self) -> Entry:
        """The best host of one that has any, without taking it."""
        while not self.entries or -self.entries[0][0] < self._threshold:
            self._refill()
        return self.entries[0]

    def draw(self) -> Entry | None:
        """Take the best host."""
        if self.is_empty:
            return None
        self.top()
        return heapq.heappop(self.entries)

    def push(self, entry: Entry) -> None:
        """Put a host back."""
        heapq.heappush(self.entries, entry)

    def _refill(self) -> None:
        """Refill the heap with the best chunk of the rest."""
        rest = self._rest
        if not self._is_rolled:
            # Equal hosts beyond a chunk: the cut must differ between schedulers, or all of them claim the same chunk.
            assert self._rng is not None
            start, self._is_rolled = self._rng.randrange(len(rest)), True
            rest = np.concatenate((rest[start:], rest[:start]))
        if rest.size > self._chunk:
            cut = self._scores[rest].argpartition(rest.size - self._chunk)
            best, self._rest = rest[cut[rest.size - self._chunk :]], rest[cut[: rest.size - self._chunk]]
            self._threshold = float(self._scores[self._rest].max())
        else:
            best, self._rest, self._threshold = rest, rest[:0], -np.inf
        for position, weight in zip(best.tolist(), self._scores[best].tolist(), strict=True):
            tie = float(position) if self._rng is None else self._rng.random()
            self.entries.append((-weight, tie, position))
        heapq.heapify(self.entries)
