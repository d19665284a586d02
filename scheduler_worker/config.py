"""The scheduler's settings: one frozen struct, parsed once and passed down."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta as Bound
from msgspec import Struct
from msgspec.structs import force_setattr

from bus.contracts.objects import Aggregate, Flavor, Quota

Positive = Annotated[int, Bound(ge=1)]
Seconds = Annotated[float, Bound(gt=0)]

__all__ = ["Aggregate", "Flavor", "Quota", "SchedulerConfig"]


def _bare_metal(resource_class: str, vcpus: int, memory_mb: int, disk_gb: int) -> Flavor:
    """A whole node: its class alone is requested; the sizes are for people."""
    specs = {"resources:VCPU": "0", "resources:MEMORY_MB": "0", "resources:DISK_GB": "0"}
    return Flavor(
        vcpus=vcpus, memory_mb=memory_mb, disk_gb=disk_gb, extra_specs={f"resources:{resource_class}": "1", **specs}
    )


DEFAULT_FLAVORS: dict[str, Flavor] = {
    "m1.tiny": Flavor(vcpus=1, memory_mb=512, disk_gb=1),
    "m1.small": Flavor(vcpus=1, memory_mb=2048, disk_gb=20),
    "m1.medium": Flavor(vcpus=2, memory_mb=4096, disk_gb=40),
    "m1.large": Flavor(vcpus=4, memory_mb=8192, disk_gb=80),
    "gpu.small": Flavor(vcpus=4, memory_mb=8192, disk_gb=40, extra_specs={"resources:VGPU": "1"}),
    "bm.gold": _bare_metal("CUSTOM_BAREMETAL_GOLD", 32, 131_072, 1000),
    "bm.silver": _bare_metal("CUSTOM_BAREMETAL_SILVER", 16, 65_536, 500),
}

# Most selective and cheapest first; they run in this order.
DEFAULT_FILTERS = (
    "scheduler_worker.filters.service_is_up.ComputeFilter",
    "scheduler_worker.filters.tenant_is_allowed.AggregateMultiTenancyIsolation",
    "scheduler_worker.filters.belongs_to_project.ProjectHostFilter",
    "scheduler_worker.filters.capabilities_match.ComputeCapabilitiesFilter",
    "scheduler_worker.filters.group_has_room.ServerGroupAntiAffinityFilter",
    "scheduler_worker.filters.group_is_here.ServerGroupAffinityFilter",
    "scheduler_worker.filters.is_another_host.DifferentHostFilter",
    "scheduler_worker.filters.is_the_same_host.SameHostFilter",
)
# Enabled by name only; ImagePropertiesFilter needs hosts that announce `supported_instances`.
MORE_FILTERS = (
    "scheduler_worker.filters.aggregate_has_extra_specs.AggregateInstanceExtraSpecsFilter",
    "scheduler_worker.filters.flavor_is_listed.AggregateTypeAffinityFilter",
    "scheduler_worker.filters.image_is_supported.ImagePropertiesFilter",
    "scheduler_worker.filters.image_is_isolated.AggregateImagePropertiesIsolation",
)
DEFAULT_WEIGHERS = (
    "scheduler_worker.weighers.free_ram.RAMWeigher",
    "scheduler_worker.weighers.free_cpu.CPUWeigher",
    "scheduler_worker.weighers.free_disk.DiskWeigher",
    "scheduler_worker.weighers.preferences.PreferenceWeigher",
    "scheduler_worker.weighers.group_members_here.ServerGroupSoftAffinityWeigher",
    "scheduler_worker.weighers.group_members_elsewhere.ServerGroupSoftAntiAffinityWeigher",
    "scheduler_worker.weighers.recent_build_failures.BuildFailureWeigher",
)


class SchedulerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The scheduler's settings; each name says its unit.

    available_filters: class paths that may be enabled besides berth's own; enabled_filters: those that run,
    in order, by class path or by the class's name. multipliers: by weigher name (`ram`, `cpu`, ...), else the weigher's
    own default; weights are added up, so hosts are packed by `ram`, `cpu` and `disk` of -1.0 together.
    default_flavors: which of berth's own flavors there are; flavors: yours, beside them, or instead of one of its name.
    Flavors, aggregates and quotas are what an empty system begins with: after that they are objects that operators
    change at run time (docs/howto/objects.md).
    """

    default_flavors: tuple[str, ...] = tuple(DEFAULT_FLAVORS)
    flavors: dict[str, Flavor] = {}
    aggregates: tuple[Aggregate, ...] = ()
    available_filters: tuple[str, ...] = ()
    enabled_filters: tuple[str, ...] = DEFAULT_FILTERS
    enabled_weighers: tuple[str, ...] = DEFAULT_WEIGHERS
    multipliers: dict[str, float] = {}

    # Choosing
    host_subset_size: Positive = 1
    shuffle_best_same_weighed_hosts: bool = True
    max_subset_size: Positive = 64  # contention widens the choice among near-best hosts up to this
    max_attempts: Annotated[int, Bound(ge=1, le=10)] = 3
    max_options: Annotated[int, Bound(ge=1, le=16)] = 4  # candidate allocations of one host, tried in one claim

    # Pre-filters
    limit_tenants_to_placement_aggregate: bool = False
    placement_aggregate_required_for_tenants: bool = False
    default_availability_zone: str = "nova"
    enable_isolated_aggregate_filtering: bool = False
    force_host_projects: tuple[str, ...] = ()  # projects (an operator's) whose requests may skip the filters

    # Quota, enforced by claims: {class: total amount of a project's instances}; INSTANCES: their number
    default_quota: Quota = {}
    quotas: dict[str, Quota] = {}  # by project, instead of the default

    # Hosts
    hosts_warmup_s: Seconds = 5.0  # after a start, hosts may still be announced: requests are retried, not failed
    cell_wait_s: Seconds = 5.0  # a start waits so long for cells that are unavailable; those are connected to later
    report_interval_s: Seconds = 300.0  # announcements are requested again so often, in case one was lost

    # Claiming
    claim_timeout_s: Seconds = 5.0
    claim_rounds: Positive = 256  # hosts claimed for one request in one delivery (the whole list, but bounded)
    claim_deadline_s: Seconds = 20.0  # ... and for no longer than this
    raced_retries: Positive = 4  # repeated claims on a host whose shape keeps changing
    raced_wait_s: Seconds = 0.25  # how long to wait for the replica to apply the newest changes
    retry_jitter_s: Seconds = 0.05

    # Moving
    allow_resize_to_same_host: bool = False  # as in Nova; a resize may then end on the host that the instance is on
    choice_held_s: Seconds = 5.0  # hosts chosen for a move count as used for so long: by then its cell has claimed

    # Building
    build_timeout_s: Seconds = 300.0

    # Retention of builds that ended without a machine; a request older than that is not taken for a new one
    ended_retention_s: Seconds = 7 * 86_400.0
    purge_interval_s: Seconds = 600.0
    purge_batch: Annotated[int, Bound(ge=1, le=10_000)] = 1000

    # Bounds of the consumers
    batch: Positive = 512  # 256: an eighth fewer boots a second where much waits (docs/lab/performance.md)
    progress_linger_s: Annotated[float, Bound(ge=0, le=1)] = 0.1  # an event that ends nothing leaves within this
    concurrency: Positive = 2  # batches of requests at a time: one decides while another waits for its claims
    prefetch: Positive = 512
    max_funnel_nearest: Positive = 3

    def __post_init__(self) -> None:
        """Raises ValueError: a default flavor that there is not."""
        for name in self.default_flavors:
            if name not in DEFAULT_FLAVORS:
                raise ValueError(f"default_flavors: there is no {name!r}; berth has {', '.join(DEFAULT_FLAVORS)}")
        default = {name: DEFAULT_FLAVORS[name] for name in self.default_flavors}
        force_setattr(self, "flavors", {**default, **self.flavors})

    def quota_of(self, project: str) -> dict[str, int]:
        """The quota of a project; without one, the default."""
        return self.quotas.get(project, self.default_quota)
