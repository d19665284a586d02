"""A book is exported, imported, copied and audited while REST clients write it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import msgspec
import pytest

from berth.cli.claims.placement_audit import _repair, _unnamed, uuids_of
from berth.cli.common import Stop
from bus.clock import new_uuid
from bus.contracts.placement import (
    Claim,
    ClaimOption,
    ConsumerAllocations,
    Inventory,
    InventoryResult,
    InventoryUpdate,
    ProviderReport,
    Swap,
)
from bus.persistence.database import Database
from placement_worker.operations import audit, export, export_store
from placement_worker.operations import audit as questions
from placement_worker.operations.audit import Duplicate, excess_of, generations, reduce_allocations, repair
from placement_worker.operations.export import CopyReader, InvalidExport, PlacementExport
from placement_worker.replica.catch_up import LocalReplica
from placement_worker.service import PlacementService
from placement_worker.store.postgres_rows import PostgresPlacementRows
from tests.integration.placement_rest.conftest import Placement, on_postgres
from tests.kit.answering import answering
from tests.kit.forks import run_berth
from tests.kit.servers import fresh_database

pytestmark = pytest.mark.postgres


# --- all of placement as a value: out and in again, over another placement, from a live Placement; and repairs


async def read(store: PlacementService) -> PlacementExport:
    await store.names.refresh()
    async with store.rows.database.raw() as connection:
        return await export_store.read(connection, store.names)


async def assign(store: PlacementService, what: PlacementExport) -> int:
    await store.names.ensure(what.classes, what.traits)
    rows = store.rows
    assert isinstance(rows, PostgresPlacementRows)
    async with rows.transaction() as transaction:
        return await export_store.assign(transaction, what, store.names)


async def findings(store: PlacementService) -> list[str]:
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
async def test_a_placement_goes_out_and_in_again(placement: Placement, postgres_server: str) -> None:
    hosts, consumers = await fill(placement)
    before = await read(placement.postgres)
    text = list(export.lines(before))
    assert export.parse(text) == before
    with fresh_database(postgres_server) as url:
        other = PlacementService(PostgresPlacementRows(Database(url, "placement")))
        await other.open()
        replica = LocalReplica(other)
        await replica.fresh()
        assert await assign(other, export.parse(text)) == 7
        assert await read(other) == before
        assert await assign(other, before) == 0, "what is equal is not written"
        current = await replica.fresh()
        row = current.row_of(hosts[0])
        assert row is not None
        assert current.inventory_of(row)["VCPU"][1] == 1 + 4
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


def test_half_a_file_is_no_placement() -> None:
    empty = PlacementExport(frozenset({"CUSTOM_A"}), frozenset(), {}, {})
    text = list(export.lines(empty))
    assert export.parse(text) == empty
    for bad in (text[:-1], text[1:], [], [b"{"], [*text, text[1]], [text[0], text[-1]], [b"\xff"]):
        with pytest.raises(InvalidExport):
            export.parse(bad)


@on_postgres
async def test_a_live_placement_is_copied_until_equal(placement: Placement, postgres_server: str) -> None:
    hosts, consumers = await fill(placement)
    with fresh_database(postgres_server) as url:
        copy = PlacementService(PostgresPlacementRows(Database(url, "placement")))
        await copy.open()
        source = CopyReader(placement.base_url, "admin")
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
    current = await replica.fresh()
    rows = [current.row_of(host) for host in hosts]
    assert [current.inventory_of(row)["VCPU"][1] for row in rows if row is not None] == [5, 0, 0]
    async with placement.postgres.rows.database.raw() as connection:
        assert await repair(connection) == []
    await asyncio.gather(*(placement.claim(new_uuid(placement.rng), host, VCPU=1) for host in hosts))
    assert await placement.findings() == []


# --- a change that moves no generation must not be missed by a copy that is reported equal


@pytest.fixture
async def source(placement: Placement) -> AsyncIterator[CopyReader]:
    made = CopyReader(placement.base_url, "admin")
    yield made
    await made.close()


async def test_a_consumer_that_was_removed_and_made_again_is_seen(placement: Placement, source: CopyReader) -> None:
    host = await placement.host(VCPU=8)
    consumer = new_uuid(placement.rng)
    assert (await placement.claim(consumer, host, VCPU=1)).status_code == 204
    before = (await source.read()).consumers[consumer]
    await placement.call("DELETE", f"/allocations/{consumer}", status=204)
    assert (await placement.claim(consumer, host, VCPU=3)).status_code == 204
    after = (await source.read(whole=False)).consumers[consumer]
    assert (before.generation, after.generation) == (1, 1)
    assert after.allocations == {host: {"VCPU": 3}}


async def test_aggregates_of_the_old_days_are_seen_by_a_whole_pass(placement: Placement, source: CopyReader) -> None:
    host, aggregate = await placement.host(VCPU=8), new_uuid(placement.rng)
    await source.read()
    path = f"/resource_providers/{host}/aggregates"
    answer = await placement.client.put(
        path, json=[aggregate], headers={"x-auth-token": "admin", "openstack-api-version": "placement 1.18"}
    )
    assert answer.status_code == 200
    assert (await source.read(whole=True)).providers[host].aggregates == (aggregate,)


async def test_an_unreachable_keystone_and_an_unknown_user(
    placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "ASK", msgspec.structs.replace(export.ASK, first_s=0.001, longest_s=0.001))
    unreachable = CopyReader("http://127.0.0.1:9", "admin")
    with pytest.raises(InvalidExport, match="ConnectError"):
        await unreachable.read()
    await unreachable.close()
    unauthorized = CopyReader(f"{placement.base_url}/resource_providers", "")
    with pytest.raises(InvalidExport):
        await unauthorized.read()
    await unauthorized.close()
    with pytest.raises((InvalidExport, httpx.HTTPError)):
        await CopyReader("gopher://x", "").read()


HOSTILE = {
    "not UTF-8": b'{"versions":[{"max_version":"\xff"}]}',
    "nested without end": b"[" * 100_000,
    "no version": b'{"versions":[{"max_version":7}]}',
    "half an answer": b'{"versions":',
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
async def test_hostile_answers_are_no_placement(body: bytes) -> None:
    async with answering(lambda _: body) as url:
        await refused(url)


@pytest.mark.parametrize("uuid", ["\\u0000", "\\n", "x" * 70_000], ids=["NUL", "a line end", "too long for a URL"])
async def test_a_provider_whose_uuid_is_no_part_of_a_url_is_no_placement(uuid: str) -> None:
    row = f'{{"uuid":"{uuid}","name":"n","parent_provider_uuid":null,"root_provider_uuid":"r","generation":1}}'
    answers = {
        "/": '{"versions":[{"max_version":"1.39"}]}',
        "/traits": '{"traits":[]}',
        "/resource_classes": '{"resource_classes":[]}',
        "/resource_providers": f'{{"resource_providers":[{row}]}}',
    }
    async with answering(lambda path: answers.get(path, "{").encode()) as url:
        await refused(url)


async def test_an_answer_that_cannot_be_unpacked_is_no_placement() -> None:
    async with answering(lambda _: b"{}", b"content-encoding: gzip\r\n") as url:
        await refused(url)


async def test_an_answer_without_end_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was kept in memory whole."""
    monkeypatch.setattr(export, "MAX_BYTES", 1000)
    async with answering(lambda _: b" " * 1001 + b'{"versions":[]}') as url:
        await refused(url, match="AnswerTooLarge")


