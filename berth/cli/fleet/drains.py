"""`berth host drain`, `berth drain`: hosts are emptied; a plan first shows where their instances would go."""

from __future__ import annotations

import asyncio
import random
import signal
from functools import partial
from typing import Annotated

import typer
from msgspec import Struct

from berth.cli.common import (
    MAX_LIMIT,
    Exit,
    Reason,
    Stop,
    Timeout,
    check_reason,
    further,
    is_uuid,
    one_of,
    parse_uuid,
)
from berth.cli.http import connected, may_pass
from berth.cli.output import (
    As,
    Cell,
    Form,
    Id,
    ListedItems,
    ListOutput,
    Table,
    Time,
    out,
    print_data,
    print_line,
    print_list,
)
from berth.client import ApiProblem, ApiTimeout, AsyncClient
from berth.client.types import DrainCommandBody, DrainKind, TargetBody
from berth.drain_follow import follow, is_stuck
from berth.text import counted, printable, render_rows, utc
from bus.clock import SystemClock, new_uuid
from bus.contracts.drains import (
    MAX_AT_ONCE,
    MAX_DEADLINE_S,
    DrainPlan,
    DrainProgress,
    DrainState,
    DrainTarget,
)
from bus.faults import Fault

DrainId = Annotated[str, typer.Argument(help="The drain's id, or its first letters.", metavar="DRAIN")]
Deadline = Annotated[
    float | None,
    typer.Option("--deadline", min=0.1, max=MAX_DEADLINE_S, help="Seconds, after which no further move starts."),
]


class DrainOptions(Struct, frozen=True, kw_only=True):
    """The options of a drain, whatever it is of."""

    plan: Annotated[
        bool,
        typer.Option("--plan", "--dry-run", help="Only print the destinations, and the instances that cannot move."),
    ] = False
    cold: Annotated[bool, typer.Option("--cold", help="Stop each instance for its move, instead of live.")] = False
    at_once: Annotated[int, typer.Option(min=1, max=MAX_AT_ONCE, help="Instances under way at a time.")] = 4
    rate: Annotated[
        int | None, typer.Option("--rate", min=1, max=10_000, help="Moves that start in a minute at most.")
    ] = None
    deadline: Deadline = None
    force: Annotated[bool, typer.Option("--force", help="Begin though the plan has instances that cannot move.")] = (
        False
    )
    detach: Annotated[bool, typer.Option("--detach", help="Print the drain's id, and do not follow it.")] = False
    drain_id: Annotated[
        str | None,
        typer.Option(
            "--id",
            parser=parse_uuid,
            metavar="UUID",
            help="The drain's id; one that is on record is followed, not begun again.",
        ),
    ] = None
    reason: Reason = "drain"
    timeout: Timeout = 3600.0
    form: As = Form.TABLE


InCell = Annotated[str | None, typer.Option("--cell", help="The cell in which the name is looked up.")]


async def drain_host(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name or UUID of a host.", metavar="HOST")],
    cell: InCell = None,
    *,
    options: DrainOptions,
) -> int:
    """Move every instance off a host.

    Schedulers carry it out: it goes on when this command ends. The hosts are disabled first, together.

    Ctrl-C stops the drain: it starts nothing more. Exit status 1 when no remaining instance can move, whether the drain
    goes on or has ended; 4 when it has ended, or the time is over, before the others have been moved.
    """
    return await drain(context, name, DrainTarget.HOST, cell, options=options)


async def drain_service(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of a compute service.", metavar="SERVICE")],
    cell: InCell = None,
    *,
    options: DrainOptions,
) -> int:
    """Move every instance off the hosts of a compute service, as `berth host drain` does off one."""
    return await drain(context, name, DrainTarget.SERVICE, cell, options=options)


async def drain_aggregate(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of a host aggregate.", metavar="AGGREGATE")],
    *,
    options: DrainOptions,
) -> int:
    """Move every instance off the hosts of an aggregate, as `berth host drain` does off one."""
    return await drain(context, name, DrainTarget.AGGREGATE, options=options)


async def drain_cell(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of a cell.", metavar="CELL")],
    *,
    options: DrainOptions,
) -> int:
    """Move every instance off the hosts of a cell, as `berth host drain` does off one."""
    return await drain(context, name, DrainTarget.CELL, options=options)


