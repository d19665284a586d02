"""The honest end of a run, from its columns: how many ended how, how fast, and where a ramp bent."""

from __future__ import annotations

import math
import os
import platform
import socket
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from statistics import median

from msgspec import Struct

from berth.client import Track
from berth.load.record import STAGES, LoadSettings, MachineInfo, Operations, Totals
from berth.load.run import LoadRun
from bus.contracts.build import BuildEvent, FunnelStep
from bus.contracts.stages import durations


def stages_of(event: BuildEvent, *, since: float | None = None, until: float | None = None) -> dict[str, float]:
    """Seconds in each stage of `record.STAGES` that the event has; a stage without a stamp is absent.

    since, until: when the client meant to publish and when it received the event, both by its own wall clock. Given
    both, the stages add up to the latency between them whatever the clocks of other machines show. Left out: from when
    the broker was given the request (`queued`), and to when the scheduler passed the end on (`announced`).
    """
    return {} if event.stamps is None else durations(event.stamps, since=since, until=until)


def conflicts_of(event: BuildEvent) -> int | None:
    """Claims that this boot lost to others before one held; None when the event does not contain it."""
    return None if event.stamps is None else event.stamps.lost_claims


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


def sum_up(tracks: Sequence[Track], *, started: float, now: float) -> LoadReport:
    """Sum up what a client saw of its builds."""
    ended = [t.ended_at for t in tracks if t.ended_at is not None]
    seconds = max((max(ended) if ended else now) - started, 1e-9)
    states = Counter(track.state for track in tracks)
    active = [t for t in tracks if t.state == "active"]
    failures = [_failure(t) for t in tracks if t.state in {"failed", "refused"}]
    return LoadReport(
        requests=len(tracks),
        active=states["active"],
        failed=states["failed"],
        refused=states["refused"],
        unfinished=sum(t.ended_at is None for t in tracks),
        seconds=seconds,
        boots_per_s=states["active"] / seconds,
        latency_ms=percentiles([1000 * t.latency_s for t in active if t.latency_s is not None]),
        stages_ms=_stages(active),
        alternates_used=sum(max(_attempt(t) - 1, 0) for t in tracks),
        attempts={str(n): c for n, c in sorted(Counter(_attempt(t) for t in active).items())},
        failures_by_code=dict(Counter(f.code for f in failures).most_common()),
        failures=tuple(failures[:MAX_FAILURES_SHOWN]),
        more_than_one_terminal=sum(t.terminals > 1 for t in tracks),
    )


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, p95, p99, max and mean (nearest rank); empty when there is nothing."""
    if not values:
        return {}
    ordered = sorted(values)

    def rank(share: float) -> float:
        return round(ordered[math.ceil(share * len(ordered)) - 1], 3)

    return {
        "p50": rank(0.50),
        "p90": rank(0.90),
        "p95": rank(0.95),
        "p99": rank(0.99),
        "max": round(ordered[-1], 3),
        "mean": round(sum(ordered) / len(ordered), 3),
    }


def _stages(tracks: Sequence[Track]) -> dict[str, dict[str, float]]:
    """Milliseconds from the intended time until the client received each state."""
    names = ("accepted", "scheduled", "building", "active")
    return {
        name: percentiles([1000 * (t.stages[name] - t.intended_at) for t in tracks if name in t.stages])
        for name in names
    }


def _attempt(track: Track) -> int:
    event: BuildEvent | None = track.last
    return event.attempt if event is not None else 0


def _failure(track: Track) -> Failure:
    event = track.last
    return Failure(
        instance_uuid=track.instance_uuid,
        flavor=track.flavor,
        state=track.state,
        code=event.code if event else "",
        reason=event.reason if event else "its end was learned by a query; see `berth show`",
        attempts=event.attempt if event else 0,
        funnel=event.funnel if event else (),
    )


NOT_ACCEPTED = frozenset({"backpressure", "unsent"})
# The knee of a ramp: arrivals are looked at in so many steps; the first tenth defines calm; it is past the knee
# where the median is this many times the calm one (and this much above it) for so many steps in a row.
KNEE_STEPS = 60
CALM_SHARE = 0.1
KNEE_TIMES = 3.0
KNEE_ABOVE_MS = 20.0
KNEE_ROWS = 3


def totals(run: LoadRun, boots: Operations, deletes: Operations) -> Totals:
    """The summary of a run that has ended."""
    outcomes = _outcomes(boots)
    seconds = max(run.last_end - run.started, 1e-9)
    active = [row for row in range(len(boots)) if boots.outcome_of(row) == "active"]
    deleted = [row for row in range(len(deletes)) if deletes.outcome_of(row) == "deleted"]
    return Totals(
        boots=len(boots),
        accepted=sum(count for name, count in outcomes.items() if name not in NOT_ACCEPTED),
        outcomes=outcomes,
        by_code=_by_code(boots),
        deletes=len(deletes),
        delete_outcomes=_outcomes(deletes),
        delete_by_code=_by_code(deletes),
        twice=run.twice,
        interrupted=run.interrupted,
        seconds=round(seconds, 3),
        boots_per_s=round(len(active) / seconds, 2),
        latency_ms=percentiles([1000 * (boots.latency_s(row) or 0.0) for row in active]),
        delete_ms=percentiles([1000 * (deletes.latency_s(row) or 0.0) for row in deleted]),
        stages_ms=_stages_totals(boots, active),
        attempts={str(n): count for n, count in sorted(Counter(boots.attempts[row] for row in active).items())},
        conflicts=run.conflicts,
        backpressure=run.refusals,
        knee=knee(boots, run.plan.ramp_s) if run.plan.mode == "ramp" else {},
    )


def knee(boots: Operations, ramp_s: float) -> dict[str, float]:
    """Where a ramp's latency leaves its calm: the rate before it bent, and the medians before and after; {}: nowhere.

    `highest_ended_per_s`: the most boots that became active within a whole second.
    """
    step_s = ramp_s / KNEE_STEPS
    by_step: list[list[float]] = [[] for _ in range(KNEE_STEPS)]
    offered = [0] * KNEE_STEPS
    ended: Counter[int] = Counter()
    for row in range(len(boots)):
        step = min(int(boots.intended_s[row] / step_s), KNEE_STEPS - 1)
        offered[step] += 1
        latency_s, end_s = boots.latency_s(row), boots.ended_s[row]
        if latency_s is not None and end_s is not None and boots.outcome_of(row) == "active":
            by_step[step].append(1000 * latency_s)
            ended[int(end_s)] += 1
    medians = [median(step) if step else None for step in by_step]
    calm = [value for value in medians[: max(3, int(KNEE_STEPS * CALM_SHARE))] if value is not None]
    if not calm:
        return {}
    found = {"calm_p50_ms": round(median(calm), 3), "highest_ended_per_s": float(max(ended.values()))}
    bound = max(KNEE_TIMES * median(calm), median(calm) + KNEE_ABOVE_MS)
    past = [offered[step] > 0 and (value is None or value > bound) for step, value in enumerate(medians)]
    bend = next((step for step in range(1, KNEE_STEPS - KNEE_ROWS + 1) if all(past[step : step + KNEE_ROWS])), None)
    if bend is None:
        return found
    return {**found, "rate_per_s": round(offered[bend - 1] / step_s, 1), "p50_ms": round(medians[bend] or 0.0, 3)}


def settings_of(run: LoadRun, **more: object) -> LoadSettings:
    """The plan, as the record has it."""
    plan = run.plan
    return LoadSettings(
        mode=plan.mode,
        boots=plan.boots,
        mix=dict(plan.mix),
        rate_per_s=plan.rate_per_s,
        ramp_from_per_s=plan.ramp_from_per_s,
        ramp_s=plan.ramp_s,
        concurrency=plan.concurrency,
        churn=plan.churn,
        timeout_s=plan.timeout_s,
        lost_after_s=plan.timeout_s,
        project_id=plan.project_id,
        **more,  # type: ignore[arg-type]
    )


def machine() -> MachineInfo:
    """This one."""
    try:
        version = metadata.version("berth")
    except metadata.PackageNotFoundError:
        version = ""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return MachineInfo(
        hostname=socket.gethostname(),
        system=f"{platform.system()} {platform.release()}",
        cpus=len(os.sched_getaffinity(0)),
        cpu_model=_cpu_model(),
        memory_mb=pages // 2**20,
        python=platform.python_version(),
        berth=version,
    )


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return ""


def _outcomes(rows: Operations) -> dict[str, int]:
    return dict(Counter(rows.outcome_of(row) for row in range(len(rows))).most_common())


def _by_code(rows: Operations) -> dict[str, int]:
    codes = Counter(
        rows.codes[rows.code[row]] or "unknown"
        for row in range(len(rows))
        if rows.outcome_of(row) in {"failed", "refused"}
    )
    return dict(codes.most_common())


def _stages_totals(boots: Operations, rows: list[int]) -> dict[str, dict[str, float]]:
    found = {}
    for stage in STAGES:
        column = boots.stages.get(stage)
        if column is not None:
            found[stage] = percentiles([1000 * value for row in rows if (value := column[row]) is not None])
    return found
