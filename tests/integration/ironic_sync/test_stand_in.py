"""The stand-in behaves as Ironic, and its nodes outlive its process."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog

from berth.config.settings import Settings, UpSettings
from berth.config.site import Brokers, Site
from berth.up.in_one_process import simulated_ironic
from berth.up.worker_processes import NO_TLS
from bus.clock import SystemClock
from compute_sim.ironic_stand_in import Behaviour, IronicStandIn, NodePool, RequestError, Silent, state_file
from compute_sim.ironic_stand_in.state_file import load, save, settled
from tests.kit.waiting import until
from tests.unit.ironic_sync.world import SCENARIOS, Recording

# --- the stand-in behaves as Ironic: same events, same fields, same routing, same wishful `.start`s


class Listener:
    """Keeps what is published."""

    def __init__(self) -> None:
        self.received: list[tuple[str, dict[str, Any]]] = []

    async def open(self) -> None:
        pass

    async def publish(self, routing_key: str, body: bytes) -> None:
        self.received.append((routing_key, json.loads(json.loads(body)["oslo.message"])))

    async def close(self) -> None:
        pass

    def events(self) -> list[str]:
        return [message["event_type"].removeprefix("baremetal.node.") for _, message in self.received]


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
async def ironic(listener: Listener) -> AsyncIterator[IronicStandIn]:
    quick = Behaviour(verify_s=0.0, deploy_s=0.0, undeploy_s=0.0, clean_s=0.0)
    ironic = IronicStandIn(listener, clock=SystemClock(), rng=random.Random(1), behaviour=quick)
    await ironic.start()
    yield ironic
    await ironic.stop()


@pytest.fixture
async def client(ironic: IronicStandIn) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=ironic.url, trust_env=False, verify=NO_TLS, timeout=60.0) as client:
        yield client


async def idle(ironic: IronicStandIn) -> None:
    await until(lambda: ironic.pool.idle)


def recorded_shapes() -> dict[str, tuple[set[str], set[str], str, str]]:
    spec_generations = {}
    for name in SCENARIOS:
        for messages in Recording(name).messages:
            for body, key in messages:
                inner = json.loads(json.loads(body)["oslo.message"])
                payload = inner["payload"]
                spec_generations[inner["event_type"]] = (
                    set(inner),
                    set(payload["ironic_object.data"]),
                    payload["ironic_object.name"] + payload["ironic_object.version"],
                    key,
                )
    return spec_generations


async def whole_life(client: httpx.AsyncClient, ironic: IronicStandIn) -> str:
    made = await client.post("/v1/nodes", json={"name": "n", "driver": "fake-hardware", "resource_class": "gold"})
    assert made.status_code == 201
    uuid: str = made.json()["uuid"]
    node = f"/v1/nodes/{uuid}"
    for target in ("manage", "provide"):
        assert (await client.put(f"{node}/states/provision", json={"target": target})).status_code == 202
        await idle(ironic)
    patch = [{"op": "add", "path": "/instance_uuid", "value": "11111111-2222-4333-8444-555555555555"}]
    assert (await client.patch(node, json=patch)).status_code == 200
    assert (await client.put(f"{node}/states/provision", json={"target": "active"})).status_code == 202
    await idle(ironic)
    assert (await client.get(node)).json()["provision_state"] == "active"
    other = [{"op": "add", "path": "/instance_uuid", "value": "21111111-2222-4333-8444-555555555555"}]
    assert (await client.patch(node, json=other)).status_code == 409
    assert (await client.delete(node)).status_code == 409
    assert (await client.put(f"{node}/states/provision", json={"target": "deleted"})).status_code == 202
    await idle(ironic)
    assert (await client.put(f"{node}/maintenance", json={"reason": "disk"})).status_code == 202
    assert (await client.delete(f"{node}/maintenance")).status_code == 202
    assert (await client.put(f"{node}/states/power", json={"target": "power on"})).status_code == 202
    await ironic.pool.lose_power(ironic.pool.get(uuid))
    assert (await client.delete(node)).status_code == 204
    assert (await client.get(node)).status_code == 404
    return uuid


async def test_every_notification_has_the_recorded_shape(
    client: httpx.AsyncClient, ironic: IronicStandIn, listener: Listener
) -> None:
    await whole_life(client, ironic)
    spec_generations = recorded_shapes()
    assert len(set(listener.events())) > 15
    for key, message in listener.received:
        inner, data, payload, recorded_key = spec_generations[message["event_type"]]
        content = message["payload"]
        assert set(message) == inner
        assert set(content["ironic_object.data"]) == data, message["event_type"]
        assert content["ironic_object.name"] + content["ironic_object.version"] == payload
        assert key == recorded_key


async def test_the_order_of_a_life(client: httpx.AsyncClient, ironic: IronicStandIn, listener: Listener) -> None:
    await whole_life(client, ironic)
    events = listener.events()
    assert events[:2] == ["create.start", "create.end"]
    assert [
        message["payload"]["ironic_object.data"]["provision_state"]
        for _, message in listener.received
        if ".provision_set." in message["event_type"]
    ] == [
        "verifying",
        "manageable",
        "cleaning",
        "available",
        "deploying",
        "active",
        "deleting",
        "cleaning",
        "available",
    ]
    assert events[-1] == "delete.end"
    refused = listener.received[events.index("update.error")][1]
    assert refused["payload"]["ironic_object.data"]["instance_uuid"].startswith("2"), "the wish, not the truth"


async def test_a_locked_node_refuses(client: httpx.AsyncClient, ironic: IronicStandIn) -> None:
    ironic.pool.plan(1)
    (node,) = ironic.pool.nodes.values()
    node["reservation"] = "somebody"
    patch = [{"op": "remove", "path": "/instance_uuid"}]
    assert (await client.patch(f"/v1/nodes/{node['uuid']}", json=patch)).status_code == 409
    answer = await client.put(f"/v1/nodes/{node['uuid']}/states/provision", json={"target": "active"})
    assert answer.status_code == 409
    assert "locked" in answer.json()["error_message"]["faultstring"]


async def test_its_nodes_have_the_fields_of_recorded_ones(client: httpx.AsyncClient, ironic: IronicStandIn) -> None:
    ironic.pool.plan(1)
    (node,) = (await client.get("/v1/nodes", params={"detail": "True"})).json()["nodes"]
    recorded = next(iter(Recording("02-maintenance").steps[0].nodes.values()))
    assert set(recorded) - set(node) <= {"ports", "portgroups", "states", "volume"}
    assert set(node) <= set(recorded)


# --- the nodes of the simulated Ironic outlive its process


PATIENCE_S = 60.0
INSTANCE = "0b2d1c9e-6f7a-4d53-9a40-2f1a3b4c5d6e"
SLOW = Behaviour(deploy_s=3600.0, clean_s=3600.0, verify_s=3600.0)


def site() -> Site:
    clock = SystemClock()
    return Site(Settings(up=UpSettings(nodes=4)), brokers=Brokers(clock), clock=clock, seed=1)


async def test_nodes_are_as_they_were_left(tmp_path: Path) -> None:
    kept = tmp_path / "deep" / "ironic.json"
    async with simulated_ironic(site(), SLOW, kept=kept) as ironic:
        assert ironic is not None
        first, second, *_ = ironic.pool.nodes
        async with httpx.AsyncClient(base_url=ironic.url, verify=NO_TLS, timeout=PATIENCE_S) as client:
            taken = [{"op": "add", "path": "/instance_uuid", "value": INSTANCE}]
            (await client.patch(f"/v1/nodes/{first}", json=taken)).raise_for_status()
            (await client.put(f"/v1/nodes/{second}/maintenance", json={"reason": "r"})).raise_for_status()
            (await client.delete(f"/v1/nodes/{list(ironic.pool.nodes)[3]}")).raise_for_status()
        left = {uuid: dict(node) for uuid, node in ironic.pool.nodes.items()}
    async with simulated_ironic(site(), kept=kept) as ironic:
        assert ironic is not None
        assert ironic.pool.nodes == left
        assert (left[first]["instance_uuid"], left[second]["maintenance"], len(left)) == (INSTANCE, True, 3)


async def test_a_killed_process_leaves_its_nodes_behind(tmp_path: Path) -> None:
    kept = tmp_path / "ironic.json"
    async with simulated_ironic(site(), kept=kept) as ironic:
        assert ironic is not None
        node = next(iter(ironic.pool.nodes.values()))
        await ironic.pool.patch(node, {"instance_uuid": INSTANCE}, "req")

        await until_kept(kept, node["uuid"])


async def until_kept(path: Path, node: str) -> None:
    def found() -> bool:
        other = NodePool(Silent(), clock=SystemClock(), rng=random.Random(1))
        return load(other, path) and other.nodes[node]["instance_uuid"] == INSTANCE

    await until(found)


async def test_what_is_being_written_when_it_stops_does_not_outlast_what_is_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, begun, newer = tmp_path / "ironic.json", threading.Event(), threading.Event()
    write = state_file._write

    def slow(path: Path, body: bytes) -> None:
        if begun.is_set():
            write(path, body)
            newer.set()
        else:
            begun.set()
            newer.wait(0.3)
            write(path, body)

    monkeypatch.setattr(state_file, "_write", slow)
    async with simulated_ironic(site(), kept=kept) as ironic:
        assert ironic is not None
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        node = next(iter(ironic.pool.nodes.values()))
        await ironic.pool.patch(node, {"instance_uuid": INSTANCE}, "req")
    await asyncio.get_running_loop().shutdown_default_executor()
    await until_kept(kept, node["uuid"])


async def test_a_disk_that_was_full_is_written_again(tmp_path: Path) -> None:
    kept = tmp_path / "ironic.json"
    blocked = kept.with_suffix(".new")
    blocked.mkdir()
    with structlog.testing.capture_logs() as logs:
        async with simulated_ironic(site(), kept=kept) as ironic:
            assert ironic is not None
            node = next(iter(ironic.pool.nodes.values()))
            await ironic.pool.patch(node, {"instance_uuid": INSTANCE}, "req")
            await until(lambda: logs)
            blocked.rmdir()
            await until_kept(kept, node["uuid"])
            blocked.mkdir()
    assert [line["event"] for line in logs] == ["ironic.nodes_not_saved"] * 2, "and stopping is none the worse for it"


@pytest.mark.parametrize(
    ("state", "then", "instance"),
    [
        ("available", "available", INSTANCE),
        ("active", "active", INSTANCE),
        ("deploying", "deploy failed", INSTANCE),
        ("deleting", "available", None),
        ("cleaning", "available", None),
        ("verifying", "enroll", INSTANCE),
    ],
)
def test_what_was_under_way_is_settled(state: str, then: str, instance: str | None) -> None:
    pool = NodePool(Silent(), clock=SystemClock(), rng=random.Random(1))
    node = pool.add(provision_state=state, instance_uuid=INSTANCE)
    node |= {"reservation": "somebody", "target_provision_state": "active"}
    rested = settled(node)
    assert (rested["provision_state"], rested["instance_uuid"], rested["reservation"]) == (then, instance, None)
    assert rested["target_provision_state"] == ("active" if then == state else None)


def test_a_file_that_is_no_map_is_refused(tmp_path: Path) -> None:
    pool = NodePool(Silent(), clock=SystemClock(), rng=random.Random(1))
    path = tmp_path / "ironic.json"
    assert not load(pool, path)
    pool.plan(1)
    save(pool, path)
    half = path.read_bytes().removesuffix(b"]") + b', {"uuid": "x"}]'  # nor is the half of it that could be one
    pool.nodes.clear()
    for body in (b"", b"{}", b'[{"uuid": "x"}]', half):
        path.write_bytes(body)
        assert not load(pool, path)
        assert pool.nodes == {}
    pool.plan(2)
    save(pool, path)
    other = NodePool(Silent(), clock=SystemClock(), rng=random.Random(2))
    assert load(other, path)
    assert other.nodes == pool.nodes
    with pytest.raises(RequestError):
        other.get("nobody")


async def test_a_node_that_another_request_has_deleted_is_not_found(listener: Listener) -> None:
    """The simulation ended, without the number of its seed: two operators had deleted it at once."""
    pool = NodePool(listener, clock=SystemClock(), rng=random.Random(1))
    node = await pool.create({"name": "n1"}, "req-1")
    await pool.delete(node, "req-2")
    with pytest.raises(RequestError) as refused:
        await pool.delete(node, "req-3")
    assert refused.value.status == 404
    again = await pool.create({"uuid": node["uuid"], "name": "n1"}, "req-4")
    with pytest.raises(RequestError) as refused:
        await pool.delete(node, "req-5")
    assert (refused.value.status, pool.get("n1")) == (404, again)
