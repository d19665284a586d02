"""The simulated Ironic of one site: its nodes, its REST endpoint, its notifications on the API bus's broker."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from berth.ironic_stand_in import AmqpAnnouncer, Announcer, Behaviour, IronicStandIn, MemoryAnnouncer
from berth.settings import MEMORY
from berth.site import Site
from bus.bus import API


def announcer(site: Site) -> Announcer:
    """Where the stand-in's notifications go: as Ironic's would, into an exchange of its own."""
    exchange = site.settings.ironic_sync.exchange
    if site.settings.bus.url != MEMORY:
        return AmqpAnnouncer(site.settings.bus.url, exchange)
    assert site.brokers is not None
    return MemoryAnnouncer(site.brokers.broker(API), exchange)


@contextlib.asynccontextmanager
async def simulated_ironic(site: Site, behaviour: Behaviour | None = None) -> AsyncIterator[IronicStandIn | None]:
    """An Ironic with `up.nodes` available nodes for as long as this context; None when there are to be none."""
    if site.settings.up.nodes == 0:
        yield None
        return
    ironic = IronicStandIn(announcer(site), clock=site.clock, rng=site.rng, behaviour=behaviour)
    ironic.farm.plan(site.settings.up.nodes)
    await ironic.start()
    try:
        yield ironic
    finally:
        await ironic.stop()
