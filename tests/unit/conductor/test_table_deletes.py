"""The instance state machine: deletes, hosts' own reports, and compute services that are down."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.build import BuildState
from bus.contracts.cell import UNKNOWN_ATTEMPT, Destroy, FoundMachine
from bus.contracts.placement import Claim, Release
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import Instance, Phase, State
from cell_conductor.domain.report import rescan_id
from cell_conductor.domain.set_back import FORGOTTEN_ATTEMPTS
from cell_conductor.domain.steps import Step
from cell_conductor.domain.table import question_of, step
from tests.unit.conductor.scenario import (
    DELETE,
    DEPLOYMENT,
    PATIENCE,
    RELEASED,
    SPEC,
    TIMED_OUT,
    UUID,
    announced,
    claimed,
    destroys,
    failed,
    host,
    missed,
    on,
    orders,
    phase_of,
    queried,
    refused,
    reported,
    run,
    spawned,
    spawns,
)

# --- The instance state machine: deletes, at every point of a life.


def test_delete_holds_the_allocation_until_the_host_has_destroyed() -> None:
    leaving = run(queried(), spawned(), DELETE)
    assert (leaving.instance.phase, destroys(leaving)) == ((State.DESTROYING, State.DELETED), [(1, host(1))])
    assert question_of(leaving.instance) is None
    again = run(e.TimedOut(at=150.0), start=leaving.instance)
    assert (
        destroys(again) == [(1, host(1))] and again.instance.deadline == 180.0 and question_of(again.instance) is None
    )
    older = run(e.Destroyed(at=151.0, attempt=0, host_uuid=host(1), service="s1"), start=again.instance)
    assert older.instance.phase == (State.DESTROYING, State.DELETED)
    other = run(e.Destroyed(at=151.0, attempt=1, host_uuid=host(2), service="s1"), start=again.instance)
    assert other.instance.phase == (State.DESTROYING, State.DELETED)
    gone = run(e.Destroyed(at=152.0, attempt=1, host_uuid=host(1), service="s1"), start=again.instance)
    assert question_of(gone.instance) == Release(consumer=UUID, attempt=2)
    (event,) = announced(run(RELEASED, start=gone.instance))
    assert (event.state, event.terminal) == (BuildState.DELETED, True)


def test_a_delete_for_another_project_changes_nothing() -> None:
    """An operator, or a request that another client has made under this uuid, names the wrong one."""
    up = run(queried(), spawned()).instance
    theirs = replace(DELETE, project_id="theirs")
    assert run(theirs, start=up) == Step(up)
    assert run(replace(DELETE, project_id=SPEC.project_id), start=up).instance.phase == (
        State.DESTROYING,
        State.DELETED,
    )
    assert run(theirs).instance.state is State.TOMBSTONE, "it is no instance here"


def test_a_second_delete_is_answered_with_the_end_once_more() -> None:
    """After a restore of the schedulers, to before the delete, its client waited for ever: it was taken for a copy."""
    deleted = run(
        queried(), spawned(), DELETE, e.Destroyed(at=152.0, attempt=1, host_uuid=host(1), service="s1"), RELEASED
    )
    again = run(DELETE, start=deleted.instance)
    (first,), (second,) = announced(deleted), announced(again)
    assert again.instance == deleted.instance and not destroys(again)
    assert (second.state, second.sequence, second.terminal) == (BuildState.DELETED, first.sequence, True)


def test_why_a_host_cannot_destroy_is_announced_once_for_each_reason() -> None:
    def cannot(reason: str, *, attempt: int = 1, at_host: int = 1, code: str = "destroy.protected") -> e.SpawnFailed:
        return e.SpawnFailed(at=5.0, attempt=attempt, host_uuid=host(at_host), code=code, reason=reason)

    leaving = run(queried(), spawned(), DELETE)
    held = run(cannot("the ledger is on it"), start=leaving.instance)
    (event,) = announced(held)
    assert (event.state, event.terminal) == (BuildState.DELETING, False)
    assert (event.code, event.reason) == ("destroy.protected", "the ledger is on it")
    assert (held.instance.phase, held.instance.deadline) == (
        (State.DESTROYING, State.DELETED),
        leaving.instance.deadline,
    )
    for same in (
        cannot("the ledger is on it"),
        cannot("other", attempt=2),
        cannot("other", at_host=2),
        cannot("a new attempt came", code="spawn.superseded"),
    ):
        assert run(same, start=held.instance).instance == held.instance
    (event,) = announced(run(cannot("it is locked", code="destroy.failed"), start=held.instance))
    assert (event.code, event.reason) == ("destroy.failed", "it is locked")
    gone = run(e.Destroyed(at=152.0, attempt=1, host_uuid=host(1), service="s1"), RELEASED, start=held.instance)
    (event,) = announced(gone)
    assert (event.state, event.code, event.reason) == (BuildState.DELETED, "", "")


def test_delete_while_building_announces_one_terminal_event() -> None:
    leaving = run(queried(), DELETE)
    gone = run(e.Destroyed(at=1.0, attempt=1, host_uuid=host(1), service="s1"), RELEASED, start=leaving.instance)
    assert [(s.state, s.terminal) for s in announced(leaving) + announced(gone)] == [
        (BuildState.DELETING, False),
        (BuildState.DELETED, True),
    ]


def test_delete_while_claiming_gives_the_alternate_back() -> None:
    waiting = run(queried(), failed(), DELETE)
    assert waiting.instance.phase == (State.CLAIMING, State.DELETED)
    assert isinstance(question_of(waiting.instance), Claim), (
        "a claim may be under way: only its answer makes releasing safe"
    )
    back = run(claimed(), start=waiting.instance)
    assert not spawns(back) and question_of(back.instance) == Release(consumer=UUID, attempt=3)
    assert run(refused(), start=waiting.instance).instance.phase == (State.RELEASING, State.DELETED)
    assert run(refused(changed=True), start=waiting.instance).instance.state is State.DELETED


def test_delete_before_its_build_starts_nothing_and_frees_the_claim() -> None:
    grave = run(DELETE)
    assert (grave.instance.state, grave.commands) == (State.TOMBSTONE, ())
    late = run(queried(), start=grave.instance)
    assert late.commands == () and question_of(late.instance) == Release(consumer=UUID, attempt=2)
    (event,) = announced(run(RELEASED, start=late.instance))
    assert (event.state, event.terminal) == (BuildState.DELETED, True)


def test_delete_while_giving_up_ends_deleted_once() -> None:
    leaving = run(queried(hosts=1), failed(), DELETE)
    assert leaving.instance.phase == (State.RELEASING, State.DELETED)
    end = run(RELEASED, start=leaving.instance)
    assert [s.state for s in announced(end)] == [BuildState.DELETED]
    assert run(RELEASED, start=end.instance).commands == ()


def test_delete_of_a_failed_instance() -> None:
    assert announced(run(queried(), failed(), refused(), RELEASED, DELETE))[0].state is BuildState.DELETED


def test_a_host_that_never_confirms_is_queried_less_and_less_often() -> None:
    """Each order waits in the queue of a service that is away: at one every 30 s a day would fill it."""
    now = 200.0
    instance = run(queried(), spawned(), e.DeleteRequested(at=now)).instance
    orders, day = 0, now + 86_400.0
    waits: list[float] = []
    while instance.deadline is not None and instance.deadline < day:
        waits.append(instance.deadline - now)
        now = instance.deadline
        stepped = step(instance, e.TimedOut(at=now), PATIENCE)
        instance, orders = stepped.instance, orders + len(stepped.commands)
    assert waits[:5] == [30.0, 30.0, 60.0, 120.0, 240.0]
    assert max(waits) == PATIENCE.destroy_retry_max_s
    assert orders < 160


def test_a_delete_follows_its_host_to_the_heir_of_a_dead_service() -> None:
    leaving = run(queried(), spawned(), DELETE)
    assert orders(leaving) == [("s1", host(1), 1)]
    resent = run(reported("heir"), start=leaving.instance)
    assert resent.instance.phase == (State.DESTROYING, State.DELETED)
    assert orders(resent) == [("heir", host(1), 1)]
    assert run(reported("heir"), start=resent.instance).commands == ()
    assert orders(run(TIMED_OUT, start=resent.instance)) == [("heir", host(1), 1)]


def test_a_delete_does_not_follow_what_is_not_its_own() -> None:
    leaving = run(queried(), spawned(), DELETE)
    older = run(reported("heir", attempt=9, n=2), start=leaving.instance)
    assert orders(older) == [("heir", host(2), 9)]
    assert older.instance == leaving.instance


def test_an_active_machine_follows_its_host_so_that_its_delete_is_sent_to_the_heir() -> None:
    moved = run(queried(), spawned(), reported("heir"))
    assert (moved.instance.state, moved.commands) == (State.ACTIVE, ())
    assert orders(run(DELETE, start=moved.instance)) == [("heir", host(1), 1)]


def forgotten(*machines: FoundMachine, start: Instance | None = None) -> Step:
    return run(e.DeleteRequested(at=120.0, project_id="p", found=machines), start=start)


def machine_of(n: int, attempt: int, **other: object) -> FoundMachine:
    known = FoundMachine(
        instance_uuid=UUID, host_uuid=host(n), host=f"host-{n}", service="s1", attempt=attempt, project_id="p"
    )
    return replace(known, **other)


def test_a_delete_of_what_the_record_has_forgotten_destroys_what_is_found_and_is_answered() -> None:
    leaving = forgotten(machine_of(1, 1, built=False), machine_of(2, 3))
    assert sorted(destroys(leaving)) == [(1, host(1)), (3, host(2))]
    assert (leaving.instance.phase, leaving.instance.host_uuid) == ((State.DESTROYING, State.DELETED), host(2))
    releasing = run(e.Destroyed(at=130.0, attempt=3, host_uuid=host(2), service="s1"), start=leaving.instance)
    release = question_of(releasing.instance)
    assert isinstance(release, Release) and release.attempt is not None
    assert release.attempt > 3 + FORGOTTEN_ATTEMPTS, "the book may have an attempt that is forgotten"
    (event,) = announced(run(RELEASED, start=releasing.instance))
    assert (event.state, event.terminal, event.project_id) == (BuildState.DELETED, True, "p")


def test_a_delete_of_what_no_service_has_is_answered_also_after_its_tombstone() -> None:
    for before in (Instance(uuid=UUID), run(DELETE).instance):
        releasing = forgotten(start=before)
        assert (releasing.instance.phase, destroys(releasing)) == ((State.RELEASING, State.DELETED), [])
        (event,) = announced(run(RELEASED, start=releasing.instance))
        assert (event.state, event.terminal, event.host) == (BuildState.DELETED, True, None)


def test_another_projects_machine_is_not_ordered_destroyed_by_a_delete() -> None:
    assert destroys(forgotten(machine_of(1, 1, project_id="theirs"))) == []


# --- The instance state machine: what a host's own report of its machines changes.


def test_report_finds_a_lost_success() -> None:
    runs = e.HostRuns(at=112.0, attempt=1, host_uuid=host(1), service="s1")
    assert run(queried(), runs).instance.state is State.ACTIVE


def test_report_of_a_vanished_instance_fails_it_without_a_second_terminal_event() -> None:
    up = run(queried(), spawned(at=110.0)).instance
    lost = run(missed(up), start=up)
    assert lost.instance.phase == (State.RELEASING, State.FAILED) and destroys(lost) == [(1, host(1))]
    (event,) = announced(run(RELEASED, start=lost.instance))
    assert (event.state, event.terminal, event.code) == (BuildState.FAILED, False, "instance.lost")


def test_an_unasked_destroyed_of_an_active_instance_waits_for_a_report() -> None:
    """One result made it lost and released its allocation, past the breaker, though its machine might still run."""
    up = run(queried(), spawned(at=110.0)).instance
    for attempt in (1, 2):
        reported_gone = run(e.Destroyed(at=150.0, attempt=attempt, host_uuid=host(1), service="s1"), start=up)
        assert reported_gone.instance == up and not reported_gone.commands
    lost = run(missed(up), start=up).instance
    assert lost.phase == (State.RELEASING, State.FAILED)
    leaving = run(DELETE, e.Destroyed(at=152.0, attempt=1, host_uuid=host(1), service="s1"), start=up).instance
    assert leaving.phase == (State.RELEASING, State.DELETED), "the answer to a destroy of ours is accepted as before"


@pytest.mark.parametrize("service", ["s1", "heir"])
@pytest.mark.parametrize("at", [State.ACTIVE, State.RESIZED, (State.DESTROYING, State.DELETED)])
def test_a_scan_that_may_be_older_than_the_record_ends_nothing(service: str, at: State | Phase) -> None:
    """Seed 61245 at d0562af: a node's former service had looked before the build, and by its clock long after it.
    Seed 60191 at f11870b: a paused conductor took a report after the delete, and released what still ran. A host whose
    clock was minutes ahead killed a young instance, and one whose clock was behind hid a lost one.
    """
    state, then = phase_of(at)
    record = replace(run(queried(), spawned(at=110.0)).instance, state=state, then=then)
    none = e.HostMissing(at=999.0, host_uuid=host(1), service=service)
    earlier = replace(record, since=record.since - 1.0)
    for one in (none, *(missed(of, service=service) for of in (earlier, replace(record, attempt=2)))):
        assert run(one, start=record) == Step(record)
    if state is not State.RESIZED:
        assert run(missed(record, service=service), start=record).instance.state is not state


def test_a_young_build_is_not_killed_by_a_report() -> None:
    building = run(queried()).instance
    assert run(missed(building), start=building).instance == building


def runs(attempt: int, n: int = 1, *, built: bool = True) -> e.HostRuns:
    return e.HostRuns(at=320.0, attempt=attempt, host_uuid=host(n), service="s1", built=built)


def test_without_a_record_nothing_is_destroyed() -> None:
    """An empty database destroyed every machine of its cell within seconds."""
    for event in (runs(1), runs(UNKNOWN_ATTEMPT), spawned()):
        assert run(event) == Step(Instance(uuid=UUID))


def test_what_is_newer_than_its_record_is_kept() -> None:
    """A database that was restored from a backup does not know what was commanded since."""
    failed_twice = run(queried(hosts=1), failed(), RELEASED).instance
    for before in (run(queried()).instance, run(queried(), spawned()).instance, failed_twice):
        for event in (runs(2), runs(2, 2), runs(1, 2), runs(UNKNOWN_ATTEMPT), runs(UNKNOWN_ATTEMPT, 2), spawned(2)):
            assert step(before, event, PATIENCE) == Step(before), (before.state, event)


def test_what_its_record_proves_over_is_destroyed() -> None:
    second = run(queried(), failed(), claimed(), spawned(2)).instance
    over = run(queried(hosts=1), failed(), RELEASED).instance
    gone = run(
        queried(), spawned(), DELETE, e.Destroyed(at=1.0, attempt=1, host_uuid=host(1), service="s1"), RELEASED
    ).instance
    buried = run(DELETE).instance
    for before, older in ((second, runs(1)), (over, runs(1)), (gone, runs(1)), (gone, runs(5, 3)), (buried, runs(1))):
        event = replace(older, rescans=(rescan_id(before),))
        if before.state in (State.ACTIVE, State.FAILED):
            assert step(before, older, PATIENCE) == Step(before), "it may be gone by now"
        (order,) = step(before, event, PATIENCE).commands
        assert isinstance(order, Destroy) and (order.attempt, order.host_uuid) == (event.attempt, event.host_uuid)
        assert order.deployment == DEPLOYMENT


def test_a_machine_that_may_still_be_building_is_not_active() -> None:
    building = run(queried()).instance
    assert step(building, runs(1, built=False), PATIENCE) == Step(building)
    assert step(building, runs(1), PATIENCE).instance.state is State.ACTIVE


def test_a_build_that_the_heir_reports_is_the_heirs() -> None:
    up = run(queried(), reported("heir"))
    assert up.instance.state is State.ACTIVE
    assert orders(run(DELETE, start=up.instance)) == [("heir", host(1), 1)]


# --- The instance state machine: compute services that are down.


LOST = e.ServiceLost(at=112.0, service="s1", code="service.silent", reason="no heartbeat")


def options(stepped: Step) -> list[str]:
    claim = question_of(stepped.instance)
    assert isinstance(claim, Claim)
    return [next(iter(option.allocations)) for option in claim.options]


def test_a_build_leaves_a_silent_service_for_the_first_host_of_another() -> None:
    building = run(on("s1", "s1", "s2")).instance
    stepped = run(LOST, down="s1", start=building)
    assert stepped.instance.phase == (State.CLAIMING, State.BUILDING) and options(stepped) == [host(3)]
    assert orders(stepped) == [("s1", host(1), 1)], "what may run there is fenced, for when the service is back"
    assert [(r.host, r.outcome, r.code) for r in stepped.instance.history] == [
        ("host-1", "failed", "service.silent"),
        ("host-2", "not_tried", "service.silent"),
    ]
    moved = run(claimed(), down="s1", start=stepped.instance)
    assert spawns(moved) == [(2, host(3))]


def test_the_late_active_of_the_lost_attempt_loses_and_its_machine_is_destroyed() -> None:
    building = run(on("s1", "s2")).instance
    moved = run(LOST, claimed(), down="s1", start=building).instance
    for start in (moved, run(spawned(2), start=moved).instance):
        late = run(spawned(1), start=start)
        assert destroys(late) == [(1, host(1))] and late.instance is start and not announced(late)


@pytest.mark.parametrize("services", [("s1",), ("s1", "s1"), ("s1", "s2")])
def test_a_build_without_a_living_alternate_waits_for_its_deadline(services: tuple[str, ...]) -> None:
    building = run(on(*services)).instance
    down = "s1 s2"
    assert run(LOST, down=down, start=building) == Step(building)
    up = run(spawned(), down=down, start=building)
    assert up.instance.state is State.ACTIVE, "it came back in time"
    over = run(TIMED_OUT, TIMED_OUT, RELEASED, down=down, start=building)
    assert over.instance.state is State.FAILED and over.instance.code == "max_retries_exceeded"
    assert f"1 of {len(services)} hosts tried" in over.instance.reason, "no other host of a service that is down"


def test_a_build_elsewhere_is_left_alone() -> None:
    building = run(on("s2", "s1")).instance
    assert run(LOST, down="s1", start=building) == Step(building)


@pytest.mark.parametrize("then", [(spawned(),), (failed(),), (failed(), DELETE), (DELETE,), (spawned(), DELETE)])
def test_nothing_but_a_build_under_way_is_moved(then: tuple[e.Event, ...]) -> None:
    """An active instance of a silent service may run, and a delete waits until its host has confirmed it."""
    before = run(on("s1", "s1", "s2"), *then).instance
    assert run(LOST, down="s1", start=before) == Step(before)


def test_alternates_are_not_tried_where_the_service_is_down() -> None:
    stepped = run(on("s1", "s2", "s3"), failed(), down="s2")
    assert options(stepped) == [host(3)]
    none = run(on("s1", "s2"), failed(), RELEASED, down="s2")
    (event,) = announced(none)
    assert (event.state, event.terminal, event.code) == (BuildState.FAILED, True, "max_retries_exceeded")
    assert "host-2: not_tried, service.silent" in event.reason and "1 of 2 hosts tried" in event.reason


def test_a_question_of_stays_the_same_when_a_service_comes_back_or_goes() -> None:
    asking = run(on("s1", "s2", "s3"), failed(), down="s2").instance
    question = question_of(asking)
    for down in ("", "s2", "s3"):
        assert question_of(run(LOST, e.TimedOut(at=130.0), down=down, start=asking).instance) == question


def test_a_build_that_comes_for_a_service_that_is_down_begins_elsewhere() -> None:
    stepped = run(on("s1", "s1", "s2"), down="s1")
    assert stepped.instance.phase == (State.CLAIMING, State.BUILDING) and options(stepped) == [host(3)]
    assert stepped.commands == (), "nothing was begun there: nothing is to be destroyed, or announced"
    moved = run(claimed(), down="s1", start=stepped.instance)
    assert spawns(moved) == [(2, host(3))] and [event.state for event in announced(moved)] == [BuildState.BUILDING]
    alone = run(on("s1", "s1"), down="s1")
    assert spawns(alone) == [(1, host(1))], "there is nowhere else: its order waits for the service"


def test_a_machine_on_the_host_that_a_build_passed_over_is_another_records_and_kept() -> None:
    """Seed 13006: the cell was set back to before the build; handed in again it passed over the host that ran it."""
    passed = run(on("s1", "s2"), down="s1").instance
    moved = run(claimed(), start=passed).instance
    up = run(spawned(2), start=moved).instance
    for record in (passed, moved, up):
        for late in (spawned(1), e.HostRuns(at=120.0, attempt=1, host_uuid=host(1), service="s1")):
            assert run(late, start=record) == Step(record)
    leaving = run(DELETE, start=up).instance
    assert destroys(run(spawned(1), start=leaving)) == [(1, host(1))], "a client's delete is for whatever attempt"
