"""Wires a scheduler: the API bus, each cell's bus, its schema, the replica, the engine, the handlers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from functools import partial

from bus.bus import API, Bus
from bus.cell_link import CellLink, wait_for
from bus.clock import Clock
from bus.consuming.consumer import Consumer
from bus.consuming.dead_letters import count_dead_letters
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.base import Message
from bus.contracts.build import BuildEvent
from bus.contracts.cell import ComputeHosts, ReportHosts, ServicesDigest
from bus.contracts.workers import WorkerHeartbeat
from bus.persistence.database import Database
from bus.persistence.identity import watch_identity
from bus.persistence.outbox import Place, Relay
from bus.port import BusError
from bus.service.environment import Environment
from bus.service.presence import announce_presence
from bus.service.service import Service
from placement_worker.replica.book import Book
from placement_worker.replica.follower import Follower
from scheduler_worker import metrics
from scheduler_worker.announcements import AnnouncementHandler
from scheduler_worker.changes import ChangeHandler, ControlListener
from scheduler_worker.claims import BusClaims
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.decisions import refused_event
from scheduler_worker.domain.hosts import HostTable
from scheduler_worker.domain.moves import refused_move
from scheduler_worker.domain.selector import Selector
from scheduler_worker.domain.workers import WorkerTable
from scheduler_worker.drain_plan import DrainPlanner
from scheduler_worker.drains import DrainKeeper
from scheduler_worker.engine import SchedulingEngine
from scheduler_worker.evacuations import EvacuationTask
from scheduler_worker.fences import FencePublisher
from scheduler_worker.fleet_metrics import FLEET
from scheduler_worker.handlers import RequestHandler
from scheduler_worker.host_metrics import QUEUE as METRICS_QUEUE
from scheduler_worker.host_metrics import HostMetricsListener, age
from scheduler_worker.moves import MoveEngine
from scheduler_worker.objects import ObjectRegistry, configured
from scheduler_worker.queries import QueryHandler
from scheduler_worker.retention import purge_forever
from scheduler_worker.store.port import SchedulerStore
from scheduler_worker.store.postgres import PostgresBuilds


def is_progress(message: Message) -> bool:
    """Whether it is an event of a build that goes on: it leaves a moment later, unless the next one is quicker."""
    return isinstance(message, BuildEvent) and not message.terminal


def place_of_event(message: Message) -> Place | None:
    """The build of an event, and the number of the event there; None: no event of a build on record."""
    return (message.instance_uuid, message.sequence) if isinstance(message, BuildEvent) and message.sequence else None


class HostsListener:
    """Keeps the host table: applies announcements and digests, and requests announcements when some may be missing."""

    def __init__(
        self,
        bus: Bus,
        table: HostTable,
        workers: WorkerTable,
        *,
        clock: Clock,
        rng: random.Random,
        again_s: float,
    ) -> None:
        self._bus = bus
        self._table = table
        self._workers = workers
        self._clock = clock
        self._rng = rng
        self._again_s = again_s
        self._requested = True

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """Queue `scheduler.hosts.{process}` of one cell. A service announces hosts of its own cell only."""
        now_s = self._clock.monotonic()
        for received in batch:
            message = received.message
            if isinstance(message, ComputeHosts | ServicesDigest) and message.cell == self._bus.name:
                self._table.apply(message, now_s)
            elif isinstance(message, WorkerHeartbeat):
                self._workers.apply(message, self._bus.name, now_s)
        metrics.KNOWN_HOSTS.set(len(self._table))
        return [Done()] * len(batch)

    def on_reconnected(self) -> None:
        """The private queue was deleted with the connection, and so were the announcements in it."""
        self._requested = False

    async def run(self) -> None:
        """Ask at start, soon after each reconnect, and periodically, with a jitter of its own in each scheduler.

        Sooner when the cell's digest counts fewer services than are taken for there.
        """
        while True:
            self._requested = await self.request_reports()
            requested_at = self._clock.monotonic()
            due = requested_at + self._pause()
            while True:
                await self._clock.sleep(RECONNECT_CHECK_S)
                now_s = self._clock.monotonic()
                doubts = now_s - requested_at >= DOUBT_S and self._table.knows_more(self._bus.name)
                if not self._requested or now_s >= due or doubts:
                    break

    async def request_reports(self) -> bool:
        """Ask every compute service of the cell to announce its hosts now. False: the bus is unavailable."""
        try:
            await self._bus.publish(ReportHosts(why="a scheduler listens"))
        except BusError:
            return False
        self._table.count_request(self._bus.name, self._clock.monotonic())
        return True

    def _pause(self) -> float:
        return self._again_s * self._rng.uniform(0.75, 1.25)


MOVES = "instance.move."  # how the routing keys of moves begin
RECONNECT_CHECK_S = 0.5  # how soon after a reconnect announcements are requested
DOUBT_S = 15.0  # between two questions while a service is taken for there that its cell does not count


def build(
    env: Environment,
    config: SchedulerConfig,
    cells: Sequence[str],
    *,
    store: SchedulerStore | None = None,
    book: Book | None = None,
    table: HostTable | None = None,
) -> Service:
    """One scheduler over these cells. Any number may run side by side.

    store: instead of the schema `scheduler` in the environment's database. book, table: the replica and the host
    table to fill, for callers that read them (simulation, tests).
    """
    service = Service("scheduler", clock=env.clock)
    made = configured(config)
    selector = Selector(
        Book() if book is None else book,
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
        service.add_task("identity", partial(watch_identity, database, lambda: store.deployment, env.clock))
    for bus in buses.values():
        bus.belongs_to("scheduler", lambda: store.deployment, lambda: "" if database is None else database.place)
    relay = Relay(
        store.outbox,
        buses,
        clock=env.clock,
        linger_s=config.progress_linger_s,
        lingers=is_progress,
        place=place_of_event,
    )
    store.publish_through(relay)
    follower = Follower(buses[API], selector.book, process=env.process, clock=env.clock)
    engine, moves = _engines(env, buses[API], store=store, selector=selector, follower=follower, config=config)
    service.add_resource(store.open, store.close)
    service.add_resource(buses[API].open, buses[API].close)
    service.add_resource(follower.start, follower.close)

    service.add_resource(partial(_export_fleet, selector), partial(_stop_exporting_fleet, selector))
    service.add_task("outbox", relay.run)
    service.add_task("retention", lambda: purge_forever(store, env.clock, config))
    service.add_drain(relay.drain)
    service.add_task("replica", follower.run)
    service.add_preparation(follower.ready.wait)
    service.add_check("replica", follower.ready.is_set)

    for name, bus in buses.items():
        service.add_refresh(partial(count_dead_letters, name, bus.transport))
    workers = WorkerTable()
    announce_presence(service, env, buses[API], "scheduler")
    registry = ObjectRegistry(store, selector, config, clock=env.clock, cells=cells)
    drains = _drains(service, env, registry, store=store, selector=selector, moves=moves)
    _objects(service, buses[API], registry, drains, selector=selector, workers=workers, config=config)
    measured = asyncio.Event()
    service.add_consumer(_metrics_consumer(buses[API], selector, measured))
    service.add_task("host metrics", lambda: age(selector.metrics, measured, env.clock))
    publisher = FencePublisher(registry, {cell: buses[cell] for cell in cells}, clock=env.clock)
    service.add_task("fences", publisher.run)
    evacuations = EvacuationTask(
        store, registry, selector, buses[API], clock=env.clock, rng=random.Random(f"evacuations {env.process}")
    )
    service.add_task("evacuations", evacuations.run)
    links = [
        _link(
            service,
            env,
            buses[cell],
            selector,
            workers,
            store=store,
            registry=registry,
            config=config,
            more=[_metrics_consumer(buses[cell], selector, measured)],
        )
        for cell in cells
    ]
    service.add_preparation(lambda: wait_for(links, config.cell_wait_s))
    queries = QueryHandler(store, selector, drains, workers, clock=env.clock, objects=registry)
    _requests(service, env, buses[API], queries=queries, selector=selector, engine=engine, moves=moves, config=config)
    return service


def _engines(
    env: Environment,
    bus: Bus,
    *,
    store: SchedulerStore,
    selector: Selector,
    follower: Follower,
    config: SchedulerConfig,
) -> tuple[SchedulingEngine, MoveEngine]:
    """What decides about builds and deletes, and what decides about moves."""
    process = f"scheduler {env.process}".strip()
    engine = SchedulingEngine(
        store,
        BusClaims(bus, timeout_s=config.claim_timeout_s),
        selector,
        follower,
        clock=env.clock,
        rng=random.Random(env.rng.getrandbits(64)),
        config=config,
        process=process,
    )
    moves = MoveEngine(
        store,
        BusClaims(bus, timeout_s=config.claim_timeout_s),
        selector,
        follower,
        clock=env.clock,
        rng=random.Random(f"moves {env.process}"),
        process=process,
    )
    return engine, moves


def _drains(
    service: Service,
    env: Environment,
    registry: ObjectRegistry,
    *,
    store: SchedulerStore,
    selector: Selector,
    moves: MoveEngine,
) -> DrainKeeper:
    """What plans drains and carries them out."""
    drains = DrainKeeper(
        store,
        registry,
        selector,
        DrainPlanner(store, selector, moves, clock=env.clock),
        clock=env.clock,
        rng=random.Random(f"drains {env.process}"),
        process=f"scheduler {env.process}".strip(),
    )
    service.add_task("drains", drains.run)
    return drains


async def _export_fleet(selector: Selector) -> None:
    FLEET.add(selector)


async def _stop_exporting_fleet(selector: Selector) -> None:
    FLEET.remove(selector)


def _objects(
    service: Service,
    bus: Bus,
    registry: ObjectRegistry,
    drains: DrainKeeper,
    *,
    selector: Selector,
    workers: WorkerTable,
    config: SchedulerConfig,
) -> None:
    """Operators' objects: loaded before the first request is taken, and again whenever they change."""
    bus.transport.on_reconnect(registry.on_reconnected)
    listener = ControlListener(registry, workers, bus.name, clock=bus.clock)
    changes = ChangeHandler(registry, selector, drains, clock=bus.clock, warmup_s=config.hosts_warmup_s)
    # The queue is there before the objects are read: a change in between is announced in it.
    service.add_declaration(lambda: bus.declare("scheduler.control.{process}"))
    service.add_preparation(registry.open)
    service.add_task("objects", registry.run)
    service.add_consumer(
        bus.consumer("scheduler.control.{process}", listener, max_batch=64, concurrency=1, prefetch=64)
    )
    service.add_consumer(bus.consumer("scheduler.changes", changes, max_batch=16, concurrency=1, prefetch=16))


