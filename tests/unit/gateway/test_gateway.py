"""A gateway: what of a client's message comes through, what comes back, and what keeps nobody waiting."""

from __future__ import annotations

import asyncio
import json
import math
import uuid
from typing import Any

import pytest
from msgspec import structs

from bus.bus import API
from bus.clock import SystemClock
from bus.consuming.in_flight import LAST_DELIVERIES
from bus.consuming.outcome import Done, Outcome, Received, Retry
from bus.contracts.actions import ActionKind, ActionPage, ActionRecord, ActionState
from bus.contracts.base import Refusal
from bus.contracts.build import (
    BuildEvent,
    BuildPage,
    BuildQuery,
    BuildRecord,
    BuildRequest,
    BuildState,
    DeleteRequest,
    TimelineEntry,
)
from bus.contracts.placement import ConflictingConsumer
from bus.contracts.queues import BY_QUEUE, project_bus
from bus.topology import plan
from bus.transport import UNREAD, BusForbidden, Outgoing, PublishRefused
from gateway import app
from gateway.config import GatewayConfig
from gateway.forwarder import of_project
from tests.kit.door import ANSWER_TO, Door, accepted, request
from tests.kit.waiting import until

BATCH = "application/vnd.berth.batch+json"


def received(door: Door) -> list[BuildRequest]:
    return [one.message for one in door.got if isinstance(one.message, BuildRequest)]


@pytest.mark.parametrize("named", ["demo", "other"])
async def test_the_project_is_that_of_the_virtual_host_whatever_the_body_says(named: str) -> None:
    door = Door()
    async with door.scheduler(), door.client() as client, door.gateway("demo"):
        await client.publish(body := request(named), f"build.request.{named}", reply_to=ANSWER_TO)
        await until(lambda: client.replies)
        (got,) = received(door)
        assert (got.project_id, got.instance_uuid) == ("demo", body["instance_uuid"])
        assert client.replies[0][1]["instance_uuid"] == body["instance_uuid"]


HOSTILE: dict[str, dict[str, Any]] = {
    "a second key": {"headers": {"CC": "build.delete.demo"}},
    "many headers": {"headers": {f"h{number}": "x" for number in range(100)}},
    "headers of berth's": {"headers": {"berth-retries": 3, "berth-code": "x", "berth-key": "y", "berth-waited-ms": 9}},
    "a cause": {"headers": {"berth-cause": "x" * 255}},
    "an id": {"message_id": "\x00" * 255},
    "a type": {"type": "build.request.v1"},
    "a correlation id": {"correlation_id": "x" * 255},
}


@pytest.mark.parametrize("properties", HOSTILE.values(), ids=HOSTILE)
async def test_nothing_but_what_was_parsed_comes_through(properties: dict[str, Any]) -> None:
    door, raw = Door(), []
    async with door.scheduler(), door.client() as client, door.gateway("demo"):
        publish = door.brokers[API].route
        door.brokers[API].route = lambda message, *deaths: (raw.append(message), publish(message, *deaths))  # type: ignore[method-assign,func-returns-value,assignment]
        await client.publish(body := request(), **properties)
        await until(lambda: door.got)
    (got,) = door.got
    (sent,) = [one for one in raw if one.routing_key == "door.request.demo"]
    ours = {"berth-cause", "berth-sent-at-ms", "berth-timeout-ms"}
    (meta,) = [item["meta"] for item in json.loads(sent.body)] if sent.content_type == BATCH else [{}]
    assert set(sent.headers) <= ours and set(meta) <= {
        "id", "cause", "sent_at", "reply_to", "correlation_id", "timeout_s"
    }  # fmt: skip
    assert got.meta.cause == body["instance_uuid"]
    assert (got.meta.reply_to or "").startswith("berth.reply.gateway-1.") and got.meta.retries == 0


@pytest.mark.parametrize(("answer_to", "timeout_s"), [(ANSWER_TO, 60.0), (None, math.inf)])
async def test_a_request_is_of_use_as_long_as_its_client_awaits_it(answer_to: str | None, timeout_s: float) -> None:
    """Else it is begun when its client has given it up. One that nobody awaits would be dropped without an event."""
    door = Door()
    async with door.scheduler(), door.client() as client, door.gateway("demo"):
        await client.publish(request(), reply_to=answer_to, expiration_s=60.0)
        await until(lambda: door.got)
    (got,) = door.got
    assert 0 < (got.meta.timeout_s or math.inf) <= timeout_s
    assert (got.meta.timeout_s is None) is (answer_to is None)


