"""How many instances has the host's compute service, and how many are built or moved there now?"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from bus.contracts.host_metrics import NUM_INSTANCES, NUM_IO_OPS
from scheduler_worker.hosts.host_table import Floats
from scheduler_worker.selection.host_view import HostsView
from scheduler_worker.selection.plugin import Weigher
from scheduler_worker.selection.request_spec import RequestSpec


class NumInstancesWeigher(Weigher):
    """Weighs the number of instances. As in Nova it is off, and a negative multiplier spreads."""

    name: ClassVar[str] = "num_instances"
    multiplier: ClassVar[float] = 0.0
    metric: ClassVar[str] = NUM_INSTANCES

    def weigh(self, view: HostsView, spec: RequestSpec) -> Floats:
        """A number that is not known is 0."""
        del spec
        return np.nan_to_num(view.metric(self.metric))


class IoOpsWeigher(NumInstancesWeigher):
    """Prefers hosts with few instances that are built or moved now; a positive multiplier prefers many, as in Nova."""

    name: ClassVar[str] = "io_ops"
    multiplier: ClassVar[float] = -1.0
    minimum: ClassVar[float | None] = 0.0
    metric: ClassVar[str] = NUM_IO_OPS
