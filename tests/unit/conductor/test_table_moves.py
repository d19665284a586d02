"""Moves as scenarios of the table: what is commanded, claimed and announced; each way back ends on the source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from msgspec.structs import replace

from bus.contracts.base import Message
from bus.contracts.cell import Destroy, Spawn
from bus.contracts.moves import (
    RESCUE_FAILED,
    CellMove,
    ChangeKind,
    ChangeMachine,
    Condition,
    MoveEvent,
    MoveKind,
    MoveState,
)
from bus.contracts.placement import Claim, ClaimOutcome, Release, Revert
from bus.persistence.outbox import OutboxMessage
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import Instance, Power, ScanId, State
from cell_conductor.domain.leases import Lease, LeaseState
from cell_conductor.domain.move_events import condition_of
from cell_conductor.domain.proof import is_over, rescan_id
from cell_conductor.domain.steps import Step
from cell_conductor.domain.table import question_of, step
from cell_conductor.engine import Transition, _may_be_redone
from tests.unit.conductor.scenario import PATIENCE, SPEC, UUID, host, queried, run, selection, spawned

MOVE = "d0000000-0000-4000-8000-000000000001"
OTHER = "d0000000-0000-4000-8000-000000000002"
SERVICE_DOWN = replace(PATIENCE, down={"s1": Lease(service="s1", epoch=1, state=LeaseState.SILENT)})


def request(
    kind: MoveKind = MoveKind.MIGRATE, *hosts: int, request_id: str = MOVE, **fields: object
) -> e.MoveRequested:
    message = CellMove(
        request_id=request_id,
        instance_uuid=UUID,
        project_id="p",
        kind=kind,
        selections=tuple(selection(n) for n in hosts),
        **fields,  # type: ignore[arg-type]
    )
    return e.MoveRequested(at=200.0, request=message, cause=request_id)


def active() -> Instance:
    """On host 1, attempt 1."""
    return run(queried(hosts=1), spawned()).instance


def claimed(attempt: int = 2, option: int = 0) -> e.Claimed:
    return e.Claimed(at=201.0, attempt=attempt, option=option, consumer_generation=9)


def refused(attempt: int = 2) -> e.ClaimRefused:
    return e.ClaimRefused(at=201.0, attempt=attempt, outcomes=(ClaimOutcome.FULL,))


def changes(stepped: Step) -> list[ChangeMachine]:
    return [one for one in stepped.commands if isinstance(one, ChangeMachine)]


def ended(instance: Instance, n: int, attempt: int, *, done: bool = True, **fields: object) -> e.ChangeEnded:
    assert instance.move is not None
    return e.ChangeEnded(
        at=202.0,
        attempt=attempt,
        order=instance.move.order,
        host_uuid=host(n),
        service="s1",
        done=done,
        **fields,  # type: ignore[arg-type]
    )


def announced(*commands: Message) -> list[tuple[MoveKind, MoveState, bool, str]]:
    return [(m.kind, m.state, m.terminal, m.code) for m in commands if isinstance(m, MoveEvent)]


class Scenario:
    """An instance, and everything that was commanded and announced since."""

    def __init__(self, instance: Instance, timeouts: object = PATIENCE) -> None:
        self.instance = instance
        self.commands: list[Message] = []
        self.timeouts = timeouts

    def apply(self, *happened: e.Event) -> Step:
        stepped = Step(self.instance)
        for event in happened:
            stepped = step(self.instance, event, self.timeouts)  # type: ignore[arg-type]
            self.instance = stepped.instance
            self.commands += stepped.commands
        return stepped

    def end(self, n: int, attempt: int, *, done: bool = True, **fields: object) -> Step:
        return self.apply(ended(self.instance, n, attempt, done=done, **fields))

    @property
    def terminals(self) -> list[tuple[MoveKind, MoveState, str]]:
        return [(m.kind, m.state, m.code) for m in self.commands if isinstance(m, MoveEvent) and m.terminal]

    @property
    def destroys(self) -> list[tuple[int, str]]:
        return [(m.attempt, m.host_uuid) for m in self.commands if isinstance(m, Destroy)]

    @property
    def spawns(self) -> list[Spawn]:
        return [m for m in self.commands if isinstance(m, Spawn)]


def begun(kind: MoveKind = MoveKind.MIGRATE, *hosts: int, **fields: object) -> Scenario:
    made = Scenario(active())
    made.apply(request(kind, *hosts, **fields))
    return made


def to_resized(kind: MoveKind = MoveKind.MIGRATE, **fields: object) -> Scenario:
    made = begun(kind, 2, 3, **fields)
    made.apply(claimed())
    made.end(2, 2)
    made.end(1, 1)
    made.apply(spawned(attempt=2, at=210.0))
    return made


def test_a_cold_migration_from_claim_to_confirm() -> None:
    made = begun(MoveKind.MIGRATE, 2, 3)
    question = question_of(made.instance)
    assert isinstance(question, Claim)
    assert (question.attempt, question.release_first, len(question.options)) == (2, False, 2)
    assert question.migration is not None
    assert question.migration.uuid == MOVE
    assert made.instance.state is State.CLAIMING
    (check,) = changes(made.apply(claimed()))
    assert (check.change, check.host_uuid, check.attempt) == (ChangeKind.CHECK, host(2), 2)
    (stop,) = changes(made.end(2, 2))
    assert (stop.change, stop.host_uuid, stop.attempt, stop.to_host) == (ChangeKind.HAND_OVER, host(1), 1, host(2))
    assert stop.order > check.order
    assert not made.spawns
    made.end(1, 1)
    (spawn,) = made.spawns
    assert (spawn.attempt, spawn.host_uuid) == (2, host(2))
    assert spawn.origin is not None
    assert (spawn.origin.host_uuid, spawn.origin.runs) == (host(1), True)
    assert made.destroys == []  # before the destination is active the source is never given up
    made.apply(spawned(attempt=2, at=210.0))
    assert made.instance.state is State.RESIZED
    assert made.terminals == [(MoveKind.MIGRATE, MoveState.DONE, "")]
    assert made.destroys == []
    made.apply(request(MoveKind.CONFIRM, request_id=OTHER))
    assert (made.instance.state, made.destroys) == (State.CONFIRMING, [(1, host(1))])
    made.apply(e.Destroyed(at=220.0, attempt=1, host_uuid=host(1)))
    released = question_of(made.instance)
    assert isinstance(released, Release)
    assert released.consumer == MOVE
    made.apply(e.Released(at=221.0, consumer=MOVE))
    assert (made.instance.state, made.instance.host_uuid, made.instance.attempt) == (State.ACTIVE, host(2), 2)
    assert made.instance.move is None
    assert made.terminals[1:] == [(MoveKind.CONFIRM, MoveState.DONE, "")]


def test_a_copy_of_a_request_that_has_ended_gets_its_end_again() -> None:
    made = to_resized()
    made.apply(request(MoveKind.MIGRATE, 2, 3))
    assert made.instance.state is State.RESIZED
    made.apply(request(MoveKind.REVERT, request_id=OTHER))
    made.apply(request(MoveKind.MIGRATE, 2, 3))
    assert made.terminals == [(MoveKind.MIGRATE, MoveState.DONE, "")] * 2
    made = begun(MoveKind.MIGRATE, 1)
    made.apply(request(MoveKind.MIGRATE, 2))
    assert made.terminals == [(MoveKind.MIGRATE, MoveState.REFUSED, "move.no_host")] * 2


def test_a_reverted_move_destroys_the_destination_before_the_source_starts() -> None:
    made = to_resized()
    made.apply(request(MoveKind.REVERT, request_id=OTHER))
    assert (made.instance.state, made.destroys) == (State.UNDOING, [(2, host(2))])
    assert question_of(made.instance) is None
    made.apply(e.Destroyed(at=220.0, attempt=2, host_uuid=host(2)))
    question = question_of(made.instance)
    assert isinstance(question, Revert)
    assert (question.attempt, question.source_attempt) == (3, 1)
    (start,) = changes(made.apply(e.Reverted(at=221.0, attempt=3, consumer_generation=11)))
    assert (start.change, start.host_uuid, start.attempt) == (ChangeKind.START, host(1), 1)
    made.end(1, 1, runs=True)
    assert (made.instance.state, made.instance.host_uuid, made.instance.attempt) == (State.ACTIVE, host(1), 1)
    assert made.terminals == [(MoveKind.MIGRATE, MoveState.DONE, ""), (MoveKind.REVERT, MoveState.DONE, "")]
    # The numbers that the move has used are behind it: what they may still bring is over, the source is not.
    assert is_over(made.instance, 2, host(2))
    assert not is_over(made.instance, 1, host(1))
    assert not is_over(made.instance, 4, host(2))
    made.apply(request(MoveKind.MIGRATE, 2, request_id=OTHER.replace("2", "3")))
    question = question_of(made.instance)
    assert isinstance(question, Claim)
    assert question.attempt == 4


def test_the_time_confirms_and_a_late_revert_is_refused() -> None:
    made = to_resized(auto_confirm_s=5.0)
    assert made.instance.deadline == 215.0
    made.apply(e.TimedOut(at=215.0), request(MoveKind.REVERT, request_id=OTHER))
    assert made.instance.state is State.CONFIRMING
    assert made.terminals[1:] == [(MoveKind.REVERT, MoveState.REFUSED, "move.too_late")]


def test_a_revert_and_then_the_time_reverts() -> None:
    made = to_resized(auto_confirm_s=5.0)
    made.apply(request(MoveKind.REVERT, request_id=OTHER), e.TimedOut(at=245.0))
    assert made.instance.state is State.UNDOING


@pytest.mark.parametrize("code", ["check", "spawn"])
def test_a_destination_that_fails_is_followed_by_the_next(code: str) -> None:
    made = begun(MoveKind.MIGRATE, 2, 3)
    made.apply(claimed())
    if code == "check":
        made.end(2, 2, done=False, code="host.disabled")
        assert made.destroys == []
    else:
        made.end(2, 2)
        made.end(1, 1)
        made.apply(e.SpawnFailed(at=210.0, attempt=2, host_uuid=host(2), code="spawn.no_disk"))
        assert made.destroys == [(2, host(2))]
    question = question_of(made.instance)
    assert isinstance(question, Claim)
    assert (question.attempt, question.release_first, len(question.options)) == (3, True, 1)
    made.apply(claimed(3))
    made.end(3, 3)
    if code == "check":
        made.end(1, 1)
    assert [(spawn.attempt, spawn.host_uuid) for spawn in made.spawns][-1] == (3, host(3))
    made.apply(spawned(attempt=3, at=220.0))
    assert (made.instance.state, made.instance.attempt) == (State.RESIZED, 3)
    event = next(m for m in made.commands if isinstance(m, MoveEvent) and m.terminal)
    assert [record.outcome for record in event.history] == ["failed", "active"]


def test_without_an_alternate_the_instance_is_active_where_it_was() -> None:
    made = begun(MoveKind.MIGRATE, 2)
    made.apply(claimed())
    made.end(2, 2)
    made.end(1, 1)
    made.apply(e.SpawnFailed(at=210.0, attempt=2, host_uuid=host(2), code="spawn.no_disk"))
    made.apply(e.Destroyed(at=211.0, attempt=2, host_uuid=host(2)), e.Reverted(at=212.0, attempt=3))
    made.end(1, 1, runs=True)
    assert (made.instance.state, made.instance.host_uuid, made.instance.power) == (
        State.ACTIVE,
        host(1),
        Power.RUNNING,
    )
    assert made.terminals == [(MoveKind.MIGRATE, MoveState.FAILED, "max_retries_exceeded")]


def test_a_destination_that_does_not_answer_is_never_followed_by_another_machine() -> None:
    made = begun(MoveKind.MIGRATE, 2, 3)
    made.apply(claimed())
    made.end(2, 2)
    made.end(1, 1)
    for at in (600.0, 700.0, 900.0):
        made.apply(e.TimedOut(at=at), e.ServiceLost(at=at, service="s1", code="service.silent"))
        order = made.commands[-1]
        assert isinstance(order, Destroy)
        assert order.unless_built
    assert made.instance.state is State.FINISHING
    made.apply(e.Destroyed(at=901.0, attempt=2, host_uuid=host(2)))
    assert made.instance.state is State.CLAIMING


def test_a_source_that_does_not_hand_over_is_started_again() -> None:
    made = begun(MoveKind.MIGRATE, 2)
    made.apply(claimed())
    made.end(2, 2)
    late = ended(made.instance, 1, 1)
    made.apply(e.TimedOut(at=600.0))
    assert made.instance.state is State.REVERTING  # the destination was never commanded
    (start,) = changes(made.apply(e.Reverted(at=601.0, attempt=3)))
    assert start.change is ChangeKind.START
    assert not changes(made.apply(late))  # its answer to the older order counts for nothing
    assert made.instance.state is State.RESTARTING
    made.apply(e.TimedOut(at=602.0))
    assert made.terminals == [(MoveKind.MIGRATE, MoveState.FAILED, "move.timeout")]
    made.end(1, 1, runs=True)
    assert made.instance.state is State.ACTIVE
    assert len(made.terminals) == 1


def test_a_failed_live_migration_leaves_the_machine_active() -> None:
    made = begun(MoveKind.LIVE_MIGRATE, 2)
    made.apply(claimed())
    (copy,) = changes(made.end(2, 2))
    assert copy.change is ChangeKind.HAND_OVER_LIVE
    made.end(1, 1, done=False, code="live.too_slow", runs=True)
    made.apply(e.Reverted(at=205.0, attempt=3))
    made.end(1, 1, runs=True)
    assert (made.instance.state, made.instance.host_uuid) == (State.ACTIVE, host(1))
    assert made.terminals == [(MoveKind.LIVE_MIGRATE, MoveState.FAILED, "live.too_slow")]


def test_a_live_migration_awaits_no_confirm() -> None:
    made = to_resized(MoveKind.LIVE_MIGRATE)
    assert (made.instance.state, made.destroys) == (State.CONFIRMING, [(1, host(1))])
    assert made.terminals == [(MoveKind.LIVE_MIGRATE, MoveState.DONE, "")]


@pytest.mark.parametrize("when", ["claiming", "preparing", "handing over"])
def test_an_abort_ends_the_move_before_the_destination_is_commanded(when: str) -> None:
    made = begun(MoveKind.LIVE_MIGRATE, 2)
    stop = request(MoveKind.ABORT, request_id=OTHER)
    if when == "claiming":
        made.apply(stop, claimed())
    elif when == "preparing":
        made.apply(claimed(), stop)
    else:
        made.apply(claimed())
        made.end(2, 2)
        made.apply(stop)
    made.apply(e.Reverted(at=205.0, attempt=3))
    if when == "handing over":
        made.end(1, 1, runs=True)
    assert (made.instance.state, made.instance.host_uuid) == (State.ACTIVE, host(1))
    assert made.terminals == [
        (MoveKind.LIVE_MIGRATE, MoveState.FAILED, "move.aborted"),
        (MoveKind.ABORT, MoveState.DONE, ""),
    ]


def test_an_abort_that_was_refused_before_a_move_does_not_abort_it_when_it_comes_again() -> None:
    """A copy of it is delivered late: it is answered as it was."""
    made = Scenario(active())
    stop = request(MoveKind.ABORT, request_id=OTHER)
    made.apply(stop, request(MoveKind.LIVE_MIGRATE, 2))
    made.apply(stop)
    assert made.instance.move is not None and made.instance.move.by == ""
    made.apply(claimed(), stop)
    assert made.instance.state is State.PREPARING
    assert made.terminals == [(MoveKind.ABORT, MoveState.REFUSED, "move.none")] * 3


def test_a_resize_in_place_has_one_machine() -> None:
    made = begun(MoveKind.RESIZE, 1, spec=replace(SPEC, flavor="larger"))
    (resize,) = changes(made.apply(claimed()))
    assert (resize.change, resize.attempt, resize.host_uuid, resize.spec.flavor) == (
        ChangeKind.RESIZE,
        1,
        host(1),
        "larger",
    )
    made.end(1, 1, runs=True)
    assert (made.instance.state, made.instance.attempt, made.spawns) == (State.RESIZED, 1, [])
    assert not is_over(made.instance, 1, host(1))
    made.apply(request(MoveKind.CONFIRM, request_id=OTHER))
    assert made.instance.state is State.SETTLING
    made.apply(e.Released(at=230.0, consumer=MOVE))
    assert made.instance.spec is not None
    assert (made.instance.state, made.instance.spec.flavor, made.destroys) == (State.ACTIVE, "larger", [])


def test_a_reverted_resize_in_place_is_given_its_old_size_before_the_book_is() -> None:
    made = begun(MoveKind.RESIZE, 1, spec=replace(SPEC, flavor="larger"))
    made.apply(claimed())
    made.end(1, 1, runs=True)
    (back,) = changes(made.apply(request(MoveKind.REVERT, request_id=OTHER)))
    assert (back.change, back.spec.flavor, made.instance.state) == (ChangeKind.RESIZE, "", State.UNDOING)
    made.end(1, 1, done=False)
    assert made.instance.state is State.UNDOING  # until it has its old size the larger claim is kept
    made.apply(e.TimedOut(at=400.0))
    made.end(1, 1, runs=True)
    made.apply(e.Reverted(at=401.0, attempt=3))
    assert (made.instance.state, made.instance.attempt, made.destroys) == (State.ACTIVE, 1, [])


def test_a_machine_that_is_gone_is_not_waited_for_to_take_its_old_size() -> None:
    made = begun(MoveKind.RESIZE, 1, 2, spec=replace(SPEC, flavor="larger"))
    made.apply(claimed())
    made.end(1, 1, done=False, code="machine.absent", runs=False)
    made.apply(refused(3))
    made.end(1, 1, done=False, code="machine.absent", runs=False)
    assert made.instance.state is State.REVERTING


def test_a_lost_destination_is_reverted_and_not_failed() -> None:
    made = to_resized()
    made.apply(e.HostMissing(at=300.0, host_uuid=host(2), seen_at=299.0, service="s1"))
    assert made.instance.state is State.UNDOING
    made.apply(e.Destroyed(at=301.0, attempt=2, host_uuid=host(2)), e.Reverted(at=302.0, attempt=3))
    made.end(1, 1, runs=True)
    assert (made.instance.state, made.instance.host_uuid) == (State.ACTIVE, host(1))


def test_an_evacuation_needs_a_fence_and_a_service_that_is_down() -> None:
    made = begun(MoveKind.EVACUATE, 2)
    assert made.terminals == [(MoveKind.EVACUATE, MoveState.REFUSED, "evacuate.not_fenced")]
    made = begun(MoveKind.EVACUATE, 2, fenced=True)
    assert made.terminals == [(MoveKind.EVACUATE, MoveState.REFUSED, "evacuate.service_up")]


def test_an_evacuated_source_keeps_its_claim_until_its_host_has_nothing_of_it() -> None:
    made = Scenario(active(), SERVICE_DOWN)
    elsewhere = replace(selection(2), service="s2")
    asking = request(MoveKind.EVACUATE, fenced=True)
    made.apply(replace(asking, request=replace(asking.request, selections=(elsewhere,))))
    made.apply(claimed())
    made.end(2, 2)
    (spawn,) = made.spawns
    assert spawn.origin is not None
    assert spawn.origin.host_uuid is None
    made.apply(replace(spawned(attempt=2, at=210.0), service="s2"))
    assert (made.instance.state, made.destroys) == (State.CONFIRMING, [(1, host(1))])
    assert question_of(made.instance) is None
    runs = e.HostRuns(at=900.0, attempt=1, host_uuid=host(1), service="s3", seen_at=900.0)
    made.apply(runs)
    assert made.destroys[-1] == (1, host(1))  # its host has another service now, which is commanded
    missing = e.HostMissing(at=990.0, host_uuid=host(1), seen_at=990.0, service="s1")
    assert made.apply(missing).instance.state is State.CONFIRMING, "its former service may have looked before that"
    made.apply(replace(missing, rescans=(rescan_id(made.instance),)))
    assert made.instance.state is State.SETTLING


def test_a_machine_that_was_resized_in_place_is_not_lost_by_a_report_of_before_it_was_built() -> None:
    """Seed 61105 at d0562af: its host was not taken for the one that was seen to run it."""
    made = Scenario(replace(active(), up_scan=ScanId(5, 3)))
    made.apply(request(MoveKind.RESIZE, 1), claimed())
    made.end(1, 1)
    assert made.instance.state is State.RESIZED and made.instance.is_in_place
    older = e.HostMissing(at=300.0, host_uuid=host(1), seen_at=999.0, service="s1", scan=ScanId(5, 3))
    assert made.apply(older).instance.state is State.RESIZED
    assert made.apply(replace(older, scan=ScanId(5, 4))).instance.state is State.GIVING_UP


def test_an_evacuation_that_finds_no_host_leaves_the_record_as_it_was() -> None:
    made = Scenario(active(), SERVICE_DOWN)
    elsewhere = replace(selection(2), service="s2")
    asking = request(MoveKind.EVACUATE, fenced=True)
    made.apply(replace(asking, request=replace(asking.request, selections=(elsewhere,))))
    made.apply(refused(), e.Reverted(at=202.0, attempt=2))
    assert (made.instance.state, made.instance.host_uuid) == (State.ACTIVE, host(1))
    assert not changes(made.apply())  # nothing is started on a host that is dead


@pytest.mark.parametrize(
    ("kind", "change", "power"),
    [
        (MoveKind.STOP, ChangeKind.STOP, Power.STOPPED),
        (MoveKind.REBUILD, ChangeKind.REBUILD, Power.RUNNING),
        (MoveKind.SHELVE, ChangeKind.SNAPSHOT, Power.SHELVED),
        (MoveKind.RESCUE, ChangeKind.RESCUE, Power.RESCUED),
        (MoveKind.UNRESCUE, ChangeKind.UNRESCUE, Power.RUNNING),
    ],
)
def test_what_is_done_in_place(kind: MoveKind, change: ChangeKind, power: Power) -> None:
    made = begun(kind, spec=replace(SPEC, image="new") if kind is MoveKind.REBUILD else None)
    (order,) = [one for one in made.commands if isinstance(one, ChangeMachine)]
    assert (order.change, order.attempt) == (change, 1)
    made.apply(e.TimedOut(at=600.0))
    assert made.terminals == [(kind, MoveState.FAILED, "change.timeout")]
    made.end(1, 1, runs=power in (Power.RUNNING, Power.RESCUED), image="kept")
    assert (made.instance.state, made.instance.power) == (State.ACTIVE, power)
    assert len(made.terminals) == 1


def rescued() -> Scenario:
    made = begun(MoveKind.RESCUE, rescue_password="sesame")
    made.end(1, 1, runs=True)
    return made


def test_a_rescued_instance_is_unrescued_first_and_its_password_is_forgotten() -> None:
    made = begun(MoveKind.RESCUE, rescue_password="sesame")
    (order,) = [one for one in made.commands if isinstance(one, ChangeMachine)]
    assert (order.change, order.rescue_password) == (ChangeKind.RESCUE, "sesame")
    made.end(1, 1, runs=True)
    assert b"sesame" not in msgspec.json.encode(made.instance)
    assert condition_of(made.instance) is Condition.RESCUED
    refusal = made.apply(request(MoveKind.STOP, request_id=OTHER))
    assert announced(*refusal.commands) == [(MoveKind.STOP, MoveState.REFUSED, True, "instance.rescued")]
    (order,) = changes(made.apply(request(MoveKind.UNRESCUE, request_id=UUID)))
    assert (order.change, order.rescue_password) == (ChangeKind.UNRESCUE, "")


@pytest.mark.parametrize(
    ("made", "kind", "code", "runs", "power"),
    [
        (None, MoveKind.RESCUE, RESCUE_FAILED, False, Power.RESCUED),
        (None, MoveKind.RESCUE, "node.refused", True, Power.RUNNING),
        (rescued, MoveKind.UNRESCUE, RESCUE_FAILED, True, Power.RESCUED),
        (rescued, MoveKind.UNRESCUE, "node.refused", True, Power.RESCUED),
    ],
)
def test_what_is_left_of_a_rescue_that_failed(
    made: Callable[[], Scenario] | None, kind: MoveKind, code: str, runs: bool, power: Power
) -> None:
    """From a rescue that was begun, unrescuing is the way back; one that was refused has changed nothing."""
    there = Scenario(active()) if made is None else made()
    there.apply(request(kind, request_id=OTHER, rescue_password="sesame"))
    there.end(1, 1, done=False, code=code, runs=runs)
    assert (there.instance.state, there.instance.power) == (State.ACTIVE, power)


def test_what_is_so_already_is_done_at_once() -> None:
    made = begun(MoveKind.START)
    assert (made.terminals, made.instance.state) == ([(MoveKind.START, MoveState.DONE, "")], State.ACTIVE)


def offloaded() -> Scenario:
    made = begun(MoveKind.SHELVE, offload=True)
    made.end(1, 1, runs=False, image="kept")
    assert (made.instance.state, made.destroys) == (State.OFFLOADING, [(1, host(1))])
    made.apply(e.Destroyed(at=210.0, attempt=1, host_uuid=host(1)))
    assert isinstance(question_of(made.instance), Release)
    made.apply(e.Released(at=211.0, consumer=UUID))
    return made


def test_an_offloaded_instance_holds_nothing_and_is_unshelved_from_its_image() -> None:
    made = offloaded()
    assert (made.instance.state, question_of(made.instance)) == (State.OFFLOADED, None)
    assert made.terminals == [(MoveKind.SHELVE, MoveState.DONE, "")]
    assert is_over(made.instance, 1, host(1))
    made.apply(request(MoveKind.UNSHELVE, 2, 3, request_id=OTHER))
    question = question_of(made.instance)
    assert isinstance(question, Claim)
    assert (question.consumer_generation, question.migration, question.release_first) == (None, None, False)
    made.apply(claimed(question.attempt))
    made.end(2, question.attempt)
    (spawn,) = made.spawns
    assert spawn.origin is not None
    assert (spawn.origin.image, spawn.host_uuid) == ("kept", host(2))
    made.apply(spawned(attempt=question.attempt, n=2, at=230.0))
    assert (made.instance.state, made.instance.power, made.instance.host_uuid) == (
        State.ACTIVE,
        Power.RUNNING,
        host(2),
    )


def test_an_unshelving_that_finds_no_host_leaves_it_offloaded() -> None:
    made = offloaded()
    made.apply(request(MoveKind.UNSHELVE, 2, request_id=OTHER))
    made.apply(refused(made.instance.next_attempt))
    assert isinstance(question_of(made.instance), Release)
    made.apply(e.Released(at=231.0, consumer=UUID))
    assert (made.instance.state, made.instance.image) == (State.OFFLOADED, "kept")
    assert made.terminals[1:] == [(MoveKind.UNSHELVE, MoveState.FAILED, "max_retries_exceeded")]


STAGES = ["claiming", "preparing", "handing over", "finishing", "resized", "confirming", "settling", "undoing"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_delete_in_every_state_destroys_both_and_releases_both(stage: str) -> None:
    made = begun(MoveKind.MIGRATE, 2)
    number = STAGES.index(stage)
    steps = [
        lambda: made.apply(claimed()),
        lambda: made.end(2, 2),
        lambda: made.end(1, 1),
        lambda: made.apply(spawned(attempt=2, at=210.0)),
        lambda: made.apply(request(MoveKind.CONFIRM, request_id=OTHER)),
        lambda: made.apply(e.Destroyed(at=215.0, attempt=1, host_uuid=host(1))),
    ]
    for act in steps[: min(number, 6)] if stage != "undoing" else steps[:4]:
        act()
    if stage == "undoing":
        made.apply(request(MoveKind.REVERT, request_id=OTHER))
    made.apply(e.DeleteRequested(at=300.0))
    if stage == "claiming":
        made.apply(claimed())
    made.apply(e.Destroyed(at=301.0, attempt=1, host_uuid=host(1)))
    if number >= STAGES.index("finishing"):
        if stage != "settling":
            assert made.instance.state is State.DELETING  # the destination has not answered
        made.apply(e.Destroyed(at=301.0, attempt=2, host_uuid=host(2)))
    assert made.instance.state is State.RELEASING
    first = question_of(made.instance)
    assert isinstance(first, Release)
    assert first.consumer == UUID
    made.apply(e.Released(at=302.0, consumer=UUID), e.Released(at=302.0, consumer=UUID))
    second = question_of(made.instance)
    assert isinstance(second, Release)
    assert second.consumer == MOVE
    made.apply(e.Released(at=303.0, consumer=MOVE))
    assert (made.instance.state, made.instance.move) == (State.DELETED, None)
    assert len({m.request_id for m in made.commands if isinstance(m, MoveEvent) and m.terminal}) == len(made.terminals)


def test_a_move_of_what_is_not_there_is_refused() -> None:
    stepped = step(Instance(uuid=UUID), request(MoveKind.MIGRATE, 2), PATIENCE)
    (event,) = stepped.commands
    assert isinstance(event, MoveEvent)
    assert (event.state, event.code, event.condition) == (MoveState.REFUSED, "instance.unknown", Condition.UNKNOWN)
    assert stepped.instance.state is State.ABSENT


def test_one_thing_at_a_time() -> None:
    made = begun(MoveKind.MIGRATE, 2)
    made.apply(request(MoveKind.STOP, request_id=OTHER), request(MoveKind.MIGRATE, 2))
    assert made.terminals == [(MoveKind.STOP, MoveState.REFUSED, "instance.busy")]


def test_a_source_that_may_run_is_not_on_record_as_stopped() -> None:
    """Its host did not know whether it had started again: it ran, and its record had it stopped."""
    made = begun(MoveKind.MIGRATE, 2)
    made.apply(claimed())
    made.end(2, 2)
    made.end(1, 1, done=False, code="change.timeout")
    made.apply(e.Reverted(at=205.0, attempt=3))
    made.end(1, 1, done=False, code="change.timeout")
    assert (made.instance.state, made.instance.power) == (State.RESTARTING, Power.RUNNING)
    (again,) = changes(made.apply(e.TimedOut(at=600.0)))
    assert again.change is ChangeKind.START
    made.end(1, 1, runs=True)
    assert (made.instance.state, made.instance.power) == (State.ACTIVE, Power.RUNNING)
    assert made.terminals == [(MoveKind.MIGRATE, MoveState.FAILED, "change.timeout")]


def test_a_change_of_which_its_host_does_not_know_whether_it_happened_is_commanded_again() -> None:
    made = begun(MoveKind.STOP)
    made.end(1, 1, done=False, code="change.timeout")
    assert made.terminals == [(MoveKind.STOP, MoveState.FAILED, "change.timeout")]
    assert made.instance.state is State.CHANGING
    (again,) = changes(made.apply(e.TimedOut(at=600.0)))
    assert again.change is ChangeKind.STOP
    made.end(1, 1, runs=False)
    assert (made.instance.state, made.instance.power) == (State.ACTIVE, Power.STOPPED)
    assert len(made.terminals) == 1


def test_a_shelved_machine_that_runs_though_its_start_failed_is_not_on_record_as_shelved() -> None:
    made = begun(MoveKind.SHELVE)
    made.end(1, 1, runs=False, image="snapshot")
    made.apply(request(MoveKind.UNSHELVE, request_id=OTHER))
    made.end(1, 1, done=False, code="broken", runs=True)
    assert (made.instance.state, made.instance.power, made.instance.image) == (State.ACTIVE, Power.RUNNING, "")
    assert made.terminals[-1] == (MoveKind.UNSHELVE, MoveState.FAILED, "broken")


@pytest.mark.parametrize("answered", [True, False], ids=["answered", "not answered"])
def test_a_resize_that_failed_in_place_is_taken_back_before_the_next_host_is_commanded(answered: bool) -> None:
    """The machine kept the new size, and with the move undone its record and the book had the old one."""
    made = begun(MoveKind.RESIZE, 1, 2, spec=replace(SPEC, flavor="larger"))
    made.apply(claimed())
    (back,) = changes(made.end(1, 1, done=False, code="broken", runs=True))
    assert (back.change, back.spec.flavor, back.allocations) == (ChangeKind.RESIZE, "", selection(1).allocations)
    assert made.instance.state is State.RESIZING
    if not answered:
        made.end(1, 1, done=False, code="broken", runs=True)
        made.apply(e.TimedOut(at=600.0))
        assert made.instance.state is State.UNDOING
        return
    made.end(1, 1, runs=True)
    assert made.instance.state is State.CLAIMING
    made.apply(claimed(3))
    made.end(2, 3, done=False, code="full")
    made.apply(e.Reverted(at=401.0, attempt=4))
    assert (made.instance.state, made.instance.here) == (State.ACTIVE, selection(1))
    assert made.instance.spec == SPEC


def test_after_a_move_that_was_undone_its_source_is_lost_by_its_own_hosts_scans_as_before() -> None:
    """That its host had been seen to run it was forgotten: a report of a host whose clock was behind was dropped."""
    up = active()
    made = Scenario(replace(up, up_at=50.0, up_scan=ScanId(1, 4)))
    made.apply(request(MoveKind.MIGRATE, 2), refused(), e.Reverted(at=205.0, attempt=2))
    assert made.instance.state is State.ACTIVE
    older = e.HostMissing(at=300.0, host_uuid=host(1), seen_at=20.0, service="s1", scan=ScanId(1, 4))
    assert made.apply(older).instance.state is State.ACTIVE
    made.apply(replace(older, scan=ScanId(1, 5)))
    assert made.instance.state is State.GIVING_UP


def test_a_refusal_is_on_disk_before_its_request_is_acknowledged() -> None:
    """Forgotten in a crash, the request came again when the instance was not busy any more, and was carried out."""
    made = to_resized()
    refusal = made.apply(request(MoveKind.STOP, request_id=OTHER))
    assert announced(*refusal.commands) == [(MoveKind.STOP, MoveState.REFUSED, True, "instance.resized")]
    outgoing = [OutboxMessage("c", message, UUID) for message in refusal.commands]
    assert not _may_be_redone(Transition({UUID: refusal.instance}, outgoing, Counter(), []))


@pytest.mark.parametrize("state", [State.CHANGING, State.RESTARTING])
def test_a_machine_that_is_being_changed_is_wanted_where_it_is(state: State) -> None:
    """A report that lists it comes while it is being stopped, or started again after a move that was undone."""
    made = begun(MoveKind.STOP) if state is State.CHANGING else begun(MoveKind.MIGRATE, 2)
    if state is State.RESTARTING:
        made.apply(claimed())
        made.end(2, 2)
        made.end(1, 1, done=False, code="broken", runs=True)
        made.apply(e.Reverted(at=205.0, attempt=3))
    assert made.instance.state is state
    assert not is_over(made.instance, 1, host(1))
    made.apply(e.HostRuns(at=206.0, attempt=1, host_uuid=host(1), service="s1", seen_at=206.0))
    assert (made.instance.state, made.destroys) == (state, [])


def test_a_stopped_machine_is_stopped_where_it_has_been_moved_to() -> None:
    made = begun(MoveKind.STOP)
    made.end(1, 1, runs=False)
    made.apply(request(MoveKind.MIGRATE, 2, request_id=OTHER), claimed())
    made.end(2, 2)
    made.end(1, 1, runs=False)
    (spawn,) = made.spawns
    assert spawn.origin is not None
    assert not spawn.origin.runs
    made.apply(spawned(attempt=2, at=210.0))
    assert (made.instance.state, made.instance.power) == (State.RESIZED, Power.STOPPED)


def test_a_report_of_before_a_host_was_known_to_run_it_releases_neither_host_of_a_move() -> None:
    """Each host is judged by its own scans, and by the clock alone when its service counts none of them."""
    made = Scenario(replace(active(), up_scan=ScanId(5, 3)))
    made.apply(request(MoveKind.MIGRATE, 2, 3), claimed())
    made.end(2, 2)
    made.end(1, 1)
    made.apply(replace(spawned(attempt=2, at=210.0), scan=ScanId(5, 7)), e.DeleteRequested(at=220.0, cause="delete"))
    missing = e.HostMissing(at=230.0, host_uuid=host(1), seen_at=999.0, service="s1", scan=ScanId(5, 3))
    deleting = made.instance
    made.apply(missing, replace(missing, host_uuid=host(2), scan=ScanId(5, 7)))
    assert (made.instance, deleting.state) == (deleting, State.DELETING)
    made.apply(replace(missing, scan=ScanId(5, 4)))
    assert made.instance.move is not None and made.instance.move.source_gone and not made.instance.move.here_gone
    made.apply(replace(missing, host_uuid=host(2), scan=ScanId(5, 8)))
    assert made.instance.state is State.RELEASING


def test_a_destination_that_was_never_reached_is_not_judged_by_the_scans_of_its_source() -> None:
    made = Scenario(replace(active(), up_scan=ScanId(5, 3)))
    elsewhere = replace(selection(2), service="s2")
    asking = request(MoveKind.MIGRATE)
    made.apply(replace(asking, request=replace(asking.request, selections=(elsewhere,))), claimed())
    made.end(2, 2)
    made.end(1, 1)
    assert made.instance.state is State.FINISHING
    made.apply(e.DeleteRequested(at=220.0, cause="delete"))
    assert made.instance.move is not None and not made.instance.move.here_gone
    made.apply(e.HostMissing(at=230.0, host_uuid=host(2), seen_at=999.0, service="s2", scan=ScanId(4, 9)))
    assert made.instance.move is not None and made.instance.move.here_gone
