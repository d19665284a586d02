"""Trace contexts, sampling, batches and the export, without a worker."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
from collections.abc import Sequence

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from bus.consuming.outcome import Done, Received, Refuse
from bus.contracts.base import Meta
from bus.contracts.build import BuildRequest
from bus.tracing import otlp_json
from bus.tracing.context import CURRENT, Span, SpanKind, TraceContext, context_of, parse_traceparent, traceparent_of
from bus.tracing.otlp_json import OtlpJsonExporter
from bus.tracing.tracer import MAX_SPANS, ExportFailed, TraceLimit, Tracer, work_for

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
LIMIT_S = 20.0
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
SAMPLED = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture(autouse=True)
def patient_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    """An export fails by the time only where a test is about that."""
    monkeypatch.setattr(otlp_json, "EXPORT_TIMEOUT_S", LIMIT_S)


class KeptSpans:
    """An exporter that keeps what it is given. fails: it takes nothing."""

    def __init__(self, *, fails: bool = False) -> None:
        self.spans: list[Span] = []
        self.fails = fails

    async def export(self, spans: Sequence[Span]) -> None:
        if self.fails:
            raise ExportFailed("away")
        self.spans += spans

    async def close(self) -> None:
        pass


def made(exporter: KeptSpans, *, ratio: float = 1.0, most_per_s: float = 1_000.0) -> Tracer:
    """At a moment that does not pass."""
    return Tracer(exporter, ratio=ratio, most_per_s=most_per_s, rng=random.Random(1), monotonic=lambda: 1_000.0)


def request(number: int, traceparent: str | None = None) -> Received:
    uuid = f"00000000-0000-4000-8000-{number:012d}"
    message = BuildRequest(instance_uuid=uuid, flavor="m1.small", project_id="p")
    return Received(message, Meta(id=uuid, traceparent=traceparent), "api", "scheduler.requests")


@pytest.mark.parametrize(
    ("text", "sampled"),
    [
        (SAMPLED, True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-ff", True),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-holds", True),
    ],
)
def test_a_header_of_the_specification_is_read(text: str, sampled: bool) -> None:
    assert parse_traceparent(text) == (TraceContext(TRACE, SPAN), sampled)


@pytest.mark.parametrize(
    "text",
    [
        "",
        None,
        "00",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f" {SAMPLED}",
        f"00-{TRACE[:-1]}\N{FULLWIDTH DIGIT ONE}-{SPAN}-01",
    ],
)
def test_what_is_no_header_of_the_specification_is_none(text: str | None) -> None:
    assert parse_traceparent(text) is None


@given(st.text(max_size=300))
def test_no_text_breaks_the_parser(text: str) -> None:
    found = parse_traceparent(text)
    assert found is None or found[0].header[3:52] == text[3:52]


async def test_a_batch_of_several_sampled_requests_is_linked_with_each_of_them() -> None:
    exporter = KeptSpans()
    tracer = made(exporter, ratio=0.0)
    batch = [request(1, SAMPLED), request(2), request(3, f"00-{'a' * 32}-{'b' * 16}-01"), request(4, "nonsense")]
    with tracer.consuming("api", "scheduler.requests", batch) as outcomes:
        first, third = batch[0].message.instance_uuid, batch[2].message.instance_uuid  # type: ignore[attr-defined]
        assert (context_of(first) or pytest.fail()).trace_id == TRACE
        assert (context_of(third) or pytest.fail()).trace_id == "a" * 32
        assert traceparent_of(batch[1].message.instance_uuid) == ""  # type: ignore[attr-defined]
        scope = CURRENT.get()
        assert scope is not None
        work = scope.start_span("transaction")
        assert work is not None
        work.end()
        outcomes += [Done(), Done(), Refuse("build.refused"), Done()]
    assert CURRENT.get() is None
    await tracer.close()
    by_name = {(span.name, span.context.trace_id): span for span in exporter.spans}
    whole = next(span for (name, _), span in by_name.items() if name == "scheduler.requests batch")
    parts = [by_name["scheduler.requests", TRACE], by_name["scheduler.requests", "a" * 32]]
    assert [span.parent_id for span in parts] == [SPAN, "b" * 16]
    assert [span.links for span in parts] == [(whole.context,), (whole.context,)]
    assert list(whole.links) == [span.context for span in parts]
    assert [span.error for span in parts] == ["", "build.refused"]
    assert work.parent_id == whole.context.span_id


async def test_a_client_cannot_have_more_traces_made_than_the_limit() -> None:
    exporter = KeptSpans()
    tracer = made(exporter, ratio=1.0, most_per_s=5.0)
    with tracer.consuming("api", "scheduler.requests", [request(n, SAMPLED) for n in range(20)]):
        pass
    with tracer.consuming("cell1", "conductor.work", [request(20, SAMPLED)]):
        pass  # below the edge a trace that was begun goes on
    await tracer.close()
    assert sorted(span.name for span in exporter.spans) == [
        "conductor.work",
        *["scheduler.requests"] * 5,
        "scheduler.requests batch",
    ]


@pytest.mark.parametrize(("ratio", "least", "most"), [(0.0, 0, 0), (0.05, 30, 75), (1.0, 1_000, 1_000)])
def test_the_ratio_of_requests_is_sampled(ratio: float, least: int, most: int) -> None:
    tracer = made(KeptSpans(), ratio=ratio, most_per_s=100_000.0)
    count = sum(tracer._parent_of(request(n), "scheduler.requests") is not None for n in range(1_000))
    assert least <= count <= most


def test_no_trace_begins_below_the_edge() -> None:
    assert made(KeptSpans())._parent_of(request(1), "conductor.work") is None


def test_a_limit_fills_again_with_time() -> None:
    limit = TraceLimit(most_per_s=2.0, left=1.0)
    assert [limit.take(at) for at in (0.0, 0.0, 0.25, 0.5, 100.0, 100.0, 100.0)] == [
        True, False, False, True, True, True, False,
    ]  # fmt: skip


async def test_work_of_a_task_that_outlives_its_batch_stays_in_the_trace_of_its_cause() -> None:
    exporter = KeptSpans()
    tracer = made(exporter)
    batch = [request(1, SAMPLED), request(2, SAMPLED)]
    uuid = batch[1].message.instance_uuid  # type: ignore[attr-defined]
    with tracer.consuming("cell1", "compute.commands", batch):
        scope = CURRENT.get()
    assert scope is not None
    assert scope.start_span("late") is None  # the batch is over
    token = CURRENT.set(scope)
    with work_for("build", uuid):
        inner = CURRENT.get()
        assert inner is not None
        call = inner.start_span("ironic PUT")
        assert call is not None
        call.end()
    CURRENT.reset(token)
    await tracer.close()
    build = next(span for span in exporter.spans if span.name == "build")
    assert (build.context.trace_id, call.parent_id) == (TRACE, build.context.span_id)


async def test_spans_that_nothing_takes_are_dropped_and_bounded() -> None:
    exporter = KeptSpans(fails=True)
    tracer = made(exporter)
    for _ in range(MAX_SPANS + 10):
        tracer.start("s", parent=None).end()
    assert len(tracer._spans) == MAX_SPANS
    await tracer.close()
    assert not tracer._spans
    assert not exporter.spans


async def test_a_handler_that_raises_leaves_a_failed_span() -> None:
    exporter = KeptSpans()
    tracer = made(exporter)
    with pytest.raises(ValueError, match="boom"), tracer.consuming("cell1", "conductor.work", [request(1, SAMPLED)]):
        raise ValueError("boom")
    await tracer.close()
    assert [span.error for span in exporter.spans] == ["handler.raised"]


def test_the_export_is_what_opentelemetry_reads() -> None:
    tracer = made(KeptSpans())
    parent = TraceContext(TRACE, SPAN)
    span = tracer.start(
        "a", parent=parent, kind=SpanKind.CONSUMER, links=[parent], attributes={"text": "\x00é", "number": 7}
    )
    span.ended_ns, span.error = span.started_ns + 5, "code"
    body = OtlpJsonExporter("http://127.0.0.1:1", {"service.name": "scheduler"}).encode([span]).decode()
    # OTLP's JSON has ids as hexadecimal digits, where protobuf's own has base64.
    for one in (TRACE, SPAN, span.context.span_id):
        body = body.replace(f'"{one}"', f'"{base64.b64encode(bytes.fromhex(one)).decode()}"')
    read = json_format.Parse(body, trace_service_pb2.ExportTraceServiceRequest()).resource_spans[0]
    (found,) = read.scope_spans[0].spans
    assert (found.trace_id.hex(), found.parent_span_id.hex()) == (TRACE, SPAN)
    assert (found.kind, found.status.code, found.end_time_unix_nano - found.start_time_unix_nano) == (5, 2, 5)
    assert {one.key: one.value.string_value or one.value.int_value for one in found.attributes} == {
        "text": "\x00é",
        "number": 7,
    }


async def test_a_collector_that_takes_no_json_is_reported_with_what_to_set() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 415 Unsupported Media Type\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    exporter = OtlpJsonExporter(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {})
    async with server:
        with pytest.raises(ExportFailed, match="takes no JSON"):
            await exporter.export([])
        await exporter.close()


async def test_an_export_goes_on_after_the_collector_has_closed_the_connection() -> None:
    bodies: list[int] = []

    async def take_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        bodies.append(len(await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))))
        writer.write(ANSWER)  # without "connection: close"
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(take_one, "127.0.0.1", 0)
    exporter = OtlpJsonExporter(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {})
    async with server:
        for _ in range(3):
            await exporter.export([])
        await exporter.close()
    assert len(bodies) == 3


async def test_a_collector_that_answers_for_ever_holds_neither_export_nor_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each read gets a byte, so no time-out of the socket ever ends it."""
    monkeypatch.setattr(otlp_json, "EXPORT_TIMEOUT_S", 0.2)
    dripping = Dripping()
    server = await asyncio.start_server(dripping, "127.0.0.1", 0)
    exporter = OtlpJsonExporter(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {})
    async with server:
        while not dripping.answered:  # a machine that stands still lets the time pass before there is a connection
            with pytest.raises(ExportFailed, match="TimeoutError"):
                await exporter.export([])
        await ended(dripping.gone)


