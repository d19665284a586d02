"""The command to the cell that a build is dispatched to, and the query of it. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.build import BuildRequest
from bus.contracts.cell import CellBuild, InstanceSpec
from bus.contracts.cell_queries import CellBuildQuery
from bus.contracts.stages import Stamps
from scheduler_worker.config import Flavor, SchedulerConfig
from scheduler_worker.domain.builds import RecordedBuild
from scheduler_worker.domain.fences import for_cell, policy_of
from scheduler_worker.domain.placement import FIRST_ATTEMPT, HostClaimed

# The parts of a flavor's extra specs that concern the node: traits of the whole host (traits of numbered groups are not
# the node's own), and the capabilities that Ironic gets as the instance's.
TRAIT = "trait:"
CAPABILITY = "capabilities:"
NO_FLAVOR = Flavor()


def instance_spec(request: BuildRequest, config: SchedulerConfig) -> InstanceSpec:
    """The parts of the request, and of its flavor as it is now, that the cell needs."""
    flavor = config.flavors.get(request.flavor, NO_FLAVOR)
    specs = flavor.extra_specs
    return InstanceSpec(
        instance_uuid=request.instance_uuid,
        project_id=request.project_id,
        user_id=request.user_id,
        name=request.name,
        image=request.image,
        flavor=request.flavor,
        image_source=request.image_source,
        config_drive=request.config_drive,
        networks=request.networks,
        volumes=request.volumes,
        root_gb=flavor.disk_gb,
        traits=tuple(
            key[len(TRAIT) :] for key, value in specs.items() if key.startswith(TRAIT) and value == "required"
        ),
        capabilities={key[len(CAPABILITY) :]: value for key, value in specs.items() if key.startswith(CAPABILITY)},
        on_host_failure=for_cell(policy_of(request.on_host_failure, flavor, config.on_host_failure)),
    )


def cell_build(
    request: BuildRequest, claimed: HostClaimed, at: float, stamps: Stamps, config: SchedulerConfig
) -> CellBuild:
    """The command to the cell."""
    return CellBuild(
        spec=instance_spec(request, config),
        selections=claimed.selections,
        consumer_generation=claimed.consumer_generation,
        build_timeout_s=request.build_timeout_s or config.build_timeout_s,
        requested_at=at,
        server_group=request.server_group,
        limits=config.quota_of(request.project_id),
        stamps=replace(stamps, lost_claims=len(claimed.lost)) if claimed.lost else stamps,
        attempt=claimed.attempt,
    )


def build_query(request: BuildRequest, build: RecordedBuild, at: float, config: SchedulerConfig) -> CellBuildQuery:
    """The query of its cell about a build that has had no event for long, or whose claim was found there."""
    return CellBuildQuery(
        spec=instance_spec(request, config),
        attempt=build.attempt or FIRST_ATTEMPT,
        build_timeout_s=request.build_timeout_s or config.build_timeout_s,
        sequence=build.sequence,
        requested_at=at,
    )
