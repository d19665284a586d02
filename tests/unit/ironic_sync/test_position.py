"""Positions under any interleaving, one writer after another, lost and overtaken events."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.consuming.outcome import Received
from bus.contracts.base import Meta
from bus.contracts.placement import Inventory, InventoryStale, InventoryUpdate, ProviderReport
from bus.memory import MemoryTransport
from bus.transport import BusUnavailable
from ironic_sync.config import IronicSyncConfig
from ironic_sync.domain import position as step
from ironic_sync.domain.effect import Effect
from ironic_sync.domain.node import Node, Unreadable, parse_node
from ironic_sync.domain.position import Position
from ironic_sync.domain.rules import ABSENT, is_reserved, place
from ironic_sync.source.port import IronicUnavailable
from ironic_sync.sync_state import UNREADABLE, SyncState
from tests.kit.cases import nightly
from tests.unit.ironic_sync.world import FREE, INSTANCE, NODE, OTHER, Nodes, World, body, notification, turns, world
from tests.unit.ironic_sync.world import FREE as FREE_NODE
from tests.unit.ironic_sync.world import reserved as reserved_in

# --- positions under any interleaving of changes, notifications and reads that overtake each other


UUID = "8296eb22-b44b-4cba-95b1-3a66b31189a4"
CONFIG = IronicSyncConfig()
AT_ONCE = IronicSyncConfig(absent_retention_s=0.0)  # a node that Ironic does not show is removed
STATES = ("available", "active", "cleaning", "manageable")


def node(state: str, trait: int) -> Node:
    raw: dict[str, Any] = {"uuid": UUID, "provision_state": state, "power_state": "power off", "resource_class": "x"}
    parsed = parse_node({**raw, "traits": [f"CUSTOM_{trait}"]})
    assert isinstance(parsed, Node)
    return parsed


class Model:
    """One node, its position, reads on their way, and what is certain."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.seq = 0
        self.node = node("available", 0)
        self.position = Position(uuid=UUID)
        self.reads: list[tuple[int, Node]] = []
        self.withdrawn_seen = 0
        self.last_answer = 0
        self.versions: list[int] = []

    def change(self, state: str, trait: int) -> None:
        self.node = node(state, trait)

    def publish(self) -> None:
        self.seq += 1
        withdrawn = is_reserved(self.node)
        self.withdrawn_seen = self.seq if withdrawn else self.withdrawn_seen
        self._set(step.on_notification(self.position, taken=withdrawn, seq=self.seq, now=self.now))

    def send(self) -> None:
        self.seq += 1
        self.reads.append((self.seq, self.node))

    def answer(self, which: int) -> None:
        if not self.reads:
            return
        seq, seen = self.reads.pop(which % len(self.reads))
        before = self.position
        self._set(step.apply_read(before, seen, seq=seq, now=self.now, config=CONFIG))
        if seq < self.last_answer:
            assert self.position.report == before.report or not _offers(self.position), "an older read only takes away"
        self.last_answer = max(self.last_answer, seq)
        gained = _offers(self.position) and not _offers(before)
        assert not gained or seq > self.withdrawn_seen, "given back by a read older than the news that took it away"

    def settle(self) -> None:
        """Answer what is on its way, then read while a read is due."""
        while self.reads:
            self.answer(0)
        for _ in range(100):
            due_at = self.position.due_at
            if due_at is None or due_at > self.now:
                return
            self.send()
            self.answer(0)
        raise AssertionError("it reads for ever")

    def _set(self, after: Position) -> None:
        self.now += 0.001
        if after.report != self.position.report:
            assert after.version > self.position.version
        assert after.version >= self.position.version
        self.position = after


def _offers(position: Position) -> bool:
    report = position.report
    return report is not None and any(inventory.reserved == 0 for inventory in report.inventories.values())


EVENTS = st.one_of(
    st.tuples(st.just("change"), st.sampled_from(STATES), st.integers(0, 2)),
    st.tuples(st.just("publish")),
    st.tuples(st.just("send")),
    st.tuples(st.just("answer"), st.integers(0, 3)),
)


