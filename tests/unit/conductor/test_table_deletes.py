"""The instance state machine: deletes, at every point of a life."""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.build import BuildState
from bus.contracts.cell import FoundMachine
from bus.contracts.placement import Claim, Release
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import FORGOTTEN_ATTEMPTS, Instance, State
from cell_conductor.domain.steps import Step
from cell_conductor.domain.table import question_of, step
from tests.unit.conductor.scenario import (
    DELETE,
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
    orders,
    queried,
    refused,
    reported,
    run,
    spawned,
    spawns,
)


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
