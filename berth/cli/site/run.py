"""`berth run`: one worker as this process.

A worker imports itself and nothing of the others: a conductor does not wait for the scheduler's numpy.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from berth.cli.common import (
    SHADOW,
    Exit,
    Stop,
    database_of,
    explain,
    host_and_port,
    in_shadow,
    make_directory,
    print_stop,
    settings_of,
)
from berth.cli.output import (
    err,
)
from berth.config.rest_address import AtHttp, at_http, with_rest_at
from berth.config.settings import MEMORY, Settings
from berth.config.site import Site, process_name, read_runtime
from bus.contracts.base import Word
from bus.service.environment import Environment
from bus.service.main import run_process
from bus.service.service import WorkerRuntime
from bus.service.settings import SettingsError
from bus.service.telemetry import set_log_level
from compute_agent.config import default_service


class Role(StrEnum):
    """A worker that runs as a process of its own."""

    PLACEMENT = "placement"
    SCHEDULER = "scheduler"
    NOVA_SCHEDULER = "nova-scheduler"
    CONDUCTOR = "conductor"
    COMPUTE = "compute"
    IRONIC_SYNC = "ironic-sync"
    GATEWAY = "gateway"


Build = Callable[[Environment], WorkerRuntime]
WITHOUT_DATABASE = frozenset({Role.COMPUTE, Role.GATEWAY})


def run_role(
    context: typer.Context,
    role: Annotated[Role, typer.Argument(help="Which worker.")],
    cell: Annotated[str | None, typer.Option(help="The cell, for conductor and compute.")] = None,
    service: Annotated[
        str | None,
        typer.Option(help="The compute service's name, of one process at a time; default: CELL-HOSTNAME."),
    ] = None,
    http: Annotated[
        str | None, typer.Option(help="Serve health and metrics at HOST:PORT (0: any), placement its REST API too.")
    ] = None,
    api: Annotated[
        str | None, typer.Option(help="Serve the REST API at a HOST:PORT of its own (placement only).")
    ] = None,
    shadow: Annotated[bool, typer.Option("--shadow", help=f"Of nova-scheduler. {SHADOW}")] = False,
) -> None:
    """Run one worker as this process.

    Until SIGTERM or SIGINT, which drain it; start as many as you like.
    """
    try:
        settings = settings_of(context)
        _check_role(role, api=api, shadow=shadow)
        settings = in_shadow(settings, shadow)
        if api is not None:
            settings = with_rest_at(settings, api)
        requested = None if http is None else host_and_port(http, "--http")
        served = AtHttp(settings=settings, with_rest=False)
        if role is Role.PLACEMENT and requested is not None:
            served = at_http(settings, *requested)
            settings = served.settings
        here = database_of(settings) if role not in WITHOUT_DATABASE else Site(settings)
        build = _build(
            role,
            here,
            cell,
            service,
            health_with_rest=served.with_rest,
            reread=lambda: in_shadow(settings_of(context), shadow),
        )
        listen = health_address(requested, settings)
        _join(settings, cell if role in {Role.CONDUCTOR, Role.COMPUTE} else None)
        if served.message:
            err.print(served.message, soft_wrap=True, markup=False)
    except (Stop, SettingsError) as fault:
        stop = explain(fault)
        assert stop is not None
        print_stop(stop)
        raise SystemExit(stop.status) from None
    process = process_name(role.value, cell or "")
    status = run_process(
        build,
        lambda: here.environment(process),
        role=role.value,
        process=process,
        http=listen if not served.with_rest else None,
        log_level=settings.telemetry.log_level,
        log_style=settings.telemetry.log_format,
    )
    raise SystemExit(status)


def _check_role(role: Role, *, api: str | None, shadow: bool) -> None:
    """Raises Stop: an option is another role's."""
    if api is not None and role is not Role.PLACEMENT:
        raise Stop(Exit.USAGE, "api.role", "--api is placement's")
    if shadow and role is not Role.NOVA_SCHEDULER:
        raise Stop(Exit.USAGE, "shadow.role", "--shadow is nova-scheduler's")


