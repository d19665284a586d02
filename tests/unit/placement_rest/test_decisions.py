"""The results of the REST API's writes, decided without a database, and of those that gather."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.faults import DatabaseUnavailable, Transient
from placement_worker.domain.allocations import Replace, decide
from placement_worker.domain.claim_ledger import ConsumerWrite
from placement_worker.domain.refusal import RefusalCode, WriteRefusal
from placement_worker.domain.reports import changes_of
from placement_worker.domain.trees import (
    CreateProvider,
    DeleteInventory,
    DeleteProvider,
    ProviderTrees,
    SetAggregates,
    SetInventories,
    SetTraits,
    TreeWrite,
    UpdateProvider,
    WriteInventory,
)
from placement_worker.domain.values import (
    ClaimedProvider,
    ConsumerState,
    InventoryUsage,
    Provider,
    StoredInventory,
    state_of,
)
from placement_worker.replica.replica import Replica
from placement_worker.rest.write_batcher import BATCH_S, MAX_ENTRIES, TRIES, Groups, TooMany
from tests.unit.replica.worlds import dump, loaded

# --- The results of the REST API's writes, decided without a database: Placement's generations, capacity, and refusals.


# --- the results of the REST API's writes, decided without a database: Placement's generations, capacity, and
# refusals

CLASSES = {"VCPU": 1, "DISK_GB": 2}
TRAITS = {"CUSTOM_T": 1}


def inventory(total: int, **fields: Any) -> StoredInventory:
    return StoredInventory(
        **{
            "total": total,
            "reserved": 0,
            "min_unit": 1,
            "max_unit": 100,
            "step_size": 1,
            "allocation_ratio": 1.0,
            "capacity": total,
            **fields,
        }
    )


def provider(uuid: str, **fields: Any) -> Provider:
    made = {
        "parent": None,
        "root": uuid,
        "generation": 5,
        "spec_generation": 5,
        "inventories": {},
        "used": {},
        "traits": (),
        "aggregates": (),
    }
    return Provider(uuid=uuid, name=f"name-{uuid}", **{**made, **fields})


def trees_of(*providers: Provider) -> ProviderTrees:
    return ProviderTrees({p.uuid: p for p in providers}, CLASSES, TRAITS, spec_generation=6)


def why(outcome: object) -> RefusalCode | None:
    return outcome.code if isinstance(outcome, WriteRefusal) else None


@pytest.mark.parametrize(
    ("item", "refused"),
    [
        (SetInventories("a", {"DISK_GB": inventory(1)}, 5), None),
        (SetInventories("a", {"DISK_GB": inventory(1)}), None),
        (SetInventories("a", {"DISK_GB": inventory(1)}, 4), RefusalCode.GENERATION),
        (SetInventories("a", {"DISK_GB": inventory(1)}, 5, problem="it is odd"), RefusalCode.BAD_INVENTORY),
        (SetInventories("a", {"CUSTOM_NONE": inventory(1)}, 5), RefusalCode.NO_SUCH),
        (WriteInventory("a", "DISK_GB", inventory(1)), None),
        (WriteInventory("a", "DISK_GB", inventory(1), problem="it is odd"), RefusalCode.BAD_INVENTORY),
        (WriteInventory("a", "CUSTOM_NONE", inventory(1)), RefusalCode.NO_SUCH),
        (WriteInventory("a", "VCPU", inventory(1)), RefusalCode.DUPLICATE),
        (WriteInventory("a", "VCPU", inventory(1), 5), None),
        (WriteInventory("a", "VCPU", inventory(1), 4), RefusalCode.GENERATION),
        (WriteInventory("a", "VCPU", inventory(1), 5, problem="it is odd"), RefusalCode.BAD_INVENTORY),
        (WriteInventory("a", "DISK_GB", inventory(1), 5), RefusalCode.NO_INVENTORY),
        (WriteInventory("a", "CUSTOM_NONE", inventory(1), 5), RefusalCode.NO_SUCH),
        (DeleteInventory("a", "VCPU"), None),
        (DeleteInventory("a", "DISK_GB"), RefusalCode.NO_INVENTORY),
        (DeleteInventory("a", "CUSTOM_NONE"), RefusalCode.NO_INVENTORY),
    ],
)
def test_a_write_of_inventories_is_refused_as_placement_refuses_it(
    item: TreeWrite, refused: RefusalCode | None
) -> None:
    trees = trees_of(provider("a", inventories={"VCPU": inventory(4)}))
    assert why(trees.apply(item)) is refused
    assert (trees.providers["a"].generation == 6) is (refused is None)


def claimed(**used: int) -> dict[str, ClaimedProvider]:
    return {
        uuid: ClaimedProvider(
            5, 5, {"VCPU": InventoryUsage(10, 1, 8, 1, amount), "DISK_GB": InventoryUsage(10, 2, 10, 2, 0)}, root=uuid
        )
        for uuid, amount in used.items()
    }


def write(consumer: str, amount: int, host: str = "a", name: str = "VCPU", **fields: Any) -> Replace:
    held = {host: {name: amount}} if amount else {}
    return Replace((ConsumerWrite(consumer, held, "p", "u", **fields),))


def test_what_does_not_worsen_an_overage_is_allowed() -> None:
    held = ConsumerState(1, 0, "p", "u", "X", {"a": {"VCPU": 6}})
    for amount, fits in ((6, True), (5, True), (7, False)):
        [outcome], _ = decide([write("c", amount)], {"c": held}, claimed(a=20), CLASSES)
        assert (outcome is None) is fits


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("cde"), st.integers(0, 9), st.sampled_from("ab")), max_size=12))
def test_a_group_is_what_its_members_are_one_after_the_other(requested: list[tuple[str, int, str]]) -> None:
    items = [write(consumer, amount, host) for consumer, amount, host in requested]
    together, decision = decide(items, {}, claimed(a=0, b=0), CLASSES)
    consumers: dict[str, ConsumerState] = {}
    providers = claimed(a=0, b=0)
    apart = []
    for item in items:
        [outcome], step = decide([item], consumers, providers, CLASSES)
        apart.append(outcome)
        for uuid, after in step.consumers.items():
            consumers.pop(uuid, None)
            if after is not None:
                consumers[uuid] = after
        for uuid, used in step.used.items():
            inventories = {
                n: InventoryUsage(r.capacity, r.min_unit, r.max_unit, r.step_size, used.get(n, r.used))
                for n, r in providers[uuid].inventories.items()
            }
            providers[uuid] = ClaimedProvider(step.generations[uuid], 5, inventories, root=uuid)
    assert together == apart
    assert {u: c for u, c in decision.consumers.items() if c is not None} == consumers
    for uuid, used in decision.used.items():
        assert used["VCPU"] == providers[uuid].inventories["VCPU"].used <= 10
        assert decision.generations[uuid] == providers[uuid].generation


# --- whatever the REST API writes in one group: the feed carries what placement then is, and spec_generations never
# come back

A, B = UUIDS = [f"{letter * 8}-0000-4000-8000-000000000000" for letter in "ab"]
SOME = st.sampled_from(UUIDS)
STOCK_CLASSES, STOCK_TRAITS = {"VCPU": 0}, ("CUSTOM_X", "CUSTOM_Y")


def stock(total: int) -> StoredInventory:
    return StoredInventory(total, 0, 1, total, 1, 1.0, total)


def created(uuid: str, parent: str | None = None) -> CreateProvider:
    return CreateProvider(uuid, f"name-{uuid[0]}", parent)


# Objects that are written together: one write, or a provider deleted and created again.
WRITES: st.SearchStrategy[list[TreeWrite]] = st.one_of(
    st.builds(created, SOME, st.none() | SOME).map(lambda write: [write]),
    st.builds(lambda uuid: [DeleteProvider(uuid), created(uuid)], SOME),
    st.builds(lambda uuid: [DeleteProvider(uuid)], SOME),
    st.builds(lambda uuid, parent: [UpdateProvider(uuid, f"name-{uuid[0]}", parent, True)], SOME, st.none() | SOME),
    st.builds(lambda uuid, total: [SetInventories(uuid, {"VCPU": stock(total)})], SOME, st.integers(1, 3)),
    st.builds(lambda uuid, trait: [SetTraits(uuid, [trait])], SOME, st.sampled_from(STOCK_TRAITS)),
    st.builds(lambda uuid, other: [SetAggregates(uuid, [other])], SOME, SOME),
)
GROUPS = st.lists(
    st.lists(WRITES, min_size=1, max_size=5).map(lambda parts: [write for part in parts for write in part]),
    min_size=1,
    max_size=6,
)


@given(GROUPS)
def test_the_feed_carries_what_a_group_of_writes_comes_to(groups: list[list[TreeWrite]]) -> None:
    providers: Mapping[str, Provider] = {}
    replica = Replica()
    given: dict[str, set[int]] = {}
    for spec_generation, group in enumerate(groups, 1):
        trees = ProviderTrees(providers, STOCK_CLASSES, STOCK_TRAITS, spec_generation=spec_generation)
        for write in group:
            trees.apply(write)
        changes = changes_of(providers, trees.providers)
        published = [replace(change, sequence=replica.sequence + at) for at, change in enumerate(changes, 1)]
        assert replica.apply(published) is None
        assert dump(replica) == dump(loaded(map(state_of, trees.providers.values())))
        for uuid, provider in trees.providers.items():
            if uuid not in providers or providers[uuid].spec_generation != provider.spec_generation:
                assert provider.spec_generation not in given.setdefault(uuid, set())
                given[uuid].add(provider.spec_generation)
        providers = trees.providers


# --- Writes that gather: one transaction for what came meanwhile, one outcome each, and no write fails for a neighbour.


HANG_S = 60.0


class Doubling:
    """Doubles what it is given; refuses to store 13, and fails as often as it is instructed."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.commits = 0
        self.failures: list[Exception] = []
        self.go = asyncio.Event()
        self.go.set()
        self.began = asyncio.Event()

    async def apply(self, items: Sequence[int]) -> list[int]:
        self.groups.append(list(items))
        self.began.set()
        await self.go.wait()
        if self.failures:
            raise self.failures.pop(0)
        if 13 in items:
            raise ValueError("13")
        return [2 * item for item in items]

    def committed(self) -> None:
        self.commits += 1


