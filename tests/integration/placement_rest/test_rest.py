"""The REST API over real HTTP and PostgreSQL: what Placement's own suite (scripts/conformance) does not look at."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from berth.trial.embedded.process import free_port
from bus.clock import new_uuid
from bus.contracts.placement import Claim, ClaimOption, ClaimResult, Inventory, InventoryUpdate, ProviderReport
from placement_worker.rest.config import RestConfig
from placement_worker.rest.openapi import document
from tests.integration.placement_rest.conftest import Placement, holding, on_postgres


async def test_a_search_after_a_write_sees_it(placement: Placement) -> None:
    for number in range(20):
        host = await placement.host(VCPU=4)
        answer = await placement.call("GET", "/allocation_candidates?resources=VCPU:4", status=200)
        assert len(answer.json()["allocation_requests"]) == 1, number
        consumer = new_uuid(placement.rng)
        assert (await placement.claim(consumer, host, VCPU=1)).status_code == 204
        answer = await placement.call("GET", "/allocation_candidates?resources=VCPU:4", status=200)
        assert answer.json() == {"allocation_requests": [], "provider_summaries": {}}


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


async def test_one_bad_write_in_a_group_fails_alone(placement: Placement) -> None:
    host = await placement.host(VCPU=100)
    good = [placement.claim(new_uuid(placement.rng), host, VCPU=1) for _ in range(10)]
    bad = [
        placement.claim(new_uuid(placement.rng), host, VCPU=1000),
        placement.claim(new_uuid(placement.rng), new_uuid(placement.rng), VCPU=1),
        placement.claim(new_uuid(placement.rng), host, CUSTOM_UNKNOWN=1),
        placement.claim(new_uuid(placement.rng), host, 7, VCPU=1),
    ]
    statuses = [answer.status_code for answer in await asyncio.gather(*good, *bad)]
    assert statuses == [204] * 10 + [409, 400, 400, 409]
    assert await placement.findings() == []


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


async def test_every_write_is_on_the_feed_once_and_in_order(placement: Placement) -> None:
    replica = await placement.replica()
    parent, child = await placement.host(VCPU=8), await placement.host(SRIOV_NET_VF=4)
    await placement.call("PUT", "/traits/CUSTOM_FAST", status=201)
    name = f"host-{child}"
    await placement.call(
        "PUT", f"/resource_providers/{child}", {"name": name, "parent_provider_uuid": parent}, status=200
    )
    body: dict[str, Any] = {"resource_provider_generation": 1, "traits": ["CUSTOM_FAST"]}
    await placement.call("PUT", f"/resource_providers/{child}/traits", body, status=200)
    body = {"resource_provider_generation": 1, "aggregates": [parent]}
    await placement.call("PUT", f"/resource_providers/{parent}/aggregates", body, status=200)
    consumer = new_uuid(placement.rng)
    assert (await placement.claim(consumer, child, SRIOV_NET_VF=3)).status_code == 204
    followed = await replica.fresh()
    loaded = (await placement.replica()).book
    for book in (followed, loaded):
        top, low = book.row_of(parent), book.row_of(child)
        assert top is not None
        assert low is not None
        assert book.root_of(low) == top
        assert book.traits_of(low) == ("CUSTOM_FAST",)
        assert book.aggregates_of(top) == (parent,)
        assert book.inventory_of(low)["SRIOV_NET_VF"][1:] == (3, 1)
        assert (book.generation_of(top), book.generation_of(low)) == (2, 3)
    await placement.call("DELETE", f"/allocations/{consumer}", status=204)
    await placement.call("DELETE", f"/resource_providers/{child}", status=204)
    book = await replica.fresh()
    assert book.row_of(child) is None
    assert len(book) == 1
    assert await placement.findings() == []


async def test_the_bus_and_rest_share_one_book(placement: Placement) -> None:
    root, consumer = new_uuid(placement.rng), new_uuid(placement.rng)
    report = ProviderReport(uuid=root, name="metal", inventories={"VCPU": Inventory(total=4)})
    [result] = await placement.store.report(
        [InventoryUpdate(source="c1", version=1, root_uuid=root, providers=(report,))]
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
    await placement.call("PUT", f"/allocations/{consumer}", holding({}, 1), status=204)
    [late] = await placement.store.apply([Claim(consumer=consumer, options=(option,), project_id="p")])
    assert isinstance(late, ClaimResult)
    assert late.outcome == "consumer_changed", "a late duplicate must not bring back what REST has removed"
    body = {"resource_provider_generation": shown["resource_provider_generation"] + 2, "inventories": {}}
    await placement.call("PUT", f"/resource_providers/{root}/inventories", body, status=200)
    [again] = await placement.store.report(
        [InventoryUpdate(source="c1", version=2, root_uuid=root, providers=(report,))]
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
    book = await replica.fresh()
    row = book.row_of(child)
    assert row is not None
    assert book.inventory_of(row)["VCPU"][1] == 2
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


async def test_the_openapi_document_is_served_where_the_settings_allow_it(
    placement: Placement,
) -> None:
    await placement.call("GET", "/openapi.json", status=404)
    other = Placement(placement.book, RestConfig(listen=f"127.0.0.1:{free_port()}", openapi=True))
    await other.start()
    try:
        answer = await other.call("GET", "/openapi.json", status=200)
        assert answer.json() == document()
        assert "/openapi.json" not in answer.json()["paths"]
        await other.call("PUT", "/openapi.json", status=405)
    finally:
        await other.stop()


@on_postgres
async def test_what_projects_hold_follows_every_write_of_allocations(placement: Placement) -> None:
    one, other = await placement.host(VCPU=8), await placement.host(VCPU=8)
    consumers = [new_uuid(placement.rng) for _ in range(2)]

    async def held() -> dict[str, dict[int, int]]:
        async with placement.postgres.database.raw() as connection:
            rows = await connection.fetch("SELECT project_id, class_id, amount FROM project_usage WHERE amount <> 0")
        assert await placement.findings() == []
        found: dict[str, dict[int, int]] = {}
        for project, class_id, amount in rows:
            found.setdefault(project, {})[class_id] = amount
        return found

    def body(project: str, generation: int | None, **amounts: int) -> dict[str, Any]:
        hosts = dict(zip(("one", "other"), (one, other), strict=True))
        held = {hosts[name]: {"resources": {"VCPU": amount}} for name, amount in amounts.items()}
        named = {"project_id": project, "user_id": "u", "consumer_type": "INSTANCE", "consumer_generation": generation}
        return {"allocations": held, **named}

    vcpu = placement.postgres.names.class_ids["VCPU"]
    await placement.call("PUT", f"/allocations/{consumers[0]}", body("p", None, one=2), status=204)
    assert await held() == {"p": {vcpu: 2, -1: 1}}
    await placement.call("PUT", f"/allocations/{consumers[0]}", body("q", 1, one=1, other=3), status=204)
    assert await held() == {"q": {vcpu: 4, -1: 1}}, "its project changed with it"
    both = {consumers[0]: body("q", 2, one=1), consumers[1]: body("p", None, other=5)}
    await placement.call("POST", "/allocations", both, status=204)
    assert await held() == {"p": {vcpu: 5, -1: 1}, "q": {vcpu: 1, -1: 1}}
    generations = {
        uuid: (await placement.call("GET", f"/resource_providers/{uuid}")).json()["generation"] for uuid in (one, other)
    }
    reshape = {
        "inventories": {
            uuid: {"resource_provider_generation": generation, "inventories": {"VCPU": {"total": 8}}}
            for uuid, generation in generations.items()
        },
        "allocations": {consumers[0]: body("r", 3, other=2)},
    }
    await placement.call("POST", "/reshaper", reshape, x_roles="service", x_project_id="s", status=204)
    assert await held() == {"p": {vcpu: 5, -1: 1}, "r": {vcpu: 2, -1: 1}}
    await placement.call("DELETE", f"/allocations/{consumers[1]}", status=204)
    assert await held() == {"r": {vcpu: 2, -1: 1}}


@pytest.mark.parametrize("other", ["compute 2.1", "placement 1.0"])
async def test_of_several_version_headers_the_last_that_names_placement_counts(
    placement: Placement, other: str
) -> None:
    newest = ("openstack-api-version", "placement 1.39")
    for listed in ([newest, (newest[0], other)], [(newest[0], other), newest]):
        answer = await placement.client.get("/resource_providers", headers=[("x-auth-token", "admin"), *listed])
        mine = [value for _, value in listed if value.startswith("placement")]
        assert answer.headers["openstack-api-version"] == mine[-1]
