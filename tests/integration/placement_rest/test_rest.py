"""The REST API as clients use it: providers, names, traits, consumers made again, races."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from berth.config.ports import free_port
from bus.clock import new_uuid
from bus.contracts.placement import Claim, ClaimOption, ClaimResult, Inventory, InventoryUpdate, ProviderReport
from bus.persistence.database import Database
from placement_worker.operations import export, export_store
from placement_worker.rest.config import RestConfig
from placement_worker.service import PlacementService
from placement_worker.store.postgres_rows import PostgresPlacementRows
from tests.integration.placement_rest.conftest import Placement, holding, on_postgres, serving
from tests.kit.servers import fresh_database

# --- the REST API over real HTTP and PostgreSQL: what Placement's own suite (scripts/conformance) does not look at


async def test_many_writers_on_few_providers_never_conflict_and_never_exceed(placement: Placement) -> None:
    hosts = [await placement.host(VCPU=10, MEMORY_MB=1000) for _ in range(4)]
    claims = [placement.claim(new_uuid(placement.rng), hosts[n % 4], VCPU=1, MEMORY_MB=10) for n in range(64)]
    answers = await asyncio.gather(*claims)
    statuses = [answer.status_code for answer in answers]
    assert statuses.count(204) == 40
    assert statuses.count(409) == 24
    assert {a.json()["errors"][0]["code"] for a in answers if a.status_code == 409} == {"placement.undefined_code"}
    assert await placement.findings() == []
    for host in hosts:
        usages = (await placement.call("GET", f"/resource_providers/{host}/usages")).json()
        assert usages["usages"] == {"VCPU": 10, "MEMORY_MB": 100}
        assert usages["resource_provider_generation"] == 11


async def test_consumers_that_cross_over_neither_deadlock_nor_conflict(placement: Placement) -> None:
    """The real Placement answers some of these 409 and some 500."""
    hosts = [await placement.host(VCPU=1000) for _ in range(6)]
    consumers = [new_uuid(placement.rng) for _ in range(20)]

    async def post(turn: int) -> int:
        ordered = consumers if turn % 2 else consumers[::-1]
        body = {
            consumer: {
                "allocations": {hosts[(n + turn) % 6]: {"resources": {"VCPU": 1}} for n in range(3)},
                "project_id": "p",
                "user_id": "u",
            }
            for consumer in ordered
        }
        return (await placement.call("POST", "/allocations", body, version="1.27")).status_code

    assert set(await asyncio.gather(*(post(turn) for turn in range(24)))) == {204}
    assert await placement.findings() == []


async def test_the_bus_and_rest_share_one_placement(placement: Placement) -> None:
    root, consumer = new_uuid(placement.rng), new_uuid(placement.rng)
    report = ProviderReport(uuid=root, name="metal", inventories={"VCPU": Inventory(total=4)})
    [result] = await placement.store.apply_reports(
        [InventoryUpdate(reporter="c1", version=1, root_uuid=root, providers=(report,))]
    )
    assert getattr(result, "outcome", None) == "applied"
    shown = (await placement.call("GET", f"/resource_providers/{root}/inventories", status=200)).json()
    assert shown["inventories"]["VCPU"]["total"] == 4
    option = ClaimOption(allocations={root: {"VCPU": 3}})
    [claimed] = await placement.store.apply([Claim(consumer=consumer, options=(option,), project_id="p")])
    assert isinstance(claimed, ClaimResult)
    assert claimed.outcome == "claimed"
    held = (await placement.call("GET", f"/allocations/{consumer}", status=200)).json()
    assert held["allocations"][root]["resources"] == {"VCPU": 3}
    assert held["consumer_generation"] == 1
    for version, kind in (("1.37", None), ("1.38", "INSTANCE")):
        answer = await placement.call("GET", f"/allocations/{consumer}", status=200, version=version)
        assert answer.json().get("consumer_type") == kind
    await placement.call("PUT", f"/allocations/{consumer}", holding({}, 1), status=204)
    [late] = await placement.store.apply([Claim(consumer=consumer, options=(option,), project_id="p")])
    assert isinstance(late, ClaimResult)
    assert late.outcome == "consumer_conflict", "a late duplicate must not bring back what REST has removed"
    body = {"resource_provider_generation": shown["resource_provider_generation"] + 2, "inventories": {}}
    await placement.call("PUT", f"/resource_providers/{root}/inventories", body, status=200)
    [again] = await placement.store.apply_reports(
        [InventoryUpdate(reporter="c1", version=2, root_uuid=root, providers=(report,))]
    )
    assert getattr(again, "outcome", None) == "applied", "the same report repairs what REST has changed under it"
    assert await placement.findings() == []


async def test_a_reshape_moves_inventory_and_allocations_at_once(placement: Placement) -> None:
    root, child = await placement.host(VCPU=8, MEMORY_MB=512), await placement.host(MEMORY_MB=1)
    consumer = new_uuid(placement.rng)
    assert (await placement.claim(consumer, root, VCPU=2, MEMORY_MB=256)).status_code == 204
    held = {root: {"resources": {"MEMORY_MB": 256}}, child: {"resources": {"VCPU": 2}}}
    body = {
        "inventories": {
            root: {"resource_provider_generation": 2, "inventories": {"MEMORY_MB": {"total": 512}}},
            child: {"resource_provider_generation": 1, "inventories": {"VCPU": {"total": 8}}},
        },
        "allocations": {consumer: holding(held, 1)},
    }
    replica = await placement.replica()
    await placement.call("POST", "/reshaper", body, status=403)  # new defaults: for services alone
    await placement.call("POST", "/reshaper", body, x_roles="service", x_project_id="s", status=204)
    answer = (await placement.call("GET", f"/allocations/{consumer}")).json()
    assert {p: a["resources"] for p, a in answer["allocations"].items()} == {
        root: {"MEMORY_MB": 256},
        child: {"VCPU": 2},
    }
    current = await replica.fresh()
    row = current.row_of(child)
    assert row is not None
    assert current.inventory_of(row)["VCPU"][1] == 2
    await placement.call("POST", "/reshaper", body, x_roles="service", x_project_id="s", status=409)
    assert await placement.findings() == []


HOSTILE: list[tuple[str, str, Any, int]] = [
    ("POST", "/resource_providers", {"name": "nul\x00"}, 400),
    ("GET", "/resource_providers?name=%00", None, 400),
    ("GET", "/resource_providers?name=%ff", None, 400),
    ("GET", "/resource_providers/%ff%00", None, 404),
    ("GET", "/traits/%00", None, 404),
    ("PUT", "/resource_classes/%00%22", None, 400),
    ("GET", "/allocations/not-a-uuid", None, 200),
    ("DELETE", "/allocations/not-a-uuid", None, 404),
    ("GET", "/allocation_candidates?resources=VCPU:" + "9" * 400, None, 200),
    ("GET", "/allocation_candidates?" + "&".join(f"resources{n}=VCPU:1" for n in range(1, 300)), None, 400),
    ("GET", "/allocation_candidates?limit=" + "9" * 400 + "&resources=VCPU:1", None, 200),
    ("GET", "/resource_providers?resources=VCPU:" + "9" * 30, None, 200),
    ("GET", "/usages?project_id=%00", None, 400),
]


async def test_hostile_input_is_answered(placement: Placement) -> None:
    for method, path, body, status in HOSTILE:
        answer = await placement.call(method, path, body, status=status)
        assert status < 400 or answer.json()["errors"][0]["status"] == status, (method, path)


async def test_hostile_bodies_are_answered(placement: Placement) -> None:
    host = await placement.host(VCPU=1)
    for ratio in (-1e308, -0.1, 1e-300):  # -1e308 was 500: infinity has no whole part
        body = {"resource_provider_generation": 1, "total": 2**31 - 1, "allocation_ratio": ratio}
        path = f"/resource_providers/{host}/inventories/VCPU"
        await placement.call("PUT", path, body, version="1.0", status=400)
    huge = {"total": 2**31 - 1, "allocation_ratio": 3.4e38}
    body = {"resource_provider_generation": 1, "inventories": {"VCPU": huge}}
    await placement.call("PUT", f"/resource_providers/{host}/inventories", body, status=200)
    assert (await placement.claim(new_uuid(placement.rng), host, VCPU=10**30)).status_code == 409
    headers = {"x-auth-token": "admin", "content-type": "application/json"}
    for bad in (
        b"[" * 100_000,
        b'{"name": "\\ud800"}',
        b"NaN",
        b'{"name": 1e999}',
        b"\xff",
        b"{" + b'"a":' * 30 + b"1",
    ):
        answer = await placement.client.post("/resource_providers", content=bad, headers=headers)
        assert answer.status_code == 400, answer.text
    await placement.call("GET", "/allocation_candidates?resources=VCPU:1", status=200)


async def test_errors_carry_the_request_id_and_the_version(placement: Placement) -> None:
    answer = await placement.call("GET", "/resource_providers/none", version="1.22", status=404)
    error = answer.json()["errors"][0]
    assert error["request_id"] == answer.headers["x-openstack-request-id"]
    assert "code" not in error
    assert answer.headers["openstack-api-version"] == "placement 1.22"
    assert answer.headers["vary"] == "openstack-api-version"
    answer = await placement.client.get("/resource_providers")
    assert answer.status_code == 401
    answer = await placement.call("GET", "/resource_providers", x_auth_token="somebody")
    assert answer.status_code == 403


@pytest.mark.parametrize("other", ["compute 2.1", "placement 1.0"])
async def test_of_several_version_headers_the_last_that_names_placement_counts(
    placement: Placement, other: str
) -> None:
    newest = ("openstack-api-version", "placement 1.39")
    for listed in ([newest, (newest[0], other)], [(newest[0], other), newest]):
        answer = await placement.client.get("/resource_providers", headers=[("x-auth-token", "admin"), *listed])
        mine = [value for _, value in listed if value.startswith("placement")]
        assert answer.headers["openstack-api-version"] == mine[-1]


# --- names of classes that another process of the same placement has renamed, made or removed

OLD, NEW = "CUSTOM_OLD", "CUSTOM_NEW"


@pytest.fixture
async def other(placement: Placement) -> AsyncIterator[Placement]:
    """A second process on the same placement, which knows the class by its old name when a test begins."""
    await placement.call("PUT", f"/resource_classes/{OLD}", status=201)
    made = Placement(placement.database, RestConfig(listen=f"127.0.0.1:{free_port()}"))
    made.rng.seed(8)
    await made.start()
    yield made
    await made.stop()


async def rename(placement: Placement) -> None:
    await placement.call("PUT", f"/resource_classes/{OLD}", {"name": NEW}, version="1.6", status=200)


async def test_a_renamed_class_keeps_its_inventories_and_allocations(placement: Placement, other: Placement) -> None:
    host, consumer = await other.host(**{OLD: 10}), new_uuid(other.rng)
    assert (await other.claim(consumer, host, **{OLD: 2})).status_code == 204
    await rename(placement)
    for each in (placement, other):
        held = (await each.call("GET", f"/allocations/{consumer}", status=200)).json()
        assert held["allocations"][host]["resources"] == {NEW: 2}
        shown = (await each.call("GET", f"/resource_providers/{host}/inventories", status=200)).json()
        assert list(shown["inventories"]) == [NEW]
        await each.call("GET", f"/resource_classes/{OLD}", status=404)
        await each.call("GET", f"/resource_classes/{NEW}", status=200)
    assert await placement.findings() == []


async def test_a_process_that_knew_the_old_name_publishes_the_new_one_on_the_feed(
    placement: Placement, other: Placement
) -> None:
    host, consumer = await other.host(**{OLD: 10}), new_uuid(other.rng)
    assert (await other.claim(consumer, host, **{OLD: 2})).status_code == 204
    replica = await placement.replica()
    await rename(placement)
    assert (await other.claim(consumer, host, 1)).status_code == 204  # emptied, by a process that has not learned it
    current = await replica.fresh()
    row = current.row_of(host)
    assert row is not None
    assert {name: used for name, (_, used, _) in current.inventory_of(row).items()} == {NEW: 0}
    assert (await other.claim(consumer, host, None, **{NEW: 3})).status_code == 204
    assert await placement.findings() == []


async def test_the_old_name_is_unknown_everywhere(placement: Placement, other: Placement) -> None:
    host = await other.host(**{OLD: 10})
    await other.call("GET", f"/allocation_candidates?resources={OLD}:1", status=200)
    await rename(placement)
    await other.call("GET", f"/allocation_candidates?resources={OLD}:1", status=400)
    body = {"resource_provider_generation": 1, "inventories": {OLD: {"total": 1}}}
    await other.call("PUT", f"/resource_providers/{host}/inventories", body, status=400)
    answer = await other.claim(new_uuid(other.rng), host, **{OLD: 1})
    assert answer.status_code == 400, answer.text


async def test_a_report_with_a_name_that_has_gone_makes_it_anew(placement: Placement, other: Placement) -> None:
    await other.host(**{OLD: 10})
    await rename(placement)
    root = new_uuid(other.rng)
    report = ProviderReport(uuid=root, name="metal", inventories={OLD: Inventory(total=4)})
    [result] = await other.store.apply_reports(
        [InventoryUpdate(reporter="c1", version=1, root_uuid=root, providers=(report,))]
    )
    assert getattr(result, "outcome", None) == "applied"
    await placement.call("GET", f"/resource_classes/{OLD}", status=200)
    assert await placement.findings() == []


async def test_inventory_of_a_class_that_another_process_made_can_go(placement: Placement, other: Placement) -> None:
    await placement.call("PUT", "/resource_classes/CUSTOM_MADE", status=201)
    host = await placement.host(CUSTOM_MADE=1, VCPU=1)
    await other.call("DELETE", f"/resource_providers/{host}/inventories", status=204)
    host = await placement.host(CUSTOM_MADE=1, VCPU=1)
    await placement.call("PUT", "/resource_classes/CUSTOM_MADE_2", status=201)
    host = await placement.host(CUSTOM_MADE_2=1, VCPU=1)
    body = {"resource_provider_generation": 1, "inventories": {"VCPU": {"total": 2}}}
    await other.call("PUT", f"/resource_providers/{host}/inventories", body, status=200)
    assert await placement.findings() == []


# --- traits that an operator gives a host outlast what the host's own service reports

VMX, AVX = "HW_CPU_X86_VMX", "HW_CPU_X86_AVX"


async def report(placement: Placement, root: str, version: int, *traits: str) -> None:
    announced = ProviderReport(
        uuid=root, name="host", inventories={"VCPU": Inventory(total=4 + version)}, traits=traits
    )
    [result] = await placement.store.apply_reports(
        [InventoryUpdate(reporter="c1", version=version, root_uuid=root, providers=(announced,))]
    )
    assert getattr(result, "outcome", None) == "applied"


async def shown(placement: Placement, root: str) -> tuple[list[str], int]:
    data = (await placement.call("GET", f"/resource_providers/{root}/traits", status=200)).json()
    return sorted(data["traits"]), data["resource_provider_generation"]


async def give(placement: Placement, root: str, *traits: str) -> None:
    body = {"traits": traits, "resource_provider_generation": (await shown(placement, root))[1]}
    await placement.call("PUT", f"/resource_providers/{root}/traits", body, status=200)


@pytest.mark.postgres
async def test_what_an_operator_gave_a_host_outlasts_its_reports(placement: Placement) -> None:
    root = new_uuid(placement.rng)
    await report(placement, root, 1, VMX)
    await placement.call("PUT", "/traits/CUSTOM_RACK", status=201)
    await give(placement, root, VMX, "CUSTOM_RACK")
    replica = await placement.replica()
    await report(placement, root, 2, VMX)
    assert (await shown(placement, root))[0] == ["CUSTOM_RACK", VMX]
    current = await replica.fresh()
    row = current.row_of(root)
    assert row is not None
    assert set(current.trait_sets.values[current.traits[row]]) == {"CUSTOM_RACK", VMX}
    await report(placement, root, 3, AVX)
    assert (await shown(placement, root))[0] == ["CUSTOM_RACK", AVX], "what the service itself reported goes with it"
    await give(placement, root, "CUSTOM_RACK")
    await report(placement, root, 4, AVX)
    assert (await shown(placement, root))[0] == ["CUSTOM_RACK", AVX], "what the service reports comes back"
    await give(placement, root, AVX)
    await report(placement, root, 5, AVX)
    assert (await shown(placement, root))[0] == [AVX], "what an operator takes away stays away"
    await give(placement, root, AVX, "CUSTOM_RACK")
    await placement.call("DELETE", f"/resource_providers/{root}/traits", status=204)
    await report(placement, root, 6)
    assert (await shown(placement, root))[0] == []


@on_postgres
@pytest.mark.postgres
async def test_it_is_kept_in_a_placement_that_goes_out_and_in_again(placement: Placement, postgres_server: str) -> None:
    root = new_uuid(placement.rng)
    await report(placement, root, 1, VMX)
    await placement.call("PUT", "/traits/CUSTOM_RACK", status=201)
    await give(placement, root, VMX, "CUSTOM_RACK")
    await placement.postgres.names.refresh()
    async with placement.postgres.rows.database.raw() as connection:
        lines = list(export.lines(await export_store.read(connection, placement.postgres.names)))
    with fresh_database(postgres_server) as url:
        rows = PostgresPlacementRows(Database(url, "placement"))
        other = PlacementService(rows)
        await other.open()
        what = export.parse(lines)
        await other.names.ensure(what.classes, what.traits)
        for changed in (1, 0):
            async with rows.transaction() as transaction:
                assert await export_store.assign(transaction, what, other.names) == changed
        async with rows.database.raw() as connection:
            assert list(export.lines(await export_store.read(connection, other.names))) == lines
        await other.close()


# --- two processes write allocations of the same consumers at once: one after the other, each on its own generation

ROUNDS = 10


@pytest.mark.postgres
async def test_of_two_puts_for_one_new_consumer_one_is_refused_as_not_new(postgres_url: str) -> None:
    async with serving(postgres_url) as mine, serving(postgres_url) as theirs:
        hosts = [await mine.host(VCPU=2 * ROUNDS) for _ in range(2)]
        for _ in range(ROUNDS):
            consumer = new_uuid(mine.rng)
            answers = await asyncio.gather(
                mine.claim(consumer, hosts[0], VCPU=1), theirs.claim(consumer, hosts[1], VCPU=1)
            )
            assert Counter(answer.status_code for answer in answers) == {204: 1, 409: 1}
            won = next(host for host, answer in zip(hosts, answers, strict=True) if answer.status_code == 204)
            held = (await theirs.call("GET", f"/allocations/{consumer}", status=200)).json()["allocations"]
            assert list(held) == [won]
        assert await mine.findings() == []


@pytest.mark.postgres
async def test_of_two_posts_that_swap_the_same_consumers_one_does(postgres_url: str) -> None:
    """Named in opposite orders, they do not deadlock either."""
    async with serving(postgres_url) as mine, serving(postgres_url) as theirs:
        hosts = [await mine.host(VCPU=2) for _ in range(2)]
        pair = [new_uuid(mine.rng) for _ in range(2)]
        for consumer, host in zip(pair, hosts, strict=True):
            assert (await mine.claim(consumer, host, VCPU=2)).status_code == 204
        for generation in range(1, ROUNDS):
            there = hosts[::-1] if generation % 2 else hosts
            body = {
                consumer: holding({host: {"resources": {"VCPU": 2}}}, generation)
                for consumer, host in zip(pair, there, strict=True)
            }
            again = dict(reversed(body.items()))
            answers = await asyncio.gather(
                mine.call("POST", "/allocations", body), theirs.call("POST", "/allocations", again)
            )
            assert Counter(answer.status_code for answer in answers) == {204: 1, 409: 1}
        assert await mine.findings() == []
