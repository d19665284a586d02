"""Does the host suit the policy of the server group: has it room for another member, or is the group here?"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from bus.contracts.placement import GroupPolicy
from scheduler_worker.domain.plugins import NONE_REJECTED, Verdict, verdict_of
from scheduler_worker.domain.view import HostsView, RequestSpec


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


class ServerGroupAffinityFilter:
    """Passes the host that has the members; all hosts while there is none. Of two first members the claim grants one.

    While a member moves it is on two hosts and may end on either: no host passes until its move is over. Of a foreign
    control plane's group each host that has a member passes, as in Nova.
    """

    name: ClassVar[str] = "ServerGroupAffinityFilter"

    def applies_to(self, spec: RequestSpec) -> bool:
        """Only to groups with this policy."""
        return spec.has_policy(GroupPolicy.AFFINITY)

    def filter(self, view: HostsView, spec: RequestSpec) -> Verdict:
        """By where the members were when placement was queried; the claim checks again."""
        assert spec.peers is not None
        if not spec.peers.members:
            return Verdict(np.ones(len(view), dtype=np.bool_), NONE_REJECTED)
        may_join = spec.peers.is_foreign or len(spec.peers.members) == 1
        return verdict_of((view.counted(spec.peers.members) > 0) & may_join, "group.elsewhere")
