"""Is something wrong with the host: does its service warn of it, or have builds failed there?"""

from __future__ import annotations

from typing import ClassVar

from bus.contracts.host_metrics import SENSORS_CRITICAL, SENSORS_WARNING
from scheduler_worker.domain.hosts import Floats
from scheduler_worker.domain.request_spec import RequestSpec
from scheduler_worker.domain.view import HostsView


class HealthWeigher:
    """Puts hosts with a warning below all without, and above those with failed builds.

    A warning is the host's attribute `health`, or a sensor of it that reads warning or critical. (A critical sensor
    alone, for instance one of two power supplies, stops nothing: the host's manager disables a host that is not to be
    used.)
    """

    name: ClassVar[str] = "health"
    multiplier: ClassVar[float] = 100_000.0
    sign: ClassVar[float] = -1.0
    minimum: ClassVar[float | None] = None
    maximum: ClassVar[float | None] = None

    def weigh(self, view: HostsView, spec: RequestSpec) -> Floats:
        """1 for a host with a warning."""
        del spec
        found = view.warning.astype(float)
        if len(view.metrics):
            for name in (SENSORS_WARNING, SENSORS_CRITICAL):
                found[view.metric(name) > 0] = 1.0
        return found


class BuildFailureWeigher:
    """Puts hosts with build failures below all others, whatever their other weights."""

    name: ClassVar[str] = "build_failure"
    multiplier: ClassVar[float] = 1_000_000.0
    sign: ClassVar[float] = -1.0
    minimum: ClassVar[float | None] = None
    maximum: ClassVar[float | None] = None

    def weigh(self, view: HostsView, spec: RequestSpec) -> Floats:
        """Consecutive failures; a success on the host resets them."""
        del spec
        return view.failed_builds
