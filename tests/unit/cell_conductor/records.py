"""Records whose values are neither the default nor what a step leaves, and what a step commands, in brief."""

from __future__ import annotations

from typing import Any, TypeAlias

from msgspec.structs import replace

from bus.contracts.actions import ActionEvent, ActionKind, ChangeMachine
from bus.contracts.base import Message
from bus.contracts.build import BuildEvent
from bus.contracts.cell import Destroy, Spawn
from cell_conductor.state import events as e
from cell_conductor.state.desired_state import phase_to_text
from cell_conductor.state.fence import Fence
from cell_conductor.state.instance import ActionInProgress, Instance, Power, State
from cell_conductor.state.step import Step, StepContext
from cell_conductor.transition import step
from tests.unit.cell_conductor.move_scenario import ACTION, OTHER, ended
from tests.unit.cell_conductor.scenario import PATIENCE, SPEC, UUID, answering, host, selection

ON_1, ON_2, ON_3 = (selection(n) for n in (1, 2, 3))
LEAVES = ActionInProgress(
    request_id=ACTION, kind=ActionKind.MIGRATE, source=ON_1, source_attempt=1, allocation_attempt=4, spec=SPEC
)
GONE = e.Destroyed(at=310.0, attempt=2, host_uuid=host(2), service="s1")
SOURCE_GONE = replace(GONE, attempt=1, host_uuid=host(1))
BY_REVERT: dict[str, Any] = {
    "rollback_code": "action.reverted",
    "ending_request_id": OTHER,
    "ending_kind": ActionKind.REVERT,
}


def record(state: State, next_state: State | None = None, **other: object) -> Instance:
    """On host 2 as attempt 2, after host 1; number 4 was given out."""
    made = Instance(
        uuid=UUID,
        state=state,
        next_state=next_state,
        spec=SPEC,
        selections=(ON_1, ON_2, ON_3),
        selection_index=1,
        attempt=2,
        highest_attempt=4,
        consumer_generation=7,
        sequence=20,
        build_timeout_s=60.0,
        requested_at=50.0,
        deadline=99.0,
        since=90.0,
        queried=True,
        code="old",
        reason="old",
        cause="its own",
    )
    return replace(made, **other)


def moving(
    state: State, next_state: State | None = None, action: dict[str, Any] | None = None, **other: object
) -> Instance:
    """From host 1 to host 2."""
    return record(state, next_state, action=replace(LEAVES, **action or {}), **other)


def at_source(action: dict[str, Any] | None = None, **other: object) -> Instance:
    """A destination is requested of placement."""
    return moving(State.CLAIMING, State.PREPARING, action, **{"selection_index": 0, "attempt": 1, **other})


def unshelving(
    state: State, next_state: State | None = None, action: dict[str, Any] | None = None, **other: Any
) -> Instance:
    """To host 2, without a source."""
    known = {"kind": ActionKind.UNSHELVE, "source": None, "source_attempt": 0, **(action or {})}
    return moving(state, next_state, known, **{"power": Power.SHELVED, "image": "kept", **other})


def in_place(
    state: State, next_state: State | None = None, action: dict[str, Any] | None = None, **other: Any
) -> Instance:
    """A resize on host 1."""
    resize = {"kind": ActionKind.RESIZE, "change_number": 5, **(action or {})}
    return moving(state, next_state, resize, selections=(ON_1, ON_1, ON_3), attempt=1, change_number=5, **other)


def changing(kind: ActionKind, **action: object) -> Instance:
    known = {"kind": kind, "source": None, "source_attempt": 0, **action}
    return moving(State.CHANGING, action=known, power=Power.SHELVED, image="kept")


def restarting(**action: object) -> Instance:
    known = {"rollback_code": "x", "rollback_reason": "why", "handed_over": True, **action}
    return moving(State.RESTARTING, action=known, selections=(ON_1,), selection_index=0, attempt=1, image="kept")


def answer(instance: Instance, n: int, *, done: bool = True, **other: Any) -> tuple[Instance, e.ChangeEnded]:
    """The record, and its host's answer to the change that is awaited."""
    return instance, ended(instance, n, 1 if n == 1 else 2, done=done, **other)


def brief(stepped: Step) -> tuple[str, ...]:
    """Its commands and announcements, each in a few words; an order with the attempt and the host that it is for."""
    return tuple(_brief(one) for one in stepped.commands)


def _brief(one: Message) -> str:
    match one:
        case Destroy():
            return f"{'end' if one.keep_if_complete else 'destroy'} {one.attempt}@{one.host_uuid[-1]}"
        case Spawn():
            return f"spawn {one.attempt}@{one.host_uuid[-1]}"
        case ChangeMachine():
            return f"{one.change} {one.attempt}@{one.host_uuid[-1]}"
        case ActionEvent():
            return f"{one.kind}: {one.state} {one.code}".strip()
        case BuildEvent():
            return f"build: {one.state} {one.code}".strip()
    raise AssertionError(one)


def after(before: Instance, changes: dict[str, Any]) -> Instance:
    """With these fields, those of the move with `move_` before their name."""
    own = {name: value for name, value in changes.items() if not name.startswith("move_")}
    of_action = {name.removeprefix("move_"): value for name, value in changes.items() if name.startswith("move_")}
    if of_action:
        assert before.action is not None
        own["action"] = replace(before.action, **of_action)
    return replace(before, **own)


Case: TypeAlias = tuple[Instance, e.Event, StepContext, str, tuple[str, ...]]


def case(before: Instance, event: e.Event, phase: str, *commands: str, context: StepContext = PATIENCE) -> Case:
    """A row of a table: the phase that the event leads to, and `brief` of what it commands."""
    return before, event, context, phase, commands


def outcome(before: Instance, event: e.Event, context: StepContext) -> tuple[str, tuple[str, ...]]:
    """The phase after the event, and `brief` of what it commands."""
    stepped = step(before, answering(before, event), context)
    return phase_to_text(stepped.instance.phase), brief(stepped)


def fenced(*numbers: int, context: StepContext = PATIENCE) -> StepContext:
    """These hosts are."""
    fences = {host(n): Fence(host_uuid=host(n), host=f"host-{n}", version=1) for n in numbers}
    return replace(context, fences=fences)
