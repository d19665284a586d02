"""Queries cells about requests that have had no event for a long time. Any number of schedulers do so side by side.

A request is a build, the delete of one, or a move. A cell that has lost it, or its end, answers with an end
(`cell.build.query.v1`, `cell.move.query.v1`), or carries the delete out that it is commanded once more. One that does
not answer is queried again, less and less often; the record of the request states it, and a metric counts them.

The only state kept is how long each has been silent; a scheduler that starts again begins to count anew. Moves under
way have an index. Builds have none that changes: each pass examines a page of all builds, the next pass the next one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import structlog
from msgspec.structs import replace

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.build import TimelineEntry
from bus.faults import Transient
from bus.port import BusError
from scheduler_worker import metrics
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.builds import Author, BuildUpdate, OpenBuild
from scheduler_worker.domain.recorded_moves import RecordedMove
from scheduler_worker.domain.unanswered import OpenRequest, R, Watched, Watching, look, marked, message_to_cell
from scheduler_worker.store.port import FIRST_UUID, SchedulerStore

log = structlog.get_logger(__name__)

LOOKS = 4  # passes in the time after which a cell is queried
PAGE = 500  # requests read at a time
MAX_WATCHED = 10_000  # requests of each kind whose silence one process keeps track of; the rest is looked at later
MAX_EXAMINED = 5_000  # builds of one pass, in whatever state
FROM_THE_FIRST = (0.0, FIRST_UUID)


class UnansweredRequests:
    """The task of one scheduler. cells: the bus of each; after_s: seconds without an event after which a cell is
    queried.
    """

    def __init__(
        self,
        store: SchedulerStore,
        cells: Mapping[str, Bus],
        config: Callable[[], SchedulerConfig],
        *,
        clock: Clock,
        rng: random.Random,
        after_s: float,
        process: str = "",
    ) -> None:
        """`config()`: the settings and operators' objects that are in force now."""
        self._store = store
        self._cells = cells
        self._config = config
        self._clock = clock
        self._rng = rng
        self._after_s = after_s
        self._who = process or "scheduler"
        self._moves: dict[str, Watched] = {}
        self._builds: dict[str, Watched] = {}
        self._examined = FROM_THE_FIRST  # the last build of the page before

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            # The answer to the first scheduler's query resets the count of the others.
            await self._clock.sleep(self._after_s / LOOKS * self._rng.uniform(0.75, 1.25))
            try:
                await self.look()
            except Transient as fault:
                log.warning("requests.not_looked_at", code=fault.code, reason=str(fault))

    async def look(self) -> None:
        """Look once at all moves under way, at a page of all builds, and at the builds that are watched. Raises
        Transient.
        """
        moves = self._looked(self._moves, await self._open_moves())
        builds = self._looked(self._builds, await self._open_builds())
        self._moves, self._builds = moves.watched, builds.watched
        metrics.SILENT_MOVES.set(moves.waiting + builds.waiting)
        unavailable: set[str | None] = set()
        queries: list[OpenRequest] = [*moves.query, *builds.query]
        for one in queries:
            if one.cell not in unavailable and not await self._query(one):
                unavailable.add(one.cell)
        if moves.silent:
            await self._mark_moves(moves.silent)
        if builds.silent:
            await self._mark_builds(builds.silent)

    def _looked(self, watched: dict[str, Watched], requests: Sequence[R]) -> Watching[R]:
        return look(watched, requests, now_s=self._clock.monotonic(), pause_s=self._after_s)

    async def _open_moves(self) -> list[RecordedMove]:
        moves: list[RecordedMove] = []
        after = FIRST_UUID
        while len(moves) < MAX_WATCHED:
            page = await self._store.open_moves(after, PAGE)
            moves += page
            if len(page) < PAGE:
                break
            after = page[-1].request_id
        return moves

    async def _open_builds(self) -> Sequence[OpenBuild]:
        unchanged_since = self._clock.time() - self._after_s
        found = await self._store.open_builds(self._builds, self._examined, unchanged_since, MAX_EXAMINED)
        self._examined = found.last or FROM_THE_FIRST
        known = [one for one in found.builds if one.request_id in self._builds]
        new = [one for one in found.builds if one.request_id not in self._builds]
        return [*known, *new][:MAX_WATCHED]

    async def _query(self, request: OpenRequest) -> bool:
        """Publish the query; returns whether the cell's bus took it."""
        bus = self._cells.get(request.cell or "")
        log.info(
            "request.queried",
            request=request.request_id,
            instance=request.instance_uuid,
            cell=request.cell,
            kind=request.kind,
        )
        if bus is None:
            return False
        metrics.MOVE_QUERIES.labels(bus.name).inc()
        try:
            await bus.publish(message_to_cell(request, self._config()), cause=request.request_id)
        except BusError as fault:
            log.info("request.not_queried", cell=bus.name, code=fault.code, reason=str(fault))
            return False
        return True

    async def _mark_moves(self, silent: Sequence[RecordedMove]) -> None:
        """State the silence in their records, unless an event has come meanwhile."""
        author = Author(self._who, self._clock.time())
        async with self._store.operation() as unit:
            known = await unit.known({one.request_id: one.instance_uuid for one in silent}, lock=True)
            for one in silent:
                now = known[one.request_id]
                if now.move is None or now.build is None or now.move.terminal or now.move.sequence != one.sequence:
                    continue
                after = self._marked(self._moves, now.move)
                await unit.update([BuildUpdate(build=now.build, timeline=(_entry(author, after),))], author.at)
                await unit.update_moves([after], author.at)

    async def _mark_builds(self, silent: Sequence[OpenBuild]) -> None:
        """As of moves. A mark is no event: the build is of the same number after it."""
        author = Author(self._who, self._clock.time())
        async with self._store.operation() as unit:
            now = await unit.lock([one.instance_uuid for one in silent])
            updates = []
            for one in silent:
                build = now.get(one.instance_uuid)
                if build is None or (build.state, build.sequence) != (one.build.state, one.sequence):
                    continue
                after = self._marked(self._builds, replace(one, build=build))
                updates.append(BuildUpdate(build=after.build, timeline=(_entry(author, after),)))
            await unit.update(updates, author.at)

    def _marked(self, watched: Mapping[str, Watched], request: R) -> R:
        queried, is_known = watched[request.request_id], request.cell in self._cells
        after = marked(request, queried, self._clock.monotonic(), known=is_known)
        log.warning("request.silent", request=request.request_id, code=after.code, cell=request.cell)
        return after


def _entry(author: Author, silent: OpenRequest) -> TimelineEntry:
    reason = silent.reason if isinstance(silent, RecordedMove) else silent.build.reason
    return author.entry(f"{silent.kind} waits", f"{silent.code}: {reason}")
