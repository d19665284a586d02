"""The page about calls of Nova: from what a front announces to what a browser gets, and the bounds of what is kept."""

from __future__ import annotations

import asyncio
import json
import random
from functools import partial

import httpx
import msgspec
import pytest
from msgspec import structs
from starlette.requests import Request
from starlette.responses import StreamingResponse
from structlog.testing import capture_logs

from berth.web.application import nova_application
from berth.web.event_stream import Live
from berth.web.pages.nova_calls import FRONTEND, MAX_FRONTENDS, SHOWN, NovaCalls, NovaPages
from berth.web.sign_in_sessions import LOCAL, Access, WebCaller, WebRole, digest_of
from bus.bus import API
from bus.clock import SystemClock
from bus.contracts.nova_calls import CallCompared, CallDecision, ComparedAnswer, DecisionStep, NovaCall
from bus.contracts.workers import STOPPED, WorkerHeartbeat
from bus.memory import MemoryBroker, MemoryTransport
from bus.service.environment import Environment
from nova_scheduler.decide.decision_log import (
    ANSWERED,
    MAX_BYTES,
    MAX_WAITING,
    CallRecorder,
    PublishedCalls,
    RecentCalls,
)
from tests.kit.waiting import until

HOSTILE = "<script>alert(1)</script>\n\u202eevil"
NO_HOST = CallDecision(
    event=ANSWERED.no_host,
    request_id="req-1",
    instances=("vm-1",),
    count=3,
    reason="no room",
    funnel=(DecisionStep(step="ram", remaining=0, rejected={"memory": 7}, hosts={"memory": ("h1", HOSTILE)}),),
)
OTHER_HOST = CallCompared(
    difference="other host",
    stock=ComparedAnswer(hosts=("h-stock",), took_s=0.25),
    berth=ComparedAnswer(hosts=("h-berth",), took_s=0.002),
)


