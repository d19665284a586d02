"""Everything as processes: each worker its own, on the real servers, with numbers that suit the machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from berth.config.ports import ServerFailed
from berth.config.settings import MEMORY, CellSettings, Settings, UpSettings
from berth.config.site import Runtime, Site, write_runtime
from berth.up.broker_probe import probe
from berth.up.embedded.rabbitmq import RabbitMQ
from berth.up.in_one_process import database, ironic_of, message_of, unusable_hosts
from berth.up.server_restart import Notify, kept_running
from berth.up.servers import API_VHOST, variables
from berth.up.worker_processes import WatchdogPings, WorkerProcesses
from bus.bus import API
from bus.clock import Clock
from bus.contracts.queues import project_bus
from placement_worker.rest.config import RestConfig

LOOK_S = 0.2
# One worker may die so often within so long; past it something is wrong that a restart does not mend.
MAX_DEATHS = 5
WITHIN_S = 60.0
# The first restart comes at once, each further one within that time waits longer.
PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0
# A worker that stands still is aborted, which prints its stacks into its log, and after so long it is killed.
ABORT_S = 5.0


# A worker that died is started again, a bounded number of times. One whose event loop stands still is ended first.
class Supervisor:
    """Watches worker processes. notify: called with a sentence for each death and restart."""

    def __init__(self, processes: WorkerProcesses, *, clock: Clock, notify: Callable[[str], None]) -> None:
        self._processes = processes
        self._clock = clock
        self._notify = notify
        self._deaths: dict[str, deque[float]] = {}
        self._again_at: dict[str, float] = {}
        self._killed_at: dict[str, float] = {}  # when a worker that was aborted is killed

    async def watch(self) -> None:
        """Until cancelled. Raises ServerFailed when a worker dies again and again."""
        while True:
            self.check_workers()
            await self._clock.sleep(LOOK_S)

    def check_workers(self) -> None:
        """End those that stand still, note those that died, start those again whose pause is over."""
        now = self._clock.monotonic()
        if self._processes.pings is not None:
            self._processes.pings.receive(now)
        for name, worker in list(self._processes.workers.items()):
            if worker.process.running:
                self._check_loop(name, now)
                continue
            if name not in self._again_at:
                self._again_at[name] = now + self._died(name, now)
            if self._again_at[name] <= now:
                del self._again_at[name]
                self._processes.restart(name)

    def _check_loop(self, name: str, now: float) -> None:
        """End a worker whose event loop has given no watchdog ping for too long."""
        pings, worker = self._processes.pings, self._processes.workers[name]
        if pings is None:
            return
        if name in self._killed_at:
            if self._killed_at[name] <= now:
                worker.process.kill()
            return
        if pings.stalled_s(worker.process.pid, now) <= pings.limit_s:
            return
        self._notify(
            f"the event loop of {name} stood still for {pings.limit_s:g} s, so it is ended; its log: {worker.log}"
        )
        self._killed_at[name] = now + ABORT_S
        worker.process.abort()

    def _died(self, name: str, now: float) -> float:
        """Count a death; returns how long to wait before the restart."""
        worker = self._processes.workers[name]
        self._killed_at.pop(name, None)
        if self._processes.pings is not None:
            self._processes.pings.remove(worker.process.pid)
        deaths = self._deaths.setdefault(name, deque(maxlen=MAX_DEATHS))
        while deaths and deaths[0] < now - WITHIN_S:
            deaths.popleft()
        status = f"{name} died with status {worker.process.status}"
        if len(deaths) >= MAX_DEATHS:
            raise ServerFailed(f"{status}, {MAX_DEATHS} times within {WITHIN_S:g} s:\n{worker.process.tail()}")
        pause_s = min(PAUSE_S * 2 ** (len(deaths) - 1), LONGEST_PAUSE_S) if deaths else 0.0
        deaths.append(now)
        self._notify(f"{status}; started again{f' after {pause_s:g} s' if pause_s else ''} (its log: {worker.log})")
        return pause_s


async def supervised(supervisor: Supervisor, stop: asyncio.Event) -> None:
    """Until `stop` is set. Raises what ended the supervision."""
    watching = asyncio.create_task(supervisor.watch())
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({watching, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()
    finally:
        for task in (watching, stopped):
            task.cancel()
        await asyncio.gather(watching, stopped, return_exceptions=True)


# A worker is one core's worth of Python at most. Broker and database take about half of a busy machine, so the other
# half is dealt out: a quarter of the cores each to schedulers and placement workers, a quarter to each cell's pair.
CORES_PER_WORKER = 4
MAX_WORKERS = 16
MAX_PER_CELL = 8
MAX_COMPUTES = 64  # of a cell, as `up.computes_per_cell`


class ProcessCounts(Struct, frozen=True, kw_only=True):
    """How many processes of each worker; conductors and computes for every cell."""

    schedulers: int
    placements: int
    conductors: int
    computes: int

    def total(self, cells: int) -> int:
        """All of them."""
        return self.schedulers + self.placements + cells * (self.conductors + self.computes)


def computes_on_record(machines: Path, cells: Collection[str]) -> int:
    """How many compute services of a cell have left machines here; a cell that had more than another counts for all.

    A service that is not started again would leave its hosts silent and its instances unmanaged.
    """
    own = re.compile(r"(?P<cell>.+)\.(?P=cell)-c(?P<number>[1-9][0-9]?)\.machines")
    found = (own.fullmatch(path.name) for path in machines.glob("*.machines"))
    numbers = [int(one["number"]) for one in found if one is not None and one["cell"] in cells]
    return min(max(numbers, default=0), MAX_COMPUTES)


def numbers(
    cpus: int, cells: int, up: UpSettings, requested: Mapping[str, int | None], *, earlier: int = 0
) -> ProcessCounts:
    """The options, else settings that are not their default, else numbers that suit so many CPUs.

    earlier: compute services of a cell that were there before; by default no fewer are started.
    """
    usual = UpSettings()
    alone = min(max(cpus // CORES_PER_WORKER, 1), MAX_WORKERS)
    in_cell = min(max(cpus // (CORES_PER_WORKER * max(cells, 1)), 1), MAX_PER_CELL)
    suits = {"schedulers": alone, "placements": alone, "conductors": in_cell, "computes": max(in_cell, earlier)}
    settings = {
        name: value
        for name, value, default in (
            ("schedulers", up.schedulers, usual.schedulers),
            ("placements", up.placements, usual.placements),
            ("computes", up.computes_per_cell, usual.computes_per_cell),
        )
        if value != default
    }
    given = {name: number for name, number in requested.items() if number is not None}
    return ProcessCounts(**{**suits, **settings, **given})


class RunningProcesses(Struct, frozen=True, kw_only=True):
    """The running processes: for printing it, and for watching it."""

    processes: WorkerProcesses
    site: Site
    logs: Path
    ironic_url: str


@contextlib.asynccontextmanager
async def running(settings: Settings, count: ProcessCounts, *, notify: Notify) -> AsyncIterator[RunningProcesses]:
    """Run servers (ours, kept alive, unless the settings name others) and every worker, ready for other commands.

    notify: called with a sentence when a server of ours ended.

    Raises ServerMissing (no RabbitMQ on this computer) or ServerFailed.
    """
    logs = settings.state / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    async with (
        _broker(settings, notify) as buses,
        database(settings, durable=True, directory=settings.state / "postgres", notify=notify) as database_url,
    ):
        real = _real(settings, buses, database_url)
        here = Site(real)
        async with ironic_of(here) as ironic_url:
            pings = WatchdogPings()
            processes = WorkerProcesses(logs, variables(real), pings=pings)
            try:
                started = await start(processes, real, count, ironic_url)
                await processes.ready()
                if missing := await unusable_hosts(here, started):
                    notify(message_of(missing))
                runtime = Runtime(pid=os.getpid(), database_url=database_url, ironic_url=ironic_url, buses=buses)
                remove_runtime = write_runtime(settings.state, runtime)
                try:
                    yield RunningProcesses(processes=processes, site=here, logs=logs, ironic_url=ironic_url)
                finally:
                    remove_runtime()
            finally:
                await asyncio.to_thread(processes.stop)
                pings.close()


async def start(
    processes: WorkerProcesses, settings: Settings, count: ProcessCounts, ironic_url: str
) -> dict[str, list[str]]:
    """Start all, what others lean on first. Returns {cell: names of its compute services}.

    Placement is waited for: a compute service whose first report finds no queue tries again less and less often, and a
    host that is not in placement takes no builds meanwhile.
    """
    started: dict[str, list[str]] = {cell: [] for cell in settings.cells}
    no_rest = {"BERTH_PLACEMENT__REST": msgspec.json.encode(RestConfig()).decode()}
    for number in range(1, count.placements + 1):  # one of them has the address of the REST API
        processes.start(f"placement{number}", "placement", settings=no_rest if number > 1 else None)
    await processes.ready()
    for position, (cell, services) in enumerate(started.items()):
        for number in range(1, count.conductors + 1):
            processes.start(f"conductor-{cell}-{number}", "conductor", "--cell", cell)
        for number in range(1, count.computes + 1):
            services.append(service := f"{cell}-c{number}")
            processes.start(f"compute-{service}", "compute", "--cell", cell, "--service", service)
        if ironic_url:
            share = _metal(settings, ironic_url, position, len(started))
            services.append(name := f"{cell}-metal")
            processes.start(f"compute-{name}", "compute", "--cell", cell, "--service", name, settings=share)
    if ironic_url:
        processes.start("ironic-sync", "ironic-sync", settings={"BERTH_IRONIC_SYNC__URL": ironic_url})
    for number in range(1, count.schedulers + 1):
        processes.start(f"scheduler{number}", "scheduler")
    if settings.gateway.projects:
        processes.start("gateway", "gateway")
    return started


def _metal(settings: Settings, url: str, share: int, shares: int) -> dict[str, str]:
    """A compute service of bare metal: its share of the nodes."""
    ironic = replace(settings.compute.ironic, url=url, share=share, shares=shares)
    return {
        "BERTH_COMPUTE__DRIVER": "ironic",
        "BERTH_COMPUTE__IRONIC": msgspec.json.encode(ironic).decode(),
    }


@contextlib.asynccontextmanager
async def _broker(settings: Settings, notify: Notify) -> AsyncIterator[dict[str, str]]:
    """{bus: URL} of a broker of our own, its messages kept below the state directory; {}: the settings name one."""
    if settings.bus.url != MEMORY:
        yield {}
        return
    broker = RabbitMQ(settings.state / "rabbitmq")
    async with kept_running("RabbitMQ", broker, notify=notify, probe=lambda: probe(broker.url())):
        clients = map(project_bus, settings.gateway.projects)
        vhosts = {API: API_VHOST, **{bus: bus for bus in (*settings.cells, *clients)}}
        urls = await asyncio.to_thread(broker.add_vhosts, vhosts.values())
        yield {name: urls[vhost] for name, vhost in vhosts.items()}


def _real(settings: Settings, buses: Mapping[str, str], database_url: str) -> Settings:
    """The settings with the servers that run."""
    settings = replace(settings, database=replace(settings.database, url=database_url))
    if not buses:
        return settings
    cells = {cell: CellSettings(url=buses[cell]) for cell in settings.cells}
    return replace(settings, bus=replace(settings.bus, url=buses[API], prefix=""), cells=cells)
