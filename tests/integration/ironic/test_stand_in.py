"""The stand-in behaves as Ironic: same events, same fields, same routing, same wishful `.start`s."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from berth.trial.ironic_stand_in import Behaviour, IronicStandIn
from berth.trial.worker_processes import NO_TLS
from bus.clock import SystemClock
from tests.unit.ironic.world import SCENARIOS, Recording


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
    async with asyncio.timeout(60):
        while not ironic.pool.idle:  # noqa: ASYNC110 (the node pool has no event for it)
            await asyncio.sleep(0)


def recorded_shapes() -> dict[str, tuple[set[str], set[str], str, str]]:
    shapes = {}
    for name in SCENARIOS:
        for messages in Recording(name).messages:
            for body, key in messages:
                inner = json.loads(json.loads(body)["oslo.message"])
                payload = inner["payload"]
                shapes[inner["event_type"]] = (
                    set(inner),
                    set(payload["ironic_object.data"]),
                    payload["ironic_object.name"] + payload["ironic_object.version"],
                    key,
                )
    return shapes


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
    shapes = recorded_shapes()
    assert len(set(listener.events())) > 15
    for key, message in listener.received:
        inner, data, payload, recorded_key = shapes[message["event_type"]]
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
