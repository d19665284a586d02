"""`berth placement`: placement on its own, and an operator's work on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated

import typer

import placement_worker.app
from berth.cli.common import (
    Stop,
    explain,
    make_directory,
    print_stop,
    settings_of,
)
from berth.cli.output import (
    print_document,
)
from berth.config.ports import ServerFailed
from berth.config.rest_address import DEFAULT_PORT, LOOPBACK, with_rest_at
from berth.config.settings import EMBEDDED, Settings
from berth.config.site import Brokers, Site, process_name, read_runtime
from berth.up.embedded.postgres import Postgres
from berth.up.embedded.process import ServerMissing
from bus.clock import SystemClock
from bus.service.main import run_process
from bus.service.settings import SettingsError
from placement_worker.rest.openapi import document
from placement_worker.service import PlacementService
from placement_worker.store.memory_rows import MemoryPlacementRows
from placement_worker.store.memory_table import MemoryPlacementTable

DEFAULT_API = f"{LOOPBACK}:{DEFAULT_PORT}"


def serve(
    context: typer.Context,
    api: Annotated[str, typer.Option(help="Serve Placement's REST API at HOST:PORT.")] = DEFAULT_API,
    scratch: Annotated[
        bool, typer.Option("--scratch", help="An empty placement in memory, which is lost at the end.")
    ] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="The same without a database: placement is in this process's memory.")
    ] = False,
) -> None:
    """Serve Placement's REST API alone.

    A drop-in for OpenStack Placement: no broker, no other worker needed.

    Placement is in the configured database, else in an embedded PostgreSQL below the state directory. Its change feed
    goes to a bus inside this process; to share placement with a whole berth use `berth run placement --http`.
    """
    try:
        settings = settings_of(context)
        settings = with_rest_at(settings, api)
        if memory:
            raise SystemExit(
                _run(settings, "", PlacementService(MemoryPlacementRows(MemoryPlacementTable(SystemClock()).session())))
            )
        with placement_database(settings, scratch=scratch) as url:
            raise SystemExit(_run(settings, url))
    except (SettingsError, Stop, ServerFailed, ServerMissing) as fault:
        stop = explain(fault)
        assert stop is not None
        print_stop(stop)
        raise SystemExit(stop.status) from None


def openapi() -> None:
    """Print the OpenAPI document of the served routes."""
    print_document(document())


def _run(settings: Settings, url: str, store: PlacementService | None = None) -> int:
    here = Site(settings, brokers=Brokers(SystemClock()), database_url=url)
    process = process_name("placement")
    telemetry = settings.telemetry
    return run_process(
        lambda env: placement_worker.app.build(env, settings.placement, (), store=store, health_with_rest=True),
        lambda: here.environment(process, takes_cells=False),  # there is no scheduler to query
        role="placement",
        process=process,
        log_level=telemetry.log_level,
        log_style=telemetry.log_format,
    )


@contextlib.contextmanager
def placement_database(settings: Settings, *, scratch: bool) -> Iterator[str]:
    """The address of placement's database while it is used: the settings', or an embedded server's."""
    if scratch:
        with Postgres() as server:
            yield server.url()
        return
    if settings.database.url != EMBEDDED:
        yield settings.database.url
        return
    running = read_runtime(settings.state)
    if running is not None:
        yield running.database_url
        return
    make_directory(settings.state)
    server = Postgres(settings.state / "postgres", durable=True)
    server.start()
    try:
        yield server.url()
    finally:
        server.shut_down()
