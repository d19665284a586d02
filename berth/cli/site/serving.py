"""`berth serve`: `web`, the pages and `/api/v1`, and `fencer`, which fences silent hosts; they run on."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Annotated

import typer

from berth.cli.common import (
    client,
    host_and_port,
    open_in_time,
    settings_of,
)
from berth.cli.output import (
    out,
)
from berth.config.settings import Settings
from berth.config.site import Site, process_name
from berth.fencing.fencer import Fencer
from berth.fencing.plugin import load
from berth.web.oidc import Oidc
from berth.web.server import DEFAULT_PORT, WebServer
from berth.web.sign_in_sessions import Access, read_tokens
from bus.clock import SystemClock
from bus.service.main import STOP_SIGNALS, freeze_loaded_objects
from bus.service.settings import SettingsError
from bus.service.telemetry import configure_logging
from placement_worker.rest.config import with_oslo_conf
from placement_worker.rest.keystone import Keystone

DEFAULT_LISTEN = f"127.0.0.1:{DEFAULT_PORT}"


Tokens = Annotated[
    Path | None,
    typer.Option(help="A TOML file of [[tokens]]: sha256, name, role (project, reader, operator) and project."),
]


async def web(
    settings: Settings,
    listen: Annotated[str, typer.Option(help="Serve at HOST:PORT (port 0: any).")] = DEFAULT_LISTEN,
    tokens: Tokens = None,
    keystone: Annotated[
        bool, typer.Option("--keystone", help="Take tokens of the Keystone of [placement.rest.keystone], too.")
    ] = False,
) -> None:
    """Serve the pages and the HTTP API.

    The API is at /api/v1. It runs until SIGTERM or SIGINT, or until the `berth up` that has its bus ends (status 3).

    Without --tokens, --keystone and `web.oidc` it listens on loopback alone, and everyone who can reach it there may do
    everything.
    """
    host, port = host_and_port(listen, "--listen")
    telemetry = settings.telemetry
    configure_logging(process="web", role="web", level=telemetry.log_level, style=telemetry.log_format)
    site, process = Site(settings), process_name("web")
    async with contextlib.AsyncExitStack() as closing:
        access = _access(settings, site, tokens, keystone=keystone, closing=closing)
        server = WebServer(site.environment(process), settings, host=host, port=port, access=access)
        stop = asyncio.Event()
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await open_in_time(server.open())
        closing.push_async_callback(server.close)
        freeze_loaded_objects()
        out.print(f"berth is at {server.url}", soft_wrap=True, markup=False)
        await server.serve_until(stop)


def _access(
    settings: Settings, site: Site, tokens: Path | None, *, keystone: bool, closing: contextlib.AsyncExitStack
) -> Access:
    """How callers are known. Raises SettingsError."""
    known = provider = None
    if keystone:
        config = with_oslo_conf(settings.placement.rest).keystone
        if not config.auth_url:
            raise SettingsError("web.keystone", "--keystone needs placement.rest.keystone.auth_url")
        known = Keystone(config, site.clock)
        closing.push_async_callback(known.close)
    if settings.web.oidc.issuer:
        provider = Oidc(settings.web.oidc, site.clock)
        closing.push_async_callback(provider.close)
    return Access(None if tokens is None else read_tokens(tokens), site.clock, known, provider)


async def fencer(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Log which hosts are due; switch off none.")] = False,
) -> None:
    """Switch off and fence hosts that stay silent.

    Until it is ended; by the plug-in and the bounds in `[fencing]`. Hosts that share a compute service never count.
    """
    settings = settings_of(context)
    telemetry = settings.telemetry
    configure_logging(process="fencer", role="fencer", level=telemetry.log_level, style=telemetry.log_format)
    clock = SystemClock()
    plugin = load(settings.fencing, clock=clock)
    async with client(settings) as berth:
        running = asyncio.ensure_future(Fencer(berth, plugin, settings.fencing, clock=clock).run(dry_run=dry_run))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, running.cancel)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await running
        finally:
            await plugin.close()
