"""`berth status`: all that waits for a person, for that person and for a monitoring system."""

from __future__ import annotations

from collections.abc import Mapping

import typer
from rich.text import Text

from berth.cli.common import explain, print_stop
from berth.cli.http import connected
from berth.cli.output import As, Form, out, print_data, print_line
from berth.client.status import Severity, StatusRow, SystemState, SystemStatus
from berth.text import age, printable
from bus.faults import Fault

# As a plug-in of a monitoring system ends.
EXIT: Mapping[SystemState, int] = {
    SystemState.FINE: 0,
    SystemState.WARNING: 1,
    SystemState.CRITICAL: 2,
    SystemState.NOT_KNOWN: 3,
}
_STYLE = {Severity.CRITICAL: "bold red", Severity.NOT_KNOWN: "magenta", Severity.WARNING: "yellow"}
_WIDTH = max(len(one.value) for one in Severity)


async def status(context: typer.Context, form: As = Form.TABLE) -> int:
    """Show all that waits for a person.

    The worst first, each with its age and the next command.

    Exit status, as a monitoring plug-in has it: 0 nothing waits, 1 warning, 2 critical, 3 a part is not known. A part
    that cannot be read is a row of its own; none holds up the others.
    """
    try:
        async with connected(context) as berth:
            found = await berth.show_status()
    except Fault as fault:  # not critical: nothing was read
        stop = explain(fault)
        assert stop is not None
        print_stop(stop)
        return EXIT[SystemState.NOT_KNOWN]
    if form.is_data:
        print_data(found, form)
    else:
        _show(found)
    return EXIT[found.state]


def _show(found: SystemStatus) -> None:
    if not found.rows:
        print_line("nothing waits for a person")
    for row in found.rows:
        out.print(_line(row, found.at), soft_wrap=True)
        margin = " " * (_WIDTH + 2)
        if row.detail:
            print_line(f"{margin}{row.detail}")
        if row.next:
            print_line(f"{margin}next: {row.next}")


def _line(row: StatusRow, now: float) -> Text:
    since = "" if row.since is None else f"  ({age(now - row.since)})"
    mark = Text(row.severity.replace("_", " ").ljust(_WIDTH + 2), _STYLE[row.severity])
    return mark + Text(printable(f"{row.what}{since}"))
