"""The resources of quarantined machines, taken out of the inventory that the host reports."""

# Such a machine may have no claim in placement, so its resources would be offered to others, and a build there would
# take more than its host has. The cell's conductor names these machines (`ReserveMachines`); they are on record here,
# so that a restart does not offer their resources. A machine that its host does not carry any more is dropped at once.

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import structlog
from msgspec.structs import replace

from bus.contracts.cell import MAX_RESERVED_AT_ONCE, ReservedMachine, ReserveMachines
from bus.contracts.placement import Inventory, ProviderReport
from compute_agent import metrics
from compute_agent.driver import Driver, DriverUnavailable, Machine, Tree
from compute_agent.records.records import Records

ROUNDING = 1e-9  # a quotient that is a whole number but for its last bits is not rounded up


def with_reserved(tree: Sequence[ProviderReport], machines: Iterable[ReservedMachine]) -> tuple[ProviderReport, ...]:
    """The tree with what these machines take added to `reserved`: never more than there is."""
    # `reserved` counts before the allocation ratio, allocations after it. Rounded up: less is offered, never more.
    taken = amounts_of(machines)
    if not taken:
        return tuple(tree)
    return tuple(
        replace(
            provider,
            inventories={
                name: _reserved(inventory, taken[provider.uuid, name])
                for name, inventory in provider.inventories.items()
            },
        )
        for provider in tree
    )


def amounts_of(machines: Iterable[ReservedMachine]) -> Counter[tuple[str, str]]:
    """The sum of the machines' resources, by provider and class."""
    taken: Counter[tuple[str, str]] = Counter()
    for machine in machines:
        for provider, resources in (machine.allocations or {}).items():
            for name, amount in resources.items():
                taken[provider, name] += amount
    return taken


def uncounted_classes(tree: Sequence[ProviderReport], machine: ReservedMachine) -> tuple[str, ...]:
    """The classes of a machine's resources that its host reports nowhere: they cannot be reserved there."""
    there = {(provider.uuid, name) for provider in tree for name in provider.inventories}
    return tuple(sorted({name for provider, name in amounts_of((machine,)) if (provider, name) not in there}))


def _reserved(inventory: Inventory, amount: int) -> Inventory:
    if not amount:
        return inventory
    more = math.ceil(amount / inventory.allocation_ratio - ROUNDING)
    return replace(inventory, reserved=min(inventory.total, inventory.reserved + more))


log = structlog.get_logger(__name__)

Reserved = Mapping[str, Sequence[ReservedMachine]]  # by host


class Quarantine:
    """The reserved machines of one service. `on_changed(hosts)`: the amounts that these hosts offer have changed."""

    def __init__(
        self, *, service: str, driver: Driver, records: Records, on_changed: Callable[[Sequence[str]], None]
    ) -> None:
        self._service = service
        self._driver = driver
        self._records = records
        self._on_changed = on_changed
        self._newest: dict[str, tuple[int, int]] = {}  # of each host the page of a report that was judged last
        metrics.RESERVED.labels(service, "known").set_function(lambda: records.count_reserved(sized=True))
        metrics.RESERVED.labels(service, "unknown").set_function(lambda: records.count_reserved(sized=False))

    async def reserve(self, command: ReserveMachines) -> None:
        """Apply a command, as far as it is the newest about its hosts and its machines exist."""
        page = (command.epoch, command.sequence)
        newer = {one.host_uuid: one.machines for one in command.hosts if page > self._newest.get(one.host_uuid, (0, 0))}
        try:
            for part in _parts(newer):  # a message may have more than one part
                await self._reserve(page, part)
                await asyncio.sleep(0)
        except DriverUnavailable as fault:  # the next report leads to another command
            log.warning("quarantine.not_checked", service=self._service, reason=str(fault))

    async def _reserve(self, page: tuple[int, int], newer: Reserved) -> None:
        listed = await self._driver.list(tuple(newer))
        trees = {tree[0].uuid: tree for tree in await self._driver.inventory(tuple(newer))}
        self._newest.update((host, page) for host in newer if host in listed)
        changed = self._put({host: self._found(host, newer[host], listed[host]) for host in newer if host in listed})
        for host in changed:
            if (
                host in trees
            ):  # others are offered by another source: a bare-metal node by its Ironic, and only when free
                self._log(host, trees[host])

    def drop_absent(self, listed: Mapping[str, Sequence[Machine]]) -> None:
        """Offer the resources again of machines that these hosts no longer have."""
        kept = {
            host: tuple(one for one in reserved if any(_is_this(one, machine) for machine in machines))
            for host, machines in listed.items()
            if (reserved := self._records.reserved(host))
        }
        if kept:
            self._put(kept)

    def _found(
        self, host: str, named: Sequence[ReservedMachine], machines: Sequence[Machine]
    ) -> tuple[ReservedMachine, ...]:
        """The named machines that exist; the host's own statement of a machine's resources comes first."""
        there = {machine.instance_uuid: machine for machine in machines}
        before = {(one.instance_uuid, one.attempt): one.allocations for one in self._records.reserved(host)}
        found: list[ReservedMachine] = []
        for one in sorted(named, key=lambda one: one.instance_uuid):
            machine = there.get(one.instance_uuid)
            if machine is None or not _is_this(one, machine):
                continue
            known = machine.allocations or one.allocations or before.get((one.instance_uuid, one.attempt))
            found.append(replace(one, allocations=known and {uuid: dict(taken) for uuid, taken in known.items()}))
        return tuple(found)

    def _put(self, hosts: Mapping[str, tuple[ReservedMachine, ...]]) -> list[str]:
        changed = self._records.reserve(hosts)
        if changed:
            self._on_changed(changed)
        return changed

    def _log(self, host: str, tree: Tree) -> None:
        for one in self._records.reserved(host):
            uncounted = uncounted_classes(tree, one)
            if one.allocations and not uncounted:
                log.info("quarantine.reserved", instance=one.instance_uuid, cause=one.instance_uuid, host=host)
            else:
                log.warning(
                    "quarantine.size_unknown",
                    instance=one.instance_uuid,
                    cause=one.instance_uuid,
                    host=host,
                    uncounted=list(uncounted) or "everything",
                    hint="disable the host if this machine's resources matter",
                )


def _parts(hosts: Reserved) -> Sequence[Reserved]:
    """In order, of at most MAX_RESERVED_AT_ONCE machines each, unless one host has more."""
    parts: list[dict[str, Sequence[ReservedMachine]]] = []
    left = 0
    for host, machines in hosts.items():
        if not parts or len(machines) > left:
            parts.append({})
            left = MAX_RESERVED_AT_ONCE
        left -= len(machines)
        parts[-1][host] = machines
    return parts


def _is_this(one: ReservedMachine, machine: Machine) -> bool:
    return (one.instance_uuid, one.attempt) == (machine.instance_uuid, machine.attempt)
