"""What every command shares: settings, output, exit statuses, and errors told without a traceback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer
import uvloop
from rich.console import Console

from berth.client import BuildClient
from berth.settings import Settings, read_settings
from berth.site import Site, process_name
from bus.faults import Fault, RequestTimeout, Transient
from bus.port import BusError, BusForbidden, BusUnavailable, PublishRefused, Unroutable
from bus.service.settings import SettingsError
from bus.service.telemetry import configure_logging

EXIT_NO = 1  # the answer is no: a build failed, an invariant is broken
EXIT_USAGE = 2  # wrong use, settings or credentials
EXIT_AWAY = 3  # bus or database out of reach
EXIT_TIME = 4  # time ran out

OPEN_TIMEOUT_S = 10.0

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, max=86_400, help="Seconds to wait at most.")]

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


class Stop(Exception):
    """Ends the command with a sentence and a status."""

    def __init__(self, status: int, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.code = code


def settings_of(context: typer.Context) -> Settings:
    """The settings in force, from --config or where `read_settings` looks."""
    path: Path | None = context.obj
    return read_settings(path)


def print_json(data: object) -> None:
    """Print data as indented JSON on standard output."""
    text = msgspec.json.format(msgspec.json.encode(data), indent=2)
    sys.stdout.write(text.decode() + "\n")
    sys.stdout.flush()


def run(body: Callable[[], Coroutine[Any, Any, int | None]]) -> NoReturn:
    """Run a command's coroutine and exit with its status; faults become a sentence on standard error."""
    configure_logging(process="berth", role="cli", level=os.environ.get("BERTH_CLI_LOG", "error"), style="pretty")
    try:
        status = uvloop.run(body()) or 0
    except KeyboardInterrupt:
        status = 130
    except Exception as fault:
        found = explain(fault)
        if found is None:
            raise
        err.print(f"[red]berth:[/red] {found}", soft_wrap=True)
        status = found.status
    raise SystemExit(status)


def explain(fault: BaseException) -> Stop | None:
    """What a fault means for a user, or None when it is a defect of ours."""
    if isinstance(fault, Stop):
        return fault
    if isinstance(fault, BaseExceptionGroup):
        return explain(fault.exceptions[0])
    if isinstance(fault, SettingsError):
        return Stop(EXIT_USAGE, fault.code, str(fault))
    if isinstance(fault, Unroutable):
        return Stop(EXIT_AWAY, fault.code, "the bus has no queue for this yet: has a scheduler ever been started?")
    if isinstance(fault, PublishRefused):
        return Stop(EXIT_AWAY, fault.code, "the queue is full: publish more slowly")
    if isinstance(fault, BusForbidden):
        return Stop(EXIT_USAGE, fault.code, f"the broker refuses these credentials: {fault}")
    if isinstance(fault, BusUnavailable):
        return Stop(EXIT_AWAY, fault.code, f"the bus is out of reach: {fault}")
    if isinstance(fault, RequestTimeout):
        return Stop(EXIT_TIME, fault.code, "nobody answered in time: is a scheduler running?")
    if isinstance(fault, Transient):
        return Stop(EXIT_AWAY, fault.code, str(fault))
    if isinstance(fault, BusError | Fault):
        return Stop(EXIT_NO, fault.code, f"{fault.code}: {fault}")
    if isinstance(fault, TimeoutError):
        return Stop(EXIT_TIME, "timeout", "time ran out")
    return None


@contextlib.asynccontextmanager
async def client(settings: Settings, *, keep_events: bool = False) -> AsyncIterator[BuildClient]:
    """A connected client of the API bus. Raises Stop when the bus does not answer within OPEN_TIMEOUT_S."""
    site = Site(settings)
    process = process_name("cli")
    made = BuildClient(site.bus(process), clock=site.clock, process=process, keep_events=keep_events)
    await open_in_time(made.open())
    try:
        yield made
    finally:
        await made.close()


async def open_in_time(opening: Coroutine[Any, Any, None]) -> None:
    """Wait for a connection, but not for ever as a worker does. Raises Stop."""
    try:
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            await opening
    except TimeoutError as fault:
        raise Stop(EXIT_AWAY, "bus.unavailable", f"no answer from the bus within {OPEN_TIMEOUT_S:g} s") from fault


def database_of(settings: Settings) -> Site:
    """A site whose database is known. Raises Stop when it is embedded and no `berth up` runs."""
    site = Site(settings)
    if site.database_url is None:
        raise Stop(
            EXIT_AWAY,
            "database.unavailable",
            "no database: set database.url (BERTH_DATABASE__URL), or start `berth up`",
        )
    return site
