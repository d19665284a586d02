"""`berth quarantine` and `berth breaker`: what berth does not destroy by itself, and an operator's decision on it.

They read and write the cells' schemas; every conductor follows the record.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Annotated

import asyncpg
import typer

from berth.audit.adoption import decide_adoption
from berth.commands.common import (
    EXIT_NO,
    EXIT_UNAVAILABLE,
    AsJson,
    By,
    Stop,
    database_of,
    decided_by,
    open_database_in_time,
    out,
    parse_uuid,
    print_json,
    run,
    settings_of,
)
from berth.render import printable, render_rows
from berth.site import Site
from bus.contracts.base import MAX_REASON
from bus.faults import DatabaseUnprepared
from cell_conductor.domain.breaker import Breaker
from cell_conductor.domain.report import UnexplainedKind
from cell_conductor.store.safety import ADOPT, DESTROY, KEEP, PostgresSafety, Safety, UnexplainedRecord

quarantine = typer.Typer(no_args_is_help=True, help="Machines kept until an operator decides about them.")
breaker = typer.Typer(no_args_is_help=True, help="Stopped destruction: too much was lost within a short time.")

CellName = Annotated[str | None, typer.Option("--cell", help="Only this cell.")]


@quarantine.command("list")
def list_quarantine(context: typer.Context, cell: CellName = None, as_json: AsJson = False) -> None:
    """List the machines in quarantine, and the decisions about them."""

    async def body() -> None:
        show_unexplained(
            await unexplained(database_of(settings_of(context)), cell, (UnexplainedKind.QUARANTINED,)), as_json
        )

    run(body)


@quarantine.command("release")
def release(
    context: typer.Context,
    uuid: Annotated[str, typer.Argument(help="The instance.")],
    destroy: Annotated[
        bool | None, typer.Option("--destroy/--keep", help="Have its host destroy it, or leave it for good.")
    ] = None,
    cell: CellName = None,
    by: By = None,
    as_json: AsJson = False,
) -> None:
    """Decide about a machine in quarantine: --destroy or --keep. Destroying begins with its host's next report.

    `berth quarantine adopt` gives it back to its instance.
    """
    instance = parse_uuid(uuid)
    if destroy is None:
        raise typer.BadParameter("give --destroy or --keep", param_hint="--destroy/--keep")
    verdict = DESTROY if destroy else KEEP

    async def body() -> None:
        here, decided = database_of(settings_of(context)), 0
        for name in _cells(here, cell):
            async with _safety(here, name) as safety:
                decided += await safety.decide(instance, verdict, decided_by(by), here.clock.time())
        if not decided:
            raise Stop(EXIT_NO, "quarantine.unknown", f"no machine of {instance} is in quarantine")
        if as_json:
            print_json({"instance": instance, "verdict": verdict, "machines": decided})
        else:
            out.print(f"{instance}: {verdict}, {decided} machine{'s' if decided > 1 else ''}", soft_wrap=True)

    run(body)


@quarantine.command("adopt")
def adopt(
    context: typer.Context,
    uuid: Annotated[str, typer.Argument(help="The instance.")],
    host: Annotated[str, typer.Option("--host", help="The UUID of the host with the machine, as `list` shows it.")],
    reason: Annotated[str, typer.Option("--reason", help="Why, for those who look later.")],
    by: By = None,
    as_json: AsJson = False,
) -> None:
    """Give a machine in quarantine back to its instance.

    For an instance that was moved after a backup, and whose record has the host that it left: the record then has it
    where it runs. Its cell carries this out with the host's next report, if the host still reports the machine, no
    other host reports one of the instance, and the host on record has been looked at (or is fenced, or its service
    forgotten). Nothing is destroyed or started. The cell claims what the machine takes; where placement refuses that,
    `berth placement audit --repair` puts it right.
    """
    instance, place = parse_uuid(uuid), parse_uuid(host)
    if not reason or len(reason) > MAX_REASON:
        raise typer.BadParameter(f"1 to {MAX_REASON} characters", param_hint="--reason")

    async def body() -> None:
        here, who = database_of(settings_of(context)), decided_by(by)
        cell = await decide_adoption(here, instance, place, who=who, why=reason)
        if as_json:
            print_json({"instance": instance, "verdict": ADOPT, "cell": cell, "host": place})
        else:
            out.print(f"{instance}: {ADOPT}, with the next report of host {place}", soft_wrap=True)

    run(body)


@breaker.command("list")
def list_breakers(context: typer.Context, cell: CellName = None, as_json: AsJson = False) -> None:
    """List the breakers that ever tripped. Exit status 1 when one is open."""

    async def body() -> int:
        here = database_of(settings_of(context))
        found: list[tuple[str, Breaker]] = []
        for name in _cells(here, cell):
            async with _safety(here, name) as safety:
                found += [(name, one) for one in await safety.breakers()]
        if as_json:
            print_json([{"cell": name, "breaker": one} for name, one in found])
        else:
            rows = [
                [
                    name,
                    one.service,
                    "open" if one.is_open else f"reset by {one.reset_by}",
                    str(one.lost),
                    str(one.quarantined),
                    str(one.over),
                    _when(one.tripped_at),
                ]
                for name, one in found
            ]
            render_rows(out, ["cell", "service", "state", "lost", "quarantined", "over", "tripped"], rows)
        return EXIT_NO if any(one.is_open for _, one in found) else 0

    run(body)


@breaker.command("reset")
def reset(
    context: typer.Context,
    service: Annotated[str, typer.Argument(help="The compute service.")],
    cell: CellName = None,
    by: By = None,
    as_json: AsJson = False,
) -> None:
    """Allow what tripped the breaker.

    It may be destroyed or counted as lost; later findings are judged anew.
    """

    async def body() -> None:
        here, done = database_of(settings_of(context)), []
        for name in _cells(here, cell):
            async with _safety(here, name) as safety:
                if await safety.reset(service, decided_by(by), here.clock.time()):
                    done.append(name)
        if not done:
            raise Stop(EXIT_NO, "breaker.not_open", f"no breaker of {service} is open")
        if as_json:
            print_json({"service": service, "cells": done})
        else:
            out.print(printable(f"{service}: reset in {', '.join(done)}"), soft_wrap=True, markup=False)

    run(body)


async def unexplained(
    here: Site, cell: str | None, kinds: Sequence[UnexplainedKind]
) -> list[tuple[str, UnexplainedRecord]]:
    """The machines of these kinds that are on record, with their cells."""
    found: list[tuple[str, UnexplainedRecord]] = []
    for name in _cells(here, cell):
        async with _safety(here, name) as safety:
            found += [(name, one) for one in await safety.records() if one.machine.kind in kinds]
    return found


def show_unexplained(found: Sequence[tuple[str, UnexplainedRecord]], as_json: bool) -> None:
    """As JSON, or as a table."""
    if as_json:
        print_json([{"cell": name, "record": one} for name, one in found])
        return
    rows = [
        [
            one.machine.kind.value,
            name,
            one.service,
            one.machine.host_uuid,
            one.machine.uuid,
            str(one.machine.attempt or ""),
            one.machine.why,
            _when(one.first_seen),
            f"{one.verdict} ({one.decided_by}, {_when(one.decided_at)})" if one.verdict else "",
        ]
        for name, one in found
    ]
    render_rows(out, ["kind", "cell", "service", "host", "instance", "attempt", "why", "first seen", "decided"], rows)


def _cells(here: Site, cell: str | None) -> Sequence[str]:
    if cell is None:
        return here.cells
    here.check_cell(cell)
    return (cell,)


@asynccontextmanager
async def _safety(here: Site, cell: str) -> AsyncIterator[Safety]:
    database = here.environment("operator").database(f"cell_{cell}", pool_size=1)
    await open_database_in_time(database.open())
    try:
        yield PostgresSafety(database)
    except (asyncpg.UndefinedTableError, DatabaseUnprepared) as error:
        raise Stop(
            EXIT_UNAVAILABLE, "cell.never_started", f"cell {cell} has never been started here with this release"
        ) from error
    finally:
        await database.close()


def _when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")
