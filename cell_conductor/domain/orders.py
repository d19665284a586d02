"""The orders of a record: what its hosts are commanded for as long as it is as it is, and until they have answered.

They follow from the record alone. `table.step` sends all of them when a state is entered, and within a state those that
have changed: the machine is under another service, or its host is queried now. A deadline sends all once more
(`repeated`). Three kinds are sent once, and are none of these: `Spawn`, because the number of an attempt is used once;
the destroy of an attempt that the record leaves behind, which nobody awaits; and that of a machine which a host lists
though it is over.
"""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.cell import Destroy
from bus.contracts.moves import ChangeKind, ChangeMachine, MoveKind

from .desires import Wish, desire_of
from .instance import Instance, Move, Power, State
from .steps import Step, StepContext, destroy_at

CHANGES = {
    MoveKind.START: ChangeKind.START,
    MoveKind.UNSHELVE: ChangeKind.START,
    MoveKind.STOP: ChangeKind.STOP,
    MoveKind.REBUILD: ChangeKind.REBUILD,
    MoveKind.SHELVE: ChangeKind.SNAPSHOT,
    MoveKind.RESCUE: ChangeKind.RESCUE,
    MoveKind.UNRESCUE: ChangeKind.UNRESCUE,
}
MAX_STEP_S = 86_400.0  # as bus.contracts.moves bounds the time of one step


def orders_of(instance: Instance, context: StepContext) -> tuple[Destroy | ChangeMachine, ...]:
    """The orders, in which a host that was queried is to end its attempt unless it is complete."""
    if (kind := change_of(instance)) is not None:
        return (change_order(instance, kind, context),)
    desire, move = desire_of(instance), instance.move
    is_queried = instance.queried and desire.here is Wish.BUILD
    orders: list[Destroy] = []
    if (is_queried or desire.here is Wish.DESTROY) and not (move is not None and move.here_gone):
        orders.append(destroy_at(instance, instance.here, instance.attempt, context, unless_built=is_queried))
    if move is None or instance.source_host_uuid is None:
        return tuple(orders)
    assert move.source is not None
    if not move.source_gone and desire.source is Wish.DESTROY:
        orders.append(destroy_at(instance, move.source, move.source_attempt, context))
    return tuple(orders)


def with_orders(before: Instance, stepped: Step, context: StepContext) -> Step:
    """The step with the orders that follow from it, before its other messages."""
    after = stepped.instance
    orders = orders_of(after, context)
    if after.phase == before.phase and not stepped.again:
        known = orders_of(before, context)
        orders = tuple(one for one in orders if one not in known)
    return replace(stepped, commands=(*orders, *stepped.commands))


def repeated(instance: Instance, at: float, context: StepContext) -> Step:
    """No answer: every order is sent again, without a limit, a change under a new number.

    A new number ends what its host has begun. So the host is given twice the time for a change of a machine that stays,
    and no other order before that is over: what takes longer than its step comes to its end.
    """
    desire, move = desire_of(instance), instance.move
    is_queried = instance.queried or desire.here is Wish.BUILD
    again = replace(instance, queried=is_queried, deadline=repeat_at(instance, at, context))
    if move is None or change_of(again) is None:
        return Step(again, again=True)
    if desire.here is Wish.STAY:
        longer_s = min(2 * move.step_timeout_s, MAX_STEP_S)
        again = replace(again, move=replace(move, step_timeout_s=longer_s), deadline=at + longer_s)
    return Step(numbered(again, at), again=True)


def sooner(instance: Instance, at: float, context: StepContext) -> Instance:
    """The host has answered that it does not know how the change ended: nothing is under way there, so the change is
    commanded again without waiting for the end of its time.
    """
    again_at = repeat_at(instance, at, context)
    return replace(instance, deadline=again_at if instance.deadline is None else min(instance.deadline, again_at))


def repeat_at(instance: Instance, at: float, context: StepContext) -> float:
    """When what has not been answered is sent once more.

    Less and less often: the orders wait in the service's queue while it is down, so their number has to stay small.
    """
    return at + min(max(context.destroy_retry_s, at - instance.since), context.destroy_retry_max_s)


def change_of(instance: Instance) -> ChangeKind | None:
    """The change of one machine that is awaited in this state; None: none is."""
    move = instance.move
    if move is None:
        return None
    kind = desire_of(instance).change
    if instance.state is State.CHANGING:
        return CHANGES[move.kind] if move.to_cell is None else ChangeKind.SNAPSHOT
    if kind is ChangeKind.RESIZE:  # the only one that is undone where it was done
        return kind if instance.is_in_place else None
    if kind is ChangeKind.START and move.power is not Power.RUNNING:  # it is only to be as it was
        return ChangeKind.STOP
    if kind is ChangeKind.HAND_OVER and move.kind is MoveKind.LIVE_MIGRATE:
        return ChangeKind.HAND_OVER_LIVE
    return kind


def numbered(instance: Instance, at: float) -> Instance:
    """Number the change that is commanded next above all before: also above those that a restored database has
    forgotten.
    """
    assert instance.move is not None
    number = max(instance.order + 1, int(at * 1000))
    return replace(instance, order=number, move=replace(instance.move, order=number))


def change_order(instance: Instance, kind: ChangeKind, context: StepContext) -> ChangeMachine:
    """The command of a change, under the number that is on record."""
    move = instance.move
    assert move is not None and instance.spec is not None
    where, attempt, spec = instance.here, instance.attempt, instance.spec
    is_back = kind is ChangeKind.RESIZE and (move.resizing_back or desire_of(instance).here is Wish.DESTROY)
    is_of_source = desire_of(instance).change is ChangeKind.HAND_OVER
    if is_of_source or is_back:
        assert move.source is not None
        # In place, as `here`: under the service that has the host now.
        where = replace(move.source, service=where.service) if is_back else move.source
        attempt, spec = move.source_attempt, move.spec
    return ChangeMachine(
        change=kind,
        spec=spec,
        attempt=attempt,
        order=move.order,
        host_uuid=where.host_uuid,
        service=where.service,
        allocations=where.allocations,
        deployment=context.deployment,
        to_host=instance.here.host_uuid if is_of_source else None,
        rescue_password=move.rescue_password if kind is ChangeKind.RESCUE else "",
        timeout_s=step_s(move, kind, context),
    )


def step_s(move: Move, kind: ChangeKind, context: StepContext) -> float:
    """The most seconds that a host may take for one change: those of one step, and for a live migration those of
    copying the memory that the source holds.
    """
    if kind is not ChangeKind.HAND_OVER_LIVE or move.source is None or not context.live_copy_mb_s:
        return move.step_timeout_s
    memory_mb = sum(amounts.get("MEMORY_MB", 0) for amounts in move.source.allocations.values())
    return min(move.step_timeout_s + memory_mb / context.live_copy_mb_s, MAX_STEP_S)
