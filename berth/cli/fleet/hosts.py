"""`berth host list`, `services`, `workers`: what schedulers know of them, and decisions about them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Annotated, TypeVar

import typer
from msgspec import Struct
from rich.text import Text

from berth.cli.common import (
    QUERY_TIMEOUT_S,
    Exit,
    Reason,
    Stop,
    Yes,
    ask_first,
    by_cell,
    check_reason,
    client,
    decided_by,
    explain,
    further,
    settings_of,
)
from berth.cli.http import check_cell, connected, may_pass, other_site
from berth.cli.output import (
    As,
    Cell,
    Form,
    ListedItems,
    ListOutput,
    Table,
    gibibytes,
    mebibytes,
    out,
    print_data,
    print_line,
    print_list,
    print_one,
)
from berth.cli.session.contexts import NO_CONTEXT, ContextFault
from berth.client import AsyncClient
from berth.client.types import AdminStateRequest, RemovalBody
from bus.contracts.build import MAX_HOSTS, HostRecord
from bus.contracts.operations import (
    AdminState,
    HostAdminState,
    HostDeleted,
    ServiceDeleted,
)
from bus.faults import Fault, RequestRefused, Transient
from bus.transport import BusError

MAX_NAMED = 1000  # hosts or services of one command
MAX_SILENT = 2
NO_CELL = "no known cell"
NOT_REPORTED = "not reported"  # the state of a host whose service is dead, or has not reported it yet

T = TypeVar("T")
Refused = Sequence[tuple[str, Fault]]

Hosts = Annotated[list[str], typer.Argument(help="Names or UUIDs of hosts.", metavar="HOST...")]
InCell = Annotated[str | None, typer.Option("--cell", help="The cell in which the name is looked up.")]
OnlyCell = Annotated[str | None, typer.Option(help="Only this cell's.")]
CELL_OF_NAME = "The cell in which a name is looked up"


class HostOptions(Struct, frozen=True, kw_only=True):
    """The options of each decision about hosts or services."""

    cell: Annotated[str | None, typer.Option("--cell", help=f"{CELL_OF_NAME}.")] = None
    form: As = Form.TABLE


class FinalOptions(HostOptions, frozen=True, kw_only=True):
    """The options of a decision with a prompt."""

    yes: Yes = False


class FenceOptions(FinalOptions, frozen=True, kw_only=True):
    """The options of a fence."""

    cell: Annotated[
        str | None, typer.Option("--cell", help=f"{CELL_OF_NAME}, or that of a UUID which none has reported.")
    ] = None


async def list_hosts(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="At most this many hosts, the first by name.")] = 100,
    cell: OnlyCell = None,
    up: Annotated[
        bool | None, typer.Option("--up/--down", help="Only hosts whose compute service is up, or is not.")
    ] = None,
    *,
    listing: ListOutput,
) -> None:
    """List hosts as a scheduler sees them.

    Their state, the usage of each resource, and the operator's decision. A host that is `not reported` has been
    reported by no compute service since the scheduler that answers started.
    """
    async with connected(context) as berth:
        await check_cell(berth, cell)

        async def read() -> ListedItems[HostRecord]:
            found = await berth.list_hosts(limit=limit, cell=cell, up=up)
            return ListedItems(found, further(found, limit, MAX_HOSTS))

        await print_list(read, HOSTS, listing)


async def show_host(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name or UUID of a host.", metavar="HOST")],
    cell: InCell = None,
    form: As = Form.TABLE,
) -> None:
    """Show one host: its state, usage, zone, aggregates, and the operator's decision."""
    async with connected(context) as berth:
        await check_cell(berth, cell)
        found = await named_host(berth, name, cell)
    if form.is_data:
        print_data(found, form)
    else:
        print_one(HOSTS, found)


async def disable(context: typer.Context, names: Hosts, reason: Reason, *, decision: HostOptions) -> int:
    """Place nothing new on these hosts; their instances stay. In effect on every scheduler at once."""
    return await _decide(context, names, AdminState.DISABLED, reason, decision)


