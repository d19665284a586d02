"""Asks the compute services of a cell what machines they have, for a recovery."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import structlog
from msgspec import Struct, field
from msgspec.structs import replace

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.listing import ListedMachine, ListMachines, MachinesPage
from bus.faults import Fault
from cell_conductor.config import ConductorConfig
from cell_conductor.hosts.lease_controller import LeaseController
from cell_conductor.store.port import InstanceStore

log = structlog.get_logger(__name__)

MAX_TRIES = 5  # a service that is up and does not list is as one that is down
MAX_PAGES = 1_000  # of one service
AGAIN_S = 2.0  # a service has not answered


class MachineListing(Struct):
    """What the services of a cell have, who were asked under this incarnation of its database."""

    incarnation: int
    machines: dict[str, list[ListedMachine]] = field(default_factory=dict)
    hosts: set[str] = field(default_factory=set)  # the hosts that were read
    silent: set[str] = field(default_factory=set)  # services that have not listed
    without: set[str] = field(default_factory=set)  # services without machines, by an operator's decision

    def add(self, pages: Iterable[MachinesPage]) -> None:
        """Of one service, all of them."""
        for page in pages:
            self.hosts.update(page.hosts)
            for one in page.machines:
                self.machines.setdefault(one.instance_uuid, []).append(one)

    def of(self, services: Collection[str]) -> set[str]:
        """The instances of which these have a machine."""
        return {uuid for uuid, machines in self.machines.items() if any(one.service in services for one in machines)}


class MachineCollector:
    """One conductor's. leases: which services are up."""

    def __init__(
        self, store: InstanceStore, bus: Bus, *, clock: Clock, config: ConductorConfig, leases: LeaseController
    ) -> None:
        self._store = store
        self._bus = bus
        self._clock = clock
        self._config = config
        self._leases = leases

    async def collect(self) -> MachineListing:
        """What each service that is up has. Those that are down, and may have hosts all the same, are silent."""
        failed = set(self._leases.up() or ())
        incarnation, down = self._store.incarnation, set(self._leases.down())
        async with self._store.transaction() as transaction:
            absent = await transaction.absent_services()
        without = {*self._leases.deleted(), *(name for name, has_nothing in absent.items() if has_nothing)} - failed
        silent = (down | absent.keys()) - failed - without
        listing = MachineListing(incarnation, silent=silent, without=without)
        for number in range(MAX_TRIES):
            if number:
                await self._clock.sleep(AGAIN_S)
            left, failed = failed, set[str]()
            pages: dict[str, list[MachinesPage]] = {}
            queries = [ListMachines(service=service, database_id=self._store.database_id) for service in sorted(left)]
            while queries:
                queries = await self._next_pages(queries, pages, failed)
            for service, listed in pages.items():
                if service not in failed:
                    listing.add(listed)
            if not failed:
                break
        listing.silent |= failed
        return listing

    async def _next_pages(
        self, queries: Sequence[ListMachines], pages: dict[str, list[MachinesPage]], failed: set[str]
    ) -> list[ListMachines]:
        causes = [one.database_id for one in queries]
        answers = await self._bus.request_all(
            queries, MachinesPage, timeout_s=self._config.answer_timeout_s, causes=causes
        )
        following: list[ListMachines] = []
        for query, answer in zip(queries, answers, strict=True):
            if isinstance(answer, Fault):
                log.warning("recovery.not_listed", service=query.service, code=answer.code, reason=str(answer))
                failed.add(query.service)
                continue
            pages.setdefault(query.service, []).append(answer)
            after = answer.next_host, answer.next_instance
            is_further = after > (query.after_host, query.after_instance)
            if answer.more and is_further and len(pages[query.service]) < MAX_PAGES:
                following.append(replace(query, after_host=after[0], after_instance=after[1]))
            elif answer.more:
                failed.add(query.service)  # it would never end
        return following
