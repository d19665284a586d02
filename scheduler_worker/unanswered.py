"""Queries cells about requests that have had no event for a long time. Any number of schedulers do so side by side.

A cell that has lost the request, or its end, answers with an end (`cell.move.query.v1`). One that does not answer is
queried again, less and less often; the record of the request states it, and a metric counts such requests.

The only state kept is how long each has been silent; a scheduler that starts again begins to count anew.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import structlog

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.moves import CellMoveQuery
from bus.faults import Transient
from bus.port import BusError
from scheduler_worker import metrics
from scheduler_worker.domain.builds import Author, BuildUpdate
from scheduler_worker.domain.recorded_moves import RecordedMove
from scheduler_worker.domain.transfers import repeated
from scheduler_worker.domain.unanswered import Watched, Watching, look, marked
from scheduler_worker.store.port import FIRST_UUID, SchedulerStore

log = structlog.get_logger(__name__)

LOOKS = 4  # passes in the time after which a cell is queried
PAGE = 500  # requests read at a time
MAX_WATCHED = 10_000  # requests whose silence one process keeps track of; the rest is looked at later


class UnansweredMoves:
    """The task of one scheduler. cells: the bus of each; after_s: seconds without an event after which a cell is
    queried.
    """

    def __init__(
        self,
        store: SchedulerStore,
        cells: Mapping[str, Bus],
        *,
        clock: Clock,
        rng: random.Random,
        after_s: float,
        process: str = "",
    ) -> None:
        self._store = store
        self._cells = cells
        self._clock = clock
        self._rng = rng
        self._after_s = after_s
        self._who = process or "scheduler"
        self._watched: dict[str, Watched] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            # The answer to the first scheduler's query resets the count of the others.
            await self._clock.sleep(self._after_s / LOOKS * self._rng.uniform(0.75, 1.25))
            try:
                await self.look()
            except Transient as fault:
                log.warning("moves.not_looked_at", code=fault.code, reason=str(fault))

    async def look(self) -> Watching:
        """Look once at all requests under way. Raises Transient."""
        found = look(self._watched, await self._open(), now_s=self._clock.monotonic(), pause_s=self._after_s)
        self._watched = found.watched
        metrics.SILENT_MOVES.set(found.waiting)
        unavailable: set[str | None] = set()
        for move in found.query:
            if move.cell not in unavailable and not await self._query(move):
                unavailable.add(move.cell)
        if found.silent:
            await self._mark(found.silent)
        return found

    async def _open(self) -> list[RecordedMove]:
        moves: list[RecordedMove] = []
        after = FIRST_UUID
        while len(moves) < MAX_WATCHED:
            page = await self._store.open_moves(after, PAGE)
            moves += page
            if len(page) < PAGE:
                break
            after = page[-1].request_id
        return moves

    async def _query(self, move: RecordedMove) -> bool:
        """Publish the query; returns whether the cell's bus took it."""
        bus = self._cells.get(move.cell or "")
        log.info("move.queried", request=move.request_id, instance=move.instance_uuid, cell=move.cell)
        if bus is None:
            return False
        query = repeated(move) or CellMoveQuery(
            request_id=move.request_id,
            instance_uuid=move.instance_uuid,
            project_id=move.project_id,
            kind=move.kind,
        )
        metrics.MOVE_QUERIES.labels(bus.name).inc()
        try:
            await bus.publish(query, cause=move.request_id)
        except BusError as fault:
            log.info("move.not_queried", cell=bus.name, code=fault.code, reason=str(fault))
            return False
        return True

    async def _mark(self, silent: Sequence[RecordedMove]) -> None:
        """State the silence in their records, unless an event has come meanwhile."""
        author = Author(self._who, self._clock.time())
        async with self._store.operation() as unit:
            known = await unit.known({one.request_id: one.instance_uuid for one in silent}, lock=True)
            for one in silent:
                now = known[one.request_id]
                if now.move is None or now.build is None or now.move.terminal or now.move.sequence != one.sequence:
                    continue
                after = marked(
                    now.move,
                    self._watched[one.request_id],
                    self._clock.monotonic(),
                    known=one.cell in self._cells,
                )
                log.warning("move.silent", request=one.request_id, code=after.code, reason=after.reason)
                entry = author.entry(f"{one.kind} waits", f"{after.code}: {after.reason}")
                await unit.update([BuildUpdate(build=now.build, timeline=(entry,))], author.at)
                await unit.update_moves([after], author.at)
