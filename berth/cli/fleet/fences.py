"""`berth fence`: hosts that are stated to be off, and how far each has come. `berth host fence` begins one."""

from __future__ import annotations

from typing import Annotated

import typer

from berth.cli.common import Exit, Reason, Stop
from berth.cli.fleet.hosts import FinalOptions, Hosts, InCell, OnlyCell, decided_state, end_fences, named_host
from berth.cli.http import check_cell, connected
from berth.cli.output import As, Cell, Form, Id, ListedItems, ListOutput, Table, Time, print_data, print_list, print_one
from bus.contracts.build import MAX_HOSTS, HostRecord
from bus.contracts.operations import AdminState


async def list_fences(context: typer.Context, cell: OnlyCell = None, *, listing: ListOutput) -> None:
    """List fenced hosts: whether the cell of each has acknowledged it, and the machines that are left."""
    async with connected(context) as berth:
        await check_cell(berth, cell)

        async def read() -> ListedItems[HostRecord]:
            found = await berth.list_hosts(limit=MAX_HOSTS, cell=cell)
            return ListedItems([one for one in found if is_fenced(one)])

        await print_list(read, FENCES, listing)


async def show_fence(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name or UUID of a host.", metavar="HOST")],
    cell: InCell = None,
    form: As = Form.TABLE,
) -> None:
    """Show the fence of one host."""
    async with connected(context) as berth:
        await check_cell(berth, cell)
        found = await named_host(berth, name, cell)
    if not is_fenced(found):
        raise Stop(Exit.NO, "host.not_fenced", f"host {found.name} is not fenced")
    if form.is_data:
        print_data(found, form)
    else:
        print_one(FENCES, found)


async def cancel_fences(
    context: typer.Context,
    names: Hosts,
    reason: Reason = "",
    force: Annotated[
        bool, typer.Option("--force", help="Without its cell's report: the cell is decommissioned.")
    ] = False,
    *,
    decision: FinalOptions,
) -> int:
    """End the fence of hosts that are on again.

    A fenced host is used once it has destroyed its stale machines; until then it stays fenced, and `list` shows how
    many machines are left. With --force and a reason it does not wait for that.
    """
    async with connected(context) as berth:
        await check_cell(berth, decision.cell)
        for name in names:
            if not is_fenced(found := await named_host(berth, name, decision.cell)):
                raise Stop(Exit.NO, "host.not_fenced", f"host {found.name} is not fenced: nothing is done")
    return await end_fences(context, names, reason, decision, force=force)


def is_fenced(host: HostRecord) -> bool:
    """Whether an operator's newest decision about it is a fence, or follows one that has not ended."""
    return host.admin is not None and host.admin.state is AdminState.FENCED


def _row(host: HostRecord) -> list[Cell]:
    admin = host.admin
    assert admin is not None
    where: list[Cell] = [host.name, host.cell or "", decided_state(admin), admin.stale_machines]
    return [*where, admin.by, Time(admin.at), admin.reason, Id(host.uuid)]


FENCES = Table("host cell state machines by since reason | uuid", _row)
