"""`berth fencer`: switch silent hosts off and fence them, without a person."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Annotated

import typer

from berth.commands.common import client, run, settings_of
from berth.fencing.fencer import Fencer
from berth.fencing.plugin import load
from bus.clock import SystemClock
from bus.service.telemetry import configure_logging


def fencer(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Log which hosts are due; switch off none.")] = False,
) -> None:
    """Switch off and fence hosts that stay silent.

    Until it is ended; by the plug-in and the bounds in `[fencing]`. Hosts that share a compute service never count.
    """

    async def body() -> None:
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

    run(body)
