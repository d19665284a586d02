"""`berth drain` and `berth drains`: the instances of hosts move elsewhere, by a plan that is made before the start."""

from __future__ import annotations

import asyncio
import random
import signal
from datetime import UTC, datetime
from typing import Annotated

import typer
from msgspec import Struct
from rich.text import Text

from berth.client import BuildClient
from berth.client import drains as client_drains
from berth.commands.common import (
    EXIT_NO,
    EXIT_TIME,
    AsJson,
    By,
    Stop,
    Timeout,
    client,
    decided_by,
    out,
    parse_uuid,
    print_json,
    run,
    settings_of,
)
from berth.commands.options import with_options
from berth.render import counted, printable, render_rows
from berth.settings import Settings
from bus.clock import new_uuid
from bus.contracts.base import MAX_REASON
from bus.contracts.drains import (
    MAX_AT_ONCE,
    MAX_DEADLINE_S,
    DrainAction,
    DrainCommand,
    DrainMoveState,
    DrainPlan,
    DrainProgress,
    DrainQuery,
    DrainsQuery,
    DrainStart,
    DrainState,
    DrainTarget,
)
from bus.contracts.moves import MoveKind

drains = typer.Typer(invoke_without_command=True)

Id = Annotated[str, typer.Argument(help="The drain's id.", metavar="DRAIN")]
Reason = Annotated[str, typer.Option("--reason", help="Why, for those who look later.")]
Deadline = Annotated[
    float | None,
    typer.Option("--deadline", min=0.1, max=MAX_DEADLINE_S, help="Seconds, after which no further move begins."),
]


class DrainOptions(Struct, frozen=True, kw_only=True):
    """The options of `berth drain`."""

    target: Annotated[
        DrainTarget | None, typer.Option("--target", help="The kind of the target, if its name is ambiguous.")
    ] = None
    plan: Annotated[
        bool,
        typer.Option("--plan", "--dry-run", help="Only print the destinations, and the instances that cannot move."),
    ] = False
    cold: Annotated[bool, typer.Option("--cold", help="Stop each instance for its move, instead of live.")] = False
    at_once: Annotated[int, typer.Option(min=1, max=MAX_AT_ONCE, help="Instances under way at a time.")] = 4
    rate: Annotated[
        int | None, typer.Option("--rate", min=1, max=10_000, help="Moves that begin in a minute at most.")
    ] = None
    deadline: Deadline = None
    force: Annotated[bool, typer.Option("--force", help="Begin though the plan has instances that cannot move.")] = (
        False
    )
    detach: Annotated[bool, typer.Option("--detach", help="Print the drain's id, and do not follow it.")] = False
    drain_id: Annotated[
        str | None, typer.Option("--id", help="The drain's id; one that is on record is followed, not begun again.")
    ] = None
    reason: Reason = "drain"
    cell: Annotated[str | None, typer.Option("--cell", help="The cell in which a name is looked for.")] = None
    by: By = None
    timeout: Timeout = 3600.0
    as_json: AsJson = False

    @property
    def kind(self) -> MoveKind:
        """How each instance is moved."""
        return MoveKind.MIGRATE if self.cold else MoveKind.LIVE_MIGRATE


@with_options
def drain(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(help="Name or UUID of a host, a compute service, a cell or an aggregate.", metavar="TARGET")
    ],
    *,
    options: DrainOptions,
) -> None:
    """Move every instance off a host, service, cell or aggregate.

    Schedulers carry it out: it goes on when this command ends. The hosts are disabled first, together.

    Ctrl-C stops the drain: it begins nothing more. Exit status 1 when an instance could not move, 4 when not all have
    been moved.
    """
    start = _start_of(name, options)
    as_json = options.as_json
    if options.plan:
        query = DrainQuery(host=name, target=options.target, cell=options.cell, kind=options.kind)
        run(lambda: _plan(settings_of(context), query, as_json=as_json))
    timeout_s = options.timeout
    run(lambda: _drain(settings_of(context), start, detach=options.detach, timeout_s=timeout_s, as_json=as_json))


def _start_of(name: str, options: DrainOptions) -> DrainStart:
    """The begin of the drain. Raises typer.BadParameter."""
    _check(options.reason)
    return DrainStart(
        drain=_new_id() if options.drain_id is None else parse_uuid(options.drain_id),
        name=name,
        target=options.target,
        cell=options.cell,
        kind=options.kind,
        at_once=options.at_once,
        per_minute=options.rate,
        deadline_s=options.deadline,
        force=options.force,
        reason=options.reason,
        by=decided_by(options.by),
    )


