"""The settings of a test's nova.conf as those of the front. Run by Nova's own interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Settings that shape a query, by their group; the front has them by the same names.
PREFILTERS = {
    "max_placement_results": "scheduler",
    "enable_isolated_aggregate_filtering": "scheduler",
    "limit_tenants_to_placement_aggregate": "scheduler",
    "placement_aggregate_required_for_tenants": "scheduler",
    "query_placement_for_image_type_support": "scheduler",
    "image_metadata_prefilter": "scheduler",
    "query_placement_for_routed_network_aggregates": "scheduler",
    "pci_in_placement": "filter_scheduler",
    "disable_fallback_pcpu_query": "workarounds",
}
MULTIPLIERS = {
    "ram": "ram_weight_multiplier",
    "cpu": "cpu_weight_multiplier",
    "disk": "disk_weight_multiplier",
    "soft_affinity": "soft_affinity_weight_multiplier",
    "soft_anti_affinity": "soft_anti_affinity_weight_multiplier",
}
MOST_ATTEMPTS = 10  # of the front's setting


def of_queries(conf: Any) -> dict[str, Any]:
    """Those that shape a query."""
    return {name: getattr(getattr(conf, group), name) for name, group in PREFILTERS.items()}


def settings_of(conf: Any, weights: Mapping[str, float] | None) -> dict[str, Any]:
    """{"nova": ..., "scheduler": ...}. weights: of hosts by name, of the fixture that has no other weigher run."""
    chosen = conf.filter_scheduler
    scheduler: dict[str, Any] = {
        "host_subset_size": chosen.host_subset_size,
        "shuffle_best_same_weighed_hosts": chosen.shuffle_best_same_weighed_hosts,
        "max_attempts": min(conf.scheduler.max_attempts, MOST_ATTEMPTS),
    }
    if weights is None:
        scheduler["multipliers"] = {name: getattr(chosen, its) for name, its in MULTIPLIERS.items()}
    else:
        # A weigher's name is what its multiplier is found by.
        scheduler["enabled_weighers"] = ["host_names.HostNameWeigher"]
        scheduler["multipliers"] = {"host_names": 1.0}
    nova = {
        "prefilters": of_queries(conf),
        "enabled_filters": list(chosen.enabled_filters),  # a copy: tests append to it
        "default_availability_zone": conf.default_availability_zone,
    }
    return {"nova": nova, "scheduler": scheduler}
