"""Wiring of the Ironic sync: the API bus, its own schema, Ironic's REST API."""

from __future__ import annotations

from functools import partial

import structlog

from bus.bus import API, Bus
from bus.clock import Clock
from bus.consuming.consumer import Consumer
from bus.openstack.rest import auth_of, tls_of
from bus.persistence.database import watch_identity
from bus.rabbitmq.address import BadBusUrl, parse_bus_url
from bus.rabbitmq.transport import RabbitTransport
from bus.service.environment import Environment
from bus.service.service import WorkerRuntime
from bus.service.settings import SettingsError
from bus.service.worker_heartbeat import add_heartbeat
from bus.transport import Transport
from ironic_sync.config import IronicSyncConfig, NotificationBroker
from ironic_sync.domain.position import reporter_name
from ironic_sync.loop import SyncLoop
from ironic_sync.source.port import IronicClient
from ironic_sync.source.rest import IronicRestClient
from ironic_sync.store.port import Positions
from ironic_sync.store.postgres import PostgresPositions

log = structlog.get_logger(__name__)

SCHEMA = "ironic_sync"


def build(
    env: Environment,
    config: IronicSyncConfig,
    *,
    client: IronicClient | None = None,
    store: Positions | None = None,
) -> WorkerRuntime:
    """One ironic_sync process. Any number may run; one works. Raises SettingsError: the settings know no such cell.
    client: instead of Ironic's REST API at the configured address. store: instead of the environment's PostgreSQL.
    """
    if config.cell and config.cell not in env.cells:
        known = ", ".join(env.cells)
        raise SettingsError("ironic_sync.cell", f"there is no cell {config.cell!r}; the settings know {known}")
    bus = env.bus(API)
    bus.publishes_as("ironic_sync")
    service = WorkerRuntime("ironic-sync", clock=env.clock, log=log)
    positions = _positions(service, env, bus, config) if store is None else store
    if store is not None:
        bus.belongs_to(role_of(config.name), lambda: store.database_id, lambda: "")
    own_broker = notifications_transport(config.broker)
    reading = client if client is not None else rest_client(config, env.clock)
    loop = SyncLoop(
        reading,
        positions,
        own_broker or bus.transport,
        bus.publish_all,
        clock=env.clock,
        rng=env.rng,
        config=config,
        tracer=env.tracer,
    )
    service.add_resource(bus.open, bus.close)
    add_heartbeat(service, env, bus, "ironic-sync")
    if own_broker is not None:
        service.add_resource(own_broker.open, own_broker.close)
    service.add_resource(None, reading.close)  # it connects with its first request
    service.add_task("sync", loop.run)
    # One at a time: the positions belong to the term.
    service.add_consumer(
        Consumer(bus, "ironic.stale.{process}", loop.outdated, concurrency=1, reporter=reporter_name(config.name))
    )
    service.add_drain(loop.drain)
    service.add_bus_check("bus", lambda: bus.unavailable_reason)
    service.add_check("ironic", lambda: loop.healthy)
    return service


def _positions(service: WorkerRuntime, env: Environment, bus: Bus, config: IronicSyncConfig) -> PostgresPositions:
    """The environment's PostgreSQL, opened and watched with the service; the bus has its owner set."""
    database = env.database(schema_of(config.name))
    positions = PostgresPositions(database)
    service.add_resource(positions.open, positions.close)
    service.add_check("database", lambda: database.ready)
    service.add_task("identity", partial(watch_identity, database, lambda: positions.database_id, env.clock))
    bus.belongs_to(role_of(config.name), lambda: positions.database_id, lambda: database.place)
    return positions


def schema_of(name: str) -> str:
    """The schema of an Ironic of this name."""
    return f"{SCHEMA}_{name}" if name else SCHEMA


def role_of(name: str) -> str:
    """The role under which the processes of an Ironic of this name enter the bus."""
    return f"ironic-sync-{name}" if name else "ironic-sync"


def notifications_transport(config: NotificationBroker) -> Transport | None:
    """A connection to Ironic's own broker; None: it publishes on the API bus. Raises SettingsError."""
    if not config.url:
        return None
    try:
        parse_bus_url(config.url)
    except BadBusUrl as error:
        raise SettingsError(error.code, f"ironic_sync.broker.url: {error}") from None
    return RabbitTransport(config.url, name="ironic", connection_name="berth ironic-sync notifications")


def rest_client(config: IronicSyncConfig, clock: Clock) -> IronicRestClient:
    """Ironic's REST API as configured. Raises SettingsError."""
    verify = tls_of(verify=config.verify_tls, ca_file=config.ca_file, setting="ironic_sync.ca_file")
    return IronicRestClient(
        config.url,
        microversion=config.microversion,
        timeout_s=config.request_timeout_s,
        list_timeout_s=config.list_timeout_s,
        page_size=config.page_size,
        connections=config.reads_in_flight + 2,  # besides the single reads, one of all and one of an allocation
        auth=auth_of(
            config.keystone,
            username=config.username,
            password=config.password,
            clock=clock,
            timeout_s=config.request_timeout_s,
            verify=verify,
            setting="ironic_sync.keystone",
        ),
        token=config.token,
        verify=verify,
    )
