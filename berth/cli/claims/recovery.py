"""`berth recovery`: cells whose database was restored, and the decision about what they would lose."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from berth.cli.claims.quarantine import CellName
from berth.cli.common import (
    Exit,
    Reason,
    Stop,
    Yes,
    ask_first,
    check_reason,
)
from berth.cli.http import connected
from berth.cli.output import (
    As,
    Cell,
    Form,
    ListedItems,
    ListOutput,
    Table,
    print_data,
    print_list,
    print_one,
    print_result,
)
from berth.client import AsyncClient
from berth.client.types import LossesAccepted, Recovery, WithoutService
from berth.text import counted
from bus.contracts.base import Word, reason_of


async def list_recoveries(context: typer.Context, cell: CellName = None, *, listing: ListOutput) -> None:
    """List whether cells recover, and which instances they would lose."""

    async with connected(context) as berth:

        async def read() -> ListedItems[Recovery]:
            return ListedItems([one for one in await berth.list_recoveries() if cell in (None, one.cell)])

        await print_list(read, RECOVERIES, listing)


async def show(
    context: typer.Context, cell: Annotated[str, typer.Argument(help="The cell.")], form: As = Form.TABLE
) -> int:
    """Show the recovery of one cell. Exit status 1 when it waits for `accept`."""
    async with connected(context) as berth:
        found = await _of_cell(berth, cell)
    if form.is_data:
        print_data(found, form)
    else:
        print_one(RECOVERIES, found)
    return Exit.NO if found.is_waiting else 0


async def accept(
    context: typer.Context,
    cell: Annotated[str, typer.Argument(help="The cell.")],
    losses: Annotated[int, typer.Option("--losses", help="How many, as `show` names them.", min=1)],
    reason: Reason = "",
    form: As = Form.TABLE,
    yes: Yes = False,
) -> None:
    """Have a cell recover though it loses these instances: they end, and their allocations are released."""
    check_reason(reason)
    async with connected(context) as berth:
        found = await _of_cell(berth, cell)
        if not found.is_waiting or found.losses.count != losses:
            about = f"about {counted(found.losses.count, 'instance')}"
            waits = f"for a decision {about}" if found.is_waiting else "for nothing"
            raise Stop(Exit.NO, "recovery.not_waiting", f"the recovery of {cell} waits {waits}")
        what = counted(losses, "instance")
        ask_first(f"Lose {what} in {cell}, and {counted(found.losses.builds, 'build')} under way", yes=yes)
        seen = LossesAccepted(database_incarnation=found.database_incarnation, losses=losses, reason=reason)
        await berth.accept_losses(cell, seen)
    print_result({"cell": cell, "losses": losses}, form, f"{cell}: recovers, {what} lost")


async def _of_cell(berth: AsyncClient, cell: str) -> Recovery:
    """Raises Stop: no such cell was ever started."""
    found = next((one for one in await berth.list_recoveries() if one.cell == cell), None)
    if found is None:
        raise Stop(Exit.USAGE, "cell.unknown", f"there is no cell {cell!r} that was ever started")
    return found


async def without(
    context: typer.Context,
    cell: Annotated[str, typer.Argument(help="The cell.")],
    service: Annotated[str, typer.Argument(help="The compute service.")],
    reason: Reason = "",
    form: As = Form.TABLE,
    yes: Yes = False,
) -> None:
    """State that a decommissioned compute service has no machine: what waits for its hosts continues without them.

    It ends if nothing else has it. A machine that runs there all the same is quarantined when it is listed.
    """
    check_reason(reason)
    try:
        msgspec.convert(service, Word)
    except msgspec.ValidationError as error:
        raise typer.BadParameter(reason_of(error), param_hint="SERVICE") from None
    ask_first(f"Count the hosts of {service} in {cell} as empty", yes=yes)
    async with connected(context) as berth:
        await berth.go_on_without(cell, WithoutService(service=service, reason=reason))
    print_result({"cell": cell, "service": service}, form, f"{cell}: goes on without {service}")


def _row(one: Recovery) -> list[Cell]:
    absent = [f"{name} (nothing)" if has_nothing else name for name, has_nothing in sorted(one.absent.items())]
    lost = one.losses
    counts: list[Cell] = [lost.count, lost.builds, " ".join(lost.instances), ", ".join(absent)]
    return [one.cell, one.state, *counts, one.database_incarnation]


RECOVERIES = Table("cell state losses builds instances absent | incarnation", _row)