DROPPED: dict[str, dict[str, Any]] = {
    "a record of deaths": {"headers": {"x-death": "x"}},
    "more headers than are read": {"headers": {UNREAD: True}},
}


@pytest.mark.parametrize("properties", DROPPED.values(), ids=DROPPED)
async def test_what_pretends_to_have_died_is_dropped(properties: dict[str, Any]) -> None:
    door = Door()
    async with door.scheduler(), door.client() as client, door.gateway("demo"):
        await client.publish(request(), **properties)
        await client.publish(after := request())
        await until(lambda: door.got)
        assert [one.instance_uuid for one in received(door)] == [after["instance_uuid"]]


UNREADABLE: dict[str, tuple[Any, str]] = {
    "no JSON": (b"{", ""),
    "a field of another kind": (request(flavor=5), "message.invalid"),
    "an unknown field": (request(hostt="x"), "message.invalid"),
    "an operator's right": (request(host="h1"), "role.forbidden"),
    "forced": (request(host="h1", forced=True), "role.forbidden"),
    "a megabyte and more": (b'{"x": "%s"}' % (b"A" * 2**20), ""),
    "many values": (json.dumps({**request(), "x": [[]] * 70_000}).encode(), "message.too_large"),
}


@pytest.mark.parametrize(("body", "code"), UNREADABLE.values(), ids=UNREADABLE)
async def test_what_cannot_be_read_ends_here(body: Any, code: str) -> None:
    door = Door()
    async with door.scheduler(), door.client() as client, door.gateway("demo"):
        await client.publish(body)
        await client.publish(after := request())
        await until(lambda: door.got)
        assert [one.instance_uuid for one in received(door)] == [after["instance_uuid"]]
        if code:
            await until(lambda: client.events)
            assert [(event["state"], event["code"], event["project_id"]) for _, event in client.events] == [
                ("refused", code, "demo")
            ]
        await client.ask(body if isinstance(body, dict) else {"x": 1}, "build.request.demo")
        await until(lambda: client.replies)
        assert client.replies[0][0] == "mine" and client.replies[0][1]["code"].startswith(("message.", "role."))


async def test_an_unreadable_move_ends_as_a_move() -> None:
    door, action = Door(), {"request_id": str(uuid.uuid4()), "instance_uuid": str(uuid.uuid4()), "project_id": "other"}
    async with door.scheduler(), door.client() as client, door.gateway("demo"):
        await client.publish({**action, "kind": "migrate"}, "instance.action.demo")
        await until(lambda: client.events)
        ((key, event),) = client.events
        assert (key, event["code"], event["request_id"]) == (
            "instance.event.refused.demo", "role.forbidden", action["request_id"]
        )  # fmt: skip


async def test_a_batch_counts_its_items_and_keeps_their_order() -> None:
    door, bodies = Door(), [request() for _ in range(200)]
    async with door.scheduler(), door.client() as client, door.gateway("demo"):
        items = [{"meta": {"id": f"m{number}"}, "body": body} for number, body in enumerate(bodies)]
        await client.publish(json.dumps(items).encode(), content_type=BATCH)
        await until(lambda: len(door.got) == len(bodies))
        assert [one.instance_uuid for one in received(door)] == [one["instance_uuid"] for one in bodies]


async def test_large_messages_do_not_hand_the_queue_to_another_gateway() -> None:
    """A pause is the end of a consumption: the other gateway would go on beside what this one has in hand."""
    door, paused = Door(), []
    async with door.scheduler(), door.client() as client, door.gateway("demo"):
        (consumption,) = client.broker.queue("gateway.requests").consumers
        consumption.pause = lambda: paused.append(1)  # type: ignore[method-assign]
        large = b'{"x": "%s"}' % (b"A" * 400_000)
        await asyncio.gather(*(client.publish(large) for _ in range(9)))
        await client.publish(request())
        await until(lambda: door.got)
    assert paused == []


