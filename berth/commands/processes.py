"""`berth up`: everything; and `berth config`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from berth.commands.as_toml import as_toml
from berth.commands.common import (
    EXIT_USAGE,
    AsJson,
    Stop,
    err,
    make_directory,
    out,
    print_json,
    run,
    settings_of,
)
from berth.commands.objects import read_file, valid_changes
from berth.commands.up_messages import as_processes, block, one_process
from berth.in_process import WorkerEnded
from berth.rest_address import AtUp, for_up
from berth.settings import Settings
from berth.site import read_runtime
from berth.trial.metal import ironic_of
from berth.trial.supervisor import Supervisor, supervised
from berth.trial.up import LocalSystem, serve, site
from berth.trial.up_processes import computes_on_record, numbers, running
from berth.trial.usable_hosts import sentence, unusable_hosts
from berth.web.server import pages_of_up
from bus.contracts.objects import ObjectsChange
from bus.service.main import STOP_SIGNALS
from bus.service.settings import describe, redact
from bus.service.telemetry import configure_logging
from scheduler_worker.objects import check_objects

MAX_SOCKET_PATH = 107  # the kernel's limit

Count = Annotated[int | None, typer.Option(min=1, max=64, help="With --processes; default: as the machine has CPUs.")]


def up(
    context: typer.Context,
    processes: Annotated[
        bool, typer.Option("--processes", help="Each worker a process, on RabbitMQ and PostgreSQL.")
    ] = False,
    schedulers: Count = None,
    placements: Count = None,
    conductors: Annotated[int | None, typer.Option(min=1, max=64, help="The same, for each cell.")] = None,
    computes: Annotated[int | None, typer.Option(min=1, max=64, help="The same, for each cell.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run everything until it is interrupted.

    In this process, or each worker as a process; commands in other terminals reach it.

    Placement's REST API is at 127.0.0.1:8778, or at a free port; the message at the end of the start names it and its
    token.

    With --processes: on the broker and database that the settings name, else on a RabbitMQ (the machine's program) and
    a PostgreSQL of its own, kept below state_dir. A worker that dies is started again, a bounded number of times. Each
    one's log is in state_dir/logs.
    """
    requested = {"schedulers": schedulers, "placements": placements, "conductors": conductors, "computes": computes}

    async def body() -> int:
        if processes:
            return await _up_processes(context, requested, as_json)
        if any(number is not None for number in requested.values()):
            raise Stop(EXIT_USAGE, "up.processes", "numbers of processes are for --processes; see also [up]")
        settings, stop = _prepare(context)
        with for_up(settings) as rest:
            return await _up_here(rest, stop, as_json)

    run(body)


