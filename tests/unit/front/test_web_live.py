"""The part of the event stream that the pages keep is bounded, and a reader that falls behind is notified."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest
from msgspec import structs

from berth.web import api, live
from berth.web.api import stream_response
from berth.web.live import EventFollower, Live
from berth.web.problems import Problem
from bus.bus import API, Bus
from bus.clock import SystemClock
from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.stages import Stamps
from bus.faults import RequestTimeout
from bus.memory import MemoryBroker, MemoryTransport


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


async def test_one_projects_followers_leave_room_for_others() -> None:
    clock = SystemClock()
    bus = Bus(API, MemoryTransport(MemoryBroker(clock), API), process="p", clock=clock, rng=random.Random(1))
    stream = Live(bus, clock=clock, process="p")
    with contextlib.ExitStack() as held:

        def follow(project: str | None) -> None:
            held.enter_context(stream.follow(lambda _: True, project=project))

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
    stream.note(structs.replace(event(2, BuildState.ACTIVE, now + 3), stamps=Stamps(requested=now)))
    stream.note(event(2, BuildState.ACCEPTED, now))  # late, from another scheduler
    assert stream.in_flight == 0 and stream.ended["active"] == 2
    assert sum(second.accepted for second in stream._seconds) == 2
    assert stream.percentiles() == {"p50": 3.0, "p95": 3.0, "p99": 3.0}


async def test_lost_claims_and_retries_are_counted_once_a_build() -> None:
    stream = Live(None, clock=SystemClock(), process="p")  # type: ignore[arg-type]
    ended = structs.replace(event(1, BuildState.ACTIVE), attempt=3, stamps=Stamps(requested=1.0, lost_claims=4))
    for _ in range(2):  # published twice, as its publisher crashed in between
        stream.note(ended)
    stream.note(event(2, BuildState.ACTIVE))
    assert sum(second.lost_claims for second in stream._seconds) == 4
    assert sum(second.retries for second in stream._seconds) == 2


async def test_the_history_has_each_second_once() -> None:
    stream = Live(None, clock=SystemClock(), process="p")  # type: ignore[arg-type]
    stream.note(event(1, BuildState.FAILED))
    seconds = [second.at for second in stream.history()]
    assert len(seconds) == live.HISTORY_S - 1 and seconds == list(range(seconds[0], seconds[-1] + 1))
    assert [one.instance_uuid for one in stream.failures] == [event(1, BuildState.FAILED).instance_uuid]
