"""`berth quarantine` and `berth breaker`: what berth does not destroy by itself, and an operator's decision on it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Annotated, Literal

import typer
from msgspec import Struct

from berth.cli.common import (
    Exit,
    Stop,
    Yes,
    ask_first,
    by_cell,
    check_reason,
    one_of,
    parse_uuid,
    print_stop,
)
from berth.cli.http import connected
from berth.cli.output import (
    As,
    Cell,
    Form,
    Id,
    ListedItems,
    ListOutput,
    Table,
    Time,
    print_data,
    print_list,
    print_one,
    print_result,
)
from berth.client import AsyncClient
from berth.client.types import (
    MAX_DECIDED,
    BreakersReset,
    BreakerView,
    QuarantineDecision,
    QuarantinedMachine,
    QuarantinePage,
    SeenBreaker,
    SeenMachine,
)
from berth.text import counted, utc

MAX_SHOWN = 10_000
CellName = Annotated[str | None, typer.Option("--cell", help="Only this cell.")]


async def list_quarantine(
    context: typer.Context,
    cell: CellName = None,
    unknown: Annotated[
        bool, typer.Option("--unknown", help="Also the other machines on hosts that no record has.")
    ] = False,
    *,
    listing: ListOutput,
) -> int:
    """List the machines in quarantine, and the decisions about them.

    Exit status 3 when a cell has no record here; the others are listed.
    """
    status = 0
    async with connected(context) as berth:

        async def read() -> ListedItems[QuarantinedMachine]:
            nonlocal status
            page = await berth.list_quarantine(cell=cell, foreign=unknown or None, limit=MAX_SHOWN)
            status = name_never_started(page)
            return ListedItems(page.machines, total=page.count)

        await print_list(read, MACHINES, listing)
    return status


async def show_machine(
    context: typer.Context,
    uuid: Annotated[str, typer.Argument(help="The instance's UUID, or its first letters.", metavar="INSTANCE")],
    cell: CellName = None,
    form: As = Form.TABLE,
) -> int:
    """Show the machines of one instance that no record has.

    Where they are, why, and what was decided.
    """
    async with connected(context) as berth:
        page = await berth.list_quarantine(cell=cell, foreign=True, limit=MAX_SHOWN)
    known = {one.instance_uuid: "" for one in page.machines}
    wanted = one_of("machine", "quarantine.unknown", uuid, known)
    found = [one for one in page.machines if one.instance_uuid == wanted]
    if form.is_data:
        print_data(found, form)
    else:
        for one in found:
            print_one(MACHINES, one)
    return name_never_started(page)


class MachineOptions(Struct, frozen=True, kw_only=True):
    """The options of a decision about machines."""

    service: Annotated[
        str | None, typer.Option("--service", help="Those of this compute service; without UUIDs all undecided ones.")
    ] = None
    cell: CellName = None
    form: As = Form.TABLE


Machines = Annotated[list[str] | None, typer.Argument(metavar="[UUID]...", help="The instances.")]


async def destroy(context: typer.Context, uuids: Machines = None, yes: Yes = False, *, options: MachineOptions) -> None:
    """Destroy machines in quarantine.

    Their hosts do so from their next reports on.
    """
    await _decide(context, uuids or (), "destroy", options, yes=yes)


async def protect(context: typer.Context, uuids: Machines = None, *, options: MachineOptions) -> None:
    """Leave machines in quarantine alone for good.

    `berth quarantine adopt` records one as its instance's.
    """
    await _decide(context, uuids or (), "protect", options)


async def _decide(
    context: typer.Context,
    uuids: Sequence[str],
    decision: Literal["destroy", "protect"],
    options: MachineOptions,
    *,
    yes: bool = True,
) -> None:
    instances, service = {parse_uuid(one) for one in uuids}, options.service
    if not instances and service is None:
        raise typer.BadParameter("give UUIDs, or --service", param_hint="[UUID]...")
    async with connected(context) as berth:
        chosen = await _chosen(berth, options.cell, instances, service)
        if decision == "destroy" and chosen:
            uuids_of: dict[str, list[str]] = defaultdict(list)
            for one in chosen:
                uuids_of[one.cell].append(one.instance_uuid)
            ask_first(f"Destroy {by_cell(uuids_of, 'machine')}", yes=yes)
        decided, faults = list[str](), list[Stop]()
        for at in range(0, len(chosen), MAX_DECIDED):
            body = QuarantineDecision(decision=decision, machines=tuple(chosen[at : at + MAX_DECIDED]))
            answer = await berth.decide_quarantine(body)
            decided += answer.decided
            faults += [
                Stop(Exit.UNAVAILABLE, one.code, one.reason)
                for one in answer.undecided
                if one.code != "quarantine.unknown"
            ]
    done = sorted({*decided})
    what = ", ".join(done) if instances else f"service {service}"
    if done or faults:
        found = {"instances": done, "decision": decision, "machines": len(decided)}
        print_result(found, options.form, f"{what}: {decision}, {counted(len(decided), 'machine')}")
    for fault in faults:
        raise fault
    if left := ", ".join(sorted(instances.difference(done))) or ("" if done else what):
        raise Stop(Exit.NO, "quarantine.unknown", f"no machine of {left} is in quarantine")


async def adopt(
    context: typer.Context,
    uuid: Annotated[str, typer.Argument(help="The instance.")],
    host: Annotated[str, typer.Option("--host", help="The UUID of the host with the machine, as `list` shows it.")],
    reason: Annotated[str, typer.Option("--reason", help="The reason, for the record.")],
    form: As = Form.TABLE,
) -> None:
    """Adopt a machine in quarantine as its instance's.

    For an instance that was moved after a backup, and whose record has its former host: the record then has it
    where it runs. Its cell carries this out with the host's next report, if the host still reports the machine, no
    other host reports one of the instance, and the host on record has reported (or is fenced, or its service
    deleted). Nothing is destroyed or started. The cell claims what the machine uses; where placement refuses that,
    `berth placement audit --repair` repairs it.
    """
    instance, place = parse_uuid(uuid), parse_uuid(host)
    check_reason(reason, least=1)
    async with connected(context) as berth:
        page = await berth.list_quarantine(instance=instance, limit=MAX_SHOWN)
        seen = tuple(_seen(one) for one in page.machines if one.host_uuid == place)
        if not seen:
            raise Stop(Exit.NO, "quarantine.unknown", f"no machine of {instance} is in quarantine on host {place}")
        answer = await berth.decide_quarantine(QuarantineDecision(decision="adopt", machines=seen, reason=reason))
    for one in answer.undecided:
        raise Stop(Exit.NO, one.code, one.reason)
    found = {"instance": instance, "decision": "adopt", "cell": seen[0].cell, "host": place}
    print_result(found, form, f"{instance}: adopt, with the next report of host {place}")


async def list_breakers(context: typer.Context, cell: CellName = None, *, listing: ListOutput) -> int:
    """List the breakers that ever tripped. Exit status 3 when a cell has no record here; the others are listed."""
    status = 0
    async with connected(context) as berth:

        async def read() -> ListedItems[BreakerView]:
            nonlocal status
            found = await berth.list_breakers(cell=cell)
            status = name_never_started(await berth.list_quarantine(cell=cell, limit=1))
            return ListedItems(found)

        await print_list(read, BREAKERS, listing)
    return status


async def show_breaker(
    context: typer.Context,
    service: Annotated[str, typer.Argument(help="The compute service.")],
    cell: CellName = None,
    form: As = Form.TABLE,
) -> None:
    """Show the breaker of a compute service, and what tripped it."""
    async with connected(context) as berth:
        of_service = [one for one in await berth.list_breakers(cell=cell) if one.service == service]
        _check_one_cell(service, {one.cell for one in of_service})
        if not of_service:
            raise Stop(Exit.NO, "breaker.unknown", f"no breaker of {service} ever tripped")
        found = await berth.show_breaker(of_service[0].cell, service)
    if form.is_data:
        print_data(found, form)
    else:
        print_one(BREAKERS, found)


async def reset(
    context: typer.Context,
    service: Annotated[str, typer.Argument(help="The compute service.")],
    cell: CellName = None,
    form: As = Form.TABLE,
    yes: Yes = False,
) -> None:
    """Allow what tripped the breaker.

    It may be destroyed or counted as lost; later findings are evaluated again.
    """
    async with connected(context) as berth:
        tripped = [one for one in await berth.list_breakers(cell=cell, open=True) if one.service == service]
        _check_one_cell(service, {one.cell for one in tripped})
        if not tripped:
            raise Stop(Exit.NO, "breaker.not_open", f"no breaker of {service} is open")
        (one,) = tripped
        what = f"{counted(one.lost, 'machine')} lost, {one.quarantined} in quarantine, {one.over} over"
        ask_first(f"Allow what tripped the breaker of {service} in {one.cell} ({what})", yes=yes)
        seen = SeenBreaker(cell=one.cell, service=service, tripped_at=one.tripped_at)
        answer = await berth.reset_breakers(BreakersReset(breakers=(seen,)))
    if answer.no_answer:
        raise Stop(Exit.UNAVAILABLE, "database.unavailable", f"the records of cell {one.cell} cannot be reached")
    if answer.not_open:
        reason = "was reset or has tripped again meanwhile: read it again"
        raise Stop(Exit.NO, "breaker.not_open", f"the breaker of {service} in {one.cell} {reason}")
    print_result({"service": service, "cells": [one.cell]}, form, f"{service}: reset in {one.cell}")


async def _chosen(
    berth: AsyncClient, cell: str | None, instances: Collection[str], service: str | None
) -> list[SeenMachine]:
    """The machines in quarantine of these instances, or else the undecided ones of a service. Raises Stop."""
    page = await berth.list_quarantine(cell=cell, service=service, limit=MAX_SHOWN)
    chosen = [_seen(one) for one in page.machines if one.instance_uuid in instances or not (instances or one.decision)]
    if service is not None:
        _check_one_cell(service, {one.cell for one in chosen})
    return chosen


def _seen(one: QuarantinedMachine) -> SeenMachine:
    return SeenMachine(cell=one.cell, host_uuid=one.host_uuid, instance_uuid=one.instance_uuid, attempt=one.attempt)


def _check_one_cell(service: str, cells: Collection[str]) -> None:
    """Services of several cells may have one name, and an operator has seen one. Raises Stop."""
    if len(cells) > 1:
        reason = f"{', '.join(sorted(cells))} each have one of a service {service}: name the --cell"
        raise Stop(Exit.USAGE, "service.ambiguous", reason)


def name_never_started(page: QuarantinePage) -> int:
    """Name the cells that have no record; returns the exit status for it."""
    for cell in page.never_started:
        reason = f"cell {cell} has never been started here with this release"
        print_stop(Stop(Exit.UNAVAILABLE, "cell.never_started", reason))
    return Exit.UNAVAILABLE if page.never_started else 0


def _machine_row(one: QuarantinedMachine) -> list[Cell]:
    decided = f"{one.decision} ({one.decided_by}, {utc(one.decided_at)})" if one.decision else ""
    of: list[Cell] = [Id(one.instance_uuid), Id(one.host_uuid), one.service, one.kind, Time(one.first_seen)]
    return [*of, decided, one.reason, one.cell, one.attempt or ""]


MACHINES = Table("instance host service kind first-seen decided reason | cell attempt", _machine_row)


def _breaker_row(one: BreakerView) -> list[Cell]:
    state = "open" if one.open else f"reset by {one.reset_by}"
    return [one.service, one.cell, state, one.lost, one.quarantined, one.over, Time(one.tripped_at)]


BREAKERS = Table("service cell state lost quarantined over tripped", _breaker_row)
