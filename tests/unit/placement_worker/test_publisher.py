"""Placement's feed, placements from outside, a cell that refuses, and any order of trees."""

from __future__ import annotations

import asyncio
import random
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.bus import API, Bus
from bus.clock import SystemClock
from bus.contracts.feed import FeedChanges
from bus.contracts.placement import Claim, ClaimOption, Inventory, InventoryUpdate, ProviderReport, Release
from bus.contracts.queues import BY_QUEUE, EVENTS
from bus.memory import MemoryBroker, MemoryTransport
from bus.service.environment import Environment
from bus.transport import BusForbidden
from placement_worker.app import build
from placement_worker.config import PlacementConfig
from placement_worker.domain.reports import Applied, changes_of, plan
from placement_worker.domain.server_groups import GroupMember
from placement_worker.domain.values import ConsumerState, Provider, StoredInventory
from placement_worker.operations.export import InvalidExport, PlacementExport, checked, lines, parse
from placement_worker.publisher import TAKEN_WAIT_S, FeedPublisher
from placement_worker.service import PlacementService
from placement_worker.store import trees
from placement_worker.store.memory_rows import MemoryPlacementRows
from placement_worker.store.memory_table import MemoryPlacementTable
from tests.kit.virtual_time import on_virtual_time
from tests.unit.berth.world import HandClock

# --- Placement's feed, its differences, and placements from outside.


# --- how the worker forgets: often enough to keep up, a batch at a time
HOST = "10000000-0000-4000-8000-000000000000"
USER = "c0000000-0000-4000-8000-000000000000"


def publisher_of(config: PlacementConfig) -> tuple[HandClock, MemoryPlacementTable, PlacementService, FeedPublisher]:
    """On a placement in memory."""
    clock = HandClock()
    table = MemoryPlacementTable(clock)
    store = PlacementService(MemoryPlacementRows(table.session()))
    bus = Bus(API, MemoryTransport(MemoryBroker(clock), API), process="p", clock=clock, rng=random.Random(1))
    return clock, table, store, FeedPublisher(store, bus, clock=clock, config=config)


async def report(store: PlacementService, version: int, total: int) -> None:
    inventory = ProviderReport(uuid=HOST, name="h", inventories={"VCPU": Inventory(total=total)})
    await store.apply_reports([InventoryUpdate(reporter="s", version=version, root_uuid=HOST, providers=(inventory,))])


async def test_a_full_batch_is_followed_by_the_next_at_once() -> None:
    config = PlacementConfig(trim_batch=100, ended_attempt_retention_s=3600.0, trim_interval_s=7200.0)
    clock, table, store, publisher = publisher_of(config)
    await report(store, 1, 1000)
    consumers = [f"c0000000-0000-4000-8000-{number:012d}" for number in range(450)]
    option = ClaimOption(allocations={HOST: {"VCPU": 1}})
    await store.apply([Claim(consumer=uuid, options=(option,), project_id="p") for uuid in consumers])
    await store.apply([Release(consumer=uuid, attempt=1) for uuid in consumers])
    started = clock.monotonic()
    trimming = asyncio.create_task(publisher.trim())
    async with asyncio.timeout(20):
        while table.consumers:  # noqa: ASYNC110  (whatever it is, it needs only turns of the loop)
            await asyncio.sleep(0)
    trimming.cancel()
    await asyncio.gather(trimming, return_exceptions=True)
    assert clock.monotonic() - started < 2 * config.trim_interval_s


async def test_trimming_removes_retired_trees_that_are_unused() -> None:
    _, table, store, publisher = publisher_of(PlacementConfig())
    await report(store, 1, 4)
    option = ClaimOption(allocations={HOST: {"VCPU": 1}})
    await store.apply([Claim(consumer=USER, options=(option,), project_id="p")])
    await store.apply_reports([InventoryUpdate(reporter="s", version=2, root_uuid=HOST)])
    await store.apply([Release(consumer=USER)])
    trimming = asyncio.create_task(publisher.trim())
    async with asyncio.timeout(20):
        while table.providers:  # noqa: ASYNC110  (whatever it is, it needs only turns of the loop)
            await asyncio.sleep(0)
    trimming.cancel()
    await asyncio.gather(trimming, return_exceptions=True)


