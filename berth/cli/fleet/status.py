"""The commands `berth up`, which runs everything and prints where it is, and `berth config`."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from berth.cli.common import (
    Exit,
    Stop,
    make_directory,
)
from berth.cli.objects.objects import read_file, valid_changes
from berth.cli.output import (
    As,
    Form,
    err,
    out,
    print_data,
)
from berth.cli.site.as_toml import as_toml
from berth.config.at_up import lock_file
from berth.config.rest_address import AtUp, for_up
from berth.config.settings import MEMORY, Settings
from berth.config.site import Site, read_runtime
from berth.up.in_one_process import LocalSystem, ironic_of, message_of, serve, site, unusable_hosts
from berth.up.in_processes import (
    ProcessCounts,
    RunningProcesses,
    Supervisor,
    computes_on_record,
    numbers,
    running,
    supervised,
)
from berth.up.local_workers import WorkerEnded
from berth.web.server import pages_of_up
from bus.contracts.objects import ObjectsChange
from bus.service.main import STOP_SIGNALS
from bus.service.settings import describe, hide_password, redact
from bus.service.telemetry import configure_logging
from scheduler_worker.objects.configured import check_objects

MAX_SOCKET_PATH = 107  # the kernel's limit

Count = Annotated[int | None, typer.Option(min=1, max=64, help="With --processes; default: as the machine has CPUs.")]


async def up(
    settings: Settings,
    processes: Annotated[
        bool, typer.Option("--processes", help="Each worker a process, on RabbitMQ and PostgreSQL.")
    ] = False,
    schedulers: Count = None,
    placements: Count = None,
    conductors: Annotated[int | None, typer.Option(min=1, max=64, help="The same, for each cell.")] = None,
    computes: Annotated[int | None, typer.Option(min=1, max=64, help="The same, for each cell.")] = None,
    form: As = Form.TABLE,
) -> int:
    """Run everything until it is interrupted.

    In this process, or each worker as a process; commands in other terminals reach it.

    Placement's REST API is at 127.0.0.1:8778, or at a free port; the message at the end of the start names it and its
    token.

    With --processes: on the broker and database that the settings name, else on a RabbitMQ (the machine's program) and
    a PostgreSQL of its own, below state_dir. A worker that dies is started again, a bounded number of times. Each
    one's log is in state_dir/logs.
    """
    requested = {"schedulers": schedulers, "placements": placements, "conductors": conductors, "computes": computes}

    if processes:
        return await _up_processes(settings, requested, form)
    if any(number is not None for number in requested.values()):
        raise Stop(Exit.USAGE, "up.processes", "numbers of processes are for --processes; see also [up]")
    settings, stop = _prepare(settings)
    with for_up(settings) as rest:
        return await _up_here(rest, stop, form)


async def _up_here(rest: AtUp, stop: asyncio.Event, form: Form) -> int:
    starting = asyncio.create_task(_abandon(stop, asyncio.current_task()))
    try:
        async with (
            site(rest.settings, directory=rest.settings.state / "postgres", notify=_warn) as here,
            ironic_of(here) as ironic_url,
        ):
            starting.cancel()
            failed = await _run_here(here, ironic_url, rest, stop, form)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        starting.cancel()
    if failed is not None:
        raise failed
    return 0


async def _run_here(
    here: Site, ironic_url: str | None, rest: AtUp, stop: asyncio.Event, form: Form
) -> BaseException | None:
    """The workers in this process, until it is to stop or one has failed: then that one's fault."""
    system = LocalSystem(here)
    stopped = asyncio.create_task(stop.wait())
    starting = asyncio.create_task(_start_here(system, ironic_url or None))
    try:
        starts: set[asyncio.Future[Any]] = {starting, stopped, system.in_process.failed}
        await asyncio.wait(starts, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            async with serve(here, ironic_url), pages_of_up(here, wanted=here.settings.up.web) as pages:
                _print_summary({**one_process(here, system.computes, ironic_url, rest), "pages": pages or None}, form)
                waiting: set[asyncio.Future[Any]] = {stopped, system.in_process.failed}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (starting, stopped):
            task.cancel()
        await asyncio.gather(starting, stopped, return_exceptions=True)
        failed = system.in_process.failed.exception() if system.in_process.failed.done() else None
        with contextlib.suppress(WorkerEnded):  # the first one is reported
            await system.in_process.stop()
    return failed


async def _start_here(system: LocalSystem, ironic_url: str | None) -> None:
    await system.start(ironic_url=ironic_url)
    if missing := await unusable_hosts(system.site, system.services):
        _warn(message_of(missing))


def _prepare(settings: Settings) -> tuple[Settings, asyncio.Event]:
    """The common start of both ways of being up: settings, a state directory, and an event that signals set."""
    _make_state(settings)
    _claim_state(settings.state)
    settings = msgspec.structs.replace(settings, compute=settings.kept_compute)
    if not settings.compute.state_dir:
        _warn("compute.in_memory: the simulated machines are lost when this ends (compute.state_dir is empty)")
    configure_logging(process="up", role="up", level=settings.telemetry.log_level, style=settings.telemetry.log_format)
    stop = asyncio.Event()
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return settings, stop


async def _up_processes(settings: Settings, requested: Mapping[str, int | None], form: Form) -> int:
    settings, stop = _prepare(settings)
    cpus = len(os.sched_getaffinity(0))
    kept = settings.compute.state_dir
    earlier = computes_on_record(Path(kept), settings.cells) if kept else 0
    count = numbers(cpus, len(settings.cells), settings.up, requested, earlier=earlier)
    starting = asyncio.create_task(_abandon(stop, asyncio.current_task()))
    try:
        with for_up(settings) as rest:
            async with running(rest.settings, count, notify=_warn) as started:
                starting.cancel()
                supervisor = Supervisor(started.processes, clock=started.site.clock, notify=_warn)
                async with pages_of_up(started.site, wanted=settings.up.web) as pages:
                    _print_summary({**as_processes(started, count, cpus, rest), "pages": pages or None}, form)
                    await supervised(supervisor, stop)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        starting.cancel()
    return 0


async def _abandon(stop: asyncio.Event, starting: asyncio.Task[Any] | None) -> None:
    """Starting takes as long as the slowest worker; who interrupts it does not want to wait for that."""
    await stop.wait()
    if starting is not None:
        starting.cancel()


async def config(
    settings: Settings,
    explain: Annotated[bool, typer.Option("--explain", help="Print each setting's description above it.")] = False,
    objects: Annotated[
        Path | None, typer.Option("--objects", metavar="FILE", help="Check a file for `berth apply` as well.")
    ] = None,
    form: As = Form.TABLE,
) -> None:
    """Print the settings in force, secrets hidden.

    Exit status 2 when a worker could not start with them, their flavors, aggregates, quotas and groups included.
    """
    # A setting that names a class is only known to be wrong once the class is looked for; objects, once they are
    # put together.
    cells = sorted(settings.cells)
    check_objects(settings.scheduler, cells=cells)
    if objects is not None:
        change = ObjectsChange(changes=tuple(valid_changes(read_file(objects)[0])), actor="berth config")
        check_objects(settings.scheduler, change, cells)
    plain = redact(settings)
    if form.is_data:
        print_data(plain, form)
        return
    comments = describe(Settings, plain) if explain else {}
    out.print(as_toml(plain, comments), end="", markup=False, soft_wrap=True, highlight=False)


def _make_state(settings: Settings) -> None:
    """The directory of what lasts. Raises Stop when it cannot be."""
    path = str(settings.socket)
    if len(path.encode()) > MAX_SOCKET_PATH:
        reason = f"{path} is too long for a socket's name; set state_dir (BERTH_STATE_DIR) to something shorter"
        raise Stop(Exit.USAGE, "state.too_long", reason)
    make_directory(settings.state)


def _claim_state(state: Path) -> None:
    """Lock the directory until this process ends, before anything is started in it. Raises Stop."""
    lock = os.open(lock_file(state), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        running = read_runtime(state)
        actor = "another process is starting it" if running is None else f"process {running.pid}"
        raise Stop(Exit.USAGE, "up.running", f"berth is up already: {actor}, in {state}") from None


def _warn(summary: str) -> None:
    err.print(summary, soft_wrap=True, markup=False)


def _print_summary(summary: dict[str, Any], form: Form) -> None:
    if form.is_data:
        print_data(summary, form)
    else:
        out.print(block(summary), soft_wrap=True, markup=False)


NEXT = ("berth boot --flavor m1.small --count 50 --wait", "berth list", "berth host list", "berth check")
END = "Ctrl-C drains and ends it."


def one_process(here: Site, computes: Sequence[str], ironic_url: str | None, rest: AtUp) -> dict[str, Any]:
    """All in this process."""
    settings = here.settings
    return {
        "up": True,
        "cells": here.cells,
        "computes": computes,
        "socket": str(settings.socket),
        "bus": hide_password(settings.bus.url),
        "durable": _durable(settings, one_process=True),
        **_servers(settings, here.database_url, ironic_url, rest),
    }


def as_processes(started: RunningProcesses, count: ProcessCounts, cpus: int, rest: AtUp) -> dict[str, Any]:
    """Each worker a process."""
    workers = started.processes.workers.values()
    settings = started.site.settings
    return {
        "up": True,
        "cells": started.site.cells,
        "cpus": cpus,
        "numbers": count,
        "workers": {one.name: {"pid": one.process.pid, "port": one.port, "log": str(one.log)} for one in workers},
        "logs": str(started.logs),
        "bus": hide_password(settings.bus.url),
        "durable": _durable(settings, one_process=False),
        **_servers(settings, started.site.database_url, started.ironic_url, rest),
    }


def _durable(settings: Settings, *, one_process: bool) -> str:
    """The parts that outlive the end of this process, however it ends, and those that do not."""
    kept = f"placement, builds and machines are kept below {settings.state}"
    if one_process and settings.bus.url == MEMORY:
        return f"{kept}; messages are not: those under way end with this process"
    return f"{kept}, messages in the broker"


def _servers(settings: Settings, database_url: str | None, ironic_url: str | None, rest: AtUp) -> dict[str, Any]:
    listen = settings.placement.rest.listen
    return {
        "database": hide_password(database_url or ""),
        "placement_api": f"http://{listen}" if listen else None,
        "placement_token": str(rest.token) if rest.token else None,
        "placement_taken": rest.taken or None,
        "ironic": ironic_url or None,
    }


def block(summary: Mapping[str, Any]) -> str:
    """For people: what runs, where it answers, what to type next."""
    workers: Mapping[str, Mapping[str, Any]] = summary.get("workers", {})
    runs = f"{len(workers)} processes for {summary['cpus']} CPUs" if workers else "one process"
    bus = (
        f"in this process; other terminals reach it at {summary['socket']}"
        if summary["bus"] == MEMORY
        else summary["bus"]
    )
    rows = [
        ("cells", ", ".join(summary["cells"])),
        ("computes", ", ".join(summary.get("computes", ()))),
        ("RabbitMQ" if summary["bus"] != MEMORY else "bus", bus),
        ("PostgreSQL", summary["database"]),
        ("durable", summary.get("durable", "")),
        ("pages", summary.get("pages") or ""),
        ("Placement", _placement(summary)),
        ("Ironic", f"{summary['ironic']} (simulated)" if summary["ironic"] else ""),
        ("/metrics", ", ".join(f"{name} {worker['port']}" for name, worker in workers.items())),
        ("logs", summary.get("logs", "")),
    ]
    return _lines(f"berth is up: {runs}", rows)


def _placement(summary: Mapping[str, Any]) -> str:
    if not summary["placement_api"]:
        return "no REST API; BERTH_PLACEMENT__REST__LISTEN=HOST:PORT serves one"
    taken = f" ({summary['placement_taken']} is in use)" if summary["placement_taken"] else ""
    token = f", for the token in {summary['placement_token']}" if summary["placement_token"] else ""
    return f"{summary['placement_api']}{taken}{token}"


def _lines(head: str, rows: Sequence[tuple[str, str]]) -> str:
    shown = [f"  {name:<11} {value}" for name, value in rows if value]
    return "\n".join(["", head, *shown, "", "Next, in another terminal:", *(f"  {one}" for one in NEXT), "", END, ""])