@given(st.lists(EVENTS, max_size=30))
@example([("send",), ("change", "active", 0), ("send",), ("answer", 1), ("answer", 0)])
@example([("change", "active", 0), ("send",), ("publish",), ("change", "active", 1), ("publish",), ("answer", 0)])
def test_it_is_never_free_by_accident_and_ends_as_the_node_is(events: list[tuple[Any, ...]]) -> None:
    model = Model()
    for name, *arguments in events:
        getattr(model, name)(*arguments)
    model.publish()
    model.settle()
    assert model.position.report == place(model.node, None).report
    assert (model.position.due_at is None) == (model.node.provision_state in ("available", "active", "manageable"))


def test_waits_for_a_transient_node_double_up_to_a_bound() -> None:
    position, waits, now = Position(uuid=UUID), [], 0.0
    for seq in range(1, 12):
        position = step.apply_read(position, node("cleaning", 0), seq=seq, now=now, config=CONFIG)
        assert position.due_at is not None
        waits.append(position.due_at - now)
        now = position.due_at
    assert waits[:4] == [1.0, 2.0, 4.0, 8.0]
    assert max(waits) == waits[-1] == CONFIG.transient_retry_max_s


# --- one writer after another: taking over, starting again, telling again, forgetting


async def test_a_second_process_waits_and_takes_over_with_newer_versions() -> None:
    nodes, here = world()
    second = World(nodes, positions=here.positions)
    second.broker, second.clock = here.broker, here.clock
    second.transport = MemoryTransport(here.broker, "second")
    second.ironic = MemoryTransport(here.broker, "also ironic")
    second.placement = here.placement
    second.loop = second.make_loop()
    async with here.running():
        await here.settle()
        async with second.running():
            await turns()
            assert (here.loop.is_leader, second.loop.is_leader) == (True, False)
            assert second.loop.healthy
            versions = dict(here.placement.versions)
            here.positions.depose()
            nodes.put(maintenance=True)
            await here.notify(notification("node.maintenance_set.end", maintenance=True))
            for _ in range(10):
                await turns()
                here.clock.advance()
            assert (here.loop.is_leader, second.loop.is_leader) == (False, True)
            assert reserved_in(here) == 1
            assert here.placement.versions[NODE] > versions[NODE]


async def test_a_deposed_writer_publishes_nothing_more() -> None:
    nodes, here = world()
    async with here.running():
        await here.settle()
        here.positions.depose()
        held = here.positions.become_leader()
        async with held:
            count = len(here.placement.updates)
            nodes.put(maintenance=True)
            await here.notify(notification("node.maintenance_set.end", maintenance=True))
            await turns(200)
            assert len(here.placement.updates) == count
            assert not here.loop.is_leader
            assert await here.transport.depth(here.config.queue) == 1, "the notification is left to the next writer"


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(notification("node.maintenance_set.end", maintenance=True), id="it holds the node back already"),
        pytest.param(notification("node.update.start"), id="it only announces a change"),
        pytest.param(body("allocation.create.end", {"uuid": OTHER}), id="of an allocation"),
    ],
)
async def test_a_deposed_writer_leaves_what_only_asks_for_a_read_to_the_next_one(what: bytes) -> None:
    """It acknowledged the notification after the next writer's list, which then offered the node until its next one."""
    nodes, here = world()
    nodes.put(maintenance=True)
    async with here.running():
        await here.settle()
        here.positions.depose()
        async with here.positions.become_leader():
            await here.notify(what)
            await turns(200)
            assert not here.loop.is_leader
            assert await here.transport.depth(here.config.queue) == 1


async def test_a_restart_publishes_everything_again_with_newer_versions() -> None:
    nodes, here = world()
    async with here.running():
        await here.settle()
    before = dict(here.placement.versions)
    again = World(nodes, positions=here.positions)
    again.clock.now = here.clock.now - 1000  # even with a clock that went back
    async with again.running():
        await again.settle()
        assert again.placement.versions[NODE] > before[NODE]


async def test_what_was_saved_and_not_published_is_published_at_the_next_start() -> None:
    nodes, here = world()
    async with here.running():
        await here.settle()
        here.placement.fault = BusUnavailable("unavailable")
        nodes.put(maintenance=True)
        await here.notify(notification("node.maintenance_set.end", maintenance=True))
        await turns()
    again = World(nodes, positions=here.positions)
    nodes.fault = IronicUnavailable("and Ironic is unavailable too")
    async with again.running():
        await turns()
        assert reserved_in(again) == 1


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
        assert reserved_in(here) == 0
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
        assert [update.providers[0].inventories["CUSTOM_GOLD"].reserved for update in again.placement.updates] == [1]


