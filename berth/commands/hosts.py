"""`berth hosts`: the schedulers' records of hosts, and an operator's decisions about them."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Sequence
from typing import Annotated

import typer
from rich.text import Text

from berth.client import BuildClient
from berth.commands.common import (
    QUERY_TIMEOUT_S,
    AsJson,
    By,
    Timeout,
    check_cell,
    client,
    database_of,
    decided_by,
    out,
    print_json,
    run,
    settings_of,
)
from berth.commands.named import check_names, finish, forget_each
from berth.commands.safety import show_unexplained, unexplained
from berth.fencing.faults import FencingFailed
from berth.fencing.fencer import MAX_HOSTS, Fencer
from berth.fencing.plugin import load
from berth.render import printable, render_rows
from berth.settings import Settings
from bus.clock import SystemClock
from bus.contracts.build import HostRecord
from bus.contracts.operations import (
    AdminState,
    ForgetHost,
    HostAdminState,
    HostForgotten,
    SetAdminState,
)
from bus.faults import Fault, RequestRefused
from cell_conductor.domain.report import UnexplainedKind

app = typer.Typer(invoke_without_command=True)

NOT_ANNOUNCED = "not announced"  # the state of a host whose service is dead, or has not announced it yet

Hosts = Annotated[list[str], typer.Argument(help="Names or UUIDs of hosts.", metavar="HOST...")]
Reason = Annotated[str, typer.Option("--reason", help="Why, for those who look later.")]
CellOfName = Annotated[str | None, typer.Option("--cell", help="The cell in which a name is looked for.")]
FencedInCell = Annotated[
    str | None,
    typer.Option("--cell", help="The cell in which a name is looked for, or that of a UUID which none has announced."),
]
OnlyCell = Annotated[str | None, typer.Option(help="Only this cell's.")]
Up = Annotated[bool | None, typer.Option("--up/--down", help="Only hosts whose compute service is up, or is not.")]


@app.callback()
def hosts(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="So many, by name.")] = 100,
    cell: OnlyCell = None,
    up: Up = None,
    unknown: Annotated[
        bool, typer.Option("--unknown", help="Instead, the machines on hosts that no record explains.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List hosts as a scheduler sees them, or decide about them.

    Their state, the usage of each resource, and the operator's decision. A host that is `not announced` has been
    reported by no compute service since the scheduler that answers started.
    """
    if context.invoked_subcommand is not None:
        return

    async def body() -> None:
        settings = settings_of(context)
        if unknown:
            show_unexplained(await unexplained(database_of(settings), cell, tuple(UnexplainedKind)), as_json)
            return
        async with client(settings) as berth:
            await check_cell(berth, settings, cell)
            page = await berth.hosts(limit=limit, cell=cell, up=up, timeout_s=QUERY_TIMEOUT_S)
        if as_json:
            print_json(page.hosts)
            return
        show_hosts(page.hosts)

    run(body)