async def maintenance(context: typer.Context, names: Hosts, reason: Reason, *, decision: HostOptions) -> int:
    """Disable these hosts for forced requests, too, which pass the filters."""
    return await _decide(context, names, AdminState.MAINTENANCE, reason, decision)


async def fence(
    context: typer.Context,
    names: Hosts,
    reason: Reason,
    force: Annotated[bool, typer.Option("--force", help="Even if the compute service is up or unknown.")] = False,
    switch_off: Annotated[
        bool, typer.Option("--switch-off", help="Switch them off first, by the plug-in that `fencing.plugin` names.")
    ] = False,
    *,
    decision: FenceOptions,
) -> int:
    """State that these hosts are off and stay off: their instances may be evacuated.

    A decision made once, by a person. While a fenced host still runs, an evacuated instance runs twice: switch it off
    first, or let --switch-off do so; a host that is not proved to be off is not fenced then. A host whose compute
    service is up is refused without --force. Nothing is put onto a fenced host until it is enabled again. Leave it off
    until its cell has acknowledged the fence as well: `berth fence list` shows that.
    """
    ask = "Switch off and fence" if switch_off else "Fence"
    return await _decide(
        context, names, AdminState.FENCED, reason, decision, force=force, switch_off=switch_off, ask=ask
    )


async def enable(context: typer.Context, names: Hosts, reason: Reason = "", *, decision: HostOptions) -> int:
    """Use these hosts again.

    A fenced host is used once it has destroyed its stale machines; until then it stays fenced, and `berth fence list`
    shows how many machines are left. `berth fence cancel --force` does not wait for that.
    """
    return await _decide(context, names, AdminState.ENABLED, reason, decision)


async def end_fences(
    context: typer.Context, names: Sequence[str], reason: str, decision: FinalOptions, *, force: bool
) -> int:
    """Use fenced hosts again; force: without their cells' reports, after a prompt. Returns the exit status."""
    ask = "End the fence, without their cells' report, of" if force else ""
    return await _decide(context, names, AdminState.ENABLED, reason, decision, force=force, ask=ask)


async def delete_hosts(context: typer.Context, names: Hosts, reason: Reason, *, decision: FinalOptions) -> int:
    """Delete these decommissioned hosts: their providers leave placement, their decisions the record.

    Refused while something shows that a host may still exist: a compute service that is up reports it, instances are on
    record there, consumers have allocations on it, it is fenced, or it is being drained.
    """
    check_names("host", names, reason)
    await _ask_about_hosts(context, "Delete for good", names, decision)

    def delete(berth: AsyncClient, name: str) -> Awaitable[HostDeleted]:
        return berth.delete_host(name, RemovalBody(reason=reason, cell=decision.cell))

    return finish("host", *await _delete_each(context, names, decision, delete), show_deleted, decision.form)


async def delete_services(
    context: typer.Context,
    names: Annotated[list[str], typer.Argument(help="Names of compute services.", metavar="SERVICE...")],
    reason: Reason,
    *,
    decision: FinalOptions,
) -> int:
    """Delete these decommissioned compute services, with the machines that they may have had.

    Nothing waits for their answers any more: their cells drop their leases, and moves between cells that wait after
    a database was restored go on. Refused while a service is up, while placement has hosts of it, or while instances
    are on record there on hosts that are not fenced.
    """
    check_names("service", names, reason)
    if not decision.yes:
        async with connected(context) as berth:
            listed = await berth.list_services(limit=MAX_HOSTS, cell=decision.cell)
        places = {name: {one.cell for one in listed if one.name == name} for name in names}
        _ask("Delete for good, with all machines that they may have had,", places, "service", decision)

    def delete(berth: AsyncClient, name: str) -> Awaitable[ServiceDeleted]:
        return berth.delete_service(name, RemovalBody(reason=reason, cell=decision.cell))

    done = await _delete_each(context, names, decision, delete)
    return finish("service", *done, show_deleted_service, decision.form)