async def refused(url: str, *, match: str = ".") -> None:
    source = CopyReader(url, "admin")
    with pytest.raises(InvalidExport, match=match):
        await source.read()
    await source.close()


# --- `berth placement audit --consumers` on a placement that REST clients write, as an operator runs it

COMMAND_TIMEOUT_S = 120.0


async def audited(placement: Placement, *words: str) -> tuple[int, dict[str, Any]]:
    env = {**os.environ, "BERTH_DATABASE__URL": str(placement.database)}
    words = ("placement", "audit", "-o", "json", *words, *(["--yes"] if "--repair" in words else []))
    done = await asyncio.to_thread(run_berth, *words, env=env, timeout_s=COMMAND_TIMEOUT_S)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}


async def age(placement: Placement) -> None:
    """All was claimed an hour ago."""
    async with placement.postgres.rows.database.raw() as connection:
        await connection.execute("UPDATE consumers SET updated_at = updated_at - interval '1 hour'")


@on_postgres
async def test_a_consumer_that_is_not_named_is_an_orphan(placement: Placement, tmp_path: Path) -> None:
    one, other = await placement.host(VCPU=8), await placement.host(VCPU=8)
    alive, orphan, doubled = (new_uuid(placement.rng) for _ in range(3))
    assert (await placement.claim(alive, one, VCPU=1)).status_code == 204
    assert (await placement.claim(orphan, one, VCPU=2)).status_code == 204
    body = {
        "allocations": {host: {"resources": {"VCPU": 1}} for host in (one, other)},
        "project_id": "p",
        "user_id": "u",
        "consumer_generation": None,
        "consumer_type": "INSTANCE",
    }
    await placement.call("PUT", f"/allocations/{doubled}", body, status=204)
    names = tmp_path / "ids"
    names.write_text(f"{alive.upper()}\n\n{doubled}\n")

    status, found = await audited(placement, "--consumers", str(names), "--repair")
    assert (found["orphaned"], found["repaired"]) == ([], []), "claimed since, perhaps"
    await age(placement)
    env = {**os.environ, "BERTH_DATABASE__URL": str(placement.database)}
    words = ("placement", "audit", "--consumers", str(names), "--repair")
    asked = await asyncio.to_thread(run_berth, *words, env=env, timeout_s=COMMAND_TIMEOUT_S)
    assert asked.returncode == 2 and "1 consumer" in asked.stderr and orphan in asked.stderr

    status, found = await audited(placement, "--consumers", str(names))
    assert (status, found["orphaned"], len(found["doubled"]), found["unsound"]) == (1, [orphan], 1, [])
    assert found["doubled"][0].startswith(f"{doubled}: VCPU of ")

    status, found = await audited(placement, "--consumers", str(names), "--repair")
    assert (status, found["orphaned"], found["repaired"]) == (1, [], [f"{orphan}: released"])
    shown = await placement.call("GET", f"/resource_providers/{one}/usages")
    assert shown.json()["usages"] == {"VCPU": 2}


