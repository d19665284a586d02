"""The load generator's arithmetic, and that it never forgives itself for being late."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random

import pytest
from msgspec.structs import replace

from berth.client import Track
from berth.load import LoadPlan, LoadRun, draw_requests, percentiles, run_load, sampler, sum_up
from berth.load.plan import draw
from berth.load.record import decode, encode
from berth.load.session import recorded
from bus.contracts.build import BuildEvent, BuildState, FunnelStep
from bus.contracts.stages import STAGES, Stamps
from tests.unit.front.world import ClientWorld


def test_percentiles_are_nearest_ranks() -> None:
    assert percentiles([]) == {}
    assert percentiles([7.0]) == {"p50": 7.0, "p90": 7.0, "p95": 7.0, "p99": 7.0, "max": 7.0, "mean": 7.0}
    found = percentiles([float(number) for number in range(100, 0, -1)])
    assert found == {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "max": 100.0, "mean": 50.5}
    assert percentiles([1.0, 2.0, 3.0, 4.0])["p50"] == 2.0


def test_a_seed_draws_the_same_requests_and_weights_are_kept() -> None:
    plan = LoadPlan(boots=2000, mix={"a": 3.0, "b": 1.0, "never": 0.0})
    drawn = draw_requests(plan, random.Random(1))
    assert drawn == draw_requests(plan, random.Random(1)) != draw_requests(plan, random.Random(2))
    share = sum(request.flavor == "a" for request in drawn) / 2000
    assert 0.7 < share < 0.8 and all(request.flavor != "never" for request in drawn)
    assert len({request.instance_uuid for request in drawn}) == 2000


def test_the_same_seed_requests_the_same_flavors_but_never_for_the_same_machines() -> None:
    """`berth load --seed 2` twice: the second requested machines that were there, and took their ages for latencies."""
    plan = LoadPlan(boots=200, mix={"a": 3.0, "b": 1.0}, churn=0.5)
    one, two = (list(draw(plan, random.Random(2), random.Random(chance))) for chance in (5, 6))
    assert [arrival for arrival, _ in one] == [arrival for arrival, _ in two]
    assert {request.instance_uuid for _, request in one}.isdisjoint(request.instance_uuid for _, request in two)


def ended(uuid: str, state: BuildState, intended: float, at: float, *, attempt: int = 1, code: str = "") -> Track:
    last = BuildEvent(
        instance_uuid=uuid, project_id="p", state=state, sequence=9, terminal=True, attempt=attempt, code=code,
        funnel=(FunnelStep(step="providers", remaining=0),) if code else (),
    )  # fmt: skip
    track = Track(instance_uuid=uuid, flavor="f", intended_at=intended, last=last, stages={state.value: at})
    track.state, track.ended_at, track.terminals = state.value, at, 1
    return track


def test_a_report_counts_every_build_once() -> None:
    tracks = [
        ended("1", BuildState.ACTIVE, 10.0, 10.5),
        ended("2", BuildState.ACTIVE, 10.0, 11.5, attempt=3),
        ended("3", BuildState.FAILED, 10.0, 12.0, attempt=2, code="max_retries_exceeded"),
        ended("4", BuildState.REFUSED, 10.0, 10.1, code="flavor.unknown"),
        Track(instance_uuid="5", flavor="f", intended_at=10.0, stages={}),
    ]
    tracks[1].terminals = 2
    found = sum_up(tracks, started=10.0, now=20.0)
    assert (found.requests, found.active, found.failed, found.refused, found.unfinished) == (5, 2, 1, 1, 1)
    assert (found.seconds, found.boots_per_s) == (2.0, 1.0)
    assert (found.latency_ms["p50"], found.latency_ms["max"]) == (500.0, 1500.0)
    assert (found.alternates_used, found.attempts) == (3, {"1": 1, "3": 1})
    assert found.failures_by_code == {"max_retries_exceeded": 1, "flavor.unknown": 1}
    assert found.more_than_one_terminal == 1


def test_a_report_of_nothing_that_ended() -> None:
    found = sum_up([Track(instance_uuid="5", flavor="f", intended_at=0.0, stages={})], started=0.0, now=8.0)
    assert (found.seconds, found.boots_per_s, found.unfinished, found.latency_ms) == (8.0, 0.0, 1, {})


async def test_a_constant_rate_counts_from_the_intended_times(client_world: ClientWorld) -> None:
    """Publishing stalls for a second; what fell due meanwhile waited that long, and the report shows it."""
    world = client_world
    world.stall_s = {5: 1.0}  # the fifth publish takes a second of the world's time
    plan = LoadPlan(boots=40, mix={"f": 1.0}, rate_per_s=10.0, timeout_s=60.0)
    found = await run_load(world.client, plan, clock=world.clock, rng=random.Random(3))
    intended = sorted(track.intended_at for track in world.client.tracks.values())
    steps = {round(later - earlier, 6) for earlier, later in itertools.pairwise(intended)}
    assert steps == {0.1}, "late publishing shifts no intention"
    assert (found.active, found.unfinished) == (40, 0)
    assert found.latency_ms["max"] == pytest.approx(1000, abs=100)
    late = [track for track in world.client.tracks.values() if (track.latency_s or 0) > 0.05]
    assert 8 <= len(late) <= 12, "about a second's worth of requests fell due during the stall"


async def test_a_closed_loop_keeps_so_many_in_flight(client_world: ClientWorld) -> None:
    world = client_world
    world.answer_at_once = False
    plan = LoadPlan(boots=20, mix={"f": 1.0}, concurrency=4, timeout_s=60.0)
    loading = asyncio.create_task(run_load(world.client, plan, clock=world.clock, rng=random.Random(3)))
    most = 0
    while not loading.done():
        await world.requested_more()
        most = max(most, world.client.unfinished)
        await world.finish(1)
    assert (most, (await loading).active) == (4, 20)


async def test_what_clients_spent_in_each_stage_adds_up_to_their_latency(client_world: ClientWorld) -> None:
    """From the intended time until the client received it, though the scheduler's clock is an hour fast."""
    world = client_world
    notify = world.scheduler.publish

    async def stamped(event: BuildEvent) -> None:
        ahead = world.clock.now + 3600
        await notify(replace(event, stamps=Stamps(ahead, ahead, ahead, ahead, ahead, ahead)))

    world.scheduler.publish = stamped  # type: ignore[method-assign, assignment]
    world.stall_s = {2: 0.5}
    plan = LoadPlan(boots=20, mix={"f": 1.0}, rate_per_s=10.0, timeout_s=60.0)
    run = LoadRun(world.client, plan, clock=world.clock, rng=random.Random(3))
    await run.go()
    boots = run.boots.operations()
    assert set(boots.stages) == set(STAGES)
    for row in range(20):
        spent = [column[row] for column in boots.stages.values()]
        assert all(seconds is not None and seconds >= 0 for seconds in spent)
        assert sum(filter(None, spent)) == pytest.approx(boots.latency_s(row), abs=1e-5)
    assert max(latency for row in range(20) if (latency := boots.latency_s(row))) > 0.3
    report = await run_load(world.client, plan, clock=world.clock, rng=random.Random(4))
    assert list(report.spent_ms) == list(STAGES)


