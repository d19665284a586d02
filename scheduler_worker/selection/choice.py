"""The choice of a host and its alternates (`Choice`), among near-best hosts (`Spread`), one cell at a time."""

from __future__ import annotations

from collections.abc import Container, Mapping

from msgspec import Struct

from bus.contracts.placement import ClaimOption

MEMORY = 0.8  # the weight of the past after a round of claims: a burst of conflicts fades within some ten rounds
MAX_SUBSET = 64  # hosts: contention widens a choice up to so many
MAX_OPTIONS = 4  # candidate allocations of one host that one claim tries in turn


class Spread(Struct, frozen=True):
    """The share of recent claims that were lost to others, 0 to 1, smoothed.

    Contention widens the choice among near-best hosts: a scheduler that keeps losing claims chooses others.
    """

    lost: float = 0.0

    def after(self, claims: int, lost: int) -> Spread:
        """The share after one more round of claims."""
        if not claims:
            return self
        return Spread(MEMORY * self.lost + (1.0 - MEMORY) * lost / claims)

    def subset(self, least: int, most: int = MAX_SUBSET) -> int:
        """How many of the best hosts a choice is drawn from."""
        return max(least, round(self.lost * most))


class CellBatching:
    """The cell to choose in next among hosts of equal weight: one cell at a time, so that its batches are large
    (docs/concepts/performance.md). The next cell is the one used longest ago, so equal cells take equal shares. One per
    scheduler; cells by their index in the host table. most: choices in a row from one cell.
    """

    __slots__ = ("_batches", "_cell", "_last", "_most", "_remaining")

    def __init__(self, most: int) -> None:
        self._most = most
        self._cell: int | None = None
        self._remaining = most  # choices in the current run
        self._batches = 0
        self._last: dict[int, int] = {}  # the number of each cell's last run; bounded by the cells

    def begin_round(self) -> None:
        """End the current run: the round's choices are sent together, and those of the next round are not."""
        self._cell = None

    def place(self, cell: int) -> int:
        """The place of a cell in the order in which equal hosts are chosen from; the lowest comes first."""
        return -1 if cell == self._cell else self._last.get(cell, 0)

    def chose(self, cell: int) -> None:
        """Count a choice of a host in this cell."""
        if cell != self._cell:
            self._batches += 1
            self._cell, self._remaining = cell, self._most
            self._last[cell] = self._batches
        self._remaining -= 1
        if not self._remaining:
            self._cell = None


NONE_FULL: Container[int] = ()


class RankedHost(Struct, frozen=True):
    """One host that fits, and what would be claimed there, best first."""

    uuid: str  # identifies the host for good
    row: int  # of the replica, valid at this moment only: after a host has left, its row may be another's
    position: int
    score: float
    options: list[ClaimOption]
    service: str  # that manages it at this moment


Weights = Mapping[str, float]
"""{weigher: what a host weighs by it}, without those that are equal for all hosts."""


class Choice(Struct, frozen=True):
    """The host to claim, and those to try in its cell when the build fails there."""

    selected: RankedHost
    alternates: tuple[RankedHost, ...]
    passing_hosts: int  # hosts to choose from
    # of the selected host and each alternate, at the time of the choice; empty: only one passed
    weights: tuple[Weights, ...] = ()

    @property
    def weights_of_hosts(self) -> dict[str, Weights]:
        """The weights, by host."""
        return dict(zip((host.uuid for host in (self.selected, *self.alternates)), self.weights, strict=False))
