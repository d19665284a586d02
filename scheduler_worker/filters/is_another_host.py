"""Is the host another than those of the instances that the request keeps away from? (F-17)"""

from __future__ import annotations

from typing import ClassVar

from scheduler_worker.domain.plugins import Verdict, one_reason
from scheduler_worker.domain.view import HostsView
from scheduler_worker.domain.wanted import Wanted


class DifferentHostFilter:
    """Passes hosts that have none of the instances of the hint `different_host`."""

    name: ClassVar[str] = "DifferentHostFilter"

    def concerns(self, wanted: Wanted) -> bool:
        """Only with the hint."""
        return wanted.company is not None and wanted.company.apart_from is not None

    def judge(self, view: HostsView, wanted: Wanted) -> Verdict:
        """By where they were when the book was asked."""
        assert wanted.company is not None
        return one_reason(~view.among(wanted.company.apart_from or ()), "hint.different_host")
