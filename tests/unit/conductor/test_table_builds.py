"""The instance state machine: builds, their alternates, how they end, and queries about them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.base import Refusal
from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.cell import Destroy, FoundMachine, Spawn
from bus.contracts.groups import GroupPolicy, ServerGroup
from bus.contracts.placement import Claim, ClaimOutcome, Release
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import FIRST_SEQUENCE, MACHINE_EXISTS, Instance, State
from cell_conductor.domain.report import is_over
from cell_conductor.domain.rules import OUTCOME_UNKNOWN
from cell_conductor.domain.table import question_of, step
from tests.unit.conductor.scenario import (
    DELETE,
    PATIENCE,
    RELEASED,
    SILENT,
    SPEC,
    TIMED_OUT,
    UUID,
    announced,
    claimed,
    destroys,
    failed,
    host,
    missed,
    queried,
    refused,
    run,
    spawned,
    spawns,
)

# --- The instance state machine: builds, their alternates, and how they end.


def test_build_spawns_on_the_first_selection_and_announces() -> None:
    stepped = run(queried())
    spawn, event = stepped.commands
    assert isinstance(spawn, Spawn) and isinstance(event, BuildEvent)
    assert (spawn.attempt, spawn.host_uuid, spawn.allocations) == (1, host(1), {host(1): {"VCPU": 1}})
    assert (event.state, event.sequence, event.terminal) == (BuildState.BUILDING, FIRST_SEQUENCE, False)
    assert stepped.instance.deadline == 160.0


def test_success_is_terminal_and_forgets_the_alternates() -> None:
    stepped = run(queried(), spawned())
    (event,) = announced(stepped)
    assert (event.state, event.terminal, event.sequence, event.host) == (BuildState.ACTIVE, True, 11, "host-1")
    assert stepped.instance.deadline is None and len(stepped.instance.selections) == 1
    assert [record.outcome for record in event.history] == ["active"]


def test_the_drivers_remark_is_in_the_announcement_and_in_the_attempt() -> None:
    """A build that waited for an outage of Ironic is active all the same, and its story shows why it took so long."""
    waited = "waited 12.3 s for Ironic (Ironic: ConnectError)"
    stepped = run(queried(), replace(spawned(), remark=waited))
    assert (announced(stepped)[-1].code, announced(stepped)[-1].reason) == ("", waited)
    assert stepped.instance.history[-1].reason == waited and not stepped.instance.reason


def test_failure_destroys_there_and_claims_the_alternates_in_order() -> None:
    stepped = run(queried(), failed())
    assert stepped.instance.phase == (State.CLAIMING, State.BUILDING)
    assert destroys(stepped) == [(1, host(1))] and not announced(stepped)
    claim = question_of(stepped.instance)
    assert isinstance(claim, Claim)
    assert (claim.attempt, claim.consumer_generation, claim.release_first) == (2, 7, True)
    assert [list(option.allocations) for option in claim.options] == [[host(2)], [host(3)]]
    assert claim.options[0].shapes == {host(2): 2}


def test_a_claimed_alternate_is_built_under_the_next_attempt() -> None:
    stepped = run(queried(), failed(), claimed(option=1))
    assert spawns(stepped) == [(2, host(3))]
    assert stepped.instance.consumer_generation == 9
    assert [(r.host, r.outcome, r.code) for r in stepped.instance.history] == [
        ("host-1", "failed", "spawn.no_disk"),
        ("host-2", "not_claimed", "full"),
    ]


def test_the_zone_of_an_alternate_is_announced_as_its_selection_has_it() -> None:
    """Nova's cell looks it up above for a build that has gone on to an alternate (its bug 1781286)."""
    zones = {1: "east", 3: "west"}
    request = queried()
    request = replace(
        request, selections=tuple(replace(one, zone=zones.get(n, "")) for n, one in enumerate(request.selections, 1))
    )
    stepped = run(request, failed(), claimed(option=1), spawned(attempt=2, n=3))
    assert [(event.state, event.host, event.zone) for event in announced(stepped)] == [("active", "host-3", "west")]


def test_exhausted_before_any_claim_releases_first_then_fails_with_the_whole_history() -> None:
    over = run(queried(hosts=1), failed())
    assert over.instance.phase == (State.RELEASING, State.FAILED) and not announced(over)
    assert question_of(over.instance) == Release(consumer=UUID, attempt=2)
    (event,) = announced(run(RELEASED, start=over.instance))
    assert (event.state, event.terminal, event.code) == (BuildState.FAILED, True, "max_retries_exceeded")
    assert "host-1: failed, spawn.no_disk, full" in event.reason
    assert len(event.history) == 1


