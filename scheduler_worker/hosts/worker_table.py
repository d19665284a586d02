"""The workers that send heartbeats, and which of them are silent. Pure: times come in."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.workers import STOPPED, WorkerHeartbeat, WorkerRecord, WorkersPage, WorkersQuery

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
