"""The instance state machine, pair by pair."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.cell import UNKNOWN_ATTEMPT, Destroy, InstanceSpec, Selection, Spawn
from bus.contracts.groups import GroupPolicy, ServerGroup
from bus.contracts.placement import Claim, ClaimOutcome, Release
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import FIRST_SEQUENCE, Instance, Look, State
from cell_conductor.domain.render import render
from cell_conductor.domain.rules import Patience, Step
from cell_conductor.domain.table import TABLE, IllegalStep, step, wanted

PATIENCE = Patience(cell="c1", ask_again_s=15.0, destroy_again_s=30.0, report_grace_s=30.0)
UUID = "00000000-0000-4000-8000-000000000001"


def host(n: int) -> str:
    return f"10000000-0000-4000-8000-{n:012d}"


def selection(n: int) -> Selection:
    return Selection(
        host_uuid=host(n), host=f"host-{n}", service="s1", allocations={host(n): {"VCPU": n}}, shapes={host(n): n}
    )


SPEC = InstanceSpec(instance_uuid=UUID, project_id="p", user_id="u")


def asked(hosts: int = 3, at: float = 100.0) -> e.BuildAsked:
    return e.BuildAsked(
        at=at,
        spec=SPEC,
        selections=tuple(selection(n) for n in range(1, hosts + 1)),
        consumer_generation=7,
        build_timeout_s=60.0,
        cause="why",
    )


def run(*happened: e.Event, start: Instance | None = None) -> Step:
    """The last step of a story."""
    stepped = Step(start or Instance(uuid=UUID))
    for event in happened:
        stepped = step(stepped.instance, event, PATIENCE)
    return stepped


def spawned(attempt: int = 1, n: int | None = None, at: float = 110.0) -> e.Spawned:
    return e.Spawned(at=at, attempt=attempt, host_uuid=host(n or attempt), service="s1")


def failed(attempt: int = 1, n: int | None = None, *, final: bool = False) -> e.SpawnFailed:
    return e.SpawnFailed(
        at=110.0, attempt=attempt, host_uuid=host(n or attempt), code="spawn.no_disk", reason="full", final=final
    )


def claimed(attempt: int = 2, option: int = 0, generation: int = 9) -> e.Claimed:
    outcomes = (ClaimOutcome.FULL,) * option + (ClaimOutcome.CLAIMED,)
    return e.Claimed(at=111.0, attempt=attempt, option=option, consumer_generation=generation, outcomes=outcomes)


def refused(attempt: int = 2, *, changed: bool = False) -> e.ClaimRefused:
    return e.ClaimRefused(
        at=111.0, attempt=attempt, consumer_changed=changed, outcomes=(ClaimOutcome.FULL, ClaimOutcome.RACED)
    )


DELETE = e.DeleteAsked(at=120.0)
TIMED_OUT = e.TimedOut(at=170.0)
RELEASED = e.Released(at=130.0)


def said(stepped: Step) -> list[BuildEvent]:
    return [command for command in stepped.commands if isinstance(command, BuildEvent)]


def destroys(stepped: Step) -> list[tuple[int, str]]:
    return [(c.attempt, c.host_uuid) for c in stepped.commands if isinstance(c, Destroy)]


def spawns(stepped: Step) -> list[tuple[int, str]]:
    return [(c.attempt, c.host_uuid) for c in stepped.commands if isinstance(c, Spawn)]


def test_total_over_states_and_events() -> None:
    assert set(TABLE) == set(State)
    for state, row in TABLE.items():
        assert set(row) == set(e.EVENTS), state


def test_every_state_is_reached_and_left_except_the_last() -> None:
    targets = {target for row in TABLE.values() for rule in row.values() if rule for target in rule.to}
    assert targets == set(State) - {State.ABSENT}
    ending = {state for state, row in TABLE.items() if not any(rule and rule.to for rule in row.values())}
    assert ending == {State.DELETED}


def test_docs_are_what_the_table_says() -> None:
    page = Path(__file__).parents[3] / "docs" / "states.md"
    assert page.read_text() == render(), "python -m cell_conductor.domain.render > docs/states.md"


def test_build_spawns_on_the_first_selection_and_announces() -> None:
    stepped = run(asked())
    spawn, event = stepped.commands
    assert isinstance(spawn, Spawn) and isinstance(event, BuildEvent)
    assert (spawn.attempt, spawn.host_uuid, spawn.allocations) == (1, host(1), {host(1): {"VCPU": 1}})
    assert (event.state, event.sequence, event.terminal) == (BuildState.BUILDING, FIRST_SEQUENCE, False)
    assert stepped.instance.deadline == 160.0


def test_success_is_terminal_and_forgets_the_alternates() -> None:
    stepped = run(asked(), spawned())
    (event,) = said(stepped)
    assert (event.state, event.terminal, event.sequence, event.host) == (BuildState.ACTIVE, True, 11, "host-1")
    assert stepped.instance.deadline is None and len(stepped.instance.selections) == 1
    assert [record.outcome for record in event.history] == ["active"]


def test_failure_destroys_there_and_asks_for_the_alternates_in_order() -> None:
    stepped = run(asked(), failed())
    assert stepped.instance.state is State.RECLAIMING
    assert destroys(stepped) == [(1, host(1))] and not said(stepped)
    claim = wanted(stepped.instance)
    assert isinstance(claim, Claim)
    assert (claim.attempt, claim.consumer_generation, claim.release_first) == (2, 7, True)
    assert [list(option.allocations) for option in claim.options] == [[host(2)], [host(3)]]
    assert claim.options[0].shapes == {host(2): 2}


def test_a_claimed_alternate_is_built_under_the_next_attempt() -> None:
    stepped = run(asked(), failed(), claimed(option=1))
    assert spawns(stepped) == [(2, host(3))]
    assert stepped.instance.consumer_generation == 9
    assert [(r.host, r.outcome, r.code) for r in stepped.instance.history] == [
        ("host-1", "failed", "spawn.no_disk"),
        ("host-2", "not_claimed", "full"),
    ]


def test_exhausted_before_any_claim_releases_first_then_fails_with_the_whole_history() -> None:
    over = run(asked(hosts=1), failed())
    assert over.instance.state is State.GIVING_UP and not said(over)
    assert wanted(over.instance) == Release(consumer=UUID, attempt=2)
    (event,) = said(run(RELEASED, start=over.instance))
    assert (event.state, event.terminal, event.code) == (BuildState.FAILED, True, "max_retries_exceeded")
    assert "host-1: failed (spawn.no_disk: full)" in event.reason
    assert len(event.history) == 1


def test_exhausted_by_the_claim_fences_what_may_be_on_its_way_then_fails() -> None:
    over = run(asked(), failed(), refused())
    assert wanted(over.instance) == Release(consumer=UUID, attempt=2), "a late copy of the claim of attempt 2"
    stepped = run(RELEASED, start=over.instance)
    (event,) = said(stepped)
    assert (stepped.instance.state, event.code, event.terminal) == (State.FAILED, "max_retries_exceeded", True)
    assert [r.code for r in event.history] == ["spawn.no_disk", "full", "raced"]
    assert wanted(stepped.instance) is None


def test_what_failed_and_was_forgotten_above_is_built_when_it_is_asked_for_anew() -> None:
    """Schedulers forget a failed build a day before its cell does: the new one stayed scheduled, and held its claim."""
    over = run(asked(hosts=1), failed(), RELEASED).instance
    assert run(asked(), start=over) == Step(over), "a copy of the same request"
    anew = run(replace(asked(), requested_at=9e5, at=9e5), start=over)
    assert spawns(anew) == [(1, host(1))] and anew.instance.state is State.BUILDING
    assert not anew.instance.history and not anew.instance.answered and not anew.instance.code
    (event,) = said(anew)
    assert event.sequence == over.sequence, "higher than all that was said of it"


def test_changed_consumer_is_fatal() -> None:
    """Trap 6."""
    stepped = run(asked(), failed(), refused(changed=True))
    assert stepped.instance.state is State.FAILED and not spawns(stepped)
    assert said(stepped)[0].code == "placement.consumer_changed"


def test_a_final_failure_tries_no_alternate() -> None:
    stepped = run(asked(), failed(final=True))
    assert stepped.instance.state is State.GIVING_UP
    assert said(run(RELEASED, start=stepped.instance))[0].code == "spawn.no_disk"


def test_a_host_that_never_answers_is_fenced_and_left() -> None:
    stepped = run(asked(), TIMED_OUT)
    assert (stepped.instance.state, destroys(stepped)) == (State.RECLAIMING, [(1, host(1))])
    assert stepped.instance.history[0].code == "spawn.timeout"


@pytest.mark.parametrize(
    "story",
    [
        (asked(), TIMED_OUT),
        (asked(), TIMED_OUT, claimed()),
        (asked(), TIMED_OUT, claimed(), spawned(2)),
        (asked(), TIMED_OUT, refused()),
        (asked(), TIMED_OUT, refused(), RELEASED),
        (asked(), TIMED_OUT, DELETE),
        (asked(hosts=1), TIMED_OUT, RELEASED),
        (asked(), TIMED_OUT, claimed(), DELETE),
    ],
)
def test_a_late_success_of_a_fenced_attempt_is_destroyed(story: tuple[e.Event, ...]) -> None:
    before = run(*story).instance
    stepped = step(before, spawned(1), PATIENCE)
    assert stepped.instance == before
    assert destroys(stepped) == [(1, host(1))] and len(stepped.commands) == 1


def test_an_attempt_never_commanded_is_destroyed() -> None:
    assert destroys(run(asked(), spawned(2))) == [(2, host(2))]
    assert destroys(run(asked(), spawned(1, n=3))) == [(1, host(3))]
    assert destroys(run(spawned())) == [(1, host(1))]


def test_delete_holds_the_allocation_until_the_host_has_destroyed() -> None:
    leaving = run(asked(), spawned(), DELETE)
    assert (leaving.instance.state, destroys(leaving)) == (State.DELETING, [(1, host(1))])
    assert wanted(leaving.instance) is None
    again = run(e.TimedOut(at=150.0), start=leaving.instance)
    assert destroys(again) == [(1, host(1))] and again.instance.deadline == 180.0 and wanted(again.instance) is None
    older = run(e.Destroyed(at=151.0, attempt=0, host_uuid=host(1)), start=again.instance)
    assert older.instance.state is State.DELETING
    other = run(e.Destroyed(at=151.0, attempt=1, host_uuid=host(2)), start=again.instance)
    assert other.instance.state is State.DELETING
    gone = run(e.Destroyed(at=152.0, attempt=1, host_uuid=host(1)), start=again.instance)
    assert wanted(gone.instance) == Release(consumer=UUID, attempt=2)
    (event,) = said(run(RELEASED, start=gone.instance))
    assert (event.state, event.terminal) == (BuildState.DELETED, True)


def test_delete_while_building_announces_one_terminal_event() -> None:
    leaving = run(asked(), DELETE)
    gone = run(e.Destroyed(at=1.0, attempt=1, host_uuid=host(1)), RELEASED, start=leaving.instance)
    assert [(s.state, s.terminal) for s in said(leaving) + said(gone)] == [
        (BuildState.DELETING, False),
        (BuildState.DELETED, True),
    ]


def test_delete_while_claiming_gives_the_alternate_back() -> None:
    waiting = run(asked(), failed(), DELETE)
    assert waiting.instance.state is State.ABANDONING
    assert isinstance(wanted(waiting.instance), Claim), "a claim may be under way: only its answer makes releasing safe"
    back = run(claimed(), start=waiting.instance)
    assert not spawns(back) and wanted(back.instance) == Release(consumer=UUID, attempt=3)
    assert run(refused(), start=waiting.instance).instance.state is State.RELEASING
    assert run(refused(changed=True), start=waiting.instance).instance.state is State.DELETED


def test_delete_before_its_build_starts_nothing_and_frees_the_claim() -> None:
    """Trap 8, C-5."""
    grave = run(DELETE)
    assert (grave.instance.state, grave.commands) == (State.TOMBSTONE, ())
    late = run(asked(), start=grave.instance)
    assert late.commands == () and wanted(late.instance) == Release(consumer=UUID, attempt=2)
    (event,) = said(run(RELEASED, start=late.instance))
    assert (event.state, event.terminal) == (BuildState.DELETED, True)


def test_delete_while_giving_up_ends_deleted_once() -> None:
    leaving = run(asked(hosts=1), failed(), DELETE)
    assert leaving.instance.state is State.RELEASING
    end = run(RELEASED, start=leaving.instance)
    assert [s.state for s in said(end)] == [BuildState.DELETED]
    assert run(RELEASED, start=end.instance).commands == ()


def test_delete_of_a_failed_instance() -> None:
    assert said(run(asked(), failed(), refused(), RELEASED, DELETE))[0].state is BuildState.DELETED


def test_report_finds_a_lost_success() -> None:
    runs = e.HostRuns(at=112.0, attempt=1, host_uuid=host(1), service="s1", seen_at=112.0)
    assert run(asked(), runs).instance.state is State.ACTIVE


def test_report_of_a_vanished_instance_fails_it_without_a_second_terminal_event() -> None:
    up = run(asked(), spawned(at=110.0))
    young = e.HostMissing(at=141.0, host_uuid=host(1), seen_at=139.9)
    assert run(young, start=up.instance).instance.state is State.ACTIVE
    lost = run(replace(young, seen_at=140.1), start=up.instance)
    assert lost.instance.state is State.GIVING_UP and destroys(lost) == [(1, host(1))]
    (event,) = said(run(RELEASED, start=lost.instance))
    assert (event.state, event.terminal, event.code) == (BuildState.FAILED, False, "instance.lost")


@pytest.mark.parametrize("ahead_s", [240.0, -240.0])
def test_a_host_whose_clock_is_minutes_off_neither_kills_a_young_instance_nor_hides_a_lost_one(ahead_s: float) -> None:
    """Its report's time was compared with ours: ahead it killed what it had not seen yet, behind it hid a loss."""
    up = run(asked(), replace(spawned(at=110.0), service="s1", ended_at=110.0 + ahead_s))
    looked = e.HostMissing(at=111.0, host_uuid=host(1), seen_at=109.0 + ahead_s, service=up.instance.here.service)
    assert run(looked, start=up.instance).instance.state is State.ACTIVE
    lost = run(replace(looked, seen_at=111.0 + ahead_s), start=up.instance)
    assert lost.instance.state is State.GIVING_UP
    other = replace(looked, seen_at=139.0, service="heir")
    assert run(other, start=up.instance).instance.state is State.ACTIVE


