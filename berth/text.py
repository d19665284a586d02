"""Text for a person: tables, funnels, weights, times, invariants; what came from outside is made printable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from bus.contracts.build import FunnelStep, HostScore
from bus.contracts.stages import StageTimes, durations

if TYPE_CHECKING:
    from berth.audit.invariants import InvariantResult


def counted(number: int, what: str) -> str:
    """A number with its noun (which takes an s): "1 host", "2 hosts"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def utc(at: float | None) -> str:
    """A time as day and time of day; of none nothing."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S") if at else ""


def age(seconds: float) -> str:
    """How long ago, in its largest unit: 12 s, 3 min, 5 h, 9 d."""
    whole = max(0, int(seconds))
    for unit, length, most in (("s", 1, 120), ("min", 60, 7_200), ("h", 3_600, 172_800)):
        if whole < most:
            return f"{whole // length} {unit}"
    return f"{whole // 86_400} d"


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


def render_stages(stage_times: Sequence[StageTimes], console: Console) -> None:
    """How long each stage of each build took; who looks from outside adds the way of the last event to himself."""
    for one in stage_times:
        spent = [f"{stage} {1000 * seconds:.1f} ms" for stage, seconds in durations(one).items()]
        console.print(Text(f"stages: {', '.join(spent)}"), soft_wrap=True)


def render_results(results: Sequence[InvariantResult], console: Console) -> None:
    """The invariants, one line each, breaches below."""
    for result in results:
        mark = "[green]holds [/green]" if result.holds else "[red]BROKEN[/red]"
        console.print(f"{mark} {escape(result.message)} [dim]({result.checked} looked at)[/dim]", soft_wrap=True)
        for example in result.examples:
            console.print(f"       [red]{escape(printable(example))}[/red]", soft_wrap=True)
        if result.breaches > len(result.examples):
            console.print(f"       [red]... {result.breaches} in all[/red]")
        for missing in result.not_judged:
            console.print(f"       [yellow]not judged: {escape(printable(missing))}[/yellow]", soft_wrap=True)