def make(service: Doubling, *, gather_s: float = BATCH_S, **limits: int) -> Groups[int, int]:
    limits = {"max_group": 4, "max_waiting": 8, **limits}
    return Groups("test", service.apply, committed=service.committed, gather_s=gather_s, **limits)


async def test_what_gathers_is_the_next_group() -> None:
    service = Doubling()
    groups = make(service)
    service.go.clear()
    tasks = [asyncio.create_task(groups.submit(number)) for number in range(7)]
    await service.began.wait()
    service.go.set()
    assert await asyncio.gather(*tasks) == [0, 2, 4, 6, 8, 10, 12]
    assert [len(group) for group in service.groups] == [4, 3]
    assert service.commits == 2
    await groups.drain()


async def test_item_16_a_group_has_no_more_entries_than_a_turn_of_the_loop_may_take() -> None:
    service = Doubling()
    groups = Groups(
        "test", service.apply, max_group=8, max_waiting=8, committed=service.committed, entries=lambda item: item
    )
    service.go.clear()
    large, half = MAX_ENTRIES + 1, MAX_ENTRIES // 2
    tasks = [asyncio.create_task(groups.submit(number)) for number in (1, half, half, 1, large, 1, 1)]
    await service.began.wait()
    service.go.set()
    await asyncio.gather(*tasks)
    assert service.groups == [[1, half], [half, 1], [large], [1, 1]]
    await groups.drain()


