"""How long a request has been silent is counted by this process alone, and it is queried about less and less often."""

from __future__ import annotations

from itertools import pairwise

from msgspec.structs import replace

from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.cell import CellDelete
from bus.contracts.cell_queries import CellBuildQuery
from bus.contracts.moves import CellMoveQuery, MoveKind, MoveState
from bus.contracts.objects import Flavor
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.builds import OpenBuild, RecordedBuild
from scheduler_worker.domain.recorded_moves import RecordedMove
from scheduler_worker.domain.unanswered import (
    CELL_SILENT,
    CELL_UNKNOWN,
    MAX_PAUSE_S,
    MAX_QUERIES,
    Watching,
    look,
    marked,
    message_to_cell,
)

MOVE = RecordedMove(
    request_id="d0000000-0000-4000-8000-000000000001",
    instance_uuid="c0000000-0000-4000-8000-000000000001",
    project_id="p",
    kind=MoveKind.MIGRATE,
    digest=b"",
    state=MoveState.SCHEDULED,
    sequence=2,
    cell="c1",
)


def queried_at(moves: list[tuple[float, RecordedMove]]) -> list[float]:
    found, watching = [], Watching({})
    for now_s, move in moves:
        watching = look(watching.watched, [move], now_s=now_s, pause_s=60.0)
        found += [now_s] if watching.query else []
    return found


def test_a_silent_request_is_queried_about_again_after_twice_as_long_up_to_a_bound() -> None:
    times = queried_at([(float(second), MOVE) for second in range(0, 4000, 10)])
    assert times[:5] == [60.0, 180.0, 420.0, 900.0, 1500.0]
    assert {later - earlier for earlier, later in pairwise(times[3:])} == {MAX_PAUSE_S}


def test_an_event_of_it_begins_the_count_anew() -> None:
    later = replace(MOVE, sequence=11, state=MoveState.CLAIMING)
    assert queried_at([(0.0, MOVE), (50.0, MOVE), (55.0, later), (70.0, later), (114.0, later), (115.0, later)]) == [
        115.0
    ]


def test_after_questions_in_vain_it_is_to_be_marked_once() -> None:
    watching, silent = Watching({}), []
    for now_s in (0.0, 60.0, 180.0, 420.0, 900.0):
        watching = look(watching.watched, [MOVE], now_s=now_s, pause_s=60.0)
        silent += [now_s] if watching.silent else []
    assert silent[0] == 420.0 and watching.waiting == 1
    record = marked(MOVE, watching.watched[MOVE.request_id], 900.0, known=True)
    assert (record.code, record.reason) == (
        CELL_SILENT,
        "nothing is received of it from cell c1: queried 4 times in 900 s",
    )
    assert marked(MOVE, watching.watched[MOVE.request_id], 900.0, known=False).code == CELL_UNKNOWN
    assert look(watching.watched, [record], now_s=5000.0, pause_s=60.0).silent == ()


def test_what_has_ended_is_forgotten() -> None:
    first = look({}, [MOVE], now_s=0.0, pause_s=60.0)
    assert look(first.watched, [], now_s=60.0, pause_s=60.0) == Watching({})


BUILD = OpenBuild(
    build=RecordedBuild(
        instance_uuid="c0000000-0000-4000-8000-000000000001",
        project_id="p",
        state=BuildState.BUILDING,
        sequence=10,
        cell="c1",
    ),
    request=BuildRequest(
        instance_uuid="c0000000-0000-4000-8000-000000000001", project_id="p", flavor="m1.small", image="i"
    ),
)


def test_a_build_is_queried_with_what_its_command_named() -> None:
    config = SchedulerConfig(flavors={"m1.small": Flavor(vcpus=1, disk_gb=7)}, build_timeout_s=90.0)
    query = message_to_cell(BUILD, config)
    assert isinstance(query, CellBuildQuery)
    assert (query.spec.instance_uuid, query.spec.project_id) == (BUILD.instance_uuid, "p")
    assert (query.spec.image, query.spec.root_gb, query.build_timeout_s, query.sequence) == ("i", 7, 90.0, 10)


def test_a_delete_is_commanded_once_more_by_a_scheduler_that_knows_that_the_build_was_begun() -> None:
    deleting = replace(BUILD, build=replace(BUILD.build, state=BuildState.DELETING))
    assert message_to_cell(deleting, SchedulerConfig()) == CellDelete(
        instance_uuid=BUILD.instance_uuid, project_id="p", begun=True
    )


def test_a_move_is_queried_by_its_request() -> None:
    query = message_to_cell(MOVE, SchedulerConfig())
    assert isinstance(query, CellMoveQuery) and query.request_id == MOVE.request_id


def test_one_pass_queries_a_bounded_number_and_the_next_one_the_others() -> None:
    uuids = [f"c0000000-0000-4000-8000-{number:012}" for number in range(MAX_QUERIES + 3)]
    builds = [replace(BUILD, build=replace(BUILD.build, instance_uuid=uuid)) for uuid in uuids]
    watching: Watching[OpenBuild] = Watching({})
    queried = []
    for now_s in (0.0, 60.0, 61.0, 62.0):
        watching = look(watching.watched, builds, now_s=now_s, pause_s=60.0)
        queried.append([one.request_id for one in watching.query])
    assert [len(one) for one in queried] == [0, MAX_QUERIES, 3, 0]
    assert sorted(uuid for one in queried for uuid in one) == uuids


def test_a_silent_build_is_marked_in_its_record() -> None:
    watching: Watching[OpenBuild] = Watching({})
    for now_s in (0.0, 60.0, 180.0, 420.0):
        watching = look(watching.watched, [BUILD], now_s=now_s, pause_s=60.0)
    assert watching.silent == (BUILD,)
    record = marked(BUILD, watching.watched[BUILD.request_id], 420.0, known=True)
    assert (record.build.state, record.code) == (BuildState.BUILDING, CELL_SILENT)