@pytest.mark.parametrize("set_by_s", [240.0, -240.0])
@pytest.mark.parametrize("after", [Look(5, 4), Look(6, 1)])
def test_a_host_whose_clock_is_set_neither_kills_a_young_instance_nor_hides_a_lost_one(
    set_by_s: float, after: Look
) -> None:
    """Set back after a look and before the build ended, its clock made the look the later, and the machine lost."""
    up = run(asked(), replace(spawned(at=110.0), ended_at=110.0 + set_by_s, look=Look(5, 3)))
    before = e.HostMissing(at=111.0, host_uuid=host(1), seen_at=109.0, service="s1", look=Look(5, 3))
    for earlier in (before, replace(before, look=Look(4, 9))):
        assert run(earlier, start=up.instance).instance.state is State.ACTIVE
    gone = replace(before, seen_at=111.0, look=after)
    assert run(gone, start=up.instance).instance.state is State.GIVING_UP


def test_what_a_report_brought_up_is_missed_by_a_later_look_only() -> None:
    seen = e.HostRuns(at=112.0, attempt=1, host_uuid=host(1), service="s1", seen_at=112.0, look=Look(5, 3))
    for up in (run(asked(), seen), run(asked(), spawned(at=110.0), replace(seen, service="heir"))):
        missed = e.HostMissing(
            at=1.0, host_uuid=host(1), seen_at=999.0, service=up.instance.here.service, look=Look(5, 3)
        )
        assert run(missed, start=up.instance).instance.state is State.ACTIVE
        missed = replace(missed, seen_at=1.0, look=Look(5, 4))
        assert run(missed, start=up.instance).instance.state is State.GIVING_UP


