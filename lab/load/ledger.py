"""The end of every boot (or delete) of a run, a row each, in columns that stay small for millions."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable

from lab.load.plan import is_metal
from lab.load.record import OUTCOMES, Column, Operations

_OUTCOME = {name: index for index, name in enumerate(OUTCOMES)}
UNSENT, OPEN, LOST, BACKPRESSURE = (_OUTCOME[name] for name in ("unsent", "open", "lost", "backpressure"))
NEVER = math.nan
UNKNOWN = -1
# Times are kept to the microsecond: what follows is noise, and doubles the file.
DIGITS = 6


class Table:
    """Strings that repeat, each kept once. `first`: what index 0 means."""

    def __init__(self, *first: str) -> None:
        self.names: list[str] = list(first)
        self._index = {name: index for index, name in enumerate(first)}

    def index(self, name: str) -> int:
        """The index of a string, new or known."""
        found = self._index.get(name)
        if found is None:
            found = self._index[name] = len(self.names)
            self.names.append(name)
        return found


class LoadLedger:
    """Rows by instance. Times are handed in as the client's monotonic clock; `start` makes them seconds of the run."""

    def __init__(self) -> None:
        self.start = 0.0
        self.rows: dict[str, int] = {}
        self.uuids: list[str] = []
        self.flavors, self.codes, self.cells, self.hosts = Table(), Table(""), Table(""), Table("")
        self.intended, self.sent, self.accepted, self.ended = (array("d") for _ in range(4))
        self.outcome, self.flavor, self.code, self.cell, self.host = (array("l") for _ in range(5))
        self.attempts, self.conflicts, self.again = (array("l") for _ in range(3))
        self.stages: dict[str, array[float]] = {}
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.uuids)

    def add(self, uuid: str, flavor: str, intended: float) -> int:
        """A new row, not sent yet."""
        row = self.rows[uuid] = len(self.uuids)
        self.uuids.append(uuid)
        self.intended.append(intended)
        for times in (self.sent, self.accepted, self.ended, *self.stages.values()):
            times.append(NEVER)
        self.flavor.append(self.flavors.index(flavor))
        self.outcome.append(UNSENT)
        self.conflicts.append(UNKNOWN)
        for numbers in (self.code, self.cell, self.host, self.attempts, self.again):
            numbers.append(0)
        self.counts["unsent"] += 1
        return row

    def set_outcome(self, row: int, outcome: str) -> None:
        """Move a row from one outcome to another."""
        self.counts[OUTCOMES[self.outcome[row]]] -= 1
        self.counts[outcome] += 1
        self.outcome[row] = _OUTCOME[outcome]

    def is_unsent(self, row: int) -> bool:
        """Whether the broker has not confirmed it, and its end has not come either."""
        return self.outcome[row] == UNSENT

    def mark_confirmed(self, row: int, at: float) -> None:
        """The broker has it."""
        self.sent[row] = at
        if self.is_unsent(row):  # its end may have come before its confirm
            self.set_outcome(row, "open")

    def record_stage(self, row: int, stage: str, seconds: float) -> None:
        """How long it spent in a stage."""
        times = self.stages.get(stage)
        if times is None:
            times = self.stages[stage] = array("d", [NEVER]) * len(self.uuids)
        times[row] = seconds

    def abandon(self, as_outcome: Callable[[str], str]) -> None:
        """End what is still open by the outcome of its instance."""
        for row in [row for row, outcome in enumerate(self.outcome) if outcome == OPEN]:
            self.set_outcome(row, as_outcome(self.uuids[row]))

    def operations(self) -> Operations:
        """The columns as the record has them."""
        return Operations(
            flavors=list(self.flavors.names),
            kinds=["metal" if is_metal(name) else "vm" for name in self.flavors.names],
            codes=list(self.codes.names),
            cells=list(self.cells.names),
            hosts=list(self.hosts.names),
            instance_uuid=list(self.uuids),
            intended_s=[round(at - self.start, DIGITS) for at in self.intended],
            sent_s=self._times(self.sent),
            accepted_s=self._times(self.accepted),
            ended_s=self._times(self.ended),
            outcome=list(self.outcome),
            flavor=list(self.flavor),
            code=list(self.code),
            cell=list(self.cell),
            host=list(self.host),
            attempts=list(self.attempts),
            conflicts=[None if number == UNKNOWN else number for number in self.conflicts],
            again=list(self.again),
            stages={name: _known(times) for name, times in self.stages.items()},
        )

    def _times(self, times: Iterable[float]) -> Column:
        return [None if math.isnan(at) else round(at - self.start, DIGITS) for at in times]


def _known(seconds: Iterable[float]) -> Column:
    return [None if math.isnan(value) else round(value, DIGITS) for value in seconds]
