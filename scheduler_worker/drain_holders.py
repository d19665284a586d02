"""Reads the holdings of hosts that are drained: from the book, and from the record of requests under way.

The replica shows which hosts have anything in use; only of these the book is queried for the holders.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from bus.bus import Bus
from bus.contracts.book import MAX_HOLDERS, HostTree, HostTreeQuery, TreeHolder
from bus.faults import Transient
from bus.port import BusError
from scheduler_worker.domain.drain_holders import (
    HeldInstance,
    arriving,
    held_as_instance,
    held_by_migration,
    is_migration,
)
from scheduler_worker.domain.drain_targets import DrainedHost
from scheduler_worker.domain.placement import PlacementUnavailable, unavailable_after
from scheduler_worker.domain.recorded_moves import MoveContext, RecordedMove
from scheduler_worker.domain.selector import Selector
from scheduler_worker.placing import ReplicaFollower
from scheduler_worker.store.port import FIRST_UUID, SchedulerStore

ANSWER_S = 10.0  # of placement
TREES = 50  # hosts that the book is queried about at a time
PAGE = 1000  # requests under way, or instances, that are read at a time


class DrainHolders:
    """Of one scheduler. api: the bus to placement."""

    def __init__(self, store: SchedulerStore, selector: Selector, follower: ReplicaFollower, api: Bus) -> None:
        self._store = store
        self._selector = selector
        self._follower = follower
        self._api = api

    async def held_on(self, hosts: Sequence[DrainedHost]) -> list[HeldInstance]:
        """The instances of which these hosts hold something, or are about to. Raises Transient.

        The requests are read before the book, so that one that ends in between is seen in one of the two. A build has
        its allocation before it is on record as scheduled.
        """
        if not hosts:
            return []
        found = await self._arriving(hosts)
        holders = await self._holders(hosts)
        known = await self._known({one.consumer for _, one in holders if not is_migration(one)})
        for host, one in holders:
            if not is_migration(one) and (held := held_as_instance(host, known[one.consumer])) is not None:
                found.append(held)
        return found + await self._by_migrations(holders)

    async def kept_on(self, hosts: Sequence[DrainedHost]) -> list[HeldInstance]:
        """The instances of which these hosts keep the source of a move. Raises Transient."""
        return await self._by_migrations(await self._holders(hosts))

    async def _by_migrations(self, holders: Sequence[tuple[DrainedHost, TreeHolder]]) -> list[HeldInstance]:
        kept = [(host, one) for host, one in holders if is_migration(one)]
        requests = await self._known({one.consumer for _, one in kept})
        moves = {uuid: context.move for uuid, context in requests.items()}
        known = await self._known({move.instance_uuid for move in moves.values() if move is not None})
        found = []
        for host, one in kept:
            move = moves[one.consumer]
            found.append(held_by_migration(host, one, move, None if move is None else known[move.instance_uuid]))
        return found

    async def _arriving(self, hosts: Sequence[DrainedHost]) -> list[HeldInstance]:
        """By the requests under way, along their index."""
        there = {host.uuid: host for host in hosts}
        moves: list[RecordedMove] = []
        after = FIRST_UUID
        while page := await self._store.open_moves(after, PAGE):
            moves += [one for one in page if one.host_uuid in there]
            after = page[-1].request_id
        known = await self._known({one.instance_uuid for one in moves})
        found = [arriving(there[one.host_uuid or ""], one, known[one.instance_uuid]) for one in moves]
        return [one for one in found if one is not None]

    async def _known(self, uuids: Iterable[str]) -> dict[str, MoveContext]:
        """The records of these instances, and of the requests with these ids."""
        found: dict[str, MoveContext] = {}
        ordered = sorted(uuids)
        for start in range(0, len(ordered), PAGE):
            async with self._store.operation() as unit:
                found |= await unit.known({uuid: uuid for uuid in ordered[start : start + PAGE]})
        return found

    async def _holders(self, hosts: Sequence[DrainedHost]) -> list[tuple[DrainedHost, TreeHolder]]:
        """By the book. Raises PlacementUnavailable."""
        if not await self._follower.refresh(timeout_s=ANSWER_S):
            raise PlacementUnavailable("the newest changes of the book did not come in time")
        found: list[tuple[DrainedHost, TreeHolder]] = []
        used = self._in_use(hosts)
        for start in range(0, len(used), TREES):
            part = used[start : start + TREES]
            after: dict[str, str] = {}  # {host: the last consumer known}
            while part:
                pages = await self._trees(part, after)
                for host, page in zip(part, pages, strict=True):
                    found += [(host, one) for one in page.holders]
                    if page.holders:
                        after[host.uuid] = page.holders[-1].consumer
                part = [host for host, page in zip(part, pages, strict=True) if page.more and page.holders]
        return found

    async def _trees(self, hosts: Sequence[DrainedHost], after: Mapping[str, str]) -> list[HostTree]:
        queries = [HostTreeQuery(provider=host.uuid, limit=MAX_HOLDERS, after=after.get(host.uuid)) for host in hosts]
        causes = [host.uuid for host in hosts]
        try:
            answers = await self._api.request_all(queries, HostTree, timeout_s=ANSWER_S, causes=causes)
        except (BusError, Transient) as error:
            raise PlacementUnavailable(str(error)) from error
        if failed := [one for one in answers if not isinstance(one, HostTree)]:
            raise unavailable_after(failed[0])
        return [one for one in answers if isinstance(one, HostTree)]

    def _in_use(self, hosts: Sequence[DrainedHost]) -> list[DrainedHost]:
        """The hosts of which something is in use, by the replica."""
        book = self._selector.book
        rows = {row: host for host in hosts if (row := book.row_of(host.uuid)) is not None}
        numbers = np.fromiter(rows, dtype=np.intp, count=len(rows))
        used = np.zeros(len(rows), dtype=np.bool_)
        for name in book.resource_classes():
            used |= book.usage(name, numbers) != 0
        return [host for host, is_used in zip(rows.values(), used, strict=True) if is_used]
