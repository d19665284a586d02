"""The two systems of lab/benchmarks/rest_beside.py, each with a private PostgreSQL (fsync on) and the same book.

Real: the installed openstack-placement under uwsgi, noauth2. berth: one placement worker as a process, and a private
RabbitMQ on which it announces every change to a queue that is bound to the feed, as a scheduler's would be.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import aio_pika
import asyncpg
import httpx
from msgspec import Struct

from berth.config.ports import ServerFailed, free_port
from berth.config.settings import BusSettings, CellSettings, DatabaseSettings, Settings
from berth.up.embedded.postgres import Postgres
from berth.up.embedded.process import Account, GuardedProcess, ServerMissing
from berth.up.embedded.rabbitmq import RabbitMQ
from berth.up.servers import variables
from berth.up.worker_processes import WorkerProcesses
from bus.contracts.queues import EVENTS
from lab.benchmarks import probe, rest_books
from lab.benchmarks.rest_books import Host
from lab.benchmarks.rest_client import Connection

ROOT = Path(__file__).parents[2]
KEPT = ROOT / ".berth" / "placement-uwsgi"  # where the real one is installed, once
WANTED = Path(__file__).with_name("rest_real.requirements")
PROCESSES, THREADS = 2, 4
LOADED, LOG_LINES = "WSGI app 0", 1000  # uwsgi logs it once a process
READY_TIMEOUT_S = 90.0
INSTALL_TIMEOUT_S = 600.0
COMMAND_TIMEOUT_S = 120.0
POLL_S = 0.05
ANNOUNCED_TIMEOUT_S = 30.0
ANNOUNCED_POLL_S = 1.1  # the head is looked at once a second
FEED_BYTES = 64 * 2**20  # what the listener's queue keeps; the oldest goes first

CONFIGURATION = """\
[DEFAULT]
default_log_levels = placement=WARNING
[api]
auth_strategy = noauth2
[placement]
max_allocation_candidates = -1
[placement_database]
connection = {url}
"""


class System(Struct, kw_only=True):
    """A running API. pids: the processes whose CPU counts, by part. keep_alive: whether connections are kept."""

    name: str
    port: int
    pids: Mapping[str, int]
    keep_alive: bool

    def connections(self, count: int) -> list[Connection]:
        """So many connections, not yet made."""
        return [Connection("127.0.0.1", self.port, keep_alive=self.keep_alive) for _ in range(count)]

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds used so far, by part."""
        return {part: probe.cpu_s(pid) for part, pid in self.pids.items()}


