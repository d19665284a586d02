"""The table of lab/benchmarks/rest_beside.py."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from lab.benchmarks.rest_client import HUNG_UP, LATE, Outcome
from lab.benchmarks.rest_phases import Phase, value

UNANSWERED = {LATE: "no answer in time", HUNG_UP: "hung up"}
COLUMNS = ("phase", "providers", "compared", "real", "berth", "ratio", "by CPU")


class Figures(Struct, frozen=True, kw_only=True):
    """One phase on one system. cpu_ms: a piece of work that went well, by part (server, postgres, broker, client)."""

    outcome: Outcome
    cpu_ms: dict[str, float]

    @property
    def servers_ms(self) -> float:
        """All but the client's."""
        return sum(ms for part, ms in self.cpu_ms.items() if part != "client")


class Row(Struct, kw_only=True):
    """One phase on both systems. ratio: how many times better berth is than the real one, by what is compared.

    ratio_cpu: how many times less CPU it takes, the client's aside.
    """

    phase: str
    title: str
    providers: int
    better: str
    systems: dict[str, Figures]
    ratio: float | None = None
    ratio_cpu: float | None = None


def row_of(phase: Phase, size: int, found: Mapping[str, Figures]) -> Row:
    """What was found of a phase in a book of this size; a ratio only where both systems did something."""
    row = Row(phase=phase.key, title=phase.title, providers=size, better=phase.better, systems=dict(found))
    if {"real", "berth"} != found.keys() or not all(figures.outcome.done for figures in found.values()):
        return row
    ours, theirs = (found[name] for name in ("berth", "real"))
    ratio = value(phase, ours.outcome) / value(phase, theirs.outcome)
    row.ratio = ratio if phase.better == "rate" else 1 / ratio
    row.ratio_cpu = theirs.servers_ms / ours.servers_ms if ours.servers_ms else None
    return row


def _trouble(outcome: Outcome) -> str:
    if not outcome.failed:
        return ""
    named = ", ".join(f"{UNANSWERED.get(status, status)}: {count}" for status, count in outcome.statuses.items())
    return f"; {named}"


def head() -> str:
    """The table's head, in Markdown."""
    return "| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS)


def line(row: Row) -> str:
    """One row."""
    ratios = [f"{_short(ratio)} x" if ratio is not None else "" for ratio in (row.ratio, row.ratio_cpu)]
    compared = "a second" if row.better == "rate" else "median"
    shown = [_shown(row, name) for name in ("real", "berth")]
    return "| " + " | ".join([row.title, f"{row.providers:,}", compared, *shown, *ratios]) + " |"


def _shown(row: Row, name: str) -> str:
    if name not in row.systems:
        return ""
    figures = row.systems[name]
    outcome = figures.outcome
    if not outcome.done:
        return "none in time"
    main = f"{_short(outcome.per_s)} /s" if row.better == "rate" else f"{_short(outcome.p50_ms)} ms"
    cpu = ", ".join(f"{part} {_short(ms)}" for part, ms in figures.cpu_ms.items())
    return f"{main} (p95 {_short(outcome.p95_ms)} ms, CPU ms each: {cpu}{_trouble(outcome)})"


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
