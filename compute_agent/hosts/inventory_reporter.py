"""Publishes the inventory of each host's provider tree to placement."""

# It goes out at start, on change, at long intervals (so that a lost or undone update heals), and after each
# reconnection. A host that the driver lists no more leaves placement with the next publication of all. After a start a
# host's inventory waits until the host may be offered (`startup_gate`).

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping

import structlog

from bus.clock import Clock
from bus.contracts.placement import InventoryUpdate
from bus.yielding import YieldingParts
from compute_agent import metrics
from compute_agent.driver import Driver, Tree
from compute_agent.hosts.pending_reports import PendingHostReports, PendingPublisher, PublishingBus
from compute_agent.hosts.quarantine import with_reserved
from compute_agent.hosts.service_name import reporter_name
from compute_agent.hosts.startup_gate import StartupGate
from compute_agent.records.records import Records

log = structlog.get_logger(__name__)

TREES_PER_PUBLISH = 200
HOSTS_AT_ONCE = 1_000  # that may be offered, found in one turn of the event loop
# Inventory travels on durable queues and is published when it changes: repeating it all is for the unforeseen, and for
# 100,000 hosts every minute it would cost placement as much as the boots do. One in this many report intervals.
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
        changes: PendingHostReports,
        startup_gate: StartupGate,
        clock: Clock,
        rng: random.Random,
        report_interval_s: float,
        take_over: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        """`take_over(host)`: the reporter that has this host by placement, if it is taken over now."""
        self._bus = bus
        self._service = service
        self._driver = driver
        self._records = records
        self._startup_gate = startup_gate
        self._clock = clock
        self._take_over = take_over
        self._pending = PendingPublisher(
            changes.inventory, clock=clock, rng=rng, interval_s=report_interval_s * INVENTORY_EVERY
        )

    async def report(self) -> None:
        """Inventory updates, until cancelled."""
        await self._startup_gate.opened.wait()
        await self._pending.run(self._publish)

    async def _publish(self, hosts: list[str] | None) -> None:
        uuids = [host.uuid for host in await self._driver.hosts()] if hosts is None else hosts
        if hosts is None and uuids:  # a driver that lists nothing may have lost its manager
            await self._take_back(uuids)
        uuids = [
            uuid
            async for part in YieldingParts(uuids, HOSTS_AT_ONCE)
            for uuid in part
            if self._startup_gate.is_ready(uuid)
        ]
        for at in range(0, len(uuids), TREES_PER_PUBLISH):
            trees = await self._driver.inventory(uuids[at : at + TREES_PER_PUBLISH])
            if not trees:
                continue
            # Before it is: a process that ends in between would leave a host there that nobody takes back.
            self._records.record_in_placement([tree[0].uuid for tree in trees], is_in=True)
            await self._publish_trees({tree[0].uuid: tree for tree in trees})

    async def _take_back(self, uuids: Collection[str]) -> None:
        """Take hosts out of placement that the driver does not have any more, and on which no machine is on record."""
        # Placement keeps the providers that a consumer still uses, for this reporter alone, and offers nothing of them.
        kept = {*uuids, *self._records.holding_hosts()}
        gone = [host for host in self._records.in_placement() if host not in kept]
        for at in range(0, len(gone), TREES_PER_PUBLISH):
            part = gone[at : at + TREES_PER_PUBLISH]
            log.warning("hosts.withdrawn", service=self._service, hosts=len(part), first=part[0])
            await self._publish_trees(dict.fromkeys(part, ()))
            self._records.record_in_placement(part, is_in=False)

    async def _publish_trees(self, trees: Mapping[str, Tree]) -> None:
        """Publish trees by the uuids of their roots; an empty one takes its root out of placement."""
        # Versions are taken after the driver looked and written down before they are used: a later scan has a
        # higher one, also after a restart.
        first = self._records.versions(len(trees), self._clock.time())
        cause = f"{self._service}:{self._records.epoch}"
        updates = [self._update(root, tree, first + number) for number, (root, tree) in enumerate(trees.items())]
        await self._bus.publish_all([(update, cause) for update in updates])
        metrics.REPORTS.labels(self._service).inc(len(trees))

    def _update(self, root: str, tree: Tree, version: int) -> InventoryUpdate:
        return InventoryUpdate(
            reporter=reporter_name(self._service),
            version=version,
            root_uuid=root,
            providers=with_reserved(tree, self._records.reserved(root)) if tree else (),
            former_reporter=self._take_over(root) if tree else None,  # what is not here is taken from nobody
        )
