"""Which workers have sent a heartbeat, and when last. Pure: times come in."""

from __future__ import annotations

from msgspec import Struct

from bus.contracts.workers import STOPPED, WorkerHeartbeat, WorkerRecord, WorkersPage, WorkersQuery

MAX_WORKERS = 100_000  # workers kept; a bus that invents more is ignored
SILENT_AFTER = 3  # heartbeats missed
RETENTION_S = 3600.0  # a worker that was silent for so long is dropped


class KnownWorker(Struct, frozen=True):
    """The newest heartbeat of one worker, and when it was received (monotonic, seconds)."""

    heartbeat: WorkerHeartbeat
    last_seen_s: float


class WorkerTable:
    """The workers by bus, role and name. began_s: when listening began."""

    def __init__(self) -> None:
        self.began_s: float | None = None
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
        self._known[key] = KnownWorker(heartbeat, now_s)

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


def _record(one: KnownWorker, bus: str, now_s: float) -> WorkerRecord:
    last_seen_s = now_s - one.last_seen_s
    silent = last_seen_s > SILENT_AFTER * one.heartbeat.every_s
    return WorkerRecord(heartbeat=one.heartbeat, bus=bus, last_seen_s=last_seen_s, silent=silent)
