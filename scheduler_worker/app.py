"""Wires a scheduler: the API bus, each cell's bus, its schema, the replica, the engine, the handlers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from bus.bus import API, Bus
from bus.cell_links import CellLinks
from bus.consuming.consumer import Consumer
from bus.consuming.dead_letters import count_dead_letters
from bus.persistence.database import Database, watch_identity
from bus.persistence.relay import Relay
from bus.service.environment import Environment
from bus.service.service import WorkerRuntime
from bus.service.worker_heartbeat import add_heartbeat
from placement_worker.replica.follower import Follower
from placement_worker.replica.replica import Replica
from scheduler_worker.action.action_engine import ActionEngine
from scheduler_worker.action.destination import DestinationChooser
from scheduler_worker.build.build_engine import SchedulingEngine
from scheduler_worker.cell_events.cell_event_recorder import CellEventRecorder
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.drain.drain_controller import DrainController
from scheduler_worker.drain.drain_inventory import DrainInventory
from scheduler_worker.drain.drain_planner import DrainPlanner
from scheduler_worker.drain.host_emptier import EvacuationController, HostEmptier
from scheduler_worker.fleet.aggregate_sync import AggregateSync
from scheduler_worker.fleet.fence_publisher import FencePublisher, find_cells
from scheduler_worker.fleet.fleet_metrics import FLEET
from scheduler_worker.fleet.host_listener import Warmup
from scheduler_worker.fleet.metrics_listener import add_host_metrics
from scheduler_worker.fleet.removal import HostRemoval
from scheduler_worker.hosts.host_table import HostTable
from scheduler_worker.hosts.waiting_builds import WaitingTable
from scheduler_worker.hosts.worker_table import WorkerTable
from scheduler_worker.objects.configured import configured
from scheduler_worker.objects.object_registry import ObjectRegistry
from scheduler_worker.objects.operator_changes import OperatorChanges
from scheduler_worker.operator_handler import ControlListener, OperatorHandler, RefusedCommands
from scheduler_worker.placement_client import BusClaims
from scheduler_worker.queries.record_queries import QueryHandler
from scheduler_worker.queries.status_queries import StatusHandler
from scheduler_worker.request_handler import RequestHandler
from scheduler_worker.selection.selector import Selector
from scheduler_worker.store.port import SchedulerStore
from scheduler_worker.store.postgres import PostgresBuilds
from scheduler_worker.upkeep.purge import purge_forever
from scheduler_worker.upkeep.silent_requests import SilentRequests
from scheduler_worker.wiring import SchedulerParts, add_cells, add_requests, cell_links, new_relay


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
    relay = new_relay(parts)
    follower = Follower(parts.api, parts.selector.replica, process=env.process, clock=env.clock)
    registry = ObjectRegistry(parts.store, parts.selector, config, clock=env.clock, cells=cells)
    engine, destinations, actions = _engines(parts, follower, registry)
    _add_store_and_replica(parts, relay, follower)
    add_heartbeat(service, env, parts.api, "scheduler")
    drains = _add_drains(parts, registry, destinations, actions, follower)
    removal = HostRemoval(parts.store, registry, parts.selector, parts.api, lambda: links.buses, clock=env.clock)
    _add_objects(parts, registry, drains, removal)
    measured = add_host_metrics(service, parts.api, parts.selector)
    writer = CellEventRecorder(parts.store, clock=env.clock, choose=destinations.choose_now)
    links = cell_links(parts, relay, registry, writer, measured)
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
    connections = add_cells(parts, registry, links, lambda: {*relay.missing, *unanswered.cells})
    queries = QueryHandler(parts.store, drains, parts.waiting, clock=env.clock, cells=connections)
    status = StatusHandler(parts.selector, parts.workers, registry, clock=env.clock)
    add_requests(parts, queries, status, requests)
    return service


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
    selector = Selector(
        Replica() if replica is None else replica,
        HostTable() if table is None else table,
        configured(config),
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


def _engines(
    parts: SchedulerParts, follower: Follower, registry: ObjectRegistry
) -> tuple[SchedulingEngine, DestinationChooser, ActionEngine]:
    """The engine of builds and deletes; what chooses hosts of moves, and their engine."""
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
    destinations = DestinationChooser(
        parts.claims,
        parts.selector,
        follower,
        clock=env.clock,
        rng=random.Random(f"moves {env.process}"),
        reload=registry.reload,
    )
    actions = ActionEngine(parts.store, parts.selector, destinations, clock=env.clock, process=parts.process)
    return engine, destinations, actions


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
    parts: SchedulerParts,
    registry: ObjectRegistry,
    destinations: DestinationChooser,
    actions: ActionEngine,
    follower: Follower,
) -> DrainController:
    """The tasks that empty hosts: drains, and evacuations of fenced hosts."""
    clock = parts.env.clock
    inventory = DrainInventory(parts.store, parts.selector, follower, parts.api, warmup=parts.warmup, clock=clock)
    planner = DrainPlanner(parts.selector, destinations, inventory, clock=clock)
    emptier = HostEmptier(parts.store, actions, inventory, planner.order, warmup=parts.warmup, clock=clock)
    drains = DrainController(
        parts.store,
        registry,
        inventory,
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
    parts: SchedulerParts, registry: ObjectRegistry, drains: DrainController, removal: HostRemoval
) -> None:
    """Operators' objects: loaded before the first request is taken, and again whenever they change."""
    service, bus = parts.service, parts.api
    bus.transport.on_reconnect(registry.on_reconnected)
    listener = ControlListener(registry, parts.workers, bus.name, clock=bus.clock)
    changes = OperatorHandler(
        registry,
        parts.selector,
        OperatorChanges(registry, parts.store, parts.selector, clock=bus.clock),
        drains,
        removal,
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


def _add_fences(parts: SchedulerParts, registry: ObjectRegistry, links: CellLinks) -> None:
    """The task that publishes fences to the cells."""
    parts.service.add_task("fences", FencePublisher(registry, links.buses, clock=parts.env.clock).run)


def _add_watch(parts: SchedulerParts, requests: RequestHandler, links: CellLinks) -> SilentRequests:
    """The task that looks after requests without an event."""
    unanswered = SilentRequests(
        parts.store,
        links.buses,
        lambda: parts.selector.config.settings,
        clock=parts.env.clock,
        rng=random.Random(f"unanswered {parts.env.process}"),
        after_s=parts.config.action_query_s,
        resume=requests.resume,
        process=parts.process,
    )
    parts.service.add_task("unanswered", unanswered.run)
    return unanswered
