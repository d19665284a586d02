"""Workers as processes of their own: started, killed, paused and stopped by benchmarks and chaos runs."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import ssl
import struct
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
from msgspec import Struct

from berth.config.ports import ServerFailed, free_port
from berth.up.embedded.process import Account, GuardedProcess
from bus.service import watchdog
from bus.service.watchdog import PING

# A worker whose event loop stands still for so long is ended. An honest worker's loop never does for more than seconds.
STALL_S = 60.0
MAX_DATAGRAMS = 1000  # read at one look
MAX_BYTES = 4096
CREDENTIALS = struct.Struct("iII")  # pid, uid, gid: put there by the kernel


# As systemd does for its services; `bus.service.watchdog` sends them.
class WatchdogPings:
    """A socket at which workers report that their event loops run.

    limit_s: so long a loop may stand still.
    """

    def __init__(self, *, limit_s: float = STALL_S) -> None:
        self.limit_s = limit_s
        self._name = f"berth-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.setblocking(False)
        self._socket.bind(f"\0{self._name}")  # an abstract address: no file that would stay
        self._last: dict[int, float] = {}
        self._looked: float | None = None

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment that a worker needs."""
        return {"NOTIFY_SOCKET": f"@{self._name}", "WATCHDOG_USEC": str(int(self.limit_s * 1e6))}

    def receive(self, now: float) -> None:
        """Note who has sent a ping. now: seconds of a monotonic clock."""
        if self._looked is not None and now - self._looked > self.limit_s / 2:
            self._last = {}  # this process stood still itself, and its socket holds few pings: everyone begins anew
        self._looked = now
        for _ in range(MAX_DATAGRAMS):
            try:
                body, ancillary, _flags, _address = self._socket.recvmsg(MAX_BYTES, socket.CMSG_SPACE(CREDENTIALS.size))
            except BlockingIOError:
                return
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and PING in body.splitlines():
                    self._last[CREDENTIALS.unpack(data)[0]] = now

    def stalled_s(self, pid: int, now: float) -> float:
        """How long ago the last ping of a process is; of one never received, since it was first asked for."""
        return now - self._last.setdefault(pid, now)

    def remove(self, pid: int) -> None:
        """A process has ended."""
        self._last.pop(pid, None)

    def close(self) -> None:
        """Take no more pings."""
        self._socket.close()


READY_TIMEOUT_S = 60.0
POLL_S = 0.05
PROBE_TIMEOUT_S = 2.0
METRICS_TIMEOUT_S = 20.0  # unlike a probe it is not repeated
# For clients of http://127.0.0.1: one that may need TLS reads every authority's certificate first (20 ms). Trusts none.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _health_at(port: int) -> dict[str, str]:
    """Not by `--http`: there a placement worker would serve its REST API as well."""
    return {"BERTH_TELEMETRY__HTTP_HOST": "127.0.0.1", "BERTH_TELEMETRY__HTTP_PORT": str(port)}


class Worker(Struct):
    """One worker process, or one that was: its arguments, where it answers, its log."""

    name: str
    arguments: tuple[str, ...]
    port: int
    log: Path
    process: GuardedProcess
    settings: Mapping[str, str]


