"""`berth recovery`: cells whose database was set back, and the word on what they would lose."""

from __future__ import annotations

from typing import Annotated

import typer

from berth.audit import recoveries
from berth.commands.common import AsJson, Exit, Stop, Yes, ask_first, out, print_json, print_result
from berth.commands.options import CommandGroup
from berth.commands.safety import CellName, environment
from berth.render import counted, render_rows
from berth.settings import Settings

recovery = CommandGroup(no_args_is_help=True, help="Cells whose database was set back, and what they would lose.")


@recovery.command("show")
async def show(settings: Settings, cell: CellName = None, as_json: AsJson = False) -> int:
    """Show whether cells recover, and which instances they would lose. Exit status 1 when one waits for `accept`."""
    found = await recoveries.read(environment(settings), cell)
    if as_json:
        print_json(found)
    else:
        rows = [
            [one.cell, one.state, str(one.database_incarnation), str(one.losses.count), " ".join(one.losses.instances)]
            for one in found
        ]
        render_rows(out, ["cell", "state", "incarnation", "losses", "instances"], rows)
    return Exit.NO if any(one.is_waiting for one in found) else 0


@recovery.command("accept")
async def accept(
    settings: Settings,
    cell: Annotated[str, typer.Argument(help="The cell.")],
    losses: Annotated[int, typer.Option("--losses", help="How many, as `show` names them.", min=1)],
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Have a cell recover though it loses these instances: they end, and what they hold is released."""
    here = environment(settings)
    (found,) = await recoveries.read(here, cell)
    if not found.is_waiting or found.losses.count != losses:
        waits = f"for the word on {counted(found.losses.count, 'instance')}" if found.is_waiting else "for nothing"
        raise Stop(Exit.NO, "recovery.not_waiting", f"the recovery of {cell} waits {waits}")
    ask_first(f"Lose {counted(losses, 'instance')} in {cell}", yes=yes)
    if not await recoveries.accept(here, found):
        raise Stop(Exit.NO, "recovery.not_waiting", f"the recovery of {cell} has gone on meanwhile: look at it again")
    print_result({"cell": cell, "losses": losses}, as_json, f"{cell}: recovers, {counted(losses, 'instance')} lost")
