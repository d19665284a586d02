"""Do the host's announced attributes match the flavor's extra specs?"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import numpy as np

from scheduler_worker.domain.extra_specs import matches, scoped_specs
from scheduler_worker.domain.plugins import NONE_REJECTED, Verdict
from scheduler_worker.domain.request_spec import RequestSpec
from scheduler_worker.domain.view import HostsView

SCOPE = "capabilities"


class ComputeCapabilitiesFilter:
    """Compares un-scoped and `capabilities:` extra specs with the host's announced attributes."""

    name: ClassVar[str] = "ComputeCapabilitiesFilter"

    def filter(self, view: HostsView, spec: RequestSpec) -> Verdict:
        """Each attribute in turn; a host is rejected by the first that does not match."""
        passed = np.ones(len(view), dtype=np.bool_)
        rejected: Counter[str] = Counter()
        for key, value in scoped_specs(spec.extra_specs, SCOPE).items():
            # Hosts announce the same few values, so each distinct value is compared once.
            words = view.attribute(key)
            verdicts = {word: matches(word, value) for word in set(words)}
            mine = np.array([verdicts[word] for word in words], dtype=np.bool_)
            rejected[f"capability.{key}"] += int(np.count_nonzero(passed & ~mine))
            passed &= mine
        return Verdict(passed, {reason: count for reason, count in rejected.items() if count} or NONE_REJECTED)
