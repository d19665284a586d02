"""Requests about an instance after its build: which of them may be carried out, and which of them need hosts. Pure.

A request has exactly one terminal event. While one request is under way another is refused; only an abort may follow
it.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from bus.consuming.outcome import Done, Retry
from bus.contracts.actions import (
    ACROSS_CELLS,
    CHOOSES_HOSTS,
    ActionAccepted,
    ActionKind,
    ActionRequest,
    ActionState,
    Condition,
    ResizePolicy,
)
from bus.contracts.base import Refusal
from bus.contracts.build import BuildState
from placement_worker.replica.request import total_resources
from scheduler_worker.action.pending_action import PendingAction
from scheduler_worker.build.admission import conflict_with
from scheduler_worker.build.pending_build import DUPLICATE, Answered, unknown_flavor
from scheduler_worker.records.action_record import ActionContext, flavor_of, image_of, image_properties_of
from scheduler_worker.records.build_record import SinceBuild
from scheduler_worker.requests.request_refusal import TOO_OLD, refused_action
from scheduler_worker.selection.request_spec import RequestSpec
from scheduler_worker.selection.selector_config import SelectorConfig

INCOMPLETE = "request.incomplete"
UNKNOWN = "instance.unknown"
BUSY = "instance.busy"
NOT_ACTIVE = "instance.not_active"
NOT_OFFLOADED = "instance.not_offloaded"
SOURCE_UNKNOWN = Retry("instance.unlocated", "placement does not know where the instance is (yet)")
# Its allocations are gone: a move, which keeps them on the source, has nothing to keep.
NO_REPORT = Refusal(code=SOURCE_UNKNOWN.code, reason="placement has no allocation of the instance, on any host")
CHANGED = Retry("request.concurrent", "the instance changed while hosts were chosen for it")

# The user_id of the requests of drains; of a whole cell its instances may leave it.
DRAIN_USER, CELL_DRAIN_USER = "drain", "cell-drain"
# End states of an instance: no further request is accepted for it.
_ENDED = frozenset({Condition.DELETED, Condition.FAILED})


def _conflict(pending: PendingAction, reason: str) -> Answered:
    request, refusal = pending.request, Refusal(code=DUPLICATE, reason=reason)
    names = (request.request_id, request.instance_uuid, request.project_id, request.kind)
    return conflict_with(refused_action(*names, refusal=refusal, at=pending.taken_at), refusal)


def check_action(pending: PendingAction, known: ActionContext, config: SelectorConfig) -> Answered | Refusal | None:
    """Answered: it was handled before, comes too early, clashes with another, or its requester has left it. A refusal
    goes on record. None: it may be carried out.
    """
    request, action, build, delivery = pending.request, known.action, known.build, pending.delivery
    if action is not None:
        if action.digest != pending.digest or action.project_id != request.project_id:
            return _conflict(pending, "this request_id is on record with other content")
        if action.state is ActionState.REFUSED:
            return Answered(outcome=Done(reply=Refusal(code=action.code, reason=action.reason)))
        return Answered(outcome=accepted(request))
    if delivery.is_abandoned:
        return Answered(outcome=Done())
    if known.names_instance or request.request_id == request.instance_uuid:
        return _conflict(pending, "the request_id is the uuid of an instance")
    if build is None or build.project_id != request.project_id:
        # The answer reveals nothing to another project.
        if build is None and delivery.may_be_out_of_order:
            return Answered(outcome=Retry(UNKNOWN, "not on record (yet)"))
        return Refusal(code=UNKNOWN, reason="there is no such instance in this project")
    if delivery.is_old:
        return TOO_OLD
    return delivery.ending_refusal() or _misfit(request, known, config)


def _misfit(request: ActionRequest, known: ActionContext, config: SelectorConfig) -> Refusal | None:
    """Why this cannot be requested of the instance in its state. The cell checks the rest."""
    build, current = known.build, known.current
    assert build is not None and known.build_request is not None
    if build.state is not BuildState.ACTIVE or current.condition in _ENDED:
        reason = f"its build is {build.state.value}, and the instance {current.condition.value}"
        return Refusal(code=NOT_ACTIVE, reason=reason)
    if current.under_way is not None and request.kind is not ActionKind.ABORT:
        return Refusal(code=BUSY, reason=f"request {current.under_way} is under way")
    if request.kind is ActionKind.RESIZE:
        if request.flavor is None:
            return Refusal(code=INCOMPLETE, reason="a resize names a flavor")
        if (unknown := unknown_flavor([request.flavor], request.project_id, config)) is not None:
            return unknown
        if request.flavor == flavor_of(known):
            return Refusal(code="flavor.same", reason=f"the instance has flavor {request.flavor}")
        if request.policy is ResizePolicy.SAME_HOST and not config.settings.allow_resize_to_same_host:
            return Refusal(code="resize.same_host", reason="this site does not resize on the same host")
    if request.kind is ActionKind.REBUILD and not request.image:
        return Refusal(code=INCOMPLETE, reason="a rebuild names an image")
    if request.kind is ActionKind.RESCUE and not request.rescue_password:
        return Refusal(code=INCOMPLETE, reason="a rescue names a password")
    if request.kind is ActionKind.UNSHELVE and request.host is not None and current.condition is Condition.SHELVED:
        # As Nova does: it starts where its machine is, and would not be on the host that its client asked for.
        return Refusal(code=NOT_OFFLOADED, reason="it starts where it is: offload it first, or name no host")
    return None


def superseded_refusal(pending: PendingAction) -> Answered | Refusal:
    """The outcome of a request whose instance has changed since hosts were chosen, or since it was found busy: refused
    by the last delivery. Waits before have used up the same deliveries, so another retry would be a dead letter.
    """
    if pending.delivery.last:
        return Refusal(code=CHANGED.code, reason=CHANGED.reason)
    return Answered(outcome=CHANGED)


def rebuild_image(request: ActionRequest, known: ActionContext) -> Mapping[str, str]:
    """The properties of the image that a rebuild names."""
    if request.image_properties is not None:
        return request.image_properties
    return image_properties_of(known) if request.image == image_of(known) else {}


def changes_image(request: ActionRequest, known: ActionContext) -> bool:
    """Whether it is a rebuild from another image than the instance has, which its host may not support."""
    if request.kind is not ActionKind.REBUILD:
        return False
    return request.image != image_of(known) or rebuild_image(request, known) != image_properties_of(known)


def in_progress(request: ActionRequest, known: ActionContext) -> SinceBuild:
    """The record of an instance whose request is dispatched."""
    if request.kind is ActionKind.ABORT:
        return known.current  # it does not replace the request that it ends, which stays under way
    begun = replace(known.current, under_way=request.request_id)
    if request.kind is ActionKind.RESIZE:
        assert request.flavor is not None
        # The cell refuses the resize of a resized instance, which then keeps what it may be reverted to.
        old = known.current.old_flavor if known.current.condition is Condition.RESIZED else flavor_of(known)
        begun = replace(begun, new_flavor=request.flavor, old_flavor=old)
    if not changes_image(request, known):
        return begun
    assert request.image is not None
    properties = {image_of(known): image_properties_of(known), request.image: rebuild_image(request, known)}
    return replace(begun, image_properties=properties)


def selects_host(request: ActionRequest, known: ActionContext) -> bool:
    """Whether hosts are chosen for it; a shelved instance that still has its host starts on that host."""
    if request.kind is ActionKind.UNSHELVE:
        return known.current.condition is Condition.OFFLOADED
    return request.kind in CHOOSES_HOSTS


def needs_hosts(request: ActionRequest, known: ActionContext) -> bool:
    """Whether it depends on hosts: chosen ones, or the instance's own, which may not support another image."""
    return selects_host(request, known) or changes_image(request, known)


