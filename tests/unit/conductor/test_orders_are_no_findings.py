"""A silent service lists, when it is back, what its records have ordered it to destroy: that opens no breaker."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from bus.contracts.build import AttemptRecord
from bus.contracts.moves import MoveKind
from cell_conductor.domain import events as e
from cell_conductor.domain.breaker import Breaker
from cell_conductor.domain.instance import MAX_ENDED_ATTEMPTS, State
from cell_conductor.domain.proof import is_ordered
from cell_conductor.domain.report import differences
from cell_conductor.store import rows
from tests.unit.conductor.move_scenario import MOVE, OTHER, Scenario, request, seen, to_resized
from tests.unit.conductor.scenario import UUID, host, spawned
from tests.unit.conductor.test_outdated_reports import (
    CONFIG,
    MANY,
    MOVED_AT,
    SERVICE,
    SOURCE,
    guarded,
    moved,
    report_of_source,
)

ELSEWHERE = "other"


@pytest.mark.parametrize(
    ("outcome", "left", "is_open", "acted_on", "over"),
    [
        pytest.param("failed", (), False, MANY, 0, id="left when its service fell silent"),
        pytest.param("timed_out", (), False, MANY, 0, id="out of time"),
        pytest.param("failed", (), True, 0, 0, id="an open breaker holds them, too"),
        pytest.param("lost", (), False, 0, MANY, id="the report itself had ended it"),
        pytest.param("active", (1,), False, MANY, 0, id="it ran there, and was moved"),
        pytest.param("active", (), False, 0, MANY, id="it ran there, and no move explains that it is elsewhere"),
    ],
)
async def test_a_machine_that_its_record_ordered_destroyed_is_not_counted_as_over(
    outcome: str, left: tuple[int, ...], is_open: bool, acted_on: int, over: int
) -> None:
    """A chaos run with moves: services that had been paused came back with 7, 10 and 19 attempts that had gone on
    elsewhere meanwhile, reported them before they took the waiting orders, and three breakers opened."""
    ended = AttemptRecord(attempt=1, host="source", outcome=outcome, at=MOVED_AT)
    instances = [replace(moved(number, ELSEWHERE), history=(ended,), ended_attempts=left) for number in range(MANY)]
    async with guarded(instances) as (store, guard):
        if is_open:
            await store.safety.trip(Breaker(service=SERVICE, tripped_at=1.0))
        report = report_of_source(instances, store.deployment)
        briefs = await store.briefs([SOURCE], [one.uuid for one in instances])
        found = differences(report, briefs, now=MOVED_AT + 60, grace_s=30.0, deployment=store.deployment)
        assert len(found.harmful) == MANY > CONFIG.breaker_limit

        assert len(await guard.assess(report, found)) == acted_on

        breakers = [one for one in await store.safety.breakers() if one.tripped_at > 1.0]
        assert [breaker.over for breaker in breakers] == ([over] if over else [])


def lists(made: Scenario, attempt: int, n: int) -> bool:
    """Whether a report that lists that machine only repeats what the record has ordered."""
    return is_ordered(made.instance, e.HostRuns(at=300.0, attempt=attempt, host_uuid=host(n), service="s1"))


def confirmed() -> Scenario:
    made = to_resized()
    made.apply(request(MoveKind.CONFIRM, request_id=OTHER))
    return made


def test_the_source_of_a_move_is_no_finding_from_its_confirm_on() -> None:
    """5,000 moves with a fault every two seconds: a scan that began before six sources of one service were destroyed
    listed them after that, and its breaker opened. All four did."""
    made = to_resized()
    assert not lists(made, 1, 1)
    made.apply(request(MoveKind.CONFIRM, request_id=OTHER))
    assert (made.instance.phase, lists(made, 1, 1)) == ((State.DESTROYING, State.ACTIVE), True)
    made.apply(e.Destroyed(at=220.0, attempt=1, host_uuid=host(1), service="s1"))
    assert (made.instance.phase, lists(made, 1, 1)) == ((State.RELEASING, State.ACTIVE), True)
    made.apply(e.Released(at=221.0, consumer=MOVE))
    assert (made.instance.state, made.instance.ended_attempts, lists(made, 1, 1)) == (State.ACTIVE, (1,), True)
    assert not lists(made, 2, 2)  # what runs is none


def test_the_destination_of_a_move_that_is_reverted_is_no_finding() -> None:
    made = to_resized()
    made.apply(
        request(MoveKind.REVERT, request_id=OTHER),
        seen(),
        e.Destroyed(at=220.0, attempt=2, host_uuid=host(2), service="s1"),
        e.Reverted(at=221.0, attempt=3, consumer_generation=11),
    )
    made.end(1, 1, runs=True)
    assert (made.instance.state, made.instance.attempt) == (State.ACTIVE, 1)
    assert lists(made, 2, 2)
    assert not lists(made, 1, 1)


def test_so_many_attempts_of_moves_stay_on_record() -> None:
    made = confirmed()
    made.instance = replace(made.instance, ended_attempts=tuple(range(101, 101 + MAX_ENDED_ATTEMPTS)))
    made.apply(e.Destroyed(at=220.0, attempt=1, host_uuid=host(1), service="s1"), e.Released(at=221.0, consumer=MOVE))
    assert made.instance.ended_attempts == (*range(102, 101 + MAX_ENDED_ATTEMPTS), 1)
    made.apply(spawned(attempt=2, at=230.0))
    assert len(made.instance.ended_attempts) == MAX_ENDED_ATTEMPTS


def test_ended_attempts_of_records_of_earlier_versions_are_read() -> None:
    stored = b'{"uuid":"%s","left":[1,3]}' % UUID.encode()
    assert rows.decode(stored).ended_attempts == (1, 3)
    assert msgspec.json.encode(rows.decode(stored)) == stored