def test_a_host_that_says_no_look_is_judged_by_its_clock() -> None:
    """Its service is of a release that counted none, at the report or at the build."""
    for told, seen in ((None, Look(5, 4)), (Look(5, 3), None)):
        up = run(asked(), replace(spawned(at=110.0), ended_at=110.0, look=told))
        missed = e.HostMissing(at=111.0, host_uuid=host(1), seen_at=109.0, service="s1", look=seen)
        assert run(missed, start=up.instance).instance.state is State.ACTIVE
        assert run(replace(missed, seen_at=111.0), start=up.instance).instance.state is State.GIVING_UP


def test_a_young_build_is_not_killed_by_a_report() -> None:
    building = run(asked()).instance
    assert run(e.HostMissing(at=999.0, host_uuid=host(1), seen_at=999.0), start=building).instance == building


def test_a_report_that_it_is_gone_ends_a_delete_whose_answer_was_lost() -> None:
    leaving = run(asked(), spawned(), DELETE).instance
    assert run(e.HostMissing(at=1.0, host_uuid=host(1), seen_at=150.0), start=leaving).instance == leaving
    assert run(e.HostMissing(at=1.0, host_uuid=host(1), seen_at=150.1), start=leaving).instance.state is State.RELEASING


def test_an_unfulfilled_question_is_asked_again() -> None:
    waiting = run(asked(), failed()).instance
    again = run(e.TimedOut(at=125.0), start=waiting)
    assert again.instance.deadline == 140.0 and wanted(again.instance) == wanted(waiting)


