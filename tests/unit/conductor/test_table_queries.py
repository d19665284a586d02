"""The schedulers query a build that has had no event for long: the record answers, or one is made in doubt."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.base import Refusal
from bus.contracts.build import BuildState
from bus.contracts.cell import FoundMachine
from bus.contracts.placement import Claim, Release
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import MACHINE_EXISTS, Instance, State
from cell_conductor.domain.proof import is_over
from cell_conductor.domain.rules import OUTCOME_UNKNOWN
from cell_conductor.domain.table import question_of
from tests.unit.conductor.scenario import (
    DELETE,
    RELEASED,
    SPEC,
    UUID,
    announced,
    claimed,
    destroys,
    failed,
    host,
    queried,
    run,
    spawned,
    spawns,
)

QUERY = e.BuildRequested(
    at=500.0,
    spec=SPEC,
    selections=(),
    consumer_generation=None,
    build_timeout_s=60.0,
    requested_at=490.0,
    given_up=Refusal(code="build.lost", reason="no machine"),
    is_query=True,
    attempt=2,
    sequence=12,
)
NOTHING = replace(QUERY, found=())
MACHINE = FoundMachine(
    instance_uuid=UUID,
    host_uuid=host(1),
    host="host-1",
    service="s1",
    attempt=1,
    project_id="p",
    allocations={host(1): {"VCPU": 1}},
)


def test_a_build_that_its_cell_has_no_record_and_no_machine_of_ends_in_doubt() -> None:
    lost = run(NOTHING)
    assert lost.instance.phase == (State.RELEASING, State.FAILED) and not lost.commands
    # That attempt, and the next one, which the cell may have requested: none that another cell has claimed since.
    assert question_of(lost.instance) == Release(consumer=UUID, attempt=3)
    ended = run(RELEASED, start=lost.instance)
    (end,) = announced(ended)
    assert (end.state, end.code, end.terminal) == (BuildState.FAILED, OUTCOME_UNKNOWN, True)
    assert end.sequence > QUERY.sequence and "build.lost" in end.reason
    assert not is_over(ended.instance, 1, host(1)), "a machine of it that appears later is kept"


def test_its_number_is_above_all_that_the_schedulers_have_had_of_records_that_were_set_back_before() -> None:
    lost = run(replace(NOTHING, sequence=5_000_000), RELEASED)
    assert announced(lost)[0].sequence > 5_000_000


def test_a_command_that_comes_after_the_query_meets_its_record() -> None:
    late = replace(queried(), requested_at=480.0)
    for happened in ((NOTHING, late), (NOTHING, RELEASED, late)):
        after = run(*happened)
        assert not spawns(after) and after.instance.state in (State.RELEASING, State.FAILED)
    assert [one.state for one in announced(after)] == [BuildState.FAILED]


def test_a_query_that_no_search_has_answered_makes_no_record() -> None:
    assert run(QUERY).instance == Instance(uuid=UUID)
    tombstone = run(DELETE)
    assert run(QUERY, start=tombstone.instance) == replace(tombstone, commands=())


def test_a_machine_of_it_is_adopted_with_what_it_takes() -> None:
    found = run(replace(QUERY, found=(MACHINE,)))
    assert found.instance.phase == (State.CLAIMING, State.ACTIVE) and not destroys(found)
    claim = question_of(found.instance)
    assert isinstance(claim, Claim) and claim.options[0].allocations == MACHINE.allocations


def test_a_machine_that_is_not_proved_to_be_its_own_is_not_adopted() -> None:
    for strange in (replace(MACHINE, project_id="q"), replace(MACHINE, allocations=None)):
        found = run(replace(QUERY, found=(strange,)))
        assert (found.instance.phase, found.instance.code) == ((State.RELEASING, State.FAILED), MACHINE_EXISTS)
        assert not found.commands


def test_nothing_is_released_while_a_machine_of_it_has_the_mark_of_another_deployment() -> None:
    anothers = replace(NOTHING, given_up=Refusal(code=MACHINE_EXISTS, reason="a host has it"))
    ended = run(anothers)
    assert ended.instance.state is State.FAILED and question_of(ended.instance) is None
    assert [(one.state, one.code, one.terminal) for one in announced(ended)] == [
        (BuildState.FAILED, MACHINE_EXISTS, True)
    ]
    assert run(DELETE, anothers).instance.state is State.TOMBSTONE


def test_the_build_of_a_delete_that_came_first_ends_with_it() -> None:
    ended = run(DELETE, NOTHING, RELEASED)
    assert [one.state for one in announced(ended)] == [BuildState.DELETED]


@pytest.mark.parametrize(
    ("happened", "state", "terminal"),
    [
        ((queried(),), BuildState.BUILDING, False),
        ((queried(), failed()), BuildState.BUILDING, False),
        ((queried(), spawned()), BuildState.ACTIVE, True),
        ((queried(), DELETE), BuildState.DELETING, False),
        ((queried(), failed(), DELETE), BuildState.DELETING, False),
    ],
)
def test_a_record_answers_by_a_number_above_all_that_the_schedulers_have(
    happened: tuple[e.Event, ...], state: BuildState, *, terminal: bool
) -> None:
    before = run(*happened).instance
    answered = run(replace(QUERY, sequence=400), start=before)
    (answer,) = announced(answered)
    assert (answer.state, answer.terminal, answer.sequence) == (state, terminal, 401)
    assert answered.instance == replace(before, sequence=402, build_sequence=401, stamps=answered.instance.stamps), (
        "nothing is begun"
    )


def test_an_end_that_the_schedulers_have_not_had_keeps_its_number() -> None:
    active = run(queried(), spawned())
    (end,) = announced(active)
    again = run(replace(QUERY, sequence=end.sequence - 1), start=active.instance)
    assert [one.sequence for one in announced(again)] == [end.sequence]
    assert again.instance == active.instance


def test_a_second_command_of_what_is_under_way_is_not_answered() -> None:
    for before in (run(queried()), run(queried(), failed()), run(queried(), DELETE)):
        assert not run(queried(), start=before.instance).commands


def test_a_delete_that_comes_again_is_announced_with_the_reason_that_holds_it_up() -> None:
    refused = e.SpawnFailed(at=130.0, attempt=1, host_uuid=host(1), code="destroy.busy", reason="a snapshot is taken")
    held = run(queried(), spawned(), DELETE, refused)
    again = run(DELETE, start=held.instance)
    (answer,) = announced(again)
    assert (answer.state, answer.code) == (BuildState.DELETING, "destroy.busy")
    assert not destroys(again)
    assert run(queried(), failed(), DELETE, claimed()).instance.phase == (State.RELEASING, State.DELETED)