class SetClock(SystemClock):
    """A clock that is set."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class World:
    """A front and the page, each with its connection to one bus in memory."""

    def __init__(self) -> None:
        broker = MemoryBroker(SystemClock())
        self.front, self.web = (
            Environment(name, transports=partial(MemoryTransport, broker), rng=random.Random(1))
            for name in ("front-1", "web-1")
        )
        self.bus, of_page = self.front.bus(API), self.web.bus(API)
        self.of_page = of_page
        self.told = PublishedCalls(self.bus)
        self.calls = NovaCalls(of_page, "web-1")
        self.live = Live(of_page, clock=self.web.clock, process="web-1")

    async def open(self) -> World:
        await self.bus.open()
        await self.of_page.open()
        await self.calls.open()
        return self

    async def close(self) -> None:
        await self.calls.close()
        await self.of_page.close()
        await self.bus.close()

    def client(self, callers: dict[str, WebCaller] | None = None, token: str = "") -> httpx.AsyncClient:
        access = Access(callers, self.web.clock)
        served = nova_application(self.web, live=self.live, calls=self.calls, access=access, hosts=None)
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return httpx.AsyncClient(transport=httpx.ASGITransport(served), base_url="http://berth", headers=headers)


def call(
    request_id: str = "req-1", *, compared: CallCompared | None = None, text: str = "", project: str = ""
) -> NovaCall:
    told = CallDecision(event=ANSWERED.placed, request_id=request_id, reason=text, project_id=project)
    decision = None if compared else told
    return NovaCall(request_id=request_id, at=1.0, worker="front-1", decision=decision, compared=compared)


async def test_what_a_front_tells_is_on_the_page_and_hostile_text_is_text() -> None:
    here = await World().open()
    sending = asyncio.create_task(here.told.run())
    here.told.record_decision(NO_HOST)
    here.told.record_difference("req-1", OTHER_HOST)
    await until(lambda: here.calls.received == 2)
    sending.cancel()
    async with here.client() as client:
        first = await client.get("/")
        assert (first.status_code, first.headers["location"]) == (303, "/nova")
        page = (await client.get("/nova")).text
        for shown in ("other host", "h-stock", "h-berth", "250.0 ms", "2.0 ms", 'href="/nova/calls/req-1"', "no room"):
            assert shown in page
        assert "/fleet" not in page, "no scheduler would answer it"
        page = (await client.get("/nova/calls/req-1")).text
        assert "ram" in page and "h1" in page and "h-stock" in page and "and 2 more" in page
        assert "<script>alert" not in page and "\u202e" not in page
        unknown = await client.get("/nova/calls/req-2")
        assert (unknown.status_code, unknown.json()["code"]) == (404, "explain.unknown")
    await here.close()


@pytest.mark.parametrize("path", ["/nova", "/nova/events", "/nova/calls/req-1", "/nova/calls/req-unknown"])
@pytest.mark.parametrize(("token", "status"), [("", {303, 401}), ("project", {403}), ("wrong", {303, 401})])
async def test_who_may_not_see_hosts_sees_nothing(path: str, token: str, status: set[int]) -> None:
    here = World()
    here.calls.note(call())
    callers = {digest_of("op"): LOCAL, digest_of("project"): WebCaller("p", WebRole.PROJECT, "p")}
    async with here.client(callers, token) as client:
        assert (await client.get(path)).status_code in status


async def test_a_stream_has_the_newest_at_once_and_ends_with_the_server() -> None:
    here = World()
    here.calls.note(call(compared=OTHER_HOST))
    scope = {"type": "http", "method": "GET", "path": "/nova/events", "headers": [], "state": {"caller": LOCAL}}
    response = await NovaPages(here.calls, here.live, has_session=False).events(Request(scope))
    assert isinstance(response, StreamingResponse)
    stream = aiter(response.body_iterator)
    piece = await anext(stream)
    assert isinstance(piece, bytes)
    name, data = piece.decode().split("\n")[:2]
    assert name == "event: nova"
    assert json.loads(data.removeprefix("data: "))["compared"][0]["compared"]["difference"] == "other host"
    here.live.end_streams()
    assert [one async for one in stream] == []


async def test_the_list_has_of_each_call_what_it_shows() -> None:
    """It is sent each second to all who look, and a project decides how much there is to explain."""
    here = World()
    steps = tuple(DecisionStep(step=f"s{n}", remaining=0, hosts={"r": ("h" * 600,) * 20}) for n in range(5))
    chosen = (("h1", "h2", "h3"), ("h4", "h5"))
    for number in range(SHOWN):
        told = CallDecision(event=ANSWERED.placed, request_id="r", count=2, reason="why", funnel=steps, hosts=chosen)
        here.calls.note(NovaCall(request_id=f"req-{number}", at=1.0, worker="front-1", decision=told))
    shown = here.calls.view()
    rows = [one.decision for one in shown.decisions if one.decision is not None]
    assert {(one.event, one.count, one.reason, one.hosts) for one in rows} == {
        (ANSWERED.placed, 2, "why", (("h1",), ("h4",)))
    }
    assert len(msgspec.json.encode(shown)) < SHOWN * 1000
    assert here.calls.of_request("req-9").decisions[0].decision == told


async def test_a_call_of_a_kind_that_is_not_known_is_not_shown() -> None:
    here = World()
    here.calls.note(NovaCall(request_id="req-1", at=1.0, worker="front-of-tomorrow"))
    assert here.calls.view().decisions == () == here.calls.view().compared


@pytest.mark.parametrize(("most", "most_bytes"), [(3, 10**9), (10**9, 1000)])
def test_what_is_kept_is_bounded(most: int, most_bytes: int) -> None:
    kept = RecentCalls(most, most_bytes)
    for number in range(100):
        kept.add(call(f"req-{number}", text="x" * 100))
    held = kept.newest()
    assert held[0].request_id == "req-99" and 1 <= len(held) <= 5
    kept.add(call("req-large", text="x" * 2000))
    assert len(kept.newest()) <= 3, "one that is larger than all may be takes no room from then on"


@pytest.mark.parametrize(("most", "most_bytes"), [(40, 10**9), (10**9, 10_000)])
def test_a_project_does_not_push_out_the_calls_of_others(most: int, most_bytes: int) -> None:
    kept = RecentCalls(most, most_bytes)
    others = [f"other-{number}" for number in range(5)]
    for name in others:
        kept.add(call(name, project=name))
    for number in range(1000):
        kept.add(call(f"flood-{number}", project="flood", text="x" * 100))
    names = [one.request_id for one in kept.newest()]
    assert names[0] == "flood-999" and names[-5:] == others[::-1] and len(names) > 20
    for number in range(200):
        kept.add(call(f"later-{number}", project=f"p{number}", text="x" * 100))
    names = [one.request_id for one in kept.newest()]
    assert names == [f"later-{number}" for number in range(199, 199 - len(names), -1)], "by age, where nobody floods"


async def test_a_project_does_not_push_out_others_from_the_list_nor_from_what_waits_for_the_bus() -> None:
    here = World()
    flood = CallDecision(event=ANSWERED.placed, request_id="flood", project_id="p1")
    with capture_logs():
        here.told.record_decision(structs.replace(flood, request_id="other", project_id="p2"))
        for _ in range(1000):
            here.told.record_decision(flood)
    await here.open()
    sending = asyncio.create_task(here.told.run())
    await until(lambda: here.calls.received >= MAX_WAITING)
    sending.cancel()
    shown = [one.request_id for one in here.calls.view().decisions]
    assert len(shown) == SHOWN and shown[-1] == "other"
    await here.close()


async def test_counts_are_those_of_all_fronts_and_of_no_other_worker() -> None:
    here = World()

    def count(worker: str, role: str = FRONTEND, **counts: int) -> None:
        here.calls.note_frontend(
            WorkerHeartbeat(
                role=role, worker=worker, host="h", pid=1, version="1", started_at=0.0, phase="ready", counts=counts
            )
        )

    count("front-1", same=1)
    count("front-1", same=3)
    count("front-2", same=1, skipped=2)
    count("scheduler-1", "scheduler", same=100)
    assert here.calls.view().counts == {"same": 4, "skipped": 2}
    assert (seen := here.calls.received) == 3, "each shows the page something new"
    count("front-2", same=1, skipped=2)
    assert here.calls.received == seen, "nothing to show anew"
    for number in range(2 * MAX_FRONTENDS):
        count(f"restarted-{number}", same=1)
    assert here.calls.view().counts == {"same": MAX_FRONTENDS}


def test_the_age_is_that_of_the_oldest_copy_and_grows_until_the_next_heartbeat() -> None:
    here = World()
    clock = here.of_page.clock = SetClock()

    def tell(worker: str, phase: str = "ready", **ages_s: float) -> None:
        here.calls.note_frontend(
            WorkerHeartbeat(
                role=FRONTEND, worker=worker, host="h", pid=1, version="1", started_at=0.0, phase=phase, ages_s=ages_s
            )
        )

    assert here.calls.view().replica_age_s is None
    tell("front-1", replica=0.5)
    tell("front-2", replica=2.0)
    clock.now_s += 3.0
    assert here.calls.view().replica_age_s == 5.0
    tell("front-2", replica=0.25)
    assert here.calls.view().replica_age_s == 3.5
    tell("front-1", phase=STOPPED, replica=0.5)
    assert here.calls.view().replica_age_s == 0.25


async def test_comparisons_are_not_pushed_out_by_calls() -> None:
    here = World()
    here.calls.note(call(compared=OTHER_HOST))
    for number in range(2000):
        here.calls.note(call(f"req-{number}"))
    shown = here.calls.view()
    assert len(shown.compared) == 1 and len(shown.decisions) == SHOWN


async def test_what_a_front_has_not_sent_is_bounded() -> None:
    here = World()
    names = tuple(f"{number}{'x' * 590}" for number in range(20))
    steps = tuple(DecisionStep(step=f"s{n}", remaining=0, hosts={"r": names}) for n in range(20))
    with capture_logs():
        for _ in range(MAX_WAITING + 10):
            here.told.record_decision(CallDecision(event=ANSWERED.no_host, request_id="req-1", funnel=steps))
    await here.open()
    sending = asyncio.create_task(here.told.run())
    await until(lambda: here.calls.received >= MAX_WAITING)
    sending.cancel()
    came = here.calls.decisions.newest()
    assert len(came) == here.calls.received == MAX_WAITING
    assert all(len(msgspec.json.encode(one)) <= MAX_BYTES for one in came)
    assert all(one.decision is not None and len(one.decision.funnel) == 20 for one in came)
    await here.close()


def test_a_recorder_alone_logs() -> None:
    recorder = CallRecorder()
    with capture_logs() as lines:
        recorder.record_decision(NO_HOST)
        recorder.record_difference("req-1", OTHER_HOST)
    assert [one["event"] for one in lines] == [ANSWERED.no_host, "nova.shadow_differs"]
    assert [one["request_id"] for one in lines] == ["req-1", "req-1"]
    assert (lines[0]["funnel"][0]["rejected"], lines[1]["stock"]) == ({"memory": 7}, ["h-stock"])