async def test_events_come_as_on_the_api_bus() -> None:
    door = Door()
    async with door.scheduler(), door.client() as client, door.client("quiet") as quiet, door.gateway("demo", "quiet"):
        await until(lambda: has_queue(door, "gateway.events.demo"))
        events = [
            BuildEvent(instance_uuid=str(uuid.uuid4()), project_id="demo", state=state, sequence=number)
            for number, state in enumerate((BuildState.ACCEPTED, BuildState.ACTIVE))
        ]
        await door.api.publish_all([(event, "cause") for event in events])
        await until(lambda: len(client.events) == 2)
        assert [key for key, _ in client.events] == ["build.event.accepted.demo", "build.event.active.demo"]
        assert client.events[1][1]["instance_uuid"] == events[1].instance_uuid
        assert quiet.events == []


def has_queue(door: Door, name: str) -> bool:
    return name in door.brokers[API]._queues


async def test_a_full_queue_of_events_drops_the_oldest_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    few = structs.replace(BY_QUEUE["gateway.events.{project}"], max_length=3)
    monkeypatch.setitem(BY_QUEUE, few.name, few)
    monkeypatch.setattr(app, "ENTERED_S", 0.0)
    door = Door()
    door.brokers[project_bus("demo")].stop()
    async with door.scheduler(), door.gateway("demo", "quiet"), door.client("quiet") as quiet:
        await until(lambda: has_queue(door, "gateway.events.demo") and has_queue(door, "gateway.events.quiet"))
        for number in range(5):
            for project in ("demo", "quiet"):
                event = BuildEvent(
                    instance_uuid=str(uuid.uuid4()), project_id=project, state=BuildState.ACTIVE, sequence=number
                )
                await door.api.publish(event)
        await until(lambda: len(quiet.events) == 5)  # the virtual host that is away keeps nobody waiting
        door.brokers[project_bus("demo")].start()
        async with door.client() as client:
            await until(lambda: len(client.events) >= 4)
            missed = [key for key, _ in client.events if key == "events.missed.demo"]
            assert len(missed) == 1
            assert sorted(event["sequence"] for _, event in client.events if "sequence" in event) == [2, 3, 4]
        assert not any(key.startswith("events.missed") for key, _ in quiet.events)


async def test_a_virtual_host_that_was_lost_is_told_later_and_nothing_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    few = structs.replace(BY_QUEUE["gateway.events.{project}"], max_length=1)
    monkeypatch.setitem(BY_QUEUE, few.name, few)
    door, published = Door(), []
    async with door.scheduler(), door.client(), door.gateway("demo"):
        door.brokers[project_bus("demo")].stop()
        missed = door.brokers[API].queue("gateway.missed.demo")
        deliver = missed.deliver_to
        missed.deliver_to = lambda consumer: (published.append(1), deliver(consumer))  # type: ignore[method-assign,assignment]
        for number in range(300):  # more than are taken ahead
            event = BuildEvent(
                instance_uuid=str(uuid.uuid4()), project_id="demo", state=BuildState.ACTIVE, sequence=number
            )
            await door.api.publish(event)
        await until(lambda: published)
        for _ in range(200):
            await asyncio.sleep(0)
        assert len(published) == 1
        door.brokers[project_bus("demo")].start()
        async with door.client() as client:
            await until(lambda: any(key == "events.missed.demo" for key, _ in client.events))


async def test_what_a_project_missed_is_given_back_when_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    few = structs.replace(BY_QUEUE["gateway.events.{project}"], max_length=1)
    monkeypatch.setitem(BY_QUEUE, few.name, few)
    monkeypatch.setattr(app, "READ_PROJECTS_S", 0.01)
    monkeypatch.setattr(app, "DRAIN_S", 0.01)
    door = Door()
    async with door.scheduler(), door.gateway("demo", "kept"):
        door.brokers[project_bus("demo")].stop()
        missed = door.brokers[API].queue("gateway.missed.demo")
        (link,) = missed.consumers
        for number in range(300):  # more than are taken ahead
            event = BuildEvent(
                instance_uuid=str(uuid.uuid4()), project_id="demo", state=BuildState.ACTIVE, sequence=number
            )
            await door.api.publish(event)
        await until(lambda: link.unacked)
        door.projects = ("kept",)
        await until(lambda: missed.returned and not link.unacked)  # for another gateway to tell


def test_a_queue_of_events_never_refuses_a_publisher() -> None:
    row = BY_QUEUE["gateway.events.{project}"]
    planned = plan(row, "gateway.events.demo", ())
    assert (planned.drop_head, planned.dead_key) == (True, "gateway.missed.demo")


