"""`scripts/simulate`: run seeds, replay one with a trace, or run fresh ones for a while."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import msgspec
import structlog
import typer

from lab.simulation.draw import plan_of
from lab.simulation.event_log import EventLog
from lab.simulation.pairs import Pair
from lab.simulation.plan import Plan
from lab.simulation.run import Result, run, simulate
from lab.simulation.shrink import MAX_RUNS, Shrinker
from lab.simulation.steering import Steering
from lab.simulation.widening import WIDENED, Widening

ROOT = Path(__file__).parents[2]
LIMIT_S = 3600.0  # so long may another interpreter take


def digests(first: int, count: int, kinds: Collection[Widening] = WIDENED) -> dict[int, str]:
    """Of so many seeds from this one on, in this process."""
    return {seed: simulate(seed, kinds).digest for seed in range(first, first + count)}


def digests_of(python: str, first: int, count: int) -> dict[int, str]:
    """The same in a process of another interpreter, under a hash seed of its own."""
    requested = [python, "-m", "lab.simulation", "--digests", "--first-seed", str(first), "--seeds", str(count)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(random.randrange(2**32))}
    output = subprocess.run(
        requested, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=LIMIT_S
    ).stdout
    return {int(seed): digest for seed, digest in (line.split() for line in output.splitlines())}


def differing(here: Mapping[int, str], there: Mapping[int, str]) -> list[int]:
    """The seeds whose runs are not the same."""
    return sorted(seed for seed in here.keys() | there.keys() if here.get(seed) != there.get(seed))


def compare(pythons: Sequence[str], first: int, here: Mapping[int, str]) -> dict[str, list[int]]:
    """{interpreter: seeds that run otherwise there than here}. here: the digests of the seeds from `first` on."""
    return {python: differing(here, digests_of(python, first, len(here))) for python in pythons}


UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
# The lines that are printed for every breach.
ALWAYS = (
    "fault",
    "kill",
    "start",
    "stop",
    "cut",
    "store",
    "forgot",
    "order",
    "calm",
    "breach",
    "rest",
    "unseen",
    "restored",
)
MAX_TRACE_LINES = 400
MAX_ENDLESS_RUNS = 20  # to make a plan smaller of which each failing run takes its limit of CPU time


def main(
    *,
    first_seed: Annotated[int, typer.Option(help="The first of the seeds to run.")] = 1,
    seeds: Annotated[int, typer.Option(help="How many seeds, one after the other.")] = 100,
    seed: Annotated[int | None, typer.Option(help="Only this seed; with --trace, every event of it.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Fresh seeds for so long.")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Print what happened, from the first fault on.")] = False,
    shrink: Annotated[bool, typer.Option("--shrink/--no-shrink", help="Make failing seeds smaller.")] = True,
    report: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    only_digests: Annotated[bool, typer.Option("--digests", help="Print each seed's digest and nothing else.")] = False,
    only: Annotated[list[Widening] | None, typer.Option(help="Of what others do, this kind; may be repeated.")] = None,
    without: Annotated[list[Widening] | None, typer.Option(help="Of what others do, not this kind.")] = None,
    alone: Annotated[bool, typer.Option("--alone", help="berth alone in its world: nothing that others do.")] = False,
    steered: Annotated[int, typer.Option(help="After each seed, so many runs steered to what none has seen.")] = 0,
    plan: Annotated[Path | None, typer.Option(help="Only the plan of this file, which a failed run has left.")] = None,
    others: Annotated[
        list[str] | None, typer.Option("--compare-with", help="Another Python: it has to run the seeds just so.")
    ] = None,
) -> None:
    """Simulate the whole system on a virtual clock. The same seed gives the same run, event for event."""
    redirect_logs()
    kinds = frozenset() if alone else frozenset(only or WIDENED) - frozenset(without or ())
    if only_digests:
        for one, digest in digests(first_seed, seeds, kinds).items():
            typer.echo(f"{one} {digest}")
        return
    if others:
        _compare(others, first_seed, seeds)
        return
    if seed is not None or plan is not None:
        replayed = read_plan(plan) if plan is not None else plan_of(seed or 0, kinds)
        results = [replay(replayed, trace=trace, smaller=shrink)]
    else:
        results = _all_of(_seeds(first_seed, seeds, minutes), Steering(first_seed, kinds), steered, shrink=shrink)
    figures = summary(results)
    if report is not None:
        report.write_text(json.dumps(figures, indent=2) + "\n")
    typer.echo(
        f"{figures['seeds']} seeds, {figures['requests']} requests, {figures['virtual_s']:.0f} virtual seconds: "
        f"{len(figures['pairs'])} pairs of state and event, {len(figures['failed'])} failed {figures['failed'] or ''}"
    )
    if figures["failed"]:
        raise typer.Exit(1)


def _all_of(seeds: Iterator[int], steering: Steering, rounds: int, *, shrink: bool) -> list[Result]:
    """The seeds' results, and those of the rounds that are steered after each; what failed is printed."""
    results = []
    for plan, result in chain.from_iterable(steering.runs(seed, rounds) for seed in seeds):
        results.append(result)
        if result.breach:
            _print_result(result)
            if rounds:
                typer.echo(f"  its plan: {written(plan)}")
            if shrink:
                _print_smaller(plan, result)
    return results


