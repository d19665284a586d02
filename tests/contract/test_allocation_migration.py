"""A flat host turns nested while it is in use: both books move inventory and allocations in one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from bus.contracts.placement import (
    Claim,
    ClaimOption,
    ClaimResult,
    Inventory,
    InventoryResult,
    InventoryUpdate,
    ProviderReport,
    Release,
)
from bus.faults import Transient
from placement_worker.book import ResourceBook
from placement_worker.operations import audit
from placement_worker.store.postgres_rows import PostgresBookRows
from tests.contract.books import KINDS, Books, books
from tests.contract.rig import PATIENCE_S

ROOT, LEFT, RIGHT, POOL = (f"{letter * 8}-0000-4000-8000-000000000000" for letter in "abcd")
CONSUMERS = [f"c000000{n}-0000-4000-8000-000000000000" for n in range(8)]


@pytest.fixture(params=KINDS)
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Books]:
    """Books in which the audit finds nothing, whatever was done to them."""
    async with books(request) as made:
        yield made
        for store in made.made:
            if isinstance(store.rows, PostgresBookRows):
                async with store.rows.database.raw() as connection:
                    assert await audit.findings(connection) == []


@pytest.fixture
async def store(make: Books) -> ResourceBook:
    made = make()
    await made.open()
    return made


def node(uuid: str, parent: str | None = None, *, takes_from: str | None = None, **amounts: int) -> ProviderReport:
    inventories = {name: Inventory(total=amount) for name, amount in amounts.items()}
    return ProviderReport(uuid=uuid, name=uuid, parent_uuid=parent, inventories=inventories, takes_from=takes_from)


def report(*nodes: ProviderReport, version: int) -> InventoryUpdate:
    return InventoryUpdate(source="s", version=version, root_uuid=nodes[0].uuid, providers=nodes)


FLAT = report(node(ROOT, VCPU=8, VGPU=4), version=1)
NESTED = report(
    node(ROOT, VCPU=8),
    node(LEFT, ROOT, takes_from=ROOT, VGPU=2),
    node(RIGHT, ROOT, takes_from=ROOT, VGPU=2),
    version=2,
)


def claim(consumer: str, shape: int | None = None, attempt: int = 1, **amounts: int) -> Claim:
    option = ClaimOption(allocations={ROOT: amounts}, shapes={} if shape is None else {ROOT: shape})
    return Claim(consumer=consumer, attempt=attempt, options=(option,), project_id="p")


async def used(store: ResourceBook) -> dict[str, dict[str, int]]:
    page = await store.snapshot(None, 100)
    return {state.uuid: dict(state.used) for state in page.providers}


async def reported(store: ResourceBook, update: InventoryUpdate) -> InventoryResult:
    (result,) = await store.report([update])
    assert isinstance(result, InventoryResult), result
    return result


async def test_inventory_and_allocations_move_together(store: ResourceBook) -> None:
    await reported(store, FLAT)
    await reported(store, report(node(POOL, DISK_GB=10), version=1))
    three = Claim(
        consumer=CONSUMERS[2],
        options=(ClaimOption(allocations={ROOT: {"VCPU": 1, "VGPU": 2}, POOL: {"DISK_GB": 5}}),),
        project_id="p",
    )
    await store.apply([claim(CONSUMERS[0], VCPU=1, VGPU=1), claim(CONSUMERS[1], VCPU=3), three])
    head = (await store.head()).sequence
    result = await reported(store, NESTED)
    assert (result.outcome, result.stranded) == ("applied", ())
    assert await used(store) == {ROOT: {"VCPU": 5}, LEFT: {"VGPU": 2}, RIGHT: {"VGPU": 1}, POOL: {"DISK_GB": 5}}
    changes = (await store.changes(head, 100)).changes
    assert [(change.provider, change.state is not None) for change in changes] == [
        (ROOT, True), (LEFT, True), (RIGHT, True)
    ]  # fmt: skip
    # Each consumer that holds something has its attempt and generation; giving back reaches the children and the pool.
    (again,) = await store.apply([claim(CONSUMERS[0], VCPU=1, VGPU=1)])
    assert isinstance(again, ClaimResult)
    assert (again.outcome, again.consumer_generation, again.option) == ("claimed", 1, None)
    assert again.holding == {ROOT: {"VCPU": 1}, RIGHT: {"VGPU": 1}}
    await store.apply([Release(consumer=consumer) for consumer in CONSUMERS[:3]])
    assert await used(store) == {ROOT: {}, LEFT: {}, RIGHT: {}, POOL: {}}
    assert (await reported(store, report(*NESTED.providers, version=3))).outcome == "unchanged"


async def test_a_conductors_next_claim_goes_on_as_if_nothing_had_moved(store: ResourceBook) -> None:
    await reported(store, FLAT)
    await reported(store, report(node(POOL, VCPU=1), version=1))
    await store.apply([claim(CONSUMERS[0], VCPU=1, VGPU=1)])
    await reported(store, NESTED)
    elsewhere = ClaimOption(allocations={POOL: {"VCPU": 1}})
    again = Claim(
        consumer=CONSUMERS[0],
        attempt=2,
        consumer_generation=1,
        release_first=True,
        options=(elsewhere,),
        project_id="p",
    )
    (result,) = await store.apply([again])
    assert result.outcome == "claimed"
    assert await used(store) == {ROOT: {}, LEFT: {}, RIGHT: {}, POOL: {"VCPU": 1}}


async def test_a_claim_chosen_for_the_flat_host_has_raced_not_filled(store: ResourceBook) -> None:
    await reported(store, FLAT)
    shape = (await store.snapshot(None, 1)).providers[0].shape
    await reported(store, NESTED)
    (late,) = await store.apply([claim(CONSUMERS[0], shape, VCPU=1, VGPU=1)])
    assert late.outcome == "raced"
    (never,) = await store.apply([claim(CONSUMERS[0], VCPU=1, VGPU=1)])
    assert never.outcome == "full"


async def test_what_finds_no_room_goes_later(store: ResourceBook) -> None:
    await reported(store, FLAT)
    await store.apply([claim(CONSUMERS[0], VGPU=3), claim(CONSUMERS[1], VGPU=1)])
    half = report(node(ROOT, VCPU=8), node(LEFT, ROOT, takes_from=ROOT, VGPU=3), version=2)
    assert (await reported(store, half)).stranded == (f"{ROOT}/VGPU",)
    assert await used(store) == {ROOT: {"VGPU": 1}, LEFT: {"VGPU": 3}}
    await store.apply([Release(consumer=CONSUMERS[0])])
    again = await reported(store, report(*half.providers, version=3))
    assert (again.outcome, again.stranded) == ("applied", ())
    assert await used(store) == {ROOT: {}, LEFT: {"VGPU": 1}}


async def test_boots_and_deletes_go_on_beside_it(make: Books, store: ResourceBook) -> None:
    others = [make() for _ in range(3)]
    for other in others:
        await other.open()
    flat = report(node(ROOT, VCPU=80, VGPU=40), version=1)
    nested = report(
        node(ROOT, VCPU=80), node(LEFT, ROOT, takes_from=ROOT, VGPU=20), node(RIGHT, ROOT, takes_from=ROOT, VGPU=20),
        version=2,
    )  # fmt: skip
    await reported(store, flat)
    held = asyncio.Event()
    done = asyncio.Event()

    async def live(other: ResourceBook, number: int) -> None:
        """Claims and releases the same two consumers over and over, wherever there is something."""
        attempt = 0
        while not done.is_set():
            attempt += 1
            mine = CONSUMERS[2 * number : 2 * number + 2]
            await other.apply([claim(consumer, attempt=attempt, VCPU=1, VGPU=1) for consumer in mine])
            held.set()
            if attempt % 2 or not done.is_set():
                await other.apply([Release(consumer=mine[0])])

    async def upgrade() -> None:
        await held.wait()
        for _ in range(200):  # busy holders: the consumer of the queue would call again, too
            try:
                await reported(store, nested)
                break
            except Transient as busy:
                assert busy.code == "inventory.holders_busy"
        done.set()

    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(upgrade(), *(live(other, number) for number, other in enumerate(others)))
    assert done.is_set()
    now = await used(store)
    assert "VGPU" not in now[ROOT]
    await store.apply([Release(consumer=consumer) for consumer in CONSUMERS])
    assert await used(store) == {ROOT: {}, LEFT: {}, RIGHT: {}}
