"""Wires a scheduler: the API bus, each cell's bus, its schema, the replica, the engine, the handlers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from bus.bus import API, Bus
from bus.cell_links import CellLink, CellLinks
from bus.consuming.consumer import Consumer
from bus.consuming.dead_letters import count_dead_letters
from bus.contracts.base import Message
from bus.contracts.build import BuildEvent
from bus.contracts.objects import CellBus
from bus.contracts.queues import REQUEST_PREFETCH, REQUEST_QUEUES
from bus.persistence.database import Database, watch_identity
from bus.persistence.relay import Lingering, Relay, StreamPosition
from bus.service.environment import Environment
from bus.service.presence import add_heartbeat
from bus.service.service import WorkerRuntime
from placement_worker.replica.book import Replica
from placement_worker.replica.follower import Follower
from scheduler_worker.announcements import CellEventHandler, CellEventRecorder
from scheduler_worker.changes import ControlListener, OperatorHandler, RefusedCommands
from scheduler_worker.claims import BusClaims
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.fleet import WaitingTable, WorkerTable
from scheduler_worker.domain.hosts import HostTable
from scheduler_worker.domain.requests import refused_unreadable
from scheduler_worker.domain.selector import Selector
from scheduler_worker.drain_plan import DrainInventory, DrainPlanner
from scheduler_worker.drains import DrainController
from scheduler_worker.emptying import EvacuationController, HostEmptier
from scheduler_worker.engine import SchedulingEngine
from scheduler_worker.fleet import QUEUE as METRICS_QUEUE
from scheduler_worker.fleet import HostMetricsListener, HostsListener, Warmup, age
from scheduler_worker.forgetting import HostRemoval
from scheduler_worker.handlers import RequestHandler
from scheduler_worker.keepers import AggregateSync, CellConnections, FencePublisher, find_cells
from scheduler_worker.metrics import FLEET
from scheduler_worker.moves import ActionEngine
from scheduler_worker.objects import ObjectRegistry, configured
from scheduler_worker.queries import QueryHandler, StatusHandler
from scheduler_worker.recovery import RecoveryAnswers
from scheduler_worker.store.port import SchedulerStore
from scheduler_worker.store.postgres import PostgresBuilds
from scheduler_worker.unanswered import SilentRequests, purge_forever


def is_progress(message: Message) -> bool:
    """Whether an event ends nothing: it is published a moment later, unless the build's next event comes first."""
    return isinstance(message, BuildEvent) and not message.terminal


def position_of_event(message: Message) -> StreamPosition | None:
    """The build of an event, and the event's number in that build; None: it is no event of a build on record."""
    return (message.instance_uuid, message.sequence) if isinstance(message, BuildEvent) and message.sequence else None


def build(
    env: Environment,
    config: SchedulerConfig,
    cells: Sequence[str],
    *,
    store: SchedulerStore | None = None,
    replica: Replica | None = None,
    table: HostTable | None = None,
) -> WorkerRuntime:
    """One scheduler over these cells, and those that operators add; any number may run side by side. store: instead of
    the environment's schema `scheduler`. replica, table: the ones to fill, for callers that read them.
    """
    service = WorkerRuntime("scheduler", clock=env.clock)
    parts = _parts(service, env, config, cells, store=store, replica=replica, table=table)
    relay = _relay(parts)
    follower = Follower(parts.api, parts.selector.replica, process=env.process, clock=env.clock)
    registry = ObjectRegistry(parts.store, parts.selector, config, clock=env.clock, cells=cells)
    engine, actions = _engines(parts, follower, registry)
    _add_store_and_replica(parts, relay, follower)
    add_heartbeat(service, env, parts.api, "scheduler")
    drains = _add_drains(parts, registry, actions, follower)
    forgetter = HostRemoval(parts.store, registry, parts.selector, parts.api, lambda: links.buses, clock=env.clock)
    _add_objects(parts, registry, drains, forgetter)
    measured = _add_host_metrics(parts)
    writer = CellEventRecorder(parts.store, clock=env.clock, choose=actions.choose_now)
    links = _links(parts, relay, registry, writer, measured)
    _add_fences(parts, registry, links)
    wait_for_backlog = partial(relay.wait_for_backlog, API)
    requests = RequestHandler(
        engine,
        actions,
        parts.selector,
        clock=env.clock,
        config=config,
        warmup=parts.warmup,
        wait_for_backlog=wait_for_backlog,
    )
    unanswered = _add_watch(parts, requests, links)
    for cell, bus in parts.cell_buses.items():
        links.configure(bus)
        service.add_bus_check(f"bus {cell}", partial(links.unavailable_reason, cell))
    service.add_preparation(lambda: links.entered(config.cell_wait_s))
    service.add_preparation(parts.warmup.begin)
    connections = _add_cells(parts, registry, links, lambda: {*relay.missing, *unanswered.cells})
    queries = QueryHandler(parts.store, drains, parts.waiting, clock=env.clock, objects=registry, cells=connections)
    status = StatusHandler(parts.selector, parts.workers, registry, clock=env.clock)
    _add_requests(parts, queries, status, requests)
    return service


