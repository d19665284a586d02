"""Wiring of the Ironic sync: the API bus, its own schema, Ironic's REST API."""

from __future__ import annotations

import httpx
import structlog

from bus.bus import API
from bus.clock import Clock
from bus.service.environment import Environment
from bus.service.service import Service
from bus.service.settings import SettingsError
from ironic_sync.config import IronicSyncConfig
from ironic_sync.loop import SyncLoop
from ironic_sync.source.keystone import KeystoneAuth
from ironic_sync.source.port import IronicSource
from ironic_sync.source.rest import RestSource
from ironic_sync.store.port import Positions
from ironic_sync.store.postgres import MIGRATIONS, PostgresPositions

log = structlog.get_logger(__name__)

SCHEMA = "ironic_sync"


def build(
    env: Environment,
    config: IronicSyncConfig,
    *,
    source: IronicSource | None = None,
    store: Positions | None = None,
) -> Service:
    """One ironic_sync process. Any number may run; one works, the others are ready to take over.

    source: instead of Ironic's REST API at the configured address. store: instead of the environment's PostgreSQL.
    """
    if config.cell and config.cell not in env.cells:
        known = ", ".join(env.cells)
        raise SettingsError("ironic_sync.cell", f"there is no cell {config.cell!r}; the settings know {known}")
    bus = env.bus(API)
    service = Service("ironic-sync", clock=env.clock, log=log)
    positions = store if store is not None else _postgres(env, service)
    reading = source if source is not None else rest_source(config, env.clock)
    loop = SyncLoop(
        reading,
        positions,
        bus.transport,
        bus.publish_all,
        clock=env.clock,
        rng=env.rng,
        config=config,
    )

    async def open_nothing() -> None:
        """The source connects when it is asked."""

    service.add_resource(bus.open, bus.close)
    service.add_resource(open_nothing, reading.close)
    service.add_task("sync", loop.run)
    service.add_drain(loop.drain)
    service.add_bus_check("bus", bus)
    service.add_check("ironic", lambda: loop.healthy)
    return service


def _postgres(env: Environment, service: Service) -> Positions:
    database = env.database(SCHEMA)

    async def open_database() -> None:
        await database.open(MIGRATIONS)

    service.add_resource(open_database, database.close)
    return PostgresPositions(database)


def rest_source(config: IronicSyncConfig, clock: Clock) -> RestSource:
    """Ironic's REST API as the configuration says. Raises SettingsError."""
    return RestSource(
        config.url,
        microversion=config.microversion,
        timeout_s=config.request_timeout_s,
        list_timeout_s=config.list_timeout_s,
        page_size=config.page_size,
        connections=config.reads_in_flight + 2,  # beside the single reads, one of all and one of an allocation
        auth=_auth(config, clock),
        token=config.token,
        verify_tls=config.verify_tls,
    )


def _auth(config: IronicSyncConfig, clock: Clock) -> httpx.Auth | None:
    if config.keystone.auth_url:
        timeout_s, verify_tls = config.request_timeout_s, config.verify_tls
        return KeystoneAuth(config.keystone, clock=clock, timeout_s=timeout_s, verify_tls=verify_tls)
    return httpx.BasicAuth(config.username, config.password) if config.username else None
