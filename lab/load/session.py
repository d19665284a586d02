"""One load from beginning to record: the run, what watches it, what shows it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Mapping

from rich.console import Console

from berth.bus_client import BuildClient
from berth.config.site import Site
from bus.bus import API
from bus.clock import Clock
from bus.transport import BusError, Transport
from lab.load.live import LiveView
from lab.load.plan import LoadPlan
from lab.load.record import LoadRecord
from lab.load.run import LoadRun
from lab.load.sampler import Sampler
from lab.load.totals import machine, settings_of, totals

# A cell's bus that does not answer within this is not looked at: a load needs none of them.
LOOK_TIMEOUT_S = 3.0


async def recorded(
    client: BuildClient,
    plan: LoadPlan,
    *,
    clock: Clock,
    rng: random.Random,
    chance: random.Random | None = None,
    transports: Mapping[str, Transport] | None = None,
    started: Callable[[LoadRun], None] = lambda run: None,
    console: Console | None = None,
    **settings: object,
) -> LoadRecord:
    """Fire the plan and return its record.

    started: is handed the run before it begins (to interrupt it). console: where it is shown how it goes.
    """
    run = LoadRun(client, plan, clock=clock, rng=rng, chance=chance, keep_watches=False)
    started(run)
    view = None if console is None else LiveView(run, console)
    sampler = Sampler(run, client, clock=clock, transports=transports, on_sample=None if view is None else view.show)
    watching = asyncio.create_task(sampler.watch())
    try:
        await run.go()
    finally:
        sampler.stopping = True
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        if view is not None:
            view.close()
    await sampler.take_sample()
    await sampler.sample_hosts()
    boots, deletes = run.boots.operations(), run.deletes.operations()
    return LoadRecord(
        settings=settings_of(run, **settings),
        totals=totals(run, boots, deletes),
        started_at=run.started_at,
        seconds=round(run.last_end - run.started, 6),
        machine=machine(),
        boots=boots,
        deletes=deletes,
        samples=sampler.samples(),
        utilisation=sampler.utilisation(),
    )


@contextlib.asynccontextmanager
async def looking_on(site: Site, process: str) -> AsyncIterator[dict[str, Transport]]:
    """Connections to every bus of a site that answers, for looking at queues only."""
    opened: dict[str, Transport] = {}
    try:
        for name in (API, *site.cells):
            transport = site.transport(name, process=process)
            try:
                async with asyncio.timeout(LOOK_TIMEOUT_S):
                    await transport.open()
            except (BusError, TimeoutError):  # not ours to enter, or away
                continue
            opened[name] = transport
        yield opened
    finally:
        for transport in opened.values():
            await transport.close()
