"""The result of a load: counted, each build once, and its latencies ranked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from berth.bus_client import RequestWatch
from bus.contracts.build import BuildEvent, FunnelStep
from lab.load.report.figures import summary

# Failures listed one by one in a report; all are counted.
MAX_FAILURES_SHOWN = 50


class Failure(Struct, frozen=True, kw_only=True):
    """One build that did not become active, with everything its client received."""

    instance_uuid: str
    flavor: str
    state: str
    code: str
    reason: str
    attempts: int
    funnel: tuple[FunnelStep, ...] = ()


class LoadReport(Struct, frozen=True, kw_only=True):
    """The result of a load. Times in seconds, latencies in milliseconds; percentiles over active builds.

    stages_ms: until the client received each state. spent_ms: in each stage of `record.STAGES`.
    """

    requests: int
    active: int
    failed: int
    refused: int
    unfinished: int
    seconds: float
    boots_per_s: float
    latency_ms: dict[str, float]
    stages_ms: dict[str, dict[str, float]]
    alternates_used: int
    attempts: dict[str, int]
    failures_by_code: dict[str, int]
    failures: tuple[Failure, ...]
    more_than_one_terminal: int
    spent_ms: dict[str, dict[str, float]] = {}


def sum_up(watches: Sequence[RequestWatch], *, started: float, now: float) -> LoadReport:
    """Sum up what a client saw of its builds."""
    ended = [t.ended_at for t in watches if t.ended_at is not None]
    seconds = max((max(ended) if ended else now) - started, 1e-9)
    states = Counter(watch.state for watch in watches)
    active = [t for t in watches if t.state == "active"]
    failures = [_failure(t) for t in watches if t.state in {"failed", "refused"}]
    return LoadReport(
        requests=len(watches),
        active=states["active"],
        failed=states["failed"],
        refused=states["refused"],
        unfinished=sum(t.ended_at is None for t in watches),
        seconds=seconds,
        boots_per_s=states["active"] / seconds,
        latency_ms=percentiles([1000 * t.latency_s for t in active if t.latency_s is not None]),
        stages_ms=_stages(active),
        alternates_used=sum(max(_attempt(t) - 1, 0) for t in watches),
        attempts={str(n): c for n, c in sorted(Counter(_attempt(t) for t in active).items())},
        failures_by_code=dict(Counter(f.code for f in failures).most_common()),
        failures=tuple(failures[:MAX_FAILURES_SHOWN]),
        more_than_one_terminal=sum(t.terminals > 1 for t in watches),
    )


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, p95, p99, max and mean (nearest rank), to three digits; empty when there is nothing."""
    found = summary(np.array(values, dtype=np.float64))
    return {name: round(value, 3) for name, value in found.items() if name != "p99.9"}


def _stages(watches: Sequence[RequestWatch]) -> dict[str, dict[str, float]]:
    """Milliseconds from the intended time until the client received each state."""
    names = ("accepted", "scheduled", "building", "active")
    return {
        name: percentiles([1000 * (t.stages[name] - t.intended_at) for t in watches if name in t.stages])
        for name in names
    }


def _attempt(watch: RequestWatch) -> int:
    event: BuildEvent | None = watch.last
    return event.attempt if event is not None else 0


def _failure(watch: RequestWatch) -> Failure:
    event = watch.last
    return Failure(
        instance_uuid=watch.instance_uuid,
        flavor=watch.flavor,
        state=watch.state,
        code=event.code if event else "",
        reason=event.reason if event else "its end was learned by a query; see `berth show`",
        attempts=event.attempt if event else 0,
        funnel=event.funnel if event else (),
    )
