"""Does the metadata of the host's aggregates match the flavor's extra specs?"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import numpy as np

from scheduler_worker.domain.flavors import matches, scoped_specs, unscoped_specs
from scheduler_worker.domain.plugins import NONE_REJECTED, Verdict
from scheduler_worker.domain.request_spec import RequestSpec
from scheduler_worker.domain.view import HostsView

SCOPE = "aggregate_instance_extra_specs"


class AggregateInstanceExtraSpecsFilter:
    """Compares un-scoped and `aggregate_instance_extra_specs:` extra specs with the metadata of the host's aggregates.

    As in Nova: a key that none of the host's aggregates has rejects it; of several values (aggregates, or a comma list)
    one must match. ComputeCapabilitiesFilter reads un-scoped keys too: use scopes when both are enabled.
    """

    name: ClassVar[str] = "AggregateInstanceExtraSpecsFilter"

    def applies_to(self, spec: RequestSpec) -> bool:
        """Only to flavors with such extra specs."""
        return bool(self._required(spec))

    def _required(self, spec: RequestSpec) -> list[tuple[str, str]]:
        return [*unscoped_specs(spec.extra_specs).items(), *scoped_specs(spec.extra_specs, SCOPE).items()]

    def filter(self, view: HostsView, spec: RequestSpec) -> Verdict:
        """Each key in turn; a host is rejected by the first that does not match."""
        passed = np.ones(len(view), dtype=np.bool_)
        rejected: Counter[str] = Counter()
        for key, value in self._required(spec):
            mine = np.zeros(len(view), dtype=np.bool_)
            for aggregate in view.membership.with_key(key):
                if any(matches(word.strip(), value) for word in aggregate.metadata[key].split(",")):
                    mine |= view.member_of(aggregate.uuid)
            rejected[f"aggregate.{key}"] += int(np.count_nonzero(passed & ~mine))
            passed &= mine
        return Verdict(passed, {reason: count for reason, count in rejected.items() if count} or NONE_REJECTED)
