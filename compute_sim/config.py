"""Settings of the simulated driver."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta as Bound
from msgspec import Struct

from bus.contracts.base import Amount, ClassName, TraitName, Uuid, Word
from bus.service.settings import Rate
from compute_sim.faults import Faults


class Device(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A device of a host: a child provider of its own."""

    name: Word
    """Unique in its host."""
    inventories: dict[ClassName, Amount] = {}
    """{resource class: total}."""
    traits: tuple[TraitName, ...] = ()
    """The device's traits."""
    under: str = ""
    """The provider above it: a device listed before it, or a NUMA cell (`numa0`). Empty: the host."""


class HostSize(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One simulated hypervisor. Ratios are Nova's initial ones."""

    vcpus: Annotated[int, Bound(ge=1, le=2**20)] = 64
    """CPUs, before the overcommit."""
    memory_mb: Annotated[int, Bound(ge=1, le=2**30)] = 262_144
    """Memory in MiB."""
    disk_gb: Annotated[int, Bound(ge=0, le=2**30)] = 4_000
    """Local disk in GiB. 0: none of its own (a shared one)."""
    reserved_memory_mb: Annotated[int, Bound(ge=0)] = 512
    """MiB of memory kept for the hypervisor itself. 512, as in Nova."""
    cpu_ratio: Annotated[float, Bound(gt=0, le=1000)] = 4.0
    """Overcommit of CPUs."""
    memory_ratio: Annotated[float, Bound(gt=0, le=1000)] = 1.0
    """Overcommit of memory."""
    disk_ratio: Annotated[float, Bound(gt=0, le=1000)] = 1.0
    """Overcommit of disk."""
    numa: Annotated[int, Bound(ge=0, le=16)] = 0
    """NUMA cells. 0: as `compute.simulated.numa_share` draws."""
    devices: Annotated[tuple[Device, ...], Bound(max_length=64)] = ()
    """Devices, each a child provider (docs/use/nested-hosts.md)."""
    aggregates: Annotated[tuple[Uuid, ...], Bound(max_length=16)] = ()
    """Uuids of aggregates that the host reports it is in. Empty: operators decide."""

    def __post_init__(self) -> None:
        above = {"", *(f"numa{cell}" for cell in range(16))}
        for device in self.devices:
            if device.name in above or device.under not in above:
                raise ValueError(
                    f"device {device.name!r} under {device.under!r}: names are unique, the upper one first"
                )
            above.add(device.name)


class SimulatedConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The simulated hosts of one compute service, and their faults."""

    hosts: Annotated[int, Bound(ge=0, le=1_000_000)] = 25
    """Hosts of this service."""
    sizes: Annotated[tuple[HostSize, ...], Bound(min_length=1, max_length=64)] = (HostSize(),)
    """Sizes that the hosts have in turn."""
    counts: Annotated[tuple[Annotated[int, Bound(ge=1, le=1_000_000)], ...], Bound(max_length=64)] = ()
    """This many hosts of each of `sizes` in a round, mixed evenly. Empty: one of each."""
    gpu_share: Rate = 0.1
    """Share of the hosts that have GPUs."""
    gpus_per_host: Annotated[int, Bound(ge=1, le=16)] = 2
    """GPUs of such a host, each a child provider."""
    vgpus_per_gpu: Annotated[int, Bound(ge=1, le=64)] = 8
    """`VGPU` of one GPU."""
    numa_share: Rate = 0.0
    """Share of the hosts that have two NUMA cells."""
    nested: bool = True
    """Whether hosts are reported as trees. False: everything at the root; the first report with true moves the
    allocations.
    """
    seed: int = 1
    """Of the hosts and of the faults."""
    faults: Faults = Faults()
    """The faults of the simulated fleet."""

    def __post_init__(self) -> None:
        if self.counts and len(self.counts) != len(self.sizes):
            raise ValueError(f"{len(self.counts)} counts for {len(self.sizes)} sizes: one of each, or none")
