"""Asks cells about builds, deletes and actions that have had no event for long, and resends what was lost. Any number
of schedulers do so side by side.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog
from msgspec.structs import replace

from bus.bus import Bus
from bus.clock import Clock
from bus.faults import Transient
from bus.persistence.outbox import OutboxMessage
from scheduler_worker import metrics as metrics_module
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.records.action_record import ActionContext, RequestKey
from scheduler_worker.records.build_record import Actor, BuildUpdate
from scheduler_worker.store.port import FIRST_UUID, OperationUnit, SchedulerStore
from scheduler_worker.upkeep.silence_rules import (
    MAX_WATCHED,
    OpenRequest,
    Watched,
    Watching,
    look,
    messages_to_cell,
    open_action,
    open_build,
    open_now,
    silence,
)

log = structlog.get_logger(__name__)

LOOKS = 4  # passes in the time after which a cell is queried
PAGE = 500  # requests read at a time
MAX_READ = 10_000  # actions of one pass
MAX_EXAMINED = 5_000  # builds of one pass, in whatever state
FROM_THE_FIRST = (0.0, FIRST_UUID)


class SilentRequests:
    """Asks cells about requests that have had no event for long. One per scheduler."""

    # A request that no cell has is scheduled again: a restored database may have it as accepted after its message was
    # acknowledged. A cell that has lost it, or its end, answers with an end, or carries out the delete that it is
    # commanded once more. One that does not answer is queried less and less often; the record states it, and a metric
    # counts them. Messages commit with a look at the records that they are about. Only how long each request has been
    # silent is kept, in memory. Moves under way have an index; builds have none that changes, so each pass examines a
    # page of all.

    def __init__(
        self,
        store: SchedulerStore,
        cells: Mapping[str, Bus],  # the bus of each cell
        config: Callable[[], SchedulerConfig],
        *,
        clock: Clock,
        rng: random.Random,
        after_s: float,  # seconds without an event after which a cell is queried
        resume: Callable[[Mapping[str, int]], Awaitable[set[str]]],
        process: str = "",
    ) -> None:
        """`config()`: the settings and operators' objects that are in force now. `resume(instances)`: schedules builds,
        {instance: how often before}, and returns those that wait, of which that was no try.
        """
        self._store = store
        self._cells = cells
        self._config = config
        self._clock = clock
        self._rng = rng
        self._after_s = after_s
        self._resume = resume
        self._who = process or "scheduler"
        self._watched: dict[RequestKey, Watched] = {}
        self._examined = FROM_THE_FIRST  # the last build of the page before
        self._read = FIRST_UUID  # the last action of the pass before

    @property
    def cells(self) -> set[str]:
        """The cells of the requests that had no end at the last look."""
        return {one.seen.cell for one in self._watched.values()}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            # The answer to the first scheduler's query puts those of the others off.
            await self._clock.sleep(self._after_s / LOOKS * self._rng.uniform(0.75, 1.25))
            try:
                await self.look()
            except Transient as fault:
                log.warning("requests.not_looked_at", code=fault.code, reason=str(fault))

    async def look(self) -> Watching:
        """Look once at the next actions under way and builds, and at those that are watched. Raises Transient."""
        actions, read = await self._open_actions()
        requests = [*actions, *await self._open_builds()]
        self._read = read  # not before: if the builds cannot be read, these actions are read again
        if len(requests) > MAX_WATCHED:
            self._rng.shuffle(requests)  # each comes to its turn
        found = look(self._watched, requests, now_s=self._clock.monotonic(), pause_s=self._after_s)
        self._watched = found.watched
        metrics_module.SILENT_ACTIONS.set(found.waiting)
        for is_action in (True, False):  # a build is not written twice in one transaction
            if queries := [one for one in found.query if one.cell and one.is_action is is_action]:
                await self._send(queries, found)
        accepted = {one.instance_uuid: one.key for one in found.query if not one.cell}
        waiting = await self._resume({uuid: found.watched[key].queried - 1 for uuid, key in accepted.items()})
        for key in [accepted[uuid] for uuid in waiting if uuid in accepted]:
            watched = found.watched[key]
            found.watched[key] = replace(watched, queried=watched.queried - 1)
        return found

    async def _open_actions(self) -> tuple[list[OpenRequest], str]:
        """The actions that are open, on from the last one of the pass before; those that are watched and were not come
        to now; and the last one that was (FIRST_UUID: there are no more).
        """
        found: list[OpenRequest] = []
        after = self._read
        for _ in range(0, MAX_READ, PAGE):
            page = await self._store.open_actions(after, PAGE)
            found += [one for action in page if (one := open_action(action)) is not None]
            after = page[-1].request_id if len(page) == PAGE else FIRST_UUID
            if after == FIRST_UUID:
                break
        watched = [one.seen for one in self._watched.values() if one.seen.is_action]
        found += [one for one in watched if one.request_id <= self._read or FIRST_UUID < after < one.request_id]
        return found, after

    async def _open_builds(self) -> list[OpenRequest]:
        unchanged_since = self._clock.time() - self._after_s  # what is younger is found by a later page
        watched = [one.seen.request_id for one in self._watched.values() if not one.seen.is_action]
        page = await self._store.open_builds(watched, self._examined, unchanged_since, MAX_EXAMINED)
        self._examined = page.last or FROM_THE_FIRST
        return [one for build in page.builds if (one := open_build(build)) is not None]

    async def _send(self, queries: Sequence[OpenRequest], found: Watching) -> None:
        """Query the cells about those requests that are still open, and state the silence of some in their records."""
        actor = Actor(self._who, self._clock.time())
        async with self._store.operation() as unit:
            known = await unit.known([one.key for one in queries], lock=True)
            for one in queries:
                now = open_now(one, known[one.key])
                if now is None or (now.sequence, now.cell) != (one.sequence, one.cell):
                    continue  # it has ended or had an event meanwhile, or waits for another request
                self._query(unit, now, known[one.key], actor.at)
                if one in found.silent and known[one.key].build is not None:
                    await self._mark(unit, now, known[one.key], actor)

    def _query(self, unit: OperationUnit, request: OpenRequest, known: ActionContext, at: float) -> None:
        bus = self._cells.get(request.cell)
        log.info(
            "request.queried",
            request=request.request_id,
            instance=request.instance_uuid,
            cell=request.cell,
            kind=request.kind,
        )
        if bus is None or bus.unavailable_reason:  # queries would pile up in the outbox
            return
        metrics_module.ACTION_QUERIES.labels(bus.name).inc()
        for message in messages_to_cell(request, known, self._config(), at):
            unit.emit(OutboxMessage(bus.name, message, request.request_id))

    async def _mark(self, unit: OperationUnit, request: OpenRequest, known: ActionContext, actor: Actor) -> None:
        """State the silence in the record. It is no event: the request is of the same number after it."""
        watched, is_known = self._watched[request.key], request.cell in self._cells
        code, reason = silence(watched, self._clock.monotonic(), known=is_known)
        log.warning("request.silent", request=request.request_id, code=code, cell=request.cell)
        entry = actor.entry(f"{request.kind} waits", f"{code}: {reason}")
        build = known.build
        assert build is not None
        if request.is_action:
            assert known.action is not None
            await unit.update_actions([replace(known.action, code=code, reason=reason)], actor.at)
        else:
            build = replace(build, code=code, reason=reason)
        await unit.update([BuildUpdate(build=build, timeline=(entry,))], actor.at)
