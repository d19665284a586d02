"""The loop with its neighbours away: no exchange, a lost connection, Ironic, the bus, the database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from bus.faults import DatabaseUnavailable
from bus.memory import MemoryTransport
from bus.port import BusUnavailable
from ironic_sync.source.port import SourceUnavailable
from ironic_sync.store.memory import MemoryTerm
from tests.unit.ironic.nodes import notification, reserved, turns, world
from tests.unit.ironic.world import VirtualClock, World


async def test_a_notification_that_cannot_be_handled_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up and counted, its neighbours are handled, and a read of all nodes shows what it could not."""
    nodes, here = world()
    async with here.running():
        await here.settle()
        lists = nodes.lists
        with monkeypatch.context() as patched:
            patched.setattr("ironic_sync.listener.effect_of", lambda *_, **__: 1 / 0)
            nodes.put(maintenance=True)
            await here.notify(notification("node.maintenance_set.end", maintenance=True))
            await here.settle()
        assert nodes.lists > lists
        assert reserved(here) == 1
        nodes.put(maintenance=False)
        await here.notify(notification("node.maintenance_set.end", maintenance=False))
        await here.settle()
        assert reserved(here) == 0
        assert await here.transport.depth(here.config.queue) == 0


async def unsettled(here: World, seconds: float) -> None:
    """Let time pass while something goes on failing."""
    until = here.clock.now + seconds
    while here.clock.now < until:
        await turns(20)
        here.clock.advance(until)


async def test_the_exchange_may_come_later() -> None:
    """Ironic declares it at its first notification; until then nodes are read anyway."""
    nodes, here = world()
    here.broker = type(here.broker)(here.clock)
    here.transport, here.ironic = MemoryTransport(here.broker, "ironic_sync"), MemoryTransport(here.broker, "ironic")
    here.loop = here.make_loop()
    async with here.running():
        await turns(200)
        assert reserved(here) == 0
        assert here.loop.healthy, "a fresh Ironic has no exchange yet: that is no fault"
        here.broker.declare_exchange("ironic")
        await here.pass_time(5)
        assert here.loop.healthy
        nodes.put(maintenance=True)
        await here.notify(notification("node.maintenance_set.end", maintenance=True))
        await here.settle()
        assert reserved(here) == 1


async def test_after_a_reconnection_it_binds_and_reads_all() -> None:
    nodes, here = world()
    async with here.running():
        await here.settle()
        lists = nodes.lists
        nodes.put(maintenance=True)
        here.broker.drop_connections()
        for _ in range(20):
            await turns()
            if nodes.lists > lists:
                break
            here.clock.advance()
        await here.settle()
        assert nodes.lists == lists + 1
        assert reserved(here) == 1
        nodes.put(maintenance=False)
        await here.notify(notification("node.maintenance_set.end"))
        await here.settle()
        assert reserved(here) == 0, "it consumes again"


async def test_ironic_unavailable() -> None:
    """A change that takes something away needs no Ironic; what gives back waits for it; reads come at longer and longer
    intervals.
    """
    nodes, here = world()
    async with here.running():
        await here.settle()
        nodes.fault = SourceUnavailable("unavailable")
        nodes.put(maintenance=True)
        await here.notify(notification("node.maintenance_set.end", maintenance=True))
        await turns()
        assert reserved(here) == 1
        reads = nodes.reads
        await unsettled(here, 600)
        assert not here.loop.healthy
        assert nodes.reads - reads < 40
        nodes.fault = None
        nodes.put(maintenance=False)
        await here.pass_time(60)
        assert reserved(here) == 0
        assert here.loop.healthy


async def test_a_node_is_offered_within_two_seconds_of_ironics_first_answer() -> None:
    """It took 15 s and more: reads were retried ever later, with nothing that noticed Ironic's return."""
    nodes, here = world()
    async with here.running():
        await here.settle()
        nodes.fault = SourceUnavailable("away")
        nodes.put(maintenance=True)
        await here.notify(notification("node.maintenance_set.end", maintenance=True))
        await unsettled(here, 300)
        assert reserved(here) == 1
        lists = nodes.lists
        assert nodes.pings > 100, "asked something small all the while"
        nodes.fault = None
        nodes.put(maintenance=False)
        await here.pass_time(2)
        assert reserved(here) == 0
        assert nodes.lists == lists + 1


async def test_a_list_that_ironic_refuses_is_not_requested_every_second() -> None:
    nodes, here = world()
    async with here.running():
        await here.settle()
        lists = nodes.lists
        nodes.list_fault = SourceUnavailable("this is too much")
        here.loop.read_all()
        await unsettled(here, 600)
        assert nodes.lists - lists < 40


async def test_an_unavailable_bus_loses_nothing_and_piles_up_one_update_a_node() -> None:
    nodes, here = world()
    async with here.running():
        await here.settle()
        here.book.fault = BusUnavailable("unavailable")
        for on in (True, False) * 20 + (True,):
            nodes.put(maintenance=on)
            await here.notify(notification("node.maintenance_set.end", maintenance=on))
            await turns()
        here.book.fault = None
        reported_before = len(here.book.updates)
        await here.settle()
        assert reserved(here) == 1
        assert len(here.book.updates) == reported_before + 1


class UnavailableTerm(MemoryTerm):
    """A database that goes away in the middle of it."""

    unavailable = False

    async def save(self, positions: Sequence[Any]) -> None:
        if UnavailableTerm.unavailable:
            raise DatabaseUnavailable("unavailable")
        await super().save(positions)


async def test_a_notification_is_acknowledged_only_after_what_it_did_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, here = world()
    monkeypatch.setattr("ironic_sync.store.memory.MemoryTerm", UnavailableTerm)
    async with here.running():
        await here.settle()
        UnavailableTerm.unavailable = True
        nodes.put(maintenance=True)
        await here.notify(notification("node.maintenance_set.end", maintenance=True))
        await turns()
        assert here.loop.sync_state is not None
        assert len(here.loop.sync_state.deliveries) == 1
        assert reserved(here) == 0, "what is not saved is not published"
        UnavailableTerm.unavailable = False
        await here.settle()
        assert reserved(here) == 1
        assert here.loop.sync_state.deliveries == []


def test_the_virtual_clock_does_not_move_by_itself() -> None:
    clock = VirtualClock()
    assert clock.time() == clock.time()