@dataclass(frozen=True, kw_only=True)
class SchedulerParts:
    """The resources that all parts of one scheduler share."""

    service: WorkerRuntime
    env: Environment
    config: SchedulerConfig
    buses: Mapping[str, Bus]  # by name, the API bus and one of each cell of the settings
    store: SchedulerStore
    claims: BusClaims
    selector: Selector
    workers: WorkerTable
    waiting: WaitingTable
    warmup: Warmup
    claim: Callable[[Bus], None]  # has a bus claimed for the database on entering it

    @property
    def api(self) -> Bus:
        """The API bus."""
        return self.buses[API]

    @property
    def cell_buses(self) -> dict[str, Bus]:
        """The buses of the settings' cells, by the cell's name."""
        return {name: bus for name, bus in self.buses.items() if name != API}

    @property
    def process(self) -> str:
        """The name of this scheduler in a build's timeline."""
        return f"scheduler {self.env.process}".strip()


def _parts(
    service: WorkerRuntime,
    env: Environment,
    config: SchedulerConfig,
    cells: Sequence[str],
    *,
    store: SchedulerStore | None,
    replica: Replica | None,
    table: HostTable | None,
) -> SchedulerParts:
    """The tables, the buses and the store; with PostgreSQL also the check that detects another schema."""
    made = configured(config)
    selector = Selector(
        Replica() if replica is None else replica,
        HostTable() if table is None else table,
        config,
        flavors=made.flavors,
        filters=made.filters,
        weighings=made.weighings,
    )
    buses = {name: env.bus(name) for name in (API, *cells)}
    database: Database | None = None
    if store is None:
        database = env.database("scheduler")
        store = PostgresBuilds(database)
        service.add_task("identity", partial(watch_identity, database, lambda: store.database_id, env.clock))

    def claim(bus: Bus) -> None:
        bus.publishes_as("scheduler_worker")
        bus.belongs_to("scheduler", lambda: store.database_id, lambda: "" if database is None else database.place)

    for bus in buses.values():
        claim(bus)
    return SchedulerParts(
        service=service,
        env=env,
        config=config,
        buses=buses,
        store=store,
        claims=BusClaims(buses[API], timeout_s=config.claim_timeout_s),
        selector=selector,
        workers=WorkerTable(),
        waiting=WaitingTable(),
        warmup=Warmup(selector, clock=env.clock),
        claim=claim,
    )


def _relay(parts: SchedulerParts) -> Relay:
    """The relay that publishes the store's outbox."""
    relay = Relay(
        parts.store.outbox,
        parts.buses,
        clock=parts.env.clock,
        lingering=Lingering(linger_s=parts.config.progress_linger_s, lingers=is_progress, place=position_of_event),
    )
    parts.store.publish_through(relay)
    return relay


def _engines(
    parts: SchedulerParts, follower: Follower, registry: ObjectRegistry
) -> tuple[SchedulingEngine, ActionEngine]:
    """The engine of builds and deletes, and the engine of moves."""
    env, config = parts.env, parts.config
    engine = SchedulingEngine(
        parts.store,
        parts.claims,
        parts.selector,
        follower,
        clock=env.clock,
        rng=random.Random(env.rng.getrandbits(64)),
        config=config,
        process=parts.process,
    )
    actions = ActionEngine(
        parts.store,
        parts.claims,
        parts.selector,
        follower,
        clock=env.clock,
        rng=random.Random(f"moves {env.process}"),
        reload=registry.reload,
        process=parts.process,
    )
    return engine, actions


