"""What a fence of a host leads to, a row for each condition: in each state, of an evacuation, in one transaction."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.actions import ActionEvent, ActionKind, ChangeKind, ChangeMachine
from bus.contracts.base import Message
from bus.contracts.cell import Spawn
from bus.contracts.operations import EvacuationPolicy, FenceState
from bus.contracts.placement import Release
from cell_conductor.state import events as e
from cell_conductor.state.evacuation_proof import (
    evacuation_blocker,
    fences_relied_on,
    lacks_proof,
    may_run_after_evacuation,
)
from cell_conductor.state.fence import Fence, RunningAfterFence
from cell_conductor.state.instance import FENCED, Instance, Phase, State
from cell_conductor.state.lease import Lease, LeaseState
from cell_conductor.state.step import Step
from cell_conductor.transition import FenceSteps, step
from tests.unit.cell_conductor.scenario import SPEC, UUID, host, phase_of
from tests.unit.cell_conductor.test_instance_table import BUILT, CONTEXT, IN_PLACE, fences, moved

# Host 2 has the current attempt (4), host 1 the source (3).
HERE, SOURCE, OTHER = 2, 1, 3


def at(known: Instance, phase: State | Phase, **more: Any) -> Instance:
    """The record in another state. more: of its move."""
    state, next_state = phase_of(phase)
    assert known.action is not None
    return replace(known, state=state, next_state=next_state, since=90.0, action=replace(known.action, **more))


def fence(n: int) -> e.HostFenced:
    return e.HostFenced(at=300.0, host_uuid=host(n))


# --- in each state

AWAY = moved()
CHANGED = replace(moved(None, selection_index=1), state=State.CHANGING)
BUILDING = replace(moved(), state=State.BUILDING, action=None)
ACTIVE = replace(BUILDING, state=State.ACTIVE)
FAILING = replace(ACTIVE, spec=replace(SPEC, on_host_failure=EvacuationPolicy.FAIL))
STOPPED = replace(CHANGED, action=replace(CHANGED.action, kind=ActionKind.STOP)) if CHANGED.action else CHANGED
UNDONE, OVER, GONE = (
    (State.DESTROYING, State.REVERTING),
    (State.RELEASING, State.FAILED),
    (State.DESTROYING, State.DELETED),
)
NEXT = (State.CLAIMING, State.PREPARING)


@pytest.mark.parametrize(
    ("before", "n", "after"),
    [
        (BUILDING, HERE, (State.CLAIMING, State.BUILDING)),
        (BUILDING, OTHER, None),
        (ACTIVE, HERE, None),
        (FAILING, HERE, OVER),
        (FAILING, OTHER, None),
        (at(AWAY, State.PREPARING), HERE, NEXT),
        (at(AWAY, State.PREPARING), SOURCE, None),
        (at(AWAY, State.HANDING_OVER), SOURCE, (State.REVERTING, None)),
        (at(AWAY, State.HANDING_OVER), HERE, None),
        (at(AWAY, State.HANDING_OVER), OTHER, None),
        (at(AWAY, State.FINISHING), HERE, NEXT),
        (at(AWAY, State.FINISHING), SOURCE, None),
        (at(IN_PLACE, State.RESIZING), HERE, UNDONE),
        (at(IN_PLACE, State.RESIZING), SOURCE, None),
        (at(IN_PLACE, State.RESIZED), HERE, None),
        (replace(at(IN_PLACE, State.RESIZED), spec=FAILING.spec), HERE, (State.RELEASING, State.ACTIVE)),
        (at(IN_PLACE, State.RESIZED), OTHER, None),
        (at(AWAY, State.RESIZED), SOURCE, None),
        (at(AWAY, UNDONE), HERE, (State.REVERTING, None)),
        (at(AWAY, UNDONE), SOURCE, None),
        (at(AWAY, UNDONE), OTHER, None),
        (at(IN_PLACE, UNDONE), HERE, (State.REVERTING, None)),
        (at(IN_PLACE, UNDONE), OTHER, None),
        (at(AWAY, State.RESTARTING), HERE, (State.ACTIVE, None)),
        (at(AWAY, State.RESTARTING), OTHER, None),
        (STOPPED, HERE, (State.ACTIVE, None)),
        (STOPPED, OTHER, None),
        (at(AWAY, GONE, source_destroyed=True), HERE, (State.RELEASING, State.DELETED)),
        (at(AWAY, GONE, current_destroyed=True), SOURCE, (State.RELEASING, State.DELETED)),
        (at(AWAY, (State.DESTROYING, State.ACTIVE)), SOURCE, (State.RELEASING, State.ACTIVE)),
        (at(AWAY, (State.DESTROYING, State.ACTIVE)), HERE, None),
        (at(moved(None), (State.DESTROYING, State.OFFLOADED)), HERE, (State.RELEASING, State.OFFLOADED)),
    ],
)
def test_a_fence_in_each_state(before: Instance, n: int, after: Phase | None) -> None:
    stepped = step(before, fence(n), replace(CONTEXT, fences=fences(n)))
    if after is None:
        assert stepped.instance is before and stepped.commands == ()
    else:
        assert stepped.instance.phase == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (FAILING, (State.ACTIVE, None)),
        (replace(at(IN_PLACE, State.RESIZED), spec=FAILING.spec), (State.RESIZED, None)),
        (at(AWAY, State.RESIZED), (State.RESIZED, None)),
        (BUILDING, (State.CLAIMING, State.BUILDING)),
    ],
)
def test_a_fence_that_is_taken_back_ends_what_waits_and_nothing_that_runs(before: Instance, after: Phase) -> None:
    context = replace(CONTEXT, fences={host(HERE): LIFTING})
    stepped = step(before, fence(HERE), context)
    assert stepped.instance.phase == after and (stepped.instance is before) is (before is not BUILDING)


@pytest.mark.parametrize(
    ("before", "n", "where"),
    [
        (at(AWAY, GONE, source_destroyed=True), HERE, "host-2"),
        (at(AWAY, GONE, current_destroyed=True), SOURCE, "host-1"),
        (at(AWAY, GONE), SOURCE, "host-1"),
        (at(AWAY, GONE), OTHER, None),
        (at(AWAY, (State.DESTROYING, State.ACTIVE)), SOURCE, None),
        (replace(BUILDING, state=State.DESTROYING, next_state=State.DELETED), HERE, "host-2"),
    ],
)
def test_the_history_of_a_delete_names_the_host_that_it_did_not_wait_for(
    before: Instance, n: int, where: str | None
) -> None:
    history = step(before, fence(n), CONTEXT).instance.history
    known = [(one.attempt, one.host, one.outcome, one.code, one.at) for one in history]
    assert known == ([] if where is None else [(4, where, "fenced", FENCED, 300.0)])


def test_the_fence_is_the_reason_of_what_it_ends() -> None:
    rows = [(at(AWAY, State.RESTARTING, rollback_code="x", rollback_reason="its own"), "x",
     "its own; its host was fenced"),
            (at(AWAY, State.RESTARTING, rollback_code="x"), "x", "its host was fenced"),
            (STOPPED, FENCED, "host host-2 was fenced")]  # fmt: skip
    for before, code, reason in rows:
        (event,) = [one for one in step(before, fence(HERE), CONTEXT).commands if isinstance(one, ActionEvent)]
        assert event.code == code and event.reason.startswith(reason)


# --- of an evacuation


def lease(state: LeaseState = LeaseState.SILENT, since: float = 0.0) -> Lease:
    return Lease(service="s1", epoch=1, state=state, since=since)


FENCE = replace(fences(HERE)[host(HERE)], at=300.0, version=2)
LIFTING = replace(FENCE, state=FenceState.UNFENCING)
SILENT, STOPPING = {"s1": lease()}, {"s1": lease(LeaseState.STOPPED)}
NOT_FENCED, SERVICE_UP, RUNNING = "evacuate.not_fenced", "evacuate.service_up", "evacuate.still_running"


def reported(attempt: int = 4, version: int = 1, service: str = "s1") -> dict[str, RunningAfterFence]:
    return {"another": RunningAfterFence(1, {}), service: RunningAfterFence(version, {UUID: attempt})}


@pytest.mark.parametrize(
    ("fence_", "stated", "down", "found", "force", "code"),
    [
        (FENCE, False, {}, {}, False, None),
        (None, False, SILENT, {}, False, NOT_FENCED),
        (LIFTING, False, SILENT, {}, False, NOT_FENCED),
        (None, True, {}, {}, False, SERVICE_UP),
        (LIFTING, True, {}, {}, False, SERVICE_UP),
        (None, True, STOPPING, {}, False, NOT_FENCED),
        (None, True, SILENT, {}, False, None),
        (LIFTING, True, SILENT, {}, False, None),
        (LIFTING, True, SILENT, reported(), True, None),
        (LIFTING, True, SILENT, reported(), False, RUNNING),
        (FENCE, False, {}, reported(), False, RUNNING),
        (FENCE, False, {}, reported(), True, None),
        (FENCE, False, {}, reported(3), False, None),
        (FENCE, False, {}, reported(5), False, None),
        (FENCE, False, SILENT, reported(), False, None),
        (FENCE, False, {"s1": lease(since=300.0)}, reported(), False, None),
        (FENCE, False, {"s1": lease(since=301.0)}, reported(), False, RUNNING),
        (FENCE, False, SILENT, reported(version=2), False, RUNNING),
        (FENCE, False, SILENT, reported(service="s9"), False, RUNNING),
    ],
)
def test_a_host_is_proved_to_be_off_by_its_fence_or_by_a_clients_word(  # noqa: PLR0917  (the columns of the table)
    fence_: Fence | None,
    stated: bool,
    down: dict[str, Lease],
    found: dict[str, RunningAfterFence],
    force: bool,
    code: str | None,
) -> None:
    known = {} if fence_ is None else {host(HERE): replace(fence_, running=found)}
    context = replace(CONTEXT, fences=known, down=down)
    reason = evacuation_blocker(ACTIVE, context, fenced=stated, force=force)
    assert (None if reason is None else reason.code) == code


@pytest.mark.parametrize(
    ("known", "off", "attempt"), [(AWAY, SOURCE, 3), (ACTIVE, HERE, 4), (IN_PLACE, HERE, 4), (moved(None), HERE, 4)]
)
def test_the_proof_is_about_the_host_that_has_the_machine(known: Instance, off: int, attempt: int) -> None:
    for n in (HERE, SOURCE, OTHER):
        reason = evacuation_blocker(known, replace(CONTEXT, fences=fences(n)), fenced=False, force=False)
        assert (reason is None) is (n == off)
    running = {"x": RunningAfterFence(1, {UUID: attempt})}
    context = replace(CONTEXT, fences={host(off): replace(fences(off)[host(off)], running=running)})
    assert evacuation_blocker(known, context, fenced=False, force=False) is not None


LOST = at(AWAY, State.REVERTING, rollback_code=NOT_FENCED)


@pytest.mark.parametrize(
    ("before", "after", "misses"),
    [
        (State.PREPARING, LOST, True),
        (State.PREPARING, at(LOST, UNDONE, rollback_code=RUNNING), True),
        (State.PREPARING, at(LOST, UNDONE, rollback_code=SERVICE_UP), True),
        (State.PREPARING, at(LOST, UNDONE, rollback_code=FENCED), False),
        (State.HANDING_OVER, LOST, False),
        (State.PREPARING, ACTIVE, False),
    ],
)
def test_an_evacuation_is_undone_for_want_of_a_proof(before: State, after: Instance, misses: bool) -> None:
    assert lacks_proof(at(AWAY, before), after) is misses


EVACUATED = at(AWAY, State.FINISHING, kind=ActionKind.EVACUATE)
CLAIMS_NEXT = at(EVACUATED, (State.CLAIMING, State.PREPARING))
CLAIMS = (CLAIMS_NEXT, replace(CLAIMS_NEXT, selection_index=0, attempt=1))


@pytest.mark.parametrize(
    ("known", "n", "evacuated"),
    [
        (EVACUATED, SOURCE, True),
        (EVACUATED, HERE, False),
        (at(EVACUATED, State.RESIZED), SOURCE, True),
        (at(EVACUATED, State.FINISHING, kind=ActionKind.MIGRATE), SOURCE, False),
        (at(EVACUATED, State.PREPARING), SOURCE, False),
        *((one, SOURCE, False) for one in CLAIMS),
        (BUILT, SOURCE, False),
    ],
)
def test_a_fence_is_needed_while_the_destination_of_an_evacuation_may_run(
    known: Instance, n: int, evacuated: bool
) -> None:
    assert may_run_after_evacuation(known, host(n)) is evacuated


PREPARED = at(EVACUATED, State.PREPARING)
SHELVED = at(moved(None), (State.DESTROYING, State.OFFLOADED), kind=ActionKind.EVACUATE)
WAITS = at(AWAY, State.RESIZED, rollback_code=FENCED)
FAILED_BY_FENCE = replace(FAILING, state=State.RELEASING, next_state=State.FAILED, code=FENCED)


@pytest.mark.parametrize(
    ("before", "after", "numbers", "unfencing", "hosts"),
    [
        (PREPARED, EVACUATED, (HERE, SOURCE), False, [SOURCE]),
        (PREPARED, EVACUATED, (HERE, SOURCE), True, []),
        (PREPARED, EVACUATED, (HERE,), False, []),
        (EVACUATED, EVACUATED, (SOURCE,), False, []),
        (PREPARED, PREPARED, (SOURCE,), False, []),
        (at(AWAY, State.PREPARING), at(AWAY, State.FINISHING), (SOURCE,), False, []),
        (ACTIVE, SHELVED, (HERE,), False, [HERE]),
        (FAILING, FAILED_BY_FENCE, (HERE,), False, [HERE]),
        (FAILING, replace(FAILED_BY_FENCE, code="instance.lost"), (HERE,), False, []),
        (BUILDING, FAILED_BY_FENCE, (HERE,), False, []),
        (WAITS, at(WAITS, (State.RELEASING, State.ACTIVE)), (HERE, SOURCE), False, [HERE, SOURCE]),
        (WAITS, at(WAITS, (State.RELEASING, State.ACTIVE)), (HERE, SOURCE), True, []),
        (WAITS, at(WAITS, (State.DESTROYING, State.ACTIVE), ending_kind=ActionKind.CONFIRM), (HERE,), False, []),
        (WAITS, at(WAITS, UNDONE), (HERE,), False, []),
    ],
)
def test_a_step_of_an_evacuation_relies_on_the_fence_of_its_host(
    before: Instance, after: Instance, numbers: tuple[int, ...], unfencing: bool, hosts: list[int]
) -> None:
    state = FenceState.UNFENCING if unfencing else FenceState.FENCED
    known = {uuid: replace(one, state=state) for uuid, one in fences(*numbers).items()}
    assert list(fences_relied_on(before, after, replace(CONTEXT, fences=known))) == [host(n) for n in hosts]


# --- in one transaction


NOTHING = e.Destroyed(at=300.0, attempt=1, host_uuid=host(9), service="x")  # of a host of another instance


def followed(before: Instance, event: e.Event, *numbers: int, stepped: Step | None = None) -> tuple[FenceSteps, Step]:
    context, steps = replace(CONTEXT, fences=fences(*numbers)), FenceSteps()
    return steps, steps.apply(before, stepped or step(before, event, context), event, context)


@pytest.mark.parametrize(
    ("before", "event", "numbers", "after", "hosts", "lost"),
    [
        (FAILING, fence(HERE), (HERE,), OVER, [HERE], [HERE]),
        (FAILING, fence(HERE), (), (State.ACTIVE, None), [], []),
        (ACTIVE, fence(HERE), (HERE,), (State.ACTIVE, None), [], []),
        (FAILING, NOTHING, (HERE,), OVER, [HERE], [HERE]),
        (FAILING, NOTHING, (OTHER,), (State.ACTIVE, None), [], []),
        (at(AWAY, GONE), NOTHING, (HERE, SOURCE), (State.RELEASING, State.DELETED), [HERE, SOURCE],
         [HERE, SOURCE]),
        (at(AWAY, GONE), fence(HERE), (HERE,), GONE, [HERE], [HERE]),
    ],
)  # fmt: skip
def test_a_fence_is_followed_to_the_end(  # noqa: PLR0917  (the columns of the table)
    before: Instance,
    event: e.Event,
    numbers: tuple[int, ...],
    after: Phase,
    hosts: list[int],
    lost: list[int],
) -> None:
    steps, stepped = followed(before, event, *numbers)
    assert stepped.instance.phase == after
    assert list(steps.hosts) == [host(n) for n in hosts]
    assert {one: len(services) for one, services in steps.stale.items()} == {host(n): 1 for n in lost}


STARTED = (
    replace(CHANGED, change_number=5, action=replace(CHANGED.action, kind=ActionKind.START, change_number=5))
    if CHANGED.action
    else CHANGED
)


def changes(commands: tuple[Message, ...]) -> list[tuple[ChangeKind, str]]:
    return [(one.change, one.host_uuid) for one in commands if isinstance(one, ChangeMachine)]


@pytest.mark.parametrize(
    ("kind", "n", "stops"),
    [
        (ActionKind.START, HERE, True),
        (ActionKind.UNRESCUE, HERE, True),
        (ActionKind.REBOOT, HERE, True),
        (ActionKind.REBUILD, HERE, True),
        (ActionKind.RESCUE, HERE, True),
        (ActionKind.STOP, HERE, False),
        (ActionKind.SHELVE, HERE, False),
        (ActionKind.START, OTHER, False),
    ],
)
def test_a_change_that_starts_a_machine_is_followed_by_a_stop_on_its_fenced_host(
    kind: ActionKind, n: int, stops: bool
) -> None:
    before = at(STARTED, State.CHANGING, kind=kind)
    _, stepped = followed(before, fence(n), HERE)
    assert changes(stepped.commands) == ([(ChangeKind.STOP, host(HERE))] if stops else [])
    if stops:
        (stop,) = [one for one in stepped.commands if isinstance(one, ChangeMachine)]
        assert stop.change_number == stepped.instance.change_number == 300_000


def test_a_change_that_goes_on_or_ends_by_its_host_is_not_followed_by_a_stop() -> None:
    _, going_on = followed(STARTED, fence(HERE), stepped=Step(replace(STARTED, since=1.0)))
    done = e.ChangeEnded(at=300.0, attempt=4, change_number=5, host_uuid=host(HERE), service="s1", done=True, runs=True)
    steps, ended = followed(STARTED, done)
    assert ended.instance.state is State.ACTIVE and steps.hosts == {}
    assert changes(going_on.commands) == changes(ended.commands) == []


START = ChangeMachine(
    change=ChangeKind.RESCUE, spec=SPEC, attempt=4, change_number=1, host_uuid=host(HERE), service="s1", allocations={},
    rescue_password="secret",
)  # fmt: skip
SPAWN = Spawn(spec=SPEC, attempt=4, host_uuid=host(HERE), service="s1", allocations={})


@pytest.mark.parametrize(
    ("command", "numbers", "kept"),
    [
        (SPAWN, (HERE,), None),
        (SPAWN, (OTHER,), SPAWN),
        (Release(consumer=UUID), (HERE,), Release(consumer=UUID)),
        (START, (HERE,), replace(START, change=ChangeKind.STOP, rescue_password="")),
        (START, (OTHER,), START),
        (replace(START, change=ChangeKind.SNAPSHOT), (HERE,), replace(START, change=ChangeKind.SNAPSHOT)),
    ],
)
def test_nothing_is_started_on_a_fenced_host(command: Message, numbers: tuple[int, ...], kept: Message | None) -> None:
    stepped = Step(ACTIVE, (command,))
    _, after = followed(ACTIVE, NOTHING, *numbers, stepped=stepped)
    assert after.commands == (() if kept is None else (kept,))