def test_illegal_pairs_raise_with_the_history() -> None:
    with pytest.raises(IllegalStep, match=r"spawn\.no_disk"):
        run(RELEASED, start=run(asked(), failed(), claimed()).instance)
    with pytest.raises(IllegalStep):
        run(TIMED_OUT)
    with pytest.raises(IllegalStep, match="claim of attempt 2"):
        run(claimed(), start=run(asked()).instance)


def test_answers_to_older_questions_change_nothing() -> None:
    second = run(asked(), failed(), claimed(), failed(2)).instance
    assert second.state is State.RECLAIMING
    for late in (claimed(), refused(), claimed(option=1)):
        assert run(late, start=second).instance == second


def test_sequence_rises_with_every_announcement() -> None:
    instance, numbers = Instance(uuid=UUID), []
    story = (
        asked(),
        failed(),
        claimed(),
        spawned(2),
        DELETE,
        e.Destroyed(at=1.0, attempt=2, host_uuid=host(2)),
        RELEASED,
    )
    for event in story:
        stepped = step(instance, event, PATIENCE)
        instance = stepped.instance
        numbers += [s.sequence for s in said(stepped)]
    assert numbers == list(range(FIRST_SEQUENCE, FIRST_SEQUENCE + 5))


def test_a_machine_of_an_unknown_attempt_is_the_current_one_on_its_own_host_only() -> None:
    def runs(n: int) -> e.HostRuns:
        return e.HostRuns(at=120.0, attempt=UNKNOWN_ATTEMPT, host_uuid=host(n), service="s1", seen_at=120.0)

    building = run(asked()).instance
    assert step(building, runs(1), PATIENCE).instance.state is State.ACTIVE
    active = run(asked(), spawned()).instance
    assert step(active, runs(1), PATIENCE) == Step(active)
    (order,) = step(active, runs(2), PATIENCE).commands
    assert isinstance(order, Destroy) and order.host_uuid == host(2)


