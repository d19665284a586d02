"""A replica that is read over a REST API, beside a Placement in memory that changes meanwhile."""

from __future__ import annotations

import asyncio
import random

import pytest

from bus.clock import SystemClock
from placement_worker.operations.export import InvalidExport
from placement_worker.operations.mirror import PlacementMirror
from placement_worker.operations.mirror_rest import RestSource
from placement_worker.replica.replica import Replica
from tests.unit.placement_worker.mirror_world import Source, shown, true


class Stopped(SystemClock):
    """A clock that does not go on."""

    def monotonic(self) -> float:
        return 0.0


def rest(source: Source, whole_s: float = 1.0) -> RestSource:
    return RestSource(source, interval_s=1.0, whole_s=whole_s)


def mirror_of(source: Source) -> PlacementMirror:
    return PlacementMirror(rest(source), Replica(), clock=SystemClock(), interval_s=1.0)


@pytest.mark.parametrize("seed", range(6))
async def test_after_each_pass_it_is_equal(seed: int) -> None:
    source = Source(random.Random(seed))
    mirror = mirror_of(source)
    for _ in range(60):
        any(source.step() for _ in range(source.rng.randrange(1, 12)))
        await mirror.read()
        assert shown(mirror.replica) == true(source)


async def test_a_deleted_consumer_is_seen_when_its_provider_has_its_turn() -> None:
    source = Source(random.Random(1))
    hosts = [source.make() for _ in range(10)]
    for number, host in enumerate(hosts):
        source.claim(str(number), host)
    mirror = PlacementMirror(rest(source, 5.0), Replica(), clock=Stopped(), interval_s=1.0)
    await mirror.read()
    source.held.clear()
    source.asked.clear()
    for _ in range(5):
        await mirror.read()
    assert sorted(source.asked) == sorted(hosts), "each once"
    assert shown(mirror.replica) == true(source)


async def test_a_mirror_is_as_new_as_it_gets_while_it_may_be_decided_by() -> None:
    """Its next pass begins when it is due, not when it is asked for."""
    mirror = PlacementMirror(rest(Source(random.Random(1)), 5.0), Replica(), clock=Stopped(), interval_s=1.0)
    assert not await mirror.refresh(timeout_s=0.0)
    await mirror.read()
    mirror.ready.set()
    assert await mirror.refresh(timeout_s=0.0)


async def test_what_a_claim_lets_go_is_seen_with_it() -> None:
    source = Source(random.Random(1))
    hosts = [source.make() for _ in range(10)]
    mirror = PlacementMirror(rest(source, 1e6), Replica(), clock=Stopped(), interval_s=1.0)
    source.claim("a", hosts[7])
    await mirror.read()
    source.claim("a", hosts[2])
    await mirror.read()
    assert mirror.hosts_of("a") == (hosts[2],)
    assert shown(mirror.replica) == true(source)


async def test_a_pass_that_was_read_while_a_tree_changed_changes_nothing() -> None:
    source = Source(random.Random(1))
    host = source.make()
    mirror = mirror_of(source)
    await mirror.read()
    before = shown(mirror.replica)
    child = source.make(host)
    source.during = lambda: source.there.pop(host, None)
    source.bump([host])
    with pytest.raises(InvalidExport):
        await mirror.read()
    assert shown(mirror.replica) == before
    source.during = None
    del source.there[child]
    await mirror.read()
    assert shown(mirror.replica) == {}


async def test_a_pass_of_which_a_part_cannot_be_read_changes_nothing() -> None:
    source = Source(random.Random(1))
    hosts = [source.make() for _ in range(3)]
    mirror = mirror_of(source)
    await mirror.read()
    before = shown(mirror.replica)
    source.claim("a", *hosts)
    source.refuses = hosts[1]
    with pytest.raises(InvalidExport):
        await mirror.read()
    assert shown(mirror.replica) == before
    source.refuses = ""
    await mirror.read()
    assert shown(mirror.replica) == true(source)


async def test_what_is_left_out_counts_again() -> None:
    source = Source(random.Random(1))
    host, other = source.make(), source.make()
    source.claim("a", host)
    source.claim("b", host)
    mirror = mirror_of(source)
    await mirror.read()
    mirror.leave_out(["a", "c"])
    assert shown(mirror.replica) == true(source, but="a")
    mirror.leave_out(["a"])
    source.claim("c", host, other)
    await mirror.read()
    assert shown(mirror.replica) == true(source, but="ac")
    assert mirror.hosts_of("c") == tuple(sorted((host, other)))
    mirror.count_again(["a", "c"])
    assert shown(mirror.replica) == true(source, but="a")
    mirror.count_again(["a"])
    assert shown(mirror.replica) == true(source)


async def test_what_has_not_moved_is_not_read_again() -> None:
    source = Source(random.Random(1))
    host, other = source.make(), source.make()
    mirror = mirror_of(source)
    await mirror.read()
    source.claim("a", host)
    await mirror.read()
    await mirror.read()
    assert source.parts == [host, other, host]


async def test_a_pass_under_way_is_not_the_one_that_is_waited_for() -> None:
    source = Source(random.Random(1))
    source.make()
    mirror = mirror_of(source)
    waiting: list[asyncio.Task[None]] = []
    source.during = lambda: waiting.append(asyncio.create_task(mirror.next_pass()))
    await mirror.read()
    await asyncio.sleep(0)
    assert [one.done() for one in waiting] == [False]
    await mirror.read()
    await waiting[0]


async def test_a_pass_is_waited_for_that_begins_later() -> None:
    source = Source(random.Random(1))
    mirror = mirror_of(source)
    assert mirror.unavailable_reason
    waiting = asyncio.create_task(mirror.next_pass())
    running = asyncio.create_task(mirror.run())
    await waiting
    assert mirror.ready.is_set() and not mirror.unavailable_reason
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
