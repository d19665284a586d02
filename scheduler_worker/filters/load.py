"""How much is the host's compute service doing: how many instances has it, and how many are built or moved now?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np

from bus.contracts.host_metrics import NUM_INSTANCES, NUM_IO_OPS
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.hosts.host_table import Floats
from scheduler_worker.selection.host_view import HostsView
from scheduler_worker.selection.plugin import FilterResult
from scheduler_worker.selection.request_spec import RequestSpec

UNKNOWN = "host.load_unknown"
MAX_BOUND = 2**31


class IoOpsFilter:
    """Passes hosts with fewer such instances than `max_io_ops_per_host`. A number that is not known rejects."""

    name: ClassVar[str] = "IoOpsFilter"
    option: ClassVar[str] = "max_io_ops_per_host"
    metric: ClassVar[str] = NUM_IO_OPS
    reason: ClassVar[str] = "host.io_ops"

    def __init__(self, most: int = SchedulerConfig().max_io_ops_per_host) -> None:
        self._most = most

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> Self:
        """The bound of these settings."""
        return cls(getattr(config, cls.option))

    def filter(self, view: HostsView, spec: RequestSpec) -> FilterResult:
        """One comparison of columns."""
        del spec
        numbers = view.metric(self.metric)
        passed = numbers < self.bounds(view)  # not true of NaN
        unknown = int(np.count_nonzero(np.isnan(numbers)))
        rejected = {UNKNOWN: unknown, self.reason: int(np.count_nonzero(~passed)) - unknown}
        return FilterResult(passed, {reason: count for reason, count in rejected.items() if count})

    def suiting(self, host: HostsView, spec: RequestSpec, options: Sequence[object]) -> list[int]:
        """All, or none where the host has its fill of those that were chosen since."""
        return list(range(len(options))) if self.filter(host, spec).passed[0] else []

    def bounds(self, view: HostsView) -> Floats:
        """The bound of each host."""
        return np.full(len(view), float(self._most))


class NumInstancesFilter(IoOpsFilter):
    """Passes hosts with fewer instances than `max_instances_per_host`."""

    name: ClassVar[str] = "NumInstancesFilter"
    option: ClassVar[str] = "max_instances_per_host"
    metric: ClassVar[str] = NUM_INSTANCES
    reason: ClassVar[str] = "host.num_instances"


class AggregateIoOpsFilter(IoOpsFilter):
    """The same with the smallest bound that the metadata of the host's aggregates have under the option's name. As in
    Nova one that is no number leaves the host with the option's bound.
    """

    name: ClassVar[str] = "AggregateIoOpsFilter"

    def bounds(self, view: HostsView) -> Floats:
        """The bound of each host."""
        most = np.full(len(view), np.inf)
        for aggregate in view.membership.with_key(self.option):
            try:
                bound = float(min(max(int(aggregate.metadata[self.option]), -MAX_BOUND), MAX_BOUND))
            except ValueError:
                bound = np.nan  # minimum() of it and any number
            members = view.member_of(aggregate.uuid)
            most[members] = np.minimum(most[members], bound)
        return np.where(np.isfinite(most), most, float(self._most))


class AggregateNumInstancesFilter(AggregateIoOpsFilter):
    """The same for the number of instances."""

    name: ClassVar[str] = "AggregateNumInstancesFilter"
    option: ClassVar[str] = NumInstancesFilter.option
    metric: ClassVar[str] = NUM_INSTANCES
    reason: ClassVar[str] = NumInstancesFilter.reason