def _link(
    service: Service,
    env: Environment,
    bus: Bus,
    selector: Selector,
    workers: WorkerTable,
    *,
    store: SchedulerStore,
    registry: ObjectRegistry,
    config: SchedulerConfig,
    more: Sequence[Consumer],
) -> CellLink:
    """The link to one cell: announcements of its hosts, and of its builds. more: consumers of further queues there."""
    rng = random.Random(env.rng.getrandbits(64))
    listener = HostsListener(bus, selector.table, workers, clock=env.clock, rng=rng, again_s=config.report_interval_s)
    bus.transport.on_reconnect(listener.on_reconnected)
    # Announcements first: a build is dispatched only when the queue for what its cell announces exists.
    consumers = [
        bus.consumer(
            "scheduler.builds",
            AnnouncementHandler(store, bus.name, clock=env.clock, on_fences=registry.record_fences),
            max_batch=config.batch,
            concurrency=1,  # two would block on each other's row locks
            prefetch=config.prefetch,
        ),
        bus.consumer(
            "scheduler.hosts.{process}", listener, max_batch=config.batch, concurrency=1, prefetch=config.prefetch
        ),
        *more,
    ]
    link = CellLink(bus, consumers)

    async def listen() -> None:
        await link.up.wait()
        await listener.run()

    service.add_resource(open_nothing, link.close)
    service.add_task(f"cell {bus.name}", link.run)
    service.add_task(f"ask hosts of {bus.name}", listen)
    service.add_drain(link.drain)
    service.add_bus_check(f"bus {bus.name}", bus)
    return link


