"""Has the host the PCI devices that are requested, and how many are free there?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final

import numpy as np

from nova_scheduler.fit.pci import Consumed, PciPool, PciRefusal, PciRequest, consume
from scheduler_worker.hosts.host_table import Floats
from scheduler_worker.selection.host_view import HostsView
from scheduler_worker.selection.plugin import FilterResult, Weigher
from scheduler_worker.selection.request_spec import RequestSpec

UNKNOWN: Final = "pci.unknown"
PCI_DEVICES: Final = "pci_devices"  # the metric: free devices of a host
ENOUGH: Final = 100  # devices: hosts with as many free weigh alike, as in Nova

# The pools of a host by its uuid; None: not known, or too old.
PoolsOf = Callable[[str], Sequence[PciPool] | None]


class PciPassthroughFilter:
    """Passes hosts whose PCI devices do for all requests together, as Nova's filter of this name. A host of which they
    are not known is rejected.
    """

    name: ClassVar[str] = "PciPassthroughFilter"

    def __init__(self, pools_of: PoolsOf) -> None:
        self._pools_of = pools_of

    def applies_to(self, spec: RequestSpec) -> bool:
        """Only to requests for devices."""
        return bool(requests_of(spec))

    def filter(self, view: HostsView, spec: RequestSpec) -> FilterResult:
        """One host after the other: each has its own pools."""
        requests = requests_of(spec)
        found = map(self._pools_of, view.replica.uuids_of(view.rows))
        reasons = [UNKNOWN if pools is None else _reason(consume(pools, requests)) for pools in found]
        passed = np.array([not reason for reason in reasons], dtype=np.bool_)
        return FilterResult(passed, Counter(filter(None, reasons)))

    def suiting(self, host: str, spec: RequestSpec, candidates: Sequence[Mapping[str, Sequence[str]]]) -> list[int]:
        """Which of a host's allocation candidates do. host: its uuid; candidates: the providers (uuids) of each group
        of the request.
        """
        pools, requests = self._pools_of(host), requests_of(spec)
        if pools is None:
            return []
        return [number for number, one in enumerate(candidates) if not _reason(consume(pools, requests, one))]


class PCIWeigher(Weigher):
    """Prefers hosts with few free PCI devices, to keep the others for instances that need many, as in Nova."""

    name: ClassVar[str] = "pci"

    def weigh(self, view: HostsView, spec: RequestSpec) -> Floats:
        """Of a column of `free_devices`; a host of which they are not known has none."""
        del spec
        return weights_of(view.metric(PCI_DEVICES))


def requests_of(spec: RequestSpec) -> tuple[PciRequest, ...]:
    """The PCI requests of a call of Nova."""
    return tuple(one for one in spec.devices if isinstance(one, PciRequest))


def weights_of(free: Floats) -> Floats:
    """The raw weights of hosts with so many free devices."""
    return ENOUGH - np.minimum(np.nan_to_num(free), ENOUGH - 1)


def _reason(found: Consumed | PciRefusal) -> str:
    return found.reason if isinstance(found, PciRefusal) else ""
