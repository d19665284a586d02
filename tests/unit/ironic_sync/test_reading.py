"""When the loop reads nodes, and what it trusts meanwhile: late reads, lost ends, allocations, lists."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from bus.clock import Clock, event_or_time
from bus.transport import BusUnavailable
from ironic_sync import metrics
from ironic_sync.domain.rules import ABSENT, NO_CLASS
from ironic_sync.reader import READS_A_SECOND
from ironic_sync.source.port import IronicUnavailable
from ironic_sync.sync_state import UNREADABLE
from ironic_sync.writer import PUBLISH_BATCH
from tests.unit.ironic_sync.world import INSTANCE, NODE, OTHER, Nodes, World, body, notification, reserved, turns, world

PATIENCE_S = 60.0


async def test_withdrawing_does_not_wait_for_the_read() -> None:
    nodes, here = world()
    async with here.running():
        await here.settle()
        assert reserved(here) == 0
        nodes.gate.clear()
        nodes.put(maintenance=True)
        await here.notify(notification("node.maintenance_set.end", maintenance=True))
        await turns()
        assert nodes.under_way == 1, "the read is on its way"
        assert reserved(here) == 1
        assert here.placement.causes[-1] == "req-1"
        nodes.gate.set()


async def test_giving_back_waits_for_the_read() -> None:
    nodes, here = world()
    nodes.put(maintenance=True)
    async with here.running():
        await here.settle()
        nodes.gate.clear()
        nodes.put(maintenance=False)
        await here.notify(notification("node.maintenance_set.end"))
        await turns()
        assert reserved(here) == 1
        nodes.gate.set()
        await here.settle()
        assert reserved(here) == 0


async def test_a_read_overtaken_by_events_gives_nothing_back() -> None:
    """The read was sent while the node was free; before its answer came, the node was taken."""
    nodes, here = world()
    nodes.put(provision_state="cleaning")
    async with here.running():
        await here.settle()
        nodes.put(provision_state="available")
        nodes.gate.clear()
        await here.notify(notification("node.provision_set.end"))
        await turns()
        nodes.put(provision_state="deploying", instance_uuid=INSTANCE)
        await here.notify(notification("node.provision_set.start", provision_state="deploying"))
        await turns()
        nodes.gate.set()
        await here.settle()
        assert [update.providers[0].inventories["CUSTOM_GOLD"].reserved for update in here.placement.updates] == [1]


async def test_many_events_about_a_node_being_read_is_one_more_read() -> None:
    nodes, here = world()
    async with here.running():
        await here.settle()
        nodes.gate.clear()
        for _ in range(100):
            await here.notify(notification("node.update.end"))
        await turns(400)
        nodes.gate.set()
        await here.settle()
        assert nodes.reads == 2
        assert nodes.most_under_way == 1


async def test_a_start_is_read_later_unless_its_end_comes() -> None:
    nodes, here = world()
    async with here.running():
        await here.settle()
        await here.notify(notification("node.maintenance_set.start", maintenance=True))
        await here.settle()
        assert (nodes.reads, reserved(here)) == (0, 0), "nothing has happened yet"
        nodes.put(maintenance=True)
        await here.pass_time(1)
        assert (nodes.reads, reserved(here)) == (1, 1), "its end was lost"
        nodes.put(maintenance=False)
        await here.notify(notification("node.maintenance_set.start"))
        await here.notify(notification("node.maintenance_set.end"))
        await here.settle()
        assert reserved(here) == 0
        await here.pass_time(1)
        assert nodes.reads == 2


async def test_many_nodes_are_read_side_by_side_within_the_bound() -> None:
    nodes, here = world(reads_in_flight=4)
    uuids = [f"00000000-0000-4000-8000-{i:012x}" for i in range(20)]
    for uuid in uuids:
        nodes.put(uuid)
    async with here.running():
        await here.settle()
        nodes.gate.clear()
        for uuid in uuids:
            await here.notify(notification("node.update.end", uuid))
        await turns(400)
        assert nodes.under_way == 4
        nodes.gate.set()
        await here.settle()
        assert nodes.most_under_way == 4
        assert nodes.reads == 20


def storm(nodes: Nodes, count: int = 300) -> list[str]:
    uuids = [f"00000000-0000-4000-8000-{i:012x}" for i in range(count)]
    for uuid in uuids:
        nodes.put(uuid)
    return uuids


async def read_through(here: World) -> None:
    """Until no read is due any more."""
    async with asyncio.timeout(PATIENCE_S):
        while not here.loop.idle:
            here.clock.advance()
            await turns()
    await here.settle()


async def test_a_storm_is_read_at_one_rate() -> None:
    """Two thousand nodes went into maintenance in 1.9 s; 2,001 single reads had the last notification wait 10 s."""
    nodes, here = world()
    uuids = storm(nodes, 1000)
    async with here.running():
        await here.settle()
        for on in (True, False):
            began, reads = here.clock.now, nodes.reads
            for uuid in uuids:
                nodes.put(uuid, maintenance=on)
                await here.notify(notification("node.maintenance_set.end", uuid, maintenance=on))
            await turns(3000)
            assert all(reserved(here, uuid) == 1 for uuid in uuids), "taken away at once, and none offered unread"
            assert nodes.reads - reads <= 2 * READS_A_SECOND
            await read_through(here)
            assert {reserved(here, uuid) for uuid in uuids} == {int(on)}
            assert nodes.reads - reads == len(uuids)
            assert here.clock.now - began == pytest.approx(len(uuids) / READS_A_SECOND, abs=1.5)
        assert nodes.lists == 1


async def test_a_node_on_offer_is_read_before_those_that_are_held() -> None:
    """Its read may take it away."""
    nodes, here = world()
    uuids = storm(nodes, 5 * READS_A_SECOND)
    async with here.running():
        await here.settle()
        for uuid in uuids:
            await here.notify(notification("node.maintenance_set.end", uuid, maintenance=True))
        await turns(3000)
        nodes.put(instance_uuid=INSTANCE)  # in silence
        await here.notify(notification("node.update.error"))
        await turns()
        for _ in range(3):
            here.clock.advance()
            await turns()
        assert reserved(here) == 1 and nodes.reads < len(uuids)


async def test_what_is_taken_away_is_published_before_what_is_offered() -> None:
    nodes, here = world()
    async with here.running():
        await here.settle()
        here.placement.fault = BusUnavailable("away")
        uuids = storm(nodes, 3 * PUBLISH_BATCH)
        here.loop.read_all()
        await turns(500)
        await here.notify(notification("node.maintenance_set.end", maintenance=True))
        nodes.put(maintenance=True)
        await turns(500)
        here.placement.fault = None
        await here.settle()
        order = [update.root_uuid for update in here.placement.updates[1:]]
        assert order.index(NODE) <= PUBLISH_BATCH and set(order) == {NODE, *uuids}


async def test_what_a_list_answers_is_not_read_again() -> None:
    nodes, here = world()
    uuids = storm(nodes, 1000)
    async with here.running():
        await here.settle()
        for uuid in uuids:
            await here.notify(notification("node.maintenance_set.end", uuid, maintenance=True))
        await turns(3000)
        here.loop.read_all()
        await here.settle()
        assert not any(reserved(here, uuid) for uuid in uuids)
        assert nodes.reads <= 2 * READS_A_SECOND and nodes.lists == 2


async def test_many_nodes_that_ironic_has_no_more_are_read_one_by_one() -> None:
    """Lists were read in their place, one after the other, and none has what is gone: all stayed on offer for ever."""
    nodes, here = world()
    uuids = storm(nodes)
    async with here.running():
        await here.settle()
        lists = nodes.lists
        for uuid in uuids:
            del nodes.nodes[uuid]  # without a word: Ironic's notifications of it are lost
        here.loop.read_all()
        await read_through(here)
        assert all(reserved(here, uuid) for uuid in uuids) and not reserved(here)
        assert here.loop.problems() == dict.fromkeys(uuids, ABSENT)
        assert nodes.lists - lists == 1 and nodes.reads == len(uuids), (nodes.lists - lists, nodes.reads)


async def test_many_made_up_uuids_are_read_once_and_hold_up_no_other_read() -> None:
    nodes, here = world()
    async with here.running():
        await here.settle()
        lists = nodes.lists
        for number in range(500):
            await here.notify(notification("node.update.end", f"00000000-0000-4000-8000-{number:012x}"))
        await read_through(here)
        assert here.loop.sync_state is not None
        assert here.loop.sync_state.known() == [NODE] and len(here.placement.updates) == 1
        assert nodes.reads == 500 and nodes.lists == lists, (nodes.reads, nodes.lists - lists)
        nodes.put(maintenance=True)
        await here.notify(notification("node.maintenance_set.end", maintenance=True))
        await here.settle()
        assert reserved(here) == 1


async def test_nothing_turns_while_the_next_read_is_paced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop over due nodes did not wait, and used a whole core."""
    nodes, here = world()
    uuids = storm(nodes)
    async with here.running():
        await here.settle()
        for uuid in uuids:
            await here.notify(notification("node.update.end", uuid))
        await turns(2000)
        waits: list[float | None] = []
        monkeypatch.setattr("ironic_sync.reader.event_or_time", partial(counted, waits))
        await turns(500)
        assert not waits, len(waits)
        await read_through(here)