async def drain(
    context: typer.Context, name: str, target: DrainTarget, cell: str | None = None, *, options: DrainOptions
) -> int:
    """Drain a target of this kind, or plan it; returns the exit status."""
    check_reason(options.reason)
    kind: DrainKind = "migrate" if options.cold else "live-migrate"
    if options.plan:
        async with connected(context) as berth:
            planned = await berth.plan_target(name=name, target=target, cell=cell, kind=kind)
        _show_plan(planned, options.form)
        return Exit.NO if any(not one.hosts for one in planned.moves) else 0
    body = TargetBody(
        id=options.drain_id or new_uuid(random.SystemRandom()),
        name=name,
        target=target,
        cell=cell,
        kind=kind,
        at_once=options.at_once,
        per_minute=options.rate,
        deadline_s=options.deadline,
        force=options.force,
        reason=options.reason,
    )
    async with connected(context) as berth:
        begun = await berth.drain_target(body)
        if options.detach:
            _show(begun, options.form)
            return 0
        if not options.form.is_data:
            show_begun(begun)
        seen = await _follow(berth, begun.id, options.timeout, options.form)
    return _ended(seen, options.form)


async def list_drains(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="So many, the newest first.")] = 20,
    *,
    listing: ListOutput,
) -> None:
    """List drains, the newest first."""
    async with connected(context) as berth:

        async def read() -> ListedItems[DrainProgress]:
            found = await berth.list_drains(limit=limit)
            return ListedItems(found, further(found, limit))

        await print_list(read, DRAINS, listing)


async def show(context: typer.Context, drain_id: DrainId, form: As = Form.TABLE) -> int:
    """Show the progress of a drain, and what it has not moved. Exit status 1 when something cannot move."""
    async with connected(context) as berth:
        found = await berth.show_drain(await _drain_of(berth, drain_id))
    _show(found, form)
    return Exit.NO if found.failed else 0


async def _drain_of(berth: AsyncClient, text: str) -> str:
    """The id of a drain, by its first letters. Raises Stop."""
    if is_uuid(text):
        return parse_uuid(text)
    found = await berth.list_drains(limit=MAX_LIMIT)
    return one_of("drain", "drain.unknown", text, {one.id: one.host for one in found})


class ToDrain(Struct, frozen=True, kw_only=True):
    """The options of each command to a drain."""

    reason: Reason = ""
    form: As = Form.TABLE


async def pause(context: typer.Context, drain_id: DrainId, *, options: ToDrain) -> None:
    """Start no further move until it is resumed; moves in progress end by themselves."""
    check_reason(options.reason)
    async with connected(context) as berth:
        body = DrainCommandBody(reason=options.reason)
        _show(await berth.pause_drain(await _drain_of(berth, drain_id), body), options.form)


async def resume(context: typer.Context, drain_id: DrainId, deadline: Deadline = None, *, options: ToDrain) -> None:
    """Go on, also with one that has ended."""
    check_reason(options.reason)
    async with connected(context) as berth:
        body = DrainCommandBody(reason=options.reason, deadline_s=deadline)
        _show(await berth.resume_drain(await _drain_of(berth, drain_id), body), options.form)


async def cancel(context: typer.Context, drain_id: DrainId, *, options: ToDrain) -> None:
    """End it: begin nothing more. Its hosts stay disabled, and moved instances stay where they are."""
    check_reason(options.reason)
    async with connected(context) as berth:
        found = await berth.stop_drain(await _drain_of(berth, drain_id), reason=options.reason or None)
    _show(found, options.form)


async def _follow(berth: AsyncClient, ident: str, timeout_s: float, form: Form) -> DrainProgress:
    """Follow a drain to its end; SIGINT stops it."""
    loop, stopping = asyncio.get_running_loop(), set[asyncio.Task[DrainProgress]]()
    loop.add_signal_handler(
        signal.SIGINT, lambda: stopping.add(loop.create_task(berth.stop_drain(ident, reason="Ctrl-C")))
    )
    last: list[str] = []

    def look(seen: DrainProgress) -> None:
        line = _counted(seen)
        is_over = seen.state is DrainState.ENDED  # the caller shows all of that
        if not form.is_data and not is_over and last[-1:] != [line]:
            last.append(line)
            show_progress(seen)

    try:
        seen = await follow(partial(_read, berth, ident), clock=SystemClock(), timeout_s=timeout_s, on_progress=look)
        await asyncio.gather(*stopping)
        return seen
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def _read(berth: AsyncClient, ident: str) -> DrainProgress | None:
    """The drain; None: it is not on record. Raises RequestTimeout where nothing answers now, and Fault."""
    try:
        return await berth.show_drain(ident)
    except Fault as fault:
        if isinstance(fault, ApiProblem) and fault.code == "drain.unknown":
            return None
        if may_pass(fault):
            raise ApiTimeout(fault.reason, code=fault.code) from fault
        raise