def _build(
    role: Role,
    here: Site,
    cell: str | None,
    service: str | None,
    *,
    health_with_rest: bool,
    reread: Callable[[], Settings],
) -> Build:
    settings: Settings = here.settings
    if role is Role.PLACEMENT:
        import placement_worker.app  # noqa: PLC0415  (why: at the top)

        return lambda env: placement_worker.app.build(
            env, settings.placement, here.cells, health_with_rest=health_with_rest
        )
    if role is Role.SCHEDULER:
        import scheduler_worker.app  # noqa: PLC0415

        return lambda env: scheduler_worker.app.build(env, settings.scheduler, here.cells)
    if role is Role.NOVA_SCHEDULER:
        import nova_scheduler.app  # noqa: PLC0415
        from nova_scheduler.reload import SettingsReload  # noqa: PLC0415

        reload = SettingsReload(settings, reread, set_log_level)
        return lambda env: nova_scheduler.app.build(env, settings.nova, settings.scheduler, reload)
    if role is Role.IRONIC_SYNC:
        import ironic_sync.app  # noqa: PLC0415

        return lambda env: ironic_sync.app.build(env, settings.ironic_sync)
    if role is Role.GATEWAY:
        import gateway.app  # noqa: PLC0415

        return lambda env: gateway.app.build(env, settings.gateway, lambda: reread().gateway.projects)
    return _build_in_cell(role, here, cell, service)


def _build_in_cell(role: Role, here: Site, cell: str | None, service: str | None) -> Build:
    settings = here.settings
    if cell is None:
        raise Stop(Exit.USAGE, "cell.missing", f"which cell? berth run {role.value} --cell {here.cells[0]}")
    here.check_cell(cell)
    if role is Role.CONDUCTOR:
        import cell_conductor.app  # noqa: PLC0415

        return lambda env: cell_conductor.app.build(env, settings.conductor, cell)
    try:
        name = msgspec.convert(service or default_service(cell, socket.gethostname()), Word)
    except msgspec.ValidationError as fault:
        raise Stop(Exit.USAGE, "service.name", f"not a service name: {service}") from fault
    import compute_agent.app  # noqa: PLC0415

    config = settings.kept_compute
    if config.state_dir:
        make_directory(Path(config.state_dir))
    return lambda env: compute_agent.app.build(env, config, cell, name)


def _join(settings: Settings, cell: str | None) -> None:
    """On the memory bus a worker is a guest of a running `berth up`. Raises Stop when none runs.

    cell: the one whose bus alone the worker uses.
    """
    if settings.bus.url != MEMORY or (cell is not None and settings.cells[cell].url not in ("", MEMORY)):
        return
    if read_runtime(settings.state) is None:
        raise Stop(Exit.UNAVAILABLE, "bus.unavailable", "no bus: set bus.url (BERTH_BUS__URL), or start `berth up`")
    err.print(
        "[yellow]bus.url is memory://: this worker joins the `berth up` of this computer[/yellow]", soft_wrap=True
    )


def health_address(requested: tuple[str, int] | None, settings: Settings) -> tuple[str, int] | None:
    """Where to answer /healthz, if anywhere. Raises Stop when that address cannot be had: better now than later."""
    telemetry = settings.telemetry
    where = requested or ((telemetry.http_host, telemetry.http_port) if telemetry.http_port is not None else None)
    if where is None:
        return None
    try:
        socket.create_server(where, family=_family(where[0])).close()
    except OSError as fault:
        reason = fault.strerror or str(fault)
        # Another process may be about to end: a supervisor starts this one again.
        status = Exit.UNAVAILABLE if fault.errno == errno.EADDRINUSE else Exit.USAGE
        raise Stop(status, "http.address", f"cannot listen at {where[0]}:{where[1]}: {reason}") from fault
    return where


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
