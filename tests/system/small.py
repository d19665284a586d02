"""The smallest whole system: one worker of each role as a process on private real servers, for a module of tests."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from berth.config.settings import ComputeSettings, Settings
from berth.config.site import Site
from berth.up.servers import API_VHOST, RealServers, SystemPlan, start_all, variables
from berth.up.worker_processes import WorkerProcesses
from compute_sim.config import SimulatedConfig
from tests.kit.forks import ForkedProcess
from tests.kit.lent import lent_servers
from tests.kit.web_process import WebProcess

PLAN = SystemPlan(
    cells=("cell1",),
    schedulers=1,
    placements=1,
    compute=ComputeSettings(simulated=SimulatedConfig(hosts=4), heartbeat_interval_s=0.5),
    durable=False,
)


class Small(Struct):
    """The objects of a test."""

    servers: RealServers
    processes: WorkerProcesses
    settings: Settings
    web: WebProcess

    @property
    def variables(self) -> dict[str, str]:
        """Of a command: the system's settings, and where its web server is."""
        return {**variables(self.settings), **self.web.variables}

    @property
    def amqp_url(self) -> str:
        """The API bus, as any AMQP client is given it."""
        return self.servers.urls[API_VHOST]

    @property
    def site(self) -> Site:
        """For clients and instruments of this loop."""
        return Site(self.settings)

    def ready(self, *names: str) -> None:
        """Wait until all workers (or those named) are ready."""
        asyncio.run(self.processes.ready(names or None))

    def pids(self) -> dict[str, int]:
        """Which process every worker is."""
        return {name: worker.process.pid for name, worker in self.processes.workers.items() if worker.process.running}


@contextlib.contextmanager
def small_processes(*, start: bool = True) -> Iterator[Small]:
    """The system, ready; with start=False nothing but the servers runs yet."""
    with lent_servers(PLAN.cells) as servers, tempfile.TemporaryDirectory(prefix="berth-small-") as name:
        settings = servers.settings(PLAN)
        compute = msgspec.structs.replace(settings.compute, state_dir=f"{name}/machines")
        settings = msgspec.structs.replace(settings, compute=compute)
        web = WebProcess(variables(settings), Path(name))
        small = Small(servers, WorkerProcesses(Path(name), variables(settings), spawn=ForkedProcess), settings, web)
        try:
            if start:
                start_all(small.processes, PLAN)
                small.ready()
            yield small
        finally:
            web.stop()
            small.processes.stop()
