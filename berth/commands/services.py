"""`berth services`: the compute services that schedulers know, and those that an operator has forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from berth.commands.common import (
    EXIT_NO,
    QUERY_TIMEOUT_S,
    AsJson,
    By,
    Stop,
    Timeout,
    check_cell,
    client,
    decided_by,
    out,
    print_json,
    run,
    settings_of,
)
from berth.commands.hosts import CellOfName, OnlyCell, Reason
from berth.render import printable, render_rows
from bus.contracts.base import MAX_REASON
from bus.contracts.operations import ForgetService, ServiceForgotten, ServiceRecord
from bus.faults import Fault, RequestRefused

app = typer.Typer(invoke_without_command=True)

MAX_FORGOTTEN = 1000  # services that one command names


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
    if len(reason) > MAX_REASON:
        raise typer.BadParameter(f"at most {MAX_REASON} characters", param_hint="--reason")
    if len(names) > MAX_FORGOTTEN:
        raise typer.BadParameter(f"at most {MAX_FORGOTTEN} services", param_hint="SERVICE")
    who = decided_by(by)

    async def body() -> int:
        settings = settings_of(context)
        forgotten: list[ServiceForgotten] = []
        refused: list[tuple[str, Fault]] = []
        async with client(settings) as berth:
            await check_cell(berth, settings, cell)
            for name in dict.fromkeys(names):
                command = ForgetService(service=name, reason=reason, by=who, cell=cell)
                try:
                    forgotten.append(await berth.forget_service(command, timeout_s=timeout))
                except RequestRefused as fault:
                    refused.append((name, fault))
        return _finish(forgotten, refused, as_json=as_json)

    run(body)


def _finish(forgotten: Sequence[ServiceForgotten], refused: Sequence[tuple[str, Fault]], *, as_json: bool) -> int:
    if as_json:
        rows = [{"service": name, "code": why.code, "reason": why.reason} for name, why in refused]
        print_json({"services": forgotten, "refused": rows})
        return EXIT_NO if refused else 0
    for one in forgotten:
        show_forgotten(one)
    if refused:
        name, first = refused[0]
        raise Stop(EXIT_NO, first.code, f"{len(refused)} refused; {name}: {first.reason}")
    return 0


def show_forgotten(one: ServiceForgotten) -> None:
    """Print a service that is forgotten."""
    what = "forgotten" if one.removed else "nothing of it was on record"
    out.print(Text(printable(f"{one.service} of {one.cell}: {what}")), soft_wrap=True)


def _service_row(one: ServiceRecord) -> list[str | Text]:
    state = Text("up", "green") if one.up else Text("down", "red")
    why = "" if one.up else f"{one.code}: {one.reason}" if one.reason else one.code
    return [one.name, one.cell, state, str(one.hosts), str(one.enabled), f"{one.last_seen_s:.0f} s ago", why]