async def test_an_answer_that_does_not_come_holds_up_none_that_follow() -> None:
    """One contended build held its project up to 26 s."""
    door, bodies = Door(), [request() for _ in range(5)]
    door.answer = lambda one: accepted(one) if one.message.instance_uuid != bodies[0]["instance_uuid"] else Done()  # type: ignore[attr-defined]
    async with door.scheduler(), door.client() as client, door.gateway("demo"):
        for number, body in enumerate(bodies):
            await client.ask(body, "build.request.demo", correlation_id=f"c{number}")
        await until(lambda: len(client.replies) == 4)
        assert [one.instance_uuid for one in received(door)] == [one["instance_uuid"] for one in bodies]
        assert [correlation for correlation, _ in client.replies] == ["c1", "c2", "c3", "c4"]
        await until(lambda: not any(one.unacked for one in client.broker.queue("gateway.requests").consumers))


async def test_what_was_confirmed_is_not_sent_again_by_the_next_gateway() -> None:
    door, body = Door(), request()
    door.answer = lambda _: Done()
    async with door.scheduler(), door.client() as client:
        async with door.gateway("demo"):
            await client.publish(body)
            await until(lambda: door.got)
            await until(lambda: not any(one.unacked for one in client.broker.queue("gateway.requests").consumers))
        async with door.gateway("demo", process="gateway-2"):
            await client.publish(after := request())
            await until(lambda: len(door.got) == 2)
        assert [one.instance_uuid for one in received(door)] == [body["instance_uuid"], after["instance_uuid"]]


async def test_a_request_does_not_expire_behind_the_gateway() -> None:
    door, raw = Door(), []
    async with door.scheduler(), door.client() as client, door.gateway("demo"):
        route = door.brokers[API].route
        door.brokers[API].route = lambda message, *deaths: (raw.append(message), route(message, *deaths))  # type: ignore[method-assign,func-returns-value,assignment]
        await client.publish(request())
        await until(lambda: door.got)
    assert [one.expiration_s for one in raw if one.routing_key == "door.request.demo"] == [None]
    assert [one.meta.timeout_s for one in door.got] == [None]


DELETE = {"instance_uuid": str(uuid.uuid4()), "project_id": "demo"}
POISON: list[tuple[dict[str, Any], str, str]] = [
    (request(), "build.request.demo", "build.event.refused.demo"),
    (DELETE, "build.delete.demo", "build.event.refused.demo"),
    ({"request_id": str(uuid.uuid4()), "instance_uuid": str(uuid.uuid4()), "project_id": "demo", "kind": "stop"},
     "instance.action.demo", "instance.event.refused.demo"),
]  # fmt: skip


# A try of each more than a gateway handles; and each that the broker delivers, as when a connection is lost each time.
@pytest.mark.parametrize("deliveries", [1 - LAST_DELIVERIES, 1])
@pytest.mark.parametrize(("body", "key", "event_key"), POISON, ids=[key for _, key, _ in POISON])
async def test_what_ends_its_gateway_each_time_is_refused(
    body: dict[str, Any], key: str, event_key: str, deliveries: int
) -> None:
    door = Door()
    async with door.scheduler(), door.client() as client:
        async with door.gateway("demo"):
            pass  # its queues are there
        await client.publish(body, key)
        looking = client.broker.queue("gateway.requests")
        for _ in range(BY_QUEUE["gateway.requests"].delivery_limit + deliveries):
            looking.requeue(looking.pop())
        async with door.gateway("demo"):
            await until(lambda: client.events)
        assert [(key, event["code"]) for key, event in client.events] == [(event_key, "delivery.limit_reached")]
        assert door.got == []


@pytest.mark.parametrize(("body", "key", "event_key"), POISON, ids=[key for _, key, _ in POISON])
async def test_what_expires_before_its_gateway_is_refused(body: dict[str, Any], key: str, event_key: str) -> None:
    """The broker had confirmed it, and dropped it: its client waited for an event for ever."""
    door = Door()
    async with door.scheduler(), door.client() as client:
        async with door.gateway("demo"):
            pass  # its queues are there
        await client.publish(body, key, expiration_s=0.01)
        await until(lambda: not client.broker.queue("gateway.requests").ready)
        async with door.gateway("demo"):
            await until(lambda: client.events)
        assert [(key, event["code"]) for key, event in client.events] == [(event_key, "broker.expired")]
        assert door.got == []


