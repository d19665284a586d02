"""The stages of a build: durations that add up whatever the clocks read, and a histogram that counts each once."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from bus.contracts.stages import STAGES, Stamps, durations
from bus.service.stages import BUCKETS_S, MAX_STAGE_S, StageSeconds

WHOLE = Stamps(requested=10.0, queued=11.0, decided=13.0, claimed=16.0, dispatched=20.0, built=25.0, announced=31.0)


def test_a_whole_build_has_every_stage_in_its_order() -> None:
    assert list(durations(WHOLE)) == list(STAGES)
    assert list(durations(WHOLE).values()) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_a_readers_own_times_come_first_and_last() -> None:
    found = durations(WHOLE, since=9.0, until=33.0)
    assert (found["queued"], found["announced"], sum(found.values())) == (2.0, 8.0, 24.0)


@pytest.mark.parametrize("skew", [-1000.0, -8.0, -3.0, 0.0, 2.0, 9.0, 1000.0])
@pytest.mark.parametrize("machine", [("queued", "decided", "claimed"), ("dispatched", "built"), ("announced",)])
def test_clocks_that_differ_move_time_between_stages_but_neither_lose_nor_invent_any(
    machine: tuple[str, ...], skew: float
) -> None:
    skewed = msgspec.structs.replace(WHOLE, **{stage: getattr(WHOLE, stage) + skew for stage in machine})
    found = durations(skewed, since=10.0, until=31.0)
    assert min(found.values()) >= 0
    assert sum(found.values()) == pytest.approx(21.0)


def test_what_never_happened_is_absent_and_its_time_is_in_the_next_stage() -> None:
    nowhere = Stamps(requested=10.0, queued=11.0, decided=13.0)
    assert durations(nowhere) == {"queued": 1.0, "decided": 2.0}
    assert durations(nowhere, until=14.0) == {"queued": 1.0, "decided": 2.0, "announced": 1.0}
    assert durations(Stamps(requested=10.0, built=12.0)) == {"built": 2.0}
    assert durations(Stamps(queued=10.0, decided=12.0)) == {"queued": 0.0, "decided": 2.0}
    assert durations(Stamps()) == {}


def test_stamps_travel_as_a_short_array_and_an_older_writer_is_understood() -> None:
    assert msgspec.json.encode(Stamps(requested=1.5, queued=2.5)) == b"[1.5,2.5,0.0,0.0,0.0,0.0,0.0,0]"
    assert msgspec.json.decode(b"[1.5,2.5]", type=Stamps) == Stamps(requested=1.5, queued=2.5)


def test_the_histogram_reads_as_prometheus_has_it() -> None:
    registry = CollectorRegistry()
    stages = StageSeconds()
    registry.register(stages)
    stages.observe("built", [0.0005, 0.0006, 3.0])
    stages.observe("built", [-2.0, 1e12])
    found = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in generate_latest(registry).decode().splitlines()
        if not line.startswith("#")
    }
    assert found['berth_stage_seconds_bucket{le="0.0005",stage="built"}'] == 2.0, "a bound is in its own bucket"
    assert found['berth_stage_seconds_bucket{le="0.001",stage="built"}'] == 3.0
    assert found['berth_stage_seconds_bucket{le="5.0",stage="built"}'] == 4.0
    assert found['berth_stage_seconds_bucket{le="+Inf",stage="built"}'] == 5.0
    assert found['berth_stage_seconds_count{stage="built"}'] == 5.0
    assert found['berth_stage_seconds_sum{stage="built"}'] == pytest.approx(3.0011 + MAX_STAGE_S)
    assert not any("queued" in name for name in found), "stages of other workers"
    assert list(BUCKETS_S) == sorted(BUCKETS_S)