async def _plan(settings: Settings, query: DrainQuery, *, as_json: bool) -> int:
    """Print the plan of a drain, and begin nothing; the exit status."""
    async with client(settings) as berth:
        planned = await client_drains.plan(berth.bus, query)
    _show_plan(planned, as_json)
    return EXIT_NO if any(not one.hosts for one in planned.moves) else 0


async def _drain(settings: Settings, command: DrainStart, *, detach: bool, timeout_s: float, as_json: bool) -> int:
    """Begin a drain, which schedulers plan once, and follow it; the exit status."""
    async with client(settings) as berth:
        begun = await client_drains.start(berth.bus, command)
        if detach:
            _show(begun, as_json)
            return 0
        if not as_json:
            show_begun(begun)
        stop = DrainCommand(drain=command.drain, action=DrainAction.STOP, by=command.by, reason="Ctrl-C")
        return _ended(await _follow(berth, command.drain, timeout_s, stop, as_json), as_json)


@drains.callback()
def list_drains(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="So many, the newest first.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List drains, the newest first, or command one."""
    if context.invoked_subcommand is not None:
        return

    async def body() -> None:
        async with client(settings_of(context)) as berth:
            found = await client_drains.drains(berth.bus, DrainsQuery(limit=limit))
        if as_json:
            print_json(found)
            return
        headers = ["drain", "of", "state", "instances", "hosts", "begun (UTC)", "by"]
        render_rows(out, headers, [_row(one) for one in found])

    run(body)


@drains.command("show")
def show(context: typer.Context, drain_id: Id, as_json: AsJson = False) -> None:
    """Show the progress of a drain, and what it has not moved. Exit status 1 when something could not move."""
    ident = parse_uuid(drain_id)

    async def body() -> int:
        async with client(settings_of(context)) as berth:
            found = await client_drains.drains(berth.bus, DrainsQuery(drain=ident))
        if not found:
            raise Stop(EXIT_NO, "drain.unknown", f"no drain {ident} is on record")
        _show(found[0], as_json)
        return EXIT_NO if found[0].failed else 0

    run(body)


@drains.command("pause")
def pause(context: typer.Context, drain_id: Id, reason: Reason = "", by: By = None, as_json: AsJson = False) -> None:
    """Begin no further move until it is resumed; moves under way end by themselves."""
    _command(context, drain_id, DrainAction.PAUSE, reason, by, as_json=as_json)


@drains.command("resume")
def resume(
    context: typer.Context,
    drain_id: Id,
    reason: Reason = "",
    deadline: Deadline = None,
    by: By = None,
    as_json: AsJson = False,
) -> None:
    """Go on, also with one that has ended: failed moves are tried again."""
    _command(context, drain_id, DrainAction.RESUME, reason, by, deadline_s=deadline, as_json=as_json)


@drains.command("stop")
def stop(context: typer.Context, drain_id: Id, reason: Reason = "", by: By = None, as_json: AsJson = False) -> None:
    """End it: begin nothing more. Its hosts stay disabled, and moved instances stay where they are."""
    _command(context, drain_id, DrainAction.STOP, reason, by, as_json=as_json)


@drains.command("undo")
def undo(
    context: typer.Context,
    drain_id: Id,
    reason: Reason = "",
    wait: Annotated[bool, typer.Option("--wait", help="Follow it to its end.")] = False,
    by: By = None,
    timeout: Timeout = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Move the moved instances back; again, try those that have stayed.

    The decisions about its hosts from before are restored at once.
    """
    follow_s = timeout if wait else None
    _command(context, drain_id, DrainAction.UNDO, reason, by, follow_s=follow_s, as_json=as_json)


def _command(
    context: typer.Context,
    drain_id: str,
    action: DrainAction,
    reason: str,
    by: str | None,
    *,
    deadline_s: float | None = None,
    follow_s: float | None = None,
    as_json: bool,
) -> None:
    ident, who = parse_uuid(drain_id), decided_by(by)
    _check(reason)

    async def body() -> int:
        command = DrainCommand(drain=ident, action=action, by=who, reason=reason, deadline_s=deadline_s)
        async with client(settings_of(context)) as berth:
            found = await client_drains.command(berth.bus, command)
            if follow_s is not None:
                pausing = DrainCommand(drain=ident, action=DrainAction.STOP, by=who, reason="Ctrl-C")
                return _ended(await _follow(berth, ident, follow_s, pausing, as_json), as_json)
        _show(found, as_json)
        return 0

    run(body)


async def _follow(
    berth: BuildClient, ident: str, timeout_s: float, on_interrupt: DrainCommand, as_json: bool
) -> DrainProgress:
    """Follow a drain to its end; SIGINT stops it."""
    loop, stopping = asyncio.get_running_loop(), set[asyncio.Task[DrainProgress]]()
    loop.add_signal_handler(
        signal.SIGINT, lambda: stopping.add(loop.create_task(client_drains.command(berth.bus, on_interrupt)))
    )
    last: list[str] = []

    def look(seen: DrainProgress) -> None:
        line = _counted(seen)
        is_over = seen.state is DrainState.ENDED  # the caller shows all of that
        if not as_json and not is_over and last[-1:] != [line]:
            last.append(line)
            show_progress(seen)

    try:
        seen = await client_drains.follow(berth.bus, ident, clock=berth.clock, timeout_s=timeout_s, on_progress=look)
        await asyncio.gather(*stopping)
        return seen
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _ended(seen: DrainProgress, as_json: bool) -> int:
    _show(seen, as_json)
    left = len(seen.not_begun) + len(seen.under_way)
    if seen.state is not DrainState.ENDED and not as_json:
        raise Stop(EXIT_TIME, "drain.under_way", f"it continues; see berth drains show {seen.id}")
    if left:
        if not as_json:
            verb = "undo" if DrainMoveState.TO_RETURN in seen.counts else "resume"  # an undo that was stopped
            reason = f"{counted(left, 'instance')} not moved; see berth drains {verb} {seen.id}"
            raise Stop(EXIT_TIME, seen.code, reason)
        return EXIT_TIME
    return EXIT_NO if seen.failed else 0


def _new_id() -> str:
    return new_uuid(random.SystemRandom())


def _check(reason: str) -> None:
    if len(reason) > MAX_REASON:
        raise typer.BadParameter(f"at most {MAX_REASON} characters", param_hint="--reason")


def _counted(one: DrainProgress) -> str:
    counts = ", ".join(f"{count} {state}" for state, count in one.counts.items()) or "nothing to move"
    return f"{one.state}: {counts}"


def _row(one: DrainProgress) -> list[str | Text]:
    state = f"{one.state} ({one.code})" if one.code else one.state.value
    counts = ", ".join(f"{count} {name}" for name, count in one.counts.items())
    return [one.id, printable(f"{one.target} {one.host}"), state, counts, str(one.hosts), _when(one.started_at), one.by]


def _when(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _show(one: DrainProgress, as_json: bool) -> None:
    if as_json:
        print_json(one)
    else:
        show_drain(one)


def show_begun(begun: DrainProgress) -> None:
    """Print the extent of a drain that has begun."""
    what = f"{counted(begun.planned, 'instance')} on {counted(begun.hosts, 'host')}"
    out.print(Text(f"drain {begun.id}: {what}"), soft_wrap=True)


def show_progress(seen: DrainProgress) -> None:
    """Print how many of its instances are in each state."""
    out.print(Text(_counted(seen)), soft_wrap=True)


def show_drain(one: DrainProgress) -> None:
    """Print a drain with the instances that it has not moved."""
    why = f" ({one.code})" if one.code else ""
    until = "" if one.deadline_at is None else f", until {_when(one.deadline_at)} UTC"
    out.print(Text(printable(f"drain {one.id} of {one.target} {one.host}, by {one.by}: {one.reason}")), soft_wrap=True)
    out.print(Text(f"{_counted(one)}{why}{until}"), soft_wrap=True)
    rows = [[fault.instance_uuid, fault.code, printable(fault.reason)] for fault in one.failed]
    rows += [[uuid, "", "not begun"] for uuid in one.not_begun]
    if rows:
        render_rows(out, ["left", "code", "why"], rows)


def _show_plan(planned: DrainPlan, as_json: bool) -> None:
    if as_json:
        print_json(planned)
        return
    rows = [
        [
            one.instance_uuid,
            one.source,
            one.project_id,
            one.flavor,
            ", ".join(one.hosts),
            f"{one.code}: {one.reason}" if one.code else "",
        ]
        for one in planned.moves
    ]
    render_rows(out, ["instance", "on", "project", "flavor", "to, alternates", "cannot"], rows)
    stuck = sum(not one.hosts for one in planned.moves)
    more = f" and more than these {len(rows)}" if planned.more else ""
    line = f"{counted(planned.hosts, 'host')}: {counted(len(rows) - stuck, 'move')}, {stuck} cannot be made{more}"
    out.print(Text(line), soft_wrap=True)
