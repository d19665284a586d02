"""Wiring of one placement worker: the book in PostgreSQL, the API bus, and every cell's bus (it connects down)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial

import structlog

from bus.bus import API, Bus
from bus.cell_link import CellLink, wait_for
from bus.consuming.consumer import Consumer
from bus.contracts.base import Message
from bus.persistence.database import Database
from bus.persistence.identity import watch_identity
from bus.port import BusError
from bus.service.environment import Environment
from bus.service.health import Health
from bus.service.presence import announce_presence
from bus.service.service import Service
from placement_worker.config import PlacementConfig
from placement_worker.handlers import PlacementHandlers
from placement_worker.publisher import FeedPublisher
from placement_worker.rest.server import RestServer
from placement_worker.store.port import PlacementStore
from placement_worker.store.postgres import PostgresStore

log = structlog.get_logger("placement")

NAME = "placement"


def build(
    env: Environment,
    config: PlacementConfig,
    cells: Sequence[str],
    *,
    store: PlacementStore | None = None,
    health_with_rest: bool = False,
) -> Service:
    """A placement worker that serves the API bus and these cells, ready to run.

    store: instead of the schema `placement` in the environment's database. health_with_rest: the REST API's port
    answers /healthz, /readyz and /metrics too, and from the very start.
    """
    service = Service(NAME, clock=env.clock, grace_s=config.grace_s)
    buses = {name: env.bus(name) for name in (API, *cells)}
    store = _store(service, env, config, buses, store)
    publisher = FeedPublisher(store, buses[API], clock=env.clock, config=config)
    handlers = _handlers(env, store, publisher, buses)
    rest = _rest(env, config, store, publisher)
    if rest is not None and health_with_rest:
        rest.add_health(Health(service.not_ready))
        service.add_resource(rest.open, rest.close)  # before the book: /readyz shows what it waits for
    _add_book(service, store, buses[API])
    _add_consumers(service, buses[API], handlers, config)
    _add_feed(service, publisher)
    announce_presence(service, env, buses[API], "placement")
    links = [_add_link(service, buses[cell], handlers, config) for cell in cells]
    if rest is not None:
        _add_rest(service, rest)
    service.add_preparation(lambda: wait_for(links, config.cell_wait_s))
    service.add_drain(publisher.drain)
    return service


def _store(
    service: Service,
    env: Environment,
    config: PlacementConfig,
    buses: Mapping[str, Bus],
    store: PlacementStore | None,
) -> PlacementStore:
    """The book; with PostgreSQL also what notices that the schema is another one. Every bus is claimed for it."""
    database: Database | None = None
    if store is None:
        database = env.database(NAME, pool_size=config.pool_size)
        store = PostgresStore(database)
        service.add_task("identity", partial(watch_identity, database, lambda: store.deployment, env.clock))
    for bus in buses.values():
        bus.belongs_to("placement", lambda: store.deployment, lambda: "" if database is None else database.place)
    return store


def _handlers(
    env: Environment, store: PlacementStore, publisher: FeedPublisher, buses: Mapping[str, Bus]
) -> PlacementHandlers:
    async def publish(bus: str, messages: Sequence[Message]) -> None:
        with contextlib.suppress(BusError):
            await buses[bus].publish_all([(message, "") for message in messages])

    return PlacementHandlers(
        store,
        clock=env.clock,
        committed=publisher.wake,
        claimed=partial(publisher.wake, at_once=False),
        publish=publish,
    )


def _add_book(service: Service, store: PlacementStore, api: Bus) -> None:
    service.add_resource(store.open, store.close)
    service.add_resource(api.open, api.close)
    service.add_check("database", lambda: store.ready)
    service.add_bus_check("bus api", api)


def _add_consumers(service: Service, api: Bus, handlers: PlacementHandlers, config: PlacementConfig) -> None:
    for consumer in _writers(api, handlers, config):
        service.add_consumer(consumer)
    service.add_consumer(
        api.consumer("placement.reads", handlers.reads, max_batch=config.read_batch, concurrency=config.concurrency)
    )


def _add_feed(service: Service, publisher: FeedPublisher) -> None:
    service.add_task("feed publisher", publisher.run)
    service.add_task("feed head", publisher.announce)
    service.add_task("feed trim", publisher.trim)


def _add_link(service: Service, bus: Bus, handlers: PlacementHandlers, config: PlacementConfig) -> CellLink:
    link = CellLink(bus, _writers(bus, handlers, config))
    service.add_resource(open_nothing, link.close)
    service.add_task(f"cell {link.name}", link.run)
    service.add_drain(link.drain)
    service.add_check(f"cell {link.name}", lambda: link.ready)
    return link


def _add_rest(service: Service, rest: RestServer) -> None:
    service.add_task("rest", rest.run)
    service.add_check("rest", lambda: rest.ready)
    service.add_drain(rest.drain)
    service.add_preparation(rest.wait_ready)


def _rest(
    env: Environment, config: PlacementConfig, store: PlacementStore, publisher: FeedPublisher
) -> RestServer | None:
    if not config.rest.listen:
        return None
    return RestServer(store, config.rest, clock=env.clock, rng=env.rng, committed=publisher.wake)


def _writers(bus: Bus, handlers: PlacementHandlers, config: PlacementConfig) -> list[Consumer]:
    """What placement takes on every bus: claims, and inventory from the hosts there."""
    return [
        bus.consumer(
            "placement.requests",
            handlers.requests,
            max_batch=config.claim_batch,
            concurrency=config.concurrency,
            prefetch=config.claim_prefetch,
        ),
        bus.consumer(
            "placement.inventory",
            handlers.inventory,
            max_batch=config.inventory_batch,
            concurrency=1,  # writers of trees are one at a time anyway; waiting messages make larger groups
            prefetch=config.inventory_prefetch,
        ),
    ]


async def open_nothing() -> None:
    """A cell's bus is opened by its own side task."""
