"""Where are the other instances of the request: those that it names, and the members of its server group?"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from bus.contracts.placement import GroupPolicy
from scheduler_worker.selection.host_view import HostsView
from scheduler_worker.selection.plugin import NONE_REJECTED, FilterResult, filter_result_of
from scheduler_worker.selection.request_spec import RequestSpec


class ServerGroupAntiAffinityFilter:
    """Passes hosts with fewer other members than `max_per_host`. The instance itself is never counted."""

    name: ClassVar[str] = "ServerGroupAntiAffinityFilter"

    def applies_to(self, spec: RequestSpec) -> bool:
        """Only to groups with this policy."""
        return spec.has_policy(GroupPolicy.ANTI_AFFINITY)

    def filter(self, view: HostsView, spec: RequestSpec) -> FilterResult:
        """By where the members were when placement was queried; the claim checks again."""
        assert spec.related is not None
        assert spec.related.server_group is not None
        most = spec.related.server_group.max_per_host
        return filter_result_of(view.counted(spec.related.members) < most, "group.no_capacity")


class ServerGroupAffinityFilter:
    """Passes the host that has the members; all hosts while there is none (of two first members the claim grants one).
    While a member moves no host passes. Of a foreign control plane's group each host with a member passes, as in Nova.
    """

    name: ClassVar[str] = "ServerGroupAffinityFilter"

    def applies_to(self, spec: RequestSpec) -> bool:
        """Only to groups with this policy."""
        return spec.has_policy(GroupPolicy.AFFINITY)

    def filter(self, view: HostsView, spec: RequestSpec) -> FilterResult:
        """By where the members were when placement was queried; the claim checks again."""
        assert spec.related is not None
        if not spec.related.members:
            return FilterResult(np.ones(len(view), dtype=np.bool_), NONE_REJECTED)
        may_join = spec.related.is_foreign or len(spec.related.members) == 1
        return filter_result_of((view.counted(spec.related.members) > 0) & may_join, "group.elsewhere")


class DifferentHostFilter:
    """Passes hosts that have none of the instances of the hint `different_host`."""

    name: ClassVar[str] = "DifferentHostFilter"

    def applies_to(self, spec: RequestSpec) -> bool:
        """Only to requests with the hint."""
        return spec.related is not None and spec.related.different_hosts is not None

    def filter(self, view: HostsView, spec: RequestSpec) -> FilterResult:
        """By where they were when placement was queried."""
        assert spec.related is not None
        return filter_result_of(~view.among(spec.related.different_hosts or ()), "hint.different_host")


class SameHostFilter:
    """Passes hosts with any of the instances of the hint `same_host`; none while those have no host, as in Nova."""

    name: ClassVar[str] = "SameHostFilter"

    def applies_to(self, spec: RequestSpec) -> bool:
        """Only to requests with the hint."""
        return spec.related is not None and spec.related.same_hosts is not None

    def filter(self, view: HostsView, spec: RequestSpec) -> FilterResult:
        """By where they were when placement was queried."""
        assert spec.related is not None
        return filter_result_of(view.among(spec.related.same_hosts or ()), "hint.same_host")
