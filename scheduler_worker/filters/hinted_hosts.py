"""Is the host another one than those of the hinted instances, or the same as one of theirs?"""

from __future__ import annotations

from typing import ClassVar

from scheduler_worker.domain.plugins import Verdict, verdict_of
from scheduler_worker.domain.view import HostsView, RequestSpec


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
