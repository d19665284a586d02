"""How long a request has been silent is counted by this process alone, and it is queried about less and less often."""

from __future__ import annotations

from itertools import pairwise

import pytest
from msgspec.structs import replace

from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.cell import CellDelete
from bus.contracts.cell_queries import CellBuildQuery
from bus.contracts.moves import CellMove, CellMoveQuery, MoveKind, MoveState
from scheduler_worker.config import Flavor, SchedulerConfig
from scheduler_worker.domain.builds import RecordedBuild
from scheduler_worker.domain.recorded_moves import InstanceRecord, MoveContext, RecordedMove
from scheduler_worker.domain.unanswered import (
    CELL_SILENT,
    CELL_UNKNOWN,
    MAX_PAUSE_S,
    MAX_QUERIES,
    AwaitedRequest,
    Watching,
    look,
    messages_to_cell,
    open_build,
    open_move,
    open_now,
    silence,
)

UUID = "c0000000-0000-4000-8000-000000000001"
RECORDED = RecordedMove(
    request_id="d0000000-0000-4000-8000-000000000001",
    instance_uuid=UUID,
    project_id="p",
    kind=MoveKind.MIGRATE,
    digest=b"",
    state=MoveState.SCHEDULED,
    sequence=2,
    cell="c1",
)
BUILD = RecordedBuild(instance_uuid=UUID, project_id="p", state=BuildState.BUILDING, sequence=10, attempt=2, cell="c1")
KNOWN = MoveContext(build=BUILD, build_request=BuildRequest(instance_uuid=UUID, project_id="p", flavor="f", image="i"))
CONFIG = SchedulerConfig(flavors={"f": Flavor(vcpus=1, disk_gb=7)}, build_timeout_s=90.0)


def opened(of: RecordedMove | RecordedBuild) -> AwaitedRequest:
    found = open_move(of) if isinstance(of, RecordedMove) else open_build(of)
    assert found is not None
    return found


MOVE = opened(RECORDED)


def queried_at(requests: list[tuple[float, AwaitedRequest]]) -> list[float]:
    found, watching = [], Watching({})
    for now_s, one in requests:
        watching = look(watching.watched, [one], now_s=now_s, pause_s=60.0)
        found += [now_s] if watching.query else []
    return found


def test_a_silent_request_is_queried_about_again_after_twice_as_long_up_to_a_bound() -> None:
    times = queried_at([(float(second), MOVE) for second in range(0, 4000, 10)])
    assert times[:5] == [60.0, 180.0, 420.0, 900.0, 1500.0]
    assert {later - earlier for earlier, later in pairwise(times[3:])} == {MAX_PAUSE_S}


def test_an_event_of_it_begins_the_wait_anew() -> None:
    later = replace(MOVE, sequence=11)
    assert queried_at([(0.0, MOVE), (50.0, MOVE), (55.0, later), (70.0, later), (114.0, later), (115.0, later)]) == [
        115.0
    ]


def test_the_pause_grows_until_the_request_ends_though_each_query_is_answered() -> None:
    """A delete that its host cannot carry out was queried about, and announced, 1,150 times a day."""
    watching, sequence, count = Watching({}), 10, 0
    for second in range(0, 86_400, 15):
        deleting = opened(replace(BUILD, state=BuildState.DELETING, sequence=sequence))
        watching = look(watching.watched, [deleting], now_s=float(second), pause_s=60.0)
        count += len(watching.query)
        sequence += len(watching.query)  # it is answered by an event
        assert not watching.silent
    assert count <= 86_400 / MAX_PAUSE_S + 5


def test_after_questions_in_vain_it_is_to_be_marked_once() -> None:
    watching, silent = Watching({}), []
    for now_s in (0.0, 60.0, 180.0, 420.0, 900.0):
        watching = look(watching.watched, [MOVE], now_s=now_s, pause_s=60.0)
        silent += [now_s] if watching.silent else []
    assert silent[0] == 420.0 and watching.waiting == 1
    watched = watching.watched[MOVE.key]
    assert silence(watched, 900.0, known=True) == (
        CELL_SILENT,
        "nothing is received of it from cell c1: queried 4 times in 900 s",
    )
    assert silence(watched, 900.0, known=False)[0] == CELL_UNKNOWN
    marked = replace(MOVE, code=CELL_SILENT)
    assert look(watching.watched, [marked], now_s=5000.0, pause_s=60.0).silent == ()


def test_what_has_ended_is_forgotten() -> None:
    first = look({}, [MOVE], now_s=0.0, pause_s=60.0)
    assert look(first.watched, [], now_s=60.0, pause_s=60.0) == Watching({})


