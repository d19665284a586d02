"""Is the host enabled, by its compute service and by the operator, and is its compute service up?"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from bus.contracts.operations import AdminState
from scheduler_worker.domain.plugins import Verdict
from scheduler_worker.domain.request_spec import RequestSpec
from scheduler_worker.domain.view import HostsView


class ComputeFilter:
    """Passes hosts that are enabled and whose service is not down, as listed by the conductor of its cell."""

    name: ClassVar[str] = "ComputeFilter"

    def filter(self, view: HostsView, spec: RequestSpec) -> Verdict:
        """A host that is disabled and down counts as disabled."""
        del spec
        enabled, up = view.enabled, view.up
        passed = enabled & up
        if passed.all():
            return Verdict(passed, {})
        maintained, fenced = view.is_in(AdminState.MAINTENANCE), view.is_in(AdminState.FENCED)
        rejected = {
            "host.fenced": int(np.count_nonzero(fenced)),
            "host.maintenance": int(np.count_nonzero(maintained)),
            "host.disabled": int(np.count_nonzero(~enabled & ~maintained & ~fenced)),
            "service.down": int(np.count_nonzero(enabled & ~up)),
        }
        return Verdict(passed, {reason: count for reason, count in rejected.items() if count})
