"""The wiring of a scheduler: what its parts share, the relay, and its consumers on the API bus and on each cell's."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping
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
from bus.persistence.relay import Lingering, Relay, StreamPosition
from bus.service.environment import Environment
from bus.service.service import WorkerRuntime
from scheduler_worker.cell_events.cell_event_recorder import CellEventHandler, CellEventRecorder
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.fleet.cell_connections import CellConnections
from scheduler_worker.fleet.host_listener import HostsListener, Warmup
from scheduler_worker.fleet.metrics_listener import metrics_consumer
from scheduler_worker.hosts.waiting_builds import WaitingTable
from scheduler_worker.hosts.worker_table import WorkerTable
from scheduler_worker.objects.object_registry import ObjectRegistry
from scheduler_worker.placement_client import BusClaims
from scheduler_worker.queries.record_queries import QueryHandler
from scheduler_worker.queries.status_queries import StatusHandler
from scheduler_worker.request_handler import RequestHandler
from scheduler_worker.requests.request_refusal import refused_unreadable
from scheduler_worker.selection.selector import Selector
from scheduler_worker.store.port import SchedulerStore
from scheduler_worker.upkeep.recovery_answers import RecoveryAnswers


def is_progress(message: Message) -> bool:
    """Whether an event ends nothing: it is published a moment later, unless the build's next event comes first."""
    return isinstance(message, BuildEvent) and not message.terminal


def position_of_event(message: Message) -> StreamPosition | None:
    """The build of an event, and the event's number in that build; None: it is no event of a build on record."""
    return (message.instance_uuid, message.sequence) if isinstance(message, BuildEvent) and message.sequence else None


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


def new_relay(parts: SchedulerParts) -> Relay:
    """The relay that publishes the store's outbox."""
    relay = Relay(
        parts.store.outbox,
        parts.buses,
        clock=parts.env.clock,
        lingering=Lingering(linger_s=parts.config.progress_linger_s, lingers=is_progress, place=position_of_event),
    )
    parts.store.publish_through(relay)
    return relay


def cell_links(
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
        metrics_consumer(bus, parts.selector, measured),
        # One at a time, of which none waits here behind another: the other schedulers answer meanwhile.
        Consumer(bus, "scheduler.recoveries", recoveries, max_batch=1, concurrency=1, prefetch=1),
    ]
    return CellLink(bus, consumers, tasks=[listener.run])


def add_cells(
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


def add_requests(parts: SchedulerParts, queries: QueryHandler, status: StatusHandler, requests: RequestHandler) -> None:
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