async def counted(waits: list[float | None], event: asyncio.Event, clock: Clock, seconds: float | None) -> bool:
    waits.append(seconds)
    return await event_or_time(event, clock, seconds)


async def test_a_storm_while_lists_fail_is_read_node_by_node() -> None:
    nodes, here = world(reads_in_flight=4)
    uuids = storm(nodes)
    async with here.running():
        await here.settle()
        nodes.list_fault = IronicUnavailable("too large")
        for on in (True, False):
            for uuid in uuids:
                nodes.put(uuid, maintenance=on)
                await here.notify(notification("node.maintenance_set.end", uuid, maintenance=on))
            await read_through(here)
            assert {reserved(here, uuid) for uuid in uuids} == {int(on)}


async def test_a_transient_node_is_read_again_until_it_is_there() -> None:
    """18-lost-end: the last event is `cleaning`."""
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
        await here.notify(body("allocation.create.end", {"uuid": INSTANCE, "node_uuid": None, "state": "allocating"}))
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
        first = here.placement.versions[NODE]
        del nodes.nodes[NODE]
        nodes.gate.clear()
        await here.notify(notification("node.delete.end"))
        await turns()
        assert reserved(here) == 1, "held back before the 404 confirms it"
        nodes.gate.set()
        await here.settle()
        assert here.placement.updates[-1].providers == ()
        nodes.put()
        await here.notify(notification("node.create.end"))
        await here.settle()
        assert reserved(here) == 0
        assert here.placement.versions[NODE] > first


