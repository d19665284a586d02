"""Inventory updates on a real PostgreSQL: versions, trees, names, what is in use."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import asyncpg
import pytest

from bus.clock import new_uuid
from bus.contracts.placement import Claim, Inventory, InventoryResult, InventoryUpdate, ProviderReport, Release
from bus.faults import DatabaseUnavailable
from bus.persistence.database import Database
from placement_worker.book import ResourceBook
from placement_worker.domain.reports import ReportRefusal
from placement_worker.store.postgres_rows import PostgresBookRows

from .conftest import Book

pytestmark = pytest.mark.postgres

MakeClaim = Callable[..., Claim]


async def reported(book: Book, *updates: InventoryUpdate) -> list[str]:
    results = await book.store.report(updates)
    return [result.outcome if isinstance(result, InventoryResult) else result.code for result in results]


async def names_in_book(book: Book) -> dict[str, str]:
    page = await book.store.snapshot(None, 1000)
    return {state.name: state.root_uuid for state in page.providers}


def tree(root: str, *children: str, version: int, source: str = "s", gpus: int = 2) -> InventoryUpdate:
    reports = [ProviderReport(uuid=root, name=f"r-{root}", inventories={"VCPU": Inventory(total=4)})]
    reports += [
        ProviderReport(
            uuid=child,
            name=f"c-{child}",
            parent_uuid=root,
            inventories={"VGPU": Inventory(total=gpus)},
            traits=("CUSTOM_BLUE",),
            aggregates=(root,),
        )
        for child in children
    ]
    return InventoryUpdate(source=source, version=version, root_uuid=root, providers=tuple(reports))


async def test_an_older_version_loses_and_the_same_again_changes_nothing(book: Book, rng: random.Random) -> None:
    root = new_uuid(rng)
    assert await reported(book, book.host(root, version=5, VCPU=5)) == ["applied"]
    head = (await book.store.head()).sequence
    assert await reported(book, book.host(root, version=4, VCPU=4)) == ["stale"]
    assert await reported(book, book.host(root, version=5, VCPU=9)) == ["stale"]
    assert await reported(book, book.host(root, version=5, VCPU=5)) == ["unchanged"]
    assert await reported(book, book.host(root, version=7, VCPU=5)) == ["unchanged"]
    assert await reported(book, book.host(root, version=6, VCPU=6)) == ["stale"]
    assert (await book.store.head()).sequence == head
    assert await reported(book, book.host(root, version=1, source="other", VCPU=3)) == ["applied"]
    # Another source has changed the tree since: the same report is no longer taken on trust.
    assert await reported(book, book.host(root, version=8, VCPU=5)) == ["applied"]


async def test_of_several_versions_in_one_batch_the_newest_wins(book: Book, rng: random.Random) -> None:
    root = new_uuid(rng)
    versions = [book.host(root, version=version, VCPU=version) for version in (2, 9, 3)]
    assert await reported(book, *versions) == ["stale", "applied", "stale"]
    page = await book.store.snapshot(None, 10)
    assert page.providers[0].inventories["VCPU"][0] == 9


async def test_a_tree_grows_changes_and_goes(book: Book, rng: random.Random) -> None:
    root, one, two = sorted(new_uuid(rng) for _ in range(3))
    assert await reported(book, tree(root, one, two, version=1)) == ["applied"]
    page = await book.store.snapshot(None, 10)
    child = page.providers[1]
    assert (child.parent_uuid, child.root_uuid, child.traits, child.aggregates) == (
        root,
        root,
        ("CUSTOM_BLUE",),
        (root,),
    )
    assert await reported(book, tree(root, two, version=2)) == ["applied"]
    assert [state.uuid for state in (await book.store.snapshot(None, 10)).providers] == [root, two]
    gone = InventoryUpdate(source="s", version=3, root_uuid=root)
    assert await reported(book, gone) == ["applied"]
    assert (await book.store.snapshot(None, 10)).providers == ()
    assert await reported(book, gone) == ["unchanged"]
    removed = [change.provider for change in (await book.store.changes(0, 100)).changes if change.removed]
    assert removed == [one, root, two]
    assert await reported(book, tree(root, one, version=4)) == ["applied"]


async def test_what_is_in_use_is_stranded_until_it_is_free(
    book: Book, rng: random.Random, make_claim: MakeClaim
) -> None:
    root, child = new_uuid(rng), new_uuid(rng)
    await reported(book, tree(root, child, version=1))
    user = make_claim(new_uuid(rng), {child: {"VGPU": 1}})
    await book.store.apply([user])
    (result,) = await book.store.report([tree(root, version=2)])
    assert isinstance(result, InventoryResult)
    assert result.stranded == (child,)
    late = make_claim(new_uuid(rng), {child: {"VGPU": 1}})
    assert [getattr(reply, "outcome", None) for reply in await book.store.apply([late])] == ["full"]
    assert await reported(book, tree(root, version=3)) == ["unchanged"]
    await book.store.apply([Release(consumer=user.consumer)])
    assert await reported(book, tree(root, version=4)) == ["applied"]
    assert [state.uuid for state in (await book.store.snapshot(None, 10)).providers] == [root]
    assert await book.findings() == []


async def test_one_bad_update_leaves_its_neighbours_alone(book: Book, rng: random.Random) -> None:
    good, taken, bad_trait = (new_uuid(rng) for _ in range(3))
    await reported(book, book.host(good, VCPU=1))
    name = ProviderReport(uuid=taken, name=f"host-{good}")
    trait = ProviderReport(uuid=bad_trait, name="t", traits=("HW_NOT_A_TRAIT",))
    results = await book.store.report(
        [
            InventoryUpdate(source="s", version=1, root_uuid=taken, providers=(name,)),
            InventoryUpdate(source="s", version=1, root_uuid=bad_trait, providers=(trait,)),
            book.host(good, VCPU=2),
        ]
    )
    assert [result.code if isinstance(result, ReportRefusal) else result.outcome for result in results] == [
        "provider.name_taken",
        "trait.unknown",
        "applied",
    ]


async def test_names_pass_on_in_one_batch(book: Book, rng: random.Random) -> None:
    a, b, c = (new_uuid(rng) for _ in range(3))

    def named(uuid: str, name: str, version: int) -> InventoryUpdate:
        reports = (ProviderReport(uuid=uuid, name=name, inventories={"VCPU": Inventory(total=1)}),)
        return InventoryUpdate(source="s", version=version, root_uuid=uuid, providers=reports)

    assert await reported(book, named(a, "one", 1), named(b, "two", 1)) == ["applied", "applied"]
    gone = InventoryUpdate(source="s", version=2, root_uuid=a)
    assert await reported(book, gone, named(b, "one", 2), named(c, "two", 1)) == ["applied"] * 3
    assert await names_in_book(book) == {"one": b, "two": c}
    gone = InventoryUpdate(source="s", version=3, root_uuid=b)
    assert await reported(book, gone, named(c, "one", 2)) == ["applied"] * 2
    assert await names_in_book(book) == {"one": c}


async def test_a_provider_moves_to_another_root(book: Book, rng: random.Random) -> None:
    old, new, child = (new_uuid(rng) for _ in range(3))
    await reported(book, tree(old, child, version=1), tree(new, version=1))
    assert await reported(book, tree(new, child, version=2)) == ["applied"]
    assert (await names_in_book(book))[f"c-{child}"] == new
    # The old root's next report no longer has it, and must not remove it from where it lives now.
    assert await reported(book, tree(old, version=2)) == ["unchanged"]
    assert f"c-{child}" in await names_in_book(book)


async def test_two_processes_create_the_same_names_at_once_and_one_is_refused(book: Book, rng: random.Random) -> None:
    second = ResourceBook(PostgresBookRows(Database(book.url, "placement")))
    await second.open()

    def named(name: str) -> InventoryUpdate:
        uuid = new_uuid(rng)
        reports = (ProviderReport(uuid=uuid, name=name, inventories={f"CUSTOM_{name}": Inventory(total=1)}),)
        return InventoryUpdate(source="s", version=1, root_uuid=uuid, providers=reports)

    names = [f"N{number}" for number in range(20)]
    mine, theirs = await asyncio.gather(
        book.store.report([named(name) for name in names]), second.report([named(name) for name in reversed(names)])
    )
    for a, b in zip(mine, reversed(theirs), strict=True):
        assert {type(a), type(b)} == {InventoryResult, ReportRefusal}
    assert sorted(await names_in_book(book)) == sorted(names)
    await second.close()


async def test_names_of_a_transaction_that_was_lost_are_not_used(
    book: Book, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server goes away between a new name's row and its commit: the number this process has seen does not exist."""
    execute = asyncpg.Connection.execute
    killer = await asyncpg.connect(book.url)

    async def lost(this: asyncpg.Connection, query: str, *args: object, **more: float) -> str:
        if query == "COMMIT":
            monkeypatch.setattr(asyncpg.Connection, "execute", execute)
            await killer.execute("SELECT pg_terminate_backend($1, 5000)", this.get_server_pid())
        return await execute(this, query, *args, **more)

    monkeypatch.setattr(asyncpg.Connection, "execute", lost)
    update = book.host(new_uuid(rng), CUSTOM_NEW=1)
    with pytest.raises(DatabaseUnavailable):
        await book.store.report([update])
    (result,) = await book.store.report([update])  # as the consumer calls again
    assert isinstance(result, InventoryResult) and result.outcome == "applied"
    await killer.close()