async def test_who_finds_another_publishing_looks_again_for_what_it_has_left() -> None:
    clock, table, store, publisher = publisher_of(PlacementConfig())
    other = PlacementService(MemoryPlacementRows(table.session()))
    sending, confirmed = asyncio.Event(), asyncio.Event()
    sent: list[int] = []

    async def send(published: FeedChanges) -> None:
        changes = published.changes
        sent.extend(change.sequence for change in changes)
        sending.set()
        await confirmed.wait()

    async def note(published: FeedChanges) -> None:
        changes = published.changes
        sent.extend(change.sequence for change in changes)

    publisher._send = note  # type: ignore[method-assign]
    async with asyncio.timeout(20):
        await report(store, 1, 1)
        turn = asyncio.create_task(other.publish(send, 1))
        await sending.wait()
        await report(store, 2, 2)
        started = clock.now
        running = asyncio.create_task(publisher.run())
        publisher.wake()
        while clock.now < started + TAKEN_WAIT_S:  # noqa: ASYNC110  (whatever it is, it needs only turns of the loop)
            await asyncio.sleep(0)
        confirmed.set()
        await turn
        while len(sent) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert sent == [1, 2]


async def test_a_full_queue_of_another_program_holds_up_no_feed() -> None:
    _, _, store, publisher = publisher_of(PlacementConfig())
    bus = publisher._bus
    await bus.open()
    full = replace(BY_QUEUE["client.record.{process}"], max_length=1)
    await bus.transport.declare_queue(full, "client.record.full", ((EVENTS, "placement.event.#"),))
    for version in range(1, 4):
        await report(store, version, version)
        await publisher._publish_all()
    assert not (await store.newest()).unpublished and await bus.transport.depth("client.record.full") == 1
    await bus.close()


async def test_the_event_of_a_claim_waits_for_its_answer_to_leave_and_all_other_events_for_nothing() -> None:
    config = PlacementConfig(feed_linger_s=0.5, feed_gap_s=0.0)
    clock, _, _, publisher = publisher_of(config)
    published_at: list[float] = []

    async def publish_all() -> None:
        published_at.append(clock.monotonic())

    publisher._publish_all = publish_all  # type: ignore[method-assign]
    running = asyncio.create_task(publisher.run())
    started = clock.monotonic()
    publisher.wake()
    async with asyncio.timeout(20):
        while len(published_at) < 1:  # noqa: ASYNC110  (whatever it is, it needs only turns of the loop)
            await asyncio.sleep(0)
        publisher.wake(at_once=False)
        while len(published_at) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert published_at == [started, started + config.feed_linger_s]


# --- the differences of a provider's long lists are found without a comparison of each pair
MEMBERS = 2_000


class Member(str):
    """A name that counts the comparisons with others."""

    __slots__ = ()
    compared: ClassVar[list[int]] = [0]

    def __eq__(self, other: object) -> bool:
        self.compared[0] += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def members(first: int) -> list[Member]:
    return [Member(f"CUSTOM_{number}") for number in range(first, first + MEMBERS)]


