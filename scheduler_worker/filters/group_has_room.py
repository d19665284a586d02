"""Does the host have room for one more of a server group that keeps apart? (F-4)"""

from __future__ import annotations

from typing import ClassVar

from bus.contracts.groups import GroupPolicy
from scheduler_worker.domain.plugins import Verdict, one_reason
from scheduler_worker.domain.view import HostsView
from scheduler_worker.domain.wanted import Wanted


class ServerGroupAntiAffinityFilter:
    """Passes hosts with fewer other members than `max_per_host`. The instance itself is never counted (trap 3)."""

    name: ClassVar[str] = "ServerGroupAntiAffinityFilter"

    def concerns(self, wanted: Wanted) -> bool:
        """Only of groups that keep apart."""
        return wanted.has_policy(GroupPolicy.ANTI_AFFINITY)

    def judge(self, view: HostsView, wanted: Wanted) -> Verdict:
        """By where the members were when the book was asked; the claim looks again."""
        assert wanted.company is not None
        assert wanted.company.server_group is not None
        most = wanted.company.server_group.max_per_host
        return one_reason(view.counted(wanted.company.members) < most, "group.no_room")