def check_names(kind: str, names: Sequence[str], reason: str) -> None:
    """Raises BadParameter when there are too many names, or the reason is too long."""
    check_reason(reason)
    if len(names) > MAX_NAMED:
        raise typer.BadParameter(f"at most {MAX_NAMED} {kind}s", param_hint=kind.upper())


async def _ask_about_hosts(context: typer.Context, verb: str, names: Sequence[str], decision: FinalOptions) -> None:
    """Raises Stop."""
    if decision.yes:
        return
    async with connected(context) as berth:
        listed = await berth.list_hosts(limit=MAX_HOSTS, cell=decision.cell)
    _ask(verb, _places(names, listed), "host", decision)


def _places(names: Iterable[str], hosts: Sequence[HostRecord]) -> dict[str, set[str | None]]:
    """The cells that have a host of each name or UUID."""
    return {name: {one.cell for one in hosts if name in (one.uuid, one.name)} for name in names}


def _ask(verb: str, places: Mapping[str, Collection[str | None]], what: str, decision: FinalOptions) -> None:
    """places: the cells that have each name. Raises Stop."""
    of_cells: dict[str, list[str]] = defaultdict(list)
    for name, cells in places.items():
        of_cells[" or ".join(sorted(cell or NO_CELL for cell in cells)) or NO_CELL].append(name)
    ask_first(f"{verb} {by_cell(of_cells, what)}", yes=decision.yes)


async def _each(names: Iterable[str], work: Callable[[str], Awaitable[T]]) -> tuple[list[T], list[tuple[str, Fault]]]:
    """(what is done, the names that are not with the reason), one after the other: what is done of one stays, whatever
    becomes of the next. Where nothing answers twice in a row, and after Ctrl-C, the others are not tried.
    """
    done: list[T] = []
    refused: list[tuple[str, Fault]] = []
    silent = 0
    for name in names:
        if silent >= MAX_SILENT:
            refused.append((name, Fault("not tried, because of the one before", code="command.not_commanded")))
            continue
        try:
            done.append(await work(name))
            silent = 0
        except BusError as fault:
            refused.append((name, Transient(str(fault), code="bus.unavailable")))
            silent += 1
        except Fault as fault:
            refused.append((name, fault))
            silent = silent + 1 if may_pass(fault) else 0
        except asyncio.CancelledError:
            refused.append((name, Fault("interrupted: it may be done, or half done", code="command.interrupted")))
            silent = MAX_SILENT
    return done, refused


async def _delete_each(
    context: typer.Context,
    names: Sequence[str],
    decision: HostOptions,
    delete: Callable[[AsyncClient, str], Awaitable[T]],
) -> tuple[list[T], Refused]:
    async with connected(context) as berth:
        await check_cell(berth, decision.cell)
        return await _each(dict.fromkeys(names), lambda name: delete(berth, name))


def finish(kind: str, done: Sequence[T], refused: Refused, show: Callable[[T], None], form: Form) -> int:
    """Print what was done and what was not, and return the exit status. Raises Stop when something was not."""
    stops = [explain(fault) or Stop(Exit.NO, fault.code, fault.reason) for _, fault in refused]
    if form.is_data:
        rows = [{kind: name, "code": fault.code, "reason": fault.reason} for name, fault in refused]
        print_data({f"{kind}s": done, "refused": rows}, form)
        return max((stop.status for stop in stops), default=0)
    for one in done:
        show(one)
    for (name, _), stop in zip(refused, stops, strict=True):
        print_line(f"{name}: {stop} ({stop.code})")
    if stops:
        status, tried = max(stop.status for stop in stops), len(done) + len(refused)
        raise Stop(status, stops[0].code, f"{len(refused)} of {tried} not done; {refused[0][0]}: {stops[0]}")
    return 0


