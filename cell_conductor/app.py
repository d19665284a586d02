"""Wiring of one conductor: its cell's bus, its cell's schema, and nothing above."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from bus.bus import API, Bus
from bus.contracts.base import Message
from bus.contracts.build import BuildEvent
from bus.faults import BrokenInvariant, Transient
from bus.persistence.lingering import Lingering, StreamPosition
from bus.persistence.relay import Relay
from bus.service.environment import Environment
from bus.service.presence import announce_presence
from bus.service.service import Service

from . import metrics
from .config import ConductorConfig
from .domain.report import UnexplainedKind
from .engine import Engine
from .fences import FenceKeeper
from .forgetting import LeaseForgetter
from .handlers import GIVEN_UP_QUEUE, HostHandlers, RequestHandlers
from .lease_keeper import LeaseKeeper
from .search import MachineSearch
from .side_tasks import ReportRequester, purge_forever, search_forever, sweep_forever
from .store.port import InstanceStore
from .store.postgres import PostgresInstances
from .store.safety import KEEP

REQUESTS = "conductor.requests"
RESULTS = "conductor.results"
HOSTS = "conductor.hosts.{process}"
LEASES = "conductor.leases.{process}"
# The queues of announcements are declared here too: announcements made before the first scheduler listens must not be
# lost.
ANNOUNCED_TO = "scheduler.builds"


def is_progress(message: Message) -> bool:
    """Whether it is an event of a build that continues: it may be published together with the event
    of the build's end.
    """
    return isinstance(message, BuildEvent) and not message.terminal


def position_of(message: Message) -> StreamPosition | None:
    """The instance of an event, and the event's number there; None: it is no event."""
    return (message.instance_uuid, message.sequence) if isinstance(message, BuildEvent) else None


def build(env: Environment, config: ConductorConfig, cell: str, *, store: InstanceStore | None = None) -> Service:
    """A conductor of one cell, ready to run. Any number of conductors share the cell's queues and deadlines.

    store: instead of the cell's schema in the environment's database. Raises BrokenInvariant: it would use another
    bus than its cell's.
    """
    if cell == API:
        raise BrokenInvariant("a conductor uses its own cell's bus only", code="conductor.up_call")
    service = Service(f"conductor {cell}", clock=env.clock)
    database = env.database(f"cell_{cell}") if store is None else None
    store = store if database is None else PostgresInstances(database)
    assert store is not None
    bus = env.bus(cell)
    shared = database if not config.own_database else None
    bus.belongs_to("conductor", lambda: store.deployment, lambda: "" if shared is None else shared.place)
    # The scheduler records each event of a build, so none is dropped: they travel, and are recorded, together.
    lingering = Lingering(linger_s=config.progress_linger_s, lingers=is_progress, place=position_of, keeps=True)
    relay = Relay(store.outbox, {cell: bus}, clock=env.clock, lingering=lingering)
    fences = FenceKeeper(store, bus, clock=env.clock, config=config, cell=cell)
    keeper = LeaseKeeper(
        store, bus, clock=env.clock, config=config, cell=cell, process=env.process, on_fence=fences.on_announced
    )
    search = _search_of(store, bus, config, keeper, lambda: hosts)
    engine = Engine(
        store=store,
        bus=bus,
        relay=relay,
        clock=env.clock,
        config=config,
        cell=cell,
        down=keeper.down,
        fences=fences,
        search=search,
    )
    forgetter = LeaseForgetter(store, bus, clock=env.clock, cell=cell, up=keeper.up)
    requests = RequestHandlers(engine, env.clock, fences, search, forgetter, bus=bus)
    hosts = HostHandlers(
        engine, store, env.clock, config, bus, outdated=keeper.note_outdated, fences=fences, up=keeper.up, leases=keeper
    )
    reporter = ReportRequester(bus, env.clock, config)
    service.add_resource(store.open, store.close)
    service.add_resource(bus.open, bus.close)
    service.add_declaration(partial(_declare, bus))
    service.add_task("outbox relay", relay.run)
    announce_presence(service, env, bus, "conductor")
    service.add_task("deadlines", lambda: sweep_forever(engine, env.clock, config))
    service.add_task("searches", lambda: search_forever(engine, env.clock))
    service.add_task("retention", lambda: purge_forever(store, env.clock, config))
    service.add_task("reports", reporter.run)
    service.add_preparation(fences.prepare)
    service.add_task("fences", fences.run)
    service.add_task("leases", lambda: keeper.run(engine))
    _add_consumers(service, bus, config, requests, hosts, keeper)
    service.add_bus_check("bus", bus)
    service.add_check("database", lambda: store.ready)
    service.add_refresh(partial(_show_safety, store, cell))
    service.add_drain(relay.drain)
    return service


async def _show_safety(store: InstanceStore, cell: str) -> None:
    """Set the gauges of what waits for a person. While the database is away they keep their values."""
    with suppress(Transient):
        records = await store.safety.records()
        waiting = [one for one in records if one.machine.kind is UnexplainedKind.QUARANTINED and one.verdict != KEEP]
        metrics.IN_QUARANTINE.labels(cell).set(len(waiting))
        metrics.BREAKERS_OPEN.labels(cell).set(sum(one.is_open for one in await store.safety.breakers()))


def _search_of(
    store: InstanceStore, bus: Bus, config: ConductorConfig, keeper: LeaseKeeper, hosts: Callable[[], HostHandlers]
) -> MachineSearch:
    return MachineSearch(
        store,
        bus,
        timeout_s=config.answer_timeout_s,
        up=keeper.up,
        unexplained=lambda: hosts().unexplained,
        forgotten=keeper.forgotten,
        listers=lambda host: hosts().listers(host),
    )


async def _declare(bus: Bus) -> None:
    for queue in (ANNOUNCED_TO, REQUESTS, GIVEN_UP_QUEUE, RESULTS, HOSTS, LEASES):
        await bus.declare(queue)


def _add_consumers(  # noqa: PLR0917  (one caller)
    service: Service,
    bus: Bus,
    config: ConductorConfig,
    requests: RequestHandlers,
    hosts: HostHandlers,
    keeper: LeaseKeeper,
) -> None:
    for queue, handler in (
        (REQUESTS, requests.requests),
        (GIVEN_UP_QUEUE, requests.given_up),
        (RESULTS, requests.results),
    ):
        consumer = bus.consumer(
            queue, handler, max_batch=config.max_batch, concurrency=config.concurrency, prefetch=config.prefetch
        )
        service.add_consumer(consumer)
        service.add_check(queue, lambda consumer=consumer: consumer.ready)  # type: ignore[misc]
    # One batch at a time: the newest report of a service decides, so the reports are kept in order.
    service.add_consumer(bus.consumer(HOSTS, hosts.hosts, max_batch=config.max_batch, concurrency=1))
    # Heartbeats have a queue of their own: a report waits for the database, and a heartbeat behind it would count as
    # missed.
    service.add_consumer(bus.consumer(LEASES, keeper.handle, max_batch=config.max_batch, concurrency=1))
