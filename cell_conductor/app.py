"""Wires one conductor, to its cell's bus and its cell's schema alone."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from bus.bus import API, Bus
from bus.clock import Clock
from bus.consuming.consumer import Consumer
from bus.contracts.base import Message
from bus.contracts.build import BuildEvent
from bus.faults import BrokenInvariant, Transient
from bus.persistence.database import Database
from bus.persistence.relay import Lingering, Relay, StreamPosition
from bus.service.environment import Environment
from bus.service.service import WorkerRuntime
from bus.service.worker_heartbeat import add_heartbeat
from cell_conductor import metrics
from cell_conductor.config import ConductorConfig
from cell_conductor.engine import Engine, context_of
from cell_conductor.host_handlers import HostHandlers
from cell_conductor.hosts.fence_cache import FenceCache
from cell_conductor.hosts.fence_controller import FenceController
from cell_conductor.hosts.lease_controller import LeaseController
from cell_conductor.hosts.lease_table import LeaseTable
from cell_conductor.hosts.service_state_publisher import ServiceStatePublisher
from cell_conductor.hosts.stated_marks import StatedMarks
from cell_conductor.machine_search import SourceLookup
from cell_conductor.pending_lookups import PendingLookups
from cell_conductor.periodic import ReportRequester, look_up_forever, purge_forever, sweep_forever
from cell_conductor.recovery.cell_recovery import CellRecovery
from cell_conductor.recovery.known_reader import KnownReader
from cell_conductor.recovery.machine_listing import MachineCollector
from cell_conductor.recovery.record_reconciler import RecordReconciler
from cell_conductor.reports.listings import HostListings
from cell_conductor.request_handlers import DEAD_LETTER_QUEUE, RequestHandlers
from cell_conductor.state.unknown_machine import UnknownMachineKind
from cell_conductor.store.keyed_tables import PROTECT
from cell_conductor.store.port import InstanceStore
from cell_conductor.store.postgres import PostgresInstances

REQUESTS = "conductor.requests"
RESULTS = "conductor.results"
HOSTS = "conductor.hosts.{process}"
LEASES = "conductor.leases.{process}"
KNOWN = "conductor.known.{process}"
# The queues of announcements are declared here too: announcements made before the first scheduler listens must not be
# lost.
EVENTS_TO = ("scheduler.builds",)


def is_progress(message: Message) -> bool:
    """Whether it is an event of a build that continues: it may be published together with the event
    of the build's end.
    """
    return isinstance(message, BuildEvent) and not message.terminal


def position_of(message: Message) -> StreamPosition | None:
    """The instance of an event, and the event's number there; None: it is no event."""
    return (message.instance_uuid, message.sequence) if isinstance(message, BuildEvent) else None


def build(env: Environment, config: ConductorConfig, cell: str, *, store: InstanceStore | None = None) -> WorkerRuntime:
    """A conductor of one cell, ready to run; any number share the cell's queues and deadlines. Raises BrokenInvariant:
    it would use another bus than its cell's. store: instead of the cell's schema in the environment's database.
    """
    if cell == API:
        raise BrokenInvariant("a conductor uses its own cell's bus only", code="conductor.up_call")
    service = WorkerRuntime(f"conductor {cell}", clock=env.clock)
    database = env.database(f"cell_{cell}") if store is None else None
    store = store if database is None else PostgresInstances(database)
    assert store is not None
    bus = _bus(env, cell, store, None if config.own_database else database)
    # The scheduler records each event of a build, so none is dropped: they travel, and are recorded, together.
    lingering = Lingering(linger_s=config.progress_linger_s, lingers=is_progress, place=position_of, keeps=True)
    relay = Relay(store.outbox, {cell: bus}, clock=env.clock, lingering=lingering)
    listings = HostListings()
    fences, lookups, known = FenceCache(store, env.clock), PendingLookups(), KnownReader(bus)
    leases, marks = _leases(env, config, cell, store, bus, fences)
    recovery = _recovery(env.clock, config, cell, store, bus, relay, known, leases, marks, fences)
    engine = Engine(
        store=store,
        bus=bus,
        relay=relay,
        clock=env.clock,
        config=config,
        cell=cell,
        leases=leases,
        marks=marks,
        fences=fences,
        lookups=lookups,
        blocked=recovery.note_blocked,
    )
    lookup = SourceLookup(engine, store, bus, clock=env.clock, config=config, listings=listings, pending=lookups)
    fencing = FenceController(store, fences, bus, clock=env.clock, config=config, cell=cell)
    requests = RequestHandlers(engine, env.clock, bus, fences=fences, fence_controller=fencing, leases=leases)
    hosts = HostHandlers(
        engine, store, env.clock, config, bus,
        listings=listings, lookups=lookups, fences=fences, leases=leases, marks=marks,
    )  # fmt: skip
    service.add_resource(store.open, store.close)
    service.add_resource(bus.open, bus.close)
    service.add_declaration(partial(_declare, bus))
    service.add_task("outbox relay", relay.run)
    add_heartbeat(service, env, bus, "conductor")
    _add_rounds(service, env.clock, config, store, bus, engine, lookup)
    service.add_task("recovery", recovery.run)
    service.add_task("fences", partial(fencing.run, engine))
    service.add_task("leases", lambda: leases.run(engine))
    _add_consumers(service, bus, config, requests, hosts, leases)
    service.add_consumer(Consumer(bus, KNOWN, known.handle, max_batch=1, concurrency=1))
    _add_checks(service, bus, store, cell)
    service.add_drain(relay.drain)
    return service


