"""The parts of the web server: what the pages ask about the fleet, the event stream, faults, dead letters."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import structs
from starlette.requests import Request

from berth.client.status import Severity, StatusKind
from berth.client.types import DrainBody, ProviderView
from berth.config import site
from berth.config.settings import Settings
from berth.status import rows
from berth.status.reader import Server
from berth.status.rows import status_of
from berth.web import api
from berth.web import event_stream as live
from berth.web.api import WebApi, as_seen, body_of, stream_response
from berth.web.application import on_problem
from berth.web.event_stream import EventFollower, Live, Second
from berth.web.openapi import _of_hosts
from berth.web.operations import METAL_AGE_S, Drains, NodesReader
from berth.web.pages import dead_letters
from berth.web.pages.dead_letters import DeadLetterActions
from berth.web.pages.figures import state_of
from berth.web.pages.fleet import (
    CHANGES_LOOKED_AT,
    CHANGES_SHOWN,
    COUNTED_AGE_S,
    FAILED_AGE_S,
    WORKERS_AGE_S,
    FleetReader,
    QueueReader,
)
from berth.web.pages.instances import Pages, hosts_by_cell, lost_claims
from berth.web.pages.objects import WebObjects
from berth.web.problems import PROBLEM_JSON, Problem
from berth.web.rendering import LastAnswers
from berth.web.sign_in_sessions import LOCAL, WebCaller, WebRole
from bus.bus import API, Bus
from bus.clock import SystemClock
from bus.contracts.base import Message
from bus.contracts.build import (
    BuildEvent,
    BuildPage,
    BuildQuery,
    BuildRecord,
    BuildState,
    HostRecord,
    HostsPage,
    HostsQuery,
    TimelineEntry,
)
from bus.contracts.drains import DrainTarget
from bus.contracts.feed import Change, ChangesPage, ChangesRequest, feed_rows
from bus.contracts.objects import MAX_CHANGES, CellBus, CellDecision, CellState, ObjectsChange
from bus.contracts.operations import ServiceRecord, ServicesPage, ServicesQuery
from bus.contracts.placement import ConflictingConsumer
from bus.contracts.queues import DEAD_LETTERS
from bus.contracts.stages import StageTimes
from bus.faults import RequestTimeout
from bus.memory import MemoryBroker, MemoryTransport
from bus.service.environment import Environment
from bus.transport import Outgoing, PublishRefused
from tests.unit.berth.world import HandClock

# --- how often the pages request what about the fleet. A list of hosts costs the scheduler some 3 microseconds a host


UUID = "10000000-0000-4000-8000-000000000001"


class MovedClock(SystemClock):
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Scheduler:
    """A bus that answers, and counts the requests."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.up = True
        self.failing: type[Message] | None = None

    async def request(self, query: Message, _reply: type[Any], **_: Any) -> Message:
        self.requests[type(query).__name__] += 1
        if type(query) is self.failing:
            raise RequestTimeout("no answer")
        if isinstance(query, HostsQuery):
            return HostsPage(hosts=(HostRecord(uuid=UUID, name="h", cell="c", service="s", up=self.up),), more=False)
        assert isinstance(query, ServicesQuery)
        last_seen_s = float(self.requests.total())  # of each answer another
        return ServicesPage(
            services=(ServiceRecord(name="s", cell="c", up=self.up, hosts=1, enabled=1, last_seen_s=last_seen_s),)
        )


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


@pytest.fixture
def clock() -> MovedClock:
    return MovedClock()


@pytest.fixture
def fleet(scheduler: Scheduler, clock: MovedClock) -> FleetReader:
    return FleetReader(scheduler, clock, ("c",))  # type: ignore[arg-type]


async def test_a_page_that_counts_hosts_reads_them_when_a_count_has_changed(
    fleet: FleetReader, scheduler: Scheduler, clock: MovedClock
) -> None:
    """As the page Now does: each second, here for 65 s."""
    for _ in range(65):
        assert [host.up for host in await fleet.hosts_to_count()] == [True]
        clock.now += 1.0
    assert scheduler.requests == {"ServicesQuery": 22, "HostsQuery": 6}
    scheduler.requests.clear()
    scheduler.up = False
    shown = []
    for _ in range(3):
        clock.now += 1.0
        shown.append((await fleet.hosts_to_count())[0].up)
    assert shown[-1] is False, "a service that is down is not shown in time"
    assert scheduler.requests["HostsQuery"] == 1