def test_item_16_long_lists_of_members_are_not_compared_pair_by_pair() -> None:
    before, after = members(0), members(MEMBERS // 2)
    Member.compared[0] = 0
    gone, come = trees.difference(before, after)
    assert Member.compared[0] < 20 * MEMBERS
    assert gone == before[: MEMBERS // 2]
    assert come == after[MEMBERS // 2 :]


# --- placements from outside: what cannot be one is refused in a sentence, before anything is written
A, B, C = (f"0000000{number}-0000-4000-8000-000000000000" for number in (1, 2, 3))
INVENTORY = StoredInventory(8, 0, 1, 8, 1, 2.0, 16)
EXPORTED = Provider(A, "host ü☃", None, A, 1, 1, {"VCPU": INVENTORY}, {}, ("HW_CPU_X86_VMX",), (C,))
HOLDER = ConsumerState(1, 0, "gone project", "u", "INSTANCE", {A: {"VCPU": 4}})
MEMBER = GroupMember("p", C, B)


def export_of(**changes: Any) -> PlacementExport:
    host = replace(EXPORTED, **changes)
    return PlacementExport(frozenset(), frozenset(), {host.uuid: host}, {})


def joined(**changes: Any) -> PlacementExport:
    return replace(held(), members=frozenset({replace(MEMBER, **changes)}))


def held(**changes: Any) -> PlacementExport:
    return PlacementExport(
        frozenset(), frozenset(), {A: EXPORTED}, {changes.pop("uuid", B): replace(HOLDER, **changes)}
    )


@pytest.mark.parametrize(
    "bad",
    [
        export_of(uuid="x", root="x"),
        export_of(uuid=A.replace("1", "a").upper(), root=A.replace("1", "a").upper()),
        export_of(parent="x"),
        export_of(name=""),
        export_of(name="a\x00b"),
        export_of(name="n" * 300),
        export_of(generation=-1),
        export_of(generation=2**80),
        export_of(traits=("lower",)),
        export_of(traits=("CUSTOM_A\n",)),
        export_of(aggregates=("x",)),
        export_of(inventories={"vcpu": INVENTORY}),
        export_of(inventories={"VCPU": replace(INVENTORY, total=0)}),
        export_of(inventories={"VCPU": replace(INVENTORY, total=2**31)}),
        export_of(inventories={"VCPU": replace(INVENTORY, reserved=-1)}),
        export_of(inventories={"VCPU": replace(INVENTORY, min_unit=0)}),
        export_of(inventories={"VCPU": replace(INVENTORY, step_size=0)}),
        export_of(inventories={"VCPU": replace(INVENTORY, capacity=2**70)}),
        held(uuid="x"),
        held(generation=-1),
        held(attempt=2**40),
        held(project_id=""),
        held(user_id="a\x00"),
        held(consumer_type="instance"),
        held(allocations={}),
        held(allocations={A: {"VCPU": 0}}),
        held(allocations={A: {"VCPU": -4}}),
        held(allocations={A: {"VCPU": 2**70}}),
        held(allocations={B: {"VCPU": 1}}),
        held(allocations={A: {"DISK_GB": 1}}),
        joined(project=""),
        joined(group="x"),
        joined(consumer=C),
        PlacementExport(frozenset({"custom_x"}), frozenset(), {}, {}),
        PlacementExport(frozenset(), frozenset({""}), {}, {}),
        PlacementExport(frozenset(), frozenset(), {A: EXPORTED, B: replace(EXPORTED, uuid=B, root=B)}, {}),
    ],
)
def test_what_is_no_placement_is_refused_with_its_reason(bad: PlacementExport) -> None:
    with pytest.raises(InvalidExport):
        checked(bad)


def test_unusual_exports_are_exports() -> None:
    full = replace(INVENTORY, reserved=8, capacity=0)
    closed = replace(INVENTORY, orphaned=True, reserved=8, capacity=0)
    over = replace(INVENTORY, total=1, reserved=2, allocation_ratio=0.05, capacity=0)
    for inventory in (full, closed, over):
        good = PlacementExport(
            frozenset({"CUSTOM_X"}), frozenset(), {A: replace(EXPORTED, inventories={"VCPU": inventory})}, {B: HOLDER}
        )
        assert checked(good) == good
    assert checked(held(consumer_type="")).consumers[B].consumer_type == ""


@pytest.mark.parametrize(("inventory", "capacity"), [(INVENTORY, 16), (replace(INVENTORY, orphaned=True), 0)])
def test_a_capacity_that_does_not_follow_from_the_rest_is_counted_anew(
    inventory: StoredInventory, capacity: int
) -> None:
    edited = checked(export_of(inventories={"VCPU": replace(inventory, capacity=10_000)}))
    assert edited.providers[A].inventories["VCPU"].capacity == capacity


HOSTILE = {
    "not UTF-8": b'{"resource_class":"\xff"}',
    "a name that is not UTF-8": b'{"\xff":1}',
    "nested without end": b'{"x":' + b"[" * 100_000,
    "of other types": b'{"provider":[]}',
    "empty": b"",
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("number", [0, 1], ids=["the first line", "a later one"])
def test_hostile_bytes_are_no_placement_and_the_error_names_the_line(line: bytes, number: int) -> None:
    rows = [*lines(export_of())]
    with pytest.raises(InvalidExport, match=f"line {number + 1}"):
        parse([*rows[:number], line, *rows[number:]])


# --- A placement worker beside a cell of the settings whose broker refuses it.


class Refusing(MemoryTransport):
    """A bus whose broker refuses every connection."""

    async def open(self) -> None:
        raise BusForbidden("vhost not found")


@on_virtual_time
async def test_a_cell_that_refuses_does_not_make_placement_unready() -> None:
    clock = SystemClock()
    broker = MemoryBroker(clock)
    env = Environment(
        "placement-1",
        transports=lambda name: (Refusing if name == "c1" else MemoryTransport)(broker, f"placement-1 {name}"),
        cell_transports=lambda name, _: MemoryTransport(broker, name),
        cells=("c1",),
        clock=clock,
        rng=random.Random(1),
    )
    store = PlacementService(MemoryPlacementRows(MemoryPlacementTable(clock).session()))
    service = build(env, PlacementConfig(), ["c1"], store=store)
    stop = asyncio.Event()
    running = asyncio.create_task(service.run(stop))
    await asyncio.wait({running, asyncio.ensure_future(service.ready.wait())}, return_when="FIRST_COMPLETED")
    assert service.not_ready() == []
    stop.set()
    await running


# --- Whatever trees are reported in whatever order: placement stays a forest, and nothing in use is lost.


UUIDS = [f"{letter * 8}-0000-4000-8000-000000000000" for letter in "abcde"]


@st.composite
def updates(draw: st.DrawFn) -> InventoryUpdate:
    """A root and some of the others below it, each under one that comes before it; or the tree's removal."""
    order = draw(st.permutations(UUIDS))
    size = draw(st.integers(0, len(order)))
    reports = [
        ProviderReport(
            uuid=uuid,
            name=f"n-{uuid[0]}",
            parent_uuid=order[draw(st.integers(0, at - 1))] if at else None,
            inventories={"VCPU": Inventory(total=draw(st.integers(1, 9)))} if draw(st.booleans()) else {},
        )
        for at, uuid in enumerate(order[:size])
    ]
    return InventoryUpdate(reporter="s", version=1, root_uuid=order[0], providers=tuple(reports))


STEPS = st.lists(st.tuples(updates(), st.dictionaries(st.sampled_from(UUIDS), st.integers(0, 3))), max_size=8)


@given(STEPS)
def test_trees_stay_a_forest_and_nothing_in_use_is_lost(steps: list[tuple[InventoryUpdate, dict[str, int]]]) -> None:
    providers: dict[str, Provider] = {}
    reported: dict[str, tuple[str, ...]] = {}
    for spec_generation, (update, usage) in enumerate(steps, 1):
        for uuid, amount in usage.items():
            if uuid in providers and "VCPU" in providers[uuid].inventories:
                providers[uuid] = replace(providers[uuid], used={"VCPU": amount} if amount else {})
        planned = plan([update], [reported.get(update.root_uuid, ())], providers, spec_generation=spec_generation)
        (result,) = planned.results
        check_forest(planned.after)
        check_nothing_lost(providers, planned.after)
        check_changes(providers, planned.after)
        if isinstance(result, Applied):
            reported[update.root_uuid] = result.reported
            for report in update.providers:
                assert planned.after[report.uuid].root == update.root_uuid
                assert planned.after[report.uuid].parent == report.parent_uuid
        else:
            assert planned.after == providers, "a refused update leaves no trace"
        providers = planned.after


def check_forest(providers: dict[str, Provider]) -> None:
    for uuid, provider in providers.items():
        seen = [uuid]
        while (parent := providers[seen[-1]].parent) is not None:
            assert parent in providers, f"{seen[-1]} hangs under nothing"
            assert parent not in seen, "round in circles"
            seen.append(parent)
        assert provider.root == seen[-1]
    assert len({provider.name for provider in providers.values()}) == len(providers)


def check_nothing_lost(before: dict[str, Provider], after: dict[str, Provider]) -> None:
    for uuid, provider in before.items():
        if provider.used:
            assert after[uuid].used == provider.used
            assert provider.used.keys() <= after[uuid].inventories.keys()


def check_changes(before: dict[str, Provider], after: dict[str, Provider]) -> None:
    """A changed row has a higher generation, and a replica that applies the changes has placement."""
    for uuid in before.keys() & after.keys():
        if after[uuid] != before[uuid]:
            assert after[uuid].generation > before[uuid].generation
    changes = {change.provider: change for change in changes_of(before, after)}
    assert {uuid for uuid, change in changes.items() if change.removed} == before.keys() - after.keys()
    assert {uuid for uuid, change in changes.items() if change.state} >= after.keys() - before.keys()
