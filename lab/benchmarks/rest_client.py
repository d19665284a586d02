"""A client that costs little: raw requests over asyncio streams, for lab/benchmarks/rest_beside.py.

Requests are bytes made beforehand; of an answer only the status and the length are looked at.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from msgspec import Struct

from lab.load import percentiles

HEAD = b"Host: bench\r\nX-Auth-Token: admin\r\nAccept: application/json\r\nOpenStack-API-Version: placement 1.39\r\n"
ANSWER_TIMEOUT_S = 60.0
READ_LIMIT_BYTES = 2**24  # the largest answer is read without a pause
LATE, HUNG_UP = 0, -1  # instead of a status: no answer in time, none at all

Work = Callable[["Connection", int], Awaitable[int]]


class Bound(Struct, frozen=True):
    """How long a phase lasts: so many seconds or pieces of work, whichever is over first; `least` in any case."""

    seconds: float
    most: int
    least: int = 1


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


class Connection:
    """One request at a time. keep_alive False: the server closes after each answer (uwsgi's http-socket)."""

    def __init__(self, host: str, port: int, *, keep_alive: bool = True) -> None:
        self._address = (host, port)
        self._keep_alive = keep_alive
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """(status, body). Raises ConnectionError."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address, limit=READ_LIMIT_BYTES)
        reader, writer = self._streams
        writer.write(request)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = head.partition(b"content-length:")[2].partition(b"\r")[0]
            body = await reader.readexactly(int(length or 0))
        except EOFError as error:
            self.close()
            raise ConnectionError(f"hung up: {error}") from error
        if not self._keep_alive:
            self.close()
        return int(head[9:12]), body

    def close(self) -> None:
        """Hang up; the next request connects again."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


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
        async with asyncio.timeout(bound.seconds + ANSWER_TIMEOUT_S):
            await asyncio.gather(*(one(connection) for connection in connections))
    except TimeoutError:
        statuses[LATE] += 1
    finally:
        gc.enable()
    seconds = clock() - began
    ranks = percentiles([1000 * took for took in times])
    return Outcome(
        done=len(times),
        seconds=seconds,
        per_s=len(times) / seconds,
        p50_ms=ranks.get("p50", math.inf),
        p95_ms=ranks.get("p95", math.inf),
        statuses=dict(sorted(statuses.items())),
    )
