"""The process of a command that works on the buses and databases of a site: its logs, its loop and its watchdog."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from bus.service.telemetry import configure_logging
from bus.service.watchdog import watchdog_of, watched_loop


def run_in_site(body: Callable[[], Coroutine[Any, Any, int | None]]) -> int | None:
    """Run a command's coroutine to its end; returns its status."""
    configure_logging(process="berth", role="cli", level=os.environ.get("BERTH_CLI_LOG", "error"), style="pretty")
    return uvloop.run(_watched(body))


async def _watched(body: Callable[[], Coroutine[Any, Any, int | None]]) -> int | None:
    async with watched_loop(watchdog_of(os.environ, pid=os.getpid())):
        return await body()
