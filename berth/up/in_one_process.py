"""Everything in one process: embedded PostgreSQL, memory buses served at a socket, and every worker."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from functools import partial
from pathlib import Path

import msgspec

import cell_conductor.app
import compute_agent.app
import gateway.app
import ironic_sync.app
import placement_worker.app
import scheduler_worker.app
from berth.config.settings import EMBEDDED, MEMORY, ComputeSettings, Settings
from berth.config.site import Brokers, Runtime, Site, process_name, write_runtime
from berth.up.embedded.postgres import Postgres
from berth.up.local_workers import InProcessWorkers
from berth.up.server_restart import Notify, kept_running, to_log
from bus.bus import API, Bus
from bus.clock import SystemClock
from bus.contracts.operations import ServiceRecord, ServicesPage, ServicesQuery
from bus.faults import DatabaseForbidden, Fault
from bus.local import LocalServer
from bus.service.service import WorkerRuntime
from bus.transport import BusError
from compute_agent.driver_plugin import load as load_driver
from compute_agent.records.records import Records
from compute_sim.fleet import Fleet
from compute_sim.ironic_stand_in import AmqpAnnouncer, Behaviour, IronicStandIn, MemoryAnnouncer, NotificationAnnouncer
from compute_sim.ironic_stand_in.state_file import load, save, save_changes
from placement_worker.rest.config import RestConfig


def announcer(site: Site) -> NotificationAnnouncer:
    """Where the stand-in's notifications go: as Ironic's would, into an exchange of its own."""
    exchange = site.settings.ironic_sync.exchange
    if site.settings.bus.url != MEMORY:
        return AmqpAnnouncer(site.settings.bus.url, exchange)
    assert site.brokers is not None
    return MemoryAnnouncer(site.brokers.broker(API), exchange)


@contextlib.asynccontextmanager
async def simulated_ironic(
    site: Site, behaviour: Behaviour | None = None, *, kept: Path | None = None
) -> AsyncIterator[IronicStandIn | None]:
    """An Ironic with `up.nodes` available nodes for as long as this context; None when there are to be none.

    kept: a file that the nodes come from and are kept in; then they are as they were left, and as many as ever.
    """
    if site.settings.up.nodes == 0:
        yield None
        return
    ironic = IronicStandIn(announcer(site), clock=site.clock, rng=site.rng, behaviour=behaviour)
    if kept is None or not load(ironic.pool, kept):
        ironic.pool.plan(site.settings.up.nodes)
    await ironic.start()
    save_task = asyncio.create_task(save_changes(ironic.pool, kept, site.clock)) if kept is not None else None
    try:
        yield ironic
    finally:
        await ironic.stop()
        if kept is not None and save_task is not None:
            save_task.cancel()
            await asyncio.gather(save_task, return_exceptions=True)
            save(ironic.pool, kept)


@contextlib.asynccontextmanager
async def ironic_of(site: Site) -> AsyncIterator[str]:
    """The address of the Ironic that `berth up` works with: the settings', else a simulated one's; empty: none."""
    if site.settings.up.ironic_url:
        yield site.settings.up.ironic_url
        return
    async with simulated_ironic(site, kept=kept_in(site)) as ironic:
        yield ironic.url if ironic is not None else ""


def kept_in(site: Site) -> Path:
    """Where `berth up` keeps its nodes: beside the embedded database, which knows the instances on them."""
    return site.settings.state / "ironic.json"


DATABASE_NAME = "postgres"
FIRST_PLACEMENT = "placement1"
OTHER_SCHEMAS = frozenset(f"database.{one}_schema" for one in ("other", "newer", "foreign"))


@contextlib.asynccontextmanager
async def database(
    settings: Settings, *, durable: bool, directory: Path | None, notify: Notify = to_log
) -> AsyncIterator[str]:
    """The URL of the database: the settings', or of an embedded server that is kept alive as long as this context."""
    if settings.database.url != EMBEDDED:
        yield settings.database.url
        return
    server = Postgres(directory, durable=durable)
    async with kept_running("PostgreSQL", server, notify=notify):
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
    message = (
        f"the embedded database in {directory} is of another version: {found}. To begin with an empty one set "
        f"state_dir (BERTH_STATE_DIR) to another directory than {directory.parent}"
    )
    return DatabaseForbidden(message, code=found.code)


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
    """All workers of one process, as the settings count them. Fleets and records outlive their services."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.in_process = InProcessWorkers()
        self.fleets: dict[str, Fleet] = {}
        self._computes: dict[str, Callable[[], WorkerRuntime]] = {}
        self.services: dict[str, list[str]] = {cell: [] for cell in site.cells}  # compute services
        self._builds: dict[str, Callable[[], WorkerRuntime]] = {}  # of all workers, by name

    async def start(self, *, ironic_url: str | None = None) -> None:
        """Start everything, what others lean on first. ironic_url: also ironic-sync and a bare-metal compute a cell."""
        up, base, start = self.site.settings.up, self.site.settings.compute, self._start
        await start({name: partial(self._placement, name) for name in _numbered("placement", up.placements)})
        await start({f"conductor-{cell}": partial(self._conductor, cell) for cell in self.site.cells})
        for number, cell in enumerate(self.site.cells):
            for service in _numbered(f"{cell}-c", up.computes_per_cell):
                self._computes[service] = self._compute(base, cell, service)
                self.services[cell].append(service)
            if ironic_url is not None:
                ironic = msgspec.structs.replace(base.ironic, url=ironic_url, share=number, shares=len(self.site.cells))
                metal = msgspec.structs.replace(base, driver="ironic", ironic=ironic)
                self._computes[f"{cell}-metal"] = self._compute(metal, cell, f"{cell}-metal")
                self.services[cell].append(f"{cell}-metal")
        await start(self._computes)
        if ironic_url is not None:
            await start({"ironic-sync": partial(self._ironic_sync, ironic_url)})
        await start({name: partial(self._scheduler, name) for name in _numbered("scheduler", up.schedulers)})
        if self.site.settings.gateway.projects:
            await start({"gateway": self._gateway})

    async def _start(self, builds: Mapping[str, Callable[[], WorkerRuntime]]) -> None:
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

    def _placement(self, name: str) -> WorkerRuntime:
        config = self.site.settings.placement
        if name != FIRST_PLACEMENT:  # one of them has the address of the REST API
            config = msgspec.structs.replace(config, rest=RestConfig())
        return placement_worker.app.build(self.site.environment(name), config, self.site.cells)

    def _scheduler(self, name: str) -> WorkerRuntime:
        return scheduler_worker.app.build(self.site.environment(name), self.site.settings.scheduler, self.site.cells)

    def _ironic_sync(self, url: str) -> WorkerRuntime:
        config = msgspec.structs.replace(self.site.settings.ironic_sync, url=url)
        return ironic_sync.app.build(self.site.environment("ironic-sync", "ironic-sync"), config)

    def _gateway(self) -> WorkerRuntime:
        return gateway.app.build(self.site.environment("gateway"), self.site.settings.gateway)

    def _conductor(self, cell: str) -> WorkerRuntime:
        environment = self.site.environment(f"conductor-{cell}")
        return cell_conductor.app.build(environment, self.site.settings.conductor, cell)

    def _compute(self, config: ComputeSettings, cell: str, service: str) -> Callable[[], WorkerRuntime]:
        records = Records.of_service(config.state_dir, cell, service, synced=load_driver(config.driver).synced)
        fleet = None
        if config.driver == "simulated":
            fleet = Fleet.planned(config.simulated, cell, service, records, config.state_dir)
            self.fleets[service] = fleet
        return lambda: compute_agent.app.build(
            self.site.environment(service, "compute"), config, cell, service, records=records, driver_state=fleet
        )


@contextlib.asynccontextmanager
async def serve(site: Site, ironic_url: str | None) -> AsyncIterator[None]:
    """Let other commands of this computer reach what this process holds in memory."""
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


# The hosts are waited for this long after the workers are ready; a compute service tries again to report its inventory
# within ten seconds at the latest.
WAIT_S = 30.0
ASK_S = 0.2
MIN_ASK_S, MAX_ASK_S = 0.1, 5.0  # the time-out of one query
MAX_SERVICES = 1000  # of one answer
MAX_NAMED = 5  # services in a sentence


async def unusable_hosts(here: Site, started: Mapping[str, Collection[str]], *, wait_s: float = WAIT_S) -> list[str]:
    """Wait until a scheduler knows each of these compute services, and has each of its hosts in placement.

    started: {cell: names of compute services}. Returns what is missing after `wait_s` seconds, a sentence each.
    """
    bus = here.bus(process_name("up"))
    until = here.clock.monotonic() + wait_s
    await bus.open()
    try:
        while True:
            remaining_s = until - here.clock.monotonic()
            missing = await _missing(bus, started, min(MAX_ASK_S, max(remaining_s, MIN_ASK_S)))
            if not missing or remaining_s <= 0:
                return missing
            await here.clock.sleep(ASK_S)
    finally:
        await bus.close()


async def _missing(bus: Bus, started: Mapping[str, Collection[str]], timeout_s: float) -> list[str]:
    missing: list[str] = []
    for cell, names in started.items():
        if not names:
            continue
        query = ServicesQuery(cell=cell, limit=MAX_SERVICES)
        try:
            page = await bus.request(query, ServicesPage, timeout_s=timeout_s)
        except (Fault, BusError) as fault:
            return [f"no scheduler answers: {fault}"]
        known = {one.name: one for one in page.services}
        states = {name: _state(known.get(name)) for name in names}
        missing += [f"{name} {state}" for name, state in sorted(states.items()) if state]
    return missing


def _state(service: ServiceRecord | None) -> str:
    """Why not all hosts of a service can be used; "": they can."""
    if service is None:
        return "has not announced its hosts"
    if not service.up:
        return f"is down ({service.code})"
    if service.in_placement < service.hosts:
        return f"has {service.hosts} hosts, of which {service.in_placement} are in placement"
    return ""


def message_of(missing: Collection[str]) -> str:
    """The message to an operator."""
    named = "; ".join(list(missing)[:MAX_NAMED])
    more = f"; and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
    return f"not every host takes builds yet: {named}{more}"
