"""A request that comes so late that the record of it could be gone: nothing is built twice."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from bus.bus import API, Bus
from bus.clock import SystemClock
from bus.consuming import dead_letters
from bus.contracts.base import Meta
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.catalogue import DEAD
from bus.memory import MemoryTransport
from bus.wire import pack, single
from scheduler_worker import engine
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.retention import max_request_age_s, purge
from scheduler_worker.store.postgres import PostgresBuilds
from tests.integration.scheduler.test_twins import Gate
from tests.integration.scheduler.world import World

pytestmark = pytest.mark.postgres

DAY_S = 86_400.0
REQUESTS = "scheduler.requests"
CONFIG = SchedulerConfig(hosts_warmup_s=0.001, ended_retention_s=DAY_S)


class Yesterdays(SystemClock):
    """A clock that is two days slow: what it stamps was sent two days ago."""

    def time(self) -> float:
        return super().time() - 2 * DAY_S


@pytest.fixture
async def late(world: World) -> AsyncIterator[Bus]:
    """A client whose messages were two days under way."""
    bus = Bus(API, MemoryTransport(world.brokers[API], API), process="late", clock=Yesterdays(), rng=world.rng)
    await bus.open()
    yield bus
    await bus.close()


def test_a_request_is_refused_before_the_record_of_it_can_be_gone() -> None:
    for keep_s in (60.0, DAY_S, 7 * DAY_S):
        assert 0 < max_request_age_s(SchedulerConfig(ended_retention_s=keep_s)) < keep_s


async def publish(late: Bus, request: BuildRequest) -> None:
    await late.publish(request)


async def replay(late: Bus, request: BuildRequest) -> None:
    """It was given up two days ago, and an operator sends it back."""
    packed = pack(request, Meta(id="m1", sent_at=late.clock.time()))
    await late.transport.publish(single(packed, DEAD, REQUESTS, mandatory=True))
    assert await dead_letters.replay(late.transport, REQUESTS) == ["m1"]


@pytest.mark.parametrize("bring", [publish, replay])
async def test_a_late_copy_of_a_forgotten_build_builds_nothing(
    world: World, late: Bus, bring: Callable[[Bus, BuildRequest], Awaitable[None]]
) -> None:
    await world.scheduler("s1", CONFIG)
    await world.add_hosts("c1", 1)
    request = world.request()
    await world.ask(request)
    await world.until(lambda: len(world.builds) == 1)
    await world.announced("c1", request, BuildState.ACTIVE, 10, terminal=True)
    await world.ended(request.instance_uuid, BuildState.ACTIVE)
    await world.delete(request)
    await world.until(lambda: world.deletes)
    await world.announced("c1", request, BuildState.DELETED, 11, terminal=True)
    await world.ended(request.instance_uuid, BuildState.DELETED)

    service, _, _ = world.services["s1"]
    store = PostgresBuilds(world.environment("gardener").database("scheduler"))
    await store.open()
    assert await purge(store, world.clock.time() + 1, 10) == 1
    await store.close()
    assert await world.show(request.instance_uuid) is None

    await bring(late, request)
    refused = await world.ended(request.instance_uuid, BuildState.REFUSED)
    assert (refused.code, len(world.builds), service.not_ready()) == ("request.too_old", 1, [])


async def test_a_late_copy_of_what_lives_is_a_repeat(world: World, late: Bus) -> None:
    await world.scheduler("s1", CONFIG)
    await world.add_hosts("c1", 1)
    request, marker = world.request(), world.request(flavor="no such flavor")
    await world.ask(request)
    await world.until(lambda: len(world.builds) == 1)
    await late.publish(request)
    await world.ask(marker)  # behind it on the same queue
    await world.ended(marker.instance_uuid, BuildState.REFUSED)
    assert "refused" not in world.states(request.instance_uuid) and len(world.builds) == 1


async def test_an_old_request_that_is_on_record_undecided_is_carried_out(
    world: World, late: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its scheduler died before it decided, and no scheduler ran for days: it was accepted, so it is built."""
    writing = Gate(monkeypatch, engine.SchedulingEngine, "_write")
    await world.scheduler("s1", SchedulerConfig(hosts_warmup_s=0.001, ended_retention_s=30 * DAY_S))
    await world.add_hosts("c1", 1)
    request = world.request()
    await late.publish(request)
    await writing.wait()
    await world.kill("s1")
    await world.scheduler("s2", CONFIG)
    await world.until(lambda: len(world.builds) == 1)
    assert (await world.ended(request.instance_uuid, BuildState.SCHEDULED)).code == ""
