"""The Placement REST API of berth beside the real OpenStack Placement, on this computer, in one run.

    python -m lab.benchmarks.rest_beside [--providers 1000,10000] [--only berth|real] [--seconds 8] [--json FILE]

Both have a private PostgreSQL 15 of the same kind and settings, fsync on, and the same book. The real one: uwsgi, 2
processes x 4 threads, noauth2, request log off.
berth: one placement worker, which also announces every change on a private RabbitMQ. One phase after the other, each
on one system while the others are idle; a phase ends by time. CPU is from /proc, milliseconds a piece of work.

--phases: only rows whose key begins so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct

from berth.config.ports import ServerFailed
from berth.up.embedded.postgres import Postgres
from berth.up.embedded.process import ServerMissing
from berth.up.embedded.rabbitmq import RabbitMQ
from lab.benchmarks import rest_books, rest_report
from lab.benchmarks.command import measured, parser_of, write
from lab.benchmarks.rest_books import Host
from lab.benchmarks.rest_client import Bound, load
from lab.benchmarks.rest_phases import FLAT, NESTED, Phase, TestBed, holds
from lab.benchmarks.rest_report import Figures, Row
from lab.benchmarks.rest_servers import Real, System, berth, install

NESTED_ROOTS = 1000
WARM_S = 5.0
MOST_PROVIDERS = 50_000
SEED = 1
IDLE_LOOKS, IDLE_CPU = 60, 0.1
RUN_TIMEOUT_S = 1140.0  # on a machine that is too slow for all of it the rest is left out


class Run(Struct, kw_only=True):
    """The options, and the findings."""

    seconds: float
    sizes: list[int]
    phases: tuple[str, ...]
    directory: Path
    real: Postgres | None  # None: not measured
    berth: Postgres | None
    broker: RabbitMQ | None
    programs: Path | None
    rows: list[Row] = []
    wrong: list[str] = []

    def wants(self, phase: Phase) -> bool:
        """Whether this row is asked for."""
        return not self.phases or phase.key.startswith(self.phases)


async def measure(run: Run, phase: Phase, system: System, bed: TestBed) -> Figures:
    """One phase on one system."""
    work = phase.make(bed)
    connections = system.connections(phase.clients)
    if phase.warm:
        warmed = await load(connections, work, Bound(WARM_S, phase.warm, least=0), phase.fine)
        bed.unsure |= warmed.unsure
    before, own = system.cpu_s(), time.process_time()
    outcome = await load(connections, work, phase.bound(run.seconds), phase.fine)
    own = time.process_time() - own
    used = {part: after - before[part] for part, after in system.cpu_s().items()}
    for connection in connections:
        connection.close()
    bed.unsure |= outcome.unsure
    count = max(1, outcome.done)
    if outcome.unsure:
        await idle(system)
    parts = {**used, "client": own}
    return Figures(outcome=outcome, cpu_ms={part: 1000 * seconds / count for part, seconds in parts.items()})


async def idle(system: System) -> None:
    """Wait until a system no longer works at what no request waits for, so that the next one has the machine."""
    before = sum(system.cpu_s().values())
    for _ in range(IDLE_LOOKS):
        await asyncio.sleep(1.0)
        now = sum(system.cpu_s().values())
        if now - before < IDLE_CPU:
            return
        before = now


async def in_turn(run: Run, phases: Sequence[Phase], systems: Sequence[System], hosts: Sequence[Host]) -> None:
    """Every phase, on one system after the other."""
    beds = {system.name: TestBed(hosts=hosts, rng=random.Random(SEED)) for system in systems}
    for phase in phases:
        if not run.wants(phase):
            continue
        found = {system.name: await measure(run, phase, system, beds[system.name]) for system in systems}
        run.rows.append(rest_report.row_of(phase, len(hosts), found))
        print(rest_report.line(run.rows[-1]), flush=True)  # a run that is broken off has printed something
        for name, figures in found.items():
            if not figures.outcome.done:
                _wrong(run, f"{name} did nothing of {phase.key}")
    for system in systems:
        if wrong := await holds(system.connections(1)[0], beds[system.name]):
            _wrong(run, f"{system.name}: {wrong}")


def _wrong(run: Run, what: str) -> None:
    run.wrong.append(what)
    print(f"WRONG: {what}", flush=True)


async def everything(run: Run) -> None:
    """All books, one after the other."""
    books = [(f"flat{size}", FLAT, partial(rest_books.flat, size)) for size in run.sizes]
    books.append(("nested", NESTED, partial(rest_books.nested, NESTED_ROOTS)))
    async with asyncio.timeout(RUN_TIMEOUT_S):
        for book, phases, make in books:
            if not any(map(run.wants, phases)):
                continue
            hosts = make()
            async with contextlib.AsyncExitStack() as stack:
                systems: list[System] = []
                if run.real is not None and run.programs is not None:
                    real = await Real.make(run.programs, run.directory / f"real-{book}", run.real, book, hosts)
                    systems.append(await stack.enter_async_context(real.serve()))
                if run.berth is not None and run.broker is not None:
                    ours = berth(run.directory / f"berth-{book}", run.berth, run.broker, book, hosts)
                    systems.append(await stack.enter_async_context(ours))
                await in_turn(run, phases, systems, hosts)


def sizes(text: str) -> list[int]:
    """`1000,10000` as numbers. Raises argparse.ArgumentTypeError."""
    found = [int(size) if size.isdecimal() else 0 for size in text.split(",")]
    if not all(rest_books.BIG_HOSTS < size <= MOST_PROVIDERS for size in found):
        raise argparse.ArgumentTypeError(f"sizes from {rest_books.BIG_HOSTS + 1} to {MOST_PROVIDERS}: {text!r}")
    return found


def options_of() -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--providers", type=sizes, default="1000,10000", help="sizes of the flat book, comma between")
    parser.add_argument("--only", choices=("berth", "real"))
    parser.add_argument("--seconds", type=float, default=8.0, help="of a phase")
    parser.add_argument("--phases", default="", help="only rows whose key begins with one of these, comma between")
    return parser.parse_args()


def main() -> int:
    """Start what is asked for, measure, stop everything, print the table."""
    options = options_of()
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # leave in good order
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        try:
            real, ours = options.only != "berth", options.only != "real"
            programs = install() if real else None
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="berth-beside-")))
            run = Run(
                seconds=options.seconds,
                sizes=options.providers,
                phases=tuple(filter(None, options.phases.split(","))),
                directory=directory,
                real=stack.enter_context(Postgres(durable=True)) if real else None,
                berth=stack.enter_context(Postgres(durable=True)) if ours else None,
                broker=stack.enter_context(RabbitMQ()) if ours else None,
                programs=programs,
            )
            print(rest_report.head())
            measured(everything(run))
        except (ServerFailed, ServerMissing) as error:
            print(error, file=sys.stderr)
            return 2
        except TimeoutError:
            print(f"WRONG: not done after {RUN_TIMEOUT_S:g} s; the rest is left out", file=sys.stderr)
            return 2
        finally:
            if "run" in locals():
                write(run.rows, options.json)
    print(f"{time.monotonic() - began:.0f} s in all")
    return 1 if run.wrong or not run.rows else 0


if __name__ == "__main__":
    sys.exit(main())
