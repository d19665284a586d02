"""`berth quarantine` and `berth breaker`: what berth does not destroy by itself, and an operator's decision on it.

They read and write the cells' schemas; every conductor follows the record.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, TypeVar

import asyncpg
import typer

from berth.audit.adoption import decide_adoption
from berth.commands.common import (
    AsJson,
    By,
    Exit,
    Stop,
    check_reason,
    database_of,
    decided_by,
    open_database_in_time,
    out,
    parse_uuid,
    print_json,
    print_result,
)
from berth.commands.options import CommandGroup
from berth.render import counted, render_rows, utc
from berth.settings import Settings
from berth.site import Site
from bus.faults import DatabaseUnprepared
from cell_conductor.domain.breaker import Breaker
from cell_conductor.domain.report import UnexplainedKind
from cell_conductor.store.safety import ADOPT, DESTROY, KEEP, PostgresSafety, Safety, UnexplainedRecord

quarantine = CommandGroup(no_args_is_help=True, help="Machines kept until an operator decides about them.")
breaker = CommandGroup(no_args_is_help=True, help="Stopped destruction: too much was lost within a short time.")

T = TypeVar("T")

CellName = Annotated[str | None, typer.Option("--cell", help="Only this cell.")]


@quarantine.command("list")
async def list_quarantine(settings: Settings, cell: CellName = None, as_json: AsJson = False) -> None:
    """List the machines in quarantine, and the decisions about them."""
    show_unexplained(await unexplained(database_of(settings), cell, (UnexplainedKind.QUARANTINED,)), as_json)


@quarantine.command("release")
async def release(
    settings: Settings,
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

    here, who = database_of(settings), decided_by(by)
    at = here.clock.time()
    decided = sum(n for _, n in await _in_cells(here, cell, lambda of: of.decide(instance, verdict, who, at)))
    if not decided:
        raise Stop(Exit.NO, "quarantine.unknown", f"no machine of {instance} is in quarantine")
    found = {"instance": instance, "verdict": verdict, "machines": decided}
    print_result(found, as_json, f"{instance}: {verdict}, {counted(decided, 'machine')}")


@quarantine.command("adopt")
async def adopt(
    settings: Settings,
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
    check_reason(reason, least=1)

    here, who = database_of(settings), decided_by(by)
    cell = await decide_adoption(here, instance, place, who=who, why=reason)
    found = {"instance": instance, "verdict": ADOPT, "cell": cell, "host": place}
    print_result(found, as_json, f"{instance}: {ADOPT}, with the next report of host {place}")


@breaker.command("list")
async def list_breakers(settings: Settings, cell: CellName = None, as_json: AsJson = False) -> int:
    """List the breakers that ever tripped. Exit status 1 when one is open."""
    here = database_of(settings)
    read = await _in_cells(here, cell, lambda of: of.breakers())
    found = [(name, one) for name, breakers in read for one in breakers]
    if as_json:
        print_json([{"cell": name, "breaker": one} for name, one in found])
    else:
        columns = ["cell", "service", "state", "lost", "quarantined", "over", "tripped"]
        render_rows(out, columns, [_breaker_row(*one) for one in found])
    return Exit.NO if any(one.is_open for _, one in found) else 0


@breaker.command("reset")
async def reset(
    settings: Settings,
    service: Annotated[str, typer.Argument(help="The compute service.")],
    cell: CellName = None,
    by: By = None,
    as_json: AsJson = False,
) -> None:
    """Allow what tripped the breaker.

    It may be destroyed or counted as lost; later findings are judged anew.
    """
    here, who = database_of(settings), decided_by(by)
    reset = await _in_cells(here, cell, lambda of: of.reset(service, who, here.clock.time()))
    done = [name for name, was_open in reset if was_open]
    if not done:
        raise Stop(Exit.NO, "breaker.not_open", f"no breaker of {service} is open")
    print_result({"service": service, "cells": done}, as_json, f"{service}: reset in {', '.join(done)}")


async def unexplained(
    here: Site, cell: str | None, kinds: Sequence[UnexplainedKind]
) -> list[tuple[str, UnexplainedRecord]]:
    """The machines of these kinds that are on record, with their cells."""
    read = await _in_cells(here, cell, lambda of: of.records())
    return [(name, one) for name, records in read for one in records if one.machine.kind in kinds]


def show_unexplained(found: Sequence[tuple[str, UnexplainedRecord]], as_json: bool) -> None:
    """As JSON, or as a table."""
    if as_json:
        print_json([{"cell": name, "record": one} for name, one in found])
        return
    columns = ["kind", "cell", "service", "host", "instance", "attempt", "why", "first seen", "decided"]
    render_rows(out, columns, [_unexplained_row(*one) for one in found])


def _unexplained_row(cell: str, one: UnexplainedRecord) -> list[str]:
    machine = one.machine
    decided = f"{one.verdict} ({one.decided_by}, {utc(one.decided_at)})" if one.verdict else ""
    of = [machine.kind.value, cell, one.service, machine.host_uuid, machine.uuid]
    return [*of, str(machine.attempt or ""), machine.why, utc(one.first_seen), decided]


def _breaker_row(cell: str, one: Breaker) -> list[str]:
    state = "open" if one.is_open else f"reset by {one.reset_by}"
    return [cell, one.service, state, str(one.lost), str(one.quarantined), str(one.over), utc(one.tripped_at)]


async def _in_cells(here: Site, cell: str | None, work: Callable[[Safety], Awaitable[T]]) -> list[tuple[str, T]]:
    """The answers of the records of each cell, or of the one that is named."""
    if cell is not None:
        here.check_cell(cell)
    found: list[tuple[str, T]] = []
    for name in here.cells if cell is None else (cell,):
        database = here.environment("operator").database(f"cell_{name}", pool_size=1)
        await open_database_in_time(database.open())
        try:
            found.append((name, await work(PostgresSafety(database))))
        except (asyncpg.UndefinedTableError, DatabaseUnprepared) as error:
            raise Stop(
                Exit.UNAVAILABLE, "cell.never_started", f"cell {name} has never been started here with this release"
            ) from error
        finally:
            await database.close()
    return found