@on_postgres
async def test_an_operator_gives_a_host_to_a_cell(placement: Placement) -> None:
    host = await placement.host(VCPU=8)

    async def move(cell: str, *more: str) -> tuple[int | None, str]:
        env = {**os.environ, "BERTH_DATABASE__URL": str(placement.database)}
        words = ("placement", "set-host-cell", host, cell, *more)
        done = await asyncio.to_thread(run_berth, *words, env=env, timeout_s=COMMAND_TIMEOUT_S)
        return done.returncode, done.stdout + done.stderr

    assert await move("cell1") == (0, f"{host}: no cell -> cell1\n")
    assert await move("cell1") == (0, f"{host}: cell1 already\n")
    status, output = await move("cell1", "-o", "json")
    assert (status, json.loads(output)) == (0, {"provider": host, "before": "cell1", "cell": "cell1"})
    status, output = await move("nowhere")
    assert (status, "no cell 'nowhere'" in output) == (2, True)
    assert (await placement.claim(new_uuid(placement.rng), host, VCPU=1)).status_code == 204


def test_an_empty_list_would_release_everything(tmp_path: Path) -> None:
    names = tmp_path / "ids"
    for text in ("\n", "no uuid\n"):
        names.write_text(text)
        with pytest.raises(Stop) as stop:
            uuids_of(names)
        assert stop.value.status == 2


@on_postgres
async def test_what_is_over_capacity_is_listed_with_the_newest_and_evicted_on_request(
    placement: Placement, tmp_path: Path
) -> None:
    host = await placement.host(VCPU=8)
    consumers = [new_uuid(placement.rng) for _ in range(4)]
    for consumer in consumers:
        assert (await placement.claim(consumer, host, VCPU=2)).status_code == 204
    body = {"resource_provider_generation": 5, "inventories": {"VCPU": {"total": 4}}}
    await placement.call("PUT", f"/resource_providers/{host}/inventories", body, status=200)
    names = tmp_path / "ids"
    names.write_text("\n".join(consumers))
    newest = consumers[:1:-1]

    for words in ((), ("--repair",)):  # they run: repairing alone takes nothing from them
        status, found = await audited(placement, "--consumers", str(names), *words)
        line = f"{host} VCPU: 8 of 4; fits without {newest[0]} (2), {newest[1]} (2)"
        assert (status, found["over_capacity"], found["repaired"]) == (1, [line], [])

    status, found = await audited(placement, "--consumers", str(names), "--repair", "--evict")
    assert (status, found["over_capacity"]) == (0, [])
    assert found["repaired"] == [f"{uuid}: released" for uuid in sorted(newest)]
    shown = await placement.call("GET", f"/resource_providers/{host}/usages")
    assert shown.json()["usages"] == {"VCPU": 4}


@on_postgres
async def test_a_node_that_is_held_back_while_it_is_in_use_is_as_it_should_be(
    placement: Placement, tmp_path: Path
) -> None:
    """Every deployed bare-metal node is reserved. It was called over capacity, and `--evict` would have freed it."""
    node, consumer = await placement.host(DISK_GB=1), new_uuid(placement.rng)
    assert (await placement.claim(consumer, node, DISK_GB=1)).status_code == 204
    body = {"resource_provider_generation": 2, "inventories": {"DISK_GB": {"total": 1, "reserved": 1}}}
    await placement.call("PUT", f"/resource_providers/{node}/inventories", body, status=200)
    names = tmp_path / "ids"
    names.write_text(consumer)
    status, found = await audited(placement, "--consumers", str(names), "--repair", "--evict")
    assert (status, found["over_capacity"], found["repaired"]) == (0, [], [])