async def test_two_sources_own_parts_of_one_tree(book: Book, rng: random.Random) -> None:
    root, cell, device = (new_uuid(rng) for _ in range(3))
    inventory = {"SRIOV_NET_VF": Inventory(total=8)}
    places = tuple(
        ProviderReport(uuid=uuid, name="x", parent_uuid=parent, theirs=True)
        for uuid, parent in ((root, None), (cell, root))
    )
    mine = ProviderReport(uuid=device, name=f"d-{device}", parent_uuid=cell, inventories=inventory)

    def agent(version: int, *reports: ProviderReport) -> InventoryUpdate:
        return InventoryUpdate(source="agent", version=version, root_uuid=root, providers=(*places, *reports))

    assert await reported(book, agent(1, mine)) == ["inventory.not_there"]
    assert await reported(book, tree(root, cell, version=1)) == ["applied"]
    assert await reported(book, agent(1, mine)) == ["applied"]
    assert await reported(book, tree(root, cell, version=2, gpus=3)) == ["applied"]
    assert await reported(book, agent(2, mine)) == ["unchanged"]
    states = {state.uuid: state for state in (await book.store.snapshot(None, 10)).providers}
    assert {uuid: sorted(states[uuid].inventories) for uuid in (root, cell, device)} == {
        root: ["VCPU"],
        cell: ["VGPU"],
        device: ["SRIOV_NET_VF"],
    }
    assert states[cell].name == f"c-{cell}"
    assert await reported(book, agent(3)) == ["applied"]
    assert sorted(await names_in_book(book)) == sorted([f"r-{root}", f"c-{cell}"])
