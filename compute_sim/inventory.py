"""Publishes the inventory of each host's provider tree to the resource book.

It goes out at start, on change, at long intervals (so that a lost or undone update heals), and after each reconnection.
After a start a host's inventory waits until the host may be offered (`offering`).
"""

from __future__ import annotations

import random
from collections.abc import Callable

from bus.clock import Clock
from bus.contracts.placement import NEWER_FIELDS, InventoryUpdate
from bus.turns import InParts
from compute_sim import metrics
from compute_sim.domain.reserved import with_reserved
from compute_sim.driver import Driver, Tree
from compute_sim.host_changes import HostChanges
from compute_sim.name import source_of
from compute_sim.offering import Offering
from compute_sim.publishing import PendingPublisher, PublishingBus
from compute_sim.records import Records

TREES_PER_PUBLISH = 200
HOSTS_AT_ONCE = 1_000  # that may be offered, found in one turn of the event loop
# Inventory travels on durable queues and is published when it changes: repeating it all is for the unforeseen, and for
# 100,000 hosts every minute it would cost the resource book as much as the boots do. One in this many report intervals.
INVENTORY_EVERY = 10


class InventoryReporter:
    """Publishes the inventories of one service's hosts, less the resources of quarantined machines."""

    def __init__(
        self,
        bus: PublishingBus,
        *,
        service: str,
        driver: Driver,
        records: Records,
        changes: HostChanges,
        offering: Offering,
        clock: Clock,
        rng: random.Random,
        report_interval_s: float,
        take_over: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        """`take_over(host)`: the source that has this host by the book, if it is taken over now."""
        self._bus = bus
        self._service = service
        self._driver = driver
        self._records = records
        self._offering = offering
        self._clock = clock
        self._take_over = take_over
        self._pending = PendingPublisher(
            changes.inventory, clock=clock, rng=rng, interval_s=report_interval_s * INVENTORY_EVERY
        )

    async def report(self) -> None:
        """Inventory updates, until cancelled."""
        await self._offering.begun.wait()
        await self._pending.run(self._publish)

    async def _publish(self, hosts: list[str] | None) -> None:
        uuids = [host.uuid for host in await self._driver.hosts()] if hosts is None else hosts
        uuids = [uuid async for part in InParts(uuids, HOSTS_AT_ONCE) for uuid in part if self._offering.offers(uuid)]
        for at in range(0, len(uuids), TREES_PER_PUBLISH):
            trees = await self._driver.inventory(uuids[at : at + TREES_PER_PUBLISH])
            if not trees:
                continue
            # Versions are taken after the driver looked and written down before they are used: a later scan has a
            # higher one, also after a restart.
            first = self._records.versions(len(trees), self._clock.time())
            cause = f"{self._service}:{self._records.epoch}"
            updates = [self._update(tree, first + number) for number, tree in enumerate(trees)]
            await self._bus.publish_all([(update, cause) for update in updates])
            metrics.REPORTS.labels(self._service).inc(len(trees))

    def _update(self, tree: Tree, version: int) -> InventoryUpdate:
        root = tree[0].uuid
        return InventoryUpdate(
            source=source_of(self._service),
            version=version,
            root_uuid=root,
            providers=with_reserved(tree, self._records.reserved(root)),
            may_ignore=NEWER_FIELDS,
            takes_over=self._take_over(root),
        )
