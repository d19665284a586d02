"""`berth service` and `berth worker`: compute services and workers, as a scheduler knows them."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from berth.cli.common import Exit, Stop, further, one_of
from berth.cli.fleet.hosts import InCell, OnlyCell
from berth.cli.http import check_cell, connected
from berth.cli.output import (
    As,
    Cell,
    Form,
    ListedItems,
    ListOutput,
    Table,
    Time,
    print_data,
    print_list,
    print_one,
)
from bus.contracts.build import MAX_HOSTS
from bus.contracts.operations import ServiceRecord
from bus.contracts.workers import WorkerRecord


async def list_services(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="So many, by cell and name.")] = 1000,
    cell: OnlyCell = None,
    up: Annotated[bool | None, typer.Option("--up/--down", help="Only those that are up, or not.")] = None,
    *,
    listing: ListOutput,
) -> None:
    """List compute services."""
    async with connected(context) as berth:
        await check_cell(berth, cell)

        async def read() -> ListedItems[ServiceRecord]:
            found = await berth.list_services(limit=limit, cell=cell, up=up)
            return ListedItems(found, further(found, limit, MAX_HOSTS))

        await print_list(read, SERVICES, listing)


async def show_service(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of a compute service.", metavar="SERVICE")],
    cell: InCell = None,
    form: As = Form.TABLE,
) -> None:
    """Show one compute service: whether it is up, its hosts, and the reason."""
    async with connected(context) as berth:
        await check_cell(berth, cell)
        listed = await berth.list_services(limit=MAX_HOSTS, cell=cell)
    of_cells = {one.cell: one for one in listed if one.name == name}
    if not of_cells:
        raise Stop(Exit.NO, "service.unknown", f"there is no compute service {name}")
    if len(of_cells) > 1:
        reason = f"{', '.join(sorted(of_cells))} each have a service {name}: name the --cell"
        raise Stop(Exit.NO, "service.ambiguous", reason)
    (found,) = of_cells.values()
    if form.is_data:
        print_data(found, form)
    else:
        print_one(SERVICES, found)


def _service_row(one: ServiceRecord) -> list[Cell]:
    seen = f"{one.last_seen_s:.0f} s ago" if one.reported else "no"
    state = Text("up", "green") if one.up else Text("down", "red")
    reason = "" if one.up else f"{one.code}: {one.reason}" if one.reason else one.code
    return [one.name, one.cell, state, one.hosts, one.enabled, seen, reason, Time(one.since)]


SERVICES = Table("service cell state hosts enabled reported reason | since", _service_row)


async def list_workers(
    context: typer.Context,
    role: Annotated[str | None, typer.Option(help="Only of this role.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="So many, by role, bus and name.")] = 1000,
    *,
    listing: ListOutput,
) -> None:
    """List workers by their heartbeats.

    A worker that ended on purpose is listed as silent for an hour.
    """
    async with connected(context) as berth:

        async def read() -> ListedItems[WorkerRecord]:
            found = await berth.list_workers(role=role, limit=limit)
            return ListedItems(found, further(found, limit, MAX_HOSTS))

        await print_list(read, WORKERS, listing)


async def show_worker(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of a worker; BUS/NAME where two have it.", metavar="WORKER")],
    form: As = Form.TABLE,
) -> None:
    """Show one worker: its state, and what it has in hand."""
    async with connected(context) as berth:
        listed = await berth.list_workers(limit=MAX_HOSTS)
    known = {f"{one.bus}/{one.heartbeat.worker}": one for one in listed}  # workers of two buses share names
    found = known[one_of("worker", "worker.unknown", name, {key: one.heartbeat.worker for key, one in known.items()})]
    if form.is_data:
        print_data(found, form)
    else:
        print_one(WORKERS, found)


def _worker_row(one: WorkerRecord) -> list[Cell]:
    sent = one.heartbeat
    state = Text(sent.phase, "green") if not sent.not_ready else Text("; ".join(sent.not_ready), "yellow")
    if one.silent:
        state = Text(f"silent, was {sent.phase}", "red")
    in_flight = ", ".join(f"{queue} {count}" for queue, count in sorted(sent.in_flight.items()) if count)
    seen = f"{one.last_seen_s:.0f} s ago"
    return [
        sent.worker,
        sent.role,
        one.bus,
        state,
        seen,
        in_flight,
        sent.host,
        sent.pid,
        sent.version,
        Time(sent.started_at),
    ]


WORKERS = Table("worker role bus state seen in-hand | host pid version started", _worker_row)
