"""Do the host's aggregates list this flavor?"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from scheduler_worker.domain.plugins import NONE_REJECTED, Verdict, verdict_of
from scheduler_worker.domain.request_spec import RequestSpec
from scheduler_worker.domain.view import HostsView

KEY = "instance_type"


class AggregateTypeAffinityFilter:
    """A host in aggregates with `instance_type` metadata takes the flavors that any of them lists; others take all."""

    name: ClassVar[str] = "AggregateTypeAffinityFilter"

    def filter(self, view: HostsView, spec: RequestSpec) -> Verdict:
        """By the flavor's name, in comma lists."""
        listing = view.membership.with_key(KEY)
        if not listing:
            return Verdict(np.ones(len(view), dtype=np.bool_), NONE_REJECTED)
        restricted = np.zeros(len(view), dtype=np.bool_)
        allowed = np.zeros(len(view), dtype=np.bool_)
        for aggregate in listing:
            members = view.member_of(aggregate.uuid)
            restricted |= members
            if spec.flavor in {name.strip() for name in aggregate.metadata[KEY].split(",")}:
                allowed |= members
        return verdict_of(~restricted | allowed, "flavor.not_listed")
