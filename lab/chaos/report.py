"""The result of a chaos run: as data, and as tables that a person reads."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from msgspec import Struct
from rich.console import Console
from rich.markup import escape

from berth.audit.invariants import Facts, InvariantResult
from berth.text import render_results, render_rows
from lab.chaos.churn import Ended
from lab.chaos.faults import Death, Injected

# Which invariant says it.
COUNTED_BY = {
    "lost": "one_terminal_state",
    "doubled": "built_once",
    "leaked": "hosts_instances_allocations_agree",
    "overcommitted": "capacity",
}


def breaches(results: Sequence[InvariantResult]) -> dict[str, int]:
    """How many breaches of these invariants there are. Raises KeyError: one of them was not judged."""
    found = {result.name: result.breaches for result in results}
    return {word: found[name] for word, name in COUNTED_BY.items()}


def lost_actions(facts: Facts, requested: Sequence[str]) -> tuple[str, ...]:
    """Accepted requests about instances that are not on record, or have not ended."""
    ended = {one.request_id for one in facts.actions or () if one.terminal}
    return tuple(sorted(set(requested) - ended))


def doubled_actions(ends: Mapping[str, Collection[tuple[str, str]]]) -> tuple[str, ...]:
    """Requests of which two different ends were published. ends: {request: its ends, as (state, code)}."""
    return tuple(sorted(request for request, different in ends.items() if len(different) > 1))


class Stall(Struct, frozen=True):
    """The longest time in which nothing ended, and the faults of that time."""

    seconds: float
    faults: tuple[str, ...]


def longest_stall(ended: Sequence[Ended], faults: Sequence[Injected]) -> Stall:
    """The longest gap between two ends while the load ran."""
    times = sorted(end.ended_at for end in ended)
    gaps = [(late - early, early, late) for early, late in pairwise(times)]
    if not gaps:
        return Stall(0.0, ())
    seconds, early, late = max(gaps)
    responsible = [f for f in faults if f.began_at < late and (f.over_at is None or f.over_at > early - 1.0)]
    return Stall(round(seconds, 3), tuple(sorted({fault.fault.label for fault in responsible})))


def recoveries(ended: Sequence[Ended], faults: Sequence[Injected]) -> dict[str, list[float]]:
    """Seconds from the end of each fault until the first build or delete requested after it had ended, by sort.

    Other faults go on meanwhile; so this is how soon the system works again, not how soon it would alone.
    """
    by_request_time = sorted(ended, key=lambda end: end.requested_at)
    requested = [end.requested_at for end in by_request_time]
    soonest: list[float] = [float("inf")]
    for end in reversed(by_request_time):
        soonest.append(min(soonest[-1], end.ended_at))
    soonest.reverse()  # soonest[n]: the first end among those requested n-th or later
    found: dict[str, list[float]] = defaultdict(list)
    for fault in faults:
        if fault.over_at is not None and (at := bisect_left(requested, fault.over_at)) < len(requested):
            found[fault.fault.label].append(round(soonest[at] - fault.over_at, 3))
    return dict(found)


def counts(faults: Sequence[Injected]) -> Mapping[str, int]:
    """How many faults of each sort, by name."""
    return dict(sorted(Counter(fault.fault.label for fault in faults).items()))


DEATHS_SHOWN = 10


class ChaosReport(Struct, frozen=True, kw_only=True):
    """Figures of one run. Times in seconds.

    lost, doubled: breaches of the invariants of `COUNTED_BY`, and actions; leaked, overcommitted: breaches alone.
    requests: builds that the broker confirmed. wanted: as many as there should be; stopped: why there are fewer,
    after which the run cannot be sound: it has not shown its purpose. active ... deleted: how they stood at the
    end, by the schedulers' record. recovery_s: from the end of the last fault until everything was at rest.
    recovery_by_kind: from the end of each fault until a build or delete requested after it had ended (median, longest).
    longest_stall: the longest time in which no build and no delete ended. died: workers that ended by themselves and
    were started again. actions: requests about active instances that the broker confirmed; actions_by_result: how they
    ended; lost and doubled count these, too. drains: hosts that were emptied and taken back; drained: instances
    moved by them.
    """

    seed: int
    seconds: float
    requests: int
    wanted: int
    stopped: str
    deletes: int
    active: int
    failed: int
    refused: int
    deleted: int
    failures_by_code: Mapping[str, int]
    failure_reasons: Mapping[str, str]
    events: int
    events_repeated: int
    lost: int
    doubled: int
    leaked: int
    overcommitted: int
    faults: Mapping[str, int]
    faults_total: int
    connections_cut: int
    died: tuple[Death, ...]
    ends_per_s: float
    longest_stall: Stall
    recovery_s: float
    recovery_by_kind: Mapping[str, tuple[float, float]]
    at_rest: bool
    dead_letters: Mapping[str, int]
    verdicts: tuple[InvariantResult, ...]
    examples: Mapping[str, tuple[str, ...]]
    actions: int = 0
    actions_wanted: int = 0
    actions_by_result: Mapping[str, int] = {}
    gangs: int = 0
    drains: int = 0
    drained: int = 0
    drains_by_code: Mapping[str, int] = {}

    @property
    def sound(self) -> bool:
        """Nothing lost, doubled, leaked or overcommitted by any of the faults, of which there are some; at rest; every
        invariant holds; no worker found a bug.
        """
        nothing = not (self.lost or self.doubled or self.leaked or self.overcommitted)
        whole = self.requests == self.wanted and self.actions >= self.actions_wanted and self.faults_total > 0
        return nothing and whole and self.at_rest and all(result.holds for result in self.verdicts) and not self.bugs

    @property
    def bugs(self) -> tuple[Death, ...]:
        """Deaths that no outage explains: a broken invariant, an unexpected error, wrong settings.

        A worker that could not set itself up for a minute because the bus was unavailable gives up and logs it.
        """
        return tuple(
            death
            for death in self.died
            if death.status in BUGS and not any(code in death.last_log_line for code in OUTAGES)
        )


# Exit statuses of bus.service.main: a fault, wrong settings, a broken invariant.
BUGS = (1, 2, 70)
OUTAGES = ('"code":"bus.unavailable"', '"code":"database.unavailable"')


def render(report: ChaosReport, console: Console) -> None:
    """The whole report."""
    _render_faults(report, console)
    _render_requests(report, console)
    rest = f"{report.recovery_s:.1f} s after the last fault" if report.at_rest else "[red]never[/red]"
    console.print(f"everything at rest: {rest}")
    console.rule("what must not be")
    render_rows(
        console,
        list(COUNTED_BY),
        [[str(n) for n in (report.lost, report.doubled, report.leaked, report.overcommitted)]],
    )
    for name, uuids in report.examples.items():
        if uuids:
            console.print(f"[red]{name}: {', '.join(uuids)}[/red]", soft_wrap=True)
    render_results(report.verdicts, console)


def _render_faults(report: ChaosReport, console: Console) -> None:
    console.rule("faults")
    render_rows(
        console,
        ["fault", "times", "works again after: median", "longest"],
        [[name.replace("_", " "), str(count), *_recovery(report, name)] for name, count in report.faults.items()],
    )
    console.print(
        f"{report.faults_total} faults in {report.seconds:.0f} s; {report.connections_cut} connections cut; "
        f"{len(report.died)} workers ended by themselves and were started again",
        soft_wrap=True,
    )
    for death in report.died[:DEATHS_SHOWN]:
        console.print(f"  {death.worker} ended with {death.status}: {escape(death.last_log_line)}", soft_wrap=True)


def _render_requests(report: ChaosReport, console: Console) -> None:
    console.rule("requests")
    render_rows(
        console,
        ["accepted", "active", "deleted", "failed", "refused", "deletes requested"],
        [[str(n) for n in (
            report.requests, report.active, report.deleted, report.failed, report.refused, report.deletes
        )]],
    )  # fmt: skip
    if report.requests != report.wanted:
        why = report.stopped or "unknown why"
        console.print(f"[red]only {report.requests} of {report.wanted} builds were requested: {why}[/red]")
    console.print(f"failures: {_words(report.failures_by_code)}; left in queues: {_words(report.dead_letters)}")
    for code, reason in report.failure_reasons.items():
        console.print(f"  {code}, for example: {escape(reason)}", soft_wrap=True)
    if report.actions_wanted or report.drains or report.gangs:
        console.print(
            f"{report.actions} of {report.actions_wanted} actions: {_words(report.actions_by_result)}; "
            f"{report.gangs} gangs; {report.drains} drains, {report.drained} instances moved by them; "
            f"not answered or refused: {_words(report.drains_by_code)}",
            soft_wrap=True,
        )
    console.print(
        f"{report.ends_per_s:.0f} builds and deletes ended a second; {report.events} events received,  "
        f"{report.events_repeated} of them again"
    )
    console.print(
        f"longest stall: {report.longest_stall.seconds:.1f} s ({', '.join(report.longest_stall.faults) or 'no fault'})",
        soft_wrap=True,
    )


def _recovery(report: ChaosReport, name: str) -> list[str]:
    return [f"{seconds:8.2f} s" for seconds in report.recovery_by_kind.get(name, ())] or ["", ""]


def _words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"