async def _decide(
    context: typer.Context,
    names: Sequence[str],
    state: AdminState,
    reason: str,
    decision: HostOptions,
    *,
    force: bool = False,
    switch_off: bool = False,
    ask: str = "",
) -> int:
    """ask: the verb of the prompt that comes first."""
    check_names("host", names, reason)
    each_name = dict.fromkeys(names)
    if switch_off and isinstance(decision, FinalOptions):
        done = await _switch_off(context, ask, each_name, reason, decision, force=force)
        return finish("host", *done, show_decision, decision.form)
    if ask and isinstance(decision, FinalOptions):
        await _ask_about_hosts(context, ask, names, decision)
    body = AdminStateRequest(state=state, reason=reason, cell=decision.cell, force=force)
    async with connected(context) as berth:
        await check_cell(berth, decision.cell)
        done = await _each(each_name, lambda name: berth.decide_about_host(name, body))
    return finish("host", *done, show_decision, decision.form)


def show_deleted(one: HostDeleted) -> None:
    """Print a host that is deleted, and the aggregates that named it."""
    what = "deleted" if one.removed else "nothing of it was on record"
    if one.removed and one.aggregates:
        what = f"{what}; removed from {', '.join(one.aggregates)}"
    print_line(f"{one.host}: {what}")


async def _switch_off(
    context: typer.Context, ask: str, names: Collection[str], reason: str, decision: FinalOptions, *, force: bool
) -> tuple[list[HostAdminState], list[tuple[str, Fault]]]:
    """Switch hosts off by the plug-in and fence them, one after the other: by the settings in force, which have the
    credentials of what switches them off, and not by a token. Raises Stop, before anything is done, where the context
    in force is of another site.
    """
    from berth.fencing.fencer import Fencer  # noqa: PLC0415  (of a site's own machine)
    from berth.fencing.plugin import load  # noqa: PLC0415
    from bus.clock import SystemClock  # noqa: PLC0415

    settings, clock, by = settings_of(context), SystemClock(), decided_by(None)
    async with contextlib.AsyncExitStack() as stack:
        plugin = load(settings.fencing, clock=clock)
        assert plugin is not None
        stack.push_async_callback(plugin.close)
        berth = await stack.enter_async_context(client(settings))
        fencer = Fencer(berth, plugin, settings.fencing, clock=clock)
        listed = (await berth.hosts(limit=MAX_HOSTS, timeout_s=QUERY_TIMEOUT_S)).hosts
        await _check_site(context, [one for one in listed if one.uuid in names or one.name in names])
        within = [one for one in listed if decision.cell in (None, one.cell)]
        _ask(ask, _places(names, within), "host", decision)

        async def decide(name: str) -> HostAdminState:
            page = await berth.hosts(limit=MAX_HOSTS, timeout_s=QUERY_TIMEOUT_S)
            host = host_called(name, decision.cell, page.hosts)
            return await fencer.fence(host, reason, by=by, force=force, cell=decision.cell)

        return await _each(names, decide)


async def _check_site(context: typer.Context, hosts: Iterable[HostRecord]) -> None:
    """Raises Stop where the context in force, by which a person sees hosts, does not have these of the settings' site.

    Without any context (in an emergency, perhaps) the settings alone name a site.
    """
    try:
        async with connected(context) as berth:
            known = {one.uuid for one in await berth.list_hosts(limit=MAX_HOSTS)}
    except ContextFault as fault:
        if fault.code != NO_CONTEXT:
            raise
        return
    for one in hosts:
        if one.uuid not in known:
            raise other_site(f"host {one.name} ({one.uuid})")


async def named_host(berth: AsyncClient, name: str, cell: str | None) -> HostRecord:
    """The host of this name or UUID. Raises RequestRefused (`host.unknown`, `host.ambiguous`), Fault."""
    return host_called(name, cell, await berth.list_hosts(limit=MAX_HOSTS))