async def test_hosts_that_another_page_has_just_read_are_counted_without_a_request(
    fleet: FleetReader, scheduler: Scheduler, clock: MovedClock
) -> None:
    await fleet.hosts()
    clock.now += 1.0
    await fleet.hosts_to_count()
    assert scheduler.requests == {"HostsQuery": 1}


@pytest.mark.parametrize("failing", [HostsQuery, ServicesQuery])
async def test_a_change_is_not_forgotten_when_no_scheduler_answers(
    fleet: FleetReader, scheduler: Scheduler, clock: MovedClock, failing: type[Message]
) -> None:
    await fleet.hosts_to_count()
    scheduler.up, scheduler.failing = False, failing
    clock.now += 3.0
    with pytest.raises(RequestTimeout):
        await fleet.hosts_to_count()
    scheduler.failing = None
    clock.now += FAILED_AGE_S
    assert [host.up for host in await fleet.hosts_to_count()] == [False]


async def test_what_no_count_of_a_service_shows_is_read_now_and_then(
    fleet: FleetReader, scheduler: Scheduler, clock: MovedClock
) -> None:
    await fleet.hosts_to_count()
    clock.now += COUNTED_AGE_S + 1.0
    await fleet.hosts_to_count()
    assert scheduler.requests["HostsQuery"] == 2


async def test_pages_do_not_wait_one_after_the_other_for_schedulers_that_do_not_answer(
    fleet: FleetReader, scheduler: Scheduler, clock: MovedClock
) -> None:
    scheduler.failing = HostsQuery
    with pytest.raises(RequestTimeout):
        await fleet.hosts()
    for page in (fleet.hosts(), fleet.hosts_to_count(), fleet.hosts()):
        with pytest.raises(RequestTimeout):
            await page
    assert scheduler.requests == {"HostsQuery": 1}
    with pytest.raises(RequestTimeout):
        await fleet.hosts(fresh=True)  # an action is decided by what is true now
    scheduler.failing = None
    clock.now += FAILED_AGE_S
    assert await fleet.hosts() and scheduler.requests["HostsQuery"] == 3


async def test_after_an_answer_no_page_is_told_of_an_earlier_failure(
    fleet: FleetReader, scheduler: Scheduler, clock: MovedClock
) -> None:
    scheduler.failing = HostsQuery
    with pytest.raises(RequestTimeout):
        await fleet.hosts()
    scheduler.failing = None
    await fleet.hosts(fresh=True)
    assert await fleet.hosts() and await fleet.hosts_to_count()


