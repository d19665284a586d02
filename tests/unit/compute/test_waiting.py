"""A compute service's messages about its builds that wait."""

from __future__ import annotations

from collections.abc import Sequence

from bus.clock import SystemClock
from bus.contracts.base import Message
from bus.contracts.cell import MAX_WAITING, BuildsWaiting, WaitingBuild
from bus.port import BusError
from compute_sim.waiting import WaitingReporter

WAITS = WaitingBuild(
    instance_uuid="10000000-0000-4000-8000-000000000001", attempt=1, since=990.0, reason="waits for Ironic"
)


class World:
    """A driver and a bus."""

    def __init__(self) -> None:
        self.now: list[WaitingBuild] = []
        self.published: list[Message] = []
        self.is_down = False

    def waiting(self) -> Sequence[WaitingBuild]:
        return self.now

    async def publish(self, message: Message, *, cause: str = "") -> None:
        if self.is_down:
            raise BusError("down")
        self.published.append(message)

    async def publish_all(self, messages: Sequence[tuple[Message, str]]) -> None:
        raise AssertionError


async def test_waiting_builds_are_published_while_they_wait_and_once_more_when_none_does() -> None:
    world = World()
    reporter = WaitingReporter(world, world, service="metal1", cell="cell1", clock=SystemClock(), interval_s=2.0)
    await reporter.look()
    assert world.published == []
    world.now = [WAITS]
    await reporter.look()
    await reporter.look()
    world.now, world.is_down = [], True
    await reporter.look()
    world.is_down = False
    await reporter.look()
    await reporter.look()
    some = BuildsWaiting(service="metal1", cell="cell1", waiting=(WAITS,), lasts_s=6.0)
    assert world.published == [some, some, BuildsWaiting(service="metal1", cell="cell1", lasts_s=6.0)]


async def test_more_than_a_message_may_hold_are_left_out() -> None:
    world = World()
    world.now = [WAITS] * (MAX_WAITING + 1)
    await WaitingReporter(world, world, service="m", cell="c", clock=SystemClock(), interval_s=2.0).look()
    (message,) = world.published
    assert isinstance(message, BuildsWaiting) and len(message.waiting) == MAX_WAITING
