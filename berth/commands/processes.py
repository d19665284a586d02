"""`berth up` and `berth run`: the workers themselves; and `berth config`."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import msgspec
import typer
from rich.syntax import Syntax

import cell_conductor.app
import compute_sim.app
import ironic_sync.app
import placement_worker.app
import scheduler_worker.app
from berth.commands.common import EXIT_NO, EXIT_USAGE, AsJson, Stop, database_of, err, out, print_json, run, settings_of
from berth.metal import simulated_ironic
from berth.settings import MEMORY, Settings
from berth.site import Site, process_name
from berth.up import Street, serve, site
from bus.contracts.base import Word
from bus.service.environment import Environment
from bus.service.main import run_process
from bus.service.service import Service
from bus.service.settings import redact
from bus.service.telemetry import configure_logging


class Role(StrEnum):
    """A worker that runs as a process of its own."""

    PLACEMENT = "placement"
    SCHEDULER = "scheduler"
    CONDUCTOR = "conductor"
    COMPUTE = "compute"
    IRONIC_SYNC = "ironic-sync"


Build = Callable[[Environment], Service]


def up(context: typer.Context, as_json: AsJson = False) -> None:
    """Run everything in this process until it is interrupted; other commands reach it from other terminals."""

    async def body() -> int:
        settings = settings_of(context)
        configure_logging(process="up", role="up", level=settings.telemetry.log_level, style="auto")
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with site(settings, directory=settings.state / "postgres") as here, simulated_ironic(here) as ironic:
            ironic_url = ironic.url if ironic is not None else None
            street = Street(here)
            await street.start(ironic_url=ironic_url)
            try:
                async with serve(here, ironic_url):
                    _say_up(here, street, as_json)
                    stopped = asyncio.create_task(stop.wait())
                    waiting: set[asyncio.Future[Any]] = {stopped, street.ensemble.failed}
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    stopped.cancel()
            finally:
                failed = street.ensemble.failed.done()
                await street.ensemble.stop()
        if failed:
            raise Stop(EXIT_NO, "up.worker_died", "a worker died; see the log above")
        return 0

    run(body)


def run_role(
    context: typer.Context,
    role: Annotated[Role, typer.Argument(help="Which worker.")],
    cell: Annotated[str | None, typer.Option(help="The cell, for conductor and compute.")] = None,
    service: Annotated[str | None, typer.Option(help="The compute service's name.")] = None,
    http: Annotated[str | None, typer.Option(help="Serve health and metrics at HOST:PORT (0: any).")] = None,
) -> None:
    """Run one worker as this process, until SIGTERM or SIGINT; start as many as you like."""
    where = _http(http)
    status = EXIT_NO

    async def prepared() -> tuple[Build, Site, str]:
        settings = settings_of(context)
        here = database_of(settings) if role is not Role.COMPUTE else Site(settings)
        if settings.bus.url == MEMORY:
            err.print("[yellow]bus.url is memory://: this worker joins the `berth up` of this machine[/yellow]")
        return _build(role, here, cell, service), here, process_name(role.value, cell or "")

    def body() -> int:
        try:
            build, here, process = asyncio.run(prepared())
        except Exception as fault:  # told as every command tells it
            return _told(fault)
        telemetry = here.settings.telemetry
        listen = where or ((telemetry.http_host, telemetry.http_port) if telemetry.http_port is not None else None)
        return run_process(
            build,
            lambda: here.environment(process),
            role=role.value,
            process=process,
            http=listen,
            log_level=telemetry.log_level,
            log_style=telemetry.log_format,
        )

    status = body()
    raise SystemExit(status)


def config(context: typer.Context, as_json: AsJson = False) -> None:
    """Print the settings in force, secrets hidden."""

    async def body() -> None:
        plain = redact(settings_of(context))
        if as_json:
            print_json(plain)
            return
        text = msgspec.toml.encode(_without_none(plain)).decode()
        out.print(Syntax(text, "toml", background_color="default", word_wrap=True) if out.is_terminal else text)

    run(body)


def _build(role: Role, here: Site, cell: str | None, service: str | None) -> Build:
    settings: Settings = here.settings
    if role in {Role.CONDUCTOR, Role.COMPUTE} and cell is None:
        raise Stop(EXIT_USAGE, "cell.missing", f"which cell? berth run {role.value} --cell {here.cells[0]}")
    if role is Role.PLACEMENT:
        return lambda env: placement_worker.app.build(env, settings.placement, here.cells)
    if role is Role.SCHEDULER:
        return lambda env: scheduler_worker.app.build(env, settings.scheduler, here.cells)
    if role is Role.IRONIC_SYNC:
        return lambda env: ironic_sync.app.build(env, settings.ironic_sync)
    assert cell is not None
    here.check_cell(cell)
    if role is Role.CONDUCTOR:
        return lambda env: cell_conductor.app.build(env, settings.conductor, cell)
    try:
        name = msgspec.convert(service or f"{cell}-c1", Word)
    except msgspec.ValidationError as fault:
        raise Stop(EXIT_USAGE, "service.name", f"not a service name: {service}") from fault
    return lambda env: compute_sim.app.build(env, settings.compute, cell, name)


def _told(fault: Exception) -> int:
    async def body() -> int:
        raise fault

    try:
        run(body)
    except SystemExit as ended:
        return int(str(ended.code))


def _http(text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    host, _, port = text.rpartition(":")
    if not port.isdigit() or int(port) > 65_535:
        raise typer.BadParameter(f"--http takes HOST:PORT, not {text!r}")
    return host or "127.0.0.1", int(port)


def _say_up(here: Site, street: Street, as_json: bool) -> None:
    if as_json:
        print_json({"up": True, "cells": here.cells, "computes": street.computes, "socket": str(here.settings.socket)})
        return
    out.print(
        f"[green]berth is up[/green]: cells {', '.join(here.cells)}; compute services {', '.join(street.computes)}.\n"
        "In another terminal: berth boot --flavor m1.small --count 50 --wait. Ctrl-C stops it."
    )


def _without_none(data: object) -> object:
    if isinstance(data, dict):
        return {name: _without_none(value) for name, value in data.items() if value is not None}
    if isinstance(data, list | tuple):
        return [_without_none(value) for value in data]
    return data