async def test_absence_from_the_list_removes_only_what_ironic_confirms_gone() -> None:
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
        assert here.placement.seen(NODE) is not None
        nodes.nodes = {NODE: hidden[NODE]}
        here.loop.read_all()
        await here.settle()
        assert (reserved(here, OTHER), reserved(here)) == (1, 0)


async def test_a_made_up_uuid_leaves_nothing_behind() -> None:
    _, here = world()
    async with here.running():
        await here.settle()
        await here.notify(notification("node.update.end", OTHER))
        await here.settle()
        assert here.loop.sync_state is not None
        assert list(here.loop.sync_state.positions) == [NODE]
        assert len(here.placement.updates) == 1


async def test_more_nodes_than_the_bound_are_refused_aloud() -> None:
    nodes, here = world(max_nodes=3)
    for i in range(10):
        nodes.put(f"00000000-0000-4000-8000-{i:012x}")
    async with here.running():
        await here.settle()
        assert here.loop.sync_state is not None
        assert len(here.loop.sync_state.positions) == 3


async def test_nodes_without_class_and_unreadable_ones_are_listed_and_hide_no_other() -> None:
    nodes, here = world()
    nodes.put(OTHER, resource_class=None)
    nodes.put(INSTANCE, traits="none")
    async with here.running():
        for _ in range(5):
            await turns()
        assert here.loop.problems() == {OTHER: NO_CLASS, INSTANCE: UNREADABLE}
        assert here.placement.seen(OTHER) == {"resource_class": None, "traits": []}
        assert here.placement.seen(INSTANCE) is None
        assert reserved(here) == 0
        here.loop.read_all()
        await here.settle()
        assert counted_problems() == {NO_CLASS: 1, UNREADABLE: 1}
        nodes.put(INSTANCE, traits=[])
        nodes.put(OTHER, resource_class="gold")
        here.loop.read_all()
        await here.settle()
        assert here.loop.problems() == counted_problems() == {}


def counted_problems() -> dict[str, float]:
    return {sample.labels["code"]: sample.value for one in metrics.PROBLEMS.collect() for sample in one.samples}


async def test_the_next_writer_counts_the_problems_that_it_finds_on_record() -> None:
    """It counted changes: none of these nodes, and one less than none when it was in order. The last one's stayed."""
    nodes, here = world()
    nodes.put(OTHER, resource_class=None)
    for _ in range(2):
        async with here.running():
            await here.settle()
            assert counted_problems() == {NO_CLASS: 1}
            assert (metrics.LEADER._value.get(), metrics.BOUND._value.get()) == (1, 1)
        assert counted_problems() == {}
        assert (metrics.LEADER._value.get(), metrics.BOUND._value.get()) == (0, 0)
        here = World(nodes, positions=here.positions)
    nodes.put(OTHER, resource_class="gold")
    async with here.running():
        await here.settle()
        assert counted_problems() == {}