def test_the_broker_gives_up_a_projects_message_that_nobody_can_read() -> None:
    for queue in ("gateway.requests", "gateway.queries"):
        row = BY_QUEUE[queue]
        assert plan(row, queue, ()).delivery_limit == row.delivery_limit < 100


async def test_a_full_door_sends_the_gateway_back_to_its_turns() -> None:
    door = Door()
    async with door.client() as client, door.gateway("demo"):
        await door.api.open()
        name = await door.api.declare("scheduler.door")
        door.brokers[API].queue(name).shut = 1
        await client.publish(body := request())
        await asyncio.sleep(0)
        await until(lambda: len(client.broker.queue("gateway.requests")) == 0)
        door.brokers[API].queue(name).shut = 0
        async with door.scheduler():
            await until(lambda: door.got)
            assert received(door)[0].instance_uuid == body["instance_uuid"]


async def test_a_request_waits_for_a_right_that_its_gateway_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its project is not begun anew, which would leave channels on the connection that all projects use."""
    monkeypatch.setattr(app, "READ_PROJECTS_S", math.inf)
    door = Door()
    async with door.scheduler(), door.client() as client, door.gateway("demo"):
        route, refusals = door.brokers[API].route, [1]

        def refuse_first(message: Outgoing, *more: Any) -> None:
            if message.routing_key == "door.request.demo" and refusals:
                refusals.pop()
                raise BusForbidden("no right to this key")
            route(message, *more)

        monkeypatch.setattr(door.brokers[API], "route", refuse_first)
        await client.publish(body := request())
        await until(lambda: received(door))
        assert received(door)[0].instance_uuid == body["instance_uuid"]


async def test_what_a_full_door_refuses_is_not_overtaken(monkeypatch: pytest.MonkeyPatch) -> None:
    door, bodies = Door(), [request(config_drive={"user_data": "A" * 60_000}) for _ in range(12)]
    async with door.scheduler(), door.client() as client, door.gateway("demo"):
        route, refusals = door.brokers[API].route, [1]

        def refuse_first(message: Outgoing, *more: Any) -> None:
            if message.routing_key == "door.request.demo" and refusals:
                refusals.pop()
                raise PublishRefused("the door is full")
            route(message, *more)

        monkeypatch.setattr(door.brokers[API], "route", refuse_first)
        items = [{"meta": {"id": f"m{number}"}, "body": body} for number, body in enumerate(bodies)]
        await client.publish(json.dumps(items).encode(), content_type=BATCH)
        uuids = [one["instance_uuid"] for one in bodies]
        await until(lambda: {one.instance_uuid for one in received(door)} == {*uuids})
        assert list(dict.fromkeys(one.instance_uuid for one in received(door))) == uuids


def pages(one: Received) -> Outcome:
    record = BuildRecord(instance_uuid=str(uuid.uuid4()), project_id="demo", flavor="f", state=BuildState.ACTIVE)
    holders = tuple(
        ConflictingConsumer(consumer=str(uuid.uuid4()), project_id=project) for project in ("demo", "other")
    )
    line = TimelineEntry(at=1.0, actor="scheduler", what="not_claimed", conflicting_consumers=holders)
    if isinstance(one.message, BuildQuery):
        mine, theirs = structs.replace(record, timeline=(line,)), structs.replace(record, project_id="other")
        return Done(reply=BuildPage(builds=(mine, theirs)))
    action = ActionRecord(
        request_id=str(uuid.uuid4()), instance_uuid=str(uuid.uuid4()), project_id="other", kind=ActionKind.STOP,
        state=ActionState.DONE,
    )  # fmt: skip
    return Done(reply=ActionPage(actions=(action, structs.replace(action, project_id="demo"))))


@pytest.mark.parametrize(("key", "of"), [("build.query", "builds"), ("instance.query", "actions")])
async def test_a_query_is_about_the_project_and_so_is_its_answer(key: str, of: str) -> None:
    door = Door()
    door.answer = pages
    async with door.scheduler(), door.client() as client, door.gateway("demo"):
        await client.ask({"project_id": "other"}, key)
        await until(lambda: client.replies)
        assert [one.message.project_id for one in door.got] == ["demo"]  # type: ignore[attr-defined]
        ((correlation, page),) = client.replies
        assert (correlation, [one["project_id"] for one in page[of]]) == ("mine", ["demo"])
        holders = [
            holder for one in page[of] for line in one.get("timeline", ()) for holder in line["conflicting_consumers"]
        ]
        assert {one["project_id"] for one in holders} <= {"demo"}


async def test_a_refusal_is_passed_on() -> None:
    door = Door()
    door.answer = lambda _: Done(reply=Refusal(code="flavor.unknown", reason="there is none"))
    async with door.scheduler(), door.client() as client, door.gateway("demo"):
        await client.ask(request(), "build.request.demo")
        await until(lambda: client.replies)
        assert client.replies[0][1]["code"] == "flavor.unknown"


async def test_one_project_that_waits_keeps_no_other_waiting() -> None:
    door = Door()
    door.answer = lambda one: accepted(one) if one.message.project_id == "quiet" else Retry("x", "later")  # type: ignore[attr-defined]
    async with door.scheduler(), door.client() as noisy, door.client("quiet") as quiet, door.gateway("demo", "quiet"):
        for _ in range(20):
            await noisy.publish(request(count=100))
        await until(lambda: len(door.got) >= 1)
        await quiet.ask(request("quiet"), "build.request.quiet")
        await until(lambda: quiet.replies)
        gangs = {one.message.instance_uuid for one in door.got if one.message.project_id == "demo"}  # type: ignore[attr-defined]
        assert len(gangs) == 1  # a gang is more than a turn, and its project waits for the answer


async def test_a_gateway_that_is_ready_has_its_projects_open() -> None:
    door, stop = Door(), asyncio.Event()
    async with door.scheduler():
        service = app.build(door.environment(), GatewayConfig(projects=("demo", "quiet")))
        running = asyncio.create_task(service.run(stop))
        await service.ready.wait()
        assert door.is_open("demo") and door.is_open("quiet")
        stop.set()
        await running


async def test_projects_come_and_go_with_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "READ_PROJECTS_S", 0.01)
    door = Door()
    async with door.scheduler(), door.client() as client, door.client("late") as late, door.gateway("demo"):
        await client.ask(request(), "build.request.demo")
        await until(lambda: client.replies)
        door.projects = ("late",)
        await until(lambda: "gateway.requests" in late.broker._queues)
        await late.ask(request("late"), "build.request.late")
        await until(lambda: late.replies)
        await until(lambda: not client.broker.queue("gateway.requests").consumers)
        await until(lambda: not any(one.prefetch for one in door.brokers[API].queue("gateway.events.demo").consumers))


async def test_settings_without_any_project_remove_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is just being written may be empty: all projects were away for 30 s."""
    monkeypatch.setattr(app, "READ_PROJECTS_S", 0.01)
    door, reads = Door(), []
    async with door.scheduler(), door.client() as client, door.gateway("demo"):
        made = door.brokers[API].queue("gateway.events.demo")
        reading = app.Projects._read

        def counted(projects: app.Projects, read: Any) -> None:
            reads.append(1)
            reading(projects, read)

        monkeypatch.setattr(app.Projects, "_read", counted)
        door.projects = ()
        await until(lambda: len(reads) > 2)
        await client.ask(request(), "build.request.demo")
        await until(lambda: client.replies)
        assert any(one.prefetch for one in made.consumers)