def _metrics_consumer(bus: Bus, selector: Selector, measured: asyncio.Event) -> Consumer:
    listener = HostMetricsListener(selector.metrics, bus.name, clock=bus.clock, first=measured)
    return bus.consumer(METRICS_QUEUE, listener, max_batch=16, concurrency=1, prefetch=16)


async def open_nothing() -> None:
    """Open nothing: the bus of a cell is opened by its own side task."""


def _requests(
    service: Service,
    env: Environment,
    bus: Bus,
    *,
    queries: QueryHandler,
    selector: Selector,
    engine: SchedulingEngine,
    moves: MoveEngine,
    config: SchedulerConfig,
) -> None:
    requests = RequestHandler(engine, moves, selector, clock=env.clock, config=config)
    service.add_consumer(bus.consumer("scheduler.queries", queries, max_batch=16, concurrency=2, prefetch=32))
    service.add_consumer(
        bus.consumer(
            "scheduler.requests",
            requests,
            max_batch=config.batch,
            concurrency=config.concurrency,
            prefetch=config.prefetch,
            on_malformed=lambda bad: refused_move(bad) if bad.key.startswith(MOVES) else refused_event(bad),
            paced=True,
        )
    )
    service.add_consumer(
        bus.consumer(
            "scheduler.given_up",
            requests.given_up,
            max_batch=16,
            concurrency=1,
            prefetch=32,
            on_malformed=refused_event,
        )
    )
    service.add_bus_check("bus api", bus)