def _ended(seen: DrainProgress, form: Form) -> int:
    _show(seen, form)
    stop = _left(seen)
    if stop is None:
        return Exit.NO if seen.failed else 0
    if form.is_data:
        return stop.status
    raise stop


def _left(seen: DrainProgress) -> Stop | None:
    """Why the command ends though instances may still move; None: none may."""
    if seen.state is not DrainState.ENDED:
        if is_stuck(seen):
            reason = f"{counted(len(seen.failed), 'instance')} cannot move now; the drain goes on: "
            return Stop(Exit.NO, "drain.left", f"{reason}see berth drain show {seen.id}")
        return Stop(Exit.TIME, "drain.under_way", f"it continues; see berth drain show {seen.id}")
    if left := len(seen.not_started) + len(seen.under_way):
        reason = f"{counted(left, 'instance')} not moved; see berth drain resume {seen.id}"
        return Stop(Exit.TIME, seen.code, reason)
    return None


def _counted(one: DrainProgress) -> str:
    counts = ", ".join(f"{count} {state}" for state, count in one.counts.items()) or "nothing to move"
    return f"{one.state}: {counts}"


def _row(one: DrainProgress) -> list[Cell]:
    state = f"{one.state} ({one.code})" if one.code else one.state.value
    counts = ", ".join(f"{count} {name}" for name, count in one.counts.items())
    of = printable(f"{one.target} {one.host}")
    return [Id(one.id), of, state, counts, one.hosts, Time(one.started_at), one.by, one.reason]


DRAINS = Table("drain of state instances hosts begun by | reason", _row)


def _show(one: DrainProgress, form: Form) -> None:
    if form.is_data:
        print_data(one, form)
    else:
        show_drain(one)


def show_begun(begun: DrainProgress) -> None:
    """Print the extent of a drain that has begun."""
    what = f"{counted(begun.planned, 'instance')} on {counted(begun.hosts, 'host')}"
    print_line(f"drain {begun.id}: {what}")


def show_progress(seen: DrainProgress) -> None:
    """Print how many of its instances are in each state."""
    print_line(_counted(seen))


def show_drain(one: DrainProgress) -> None:
    """Print a drain with the instances that it has not moved."""
    code = f" ({one.code})" if one.code else ""
    until = "" if one.deadline_at is None else f", until {utc(one.deadline_at)} UTC"
    print_line(f"drain {one.id} of {one.target} {one.host}, by {one.by}: {one.reason}")
    print_line(f"{_counted(one)}{code}{until}")
    rows = [[fault.instance_uuid, fault.code, printable(fault.reason)] for fault in one.failed]
    rows += [[uuid, "", "waits"] for uuid in one.not_started]
    if rows:
        render_rows(out, ["remaining", "code", "reason"], rows)


def _show_plan(planned: DrainPlan, form: Form) -> None:
    if form.is_data:
        print_data(planned, form)
        return
    headers = ["instance", "on", "project", "flavor", "to, alternates", "cannot"]
    rows = [
        [one.instance_uuid, one.source, one.project_id, one.flavor, ", ".join(one.hosts), _cannot(one.code, one.reason)]
        for one in planned.moves
    ]
    render_rows(out, headers, rows)
    stuck = sum(not one.hosts for one in planned.moves)
    more = f" and more than these {len(rows)}" if planned.more else ""
    moves = counted(len(rows) - stuck, "move")
    print_line(f"{counted(planned.hosts, 'host')}: {moves}, {stuck} cannot be made{more}")


def _cannot(code: str, reason: str) -> str:
    return f"{code}: {reason}" if code else ""