def host_called(name: str, cell: str | None, hosts: Sequence[HostRecord]) -> HostRecord:
    """The one of these hosts that has this name or UUID. Raises RequestRefused (`host.unknown`, `host.ambiguous`)."""
    within = [host for host in hosts if cell in (None, host.cell)]
    found = [host for host in within if name == host.uuid]  # another host may call itself so
    found = found or [host for host in within if name == host.name]
    # nothing may show its cell; then the operator states it with the UUID
    found = found or [host for host in hosts if name == host.uuid and host.cell is None]
    if len(found) > 1:
        raise RequestRefused(f"{len(found)} hosts are called {name}: name a UUID", code="host.ambiguous")
    if not found:
        raise RequestRefused(f"there is no host {name}", code="host.unknown")
    return found[0]


def show_decision(one: HostAdminState) -> None:
    """Print what was decided about a host, and how long a fenced one has to stay off."""
    print_line(f"{one.host}: {decided_state(one)}, by {one.by}")
    if one.state is AdminState.FENCED and one.pending is None and not one.is_fence_acknowledged:
        out.print("  leave it off until `berth fence list` shows that its cell has acknowledged it", soft_wrap=True)


def decided_state(one: HostAdminState) -> str:
    """An operator's decision about a host, and how far a fence has come."""
    if one.state is not AdminState.FENCED:
        return one.state.value
    if one.pending is not None:
        return f"fenced, then {one.pending.value} ({one.stale_machines} to destroy)"
    return "fenced" if one.is_fence_acknowledged else "fenced, not acknowledged by its cell yet"


def _host_row(host: HostRecord) -> list[Cell]:
    state = Text("up", "green") if host.up and host.enabled else Text("disabled" if host.up else _down(host), "red")
    admin, decided = host.admin, ""
    if admin is not None and admin.state is not AdminState.ENABLED:
        decision = decided_state(admin)
        state = Text(decision, "yellow") if host.up else Text(f"{_down(host)}, {decision}", "red")
        decided = f"{admin.by}: {admin.reason}" if admin.reason else admin.by
    if host.not_in_placement:
        state = Text("not in placement", "red")
        decided = "; ".join(filter(None, (decided, host.not_in_placement)))
    if host.claimed_also_by is not None:
        decided = "; ".join(filter(None, (decided, f"{host.claimed_also_by} is refused it")))
    others = " ".join(_amounts(host, name) for name in sorted(host.resources.keys() - SIZES.keys()))
    sizes = [_amounts(host, name) for name in SIZES]
    where: list[Cell] = [
        host.name,
        host.cell or "",
        state,
        *sizes,
        others,
        decided,
        host.zone or "",
        host.service or "",
    ]
    return [*where, host.failed_builds or "", " ".join(host.aggregates), host.uuid]


HOSTS = Table("host cell state vcpu memory disk others decided | zone service failed-builds aggregates uuid", _host_row)
SIZES: Mapping[str, Callable[[float], str]] = {"VCPU": "{:g}".format, "MEMORY_MB": mebibytes, "DISK_GB": gibibytes}


def _amounts(host: HostRecord, name: str) -> str:
    """How much of a class is used, of how much; a class without a column of its own with its name."""
    if name not in host.resources:
        return ""
    used, capacity = map(SIZES.get(name, "{:g}".format), host.resources[name])
    amounts = f"{used}/{capacity}"
    return amounts if name in SIZES else f"{name.removeprefix('CUSTOM_')} {amounts}"


def _down(host: HostRecord) -> str:
    """Right after a scheduler's start no host is reported, and few are down."""
    return "down" if host.reported else NOT_REPORTED


def show_deleted_service(one: ServiceDeleted) -> None:
    """Print a service that is deleted."""
    what = "deleted" if one.removed else "nothing of it was on record"
    print_line(f"{one.service} of {one.cell}: {what}")