async def test_workers_that_no_scheduler_told_are_asked_for_again_a_while_after_the_failure(
    fleet: FleetReader, scheduler: Scheduler, clock: MovedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a while after the question, which took longer than that."""
    asked = 0

    async def late(*_: Any, **__: Any) -> None:
        nonlocal asked
        asked += 1
        clock.now += 2 * WORKERS_AGE_S
        raise RequestTimeout("no answer")

    monkeypatch.setattr(scheduler, "request", late)
    with pytest.raises(RequestTimeout):
        await fleet.known_workers()
    assert await fleet.known_workers() == () and asked == 1
    clock.now += WORKERS_AGE_S + 1.0
    with pytest.raises(RequestTimeout):
        await fleet.known_workers()


@pytest.mark.parametrize("ident", [None, UUID])
async def test_a_drain_has_the_id_that_its_operator_gives_it(ident: str | None) -> None:
    begun: list[Any] = []

    class Bus:
        async def request(self, command: Message, *_: Any, **__: Any) -> Any:
            begun.append(command)
            raise RequestTimeout("no answer")

    drains = Drains(Bus(), random.Random(1))  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(RequestTimeout):
            await drains.start("h", DrainTarget.HOST, DrainBody(id=ident, reason="fan"), "ann")
    assert ({one.drain for one in begun} == {UUID}) is (ident is not None) and begun[0].drain


class Feed:
    """A bus on which placement answers from a feed that reaches back to a number."""

    def __init__(self, head: int, oldest: int) -> None:
        self.head = head
        self.oldest = oldest

    async def request(self, query: Message, _reply: type[Any], **_: Any) -> Message:
        assert isinstance(query, ChangesRequest)
        if query.after < self.oldest - 1:
            return ChangesPage(head=self.head, too_old=True)
        numbers = range(query.after + 1, min(self.head, query.after + query.limit) + 1)
        changes = [Change(sequence=number, provider=UUID, generation=number) for number in numbers]
        return ChangesPage(rows=feed_rows(changes), head=self.head)


@pytest.mark.parametrize("kept", [0, 100, 1000, CHANGES_LOOKED_AT, 10_000])
async def test_a_hosts_page_shows_the_newest_changes_however_short_the_feed_is(kept: int, clock: MovedClock) -> None:
    """It showed none where the feed keeps fewer than the page looks through."""
    head = 10_000
    view = ProviderView(
        uuid=UUID, name="h", parent_uuid=None, depth=0, generation=1, inventories={}, traits=(), aggregates=()
    )
    feed = Feed(head, oldest=head - kept + 1)
    found = await FleetReader(feed, clock, ("c",)).changes([view])  # type: ignore[arg-type]
    assert [one.sequence for one in found] == [head - back for back in range(min(kept, CHANGES_SHOWN))]


# --- the part of the event stream that the pages keep is bounded, and a reader that falls behind is notified


def event(number: int, state: BuildState, at: float = 0.0) -> BuildEvent:
    uuid = f"{number:08x}-0000-4000-8000-000000000000"
    return BuildEvent(instance_uuid=uuid, project_id="p", state=state, sequence=number, at=at, terminal=True)


async def test_a_follower_that_falls_behind_is_notified() -> None:
    follower = EventFollower(lambda event: event.state is BuildState.ACTIVE)
    for number in range(live.MAX_BEHIND):
        follower.put(event(number, BuildState.ACTIVE))
        follower.put(event(number, BuildState.BUILDING))
    assert not follower.lagged
    follower.put(event(0, BuildState.ACTIVE))
    assert follower.lagged and len(await follower.next(1.0)) == live.MAX_BEHIND


async def test_one_callers_followers_leave_room_for_others() -> None:
    """One reader took all 200 streams, and no operator's page moved."""
    clock = SystemClock()
    bus = Bus(API, MemoryTransport(MemoryBroker(clock), API), process="p", clock=clock, rng=random.Random(1))
    stream = Live(bus, clock=clock, process="p")
    with contextlib.ExitStack() as held:
        for _ in range(live.MAX_FOLLOWERS_OF_CALLER):
            held.enter_context(stream.follow(lambda _: True, caller="dashboard"))
        with pytest.raises(live.TooManyEventFollowers), stream.follow(lambda _: True, caller="dashboard"):
            pass
        with stream.follow(lambda _: True, caller="operator"):
            pass


async def test_a_body_whose_sender_leaves_is_no_defect() -> None:
    """Each one wrote two tracebacks into the log."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    request = Request({"type": "http", "method": "POST", "path": "/api/v1/builds", "headers": []}, receive)
    with pytest.raises(Problem) as caught:
        await body_of(request)
    assert (caught.value.status, caught.value.code) == (400, "request.cut_short")


@pytest.mark.parametrize(("many", "code"), [(MAX_CHANGES, None), (MAX_CHANGES + 1, "request.invalid")])
async def test_many_objects_are_changed_at_once_up_to_a_bound(many: int, code: str | None) -> None:
    sent: list[ObjectsChange] = []

    async def change(message: ObjectsChange) -> dict[str, int]:
        sent.append(message)
        return {"revision": 1}

    async def check_room(*_: object) -> None: ...

    async def receive() -> dict[str, Any]:
        changes = [{"kind": "flavor", "name": f"f{number}"} for number in range(many)]
        return {"type": "http.request", "body": json.dumps({"changes": changes}).encode()}

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/api/v1/objects", "query_string": b"", "headers": headers}
    request = Request(scope | {"state": {"caller": LOCAL}}, receive)
    objects = WebObjects(cast("Any", SimpleNamespace(change=change, check_room=check_room)))
    if code is None:
        assert (await objects.change_objects(request)).status_code == 200
    else:
        with pytest.raises(Problem) as caught:
            await objects.change_objects(request)
        assert (caught.value.status, caught.value.code) == (400, code)
    assert [(len(one.changes), one.actor) for one in sent] == [(many, LOCAL.name)] * (code is None)


async def test_one_projects_followers_leave_room_for_others() -> None:
    clock = SystemClock()
    bus = Bus(API, MemoryTransport(MemoryBroker(clock), API), process="p", clock=clock, rng=random.Random(1))
    stream = Live(bus, clock=clock, process="p")
    with contextlib.ExitStack() as held:
        names = itertools.count()

        def follow(project: str | None) -> None:
            held.enter_context(stream.follow(lambda _: True, caller=f"c{next(names)}", project=project))

        for number in range(live.MAX_FOLLOWERS_OF_PROJECTS):
            follow(f"p{number // live.MAX_FOLLOWERS_OF_PROJECT}")
        for project in ("p0", "another"):
            with pytest.raises(live.TooManyEventFollowers):
                follow(project)
        for _ in range(live.MAX_FOLLOWERS - live.MAX_FOLLOWERS_OF_PROJECTS):
            follow(None)
        with pytest.raises(live.TooManyEventFollowers):
            follow(None)
    with stream.follow(lambda _: True, project="p0"):
        pass


async def test_followers_read_anew_after_a_lost_connection_and_end_with_the_server() -> None:
    """The end of a build may have been published meanwhile, to no queue."""
    clock = SystemClock()
    broker = MemoryBroker(clock)
    bus = Bus(API, MemoryTransport(broker, API), process="p", clock=clock, rng=random.Random(1))
    stream = Live(bus, clock=clock, process="p")
    await bus.open()
    await stream.open()
    with stream.follow(lambda _: True) as follower:
        waiting = asyncio.create_task(follower.next(3600.0))
        await asyncio.sleep(0)
        broker.drop_connections()
        assert await asyncio.wait_for(waiting, 60.0) == [] and follower.lagged
    with stream.follow(lambda _: True) as follower:
        waiting = asyncio.create_task(follower.next(3600.0))
        await asyncio.sleep(0)
        stream.end_streams()
        assert await waiting == [] and follower.closed and not follower.lagged
    with stream.follow(lambda _: True) as follower:
        assert await follower.next(3600.0) == [] and follower.closed, "one that begins as the server stops"
    await stream.close()
    await bus.close()


async def test_a_stream_whose_scheduler_does_not_answer_ends_with_a_code() -> None:
    async def events() -> AsyncIterator[bytes]:
        yield b"first"
        raise RequestTimeout("no reply")

    parts = [part async for part in stream_response(events(), allowed).body_iterator]
    assert parts == [b"first", b'event: lagged\ndata: {"code":"request.timeout"}\n\n']


async def allowed() -> None:
    """Its caller may still follow."""


async def test_a_stream_ends_when_its_caller_may_not_follow_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a log-out it went on for as long as it was open."""
    monkeypatch.setattr(api, "CHECK_AGAIN_S", 0.0)
    logged_out = False

    async def check() -> None:
        if logged_out:
            raise Problem(401, "auth.required", "show a token")

    async def events() -> AsyncIterator[bytes]:
        yield b"first"
        yield b"of another project"

    parts = []
    async for part in stream_response(events(), check).body_iterator:
        parts.append(part)
        logged_out = True
    assert parts == [b"first", b'event: lagged\ndata: {"code":"auth.required"}\n\n']


async def test_builds_whose_end_was_missed_are_not_in_flight_for_ever() -> None:
    clock = SystemClock()
    stream = Live(None, clock=clock, process="p")  # type: ignore[arg-type]
    old = clock.time() - live.MAX_IN_FLIGHT_S - 1
    for number in range(5):
        stream.note(event(number, BuildState.ACCEPTED, old))
    stream.note(event(9, BuildState.ACCEPTED, clock.time()))
    assert stream.in_flight == 1
    stream.note(event(9, BuildState.ACTIVE, clock.time() + 2))
    assert stream.in_flight == 0 and 1.9 < stream.percentiles()["p99"] < 2.1


async def test_a_build_is_accepted_once_whichever_of_its_events_are_published() -> None:
    clock = SystemClock()
    stream = Live(None, clock=clock, process="p")  # type: ignore[arg-type]
    now = clock.time()
    stream.note(event(1, BuildState.SCHEDULED, now))
    stream.note(event(1, BuildState.BUILDING, now + 1))
    assert stream.in_flight == 1
    stream.note(event(1, BuildState.ACTIVE, now + 3))
    stream.note(structs.replace(event(2, BuildState.ACTIVE, now + 3), stage_times=StageTimes(requested=now)))
    stream.note(event(2, BuildState.ACCEPTED, now))  # late, from another scheduler
    assert stream.in_flight == 0 and sum(second.active for second in stream._seconds) == 2
    assert sum(second.accepted for second in stream._seconds) == 2
    assert stream.percentiles() == {"p50": 3.0, "p95": 3.0, "p99": 3.0}


async def test_an_end_that_is_published_twice_is_counted_once() -> None:
    stream = Live(None, clock=SystemClock(), process="p")  # type: ignore[arg-type]
    ended = structs.replace(
        event(1, BuildState.ACTIVE), attempt=3, stage_times=StageTimes(requested=1.0, lost_claims=4)
    )
    for one in (ended, ended, event(3, BuildState.FAILED), event(3, BuildState.FAILED)):
        stream.note(one)  # twice, as its publisher crashed in between
    stream.note(event(2, BuildState.ACTIVE))
    assert sum(second.active for second in stream._seconds) == 2
    assert sum(second.failed for second in stream._seconds) == 1
    assert sum(second.lost_claims for second in stream._seconds) == 4
    assert sum(second.retries for second in stream._seconds) == 2


@pytest.mark.parametrize("caller", [WebCaller("ann", WebRole.OPERATOR), WebCaller("bob", WebRole.PROJECT, "p")])
@pytest.mark.parametrize("other", [{"project_id": "evil", "sequence": 99}, {"sequence": 0}])
async def test_a_refusal_of_another_request_under_its_uuid_ends_no_stream_of_a_build(
    caller: WebCaller, other: dict[str, Any]
) -> None:
    """Any project may name any uuid in a request of its own. The page called a build that was made refused."""
    stream, made = Live(None, clock=SystemClock(), process="p"), event(7, BuildState.ACTIVE)  # type: ignore[arg-type]
    record = BuildRecord(instance_uuid=made.instance_uuid, project_id="p", flavor="f", state=BuildState.BUILDING)

    class OneBuild(WebApi):
        async def builds(self, query: BuildQuery) -> BuildPage:
            return BuildPage(builds=(record,))

    path = {"uuid": record.instance_uuid}
    scope = {"type": "http", "method": "GET", "path": "/", "path_params": path, "query_string": b"", "headers": []}
    request = Request({**scope, "state": {"caller": caller}})
    response = await OneBuild(None, stream, random.Random(1)).follow_build(request)  # type: ignore[arg-type]
    pieces = aiter(response.body_iterator)
    assert b"event: build" in await anext(pieces)
    stream.note(structs.replace(made, state=BuildState.REFUSED, reason="a clash", **other))
    stream.note(made)
    seen = [one async for one in pieces]
    assert b'"active"' in seen[-1]
    assert len(seen) == (1 if "project_id" in other else 2), "what its own project is told is shown"


async def test_the_history_has_each_second_once() -> None:
    stream = Live(None, clock=SystemClock(), process="p")  # type: ignore[arg-type]
    stream.note(event(1, BuildState.FAILED))
    seconds = [second.at for second in stream.history()]
    assert len(seconds) == live.HISTORY_S - 1 and seconds == list(range(seconds[0], seconds[-1] + 1))
    assert sum(second.failed for second in stream._seconds) == 1


# --- the pages' computations on schedulers' answers


MINE, THEIRS = ("10000000-0000-4000-8000-000000000001", "20000000-0000-4000-8000-000000000002")
LOST = TimelineEntry(
    at=1.0,
    actor="scheduler s",
    what="not_claimed",
    detail="rack: h1: no_capacity",
    conflicting_consumers=(
        ConflictingConsumer(consumer=THEIRS, project_id="theirs"),
        ConflictingConsumer(consumer=MINE, project_id="mine"),
    ),
)
BUILD = BuildRecord(
    instance_uuid="30000000-0000-4000-8000-000000000003",
    project_id="mine",
    flavor="m1.tiny",
    state=BuildState.ACTIVE,
    timeline=(LOST, TimelineEntry(at=2.0, actor="scheduler s", what="claimed")),
)


def test_a_lost_claim_is_shown_with_those_that_hold_what_was_lost() -> None:
    (shown,) = lost_claims(BUILD)
    assert (shown.at, shown.host, shown.outcome, shown.conflicting_consumers) == (
        1.0,
        "rack: h1",
        "no_capacity",
        (THEIRS, MINE),
    )


@pytest.mark.parametrize(
    ("role", "shown"),
    [(WebRole.PROJECT, [MINE]), (WebRole.READER, [THEIRS, MINE]), (WebRole.OPERATOR, [THEIRS, MINE])],
)
def test_a_project_learns_only_of_its_own_instances_that_were_faster(role: WebRole, shown: list[str]) -> None:
    seen = as_seen(BUILD, WebCaller(name="c", role=role, project="mine"))
    assert [one.consumer for one in seen.timeline[0].conflicting_consumers] == shown
    assert (seen.timeline[0].detail, seen.timeline[1]) == (LOST.detail, BUILD.timeline[1])


def test_hosts_that_are_not_announced_differ_from_those_that_are_down() -> None:
    """A scheduler that has just started has received no announcement, and no service is silent."""
    hosts = [
        HostRecord(uuid=MINE, name="h1", cell="c1", up=True),
        HostRecord(uuid=THEIRS, name="h2", cell="c1"),
        HostRecord(uuid=THEIRS, name="h3", reported=False),
        HostRecord(uuid=THEIRS, name="h4", cell="c1", reported=False),
    ]
    assert [state_of(host) for host in hosts] == ["up", "down", "not reported", "not reported"]
    assert hosts_by_cell(hosts) == {"c1": (1, 3), "?": (0, 1)}


# --- faults as a person in a browser and as a program see them; and readers of an Ironic that does not answer


BROWSER = "text/html,application/xhtml+xml,*/*;q=0.8"


@pytest.mark.parametrize(
    ("path", "accept", "fault", "status", "media_type"),
    [
        ("/drains/x", BROWSER, RequestTimeout("no reply"), 504, "text/html"),
        ("/metal", BROWSER, PublishRefused("full"), 429, "text/html"),
        ("/metal", BROWSER, ZeroDivisionError(), 500, PROBLEM_JSON),  # its page could have the same defect
        ("/metal", "*/*", RequestTimeout("no reply"), 504, PROBLEM_JSON),
        ("/api/v1/metal", BROWSER, RequestTimeout("no reply"), 504, PROBLEM_JSON),
    ],
)
async def test_a_browser_gets_a_page_and_a_program_problem_json(
    path: str, accept: str, fault: Exception, status: int, media_type: str
) -> None:
    scope = {"type": "http", "method": "GET", "path": path, "headers": [(b"accept", accept.encode())], "state": {}}
    response = await on_problem(Request(scope), fault)
    assert (response.status_code, response.media_type) == (status, media_type)
    assert ("retry-after" in response.headers) is isinstance(fault, PublishRefused)


async def test_those_that_wait_for_an_ironic_out_of_reach_do_not_wait_one_after_the_other() -> None:
    """The second page of metal came after 20 s, the third after 30 s."""
    reads, ends = 0, asyncio.Event()

    async def stored(_: object) -> None:
        nonlocal reads
        reads += 1
        await ends.wait()
        raise RequestTimeout("no reply")

    clock = HandClock()
    reader = NodesReader(Settings(), SimpleNamespace(stored=stored), clock)  # type: ignore[arg-type]
    waiting = [asyncio.create_task(reader.view()) for _ in range(5)]
    await asyncio.sleep(0)
    ends.set()
    faults = await asyncio.gather(*waiting, return_exceptions=True)
    assert [(type(one), getattr(one, "status", 0)) for one in faults] == [(Problem, 504)] * 5
    assert reads == 1
    clock.now += METAL_AGE_S + 1.0
    with pytest.raises(Problem):
        await reader.view()
    assert reads == 2


# --- requests about dead letters while a broker does not answer


class Silent:
    """A connection to a broker that does not answer."""

    opened = 0

    async def open(self) -> None:
        Silent.opened += 1
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Nothing is open."""


async def test_each_request_ends_and_none_waits_for_all_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth had its answer after 40 s."""
    monkeypatch.setattr(dead_letters, "OPEN_TIMEOUT_S", 0.1)
    monkeypatch.setattr(Silent, "opened", 0)
    env = Environment("web", transports=lambda _bus: Silent())  # type: ignore[arg-type, return-value]
    box = DeadLetterActions(env, Settings())
    ended = await asyncio.gather(*(box.counts() for _ in range(20)), return_exceptions=True)
    assert [one.status for one in ended if isinstance(one, Problem)] == [503] * 20
    assert Silent.opened < 5, "the others did not wait their turn"
    with pytest.raises(Problem, match="out of reach"):
        await box.counts()


# --- the dead letters of a cell that an operator has added


async def test_the_dead_letters_of_an_added_cell_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Depths and letters were those of the settings' cells alone."""
    clock = HandClock()
    brokers = {name: MemoryBroker(clock) for name in (API, "cell1", "new")}
    env = Environment(
        "web",
        transports=lambda name: MemoryTransport(brokers[name], name),
        cell_transports=lambda name, _where: MemoryTransport(brokers[name], name),
        cells=("cell1",),
        clock=clock,
    )
    decisions = {
        "new": CellDecision(state=CellState.ENABLED, bus=CellBus(url_variable="URL")),
        "old": CellDecision(state=CellState.REMOVED, bus=CellBus(url_variable="URL")),
    }

    async def decided(_env: Environment) -> dict[str, CellDecision]:
        return decisions

    monkeypatch.setattr(site, "_decisions", decided)
    bus = env.cell_bus("new", CellBus(url_variable="URL"))
    await bus.open()
    await bus.declare_shared()
    await bus.transport.publish(Outgoing(exchange="", routing_key=DEAD_LETTERS, body=b"{}"))
    box, queues = DeadLetterActions(env, Settings()), QueueReader(env)
    assert [(one.bus, one.dead) for one in await box.counts()] == [("new", 1)]
    assert ((await queues.depths()).dead_letters, (await queues.depths()).silent) == (1, ())
    with pytest.raises(Problem, match="there are api, cell1, new"):
        await box.of_queue("old", "x", 1)
    await queues.close()
    await bus.close()


# --- the answers that the description of the HTTP API promises


@pytest.mark.parametrize("operation", ["stop_drain", "pause_drain", "resume_drain", "start_drain", "decide_about_host"])
def test_a_decision_that_the_state_does_not_allow_is_a_documented_conflict(operation: str) -> None:
    """Schemathesis received a 409 of a DELETE that documented none."""
    assert 409 in _of_hosts()[operation].errors


async def test_rates_are_those_of_a_second_over_the_last_ten() -> None:
    seconds = [Second(at, active=1000) for at in range(50)]
    seconds += [Second(50 + at, active=10, failed=20, lost_claims=30, retries=40 * (at % 2)) for at in range(10)]
    of_live = SimpleNamespace(history=lambda: seconds, in_flight=7, percentiles=dict)
    nothing = SimpleNamespace(queues=(), dead_letters=0, silent=())

    async def answer(what: Any) -> Any:
        return what

    pages = Pages(
        never := cast("Any", None),
        never,
        cast("Any", of_live),
        cast("Any", SimpleNamespace(hosts_to_count=lambda: answer(()), known_workers=lambda: answer(()))),
        status=cast("Any", SimpleNamespace(read=lambda: answer(status_of((), 0.0)))),
        queues=cast("Any", SimpleNamespace(depths=lambda _: answer(nothing))),
        history=never,
        clock=SystemClock(),
        last=LastAnswers(SystemClock()),
        has_session=False,
    )
    now = await pages._state()
    assert (now.active_per_s, now.failed_per_s, now.lost_per_s, now.retries_per_s) == (10.0, 20.0, 30.0, 20.0)
    assert (now.in_flight, now.answered) == (7, True)


async def test_the_first_page_reads_the_status_anew_when_schedulers_fell_silent_after_it() -> None:
    """It said that nothing is wrong for as long as the status was remembered."""
    away = rows.row(StatusKind.SCHEDULER_AWAY, "No scheduler answers", severity=Severity.CRITICAL)
    of_live = SimpleNamespace(history=lambda: [Second(1)], in_flight=0, percentiles=dict)
    nothing = SimpleNamespace(queues=(), dead_letters=0, silent=())

    async def answer(what: Any) -> Any:
        return what

    async def read(anew: Server | None = None) -> Any:
        return status_of([away] if anew is Server.SCHEDULER else [], 0.0)

    async def silent() -> Any:
        raise RequestTimeout("no answer")

    never = cast("Any", None)
    pages = Pages(
        never,
        never,
        cast("Any", of_live),
        cast("Any", SimpleNamespace(hosts_to_count=silent, known_workers=silent)),
        status=cast("Any", SimpleNamespace(read=read)),
        queues=cast("Any", SimpleNamespace(depths=lambda _: answer(nothing))),
        history=never,
        clock=SystemClock(),
        last=LastAnswers(SystemClock()),
        has_session=False,
    )
    now = await pages._state()
    assert [one.kind for one in now.status.rows] == [StatusKind.SCHEDULER_AWAY]
    assert not now.answered