def _add_store_and_replica(parts: SchedulerParts, relay: Relay, follower: Follower) -> None:
    """The store, its outbox and retention; the API bus; the replica and the metrics of what it holds."""
    service = parts.service
    service.add_resource(parts.store.open, parts.store.close)
    service.add_resource(parts.api.open, parts.api.close)
    service.add_resource(follower.start, follower.close)
    service.add_resource(partial(FLEET.add, parts.selector), partial(FLEET.remove, parts.selector))
    service.add_task("outbox", relay.run)
    service.add_task("retention", lambda: purge_forever(parts.store, parts.env.clock, parts.config))
    service.add_drain(relay.drain)
    service.add_task("replica", follower.run)
    service.add_preparation(follower.ready.wait)
    service.add_check("database", lambda: parts.store.ready)
    service.add_check("replica", follower.ready.is_set)
    service.add_refresh(partial(count_dead_letters, API, parts.api.transport))


def _add_drains(
    parts: SchedulerParts, registry: ObjectRegistry, actions: ActionEngine, follower: Follower
) -> DrainController:
    """The tasks that empty hosts: drains, and evacuations of fenced hosts."""
    clock = parts.env.clock
    holders = DrainInventory(parts.store, parts.selector, follower, parts.api, warmup=parts.warmup, clock=clock)
    planner = DrainPlanner(parts.selector, actions, holders, clock=clock)
    emptier = HostEmptier(parts.store, actions, holders, planner.order, warmup=parts.warmup, clock=clock)
    drains = DrainController(
        parts.store,
        registry,
        holders,
        planner,
        emptier,
        clock=clock,
        rng=random.Random(f"drains {parts.env.process}"),
        process=parts.process,
    )
    rng = random.Random(f"evacuations {parts.env.process}")
    evacuations = EvacuationController(registry, parts.selector, emptier, clock=clock, rng=rng)
    parts.service.add_task("drains", drains.run)
    parts.service.add_task("evacuations", evacuations.run)
    return drains


def _add_objects(
    parts: SchedulerParts, registry: ObjectRegistry, drains: DrainController, forgetter: HostRemoval
) -> None:
    """Operators' objects: loaded before the first request is taken, and again whenever they change."""
    service, bus = parts.service, parts.api
    bus.transport.on_reconnect(registry.on_reconnected)
    listener = ControlListener(registry, parts.workers, bus.name, clock=bus.clock)
    changes = OperatorHandler(
        registry,
        parts.selector,
        drains,
        forgetter,
        refused=RefusedCommands(parts.store),
        find_cells=partial(find_cells, parts.selector, bus),
        warmup=parts.warmup,
    )
    # The queue is declared before the objects are read, so that it receives the notification of a change in between.
    service.add_declaration(lambda: bus.declare("scheduler.control.{process}"))
    service.add_preparation(registry.open)
    service.add_task("objects", registry.run)
    service.add_task("aggregates", AggregateSync(registry, parts.selector, bus, clock=bus.clock).run)
    service.add_consumer(
        Consumer(bus, "scheduler.control.{process}", listener, max_batch=64, concurrency=1, prefetch=64)
    )
    service.add_consumer(Consumer(bus, "scheduler.changes", changes, max_batch=16, concurrency=1, prefetch=16))


def _add_host_metrics(parts: SchedulerParts) -> asyncio.Event:
    """Measurements of hosts; returns an event that is set when the first measurement has arrived on any bus."""
    measured = asyncio.Event()
    parts.service.add_consumer(_metrics_consumer(parts.api, parts.selector, measured))
    parts.service.add_task("host metrics", lambda: age(parts.selector.metrics, measured, parts.env.clock))
    return measured


def _add_fences(parts: SchedulerParts, registry: ObjectRegistry, links: CellLinks) -> None:
    """The task that publishes fences to the cells."""
    parts.service.add_task("fences", FencePublisher(registry, links.buses, clock=parts.env.clock).run)


def _add_watch(parts: SchedulerParts, requests: RequestHandler, links: CellLinks) -> SilentRequests:
    """The task that looks after requests without an event."""
    unanswered = SilentRequests(
        parts.store,
        links.buses,
        lambda: parts.selector.config,
        clock=parts.env.clock,
        rng=random.Random(f"unanswered {parts.env.process}"),
        after_s=parts.config.action_query_s,
        resume=requests.resume,
        process=parts.process,
    )
    parts.service.add_task("unanswered", unanswered.run)
    return unanswered


