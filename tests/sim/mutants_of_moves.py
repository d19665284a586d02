"""Deliberate defects of moves: of the cell's table, of placement's part, of a driver."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

import compute_sim.driver
from bus.contracts.actions import ChangeKind
from bus.contracts.base import DatabaseMark
from bus.contracts.cell import Spawn
from bus.contracts.placement import Claim, Release
from bus.persistence.unit_of_work import Committed
from cell_conductor import awaited_request, engine, table
from cell_conductor import placement_client as placement_requests
from cell_conductor.rules import action_events as move_events
from cell_conductor.rules import build_end_rules, delete_rules, move_rules, move_steps, resize_rules
from cell_conductor.rules import rollback_rules as way_back
from cell_conductor.state import evacuation_proof
from cell_conductor.state import events as e
from cell_conductor.state import step as steps
from cell_conductor.state.desired_state import DESIRED_STATES, MachineTarget
from cell_conductor.state.instance import Power, State
from cell_conductor.state.step import Step
from cell_conductor.store.memory import MemoryInstanceRows
from cell_conductor.store.port import InstanceWrites
from cell_conductor.table import Rule
from compute_agent.records.records import Records
from placement_worker.domain import claims

Mutant = Callable[[], AbstractContextManager[Any]]
ANYWHERE = tuple(State)


def _rule(
    state: State, event: type[e.Event], apply: Callable[..., Step], *, then: State | None = None
) -> AbstractContextManager[Any]:
    """Another rule for one event in one state. then: only if this follows."""
    row: Any = table.TABLE[state]
    other = Rule(apply, ANYWHERE)
    if then is None:
        return patch.dict(row, {event: other})
    cell = row[event]
    return patch.dict(row, {event: replace(cell, rules={**cell.rules, then: other})})


def _shared(name: str, apply: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Another function in place of one that the rules of moves share."""
    stack = ExitStack()
    for module in (move_rules, resize_rules, way_back, delete_rules):
        if hasattr(module, name):
            stack.enter_context(patch.object(module, name, apply))
    return stack


def _requested(change: Callable[[Any, Any], Any]) -> AbstractContextManager[Any]:
    """Another question to placement."""
    wanted, stack = awaited_request.awaited_request_of, ExitStack()
    for module in (awaited_request, placement_requests, engine):
        stack.enter_context(
            patch.object(module, "awaited_request_of", lambda instance: change(instance, wanted(instance)))
        )
    return stack


def _desired(changed: dict[str, Any], *states: State) -> AbstractContextManager[Any]:
    """Other desires in these states."""
    rows: Any = DESIRED_STATES
    return patch.dict(rows, {(state, None): replace(rows[state, None], **changed) for state in states})


def source_never_commanded_to_stop() -> AbstractContextManager[Any]:
    """A destination that can take it is started at once: the source runs on."""

    def go_on(instance: Any, event: Any, context: Any) -> Step:
        if not move_steps.is_awaited(instance, event, instance.current, instance.attempt) or not event.done:
            return move_rules.on_check_passed(instance, event, context)
        return move_steps.finish(instance, event.at, context)

    return _rule(State.PREPARING, e.ChangeEnded, go_on)


def hand_over_leaves_it_running() -> AbstractContextManager[Any]:
    """A driver reports that a machine was handed over, and lets it run."""
    changed = compute_sim.driver._changed

    def unchanged(machine: Any, change: Any) -> Any:
        hands_over = change.kind in (ChangeKind.HAND_OVER, ChangeKind.HAND_OVER_LIVE)
        return machine if hands_over else changed(machine, change)

    return patch.object(compute_sim.driver, "_changed", unchanged)


def silent_destination_left_behind() -> AbstractContextManager[Any]:
    """A destination that does not answer is taken for failed: the next one is tried, or the source is started."""

    def pass_on(instance: Any, event: Any, context: Any) -> Step:
        recorded = move_steps.add_history(instance, "timed_out", event.at)
        recorded = replace(recorded, action=replace(recorded.action, finishing=False))
        return move_steps.try_next(recorded, event.at, context)

    return _rule(State.FINISHING, e.TimedOut, pass_on)


