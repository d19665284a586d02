"""Everything in one process: embedded PostgreSQL, memory buses served at a socket, and every worker."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec

import cell_conductor.app
import compute_sim.app
import ironic_sync.app
import placement_worker.app
import scheduler_worker.app
from berth.in_process import InProcessWorkers
from berth.settings import EMBEDDED, MEMORY, Settings
from berth.site import Brokers, Runtime, Site, write_runtime
from berth.trial.embedded.postgres import Postgres
from berth.trial.keeper import Notify, kept_alive, to_log
from bus.clock import SystemClock
from bus.faults import DatabaseForbidden
from bus.local import LocalServer
from bus.service.service import Service
from compute_sim.fleet import Fleet
from placement_worker.rest.config import RestConfig

DATABASE_NAME = "postgres"
FIRST_PLACEMENT = "placement1"
OTHER_SCHEMAS = frozenset(f"database.{one}_schema" for one in ("other", "old", "newer", "foreign"))


@contextlib.asynccontextmanager
async def database(
    settings: Settings, *, durable: bool, directory: Path | None, notify: Notify = to_log
) -> AsyncIterator[str]:
    """The URL of the database: the settings', or of an embedded server that is kept alive as long as this context."""
    if settings.database.url != EMBEDDED:
        yield settings.database.url
        return
    server = Postgres(directory, durable=durable)
    async with kept_alive("PostgreSQL", server, notify=notify):
        try:
            yield server.url(DATABASE_NAME)
        except Exception as error:
            if directory is not None and (found := other_schema(error)) is not None:
                raise _in_state_dir(found, directory) from error
            raise


def other_schema(error: BaseException | None) -> DatabaseForbidden | None:
    """The fault of a schema that this berth does not use, if that has ended a worker."""
    while error is not None:
        if isinstance(error, DatabaseForbidden) and error.code in OTHER_SCHEMAS:
            return error
        error = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__
    return None


def _in_state_dir(found: DatabaseForbidden, directory: Path) -> DatabaseForbidden:
    sentence = (
        f"the embedded database in {directory} is of another version: {found}. To begin with an empty one set "
        f"state_dir (BERTH_STATE_DIR) to another directory than {directory.parent}"
    )
    return DatabaseForbidden(sentence, code=found.code)


@contextlib.asynccontextmanager
async def site(
    settings: Settings, *, directory: Path | None, seed: int | None = None, notify: Notify = to_log
) -> AsyncIterator[Site]:
    """A site of this process: memory buses (where the settings name them) and a database that answers."""
    clock = SystemClock()
    async with database(settings, durable=directory is not None, directory=directory, notify=notify) as url:
        brokers = Brokers(clock)
        made = Site(settings, brokers=brokers, database_url=url, clock=clock, seed=seed)
        try:
            yield made
        finally:
            await made.close()
            for broker in brokers.by_bus.values():
                broker.stop()