def _bus(env: Environment, cell: str, store: InstanceStore, shared: Database | None) -> Bus:
    bus = env.bus(cell)
    bus.belongs_to("conductor", lambda: store.database_id, lambda: "" if shared is None else shared.place)
    bus.publishes_as("cell_conductor")
    bus.states_mark(lambda: store.mark)
    return bus


def _leases(  # noqa: PLR0917  (one caller)
    env: Environment, config: ConductorConfig, cell: str, store: InstanceStore, bus: Bus, fences: FenceCache
) -> tuple[LeaseController, StatedMarks]:
    table = LeaseTable(config.missed_heartbeats)
    marks = StatedMarks(table, store, env.clock)
    leases = LeaseController(
        store,
        bus,
        table,
        marks=marks,
        publisher=ServiceStatePublisher(table, bus, clock=env.clock, cell=cell),
        clock=env.clock,
        config=config,
        cell=cell,
        process=env.process,
        on_fence=fences.on_recorded,
    )
    return leases, marks


def _recovery(  # noqa: PLR0917  (one caller)
    clock: Clock,
    config: ConductorConfig,
    cell: str,
    store: InstanceStore,
    bus: Bus,
    relay: Relay,
    known: KnownReader,
    leases: LeaseController,
    marks: StatedMarks,
    fences: FenceCache,
) -> CellRecovery:
    reconciler = RecordReconciler(
        store,
        bus,
        relay,
        clock=clock,
        config=config,
        leases=leases,
        marks=marks,
        fences=fences,
        context=context_of(config, cell),
    )
    return CellRecovery(
        store,
        clock=clock,
        config=config,
        collector=MachineCollector(store, bus, clock=clock, config=config, leases=leases),
        known=known,
        reconciler=reconciler,
        leases=leases,
        marks=marks,
        fences=fences,
    )


def _add_checks(service: WorkerRuntime, bus: Bus, store: InstanceStore, cell: str) -> None:
    service.add_bus_check("bus", lambda: bus.unavailable_reason)
    service.add_check("database", lambda: store.ready)
    service.add_refresh(partial(_show_safety, store, cell))


def _add_rounds(  # noqa: PLR0917  (one caller)
    service: WorkerRuntime,
    clock: Clock,
    config: ConductorConfig,
    store: InstanceStore,
    bus: Bus,
    engine: Engine,
    lookup: SourceLookup,
) -> None:
    service.add_task("deadlines", lambda: sweep_forever(engine, clock, config))
    service.add_task("searches", lambda: look_up_forever(lookup, clock))
    service.add_task("retention", lambda: purge_forever(store, clock, config))
    service.add_task("reports", ReportRequester(bus, clock, config).run)


async def _show_safety(store: InstanceStore, cell: str) -> None:
    """Set the gauges of what waits for a person. While the database is away they keep their values."""
    with suppress(Transient):
        records = await store.safety.records()
        waiting = [
            one for one in records if one.machine.kind is UnknownMachineKind.QUARANTINED and one.decision != PROTECT
        ]
        metrics.IN_QUARANTINE.labels(cell).set(len(waiting))
        metrics.BREAKERS_OPEN.labels(cell).set(sum(one.is_open for one in await store.safety.breakers()))


async def _declare(bus: Bus) -> None:
    for queue in (*EVENTS_TO, REQUESTS, DEAD_LETTER_QUEUE, RESULTS, HOSTS, LEASES, KNOWN):
        await bus.declare(queue)


def _add_consumers(  # noqa: PLR0917  (one caller)
    service: WorkerRuntime,
    bus: Bus,
    config: ConductorConfig,
    requests: RequestHandlers,
    hosts: HostHandlers,
    leases: LeaseController,
) -> None:
    for queue, handler in (
        (REQUESTS, requests.requests),
        (DEAD_LETTER_QUEUE, requests.dead_letters),
        (RESULTS, requests.results),
    ):
        consumer = Consumer(
            bus, queue, handler, max_batch=config.max_batch, concurrency=config.concurrency, prefetch=config.prefetch
        )
        service.add_consumer(consumer)
        service.add_check(queue, lambda consumer=consumer: consumer.ready)  # type: ignore[misc]
    # One batch at a time: the newest report of a service decides, so the reports are kept in order.
    service.add_consumer(Consumer(bus, HOSTS, hosts.hosts, max_batch=config.max_batch, concurrency=1))
    # Heartbeats have a queue of their own: a report waits for the database, and a heartbeat behind it would count as
    # missed.
    service.add_consumer(Consumer(bus, LEASES, leases.handle, max_batch=config.max_batch, concurrency=1))
