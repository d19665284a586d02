"""No move that has arrived is undone before its source was seen, and what waits for a silent host shows it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.base import Message
from bus.contracts.cell import Destroy, FoundMachine, MachinesFound
from bus.contracts.moves import ChangeKind, ChangeMachine, MoveEvent, MoveKind, MoveState
from bus.faults import Fault, RequestTimeout
from cell_conductor.domain import events as e
from cell_conductor.domain.fence_steps import FenceSteps
from cell_conductor.domain.fences import Fence
from cell_conductor.domain.instance import State
from cell_conductor.domain.leases import Lease, LeaseState
from cell_conductor.domain.steps import Step
from cell_conductor.domain.table import question_of
from cell_conductor.domain.way_back import (
    SOURCE_FENCED,
    SOURCE_LOST,
    SOURCE_SILENT,
    SOURCE_UNREPORTED,
    SourceQuery,
    answer_about,
)
from tests.unit.conductor.move_scenario import MOVE, OTHER, Scenario, begun, claimed, request, seen, to_resized
from tests.unit.conductor.scenario import PATIENCE, SPEC, UUID, host, selection, spawned

LATER = OTHER.replace("2", "3")
QUERIED = SourceQuery(host(1), "s1", 1, OTHER)
DOWN = replace(PATIENCE, down={"s2": Lease(service="s2", epoch=1, state=LeaseState.SILENT)})


def fenced(*numbers: int) -> dict[str, Fence]:
    return {host(n): Fence(host_uuid=host(n), host=f"host-{n}", version=1) for n in numbers}


def unseen(code: str, by: str = OTHER) -> e.SourceAnswered:
    return e.SourceAnswered(at=211.0, by=by, code=code, reason="why")


def reverting(**fields: object) -> Scenario:
    made = to_resized(**fields)
    made.commands.clear()
    made.apply(request(MoveKind.REVERT, request_id=OTHER))
    return made


def orders(made: Scenario) -> list[Message]:
    """The orders to hosts."""
    return [one for one in made.commands if isinstance(one, Destroy | ChangeMachine)]


def shown(made: Scenario) -> list[tuple[str, MoveKind | None, MoveState, str]]:
    return [(one.request_id, one.kind, one.state, one.code) for one in made.commands if isinstance(one, MoveEvent)]


def follow(made: Scenario, event: e.Event) -> None:
    """Apply an event as the engine does where hosts are fenced."""
    before, stepped = made.instance, made.apply(event)
    followed = FenceSteps().follow(before, Step(made.instance, stepped.commands), event, made.context)  # type: ignore[arg-type]
    made.instance = followed.instance
    made.commands += followed.commands[len(stepped.commands) :]


# --- a revert


def test_a_revert_queries_for_its_source_first_and_gives_nothing_up() -> None:
    made = reverting()
    assert (made.instance.state, made.commands) == (State.RESIZED, [])
    assert question_of(made.instance) == QUERIED
    made.apply(seen())
    assert (made.instance.phase, made.destroys) == ((State.DESTROYING, State.REVERTING), [(2, host(2))])
    assert question_of(made.instance) is None


@pytest.mark.parametrize("code", [SOURCE_SILENT, SOURCE_LOST, SOURCE_UNREPORTED])
def test_a_revert_whose_source_was_not_seen_is_refused_and_the_move_waits_as_before(code: str) -> None:
    made = reverting(auto_confirm_s=90.0)
    before = to_resized(auto_confirm_s=90.0).instance
    made.apply(unseen(code))
    assert (orders(made), made.terminals) == ([], [(MoveKind.REVERT, MoveState.REFUSED, code)])
    after = made.instance
    assert (after.state, after.move, after.deadline) == (State.RESIZED, before.move, before.deadline)
    assert question_of(after) is None
    made.apply(request(MoveKind.REVERT, request_id=OTHER))
    assert made.terminals[1:] == [(MoveKind.REVERT, MoveState.REFUSED, code)], "a copy of it begins nothing"
    made.apply(request(MoveKind.REVERT, request_id=LATER), seen(LATER))
    assert made.instance.phase == (State.DESTROYING, State.REVERTING), "it may be requested again"


def test_a_revert_to_a_fenced_host_is_refused_at_once_and_a_confirm_is_carried_out() -> None:
    made = to_resized()
    made.context = replace(PATIENCE, fences=fenced(1))
    made.commands.clear()
    follow(made, request(MoveKind.REVERT, request_id=OTHER))
    assert (made.instance.state, orders(made), question_of(made.instance)) == (State.RESIZED, [], None)
    assert made.terminals == [(MoveKind.REVERT, MoveState.REFUSED, SOURCE_FENCED)]
    follow(made, request(MoveKind.CONFIRM, request_id=LATER))
    assert made.instance.phase == (State.RELEASING, State.ACTIVE)


def test_a_source_that_is_fenced_while_it_is_queried_for_is_not_gone_back_to() -> None:
    made = reverting()
    made.context = replace(PATIENCE, fences=fenced(1))
    follow(made, e.HostFenced(at=211.0, host_uuid=host(1)))
    follow(made, seen())
    assert (made.instance.state, orders(made)) == (State.RESIZED, [])
    assert made.terminals == [(MoveKind.REVERT, MoveState.REFUSED, SOURCE_FENCED)]


def test_without_an_answer_on_record_a_revert_is_refused_in_time() -> None:
    made = reverting(auto_confirm_s=5.0)
    assert made.instance.deadline is not None
    made.apply(e.TimedOut(at=made.instance.deadline))
    assert (made.instance.state, orders(made)) == (State.RESIZED, [])
    assert made.terminals == [(MoveKind.REVERT, MoveState.REFUSED, SOURCE_SILENT)]
    made.apply(e.TimedOut(at=made.instance.deadline))
    assert made.instance.phase == (State.DESTROYING, State.ACTIVE), "the time to confirm it has come meanwhile"


def test_an_answer_to_another_request_changes_nothing() -> None:
    made = reverting()
    before = made.instance
    made.apply(seen(LATER), seen(""))
    assert made.instance is before
    made.apply(unseen(SOURCE_LOST), seen())
    assert made.instance.state is State.RESIZED, "the revert has ended"


@pytest.mark.parametrize("kind", [MoveKind.CONFIRM, MoveKind.REVERT])
def test_while_the_source_is_queried_for_other_requests_are_refused(kind: MoveKind) -> None:
    made = reverting()
    made.apply(request(MoveKind.REVERT, request_id=OTHER))
    assert made.commands == [], "a copy of the revert itself"
    made.apply(request(kind, request_id=LATER))
    assert made.terminals == [(kind, MoveState.REFUSED, "instance.busy")]
    assert question_of(made.instance) == QUERIED


def test_a_delete_does_not_wait_for_the_source() -> None:
    made = reverting()
    made.apply(e.DeleteRequested(at=212.0))
    assert (made.instance.phase, question_of(made.instance)) == ((State.DESTROYING, State.DELETED), None)
    assert made.terminals == [(MoveKind.REVERT, MoveState.FAILED, "instance.deleted")]


def test_the_source_is_commanded_at_the_service_that_lists_it() -> None:
    made = reverting()
    made.apply(seen(service="s9"), e.Destroyed(at=220.0, attempt=2, host_uuid=host(2), service="s1"))
    made.apply(e.Reverted(at=221.0, attempt=3))
    start = orders(made)[-1]
    assert isinstance(start, ChangeMachine)
    assert (start.change, start.service, start.host_uuid) == (ChangeKind.START, "s9", host(1))


def test_a_resize_in_place_is_reverted_once_its_host_was_seen() -> None:
    made = begun(MoveKind.RESIZE, 1, spec=replace(SPEC, flavor="larger"))
    made.apply(claimed())
    made.end(1, 1, runs=True)
    made.commands.clear()
    made.apply(request(MoveKind.REVERT, request_id=OTHER))
    assert (question_of(made.instance), made.commands) == (QUERIED, [])
    made.apply(unseen(SOURCE_SILENT))
    assert (made.instance.state, orders(made)) == (State.RESIZED, [])
    made.apply(request(MoveKind.REVERT, request_id=LATER), seen(LATER))
    assert made.instance.phase == (State.DESTROYING, State.REVERTING)


# --- a fenced destination


def test_a_fenced_destination_is_given_up_only_for_a_source_that_was_seen() -> None:
    made = to_resized()
    made.context = replace(PATIENCE, fences=fenced(2))
    made.commands.clear()
    follow(made, e.HostFenced(at=300.0, host_uuid=host(2)))
    assert (made.instance.state, made.commands) == (State.RESIZED, [])
    assert question_of(made.instance) == replace(QUERIED, by="")
    follow(made, unseen(SOURCE_SILENT, ""))
    assert (made.instance.state, orders(made), made.instance.deadline) == (State.RESIZED, [], 241.0)
    follow(made, e.TimedOut(at=241.0))
    assert (question_of(made.instance), made.instance.deadline) == (replace(QUERIED, by=""), 271.0), "queried for again"
    follow(made, seen(""))
    assert (made.instance.state, made.destroys) == (State.REVERTING, [(2, host(2))])


def test_two_fenced_hosts_give_up_neither_machine_until_a_client_confirms() -> None:
    made = to_resized()
    made.context = replace(PATIENCE, fences=fenced(1, 2))
    made.commands.clear()
    follow(made, e.HostFenced(at=300.0, host_uuid=host(2)))
    follow(made, seen(""))
    assert (made.instance.state, orders(made)) == (State.RESIZED, [])
    follow(made, request(MoveKind.REVERT, request_id=OTHER))
    assert (made.instance.state, orders(made)) == (State.RESIZED, [])
    assert made.terminals == [(MoveKind.REVERT, MoveState.REFUSED, SOURCE_FENCED)]
    follow(made, request(MoveKind.CONFIRM, request_id=LATER))
    assert made.instance.phase == (State.RELEASING, State.ACTIVE)


def test_a_destination_whose_fence_is_lifted_stays() -> None:
    made = to_resized(auto_confirm_s=400.0)
    made.context = replace(PATIENCE, fences=fenced(2))
    follow(made, e.HostFenced(at=300.0, host_uuid=host(2)))
    made.context = PATIENCE
    made.commands.clear()
    made.apply(seen(""))
    assert (made.instance.state, made.commands, made.instance.deadline) == (State.RESIZED, [], 610.0)
    assert question_of(made.instance) is None


def test_force_does_not_stand_in_for_the_answer_of_a_host_of_the_cell() -> None:
    made = to_resized()
    made.commands.clear()
    made.apply(request(MoveKind.REVERT, request_id=OTHER, force=True))
    assert (made.instance.state, question_of(made.instance)) == (State.RESIZED, QUERIED)
    made.apply(unseen(SOURCE_LOST))
    assert (made.instance.state, orders(made)) == (State.RESIZED, [])


# --- what waits shows it


def test_a_confirm_whose_source_is_silent_shows_it_until_it_answers() -> None:
    made = to_resized()
    made.commands.clear()
    made.apply(request(MoveKind.CONFIRM, request_id=OTHER))
    assert shown(made) == [], "it may answer at once"
    made.apply(e.TimedOut(at=245.0))
    assert shown(made) == [(OTHER, MoveKind.CONFIRM, MoveState.CHANGING, SOURCE_SILENT)]
    assert not made.terminals and made.destroys == [(1, host(1))] * 2
    made.apply(e.Destroyed(at=250.0, attempt=1, host_uuid=host(1), service="s1"), e.Released(at=251.0, consumer=MOVE))
    assert made.terminals == [(MoveKind.CONFIRM, MoveState.DONE, "")]


def test_a_confirm_shows_at_once_that_its_sources_service_is_known_to_be_down() -> None:
    made = to_resized()
    made.context = replace(PATIENCE, down={"s1": Lease(service="s1", epoch=1, state=LeaseState.SILENT)})
    made.commands.clear()
    made.apply(request(MoveKind.CONFIRM, request_id=OTHER))
    assert shown(made) == [(OTHER, MoveKind.CONFIRM, MoveState.CHANGING, SOURCE_SILENT)]


def test_a_revert_whose_destination_is_silent_shows_it() -> None:
    made = reverting()
    made.apply(seen(), e.TimedOut(at=245.0))
    assert shown(made)[-1] == (OTHER, MoveKind.REVERT, MoveState.UNDOING, "move.destination_silent")


def test_time_alone_does_not_give_the_source_up_for_a_destination_that_is_down() -> None:
    there = replace(selection(2), service="s2")
    made = begun(MoveKind.MIGRATE, selections=(there,), auto_confirm_s=5.0)
    made.apply(claimed())
    made.apply(e.ChangeEnded(at=202.0, attempt=2, order=_order(made), host_uuid=host(2), service="s2", done=True))
    made.end(1, 1)
    made.apply(replace(spawned(attempt=2, at=210.0), service="s2"))
    made.context = DOWN
    made.commands.clear()
    made.apply(e.TimedOut(at=215.0))
    assert (made.instance.state, made.commands, made.instance.deadline) == (State.RESIZED, [], 245.0)
    made.context = PATIENCE
    made.apply(e.TimedOut(at=245.0))
    assert made.instance.phase == (State.DESTROYING, State.ACTIVE)


def _order(made: Scenario) -> int:
    assert made.instance.move is not None
    return made.instance.move.order


# --- the answers of the services


def found(service: str = "s1", *machines: int, hosts: tuple[int, ...] = (1,)) -> MachinesFound:
    """An answer: the attempts that it has on host 1, and the hosts that it has looked at."""
    return MachinesFound(
        machines=tuple(
            FoundMachine(instance_uuid=UUID, host_uuid=host(1), host="host-1", service=service, attempt=one)
            for one in machines
        ),
        hosts=tuple(map(host, hosts)),
    )


NONE = RequestTimeout("no answer")


@pytest.mark.parametrize(
    ("answers", "code", "service"),
    [
        ([("s1", found("s1", 1))], "", "s1"),
        ([("s1", NONE), ("s9", found("s9", 1))], "", "s9"),
        ([("s1", found("s1", hosts=())), ("s9", found("s9", 1))], "", "s9"),
        ([("s1", found("s1", 2))], SOURCE_LOST, ""),
        ([("s1", found("s1"))], SOURCE_LOST, ""),
        ([("s1", found("s1", hosts=())), ("s9", found("s9"))], SOURCE_LOST, ""),
        ([("s1", found("s1", hosts=()))], SOURCE_UNREPORTED, ""),
        ([("s1", found("s1", hosts=(2,))), ("s9", NONE)], SOURCE_UNREPORTED, ""),
        ([("s1", NONE)], SOURCE_SILENT, ""),
        ([("s1", NONE), ("s9", found("s9"))], SOURCE_SILENT, ""),
        ([("s9", found("s9")), ("s1", NONE)], SOURCE_SILENT, ""),
        ([("s9", found("s9"))], SOURCE_SILENT, ""),
        ([("s1", found("s1", 1, hosts=()))], SOURCE_UNREPORTED, ""),  # by its record, which proves nothing
    ],
)
def test_the_source_is_seen_only_where_its_host_lists_that_very_machine(
    answers: list[tuple[str, MachinesFound | Fault]], code: str, service: str
) -> None:
    answered = answer_about(UUID, QUERIED, answers, 211.0)
    assert (answered.by, answered.code, answered.service) == (OTHER, code, service)
