"""The honest end of a run, from its columns: how many ended how, how fast, and where a ramp bent."""

from __future__ import annotations

import os
import platform
import socket
from collections import Counter
from importlib.metadata import PackageNotFoundError
from statistics import median

from bus import distribution
from lab.load.record import STAGES, LoadSettings, MachineInfo, Operations, Totals
from lab.load.report.summary import percentiles
from lab.load.run import LoadRun

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
        duplicates=run.duplicates,
        interrupted=run.interrupted,
        seconds=round(seconds, 3),
        boots_per_s=round(len(active) / seconds, 2),
        latency_ms=percentiles([1000 * (boots.latency_s(row) or 0.0) for row in active]),
        delete_ms=percentiles([1000 * (deletes.latency_s(row) or 0.0) for row in deleted]),
        stages_ms=_stages(boots, active),
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
        version = distribution.version()
    except PackageNotFoundError:
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


def _stages(boots: Operations, rows: list[int]) -> dict[str, dict[str, float]]:
    found = {}
    for stage in STAGES:
        column = boots.stages.get(stage)
        if column is not None:
            found[stage] = percentiles([1000 * value for row in rows if (value := column[row]) is not None])
    return found