@on_postgres
async def test_what_its_source_no_longer_reports_is_left_to_it(placement: Placement, tmp_path: Path) -> None:
    host, consumer = new_uuid(placement.rng), new_uuid(placement.rng)

    async def report(version: int, **totals: int) -> Sequence[str]:
        inventories = {name: Inventory(total=total) for name, total in totals.items()}
        reports = (ProviderReport(uuid=host, name="host", inventories=inventories),)
        update = InventoryUpdate(reporter="s", version=version, root_uuid=host, providers=reports)
        [result] = await placement.store.apply_reports([update])
        assert isinstance(result, InventoryResult)
        return result.orphaned

    assert not await report(1, VCPU=8, CUSTOM_CARD=2)
    assert (await placement.claim(consumer, host, CUSTOM_CARD=1)).status_code == 204
    assert await report(2, VCPU=8)
    names = tmp_path / "ids"
    names.write_text(consumer)
    line = f"{host} CUSTOM_CARD: 1 of 0, no longer reported; it is removed when it is no longer used"
    for words in ((), ("--repair", "--evict")):
        status, found = await audited(placement, "--consumers", str(names), *words)
        assert (status, found["over_capacity"], found["repaired"]) == (1, [line], [])


@on_postgres
async def test_what_an_instance_holds_twice_is_given_back(placement: Placement) -> None:
    one, other = await placement.host(VCPU=8, DISK_GB=9), await placement.host(VCPU=8, DISK_GB=9)
    [consumer, moved] = [await twice_held(placement, one, other) for _ in range(2)]
    async with placement.postgres.rows.database.raw() as connection:
        twice = await found_twice(connection, {consumer: one, moved: one}, other)
        # It has moved while the audit read whose host is whose: what it holds now has not been audited.
        entry = ConsumerAllocations(
            consumer=moved, consumer_generation=1, allocations={other: {"VCPU": 3}}, project_id="p", user_id="u"
        )
        await placement.store.apply([Swap(consumers=(entry,))])
        assert await reduce_allocations(placement.store, connection, twice) == [
            f"{consumer}: given back on {other}",
            f"{moved}: left alone, consumer_conflict",
        ]
        held = await questions.allocations(connection)
    assert held == {consumer: {one: {"VCPU": 2, "DISK_GB": 1}}, moved: {other: {"VCPU": 3}}}
    assert await placement.findings() == []


async def twice_held(placement: Placement, one: str, other: str) -> str:
    """A consumer that holds the same of two hosts."""
    consumer = new_uuid(placement.rng)
    option = ClaimOption(allocations={host: {"VCPU": 2, "DISK_GB": 1} for host in (one, other)})
    [claimed] = await placement.store.apply([Claim(consumer=consumer, options=(option,), project_id="p")])
    assert getattr(claimed, "outcome", None) == "claimed"
    return consumer


async def found_twice(connection: asyncpg.Connection, hosts: dict[str, str], other: str) -> list[Duplicate]:
    known = await generations(connection)
    held = await questions.allocations(connection)
    return [
        each
        for uuid, host in hosts.items()
        for each in excess_of(uuid, host, held[uuid], {host: host, other: other}, frozenset(), known[uuid])
        if isinstance(each, Duplicate)
    ]


@on_postgres
async def test_what_has_changed_since_it_was_judged_is_not_released(placement: Placement, tmp_path: Path) -> None:
    """A consumer that no build has claimed has no attempt: what its client had claimed since went with it."""
    host, other = await placement.host(VCPU=8), await placement.host(VCPU=8)
    moved, orphan = new_uuid(placement.rng), new_uuid(placement.rng)
    for consumer in (moved, orphan):
        assert (await placement.claim(consumer, host, VCPU=2)).status_code == 204
    names = tmp_path / "ids"
    names.write_text(new_uuid(placement.rng))
    database = placement.postgres.rows.database
    await age(placement)
    judged, _ = await _unnamed(database, names)
    entry = ConsumerAllocations(
        consumer=moved, consumer_generation=1, allocations={other: {"VCPU": 3}}, project_id="p", user_id="u"
    )
    await placement.store.apply([Swap(consumers=(entry,))])
    done: list[str] = []
    await _repair(placement.postgres, database, judged, [], False, done)
    assert sorted(done) == sorted((f"{moved}: left alone, consumer_conflict", f"{orphan}: released"))
    async with database.raw() as connection:
        assert await questions.allocations(connection) == {moved: {other: {"VCPU": 3}}}


@on_postgres
async def test_evicting_is_a_part_of_repairing(placement: Placement, tmp_path: Path) -> None:
    """Alone it did nothing, and did not report that."""
    names = tmp_path / "ids"
    names.write_text(new_uuid(placement.rng))
    assert await audited(placement, "--consumers", str(names), "--evict") == (2, {})
