"""The Placement REST API of berth beside the real OpenStack Placement, on this machine, in one run.

    python -m lab.benchmarks.rest_beside [--providers 1000,10000] [--only berth|real] [--short] [--json FILE]
        [--venv DIR]

Both have a private PostgreSQL 15 of the same kind and settings, fsync on, and the same book. The real one: uwsgi, 2
processes x 4 threads, noauth2, request log off; and once more with its heap frozen for the garbage collector.
berth: one placement worker, which also announces every change on a private RabbitMQ. One phase after the other, each
on one system while the others are idle; a phase ends by time. CPU is from /proc, milliseconds a piece of work.

--phases: only rows whose key begins so. --profile: py-spy's stacks of berth's process in each phase, in this directory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import uvloop
from msgspec import Struct

from berth.trial.embedded.postgres import Postgres
from berth.trial.embedded.process import ServerFailed, ServerMissing
from berth.trial.embedded.rabbitmq import RabbitMQ
from bus.service.telemetry import configure_logging
from lab.benchmarks import probe, rest_books, rest_report
from lab.benchmarks.rest_books import Host
from lab.benchmarks.rest_client import Bound, load
from lab.benchmarks.rest_phases import FLAT, NESTED, Phase, TestBed, holds, like
from lab.benchmarks.rest_report import Figures, Row
from lab.benchmarks.rest_servers import Real, System, berth, install, new_postgres, statements

SECONDS, SHORT_SECONDS = 8.0, 2.0
NESTED_ROOTS = 1000
WARM_S = 5.0
LIKE = (1000, 10_000)
MOST_PROVIDERS = 50_000
SEED = 1
IDLE_LOOKS, IDLE_CPU = 60, 0.1
PROFILE_BEGINS_S = 1.0  # py-spy takes a while to attach
RUN_TIMEOUT_S = 1140.0  # on a machine that is too slow for all of it the rest is left out


class Run(Struct, kw_only=True):
    """The options, and the findings."""

    seconds: float
    sizes: list[int]
    phases: tuple[str, ...]
    profiles: Path | None
    directory: Path
    real: Postgres | None  # None: not measured
    berth: Postgres | None
    broker: RabbitMQ | None
    programs: Path | None
    statements: bool
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
    if run.profiles is not None and system.name == "berth":
        profile(system.pids["server"], run.profiles / f"{phase.key}-{len(bed.hosts)}.raw", run.seconds)
        await asyncio.sleep(PROFILE_BEGINS_S)
    counted = await statements(system.database) if run.statements else None
    before, own = system.cpu_s(), time.process_time()
    outcome = await load(connections, work, phase.bound(run.seconds), phase.fine)
    own = time.process_time() - own
    used = {part: after - before[part] for part, after in system.cpu_s().items()}
    for connection in connections:
        connection.close()
    bed.unsure |= outcome.unsure
    count = max(1, outcome.done)
    if counted is not None:
        rest_report.statements(counted, await statements(system.database), count)
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


def profile(pid: int, output: Path, seconds: float) -> None:
    """Let py-spy note what holds the interpreter (not what waits), as folded stacks. py-spy must be installed."""
    output.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else "py-spy"
    how = [
        "record",
        "--gil",
        "--nonblocking",
        "--rate",
        "200",
        "--format",
        "raw",
        "--duration",
        str(math.ceil(seconds)),
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.Popen([program, *how, "--pid", str(pid), "--output", str(output)], **quiet)  # type: ignore[call-overload]


async def in_turn(run: Run, phases: Sequence[Phase], systems: Sequence[System], hosts: Sequence[Host]) -> None:
    """Every phase, on one system after the other."""
    beds = {system.name: TestBed(hosts=hosts, rng=random.Random(SEED)) for system in systems}
    for phase in phases:
        if not run.wants(phase):
            continue
        found: dict[str, Figures] = {}
        for system in systems:
            if system.name != "frozen" or phase.frozen:
                found[system.name] = await measure(run, phase, system, beds[system.name])
        rest_report.add(run.rows, phase, len(hosts), found)
        for name, figures in found.items():
            if not figures.outcome.done:
                _wrong(run, f"{name} did nothing of {phase.key}")
    for system in systems:
        if system.name != "frozen" and (wrong := await holds(system.connections(1)[0], beds[system.name])):
            _wrong(run, f"{system.name}: {wrong}")


def _wrong(run: Run, what: str) -> None:
    run.wrong.append(what)
    print(f"WRONG: {what}", flush=True)


@contextlib.asynccontextmanager
async def serving(run: Run, book: str, hosts: Sequence[Host], *, frozen: bool) -> AsyncIterator[list[System]]:
    """The systems that are asked for, each with these hosts."""
    async with contextlib.AsyncExitStack() as stack:
        systems: list[System] = []
        if run.real is not None and run.programs is not None:
            real = await Real.make(run.programs, run.directory / f"real-{book}", run.real, book, hosts)
            systems.append(await stack.enter_async_context(real.serve()))
            if frozen:
                systems.append(await stack.enter_async_context(real.serve(frozen=True)))
        if run.berth is not None and run.broker is not None:
            ours = berth(run.directory / f"berth-{book}", run.berth, run.broker, book, hosts)
            systems.append(await stack.enter_async_context(ours))
        yield systems


async def like_children(run: Run) -> None:
    """The row that the real one may never end: its server is stopped before berth's turn."""
    hosts = rest_books.like_children()
    phases = [phase for phase in map(like, LIKE) if run.wants(phase)]
    found: dict[str, dict[str, Figures]] = {phase.key: {} for phase in phases}
    bed = TestBed(hosts=hosts, rng=random.Random(SEED))
    if run.real is not None and run.programs is not None and phases:
        real = await Real.make(run.programs, run.directory / "real-like", run.real, "like", hosts)
        for phase, most in zip(phases, LIKE, strict=False):
            async with real.serve(most=most) as system:
                found[phase.key]["real"] = await measure(run, phase, system, bed)
    if run.berth is not None and run.broker is not None and phases:
        async with berth(run.directory / "berth-like", run.berth, run.broker, "like", hosts) as system:
            for phase in phases:
                found[phase.key]["berth"] = await measure(run, phase, system, bed)
    for phase in phases:
        rest_report.add(run.rows, phase, len(hosts), found[phase.key])


