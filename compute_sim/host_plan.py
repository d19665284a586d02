"""Simulated hosts: which there are, and the provider tree of each. The same seed plans the same fleet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from uuid import UUID, uuid5

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.placement import Inventory, ProviderReport
from compute_sim.config import HostSize, SimulatedConfig

_SPACE = UUID("6f6a9b7e-6c1c-5d0e-9f57-3a1d2f5b8c11")  # ours alone, so that planned uuids meet no other's

NODE_TRAIT = "COMPUTE_NODE"
DISABLED_TRAIT = "COMPUTE_STATUS_DISABLED"  # the scheduler's pre-filter forbids it
GPU_TRAITS = ("CUSTOM_GPU_SMALL", "CUSTOM_GPU_LARGE")  # the children of one host differ, so traits distinguish them
NUMA_TRAIT = "HW_NUMA_ROOT"
ATTRIBUTES = {"hypervisor_type": "simulated", "cpu_arch": "x86_64"}


class HostPlan(Struct, frozen=True):
    """One simulated host as it leaves the factory."""

    uuid: str
    name: str
    size: HostSize
    gpus: tuple[str, ...] = ()  # uuids of the GPU children
    numa: tuple[str, ...] = ()  # uuids of the NUMA cell children
    vgpus_per_gpu: int = 0
    devices: tuple[str, ...] = ()  # uuids of the size's devices, in their order

    @property
    def children(self) -> tuple[str, ...]:
        """Uuids of everything below the root."""
        return (*self.numa, *self.gpus, *self.devices)


def plan_hosts(config: SimulatedConfig, cell: str, service: str) -> tuple[HostPlan, ...]:
    """The hosts of one service, by name. GPU and NUMA hosts are spread evenly over them."""
    dealt = deal(config.sizes, config.counts)
    return tuple(_plan_host(config, cell, service, index, dealt[index % len(dealt)]) for index in range(config.hosts))


def deal(sizes: Sequence[HostSize], counts: Sequence[int]) -> tuple[HostSize, ...]:
    """One round of sizes, each as often as its count, spread evenly over the round; without counts one of each."""
    if not counts:
        return tuple(sizes)
    places = [((turn + 0.5) / count, at) for at, count in enumerate(counts) for turn in range(count)]
    return tuple(sizes[at] for _, at in sorted(places))


def _plan_host(config: SimulatedConfig, cell: str, service: str, index: int, size: HostSize) -> HostPlan:
    root = uuid5(_SPACE, f"{config.seed}/{cell}/{service}/{index}")
    gpus = config.gpus_per_host if _chosen(config.gpu_share, index) else 0
    # Offset by half a turn, so that hosts with both kinds of children exist only when the shares force it.
    numa = size.numa or (2 if _chosen(config.numa_share, index + config.hosts // 2) else 0)
    return HostPlan(
        uuid=str(root),
        name=f"{service}-{index:05d}",
        size=size,
        gpus=tuple(str(uuid5(root, f"gpu{n}")) for n in range(gpus)),
        numa=tuple(str(uuid5(root, f"numa{n}")) for n in range(numa)),
        vgpus_per_gpu=config.vgpus_per_gpu,
        devices=tuple(str(uuid5(root, f"device {device.name}")) for device in size.devices),
    )


def _chosen(share: float, index: int) -> bool:
    """Whether the running total of the share passes a whole number at this index: evenly spread, no randomness."""
    return int((index + 1) * share + 1e-9) > int(index * share + 1e-9)


def tree(plan: HostPlan, size: HostSize, *, enabled: bool, nested: bool = True) -> tuple[ProviderReport, ...]:
    """The host's providers: the root, then its children. With NUMA cells, processors and memory are the cells'. nested
    False: as before there were trees, everything at the root.
    """
    children = (*_cells(plan, size), *_gpus(plan), *_devices(plan, size))
    root = ProviderReport(
        uuid=plan.uuid,
        name=plan.name,
        inventories={**({} if plan.numa and nested else _compute(size, 1)), **_disk(size)},
        traits=(NODE_TRAIT,) if enabled else (NODE_TRAIT, DISABLED_TRAIT),
        aggregates=size.aggregates or None,
    )
    return (root, *children) if nested else (_flat(root, children),)


def _flat(root: ProviderReport, children: Sequence[ProviderReport]) -> ProviderReport:
    """The root with what its children have, the whole machine's processors and memory already being its own."""
    sums: Counter[str] = Counter()
    for child in children:
        if NUMA_TRAIT not in child.traits:
            sums.update({name: inventory.total for name, inventory in child.inventories.items()})
    return replace(root, inventories={**root.inventories, **{name: _all_of(total) for name, total in sums.items()}})


def _cells(plan: HostPlan, size: HostSize) -> tuple[ProviderReport, ...]:
    return tuple(
        ProviderReport(
            uuid=child,
            name=f"{plan.name}-numa{n}",
            parent_uuid=plan.uuid,
            inventories=_compute(size, len(plan.numa)),
            traits=(NUMA_TRAIT,),
            receives_from=plan.uuid,
        )
        for n, child in enumerate(plan.numa)
    )


def _gpus(plan: HostPlan) -> tuple[ProviderReport, ...]:
    return tuple(
        ProviderReport(
            uuid=child,
            name=f"{plan.name}-gpu{n}",
            parent_uuid=plan.uuid,
            inventories={"VGPU": _all_of(plan.vgpus_per_gpu)},
            traits=(GPU_TRAITS[n % len(GPU_TRAITS)],),
            receives_from=plan.uuid,
        )
        for n, child in enumerate(plan.gpus)
    )


def _devices(plan: HostPlan, size: HostSize) -> tuple[ProviderReport, ...]:
    above = {"": plan.uuid, **{f"numa{n}": child for n, child in enumerate(plan.numa)}}
    found: list[ProviderReport] = []
    for uuid, device in zip(plan.devices, size.devices, strict=False):  # a host that is resized keeps its devices
        found.append(
            ProviderReport(
                uuid=uuid,
                name=f"{plan.name}-{device.name}",
                parent_uuid=above.get(device.under, plan.uuid),
                inventories={name: _all_of(total) for name, total in device.inventories.items()},
                traits=device.traits,
                receives_from=plan.uuid if device.inventories else None,
            )
        )
        above[device.name] = uuid
    return tuple(found)


def _all_of(total: int) -> Inventory:
    return Inventory(total=total, max_unit=total)


def _disk(size: HostSize) -> dict[str, Inventory]:
    if not size.disk_gb:
        return {}
    return {"DISK_GB": Inventory(total=size.disk_gb, max_unit=size.disk_gb, allocation_ratio=size.disk_ratio)}


def _compute(size: HostSize, parts: int) -> dict[str, Inventory]:
    """Processors and memory, or one NUMA cell's part of them. One machine may take at most the physical amount."""
    vcpus, memory = max(1, size.vcpus // parts), max(1, size.memory_mb // parts)
    return {
        "VCPU": Inventory(total=vcpus, max_unit=vcpus, allocation_ratio=size.cpu_ratio),
        "MEMORY_MB": Inventory(
            total=memory,
            reserved=min(size.reserved_memory_mb // parts, memory),
            max_unit=memory,
            allocation_ratio=size.memory_ratio,
        ),
    }
