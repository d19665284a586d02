"""The parts of lab/benchmarks/rest_beside.py that could be wrong without any notice."""

from __future__ import annotations

import argparse
import math

import pytest

from lab.benchmarks.rest_beside import sizes
from lab.benchmarks.rest_client import LATE, Outcome, Reader
from lab.benchmarks.rest_phases import FLAT, Phase, like
from lab.benchmarks.rest_report import Figures, Row, add

ANSWERS = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 12\r\n\r\n" + b'{"a":"\r\n\r\n"}',
    b"HTTP/1.1 204 No Content\r\nvary: x\r\n\r\n",
    b"HTTP/1.1 409 Conflict\r\ncontent-length: 0\r\n\r\n",
)
READ = [(200, b'{"a":"\r\n\r\n"}'), (204, b""), (409, b"")]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 60, 1000])
def test_answers_are_read_however_they_are_cut(size: int) -> None:
    reader = Reader()
    found = [reader.feed(one[at : at + size]) for one in ANSWERS for at in range(0, len(one), size)]

    assert [answer for answer in found if answer is not None] == READ


def outcome(
    *, per_s: float = 1.0, p50_ms: float = 1.0, statuses: dict[int, int] | None = None, done: int = 4
) -> Figures:
    found = Outcome(done=done, seconds=1.0, per_s=per_s, p50_ms=p50_ms, p95_ms=p50_ms, statuses=statuses or {200: 4})
    return Figures(outcome=found, cpu_ms={"server": 1.0})


def row_of(phase: Phase, size: int, **found: Figures) -> Row:
    rows: list[Row] = []
    add(rows, phase, size, found)
    return rows[0]


BY_KEY = {phase.key: phase for phase in FLAT}


def test_a_rate_is_better_when_it_is_larger() -> None:
    put = BY_KEY["put"]
    better = row_of(put, 1000, real=outcome(per_s=100.0), berth=outcome(per_s=1000.0))
    worse = row_of(put, 1000, real=outcome(per_s=100.0), berth=outcome(per_s=999.0))

    assert (better.ratio, better.met) == (10.0, True)
    assert worse.met is False


def test_a_median_is_better_when_it_is_smaller_and_the_goal_depends_on_the_size() -> None:
    search = BY_KEY["candidates"]
    found = {"real": outcome(p50_ms=80.0), "frozen": outcome(p50_ms=40.0), "berth": outcome(p50_ms=2.0)}

    small, large, other = (row_of(search, size, **found) for size in (1000, 10_000, 50))

    assert (small.ratio, small.ratio_frozen, small.met) == (40.0, 20.0, True)
    assert large.met is False
    assert other.met is None


def test_a_system_that_did_nothing_is_no_measure() -> None:
    none = outcome(per_s=0.0, p50_ms=math.inf, done=0, statuses={LATE: 1})
    rows = [
        row_of(phase, 1000, **found)
        for phase in (BY_KEY["put"], BY_KEY["candidates"])
        for found in ({"real": none, "berth": outcome()}, {"real": outcome(), "berth": none})
    ]

    assert [(row.ratio, row.ratio_cpu, row.met) for row in rows] == [(None, None, None)] * 4
    assert row_of(like(1000), 9, berth=none).met is False


def test_a_goal_in_milliseconds_needs_no_other_system() -> None:
    assert row_of(like(1000), 9, berth=outcome(p50_ms=50.0)).met is True
    assert row_of(like(1000), 9, berth=outcome(p50_ms=50.1)).met is False


def test_what_did_not_go_well_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    row_of(BY_KEY["many"], 1000, real=outcome(statuses={204: 4, 409: 2, 500: 1, LATE: 1}))

    assert "answers: 204: 4, 409: 2, 500: 1, no answer in time: 1" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "1000,", "x", "-5", "4", "1e3", "9999999"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        sizes(text)


def test_sizes() -> None:
    assert sizes("1000,10000") == [1000, 10_000]
