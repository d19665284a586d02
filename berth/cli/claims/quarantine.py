"""`berth quarantine` and `berth breaker`: what berth does not destroy by itself, and an operator's decision on it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

import typer
from msgspec import Struct

from berth.audit import quarantine as records
from berth.audit.quarantine import InCells
from berth.cli.common import (
    By,
    Exit,
    Stop,
    Yes,
    ask_first,
    by_cell,
    check_reason,
    database_of,
    decided_by,
    explain,
    one_of,
    parse_uuid,
    print_stop,
)
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
from berth.config.settings import Settings
from berth.text import counted, utc
from bus.faults import Fault
from bus.service.environment import Environment
from cell_conductor.state.breaker import Breaker
from cell_conductor.state.unknown_machine import UnknownMachineKind
from cell_conductor.store.keyed_tables import ADOPT, DESTROY, PROTECT, DecidedMachine, UnknownMachineRecord

CellName = Annotated[str | None, typer.Option("--cell", help="Only this cell.")]


async def list_quarantine(
    settings: Settings,
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
    kinds = tuple(UnknownMachineKind) if unknown else (UnknownMachineKind.QUARANTINED,)
    status = 0

    async def read() -> ListedItems[MachineInCell]:
        nonlocal status
        found = await records.read(environment(settings), cell)
        status = name_never_started(found)
        return ListedItems([MachineInCell(cell=name, record=one) for name, one in found.machines(*kinds)])

    await print_list(read, MACHINES, listing)
    return status


async def show_machine(
    settings: Settings,
    uuid: Annotated[str, typer.Argument(help="The instance's UUID, or its first letters.", metavar="INSTANCE")],
    cell: CellName = None,
    form: As = Form.TABLE,
) -> int:
    """Show the machines of one instance that no record has.

    Where they are, why, and what was decided.
    """
    read = await records.read(environment(settings), cell)
    every = read.machines(*UnknownMachineKind)
    wanted = one_of("machine", "quarantine.unknown", uuid, {one.machine.uuid: "" for _, one in every})
    found = [MachineInCell(cell=name, record=one) for name, one in every if one.machine.uuid == wanted]
    if form.is_data:
        print_data(found, form)
    else:
        for one in found:
            print_one(MACHINES, one)
    return name_never_started(read)


class MachineInCell(Struct, frozen=True, kw_only=True):
    """A machine that no record has, and the cell that has it on record as such."""

    cell: str
    record: UnknownMachineRecord


class BreakerInCell(Struct, frozen=True, kw_only=True):
    """A breaker, and its cell."""

    cell: str
    breaker: Breaker


class MachineOptions(Struct, frozen=True, kw_only=True):
    """The options of a decision about machines."""

    service: Annotated[
        str | None, typer.Option("--service", help="Those of this compute service; without UUIDs all undecided ones.")
    ] = None
    cell: CellName = None
    by: By = None
    form: As = Form.TABLE


Machines = Annotated[list[str] | None, typer.Argument(metavar="[UUID]...", help="The instances.")]


async def destroy(settings: Settings, uuids: Machines = None, yes: Yes = False, *, options: MachineOptions) -> None:
    """Destroy machines in quarantine.

    Their hosts do so from their next reports on.
    """
    await _decide(settings, uuids or (), DESTROY, options, yes=yes)


async def protect(settings: Settings, uuids: Machines = None, *, options: MachineOptions) -> None:
    """Leave machines in quarantine alone for good.

    `berth quarantine adopt` records one as its instance's.
    """
    await _decide(settings, uuids or (), PROTECT, options)


async def _decide(
    settings: Settings, uuids: Sequence[str], decision: str, options: MachineOptions, *, yes: bool = True
) -> None:
    instances, service = {parse_uuid(one) for one in uuids}, options.service
    if not instances and service is None:
        raise typer.BadParameter("give UUIDs, or --service", param_hint="[UUID]...")

    here, actor = environment(settings), decided_by(options.by)
    chosen = _chosen(await records.read(here, options.cell), instances, service)
    if decision == DESTROY and chosen:
        uuids_of = {name: [one.uuid for one in of] for name, of in chosen.items()}
        ask_first(f"Destroy {by_cell(uuids_of, 'machine')}", yes=yes)
    of_cells, faults = await records.decide(here, chosen, decision, actor)
    decided = [place for of in of_cells.values() for place in of]
    done = sorted({uuid for _, uuid in decided})
    what = ", ".join(done) if instances else f"service {service}"
    if done or faults:
        found = {"instances": done, "decision": decision, "machines": len(decided)}
        print_result(found, options.form, f"{what}: {decision}, {counted(len(decided), 'machine')}")
    raise_first(faults)
    if left := ", ".join(sorted(instances.difference(done))) or ("" if done else what):
        raise Stop(Exit.NO, "quarantine.unknown", f"no machine of {left} is in quarantine")


async def adopt(
    settings: Settings,
    uuid: Annotated[str, typer.Argument(help="The instance.")],
    host: Annotated[str, typer.Option("--host", help="The UUID of the host with the machine, as `list` shows it.")],
    reason: Annotated[str, typer.Option("--reason", help="The reason, for the record.")],
    by: By = None,
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

    decided, refused = await records.adopt(
        environment(settings), [(place, instance)], actor=decided_by(by), reason=reason
    )
    if refused:
        raise refused[place, instance]
    found = {"instance": instance, "decision": ADOPT, "cell": decided[place, instance], "host": place}
    print_result(found, form, f"{instance}: {ADOPT}, with the next report of host {place}")


async def list_breakers(settings: Settings, cell: CellName = None, *, listing: ListOutput) -> int:
    """List the breakers that ever tripped. Exit status 3 when a cell has no record here; the others are listed."""
    status = 0

    async def read() -> ListedItems[BreakerInCell]:
        nonlocal status
        found = await records.read(environment(settings), cell)
        status = name_never_started(found)
        return ListedItems(_breakers(found))

    await print_list(read, BREAKERS, listing)
    return status


async def show_breaker(
    settings: Settings,
    service: Annotated[str, typer.Argument(help="The compute service.")],
    cell: CellName = None,
    form: As = Form.TABLE,
) -> None:
    """Show the breaker of a compute service, and what tripped it."""
    found = [
        one for one in _breakers(await records.read(environment(settings), cell)) if one.breaker.service == service
    ]
    _check_one_cell(service, [one.cell for one in found])
    if not found:
        raise Stop(Exit.NO, "breaker.unknown", f"no breaker of {service} ever tripped")
    if form.is_data:
        print_data(found[0], form)
    else:
        print_one(BREAKERS, found[0])


def _breakers(read: InCells) -> list[BreakerInCell]:
    return [BreakerInCell(cell=name, breaker=one) for name, breakers in read.breakers.items() for one in breakers]


async def reset(
    settings: Settings,
    service: Annotated[str, typer.Argument(help="The compute service.")],
    cell: CellName = None,
    by: By = None,
    form: As = Form.TABLE,
    yes: Yes = False,
) -> None:
    """Allow what tripped the breaker.

    It may be destroyed or counted as lost; later findings are evaluated again.
    """
    here, actor = environment(settings), decided_by(by)
    tripped = [
        (name, one)
        for name, breakers in (await records.read(here, cell)).breakers.items()
        for one in breakers
        if one.service == service and one.is_open
    ]
    _check_one_cell(service, [name for name, _ in tripped])
    if not tripped:
        raise Stop(Exit.NO, "breaker.not_open", f"no breaker of {service} is open")
    ((name, one),) = tripped
    what = f"{counted(one.lost, 'machine')} lost, {one.quarantined} in quarantine, {one.over} over"
    ask_first(f"Allow what tripped the breaker of {service} in {name} ({what})", yes=yes)
    was_open, _ = await records.reset(here, [(name, service, one.tripped_at)], actor)
    if not all(was_open.values()):
        reason = "was reset or has tripped again meanwhile: read it again"
        raise Stop(Exit.NO, "breaker.not_open", f"the breaker of {service} in {name} {reason}")
    print_result({"service": service, "cells": [name]}, form, f"{service}: reset in {name}")


def _chosen(read: InCells, instances: Collection[str], service: str | None) -> dict[str, list[DecidedMachine]]:
    """The machines in quarantine of these instances, or else the undecided ones of a service. Raises Stop."""
    chosen: dict[str, list[DecidedMachine]] = defaultdict(list)
    for name, one in read.machines(UnknownMachineKind.QUARANTINED):
        machine = one.machine
        if service in (None, one.service) and (machine.uuid in instances or not (instances or one.decision)):
            chosen[name].append(DecidedMachine(machine.uuid, machine.host_uuid, machine.attempt))
    if service is not None:
        _check_one_cell(service, chosen)
    return chosen


def _check_one_cell(service: str, cells: Collection[str]) -> None:
    """Services of several cells may have one name, and an operator has seen one. Raises Stop."""
    if len(cells) > 1:
        reason = f"{', '.join(sorted(cells))} each have one of a service {service}: name the --cell"
        raise Stop(Exit.USAGE, "service.ambiguous", reason)


def raise_first(faults: Mapping[Any, Fault]) -> None:
    """Of the cells that have not answered, after what was done in the others is stated."""
    for fault in faults.values():
        raise fault


def environment(settings: Settings) -> Environment:
    """The environment of these commands. Raises Stop when the database is not known."""
    return database_of(settings).environment("operator")


def name_never_started(read: InCells) -> int:
    """Name the cells that have no record; returns the exit status for it."""
    for cell in read.never_started:
        fault = records.CellNeverStarted(f"cell {cell} has never been started here with this release")
        stop = explain(fault)
        assert stop is not None
        print_stop(stop)
    return Exit.UNAVAILABLE if read.never_started else 0


def _machine_row(found: MachineInCell) -> list[Cell]:
    one = found.record
    machine = one.machine
    decided = f"{one.decision} ({one.decided_by}, {utc(one.decided_at)})" if one.decision else ""
    of: list[Cell] = [Id(machine.uuid), Id(machine.host_uuid), one.service, machine.kind.value, Time(one.first_seen)]
    return [*of, decided, machine.reason, found.cell, machine.attempt or ""]


MACHINES = Table("instance host service kind first-seen decided reason | cell attempt", _machine_row)


def _breaker_row(found: BreakerInCell) -> list[Cell]:
    one = found.breaker
    state = "open" if one.is_open else f"reset by {one.reset_by}"
    return [one.service, found.cell, state, one.lost, one.quarantined, one.over, Time(one.tripped_at)]


BREAKERS = Table("service cell state lost quarantined over tripped", _breaker_row)
