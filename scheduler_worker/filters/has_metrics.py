"""Does the host report every metric that is part of its weight?"""

from __future__ import annotations

from typing import ClassVar, Self

import numpy as np

from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.plugins import Verdict, verdict_of
from scheduler_worker.domain.request_spec import RequestSpec
from scheduler_worker.domain.view import HostsView


class MetricsFilter:
    """Passes hosts of which every metric in `metrics.weights` is known; a number that is too old is not known."""

    name: ClassVar[str] = "MetricsFilter"

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        self._names = names

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> Self:
        """The metrics of these settings."""
        return cls(tuple(sorted(config.metrics.weights)))

    def filter(self, view: HostsView, spec: RequestSpec) -> Verdict:
        """One look at a column for each metric."""
        del spec
        passed = np.ones(len(view), dtype=np.bool_)
        for name in self._names:
            passed &= ~np.isnan(view.metric(name))
        return verdict_of(passed, "metrics.unavailable")
