"""`berth status`: all that waits for a person, for that person and for a monitoring system."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from rich.text import Text

from berth.bus_client.baremetal import flavor_classes
from berth.bus_client.object_edits import stored_objects
from berth.cli.common import CLOSE_TIMEOUT_S, explain, print_stop, settings_of
from berth.cli.fleet.baremetal import records
from berth.cli.output import As, Form, out, print_data, print_line
from berth.client.status import Severity, StatusRow, SystemState, SystemStatus
from berth.client.types import NodeRecord
from berth.config.settings import Settings
from berth.config.site import Site, ironic_of, process_name
from berth.status.reader import PART_TIMEOUT_S, StatusReader
from berth.text import age, printable
from bus.bus import API
from bus.contracts.objects import ObjectKind
from bus.service.settings import SettingsError

# As a plug-in of a monitoring system ends.
EXIT: Mapping[SystemState, int] = {
    SystemState.FINE: 0,
    SystemState.WARNING: 1,
    SystemState.CRITICAL: 2,
    SystemState.NOT_KNOWN: 3,
}
_STYLE = {Severity.CRITICAL: "bold red", Severity.NOT_KNOWN: "magenta", Severity.WARNING: "yellow"}
_WIDTH = max(len(one.value) for one in Severity)


async def status(
    context: typer.Context,
    per_part: Annotated[
        float, typer.Option("--timeout", min=0.1, max=60, help="Seconds for each part; all are read at once.")
    ] = PART_TIMEOUT_S,
    form: As = Form.TABLE,
) -> int:
    """Show all that waits for a person.

    The worst first, each with its age and the next command.

    Exit status, as a monitoring plug-in has it: 0 nothing waits, 1 warning, 2 critical, 3 a part is not known. A part
    that cannot be read is a row of its own; none holds up the others.
    """
    try:
        settings = settings_of(context)
    except SettingsError as fault:  # not critical: nothing was read
        stop = explain(fault)
        assert stop is not None
        print_stop(stop)
        return EXIT[SystemState.NOT_KNOWN]
    found = await read_status(settings, per_part)
    if form.is_data:
        print_data(found, form)
    else:
        _show(found)
    return EXIT[found.state]


async def read_status(settings: Settings, timeout_s: float) -> SystemStatus:
    """One look at everything, over connections of its own. timeout_s: for each part."""
    site = Site(settings)
    env = site.environment(process_name("cli"))
    bus = env.bus(API)

    async def nodes() -> Sequence[NodeRecord]:
        flavors = [one async for one in stored_objects(bus, ObjectKind.FLAVOR, timeout_s=timeout_s)]
        return await records(settings, flavor_classes(flavors))

    with_nodes = nodes if ironic_of(settings) else None
    reader = StatusReader(env, settings, bus, nodes=with_nodes, opens=True, timeout_s=timeout_s)
    try:
        return await reader.read()
    finally:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await reader.close()
                await bus.close()
        await site.close()


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
