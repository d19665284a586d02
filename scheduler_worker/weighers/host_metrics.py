"""How much do the host's own metrics (temperature, power, ...) weigh?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

import numpy as np

from scheduler_worker.config import MetricsConfig, SchedulerConfig
from scheduler_worker.domain.hosts import Floats
from scheduler_worker.domain.request_spec import RequestSpec
from scheduler_worker.domain.view import HostsView


class MetricsWeigher:
    """The sum of a host's metrics, each times its ratio of `metrics.weights`, as in Nova.

    A host of which one of them is unknown weighs `metrics.weight_of_unavailable`. Without weights it is skipped.
    """

    name: ClassVar[str] = "metrics"
    multiplier: ClassVar[float] = 1.0
    sign: ClassVar[float] = 1.0
    minimum: ClassVar[float | None] = None
    maximum: ClassVar[float | None] = None

    def __init__(
        self, weights: Mapping[str, float] | None = None, unavailable: float = MetricsConfig().weight_of_unavailable
    ) -> None:
        self._weights = dict(weights or {})
        self._unavailable = unavailable

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> Self:
        """The weights of these settings."""
        return cls(config.metrics.weights, config.metrics.weight_of_unavailable)

    def applies_to(self, spec: RequestSpec) -> bool:
        """Whether there are weights to add up."""
        del spec
        return bool(self._weights)

    def weigh(self, view: HostsView, spec: RequestSpec) -> Floats:
        """One look at a column for each metric."""
        del spec
        total = np.zeros(len(view), dtype=np.float64)
        for name, ratio in sorted(self._weights.items()):
            total += view.metric(name) * ratio
        return np.where(np.isnan(total), self._unavailable, total)
