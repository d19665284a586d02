"""The load generator: its plans and traces, its arithmetic, and that it never forgives itself for being late."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from berth.bus_client import RequestWatch
from berth.config.settings import read_settings
from bus.contracts.build import BuildEvent, BuildState, FunnelStep
from bus.contracts.stages import STAGES, StageTimes
from bus.memory import MemoryBroker, MemoryTransport
from compute_sim.host_plan import plan_hosts, tree
from lab.load import LoadPlan, LoadRun, PlanError, percentiles, run_load, sampler, sum_up
from lab.load import run as run_module
from lab.load.command import app
from lab.load.fleet import GPU_CLASS, HostKind, read_hosts, settings_like
from lab.load.plan import Arrival, arrivals, draw, parse_mix, parse_ramp, phase_boots, ramp_boots
from lab.load.trace import Shape, read_requests, read_trace
from scheduler_worker.config import DEFAULT_FLAVORS
from scheduler_worker.selection.flavor import parse
from tests.unit.berth.world import ClientWorld

# --- the load generator's arithmetic, and that it never forgives itself for being late


def test_percentiles_are_nearest_ranks() -> None:
    assert percentiles([]) == {}
    assert percentiles([7.0]) == {"p50": 7.0, "p90": 7.0, "p95": 7.0, "p99": 7.0, "max": 7.0, "mean": 7.0}
    found = percentiles([float(number) for number in range(100, 0, -1)])
    assert found == {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "max": 100.0, "mean": 50.5}
    assert percentiles([1.0, 2.0, 3.0, 4.0])["p50"] == 2.0


def test_the_same_seed_requests_the_same_flavors_but_never_for_the_same_machines() -> None:
    """`scripts/load --seed 2` twice: the second requested machines of the first and took their ages for latencies."""
    plan = LoadPlan(boots=200, mix={"a": 3.0, "b": 1.0}, churn=0.5)
    one, two = (list(draw(plan, random.Random(2), random.Random(chance))) for chance in (5, 6))
    assert [arrival for arrival, _ in one] == [arrival for arrival, _ in two]
    assert {request.instance_uuid for _, request in one}.isdisjoint(request.instance_uuid for _, request in two)


def ended(
    uuid: str, state: BuildState, intended: float, at: float, *, attempt: int = 1, code: str = ""
) -> RequestWatch:
    last = BuildEvent(
        instance_uuid=uuid, project_id="p", state=state, sequence=9, terminal=True, attempt=attempt, code=code,
        funnel=(FunnelStep(step="providers", remaining=0),) if code else (),
    )  # fmt: skip
    watch = RequestWatch(instance_uuid=uuid, flavor="f", intended_at=intended, last=last, stages={state.value: at})
    watch.state, watch.ended_at, watch.terminals = state.value, at, 1
    return watch


def test_a_report_counts_every_build_once() -> None:
    watches = [
        ended("1", BuildState.ACTIVE, 10.0, 10.5),
        ended("2", BuildState.ACTIVE, 10.0, 11.5, attempt=3),
        ended("3", BuildState.FAILED, 10.0, 12.0, attempt=2, code="max_retries_exceeded"),
        ended("4", BuildState.REFUSED, 10.0, 10.1, code="flavor.unknown"),
        RequestWatch(instance_uuid="5", flavor="f", intended_at=10.0, stages={}),
    ]
    watches[1].terminals = 2
    found = sum_up(watches, started=10.0, now=20.0)
    assert (found.requests, found.active, found.failed, found.refused, found.unfinished) == (5, 2, 1, 1, 1)
    assert (found.seconds, found.boots_per_s) == (2.0, 1.0)
    assert (found.latency_ms["p50"], found.latency_ms["max"]) == (500.0, 1500.0)
    assert (found.alternates_used, found.attempts) == (3, {"1": 1, "3": 1})
    assert found.failures_by_code == {"max_retries_exceeded": 1, "flavor.unknown": 1}
    assert found.more_than_one_terminal == 1


async def test_a_constant_rate_counts_from_the_intended_times(client_world: ClientWorld) -> None:
    """Publishing stalls for a second; what fell due meanwhile waited that long, and the report shows it."""
    world = client_world
    world.stall_s = {5: 1.0}  # the fifth publish takes a second of the world's time
    plan = LoadPlan(boots=40, mix={"f": 1.0}, rate_per_s=10.0, timeout_s=60.0)
    found = await run_load(world.client, plan, clock=world.clock, rng=random.Random(3))
    intended = sorted(watch.intended_at for watch in world.client.watches.values())
    steps = {round(later - earlier, 6) for earlier, later in itertools.pairwise(intended)}
    assert steps == {0.1}, "late publishing shifts no intention"
    assert (found.active, found.unfinished) == (40, 0)
    assert found.latency_ms["max"] == pytest.approx(1000, abs=100)
    late = [watch for watch in world.client.watches.values() if (watch.latency_s or 0) > 0.05]
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
        await notify(replace(event, stage_times=StageTimes(ahead, ahead, ahead, ahead, ahead, ahead)))

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
    run = LoadRun(client_world.client, plan, clock=client_world.clock, rng=random.Random(3), keep_watches=False)
    await run.go()
    deletes = run.deletes.operations()
    assert 15 < len(deletes) < 45 and {deletes.outcome_of(row) for row in range(len(deletes))} == {"deleted"}
    assert set(deletes.instance_uuid) <= set(run.boots.uuids) and outcomes(run) == {"active": 60}
    assert all(deletes.latency_s(row) is not None for row in range(len(deletes)))


async def test_deletions_that_are_due_long_after_the_last_sent_request_are_sent(client_world: ClientWorld) -> None:
    """Past the bound of ends they were dropped without a trace: the run ended as if all had been replayed."""
    plan = LoadPlan(boots=2, mix={}, trace=(Arrival(0.0, "f", 1.0), Arrival(0.0, "f", 9.0)), timeout_s=5.0)
    run = LoadRun(client_world.client, plan, clock=client_world.clock, rng=random.Random(3))
    await run.go()
    assert +run.deletes.counts == {"deleted": 2}


async def test_what_is_found_active_at_the_bound_is_deleted_too(client_world: ClientWorld) -> None:
    """Its event was lost, and the last query of the run told of it."""
    client_world.mute = True
    plan = LoadPlan(boots=1, mix={}, trace=(Arrival(0.0, "f", 0.0),), timeout_s=0.0)
    run = LoadRun(client_world.client, plan, clock=client_world.clock, rng=random.Random(3))
    await run.go()
    assert outcomes(run) == {"active": 1} and +run.deletes.counts == {"deleted": 1}


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an interrupt and the end of a run wait for is waited for by the system's clock."""
    monkeypatch.setattr(run_module, "INTERRUPT_GRACE_S", 0.05)


