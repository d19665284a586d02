"""A real cluster as settings: its hosts and the flavors of its requests, from the two files of a public trace.

The hosts' file is a CSV with columns cpu_milli, memory_mib, gpu (how many) and model; the requests' that of
`lab.load.trace`. A host is a provider with VCPU (a thousandth of a core each, since requests ask for fractions) and
MEMORY_MB, nothing reserved and nothing overcommitted; each GPU a child with CUSTOM_GPU_MILLI 1000 and a trait for its
model. Every distinct request is a flavor; one for several GPUs requests a group each, all from different ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from berth.config.settings import ComputeSettings, Settings, UpSettings
from compute_sim.config import Device, HostSize, SimulatedConfig
from lab.load.plan import PlanError
from lab.load.trace import WHOLE_GPU, TraceRequest, TraceRow, amount, csv_rows, model
from scheduler_worker.config import Flavor, SchedulerConfig

GPU_CLASS = "CUSTOM_GPU_MILLI"
GPU_TRAIT = "CUSTOM_GPU_MODEL_{}"
NEEDED = ("cpu_milli", "memory_mib")
MAX_KINDS = 64  # as many as SimulatedConfig.sizes may be
MAX_GPUS = 64  # as many as HostSize.devices may be
MAX_GROUPS = 16


class HostKind(Struct, frozen=True, order=True):
    """One kind of host: thousandths of a core, MiB, so many GPUs of one model."""

    cpu_milli: int
    memory_mib: int
    gpus: int = 0
    model: str = ""


def read_hosts(path: Path) -> Counter[HostKind]:
    """How many hosts of each kind a file has. Raises PlanError."""
    found = Counter(_kind(path, line, row) for line, row in csv_rows(path, NEEDED, code="load.hosts"))
    if not found:
        raise PlanError("load.hosts", f"{path} has no hosts")
    if len(found) > MAX_KINDS:
        raise PlanError("load.hosts", f"{path} has {len(found)} kinds of hosts, and {MAX_KINDS} are the most")
    return found


def _kind(path: Path, line: int, row: dict[str, str]) -> HostKind:
    try:
        gpus = int(amount(row, "gpu", "0"))
        kind = HostKind(
            cpu_milli=int(amount(row, "cpu_milli")),
            memory_mib=int(amount(row, "memory_mib")),
            gpus=gpus,
            model=model(row.get("model") or "") if gpus else "",
        )
        size_of(kind)
    except ValueError as fault:
        raise PlanError("load.hosts", f"{path}, line {line}: not a host: {fault}") from fault
    return kind


def size_of(kind: HostKind) -> HostSize:
    """A simulated host of this kind. Raises ValueError."""
    if not (1 <= kind.cpu_milli <= 2**20 and 1 <= kind.memory_mib <= 2**30 and kind.gpus <= MAX_GPUS):
        raise ValueError("cores, memory and GPUs of a host must be there, and not beyond any machine's")
    gpu = {GPU_CLASS: WHOLE_GPU}
    return HostSize(
        vcpus=kind.cpu_milli,
        memory_mb=kind.memory_mib,
        disk_gb=0,
        reserved_memory_mb=0,
        cpu_ratio=1.0,
        devices=tuple(
            Device(name=f"gpu{number}", inventories=gpu, traits=(GPU_TRAIT.format(kind.model),))
            for number in range(kind.gpus)
        ),
    )


def flavor_of(requested: TraceRequest) -> Flavor:
    """The flavor that is just this request."""
    specs: dict[str, str] = {}
    for group in range(1, requested.gpus + 1):
        specs[f"resources{group}:{GPU_CLASS}"] = str(requested.gpu_milli)
        if len(requested.models) == 1:
            specs[f"trait{group}:{GPU_TRAIT.format(requested.models[0])}"] = "required"
        elif requested.models:
            specs[f"trait{group}:in:{','.join(map(GPU_TRAIT.format, requested.models))}"] = "required"
    if requested.gpus > 1:
        specs["group_policy"] = "isolate"
    return Flavor(vcpus=requested.cpu_milli, memory_mb=requested.memory_mib, extra_specs=specs)


def settings_like(hosts: Counter[HostKind], requests: Sequence[TraceRow]) -> Settings:
    """One cell with just these hosts, and a flavor for every distinct request. Raises PlanError."""
    kinds = sorted(hosts)
    requested = sorted({one.requested for one in requests})
    if over := [one for one in requested if one.gpus > MAX_GROUPS]:
        raise PlanError("load.trace", f"a request for {over[0].gpus} GPUs, and {MAX_GROUPS} are the most")
    return Settings(
        cells={"cell1": Settings().cells["cell1"]},
        up=UpSettings(computes_per_cell=1, nodes=0),
        compute=ComputeSettings(
            simulated=SimulatedConfig(
                hosts=hosts.total(),
                sizes=tuple(size_of(kind) for kind in kinds),
                counts=tuple(hosts[kind] for kind in kinds),
                gpu_share=0.0,
            )
        ),
        scheduler=SchedulerConfig(default_flavors=(), flavors={one.flavor: flavor_of(one) for one in requested}),
    )