async def test_a_transaction_that_hangs_holds_up_only_its_own_writes() -> None:
    """It waits for a lock that another program holds: the writes that come after it, one by one, are answered."""
    service = Doubling()
    began, go_on = asyncio.Event(), asyncio.Event()

    async def apply(items: Sequence[int]) -> list[int]:
        if 1 in items:
            began.set()
            await go_on.wait()
        return await service.apply(items)

    groups = Groups("test", apply, max_group=4, max_waiting=8, committed=service.committed)
    hung = asyncio.create_task(groups.submit(1))
    await began.wait()
    async with asyncio.timeout(HANG_S):
        assert [await groups.submit(number) for number in (2, 3, 4)] == [4, 6, 8]
    go_on.set()
    assert await hung == 2
    await groups.drain()


async def test_one_bad_item_fails_alone() -> None:
    service = Doubling()
    groups = make(service)
    results = await asyncio.gather(*(groups.submit(n) for n in (1, 13, 2)), return_exceptions=True)
    assert results[0] == 2
    assert isinstance(results[1], ValueError)
    assert results[2] == 4
    assert service.commits == 2


async def test_what_breaks_after_the_commit_leaves_no_caller_waiting_and_concerns_no_other_group() -> None:
    """The callers of the group waited for ever, and those of the next one got the error."""
    service = Doubling()

    async def too_few(items: Sequence[int]) -> list[int]:
        return (await service.apply(items))[: 3 if len(items) == 4 else None]

    def broken() -> None:
        raise KeyError(service.commits)

    groups = Groups("test", too_few, max_group=4, max_waiting=8, committed=broken)
    service.go.clear()
    tasks = [asyncio.create_task(groups.submit(number)) for number in range(6)]
    await service.began.wait()
    service.go.set()
    async with asyncio.timeout(HANG_S):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results[:3] + results[4:] == [0, 2, 4, 8, 10]
    assert isinstance(results[3], ValueError)
    assert service.groups == [[0, 1, 2, 3], [4, 5]]
    await groups.drain()


