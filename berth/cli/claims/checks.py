"""`berth check` and `berth audit`: a running system, judged from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.text import Text

from berth.audit.facts import gather, rest
from berth.audit.findings import REPAIRABLE, AuditFinding
from berth.audit.invariants import check_invariants
from berth.audit.passes import AuditPass, watch
from berth.audit.readable_cells import unreadable
from berth.audit.repair import chosen, release_ended
from berth.cli.claims.placement_audit import GRACE_S, audited
from berth.cli.common import (
    Exit,
    Stop,
    Yes,
    ask_first,
    database_of,
    decided_by,
    explain,
)
from berth.cli.output import (
    As,
    Form,
    err,
    out,
    print_data,
    print_data_line,
)
from berth.config.settings import Settings
from berth.text import printable, render_results
from bus.faults import Transient

# Past the wait for rest: reading the databases and receiving every compute service's report.
CHECK_TIMEOUT_S = 60.0


async def check(
    settings: Settings,
    wait: Annotated[float, typer.Option(min=0, max=3600, help="Seconds to wait for rest first.")] = 30.0,
    form: As = Form.TABLE,
) -> int:
    """Judge the invariants of a running system from the outside. Exit status 1 when one is broken.

    A cell whose bus or database cannot be read is named, and the rest is judged; the exit status is then 2 or 3.
    """
    site = database_of(settings)
    try:
        async with asyncio.timeout(wait + CHECK_TIMEOUT_S):
            unread = _explained(await unreadable(site))
            at_rest = await rest(site, timeout_s=wait, unread=unread)
            results = check_invariants(await gather(site, unread=unread))
    except TimeoutError as fault:
        raise Stop(Exit.UNAVAILABLE, "check.unanswered", "bus or database did not answer in time") from fault
    if form.is_data:
        print_data({"at_rest": at_rest, "invariants": results, "not_judged": _as_json(unread)}, form)
    else:
        if not at_rest:
            err.print(
                "[yellow]the system is not at rest; what is within its time is not judged[/yellow]", soft_wrap=True
            )
        render_results(results, out)
        _show_unread(unread)
    return _status(unread) if all(result.holds for result in results) else Exit.NO


def _explained(unread: Mapping[str, Exception]) -> dict[str, Stop]:
    """{cell that cannot be read: the reason, in the words of a user}."""
    return {cell: explain(fault) or Stop(Exit.NO, "fault", str(fault)) for cell, fault in unread.items()}


def _show_unread(unread: Mapping[str, Stop]) -> None:
    for cell, stop in unread.items():
        err.print(Text(printable(f"not judged: {cell}: {stop} ({stop.code})")), soft_wrap=True)


def _as_json(unread: Mapping[str, Stop]) -> dict[str, dict[str, str]]:
    return {cell: {"code": stop.code, "reason": str(stop)} for cell, stop in unread.items()}


def _status(unread: Mapping[str, Stop]) -> int:
    return max((stop.status for stop in unread.values()), default=0)


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
    form: As = Form.TABLE,
    yes: Yes = False,
) -> int:
    """Find allocations, records and machines that disagree.

    Orphaned, missing and duplicate allocations, claims in doubt, machines without instance, instances without machine,
    capacity exceeded, usage miscounted, hosts outside the zone that a request names; each with its reason and the
    repair that is proposed.

    Requests in progress are not checked, and a finding counts when two passes in a row have it, so one run makes two.
    With --watch it ends by Ctrl-C. Nothing is changed without --repair, unless the setting `audit.orphaned` is
    `repair`: then --watch releases allocations of instances that are proved to be deleted. What is not of this berth is
    never changed. A cell whose bus or database cannot be read is named on standard error (with -o json also as
    `not_judged`), and what may be its own is not checked; the exit status is then 2 or 3. Exit status 1 when something
    is wrong.
    """
    if repair and not follow and grace > every:  # two passes see no finding for longer
        reason = "without --watch a finding is seen for --every seconds only: give --watch, or a --grace of no more"
        raise Stop(Exit.USAGE, "audit.grace", f"{reason}; `berth placement audit --repair` does not wait")
    if repair:
        ask_first(f"Repair placement, as `berth placement audit --repair`, at findings of {grace:g} s", yes=yes)
    here, passes = database_of(settings), 0
    unread: dict[str, Stop] = {}
    async with aclosing(watch(here, every_s=every)) as stream:
        async for seen in stream:
            passes += 1
            before, unread = unread, _explained(seen.unread)
            _show_pass(seen, {cell: stop for cell, stop in unread.items() if cell not in before}, form)
            if repair and seen.confirmed.lasting(REPAIRABLE, grace, seen.at_s):
                repaired: list[str] = []
                await _carry_out(audited(here, repair=True, grace_s=grace, done=repaired), repaired, form)
            if follow and (due := chosen(settings.audit, seen.confirmed.proven)):
                released: list[str] = []
                actor = f"audit of {decided_by(None)}"
                await _carry_out(_into(released, release_ended(here, due, actor=actor)), released, form)
            if passes >= 2 and not follow:
                if not seen.confirmed.found and not form.is_data:
                    out.print("nothing is wrong")
                return Exit.NO if seen.confirmed.found else _status(unread)
    return 0


def _show_pass(seen: AuditPass, unread: Mapping[str, Stop], form: Form) -> None:
    """unread: the cells that the pass before could read."""
    _show_unread(unread)
    for cell, fields in _as_json(unread).items() if form.is_data else ():
        print_data_line({"at": _now(), "state": "not_judged", "cell": cell, **fields}, form)
    for state, changed in (("found", seen.new), ("gone", seen.gone)):
        for one in changed:
            if form.is_data:
                _print_found(state, one, form)
            else:
                show_finding(state, one)


async def _carry_out(repair: Awaitable[object], done: Sequence[str], form: Form) -> None:
    """Carry a repair out and print the lines that it adds to `done`, also where it fails. A server that is unavailable
    is reported: the next pass tries again.
    """
    try:
        await repair
    except (Transient, Stop) as fault:
        _show_done(done, form)
        err.print(Text(printable(f"not repaired: {fault}")), soft_wrap=True)
        if form.is_data:
            code = explain(fault) or Stop(Exit.NO, "fault", str(fault))
            print_data_line({"at": _now(), "state": "not_repaired", "code": code.code, "reason": str(code)}, form)
    else:
        _show_done(done, form)


async def _into(done: list[str], repair: Awaitable[list[str]]) -> None:
    done += await repair


def _show_done(done: Sequence[str], form: Form) -> None:
    for line in done:
        if form.is_data:
            print_data_line({"at": _now(), "state": "repaired", "what": line}, form)
        else:
            out.print(Text(printable(f"{_now()} repaired: {line}")), soft_wrap=True)


def _print_found(state: str, one: AuditFinding, form: Form) -> None:
    fields = {"kind": one.kind.value, "subject": one.subject, "reason": one.reason, "repair": one.repair}
    print_data_line({"at": _now(), "state": state, **fields}, form)


def show_finding(state: str, one: AuditFinding) -> None:
    """Print a finding. state: found | gone."""
    proposed = f"; {one.repair}" if state == "found" else ""
    line = f"{_now()} {state}: {one.kind.value.replace('_', ' ')}: {one.subject}: {one.reason}{proposed}"
    out.print(Text(printable(line)), soft_wrap=True)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
