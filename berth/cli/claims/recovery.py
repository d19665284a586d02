"""`berth recovery`: cells whose database was restored, and the decision about what they would lose."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from berth.audit import recoveries
from berth.cli.claims.quarantine import CellName, environment
from berth.cli.common import (
    By,
    Exit,
    Reason,
    Stop,
    Yes,
    ask_first,
    check_reason,
    decided_by,
)
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
from berth.client.types import Recovery
from berth.config.settings import Settings
from berth.text import counted
from bus.contracts.base import Word, reason_of


async def list_recoveries(settings: Settings, cell: CellName = None, *, listing: ListOutput) -> None:
    """List whether cells recover, and which instances they would lose."""

    async def read() -> ListedItems[Recovery]:
        return ListedItems(await recoveries.read(environment(settings), cell))

    await print_list(read, RECOVERIES, listing)


async def show(
    settings: Settings, cell: Annotated[str, typer.Argument(help="The cell.")], form: As = Form.TABLE
) -> int:
    """Show the recovery of one cell. Exit status 1 when it waits for `accept`."""
    (found,) = await recoveries.read(environment(settings), cell)
    if form.is_data:
        print_data(found, form)
    else:
        print_one(RECOVERIES, found)
    return Exit.NO if found.is_waiting else 0


async def accept(
    settings: Settings,
    cell: Annotated[str, typer.Argument(help="The cell.")],
    losses: Annotated[int, typer.Option("--losses", help="How many, as `show` names them.", min=1)],
    reason: Reason = "",
    by: By = None,
    form: As = Form.TABLE,
    yes: Yes = False,
) -> None:
    """Have a cell recover though it loses these instances: they end, and their allocations are released."""
    check_reason(reason)
    here = environment(settings)
    (found,) = await recoveries.read(here, cell)
    if not found.is_waiting or found.losses.count != losses:
        waits = f"for a decision about {counted(found.losses.count, 'instance')}" if found.is_waiting else "for nothing"
        raise Stop(Exit.NO, "recovery.not_waiting", f"the recovery of {cell} waits {waits}")
    what = counted(losses, "instance")
    ask_first(f"Lose {what} in {cell}, and {counted(found.losses.builds, 'build')} under way", yes=yes)
    if not await recoveries.accept(here, found, decided_by(by), reason):
        raise Stop(Exit.NO, "recovery.not_waiting", f"the recovery of {cell} has continued meanwhile: read it again")
    print_result({"cell": cell, "losses": losses}, form, f"{cell}: recovers, {what} lost")


async def without(
    settings: Settings,
    cell: Annotated[str, typer.Argument(help="The cell.")],
    service: Annotated[str, typer.Argument(help="The compute service.")],
    reason: Reason = "",
    by: By = None,
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
    if not await recoveries.state_without(environment(settings), cell, service, decided_by(by), reason):
        raise Stop(
            Exit.NO, "recovery.not_without", f"the compute service {service} of {cell} is up: it lists by itself"
        )
    print_result({"cell": cell, "service": service}, form, f"{cell}: goes on without {service}")


def _row(one: Recovery) -> list[Cell]:
    absent = [f"{name} (nothing)" if has_nothing else name for name, has_nothing in sorted(one.absent.items())]
    lost = one.losses
    counts: list[Cell] = [lost.count, lost.builds, " ".join(lost.instances), ", ".join(absent)]
    return [one.cell, one.state, *counts, one.database_incarnation]


RECOVERIES = Table("cell state losses builds instances absent | incarnation", _row)
