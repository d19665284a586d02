"""Wires one placement worker: placement in PostgreSQL, the API bus, and the buses of the cells, to which placement
connects.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import structlog

from bus.bus import API, Bus
from bus.cell_links import CellLink, CellLinks
from bus.consuming.consumer import Consumer
from bus.contracts.base import Message
from bus.contracts.objects import CellBus
from bus.persistence.database import Database, watch_identity
from bus.service.environment import Environment
from bus.service.health import Health
from bus.service.service import WorkerRuntime
from bus.service.worker_heartbeat import add_heartbeat
from bus.transport import BusError
from placement_worker.cell_follower import CellFollower
from placement_worker.config import PlacementConfig
from placement_worker.handlers import PlacementHandlers
from placement_worker.publisher import FeedPublisher
from placement_worker.rest.api import Api
from placement_worker.rest.application import Application
from placement_worker.rest.config import RestConfig, with_oslo_conf
from placement_worker.rest.server import InProcessRest, RestServer
from placement_worker.service import PlacementService
from placement_worker.store.postgres_rows import PostgresPlacementRows

log = structlog.get_logger("placement")

NAME = "placement"


def build(
    env: Environment,
    config: PlacementConfig,
    cells: Sequence[str],
    *,
    store: PlacementService | None = None,
    health_with_rest: bool = False,
    answer: Callable[[Application], None] | None = None,
) -> WorkerRuntime:
    """Return a placement worker, ready to run, that serves the API bus, these cells, and the cells that operators add.

    store: instead of the schema `placement` in the environment's database. health_with_rest: the REST API's port
    answers /healthz, /readyz and /metrics too, and from the very start. answer: takes the REST API's application, for
    callers in this process, as the simulation has them.
    """
    service = WorkerRuntime(NAME, clock=env.clock, grace_s=config.grace_s)
    buses = {name: env.bus(name) for name in (API, *cells)}
    store, claim = _store(service, env, config, store)
    for bus in buses.values():
        claim(bus)
    publisher = FeedPublisher(store, buses[API], clock=env.clock, config=config)
    in_use = {API: buses[API]}  # with the cells that are in use at present
    handlers = _handlers(env, store, publisher, in_use)
    rest = _rest(env, config.rest, store, publisher)
    if rest is not None and health_with_rest:
        rest.add_health(Health(service.not_ready))
        service.add_resource(rest.open, rest.close)  # before placement, so that /readyz shows what is awaited
    _add_placement(service, store, buses[API])
    _add_consumers(service, buses[API], handlers, config)
    service.add_task("feed publisher", publisher.run)
    service.add_task("feed head", publisher.announce)
    service.add_task("feed trim", publisher.trim)
    add_heartbeat(service, env, buses[API], "placement")
    links = _links(env, handlers, config, claim, in_use)
    for cell in cells:
        links.configure(buses[cell])
    in_use |= {cell: buses[cell] for cell in cells}
    _add_cells(service, env, buses[API], links)
    if rest is not None:
        _add_rest(service, rest)
    if answer is not None:
        own = InProcessRest(Api(store, config.rest, clock=env.clock, rng=env.rng, committed=publisher.wake))
        service.add_task("rest in process", own.run)
        service.add_drain(own.drain)
        answer(own.application)
    service.add_preparation(lambda: links.entered(config.cell_wait_s))
    service.add_drain(publisher.drain)
    return service


def _store(
    service: WorkerRuntime,
    env: Environment,
    config: PlacementConfig,
    store: PlacementService | None,
) -> tuple[PlacementService, Callable[[Bus], None]]:
    """Return placement, and the function that claims a bus for it. With PostgreSQL, add the check that detects another
    schema.
    """
    database: Database | None = None
    if store is None:
        database = env.database(NAME, pool_size=config.pool_size)
        store = PlacementService(PostgresPlacementRows(database), env.clock)
        service.add_task("identity", partial(watch_identity, database, lambda: store.rows.database_id, env.clock))

    def claim(bus: Bus) -> None:
        bus.publishes_as("placement_worker")
        bus.belongs_to("placement", lambda: store.rows.database_id, lambda: "" if database is None else database.place)

    return store, claim


def _handlers(
    env: Environment, store: PlacementService, publisher: FeedPublisher, buses: Mapping[str, Bus]
) -> PlacementHandlers:
    async def publish(bus: str, messages: Sequence[Message]) -> None:
        if bus not in buses:  # the cell was taken out of use meanwhile
            return
        with contextlib.suppress(BusError):
            await buses[bus].publish_all([(message, "") for message in messages])

    return PlacementHandlers(
        store,
        clock=env.clock,
        committed=publisher.wake,
        claimed=partial(publisher.wake, at_once=False),
        publish=publish,
    )


def _add_placement(service: WorkerRuntime, store: PlacementService, api: Bus) -> None:
    service.add_resource(store.open, store.close)
    service.add_resource(api.open, api.close)
    service.add_check("database", lambda: store.rows.ready)
    service.add_bus_check("bus api", lambda: api.unavailable_reason)


def _add_consumers(service: WorkerRuntime, api: Bus, handlers: PlacementHandlers, config: PlacementConfig) -> None:
    for consumer in _writers(api, handlers, config):
        service.add_consumer(consumer)
    service.add_consumer(
        Consumer(api, "placement.releases", handlers.requests, max_batch=config.claim_batch, concurrency=1)
    )
    service.add_consumer(
        Consumer(api, "placement.reads", handlers.reads, max_batch=config.read_batch, concurrency=config.concurrency)
    )


def _links(
    env: Environment,
    handlers: PlacementHandlers,
    config: PlacementConfig,
    claim: Callable[[Bus], None],
    in_use: dict[str, Bus],
) -> CellLinks:
    """Return the links to the cells in use. in_use: a mapping that the links keep up to date."""

    def reach(name: str, where: CellBus | None) -> Bus:
        bus = env.cell_bus(name, where)
        claim(bus)
        return bus

    return CellLinks(
        lambda bus: CellLink(bus, _writers(bus, handlers, config)),
        clock=env.clock,
        reach=reach,
        opened=lambda bus: in_use.update({bus.name: bus}),
        closed=lambda bus: in_use.pop(bus.name, None),
    )


def _add_cells(service: WorkerRuntime, env: Environment, api: Bus, links: CellLinks) -> None:
    """Add the links to cells, and what takes cells into use and out of use, if this process can. They are no part of
    /readyz: a cell that refuses this worker, or is away, takes neither the API bus nor the REST API nor the other cells
    out of service.
    """
    service.add_drain(links.drain)
    service.add_resource(None, links.close)
    service.add_task("cell links", links.run)
    if not env.takes_cells:
        return
    follower = CellFollower(api, links)
    api.transport.on_reconnect(follower.on_reconnected)
    service.add_task("cells", follower.run)
    service.add_consumer(
        Consumer(api, "placement.control.{process}", follower, max_batch=64, concurrency=1, prefetch=64)
    )


def _add_rest(service: WorkerRuntime, rest: RestServer) -> None:
    service.add_task("rest", rest.run)
    service.add_check("rest", rest.ready.is_set)
    service.add_drain(rest.drain)
    service.add_preparation(rest.ready.wait)


def _rest(env: Environment, config: RestConfig, store: PlacementService, publisher: FeedPublisher) -> RestServer | None:
    if not config.listen:
        return None
    return RestServer(Api(store, with_oslo_conf(config), clock=env.clock, rng=env.rng, committed=publisher.wake))


def _writers(bus: Bus, handlers: PlacementHandlers, config: PlacementConfig) -> list[Consumer]:
    """Return the consumers on every bus: of claims, and of inventory from the hosts there."""
    return [
        Consumer(
            bus,
            "placement.requests",
            handlers.requests,
            max_batch=config.claim_batch,
            concurrency=config.concurrency,
            prefetch=config.claim_prefetch,
        ),
        Consumer(
            bus,
            "placement.inventory",
            handlers.inventory,
            max_batch=config.inventory_batch,
            concurrency=1,  # writers of trees run one at a time anyway, and waiting messages make larger groups
            prefetch=config.inventory_prefetch,
        ),
    ]
