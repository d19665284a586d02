"""Is the host in a state to take builds: is its service up and the host enabled, and are its metrics known?"""

from __future__ import annotations

from typing import ClassVar, Self

import numpy as np

from bus.contracts.operations import AdminState
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.selection.host_view import HostsView
from scheduler_worker.selection.plugin import FilterResult, filter_result_of
from scheduler_worker.selection.request_spec import RequestSpec


class ComputeFilter:
    """Passes hosts that are enabled and whose service is not down, as listed by the conductor of its cell."""

    name: ClassVar[str] = "ComputeFilter"

    def filter(self, view: HostsView, spec: RequestSpec) -> FilterResult:
        """A host that is disabled and down counts as disabled."""
        del spec
        enabled, up = view.enabled, view.up
        passed = enabled & up
        if passed.all():
            return FilterResult(passed, {})
        maintained, fenced = view.is_in(AdminState.MAINTENANCE), view.is_in(AdminState.FENCED)
        rejected = {
            "host.fenced": int(np.count_nonzero(fenced)),
            "host.maintenance": int(np.count_nonzero(maintained)),
            "host.disabled": int(np.count_nonzero(~enabled & ~maintained & ~fenced)),
            "service.down": int(np.count_nonzero(enabled & ~up)),
        }
        return FilterResult(passed, {reason: count for reason, count in rejected.items() if count})


class MetricsFilter:
    """Passes hosts of which every metric in `metrics.weights` is known; a number that is too old is not known."""

    name: ClassVar[str] = "MetricsFilter"

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        self._names = names

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> Self:
        """The metrics of these settings."""
        return cls(tuple(sorted(config.metrics.weights)))

    def filter(self, view: HostsView, spec: RequestSpec) -> FilterResult:
        """One look at a column for each metric."""
        del spec
        passed = np.ones(len(view), dtype=np.bool_)
        for name in self._names:
            passed &= ~np.isnan(view.metric(name))
        return filter_result_of(passed, "metrics.unavailable")