def test_one_pass_queries_a_bounded_number_and_the_next_one_the_others() -> None:
    uuids = [f"c0000000-0000-4000-8000-{number:012}" for number in range(MAX_QUERIES + 3)]
    builds = [opened(replace(BUILD, instance_uuid=uuid)) for uuid in uuids]
    watching, queried = Watching({}), []
    for now_s in (0.0, 60.0, 61.0, 62.0):
        watching = look(watching.watched, builds, now_s=now_s, pause_s=60.0)
        queried.append([one.request_id for one in watching.query])
    assert [len(one) for one in queried] == [0, MAX_QUERIES, 3, 0]
    assert sorted(uuid for one in queried for uuid in one) == uuids


@pytest.mark.parametrize("state", [BuildState.ACTIVE, BuildState.FAILED, BuildState.DELETED])
def test_a_build_that_has_ended_is_not_watched(state: BuildState) -> None:
    assert open_build(replace(BUILD, state=state)) is None


def test_a_build_that_no_cell_has_is_watched_and_its_silence_is_no_cells() -> None:
    """A database that was set back has it as accepted, and its message was acknowledged."""
    accepted = opened(replace(BUILD, state=BuildState.ACCEPTED, cell=None))
    assert queried_at([(float(second), accepted) for second in range(0, 500, 10)]) == [60.0, 180.0, 420.0]
    watching = Watching({})
    for second in range(0, 2000, 10):
        watching = look(watching.watched, [accepted], now_s=float(second), pause_s=60.0)
        assert not watching.silent


def test_a_delete_waits_while_a_move_of_its_instance_is_under_way() -> None:
    """It came to a cell that the instance was on its way to, which took it for deleted before it came."""
    deleting = replace(BUILD, state=BuildState.DELETING)
    request = opened(deleting)
    moved = InstanceRecord(instance_uuid=UUID, under_way=RECORDED.request_id)
    assert open_now(request, replace(KNOWN, build=deleting, instance=moved)) is None
    assert open_now(request, replace(KNOWN, build=deleting)) == request
    assert open_now(request, replace(KNOWN, build=replace(deleting, state=BuildState.DELETED))) is None


def test_a_build_is_queried_with_what_its_command_named_and_the_attempt_on_record() -> None:
    (query,) = messages_to_cell(opened(BUILD), KNOWN, CONFIG, 5.0)
    assert isinstance(query, CellBuildQuery)
    assert (query.spec.instance_uuid, query.spec.project_id, query.requested_at) == (UUID, "p", 5.0)
    assert (query.spec.image, query.spec.root_gb, query.build_timeout_s) == ("i", 7, 90.0)
    assert (query.attempt, query.sequence) == (2, 10)


def test_a_delete_is_commanded_once_more_by_a_scheduler_that_knows_that_the_build_was_begun() -> None:
    deleting = replace(BUILD, state=BuildState.DELETING)
    messages = messages_to_cell(opened(deleting), replace(KNOWN, build=deleting), CONFIG, 5.0)
    assert messages == (CellDelete(instance_uuid=UUID, project_id="p", begun=True),)


def test_a_move_is_queried_by_its_request_or_repeated_if_a_query_would_end_it() -> None:
    active = replace(BUILD, state=BuildState.ACTIVE)
    (query,) = messages_to_cell(MOVE, replace(KNOWN, build=active, move=RECORDED), CONFIG, 5.0)
    assert isinstance(query, CellMoveQuery) and query.request_id == MOVE.request_id
    leaving = replace(RECORDED, command=command(to_cell="c2"))
    assert messages_to_cell(MOVE, replace(KNOWN, build=active, move=leaving), CONFIG, 5.0) == (leaving.command,)


@pytest.mark.parametrize("state", [BuildState.DELETING, BuildState.DELETED])
def test_the_delete_of_its_instance_ends_a_move_whose_cell_has_forgotten_that(state: BuildState) -> None:
    """Seed 106 of transfers with set-backs: it was set back to `leaving`, and its machine was gone."""
    leaving = replace(RECORDED, command=command(to_cell="c2"))
    known = replace(KNOWN, build=replace(BUILD, state=state), move=leaving)
    delete, query = messages_to_cell(MOVE, known, CONFIG, 5.0)
    assert delete == CellDelete(instance_uuid=UUID, project_id="p", begun=True)
    assert isinstance(query, CellMoveQuery)


def command(to_cell: str) -> CellMove:
    return CellMove(
        request_id=RECORDED.request_id,
        instance_uuid=UUID,
        project_id="p",
        kind=MoveKind.MIGRATE,
        to_cell=to_cell,
    )
