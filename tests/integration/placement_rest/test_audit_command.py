"""`berth placement audit --consumers` on a book that REST clients write, as an operator runs it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from berth.commands.book import uuids_of
from berth.commands.common import Stop
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
from placement_worker.operations import audit as questions
from placement_worker.operations.overcommit import Doubled, doubled, generations, give_back
from tests.integration.placement_rest.conftest import Placement, on_postgres
from tests.kit.forks import run_berth

pytestmark = pytest.mark.postgres

COMMAND_TIMEOUT_S = 120.0


async def audit(placement: Placement, *words: str) -> tuple[int, dict[str, Any]]:
    env = {**os.environ, "BERTH_DATABASE__URL": str(placement.book)}
    words = ("placement", "audit", "--json", *words)
    done = await asyncio.to_thread(run_berth, *words, env=env, timeout_s=COMMAND_TIMEOUT_S)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}


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

    status, found = await audit(placement, "--consumers", str(names))
    assert (status, found["orphaned"], len(found["doubled"]), found["unsound"]) == (1, [orphan], 1, [])
    assert found["doubled"][0].startswith(f"{doubled}: VCPU of ")

    status, found = await audit(placement, "--consumers", str(names), "--repair")
    assert (status, found["orphaned"], found["repaired"]) == (1, [], [f"{orphan}: released"])
    shown = await placement.call("GET", f"/resource_providers/{one}/usages")
    assert shown.json()["usages"] == {"VCPU": 2}


@on_postgres
async def test_an_operator_gives_a_host_to_a_cell(placement: Placement) -> None:
    host = await placement.host(VCPU=8)

    async def move(cell: str, *more: str) -> tuple[int | None, str]:
        env = {**os.environ, "BERTH_DATABASE__URL": str(placement.book)}
        words = ("placement", "move-host", host, cell, *more)
        done = await asyncio.to_thread(run_berth, *words, env=env, timeout_s=COMMAND_TIMEOUT_S)
        return done.returncode, done.stdout + done.stderr

    assert await move("cell1") == (0, f"{host}: no cell -> cell1\n")
    assert await move("cell1") == (0, f"{host}: cell1 already\n")
    status, output = await move("cell1", "--json")
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
        status, found = await audit(placement, "--consumers", str(names), *words)
        line = f"{host} VCPU: 8 of 4; fits without {newest[0]} (2), {newest[1]} (2)"
        assert (status, found["over_capacity"], found["repaired"]) == (1, [line], [])

    status, found = await audit(placement, "--consumers", str(names), "--repair", "--evict")
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
    status, found = await audit(placement, "--consumers", str(names), "--repair", "--evict")
    assert (status, found["over_capacity"], found["repaired"]) == (0, [], [])


@on_postgres
async def test_what_its_source_no_longer_reports_is_left_to_it(placement: Placement, tmp_path: Path) -> None:
    host, consumer = new_uuid(placement.rng), new_uuid(placement.rng)

    async def report(version: int, **totals: int) -> Sequence[str]:
        inventories = {name: Inventory(total=total) for name, total in totals.items()}
        reports = (ProviderReport(uuid=host, name="host", inventories=inventories),)
        update = InventoryUpdate(source="s", version=version, root_uuid=host, providers=reports)
        [result] = await placement.store.report([update])
        assert isinstance(result, InventoryResult)
        return result.stranded

    assert not await report(1, VCPU=8, CUSTOM_CARD=2)
    assert (await placement.claim(consumer, host, CUSTOM_CARD=1)).status_code == 204
    assert await report(2, VCPU=8)
    names = tmp_path / "ids"
    names.write_text(consumer)
    line = f"{host} CUSTOM_CARD: 1 of 0, no longer reported; it is removed when it is no longer used"
    for words in ((), ("--repair", "--evict")):
        status, found = await audit(placement, "--consumers", str(names), *words)
        assert (status, found["over_capacity"], found["repaired"]) == (1, [line], [])


@on_postgres
async def test_what_an_instance_holds_twice_is_given_back(placement: Placement) -> None:
    one, other = await placement.host(VCPU=8, DISK_GB=9), await placement.host(VCPU=8, DISK_GB=9)
    [consumer, moved] = [await twice_held(placement, one, other) for _ in range(2)]
    async with placement.postgres.database.raw() as connection:
        twice = await found_twice(connection, {consumer: one, moved: one}, other)
        # It has moved while the audit read whose host is whose: what it holds now has not been audited.
        entry = ConsumerAllocations(
            consumer=moved, consumer_generation=1, allocations={other: {"VCPU": 3}}, project_id="p", user_id="u"
        )
        await placement.store.apply([Swap(consumers=(entry,))])
        assert await give_back(placement.store, connection, twice) == [
            f"{consumer}: given back on {other}",
            f"{moved}: left alone, consumer_changed",
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


async def found_twice(connection: asyncpg.Connection, hosts: dict[str, str], other: str) -> list[Doubled]:
    known = await generations(connection)
    held = await questions.allocations(connection)
    return [
        each
        for uuid, host in hosts.items()
        for each in doubled(uuid, host, held[uuid], {host: host, other: other}, frozenset(), known[uuid])
        if isinstance(each, Doubled)
    ]


@on_postgres
async def test_evicting_is_a_part_of_repairing(placement: Placement, tmp_path: Path) -> None:
    """Alone it did nothing, and did not report that."""
    names = tmp_path / "ids"
    names.write_text(new_uuid(placement.rng))
    assert await audit(placement, "--consumers", str(names), "--evict") == (2, {})
