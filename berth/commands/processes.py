"""`berth up` and `berth run`: the workers themselves; and `berth config`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any

import msgspec
import typer

import cell_conductor.app
import compute_sim.app
import ironic_sync.app
import placement_worker.app
import scheduler_worker.app
from berth.commands.as_toml import as_toml
from berth.commands.common import (
    EXIT_AWAY,
    EXIT_USAGE,
    AsJson,
    Stop,
    database_of,
    err,
    explain,
    make_directory,
    out,
    print_json,
    run,
    settings_of,
    tell,
)
from berth.commands.up_messages import as_processes, block, one_process
from berth.in_process import WorkerEnded
from berth.metal import kept_in, simulated_ironic
from berth.rest_address import AtHttp, AtUp, at_http, for_up, with_rest_at
from berth.settings import MEMORY, Settings
from berth.site import Site, process_name, read_runtime
from berth.supervisor import Supervisor, supervised
from berth.up import LocalSystem, serve, site
from berth.up_processes import numbers, running
from berth.web.server import pages_of_up
from bus.contracts.base import Word
from bus.service.environment import Environment
from bus.service.main import STOP_SIGNALS, run_process
from bus.service.service import Service
from bus.service.settings import SettingsError, redact
from bus.service.telemetry import configure_logging
from compute_sim.config import default_service
from scheduler_worker.plugins import filters, weighings

MAX_SOCKET_PATH = 107  # the kernel's limit


class Role(StrEnum):
    """A worker that runs as a process of its own."""

    PLACEMENT = "placement"
    SCHEDULER = "scheduler"
    CONDUCTOR = "conductor"
    COMPUTE = "compute"
    IRONIC_SYNC = "ironic-sync"


Build = Callable[[Environment], Service]


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

    Placement's REST API is at 127.0.0.1:8778, or at a free port; what is said when all is up names it, and its token.

    With --processes: on the broker and database that the settings name, else on a RabbitMQ (the machine's program) and
    a PostgreSQL of its own, kept below state_dir. A worker that dies is started again, a bounded number of times. Each
    one's log is in state_dir/logs.
    """
    asked = {"schedulers": schedulers, "placements": placements, "conductors": conductors, "computes": computes}

    async def body() -> int:
        if processes:
            return await _up_processes(context, asked, as_json)
        if any(number is not None for number in asked.values()):
            raise Stop(EXIT_USAGE, "up.processes", "numbers of processes are for --processes; see also [up]")
        settings, stop = _prepare(context)
        with for_up(settings) as rest:
            return await _up_here(rest, stop, as_json)

    run(body)


async def _up_here(rest: AtUp, stop: asyncio.Event, as_json: bool) -> int:
    async with (
        site(rest.settings, directory=rest.settings.state / "postgres", say=_warn) as here,
        simulated_ironic(here, kept=kept_in(here)) as ironic,
    ):
        ironic_url = ironic.url if ironic is not None else None
        system = LocalSystem(here)
        stopped = asyncio.create_task(stop.wait())
        starting = asyncio.create_task(system.start(ironic_url=ironic_url))
        try:
            await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                await starting
                async with serve(here, ironic_url), pages_of_up(here, wanted=here.settings.up.web) as pages:
                    _say({**one_process(here, system.computes, ironic_url, rest), "pages": pages or None}, as_json)
                    waiting: set[asyncio.Future[Any]] = {stopped, system.in_process.failed}
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (starting, stopped):
                task.cancel()
            await asyncio.gather(starting, stopped, return_exceptions=True)
            failed = system.in_process.failed.exception() if system.in_process.failed.done() else None
            with contextlib.suppress(WorkerEnded):  # the first one says it
                await system.in_process.stop()
    if failed is not None:
        raise failed
    return 0


def _prepare(context: typer.Context) -> tuple[Settings, asyncio.Event]:
    """What both ways of being up begin with: settings, a state directory, and an event that signals set."""
    settings = settings_of(context)
    running = read_runtime(settings.state)
    if running is not None:
        raise Stop(EXIT_USAGE, "up.running", f"berth is up already: process {running.pid}, in {settings.state}")
    _make_state(settings)
    settings = _with_lasting_machines(settings)
    configure_logging(process="up", role="up", level=settings.telemetry.log_level, style=settings.telemetry.log_format)
    stop = asyncio.Event()
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return settings, stop


async def _up_processes(context: typer.Context, asked: Mapping[str, int | None], as_json: bool) -> int:
    settings, stop = _prepare(context)
    cpus = len(os.sched_getaffinity(0))
    count = numbers(cpus, len(settings.cells), settings.up, asked)
    starting = asyncio.create_task(_given_up(stop, asyncio.current_task()))
    try:
        with for_up(settings) as rest:
            async with running(rest.settings, count, say=_warn) as started:
                starting.cancel()
                supervisor = Supervisor(started.processes, clock=started.site.clock, say=_warn)
                async with pages_of_up(started.site, wanted=settings.up.web) as pages:
                    _say({**as_processes(started, count, cpus, rest), "pages": pages or None}, as_json)
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