async def test_a_transaction_that_was_given_up_is_tried_again_but_not_for_ever() -> None:
    service = Doubling()
    groups = make(service)
    service.failures = [Transient(code="database.deadlock")] * (TRIES - 1)
    assert await groups.submit(1) == 2
    service.failures = [Transient(code="database.deadlock")] * TRIES
    with pytest.raises(Transient):
        await groups.submit(1)
    assert await groups.submit(3) == 6


async def test_a_database_that_disconnected_may_have_committed_and_is_not_tried_again() -> None:
    service = Doubling()
    groups = make(service)
    service.failures = [DatabaseUnavailable("gone")]
    with pytest.raises(DatabaseUnavailable):
        await groups.submit(1)
    assert len(service.groups) == 1


async def test_a_request_at_once_after_an_answer_is_served() -> None:
    """It hung: the worker had looked for more, and was still counted as working."""
    groups = make(Doubling())
    async with asyncio.timeout(HANG_S):
        assert [await groups.submit(number) for number in range(9)] == [2 * number for number in range(9)]


async def test_no_more_wait_than_may() -> None:
    service = Doubling()
    groups = make(service, max_waiting=2)
    service.go.clear()
    first = asyncio.create_task(groups.submit(0))
    await service.began.wait()
    waiting = [asyncio.create_task(groups.submit(n)) for n in (1, 2)]
    await asyncio.sleep(0)
    with pytest.raises(TooMany):
        await groups.submit(3)
    service.go.set()
    assert await asyncio.gather(first, *waiting) == [0, 2, 4]


async def test_a_caller_that_stops_waiting_cancels_no_other() -> None:
    service = Doubling()
    groups = make(service)
    service.go.clear()
    tasks = [asyncio.create_task(groups.submit(n)) for n in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    service.go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results[0::2] == [0, 4]
    assert isinstance(results[1], asyncio.CancelledError)


async def test_those_answered_together_are_waited_for_together() -> None:
    """The first to ask again took a group for itself, and so on for ever: 1, 7, 1, 7 ... of eight callers."""
    service = Doubling()
    groups = make(service, max_group=16, max_waiting=16, gather_s=60)  # as long as it takes: all of them come back

    async def caller(number: int) -> None:
        for _ in range(20):
            await groups.submit(number)
            for _ in range(number):  # the way to the caller and back, in turns of the loop: no two are alike
                await asyncio.sleep(0)

    async with asyncio.timeout(30):
        await asyncio.gather(*(caller(number) for number in range(8)))
    assert [len(group) for group in service.groups] == [8] * 20


async def test_no_caller_waits_long_for_callers_who_do_not_come_back() -> None:
    service = Doubling()
    groups = make(service)
    assert await asyncio.gather(*(groups.submit(number) for number in range(2))) == [0, 2]
    async with asyncio.timeout(HANG_S):
        await groups.drain()
        assert await groups.submit(3) == 6
        await groups.drain()
