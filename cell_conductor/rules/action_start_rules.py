"""Rules for the start and the abort of a request about an instance that is built. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.actions import ACROSS_CELLS, ActionKind
from cell_conductor.rules import cell_transfer_rules
from cell_conductor.rules.action_events import DELETED, ENDS_ANOTHER, has_ended, refuse_busy, refuse_request, repeat_end
from cell_conductor.rules.move_steps import CLAIMS, claim, enter_action, roll_back, start_in_place, start_with_claim
from cell_conductor.state.events import ActionRequested, TransferRequested
from cell_conductor.state.instance import Instance, Power, State, action_of
from cell_conductor.state.step import Step, StepContext

ABORTED = "action.aborted"

_OF_SHELVED = frozenset({ActionKind.UNSHELVE, ActionKind.OFFLOAD, ActionKind.SHELVE, ActionKind.EVACUATE})


def start_action(instance: Instance, event: ActionRequested, context: StepContext) -> Step:
    """A request for an instance that has no request under way: it has a machine, or none, and is unshelved on a host
    that is claimed anew.
    """
    again = repeat_end(instance, event, context)
    if again is not None:
        return again
    if isinstance(event, TransferRequested) and event.attempt != instance.last_attempt:
        return cell_transfer_rules.report_attempt(instance, event, context)
    if (refusal := _action_blocker(instance, event.request.kind)) is not None:
        return refuse_request(instance, event, context, *refusal)
    if (refused := _refuse_other_flavor(instance, event, context)) is not None:
        return refused
    if (refused := _refuse_transfer(instance, event, context)) is not None:
        return refused
    if isinstance(event, TransferRequested):
        return cell_transfer_rules.start_transfer(instance, event, context)
    if instance.state is State.OFFLOADED:
        if not event.request.selections:
            return refuse_request(instance, event, context, "action.no_host")
        # `current` is the host that it had; no machine is there.
        started = enter_action(instance, event, source=None, selections=(instance.current, *event.request.selections))
        return claim(started, event.at, context)
    if event.request.kind in CLAIMS:
        return start_with_claim(instance, event, context)
    return start_in_place(instance, event, context)


def _action_blocker(instance: Instance, kind: ActionKind) -> tuple[str, str] | None:
    """The code and the reason for which a request of this kind is not begun as the instance is; None: it may be."""
    if instance.state is State.OFFLOADED:
        return None if kind is ActionKind.UNSHELVE else ("instance.offloaded", "unshelve it first")
    if kind is ActionKind.OFFLOAD and instance.power is not Power.SHELVED:
        return "instance.not_shelved", "shelve it first"
    if kind in ENDS_ANOTHER:
        reason = f"no move is there to {kind.value}; one from another cell is over, and migrating it leads back there"
        return "action.none", reason
    if instance.power is Power.SHELVED and kind not in _OF_SHELVED:
        return "instance.shelved", "unshelve or offload it first"
    if instance.power is Power.RESCUED and kind not in (ActionKind.RESCUE, ActionKind.UNRESCUE, ActionKind.EVACUATE):
        return "instance.rescued", "unrescue it first"
    return None


def _refuse_transfer(instance: Instance, event: ActionRequested, context: StepContext) -> Step | None:
    """What has things of its cell stays in it, with a host or without."""
    assert instance.spec is not None
    if event.request.to_cell is None or not (instance.spec.networks or instance.spec.volumes):
        return None
    reason = "its networks and volumes are its cell's own"
    return refuse_request(instance, event, context, ACROSS_CELLS, reason)


def _refuse_other_flavor(instance: Instance, event: ActionRequested, context: StepContext) -> Step | None:
    """Refuse a request whose hosts were chosen for another flavor than the instance has here."""
    # Their claims would have that flavor's amounts. The sender's record is behind (a database was restored); it takes
    # the present flavor from the refusal. For a stop, and other changes on the instance's own host, no hosts were
    # chosen.
    request, expected = event.request, event.request.expected_flavor
    if not request.selections and request.spec is None and request.to_cell is None:
        return None
    assert instance.spec is not None
    if "" in (expected, instance.spec.flavor) or expected == instance.spec.flavor:
        return None
    reason = f"its flavor is {instance.spec.flavor}, and the hosts were chosen for {expected}"
    return refuse_request(instance, event, context, "instance.flavor_changed", reason)


def abort(instance: Instance, event: ActionRequested, context: StepContext) -> Step:
    """Roll the move back, as no destination has been commanded."""
    # While a request to placement is under way, the move is rolled back once it has answered. An abort that ended
    # before this move, and is delivered again, was not meant for it.
    action, request = action_of(instance), event.request
    is_referenced = request.migration in (None, action.request_id) and not has_ended(instance, request.request_id)
    if request.kind is not ActionKind.ABORT or not is_referenced or action.ending_request_id or action.source is None:
        return refuse_busy(instance, event, context)
    if action.delete:
        return refuse_request(instance, event, context, DELETED)
    named = replace(
        instance,
        action=replace(action, ending_request_id=request.request_id, ending_kind=request.kind),
        cause=event.cause,
    )
    if instance.state is State.CLAIMING:
        return Step(named)
    return roll_back(named, event.at, context, ABORTED, "")
