"""The laboratory's parts that could be wrong without any notice: proxy, demonstration, benchmarks."""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import inspect
import io
import math
import os
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from berth.client import Track
from berth.load import LoadPlan
from berth.load.summary import Failure, sum_up
from lab.benchmarks import scale, street, street_pair, street_systems
from lab.benchmarks.rest_beside import sizes
from lab.benchmarks.rest_client import LATE, Connection, Outcome
from lab.benchmarks.rest_phases import FLAT
from lab.benchmarks.rest_report import Figures, lines, row_of
from lab.benchmarks.scale import Run, Scale, parse_parts, spread, tables
from lab.benchmarks.street_report import Result
from lab.chaos.proxy import MAX_HELD_BYTES, TcpProxy
from lab.demo.run import Undisturbed, failed_as_planned, failures_in_words, planned, render_load, short, undisturbed

# --- the proxy changes no byte, and cuts, delays and stalls on command


BIG = bytes(range(256)) * 16_384  # 4 MiB


class Echo:
    """Sends back what it gets."""

    def __init__(self) -> None:
        self.port = 0
        self.received = 0

    async def open(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                self.received += len(data)
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    echo = Echo()
    server = await echo.open()
    yield echo
    server.close()


@pytest.fixture
async def proxy(echo: Echo) -> AsyncIterator[TcpProxy]:
    proxy = TcpProxy(port=echo.port)
    await proxy.open()
    yield proxy
    await proxy.close()


Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def pair(proxy: TcpProxy) -> AsyncIterator[Pair]:
    """A connection through the proxy that stands on both sides."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    await there_and_back(b"x", reader, writer)
    yield reader, writer
    await left(writer)


async def left(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not condition():  # noqa: ASYNC110 - the proxy has no events to wait for
            await asyncio.sleep(0)


async def there_and_back(
    data: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout_s: float = 10.0
) -> bytes:
    async with asyncio.timeout(timeout_s):
        writer.write(data)
        answer, _ = await asyncio.gather(reader.readexactly(len(data)), writer.drain())
        return answer


async def hung_up(reader: asyncio.StreamReader) -> bool:
    """Whether the other side ends the connection."""
    async with asyncio.timeout(60.0):
        try:
            return await reader.read(1) == b""
        except ConnectionError:
            return True


async def test_bytes_pass_unchanged_both_ways(proxy: TcpProxy, pair: Pair) -> None:
    assert await there_and_back(BIG, *pair) == BIG
    assert proxy.links == 1


async def test_a_cut_ends_both_sides(proxy: TcpProxy, pair: Pair) -> None:
    for link in proxy.some(1.0, random.Random(1)):
        link.cut()
    assert await hung_up(pair[0])
    assert proxy.links == 0


async def test_a_stalled_connection_is_silent_and_then_goes_on_in_order(
    proxy: TcpProxy, echo: Echo, pair: Pair
) -> None:
    (link,) = proxy.some(1.0, random.Random(1))
    link.stalled = True
    passing = asyncio.create_task(there_and_back(BIG, *pair))
    await until(lambda: link.client.held_bytes > 0)
    assert echo.received == 1, "nothing reached the server"
    link.release()
    assert await passing == BIG


async def test_what_is_held_back_is_bounded(proxy: TcpProxy, pair: Pair) -> None:
    (link,) = proxy.some(1.0, random.Random(1))
    link.stalled = True
    passing = asyncio.create_task(there_and_back(BIG, *pair))
    await until(lambda: link.client.transport is not None and not link.client.transport.is_reading())
    assert MAX_HELD_BYTES < link.client.held_bytes < 2 * MAX_HELD_BYTES
    link.release()
    assert await passing == BIG


async def test_a_delay_adds_up_in_each_direction(proxy: TcpProxy, pair: Pair) -> None:
    (link,) = proxy.some(1.0, random.Random(1))
    link.delay_s = 0.05
    began = asyncio.get_running_loop().time()
    await there_and_back(b"yz", *pair)
    assert asyncio.get_running_loop().time() - began >= 0.1
    link.release()
    assert await there_and_back(BIG, *pair) == BIG


async def test_an_unavailable_server_is_a_connection_that_ends() -> None:
    gone = TcpProxy(port=1)
    await gone.open()
    reader, writer = await asyncio.open_connection("127.0.0.1", gone.port)
    assert await hung_up(reader)
    await left(writer)
    await gone.close()


async def test_a_client_that_leaves_is_left(proxy: TcpProxy, pair: Pair) -> None:
    (link,) = proxy.some(1.0, random.Random(1))
    link.stalled = True
    pair[1].close()
    await until(lambda: proxy.links == 0)
    link.release()  # late: the peer is gone


# --- the demonstration's undisturbed part


def track(flavor: str, published: float, ended: float | None, state: str = "active") -> Track:
    return Track(
        instance_uuid=flavor, flavor=flavor, intended_at=0.0, published_at=published, ended_at=ended, state=state
    )


def test_the_undisturbed_part_is_virtual_machines_up_to_the_accident() -> None:
    tracks = [
        track("m1.small", 10.0, 11.0),
        track("m1.small", 10.5, 12.0),
        track("m1.small", 10.5, 11.5, "failed"),
        track("bm.gold", 9.0, 11.0),
        track("m1.tiny", 10.5, 13.0),  # after the accident
        track("m1.tiny", 10.5, None, "building"),
    ]
    assert undisturbed(tracks, 12.5) == Undisturbed(2, 2.0, 1.0)
    assert undisturbed(tracks, math.inf) == Undisturbed(3, 3.0, 1.0)
    assert undisturbed(tracks, 10.0) == Undisturbed(0, 0.0, 0.0)


def test_how_many_builds_are_meant_to_fail_follows_from_the_plan_and_the_nodes() -> None:
    plan = LoadPlan(boots=40, mix={"bm.gold": 1.0})
    free = {"provision_state": "available", "maintenance": False, "resource_class": "baremetal-gold"}
    nodes = [free] * 30 + [{**free, "maintenance": True}, {**free, "provision_state": "active"}]
    assert short(plan, 1, nodes) == {"bm.gold": (40, 30)}
    assert "40 are of bm.gold, and there are 30 such nodes. So at least 10 of them" in planned(
        plan, short(plan, 1, nodes)
    )
    assert "So at least 0 of them" in planned(plan, short(plan, 1, [free] * 40))


@pytest.mark.parametrize(
    ("failed", "words"),
    [(10, "10 failed as planned"), (12, "12 failed, 10 of them as planned")],
)
def test_planned_failures_are_counted_as_planned(failed: int, words: str) -> None:
    """A reader stopped at "9 failed", before the explanation."""
    tracks = [track("bm.gold", 1.0, 2.0, "failed" if number < failed else "active") for number in range(40)]
    report = sum_up(tracks, started=1.0, now=2.0)
    console = Console(file=io.StringIO(), width=200)
    render_load(report, console, planned_failures=10)
    assert f"a second, {words}\n" in console.file.getvalue()  # type: ignore[attr-defined]
    assert failures_in_words(failed, 0) == f"{failed} failed"


def test_what_failed_as_planned_lacked_a_node_of_a_short_flavor() -> None:
    """A run had 8 failures where 7 were the difference: a node was being cleaned after a planned fault."""

    def failure(flavor: str, code: str) -> Failure:
        return Failure(instance_uuid="", flavor=flavor, state="failed", code=code, reason="", attempts=1)

    failures = [
        *[failure("bm.gold", "no_valid_host")] * 8,
        failure("bm.gold", "max_retries_exceeded"),
        failure("bm.gold", "delivery.exhausted"),
        failure("m1.tiny", "no_valid_host"),
    ]
    assert failed_as_planned(failures, {"bm.gold": (47, 40)}) == 9
    assert failed_as_planned(failures, {}) == 0


# --- the parts of lab/benchmarks/rest_beside.py that could be wrong without any notice


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


# --- the parts of lab/benchmarks/street.py and lab/benchmarks/scale.py that could be wrong without any notice


ROOT = Path(__file__).parents[3]


def result(boots_per_s: float) -> Result:
    empty: dict[str, float] = {}
    return Result(
        system="real", boots=10, hosts=8, cells=4, schedulers=1, boots_per_s=boots_per_s, latency_ms=empty,
        stages_ms={}, spent_ms={}, idle_p50_ms=1.0, idle_p95_ms=1.0, idle_stages_ms=empty, idle_spent_ms=empty,
        invariants_hold=True, active=10,
    )  # fmt: skip


def run(hosts: int, schedulers: int = 1, *, boots_per_s: float | None = None) -> Run:
    found = None if boots_per_s is None else result(boots_per_s)
    return Run(hosts=hosts, schedulers=schedulers, result=found, why_not="" if found else "ended after 1 s")


def test_the_line_that_the_issue_names_is_there_to_be_typed() -> None:
    path = ROOT / "scripts" / "street"
    assert os.access(path, os.X_OK)
    assert "lab.benchmarks.street" in path.read_text()


def test_the_earlier_and_the_present_street_are_compared_by_what_both_have() -> None:
    assert os.access(ROOT / "scripts" / "steps" / "pair", os.X_OK)
    earlier, now = (msgspec.to_builtins(result(rate)) for rate in (1_000.0, 1_500.0))
    now["idle_spent_ms"] = {"queued": 1.0}
    lines = list(street_pair.table(earlier, now))
    assert lines[2:] == [
        "| boots a second, at once | 1000.00 | 1500.00 | 1.50 |",
        "| alone, p50 ms | 1.00 | 1.00 | 1.00 |",
    ]


def test_by_default_the_street_measures_all_that_it_can_in_one_run() -> None:
    options = street.parsed([])
    assert (options.only, options.bare, options.rates, options.statements) == ("real", True, True, True)
    assert (options.hosts, options.cells) == (10_000, 4) and options.boots >= 20_000


def test_a_part_holds_everything_that_the_street_reads() -> None:
    """The street had learned two options that scale did not pass: every part ended in an AttributeError."""
    options = scale.options_of(1000, 2, 50)
    tree = ast.parse(inspect.getsource(street_systems.on_real_servers))
    requested = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "options"
    }
    assert requested and requested <= vars(options).keys()
    assert (options.hosts, options.schedulers, options.boots, options.cells) == (1000, 2, 50, scale.CELLS)


@pytest.mark.parametrize("text", ["", "x", "0x1", "1000x0", "1000x1x1", "many", "1000x1,"])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_parts(text)


def test_parts_are_read() -> None:
    assert parse_parts("1000x1, 20x4,7") == [(1000, 1), (20, 4), (7, 1)]
    assert {hosts for hosts, _ in parse_parts(scale.PARTS)} == {1_000, 10_000, 100_000}


def test_the_tables_have_each_part_and_how_far_apart_the_fewest_and_the_most_hosts_are() -> None:
    runs = [run(1000, boots_per_s=1000.0), run(10_000, 4, boots_per_s=5.0), run(100_000, boots_per_s=850.0)]
    assert "0.85 of the throughput" in tables(Scale(runs=runs, spread=spread(runs)))
    assert "not measured" in tables(Scale(runs=runs[:2], spread=spread(runs[:2])))


@pytest.mark.parametrize(
    ("most", "verdict"), [(799.0, "NOT within"), (801.0, "within"), (1249.0, "within"), (1251.0, "NOT within")]
)
def test_how_far_apart_the_fewest_and_the_most_hosts_are(most: float, verdict: str) -> None:
    found = spread(
        [
            run(10, boots_per_s=1000.0),
            run(100, boots_per_s=1.0),
            run(1000, boots_per_s=most),
            run(10, 2, boots_per_s=1.0),
        ]
    )
    assert found is not None and (found.fewest, found.most, found.verdict) == (10, 1000, verdict)