async def _up_here(rest: AtUp, stop: asyncio.Event, as_json: bool) -> int:
    async with (
        site(rest.settings, directory=rest.settings.state / "postgres", notify=_warn) as here,
        ironic_of(here) as ironic_url,
    ):
        system = LocalSystem(here)
        stopped = asyncio.create_task(stop.wait())
        starting = asyncio.create_task(_start_here(system, ironic_url or None))
        try:
            starts: set[asyncio.Future[Any]] = {starting, stopped, system.in_process.failed}
            await asyncio.wait(starts, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                await starting
                async with serve(here, ironic_url), pages_of_up(here, wanted=here.settings.up.web) as pages:
                    _print_summary(
                        {**one_process(here, system.computes, ironic_url, rest), "pages": pages or None}, as_json
                    )
                    waiting: set[asyncio.Future[Any]] = {stopped, system.in_process.failed}
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (starting, stopped):
                task.cancel()
            await asyncio.gather(starting, stopped, return_exceptions=True)
            failed = system.in_process.failed.exception() if system.in_process.failed.done() else None
            with contextlib.suppress(WorkerEnded):  # the first one is reported
                await system.in_process.stop()
    if failed is not None:
        raise failed
    return 0


async def _start_here(system: LocalSystem, ironic_url: str | None) -> None:
    await system.start(ironic_url=ironic_url)
    if missing := await unusable_hosts(system.site, system.services):
        _warn(sentence(missing))


def _prepare(context: typer.Context) -> tuple[Settings, asyncio.Event]:
    """The common start of both ways of being up: settings, a state directory, and an event that signals set."""
    settings = settings_of(context)
    running = read_runtime(settings.state)
    if running is not None:
        raise Stop(EXIT_USAGE, "up.running", f"berth is up already: process {running.pid}, in {settings.state}")
    _make_state(settings)
    settings = msgspec.structs.replace(settings, compute=settings.kept_compute)
    if not settings.compute.state_dir:
        _warn("compute.in_memory: the simulated machines are lost when this ends (compute.state_dir is empty)")
    configure_logging(process="up", role="up", level=settings.telemetry.log_level, style=settings.telemetry.log_format)
    stop = asyncio.Event()
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return settings, stop


async def _up_processes(context: typer.Context, requested: Mapping[str, int | None], as_json: bool) -> int:
    settings, stop = _prepare(context)
    cpus = len(os.sched_getaffinity(0))
    kept = settings.compute.state_dir
    earlier = computes_on_record(Path(kept), settings.cells) if kept else 0
    count = numbers(cpus, len(settings.cells), settings.up, requested, earlier=earlier)
    starting = asyncio.create_task(_given_up(stop, asyncio.current_task()))
    try:
        with for_up(settings) as rest:
            async with running(rest.settings, count, notify=_warn) as started:
                starting.cancel()
                supervisor = Supervisor(started.processes, clock=started.site.clock, notify=_warn)
                async with pages_of_up(started.site, wanted=settings.up.web) as pages:
                    _print_summary({**as_processes(started, count, cpus, rest), "pages": pages or None}, as_json)
                    await supervised(supervisor, stop)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        starting.cancel()
    return 0


async def _given_up(stop: asyncio.Event, starting: asyncio.Task[Any] | None) -> None:
    """Starting takes as long as the slowest worker; who interrupts it does not want to wait for that."""
    await stop.wait()
    if starting is not None:
        starting.cancel()


def config(
    context: typer.Context,
    explain: Annotated[bool, typer.Option("--explain", help="Print each setting's description above it.")] = False,
    objects: Annotated[
        Path | None, typer.Option("--objects", metavar="FILE", help="Check a file for `berth apply` as well.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the settings in force, secrets hidden.

    Exit status 2 when a worker could not start with them, their flavors, aggregates, quotas and groups included.
    """

    async def body() -> None:
        settings = settings_of(context)
        # A setting that names a class is only known to be wrong once the class is looked for; objects, once they are
        # put together.
        cells = sorted(settings.cells)
        check_objects(settings.scheduler, cells=cells)
        if objects is not None:
            change = ObjectsChange(changes=tuple(valid_changes(read_file(objects)[0])), who="berth config")
            check_objects(settings.scheduler, change, cells)
        plain = redact(settings)
        if as_json:
            print_json(plain)
            return
        comments = describe(Settings, plain) if explain else {}
        out.print(as_toml(plain, comments), end="", markup=False, soft_wrap=True, highlight=False)

    run(body)


def _make_state(settings: Settings) -> None:
    """The directory that holds what lasts. Raises Stop when it cannot be."""
    path = str(settings.socket)
    if len(path.encode()) > MAX_SOCKET_PATH:
        reason = f"{path} is too long for a socket's name; set state_dir (BERTH_STATE_DIR) to something shorter"
        raise Stop(EXIT_USAGE, "state.too_long", reason)
    make_directory(settings.state)


def _warn(summary: str) -> None:
    err.print(summary, soft_wrap=True, markup=False)


def _print_summary(summary: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(summary)
    else:
        out.print(block(summary), soft_wrap=True, markup=False)
