"""Keeps a server that `berth up` started alive: one that ends is started again on its data, until it stays."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import structlog

from berth.embedded.process import ServerFailed
from berth.embedded.server import PrivateServer

log = structlog.get_logger(__name__)

Say = Callable[[str], None]

LOOK_S = 0.2
# Between two attempts at a server that does not start (a full disk, say): from the first, doubled, to the longest.
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
# One that dies within this time after it was started waits like one that did not start.
STAYS_S = 60.0
MAX_REASON = 300


def to_log(said: str) -> None:
    """What a keeper logs; it has no terminal."""
    log.warning("server.ended", reason=said)


class ServerKeeper:
    """Watches one server. name: as people call it. say: told of each end, failed attempt and return, one sentence."""

    def __init__(self, name: str, server: PrivateServer, *, say: Say) -> None:
        self._name = name
        self._server = server
        self._say = say
        self._stop = asyncio.Event()
        self._wait_s = 0.0  # before the next start

    async def watch(self) -> None:
        """Until `stop` was called; a start that is under way then is waited for."""
        up_since = asyncio.get_running_loop().time()
        while not await self._stopped_within(LOOK_S):
            now = asyncio.get_running_loop().time()
            if self._server.pid:
                continue
            if now - up_since >= STAYS_S:
                self._wait_s = 0.0
            await self._start_again()
            up_since = asyncio.get_running_loop().time()

    def stop(self) -> None:
        """Start nothing any more."""
        self._stop.set()

    async def _start_again(self) -> None:
        """Until it runs, or `stop` was called."""
        said = f"{self._name} ended with status {self._server.status}"
        while True:
            again = f"; started again in {self._wait_s:g} s" if self._wait_s else "; started again"
            self._say(f"{said}{again} (its log: {self._server.log})")
            if await self._stopped_within(self._wait_s):
                return
            self._wait_s = min(max(2 * self._wait_s, FIRST_WAIT_S), LONGEST_WAIT_S)
            try:
                await asyncio.to_thread(self._server.restart)
            except (ServerFailed, OSError) as error:
                said = f"{self._name} does not start: {_last_line(error)}"
            else:
                self._say(f"{self._name} is up again")
                return

    async def _stopped_within(self, seconds: float) -> bool:
        if not seconds:
            return self._stop.is_set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        return self._stop.is_set()


@contextlib.asynccontextmanager
async def kept_alive(name: str, server: PrivateServer, *, say: Say) -> AsyncIterator[None]:
    """Start a server and keep it alive for as long as the block runs. Raises ServerFailed when it does not start."""
    await asyncio.to_thread(server.start)
    keeper = ServerKeeper(name, server, say=say)
    watching = asyncio.create_task(keeper.watch(), name=f"keeper of {name}")
    try:
        yield
    finally:
        keeper.stop()
        await asyncio.gather(watching, return_exceptions=True)
        await asyncio.to_thread(server.stop)


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:MAX_REASON]
