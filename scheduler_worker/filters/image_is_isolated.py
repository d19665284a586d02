"""Do the host's aggregates accept images with these properties?"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import numpy as np

from scheduler_worker.domain.plugins import NONE_REJECTED, Verdict
from scheduler_worker.domain.request_spec import RequestSpec
from scheduler_worker.domain.view import HostsView, Membership


class AggregateImagePropertiesIsolation:
    """Where an aggregate's metadata has a property that the image has too, the values must match.

    As in Nova: the aggregate may have a comma list. A property that no aggregate of the host has, or that the image
    does not have, restricts nothing.
    """

    name: ClassVar[str] = "AggregateImagePropertiesIsolation"
    run_on_rebuild: ClassVar[bool] = True

    def applies_to(self, spec: RequestSpec) -> bool:
        """Only to images with properties."""
        return bool(spec.image_properties)

    def reads_image_property(self, name: str, membership: Membership) -> bool:
        """Whether some aggregate has it."""
        return membership.has_key(name)

    def filter(self, view: HostsView, spec: RequestSpec) -> Verdict:
        """Each property in turn; a host is rejected by the first that does not match."""
        passed = np.ones(len(view), dtype=np.bool_)
        rejected: Counter[str] = Counter()
        for key, value in sorted(spec.image_properties.items()):
            named = np.zeros(len(view), dtype=np.bool_)
            met = np.zeros(len(view), dtype=np.bool_)
            for aggregate in view.membership.with_key(key):
                members = view.member_of(aggregate.uuid)
                named |= members
                if value in {word.strip() for word in aggregate.metadata[key].split(",")}:
                    met |= members
            rejected[f"image.{key}"] += int(np.count_nonzero(passed & named & ~met))
            passed &= ~named | met
        return Verdict(passed, {reason: count for reason, count in rejected.items() if count} or NONE_REJECTED)