class Link:
    """A project's part that has nothing to do."""

    def __init__(self) -> None:
        self.drained = asyncio.Event()

    async def run(self) -> None:
        await self.drained.wait()

    async def drain(self, _: float) -> None:
        self.drained.set()

    async def close(self) -> None:
        """Nothing."""


async def test_no_project_begins_anew_while_the_gateway_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "READ_PROJECTS_S", 0.0)
    made: list[Link] = []

    def link(_: str) -> Any:
        made.append(Link())
        return made[-1]

    projects = app.Projects(link, ("demo",), SystemClock())
    running = asyncio.create_task(projects.run(None))
    await until(lambda: made)
    await projects.drain(1.0)
    for _ in range(20):
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert len(made) == 1


@pytest.mark.parametrize(
    "message",
    [
        BuildRequest(instance_uuid=str(uuid.uuid4()), project_id="other", flavor="f", by="root"),
        DeleteRequest(instance_uuid=str(uuid.uuid4()), project_id="other", by="root"),
    ],
)
def test_a_project_asks_in_its_own_name_whomever_it_names(message: BuildRequest | DeleteRequest) -> None:
    passed = of_project(message, "demo")
    assert isinstance(passed, BuildRequest | DeleteRequest)
    assert (passed.project_id, passed.by) == ("demo", "project demo")