async def test_all_is_published_again_at_intervals() -> None:
    nodes, here = world(resync_interval_s=60.0, republish_interval_s=300.0)
    async with here.running():
        await here.settle()
        assert len(here.placement.updates) == 1
        await here.pass_time(200)
        assert len(here.placement.updates) == 1
        await here.pass_time(200)
        assert len(here.placement.updates) == 2
        first, second = here.placement.updates
        assert isinstance(second, InventoryUpdate)
        assert (second.providers, second.version > first.version) == (first.providers, True)
        assert 5 <= nodes.lists <= 9


async def test_a_clock_that_is_set_back_puts_off_no_publication() -> None:
    """Nothing was published again until the clock was where it had been."""
    _, here = world(resync_interval_s=60.0, republish_interval_s=300.0)
    async with here.running():
        await here.settle()
        here.clock.time = lambda: here.clock.now - 50_000.0  # type: ignore[method-assign]
        await here.pass_time(400)
        assert len(here.placement.updates) == 2


async def test_that_a_node_is_gone_is_published_again_too() -> None:
    """Removed while it was in use it stayed in placement, without capacity: only a later word lets go of it."""
    nodes, here = world(
        resync_interval_s=60.0, republish_interval_s=300.0, absent_retention_s=0.0, removed_retention_s=1000.0
    )
    async with here.running():
        await here.settle()
        nodes.nodes.clear()
        here.loop.read_all()
        await here.settle()
        first = here.placement.updates[-1]
        assert not first.providers
        await here.pass_time(500)
        second = here.placement.updates[-1]
        assert (second.providers, second.version > first.version) == ((), True)
    again = World(nodes, positions=here.positions, removed_retention_s=1000.0)
    again.clock.now = here.clock.now
    async with again.running():
        await again.settle()
        assert [update.providers for update in again.placement.updates] == [()], "and by the next writer"
        await again.pass_time(5000)
        assert not again.positions.positions


async def test_what_is_held_for_a_fault_is_published_again_unless_ironic_does_not_show_it() -> None:
    """No read is applied to an unreadable node; one that is absent an operator may have deleted from placement."""
    nodes, here = world(resync_interval_s=60.0, republish_interval_s=300.0)
    nodes.put(OTHER)
    async with here.running():
        await here.settle()
        nodes.put(NODE, traits="none")
        del nodes.nodes[OTHER]
        here.loop.read_all()
        await here.settle()
        assert here.loop.problems() == {NODE: UNREADABLE, OTHER: ABSENT}
        before = dict(here.placement.versions)
        await here.pass_time(500)
        assert here.placement.versions[NODE] > before[NODE]
        assert here.placement.versions[OTHER] == before[OTHER]
        nodes.put(OTHER)
        here.loop.read_all()
        await here.settle()
        assert (reserved_in(here, NODE), reserved_in(here, OTHER)) == (1, 0)


async def test_an_absent_node_is_removed_after_long_by_another_writer_too() -> None:
    nodes, here = world(absent_retention_s=10_000.0)
    async with here.running():
        await here.settle()
        nodes.nodes.clear()
        here.loop.read_all()
        await here.settle()
        assert (reserved_in(here), here.loop.problems()) == (1, {NODE: ABSENT})
        await here.pass_time(9_000)
        assert (reserved_in(here), nodes.reads) == (1, 1)
    again = World(nodes, positions=here.positions, absent_retention_s=10_000.0)
    again.clock.now = here.clock.now
    async with again.running():
        await again.settle()
        assert again.placement.updates == [] and again.loop.problems() == {NODE: ABSENT}
        await again.pass_time(2_000)
        assert [update.providers for update in again.placement.updates] == [()]
        assert again.loop.problems() == {}


