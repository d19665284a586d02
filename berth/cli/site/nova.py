"""`berth nova`: in front of an OpenStack Nova."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from msgspec import Struct
from msgspec.structs import replace

import nova_scheduler.app
import nova_scheduler.trial.app
import placement_worker.app
from berth.cli.claims.placement import DEFAULT_API, placement_database
from berth.cli.common import (
    SHADOW,
    Exit,
    Stop,
    explain,
    host_and_port,
    in_shadow,
    print_stop,
    settings_of,
)
from berth.cli.output import (
    As,
    Form,
    err,
    out,
    print_data,
    print_line,
)
from berth.cli.site.as_toml import as_toml
from berth.cli.site.run import health_address
from berth.cli.site.serving import Tokens
from berth.config.ports import ServerFailed
from berth.config.rest_address import with_rest_at
from berth.config.settings import BusSettings, Settings
from berth.config.site import Brokers, Site, process_name
from berth.text import printable, render_rows
from berth.up.embedded.process import ServerMissing
from berth.web.server import WebServer
from berth.web.sign_in_sessions import Access, WebCaller, read_tokens
from bus.clock import SystemClock
from bus.service.environment import Environment
from bus.service.main import run_process
from bus.service.service import WorkerRuntime
from bus.service.settings import SettingsError
from bus.service.telemetry import set_log_level
from nova_scheduler.nova_conf import MAX_BYTES, NovaConfUnreadable, translate
from nova_scheduler.reload import SettingsReload
from nova_scheduler.stock.comparison import AnswerComparison, Difference
from placement_worker.service import PlacementService
from placement_worker.store.memory_rows import MemoryPlacementRows
from placement_worker.store.memory_table import MemoryPlacementTable


def serve(
    context: typer.Context,
    api: Annotated[str, typer.Option(help="Serve Placement's REST API at HOST:PORT.")] = DEFAULT_API,
    scratch: Annotated[
        bool, typer.Option("--scratch", help="An empty placement in a database that is lost at the end.")
    ] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="The same without a database: placement is in this process's memory.")
    ] = False,
    shadow: Annotated[bool, typer.Option("--shadow", help=SHADOW)] = False,
    page: Annotated[str, typer.Option(help="Show at HOST:PORT how calls are decided.")] = "",
    tokens: Tokens = None,
) -> None:
    """Be Placement and the scheduler of a Nova in one process, instead of placement-api and nova-scheduler.

    Serves Placement's REST API, and takes the calls of topic `scheduler` from Nova's broker (`nova.transport_url`).
    Placement is in the configured database, else in an embedded PostgreSQL below the state directory. It is a copy:
    fill it first (`berth placement import --from-url`). A Placement that is started again does not know what was
    claimed here meanwhile. The page "In front of Nova" has each step, and the rollback to the stock nova-scheduler.

    With --page it shows how each call was decided, and what the shadow would have done. Without --tokens that is on
    loopback alone. With a whole berth: `berth run nova-scheduler`, and `berth serve web`, which has the same page.
    """
    try:
        # Between the two parts is the bus of this process, whatever other workers use.
        def read() -> Settings:
            return replace(in_shadow(with_rest_at(settings_of(context), api), shadow), bus=BusSettings())

        settings = read()
        reload = SettingsReload(settings, read, set_log_level)
        shown = shown_at(page, tokens)
        if memory:
            store = PlacementService(MemoryPlacementRows(MemoryPlacementTable(SystemClock()).session()))
            raise SystemExit(_run(_site(settings), shown, lambda env: both(env, settings, store=store, reload=reload)))
        with placement_database(settings, scratch=scratch) as url:
            raise SystemExit(_run(_site(settings, url), shown, lambda env: both(env, settings, reload=reload)))
    except (SettingsError, Stop, ServerFailed, ServerMissing) as fault:
        _end(fault)


def trial(
    context: typer.Context,
    page: Annotated[str, typer.Option(help="Show at HOST:PORT what berth would have done.")] = "",
    tokens: Tokens = None,
    form: As = Form.TABLE,
) -> None:
    """Decide a running Nova's calls, and change nothing there.

    Listens on Nova's broker (`nova.transport_url`) in a queue of its own, and reads the Placement of OpenStack, by its
    database (`nova.trial.placement_database`) or its API (`placement_url`), and Nova's API; it changes nothing there.
    What the stock scheduler has chosen is read from the allocations of the call's servers. Each difference is logged,
    and shown with --page; at the end (SIGTERM, Ctrl-C) the counts are printed. The page "A trial beside Nova" has each
    step.
    """
    found: list[AnswerComparison] = []

    def made(env: Environment) -> WorkerRuntime:
        reload = SettingsReload(settings, read, set_log_level)
        built = nova_scheduler.trial.app.build(env, settings.nova, settings.scheduler, reload)
        found.append(built.comparison)
        return built.service

    def read() -> Settings:
        return replace(settings_of(context), bus=BusSettings())

    try:
        settings = read()
        status = _run(_site(settings), shown_at(page, tokens), made, health_address(None, settings))
    except (SettingsError, Stop, ServerFailed) as fault:
        _end(fault)
    for comparison in found:
        _print_trial(comparison, form=form)
    raise SystemExit(status)


def _print_trial(comparison: AnswerComparison, *, form: Form) -> None:
    counts = {one.value: comparison.counts().get(one.value, 0) for one in Difference}
    mean_s = dict(zip(("berth", "stock"), comparison.mean_s(), strict=True))
    if form.is_data:
        print_data({"calls": counts, "mean_s": mean_s}, form)
        return
    render_rows(out, ("calls", "count"), [(name, str(count)) for name, count in counts.items()])
    print_line(
        f"a decision on average: {mean_s['berth']:.3f} s; the stock scheduler's seen after {mean_s['stock']:.3f} s"
    )


def _site(settings: Settings, database_url: str = "") -> Site:
    return Site(settings, brokers=Brokers(SystemClock()), database_url=database_url)


def _end(fault: Exception) -> NoReturn:
    stop = explain(fault)
    assert stop is not None
    print_stop(stop)
    raise SystemExit(stop.status) from None


async def translated_settings(
    file: Annotated[Path, typer.Argument(help="A nova.conf.", metavar="FILE")],
    form: As = Form.TABLE,
) -> int:
    """Print a nova.conf as settings of berth.

    That is `[nova]`, passwords included, and what of `[scheduler]` nova.conf has. Each option of Nova's scheduler that
    cannot be translated is named on stderr, and the exit status is then 1.
    """
    try:
        with file.open("rb") as opened:
            found = translate(opened.read(MAX_BYTES + 1))
    except NovaConfUnreadable as error:
        raise Stop(Exit.USAGE, error.code, f"{file}: {error.reason}") from None
    except OSError as error:
        raise Stop(Exit.USAGE, NovaConfUnreadable.code, f"{file}: {error.strerror}") from None
    if form.is_data:
        print_data(found, form)
    else:
        sys.stdout.write(as_toml(found.settings))
        for one in found.left_out:
            reason = f"not translated: [{one.group}] {one.option}: {one.reason}"
            err.print(printable(reason), markup=False, soft_wrap=True)
    return Exit.NO if found.left_out else 0


class ShownAt(Struct, frozen=True):
    """Where the pages about Nova's calls are, and the callers that may see them; None: all who can reach loopback."""

    host: str
    port: int
    callers: dict[str, WebCaller] | None