@pytest.mark.usefixtures("no_grace")
@pytest.mark.parametrize(("goes_on", "found"), [(False, {"lost": 3}), (True, {"late": 1, "lost": 2})])
async def test_what_does_not_end_is_lost_or_late_if_a_scheduler_has_it_under_way_at_the_bound(
    client_world: ClientWorld, goes_on: bool, found: dict[str, int]
) -> None:
    client_world.answer_at_once = False
    plan = LoadPlan(boots=5, mix={"f": 1.0}, timeout_s=5.0)
    run = LoadRun(client_world.client, plan, clock=client_world.clock, rng=random.Random(3))
    going = asyncio.create_task(run.go())
    await client_world.requested_more()
    await client_world.finish(2)
    if goes_on:
        await client_world.notify(client_world.waiting[0], BuildState.BUILDING, 3, terminal=False)
    await going
    assert outcomes(run) == {"active": 2, **found}


@pytest.mark.usefixtures("no_grace")
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


@pytest.mark.usefixtures("no_grace")
async def test_interrupted_a_run_does_not_wait_for_a_broker_that_confirms_nothing(client_world: ClientWorld) -> None:
    """Each slice waited for its confirm as long as any publisher does, and Ctrl-C with it."""
    offered, confirmed = asyncio.Event(), asyncio.Event()

    async def hang(*_: object, **__: object) -> list[BaseException | None]:
        offered.set()
        await confirmed.wait()
        return []

    client_world.client.bus.publish_each = hang  # type: ignore[method-assign]
    plan = LoadPlan(boots=50_000, mix={"f": 1.0}, timeout_s=60.0)
    run = LoadRun(client_world.client, plan, clock=client_world.clock, rng=random.Random(3))
    going = asyncio.create_task(run.go())
    await offered.wait()
    run.interrupt()
    async with asyncio.timeout(30):
        await going
    assert outcomes(run).keys() == {"unsent"}