async def test_no_more_of_an_answer_is_read_than_is_needed() -> None:
    """A collector that never ends its body costs the export no more time than one that does."""
    gone = asyncio.Event()

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"1000\r\n" + b"x" * 0x1000 + b"\r\n")
                await writer.drain()
        writer.close()
        gone.set()

    server = await asyncio.start_server(pour, "127.0.0.1", 0)
    exporter = OtlpJsonExporter(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {})
    async with server:
        await exporter.export([])
        await exporter.close()
        await ended(gone)


class Dripping:
    """A collector that sends a byte of an answer now and then, for ever. gone: none of its connections is left."""

    def __init__(self) -> None:
        self.answered = self.open = 0
        self.gone = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.gone.clear()
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            self.answered += 1
            writer.write(b"HTTP/1.1 200 OK\r\nx: ")
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        self.open -= 1
        if not self.open:
            self.gone.set()


async def test_the_spans_of_an_export_that_was_given_up_are_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector takes one export, and hangs with the next on the same connection."""
    connections: list[None] = []
    gone = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(None)
        await reader.readuntil(b"]}]}]}")
        writer.write(ANSWER)
        await reader.read()  # until the exporter lets go
        writer.close()
        gone.set()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    exporter = OtlpJsonExporter(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {})
    async with server:
        await exporter.export([])
        monkeypatch.setattr(otlp_json, "EXPORT_TIMEOUT_S", 0.2)
        with pytest.raises(ExportFailed, match="TimeoutError"):
            await exporter.export([])
        await ended(gone)
    assert len(connections) == 1


async def ended(gone: asyncio.Event) -> None:
    """Wait until the connection is gone."""
    async with asyncio.timeout(LIMIT_S):
        await gone.wait()


async def test_an_export_signs_in_and_names_no_password() -> None:
    heads: list[bytes] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    exporter = OtlpJsonExporter(f"http://me:se%20cret@127.0.0.1:{server.sockets[0].getsockname()[1]}", {})
    async with server:
        with pytest.raises(ExportFailed, match="answered 401") as failed:
            await exporter.export([])
        await exporter.close()
    assert b"basic " + base64.b64encode(b"me:se cret") in heads[0].replace(b"Basic", b"basic")
    assert "cret" not in str(failed.value) and "me" not in str(failed.value)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:99999", f"http://{'a' * 70}.example"])
async def test_an_endpoint_that_is_no_address_fails_the_export(endpoint: str) -> None:
    exporter = OtlpJsonExporter(endpoint, {})
    with pytest.raises(ExportFailed):
        await exporter.export([])
    await exporter.close()
