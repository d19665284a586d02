"""The parts of lab/benchmarks/rest_beside.py that could be wrong without any notice."""

from __future__ import annotations

import argparse
import asyncio
import math

import pytest

from lab.benchmarks.rest_beside import sizes
from lab.benchmarks.rest_client import LATE, Connection, Outcome
from lab.benchmarks.rest_phases import FLAT
from lab.benchmarks.rest_report import Figures, lines, row_of

ANSWERS = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 12\r\n\r\n" + b'{"a":"\r\n\r\n"}',
    b"HTTP/1.1 204 No Content\r\nvary: x\r\n\r\n",
    b"HTTP/1.1 409 Conflict\r\ncontent-length: 0\r\n\r\n",
)
READ = [(200, b'{"a":"\r\n\r\n"}'), (204, b""), (409, b"")]


@pytest.mark.parametrize("size", [1, 60, 1000])
async def test_answers_are_read_however_they_are_cut(size: int) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for one in ANSWERS:
            await reader.readexactly(3)
            for at in range(0, len(one), size):
                writer.write(one[at : at + size])
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        connection = Connection(*server.sockets[0].getsockname())
        assert [await connection.ask(b"ask") for _ in ANSWERS] == READ
        with pytest.raises(ConnectionError):
            await connection.ask(b"ask")


def outcome(
    *, per_s: float = 1.0, p50_ms: float = 1.0, statuses: dict[int, int] | None = None, done: int = 4
) -> Figures:
    found = Outcome(done=done, seconds=1.0, per_s=per_s, p50_ms=p50_ms, p95_ms=p50_ms, statuses=statuses or {200: 4})
    return Figures(outcome=found, cpu_ms={"server": 1.0})


BY_KEY = {phase.key: phase for phase in FLAT}


def test_a_rate_is_better_when_it_is_larger_and_a_median_when_it_is_smaller() -> None:
    rate = row_of(BY_KEY["put"], 1000, {"real": outcome(per_s=100.0), "berth": outcome(per_s=1000.0)})
    median = row_of(BY_KEY["candidates"], 1000, {"real": outcome(p50_ms=80.0), "berth": outcome(p50_ms=2.0)})

    assert (rate.ratio, median.ratio) == (10.0, 40.0)


def test_a_system_that_did_nothing_is_no_measure() -> None:
    none = outcome(per_s=0.0, p50_ms=math.inf, done=0, statuses={LATE: 1})
    rows = [
        row_of(phase, 1000, found)
        for phase in (BY_KEY["put"], BY_KEY["candidates"])
        for found in ({"real": none, "berth": outcome()}, {"real": outcome(), "berth": none}, {"berth": outcome()})
    ]

    assert {(row.ratio, row.ratio_cpu) for row in rows} == {(None, None)}


def test_what_did_not_go_well_is_named() -> None:
    row = row_of(BY_KEY["many"], 1000, {"real": outcome(statuses={204: 4, 409: 2, 500: 1, LATE: 1})})

    assert "answers: 204: 4, 409: 2, 500: 1, no answer in time: 1" in lines(row)[1]


@pytest.mark.parametrize("text", ["", "1000,", "x", "-5", "4", "1e3", "9999999"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        sizes(text)


def test_sizes() -> None:
    assert sizes("1000,10000") == [1000, 10_000]
