"""The cell to choose in next, among hosts of equal weight: one cell at a time, so that a cell's batches are large.

A scheduler sends the choices of one round to each chosen cell as one batch, which passes the cell's conductor, database
and compute services, and a batch costs about as much as 25 of its items. Ten boots that are spread over four cells cost
four batches; in one cell they cost one. So equal hosts are taken from one cell in a run, and the next run goes to the
cell whose last run is the oldest: over all runs equal cells take equal shares.
"""

from __future__ import annotations

# Choices in one run. Longer runs would leave other cells idle at full load, and save little: a batch of this size costs
# a third more than its items would in the largest batch.
LONGEST_RUN = 64


class CellRuns:
    """The runs of one scheduler, from round to round. Cells are given by their index in the host table."""

    __slots__ = ("_cell", "_last", "_left", "_runs")

    def __init__(self) -> None:
        self._cell: int | None = None
        self._left = 0  # choices in the current run
        self._runs = 0
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
            self._runs += 1
            self._cell, self._left = cell, LONGEST_RUN
            self._last[cell] = self._runs
        self._left -= 1
        if not self._left:
            self._cell = None
