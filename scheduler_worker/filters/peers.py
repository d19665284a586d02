"""Where are the other instances of the request: those that it names, and the members of its server group?"""

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


class DifferentHostFilter:
    """Passes hosts that have none of the instances of the hint `different_host`."""

    name: ClassVar[str] = "DifferentHostFilter"

    def applies_to(self, spec: RequestSpec) -> bool:
        """Only to requests with the hint."""
        return spec.peers is not None and spec.peers.different_hosts is not None

    def filter(self, view: HostsView, spec: RequestSpec) -> Verdict:
        """By where they were when placement was queried."""
        assert spec.peers is not None
        return verdict_of(~view.among(spec.peers.different_hosts or ()), "hint.different_host")


class SameHostFilter:
    """Passes hosts with any of the instances of the hint `same_host`; none while those have no host, as in Nova."""

    name: ClassVar[str] = "SameHostFilter"

    def applies_to(self, spec: RequestSpec) -> bool:
        """Only to requests with the hint."""
        return spec.peers is not None and spec.peers.same_hosts is not None

    def filter(self, view: HostsView, spec: RequestSpec) -> Verdict:
        """By where they were when placement was queried."""
        assert spec.peers is not None
        return verdict_of(view.among(spec.peers.same_hosts or ()), "hint.same_host")
