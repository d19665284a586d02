"""Providers that go and come back, within one transaction or later: replicas and claims distinguish them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.clock import SystemClock
from bus.contracts.placement import (
    Claim,
    ClaimOption,
    Inventory,
    InventoryResult,
    InventoryUpdate,
    ProviderReport,
    Release,
)
from bus.persistence.database import Database
from placement_worker.book import ResourceBook
from placement_worker.replica.book import Book
from placement_worker.store.memory_rows import MemoryBookRows
from placement_worker.store.memory_table import MemoryBookTable
from placement_worker.store.postgres_rows import PostgresBookRows
from tests.contract.books import HOSTS, VMS
from tests.unit.replica.worlds import dump

A, B = HOSTS[:2]
DEVICES = [f"d00000{n:02d}-0000-4000-8000-000000000000" for n in range(20)]


def device(uuid: str, parent: str, total: int = 8) -> ProviderReport:
    return ProviderReport(uuid=uuid, name=uuid, parent_uuid=parent, inventories={"VGPU": Inventory(total=total)})


def report(
    root: str, version: int, *children: ProviderReport, source: str = "s", traits: tuple[str, ...] = ()
) -> InventoryUpdate:
    host = ProviderReport(uuid=root, name=f"host-{root[0]}", inventories={"VCPU": Inventory(total=100)}, traits=traits)
    return InventoryUpdate(source=source, version=version, root_uuid=root, providers=(host, *children))


def taken_out(root: str, version: int, source: str = "s") -> InventoryUpdate:
    return InventoryUpdate(source=source, version=version, root_uuid=root)


async def reported(store: ResourceBook, *updates: InventoryUpdate) -> list[str]:
    results = await store.report(updates)
    return [result.outcome if isinstance(result, InventoryResult) else result.code for result in results]


async def follow(store: ResourceBook, book: Book) -> None:
    """Fold in what the feed carries, and see that the book then equals the store."""
    page = await store.changes(book.sequence, 10_000)
    assert book.apply(page.changes) is None
    assert book.sequence == page.head
    whole = Book()
    snapshot = await store.snapshot(None, 1000)
    whole.load(snapshot.providers, snapshot.sequence)
    assert dump(book) == dump(whole)
    assert len(book) == len(whole)


async def shape(store: ResourceBook, uuid: str) -> int:
    return next(state.shape for state in (await store.snapshot(None, 1000)).providers if state.uuid == uuid)


async def claimed(store: ResourceBook, vm: str, provider: str, **amounts: int) -> str:
    """Claim for the shape that the provider has now."""
    option = ClaimOption(allocations={provider: amounts}, shapes={provider: await shape(store, provider)})
    (reply,) = await store.apply([Claim(consumer=vm, options=(option,), project_id="p")])
    return str(reply.outcome)


async def test_children_that_move_between_two_reports_of_one_transaction_are_followed(store: ResourceBook) -> None:
    """Removed and made again in one transaction, their generations went back and replicas kept the old ones."""
    book = Book()
    await reported(store, report(A, 2, *(device(uuid, A) for uuid in DEVICES)), report(B, 2))
    for _ in range(5):  # usage moves the generations on
        assert await claimed(store, VMS[0], DEVICES[0], VGPU=1) == "claimed"
        await store.apply([Release(consumer=VMS[0])])
    await follow(store, book)
    assert (
        await reported(store, report(A, 3), report(B, 3, *(device(uuid, B, 6) for uuid in DEVICES))) == ["applied"] * 2
    )
    await follow(store, book)
    rows = [book.row_of(uuid) for uuid in DEVICES]
    assert {book.uuid_of(book.root_of(row)) for row in rows if row is not None} == {B}
    for uuid, vm in zip(DEVICES, VMS, strict=False):
        assert await claimed(store, vm, uuid, VGPU=6) == "claimed"
    await follow(store, book)
    root = book.row_of(B)
    assert root is not None
    assert book.inventory_of(rows[0] or 0)["VGPU"][2] == 0, "nothing of it is left"


async def test_a_root_taken_out_by_one_source_and_reported_by_another_is_followed(store: ResourceBook) -> None:
    book = Book()
    for version in range(2, 6):
        await reported(store, report(A, version, traits=(f"CUSTOM_{version}",)))
    await follow(store, book)
    assert (
        await reported(store, taken_out(A, 6), report(A, 1, source="heir", traits=("CUSTOM_HEIR",))) == ["applied"] * 2
    )
    await follow(store, book)
    row = book.row_of(A)
    assert row is not None
    assert book.traits_of(row) == ("CUSTOM_HEIR",)


@pytest.mark.parametrize("at_once", [True, False], ids=["in one transaction", "later"])
async def test_a_claim_chosen_for_a_provider_that_was_made_anew_has_raced(store: ResourceBook, at_once: bool) -> None:
    """It had SGX, it went, it came back without: the claim was chosen for another host."""
    sgx, new = DEVICES[0], VMS[0]
    assert await reported(store, report(sgx, 1, traits=("HW_CPU_X86_SGX",))) == ["applied"]
    option = ClaimOption(allocations={sgx: {"VCPU": 1}}, shapes={sgx: await shape(store, sgx)})
    gone, back = taken_out(sgx, 2), report(sgx, 1, source="heir")
    for updates in [[gone, back]] if at_once else [[gone], [back]]:
        assert await reported(store, *updates) == ["applied"] * len(updates)
    (reply,) = await store.apply([Claim(consumer=VMS[0], options=(option,), project_id="p")])
    assert reply.outcome == "raced"
    await reported(store, report(new, 1))
    assert await shape(store, new) != await shape(store, sgx), "no two are ever given the same"


# --- whatever is reported in one transaction

TREE = (A, B, *DEVICES[:3])


@st.composite
def updates(draw: st.DrawFn) -> tuple[str, str, tuple[tuple[str, int, int], ...]]:
    """(source, root, (provider, place of its parent, total) ...): what is left out of it is taken out."""
    root, *others = draw(st.permutations(TREE))
    size = draw(st.integers(0, len(TREE)))
    nodes = [
        (uuid, draw(st.integers(0, at)), draw(st.integers(1, 3))) for at, uuid in enumerate([root, *others][:size])
    ]
    return draw(st.sampled_from(("s", "t"))), root, tuple(nodes)


HOLDS = st.dictionaries(st.sampled_from(VMS[:3]), st.sampled_from([None, *TREE]), max_size=2)
STEPS = st.lists(st.tuples(st.lists(updates(), min_size=1, max_size=5), HOLDS), min_size=1, max_size=5)
Steps = list[tuple[list[tuple[str, str, tuple[tuple[str, int, int], ...]]], dict[str, str | None]]]


def update_of(source: str, root: str, nodes: tuple[tuple[str, int, int], ...], version: int) -> InventoryUpdate:
    reports = [
        ProviderReport(
            uuid=uuid,
            name=uuid,
            parent_uuid=nodes[place - 1][0] if at and place else (root if at else None),
            inventories={"VGPU": Inventory(total=total)},
        )
        for at, (uuid, place, total) in enumerate(nodes)
    ]
    return InventoryUpdate(source=source, version=version, root_uuid=root, providers=tuple(reports))


async def check(store: ResourceBook, steps: Steps, versions: Iterator[int]) -> None:
    """After each transaction the feed has carried what the snapshot holds, and nothing has gone back."""
    book = Book()
    await store.open()
    snapshot = await store.snapshot(None, 1000)
    book.load(snapshot.providers, snapshot.sequence)
    shapes: dict[str, set[int]] = {}
    for reports, holds in steps:
        before = {state.uuid: state for state in (await store.snapshot(None, 1000)).providers}
        await store.report([update_of(*one, next(versions)) for one in reports])
        after = {state.uuid: state for state in (await store.snapshot(None, 1000)).providers}
        for uuid in before.keys() & after.keys():
            assert (after[uuid].generation > before[uuid].generation) is (after[uuid] != before[uuid])
            assert after[uuid].shape >= before[uuid].shape
        for uuid, state in after.items():
            if uuid not in before or state.shape != before[uuid].shape:
                assert state.shape not in shapes.get(uuid, ()), "a shape came back"
                shapes.setdefault(uuid, set()).add(state.shape)
        for vm, provider in holds.items():
            option = ClaimOption(allocations={provider or A: {"VGPU": 1}})
            write = Release(consumer=vm) if provider is None else Claim(consumer=vm, options=(option,), project_id="p")
            await store.apply([write])
        await follow(store, book)


@pytest.fixture(scope="module")
def versions() -> Iterator[int]:
    return count(1)


@given(steps=STEPS)
@settings(max_examples=100, deadline=None)
def test_the_feed_agrees_with_the_snapshot_in_memory(steps: Steps, versions: Iterator[int]) -> None:
    asyncio.run(check(ResourceBook(MemoryBookRows(MemoryBookTable(SystemClock()).session())), steps, versions))


@pytest.mark.postgres
def test_the_feed_agrees_with_the_snapshot_in_postgresql(postgres_url: str, versions: Iterator[int]) -> None:
    with asyncio.Runner() as runner:
        store = ResourceBook(PostgresBookRows(Database(postgres_url, "placement")))
        runner.run(store.open())
        try:
            replay(runner.run, store, versions)
        finally:
            runner.run(store.close())


def replay(run: Callable[[Coroutine[None, None, None]], None], store: ResourceBook, versions: Iterator[int]) -> None:
    @given(steps=STEPS)
    @settings(max_examples=25, deadline=None)
    def each(steps: Steps) -> None:
        run(emptied(store))
        run(check(store, steps, versions))

    each()


async def emptied(store: ResourceBook) -> None:
    async with store.rows.database.raw() as connection:
        await connection.execute("TRUNCATE providers, sources, consumers, allocations, changes CASCADE")
        await connection.execute("UPDATE feed_head SET number = 0")