def test_a_host_that_never_confirms_is_asked_less_and_less_often() -> None:
    """Each order waits in the queue of a service that is away: at one every 30 s a day would fill it."""
    now = 200.0
    instance = run(asked(), spawned(), e.DeleteAsked(at=now)).instance
    orders, day = 0, now + 86_400.0
    waits: list[float] = []
    while instance.deadline is not None and instance.deadline < day:
        waits.append(instance.deadline - now)
        now = instance.deadline
        stepped = step(instance, e.TimedOut(at=now), PATIENCE)
        instance, orders = stepped.instance, orders + len(stepped.commands)
    assert waits[:5] == [30.0, 30.0, 60.0, 120.0, 240.0]
    assert max(waits) == PATIENCE.destroy_longest_s
    assert orders < 160


def orders(stepped: Step) -> list[tuple[str, str, int]]:
    return [(c.service, c.host_uuid, c.attempt) for c in stepped.commands if isinstance(c, Destroy)]


def reported(service: str, attempt: int = 1, n: int = 1) -> e.HostRuns:
    return e.HostRuns(at=125.0, attempt=attempt, host_uuid=host(n), service=service, seen_at=125.0)


def test_a_delete_follows_its_host_to_the_heir_of_a_dead_service() -> None:
    leaving = run(asked(), spawned(), DELETE)
    assert orders(leaving) == [("s1", host(1), 1)]
    resent = run(reported("heir"), start=leaving.instance)
    assert resent.instance.state is State.DELETING
    assert orders(resent) == [("heir", host(1), 1)]
    assert run(reported("heir"), start=resent.instance).commands == ()
    assert orders(run(TIMED_OUT, start=resent.instance)) == [("heir", host(1), 1)]


