"""Does the instance's NUMA topology fit the host's?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import ClassVar, Final

import numpy as np

from nova_scheduler.fit.host_devices import DeviceRequest, HostDevices, Mappings, fitted
from nova_scheduler.fit.numa import Unfit
from nova_scheduler.fit.numa_fit import Arrangements
from scheduler_worker.selection.host_view import HostsView
from scheduler_worker.selection.plugin import FilterResult
from scheduler_worker.selection.request_spec import RequestSpec

UNKNOWN: Final = "numa.unknown"
IN_FLIGHT: Final = "numa.in_flight"
MAX_ARRANGEMENTS: Final = 50_000  # that are looked at for one request, of all hosts; of those with room few are

# By the uuid of a host; None: not known, or too old.
DevicesOf = Callable[[str], HostDevices | None]


def suiting(options: Sequence[Mappings], reason: Callable[[Mappings], str | None]) -> list[int]:
    """The numbers of the options that nothing speaks against; alike ones are judged once."""
    judged: dict[object, bool] = {}
    kept = []
    for number, one in enumerate(options):
        key = tuple((group, tuple(providers)) for group, providers in one.items())
        if key not in judged:
            judged[key] = reason(one) is None
        if judged[key]:
            kept.append(number)
    return kept


class NUMATopologyFilter:
    """Passes hosts whose NUMA nodes take the instance's, as Nova's filter of this name. A host of which they are not
    known is rejected. pack: as of `fit_instance_to_host`.
    """

    name: ClassVar[str] = "NUMATopologyFilter"

    def __init__(self, devices_of: DevicesOf, *, pack: bool = False) -> None:
        self._devices_of = devices_of
        self._pack = pack

    def applies_to(self, spec: RequestSpec) -> bool:
        """Only to requests with a topology, or for threads."""
        numa = DeviceRequest.of(spec.devices).numa
        return numa is not None and (numa.needs_threads or numa.has_cells)

    def filter(self, view: HostsView, spec: RequestSpec) -> FilterResult:
        """One host after the other: each has its own topology. Nova's own devices are judged without placement's."""
        allowed = Arrangements(MAX_ARRANGEMENTS)
        asked = DeviceRequest.of(spec.devices)
        reasons = [self._reason(uuid, asked, None, allowed) for uuid in view.replica.uuids_of(view.rows)]
        passed = np.array([reason is None for reason in reasons], dtype=np.bool_)
        return FilterResult(passed, Counter(reason for reason in reasons if reason is not None))

    def suiting(self, host: HostsView, spec: RequestSpec, options: Sequence[Mappings]) -> list[int]:
        """Which of a host's allocation candidates do."""
        allowed, asked = Arrangements(MAX_ARRANGEMENTS), DeviceRequest.of(spec.devices)
        (uuid,) = host.replica.uuids_of(host.rows)
        return suiting(options, lambda one: self._reason(uuid, asked, one, allowed))

    def rejection_reason(self, host: str, spec: RequestSpec, mapping: Mappings | None = None) -> str | None:
        """Why the host (uuid) may not take the instance, with this allocation candidate."""
        return self._reason(host, DeviceRequest.of(spec.devices), mapping, None)

    def _reason(
        self, host: str, asked: DeviceRequest, mapping: Mappings | None, allowed: Arrangements | None
    ) -> str | None:
        devices = self._devices_of(host)
        if devices is None or not devices.knows_topology or (asked.pci and not devices.knows_pools):
            return UNKNOWN
        if devices.is_overdrawn:
            return IN_FLIGHT
        found = fitted(devices, asked, mapping, pack=self._pack, allowed=allowed)
        return found.reason if isinstance(found, Unfit) else None
