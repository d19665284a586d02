"""Is the host one of those of the instances that the request wants to be with? (F-18)"""

from __future__ import annotations

from typing import ClassVar

from scheduler_worker.domain.plugins import Verdict, one_reason
from scheduler_worker.domain.view import HostsView
from scheduler_worker.domain.wanted import Wanted


class SameHostFilter:
    """Passes hosts that have any of the instances of the hint `same_host`; none while those are nowhere, as Nova's."""

    name: ClassVar[str] = "SameHostFilter"

    def concerns(self, wanted: Wanted) -> bool:
        """Only with the hint."""
        return wanted.company is not None and wanted.company.together_with is not None

    def judge(self, view: HostsView, wanted: Wanted) -> Verdict:
        """By where they were when the book was asked."""
        assert wanted.company is not None
        return one_reason(view.among(wanted.company.together_with or ()), "hint.same_host")