def _compare(others: list[str], first: int, count: int) -> None:
    found = compare(others, first, digests(first, count))
    for python, seeds in found.items():
        typer.echo(f"{python}: {count - len(seeds)} of {count} seeds run just so{f'; not {seeds}' if seeds else ''}")
    if any(found.values()):
        raise typer.Exit(1)


def redirect_logs(event_log: EventLog | None = None) -> None:
    """Workers' logs go into the trace, or nowhere."""
    logging.disable(logging.CRITICAL)
    level = logging.CRITICAL if event_log is None else logging.INFO

    def keep(_logger: Any, method: str, event: Any) -> Any:
        assert event_log is not None
        from lab.simulation.loop import PROCESS  # noqa: PLC0415  (only a trace needs the acting process)

        process = PROCESS.get()
        words = " ".join(f"{key}={value}" for key, value in event.items() if key != "event")
        event_log.log(process.name if process else "", f"{method}: {event.get('event')} {words}"[:600])
        raise structlog.DropEvent

    processors = [] if event_log is None else [keep]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=False,
    )


def written(plan: Plan) -> Path:
    """The plan in a file, for --plan."""
    handle, name = tempfile.mkstemp(prefix=f"berth-plan-{plan.seed}-", suffix=".json")
    with open(handle, "wb") as file:
        file.write(msgspec.json.encode(plan))
    return Path(name)


def read_plan(path: Path) -> Plan:
    """The plan in a file that `written` has made."""
    return msgspec.json.decode(path.read_bytes(), type=Plan)


def replay(plan: Plan, *, trace: bool, smaller: bool) -> Result:
    """One plan, with its trace if it is wanted; a failing one is reported as small as it gets."""
    result = run(plan)
    if result.breach and smaller:
        plan = _print_smaller(plan, result)
    if trace:
        event_log = EventLog(keep=True)
        redirect_logs(event_log)
        result = run(plan, event_log=event_log)
        redirect_logs()
        for line in readable(result):
            typer.echo(line)
    _print_result(result)
    return result


def readable(result: Result) -> Iterator[str]:
    """The trace from the first fault to the breach: every fault, and whatever concerns who the breach names."""
    about = frozenset(UUID.findall(result.detail))
    lines = list(result.lines)
    first = next((at for at, line in enumerate(lines) if line.split(maxsplit=2)[1] in ("fault", "kill", "store")), 0)
    picked = [
        line
        for at, line in enumerate(lines)
        if at >= first and (line.split(maxsplit=2)[1] in ALWAYS or any(uuid in line for uuid in about))
    ]
    yield from picked[-MAX_TRACE_LINES:]


def summary(results: list[Result]) -> dict[str, Any]:
    """The figures of many runs."""
    counts: Counter[str] = Counter()
    states: Counter[str] = Counter()
    pairs: Counter[Pair] = Counter()
    for result in results:
        counts.update(result.counts)
        pairs.update(result.seen.pairs)
        states.update(result.states)
    return {
        "seeds": len(results),
        "failed": [result.seed for result in results if result.breach],
        "breaches": {result.seed: f"{result.breach}: {result.detail}" for result in results if result.breach},
        "requests": sum(result.requests for result in results),
        "virtual_s": round(sum(result.virtual_s for result in results), 1),
        "longest_rest_s": max((result.rest_s for result in results), default=0.0),
        "events": dict(sorted(counts.items())),
        "states": dict(sorted(states.items())),
        "pairs": {f"{state}: {event}": count for (state, event), count in sorted(pairs.items())},
    }


def _seeds(first: int, count: int, minutes: float | None) -> Iterator[int]:
    if minutes is None:
        yield from range(first, first + count)
        return
    until = time.monotonic() + minutes * 60
    fresh = int(time.time()) * 1000
    while time.monotonic() < until:
        yield fresh
        fresh += 1


def _print_smaller(plan: Plan, result: Result) -> Plan:
    runs = MAX_ENDLESS_RUNS if result.breach == "endless_turn" else MAX_RUNS
    smaller = Shrinker(lambda one: run(one).breach == result.breach, max_runs=runs).shrink(plan)
    typer.echo(f"  among others: {' '.join(smaller.widenings) or 'alone'}")
    words = f"{len(smaller.fault_events)} of {len(plan.fault_events)} faults, "
    words += f"{len(smaller.orders)} of {len(plan.orders)} orders, "
    words += f"{smaller.load_s:.1f} of {plan.load_s:.1f} virtual seconds of load"
    typer.echo(f"  still {result.breach} with {words}; rates {smaller.rates}; computes {smaller.computes}")
    for part in (*smaller.fault_events, *smaller.orders):
        typer.echo(f"    {part}")
    return smaller


def _print_result(result: Result) -> None:
    ending = f"{result.breach}: {result.detail[:600]}" if result.breach else "all invariants hold"
    among = f" [{' '.join(result.widenings)}]" if result.widenings else ""
    typer.echo(f"seed {result.seed}{among}: {ending} (at {result.virtual_s:.1f} s, digest {result.digest})")


if __name__ == "__main__":
    typer.run(main)