@app.command("disable")
def disable(
    context: typer.Context,
    names: Hosts,
    reason: Reason,
    cell: CellOfName = None,
    by: By = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Put nothing new onto these hosts; its instances stay. In effect on every scheduler at once."""
    _decide(context, names, AdminState.DISABLED, reason, cell=cell, by=by, timeout_s=timeout, as_json=as_json)


@app.command("maintenance")
def maintenance(
    context: typer.Context,
    names: Hosts,
    reason: Reason,
    cell: CellOfName = None,
    by: By = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Disable these hosts for forced requests, too, which pass the filters."""
    _decide(context, names, AdminState.MAINTENANCE, reason, cell=cell, by=by, timeout_s=timeout, as_json=as_json)


@app.command("fence")
def fence(
    context: typer.Context,
    names: Hosts,
    reason: Reason,
    force: Annotated[bool, typer.Option("--force", help="Also though its compute service is up.")] = False,
    switch_off: Annotated[
        bool, typer.Option("--switch-off", help="Switch them off first, by the plug-in that `fencing.plugin` names.")
    ] = False,
    cell: FencedInCell = None,
    by: By = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """State that these hosts are off and stay off: their instances may be evacuated.

    A decision made once, by a person. While a fenced host still runs, an evacuated instance runs twice: switch it off
    first, or let --switch-off do so; a host that is not proved to be off is not fenced then. A host whose compute
    service is up is refused without --force. Nothing is put onto a fenced host until it is enabled again. Leave it off
    until its cell has acknowledged the fence as well: `berth hosts` shows that.
    """
    _decide(
        context,
        names,
        AdminState.FENCED,
        reason,
        force=force,
        cell=cell,
        by=by,
        timeout_s=timeout,
        as_json=as_json,
        switch_off=switch_off,
    )


@app.command("enable")
def enable(
    context: typer.Context,
    names: Hosts,
    reason: Reason = "",
    force: Annotated[
        bool, typer.Option("--force", help="End a fence without its cell's report: the cell is gone for good.")
    ] = False,
    cell: CellOfName = None,
    by: By = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Use these hosts again.

    A fenced host is used once it has destroyed its losses; until then it stays fenced, and `berth hosts` shows
    how many machines are left. With --force and a reason it does not wait for that.
    """
    _decide(
        context, names, AdminState.ENABLED, reason, force=force, cell=cell, by=by, timeout_s=timeout, as_json=as_json
    )


@app.command("forget")
def forget(
    context: typer.Context,
    names: Hosts,
    reason: Reason,
    cell: CellOfName = None,
    by: By = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Forget these hosts, which are gone for good: their providers leave the book, their decisions the record.

    Refused while something shows that a host may not be gone: a compute service that is up reports it, instances are on
    record there, consumers hold something of it, it is fenced, or it is being drained.
    """

    def forget_one(berth: BuildClient, name: str, who: str) -> Awaitable[HostForgotten]:
        return berth.forget_host(ForgetHost(host=name, reason=reason, by=who, cell=cell), timeout_s=timeout)

    forget_each(
        context, "host", names, reason, cell=cell, by=by, as_json=as_json, forget=forget_one, show=show_forgotten
    )


def _decide(
    context: typer.Context,
    names: list[str],
    state: AdminState,
    reason: str,
    *,
    force: bool = False,
    cell: str | None,
    by: str | None,
    timeout_s: float,
    as_json: bool,
    switch_off: bool = False,
) -> None:
    check_names("host", names, reason)
    who = decided_by(by)

    async def body() -> int:
        settings = settings_of(context)
        commands = [
            SetAdminState(host=name, state=state, reason=reason, by=who, cell=cell, force=force)
            for name in dict.fromkeys(names)
        ]
        decided, refused = await _set_states(settings, commands, timeout_s, switch_off=switch_off)
        return finish("host", decided, refused, show_decision, as_json=as_json)

    run(body)


def show_forgotten(one: HostForgotten) -> None:
    """Print a host that is forgotten, and the aggregates that named it."""
    what = "forgotten" if one.removed else "nothing of it was on record"
    if one.removed and one.aggregates:
        what = f"{what}; taken out of {', '.join(one.aggregates)}"
    out.print(Text(printable(f"{one.host}: {what}")), soft_wrap=True)


async def _set_states(
    settings: Settings, commands: Sequence[SetAdminState], timeout_s: float, *, switch_off: bool
) -> tuple[list[HostAdminState], list[tuple[str, Fault]]]:
    """(the states that were set, the hosts whose state was refused with the reason), one host after the other."""
    decided: list[HostAdminState] = []
    refused: list[tuple[str, Fault]] = []
    async with contextlib.AsyncExitStack() as stack:
        clock, fencer = SystemClock(), None
        plugin = load(settings.fencing, clock=clock) if switch_off else None
        berth = await stack.enter_async_context(client(settings))
        await check_cell(berth, settings, commands[0].cell)
        if plugin is not None:
            stack.push_async_callback(plugin.close)
            fencer = Fencer(berth, plugin, settings.fencing, clock=clock)
        for command in commands:
            try:
                if fencer is not None:
                    host = await named_host(berth, command.host, command.cell)
                    forced, named = command.force, command.cell
                    decided.append(await fencer.fence(host, command.reason, by=command.by, force=forced, cell=named))
                else:
                    decided.append(await berth.set_admin_state(command, timeout_s=timeout_s))
            except (RequestRefused, FencingFailed) as fault:
                refused.append((command.host, fault))
    return decided, refused


async def named_host(berth: BuildClient, name: str, cell: str | None) -> HostRecord:
    """The host of this name or UUID. Raises RequestRefused (`host.unknown`, `host.ambiguous`)."""
    page = await berth.hosts(limit=MAX_HOSTS, cell=cell, timeout_s=QUERY_TIMEOUT_S)
    found = [host for host in page.hosts if name in (host.uuid, host.name)]
    if not found and cell is not None:  # nothing may show its cell; then the operator states it with the UUID
        page = await berth.hosts(limit=MAX_HOSTS, timeout_s=QUERY_TIMEOUT_S)
        found = [host for host in page.hosts if name == host.uuid and host.cell is None]
    if len(found) > 1:
        raise RequestRefused(f"{len(found)} hosts are called {name}: name a UUID", code="host.ambiguous")
    if not found:
        raise RequestRefused(f"there is no host {name}", code="host.unknown")
    return found[0]


def show_hosts(hosts: Sequence[HostRecord]) -> None:
    """Print hosts, a line each."""
    headers = ["host", "cell", "service", "state", "failed builds", "used / capacity", "decided"]
    render_rows(out, headers, [_host_row(host) for host in hosts])
    if not all(host.announced for host in hosts):
        out.print(f"{NOT_ANNOUNCED}: by no compute service since this scheduler started", soft_wrap=True)


def show_decision(one: HostAdminState) -> None:
    """Print what was decided about a host, and how long a fenced one has to stay off."""
    out.print(Text(printable(f"{one.host}: {_decided_state(one)}, by {one.by}")), soft_wrap=True)
    if one.state is AdminState.FENCED and one.pending is None and not one.is_fence_acknowledged:
        out.print("  leave it off until `berth hosts` shows that its cell has acknowledged the fence", soft_wrap=True)


def _decided_state(one: HostAdminState) -> str:
    if one.state is not AdminState.FENCED:
        return one.state.value
    if one.pending is not None:
        return f"fenced, then {one.pending.value} ({one.losses} to destroy)"
    return "fenced" if one.is_fence_acknowledged else "fenced, not acknowledged by its cell yet"


def _host_row(host: HostRecord) -> list[str | Text]:
    state = Text("up", "green") if host.up and host.enabled else Text("disabled" if host.up else _down(host), "red")
    admin, decided = host.admin, ""
    if admin is not None and admin.state is not AdminState.ENABLED:
        decision = _decided_state(admin)
        state = Text(decision, "yellow") if host.up else Text(f"{_down(host)}, {decision}", "red")
        decided = f"{admin.by}: {admin.reason}" if admin.reason else admin.by
    service = host.service or ""
    if host.contested_by is not None:
        service = f"{service} (refused: {host.contested_by})"
    used = "  ".join(f"{name} {u:g}/{c:g}" for name, (u, c) in sorted(host.resources.items()))
    return [host.name, host.cell or "", service, state, str(host.failed_builds or ""), used, decided]


def _down(host: HostRecord) -> str:
    """Right after a scheduler's start no host is announced, and few are down."""
    return "down" if host.announced else NOT_ANNOUNCED
