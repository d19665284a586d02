"""Numbers about hosts as columns, each with the time until which it counts. Publishers' wall-clock times become ages on
arrival, so setting a clock here makes nothing fresh or stale. Pure: times come in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bus.contracts.host_metrics import HostMetric, HostMetrics
from scheduler_worker.hosts.host_table import Floats, HostTable, Rows

MAX_METRICS = 64  # names kept in all; the settings' own always have a place
MAX_SOURCES = 1000
GROWTH = 2  # a column grows by at least one part in so many
MAX_AHEAD_S = 30.0  # a publisher's clock may be ahead by this much; a number that is later is dropped

TAKEN, STALE, AHEAD, OLDER = "taken", "stale", "ahead", "older"
UNKNOWN_HOST, FOREIGN, TOO_MANY = "unknown_host", "foreign", "too_many"

NO_NUMBERS: Floats = np.empty(0)


class _Column:
    """One metric of all hosts, by index of the host table."""

    __slots__ = ("at", "expires_s", "source", "value")

    def __init__(self) -> None:
        self.value: Floats = NO_NUMBERS
        self.at: Floats = NO_NUMBERS
        self.expires_s: Floats = NO_NUMBERS  # monotonic; NaN: there is no number
        self.source: npt.NDArray[np.int32] = NO_NUMBERS.astype(np.int32)

    def grow(self, size: int) -> None:
        more = size - len(self.value)
        if more > 0:
            self.value = _longer(self.value, more, np.nan)
            self.at = _longer(self.at, more, np.nan)
            self.expires_s = _longer(self.expires_s, more, np.nan)
            self.source = _longer(self.source, more, -1)


class _Number(NamedTuple):
    value: float
    at: float
    source: int
    expires_s: float


class HostMetricsTable:
    """The newest numbers of the hosts of a host table."""

    def __init__(self, table: HostTable, *, max_age_s: float, reserved: Sequence[str] = ()) -> None:
        self._table = table
        self._max_age_s = max_age_s  # an older one is unknown
        self._reserved = frozenset(reserved)  # metrics that are kept however many others are published
        self._columns: dict[str, _Column] = {}
        self._sources: list[str] = []
        self._source_index: dict[str, int] = {}
        self._now_s = -np.inf

    def __len__(self) -> int:
        return len(self._columns)

    def apply(self, message: HostMetrics, cell: str | None, *, now: float, now_s: float) -> Counter[str]:
        """Take the numbers over; returns how many had which outcome. cell: on whose bus the message came (None: the API
        bus). now: wall-clock time in seconds; now_s: monotonic time.
        """
        outcomes: Counter[str] = Counter()
        self._now_s = max(self._now_s, now_s)
        source = self._index_of_source(message.source)
        for reading in message.readings:
            index = self._table.index_of(reading.host_uuid)
            age_s = now - reading.at
            if index is None:
                reason = UNKNOWN_HOST
            elif cell is not None and self._table.last_cell_of(reading.host_uuid) != cell:
                reason = FOREIGN
            elif age_s < -MAX_AHEAD_S:
                reason = AHEAD
            elif age_s >= self._max_age_s:
                reason = STALE
            else:
                for name, value in reading.values.items():
                    expires_s = now_s + self._max_age_s - max(age_s, 0.0)
                    outcomes[self._put(name, index, _Number(value, reading.at, source, expires_s))] += 1
                continue
            outcomes[reason] += len(reading.values)
        return outcomes

    def put_column(self, name: str, index: Rows, values: Floats, *, at: float, source: str, expires_s: float) -> None:
        """Take one metric of some hosts over, instead of what was known; NaN: they have none. name: the caller's own.
        at: wall-clock time in seconds; expires_s: monotonic time from which the numbers do not count.
        """
        column = self._columns.setdefault(name, _Column())
        column.grow(len(self._table))
        column.value[index], column.at[index] = values, at
        column.source[index] = np.where(np.isnan(values), -1, self._index_of_source(source))
        column.expires_s[index] = expires_s

    def increment(self, name: str, index: int, by: float = 1.0) -> None:
        """Add `by` to a number of a host, if it is known."""
        column = self._columns.get(name)
        if column is not None and index < len(column.value):
            column.value[index] += by  # of NaN it stays NaN

    def advance(self, now_s: float) -> None:
        """Numbers count by their age at this time from now on (monotonic, seconds)."""
        self._now_s = max(self._now_s, now_s)

    def metric_of(self, index: Rows) -> dict[str, Floats]:
        """{metric: the numbers of these hosts, as `values` has them}, of all metrics that are kept."""
        return {name: self.values(name, index) for name in sorted(self._columns)}

    def values(self, name: str, index: Rows) -> Floats:
        """One metric of these hosts, by index of the host table (negative: not reported); NaN: not known."""
        found = np.full(len(index), np.nan)
        column = self._columns.get(name)
        if column is None:
            return found
        there = (index >= 0) & (index < len(column.value))
        at = index[there]
        found[there] = np.where(column.expires_s[at] > self._now_s, column.value[at], np.nan)
        return found

    def of(self, index: int) -> tuple[HostMetric, ...]:
        """All numbers of one host, stale ones too, by name."""
        return tuple(
            HostMetric(
                name=name,
                value=float(column.value[index]),
                at=float(column.at[index]),
                source=self._sources[int(column.source[index])],
                fresh=bool(column.expires_s[index] > self._now_s),
            )
            for name, column in sorted(self._columns.items())
            if index < len(column.value) and column.source[index] >= 0
        )

    def _put(self, name: str, index: int, number: _Number) -> str:
        column = self._columns.get(name)
        if column is None:
            others = len(self._columns.keys() - self._reserved)
            if name not in self._reserved and others >= MAX_METRICS - len(self._reserved):
                return TOO_MANY
            column = self._columns[name] = _Column()
        column.grow(len(self._table))
        # A number from a clock that was ahead stays until it is stale by our own clock, and no longer.
        if number.at < column.at[index] and column.expires_s[index] > self._now_s:
            return OLDER
        column.value[index], column.at[index] = number.value, number.at
        column.source[index], column.expires_s[index] = number.source, number.expires_s
        return TAKEN

    def _index_of_source(self, source: str) -> int:
        if source not in self._source_index and len(self._sources) >= MAX_SOURCES - 1:
            source = "other"  # the last place is shared by all further ones
        at = self._source_index.setdefault(source, len(self._sources))
        if at == len(self._sources):
            self._sources.append(source)
        return at


def _longer(column: npt.NDArray[Any], more: int, fill: float) -> npt.NDArray[Any]:
    # In steps, so that a fleet that is reported host by host is not copied for each host.
    room = max(more, len(column) // GROWTH)
    return np.concatenate([column, np.full(room, fill, dtype=column.dtype)])
