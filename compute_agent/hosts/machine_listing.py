"""Everything that the hosts of one service have, in pages, for a conductor whose database was restored."""

# The hosts are read anew for each page, and what they have is compared with nothing: a record only adds what a host
# does not know of a machine, and the builds of which no host may list what it has.

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence

from bus.contracts.base import encode
from bus.contracts.cell import UNKNOWN_ATTEMPT
from bus.contracts.listing import (
    MAX_LISTED_BYTES,
    MAX_LISTED_HOSTS,
    MAX_LISTED_MACHINES,
    ListedMachine,
    ListMachines,
    MachinesPage,
)
from compute_agent.driver import Driver, Machine
from compute_agent.hosts.scan import MachineScanner
from compute_agent.records.attempt import AttemptPhase, may_be_built
from compute_agent.records.records import Key, Records


class MachineLister:
    """One service's; reads only. is_busy: whether a change or a destruction of a machine is under way.
    pending_destroys: those that are to be destroyed.
    """

    def __init__(
        self,
        *,
        service: str,
        driver: Driver,
        records: Records,
        scanner: MachineScanner,
        is_busy: Callable[[Key], bool],
        pending_destroys: Callable[[], Sequence[Key]],
    ) -> None:
        self._service = service
        self._driver = driver
        self._records = records
        self._scanner = scanner
        self._is_busy = is_busy
        self._pending_destroys = pending_destroys

    async def list(self, query: ListMachines) -> MachinesPage:
        """One page: as many hosts as its bounds allow, at least one machine. Raises DriverUnavailable."""
        behind = (one for one in self._scanner.hosts if one >= query.after_host)
        hosts = heapq.nsmallest(MAX_LISTED_HOSTS + 1, behind)
        listed = await self._driver.list(hosts)
        unlisted: dict[str, set[str]] = defaultdict(set)
        for at, instance in (*self._records.unlisted(), *self._pending_destroys()):
            unlisted[at].add(instance)
        page, size, read = list[ListedMachine](), 0, list[str]()
        after = (query.after_host, query.after_instance)
        for host in hosts[:MAX_LISTED_HOSTS]:
            machines = listed.get(host)
            if machines is None:
                continue
            for one in self._on_host(host, machines, unlisted[host], query.database_id):
                if (host, one.instance_uuid) <= after:
                    continue
                size += len(encode(one))
                if page and (len(page) == MAX_LISTED_MACHINES or size > MAX_LISTED_BYTES):
                    last = page[-1]
                    return self._page(page, read, host, last.instance_uuid if last.host_uuid == host else "")
                page.append(one)
            read.append(host)
        if len(hosts) > MAX_LISTED_HOSTS:
            return self._page(page, read, hosts[MAX_LISTED_HOSTS])
        return MachinesPage(machines=tuple(page), hosts=tuple(read))

    @staticmethod
    def _page(machines: Sequence[ListedMachine], hosts: Sequence[str], host: str, instance: str = "") -> MachinesPage:
        return MachinesPage(
            machines=tuple(machines), hosts=tuple(hosts), more=True, next_host=host, next_instance=instance
        )

    def _on_host(
        self, host: str, machines: Sequence[Machine], unlisted: Collection[str], database_id: str
    ) -> Iterator[ListedMachine]:
        """In the order of instances: what the host has, and what is under way there and it may not list."""
        by_instance: dict[str, Machine | None] = dict.fromkeys(unlisted)
        by_instance.update((one.instance_uuid, one) for one in machines)
        for instance, machine in sorted(by_instance.items(), key=lambda pair: pair[0]):
            yield self._machine(host, instance, machine, database_id)

    def _machine(self, host: str, instance: str, machine: Machine | None, database_id: str) -> ListedMachine:
        key = (host, instance)
        entry = self._records.get(key)
        if machine is not None:
            attempt, owner, is_built = machine.attempt, machine.database_id, machine.built
        else:
            attempt, owner, is_built = (entry.attempt, entry.database_id, False) if entry else (None, None, False)
        own = entry if entry is not None and entry.attempt == attempt else None
        is_built = is_built and (own is None or may_be_built(own))
        kept = self._records.spec_of(key, attempt) if owner == database_id else None
        taken = machine.allocations if machine is not None else None
        allocations = taken or (kept.allocations if kept is not None else None)
        return ListedMachine(
            instance_uuid=instance,
            attempt=attempt or UNKNOWN_ATTEMPT,
            host_uuid=host,
            service=self._service,
            host=self._scanner.name_of(host),
            complete=is_built and machine is not None and not machine.tag_only,
            failed=own is not None and own.phase is AttemptPhase.FAILED and not is_built,
            runs=machine is not None and machine.runs,
            busy=self._is_busy(key),
            foreign=owner != database_id,
            project_id=kept.spec.project_id if kept is not None and kept.spec is not None else None,
            spec=None if kept is None else kept.spec,
            allocations={uuid: dict(amounts) for uuid, amounts in allocations.items()} if allocations else None,
        )
