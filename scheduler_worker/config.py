"""The scheduler's settings: one frozen struct, parsed once and passed down."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta as Bound
from msgspec import Struct
from msgspec.structs import force_setattr

from bus.contracts.base import Zone
from bus.contracts.host_metrics import MetricName
from bus.contracts.objects import Aggregate, Flavor, GroupDefinition, Quota
from bus.contracts.operations import EvacuationPolicy

Positive = Annotated[int, Bound(ge=1)]
Seconds = Annotated[float, Bound(gt=0)]
Ratio = Annotated[float, Bound(ge=-1e6, le=1e6)]

__all__ = ["Aggregate", "Flavor", "GroupDefinition", "Quota", "SchedulerConfig"]


def _bare_metal(resource_class: str, vcpus: int, memory_mb: int, disk_gb: int) -> Flavor:
    """A whole node: only its class is requested; the sizes are for display."""
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
    "scheduler_worker.filters.host_state.ComputeFilter",
    "scheduler_worker.filters.project.AggregateMultiTenancyIsolation",
    "scheduler_worker.filters.project.ProjectHostFilter",
    "scheduler_worker.filters.extra_specs.ComputeCapabilitiesFilter",
    "scheduler_worker.filters.affinity.ServerGroupAntiAffinityFilter",
    "scheduler_worker.filters.affinity.ServerGroupAffinityFilter",
    "scheduler_worker.filters.affinity.DifferentHostFilter",
    "scheduler_worker.filters.affinity.SameHostFilter",
)
# Enabled by name only; ImagePropertiesFilter needs hosts that report `supported_instances`.
MORE_FILTERS = (
    "scheduler_worker.filters.extra_specs.AggregateInstanceExtraSpecsFilter",
    "scheduler_worker.filters.extra_specs.AggregateTypeAffinityFilter",
    "scheduler_worker.filters.image.ImagePropertiesFilter",
    "scheduler_worker.filters.image.AggregateImagePropertiesIsolation",
    "scheduler_worker.filters.host_state.MetricsFilter",
    "scheduler_worker.filters.image.IsolatedHostsFilter",
)
# Enabled by name only, and in front of Nova alone: they read what its cells' databases tell of hosts.
HOST_FACT_FILTERS = (
    "scheduler_worker.filters.load.IoOpsFilter",
    "scheduler_worker.filters.load.AggregateIoOpsFilter",
    "scheduler_worker.filters.load.NumInstancesFilter",
    "scheduler_worker.filters.load.AggregateNumInstancesFilter",
)
DEFAULT_WEIGHERS = (
    "scheduler_worker.weighers.free_amounts.RAMWeigher",
    "scheduler_worker.weighers.free_amounts.CPUWeigher",
    "scheduler_worker.weighers.free_amounts.DiskWeigher",
    "scheduler_worker.weighers.preferences.PreferenceWeigher",
    "scheduler_worker.weighers.affinity.ServerGroupSoftAffinityWeigher",
    "scheduler_worker.weighers.affinity.ServerGroupSoftAntiAffinityWeigher",
    "scheduler_worker.weighers.host_state.MetricsWeigher",
    "scheduler_worker.weighers.host_state.HealthWeigher",
    "scheduler_worker.weighers.host_state.BuildFailureWeigher",
)


# Enabled in front of Nova, as Nova enables them.
NOVA_WEIGHERS = (
    "scheduler_worker.weighers.load.IoOpsWeigher",
    "scheduler_worker.weighers.load.NumInstancesWeigher",
    "scheduler_worker.weighers.host_state.HypervisorVersionWeigher",
)


class MetricsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the metrics of hosts are weighed (docs/operate/host-metrics.md)."""

    weights: Annotated[dict[MetricName, Ratio], Bound(max_length=32)] = {}
    """{metric: ratio}. A host weighs the sum of its metrics, each times its ratio."""
    required: bool = False
    """Whether the scheduler starts only with `MetricsFilter` enabled, which keeps hosts that lack one of them away."""
    weight_of_unavailable: float = -10_000.0
    """The weight of a host that lacks one of them."""
    max_age_s: Seconds = 900.0
    """Seconds after which a number is unknown. Longer than its publisher's interval."""


class SchedulerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one scheduler process. Flavors, aggregates and quotas are the initial objects of an empty system;
    afterwards they are objects that operators change at run time (docs/use/objects.md).
    """

    default_flavors: tuple[str, ...] = tuple(DEFAULT_FLAVORS)
    """Names of berth's own flavors that exist at the start."""
    flavors: dict[str, Flavor] = {}
    """Flavors by name, beside berth's own, or instead of the one with the same name."""
    aggregates: tuple[Aggregate, ...] = ()
    """Host aggregates."""
    available_filters: tuple[str, ...] = ()
    """Class paths of filters that may be enabled besides berth's own."""
    enabled_filters: tuple[str, ...] = DEFAULT_FILTERS
    """Filters in the order in which they run, by class path or class name. The cheapest and most selective are
    first.
    """
    enabled_weighers: tuple[str, ...] = DEFAULT_WEIGHERS
    """Weighers, by class path or class name."""
    multipliers: dict[str, float] = {}
    """Multipliers by weigher name (`ram`, `cpu`, ...), instead of the weigher's own default. Weights are added up: -1.0
    for each of `ram`, `cpu` and `disk` packs the hosts.
    """
    metrics: MetricsConfig = MetricsConfig()
    """How the metrics of hosts are weighed."""

    # Filters
    max_io_ops_per_host: Annotated[int, Bound(ge=0)] = 8
    """`IoOpsFilter` passes hosts with fewer instances that are built, moved, resized, snapshotted, rescued or unshelved
    now, as Nova's setting of this name.
    """
    max_instances_per_host: Positive = 50
    """`NumInstancesFilter` passes hosts with fewer instances, as Nova's setting of this name."""
    isolated_hosts: tuple[str, ...] = ()
    """Names of compute services whose hosts `IsolatedHostsFilter` keeps for `isolated_images`."""
    isolated_images: tuple[str, ...] = ()
    """Images (their ids) that `IsolatedHostsFilter` keeps on `isolated_hosts`."""
    restrict_isolated_hosts_to_isolated_images: bool = True
    """Whether `isolated_hosts` take no other images, as Nova's setting of this name."""

    # Choosing
    host_subset_size: Positive = 1
    """The host is drawn at random from this many of the best, as Nova's setting of this name."""
    shuffle_best_same_weighed_hosts: bool = True
    """Whether hosts of equal weight are shuffled, as Nova's setting of this name (false there): schedulers that run
    side by side then choose different hosts.
    """
    equal_hosts_per_cell: Annotated[int, Bound(ge=1, le=10_000)] = 64
    """Of shuffled hosts of equal weight, the most that are chosen in a row from one cell. 1 spreads machines that are
    requested together over the cells, and a cell that hangs delays a part of every round; at half load with four cells
    a boot then costs about a seventh more CPU and two fifths more broker messages. More than 64 gains little.
    """
    max_attempts: Annotated[int, Bound(ge=1, le=10)] = 3
    """The most hosts that a build is tried on: the chosen one and its alternates. 3, as in Nova."""

    # Pre-filters
    limit_tenants_to_placement_aggregate: bool = False
    """Whether a project is limited to its aggregates (`filter_tenant_id`), as in Nova."""
    placement_aggregate_required_for_tenants: bool = False
    """Whether a project without such an aggregate gets no host, as in Nova."""
    default_availability_zone: Zone = "nova"
    """The zone of hosts that are in no aggregate with a zone."""
    enable_isolated_aggregate_filtering: bool = False
    """Whether aggregates with required traits are reserved for requests with those traits, as in Nova."""
    force_host_projects: tuple[str, ...] = ()
    """Operators' projects, whose requests may name a host and skip the filters."""

    # Quota
    default_quota: Quota = {}
    """The most that one project's instances may hold together: {resource class: amount}; `INSTANCES` is their
    number. The claim enforces it. As in Nova the source of a move counts until it is confirmed or reverted, and an
    offloaded instance is one of `INSTANCES`. Empty: no limit.
    """
    quotas: dict[str, Quota] = {}
    """By project, instead of the default quota."""
    groups: dict[str, GroupDefinition] = {}
    """Server groups that requests name, by PROJECT/NAME."""

    # Hosts
    hosts_warmup_s: Seconds = 5.0
    """Seconds after a start during which a request without a host is retried and not failed, because hosts are still
    being reported.
    """
    cell_wait_s: Seconds = 5.0
    """Seconds that the start waits for unavailable cells. The scheduler connects to them when they come back."""
    report_interval_s: Seconds = 300.0
    """Seconds between two requests for reports of all hosts, in case one was lost."""

    # Claiming
    claim_timeout_s: Seconds = 5.0
    """Seconds that the scheduler waits for an answer of placement."""
    claim_rounds: Positive = 256
    """The most hosts that are claimed for one request in one delivery. In effect this is the whole list; the number
    bounds it.
    """
    conflict_retries: Positive = 4
    """The most repeated claims on one host whose spec generation keeps changing."""
    retry_jitter_s: Seconds = 0.05
    """Longest random wait, in seconds, between two claims of one request."""

    # Moving
    allow_resize_to_same_host: bool = False
    """Whether a resize may end on the host that the instance is on, as in Nova."""
    actions_across_cells: bool = False
    """Whether an instance may be unshelved in another cell, migrated or resized to one, when its own has no host. It is
    built there from a snapshot, and the disk at the source goes."""
    action_query_s: Seconds = 60.0
    """Seconds without an event of a build, a delete, a move, or another request about an instance, after which the
    scheduler queries its cell about it. The query is repeated after twice as long, up to 10 minutes.
    """
    assumed_choice_s: Seconds = 5.0
    """Seconds that hosts chosen for a move count as used. By then the cell has claimed."""

    # When a host is fenced
    on_host_failure: EvacuationPolicy = EvacuationPolicy.WAIT
    """The policy for an active instance whose host is fenced, unless its request or its flavor
    (`berth:on_host_failure`) sets another: `restart` (it is evacuated), `wait` or `fail`.
    """
    evacuations_at_once: Positive = 100
    """The most evacuations by policy that are under way at a time, over all fenced hosts."""

    # Building
    build_timeout_s: Seconds = 300.0
    """Seconds that one attempt of a build may take when its request names no limit."""

    # Retention of builds that ended without a machine; a request older than that is not treated as new
    ended_retention_s: Seconds = 7 * 86_400.0
    """Seconds that the record of a build without a machine is kept. A request older than that is refused, because
    it could be a repeated one.
    """
    purge_interval_s: Seconds = 600.0
    """Seconds between two purges of such records."""
    purge_batch: Annotated[int, Bound(ge=1, le=10_000)] = 1000
    """The most records that one statement purges."""

    # Bounds of the consumers
    batch: Positive = 512
    """The most requests decided together. 512: 256 cost an eighth of the boots a second under a large backlog."""
    progress_linger_s: Annotated[float, Bound(ge=0, le=1)] = 0.25
    """Seconds until an event that ends nothing is published, unless the build's next event comes first."""
    concurrency: Positive = 2
    """Batches of requests under way: one decides while another waits for its claims."""
    prefetch: Positive = 512
    """Unacknowledged messages of a cell that the broker delivers ahead of a queue. Of a queue of requests: 64."""

    def __post_init__(self) -> None:
        """Raises ValueError: a default flavor does not exist."""
        for name in self.default_flavors:
            if name not in DEFAULT_FLAVORS:
                raise ValueError(f"default_flavors: there is no {name!r}; berth has {', '.join(DEFAULT_FLAVORS)}")
        default = {name: DEFAULT_FLAVORS[name] for name in self.default_flavors}
        force_setattr(self, "flavors", {**default, **self.flavors})

    def quota_of(self, project: str) -> dict[str, int]:
        """The quota of a project: its own, or else the default."""
        return self.quotas.get(project, self.default_quota)
