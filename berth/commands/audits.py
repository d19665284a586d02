"""`berth check` and `berth audit`: a running system, judged from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.text import Text

from berth.audit.auditing import watch
from berth.audit.findings import REPAIRABLE, AuditFinding
from berth.audit.gather import gather, rest
from berth.audit.invariants import check_invariants
from berth.audit.repairing import chosen, release_ended
from berth.commands.book import GRACE_S, audited
from berth.commands.common import AsJson, Exit, Stop, database_of, decided_by, err, out, print_json, print_json_line
from berth.render import printable, render_verdicts
from berth.settings import Settings
from berth.site import Site
from bus.faults import Transient

# Past the wait for rest: reading the databases and receiving every compute service's report.
CHECK_TIMEOUT_S = 60.0


async def check(
    settings: Settings,
    wait: Annotated[float, typer.Option(min=0, max=3600, help="Seconds to wait for rest first.")] = 30.0,
    as_json: AsJson = False,
) -> int:
    """Judge the invariants of a running system from the outside. Exit status 1 when one is broken."""
    site = database_of(settings)
    try:
        async with asyncio.timeout(wait + CHECK_TIMEOUT_S):
            at_rest = await rest(site, timeout_s=wait)
            verdicts = check_invariants(await gather(site))
    except TimeoutError as fault:
        raise Stop(Exit.UNAVAILABLE, "check.unanswered", "bus or database did not answer in time") from fault
    if as_json:
        print_json({"at_rest": at_rest, "invariants": verdicts})
    else:
        if not at_rest:
            err.print(
                "[yellow]the system is not at rest; requests under way count as a breach[/yellow]", soft_wrap=True
            )
        render_verdicts(verdicts, out)
    return 0 if all(verdict.holds for verdict in verdicts) else Exit.NO


async def audit(
    settings: Settings,
    follow: Annotated[
        bool, typer.Option("--watch", help="Continue, and print each finding when it appears and when it ends.")
    ] = False,
    every: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two passes.")] = 1.0,
    repair: Annotated[
        bool, typer.Option("--repair", help="Carry out the repairs of berth placement audit, after --grace.")
    ] = False,
    grace: Annotated[
        float, typer.Option(min=0, max=86_400, help="Seconds that a finding must have lasted before it is repaired.")
    ] = GRACE_S,
    as_json: AsJson = False,
) -> int:
    """Find allocations, records and machines that disagree.

    Orphaned, missing and doubled allocations, claims in doubt, machines without instance, instances without machine,
    capacity exceeded, usage miscounted, hosts outside the zone that a request names; each with its reason and the
    repair that is proposed.

    Requests under way are not judged, and a finding counts when two passes in a row have it, so one run makes two. With
    --watch it ends by Ctrl-C. Nothing is changed without --repair, unless the setting `audit.orphaned` is `repair`:
    then --watch releases allocations of instances that are proved to be deleted. Things that are not of this deployment
    are never changed. Exit status 1 when something is wrong.
    """
    here, passes = database_of(settings), 0
    async with aclosing(watch(here, every_s=every)) as stream:
        async for seen in stream:
            passes += 1
            for state, changed in (("found", seen.new), ("gone", seen.gone)):
                for one in changed:
                    if as_json:
                        _print_json(state, one)
                    else:
                        show_finding(state, one)
            if repair and seen.confirmed.lasting(REPAIRABLE, grace, seen.at_s):
                await _carry_out(_repaired(here, grace), as_json)
            if follow and (due := chosen(settings.audit, seen.confirmed.proven)):
                await _carry_out(release_ended(here, due, who=f"audit of {decided_by(None)}"), as_json)
            if passes >= 2 and not follow:
                if not seen.confirmed.found and not as_json:
                    out.print("nothing is wrong")
                return Exit.NO if seen.confirmed.found else 0
    return 0


async def _repaired(here: Site, grace_s: float) -> list[str]:
    return (await audited(here, repair=True, grace_s=grace_s))["repaired"]


async def _carry_out(repair: Awaitable[list[str]], as_json: bool) -> None:
    """Carry a repair out and print its lines. A server that is unavailable is reported: the next pass tries again."""
    try:
        done = await repair
    except (Transient, Stop) as fault:
        err.print(Text(printable(f"not repaired: {fault}")), soft_wrap=True)
        return
    for line in done:
        if as_json:
            print_json_line({"at": _now(), "state": "repaired", "what": line})
        else:
            out.print(Text(printable(f"{_now()} repaired: {line}")), soft_wrap=True)


def _print_json(state: str, one: AuditFinding) -> None:
    fields = {"kind": one.kind.value, "subject": one.subject, "reason": one.reason, "repair": one.repair}
    print_json_line({"at": _now(), "state": state, **fields})


def show_finding(state: str, one: AuditFinding) -> None:
    """Print a finding. state: found | gone."""
    proposed = f"; {one.repair}" if state == "found" else ""
    line = f"{_now()} {state}: {one.kind.value.replace('_', ' ')}: {one.subject}: {one.reason}{proposed}"
    out.print(Text(printable(line)), soft_wrap=True)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