def outcomes(run: LoadRun) -> dict[str, int]:
    return {name: count for name, count in run.boots.counts.items() if count}


async def test_in_an_open_loop_a_full_queue_refuses_and_is_counted(client_world: ClientWorld) -> None:
    """Reported and counted, offered once, followed no more; what was accepted ends as ever."""
    world = client_world
    world.full = {3, 4}
    plan = LoadPlan(boots=30, mix={"f": 1.0}, rate_per_s=10.0, timeout_s=60.0)
    run = LoadRun(world.client, plan, clock=world.clock, rng=random.Random(3))
    await run.go()
    assert outcomes(run) == {"active": 28, "backpressure": 2} and run.refusals == 2
    assert world.client.unfinished == 0
    record = run.boots.operations()
    assert [record.outcome_of(row) for row in (1, 2, 3, 4)] == ["active", "backpressure", "backpressure", "active"]
    assert record.sent_s[2] is None and record.again[2] == 0 and record.latency_s(2) is None


async def test_with_patience_what_was_refused_is_offered_again(client_world: ClientWorld) -> None:
    client_world.full = {1, 2, 3}
    plan = LoadPlan(boots=900, mix={"f": 1.0}, timeout_s=60.0)
    run = LoadRun(client_world.client, plan, clock=client_world.clock, rng=random.Random(3))
    await run.go()
    assert outcomes(run) == {"active": 900}
    assert run.refusals > 900 and max(run.boots.again) >= 1, "and how often it knocked is on record"


async def test_what_has_ended_though_its_confirm_was_lost_is_not_offered_again(client_world: ClientWorld) -> None:
    """The scheduler publishes nothing twice: the client would have queried its end, and timed it by the answer."""
    client_world.unconfirmed = {1}
    plan = LoadPlan(boots=3, mix={"f": 1.0}, timeout_s=60.0)
    run = LoadRun(client_world.client, plan, clock=client_world.clock, rng=random.Random(3))
    await run.go()
    assert outcomes(run) == {"active": 3} and client_world.client.unfinished == 0
    assert len(run.drain_latencies()) == 3
    assert list(run.boots.ended) == [run.started] * 3


