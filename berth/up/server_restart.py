"""Restarts a server of `berth up` whenever it ends: on its own data, at once, then less and less often.

A server that runs and does not work is ended first: it is tried now and then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog

from berth.config.ports import ServerFailed
from berth.up.embedded.server import PrivateServer
from bus.retrying import RetryPolicy
from bus.transport import BusError

log = structlog.get_logger(__name__)

Notify = Callable[[str], None]
Probe = Callable[[], Awaitable[None]]

CHECK_INTERVAL_S = 0.2
# Before the second start and every later one (the disk may be full); the first follows at once.
RESTART = RetryPolicy(first_s=0.5, longest_s=30.0, least=1.0)
# A server that ends within this time after its start counts as one that did not start.
STABLE_S = 60.0
# A server is tried this often; one that does not work this many times in a row is ended. Its length of a minute and
# more is intended: a busy machine makes a server slow, and not broken.
PROBE_INTERVAL_S = 20.0
PROBE_TIMEOUT_S = 60.0
MAX_FAILED_PROBES = 3
MAX_REASON = 300


def to_log(message: str) -> None:
    """Log a message of a supervisor, for a process without a terminal."""
    log.warning("server.ended", reason=message)


class ServerSupervisor:
    """Restarts one server whenever it ends.

    name: of the server, for the messages. notify: called with one sentence for each end, failed start and return.
    """

    def __init__(self, name: str, server: PrivateServer, *, notify: Notify) -> None:
        self._name = name
        self._server = server
        self._notify = notify
        self._stop = asyncio.Event()
        self._starts = 0  # in a row that did not last
        self._is_restarting = False

    async def watch(self) -> None:
        """Restart the server until `stop` is called. A start that is under way then is waited for."""
        up_since = asyncio.get_running_loop().time()
        while not await self._stopped_within(CHECK_INTERVAL_S):
            now = asyncio.get_running_loop().time()
            if self._server.pid:
                continue
            if now - up_since >= STABLE_S:
                self._starts = 0
            self._is_restarting = True
            await self._restart()
            self._is_restarting = False
            up_since = asyncio.get_running_loop().time()

    async def probe_until_stopped(self, probe: Probe) -> None:
        """Try the server now and then, until `stop` is called; end one that does not work, so that it is restarted.

        probe: raises BusError when the server does not work, and may hang.
        """
        failures, tried = 0, 0
        while not await self._stopped_within(PROBE_INTERVAL_S):
            pid = 0 if self._is_restarting else self._server.pid
            if not pid or pid != tried:
                failures, tried = 0, pid
            if not pid:
                continue
            reason = await _failure(probe)
            failures = failures + 1 if reason else 0
            is_same = self._server.pid == pid and not self._is_restarting and not self._stop.is_set()
            if failures < MAX_FAILED_PROBES or not is_same:
                continue
            self._notify(f"{self._name} runs and did not work {failures} times in a row, so it is ended: {reason}")
            self._server.kill()

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
async def kept_running(
    name: str, server: PrivateServer, *, notify: Notify, probe: Probe | None = None
) -> AsyncIterator[None]:
    """Start a server and keep it alive for as long as the block runs. Raises ServerFailed when it does not start.

    probe: tries whether the server works (`ServerSupervisor.probe_until_stopped`).
    """
    await _start(server)
    supervisor = ServerSupervisor(name, server, notify=notify)
    tasks = [asyncio.create_task(supervisor.watch(), name=f"supervisor of {name}")]
    if probe is not None:
        tasks.append(asyncio.create_task(supervisor.probe_until_stopped(probe), name=f"probe of {name}"))
    try:
        yield
    finally:
        supervisor.stop()
        for task in tasks[1:]:  # a restart is waited for; a probe need not end
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(server.stop)


async def _start(server: PrivateServer) -> None:
    """Start it. Cancelled meanwhile, it is waited for, as its thread cannot be ended, and stopped."""
    starting = asyncio.create_task(asyncio.to_thread(server.start))
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.gather(starting, return_exceptions=True)
        await asyncio.to_thread(server.stop)
        raise


async def _failure(probe: Probe) -> str:
    """Why the server does not work; "": it does."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            await probe()
    except TimeoutError:
        return f"no answer within {PROBE_TIMEOUT_S:g} s"
    except BusError as error:
        return _last_line(error)
    return ""


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:MAX_REASON]
