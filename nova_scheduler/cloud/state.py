"""What the scheduler knows of a Nova cloud beside placement, as read last: a nova-compute is a compute service, a
compute node a host (by its root provider's uuid), a Nova cell a cell (by its uuid) of the scheduler's own host table,
so filters and weighers run unchanged. Pure: what is read and when comes in.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.cell import HostReport, HostStates, ServiceDown, ServiceRemoved, ServiceStates
from nova_scheduler.cloud.host_facts import HostHardware, HostStats
from scheduler_worker.config import Aggregate
from scheduler_worker.filters.image import ANY, SUPPORTED
from scheduler_worker.hosts.host_table import HostTable
from scheduler_worker.hosts.service_directory import ServiceDirectory
from scheduler_worker.selection.host_view import Membership

MAX_NODES = 1_000_000
MAX_CPUS = 1_000  # descriptions of processors that are shared
# One life of every nova-compute: Nova's services announce no epochs.
EPOCH = 1
# What a hypervisor of each type runs, as its driver tells Nova's scheduler and no API tells us: (types that an image
# may name, modes).
HYPERVISORS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "qemu": (("kvm", "qemu"), ("hvm",)),
    "kvm": (("kvm", "qemu"), ("hvm",)),
    "lxc": (("lxc",), ("exe",)),
    "parallels": (("parallels",), ("exe", "hvm")),
    "vmware vcenter server": (("vmware",), ("hvm",)),
    "zvm": (("zvm",), ("hvm",)),
    "ironic": (("baremetal",), ("hvm",)),
    "fake": (("fake",), ("hvm",)),
}
BESIDE = {"x86_64": ("i686",), "aarch64": ("armv7l",), "ppc64le": ("ppc64",)}  # what such a processor runs as well
ARCHITECTURE = "arch"  # in a compute node's cpu_info
DOWN = "service.silent"


class ComputeNode(Struct, frozen=True, kw_only=True):
    """A compute node of Nova. Names are as Nova has them."""

    uuid: str  # its root provider's
    host: str  # its nova-compute's name, which aggregates, zones and forced hosts name
    nodename: str  # of the hypervisor; with most drivers equal to `host`
    hypervisor_type: str = ""
    hypervisor_version: int = 0  # 0: unknown
    host_ip: str = ""
    cpu_info: Mapping[str, str] = {}  # its plain values by path ("arch", "topology:cores")


def supported_instances(node: ComputeNode, hardware: HostHardware | None = None) -> str:
    """What runs on a compute node, in the form of `ImagePropertiesFilter`: as its driver lists it, where its cell's
    database is read. Else what Nova's API does not tell is any, and no architecture is emulated.
    """
    if hardware is not None and hardware.supported_instances is not None:
        return ", ".join("/".join(triple) for triple in hardware.supported_instances)
    arch = node.cpu_info.get(ARCHITECTURE, "").lower()
    types, modes = HYPERVISORS.get(node.hypervisor_type.lower(), ((ANY,), (ANY,)))
    architectures = (arch, *BESIDE.get(arch, ())) if arch else (ANY,)
    return ", ".join("/".join(triple) for triple in product(architectures, types, modes))


class NovaService(Struct, frozen=True, kw_only=True):
    """A nova-compute."""

    host: str
    # by Nova's service group; also False when an operator has forced it down, or Nova cannot reach its cell
    is_up: bool
    is_disabled: bool = False
    reason: str = ""
    is_read: bool = True  # False: only its host could be read


class NovaAggregate(Struct, frozen=True, kw_only=True):
    """A host aggregate of Nova. A zone is its metadata `availability_zone`."""

    uuid: str
    name: str
    metadata: Mapping[str, str] = {}
    hosts: tuple[str, ...] = ()  # names of nova-computes
    is_read: bool = True  # False: its name and metadata could not be read


def host_table() -> HostTable:
    """A table for this state. Nova lists a nova-compute until it is deleted, and it has its hosts until then."""
    return HostTable(ServiceDirectory(down_hold_s=math.inf))


class _Announced(Struct, frozen=True):
    """What the host table was told of one nova-compute last."""

    cell: str
    hosts: tuple[HostReport, ...]


class NovaState:
    """The state of a Nova cloud as it was last read, and its image in a host table."""

    def __init__(self, table: HostTable) -> None:
        self._table = table
        self.version = 0  # rises with every change of nodes, aggregates or cells: rankings made before are outdated
        self._nodes: dict[str, ComputeNode] = {}
        self._by_host: dict[str, list[str]] = {}
        self._by_lower: dict[str, list[str]] = {}  # and by the host's name in lower case
        self._by_name: dict[str, list[str]] = {}
        self._services: dict[str, NovaService] = {}
        self._cells: dict[str, str] = {}
        self._aggregates: dict[str, NovaAggregate] = {}
        self._membership: Membership | None = None
        self._supported: frozenset[str] | None = None
        self._announced: dict[str, _Announced] = {}
        self._is_announced = True  # whether that is all that is known
        self._sequence = 0
        self._cpus: dict[tuple[tuple[str, str], ...], Mapping[str, str]] = {}
        self._hardware: Mapping[str, HostHardware] = {}
        self._lasting: dict[str, tuple[object, ...]] = {}

    # --- read by whoever places

    def node(self, uuid: str) -> ComputeNode | None:
        """The compute node with this root provider; None: Nova has named none."""
        return self._nodes.get(uuid)

    def nodes_named(self, host: str | None, nodename: str | None = None) -> tuple[str, ...]:
        """The uuids of the compute nodes of this host, and of this node name (None: any), in order of their uuids.

        As in Nova, the host of a request is it in any case; a node is not.
        """
        if host is None:
            return tuple(sorted(self._nodes) if nodename is None else self._by_name.get(nodename, ()))
        uuids = self._by_lower.get(host.lower(), ())
        return tuple(uuid for uuid in uuids if nodename in (None, self._nodes[uuid].nodename))

    def cell_of(self, uuid: str) -> str | None:
        """The uuid of the Nova cell that a compute node is in; None: not known, so nothing is placed there."""
        node = self._nodes.get(uuid)
        return None if node is None else self._cells.get(node.host)

    def has_cell(self, uuid: str) -> bool:
        """Whether a host is known in this Nova cell."""
        return uuid in self._cells.values()

    def cells(self) -> frozenset[str]:
        """The cells (uuids) of the compute nodes that are known."""
        return frozenset(cell for one in self._nodes.values() if (cell := self._cells.get(one.host)) is not None)

    def aggregates(self) -> tuple[Aggregate, ...]:
        """Nova's aggregates as the scheduler's settings have them (`SchedulerConfig.aggregates`), in order of names."""
        return self.membership().aggregates

    def membership(self) -> Membership:
        """Which compute nodes are in which aggregate, by Nova's word, not placement's (`SelectorConfig.membership`)."""
        if self._membership is None:
            ordered = sorted(self._aggregates.values(), key=lambda one: (one.name, one.uuid))
            self._membership = Membership(
                tuple(Aggregate(uuid=one.uuid, name=one.name, metadata=dict(one.metadata)) for one in ordered),
                {
                    one.uuid: frozenset(uuid for host in one.hosts for uuid in self._by_host.get(host, ()))
                    for one in ordered
                },
            )
        return self._membership

    def supported(self) -> frozenset[str]:
        """What runs on the hosts, each list once (`supported_instances`)."""
        if self._supported is None:
            self._supported = frozenset(
                supported_instances(node, self._hardware.get(uuid)) for uuid, node in self._nodes.items()
            )
        return self._supported

    def unknown(self, roots: Iterable[str]) -> tuple[str, ...]:
        """Those of these root providers that Nova has named no compute node for."""
        return tuple(uuid for uuid in roots if uuid not in self._nodes)

    def recorded_nodes(self) -> frozenset[str]:
        """The uuids of all compute nodes that Nova has named."""
        return frozenset(self._nodes)

    def hosts(self) -> tuple[str, ...]:
        """All hosts that Nova has named, in order."""
        return tuple(sorted(self._services.keys() | self._by_host.keys()))

    def without_cell(self) -> tuple[str, ...]:
        """The hosts with compute nodes whose cell is not known, in order."""
        return tuple(sorted(self._by_host.keys() - self._cells.keys()))

    def without_nodes(self) -> frozenset[str]:
        """The hosts whose nova-compute is up and of which no compute node is known."""
        return frozenset(one.host for one in self._services.values() if one.is_up and one.host not in self._by_host)

    # --- written by the facts keeper

    def put_services(self, services: Iterable[NovaService], *, complete: bool) -> None:
        """Take the states of nova-computes over. complete: those are all, and others are gone. Otherwise they come with
        compute nodes, and count before these do: they may be older than what is known, which stays, and are news of
        hosts alone that no node is known of. Another one's service is gone. One that could not be read stays as known.
        """
        given = (one if one.is_read else self._services.get(one.host, one) for one in services)
        found = {one.host: one for one in given if complete or one.host not in self._by_host}
        after = found if complete else {**found, **self._services}
        self._is_announced = self._is_announced and after == self._services
        self._services = after

    def put_nodes(self, nodes: Iterable[ComputeNode], *, complete: bool, among: Collection[str] | None = None) -> None:
        """Take compute nodes over. complete: those are all that were known (`among`: then; None: now), and others are
        gone, but for those of a host whose nova-compute is not up: Nova leaves the nodes of a cell out that it cannot
        reach.
        """
        after = {one.uuid: self._shared(one) for one in nodes}
        if complete:
            down = {one.host for one in self._services.values() if not one.is_up}
            newer = frozenset[str]() if among is None else self._nodes.keys() - among
            kept = {uuid: one for uuid, one in self._nodes.items() if one.host in down or uuid in newer}
            after = {**kept, **after}
        else:
            after = {**self._nodes, **after}
        if after == self._nodes or len(after) > MAX_NODES:
            return
        self._nodes = after
        self._by_host, self._by_lower, self._by_name = {}, {}, {}
        for uuid in sorted(after):
            self._by_host.setdefault(after[uuid].host, []).append(uuid)
            self._by_lower.setdefault(after[uuid].host.lower(), []).append(uuid)
            self._by_name.setdefault(after[uuid].nodename, []).append(uuid)
        self._changed()

    def put_aggregates(self, aggregates: Iterable[NovaAggregate], *, complete: bool, but: Collection[str] = ()) -> None:
        """Take aggregates over. complete: those are all, and others are gone. but: these (uuids) stay as they are. Of
        one that could not be read the hosts are newer than what is known.
        """
        found = {
            one.uuid: one if one.is_read else replace(self._aggregates.get(one.uuid, one), hosts=one.hosts)
            for one in aggregates
            if one.uuid not in but
        }
        kept = {uuid: one for uuid, one in self._aggregates.items() if not complete or uuid in but}
        after = {**kept, **found}
        if after != self._aggregates:
            self._aggregates = after
            self._changed()

    def drop_aggregate(self, uuid: str) -> None:
        """An aggregate is gone."""
        if self._aggregates.pop(uuid, None) is not None:
            self._changed()

    def put_cells(self, cells: Mapping[str, str]) -> None:
        """Take the cells of hosts over: {host: cell uuid}, of all hosts that are in one."""
        if cells != self._cells:
            self._cells = dict(cells)
            self._changed()

    def put_hardware(self, hardware: Mapping[str, HostHardware]) -> None:
        """Take what the cells' databases tell of all compute nodes over, but what changes with each instance: that are
        metrics of the hosts.
        """
        self._hardware = hardware
        lasting = {uuid: _lasting(one) for uuid, one in hardware.items()}
        if lasting != self._lasting:
            self._lasting = lasting
            self._supported, self._is_announced = None, False

    def announce(self, now_s: float) -> None:
        """Bring the host table up to this state. now_s: monotonic seconds."""
        if not self._is_announced:
            self._announce_hosts(now_s)
            self._is_announced = True
        self._digest(now_s)

    def _announce_hosts(self, now_s: float) -> None:
        reports = self._reports()
        for host in [host for host in self._announced if host not in reports]:
            gone = self._announced.pop(host)
            self._table.delete_service(ServiceRemoved(service=host, cell=gone.cell), now_s)
        changed = [host for host, one in reports.items() if self._announced.get(host) != one]
        # A node may have changed its service. The table lets no service take what another lists, so all let go first.
        for host in changed:
            before = self._announced.get(host)
            if before is not None and before.cell != reports[host].cell:
                self._table.delete_service(ServiceRemoved(service=host, cell=before.cell), now_s)
            elif before is not None:
                stay = {one.uuid for one in reports[host].hosts}
                kept = tuple(one for one in before.hosts if one.uuid in stay)
                self._notify(host, _Announced(before.cell, kept), now_s)
        for host in changed:
            self._notify(host, reports[host], now_s)
        self._announced = reports

    def _reports(self) -> dict[str, _Announced]:
        """Of every nova-compute whose cell is known. Of what is in an aggregate that is not known nobody can tell whom
        it is for: it takes no builds.
        """
        unread = {host: one.uuid for one in self._aggregates.values() if not one.is_read for host in one.hosts}
        reports: dict[str, _Announced] = {}
        for host, known in sorted(self._services.items()):
            if host not in self._cells:
                continue
            why = f"aggregate {unread[host]} cannot be read" if host in unread else ""
            one = replace(known, is_disabled=True, reason=known.reason or why) if why else known
            nodes = tuple(self._report(self._nodes[uuid], one) for uuid in self._by_host.get(host, ()))
            reports[host] = _Announced(self._cells[host], nodes)
        return reports

    def _report(self, node: ComputeNode, service: NovaService) -> HostReport:
        """A compute node as a host. Its attributes are what a flavor's capabilities may name of Nova's HostState."""
        known = {
            "host": node.host,
            "nodename": node.nodename,
            "hypervisor_hostname": node.nodename,
            "hypervisor_type": node.hypervisor_type,
            "hypervisor_version": str(node.hypervisor_version) if node.hypervisor_version else "",
            "host_ip": node.host_ip,
        }
        hardware = self._hardware.get(node.uuid)
        known[SUPPORTED] = supported_instances(node, hardware)
        stats = HostStats() if hardware is None or hardware.stats is None else hardware.stats
        # As in Nova a stat is found where the host has no property of that name.
        attributes = {**stats.plain, **{key: value for key, value in known.items() if value}}
        attributes |= {f"cpu_info:{path}": value for path, value in node.cpu_info.items()}
        return HostReport(
            uuid=node.uuid,
            name=node.nodename,
            enabled=not service.is_disabled,
            disabled_reason=service.reason if service.is_disabled else "",
            attributes=attributes,
            failed_builds=stats.failed_builds,
        )

    def _notify(self, host: str, report: _Announced, now_s: float) -> None:
        self._sequence += 1
        message = HostStates(
            service=host,
            cell=report.cell,
            epoch=EPOCH,
            sequence=self._sequence,
            first_sequence=self._sequence,
            hosts=report.hosts,
            complete=True,
        )
        self._table.apply(message, now_s)

    def _digest(self, now_s: float) -> None:
        """Which services are down, of each cell."""
        self._sequence += 1
        for cell in sorted({one.cell for one in self._announced.values()}):
            mine = [self._services[host] for host, one in self._announced.items() if one.cell == cell]
            down = tuple(
                ServiceDown(service=one.host, epoch=EPOCH, code=DOWN, reason=one.reason or "Nova has it as down")
                for one in mine
                if not one.is_up
            )
            digest = ServiceStates(cell=cell, term=1, number=self._sequence, down=down, up=len(mine) - len(down))
            self._table.apply(digest, now_s)

    def _shared(self, node: ComputeNode) -> ComputeNode:
        """With a processor's description that equal nodes share: it may have kilobytes."""
        key = tuple(sorted(node.cpu_info.items()))
        if len(self._cpus) > MAX_CPUS:
            self._cpus.clear()
        return replace(node, cpu_info=self._cpus.setdefault(key, node.cpu_info))

    def _changed(self) -> None:
        self._membership = self._supported = None
        self._is_announced = False
        self.version += 1


def _lasting(hardware: HostHardware) -> tuple[object, ...]:
    """What is announced with the host itself."""
    stats = hardware.stats
    return hardware.supported_instances, None if stats is None else (stats.plain, stats.failed_builds)