def _links(
    parts: SchedulerParts, relay: Relay, registry: ObjectRegistry, writer: CellEventRecorder, measured: asyncio.Event
) -> CellLinks:
    """The links to the cells in use, as they are now."""
    env = parts.env

    def reach(name: str, where: CellBus | None) -> Bus:
        bus = env.cell_bus(name, where)
        parts.claim(bus)
        return bus

    links = CellLinks(
        lambda bus: _link(parts, bus, registry, writer, measured),
        clock=env.clock,
        reach=reach,
        opened=relay.add_bus,
        closed=lambda bus: relay.remove_bus(bus.name),
    )
    return links


def _link(
    parts: SchedulerParts, bus: Bus, registry: ObjectRegistry, writer: CellEventRecorder, measured: asyncio.Event
) -> CellLink:
    """The link to one cell: reports of its hosts, events of its builds, and measurements."""
    env, config = parts.env, parts.config
    rng = random.Random(env.rng.getrandbits(64))
    listener = HostsListener(
        bus,
        parts.selector.table,
        parts.workers,
        parts.waiting,
        clock=env.clock,
        rng=rng,
        again_s=config.report_interval_s,
    )
    bus.transport.on_reconnect(listener.on_reconnected)
    cell_events = CellEventHandler(parts.store, writer, bus.name, clock=env.clock, on_fences=registry.record_fences)
    # One at a time: two would block on each other's row locks.
    consume = partial(Consumer, bus, max_batch=config.batch, concurrency=1, prefetch=config.prefetch)
    recoveries = RecoveryAnswers(parts.store, parts.claims, registry, parts.selector, bus=bus, api=parts.api)
    # Events first: a build is dispatched only when the queue of its cell's events exists.
    consumers = [
        consume("scheduler.builds", cell_events),
        consume("scheduler.hosts.{process}", listener),
        _metrics_consumer(bus, parts.selector, measured),
        # One at a time, of which none waits here behind another: the other schedulers answer meanwhile.
        Consumer(bus, "scheduler.recoveries", recoveries, max_batch=1, concurrency=1, prefetch=1),
    ]
    return CellLink(bus, consumers, tasks=[listener.run])


def _add_cells(
    parts: SchedulerParts, registry: ObjectRegistry, links: CellLinks, awaited: Callable[[], Collection[str]]
) -> CellConnections:
    """The task that takes cells into use and out of use, where this process can."""
    service = parts.service
    connections = CellConnections(registry, parts.store, links, tuple(parts.cell_buses), awaited=awaited)
    service.add_drain(links.drain)
    service.add_refresh(partial(_count_dead_letters, links))  # of the buses as they are now: a cell may be entered anew
    service.add_resource(None, links.close)
    service.add_task("cell links", links.run)
    if parts.env.takes_cells:
        service.add_task("cells", connections.run)
    return connections


async def _count_dead_letters(links: CellLinks) -> None:
    for name, bus in list(links.buses.items()):
        await count_dead_letters(name, bus.transport)


def _add_requests(
    parts: SchedulerParts, queries: QueryHandler, status: StatusHandler, requests: RequestHandler
) -> None:
    """The queues of clients' requests, queries, and requests whose retries are exhausted."""
    service, bus, config = parts.service, parts.api, parts.config
    service.add_consumer(Consumer(bus, "scheduler.records", queries, max_batch=64, concurrency=2, prefetch=128))
    service.add_consumer(Consumer(bus, "scheduler.status", status, max_batch=64, concurrency=2, prefetch=128))
    take = partial(Consumer, bus, handler=requests, on_malformed=refused_unreadable)
    batch, at_once = config.batch, config.concurrency
    for queue in REQUEST_QUEUES:
        service.add_consumer(take(queue, max_batch=batch, concurrency=at_once, prefetch=REQUEST_PREFETCH, paced=True))
    service.add_consumer(take("scheduler.dead_letters", max_batch=16, concurrency=1, prefetch=32))
    service.add_bus_check("bus api", lambda: bus.unavailable_reason)


def _metrics_consumer(bus: Bus, selector: Selector, measured: asyncio.Event) -> Consumer:
    listener = HostMetricsListener(selector.metrics, bus.name, clock=bus.clock, first=measured)
    return Consumer(bus, METRICS_QUEUE, listener, max_batch=16, concurrency=1, prefetch=16)