def test_a_delete_does_not_follow_what_is_not_its_own() -> None:
    leaving = run(asked(), spawned(), DELETE)
    older = run(reported("heir", attempt=9, n=2), start=leaving.instance)
    assert orders(older) == [("heir", host(2), 9)]
    assert older.instance == leaving.instance


def test_an_active_machine_follows_its_host_so_that_its_delete_is_sent_to_the_heir() -> None:
    moved = run(asked(), spawned(), reported("heir"))
    assert (moved.instance.state, moved.commands) == (State.ACTIVE, ())
    assert orders(run(DELETE, start=moved.instance)) == [("heir", host(1), 1)]


def test_a_build_that_the_heir_reports_is_the_heirs() -> None:
    up = run(asked(), reported("heir"))
    assert up.instance.state is State.ACTIVE
    assert orders(run(DELETE, start=up.instance)) == [("heir", host(1), 1)]


def test_alternates_are_held_to_the_rule_of_the_server_group() -> None:
    apart = ServerGroup(uuid=host(99), policy=GroupPolicy.ANTI_AFFINITY)
    stepped = run(replace(asked(), server_group=apart), failed(1))
    claim = wanted(stepped.instance)
    assert isinstance(claim, Claim)
    assert claim.server_group == apart
    assert [option.host for option in claim.options] == [host(2), host(3)]
    # Ruled out is as good as full: the next state is the same, and the history says it.
    refused = e.ClaimRefused(at=111.0, attempt=2, outcomes=(ClaimOutcome.RULED_OUT, ClaimOutcome.FULL))
    over = run(refused, start=stepped.instance).instance
    assert over.state is State.GIVING_UP
    assert [record.code for record in over.history[-2:]] == ["ruled_out", "full"]