def test_exhausted_by_the_claim_fences_what_may_be_on_its_way_then_fails() -> None:
    over = run(queried(), failed(), refused())
    assert question_of(over.instance) == Release(consumer=UUID, attempt=2), "a late copy of the claim of attempt 2"
    stepped = run(RELEASED, start=over.instance)
    (event,) = announced(stepped)
    assert (stepped.instance.state, event.code, event.terminal) == (State.FAILED, "max_retries_exceeded", True)
    assert [r.code for r in event.history] == ["spawn.no_disk", "full", "raced"]
    assert question_of(stepped.instance) is None


def test_what_failed_and_was_forgotten_above_is_built_when_it_is_requested_anew() -> None:
    """Schedulers forget a failed build a day before its cell does: the new one stayed scheduled, and held its claim."""
    over = run(queried(hosts=1), failed(), RELEASED).instance
    copy = run(queried(), start=over)
    assert (copy.instance, spawns(copy)) == (over, []), "a copy of the same request"
    anew = run(replace(queried(), requested_at=9e5, at=9e5), start=over)
    assert spawns(anew) == [(1, host(1))] and anew.instance.state is State.BUILDING
    assert not anew.instance.history and not anew.instance.answered and not anew.instance.code
    (event,) = announced(anew)
    assert event.sequence == over.sequence, "higher than all that was announced of it"


def test_changed_consumer_is_fatal() -> None:
    stepped = run(queried(), failed(), refused(changed=True))
    assert stepped.instance.state is State.FAILED and not spawns(stepped)
    assert announced(stepped)[0].code == "placement.consumer_changed"


def test_a_final_failure_tries_no_alternate() -> None:
    stepped = run(queried(), failed(final=True))
    assert stepped.instance.phase == (State.RELEASING, State.FAILED)
    assert announced(run(RELEASED, start=stepped.instance))[0].code == "spawn.no_disk"


def test_a_host_that_never_answers_is_fenced_and_left() -> None:
    stepped = run(queried(), *SILENT)
    assert (stepped.instance.phase, destroys(stepped)) == ((State.CLAIMING, State.BUILDING), [(1, host(1))])
    assert stepped.instance.history[0].code == "spawn.timeout"


def test_a_host_is_queried_what_became_of_an_attempt_before_its_time_out_ends_it() -> None:
    """The answer may be on its way, or in what a restored database has forgotten."""
    asking = run(queried(), TIMED_OUT)
    (order,) = asking.commands
    assert isinstance(order, Destroy) and order.unless_built and order.attempt == 1
    assert (
        asking.instance.state is State.BUILDING and asking.instance.deadline == TIMED_OUT.at + PATIENCE.answer_timeout_s
    )
    late = run(spawned(), start=asking.instance)
    assert late.instance.state is State.ACTIVE and not late.instance.queried and not destroys(late)
    ended = run(e.Destroyed(at=171.0, attempt=1, host_uuid=host(1), service="s1"), start=asking.instance)
    assert (
        ended.instance.phase == (State.CLAIMING, State.BUILDING) and ended.instance.history[0].code == "spawn.timeout"
    )


def test_of_a_doubted_build_the_host_alone_decides_what_became_of_it() -> None:
    """The database was set back: the attempt may have been active since."""
    doubted = replace(run(queried()).instance, doubted=True)
    asking = run(*SILENT, start=doubted)
    (order,) = asking.commands
    assert isinstance(order, Destroy) and order.unless_built and asking.instance.state is State.BUILDING
    assert asking.instance.deadline == 180.0 + 80.0, "less and less often"
    up = run(spawned(), start=asking.instance).instance
    assert (up.state, up.doubted) == (State.ACTIVE, False)
    next_one = run(
        e.Destroyed(at=300.0, attempt=1, host_uuid=host(1), service="s1"), claimed(), start=asking.instance
    ).instance
    assert (next_one.state, next_one.doubted, next_one.queried) == (State.BUILDING, True, False)


@pytest.mark.parametrize(
    "path",
    [
        (queried(), *SILENT),
        (queried(), *SILENT, claimed()),
        (queried(), *SILENT, claimed(), spawned(2)),
        (queried(), *SILENT, refused()),
        (queried(), *SILENT, refused(), RELEASED),
        (queried(), *SILENT, DELETE),
        (queried(hosts=1), *SILENT, RELEASED),
        (queried(), *SILENT, claimed(), DELETE),
    ],
)
def test_a_late_success_of_a_fenced_attempt_is_destroyed(path: tuple[e.Event, ...]) -> None:
    before = run(*path).instance
    stepped = step(before, spawned(1), PATIENCE)
    assert stepped.instance == before
    assert destroys(stepped) == [(1, host(1))] and len(stepped.commands) == 1


def test_an_attempt_that_this_record_never_commanded_is_kept() -> None:
    """The record may be a backup's: what it does not know it does not prove unwanted."""
    assert destroys(run(queried(), spawned(2))) == []
    assert destroys(run(queried(), spawned(1, n=3))) == []
    assert destroys(run(spawned())) == []


