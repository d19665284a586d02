"""The loop among its neighbours: late reads, lost connections, no exchange, Ironic or the book away, two writers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from bus.contracts.placement import InventoryUpdate
from bus.faults import BrokenInvariant, DatabaseUnavailable
from bus.port import BusUnavailable
from ironic_sync.domain.node import Allocation, Node, Unreadable, parse_node
from ironic_sync.domain.rules import NO_CLASS
from ironic_sync.ledger import UNREADABLE
from ironic_sync.source.port import SourceUnavailable
from ironic_sync.store.memory import MemoryTerm
from tests.unit.ironic.test_notification import body
from tests.unit.ironic.world import VirtualClock, World

NODE = "8296eb22-b44b-4cba-95b1-3a66b31189a4"
OTHER = "05dcdb28-1788-4480-9281-af335fc32c9f"
INSTANCE = "11111111-2222-4333-8444-555555555555"
FREE: dict[str, Any] = {
    "provision_state": "available",
    "power_state": "power off",
    "maintenance": False,
    "instance_uuid": None,
    "resource_class": "gold",
    "traits": [],
}


class Nodes:
    """Ironic with nodes to change at will. A read answers with what was true when it was sent; `gate` holds answers."""

    def __init__(self, **nodes: dict[str, Any]) -> None:
        self.nodes: dict[str, dict[str, Any]] = {}
        self.allocations: dict[str, dict[str, Any]] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.fault: Exception | None = None
        self.reads = 0
        self.lists = 0
        self.under_way = 0
        self.most_under_way = 0

    def put(self, uuid: str = NODE, **fields: Any) -> None:
        self.nodes[uuid] = {**FREE, **self.nodes.get(uuid, {}), "uuid": uuid, **fields}

    async def get_node(self, uuid: str) -> Node | Unreadable | None:
        self.reads += 1
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        raw = dict(self.nodes[uuid]) if uuid in self.nodes else None
        try:
            await self.gate.wait()
        finally:
            self.under_way -= 1
        if self.fault is not None:
            raise self.fault
        return None if raw is None else parse_node(raw)

    async def list_nodes(self) -> AsyncIterator[Sequence[Node | Unreadable]]:
        self.lists += 1
        raw = [dict(node) for node in self.nodes.values()]
        await self.gate.wait()
        if self.fault is not None:
            raise self.fault
        yield [parse_node(node) for node in raw]

    async def get_allocation(self, uuid: str) -> Allocation | None:
        raw = self.allocations.get(uuid)
        return None if raw is None else Allocation(uuid=uuid, **raw)

    async def close(self) -> None:
        pass


def world(**settings: Any) -> tuple[Nodes, World]:
    nodes = Nodes()
    nodes.put()
    return nodes, World(nodes, **settings)


def told(event: str, uuid: str = NODE, **data: Any) -> bytes:
    return body(event, {**{k: v for k, v in FREE.items() if k != "resource_class"}, "uuid": uuid, **data})


def reserved(world: World, uuid: str = NODE) -> int:
    held = world.book.seen(uuid)
    assert held is not None
    value = held["reserved"]
    assert isinstance(value, int)
    return value


async def turns(count: int = 60) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_taking_away_does_not_wait_for_the_read() -> None:
    nodes, here = world()
    async with here.running():
        await here.settle()
        assert reserved(here) == 0
        nodes.gate.clear()
        nodes.put(maintenance=True)
        await here.say(told("node.maintenance_set.end", maintenance=True))
        await turns()
        assert nodes.under_way == 1, "the read is on its way"
        assert reserved(here) == 1
        assert here.book.causes[-1] == "req-1"
        nodes.gate.set()


async def test_giving_back_waits_for_the_read() -> None:
    nodes, here = world()
    nodes.put(maintenance=True)
    async with here.running():
        await here.settle()
        nodes.gate.clear()
        nodes.put(maintenance=False)
        await here.say(told("node.maintenance_set.end"))
        await turns()
        assert reserved(here) == 1
        nodes.gate.set()
        await here.settle()
        assert reserved(here) == 0


async def test_a_read_overtaken_by_news_gives_nothing_back() -> None:
    """The read was sent while the node was free; before its answer came, the node was taken."""
    nodes, here = world()
    nodes.put(provision_state="cleaning")
    async with here.running():
        await here.settle()
        nodes.put(provision_state="available")
        nodes.gate.clear()
        await here.say(told("node.provision_set.end"))
        await turns()
        nodes.put(provision_state="deploying", instance_uuid=INSTANCE)
        await here.say(told("node.provision_set.start", provision_state="deploying"))
        await turns()
        nodes.gate.set()
        await here.settle()
        assert [update.providers[0].inventories["CUSTOM_GOLD"].reserved for update in here.book.updates] == [1]


async def test_much_news_about_a_node_being_read_is_one_more_read() -> None:
    nodes, here = world()
    async with here.running():
        await here.settle()
        nodes.gate.clear()
        for _ in range(100):
            await here.say(told("node.update.end"))
        await turns(400)
        nodes.gate.set()
        await here.settle()
        assert nodes.reads == 2
        assert nodes.most_under_way == 1


async def test_a_start_is_read_later_unless_its_end_comes() -> None:
    nodes, here = world()
    async with here.running():
        await here.settle()
        await here.say(told("node.maintenance_set.start", maintenance=True))
        await here.settle()
        assert (nodes.reads, reserved(here)) == (0, 0), "nothing has happened yet"
        nodes.put(maintenance=True)
        await here.pass_time(1)
        assert (nodes.reads, reserved(here)) == (1, 1), "its end was lost"
        nodes.put(maintenance=False)
        await here.say(told("node.maintenance_set.start"))
        await here.say(told("node.maintenance_set.end"))
        await here.settle()
        assert reserved(here) == 0
        await here.pass_time(1)
        assert nodes.reads == 2


async def test_a_bug_in_a_callback_ends_the_process_and_keeps_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    _, here = world()
    await here.transport.open()
    await here.ironic.open()
    task = asyncio.create_task(here.loop.run())
    await here.settle()
    monkeypatch.setattr("ironic_sync.listener.meaning", lambda *_, **__: 1 / 0)
    await here.say(told("node.update.end"))
    with pytest.raises(BrokenInvariant):
        await task
    assert await here.transport.depth(here.config.queue) == 1
    await here.transport.close()
    await here.ironic.close()


async def test_many_nodes_are_read_side_by_side_within_the_bound() -> None:
    nodes, here = world(reads_in_flight=4)
    uuids = [f"00000000-0000-4000-8000-{i:012x}" for i in range(20)]
    for uuid in uuids:
        nodes.put(uuid)
    async with here.running():
        await here.settle()
        nodes.gate.clear()
        for uuid in uuids:
            await here.say(told("node.update.end", uuid))
        await turns(400)
        assert nodes.under_way == 4
        nodes.gate.set()
        await here.settle()
        assert nodes.most_under_way == 4
        assert nodes.reads == 20


async def test_a_transient_node_is_read_again_until_it_is_there() -> None:
    """18-lost-end: the last word said is `cleaning`."""
    nodes, here = world()
    nodes.put(provision_state="cleaning")
    async with here.running():
        await here.pass_time(3)
        nodes.put(provision_state="available")
        await here.pass_time(10)
        assert reserved(here) == 0
        reads = nodes.reads
        assert reads <= 5, "the waits double"
        await here.pass_time(600)
        assert nodes.reads == reads, "a stable node waits for news"
        assert nodes.lists == 1


async def test_an_allocation_is_followed_until_it_has_its_node() -> None:
    nodes, here = world()
    async with here.running():
        await here.settle()
        nodes.allocations[INSTANCE] = {"state": "allocating"}
        await here.say(body("allocation.create.end", {"uuid": INSTANCE, "node_uuid": None, "state": "allocating"}))
        await turns(200)
        assert reserved(here) == 0
        nodes.allocations[INSTANCE] = {"state": "active", "node_uuid": NODE}
        nodes.put(instance_uuid=INSTANCE)
        await here.settle()
        assert reserved(here) == 1


async def test_a_deleted_node_is_removed_and_may_come_back() -> None:
    nodes, here = world()
    async with here.running():
        await here.settle()
        first = here.book.versions[NODE]
        del nodes.nodes[NODE]
        nodes.gate.clear()
        await here.say(told("node.delete.end"))
        await turns()
        assert reserved(here) == 1, "held back before the 404 confirms it"
        nodes.gate.set()
        await here.settle()
        assert here.book.updates[-1].providers == ()
        nodes.put()
        await here.say(told("node.create.end"))
        await here.settle()
        assert reserved(here) == 0
        assert here.book.versions[NODE] > first


async def test_absence_from_the_list_removes_only_what_ironic_says_is_gone() -> None:
    nodes, here = world()
    nodes.put(OTHER)
    async with here.running():
        await here.settle()
        listed = dict(nodes.nodes)
        del listed[NODE], nodes.nodes[OTHER]
        hidden, nodes.nodes = nodes.nodes, listed
        nodes.gate.clear()
        here.loop.read_all()
        await turns()
        nodes.nodes = hidden
        nodes.gate.set()
        await here.settle()
        assert here.book.seen(NODE) is not None
        nodes.nodes = {NODE: hidden[NODE]}
        here.loop.read_all()
        await here.settle()
        assert here.book.seen(OTHER) is None
        assert here.book.seen(NODE) is not None


async def test_a_made_up_uuid_leaves_nothing_behind() -> None:
    _, here = world()
    async with here.running():
        await here.settle()
        await here.say(told("node.update.end", OTHER))
        await here.settle()
        assert here.loop.ledger is not None
        assert list(here.loop.ledger.positions) == [NODE]
        assert len(here.book.updates) == 1


async def test_more_nodes_than_the_bound_are_refused_aloud() -> None:
    nodes, here = world(max_nodes=3)
    for i in range(10):
        nodes.put(f"00000000-0000-4000-8000-{i:012x}")
    async with here.running():
        await here.settle()
        assert here.loop.ledger is not None
        assert len(here.loop.ledger.positions) == 3


async def test_nodes_without_class_and_unreadable_ones_are_listed_and_hide_nobody() -> None:
    nodes, here = world()
    nodes.put(OTHER, resource_class=None)
    nodes.put(INSTANCE, traits="none")
    async with here.running():
        for _ in range(5):
            await turns()
        assert here.loop.problems() == {OTHER: NO_CLASS, INSTANCE: UNREADABLE}
        assert here.book.seen(OTHER) == {"resource_class": None, "traits": []}
        assert here.book.seen(INSTANCE) is None
        assert reserved(here) == 0
        nodes.put(INSTANCE, traits=[])
        nodes.put(OTHER, resource_class="gold")
        here.loop.read_all()
        await here.settle()
        assert here.loop.problems() == {}


async def test_the_exchange_may_come_later() -> None:
    """Ironic declares it at its first notification; until then nodes are read anyway."""
    nodes, here = world()
    here.broker = type(here.broker)(here.clock)
    here.transport, here.ironic = here.broker.transport("ironic_sync"), here.broker.transport("ironic")
    here.loop = here.make_loop()
    async with here.running():
        await turns(200)
        assert reserved(here) == 0
        assert not here.loop.healthy
        here.broker.declare_exchange("ironic")
        await here.pass_time(5)
        assert here.loop.healthy
        nodes.put(maintenance=True)
        await here.say(told("node.maintenance_set.end", maintenance=True))
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
        await here.say(told("node.maintenance_set.end"))
        await here.settle()
        assert reserved(here) == 0, "it consumes again"


async def test_ironic_away() -> None:
    """What takes away needs no Ironic; what gives back waits for it; reads come at longer and longer intervals."""
    nodes, here = world()
    async with here.running():
        await here.settle()
        nodes.fault = SourceUnavailable("away")
        nodes.put(maintenance=True)
        await here.say(told("node.maintenance_set.end", maintenance=True))
        await turns()
        assert reserved(here) == 1
        reads = nodes.reads
        until = here.clock.now + 600
        while here.clock.now < until:
            await turns(20)
            here.clock.advance(until)
        assert not here.loop.healthy
        assert nodes.reads - reads < 40
        nodes.fault = None
        nodes.put(maintenance=False)
        await here.pass_time(60)
        assert reserved(here) == 0
        assert here.loop.healthy


async def test_the_bus_away_loses_nothing_and_piles_up_one_update_a_node() -> None:
    nodes, here = world()
    async with here.running():
        await here.settle()
        here.book.fault = BusUnavailable("away")
        for on in (True, False) * 20 + (True,):
            nodes.put(maintenance=on)
            await here.say(told("node.maintenance_set.end", maintenance=on))
            await turns()
        here.book.fault = None
        told_before = len(here.book.updates)
        await here.settle()
        assert reserved(here) == 1
        assert len(here.book.updates) == told_before + 1


class Away(MemoryTerm):
    """A database that goes away in the middle of it."""

    away = False

    async def save(self, positions: Sequence[Any]) -> None:
        if Away.away:
            raise DatabaseUnavailable("away")
        await super().save(positions)


async def test_a_notification_is_acknowledged_only_after_what_it_did_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, here = world()
    monkeypatch.setattr("ironic_sync.store.memory.MemoryTerm", Away)
    async with here.running():
        await here.settle()
        Away.away = True
        nodes.put(maintenance=True)
        await here.say(told("node.maintenance_set.end", maintenance=True))
        await turns()
        assert here.loop.ledger is not None
        assert len(here.loop.ledger.deliveries) == 1
        assert reserved(here) == 0, "what is not saved is not told"
        Away.away = False
        await here.settle()
        assert reserved(here) == 1
        assert here.loop.ledger.deliveries == []


async def test_a_second_process_waits_and_takes_over_with_newer_versions() -> None:
    nodes, here = world()
    second = World(nodes, positions=here.positions)
    second.broker, second.clock = here.broker, here.clock
    second.transport = here.broker.transport("second")
    second.ironic = here.broker.transport("also ironic")
    second.book = here.book
    second.loop = second.make_loop()
    async with here.running():
        await here.settle()
        async with second.running():
            await turns()
            assert (here.loop.leading, second.loop.leading) == (True, False)
            assert second.loop.healthy
            versions = dict(here.book.versions)
            here.positions.depose()
            nodes.put(maintenance=True)
            await here.say(told("node.maintenance_set.end", maintenance=True))
            for _ in range(10):
                await turns()
                here.clock.advance()
            assert (here.loop.leading, second.loop.leading) == (False, True)
            assert reserved(here) == 1
            assert here.book.versions[NODE] > versions[NODE]


async def test_a_deposed_writer_tells_nothing_more() -> None:
    nodes, here = world()
    async with here.running():
        await here.settle()
        here.positions.depose()
        held = here.positions.lead()
        async with held:
            count = len(here.book.updates)
            nodes.put(maintenance=True)
            await here.say(told("node.maintenance_set.end", maintenance=True))
            await turns(200)
            assert len(here.book.updates) == count
            assert not here.loop.leading
            assert await here.transport.depth(here.config.queue) == 1, "the notification is left to the next writer"


async def test_a_restart_tells_everything_again_with_newer_versions() -> None:
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
        here.book.fault = BusUnavailable("away")
        nodes.put(maintenance=True)
        await here.say(told("node.maintenance_set.end", maintenance=True))
        await turns()
    again = World(nodes, positions=here.positions)
    nodes.fault = SourceUnavailable("and Ironic is away too")
    async with again.running():
        await turns()
        assert reserved(again) == 1


async def test_an_offer_is_not_told_again_on_a_read_that_something_heard_has_overtaken() -> None:
    """A new writer tells everything again: what it has yet to look at again waits for that look."""

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
        await again.say(told("node.power_set.end"))
        await turns()
        nodes.gate.set()
        await turns()
        nodes.answers.set()
        await again.settle()
        assert [update.providers[0].inventories["CUSTOM_GOLD"].reserved for update in again.book.updates] == [1]


async def test_now_and_then_all_is_told_again() -> None:
    nodes, here = world(resync_s=60.0, retell_s=300.0)
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


async def test_that_a_node_is_gone_is_told_again_too() -> None:
    """Removed while it was in use it stayed in the book, without capacity: only a later word lets go of it."""
    nodes, here = world(resync_s=60.0, retell_s=300.0, forget_removed_s=1000.0)
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
    again = World(nodes, positions=here.positions, forget_removed_s=1000.0)
    again.clock.now = here.clock.now
    async with again.running():
        await again.settle()
        assert [update.providers for update in again.book.updates] == [()], "and by the next writer"
        await again.pass_time(5000)
        assert not again.positions.positions


async def test_removed_nodes_are_forgotten_after_a_while() -> None:
    nodes, here = world(forget_removed_s=1000.0, retell_s=500.0)
    async with here.running():
        await here.settle()
        nodes.nodes.clear()
        here.loop.read_all()
        await here.settle()
        assert list(here.positions.positions) == [NODE]
        await here.pass_time(2000)
        assert not here.positions.positions
        assert here.loop.ledger is not None
        assert not here.loop.ledger.positions


def test_the_virtual_clock_does_not_move_by_itself() -> None:
    clock = VirtualClock()
    assert clock.time() == clock.time()
    assert json.dumps(FREE)
