"""`berth check`: the invariants of a running system, judged from outside."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from berth.audit.gather import gather, rest
from berth.audit.invariants import check_invariants
from berth.commands.common import (
    EXIT_NO,
    EXIT_UNAVAILABLE,
    AsJson,
    Stop,
    database_of,
    err,
    out,
    print_json,
    run,
    settings_of,
)
from berth.render import render_verdicts

# Past the wait for rest: reading the databases and receiving every compute service's report.
CHECK_TIMEOUT_S = 60.0


def check(
    context: typer.Context,
    wait: Annotated[float, typer.Option(min=0, max=3600, help="Seconds to wait for rest first.")] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Judge the invariants of a running system from the outside. Exit status 1 when one is broken."""

    async def body() -> int:
        site = database_of(settings_of(context))
        try:
            async with asyncio.timeout(wait + CHECK_TIMEOUT_S):
                at_rest = await rest(site, timeout_s=wait)
                verdicts = check_invariants(await gather(site))
        except TimeoutError as fault:
            raise Stop(EXIT_UNAVAILABLE, "check.unanswered", "bus or database did not answer in time") from fault
        if as_json:
            print_json({"at_rest": at_rest, "invariants": verdicts})
        else:
            if not at_rest:
                err.print(
                    "[yellow]the system is not at rest; requests under way count as a breach[/yellow]", soft_wrap=True
                )
            render_verdicts(verdicts, out)
        return 0 if all(verdict.holds for verdict in verdicts) else EXIT_NO

    run(body)
