"""How much memory is free on the host?"""

from __future__ import annotations

from typing import ClassVar

from scheduler_worker.domain.hosts import Floats
from scheduler_worker.domain.request_spec import RequestSpec
from scheduler_worker.domain.view import HostsView


class RAMWeigher:
    """Prefers free memory; a negative multiplier packs instead. Clamped at 0 before scaling, as in Nova."""

    name: ClassVar[str] = "ram"
    multiplier: ClassVar[float] = 1.0
    sign: ClassVar[float] = 1.0
    minimum: ClassVar[float | None] = 0.0
    maximum: ClassVar[float | None] = None

    def weigh(self, view: HostsView, spec: RequestSpec) -> Floats:
        """Capacity less used, assumed claims included."""
        del spec
        return view.free("MEMORY_MB")
