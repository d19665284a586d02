"""The table of lab/benchmarks/rest_beside.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from lab.benchmarks.rest_client import HUNG_UP, LATE, Outcome
from lab.benchmarks.rest_phases import Phase, value

UNANSWERED = {LATE: "no answer in time", HUNG_UP: "hung up"}
SHOWN, SHOWN_CHARACTERS = 25, 110


class Figures(Struct, frozen=True, kw_only=True):
    """One phase on one system. cpu_ms: a piece of work that went well, by part (server, postgres, broker, client)."""

    outcome: Outcome
    cpu_ms: dict[str, float]

    @property
    def servers_ms(self) -> float:
        """All but the client's."""
        return sum(ms for part, ms in self.cpu_ms.items() if part != "client")


class Row(Struct, frozen=True, kw_only=True):
    """One phase on all systems. ratio: how many times better berth is than the real one, by what is compared.

    ratio_frozen: than the frozen one. ratio_cpu: how many times less CPU it takes, the client's aside.
    """

    phase: str
    title: str
    providers: int
    better: str
    systems: dict[str, Figures]
    ratio: float | None = None
    ratio_frozen: float | None = None
    ratio_cpu: float | None = None
    goal: float | None = None
    goal_ms: float | None = None
    met: bool | None = None


def add(rows: list[Row], phase: Phase, size: int, found: Mapping[str, Figures]) -> None:
    """Note a row and print it, so that a run that is broken off has printed something."""
    ratio, goal = _ratio(phase, found, "real"), phase.goal(size)
    met = None
    if phase.goal_ms is not None and "berth" in found:
        met = found["berth"].outcome.done > 0 and found["berth"].outcome.p50_ms <= phase.goal_ms
    elif goal is not None and ratio is not None:
        met = ratio >= goal
    row = Row(
        phase=phase.key,
        title=phase.title,
        providers=size,
        better=phase.better,
        systems=dict(found),
        ratio=ratio,
        ratio_frozen=_ratio(phase, found, "frozen"),
        ratio_cpu=_ratio_cpu(found),
        goal=goal,
        goal_ms=phase.goal_ms,
        met=met,
    )
    rows.append(row)
    print("\n".join(lines(row)), flush=True)


def _ratio(phase: Phase, found: Mapping[str, Figures], other: str) -> float | None:
    if other not in found or "berth" not in found:
        return None
    if not (found[other].outcome.done and found["berth"].outcome.done):
        return None  # nothing to compare with
    ours, theirs = value(phase, found["berth"].outcome), value(phase, found[other].outcome)
    better, worse = (ours, theirs) if phase.better == "rate" else (theirs, ours)
    return better / worse


def _ratio_cpu(found: Mapping[str, Figures]) -> float | None:
    if not all(name in found and found[name].outcome.done for name in ("real", "berth")):
        return None
    ours = found["berth"].servers_ms
    return found["real"].servers_ms / ours if ours else None


def lines(row: Row) -> list[str]:
    """One row for a person: a line a system."""
    printed = [f"{row.title}, {row.providers:,} providers [{row.phase}]"]
    for name, figures in row.systems.items():
        outcome, cpu = figures.outcome, figures.cpu_ms
        parts = "  ".join(f"{part} {ms:.2f}" for part, ms in cpu.items())
        printed.append(
            f"  {name:6} {outcome.per_s:9.1f} /s  p50 {outcome.p50_ms:9.2f} ms  p95 {outcome.p95_ms:9.2f} ms"
            f"   CPU ms each: {parts}{_trouble(outcome)}"
        )
    return printed


def _trouble(outcome: Outcome) -> str:
    if not outcome.failed:
        return ""
    named = ", ".join(f"{UNANSWERED.get(status, status)}: {count}" for status, count in outcome.statuses.items())
    return f"   answers: {named}"


COLUMNS = ("phase", "providers", "compared", "real", "frozen", "berth", "ratio", "to frozen", "by CPU", "goal", "met")


def table(rows: Sequence[Row]) -> None:
    """All rows, in Markdown."""
    print("\n| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS))
    for row in rows:
        print("| " + " | ".join(_cells(row)) + " |")


def _cells(row: Row) -> list[str]:
    def shown(name: str) -> str:
        if name not in row.systems:
            return ""
        figures = row.systems[name]
        outcome = figures.outcome
        if not outcome.done:
            return "none in time"
        main = f"{_short(outcome.per_s)} /s" if row.better == "rate" else f"{_short(outcome.p50_ms)} ms"
        trouble = _trouble(outcome).replace("   answers:", ";")
        return f"{main} (p95 {_short(outcome.p95_ms)} ms, CPU {_short(figures.servers_ms)} ms{trouble})"

    goal = f"{row.goal_ms:g} ms" if row.goal_ms is not None else f"{row.goal:g} x" if row.goal is not None else ""
    met = "" if row.met is None else "yes" if row.met else "NO"
    compared = "a second" if row.better == "rate" else "median"
    found = (row.ratio, row.ratio_frozen, row.ratio_cpu)
    ratios = [f"{_short(ratio)} x" if ratio is not None else "" for ratio in found]
    return [row.title, f"{row.providers:,}", compared, *map(shown, ("real", "frozen", "berth")), *ratios, goal, met]


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def statements(before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]], count: int) -> None:
    """The SQL statements of a phase, the costliest first."""
    found = []
    for statement, now in after.items():
        old = before.get(statement, (0.0, 0.0, 0.0))
        calls, planning, running = ((new - past) / count for new, past in zip(now, old, strict=True))
        if calls:
            found.append((planning + running, planning, calls, " ".join(statement.split())))
    print(f"  {sum(calls for _, _, calls, _ in found):.2f} statements each, {sum(ms for ms, *_ in found):.3f} ms")
    for ms, planning, calls, statement in sorted(found, reverse=True)[:SHOWN]:
        us = f"{1000 * ms:8.1f} us ({1000 * planning:.1f} planning)"
        print(f"    {us}  {calls:7.3f} calls  {statement[:SHOWN_CHARACTERS]}")