@pytest.mark.parametrize("answer", [node("manageable", 0), Unreadable(uuid=UUID, reason="")])
def test_a_read_that_a_deletion_has_overtaken_does_not_undo_its_announcement(answer: Node | Unreadable) -> None:
    """A page of a list was on its way: the node was absent for seven days, and not removed."""
    known = step.apply_read(Position(uuid=UUID), node("manageable", 0), seq=1, now=2e9 + 0, config=CONFIG)
    deleted = step.on_notification(known, taken=True, deleted=True, seq=3, now=2e9 + 1)
    if isinstance(answer, Node):
        late = step.apply_read(deleted, answer, seq=2, now=2e9 + 2, config=CONFIG)
    else:
        late = step.apply_unreadable(deleted, UNREADABLE, seq=2, now=2e9 + 2, config=CONFIG)
    assert late.due_at is not None
    assert step.apply_removed(late, seq=4, now=2e9 + 3, config=CONFIG).report is None


async def test_removed_nodes_are_forgotten_after_a_while() -> None:
    nodes, here = world(absent_retention_s=0.0, removed_retention_s=1000.0, republish_interval_s=500.0)
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
        version = here.placement.versions[NODE]
        ahead = version + 10**12
        for known in (version - 5, ahead, 2**62):
            stale = InventoryStale(reporter="ironic", root_uuid=NODE, version=known)
            await here.loop.outdated([Received(stale, Meta(id="m"), "api", "ironic.stale.test")])
            await here.settle()
            assert (here.placement.versions[NODE] > ahead) is (known >= ahead), known
        assert here.placement.versions[NODE] < 2 * ahead, "what leaves no room is not followed"


# --- a node that Ironic shows as free is offered within one read of all nodes, whatever was announced before or lost


RESYNC_S = 60.0
ONE_READ_S = RESYNC_S * 1.1 + 5  # its jitter, and the retry of a read that failed
STEPS = 40
CHANGES: tuple[dict[str, Any], ...] = (
    {"power_state": None, "maintenance": True},  # as after a power failure
    {"power_state": None},  # recovered, and read as it was noted: Ironic announces nothing
    {"power_state": "error"},
    {"maintenance": True},
    {"provision_state": "deploying", "instance_uuid": INSTANCE},
    {"provision_state": "active", "instance_uuid": INSTANCE},
    {"provision_state": "cleaning"},
    {"provision_state": "clean failed", "maintenance": True},
    {},
)
EVENTS_EVENTS = (
    "node.power_state_corrected.success",
    "node.provision_set.start",
    "node.provision_set.end",
    "node.provision_set.error",
    "node.update.start",
    "node.update.end",
    "node.maintenance_set.end",
)


