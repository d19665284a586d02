"""The lease of the one writer: it is renewed while positions are read, and ends with the process or by itself."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from bus.faults import DatabaseUnavailable
from ironic_sync.domain.position import Position
from ironic_sync.store.memory import MemoryPositions, MemoryPositionTable
from ironic_sync.store.port import LEASE_S, NotLeader
from tests.unit.ironic_sync.world import NODE, Nodes, World, notification, reserved, turns

LOAD_S = 60.0
REMOVED = {one: Position(uuid=one, version=1) for one in (str(uuid.UUID(int=number)) for number in range(1, 2501))}


class Watched:
    """Positions of which a test sees each call."""

    def __init__(self, here: World) -> None:
        self._inner = here.positions
        self.database_id = here.positions.database_id
        self.calls: list[str] = []
        self.faults: dict[str, Exception] = {}
        self.load_s = 0.0
        self._clock = here.clock

    def become_leader(self) -> AbstractAsyncContextManager[Any]:
        return self._become_leader()

    @asynccontextmanager
    async def _become_leader(self) -> AsyncIterator[Any]:
        async with self._inner.become_leader() as term:
            self._term = term
            yield self

    async def load(self) -> tuple[Mapping[str, Position], Mapping[str, int]]:
        await self._called("load")
        await self._clock.sleep(self.load_s)
        return await self._term.load()

    async def save(self, *arguments: Any) -> None:
        await self._called("save")
        await self._term.save(*arguments)

    async def mark_published(self, *arguments: Any) -> None:
        await self._term.mark_published(*arguments)

    async def purge(self, *arguments: Any) -> int:
        return await self._term.purge(*arguments)

    async def renew(self) -> None:
        await self._called("renew")
        await self._term.renew()

    async def _called(self, what: str) -> None:
        self.calls.append(what)
        if what in self.faults:
            raise self.faults[what]


def watched() -> tuple[Nodes, World, Watched]:
    nodes = Nodes()
    nodes.put()
    here = World(nodes)
    store = Watched(here)
    here.loop._positions = store
    return nodes, here, store


def another(here: World) -> MemoryPositions:
    """The positions as another process has them."""
    return MemoryPositions(here.positions._table.session())


async def test_the_lease_is_renewed_while_many_positions_are_read() -> None:
    """The term of a writer of many positions was over before it began."""
    _, here, store = watched()
    here.positions._table.positions.update(REMOVED)
    store.load_s = LOAD_S
    async with here.running():
        until = here.clock.now + LOAD_S
        while here.clock.now < until:
            await turns()
            with pytest.raises(NotLeader):
                async with another(here).become_leader():
                    pass
            assert not here.loop.is_leader
            here.clock.advance(min(here.clock.now + 1.0, until))
        assert store.calls.count("load") == 1
        assert store.calls.count("renew") > LOAD_S / LEASE_S
        await here.settle()
        assert here.loop.is_leader
        assert reserved(here) == 0


async def test_a_writer_that_was_killed_is_replaced_when_its_lease_is_over() -> None:
    _, here, _ = watched()
    table = here.positions._table
    table.expires_at = here.clock.now + LEASE_S  # of a process that is no more
    async with here.running():
        await turns()
        assert (here.loop.is_leader, here.loop.healthy) == (False, True)
        began = here.clock.now
        while not here.loop.is_leader:
            here.clock.advance()
            await turns()
        assert here.clock.now - began <= LEASE_S + here.config.leader_poll_interval_s
    assert table.expires_at <= here.clock.now, "let go of at a clean stop"
    async with another(here).become_leader():
        pass


async def test_a_writer_that_was_stopped_writes_nothing_when_it_goes_on() -> None:
    clock = World(Nodes()).clock
    table = MemoryPositionTable(clock)
    async with MemoryPositions(table.session()).become_leader() as stopped:
        clock.now += LEASE_S
        await stopped.renew()  # nobody else has it: the term goes on
        clock.now += LEASE_S
        async with MemoryPositions(table.session()).become_leader() as new:
            for write in (
                stopped.save([Position(uuid=NODE, version=1)]),
                stopped.mark_published({NODE: 1}),
                stopped.purge(0.0),
                stopped.renew(),
            ):
                with pytest.raises(NotLeader):
                    await write
            await new.save([Position(uuid=NODE, version=2)])
        assert table.positions[NODE].version == 2
        assert table.expires_at <= clock.now


async def test_a_database_that_does_not_answer_ends_no_term() -> None:
    nodes, here, store = watched()
    async with here.running():
        await here.settle()
        store.faults = dict.fromkeys(("renew", "save"), DatabaseUnavailable("away"))
        nodes.put(maintenance=True)
        await here.notify(notification("node.maintenance_set.end", maintenance=True))
        for _ in range(20):
            await turns()
            here.clock.advance()
        assert here.loop.is_leader
        store.faults.clear()
        await here.settle()
        assert reserved(here) == 1
        assert (store.calls.count("load"), nodes.lists) == (1, 1)


async def test_no_term_leaves_a_subscription_or_a_callback_behind() -> None:
    _, here, _ = watched()
    async with here.running():
        await here.settle()
        held = len(here.transport._callbacks), len(here.transport.subscriptions)
        for _ in range(5):
            here.positions.depose()
            await turns()
            here.clock.advance()
            await here.settle()
        await here.notify(notification("node.update.end"))
        await here.settle()
        assert (len(here.transport._callbacks), len(here.transport.subscriptions)) == held
        assert await here.transport.depth(here.config.queue) == 0


async def test_between_two_terms_a_notification_goes_back_to_the_queue() -> None:
    nodes, here, _ = watched()
    async with here.running():
        await here.settle()
        here.positions.depose()
        async with another(here).become_leader():
            await here.notify(notification("node.update.end"))
            await turns(200)
            assert await here.transport.depth(here.config.queue) == 1
        nodes.put(maintenance=True)
        here.clock.advance()
        await asyncio.sleep(0)
        await here.settle()
        assert reserved(here) == 1
