"""The whole book as a value: out and in again, over another book, from a live Placement; and repairs."""

from __future__ import annotations

import asyncio

import pytest

from bus.clock import new_uuid
from bus.persistence.database import Database
from placement_worker.book import ResourceBook
from placement_worker.operations import audit, export, export_store
from placement_worker.operations.copying import CopySource
from placement_worker.operations.export import BookExport, InvalidExport
from placement_worker.operations.repair import repair
from placement_worker.replica.catch_up import LocalReplica
from placement_worker.store.postgres_rows import PostgresBookRows
from tests.integration.placement_rest.conftest import Placement, on_postgres
from tests.kit.servers import fresh_database

pytestmark = pytest.mark.postgres


async def read(store: ResourceBook) -> BookExport:
    await store.names.refresh()
    async with store.rows.database.raw() as connection:
        return await export_store.read(connection, store.names)


async def assign(store: ResourceBook, what: BookExport) -> int:
    await store.names.ensure(what.classes, what.traits)
    rows = store.rows
    assert isinstance(rows, PostgresBookRows)
    async with rows.transaction() as transaction:
        return await export_store.assign(transaction, what, store.names)


async def findings(store: ResourceBook) -> list[str]:
    async with store.rows.database.raw() as connection:
        return await audit.findings(connection)


async def fill(placement: Placement) -> tuple[list[str], list[str]]:
    await placement.call("PUT", "/resource_classes/CUSTOM_GOLD", status=201)
    await placement.call("PUT", "/traits/CUSTOM_FAST", status=201)
    hosts = [await placement.host(VCPU=8, CUSTOM_GOLD=4) for _ in range(3)]
    child = {"name": f"host-{hosts[2]}", "parent_provider_uuid": hosts[0]}
    await placement.call("PUT", f"/resource_providers/{hosts[2]}", child, status=200)
    traits = {"resource_provider_generation": 1, "traits": ["CUSTOM_FAST", "HW_CPU_X86_AVX2"]}
    await placement.call("PUT", f"/resource_providers/{hosts[1]}/traits", traits, status=200)
    consumers = [new_uuid(placement.rng) for _ in range(4)]
    for number, consumer in enumerate(consumers):
        answer = await placement.claim(consumer, hosts[number % 3], VCPU=1 + number, CUSTOM_GOLD=1)
        assert answer.status_code == 204
    return hosts, consumers


@on_postgres
async def test_a_book_goes_out_and_in_again(placement: Placement, postgres_server: str) -> None:
    hosts, consumers = await fill(placement)
    before = await read(placement.postgres)
    text = list(export.lines(before))
    assert export.parse(text) == before
    with fresh_database(postgres_server) as url:
        other = ResourceBook(PostgresBookRows(Database(url, "placement")))
        await other.open()
        replica = LocalReplica(other)
        await replica.fresh()
        assert await assign(other, export.parse(text)) == 7
        assert await read(other) == before
        assert await assign(other, before) == 0, "what is equal is not written"
        book = await replica.fresh()
        row = book.row_of(hosts[0])
        assert row is not None
        assert book.inventory_of(row)["VCPU"][1] == 1 + 4
        # The other book moves on; importing the first again undoes all of it, and its replicas learn it.
        await placement.call("DELETE", f"/allocations/{consumers[2]}", status=204)
        await placement.call("DELETE", f"/resource_providers/{hosts[2]}", status=204)
        later = await read(placement.postgres)
        assert await assign(other, later) > 0
        assert (await read(other)).consumers == later.consumers
        assert (await replica.fresh()).row_of(hosts[2]) is None
        assert await assign(other, before) > 0
        again = await read(other)
        assert (again.consumers, again.providers.keys()) == (before.consumers, before.providers.keys())
        assert (await replica.fresh()).row_of(hosts[2]) is not None
        assert await findings(other) == []
        await other.close()


def test_half_a_file_is_no_book() -> None:
    empty = BookExport(frozenset({"CUSTOM_A"}), frozenset(), {}, {})
    text = list(export.lines(empty))
    assert export.parse(text) == empty
    for bad in (text[:-1], text[1:], [], [b"{"], [*text, text[1]], [text[0], text[-1]], [b"\xff"]):
        with pytest.raises(InvalidExport):
            export.parse(bad)


@on_postgres
async def test_a_live_placement_is_copied_until_equal(placement: Placement, postgres_server: str) -> None:
    hosts, consumers = await fill(placement)
    with fresh_database(postgres_server) as url:
        copy = ResourceBook(PostgresBookRows(Database(url, "placement")))
        await copy.open()
        source = CopySource(placement.base_url, "admin")
        assert await assign(copy, await source.read()) == 7
        await placement.call("DELETE", f"/allocations/{consumers[0]}", status=204)
        moved = new_uuid(placement.rng)
        assert (await placement.claim(moved, hosts[1], VCPU=2)).status_code == 204
        assert await assign(copy, await source.read()) > 0
        assert await assign(copy, await source.read()) == 0
        ours, theirs = await read(copy), await read(placement.postgres)
        assert ours.consumers == theirs.consumers
        assert {u: (p.generation, p.inventories, p.used, p.traits, p.root) for u, p in ours.providers.items()} == {
            u: (p.generation, p.inventories, p.used, p.traits, p.root) for u, p in theirs.providers.items()
        }
        assert await findings(copy) == []
        await source.close()
        await copy.close()


@on_postgres
async def test_repair_counts_anew_what_is_wrong_and_publishes_it_on_the_feed(placement: Placement) -> None:
    hosts, consumers = await fill(placement)
    replica = await placement.replica()
    async with placement.postgres.rows.database.raw() as connection:
        await connection.execute("UPDATE inventories SET used = used + 1")
        await connection.execute("DELETE FROM consumers WHERE uuid = $1", consumers[1])
        await connection.execute("DELETE FROM allocations WHERE consumer = $1", consumers[2])
    assert len(await placement.findings()) == 11
    async with placement.postgres.rows.database.raw() as connection:
        done = await repair(connection)
    assert len(done) == 6
    assert done[-1].startswith("project ")
    assert await placement.findings() == []
    book = await replica.fresh()
    rows = [book.row_of(host) for host in hosts]
    assert [book.inventory_of(row)["VCPU"][1] for row in rows if row is not None] == [5, 0, 0]
    async with placement.postgres.rows.database.raw() as connection:
        assert await repair(connection) == []
    await asyncio.gather(*(placement.claim(new_uuid(placement.rng), host, VCPU=1) for host in hosts))
    assert await placement.findings() == []