class History:
    """Changes of two nodes; of what they announce some is lost, some is late, some comes twice."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.nodes, self.world = world(resync_interval_s=RESYNC_S)
        self.nodes.put(OTHER)
        self.late: list[bytes] = []

    async def happen(self) -> None:
        for _ in range(STEPS):
            node = self.rng.choice((NODE, OTHER))
            self._change(node)
            await self._announce(node)
            await self._disturb()

    def _change(self, node: str) -> None:
        self.nodes.put(node, **{**FREE, **self.rng.choice(CHANGES)})

    async def _announce(self, node: str) -> None:
        seen = {name: value for name, value in self.nodes.nodes[node].items() if name in FREE}
        seen.pop("resource_class")
        body = notification(self.rng.choice(EVENTS_EVENTS), node, **seen)
        match self.rng.choice(("lost", "late", "once", "twice")):
            case "late":
                self.late.append(body)
            case "once":
                await self.world.notify(body)
            case "twice":
                await self.world.notify(body)
                await self.world.notify(body)
            case _:
                pass
        if self.late and self.rng.random() < 0.3:
            await self.world.notify(self.late.pop(self.rng.randrange(len(self.late))))

    async def _disturb(self) -> None:
        """Reads take their time, or fail; time passes."""
        if self.rng.random() < 0.3:
            self.nodes.gate.clear()
            await turns(self.rng.randrange(20))
            return
        self.nodes.fault = IronicUnavailable("down") if self.rng.random() < 0.2 else None
        self.nodes.gate.set()
        await turns(self.rng.randrange(20))
        if self.rng.random() < 0.3:
            self.world.clock.advance(self.world.clock.now + self.rng.uniform(0, 3))


@pytest.mark.parametrize("seed", [*range(3), *nightly(*range(3, 12))])
async def test_a_free_node_is_offered_within_one_read_of_all(seed: int) -> None:
    history = History(seed)
    async with history.world.running():
        await history.world.settle()
        await history.happen()
        for node in (NODE, OTHER):
            history.nodes.put(node, **FREE)  # and nothing is announced
        for body in history.late:
            await history.world.notify(body)  # older than that
        history.nodes.fault = None
        history.nodes.gate.set()
        await history.world.pass_time(ONE_READ_S)
        assert [reserved_in(history.world, node) for node in (NODE, OTHER)] == [0, 0]


# --- a node that Ironic did not have, and of which an event came while that answer was on its way


OVERTAKEN_FREE = parse_node({"uuid": UUID, **FREE_NODE})
FAR = 1e10
REPORTED = ProviderReport(uuid=UUID, name=UUID, inventories={"CUSTOM_X": Inventory(total=1)})


@pytest.mark.parametrize(("notified_seq", "removed"), [(4, True), (6, False)])
def test_a_404_that_was_overtaken_by_a_notification_takes_nothing_out(notified_seq: int, *, removed: bool) -> None:
    """Deleted and created again while the read was under way: it is read again at once, and stays in placement."""
    before = Position(uuid=UUID, version=3, report=REPORTED, notified_seq=notified_seq, read_seq=2)
    after = step.apply_removed(before, seq=5, now=1000.0, config=AT_ONCE)
    assert (after.report is None) is removed
    assert (after.version > before.version) is removed
    assert after.due_at == (None if removed else 1000.0)


def test_a_404_of_an_older_read_than_the_last_changes_nothing() -> None:
    before = Position(uuid=UUID, version=3, report=REPORTED, read_seq=7)
    assert step.apply_removed(before, seq=5, now=1000.0, config=AT_ONCE) is before


@pytest.mark.parametrize("maintenance", [False, True])
def test_an_answer_to_an_older_read_than_the_last_only_takes_away(*, maintenance: bool) -> None:
    """A page of a list was answered after a later read of the node, and the node was in maintenance again by then."""
    before = Position(uuid=UUID, version=3, report=REPORTED, read_seq=7)
    page = parse_node({"uuid": UUID, **FREE_NODE, "resource_class": "x", "maintenance": maintenance})
    assert isinstance(page, Node)
    after = step.apply_read(before, page, seq=5, now=1000.0, config=CONFIG)
    if not maintenance:
        assert after is before
        return
    assert after.report is not None and after.report.inventories["CUSTOM_X"].reserved == 1
    assert (after.version > before.version, after.due_at, after.read_seq) == (True, 1000.0, 7)
    late = step.apply_read(after, page, seq=6, now=1001.0, config=CONFIG)
    assert late is after, "it is held already"


def state() -> SyncState:
    return SyncState({}, {}, clock=SystemClock(), config=IronicSyncConfig(max_nodes=10))


async def test_a_node_with_a_read_in_flight_is_not_purged() -> None:
    """A removed node is named by a notification, and created again; an older answer about it must not offer it."""
    kept = state()
    kept.apply_notification(Effect(read=UUID), "first")
    assert kept.pop_due(FAR) == UUID
    with kept.read_in_flight() as seq:
        kept.apply_notification(Effect(read=UUID, reserve_all=True), "second")
        assert kept.pop_due(FAR) == UUID
        kept.purge(FAR)
        kept.apply_read(OVERTAKEN_FREE, seq=seq)
        position = kept.positions[UUID]
    assert position.report is None and position.due_at is not None  # it is read again first
    kept.positions[UUID] = replace(position, due_at=None)
    kept.purge(FAR)
    assert kept.positions == {}


@pytest.mark.parametrize("listed", [True, False])
async def test_the_removal_of_an_unreported_node_is_known_until_older_answers_have_come(*, listed: bool) -> None:
    """A page of a list was on its way when Ironic answered that it has no such node."""
    kept = state()
    with contextlib.ExitStack() as pages:
        page = pages.enter_context(kept.read_in_flight()) if listed else None
        kept.apply_notification(Effect(read=UUID), "created")
        assert kept.pop_due(FAR) == UUID
        with kept.read_in_flight() as seq:
            kept.apply_removed(UUID, seq=seq)
        if page is not None:
            kept.apply_read(OVERTAKEN_FREE, seq=page)
            assert kept.positions[UUID].report is None
    kept.purge(FAR)
    assert kept.positions == {}  # a made-up uuid leaves nothing behind
