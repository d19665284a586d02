"""What the scheduler knows of a Nova cloud beside the book: hosts, services, aggregates, cells and instances.

Everything here is Nova's state as it was read last; nothing is kept. It is put into the scheduler's own host table in
the terms of that table, so that filters and weighers run on Nova's hosts unchanged: a nova-compute is a compute
service, a compute node is a host (its uuid is that of the root provider), a Nova cell is a cell (by its uuid).
Pure: what is read and when comes in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct

from scheduler_worker.config import Aggregate
from scheduler_worker.domain.hosts import HostTable
from scheduler_worker.domain.view import Membership


class ComputeNode(Struct, frozen=True, kw_only=True):
    """A compute node of Nova.

    uuid: its own, which is its root provider's. host: the name of its nova-compute, which aggregates, zones and forced
    hosts name. nodename: of the hypervisor; with most drivers equal to `host`. Names are as Nova has them.
    hypervisor_version: 0: unknown. cpu_info: its plain values by path ("arch", "topology:cores").
    """

    uuid: str
    host: str
    nodename: str
    hypervisor_type: str = ""
    hypervisor_version: int = 0
    host_ip: str = ""
    cpu_info: Mapping[str, str] = {}


class NovaService(Struct, frozen=True, kw_only=True):
    """A nova-compute. is_up: by Nova's service group; False also of one that an operator has forced down, and of one
    whose cell Nova cannot reach.
    """

    host: str
    is_up: bool
    is_disabled: bool = False
    reason: str = ""


class NovaAggregate(Struct, frozen=True, kw_only=True):
    """A host aggregate of Nova; hosts: names of nova-computes. A zone is its metadata `availability_zone`."""

    uuid: str
    name: str
    metadata: Mapping[str, str] = {}
    hosts: tuple[str, ...] = ()


class NovaFacts:
    """The facts as they are known now, and their image in a host table."""

    def __init__(self, table: HostTable) -> None:
        self._table = table
        self.version = 0  # rises with every change of nodes, aggregates or cells: rankings made before are outdated

    # --- read by whoever places

    def node(self, uuid: str) -> ComputeNode | None:
        """The compute node with this root provider; None: Nova has named none."""
        raise NotImplementedError

    def nodes_named(self, host: str | None, nodename: str | None = None) -> tuple[str, ...]:
        """The uuids of the compute nodes of this host, and of this node name (None: any), in order of their uuids."""
        raise NotImplementedError

    def cell_of(self, uuid: str) -> str | None:
        """The uuid of the Nova cell that a compute node is in; None: not known, so nothing is placed there."""
        raise NotImplementedError

    def instances_on(self, uuid: str) -> frozenset[str]:
        """The instances that Nova has on the host of a compute node, as far as it was told."""
        raise NotImplementedError

    def hosts_of(self, instances: Collection[str]) -> dict[str, tuple[str, ...]]:
        """{instance: the compute nodes of the host that Nova has it on}; instances that are nowhere are left out."""
        raise NotImplementedError

    def members(self, instances: Collection[str]) -> dict[str, int]:
        """{compute node: how many of these instances Nova has on its host}, without zeros: `Peers.members`."""
        raise NotImplementedError

    def aggregates(self) -> tuple[Aggregate, ...]:
        """Nova's aggregates as the scheduler's settings have them (`SchedulerConfig.aggregates`), in order of names."""
        raise NotImplementedError

    def membership(self) -> Membership:
        """Which compute nodes are in which aggregate, by Nova's word and not the book's (`Selector.membership`)."""
        raise NotImplementedError

    def unknown(self, roots: Iterable[str]) -> tuple[str, ...]:
        """Those of these root providers that Nova has named no compute node for."""
        raise NotImplementedError
