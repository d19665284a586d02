"""Does the host have what the flavor names: in its aggregates, or among its own capabilities?"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import numpy as np

from scheduler_worker.config import Aggregate
from scheduler_worker.selection.flavor import matches, scoped_specs, unscoped_specs
from scheduler_worker.selection.host_view import HostsView
from scheduler_worker.selection.plugin import NONE_REJECTED, FilterResult, filter_result_of_members
from scheduler_worker.selection.request_spec import RequestSpec

AGGREGATE_SCOPE = "aggregate_instance_extra_specs"


class AggregateInstanceExtraSpecsFilter:
    """Compares un-scoped and `aggregate_instance_extra_specs:` extra specs with metadata of the host's aggregates."""

    # As in Nova: a key that none of the host's aggregates has rejects it; of several values (aggregates, or a comma
    # list) one must match. ComputeCapabilitiesFilter reads un-scoped keys too: use scopes when both are enabled.

    name: ClassVar[str] = "AggregateInstanceExtraSpecsFilter"

    def applies_to(self, spec: RequestSpec) -> bool:
        """Only to flavors with such extra specs."""
        return bool(self._required(spec))

    def _required(self, spec: RequestSpec) -> list[tuple[str, str]]:
        return [*unscoped_specs(spec.extra_specs).items(), *scoped_specs(spec.extra_specs, AGGREGATE_SCOPE).items()]

    def filter(self, view: HostsView, spec: RequestSpec) -> FilterResult:
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
        return FilterResult(passed, {reason: count for reason, count in rejected.items() if count} or NONE_REJECTED)


KEY = "instance_type"


class AggregateTypeAffinityFilter:
    """A host in aggregates with `instance_type` metadata takes the flavors that any of them lists; others take all."""

    name: ClassVar[str] = "AggregateTypeAffinityFilter"

    def filter(self, view: HostsView, spec: RequestSpec) -> FilterResult:
        """By the flavor's name, in comma lists."""

        def lists(aggregate: Aggregate) -> bool:
            return spec.flavor in {name.strip() for name in aggregate.metadata[KEY].split(",")}

        return filter_result_of_members(view, view.membership.with_key(KEY), lists, "flavor.not_listed")


CAPABILITIES = "capabilities"


class ComputeCapabilitiesFilter:
    """Compares `capabilities:` and un-scoped extra specs with the host's reported attributes. As in Nova: a missing
    attribute rejects where the key has the scope, and passes without: un-scoped keys may be meant for a driver or
    another filter.
    """

    name: ClassVar[str] = "ComputeCapabilitiesFilter"

    def filter(self, view: HostsView, spec: RequestSpec) -> FilterResult:
        """Each attribute in turn; a host is rejected by the first that does not match."""
        passed = np.ones(len(view), dtype=np.bool_)
        rejected: Counter[str] = Counter()
        scoped, unscoped = scoped_specs(spec.extra_specs, CAPABILITIES), unscoped_specs(spec.extra_specs)
        required = [(*item, False) for item in scoped.items()] + [(*item, True) for item in unscoped.items()]
        for key, value, may_lack in required:
            # Hosts report the same few values, so each distinct value is compared once.
            words = view.attribute(key)
            results = {word: may_lack if word is None else matches(word, value) for word in set(words)}
            mine = np.array([results[word] for word in words], dtype=np.bool_)
            rejected[f"capability.{key}"] += int(np.count_nonzero(passed & ~mine))
            passed &= mine
        return FilterResult(passed, {reason: count for reason, count in rejected.items() if count} or NONE_REJECTED)