@pytest.mark.usefixtures("no_grace")
async def test_interrupted_a_run_does_not_wait_for_deletions_that_are_due_later(client_world: ClientWorld) -> None:
    """Of a trace: nothing deletes them any more, and they were waited for until the bound."""
    plan = LoadPlan(boots=2, mix={}, trace=(Arrival(0.0, "f", 50.0), Arrival(0.0, "f", 60.0)), timeout_s=1e9)
    run = LoadRun(client_world.client, plan, clock=client_world.clock, rng=random.Random(3))
    began = client_world.clock.monotonic()
    going = asyncio.create_task(run.go())
    await client_world.client.until(lambda: run.boots.counts["active"] == 2, 60.0)
    run.interrupt()
    async with asyncio.timeout(30):
        await going
    assert outcomes(run) == {"active": 2} and not len(run.deletes)
    assert client_world.clock.monotonic() - began < 1.0


async def test_a_broker_that_does_not_answer_holds_up_no_sample(
    client_world: ClientWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its queues waited out its own time limit, and the summary of an interrupted run with them."""
    monkeypatch.setattr(sampler, "DEPTHS_TIMEOUT_S", 0.01)

    class Hung(MemoryTransport):
        async def depth(self, queue: str) -> int:
            await asyncio.Event().wait()
            return 0

    client = client_world.client
    run = LoadRun(client, LoadPlan(boots=1, mix={"f": 1.0}), clock=client_world.clock, rng=random.Random(3))
    hung = Hung(MemoryBroker(client_world.clock), "look")
    looks = sampler.Sampler(run, client, clock=client_world.clock, transports={"api": hung, "cell1": hung})
    async with asyncio.timeout(30):
        assert (await looks.take_sample()).depths == {}


# --- the definition of a load: arrivals of every mode, mixes by short names, ramps, traces, and where a ramp bends


MIX = {"f": 1.0}


def times(plan: LoadPlan) -> list[float]:
    return [arrival.at_s for arrival in arrivals(plan, random.Random(1))]


def test_a_constant_rate_is_evenly_spaced_and_a_burst_is_at_once() -> None:
    assert times(LoadPlan(boots=4, mix=MIX, rate_per_s=10.0)) == [0.0, 0.1, 0.2, 0.3]
    assert times(LoadPlan(boots=3, mix=MIX)) == times(LoadPlan(boots=3, mix=MIX, concurrency=2)) == [0.0] * 3


@pytest.mark.parametrize(("low", "high"), [(10.0, 50.0), (50.0, 10.0), (0.0, 20.0), (20.0, 0.0), (30.0, 30.0)])
def test_a_ramp_changes_its_rate_evenly(low: float, high: float) -> None:
    boots = ramp_boots(low, high, 10.0)
    found = times(LoadPlan(boots=boots, mix=MIX, ramp_from_per_s=low, rate_per_s=high, ramp_s=10.0))
    assert found == sorted(found) and found[0] == 0.0 and 8.5 < found[-1] <= 10.0 + 1e-6
    half = sum(at < 5.0 for at in found)
    assert half == pytest.approx((3 * low + high) / 8 * 10, abs=2), "the area under the first half of the line"


def test_phases_follow_each_other_without_a_gap() -> None:
    phases = ((10.0, 1.0), (100.0, 0.5), (4.0, 2.0))
    assert phase_boots(phases) == 68
    found = times(LoadPlan(boots=68, mix=MIX, phases=phases))
    assert found == sorted(found)
    assert [sum(a <= at < b for at in found) for a, b in ((0.0, 1.0), (1.0, 1.5), (1.5, 3.5))] == [10, 50, 8]


def test_churn_is_the_share_that_is_deleted_again() -> None:
    drawn = list(arrivals(LoadPlan(boots=2000, mix=MIX, churn=0.25), random.Random(3)))
    assert 0.2 < sum(arrival.lifetime_s == 0.0 for arrival in drawn) / 2000 < 0.3
    assert not any(a.lifetime_s is not None for a in arrivals(LoadPlan(boots=50, mix=MIX), random.Random(3)))


def test_short_names_and_metal_in_a_mix() -> None:
    flavors = list(DEFAULT_FLAVORS)
    assert parse_mix("small=8,large=2,metal=1", flavors) == {
        "m1.small": 8.0, "m1.large": 2.0, "bm.gold": 0.5, "bm.silver": 0.5,
    }  # fmt: skip
    assert parse_mix("gold, gpu.small=2", flavors) == {"bm.gold": 1.0, "gpu.small": 2.0}
    assert parse_mix("unheard-of=1", flavors) == {"unheard-of": 1.0}, "the scheduler refuses it, with its code"
    with pytest.raises(PlanError, match=r"a\.x or b\.x"):
        parse_mix("x=1", ["a.x", "b.x"])


@pytest.mark.parametrize(
    "text", ["", "5", "1..2", "1/2", "a..b/3", "1..2/0", "0..0/5", "-1..5/3", "1..inf/3", "1..2/nan"]
)
def test_what_is_no_ramp_is_refused(text: str) -> None:
    with pytest.raises(PlanError) as fault:
        parse_ramp(text)
    assert fault.value.code == "load.ramp"


@pytest.mark.parametrize("text", ["1e308..1e308/1", "1e200..0/1e-300", "1..1e6/1e6"])
def test_a_ramp_without_a_step_is_refused(text: str) -> None:
    with pytest.raises(PlanError) as fault:
        ramp_boots(*parse_ramp(text))
    assert fault.value.code == "load.ramp"


SHAPES = {"s": Shape(1, 1024), "l": Shape(8, 16_384), "g": Shape(4, 8_192, 1.0)}
HEAD = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,creation_time,deletion_time\n"


def trace(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def test_a_trace_is_replayed_in_order_faster_and_with_its_deletions(tmp_path: Path) -> None:
    rows = "b,900,1000,0,0,140,999\na,1000,2000,0,0,100,120\nc,64000,1,0,0,160,\nd,1,1,1,500,150,150\n"
    found = read_trace(trace(tmp_path, HEAD + rows), SHAPES, speed=10.0)
    assert [(a.at_s, a.flavor, a.lifetime_s) for a in found] == [
        (0.0, "l", 2.0),
        (4.0, "s", None),  # deleted after the last arrival: left alone
        (5.0, "g", 0.0),
        (6.0, "l", None),  # nothing covers it: the largest
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "lacks the column cpu_milli"),
        ("name,cpu_milli,creation_time\n", "lacks the column memory_mib"),
        (HEAD, "has no requests"),
        (HEAD + "a,much,1,0,0,1,2\n", "line 2: not a request"),
        (HEAD + "a,1,1,0,0,nan,2\n", "line 2: not a request"),
        (HEAD + "a,1\n", "line 2: not a request"),
        (HEAD + "a,1,1,0,0," + "9" * 200_000 + ",2\n", "not a"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence) as fault:
        read_trace(trace(tmp_path, text), SHAPES, speed=1.0)
    assert fault.value.code == "load.trace"


# --- a real cluster's files as settings: hosts and flavors that are just theirs


HOSTS = (
    "sn,cpu_milli,memory_mib,gpu,model\na,32000,262144,0,\nb,96000,393216,2,G2\nc,32000,262144,0,\nd,8000,4096,1,t4\n"
)
REQUESTS = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time,deletion_time\n"
    "p,3152,5600,1,810,,100,160\n"
    "q,12000,16384,2,1000,T4|G2,120,999\n"
    "r,500,100,0,0,G2,140,150\n"
    "s,3152,5600,1,810,,200,300\n"
)


def written(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_hosts_and_flavors_are_those_of_the_files_after_a_round_trip_through_a_settings_file(tmp_path: Path) -> None:
    hosts, path = written(tmp_path, "hosts.csv", HOSTS), written(tmp_path, "requests.csv", REQUESTS)
    done = CliRunner().invoke(app, ["trace-settings", str(hosts), str(path)])
    settings = read_settings(written(tmp_path, "like.toml", done.stdout), {})
    assert settings == settings_like(read_hosts(hosts), read_requests(path))

    plans = plan_hosts(settings.compute.simulated, "cell1", "cell1-c1")
    kinds = Counter((plan.size.vcpus, plan.size.memory_mb, len(plan.devices)) for plan in plans)
    assert kinds == {(32000, 262144, 0): 2, (96000, 393216, 2): 1, (8000, 4096, 1): 1}
    gpus = [provider for plan in plans for provider in tree(plan, plan.size, enabled=True)[1:]]
    assert [gpu.inventories[GPU_CLASS].total for gpu in gpus] == [1000] * 3
    assert {gpu.traits for gpu in gpus} == {("CUSTOM_GPU_MODEL_G2",), ("CUSTOM_GPU_MODEL_T4",)}

    flavors = settings.scheduler.flavors
    arrivals = read_trace(path, {name: Shape(one.vcpus, one.memory_mb) for name, one in flavors.items()}, speed=10.0)
    assert [one.flavor for one in arrivals] == [
        "trace.3152m-5600M-1x810", "trace.12000m-16384M-2x1000-G2-T4", "trace.500m-100M", "trace.3152m-5600M-1x810",
    ]  # fmt: skip
    assert {one.flavor for one in arrivals} == set(flavors)
    query = parse("q", flavors["trace.12000m-16384M-2x1000-G2-T4"]).query
    assert query.resources == {"VCPU": 12000, "MEMORY_MB": 16384} and query.group_policy == "isolate"
    assert [dict(group.resources) for group in query.groups] == [{GPU_CLASS: 1000}] * 2


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sn,cpu_milli\na,1\n", "lacks the column memory_mib"),
        ("cpu_milli,memory_mib\n", "has no hosts"),
        ("cpu_milli,memory_mib,gpu,model\n1000,100,1,\n", "line 2: not a host: '' is no model"),
        ("cpu_milli,memory_mib,gpu,model\n1000,100,1,a b\n", "line 2: not a host"),
        ("cpu_milli,memory_mib\n1000,100\n1e300,1\n", "line 3: not a host"),
        ("cpu_milli,memory_mib\n0,1\n", "line 2: not a host"),
        ("cpu_milli,memory_mib,gpu,model\n1,1,65,x\n", "line 2: not a host"),
        ("cpu_milli,memory_mib\n" + "".join(f"{n},1\n" for n in range(1, 66)), "65 kinds of hosts"),
    ],
)
def test_what_are_no_hosts_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence) as fault:
        read_hosts(written(tmp_path, "hosts.csv", text))
    assert fault.value.code == "load.hosts"


def test_a_request_for_more_gpus_than_groups_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "r.csv", "cpu_milli,memory_mib,num_gpu,creation_time\n1,1,17,0\n")
    with pytest.raises(PlanError, match="17 GPUs"):
        settings_like(Counter({HostKind(1, 1): 1}), read_requests(path))