def undone_before_the_destination_is_gone() -> AbstractContextManager[Any]:
    """Placement is reverted, and the source started, while the destination may still run."""

    def undo(instance: Any, event: Any, context: Any) -> Step:
        return Step(steps.await_placement(instance, State.REVERTING, event.at, context))

    def go_back(instance: Any, event: Any, context: Any) -> Step:
        stepped = way_back.roll_back_to_source(instance, event, context)
        if stepped.instance.phase != (State.DESTROYING, State.REVERTING):
            return stepped
        return undo(stepped.instance, event, context)

    return _rule(State.RESIZED, e.SourceAnswered, go_back)


def reverted_without_its_source() -> AbstractContextManager[Any]:
    """A revert gives the destination up before its source was seen."""

    def end_resized(instance: Any, event: Any, context: Any) -> Step:
        stepped = resize_rules.end_resized(instance, event, context)
        move = stepped.instance.action
        if not way_back.is_waiting(stepped.instance):
            return stepped
        undone = move_steps.roll_back(stepped.instance, event.at, context, move.rollback_code, "")
        return Step(undone.instance, (*stepped.commands, *undone.commands))

    return _rule(State.RESIZED, e.ActionRequested, end_resized)


def book_never_reverted() -> AbstractContextManager[Any]:
    """An undone move leaves placement as it is: the source is started under the destination's claim."""

    def wanted(instance: Any, question: Any) -> Any:
        if instance.state is not State.REVERTING:
            return question
        return Release(consumer=instance.action.request_id, project_id=instance.spec.project_id)

    def released(instance: Any, event: Any, context: Any) -> Step:
        back = e.Reverted(at=event.at, attempt=instance.next_attempt)
        return way_back.return_to_source(instance, back, context)

    row: Any = table.TABLE[State.REVERTING]
    both = _requested(wanted)
    return _Both(both, patch.dict(row, {e.Released: Rule(released, ANYWHERE)}))


class _Both:
    def __init__(self, *parts: AbstractContextManager[Any]) -> None:
        self._parts = parts

    def __enter__(self) -> None:
        for part in self._parts:
            part.__enter__()

    def __exit__(self, *fault: Any) -> None:
        for part in reversed(self._parts):
            part.__exit__(*fault)


def instance_released_for_its_migration() -> AbstractContextManager[Any]:
    """A confirmed move releases what the instance holds, and not what its migration does."""

    def wanted(instance: Any, question: Any) -> Any:
        is_confirmed = instance.phase == (State.RELEASING, State.ACTIVE)
        return replace(question, consumer=instance.uuid) if is_confirmed else question

    def settled(instance: Any, event: Any, context: Any) -> Step:
        return move_rules.end_source_released(instance, replace(event, consumer=instance.action.request_id), context)

    return _Both(_requested(wanted), _rule(State.RELEASING, e.Released, settled, then=State.ACTIVE))


def migration_never_released() -> AbstractContextManager[Any]:
    """A confirmed move ends when its source is gone: the migration holds the source for ever."""

    def settle(instance: Any, event: Any, context: Any) -> Step:
        stepped = delete_rules.release_destroyed(instance, event, context)
        if stepped.instance.phase != (State.RELEASING, State.ACTIVE):
            return stepped
        released = e.Released(at=event.at, consumer=instance.action.request_id)
        return move_rules.end_source_released(stepped.instance, released, context)

    return _rule(State.DESTROYING, e.Destroyed, settle, then=State.ACTIVE)


def migration_of_a_deleted_instance_forgotten() -> AbstractContextManager[Any]:
    """Of an instance that is deleted while it moves only its own claim is released."""
    return patch.object(build_end_rules, "_release_second_consumer", lambda instance, event, context: None)


def migration_released_only_if_its_claim_was_answered() -> AbstractContextManager[Any]:
    """A copy of a move's claim that was refused is taken for the fate of all copies."""
    half_released = build_end_rules._release_second_consumer

    def release(instance: Any, event: Any, context: Any) -> Step | None:
        move = instance.action
        return half_released(instance, event, context) if move is None or move.claimed else None

    return patch.object(build_end_rules, "_release_second_consumer", release)


def delete_does_not_await_the_destination() -> AbstractContextManager[Any]:
    """The claims of a deleted instance go when its source is gone, whatever its destination runs."""
    leave = move_steps.delete_during_action

    def left(instance: Any, at: float, context: Any) -> Step:
        stepped = leave(instance, at, context)
        move = stepped.instance.action
        if stepped.instance.phase != (State.DESTROYING, State.DELETED) or move.source_destroyed:
            return stepped
        return Step(replace(stepped.instance, action=replace(move, current_destroyed=True)), stepped.commands)

    return _shared("delete_during_action", left)


