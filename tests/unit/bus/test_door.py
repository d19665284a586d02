"""Requests by the door: several projects of one program take turns, and what is refused takes its turn anew."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bus import fair_queue
from bus.bus import API, Bus
from bus.consuming.outcome import Done, Outcome, Received, Retry
from bus.contracts.base import Refusal
from bus.contracts.build import BuildAccepted, BuildRequest
from bus.door import request_in_turn
from bus.fair_queue import Turns
from bus.faults import RequestRefused, RequestTimeout
from tests.kit.door import Door, accepted
from tests.kit.waiting import until


def build(project: str, **more: Any) -> BuildRequest:
    return BuildRequest(instance_uuid=str(uuid.uuid4()), project_id=project, flavor="f", **more)


class Program:
    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.turns = Turns()

    async def send(self, message: BuildRequest, timeout_s: float = 60.0) -> BuildAccepted:
        cause = message.instance_uuid
        return await request_in_turn(self.bus, self.turns, message, BuildAccepted, timeout_s=timeout_s, cause=cause)


@asynccontextmanager
async def program(door: Door) -> AsyncIterator[Program]:
    bus = door.bus(API, "web-1")
    await bus.open()
    try:
        yield Program(bus)
    finally:
        await bus.close()


async def test_sixty_four_that_post_gangs_keep_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "MAX_TURN_S", 600.0)
    door = Door()

    def answer(one: Received) -> Outcome:
        assert isinstance(one.message, BuildRequest)
        return accepted(one) if one.message.project_id == "quiet" else Retry("x", "later")

    door.answer = answer
    async with door.scheduler("scheduler.door"), program(door) as web:
        posts = [asyncio.create_task(web.send(build("noisy", count=100))) for _ in range(64)]
        await until(lambda: door.got)
        wanted = build("quiet")
        assert (await web.send(wanted)).instance_uuid == wanted.instance_uuid
        gangs = {one.message.instance_uuid for one in door.got if one.message.project_id == "noisy"}  # type: ignore[attr-defined]
        assert len(gangs) <= 2
        for post in posts:
            post.cancel()
        await asyncio.gather(*posts, return_exceptions=True)


async def test_what_the_door_refuses_takes_its_turn_anew() -> None:
    door = Door()
    async with program(door) as web:
        await door.api.open()
        queue = door.brokers[API].queue(await door.api.declare("scheduler.door"))
        queue.shut = 1
        post = asyncio.create_task(web.send(build("demo")))
        await until(lambda: len(web.turns._queue._lines) == 1 and not web.turns._queue._started)  # it was refused
        assert not post.done()
        queue.shut = 0
        async with door.scheduler("scheduler.door"):
            assert await post


async def test_an_operators_right_goes_by_its_own_queue() -> None:
    door = Door()
    async with door.scheduler("scheduler.operators"), program(door) as web:
        assert await web.send(build("demo", host="h1"))
        assert [one.queue for one in door.got] == ["scheduler.operators"]


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (Done(reply=Refusal(code="flavor.unknown", reason="x")), RequestRefused),
        (Done(), RequestTimeout),
    ],
)
async def test_faults_are_those_of_a_request(answer: Outcome, fault: type[Exception]) -> None:
    door = Door()
    door.answer = lambda _: answer
    async with door.scheduler("scheduler.door"), program(door) as web:
        with pytest.raises(fault):
            await web.send(build("demo"), timeout_s=0.2)
