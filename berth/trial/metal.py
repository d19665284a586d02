"""The simulated Ironic of one site: its nodes, its REST endpoint, its notifications on the API bus's broker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from berth.settings import MEMORY
from berth.site import Site
from berth.trial.ironic_stand_in import AmqpAnnouncer, Behaviour, IronicStandIn, MemoryAnnouncer, NotificationAnnouncer
from berth.trial.ironic_stand_in.state_file import load, save, save_changes
from bus.bus import API


def announcer(site: Site) -> NotificationAnnouncer:
    """Where the stand-in's notifications go: as Ironic's would, into an exchange of its own."""
    exchange = site.settings.ironic_sync.exchange
    if site.settings.bus.url != MEMORY:
        return AmqpAnnouncer(site.settings.bus.url, exchange)
    assert site.brokers is not None
    return MemoryAnnouncer(site.brokers.broker(API), exchange)


@contextlib.asynccontextmanager
async def simulated_ironic(
    site: Site, behaviour: Behaviour | None = None, *, kept: Path | None = None
) -> AsyncIterator[IronicStandIn | None]:
    """An Ironic with `up.nodes` available nodes for as long as this context; None when there are to be none.

    kept: a file that the nodes come from and are kept in; then they are as they were left, and as many as ever.
    """
    if site.settings.up.nodes == 0:
        yield None
        return
    ironic = IronicStandIn(announcer(site), clock=site.clock, rng=site.rng, behaviour=behaviour)
    if kept is None or not load(ironic.pool, kept):
        ironic.pool.plan(site.settings.up.nodes)
    await ironic.start()
    save_task = asyncio.create_task(save_changes(ironic.pool, kept, site.clock)) if kept is not None else None
    try:
        yield ironic
    finally:
        await ironic.stop()
        if kept is not None and save_task is not None:
            save_task.cancel()
            await asyncio.gather(save_task, return_exceptions=True)
            save(ironic.pool, kept)


@contextlib.asynccontextmanager
async def ironic_of(site: Site) -> AsyncIterator[str]:
    """The address of the Ironic that `berth up` works with: the settings', else a simulated one's; empty: none."""
    if site.settings.up.ironic_url:
        yield site.settings.up.ironic_url
        return
    async with simulated_ironic(site, kept=kept_in(site)) as ironic:
        yield ironic.url if ironic is not None else ""


def kept_in(site: Site) -> Path:
    """Where `berth up` keeps its nodes: beside the embedded database, which knows the instances on them."""
    return site.settings.state / "ironic.json"
