"""Progress of a load for a person: one block that refreshes on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.live import Live
from rich.text import Text

from berth.text import printable
from lab.load.record import LoadRecord
from lab.load.run import LoadRun
from lab.load.sampler import Sample

PLAIN_EVERY_S = 5.0
QUEUES_SHOWN = 6


class LiveView:
    """Shows a run's newest sample. `show` after each sample, `close` at the end."""

    def __init__(self, run: LoadRun, console: Console) -> None:
        self._run = run
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._next_line_s = PLAIN_EVERY_S
        self._latency = "p50 -, p95 -, p99 -"

    def close(self) -> None:
        """Take the block away."""
        if self._live is not None:
            self._live.stop()

    def show(self, sample: Sample) -> None:
        """Draw the block, or print the line when it is time."""
        if sample.p50_ms is not None:
            self._latency = f"p50 {sample.p50_ms:.0f}, p95 {sample.p95_ms:.0f}, p99 {sample.p99_ms:.0f}"
        if self._live is not None:
            self._live.start()
            self._live.update(Text("\n".join(map(printable, self.block(sample)))), refresh=True)
        elif sample.at_s >= self._next_line_s:
            self._next_line_s = sample.at_s + PLAIN_EVERY_S
            self._console.print(printable(" | ".join(self.line(sample))), soft_wrap=True, markup=False)

    def line(self, sample: Sample) -> list[str]:
        """The figures, each a few words."""
        boots, counts = self._run.boots, self._run.boots.counts
        failed = counts["failed"] + counts["refused"]
        return [
            f"{sample.at_s:.0f} s",
            f"{len(boots)} of {self._run.plan.boots} offered, {counts['active']} active, {failed} failed",
            f"rate {sample.offered_per_s:.0f} offered, {sample.ended_per_s:.0f} ended a second",
            f"in flight {sample.in_flight}",
            f"ms {self._latency}",
            f"conflicts {'-' if sample.conflicts is None else sample.conflicts}, retries {sample.retries}, "
            f"refused by a full queue {sample.backpressure}",
        ]

    def block(self, sample: Sample) -> list[str]:
        """The figures and the queues, a line each."""
        deepest = sorted(sample.depths.items(), key=lambda item: (-item[1], item[0]))[:QUEUES_SHOWN]
        queues = "  ".join(f"{name} {depth}" for name, depth in deepest) or "not seen"
        deletes = self._run.deletes
        gone = f"deletes: {deletes.counts['deleted']} of {len(deletes)}" if len(deletes) else ""
        return [*self.line(sample), f"queues: {queues}", *([gone] if gone else [])]


def render_record(record: LoadRecord, console: Console) -> None:
    """How a run ended, nothing left out."""
    totals = record.totals
    counts = ", ".join(f"{count} {_WORDS.get(name, name)}" for name, count in totals.outcomes.items()) or "none"
    if totals.interrupted:
        console.print(f"interrupted: {totals.boots} of {record.settings.boots} boots were offered", soft_wrap=True)
    console.print(
        f"{totals.boots} boots, {totals.accepted} accepted: {counts}; {totals.seconds:.2f} s, "
        f"{totals.boots_per_s:.0f} active a second",
        soft_wrap=True,
    )
    if totals.by_code:
        console.print(
            printable("  why: " + ", ".join(f"{count} {code}" for code, count in totals.by_code.items())),
            soft_wrap=True,
            markup=False,
        )
    if totals.backpressure:
        console.print(f"  the queue was full and refused a message {totals.backpressure} times", soft_wrap=True)
    if totals.deletes:
        ends = ", ".join(f"{count} {_WORDS.get(name, name)}" for name, count in totals.delete_outcomes.items())
        console.print(f"{totals.deletes} deletes: {ends}", soft_wrap=True)
    rows = [("active", totals.latency_ms), ("deleted", totals.delete_ms)]
    for name, ranks in [*rows, *((f"  {stage}", ranks) for stage, ranks in totals.stages_ms.items())]:
        if ranks:
            figures = "  ".join(f"{rank} {value:.1f}" for rank, value in ranks.items())
            console.print(f"{name:12} ms: {figures}", soft_wrap=True)
    if len(totals.attempts) > 1:
        tries = ", ".join(f"{n}: {c}" for n, c in totals.attempts.items())
        console.print(f"active after attempt: {tries}", soft_wrap=True)
    if record.settings.mode == "ramp":
        console.print(_knee(totals.knee), soft_wrap=True)
    if totals.duplicates:
        console.print(f"[red]{totals.duplicates} ended twice[/red]")


_WORDS = {
    "refused": "refused by the scheduler",
    "backpressure": "refused by backpressure",
    "unsent": "never confirmed by the broker",
    "open": "still under way when interrupted",
    "late": "still under way at the bound",
    "lost": "LOST (no end was received)",
}


def _knee(knee: dict[str, float]) -> str:
    if not knee:
        return "knee: unknown, nothing ended early enough"
    most = f"at most {knee['highest_ended_per_s']:.0f} ended a second, calm p50 {knee['calm_p50_ms']:.1f} ms"
    if "rate_per_s" not in knee:
        return f"knee: not reached; {most}"
    return f"knee: past {knee['rate_per_s']:.0f} a second the median rises to {knee['p50_ms']:.1f} ms; {most}"
