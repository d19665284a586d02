"""Restarts a server of `berth up` whenever it ends: on its own data, at once, then less and less often."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import structlog

from berth.embedded.process import ServerFailed
from berth.embedded.server import PrivateServer
from bus.retrying import RetryPolicy

log = structlog.get_logger(__name__)

Notify = Callable[[str], None]

CHECK_INTERVAL_S = 0.2
# Before the second start and every later one (the disk may be full); the first follows at once.
RESTART = RetryPolicy(first_s=0.5, longest_s=30.0, least=1.0)
# A server that ends within this time after its start counts as one that did not start.
STABLE_S = 60.0
MAX_REASON = 300


def to_log(sentence: str) -> None:
    """Log a sentence of a keeper, for a process without a terminal."""
    log.warning("server.ended", reason=sentence)


class ServerKeeper:
    """Restarts one server whenever it ends.

    name: of the server, for the messages. notify: called with one sentence for each end, failed start and return.
    """

    def __init__(self, name: str, server: PrivateServer, *, notify: Notify) -> None:
        self._name = name
        self._server = server
        self._notify = notify
        self._stop = asyncio.Event()
        self._starts = 0  # in a row that did not last

    async def watch(self) -> None:
        """Restart the server until `stop` is called. A start that is under way then is waited for."""
        up_since = asyncio.get_running_loop().time()
        while not await self._stopped_within(CHECK_INTERVAL_S):
            now = asyncio.get_running_loop().time()
            if self._server.pid:
                continue
            if now - up_since >= STABLE_S:
                self._starts = 0
            await self._restart()
            up_since = asyncio.get_running_loop().time()

    def stop(self) -> None:
        """Restart nothing from now on."""
        self._stop.set()

    async def _restart(self) -> None:
        """Try until the server runs, or `stop` is called."""
        problem = f"{self._name} ended with status {self._server.status}"
        while True:
            wait_s = RESTART.wait_s(self._starts, None) if self._starts else 0.0
            again = f"; started again in {wait_s:g} s" if wait_s else "; started again"
            self._notify(f"{problem}{again} (its log: {self._server.log})")
            if await self._stopped_within(wait_s):
                return
            self._starts += 1
            try:
                await asyncio.to_thread(self._server.restart)
            except (ServerFailed, OSError) as error:
                problem = f"{self._name} does not start: {_last_line(error)}"
            else:
                self._notify(f"{self._name} is up again")
                return

    async def _stopped_within(self, seconds: float) -> bool:
        if not seconds:
            return self._stop.is_set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        return self._stop.is_set()


@contextlib.asynccontextmanager
async def kept_alive(name: str, server: PrivateServer, *, notify: Notify) -> AsyncIterator[None]:
    """Start a server and keep it alive for as long as the block runs. Raises ServerFailed when it does not start."""
    await asyncio.to_thread(server.start)
    keeper = ServerKeeper(name, server, notify=notify)
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
