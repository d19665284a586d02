"""How few of the server group that would like to be apart are on the host? (W-8)"""

from __future__ import annotations

from typing import ClassVar

from bus.contracts.groups import GroupPolicy
from scheduler_worker.domain.hosts import Floats
from scheduler_worker.domain.view import HostsView
from scheduler_worker.domain.wanted import Wanted


class ServerGroupSoftAntiAffinityWeigher:
    """Likes hosts with few members."""

    name: ClassVar[str] = "soft_anti_affinity"
    multiplier: ClassVar[float] = 1.0
    sign: ClassVar[float] = -1.0
    minimum: ClassVar[float | None] = None
    maximum: ClassVar[float | None] = None

    def concerns(self, wanted: Wanted) -> bool:
        """Only of groups with this wish."""
        return wanted.has_policy(GroupPolicy.SOFT_ANTI_AFFINITY)

    def weigh(self, view: HostsView, wanted: Wanted) -> Floats:
        """The number of other members on each host."""
        assert wanted.company is not None
        return view.counted(wanted.company.members)
