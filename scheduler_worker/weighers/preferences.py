"""How many of the preferred traits and classes does the host have?"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from scheduler_worker.hosts.host_table import Floats
from scheduler_worker.selection.host_view import HostsView
from scheduler_worker.selection.plugin import Weigher
from scheduler_worker.selection.request_spec import RequestSpec


class PreferenceWeigher(Weigher):
    """Prefers hosts that have the flavor's preferences: a trait on any provider of the tree, a class of which any is
    free. By default its multiplier outweighs all but build failures. A flavor without preferences adds no weight.
    """

    name: ClassVar[str] = "preferred"
    multiplier: ClassVar[float] = 10.0

    def weigh(self, view: HostsView, spec: RequestSpec) -> Floats:
        """The number of preferences that each host meets."""
        met = np.zeros(len(view), dtype=np.float64)
        for trait in spec.preferred_traits:
            met += view.has_trait(trait)
        for resource_class in spec.preferred_classes:
            met += view.free(resource_class) > 0
        return met
