"""How many members of the request's server group are on the host?"""

from __future__ import annotations

from typing import ClassVar

from bus.contracts.placement import GroupPolicy
from scheduler_worker.hosts.host_table import Floats
from scheduler_worker.selection.host_view import HostsView
from scheduler_worker.selection.plugin import Weigher
from scheduler_worker.selection.request_spec import RequestSpec


class ServerGroupSoftAffinityWeigher(Weigher):
    """Prefers hosts with many members."""

    name: ClassVar[str] = "soft_affinity"

    def applies_to(self, spec: RequestSpec) -> bool:
        """Only to groups with this policy."""
        return spec.has_policy(GroupPolicy.SOFT_AFFINITY)

    def weigh(self, view: HostsView, spec: RequestSpec) -> Floats:
        """The number of other members on each host."""
        assert spec.related is not None
        return view.counted(spec.related.members)


class ServerGroupSoftAntiAffinityWeigher(Weigher):
    """Prefers hosts with few members."""

    name: ClassVar[str] = "soft_anti_affinity"
    sign: ClassVar[float] = -1.0

    def applies_to(self, spec: RequestSpec) -> bool:
        """Only to groups with this policy."""
        return spec.has_policy(GroupPolicy.SOFT_ANTI_AFFINITY)

    def weigh(self, view: HostsView, spec: RequestSpec) -> Floats:
        """The number of other members on each host."""
        assert spec.related is not None
        return view.counted(spec.related.members)
