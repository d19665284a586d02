"""Destinations of moves, their sources and their end: a row for each condition that decides."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.actions import MACHINE_ABSENT, ActionKind
from bus.contracts.placement import ClaimOutcome
from cell_conductor.state import events as e
from cell_conductor.state.instance import Instance, State
from cell_conductor.state.step import StepContext
from tests.unit.cell_conductor.move_scenario import ACTION, OTHER, SERVICE_DOWN, claimed, refused
from tests.unit.cell_conductor.records import (
    BY_REVERT,
    GONE,
    ON_1,
    ON_2,
    SOURCE_GONE,
    Case,
    answer,
    at_source,
    case,
    fenced,
    in_place,
    moving,
    outcome,
    unshelving,
)
from tests.unit.cell_conductor.scenario import UUID, failed, host, missed, spawned

K, S = ActionKind, State
HELD = replace(refused(5), consumer_conflict=True, consumer_generation=11, allocations={host(1): {"VCPU": 1}})
LOST = e.ServiceLost(at=220.0, service="s1", code="service.silent")
LATE = e.TimedOut(at=220.0)
THERE = moving(S.RESIZED, action={"finishing": True})
BUILT = moving(S.FINISHING, action={"finishing": True})


def runs(n: int, *, built: bool = True) -> e.MachineRunning:
    return e.MachineRunning(at=220.0, attempt=n, host_uuid=host(n), service="s1", built=built)


CLAIMED: list[Case] = [
    case(at_source(), claimed(4), "claiming/preparing"),
    case(at_source(selections=(ON_1, ON_1, ON_2)), claimed(5), "resizing", "resize 1@1", "migrate: changing"),
    case(
        unshelving(S.CLAIMING, S.PREPARING, selection_index=0),
        claimed(5),
        "preparing",
        "check 5@2",
        "unshelve: preparing",
    ),
    case(at_source({"delete": True}), claimed(5), "destroying/deleted", "destroy 1@1"),
    case(
        at_source({"ending_request_id": OTHER, "ending_kind": K.ABORT}),
        claimed(5),
        "reverting",
        "migrate: rolling-back",
    ),
    case(at_source(), refused(4), "claiming/preparing"),
    case(at_source(), refused(5), "reverting", "migrate: rolling-back"),
    case(at_source({"delete": True}), refused(5), "destroying/deleted", "destroy 1@1"),
    case(at_source(), HELD, "claiming/preparing"),
    case(at_source({"refreshed": True}), HELD, "reverting", "migrate: rolling-back"),
    case(at_source({"ending_request_id": OTHER, "ending_kind": K.ABORT}), HELD, "reverting", "migrate: rolling-back"),
    case(
        at_source({"ending_request_id": OTHER, "ending_kind": K.ABORT}),
        refused(5),
        "reverting",
        "migrate: rolling-back",
    ),
    case(at_source(selection_index=1), HELD, "reverting", "migrate: rolling-back"),
    case(at_source(), replace(HELD, consumer_conflict=False), "reverting", "migrate: rolling-back"),
    case(at_source(), replace(HELD, consumer_generation=None), "reverting", "migrate: rolling-back"),
    case(at_source(), replace(HELD, allocations={host(1): {"VCPU": 2}}), "reverting", "migrate: rolling-back"),
    case(unshelving(S.CLAIMING, S.PREPARING, selection_index=0), HELD, "releasing/offloaded", "unshelve: rolling-back"),
    case(at_source(), replace(refused(5), outcomes=(ClaimOutcome.OVER_QUOTA,)), "reverting", "migrate: rolling-back"),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), CLAIMED)
def test_what_placement_answers_about_a_destination(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)


CHECKED: list[Case] = [
    case(*answer(moving(S.PREPARING), 2), "handing_over", "hand-over 1@1", "migrate: migrating"),
    case(*answer(moving(S.PREPARING), 1), "preparing"),
    case(*answer(moving(S.PREPARING), 2, done=False), "claiming/preparing", "migrate: claiming"),
    case(*answer(moving(S.PREPARING, action={"handed_over": True}), 2), "finishing", "spawn 2@2", "migrate: finishing"),
    case(
        *answer(moving(S.PREPARING, action={"kind": K.EVACUATE}), 2),
        "finishing",
        "spawn 2@2",
        "evacuate: finishing",
        context=fenced(1),
    ),
    case(
        *answer(moving(S.PREPARING, action={"kind": K.EVACUATE}), 2),
        "reverting",
        "evacuate: rolling-back",
        context=fenced(2),
    ),
    case(
        *answer(moving(S.PREPARING, action={"kind": K.EVACUATE, "fenced": True}), 2),
        "finishing",
        "spawn 2@2",
        "evacuate: finishing",
        context=SERVICE_DOWN,
    ),
    case(
        *answer(moving(S.PREPARING, action={"kind": K.LIVE_MIGRATE}), 2),
        "handing_over",
        "hand-over-live 1@1",
        "live-migrate: migrating",
    ),
    case(*answer(unshelving(S.PREPARING), 2), "finishing", "spawn 2@2", "unshelve: finishing"),
    case(moving(S.PREPARING), LATE, "claiming/preparing", "migrate: claiming"),
    case(moving(S.PREPARING, selections=(ON_1, ON_2, ON_1)), LATE, "claiming/preparing", "migrate: claiming"),
    case(
        moving(S.PREPARING, action={"handed_over": True}, selections=(ON_1, ON_2, ON_1)),
        LATE,
        "reverting",
        "migrate: rolling-back",
    ),
    case(moving(S.PREPARING), LOST, "claiming/preparing", "migrate: claiming"),
    case(moving(S.PREPARING), replace(LOST, service="s2"), "preparing"),
    case(moving(S.PREPARING, selections=(ON_1, ON_2)), LATE, "reverting", "migrate: rolling-back"),
    case(moving(S.PREPARING), LATE, "reverting", "migrate: rolling-back", context=fenced(3)),
    case(*answer(moving(S.HANDING_OVER), 1), "finishing", "spawn 2@2", "migrate: finishing"),
    case(*answer(moving(S.HANDING_OVER), 2), "handing_over"),
    case(*answer(moving(S.HANDING_OVER), 1, done=False), "reverting", "migrate: rolling-back"),
    case(
        *answer(moving(S.HANDING_OVER), 1, done=False, refused=True, runs=False, code="x"),
        "reverting",
        "migrate: rolling-back",
    ),
    case(
        *answer(moving(S.HANDING_OVER), 1, done=False, refused=True, runs=True, code="x"),
        "reverting",
        "migrate: rolling-back",
    ),
    case(
        *answer(moving(S.HANDING_OVER), 1, done=False, refused=True, runs=True, retry_other_host=True, code="x"),
        "claiming/preparing",
        "migrate: claiming",
    ),
    case(moving(S.HANDING_OVER), LATE, "reverting", "migrate: rolling-back"),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), CHECKED)
def test_what_a_destination_or_a_source_answers(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)


COMMANDED: list[Case] = [
    case(moving(S.FINISHING), spawned(2), "resized", "migrate: done"),
    case(moving(S.FINISHING), spawned(3), "finishing", "destroy 3@3"),
    case(moving(S.FINISHING), spawned(1), "finishing"),
    case(moving(S.FINISHING), runs(2), "resized", "migrate: done"),
    case(moving(S.FINISHING), runs(2, built=False), "finishing"),
    case(
        moving(S.FINISHING, action={"kind": K.LIVE_MIGRATE}),
        spawned(2),
        "destroying/active",
        "destroy 1@1",
        "live-migrate: done",
    ),
    case(
        moving(S.FINISHING, action={"auto_confirm_s": 0}),
        spawned(2),
        "destroying/active",
        "destroy 1@1",
        "migrate: done",
    ),
    case(moving(S.FINISHING, action={"auto_confirm_s": 1}), spawned(2), "resized", "migrate: done"),
    case(unshelving(S.FINISHING), spawned(2), "active", "unshelve: done"),
    case(BUILT, failed(2), "claiming/preparing", "destroy 2@2", "migrate: claiming"),
    case(BUILT, failed(2, final=True), "destroying/reverting", "destroy 2@2", "migrate: rolling-back"),
    case(BUILT, failed(3, n=2), "finishing", "destroy 3@2"),
    case(BUILT, failed(1, n=2), "finishing"),
    case(BUILT, failed(2, n=3), "finishing"),
    case(BUILT, GONE, "claiming/preparing", "migrate: claiming"),
    case(BUILT, SOURCE_GONE, "finishing"),
    case(BUILT, replace(GONE, attempt=1), "finishing"),
    case(
        moving(S.FINISHING, action={"finishing": True}, selections=(ON_1, ON_2)),
        GONE,
        "reverting",
        "migrate: rolling-back",
    ),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), COMMANDED)
def test_what_comes_of_a_destination_that_was_commanded(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)


IN_PLACE: list[Case] = [
    case(*answer(in_place(S.RESIZING, queried=False), 1), "resized", "resize: done"),
    case(in_place(S.RESIZING, queried=False), replace(answer(in_place(S.RESIZING), 1)[1], change_number=4), "resizing"),
    case(*answer(in_place(S.RESIZING, queried=False), 1, done=False, code="x"), "resizing", "resize 1@1"),
    case(
        *answer(in_place(S.RESIZING, queried=False), 1, done=False, code=MACHINE_ABSENT),
        "claiming/preparing",
        "resize: claiming",
    ),
    case(
        *answer(in_place(S.RESIZING, action={"restoring_size": True}, queried=False), 1),
        "claiming/preparing",
        "resize: claiming",
    ),
    case(
        *answer(in_place(S.RESIZING, action={"restoring_size": True}, queried=False), 1, done=False, code="x"),
        "resizing",
    ),
    case(
        *answer(
            in_place(S.RESIZING, action={"restoring_size": True}, queried=False), 1, done=False, code=MACHINE_ABSENT
        ),
        "claiming/preparing",
        "resize: claiming",
    ),
    case(in_place(S.RESIZING, queried=False), LATE, "destroying/reverting", "resize 1@1", "resize: rolling-back"),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), IN_PLACE)
def test_what_comes_of_a_resize_in_place(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)


THERE_ALREADY: list[Case] = [
    case(THERE, missed(THERE, 2), "destroying/reverting", "destroy 2@2", "migrate: rolling-back"),
    case(THERE, missed(THERE, 1), "resized"),
    case(in_place(S.RESIZED), missed(in_place(S.RESIZED), 1), "releasing/failed", "destroy 1@1"),
    case(moving(S.RESIZED), LATE, "destroying/active", "destroy 1@1", "migrate: confirmed"),
    case(moving(S.RESIZED, action=BY_REVERT), LATE, "resized", "revert: refused action.source_silent"),
    case(moving(S.RESIZED), LATE, "resized", context=fenced(2)),
    case(in_place(S.RESIZED), LATE, "releasing/active", "resize: confirmed", context=fenced(1)),
    case(moving(S.RESIZED), LATE, "destroying/active", "destroy 1@1", "migrate: confirmed", context=fenced(1)),
    case(moving(S.RELEASING, S.ACTIVE), e.Released(at=220.0, consumer=ACTION), "active", "migrate: source-destroyed"),
    case(moving(S.RELEASING, S.ACTIVE), e.Released(at=220.0, consumer=UUID), "releasing/active"),
    case(
        moving(S.RELEASING, S.ACTIVE, {"ending_request_id": OTHER, "ending_kind": K.CONFIRM, "answered": True}),
        e.Released(at=220.0, consumer=ACTION),
        "active",
        "confirm: done",
        "migrate: source-destroyed",
    ),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), THERE_ALREADY)
def test_what_ends_a_move_that_has_arrived(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)
