"""How much memory, how many virtual CPUs and how much disk are free on the host?"""

from __future__ import annotations

from typing import ClassVar

from scheduler_worker.hosts.host_table import Floats
from scheduler_worker.selection.host_view import HostsView
from scheduler_worker.selection.plugin import Weigher
from scheduler_worker.selection.request_spec import RequestSpec


class RAMWeigher(Weigher):
    """Prefers free memory; a negative multiplier packs instead. Clamped at 0 before scaling, as in Nova."""

    name: ClassVar[str] = "ram"
    minimum: ClassVar[float | None] = 0.0
    resource_class: ClassVar[str] = "MEMORY_MB"

    def weigh(self, view: HostsView, spec: RequestSpec) -> Floats:
        """Capacity less used, assumed claims included."""
        del spec
        return view.free(self.resource_class)


class CPUWeigher(RAMWeigher):
    """Prefers free virtual CPUs in the same way."""

    name: ClassVar[str] = "cpu"
    resource_class: ClassVar[str] = "VCPU"


class DiskWeigher(RAMWeigher):
    """Prefers free disk in the same way."""

    name: ClassVar[str] = "disk"
    resource_class: ClassVar[str] = "DISK_GB"