class WorkerProcesses:
    """Worker processes of one system. `settings`: `BERTH_...` variables for all of them. spawn: makes a process.

    pings: where they report that their event loops run; None: nowhere.
    """

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, str],
        *,
        spawn: type[GuardedProcess] = GuardedProcess,
        pings: WatchdogPings | None = None,
    ) -> None:
        self.directory = directory
        self.workers: dict[str, Worker] = {}
        self._spawn = spawn
        self.pings = pings
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("BERTH_") and name not in watchdog.VARIABLES  # of this process's own supervisor
        }
        self._env = {**kept, **settings, "PYTHONUNBUFFERED": "1", **(pings.variables if pings is not None else {})}

    def start(self, name: str, *arguments: str, settings: Mapping[str, str] | None = None) -> Worker:
        """Start `berth run ARGUMENTS`; does not wait until it is ready."""
        port = free_port()
        log = self.directory / f"{name}.log"
        process = self._spawn(
            [sys.executable, "-m", "berth", "run", *arguments],
            env={**self._env, "PYTHONPATH": str(Path(__file__).parents[2]), **(settings or {}), **_health_at(port)},
            cwd=self.directory,
            log=log,
            account=Account(()),
        )
        self.workers[name] = Worker(
            name=name, arguments=arguments, port=port, log=log, process=process, settings=settings or {}
        )
        return self.workers[name]

    async def ready(self, names: Sequence[str] | None = None, *, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until workers (all, or those named) are ready. Raises ServerFailed."""
        async with httpx.AsyncClient(timeout=PROBE_TIMEOUT_S, verify=NO_TLS) as http:
            unready = dict.fromkeys(names or self.workers, "it has not answered")
            waits = (self._ready(http, self.workers[name], timeout_s, unready) for name in list(unready))
            await asyncio.gather(*waits)

    async def metrics(self, name: str) -> str:
        """The text of a worker's /metrics. Raises httpx.HTTPError."""
        async with httpx.AsyncClient(timeout=METRICS_TIMEOUT_S, verify=NO_TLS) as http:
            return (await http.get(f"http://127.0.0.1:{self.workers[name].port}/metrics")).text

    def kill(self, name: str) -> None:
        """SIGKILL."""
        self.workers[name].process.kill()

    def pause(self, name: str) -> None:
        """SIGSTOP: it lives, but does nothing."""
        os.kill(self.workers[name].process.pid, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """SIGCONT."""
        os.kill(self.workers[name].process.pid, signal.SIGCONT)

    def restart(self, name: str) -> Worker:
        """The same worker again, as a new process."""
        old = self.workers[name]
        if old.process.running:
            old.process.stop()
        return self.start(name, *old.arguments, settings=old.settings)

    def stop(self) -> None:
        """Let all drain and end, at once; what does not is killed."""
        if self.workers:
            with ThreadPoolExecutor(len(self.workers)) as pool:
                list(pool.map(lambda worker: worker.process.stop(), self.workers.values()))

    async def _ready(self, http: httpx.AsyncClient, worker: Worker, timeout_s: float, unready: dict[str, str]) -> None:
        """unready: {worker: what it waits for} of all that are waited for, which the message of a time-out names."""
        until = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                answer = await http.get(f"http://127.0.0.1:{worker.port}/readyz")
                readiness = _readiness(answer.content)
                if answer.status_code == 200 and readiness.pid == worker.process.pid:
                    unready.pop(worker.name, None)
                    return
                unready[worker.name] = (
                    ", ".join(readiness.not_ready)
                    if readiness.pid == worker.process.pid
                    else f"process {readiness.pid} answers at its port"
                )
            except httpx.HTTPError as error:
                unready[worker.name] = f"its port {worker.port} does not answer ({type(error).__name__})"
            if not worker.process.running:
                raise ServerFailed(f"{worker.name} ended:\n{worker.process.tail()}")
            if asyncio.get_running_loop().time() > until:
                late = "; ".join(f"{name}: {problem}" for name, problem in unready.items())
                raise ServerFailed(f"not ready after {timeout_s:g} s: {late}\n{worker.name}:\n{worker.process.tail()}")
            await asyncio.sleep(POLL_S)


class _Readiness(Struct):
    pid: int = 0
    not_ready: tuple[str, ...] = ()


def _readiness(body: bytes) -> _Readiness:
    """The answer of a worker, or of another process that has the port: our worker may have died of that. pid 0: it is
    unknown.
    """
    try:
        return msgspec.json.decode(body, type=_Readiness)
    except msgspec.MsgspecError:
        return _Readiness()
