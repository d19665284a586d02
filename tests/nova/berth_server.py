"""Placement, and a front of Nova, in one process; made by fork, see `forks`. Run by berth's interpreter.

Unlike `berth nova serve` it keeps its book while the front starts again with other settings, as a test's Nova keeps its
Placement while its scheduler does; and each of the two may be left out, for processes that are killed alone.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import host_names
import msgspec
from forks import serve

import nova_scheduler.app
import placement_worker.app
from berth.config.rest_address import with_rest_at
from berth.config.settings import Settings
from berth.config.site import Brokers, Site, process_name
from bus.clock import SystemClock
from bus.service.environment import Environment
from bus.service.main import run_process
from bus.service.service import WorkerRuntime
from nova_scheduler.decide.select_destinations import Destinations
from nova_scheduler.wire.envelope import Call
from placement_worker.service import PlacementService
from placement_worker.store.memory_rows import MemoryPlacementRows
from placement_worker.store.memory_table import MemoryPlacementTable
from scheduler_worker import plugins
from scheduler_worker.config import SchedulerConfig

POLL_S = 0.02
ROLE = "nova"


class Holding(Destinations):
    """Claims, and does not answer."""

    file: Path

    async def call(self, call: Call) -> object:
        """Never returns from one that claims."""
        result = await super().call(call)
        if call.is_answered:
            self.file.touch()
            await asyncio.Event().wait()
        return result


def run(given: dict[str, Any]) -> None:
    """{"settings": of placement; "api": HOST:PORT of its REST API, "": there is none; "front": a file with
    {"settings": of the front, "weights": of hosts by name}, which starts when the file comes and anew when it changes;
    the file `served` beside it has those that calls are taken with; "holds": a file that it makes instead of an answer,
    "": it answers}.
    """
    if given.get("holds"):
        Holding.file = Path(given["holds"])
        nova_scheduler.app.Destinations = Holding
    settings = msgspec.convert(given["settings"], Settings)
    if given["api"]:
        settings = with_rest_at(settings, given["api"])
    process = process_name(ROLE)
    here = Site(settings, brokers=Brokers(SystemClock()), database_url="")
    sys.exit(
        run_process(
            lambda env: servers(env, here, settings, bool(given["api"]), Path(given["front"])),
            lambda: here.environment(process, takes_cells=False),
            role=ROLE,
            process=process,
            log_level="info",
            log_style="json",
        )
    )


def servers(env: Environment, here: Site, settings: Settings, has_api: bool, front: Path) -> WorkerRuntime:
    """Both as one service."""
    service = WorkerRuntime(ROLE, clock=env.clock)
    if has_api:
        book = PlacementService(MemoryPlacementRows(MemoryPlacementTable(env.clock).session()))
        placement = placement_worker.app.build(env, settings.placement, (), store=book, health_with_rest=True)
        service.add_task("placement", lambda: placement.run(asyncio.Event()))
    stop, ended = asyncio.Event(), asyncio.Event()

    async def drain(_grace_s: float) -> None:
        stop.set()
        await ended.wait()

    service.add_task("front", lambda: _fronts(here, front, stop, ended))
    service.add_drain(drain)
    return service


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


async def _fronts(here: Site, file: Path, stop: asyncio.Event, ended: asyncio.Event) -> None:
    """A front with the settings of the file, as often as they change."""
    told = ""
    try:
        while not stop.is_set():
            text = _text(file)
            if text != told:
                told = text
                await _front(here, file, told, stop)
            await asyncio.sleep(POLL_S)
    finally:
        ended.set()
    await asyncio.Event().wait()


async def _front(here: Site, file: Path, told: str, stop: asyncio.Event) -> None:
    """One front, until its settings change."""
    given = json.loads(told)
    host_names.WEIGHTS = given["weights"]
    its = msgspec.convert(given["settings"], Settings)
    env = here.environment(process_name("front"), takes_cells=False)
    service = nova_scheduler.app.build(env, its.nova, its.scheduler)
    ends = asyncio.Event()
    running = asyncio.create_task(service.run(ends))
    served = False
    while not running.done():
        if stop.is_set() or _text(file) != told:
            ends.set()
        if not served and not service.not_ready():
            file.with_name("served").write_text(told)
            served = True
        await asyncio.wait([running], timeout=POLL_S)
    await running


if __name__ == "__main__":
    # They are imported by name: now, and not by each front.
    plugins.filters(SchedulerConfig())
    plugins.weighings(SchedulerConfig())
    serve(run)
