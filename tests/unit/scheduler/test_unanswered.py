"""How long a request has been silent is counted by this process alone, and it is queried about less and less often."""

from __future__ import annotations

from itertools import pairwise

from msgspec.structs import replace

from bus.contracts.moves import MoveKind, MoveState
from scheduler_worker.domain.recorded_moves import RecordedMove
from scheduler_worker.domain.unanswered import CELL_SILENT, CELL_UNKNOWN, MAX_PAUSE_S, Watching, look, marked

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
