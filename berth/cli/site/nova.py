"""`berth nova`: in front of an OpenStack Nova."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer
from msgspec import Struct
from msgspec.structs import replace

import nova_scheduler.app
import placement_worker.app
from berth.cli.claims.placement import DEFAULT_API, placement_database
from berth.cli.common import (
    SHADOW,
    AsJson,
    Exit,
    Stop,
    err,
    explain,
    host_and_port,
    in_shadow,
    print_json,
    print_stop,
    settings_of,
)
from berth.cli.options import CommandGroup
from berth.cli.site.as_toml import as_toml
from berth.cli.site.serving import Tokens
from berth.config.ports import ServerFailed
from berth.config.rest_address import with_rest_at
from berth.config.settings import BusSettings, Settings
from berth.config.site import Brokers, Site, process_name
from berth.text import printable
from berth.up.embedded.process import ServerMissing
from berth.web.server import WebServer
from berth.web.sign_in_sessions import Access, WebCaller, read_tokens
from bus.clock import SystemClock
from bus.service.environment import Environment
from bus.service.main import run_process
from bus.service.service import WorkerRuntime
from bus.service.settings import SettingsError
from nova_scheduler.nova_conf import MAX_BYTES, NovaConfUnreadable, translate
from placement_worker.service import PlacementService
from placement_worker.store.memory_rows import MemoryPlacementRows
from placement_worker.store.memory_table import MemoryPlacementTable

nova = CommandGroup(no_args_is_help=True, help="In front of an OpenStack Nova.")


@nova.command()
def serve(
    context: typer.Context,
    api: Annotated[str, typer.Option(help="Serve Placement's REST API at HOST:PORT.")] = DEFAULT_API,
    scratch: Annotated[
        bool, typer.Option("--scratch", help="An empty placement in a database that is lost at the end.")
    ] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="The same without a database: placement is in this process's memory.")
    ] = False,
    shadow: Annotated[bool, typer.Option("--shadow", help=SHADOW)] = False,
    page: Annotated[str, typer.Option(help="Show at HOST:PORT how calls are decided.")] = "",
    tokens: Tokens = None,
) -> None:
    """Be Placement and the scheduler of a Nova in one process, instead of placement-api and nova-scheduler.

    Serves Placement's REST API, and takes the calls of topic `scheduler` from Nova's broker (`nova.transport_url`).
    Placement is in the configured database, else in an embedded PostgreSQL below the state directory. It is a copy:
    fill it first (`berth placement import --from-url`). A Placement that is started again does not know what was
    claimed here meanwhile. The page "In front of Nova" has each step, and the rollback to the stock nova-scheduler.

    With --page it shows how each call was decided, and what the shadow would have done. Without --tokens that is on
    loopback alone. With a whole berth: `berth run nova-scheduler`, and `berth web`, which has the same page.
    """
    try:
        # Between the two parts is the bus of this process, whatever other workers use.
        settings = replace(in_shadow(with_rest_at(settings_of(context), api), shadow), bus=BusSettings())
        callers = None if tokens is None else read_tokens(tokens)
        shown = ShownAt(*host_and_port(page, "--page"), callers) if page else None
        if memory:
            store = PlacementService(MemoryPlacementRows(MemoryPlacementTable(SystemClock()).session()))
            raise SystemExit(_run(settings, "", store, shown))
        with placement_database(settings, scratch=scratch) as url:
            raise SystemExit(_run(settings, url, None, shown))
    except (SettingsError, Stop, ServerFailed, ServerMissing) as fault:
        stop = explain(fault)
        assert stop is not None
        print_stop(stop)
        raise SystemExit(stop.status) from None


@nova.command("settings")
async def translated_settings(
    file: Annotated[Path, typer.Argument(help="A nova.conf.", metavar="FILE")],
    as_json: AsJson = False,
) -> int:
    """Print a nova.conf as settings of berth.

    That is `[nova]`, passwords included, and what of `[scheduler]` nova.conf has. Each option of Nova's scheduler that
    cannot be translated is named on stderr, and the exit status is then 1.
    """
    try:
        with file.open("rb") as opened:
            found = translate(opened.read(MAX_BYTES + 1))
    except NovaConfUnreadable as error:
        raise Stop(Exit.USAGE, error.code, f"{file}: {error.reason}") from None
    except OSError as error:
        raise Stop(Exit.USAGE, NovaConfUnreadable.code, f"{file}: {error.strerror}") from None
    if as_json:
        print_json(found)
    else:
        sys.stdout.write(as_toml(found.settings))
        for one in found.left_out:
            reason = f"not translated: [{one.group}] {one.option}: {one.reason}"
            err.print(printable(reason), markup=False, soft_wrap=True)
    return Exit.NO if found.left_out else 0


class ShownAt(Struct, frozen=True):
    """Where the pages about Nova's calls are, and the callers that may see them; None: all who can reach loopback."""

    host: str
    port: int
    callers: dict[str, WebCaller] | None


def _run(settings: Settings, url: str, store: PlacementService | None, shown: ShownAt | None) -> int:
    here = Site(settings, brokers=Brokers(SystemClock()), database_url=url)
    process = process_name("nova")
    telemetry = settings.telemetry

    def built(env: Environment) -> WorkerRuntime:
        service = both(env, settings, store)
        if shown is not None:
            pages = WebServer(
                here.environment(process_name("web"), takes_cells=False),
                settings,
                host=shown.host,
                port=shown.port,
                access=Access(shown.callers, env.clock),
                of_nova=True,
            )
            service.add_resource(pages.open, pages.close)
        return service

    return run_process(
        built,
        lambda: here.environment(process, takes_cells=False),
        role="nova",
        process=process,
        log_level=telemetry.log_level,
        log_style=telemetry.log_format,
    )


def both(env: Environment, settings: Settings, store: PlacementService | None = None) -> WorkerRuntime:
    """Placement and the frontend as one service. Placement answers while Nova's API or broker is not there yet. At the
    end the frontend is drained first, as its calls claim at placement.
    """
    placement = _Part(placement_worker.app.build(env, settings.placement, (), store=store, health_with_rest=True))
    frontend = _Part(nova_scheduler.app.build(env, settings.nova, settings.scheduler))
    placement.service.add_bus_check(frontend.service.name, frontend.not_ready)  # /readyz is its
    service = WorkerRuntime("nova", clock=env.clock)
    for part in (placement, frontend):
        service.add_task(part.service.name, part.run)
        service.add_bus_check(part.service.name, part.not_ready)

    async def drain(_grace_s: float) -> None:
        """Each within its own grace time."""
        await frontend.drain()
        await placement.drain()

    service.add_drain(drain)
    return service


class _Part:
    """A service within another one."""

    def __init__(self, service: WorkerRuntime) -> None:
        self.service = service
        self._stop = asyncio.Event()
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Until it is drained, cancelled or has failed."""
        try:
            await self.service.run(self._stop)
        finally:
            self._ended.set()

    async def drain(self) -> None:
        """Stop it, and wait for its end, which its own grace time bounds."""
        self._stop.set()
        await self._ended.wait()

    def not_ready(self) -> str:
        """What of it is not ready."""
        return "; ".join(self.service.not_ready())
