"""A silent service lists, when it is back, what its records have ordered it to destroy: that opens no breaker."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.build import AttemptRecord
from cell_conductor.domain.breaker import Breaker
from cell_conductor.domain.report import differences
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
    ("outcome", "is_open", "acted_on", "over"),
    [
        pytest.param("failed", False, MANY, 0, id="left when its service fell silent"),
        pytest.param("timed_out", False, MANY, 0, id="out of time"),
        pytest.param("failed", True, 0, 0, id="an open breaker holds them, too"),
        pytest.param("lost", False, 0, MANY, id="the report itself had ended it"),
        pytest.param("active", False, 0, MANY, id="it ran there, and was moved"),
    ],
)
async def test_a_machine_that_its_record_ordered_destroyed_is_not_counted_as_over(
    outcome: str, is_open: bool, acted_on: int, over: int
) -> None:
    """A chaos run with moves: services that had been paused came back with 7, 10 and 19 attempts that had gone on
    elsewhere meanwhile, reported them before they took the waiting orders, and three breakers opened."""
    ended = AttemptRecord(attempt=1, host="source", outcome=outcome, at=MOVED_AT)
    instances = [replace(moved(number, ELSEWHERE), history=(ended,)) for number in range(MANY)]
    async with guarded(instances) as (store, guard):
        if is_open:
            await store.safety.trip(Breaker(service=SERVICE, tripped_at=1.0))
        report = report_of_source(instances, store.deployment)
        briefs = await store.briefs([SOURCE], [one.uuid for one in instances])
        found = differences(
            report, briefs, now=MOVED_AT + 6, seen_at=MOVED_AT + 5, grace_s=30.0, deployment=store.deployment
        )
        assert len(found.harmful) == MANY > CONFIG.breaker_limit

        assert len(await guard.assess(report, found)) == acted_on

        breakers = [one for one in await store.safety.breakers() if one.tripped_at > 1.0]
        assert [breaker.over for breaker in breakers] == ([over] if over else [])
