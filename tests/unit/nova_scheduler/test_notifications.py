"""Notifications about calls, and how a call was decided, as `berth explain` prints it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from berth.cli.main import app
from bus.clock import SystemClock
from bus.rabbitmq.transport import RabbitTransport
from bus.topology import ExternalQueue
from bus.transport import BusUnavailable, Outgoing
from nova_scheduler.config import NotificationSettings, NovaConfig
from nova_scheduler.decide.notifications import END, MAX_BYTES, MAX_WAITING, START, NovaNotifier, payload_of
from nova_scheduler.wire.envelope import Call, RemoteFault
from nova_scheduler.wire.queues import RabbitOptions
from tests.kit.virtual_time import on_virtual_time
from tests.unit.nova_scheduler.test_select import REBUILD, VMS, image
from tests.unit.nova_scheduler.world import PLENTY, Cloud, destination, group, request_spec, versioned

# --- Notifications about calls: their form on the wire, that they wait for nothing, and hostile specs.


VERSIONED = NotificationSettings(notification_format="versioned", versioned_notifications_topics=("v", "w"))


class Broker:
    """published: what it was given. away: it takes nothing."""

    def __init__(self) -> None:
        self.declared: list[str] = []
        self.published: list[Outgoing] = []
        self.away = False

    async def declare_external(self, planned: ExternalQueue) -> None:
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


# --- How a call was decided: from the log of the frontend to what `berth explain` prints.


SMALL = {"VCPU": 1, "MEMORY_MB": 100, "DISK_GB": 10}


async def calls(*asked: dict[str, Any], instances: int = 1, shadow: bool = False) -> None:
    """Calls of one request, of which some find no host: h0 and h1 are small, h2 is not."""
    here = await Cloud([SMALL, SMALL, PLENTY], nova=NovaConfig(shadow=shadow)).open()
    for number, fields in enumerate(asked):
        try:
            await here.select(*VMS[:instances], run=f"call{number}", **fields)
        except RemoteFault as fault:
            assert not any(f"h{n}" in fault.message for n in range(3))


def logged(tmp_path: Path, *asked: dict[str, Any], instances: int = 1, shadow: bool = False) -> Path:
    with capture_logs() as lines:
        asyncio.run(calls(*asked, instances=instances, shadow=shadow))
    path = tmp_path / "log"
    written = [json.dumps({"timestamp": "t", "process": "front-1", **line}) for line in lines]
    path.write_text("\n".join(["no JSON req-1", '{"event": 7, "request_id": "req-1"}', *written]))
    return path


def explained(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["explain", *arguments])
    return done.exit_code, done.output


def test_a_host_is_named_with_what_it_and_its_alternates_weighed(tmp_path: Path) -> None:
    status, text = explained("req-1", str(logged(tmp_path, {}, instances=2)))
    assert status == 0 and text.count(f"{VMS[0]}") == 2 and "h2.local" in text


def test_no_host_is_explained_with_the_hosts_that_each_step_rejected(tmp_path: Path) -> None:
    path = logged(tmp_path, {"ignore_hosts": ["h2"]}, {"requested_destination": destination(host="h1")})
    status, text = explained("req-1", str(path))
    assert status == 0
    assert "h0 (h0.local), h1 (h1.local) are too small in MEMORY_MB" in text
    assert "h2 (h2.local) were ignored as requested" in text
    assert "are not among the hosts that were requested" in text
    status, text = explained("req-1", str(path), "-o", "json")
    first, second = json.loads(text)["items"]
    assert (first["funnel"][0]["step"], first["funnel"][-1]["step"]) == ("providers", "claim")
    assert first["instances"] == second["instances"] == [VMS[0]]


AGGREGATES = [f"00000000-0000-4000-8000-{number:012}" for number in range(20)]
PORTS = [versioned("RequestGroup", "1.3", {"requester_id": uuid, "resources": {"VCPU": 5}}) for uuid in AGGREGATES[:8]]


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"requested_destination": destination(aggregates=[",".join(AGGREGATES)])}, "are not in aggregate one of 0000"),
        ({"requested_resources": PORTS}, "have room for each of groups 0000"),
    ],
    ids=["aggregates of a zone", "ports"],
)
def test_a_step_that_names_much_is_explained(tmp_path: Path, fields: dict[str, Any], shown: str) -> None:
    status, text = explained("req-1", str(logged(tmp_path, fields)))
    assert status == 0 and shown in text


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"image": image(traits_required=["CUSTOM_MAGIC"])}, "h1 (h1.local)"),
        ({"force_hosts": ["h9"], "force_nodes": None}, "requested name"),
    ],
    ids=["image", "unknown host"],
)
def test_a_refused_check_of_a_rebuild_is_explained(tmp_path: Path, fields: dict[str, Any], shown: str) -> None:
    status, text = explained("req-1", str(logged(tmp_path, REBUILD | fields)))
    assert status == 0 and shown in text


def test_what_the_shadow_would_have_done_is_told_as_such(tmp_path: Path) -> None:
    status, text = explained("req-1", str(logged(tmp_path, {}, {"ignore_hosts": ["h2"]}, shadow=True)))
    assert status == 0 and text.count("in the shadow") == 2
    assert "h2.local" in text and "too small in MEMORY_MB" in text


def test_a_request_that_the_logs_do_not_have(tmp_path: Path) -> None:
    assert explained("req-2", str(logged(tmp_path, {})))[0] == 1
    assert explained("req-1", str(tmp_path / "none"))[0] == 2
