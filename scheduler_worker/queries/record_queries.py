"""Answers queries on queue `scheduler.records` from the database: builds, actions, drains, objects."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from bus.clock import Clock
from bus.consuming.outcome import Done, Outcome, Received, Refuse
from bus.contracts.actions import ActionPage, ActionQuery
from bus.contracts.base import Message, Refusal
from bus.contracts.build import BuildPage, BuildQuery, BuildRecord, TimelineEntry
from bus.contracts.drains import DrainQuery, DrainsQuery
from bus.contracts.objects import CellsQuery, ObjectLogPage, ObjectLogQuery, ObjectsPage, ObjectsQuery
from bus.faults import RequestRefused, Transient
from scheduler_worker.drain.drain_controller import DrainController
from scheduler_worker.fleet.cell_connections import CellConnections
from scheduler_worker.hosts.waiting_builds import WaitingTable
from scheduler_worker.records.build_record import is_search
from scheduler_worker.store.port import SchedulerStore

T = TypeVar("T")

# Builds are counted so far: along an index, in some milliseconds.
MAX_COUNTED = 10_000


class QueryHandler:
    """Handles queue `scheduler.records`."""

    def __init__(
        self,
        store: SchedulerStore,
        drains: DrainController,
        waiting: WaitingTable,
        *,
        clock: Clock,
        cells: CellConnections,
    ) -> None:
        self._store = store
        self._cells = cells
        self._drains = drains
        self._waiting = waiting
        self._clock = clock

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """Builds queried by name take one statement: after a long silence a client queries each of its builds, at a
        time when the scheduler is slow anyway. The other queries, which are rare, are answered one after another.
        """
        named = {one.instance_uuid for received in batch if (one := _of_one_build(received.message)) is not None}
        by_name = await _or_refused(self._store.builds_named(sorted(filter(None, named)))) if named else {}
        return [
            await self._answer(received)
            if (query := _of_one_build(received.message)) is None
            else self._one_of(by_name, query)
            for received in batch
        ]

    async def _builds(self, query: BuildQuery) -> BuildPage:
        found, last = await self._store.builds(query), None
        if is_search(query) and len(found) < query.limit:
            last = await self._store.searched_to(query)
        at, instance = last or (None, None)
        builds = tuple(map(self._with_timeline, found))
        total = await self._total(query, len(found)) if query.count else None
        return BuildPage(builds=builds, searched_to=at, searched_to_instance=instance, total=total)

    async def _total(self, query: BuildQuery, found: int) -> int | None:
        """How many builds match on all pages; None: to count them would take long."""
        if is_search(query):
            return None
        if query.before is None and found < query.limit:
            return found
        whole = replace(query, before=None, before_instance=None)
        counted = await self._store.count_builds(whole, MAX_COUNTED + 1)
        return counted if counted <= MAX_COUNTED else None

    async def _objects(self, query: ObjectsQuery) -> ObjectsPage:
        """In order of kind and name."""
        found = await self._store.objects()
        assert found is not None
        wanted = [
            stored
            for key, stored in sorted(found.objects.items())
            if query.kind in (None, stored.kind)
            and query.name in (None, stored.name)
            and (query.after is None or key > query.after)
        ]
        more = len(wanted) > query.limit
        shown = tuple(replace(one, body=_shown(one.body)) for one in wanted[: query.limit])
        return ObjectsPage(revision=found.revision, objects=shown, more=more)

    async def _log(self, query: ObjectLogQuery) -> ObjectLogPage:
        return ObjectLogPage(
            entries=tuple(
                replace(
                    one,
                    before=None if one.before is None else _shown(one.before),
                    after=None if one.after is None else _shown(one.after),
                )
                for one in await self._store.object_log(query)
            )
        )

    def _one_of(self, found: dict[str, BuildRecord] | Refuse, query: BuildQuery) -> Outcome:
        """The answer about one build; an empty page if it is not on record, or another project's."""
        if isinstance(found, Refuse):
            return found
        build = found.get(query.instance_uuid or "")
        if build is None or query.project_id not in (None, build.project_id):
            return Done(reply=BuildPage())
        return Done(reply=BuildPage(builds=(self._with_timeline(build),)))

    def _with_timeline(self, build: BuildRecord) -> BuildRecord:
        """The build with its timeline in order, and what it waits for now as the last line."""
        line = self._waiting.line_of(build, self._clock.monotonic())
        build = _with_sorted_timeline(build)
        return build if line is None else replace(build, timeline=(*build.timeline, line))

    async def _answer(self, received: Received) -> Outcome:
        answer = await _or_refused(self._page(received.message))
        if isinstance(answer, Refusal):
            return Refuse(answer.code, answer.reason)
        return answer if isinstance(answer, Refuse) else Done(reply=answer)

    async def _page(self, message: Message) -> Message | Refusal:
        match message:
            case BuildQuery():
                return await self._builds(message)
            case ActionQuery():
                return ActionPage(actions=tuple(await self._store.actions(message)))
            case DrainQuery():
                return await self._drains.plan(message)
            case DrainsQuery():
                return await self._drains.page(message)
            case ObjectsQuery():
                return await self._objects(message)
            case CellsQuery():
                return await self._cells.page()
        assert isinstance(message, ObjectLogQuery), message
        return await self._log(message)


def _shown(body: Mapping[str, Any]) -> dict[str, Any]:
    """A body without the token of a fence: who knows it can take the ids of the evacuations before they are made."""
    return {name: value for name, value in body.items() if name != "token"}


async def _or_refused(answer: Awaitable[T]) -> T | Refuse:
    """The answer, or at once that there is none: its requester does not wait for what is unavailable."""
    try:
        return await answer
    except (Transient, RequestRefused) as fault:
        return Refuse(fault.code, fault.reason)


def _of_one_build(message: Message) -> BuildQuery | None:
    """The query, if it names a build, with or without its project, and nothing else."""
    if not isinstance(message, BuildQuery) or message.instance_uuid is None:
        return None
    named = BuildQuery(instance_uuid=message.instance_uuid, project_id=message.project_id, limit=message.limit)
    return message if message == named else None


def _with_sorted_timeline(build: BuildRecord) -> BuildRecord:
    """The timeline in order of time: events arrive late, out of order, and sometimes twice."""
    lines: dict[tuple[float, str, str, str], TimelineEntry] = {}
    for line in build.timeline:  # a repeated line differs only in the time of its publication
        lines.setdefault((line.at, line.actor, line.what, line.detail), line)
    return replace(build, timeline=tuple(sorted(lines.values(), key=lambda line: line.at)))