def releases_source(request: ActionRequest, *, same_host: bool) -> bool:
    """Whether the instance's present host may not be chosen."""
    if request.kind is ActionKind.RESIZE:
        return request.policy is ResizePolicy.OTHER_HOST or (request.policy is ResizePolicy.ANY and not same_host)
    return request.kind is not ActionKind.UNSHELVE


# Requests by which an instance may leave its cell, where moves across cells are allowed.
_LEAVES_CELL = frozenset({ActionKind.MIGRATE, ActionKind.RESIZE, ActionKind.UNSHELVE})


def stays_in_cell(known: ActionContext, spec: RequestSpec) -> Refusal | None:
    """Why the instance can leave its cell by no request: said before a move begins, and checked again by the cell."""
    if known.build_request is not None and (known.build_request.networks or known.build_request.volumes):
        return Refusal(code=ACROSS_CELLS, reason="its networks and volumes are its cell's own")
    if not {"VCPU", "PCPU"} & total_resources(spec.query).keys():
        return Refusal(code=ACROSS_CELLS, reason="it is a bare-metal node's, and that moves no instance")
    return None


def may_leave_cell(request: ActionRequest) -> bool:
    """Whether a host of another cell will do.

    A drain moves instances within their cell, whatever the site allows its clients, unless the whole cell is drained.
    """
    stays = request.kind is ActionKind.RESIZE and request.policy is ResizePolicy.SAME_HOST
    return request.kind in _LEAVES_CELL and not (stays or request.user_id == DRAIN_USER)


def accepted(request: ActionRequest) -> Done:
    """The outcome of a request that is on record."""
    return Done(reply=ActionAccepted(request_id=request.request_id, instance_uuid=request.instance_uuid))