async def everything(run: Run) -> None:
    """All books, one after the other."""
    async with asyncio.timeout(RUN_TIMEOUT_S):
        for postgres in filter(None, (run.real, run.berth) if run.statements else ()):
            await probe.count_statements(postgres.url("template1"))  # every new database is a copy of it
        for size in run.sizes:
            hosts = rest_books.flat(size)
            if any(map(run.wants, FLAT)):
                async with serving(run, f"flat{size}", hosts, frozen=True) as systems:
                    await in_turn(run, FLAT, systems, hosts)
        if any(map(run.wants, NESTED)):
            hosts = rest_books.nested(NESTED_ROOTS)
            async with serving(run, "nested", hosts, frozen=True) as systems:
                await in_turn(run, NESTED, systems, hosts)
        await like_children(run)


def sizes(text: str) -> list[int]:
    """`1000,10000` as numbers. Raises argparse.ArgumentTypeError."""
    found = [int(size) if size.isdecimal() else 0 for size in text.split(",")]
    if not all(rest_books.BIG_HOSTS < size <= MOST_PROVIDERS for size in found):
        raise argparse.ArgumentTypeError(f"sizes from {rest_books.BIG_HOSTS + 1} to {MOST_PROVIDERS}: {text!r}")
    return found


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--providers", type=sizes, default="1000,10000", help="sizes of the flat book, comma between")
    parser.add_argument("--only", choices=("berth", "real"))
    parser.add_argument("--short", action="store_true", help="2 seconds a phase instead of 8")
    parser.add_argument("--seconds", type=float, help="so many instead")
    parser.add_argument("--phases", default="", help="only rows whose key begins with one of these, comma between")
    parser.add_argument("--json", type=Path, help="write everything here, too")
    parser.add_argument("--venv", type=Path, help="has openstack-placement, uwsgi, psycopg2; else made in .berth")
    parser.add_argument(
        "--statements", action="store_true", help="SQL statements a piece of work (Debian's PostgreSQL)"
    )
    parser.add_argument("--profile", type=Path, help="py-spy's stacks of berth in each phase, in this directory")
    return parser.parse_args(arguments)


def main() -> int:
    """Start what is asked for, measure, stop everything, print the table."""
    options = options_of()
    configure_logging(process="bench", role="bench", level="error", style="pretty")
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # leave in good order
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        try:
            real, ours = options.only != "berth", options.only != "real"
            programs = install(options.venv) if real else None
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="berth-beside-")))
            run = Run(
                seconds=options.seconds or (SHORT_SECONDS if options.short else SECONDS),
                sizes=options.providers,
                phases=tuple(filter(None, options.phases.split(","))),
                profiles=options.profile,
                directory=directory,
                statements=options.statements,
                real=stack.enter_context(new_postgres(statements=options.statements)) if real else None,
                berth=stack.enter_context(new_postgres(statements=options.statements)) if ours else None,
                broker=stack.enter_context(RabbitMQ()) if ours else None,
                programs=programs,
            )
            uvloop.run(everything(run))
        except (ServerFailed, ServerMissing) as error:
            print(error, file=sys.stderr)
            return 2
        except TimeoutError:
            print(f"WRONG: not done after {RUN_TIMEOUT_S:g} s; the rest is left out", file=sys.stderr)
            return 2
        finally:
            if "run" in locals():
                rest_report.table(run.rows)
                if options.json:
                    options.json.write_bytes(msgspec.json.format(msgspec.json.encode(run.rows), indent=1))
    print(f"{time.monotonic() - began:.0f} s in all")
    return 1 if run.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
