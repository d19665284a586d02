"""The definition of a load: arrivals of every mode, mixes by short names, ramps, traces, and where a ramp bends."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from berth.load import LoadPlan, PlanError
from berth.load.plan import arrivals, parse_mix, parse_ramp, phase_boots, ramp_boots
from berth.load.record import Operations
from berth.load.totals import knee
from berth.load.trace import Shape, read_trace
from scheduler_worker.config import DEFAULT_FLAVORS

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


def test_a_ramp_is_read() -> None:
    assert parse_ramp("100..4000/60") == (100.0, 4000.0, 60.0)


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


def ramped(bend_s: float) -> Operations:
    """A ramp 10..100 over 60 s whose latency is 10 ms until `bend_s` and grows by 100 ms a second after it."""
    plan = LoadPlan(boots=ramp_boots(10.0, 100.0, 60.0), mix=MIX, ramp_from_per_s=10.0, rate_per_s=100.0, ramp_s=60.0)
    at = times(plan)
    late = [0.010 + max(0.0, when - bend_s) * 0.1 for when in at]
    many = len(at)
    return Operations(
        flavors=["f"], kinds=["vm"], codes=[""], cells=[""], hosts=[""], instance_uuid=[str(n) for n in range(many)],
        intended_s=at, sent_s=list(at), accepted_s=list(at),
        ended_s=[when + more for when, more in zip(at, late, strict=True)], outcome=[0] * many, flavor=[0] * many,
        code=[0] * many, cell=[0] * many, host=[0] * many, attempts=[1] * many, conflicts=[0] * many, again=[0] * many,
    )  # fmt: skip


def test_the_knee_is_where_the_median_leaves_its_calm() -> None:
    found = knee(ramped(40.0), 60.0)
    assert found["rate_per_s"] == pytest.approx(70.0, abs=5) and found["calm_p50_ms"] == pytest.approx(10.0)
    assert "rate_per_s" not in knee(ramped(999.0), 60.0), "not reached"
    assert knee(Operations(), 60.0) == {}
    steps = list(itertools.pairwise([knee(ramped(bend), 60.0)["rate_per_s"] for bend in (10.0, 25.0, 40.0)]))
    assert all(earlier < later for earlier, later in steps)