def shown_at(page: str, tokens: Path | None) -> ShownAt | None:
    """By the options; None: there is no page. Raises SettingsError, BadParameter."""
    callers = None if tokens is None else read_tokens(tokens)
    return ShownAt(*host_and_port(page, "--page"), callers) if page else None


def _run(
    here: Site,
    shown: ShownAt | None,
    made: Callable[[Environment], WorkerRuntime],
    http: tuple[str, int] | None = None,
) -> int:
    """Run one process until it is stopped. made: its service, to which the pages are added. http: where /healthz is,
    if not beside Placement.
    """
    process = process_name("nova")
    telemetry = here.settings.telemetry

    def built(env: Environment) -> WorkerRuntime:
        service = made(env)
        if shown is not None:
            pages = WebServer(
                here.environment(process_name("web"), takes_cells=False),
                here.settings,
                host=shown.host,
                port=shown.port,
                access=Access(shown.callers, env.clock),
                of_nova=True,
            )
            service.add_resource(pages.open, pages.close)
        return service

    return run_process(
        built,
        lambda: here.environment(process, takes_cells=False),
        role="nova",
        process=process,
        http=http,
        log_level=telemetry.log_level,
        log_style=telemetry.log_format,
    )


def both(
    env: Environment,
    settings: Settings,
    *,
    store: PlacementService | None = None,
    reload: SettingsReload | None = None,
) -> WorkerRuntime:
    """Placement and the frontend as one service. Placement answers while Nova's API or broker is not there yet. At the
    end the frontend is drained first, as its calls claim at placement.
    """
    placement = _Part(placement_worker.app.build(env, settings.placement, (), store=store, health_with_rest=True))
    frontend = _Part(nova_scheduler.app.build(env, settings.nova, settings.scheduler, reload))
    placement.service.add_bus_check(frontend.service.name, frontend.not_ready)  # /readyz is its
    service = WorkerRuntime("nova", clock=env.clock)
    service.on_reload = frontend.service.on_reload
    for part in (placement, frontend):
        service.add_task(part.service.name, part.run)
        service.add_bus_check(part.service.name, part.not_ready)

    async def drain(_grace_s: float) -> None:
        """Each within its own grace time."""
        await frontend.drain()
        await placement.drain()

    service.add_drain(drain)
    return service


class _Part:
    """A service within another one."""

    def __init__(self, service: WorkerRuntime) -> None:
        self.service = service
        self._stop = asyncio.Event()
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Until it is drained, cancelled or has failed."""
        try:
            await self.service.run(self._stop)
        finally:
            self._ended.set()

    async def drain(self) -> None:
        """Stop it, and wait for its end, which its own grace time bounds."""
        self._stop.set()
        await self._ended.wait()

    def not_ready(self) -> str:
        """What of it is not ready."""
        return "; ".join(self.service.not_ready())
