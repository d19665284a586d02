"""Does the host have fewer members of the anti-affinity group than it may have?"""

from __future__ import annotations

from typing import ClassVar

from bus.contracts.groups import GroupPolicy
from scheduler_worker.domain.plugins import Verdict, verdict_of
from scheduler_worker.domain.request_spec import RequestSpec
from scheduler_worker.domain.view import HostsView


class ServerGroupAntiAffinityFilter:
    """Passes hosts with fewer other members than `max_per_host`. The instance itself is never counted."""

    name: ClassVar[str] = "ServerGroupAntiAffinityFilter"

    def applies_to(self, spec: RequestSpec) -> bool:
        """Only to groups with this policy."""
        return spec.has_policy(GroupPolicy.ANTI_AFFINITY)

    def filter(self, view: HostsView, spec: RequestSpec) -> Verdict:
        """By where the members were when placement was queried; the claim checks again."""
        assert spec.peers is not None
        assert spec.peers.server_group is not None
        most = spec.peers.server_group.max_per_host
        return verdict_of(view.counted(spec.peers.members) < most, "group.no_room")
