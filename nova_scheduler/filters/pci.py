"""Has the host the PCI devices that are requested, and how many are free there?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar, Final

import numpy as np

from nova_scheduler.filters.numa import DevicesOf, suiting
from nova_scheduler.fit.host_devices import DeviceRequest, Mappings
from nova_scheduler.fit.pci import PciRefusal, PciRequest, consume
from scheduler_worker.hosts.host_table import Floats
from scheduler_worker.selection.host_view import HostsView
from scheduler_worker.selection.plugin import FilterResult, Weigher
from scheduler_worker.selection.request_spec import RequestSpec

UNKNOWN: Final = "pci.unknown"
IN_FLIGHT: Final = "pci.in_flight"
PCI_DEVICES: Final = "pci_devices"  # the metric: free devices of a host
ENOUGH: Final = 100  # devices: hosts with as many free weigh alike, as in Nova


class PciPassthroughFilter:
    """Passes hosts whose PCI devices do for all requests together, as Nova's filter of this name. A host of which they
    are not known is rejected.
    """

    name: ClassVar[str] = "PciPassthroughFilter"

    def __init__(self, devices_of: DevicesOf) -> None:
        self._devices_of = devices_of

    def applies_to(self, spec: RequestSpec) -> bool:
        """Only to requests for devices."""
        return any(isinstance(one, PciRequest) for one in spec.devices)

    def filter(self, view: HostsView, spec: RequestSpec) -> FilterResult:
        """One host after the other: each has its own pools."""
        requests = DeviceRequest.of(spec.devices).pci
        reasons = [self._reason(uuid, requests, None) for uuid in view.replica.uuids_of(view.rows)]
        passed = np.array([reason is None for reason in reasons], dtype=np.bool_)
        return FilterResult(passed, Counter(reason for reason in reasons if reason is not None))

    def suiting(self, host: HostsView, spec: RequestSpec, options: Sequence[Mappings]) -> list[int]:
        """Which of a host's allocation candidates do."""
        requests, (uuid,) = DeviceRequest.of(spec.devices).pci, host.replica.uuids_of(host.rows)
        return suiting(options, lambda one: self._reason(uuid, requests, one))

    def rejection_reason(self, host: str, spec: RequestSpec, mapping: Mappings | None = None) -> str | None:
        """Why the host (uuid) may not take the instance, with this allocation candidate."""
        return self._reason(host, DeviceRequest.of(spec.devices).pci, mapping)

    def _reason(self, host: str, requests: Sequence[PciRequest], mapping: Mappings | None) -> str | None:
        devices = self._devices_of(host)
        if devices is None or not devices.knows_pools:
            return UNKNOWN
        if devices.is_overdrawn:
            return IN_FLIGHT
        found = consume(devices.pools, requests, mapping)
        return found.reason if isinstance(found, PciRefusal) else None


class PCIWeigher(Weigher):
    """Prefers hosts with few free PCI devices, to keep the others for instances that need many, as in Nova."""

    name: ClassVar[str] = "pci"

    def weigh(self, view: HostsView, spec: RequestSpec) -> Floats:
        """Of the column `pci_devices`; a host of which they are not known has none."""
        del spec
        return weights_of(view.metric(PCI_DEVICES))


def weights_of(free: Floats) -> Floats:
    """The raw weights of hosts with so many free devices."""
    return ENOUGH - np.minimum(np.nan_to_num(free), ENOUGH - 1)
