"""Real servers and a whole set of worker processes on them: what tests, benchmarks and chaos runs start from."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from berth.bus_client import BuildClient
from berth.config.settings import BusSettings, CellSettings, ComputeSettings, DatabaseSettings, Settings
from berth.config.site import Site
from berth.up.embedded.postgres import Postgres
from berth.up.embedded.process import GuardedProcess
from berth.up.embedded.rabbitmq import RabbitMQ
from berth.up.worker_processes import WorkerProcesses
from bus.faults import Transient
from bus.transport import BusError
from compute_sim.config import SimulatedConfig

API_VHOST = "berth"
HOSTS_KNOWN_S = 300.0  # a hundred thousand hosts take minutes to report
MAX_SERVICES = 1_000
ANSWERS_IN_A_ROW = 4  # a scheduler: whichever is free answers
ASK_AGAIN_S = 0.1


class SystemPlan(Struct, frozen=True, kw_only=True):
    """How many of each worker, and what hosts."""

    cells: tuple[str, ...] = ("cell1", "cell2")
    schedulers: int = 2
    placements: int = 2
    conductors_per_cell: int = 1
    computes_per_cell: int = 1
    compute: ComputeSettings = ComputeSettings(simulated=SimulatedConfig(hosts=50))
    durable: bool = True


class RealServers:
    """A private RabbitMQ with a virtual host per bus, and a private PostgreSQL with an empty database."""

    def __init__(
        self, broker: RabbitMQ, postgres: Postgres, cells: tuple[str, ...], *, database: str = "postgres"
    ) -> None:
        self.broker = broker
        self.postgres = postgres
        self.urls = broker.add_vhosts((API_VHOST, *cells))
        self.database_url = postgres.url(database)

    def settings(self, plan: SystemPlan) -> Settings:
        """Settings of a system on these servers."""
        return Settings(
            bus=BusSettings(url=self.urls[API_VHOST]),
            cells={cell: CellSettings(url=self.urls[cell]) for cell in plan.cells},
            database=DatabaseSettings(url=self.database_url),
            compute=plan.compute,
        )


@contextlib.contextmanager
def real_servers(cells: tuple[str, ...], *, durable: bool, **of_postgres: Any) -> Iterator[RealServers]:
    """Private servers for as long as the block runs. durable: PostgreSQL with fsync, as in production; of_postgres: as
    for `Postgres`.
    """
    with RabbitMQ() as broker, Postgres(durable=durable, **of_postgres) as postgres:
        yield RealServers(broker, postgres, cells)


def variables(settings: Settings) -> dict[str, str]:
    """The `BERTH_...` variables for what is not default in these settings, for child processes."""
    bare = msgspec.to_builtins(Settings())
    found: dict[str, str] = {}
    for section, values in msgspec.to_builtins(settings).items():
        if not isinstance(values, dict) or section == "cells":
            continue
        for name, value in values.items():
            if value != bare[section].get(name) and value is not None:
                plain = isinstance(value, str)
                text = value if plain else msgspec.json.encode(value).decode()
                found[f"BERTH_{section.upper()}__{name.upper()}"] = text
    found["BERTH_CELLS"] = msgspec.json.encode(settings.cells).decode()
    return found


async def hosts_known(client: BuildClient, plan: SystemPlan) -> None:
    """Wait until each scheduler can place on every host of the plan: a build before that may rightly find none.

    Raises TimeoutError.
    """
    count = len(plan.cells) * plan.computes_per_cell * plan.compute.simulated.hosts
    async with asyncio.timeout(HOSTS_KNOWN_S):
        in_a_row = 0
        while in_a_row < ANSWERS_IN_A_ROW * plan.schedulers:
            await asyncio.sleep(ASK_AGAIN_S if in_a_row == 0 else 0)
            with contextlib.suppress(Transient, BusError):
                page = await client.services(limit=MAX_SERVICES, timeout_s=HOSTS_KNOWN_S, up=True)
                known = sum(service.in_placement for service in page.services)
                in_a_row = in_a_row + 1 if known == count else 0


@contextlib.asynccontextmanager
async def running_processes(
    servers: RealServers,
    plan: SystemPlan,
    *,
    extra: Mapping[str, str] | None = None,
    spawn: type[GuardedProcess] = GuardedProcess,
) -> AsyncIterator[tuple[WorkerProcesses, Site]]:
    """Every worker of the plan as a process on these servers, ready."""
    settings = servers.settings(plan)
    with tempfile.TemporaryDirectory(prefix="berth-processes-") as name:
        directory = Path(name)
        compute = msgspec.structs.replace(settings.compute, state_dir=str(directory / "machines"))
        settings = msgspec.structs.replace(settings, compute=compute)
        processes = WorkerProcesses(directory, {**variables(settings), **(extra or {})}, spawn=spawn)
        try:
            start_all(processes, plan)
            await processes.ready()
            yield processes, Site(settings)
        finally:
            await asyncio.to_thread(processes.stop)


def start_all(processes: WorkerProcesses, plan: SystemPlan) -> None:
    """Start what the plan counts, what others lean on first."""
    for number in range(1, plan.placements + 1):
        processes.start(f"placement{number}", "placement")
    for cell in plan.cells:
        for number in range(1, plan.conductors_per_cell + 1):
            processes.start(f"conductor-{cell}-{number}", "conductor", "--cell", cell)
        for number in range(1, plan.computes_per_cell + 1):
            service = f"{cell}-c{number}"
            processes.start(f"compute-{service}", "compute", "--cell", cell, "--service", service)
    for number in range(1, plan.schedulers + 1):
        processes.start(f"scheduler{number}", "scheduler")
