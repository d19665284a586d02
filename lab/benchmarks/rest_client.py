"""A client that costs next to nothing: raw requests over asyncio protocols, for lab/benchmarks/rest_beside.py.

Requests are bytes made beforehand; of an answer only the status and the length are looked at.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

from msgspec import Struct

HEAD = b"Host: bench\r\nX-Auth-Token: admin\r\nAccept: application/json\r\nOpenStack-API-Version: placement 1.39\r\n"
ANSWER_TIMEOUT_S = 60.0
LATE, HUNG_UP = 0, -1  # instead of a status: no answer in time, none at all

Work = Callable[["Connection", int], Awaitable[int]]


class Bound(Struct, frozen=True):
    """How long a phase lasts: so many seconds or pieces of work, whichever is over first; `least` in any case."""

    seconds: float
    most: int
    least: int = 1
    answer_s: float = ANSWER_TIMEOUT_S  # longest wait for one answer


class Outcome(Struct, frozen=True, kw_only=True):
    """The results of one phase. statuses: of all pieces of work; times and rate: of those that went well."""

    done: int
    seconds: float
    per_s: float
    p50_ms: float
    p95_ms: float
    statuses: dict[int, int]

    @property
    def unsure(self) -> bool:
        """Whether something may have been done without an answer."""
        return LATE in self.statuses or HUNG_UP in self.statuses

    @property
    def failed(self) -> int:
        """Pieces of work that did not go well."""
        return sum(self.statuses.values()) - self.done


class Reader:
    """Takes the bytes of one answer after the other, however they are cut."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._head = b""
        self._missing = -1  # bytes of the body still to come; -1: the head is not complete
        self._status = 0

    def feed(self, data: bytes) -> tuple[int, bytes] | None:
        """(status, body) once they are complete."""
        if self._missing < 0:
            data = self._head + data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._head = data
                return None
            self._head = b""
            head = data[: end + 2].lower()
            self._status = int(head[9:12])
            at = head.find(b"content-length:")
            self._missing = 0 if at < 0 else int(head[at + 15 : head.index(b"\r", at)])
            data = data[end + 4 :]
        self._missing -= len(data)
        self._pieces.append(data)
        if self._missing > 0:
            return None
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self.clear()
        return self._status, body

    def clear(self) -> None:
        """Forget what came of an answer that is not complete."""
        self._pieces.clear()
        self._head, self._missing = b"", -1


class Connection(asyncio.Protocol):
    """One request at a time. keep_alive False: the server closes after each answer (uwsgi's http-socket)."""

    def __init__(self, host: str, port: int, *, keep_alive: bool = True) -> None:
        self._address = (host, port)
        self._keep_alive = keep_alive
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._reader = Reader()

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """(status, body). Raises ConnectionError."""
        if self._transport is None:
            await self._loop.create_connection(lambda: self, *self._address)
        assert self._transport is not None
        answer: asyncio.Future[tuple[int, bytes]] = self._loop.create_future()
        self._answer = answer
        self._transport.write(request)
        found = await answer
        if not self._keep_alive:
            self.close()
        return found

    def close(self) -> None:
        """Hang up; the next request connects again."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        self._reader.clear()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """asyncio's."""
        found = self._reader.feed(data)
        if found is not None and self._answer is not None and not self._answer.done():
            self._answer.set_result(found)

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio's."""
        self._transport = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(f"hung up: {error}"))


def request(method: str, path: str, body: bytes | None = None) -> bytes:
    """A request as bytes."""
    if body is None:
        return b"%b %b HTTP/1.1\r\n%b\r\n" % (method.encode(), path.encode(), HEAD)
    return b"%b %b HTTP/1.1\r\n%bContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        method.encode(),
        path.encode(),
        HEAD,
        len(body),
        body,
    )


async def load(connections: Sequence[Connection], work: Work, bound: Bound, fine: frozenset[int]) -> Outcome:
    """Work with all connections at once, each with its next piece as soon as it has done one."""
    statuses: Counter[int] = Counter()
    times: list[float] = []
    begun = 0
    clock = time.perf_counter
    gc.collect()
    gc.disable()
    began = clock()
    until = began + bound.seconds

    async def one(connection: Connection) -> None:
        nonlocal begun
        while begun < bound.most and (clock() < until or begun < bound.least):
            number = begun
            begun += 1
            started = clock()
            try:
                status = await work(connection, number)
            except OSError:
                status = HUNG_UP
            statuses[status] += 1
            if status in fine:
                times.append(clock() - started)

    try:
        async with asyncio.timeout(bound.seconds + bound.answer_s):
            await asyncio.gather(*(one(connection) for connection in connections))
    except TimeoutError:
        statuses[LATE] += 1
    finally:
        gc.enable()
    seconds = clock() - began
    times.sort()
    return Outcome(
        done=len(times),
        seconds=seconds,
        per_s=len(times) / seconds,
        p50_ms=_share(times, 0.5),
        p95_ms=_share(times, 0.95),
        statuses=dict(sorted(statuses.items())),
    )


def _share(times: Sequence[float], share: float) -> float:
    return 1000 * times[min(int(len(times) * share), len(times) - 1)] if times else math.inf
