"""Reports for a person: what came of a load, how each invariant stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from berth.invariants import Verdict
from berth.load import Failure, LoadReport

FAILURES_SHOWN = 12


def render_load(report: LoadReport, console: Console) -> None:
    """The load's summary."""
    console.print(
        f"[bold]{report.active}[/bold] of {report.requests} active in {report.seconds:.2f} s: "
        f"[bold]{report.boots_per_s:.0f} boots a second[/bold]"
        + (f", {report.failed} failed" if report.failed else "")
        + (f", {report.refused} refused" if report.refused else "")
        + (f", [red]{report.unfinished} not ended[/red]" if report.unfinished else "")
    )
    console.print(f"alternates used: {report.alternates_used}, active after attempt: {_counts(report.attempts)}")
    table = Table("milliseconds until the client heard", *_PERCENTILES)
    for stage, figures in report.stages_ms.items():
        table.add_row(stage, *(f"{figures[name]:.0f}" if name in figures else "" for name in _PERCENTILES))
    console.print(table)
    render_failures(report.failures, console)


_PERCENTILES = ("p50", "p90", "p95", "p99", "max")


def render_failures(failures: Sequence[Failure], console: Console) -> None:
    """Failures, like ones together: each reason once with its funnel, and how many share it."""
    groups: dict[tuple[str, str, str], list[Failure]] = {}
    for failure in failures:
        groups.setdefault((failure.flavor, failure.code, failure.reason), []).append(failure)
    for (flavor, code, reason), alike in list(groups.items())[:FAILURES_SHOWN]:
        first = alike[0]
        console.print(
            f"[red]{len(alike)} x[/red] {escape(flavor)} {escape(code)}: {escape(reason)}"
            f" [dim]({first.instance_uuid}{', ...' if len(alike) > 1 else ''})[/dim]",
            soft_wrap=True,
        )
        for step in first.funnel:
            fell = ", ".join(f"{n} {why}" for why, n in sorted(step.fell.items(), key=lambda item: -item[1]))
            console.print(f"      {step.step:36} {step.left:5} left{'   fell: ' + escape(fell) if fell else ''}")
    if len(groups) > FAILURES_SHOWN:
        console.print(f"... and {len(groups) - FAILURES_SHOWN} other kinds of failure")


def render_verdicts(verdicts: Sequence[Verdict], console: Console) -> None:
    """The invariants, one line each, breaches below."""
    for verdict in verdicts:
        mark = "[green]holds [/green]" if verdict.holds else "[red]BROKEN[/red]"
        console.print(f"{mark} {escape(verdict.sentence)} [dim]({verdict.checked} looked at)[/dim]")
        for example in verdict.examples:
            console.print(f"       [red]{escape(example)}[/red]", soft_wrap=True)
        if verdict.breaches > len(verdict.examples):
            console.print(f"       [red]... {verdict.breaches} in all[/red]")


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items()) or "none"
