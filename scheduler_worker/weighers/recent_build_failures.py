"""How many builds in a row have failed on the host?"""

from __future__ import annotations

from typing import ClassVar

from scheduler_worker.domain.hosts import Floats
from scheduler_worker.domain.request_spec import RequestSpec
from scheduler_worker.domain.view import HostsView


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
