"""Queue `scheduler.queries`: builds with their story, and hosts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from bus.consuming.outcome import Done, Outcome, Received, Refuse
from bus.contracts.build import BuildPage, BuildQuery, BuildRecord, HostRecord, HostsPage, HostsQuery, StoryLine
from bus.faults import DatabaseUnavailable
from scheduler_worker.domain.hosts import NO_SERVICE, Mask
from scheduler_worker.domain.selector import Selector
from scheduler_worker.store.port import SchedulerStore


class QueryHandler:
    """Handles queue `scheduler.queries`."""

    def __init__(self, store: SchedulerStore, selector: Selector) -> None:
        self._store = store
        self._selector = selector

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """One after another: queries are rare."""
        return [await self._answer(received) for received in batch]

    async def _answer(self, received: Received) -> Outcome:
        message = received.message
        if isinstance(message, BuildQuery):
            try:
                found = await self._store.builds(message)
            except DatabaseUnavailable as fault:  # answered now: the requester does not wait until it is back
                return Refuse(fault.code, fault.reason)
            return Done(reply=BuildPage(builds=tuple(map(_with_sorted_story, found))))
        assert isinstance(message, HostsQuery)
        return Done(reply=self.hosts(message))

    def hosts(self, query: HostsQuery) -> HostsPage:
        """The hosts of the replica by name, with what their compute services announce."""
        book, table = self._selector.book, self._selector.table
        down = table.down()
        rows = [row for row in book.rows_of_roots().tolist() if self._matches(row, query, down)]
        rows = sorted(rows, key=book.name_of)[: query.limit]
        asked = np.array(rows, dtype=np.intp)
        amounts = {
            name: (book.usage(name, asked).tolist(), book.totals(name, asked).tolist())
            for name in sorted(book.resource_classes())
        }
        hosts = []
        for at, row in enumerate(rows):
            uuid = book.uuid_of(row)
            index = table.index_of(uuid)
            service = NO_SERVICE if index is None else int(table.service[index])
            hosts.append(
                HostRecord(
                    uuid=uuid,
                    name=book.name_of(row) if index is None else table.names[index],
                    cell=None if index is None else table.cells[int(table.cell[index])],
                    service=None if service == NO_SERVICE else table.services[service].name,
                    up=not bool(down[service]),
                    enabled=False if index is None else bool(table.enabled[index]),
                    resources={
                        name: (float(used[at]), float(total[at]))
                        for name, (used, total) in amounts.items()
                        if used[at] or total[at]
                    },
                    failed_builds=0 if index is None else int(table.failed_builds[index]),
                )
            )
        return HostsPage(hosts=tuple(hosts), feed_sequence=book.sequence)

    def _matches(self, row: int, query: HostsQuery, down: Mask) -> bool:
        if query.cell is None and query.up is None:
            return True
        table = self._selector.table
        index = table.index_of(self._selector.book.uuid_of(row))
        cell = None if index is None else table.cells[int(table.cell[index])]
        up = not bool(down[NO_SERVICE if index is None else int(table.service[index])])
        return query.cell in (None, cell) and query.up in (None, up)


def _with_sorted_story(build: BuildRecord) -> BuildRecord:
    """The story in order of time: announcements arrive late, out of order, and sometimes twice."""
    lines: dict[tuple[float, str, str, str], StoryLine] = {}
    for line in build.story:  # a repeated line differs only in when it was passed on
        lines.setdefault((line.at, line.who, line.what, line.detail), line)
    return replace(build, story=tuple(sorted(lines.values(), key=lambda line: line.at)))
