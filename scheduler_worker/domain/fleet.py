"""What is reported besides hosts, and kept in memory: numbers about hosts as columns, with until when each counts;
builds that wait for the managers of their hosts; workers. Publishers' wall-clock times become ages on arrival, so
setting a clock here makes nothing fresh or stale. Pure: times come in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.build import BuildRecord, BuildState, TimelineEntry
from bus.contracts.host_metrics import HostMetric, HostMetrics
from bus.contracts.waiting import BuildsWaiting, WaitingBuild
from bus.contracts.workers import STOPPED, WorkerHeartbeat, WorkerRecord, WorkersPage, WorkersQuery
from scheduler_worker.domain.hosts import Floats, HostTable, Rows

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

    def advance(self, now_s: float) -> None:
        """Numbers count by their age at this time from now on (monotonic, seconds)."""
        self._now_s = now_s

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


MAX_SERVICES = 10_000  # services with waiting builds; a bus that invents more is ignored
WAITING = "waiting"  # in a timeline


class ReportedWaits(Struct, frozen=True):
    """The report of one service, by instance, and until when it holds (monotonic, seconds)."""

    waiting: dict[str, WaitingBuild]
    until_s: float


class WaitingTable:
    """The waiting builds by cell and service."""

    def __init__(self) -> None:
        self._reported: dict[tuple[str, str], ReportedWaits] = {}

    def apply(self, message: BuildsWaiting, now_s: float) -> None:
        """Take one report in: it replaces the service's last one."""
        key = message.cell, message.service
        self._reported.pop(key, None)
        for old in [one for one, kept in self._reported.items() if kept.until_s <= now_s]:
            del self._reported[old]
        if message.waiting and len(self._reported) < MAX_SERVICES:
            waiting = {one.instance_uuid: one for one in message.waiting}
            self._reported[key] = ReportedWaits(waiting, now_s + message.lasts_s)

    def line_of(self, build: BuildRecord, now_s: float) -> TimelineEntry | None:
        """The last line of the timeline of a build under way: what it waits for; None: nothing is known.

        A cell reports its own builds only, and an attempt that has ended waits no more.
        """
        if build.state != BuildState.BUILDING:
            return None
        for (cell, service), reported in self._reported.items():
            found = reported.waiting.get(build.instance_uuid)
            if cell != build.cell or found is None or reported.until_s <= now_s:
                continue
            if any(one.attempt >= found.attempt and one.outcome for one in build.history):
                continue
            return TimelineEntry(at=found.since, actor=f"compute {service}", what=WAITING, detail=found.reason)
        return None


MAX_WORKERS = 100_000  # workers kept; a bus that invents more is ignored
SILENT_AFTER = 3  # heartbeats missed
RETENTION_S = 3600.0  # a worker that was silent for so long is dropped


class KnownWorker(Struct, frozen=True):
    """The newest heartbeat of one worker, when the first and this one were received (monotonic, seconds), and whether
    it has taken the place of another one.
    """

    heartbeat: WorkerHeartbeat
    first_seen_s: float
    last_seen_s: float
    succeeds: bool = False


class WorkerTable:
    """The workers by bus, role and name."""

    def __init__(self) -> None:
        self.began_s: float | None = None  # when listening began
        self._known: dict[tuple[str, str, str], KnownWorker] = {}

    def __len__(self) -> int:
        return len(self._known)

    def apply(self, heartbeat: WorkerHeartbeat, bus: str, now_s: float) -> None:
        """Take one heartbeat in."""
        if self.began_s is None:
            self.began_s = now_s
        key = heartbeat.role, bus, heartbeat.worker
        if heartbeat.phase == STOPPED:
            self._known.pop(key, None)
            return
        if key not in self._known and len(self._known) >= MAX_WORKERS:
            self._purge(now_s)
            if len(self._known) >= MAX_WORKERS:
                return
        last = self._known.get(key)
        first_s, succeeds = (now_s, False) if last is None else (last.first_seen_s, last.succeeds)
        self._known[key] = KnownWorker(heartbeat, first_s, now_s, succeeds)

    def page(self, query: WorkersQuery, now_s: float) -> WorkersPage:
        """The workers that a query selects, by role, bus and name."""
        self._purge(now_s)
        found = [key for key in sorted(self._known) if query.role in (None, key[0])][: query.limit]
        return WorkersPage(
            workers=tuple(_record(self._known[key], key[1], now_s) for key in found),
            since_s=0.0 if self.began_s is None else now_s - self.began_s,
        )

    def _purge(self, now_s: float) -> None:
        gone = [key for key, one in self._known.items() if now_s - one.last_seen_s > RETENTION_S]
        for key in gone:
            del self._known[key]
        self._drop_succeeded(now_s)

    def _drop_succeeded(self, now_s: float) -> None:
        """Drop each silent worker for which another one of its role was started on its machine since: a process that
        was killed comes back under another name, and nobody has to do anything about the former one.
        """
        silent: list[tuple[tuple[str, str, str], KnownWorker]] = []
        heirs: dict[tuple[str, str, str], list[tuple[str, str, str]]] = {}
        for key, one in self._known.items():
            if _is_silent(one, now_s):
                silent.append((key, one))
            elif not one.succeeds:
                heirs.setdefault((*key[:2], one.heartbeat.host), []).append(key)
        for key, one in sorted(silent, key=lambda found: found[1].last_seen_s):
            of_place = heirs.get((*key[:2], one.heartbeat.host), [])
            heir = next((other for other in of_place if _succeeds(self._known[other], one)), None)
            if heir is not None:
                of_place.remove(heir)
                self._known[heir] = replace(self._known[heir], succeeds=True)
                del self._known[key]


def _is_silent(one: KnownWorker, now_s: float) -> bool:
    return now_s - one.last_seen_s > SILENT_AFTER * one.heartbeat.every_s


def _succeeds(one: KnownWorker, other: KnownWorker) -> bool:
    return one.first_seen_s > other.last_seen_s and one.heartbeat.started_at > other.heartbeat.started_at


def _record(one: KnownWorker, bus: str, now_s: float) -> WorkerRecord:
    last_seen_s = now_s - one.last_seen_s
    silent = _is_silent(one, now_s)
    return WorkerRecord(heartbeat=one.heartbeat, bus=bus, last_seen_s=last_seen_s, silent=silent)
