"""The deployment of a chaos run: real servers behind proxies, every worker a process that sees only the proxies."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit, urlunsplit

import msgspec
from msgspec import Struct

from berth.config.settings import Settings
from berth.config.site import Site
from berth.up.servers import API_VHOST, RealServers, real_servers, start_all, variables
from berth.up.worker_processes import WorkerProcesses
from bus.bus import API
from lab.chaos.plan import BROKER, DATABASE, ChaosPlan
from lab.chaos.proxy import TcpProxy

CLUES = ("invariant_broken", "process.died", "cannot_start", "Traceback")
_CONNECTION = re.compile(r'\{"connection_name","berth ([^"]+)"\}')


class Deployment(Struct):
    """The deployment under test. `site` connects past the proxies, for the client and the checks of the invariants."""

    servers: RealServers
    proxies: dict[str, TcpProxy]
    processes: WorkerProcesses
    site: Site
    directory: Path

    def workers(self, role: str) -> list[str]:
        """Names of the workers of a role."""
        return [name for name, worker in self.processes.workers.items() if worker.arguments[0] == role]


@contextlib.asynccontextmanager
async def deployment(plan: ChaosPlan, directory: Path) -> AsyncIterator[Deployment]:
    """Everything up and ready; all of it gone at the end."""
    servers_context = real_servers(plan.processes.cells, durable=plan.processes.durable)
    servers = await asyncio.to_thread(servers_context.__enter__)
    try:
        direct = _tuned(servers.settings(plan.processes), directory)
        proxies = {
            BROKER: TcpProxy(port=servers.broker.port),
            DATABASE: TcpProxy(path=_socket_of(servers.database_url)),
        }
        for proxy in proxies.values():
            await proxy.open()
        processes = WorkerProcesses(
            directory, {**variables(_through(direct, proxies)), "BERTH_TELEMETRY__LOG_FORMAT": "json"}
        )
        try:
            start_all(processes, plan.processes)
            await processes.ready()
            yield Deployment(
                servers=servers, proxies=proxies, processes=processes, site=Site(direct), directory=directory
            )
        finally:
            await asyncio.to_thread(processes.stop)
            for proxy in proxies.values():
                await proxy.close()
    finally:
        await asyncio.to_thread(servers_context.__exit__, None, None, None)


def _tuned(settings: Settings, directory: Path) -> Settings:
    """Journals that outlive a killed compute service; waits that are minutes in production are seconds here."""
    replace = msgspec.structs.replace
    return replace(
        settings,
        compute=replace(settings.compute, state_dir=str(directory / "machines"), report_interval_s=20.0),
        scheduler=replace(settings.scheduler, build_timeout_s=40.0),
        conductor=replace(settings.conductor, destroy_retry_s=8.0, report_grace_s=15.0, report_interval_s=20.0),
    )


def _through(settings: Settings, proxies: Mapping[str, TcpProxy]) -> Settings:
    replace = msgspec.structs.replace
    broker, database = proxies[BROKER].port, proxies[DATABASE].port
    return replace(
        settings,
        bus=replace(settings.bus, url=_at(settings.bus.url, broker)),
        cells={name: replace(cell, url=_at(cell.url, broker)) for name, cell in settings.cells.items()},
        database=replace(settings.database, url=_tcp(settings.database.url, database)),
    )


def _at(url: str, port: int) -> str:
    """The same URL at another port of 127.0.0.1."""
    parts = urlsplit(url)
    login = parts.netloc.rpartition("@")[0]
    return urlunsplit(parts._replace(netloc=f"{login}@127.0.0.1:{port}"))


def _tcp(url: str, port: int) -> str:
    """A URL through a Unix socket as one through the proxy, which connects to that socket (without a password)."""
    parts = urlsplit(url)
    return f"postgresql://{quote(parts.username or '')}@127.0.0.1:{port}{parts.path}?sslmode=disable"


def _socket_of(url: str) -> str:
    requested = parse_qs(urlsplit(url).query)
    return f"{requested['host'][0]}/.s.PGSQL.{requested['port'][0]}"


async def wait_registered(deployment: Deployment) -> None:
    """Return when every quorum queue would survive a kill of the broker (see RabbitMQ.wait_registered)."""
    broker = deployment.servers.broker
    for vhost in (API_VHOST, *deployment.site.cells):
        listed = await asyncio.to_thread(
            broker.control, "list_queues", "-p", vhost, "name", "type", "--no-table-headers"
        )
        rows = [line.split("\t") for line in listed.splitlines()]
        await asyncio.to_thread(broker.wait_registered, vhost, *(row[0] for row in rows if row[-1] == "quorum"))


async def left_in_queues(deployment: Deployment) -> dict[str, int]:
    """Messages in dead-letter and work queues, by virtual host and queue; empty ones are not named."""
    found: dict[str, int] = {}
    for vhost in (API_VHOST, *deployment.site.cells):
        listed = await asyncio.to_thread(
            deployment.servers.broker.control, "list_queues", "-p", vhost, "name", "messages", "--no-table-headers"
        )
        for name, count in (line.split("\t") for line in listed.splitlines()):
            if int(count):
                found[f"{vhost}/{name}"] = int(count)
    return found


async def connections(deployment: Deployment) -> list[tuple[str, str, bool]]:
    """The connections to each bus, by the broker itself: (process, bus, whether the process belongs to a cell)."""
    listed = await asyncio.to_thread(
        deployment.servers.broker.control, "list_connections", "vhost", "client_properties", "--no-table-headers"
    )
    found: list[tuple[str, str, bool]] = []
    for line in listed.splitlines():
        vhost, _, properties = line.partition("\t")
        if (named := _CONNECTION.search(properties)) is not None:
            in_cell = named[1].startswith(("conductor", "compute", *deployment.site.cells))
            found.append((named[1], API if vhost == API_VHOST else vhost, in_cell))
    return found


def last_log_line(log: Path, lines: int = 400) -> str:
    """The line of a log with the reason why its process ended."""
    if not log.exists():
        return ""
    text: Sequence[str] = log.read_text(errors="replace").splitlines()[-lines:]
    telling = [line for line in text if any(clue in line for clue in CLUES)]
    return (telling or list(text) or [""])[-1][:600]
