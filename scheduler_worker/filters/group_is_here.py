"""Is the host where the server group is? (F-5)"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from bus.contracts.groups import GroupPolicy
from scheduler_worker.domain.plugins import EVERYONE, Verdict, one_reason
from scheduler_worker.domain.view import HostsView
from scheduler_worker.domain.wanted import Wanted


class ServerGroupAffinityFilter:
    """Passes hosts that have a member; all of them while there is none. Two first members at once: the claim tells."""

    name: ClassVar[str] = "ServerGroupAffinityFilter"

    def concerns(self, wanted: Wanted) -> bool:
        """Only of groups that stay together."""
        return wanted.has_policy(GroupPolicy.AFFINITY)

    def judge(self, view: HostsView, wanted: Wanted) -> Verdict:
        """By where the members were when the book was asked; the claim looks again."""
        assert wanted.company is not None
        if not wanted.company.members:
            return Verdict(np.ones(len(view), dtype=np.bool_), EVERYONE)
        return one_reason(view.counted(wanted.company.members) > 0, "group.elsewhere")
