"""`berth services`: the compute services that schedulers know, and those that an operator has forgotten."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Annotated

import typer
from rich.text import Text

from berth.client import BuildClient
from berth.commands.common import (
    EXIT_NO,
    QUERY_TIMEOUT_S,
    AsJson,
    By,
    Timeout,
    check_cell,
    client,
    out,
    print_json,
    run,
    settings_of,
)
from berth.commands.hosts import CellOfName, OnlyCell, Reason
from berth.commands.named import forget_each
from berth.render import printable, render_rows
from bus.contracts.operations import ForgetService, ServiceForgotten, ServiceRecord

app = typer.Typer(invoke_without_command=True)


@app.callback()
def services(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="So many, by cell and name.")] = 1000,
    cell: OnlyCell = None,
    up: Annotated[bool | None, typer.Option("--up/--down", help="Only those that are up, or not.")] = None,
    as_json: AsJson = False,
) -> None:
    """List compute services, or forget some. Exit status 1 when a listed service is not up."""
    if context.invoked_subcommand is not None:
        return

    async def body() -> int:
        settings = settings_of(context)
        async with client(settings) as berth:
            await check_cell(berth, settings, cell)
            page = await berth.services(limit=limit, cell=cell, up=up, timeout_s=QUERY_TIMEOUT_S)
        if as_json:
            print_json(page.services)
        else:
            headers = ["service", "cell", "state", "hosts", "enabled", "last seen", "why"]
            render_rows(out, headers, [_service_row(one) for one in page.services])
        return EXIT_NO if any(not one.up for one in page.services) else 0

    run(body)


@app.command("forget")
def forget(
    context: typer.Context,
    names: Annotated[list[str], typer.Argument(help="Names of compute services.", metavar="SERVICE...")],
    reason: Reason,
    cell: CellOfName = None,
    by: By = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Forget these compute services, which are gone for good, with the machines that they may have had.

    Nothing waits for their answers any more: their cells drop their leases, and moves between cells that are held after
    a database was set back go on. Refused while a service is up, while the book has hosts of it, or while instances are
    on record there on hosts that are not fenced.
    """

    def forget_one(berth: BuildClient, name: str, who: str) -> Awaitable[ServiceForgotten]:
        command = ForgetService(service=name, reason=reason, by=who, cell=cell)
        return berth.forget_service(command, timeout_s=timeout)

    forget_each(
        context, "service", names, reason, cell=cell, by=by, as_json=as_json, forget=forget_one, show=show_forgotten
    )


def show_forgotten(one: ServiceForgotten) -> None:
    """Print a service that is forgotten."""
    what = "forgotten" if one.removed else "nothing of it was on record"
    out.print(Text(printable(f"{one.service} of {one.cell}: {what}")), soft_wrap=True)


def _service_row(one: ServiceRecord) -> list[str | Text]:
    seen = f"{one.last_seen_s:.0f} s ago" if one.announced else "not announced"
    state = Text("up", "green") if one.up else Text("down", "red")
    why = "" if one.up else f"{one.code}: {one.reason}" if one.reason else one.code
    return [one.name, one.cell, state, str(one.hosts), str(one.enabled), seen, why]