class LocalSystem:
    """All workers of one process, as the settings count them. Fleets outlive their services, as machines do."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.in_process = InProcessWorkers()
        self.fleets: dict[str, Fleet] = {}
        self._computes: dict[str, Callable[[], Service]] = {}
        self.services: dict[str, list[str]] = {cell: [] for cell in site.cells}  # compute services
        self._builds: dict[str, Callable[[], Service]] = {}  # of all workers, by name

    async def start(self, *, ironic_url: str | None = None) -> None:
        """Start everything, what others lean on first. ironic_url: also ironic-sync and a bare-metal compute a cell."""
        up, start = self.site.settings.up, self._start
        await start({name: partial(self._placement, name) for name in _numbered("placement", up.placements)})
        await start({f"conductor-{cell}": partial(self._conductor, cell) for cell in self.site.cells})
        for number, cell in enumerate(self.site.cells):
            for service in _numbered(f"{cell}-c", up.computes_per_cell):
                self._computes[service] = self._hypervisors(cell, service)
                self.services[cell].append(service)
            if ironic_url is not None:
                share = (number, len(self.site.cells))
                self._computes[f"{cell}-metal"] = self._metal(cell, f"{cell}-metal", ironic_url, share)
                self.services[cell].append(f"{cell}-metal")
        await start(self._computes)
        if ironic_url is not None:
            await start({"ironic-sync": partial(self._ironic_sync, ironic_url)})
        await start({name: partial(self._scheduler, name) for name in _numbered("scheduler", up.schedulers)})

    async def _start(self, builds: Mapping[str, Callable[[], Service]]) -> None:
        self._builds.update(builds)
        await self.in_process.start(*((name, build()) for name, build in builds.items()))

    @property
    def computes(self) -> tuple[str, ...]:
        """The compute services' names."""
        return tuple(self._computes)

    @property
    def workers(self) -> tuple[str, ...]:
        """All workers' names."""
        return tuple(self._builds)

    async def replace_worker(self, name: str) -> None:
        """A worker dies, and a new process of it starts."""
        await self.in_process.kill(name)
        await self.in_process.start((name, self._builds[name]()))

    async def kill_compute(self, service: str) -> None:
        """The compute service dies; its machines run on."""
        await self.in_process.kill(service)

    async def revive_compute(self, service: str) -> None:
        """A new process of the same compute service, over the same machines."""
        await self.in_process.start((service, self._computes[service]()))

    def _placement(self, name: str) -> Service:
        config = self.site.settings.placement
        if name != FIRST_PLACEMENT:  # one of them has the address of the REST API
            config = msgspec.structs.replace(config, rest=RestConfig())
        return placement_worker.app.build(self.site.environment(name), config, self.site.cells)

    def _scheduler(self, name: str) -> Service:
        return scheduler_worker.app.build(self.site.environment(name), self.site.settings.scheduler, self.site.cells)

    def _ironic_sync(self, url: str) -> Service:
        config = msgspec.structs.replace(self.site.settings.ironic_sync, url=url)
        return ironic_sync.app.build(self.site.environment("ironic-sync", "ironic-sync"), config)

    def _conductor(self, cell: str) -> Service:
        environment = self.site.environment(f"conductor-{cell}")
        return cell_conductor.app.build(environment, self.site.settings.conductor, cell)

    def _hypervisors(self, cell: str, service: str) -> Callable[[], Service]:
        config = self.site.settings.compute
        fleet = self.fleets[service] = Fleet.planned(config, cell, service)
        return lambda: compute_sim.app.build(
            self.site.environment(service, "compute"), config, cell, service, fleet=fleet
        )

    def _metal(self, cell: str, service: str, url: str, share: tuple[int, int]) -> Callable[[], Service]:
        base = self.site.settings.compute
        ironic = msgspec.structs.replace(base.ironic, url=url, share=share[0], shares=share[1])
        config = msgspec.structs.replace(base, driver="ironic", hosts=0, ironic=ironic)
        fleet = self.fleets[service] = Fleet.planned(config, cell, service)
        return lambda: compute_sim.app.build(
            self.site.environment(service, "compute"), config, cell, service, fleet=fleet
        )


@contextlib.asynccontextmanager
async def serve(site: Site, ironic_url: str | None) -> AsyncIterator[None]:
    """Let other commands of this machine reach what this process holds in memory."""
    assert site.brokers is not None
    state = site.settings.state
    runtime = Runtime(pid=os.getpid(), database_url=site.database_url or "", ironic_url=ironic_url or "")
    if site.settings.bus.url != MEMORY:
        remove_runtime = write_runtime(state, runtime)
        try:
            yield
        finally:
            remove_runtime()
        return
    server = LocalServer(site.settings.socket, site.brokers.transport)
    await server.open()
    remove_runtime = write_runtime(state, runtime)
    try:
        yield
    finally:
        remove_runtime()
        await server.close()


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name}{number}" for number in range(1, count + 1)]
