"""Do the host's announced attributes match the flavor's extra specs?"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import numpy as np

from scheduler_worker.domain.flavors import matches, scoped_specs, unscoped_specs
from scheduler_worker.domain.plugins import NONE_REJECTED, Verdict
from scheduler_worker.domain.request_spec import RequestSpec
from scheduler_worker.domain.view import HostsView

SCOPE = "capabilities"


class ComputeCapabilitiesFilter:
    """Compares `capabilities:` and un-scoped extra specs with the host's announced attributes.

    As in Nova: a host without an attribute is rejected where the key has the scope, and passes where it has none.
    Flavors carry un-scoped keys that are meant for a driver or for another filter.
    """

    name: ClassVar[str] = "ComputeCapabilitiesFilter"

    def filter(self, view: HostsView, spec: RequestSpec) -> Verdict:
        """Each attribute in turn; a host is rejected by the first that does not match."""
        passed = np.ones(len(view), dtype=np.bool_)
        rejected: Counter[str] = Counter()
        scoped, unscoped = scoped_specs(spec.extra_specs, SCOPE), unscoped_specs(spec.extra_specs)
        required = [(*item, False) for item in scoped.items()] + [(*item, True) for item in unscoped.items()]
        for key, value, may_lack in required:
            # Hosts announce the same few values, so each distinct value is compared once.
            words = view.attribute(key)
            verdicts = {word: may_lack if word is None else matches(word, value) for word in set(words)}
            mine = np.array([verdicts[word] for word in words], dtype=np.bool_)
            rejected[f"capability.{key}"] += int(np.count_nonzero(passed & ~mine))
            passed &= mine
        return Verdict(passed, {reason: count for reason, count in rejected.items() if count} or NONE_REJECTED)
