"""Is the host enabled, and has its compute service announced recently?"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from scheduler_worker.domain.plugins import Verdict
from scheduler_worker.domain.request_spec import RequestSpec
from scheduler_worker.domain.view import HostsView


class ComputeFilter:
    """Passes hosts that are enabled and whose service has not been silent for `service_down_time_s`."""

    name: ClassVar[str] = "ComputeFilter"

    def filter(self, view: HostsView, spec: RequestSpec) -> Verdict:
        """A host that is disabled and down counts as disabled."""
        del spec
        enabled, up = view.enabled, view.up
        passed = enabled & up
        rejected = {
            "host.disabled": int(np.count_nonzero(~enabled)),
            "service.down": int(np.count_nonzero(enabled & ~up)),
        }
        return Verdict(passed, {reason: count for reason, count in rejected.items() if count})
