"""`berth service` and `berth worker`: compute services and workers, as a scheduler knows them."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from berth.cli.common import (
    QUERY_TIMEOUT_S,
    Exit,
    Stop,
    check_cell,
    client,
    one_of,
)
from berth.cli.fleet.hosts import InCell, OnlyCell
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
from berth.config.settings import Settings
from berth.fencing.fencer import MAX_HOSTS
from bus.contracts.operations import ServiceRecord
from bus.contracts.workers import WorkerRecord, WorkersPage, WorkersQuery


async def list_services(
    settings: Settings,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="So many, by cell and name.")] = 1000,
    cell: OnlyCell = None,
    up: Annotated[bool | None, typer.Option("--up/--down", help="Only those that are up, or not.")] = None,
    *,
    listing: ListOutput,
) -> None:
    """List compute services."""
    async with client(settings) as berth:
        await check_cell(berth, settings, cell)

        async def read() -> ListedItems[ServiceRecord]:
            page = await berth.services(limit=limit, cell=cell, up=up, timeout_s=QUERY_TIMEOUT_S)
            more = len(page.services) == limit and limit < MAX_HOSTS
            return ListedItems(page.services, {"--limit": str(min(limit * 10, MAX_HOSTS))} if more else None)

        await print_list(read, SERVICES, listing)


async def show_service(
    settings: Settings,
    name: Annotated[str, typer.Argument(help="Name of a compute service.", metavar="SERVICE")],
    cell: InCell = None,
    form: As = Form.TABLE,
) -> None:
    """Show one compute service: whether it is up, its hosts, and the reason."""
    async with client(settings) as berth:
        await check_cell(berth, settings, cell)
        page = await berth.services(limit=MAX_HOSTS, cell=cell, timeout_s=QUERY_TIMEOUT_S)
    of_cells = {one.cell: one for one in page.services if one.name == name}
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
    settings: Settings,
    role: Annotated[str | None, typer.Option(help="Only of this role.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="So many, by role, bus and name.")] = 1000,
    *,
    listing: ListOutput,
) -> None:
    """List workers by their heartbeats.

    A worker that ended on purpose is listed as silent for an hour.
    """
    async with client(settings) as berth:

        async def read() -> ListedItems[WorkerRecord]:
            query = WorkersQuery(role=role, limit=limit)
            page = await berth.bus.request(query, WorkersPage, timeout_s=QUERY_TIMEOUT_S)
            more = len(page.workers) == limit and limit < MAX_HOSTS
            return ListedItems(page.workers, {"--limit": str(min(limit * 10, MAX_HOSTS))} if more else None)

        await print_list(read, WORKERS, listing)


async def show_worker(
    settings: Settings,
    name: Annotated[str, typer.Argument(help="Name of a worker; BUS/NAME where two have it.", metavar="WORKER")],
    form: As = Form.TABLE,
) -> None:
    """Show one worker: its state, and what it has in hand."""
    async with client(settings) as berth:
        page = await berth.bus.request(WorkersQuery(limit=MAX_HOSTS), WorkersPage, timeout_s=QUERY_TIMEOUT_S)
    known = {f"{one.bus}/{one.heartbeat.worker}": one for one in page.workers}  # workers of two buses share names
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
