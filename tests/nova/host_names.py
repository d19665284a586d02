"""Nova's HostNameWeigher, which its tests choose hosts by, as a weigher of berth's."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from scheduler_worker.hosts.host_table import Floats
from scheduler_worker.selection.host_view import HostsView
from scheduler_worker.selection.request_spec import RequestSpec

WEIGHTS: dict[str, float] = {}  # of hosts by name; set before a front is made


class HostNameWeigher:
    """Weighs a host by its name alone; one that has no weight weighs 0."""

    name: ClassVar[str] = "host_names"
    multiplier: ClassVar[float] = 1.0
    sign: ClassVar[float] = 1.0
    minimum: ClassVar[float | None] = None
    maximum: ClassVar[float | None] = None

    def weigh(self, view: HostsView, spec: RequestSpec) -> Floats:
        """The weights of the hosts."""
        hosts = [view.host(row).attributes.get("host", "") for row in range(len(view))]
        return np.array([WEIGHTS.get(host, 0.0) for host in hosts], dtype=np.float64)
