"""Both clients of `/api/v1` before a server that answers as no server should: bounds, faults, streams that are cut."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from berth.client import (
    ApiAddressInvalid,
    ApiAnswerInvalid,
    ApiProblem,
    ApiTimeout,
    ApiUnavailable,
    AsyncClient,
    Client,
    Reconnected,
    answers,
    event_feed,
)
from bus.contracts.build import BuildEvent, BuildRecord, BuildState
from bus.faults import Fault

UUID = "10000000-0000-4000-8000-000000000001"
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def answer(body: bytes, head: bytes = OK) -> bytes:
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


def problem(status: int, code: str, *more: bytes) -> bytes:
    body = msgspec.json.encode({"title": "t", "status": status, "code": code, "detail": "why"})
    head = b"HTTP/1.1 %d X\r\ncontent-type: application/problem+json\r\n" % status
    return answer(body, head + b"".join(one + b"\r\n" for one in more))


class Scripted:
    """A server whose n-th connection gets the n-th answer, the last one again and again."""

    def __init__(self, *scripts: bytes) -> None:
        self._scripts = scripts
        self.requests: list[bytes] = []

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving.append(asyncio.current_task())
        with contextlib.suppress(ConnectionError):
            self.requests.append(await reader.readuntil(b"\r\n\r\n"))
            script = self._scripts[min(len(self.requests), len(self._scripts)) - 1]
            writer.write(script)
            await writer.drain()
            if script.startswith(b"HTTP/1.1 200 SLOW"):
                await reader.read()  # until the client leaves
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    @asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        self._serving: list[Any] = []
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            await asyncio.gather(*self._serving)


async def by_client(url: str, use: Callable[[Client], Any], **options: Any) -> Any:
    def called() -> Any:
        with Client(url, "secret", **options) as client:
            return use(client)

    return await asyncio.to_thread(called)


async def by_async_client(url: str, use: Callable[[Any], Any], **options: Any) -> Any:
    async with AsyncClient(url, "secret", **options) as client:
        result = use(client)
        return [one async for one in result] if hasattr(result, "__aiter__") else await result


def whole(use: Callable[[Client], Any]) -> Callable[[Client], Any]:
    """Of a stream all that it yields."""
    return lambda client: list(result) if isinstance(result := use(client), Iterator) else result


async def each(use: Callable[[Any], Any], *scripts: bytes, **options: Any) -> list[Any]:
    """What both clients make of these answers: results or faults."""
    found: list[Any] = []
    for call, used in ((by_client, whole(use)), (by_async_client, use)):
        server = Scripted(*scripts)
        async with server.served() as url:
            try:
                found.append(await call(url, used, **options))  # type: ignore[operator]
            except Fault as fault:
                found.append(fault)
        assert all(
            b"authorization: Bearer secret\r\n" in one.lower().replace(b"bearer", b"Bearer") for one in server.requests
        )
    return found


def codes(found: list[Any]) -> set[tuple[type, str]]:
    return {(type(one), one.code) for one in found}


def zones(client: Any) -> Any:
    return client.list_zones()


async def test_an_answer_is_of_its_type() -> None:
    one, two = await each(zones, answer(b'[{"name": "a", "aggregates": ["x"], "newer": 1}]'))
    assert one == two and (one[0].name, one[0].aggregates) == ("a", ("x",))


async def test_a_refusal_has_the_servers_code_and_when_to_ask_again() -> None:
    found = await each(zones, problem(429, "queue.full", b"retry-after: 7"))
    assert {(one.status, one.code, one.reason, one.retry_after_s) for one in found} == {(429, "queue.full", "why", 7.0)}


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (answer(b"{}"), "api.answer_invalid"),
        (answer(b"[" * 100_000), "api.answer_invalid"),
        (answer(b'[{"name": "\xff", "aggregates": []}]'), "api.answer_invalid"),
        (answer(b"<html>", b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\n"), "api.answer_invalid"),
        (answer(b"x", OK + b"content-encoding: gzip\r\n"), "api.answer_invalid"),
        (answer(b"<html>", b"HTTP/1.1 404 X\r\ncontent-type: text/html\r\n"), "api.answer_invalid"),
        (problem(400, "<script>"), "api.answer_invalid"),
        (answer(b"", b"HTTP/1.1 302 X\r\nlocation: http://elsewhere/\r\n"), "api.redirected"),
        (problem(400, "a" * 70_000), "api.answer_too_large"),
    ],
)  # fmt: skip
async def test_an_answer_that_is_none_is_a_coded_fault(script: bytes, code: str) -> None:
    assert codes(await each(zones, script)) == {(ApiAnswerInvalid, code)}


async def test_an_answer_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_ANSWER_BYTES", 1_000)
    endless = OK + b"\r\n" + b" " * 5_000
    assert codes(await each(zones, endless)) == {(ApiAnswerInvalid, "api.answer_too_large")}


@pytest.mark.parametrize(
    "script", [b"", b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n[", b"no http"]
)
async def test_a_connection_that_is_cut_is_unavailable(script: bytes) -> None:
    assert codes(await each(zones, script)) == {(ApiUnavailable, "api.unavailable")}


async def test_a_proxy_without_its_server_is_unavailable() -> None:
    script = answer(b"<html>", b"HTTP/1.1 502 X\r\ncontent-type: text/html\r\n")
    assert codes(await each(zones, script)) == {(ApiUnavailable, "api.unavailable")}


async def test_an_answer_that_does_not_come_is_a_time_out() -> None:
    head = b"HTTP/1.1 200 SLOW\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n"
    assert codes(await each(zones, head, timeout_s=0.2)) == {(ApiTimeout, "api.timeout")}


async def test_nobody_at_the_address_is_unavailable() -> None:
    async with Scripted(b"").served() as url:
        pass
    for call in (by_client, by_async_client):
        with pytest.raises(ApiUnavailable):
            await call(url, zones)


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("http://berth.example", "api.plain_http"),
        ("http://192.0.2.1:8780", "api.plain_http"),
        ("ftp://localhost", "api.address"),
        ("https://user:secret@localhost", "api.address"),
        ("https://localhost/?a=b", "api.address"),
        ("https://localhost:99999", "api.address"),
        ("https://local\nhost", "api.address"),
        ("localhost:8780", "api.address"),
        ("", "api.address"),
    ],
)
def test_an_address_that_is_none_or_would_give_the_token_away_is_refused(url: str, code: str) -> None:
    for client in (Client, AsyncClient):
        with pytest.raises(ApiAddressInvalid) as refused:
            client(url, "secret")
        assert refused.value.code == code and "secret" not in str(refused.value)


def test_a_token_is_one_word() -> None:
    for token in ("a b", "a\r\nx-auth-token: b", "\u20ac"):
        with pytest.raises(ApiAddressInvalid) as refused:
            Client("http://localhost", token)
        assert refused.value.code == "api.token"
    Client("http://berth.example", "t", insecure=True).close()


# --- streams


def event(name: str, data: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"


def record(state: BuildState) -> bytes:
    return event("build", BuildRecord(instance_uuid=UUID, project_id="p", flavor="f", state=state))


def happened(state: BuildState, sequence: int, *, terminal: bool = False) -> bytes:
    fields = {"instance_uuid": UUID, "project_id": "p", "state": state, "sequence": sequence, "terminal": terminal}
    return event("event", msgspec.convert(fields, BuildEvent))


def follow(client: Any) -> Any:
    return client.follow_build(UUID)


def seen(items: list[Any]) -> list[tuple[type, str]]:
    return [(type(one), getattr(one, "state", "")) for one in items]


async def test_a_stream_that_is_cut_goes_on_with_the_record_and_repeats_nothing() -> None:
    first = (
        STREAM
        + record(BuildState.ACCEPTED)
        + b": nothing happened\n\n"
        + happened(BuildState.SCHEDULED, 3)
        + b"event: ev"
    )
    second = (
        STREAM + record(BuildState.SCHEDULED) + happened(BuildState.SCHEDULED, 3) + happened(BuildState.BUILDING, 5)
    )
    third = (
        STREAM
        + record(BuildState.BUILDING)
        + happened(BuildState.ACTIVE, 9, terminal=True)
        + happened(BuildState.DELETED, 10)
    )
    for items in await each(follow, first, second, third):
        assert seen(items) == [
            (BuildRecord, "accepted"),
            (BuildEvent, "scheduled"),
            (BuildRecord, "scheduled"),
            (BuildEvent, "building"),
            (BuildRecord, "building"),
            (BuildEvent, "active"),
        ]


async def test_a_build_that_has_ended_is_one_record() -> None:
    for items in await each(follow, STREAM + record(BuildState.ACTIVE)):
        assert seen(items) == [(BuildRecord, "active")]


async def test_following_goes_on_to_the_delete_on_request() -> None:
    script = STREAM + record(BuildState.ACTIVE) + happened(BuildState.DELETED, 1, terminal=True)
    for items in await each(lambda client: client.follow_build(UUID, until="deleted"), script):
        assert seen(items) == [(BuildRecord, "active"), (BuildEvent, "deleted")]


async def test_a_refused_request_off_the_record_ends_nothing() -> None:
    script = STREAM + record(BuildState.BUILDING) + happened(BuildState.REFUSED, 0, terminal=True)
    script += happened(BuildState.ACTIVE, 4, terminal=True)
    for items in await each(follow, script):
        assert seen(items)[-1] == (BuildEvent, "active")


async def test_what_passes_is_tried_again_and_what_lasts_is_not() -> None:
    begun = STREAM + record(BuildState.BUILDING)
    for items in await each(follow, begun, problem(503, "bus.unavailable"), STREAM + record(BuildState.ACTIVE)):
        assert seen(items) == [(BuildRecord, "building"), (BuildRecord, "active")]
    assert codes(await each(follow, begun, problem(404, "build.unknown"))) == {(ApiProblem, "build.unknown")}
    assert codes(await each(follow, problem(503, "bus.unavailable"))) == {(ApiProblem, "bus.unavailable")}
    revoked = begun + event("lagged", {"code": "auth.required"})
    assert codes(await each(follow, revoked)) == {(ApiProblem, "auth.required")}


async def test_a_stream_that_brings_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_feed, "FIRST_DELAY_S", 0.0)
    lagged = STREAM + event("lagged", {"code": "stream.too_many"})
    assert codes(await each(follow, STREAM + record(BuildState.BUILDING), lagged)) == {
        (ApiUnavailable, "api.unavailable")
    }


async def test_an_event_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_feed, "MAX_EVENT_BYTES", 1_000)
    assert codes(await each(follow, STREAM + b"data: " + b"x" * 5_000)) == {(ApiAnswerInvalid, "api.answer_too_large")}


async def test_who_follows_all_is_told_where_some_are_missing() -> None:
    first, second = STREAM + happened(BuildState.ACTIVE, 9, terminal=True), problem(403, "role.forbidden")
    async with Scripted(first, first, second).served() as url, AsyncClient(url) as client:
        items: list[Any] = []
        with pytest.raises(ApiProblem):
            async for one in client.follow_all():
                items.append(one)  # noqa: PERF401  (the fault is at its end)
    assert seen(items) == [(BuildEvent, "active"), (Reconnected, ""), (BuildEvent, "active")]


def test_a_sync_stream_that_is_left_closes_its_connection() -> None:
    ready: threading.Event = threading.Event()
    left: list[bool] = []
    found: list[str] = []

    async def serve() -> None:
        gone = asyncio.Event()

        async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(STREAM + record(BuildState.BUILDING))
            left.append(await reader.read() == b"")
            gone.set()
            writer.close()

        async with await asyncio.start_server(one, "127.0.0.1", 0) as server:
            found.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            ready.set()
            await gone.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(30.0)
    with Client(found[0]) as client:
        for item in client.follow_build(UUID):
            assert item.state == "building"
            break
    thread.join(30.0)
    assert left == [True]