async def execute(url: str, statement: str) -> None:
    """One statement."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


async def new_database(postgres: Postgres, name: str) -> str:
    """An empty database on a server; returns its URL."""
    await execute(postgres.url(), f'CREATE DATABASE "{name}"')
    return postgres.url(name)


# --- berth


@contextlib.asynccontextmanager
async def berth(
    directory: Path, postgres: Postgres, broker: RabbitMQ, book: str, hosts: Sequence[Host]
) -> AsyncIterator[System]:
    """One placement worker with the REST API, on a database of its own with these hosts in it."""
    vhost = f"bench-{book}"
    bus = await asyncio.to_thread(broker.add_vhost, vhost)
    url = await new_database(postgres, book)
    settings = Settings(bus=BusSettings(url=bus), cells={"cell1": CellSettings()}, database=DatabaseSettings(url=url))
    directory.mkdir()  # noqa: ASYNC240 - nothing is measured yet
    environment = {**variables(settings), "BERTH_TELEMETRY__LOG_LEVEL": "warning", "PYTHONPATH": str(ROOT)}
    lines = directory / "book.jsonl"
    lines.write_bytes(b"".join(rest_books.as_lines(hosts)))
    await _run([sys.executable, "-m", "berth", "placement", "import", str(lines)], environment, directory)
    await execute(url, "ANALYZE")
    processes = WorkerProcesses(directory, environment)
    port = free_port()
    try:
        worker = processes.start("placement", "placement", "--api", f"127.0.0.1:{port}")
        await processes.ready(timeout_s=READY_TIMEOUT_S)
        async with _listener(bus):
            await _announced(processes)  # placement itself
            pids = {"server": worker.process.pid, "postgres": postgres.pid, "broker": broker.pid}
            yield System(name="berth", port=port, pids=pids, keep_alive=True)
            await _announced(processes)
    finally:
        await asyncio.to_thread(processes.stop)


@contextlib.asynccontextmanager
async def _listener(url: str) -> AsyncIterator[None]:
    """A queue on the feed, so that the broker delivers the announcements somewhere; it is not read here."""
    connection = await aio_pika.connect(url)
    async with connection:
        channel = await connection.channel()
        queue = await channel.declare_queue(
            exclusive=True, arguments={"x-max-length-bytes": FEED_BYTES, "x-overflow": "drop-head"}
        )
        await queue.bind(EVENTS, "placement.event.#")
        yield


async def _announced(processes: WorkerProcesses) -> None:
    """Wait until every change that was committed is on the bus. Raises ServerFailed."""
    head, published = "berth_placement_feed_head", "berth_placement_feed_published"
    found: dict[str, float] = {}
    for _ in range(int(ANNOUNCED_TIMEOUT_S / ANNOUNCED_POLL_S)):
        before = found.get(head)
        found = dict(probe.scraped(await processes.metrics("placement"), (head, published)))
        if found.get(head) and found[head] == found.get(published) == before:
            return
        await asyncio.sleep(ANNOUNCED_POLL_S)
    raise ServerFailed(f"not every change was announced: {found}")


# --- the real one


def install() -> Path:
    """The directory of programs of a virtualenv with the real Placement, made once."""
    stamp = KEPT / "berth.stamp"
    wanted = f"{zlib.crc32(WANTED.read_bytes())}\n"
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"installing the real Placement, uwsgi and psycopg2 into {KEPT} (once)", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(KEPT)], check=True, timeout=INSTALL_TIMEOUT_S)
        pip = [str(KEPT / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run(
            [*pip, "--no-input", "-r", str(WANTED)], stdin=subprocess.DEVNULL, timeout=INSTALL_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise ServerMissing("pip could not install the real Placement (uwsgi is compiled: it needs a C compiler)")
        stamp.write_text(wanted)
    for program in ("uwsgi", "placement-manage"):
        if not (KEPT / "bin" / program).exists():
            raise ServerMissing(f"no {program} in {KEPT}")
    return KEPT.absolute() / "bin"


class Real:
    """The real Placement on one database; several servers may serve it in turn."""

    def __init__(self, bin_: Path, directory: Path, postgres: Postgres, url: str) -> None:
        self._bin, self._directory, self._postgres, self._url = bin_, directory, postgres, url
        self._count = 0

    @classmethod
    async def make(cls, bin_: Path, directory: Path, postgres: Postgres, book: str, hosts: Sequence[Host]) -> Real:
        """A new database with these hosts in it."""
        directory.mkdir()  # noqa: ASYNC240 - nothing is measured yet
        url = await new_database(postgres, book)
        real = cls(bin_, directory, postgres, url)
        environment = real._environment()
        where = f"{environment['OS_PLACEMENT_CONFIG_DIR']}/placement.conf"
        await _run([str(bin_ / "placement-manage"), "--config-file", where, "db", "sync"], environment, directory)
        async with real.serve():  # writes the standard traits and classes when it starts
            pass
        await rest_books.into_real(url, hosts)
        return real

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[System]:
        """uwsgi."""
        self._count += 1
        port = free_port()
        process = GuardedProcess(
            self._command(port),
            env=self._environment(),
            cwd=self._directory,
            log=self._directory / f"uwsgi{self._count}.log",
            account=Account(()),
            stop_signal="INT",
        )
        try:
            await _answers(port, process)
            pids = {"server": process.pid, "postgres": self._postgres.pid}
            yield System(name="real", port=port, pids=pids, keep_alive=False)
        finally:
            await asyncio.to_thread(process.stop, timeout_s=3.0)

    def _command(self, port: int) -> list[str]:
        return [
            str(self._bin / "uwsgi"),
            *("--master", "--die-on-term", "--need-app", "--lazy-apps", "--enable-threads", "--disable-logging"),
            *("--processes", str(PROCESSES), "--threads", str(THREADS)),
            *("--http-socket", f"127.0.0.1:{port}", "--listen", "100", "--buffer-size", "65535"),
            *("--virtualenv", str(self._bin.parent), "--module", "placement.wsgi.api"),
        ]

    def _environment(self) -> dict[str, str]:
        url = self._url.replace("postgresql://", "postgresql+psycopg2://", 1)
        file = self._directory / "placement.conf"
        if not file.exists():  # a process that is still starting may be reading it
            file.write_text(CONFIGURATION.format(url=url))
        return {
            "PATH": f"{self._bin}:/usr/bin:/bin",
            "HOME": str(self._directory),
            "OS_PLACEMENT_CONFIG_DIR": str(self._directory),
            "LC_ALL": "C.UTF-8",
        }


async def _answers(port: int, process: GuardedProcess) -> None:
    """Wait until every process of a uwsgi has loaded the application, and one answers. Raises ServerFailed."""
    until = asyncio.get_running_loop().time() + READY_TIMEOUT_S
    async with httpx.AsyncClient() as http:
        while process.running and asyncio.get_running_loop().time() < until:
            if process.tail(LOG_LINES).count(LOADED) >= PROCESSES:
                with contextlib.suppress(httpx.HTTPError):
                    if (await http.get(f"http://127.0.0.1:{port}/", timeout=5.0)).status_code == 200:
                        return
            await asyncio.sleep(POLL_S)
    raise ServerFailed(f"uwsgi {'is not ready' if process.running else 'ended'}:\n{process.tail()}")


async def _run(command: Sequence[str], environment: Mapping[str, str], directory: Path) -> None:
    """Run a command to its end. Raises ServerFailed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BERTH_", "OS_"))}
    done = await asyncio.to_thread(
        subprocess.run,
        command,
        env={**kept, **environment},
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise ServerFailed(
            f"{command[-2:]} ended with status {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}"
        )
