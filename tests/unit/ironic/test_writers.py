"""One writer after another: taking over, starting again, telling again, forgetting."""

from __future__ import annotations

import asyncio

from bus.consuming.outcome import Received
from bus.contracts.base import Meta
from bus.contracts.placement import InventoryOutdated, InventoryUpdate
from bus.memory import MemoryTransport
from bus.port import BusUnavailable
from ironic_sync.domain.node import Node, Unreadable
from ironic_sync.source.port import SourceUnavailable
from tests.unit.ironic.nodes import NODE, Nodes, notification, reserved, turns, world
from tests.unit.ironic.world import World


async def test_a_second_process_waits_and_takes_over_with_newer_versions() -> None:
    nodes, here = world()
    second = World(nodes, positions=here.positions)
    second.broker, second.clock = here.broker, here.clock
    second.transport = MemoryTransport(here.broker, "second")
    second.ironic = MemoryTransport(here.broker, "also ironic")
    second.book = here.book
    second.loop = second.make_loop()
    async with here.running():
        await here.settle()
        async with second.running():
            await turns()
            assert (here.loop.is_leader, second.loop.is_leader) == (True, False)
            assert second.loop.healthy
            versions = dict(here.book.versions)
            here.positions.depose()
            nodes.put(maintenance=True)
            await here.notify(notification("node.maintenance_set.end", maintenance=True))
            for _ in range(10):
                await turns()
                here.clock.advance()
            assert (here.loop.is_leader, second.loop.is_leader) == (False, True)
            assert reserved(here) == 1
            assert here.book.versions[NODE] > versions[NODE]


async def test_a_deposed_writer_publishes_nothing_more() -> None:
    nodes, here = world()
    async with here.running():
        await here.settle()
        here.positions.depose()
        held = here.positions.become_leader()
        async with held:
            count = len(here.book.updates)
            nodes.put(maintenance=True)
            await here.notify(notification("node.maintenance_set.end", maintenance=True))
            await turns(200)
            assert len(here.book.updates) == count
            assert not here.loop.is_leader
            assert await here.transport.depth(here.config.queue) == 1, "the notification is left to the next writer"


async def test_a_restart_publishes_everything_again_with_newer_versions() -> None:
    nodes, here = world()
    async with here.running():
        await here.settle()
    before = dict(here.book.versions)
    again = World(nodes, positions=here.positions)
    again.clock.now = here.clock.now - 1000  # even with a clock that went back
    async with again.running():
        await again.settle()
        assert again.book.versions[NODE] > before[NODE]


async def test_what_was_saved_and_not_published_is_published_at_the_next_start() -> None:
    nodes, here = world()
    async with here.running():
        await here.settle()
        here.book.fault = BusUnavailable("unavailable")
        nodes.put(maintenance=True)
        await here.notify(notification("node.maintenance_set.end", maintenance=True))
        await turns()
    again = World(nodes, positions=here.positions)
    nodes.fault = SourceUnavailable("and Ironic is unavailable too")
    async with again.running():
        await turns()
        assert reserved(again) == 1


async def test_an_offer_is_not_published_again_on_a_read_that_an_event_has_overtaken() -> None:
    """A new writer publishes everything again: what it has yet to read again waits for that read."""

    class SlowReads(Nodes):
        """The list is answered, and a read of one node takes longer."""

        answers = asyncio.Event()

        async def get_node(self, uuid: str) -> Node | Unreadable | None:
            await self.answers.wait()
            return await super().get_node(uuid)

    nodes = SlowReads()
    nodes.put()
    here = World(nodes)
    async with here.running():
        await here.settle()
        assert reserved(here) == 0
    again = World(nodes, positions=here.positions)
    nodes.gate.clear()
    async with again.running():
        await turns()
        assert nodes.lists == 2  # under way, with the node as it still is
        nodes.put(maintenance=True)  # and this goes unsaid
        await again.notify(notification("node.power_set.end"))
        await turns()
        nodes.gate.set()
        await turns()
        nodes.answers.set()
        await again.settle()
        assert [update.providers[0].inventories["CUSTOM_GOLD"].reserved for update in again.book.updates] == [1]


async def test_all_is_published_again_at_intervals() -> None:
    nodes, here = world(resync_interval_s=60.0, republish_interval_s=300.0)
    async with here.running():
        await here.settle()
        assert len(here.book.updates) == 1
        await here.pass_time(200)
        assert len(here.book.updates) == 1
        await here.pass_time(200)
        assert len(here.book.updates) == 2
        first, second = here.book.updates
        assert isinstance(second, InventoryUpdate)
        assert (second.providers, second.version > first.version) == (first.providers, True)
        assert 5 <= nodes.lists <= 9


async def test_that_a_node_is_gone_is_published_again_too() -> None:
    """Removed while it was in use it stayed in the book, without capacity: only a later word lets go of it."""
    nodes, here = world(resync_interval_s=60.0, republish_interval_s=300.0, removed_retention_s=1000.0)
    async with here.running():
        await here.settle()
        nodes.nodes.clear()
        here.loop.read_all()
        await here.settle()
        first = here.book.updates[-1]
        assert not first.providers
        await here.pass_time(500)
        second = here.book.updates[-1]
        assert (second.providers, second.version > first.version) == ((), True)
    again = World(nodes, positions=here.positions, removed_retention_s=1000.0)
    again.clock.now = here.clock.now
    async with again.running():
        await again.settle()
        assert [update.providers for update in again.book.updates] == [()], "and by the next writer"
        await again.pass_time(5000)
        assert not again.positions.positions


async def test_removed_nodes_are_forgotten_after_a_while() -> None:
    nodes, here = world(removed_retention_s=1000.0, republish_interval_s=500.0)
    async with here.running():
        await here.settle()
        nodes.nodes.clear()
        here.loop.read_all()
        await here.settle()
        assert list(here.positions.positions) == [NODE]
        await here.pass_time(2000)
        assert not here.positions.positions
        assert here.loop.sync_state is not None
        assert not here.loop.sync_state.positions


async def test_a_process_whose_clock_is_behind_goes_on_above_what_the_book_has() -> None:
    """Seed 1210: positions were lost, and the process before had a clock that was minutes ahead: all that was published
    counted for older until its clock had passed."""
    _, here = world()
    async with here.running():
        await here.settle()
        version = here.book.versions[NODE]
        ahead = version + 10**12
        for known in (version - 5, ahead, 2**62):
            outdated = InventoryOutdated(source="ironic", root_uuid=NODE, version=known)
            await here.loop.outdated([Received(outdated, Meta(id="m"), "api", "ironic.outdated.test")])
            await here.settle()
            assert (here.book.versions[NODE] > ahead) is (known >= ahead), known
        assert here.book.versions[NODE] < 2 * ahead, "what leaves no room is not followed"
