"""Is the host's compute service enabled, and was it heard from recently? (F-1)"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from scheduler_worker.domain.plugins import Verdict
from scheduler_worker.domain.view import HostsView
from scheduler_worker.domain.wanted import Wanted


class ComputeFilter:
    """Passes hosts that are enabled and whose service has not been silent for `service_down_time_s`."""

    name: ClassVar[str] = "ComputeFilter"

    def judge(self, view: HostsView, wanted: Wanted) -> Verdict:
        """Disabled is the stronger reason: somebody meant it."""
        del wanted
        enabled, up = view.enabled, view.up
        passed = enabled & up
        fell = {
            "host.disabled": int(np.count_nonzero(~enabled)),
            "service.down": int(np.count_nonzero(enabled & ~up)),
        }
        return Verdict(passed, {reason: count for reason, count in fell.items() if count})
