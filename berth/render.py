"""Reports for a person: what came of a load, how each invariant stands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from berth.audit.invariants import InvariantVerdict
from bus.contracts.build import FunnelStep, HostScore
from bus.contracts.stages import Stamps, durations

if TYPE_CHECKING:  # what a load needs is imported by who loads
    from berth.load import Failure, LoadReport

FAILURES_SHOWN = 12


def counted(number: int, what: str) -> str:
    """A number with its noun (which takes an s): "1 host", "2 hosts"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def printable(text: str) -> str:
    """Text from outside as one line of a terminal may have it.

    Line ends, control characters and those that turn the direction of writing are escaped (`\\n`, `\\u202e`): a name
    cannot forge a row, nor control the terminal.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """Lines of our own making with text from outside within: as `printable`, but the line ends stay."""
    return "\n".join(map(printable, text.split("\n")))


def render_rows(console: Console, headers: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
    """Aligned columns, each as wide as it needs: nothing is ever cut, so that a UUID can be copied or piped."""
    table = [[_cell(cell) for cell in row] for row in rows]
    titles = [Text(header, "bold") for header in headers]
    widths = [max(cell_len(row[at].plain) for row in [titles, *table]) for at in range(len(headers))]
    for row in [titles, *table]:
        line = Text("  ").join(_padded(cell, width) for cell, width in zip(row, widths, strict=True))
        line.rstrip()
        console.print(line, soft_wrap=True)


def _cell(cell: str | Text) -> Text:
    if isinstance(cell, str):
        return Text(printable(cell))
    return cell if cell.plain.isprintable() else Text(printable(cell.plain), cell.style)


def _padded(cell: Text, width: int) -> Text:
    return Text.assemble(cell, " " * (width - cell_len(cell.plain)))


def failures_in_words(failed: int, planned: int) -> str:
    """How many builds failed, and how many of them as planned."""
    if not planned:
        return f"{failed} failed"
    return f"{failed} failed as planned" if failed == planned else f"{failed} failed, {planned} of them as planned"


def render_load(report: LoadReport, console: Console, *, planned_failures: int = 0) -> None:
    """The load's summary. planned_failures: how many of them failed as planned."""
    console.print(
        f"[bold]{report.active}[/bold] of {report.requests} active in {report.seconds:.2f} s: "
        f"[bold]{report.boots_per_s:.0f} boots a second[/bold]"
        + (f", {failures_in_words(report.failed, planned_failures)}" if report.failed else "")
        + (f", {report.refused} refused" if report.refused else "")
        + (f", [red]{report.unfinished} not ended[/red]" if report.unfinished else ""),
        soft_wrap=True,
    )
    console.print(f"alternates used: {report.alternates_used}, active after attempt: {_counts(report.attempts)}")
    render_rows(
        console,
        ["milliseconds until the client's event", *(f"{name:>6}" for name in _PERCENTILES)],
        [
            [stage, *(f"{figures[name]:6.0f}" if name in figures else "" for name in _PERCENTILES)]
            for stage, figures in report.stages_ms.items()
        ],
    )
    render_failures(report.failures, console)


_PERCENTILES = ("p50", "p90", "p95", "p99", "max")


def render_failures(failures: Sequence[Failure], console: Console) -> None:
    """Failures, like ones together: each reason once with its funnel, and how many share it."""
    groups: dict[tuple[str, str, str], list[Failure]] = {}
    for failure in failures:
        # A funnel's sentence is the same for all alike; where hosts were tried, each build has its own.
        reason = failure.reason if failure.funnel else ""
        groups.setdefault((failure.flavor, failure.code, reason), []).append(failure)
    for (flavor, code, _), alike in list(groups.items())[:FAILURES_SHOWN]:
        first = alike[0]
        example = "" if first.funnel or len(alike) == 1 else "for example "
        line = Text.assemble(
            (f"{len(alike)} x ", "red"),
            printable(f"{flavor} {code}: {example}{first.reason}"),
            (f" ({first.instance_uuid}{', ...' if len(alike) > 1 else ''})", "dim"),
        )
        console.print(line, soft_wrap=True)
        render_funnel(first.funnel, console, indent=6)
    if len(groups) > FAILURES_SHOWN:
        console.print(f"... and {len(groups) - FAILURES_SHOWN} other kinds of failure")


def render_funnel(funnel: Sequence[FunnelStep], console: Console, *, indent: int = 2) -> None:
    """How many hosts each step of a search left, and why it rejected the rest, the most frequent reason first."""
    for step in funnel:
        rejected = ", ".join(
            f"{count} {why}" for why, count in sorted(step.rejected.items(), key=lambda item: -item[1])
        )
        line = f"{' ' * indent}{step.step:36} {step.remaining:6} left{'   rejected: ' + rejected if rejected else ''}"
        console.print(Text(printable(line)), soft_wrap=True)


def render_scores(scores: Sequence[Sequence[HostScore]], console: Console) -> None:
    """Why a host was chosen: what it and its alternates weighed, by weigher, and in all."""
    for hosts in scores:
        names = list(dict.fromkeys(name for host in hosts for name in host.weights))
        rows = [
            [f"  {host.host}", f"{sum(host.weights.values()):.3f}", *(f"{host.weights.get(n, 0.0):.3f}" for n in names)]
            for host in hosts
        ]
        render_rows(console, ["  chosen, then alternates", "score", *names], rows)


def render_stages(stamps: Sequence[Stamps], console: Console) -> None:
    """How long each stage of each build took; who looks from outside adds the way of the last event to himself."""
    for one in stamps:
        spent = [f"{stage} {1000 * seconds:.1f} ms" for stage, seconds in durations(one).items()]
        console.print(Text(f"stages: {', '.join(spent)}"), soft_wrap=True)


def render_verdicts(verdicts: Sequence[InvariantVerdict], console: Console) -> None:
    """The invariants, one line each, breaches below."""
    for verdict in verdicts:
        mark = "[green]holds [/green]" if verdict.holds else "[red]BROKEN[/red]"
        console.print(f"{mark} {escape(verdict.sentence)} [dim]({verdict.checked} looked at)[/dim]", soft_wrap=True)
        for example in verdict.examples:
            console.print(f"       [red]{escape(printable(example))}[/red]", soft_wrap=True)
        if verdict.breaches > len(verdict.examples):
            console.print(f"       [red]... {verdict.breaches} in all[/red]")
        for missing in verdict.not_judged:
            console.print(f"       [yellow]not judged: {escape(printable(missing))}[/yellow]", soft_wrap=True)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items()) or "none"