def source_claimed_by_no_migration() -> AbstractContextManager[Any]:
    """The claim of a destination names no migration: the instance lets its source go with it."""

    def wanted(instance: Any, question: Any) -> Any:
        return replace(question, migration=None) if isinstance(question, Claim) else question

    return _requested(wanted)


def book_keeps_no_source() -> AbstractContextManager[Any]:
    """Placement gives the destination to the instance, and nothing to the migration."""
    return patch.object(claims, "_keep_source", lambda ledger, claim, wanted, kind="": None)


def end_announced_twice() -> AbstractContextManager[Any]:
    """A request whose end has been announced has another one."""
    answer = move_events.answer

    def again(instance: Any, *rest: Any) -> Step:
        return answer(replace(instance, action=replace(instance.action, answered=False)), *rest)

    return patch("cell_conductor.rules.action_events.answer", again)


def end_of_an_undone_move_not_announced() -> AbstractContextManager[Any]:
    """A move that was undone has no end."""
    return _shared(
        "end_rolled_back",
        lambda instance, at, context: Step(replace(move_steps.enter_active(instance, at, context), action=None)),
    )


def source_under_the_destinations_number() -> AbstractContextManager[Any]:
    """An instance that is back on its source keeps the attempt of the destination."""

    def back(instance: Any, event: Any, context: Any) -> Step:
        stepped = way_back.return_to_source(instance, event, context)
        return Step(replace(stepped.instance, attempt=instance.attempt), stepped.commands)

    return _rule(State.REVERTING, e.Reverted, back)


def flavor_of_an_undone_resize_kept() -> AbstractContextManager[Any]:
    """A resize that was undone leaves the new flavor in the record."""

    def back(instance: Any, event: Any, context: Any) -> Step:
        stepped = way_back.return_to_source(instance, event, context)
        return Step(replace(stepped.instance, spec=instance.spec), stepped.commands)

    return _rule(State.REVERTING, e.Reverted, back)


def source_over_before_it_is_confirmed() -> AbstractContextManager[Any]:
    """The source's machine is destroyed by the next report, while the destination is being built."""
    return _desired({"source": MachineTarget.ABSENT_AFTER_DESTROY}, State.FINISHING, State.RESIZED)


def machine_under_change_not_wanted() -> AbstractContextManager[Any]:
    """A machine that is being stopped, started or rebuilt is taken for over when a report lists it."""
    return _desired({"current": MachineTarget.ABSENT_AFTER_DESTROY}, State.CHANGING, State.RESTARTING)


def offloaded_keeps_its_claim() -> AbstractContextManager[Any]:
    """An instance is offloaded when its machine is gone: what it held is never released."""

    def vacate(instance: Any, event: Any, context: Any) -> Step:
        stepped = delete_rules.release_destroyed(instance, event, context)
        if stepped.instance.phase != (State.RELEASING, State.OFFLOADED):
            return stepped
        return move_rules.end_offloaded(stepped.instance, e.Released(at=event.at), context)

    return _rule(State.DESTROYING, e.Destroyed, vacate, then=State.OFFLOADED)


def confirmed_in_place_destroys_the_machine() -> AbstractContextManager[Any]:
    """A confirmed resize in place destroys its source, which is the only machine."""
    confirm = move_steps.confirm

    def confirmed(instance: Any, at: float, context: Any) -> Step:
        stepped, move = confirm(instance, at, context), instance.action
        destroyed = steps.destroy_at(instance, move.source, move.source_attempt, context)
        return Step(stepped.instance, (*stepped.commands, destroyed))

    return _shared("confirm", confirmed)


def undone_in_place_keeps_the_new_size() -> AbstractContextManager[Any]:
    """A resize in place is undone in placement alone."""
    return patch.object(
        move_steps,
        "restore_size",
        lambda instance, at, context: Step(steps.await_placement(instance, State.REVERTING, at, context)),
    )


def evacuated_while_its_service_is_up() -> AbstractContextManager[Any]:
    """An instance is built elsewhere though the service of its host is up."""
    why = evacuation_proof.evacuation_blocker

    def unproved(instance: Any, context: Any, *, fenced: bool, force: bool) -> Any:
        found = why(instance, context, fenced=fenced, force=force)
        return None if found is not None and found.code == "evacuate.service_up" else found

    return _Both(_shared("evacuation_blocker", unproved), patch.object(move_steps, "evacuation_blocker", unproved))


