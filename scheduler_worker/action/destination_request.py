"""What is asked of the search for an action's hosts: the request, its limits, and where its instance is. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.actions import ActionKind, ActionRequest
from bus.contracts.build import BuildRequest
from bus.contracts.placement import INSTANCES, LocatePage
from bus.contracts.placement_queries import ConsumerRecord
from bus.faults import Fault
from scheduler_worker.action.action_checks import rebuild_image
from scheduler_worker.action.pending_action import PendingAction
from scheduler_worker.records.action_record import ActionContext, flavor_of, image_of, image_properties_of


def build_request_for(request: ActionRequest, known: ActionContext) -> BuildRequest:
    """The request for which hosts are chosen: that of the build, with the instance's present flavor and image and those
    that this request names. The source of its present image is known to its cell alone.
    """
    built = known.build_request
    assert built is not None
    is_rebuilt = request.kind is ActionKind.REBUILD
    return replace(
        built,
        flavor=(request.flavor if request.kind is ActionKind.RESIZE else None) or flavor_of(known),
        image=(request.image if is_rebuilt else None) or image_of(known),
        image_properties=dict(rebuild_image(request, known) if is_rebuilt else image_properties_of(known)),
        image_source=request.image_source,
        host=request.host,
        forced=request.forced,
        ignore_hosts=request.ignore_hosts,
        max_attempts=request.max_attempts,
    )


def limits_of(request: ActionRequest, quota: Mapping[str, int]) -> dict[str, int]:
    """What its claims are held to: the quota, where the instance may hold more than before, as in Nova. The instances
    do not become more.
    """
    if request.kind not in (ActionKind.RESIZE, ActionKind.UNSHELVE):
        return {}
    return {name: most for name, most in quota.items() if name != INSTANCES}


HostAllocations: TypeAlias = Mapping[str, Mapping[str, int]]  # {provider: {class: amount}}


def added_by(allocations: HostAllocations, present: HostAllocations) -> dict[str, dict[str, int]]:
    """What a claim adds to the usage of each provider: what is held there is counted once, the larger of the two."""
    added = {
        uuid: {
            name: more for name, amount in share.items() if (more := amount - present.get(uuid, {}).get(name, 0)) > 0
        }
        for uuid, share in allocations.items()
    }
    return {uuid: share for uuid, share in added.items() if share}


class Located(Struct, frozen=True):
    """Where an instance and those that it depends on are, and what it holds."""

    instance_uuid: str
    page: LocatePage
    allocations: HostAllocations

    @property
    def source(self) -> str | None:
        """The instance's host."""
        return next(iter(self.page.hosts.get(self.instance_uuid, ())), None)


def located_of(
    pending: PendingAction, page: LocatePage | Fault, consumer: ConsumerRecord | Fault | None
) -> Located | Fault:
    """Both answers of placement about one instance."""
    if isinstance(page, Fault):
        return page
    if isinstance(consumer, Fault):
        return consumer
    return Located(pending.request.instance_uuid, page, {} if consumer is None else consumer.allocations)
