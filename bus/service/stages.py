"""`berth_stage_seconds`: how long builds spend in each stage, a Prometheus histogram that is fed by the batch. The
worker that sees the end of a stage observes it, once a build: schedulers queued, decided, claimed and announced;
conductors dispatched and built.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from prometheus_client import REGISTRY
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from bus.contracts.stages import STAGES

BUCKETS_S = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
# A client may claim that it published in 1970; the sum must survive that.
MAX_STAGE_S = 86_400.0


class StageSeconds(Collector):
    """One histogram with label `stage`. Not for several threads: a worker has one loop."""

    # prometheus_client's Histogram takes a lock and walks its buckets for each observation, 2 to 3 microseconds: six a
    # build would cost more than some stages do. Plain lists take a tenth of that.

    def __init__(self) -> None:
        self._counts = {stage: [0] * (len(BUCKETS_S) + 1) for stage in STAGES}
        self._sums = dict.fromkeys(STAGES, 0.0)

    def observe(self, stage: str, seconds: Iterable[float]) -> None:
        """A batch of durations of one stage; clocks that disagree make 0, nonsense makes a day."""
        counts = self._counts[stage]
        total = 0.0
        for one in seconds:
            bounded = min(max(one, 0.0), MAX_STAGE_S)
            counts[bisect_left(BUCKETS_S, bounded)] += 1
            total += bounded
        self._sums[stage] += total

    def describe(self) -> Iterator[HistogramMetricFamily]:
        """The name, without figures."""
        yield HistogramMetricFamily("berth_stage_seconds", "Time of a build in each stage.", labels=["stage"])

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The stages that were observed in this process."""
        (family,) = self.describe()
        for stage, counts in self._counts.items():
            if any(counts):
                family.add_metric([stage], _cumulative(counts), self._sums[stage])
        yield family


def _cumulative(counts: list[int]) -> list[tuple[str, float]]:
    so_far = 0
    buckets = []
    for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), counts, strict=True):
        so_far += count
        buckets.append((bound, float(so_far)))
    return buckets


STAGE_S = StageSeconds()
REGISTRY.register(STAGE_S)
