"""Notifications about calls: their form on the wire, that they wait for nothing, and hostile specs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from bus.clock import SystemClock
from bus.port import BusUnavailable, Outgoing
from bus.rabbitmq.transport import RabbitTransport
from bus.topology import ForeignQueue
from scheduler_worker.nova.config import NotificationSettings
from scheduler_worker.nova.envelope import Call, RemoteFault
from scheduler_worker.nova.notifications import END, MAX_BYTES, MAX_WAITING, START, NovaNotifier, payload_of
from scheduler_worker.nova.queues import RabbitOptions
from tests.kit.virtual_time import on_virtual_time
from tests.unit.nova.test_select import VMS
from tests.unit.nova.world import PLENTY, Cloud, group, request_spec

VERSIONED = NotificationSettings(notification_format="versioned", versioned_notifications_topics=("v", "w"))


class Broker:
    """published: what it was given. away: it takes nothing."""

    def __init__(self) -> None:
        self.declared: list[str] = []
        self.published: list[Outgoing] = []
        self.away = False

    async def declare_foreign(self, planned: ForeignQueue) -> None:
        if self.away:
            raise BusUnavailable("away")
        self.declared.append(planned.name)

    async def publish(self, message: Outgoing) -> None:
        self.published.append(message)

    def told(self, key: str) -> list[dict[str, Any]]:
        return [json.loads(json.loads(one.body)["oslo.message"]) for one in self.published if one.routing_key == key]


@contextlib.asynccontextmanager
async def notifier(broker: Broker, settings: NotificationSettings = VERSIONED) -> AsyncIterator[NovaNotifier]:
    made = NovaNotifier(
        cast(RabbitTransport, broker), settings, host="h", options=RabbitOptions(), control_exchange="nova",
        clock=SystemClock(), rng=random.Random(1),
    )  # fmt: skip
    running = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def call(**more: Any) -> Call:
    context = {"request_id": "req-1", "user_id": "u", "auth_token": "secret", "service_catalog": ["secret"]}
    return Call(method="select_destinations", arguments={"spec_obj": request_spec(**more)}, context=context)


@on_virtual_time
async def test_start_and_end_are_told_to_each_topic_without_secrets() -> None:
    broker = Broker()
    async with notifier(broker) as here:
        here.notify(call(), 1_800_000_000.5, placed=True)
        here.notify(call(), 1_800_000_000.5, placed=False)
        await asyncio.sleep(1)
    assert broker.declared == ["v.info", "w.info"]
    assert [one["event_type"] for one in broker.told("v.info")] == [START, END, START]
    assert len(broker.told("w.info")) == 3 and {one.exchange for one in broker.published} == {"nova"}
    first = broker.told("v.info")[0]
    assert (first["publisher_id"], first["priority"]) == ("nova-scheduler:h", "INFO")
    assert first["timestamp"] == "2027-01-15 08:00:00.500000" and first["_context_request_id"] == "req-1"
    assert first["payload"]["nova_object.data"]["flavor"]["nova_object.data"]["name"] == "m1.small"
    assert not any(b"secret" in one.body for one in broker.published)


@pytest.mark.parametrize(
    "settings", [NotificationSettings(), NotificationSettings(versioned_notifications_topics=("v",))]
)
@on_virtual_time
async def test_nothing_is_told_unless_it_is_switched_on(settings: NotificationSettings) -> None:
    broker = Broker()
    async with notifier(broker, settings) as here:
        here.notify(call(), 0.0, placed=True)
        await asyncio.sleep(1)
    assert not broker.published and not broker.declared


@on_virtual_time
async def test_a_broker_that_takes_none_holds_nothing_up() -> None:
    broker = Broker()
    broker.away = True
    async with notifier(broker) as here:
        for _ in range(2 * MAX_WAITING):
            here.notify(call(), 0.0, placed=True)
        await asyncio.sleep(1)
        broker.away = False
        here.notify(call(), 0.0, placed=False)
        here.notify(Call(method="m", body=b"x" * (MAX_BYTES + 1)), 0.0, placed=True)
        await asyncio.sleep(1)
    assert len(broker.told("v.info")) == 1


async def test_of_each_call_that_is_decided_the_end_is_told_once() -> None:
    here = await Cloud([PLENTY]).open()
    await here.select(VMS[0])
    with pytest.raises(RemoteFault):
        await here.select(VMS[1], run="call2", ignore_hosts=["h0"])
    here.claims.unavailable = True
    with pytest.raises(Exception):  # noqa: B017 - it is tried again
        await here.select(VMS[2], run="call3")
    assert here.notified == [True, False]


async def test_the_check_of_a_rebuild_is_told_as_nova_does() -> None:
    here = await Cloud([PLENTY]).open()
    rebuild = {"scheduler_hints": {"_nova_check_type": ["rebuild"]}, "force_nodes": ["h0.local"]}
    await here.select(VMS[0], force_hosts=["h0"], **rebuild)
    with pytest.raises(RemoteFault):
        await here.select(VMS[0], force_hosts=["none"], **rebuild)
    assert here.notified == [True, False]


HOSTILE: tuple[object, ...] = (
    None,
    7,
    "x",
    [],
    {},
    [None],
    {"nova_object.data": 7},
    {"nova_object.data": {"objects": 7}},
)
READ = (
    "flavor", "image", "numa_topology", "pci_requests", "requested_destination", "retry", "security_groups",
    "instance_group", "force_hosts", "force_nodes", "scheduler_hints",
)  # fmt: skip


@pytest.mark.parametrize("hostile", HOSTILE)
def test_what_is_none_of_novas_breaks_nothing(hostile: object) -> None:
    assert payload_of(hostile)["nova_object.name"] == "RequestSpecPayload"
    for key in READ:
        assert payload_of(request_spec(**{key: hostile}))["nova_object.version"] == "1.1", key
    inner = {
        "nova_object.data": dict.fromkeys(("cells", "requests", "hosts", "cell", "properties", "objects"), hostile)
    }
    for key in READ:
        assert payload_of(request_spec(**{key: inner}))["nova_object.version"] == "1.1", key


def test_a_group_is_told_with_its_rules() -> None:
    told = payload_of(request_spec(instance_group=group("anti-affinity", [VMS[0]], max_server_per_host="2")))
    of_group = told["nova_object.data"]["instance_group"]
    assert of_group["nova_object.name"] == "ServerGroupPayload"
    assert of_group["nova_object.data"]["rules"] == {"max_server_per_host": "2"}