def test_alternates_are_held_to_the_limits_of_their_project() -> None:
    stepped = run(replace(queried(), limits={"INSTANCES": 3}), failed(1))
    claim = question_of(stepped.instance)
    assert isinstance(claim, Claim)
    assert claim.limits == {"INSTANCES": 3}
    refused = e.ClaimRefused(at=111.0, attempt=2, outcomes=(ClaimOutcome.OVER_LIMIT, ClaimOutcome.OVER_LIMIT))
    over = run(refused, start=stepped.instance).instance
    assert (over.phase, over.history[-1].code, over.code) == (
        (State.RELEASING, State.FAILED),
        "over_limit",
        "quota.exceeded",
    )


def test_alternates_are_held_to_the_rule_of_the_server_group() -> None:
    apart = ServerGroup(uuid=host(99), policy=GroupPolicy.ANTI_AFFINITY)
    stepped = run(replace(queried(), server_group=apart), failed(1))
    claim = question_of(stepped.instance)
    assert isinstance(claim, Claim)
    assert claim.server_group == apart
    assert [option.host for option in claim.options] == [host(2), host(3)]
    # Ruled out is as good as full: the next state is the same, and the history holds it.
    refused = e.ClaimRefused(at=111.0, attempt=2, outcomes=(ClaimOutcome.RULED_OUT, ClaimOutcome.FULL))
    over = run(refused, start=stepped.instance).instance
    assert over.phase == (State.RELEASING, State.FAILED)
    assert [record.code for record in over.history[-2:]] == ["ruled_out", "full"]


def test_a_second_build_of_what_has_ended_is_answered_with_its_end_once_more() -> None:
    """After a restore of the schedulers it stayed `scheduled` for ever: the cell took it for a copy."""
    up = run(queried(), spawned())
    lost = run(missed(up.instance), RELEASED, start=up.instance)
    failed_at_once = run(queried(hosts=1), failed(final=True), RELEASED)
    deleted = run(
        DELETE, e.Destroyed(at=125.0, attempt=1, host_uuid=host(1), service="s1"), RELEASED, start=up.instance
    )
    for end, terminal in ((up, True), (lost, False), (failed_at_once, True), (deleted, True)):
        again = run(queried(), start=end.instance)
        assert again.instance == end.instance and not spawns(again) and not destroys(again)
        (first,), (second,) = announced(end), announced(again)
        assert (second.state, second.sequence, second.host) == (first.state, first.sequence, first.host)
        assert (second.terminal, second.code, second.history) == (terminal, first.code, first.history)
    tombstone = run(DELETE).instance
    assert announced(run(queried(), start=tombstone)) == [], "that one is refused, and released"


@pytest.mark.parametrize("ended", [False, True])
def test_an_attempt_that_fails_once_more_after_its_build_is_destroyed_once_more(ended: bool) -> None:
    """Another service of its name had answered that nothing is there; its order was delivered again (seed 81393)."""
    over = run(queried(), failed(final=True), *([RELEASED] if ended else []))
    assert over.instance.phase == ((State.FAILED, None) if ended else (State.RELEASING, State.FAILED))
    again = step(over.instance, replace(failed(), service="compute-1"), PATIENCE)
    assert again.instance.state is over.instance.state
    (order,) = again.commands
    assert isinstance(order, Destroy)
    assert (order.attempt, order.host_uuid, order.service) == (1, host(1), "compute-1")
    refused_to = replace(failed(), code="destroy.protected")
    assert step(over.instance, refused_to, PATIENCE).commands == ()  # or each refusal would be the next order


@pytest.mark.parametrize(
    "since",
    [
        (),
        (claimed(),),
        (claimed(), spawned(attempt=2)),
        (claimed(), failed(2)),
        (DELETE,),
        (claimed(), DELETE),
        (claimed(), DELETE, e.Destroyed(at=125.0, attempt=2, host_uuid=host(2), service="s1")),
        (claimed(), DELETE, e.Destroyed(at=125.0, attempt=2, host_uuid=host(2), service="s1"), RELEASED),
    ],
    ids=lambda events: run(queried(), failed(), *events).instance.state.value,
)
def test_an_attempt_that_is_over_and_fails_once_more_is_cleaned_up_once_more(since: tuple[e.Event, ...]) -> None:
    """A second process of the service carried out a spawn that the first, which was killed, had answered: what it left
    half-built was on no report (seed 1795421151).
    """
    before = run(queried(), failed(), *since).instance
    once_more = run(failed(), start=before)
    assert (destroys(once_more), once_more.instance) == ([(1, host(1))], before)
    refused_there = replace(failed(), code="destroy.protected")
    assert destroys(run(refused_there, start=before)) == [], (
        "an order that is refused is not sent again because of that"
    )


def test_the_machine_that_is_wanted_outlives_a_late_failure_of_its_attempt() -> None:
    up = run(queried(), spawned()).instance
    again = run(failed(), start=up)
    assert (again.instance, again.commands) == (up, ())


# --- The schedulers query a build that has had no event for long: the record answers, or one is made in doubt.


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