async def test_churn_deletes_what_became_active_and_times_it(client_world: ClientWorld) -> None:
    plan = LoadPlan(boots=60, mix={"f": 1.0}, rate_per_s=20.0, churn=0.5, timeout_s=60.0)
    run = LoadRun(client_world.client, plan, clock=client_world.clock, rng=random.Random(3), keep_tracks=False)
    await run.go()
    deletes = run.deletes.operations()
    assert 15 < len(deletes) < 45 and {deletes.outcome_of(row) for row in range(len(deletes))} == {"deleted"}
    assert set(deletes.instance_uuid) <= set(run.boots.uuids) and outcomes(run) == {"active": 60}
    assert all(deletes.latency_s(row) is not None for row in range(len(deletes)))


async def test_what_never_ends_is_lost_and_reported(client_world: ClientWorld) -> None:
    client_world.answer_at_once = False
    plan = LoadPlan(boots=5, mix={"f": 1.0}, timeout_s=5.0)
    run = LoadRun(client_world.client, plan, clock=client_world.clock, rng=random.Random(3))
    going = asyncio.create_task(run.go())
    await client_world.requested_more()
    await client_world.finish(2)
    await going
    assert outcomes(run) == {"active": 2, "lost": 3}


async def test_what_a_scheduler_still_has_under_way_at_the_bound_is_late_and_not_lost(
    client_world: ClientWorld,
) -> None:
    client_world.answer_at_once = False
    plan = LoadPlan(boots=5, mix={"f": 1.0}, timeout_s=5.0)
    run = LoadRun(client_world.client, plan, clock=client_world.clock, rng=random.Random(3))
    going = asyncio.create_task(run.go())
    await client_world.requested_more()
    await client_world.finish(2)
    await client_world.notify(client_world.waiting[0], BuildState.BUILDING, 3, terminal=False)
    await going
    assert outcomes(run) == {"active": 2, "late": 1, "lost": 2}


async def test_interrupted_nothing_more_is_offered_and_nothing_counts_as_lost(client_world: ClientWorld) -> None:
    client_world.answer_at_once = False
    plan = LoadPlan(boots=500, mix={"f": 1.0}, concurrency=10, timeout_s=60.0)
    run = LoadRun(client_world.client, plan, clock=client_world.clock, rng=random.Random(3))
    going = asyncio.create_task(run.go())
    await client_world.requested_more()
    await client_world.finish(4)
    run.interrupt()
    await going
    assert "lost" not in outcomes(run) and run.boots.counts["open"] >= 6 and len(run.boots) < 30


async def test_each_sample_holds_what_came_since_the_one_before(client_world: ClientWorld) -> None:
    plan = LoadPlan(boots=40, mix={"f": 1.0}, rate_per_s=20.0, timeout_s=60.0)
    record = await recorded(client_world.client, plan, clock=client_world.clock, rng=random.Random(3))
    samples = record.samples
    assert decode(encode(record)) == record
    assert samples.at_s == sorted(samples.at_s) and len(samples) >= 4
    offered = sum(
        rate * (at - before)
        for rate, at, before in zip(samples.offered_per_s, samples.at_s, [0.0, *samples.at_s], strict=False)
    )
    assert offered == pytest.approx(40, abs=0.5) and record.totals.outcomes == {"active": 40}


async def test_a_long_run_is_sampled_less_often_and_shows_the_same(client_world: ClientWorld, few_samples: int) -> None:
    plan = LoadPlan(boots=200, mix={"f": 1.0}, rate_per_s=20.0, timeout_s=60.0)
    record = await recorded(client_world.client, plan, clock=client_world.clock, rng=random.Random(3))
    assert len(record.samples) <= few_samples + 1
    assert max(record.samples.offered_per_s) == pytest.approx(20.0, rel=0.2)


@pytest.fixture
def few_samples(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sampler, "MAX_SAMPLES", 6)
    return 6


class Deaf:
    """A connection in whose calls a cancellation can get lost, as in Python 3.11's `asyncio.wait_for`."""

    first = True

    async def depth(self, queue: str) -> int:
        if self.first:
            self.first = False
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        return 7


async def test_a_cancellation_that_gets_lost_does_not_keep_a_run_sampling_for_ever(client_world: ClientWorld) -> None:
    plan = LoadPlan(boots=30, mix={"f": 1.0}, rate_per_s=20.0, timeout_s=60.0)
    running = asyncio.create_task(
        recorded(
            client_world.client, plan, clock=client_world.clock, rng=random.Random(3),
            transports={"api": Deaf()},  # type: ignore[dict-item]
        )
    )  # fmt: skip
    done, _ = await asyncio.wait({running}, timeout=60)
    running.cancel()
    assert done and running.result().totals.outcomes == {"active": 30}