def run_role(
    context: typer.Context,
    role: Annotated[Role, typer.Argument(help="Which worker.")],
    cell: Annotated[str | None, typer.Option(help="The cell, for conductor and compute.")] = None,
    service: Annotated[
        str | None,
        typer.Option(help="The compute service's name, of one process at a time; default: CELL-HOSTNAME."),
    ] = None,
    http: Annotated[
        str | None, typer.Option(help="Serve health and metrics at HOST:PORT (0: any), placement its REST API too.")
    ] = None,
    api: Annotated[
        str | None, typer.Option(help="Serve the REST API at a HOST:PORT of its own (placement only).")
    ] = None,
) -> None:
    """Run one worker as this process.

    Until SIGTERM or SIGINT, which drain it; start as many as you like.
    """
    try:
        settings = settings_of(context)
        if api is not None:
            if role is not Role.PLACEMENT:
                raise Stop(EXIT_USAGE, "api.role", "--api is placement's")
            settings = with_rest_at(settings, api)
        asked = _http(http)
        served = AtHttp(settings=settings, with_rest=False)
        if role is Role.PLACEMENT and asked is not None:
            served = at_http(settings, *asked)
            settings = served.settings
        here = database_of(settings) if role is not Role.COMPUTE else Site(settings)
        build = _build(role, here, cell, service, health_with_rest=served.with_rest)
        listen = _listen(asked, settings)
        _join(settings, cell if role in {Role.CONDUCTOR, Role.COMPUTE} else None)
        if served.sentence:
            err.print(served.sentence, soft_wrap=True, markup=False)
    except (Stop, SettingsError) as fault:
        stop = explain(fault)
        assert stop is not None
        tell(stop)
        raise SystemExit(stop.status) from None
    process = process_name(role.value, cell or "")
    status = run_process(
        build,
        lambda: here.environment(process),
        role=role.value,
        process=process,
        http=listen if not served.with_rest else None,
        log_level=settings.telemetry.log_level,
        log_style=settings.telemetry.log_format,
    )
    raise SystemExit(status)


def config(context: typer.Context, as_json: AsJson = False) -> None:
    """Print the settings in force, secrets hidden. Exit status 2 when a worker could not start with them."""

    async def body() -> None:
        settings = settings_of(context)
        # What names a class is only known to be wrong once it is looked for.
        filters(settings.scheduler)
        weighings(settings.scheduler)
        plain = redact(settings)
        if as_json:
            print_json(plain)
            return
        out.print(as_toml(plain), end="", markup=False, soft_wrap=True)

    run(body)


def _build(role: Role, here: Site, cell: str | None, service: str | None, *, health_with_rest: bool) -> Build:
    settings: Settings = here.settings
    if role in {Role.CONDUCTOR, Role.COMPUTE} and cell is None:
        raise Stop(EXIT_USAGE, "cell.missing", f"which cell? berth run {role.value} --cell {here.cells[0]}")
    if role is Role.PLACEMENT:
        return lambda env: placement_worker.app.build(
            env, settings.placement, here.cells, health_with_rest=health_with_rest
        )
    if role is Role.SCHEDULER:
        return lambda env: scheduler_worker.app.build(env, settings.scheduler, here.cells)
    if role is Role.IRONIC_SYNC:
        return lambda env: ironic_sync.app.build(env, settings.ironic_sync)
    assert cell is not None
    here.check_cell(cell)
    if role is Role.CONDUCTOR:
        return lambda env: cell_conductor.app.build(env, settings.conductor, cell)
    try:
        name = msgspec.convert(service or default_service(cell, socket.gethostname()), Word)
    except msgspec.ValidationError as fault:
        raise Stop(EXIT_USAGE, "service.name", f"not a service name: {service}") from fault
    return lambda env: compute_sim.app.build(env, settings.compute, cell, name)


def _make_state(settings: Settings) -> None:
    """The directory that holds what lasts. Raises Stop when it cannot be."""
    path = str(settings.socket)
    if len(path.encode()) > MAX_SOCKET_PATH:
        reason = f"{path} is too long for a socket's name; set state_dir (BERTH_STATE_DIR) to something shorter"
        raise Stop(EXIT_USAGE, "state.too_long", reason)
    make_directory(settings.state)


def _with_lasting_machines(settings: Settings) -> Settings:
    """The book outlives `berth up`, so the simulated machines must, too: else each would be lost at the next start."""
    if settings.compute.state_dir is not None:
        return settings
    compute = msgspec.structs.replace(settings.compute, state_dir=str(settings.state / "machines"))
    return msgspec.structs.replace(settings, compute=compute)


def _join(settings: Settings, cell: str | None) -> None:
    """On the memory bus a worker is a guest of a running `berth up`. Raises Stop when none runs.

    cell: the one on whose bus alone the worker speaks.
    """
    if settings.bus.url != MEMORY or (cell is not None and settings.cells[cell].url not in ("", MEMORY)):
        return
    if read_runtime(settings.state) is None:
        raise Stop(EXIT_AWAY, "bus.unavailable", "no bus: set bus.url (BERTH_BUS__URL), or start `berth up`")
    err.print("[yellow]bus.url is memory://: this worker joins the `berth up` of this machine[/yellow]", soft_wrap=True)


def _listen(asked: tuple[str, int] | None, settings: Settings) -> tuple[str, int] | None:
    """Where to answer /healthz, if anywhere. Raises Stop when that address cannot be had: better now than later."""
    telemetry = settings.telemetry
    where = asked or ((telemetry.http_host, telemetry.http_port) if telemetry.http_port is not None else None)
    if where is None:
        return None
    try:
        socket.create_server(where, family=_family(where[0])).close()
    except OSError as fault:
        reason = fault.strerror or str(fault)
        raise Stop(EXIT_USAGE, "http.address", f"cannot listen at {where[0]}:{where[1]}: {reason}") from fault
    return where


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _http(text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    host, _, port = text.rpartition(":")
    if not port.isdigit() or int(port) > 65_535:
        raise typer.BadParameter(f"--http takes HOST:PORT, not {text!r}")
    return host.strip("[]") or "127.0.0.1", int(port)


def _warn(said: str) -> None:
    err.print(said, soft_wrap=True, markup=False)


def _say(said: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(said)
    else:
        out.print(block(said), soft_wrap=True, markup=False)