def late_answers_accepted() -> AbstractContextManager[Any]:
    """The answer to any change of the attempt counts for the one that is waited for."""

    def is_awaited(instance: Any, event: Any, where: Any, attempt: int) -> bool:
        return bool((event.attempt, event.host_uuid) == (attempt, where.host_uuid))

    return _shared("is_awaited", is_awaited)


def stopped_machine_started_by_its_move() -> AbstractContextManager[Any]:
    """A machine that its client has stopped runs when it has been moved."""
    finish = move_steps.finish

    def finished(instance: Any, at: float, context: Any) -> Step:
        stepped = finish(instance, at, context)
        commands = tuple(
            replace(one, origin=replace(one.origin, runs=True)) if isinstance(one, Spawn) and one.origin else one
            for one in stepped.commands
        )
        return Step(stepped.instance, commands)

    return _shared("finish", finished)


def shelved_machine_taken_for_running() -> AbstractContextManager[Any]:
    """A shelved machine counts as running."""

    def changed(instance: Any, event: Any, context: Any) -> Step:
        stepped = move_rules.on_changed(instance, event, context)
        is_shelved = stepped.instance.power is Power.SHELVED and stepped.instance.state is State.ACTIVE
        return Step(replace(stepped.instance, power=Power.RUNNING), stepped.commands) if is_shelved else stepped

    return _rule(State.CHANGING, e.ChangeEnded, changed)


def old_incarnation_accepted() -> AbstractContextManager[Any]:
    """A compute service carries out what was decided by an earlier incarnation of the cell's database."""
    return patch.object(Records, "may_predate_restore", lambda self, mark: False)


def mark_on_an_unflushed_message() -> AbstractContextManager[Any]:
    """What leaves after a commit that does not wait for the disk carries a mark for it."""
    write = MemoryInstanceRows.write

    async def marked(self: MemoryInstanceRows, writes: InstanceWrites) -> Committed:
        committed, seen = await write(self, writes), self._seen
        if not writes.durable:
            number = max(seen.mark.sent_sequences, default=0) + 1
            seen.record_sent(DatabaseMark(seen.mark.database_incarnation, (number,)))
        return committed

    return patch.object(MemoryInstanceRows, "write", marked)


# {defect: a seed that finds it}
FOUND_BY = {
    "source_never_commanded_to_stop": 7,
    "hand_over_leaves_it_running": 7,
    "silent_destination_left_behind": 149,
    "undone_before_the_destination_is_gone": 7,
    "instance_released_for_its_migration": 7,
    "migration_never_released": 7,
    "source_claimed_by_no_migration": 7,
    "book_keeps_no_source": 7,
    "flavor_of_an_undone_resize_kept": 7,
    "source_over_before_it_is_confirmed": 104,
    "evacuated_while_its_service_is_up": 199,
    "end_announced_twice": 7,
    "confirmed_in_place_destroys_the_machine": 36,
    "shelved_machine_taken_for_running": 7,
    "end_of_an_undone_move_not_announced": 7,
    "book_never_reverted": 7,
    "source_under_the_destinations_number": 7,
    "offloaded_keeps_its_claim": 7,
}
MUTANTS_OF_MOVES: tuple[Mutant, ...] = (
    source_never_commanded_to_stop,
    hand_over_leaves_it_running,
    silent_destination_left_behind,
    undone_before_the_destination_is_gone,
    instance_released_for_its_migration,
    migration_never_released,
    source_claimed_by_no_migration,
    book_keeps_no_source,
    flavor_of_an_undone_resize_kept,
    source_over_before_it_is_confirmed,
    evacuated_while_its_service_is_up,
    end_announced_twice,
    confirmed_in_place_destroys_the_machine,
    shelved_machine_taken_for_running,
    end_of_an_undone_move_not_announced,
    book_never_reverted,
    source_under_the_destinations_number,
    offloaded_keeps_its_claim,
)
# No seed is on record that finds these; a test of the table does (tests/sim/test_mutants_of_cases.py).
FOUND_BY_THE_TABLE: tuple[Mutant, ...] = (
    migration_of_a_deleted_instance_forgotten,
    migration_released_only_if_its_claim_was_answered,
    delete_does_not_await_the_destination,
    machine_under_change_not_wanted,
    late_answers_accepted,
    stopped_machine_started_by_its_move,
    undone_in_place_keeps_the_new_size,
    reverted_without_its_source,
    old_incarnation_accepted,
    mark_on_an_unflushed_message,
)
