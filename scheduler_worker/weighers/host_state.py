"""How is the host: is something wrong with it, have builds failed there, what do its metrics say, and how new is it?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

import numpy as np

from bus.contracts.host_metrics import SENSORS_CRITICAL, SENSORS_WARNING
from scheduler_worker.config import MetricsConfig, SchedulerConfig
from scheduler_worker.hosts.host_table import Floats
from scheduler_worker.selection.host_view import VERSION, HostsView
from scheduler_worker.selection.plugin import Weigher, Weighing
from scheduler_worker.selection.request_spec import RequestSpec
from scheduler_worker.selection.weighing import multipliers


class HealthWeigher(Weigher):
    """Puts hosts with a warning below all without, and above those with failed builds. A warning is the attribute
    `health`, or a sensor that reads warning or critical; a critical one alone stops nothing: the host's manager
    disables hosts.
    """

    name: ClassVar[str] = "health"
    multiplier: ClassVar[float] = 100_000.0
    sign: ClassVar[float] = -1.0

    def weigh(self, view: HostsView, spec: RequestSpec) -> Floats:
        """1 for a host with a warning."""
        del spec
        found = view.warning.astype(float)
        if len(view.metrics):
            for name in (SENSORS_WARNING, SENSORS_CRITICAL):
                found[view.metric(name) > 0] = 1.0
        return found


class BuildFailureWeigher(Weigher):
    """Puts hosts with build failures below all others, whatever their other weights."""

    name: ClassVar[str] = "build_failure"
    multiplier: ClassVar[float] = 1_000_000.0
    sign: ClassVar[float] = -1.0

    def weigh(self, view: HostsView, spec: RequestSpec) -> Floats:
        """Consecutive failures; a success on the host resets them."""
        del spec
        return view.failed_builds


class MetricsWeigher(Weigher):
    """The sum of a host's metrics, each times its ratio of `metrics.weights`, as in Nova.

    A host of which one of them is unknown weighs `metrics.weight_of_unavailable`; where the ratio or the host's
    multiplier is 0, an unknown one counts as 0. Without weights it is skipped.
    """

    name: ClassVar[str] = "metrics"

    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        unavailable: float = MetricsConfig().weight_of_unavailable,
        multiplier: float = 1.0,
    ) -> None:
        self._weights = dict(weights or {})
        self._unavailable = unavailable
        self._multiplied = Weighing(self, multiplier)

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> Self:
        """The weights of these settings."""
        multiplier = config.multipliers.get(cls.name, cls.multiplier)
        return cls(config.metrics.weights, config.metrics.weight_of_unavailable, multiplier)

    def applies_to(self, spec: RequestSpec) -> bool:
        """Whether there are weights to add up."""
        del spec
        return bool(self._weights)

    def weigh(self, view: HostsView, spec: RequestSpec) -> Floats:
        """One look at a column for each metric."""
        del spec
        total, lacks = np.zeros(len(view), dtype=np.float64), np.zeros(len(view), dtype=np.bool_)
        for name, ratio in sorted(self._weights.items()):
            if ratio:
                numbers = view.metric(name) * ratio
                lacks |= np.isnan(numbers)
                total += np.nan_to_num(numbers)
        return np.where(lacks & (multipliers(view, self._multiplied) != 0), self._unavailable, total)


class HypervisorVersionWeigher(Weigher):
    """Prefers hosts with a newer hypervisor, by the version that they report; one that is not reported is 0."""

    name: ClassVar[str] = "hypervisor_version"

    def weigh(self, view: HostsView, spec: RequestSpec) -> Floats:
        """Hosts report the same few versions, so each distinct one is read once."""
        del spec
        words = view.attribute(VERSION)
        numbers = {word: float(word) if word and word.isdecimal() else 0.0 for word in set(words)}
        return np.array([numbers[word] for word in words], dtype=np.float64)
