"""`berth host list`, `services`, `workers`: what schedulers know of them, and decisions about them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import typer
from msgspec import Struct
from rich.text import Text

from berth.bus_client import BuildClient
from berth.cli.common import (
    QUERY_TIMEOUT_S,
    By,
    Exit,
    Reason,
    Stop,
    Timeout,
    Yes,
    ask_first,
    by_cell,
    check_cell,
    check_reason,
    client,
    decided_by,
    explain,
)
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
from berth.config.settings import Settings
from berth.fencing.fencer import MAX_HOSTS, Fencer
from berth.fencing.plugin import FencingFailed, load
from bus.clock import SystemClock
from bus.contracts.build import HostRecord
from bus.contracts.operations import (
    AdminState,
    DeleteHost,
    DeleteService,
    HostAdminState,
    HostDeleted,
    ServiceDeleted,
    SetAdminState,
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
    by: By = None
    timeout: Timeout = 30.0
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
    settings: Settings,
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
    async with client(settings) as berth:
        await check_cell(berth, settings, cell)

        async def read() -> ListedItems[HostRecord]:
            page = await berth.hosts(limit=limit, cell=cell, up=up, timeout_s=QUERY_TIMEOUT_S)
            return ListedItems(page.hosts, {"--limit": str(min(limit * 10, MAX_HOSTS))} if page.more else None)

        await print_list(read, HOSTS, listing)


async def show_host(
    settings: Settings,
    name: Annotated[str, typer.Argument(help="Name or UUID of a host.", metavar="HOST")],
    cell: InCell = None,
    form: As = Form.TABLE,
) -> None:
    """Show one host: its state, usage, zone, aggregates, and the operator's decision."""
    async with client(settings) as berth:
        await check_cell(berth, settings, cell)
        found = await named_host(berth, name, cell)
    if form.is_data:
        print_data(found, form)
    else:
        print_one(HOSTS, found)


async def disable(settings: Settings, names: Hosts, reason: Reason, *, decision: HostOptions) -> int:
    """Place nothing new on these hosts; their instances stay. In effect on every scheduler at once."""
    return await _decide(settings, names, AdminState.DISABLED, reason, decision)


async def maintenance(settings: Settings, names: Hosts, reason: Reason, *, decision: HostOptions) -> int:
    """Disable these hosts for forced requests, too, which pass the filters."""
    return await _decide(settings, names, AdminState.MAINTENANCE, reason, decision)


async def fence(
    settings: Settings,
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
        settings, names, AdminState.FENCED, reason, decision, force=force, switch_off=switch_off, ask=ask
    )


async def enable(settings: Settings, names: Hosts, reason: Reason = "", *, decision: HostOptions) -> int:
    """Use these hosts again.

    A fenced host is used once it has destroyed its stale machines; until then it stays fenced, and `berth fence list`
    shows how many machines are left. `berth fence cancel --force` does not wait for that.
    """
    return await _decide(settings, names, AdminState.ENABLED, reason, decision)


async def end_fences(
    settings: Settings, names: Sequence[str], reason: str, decision: FinalOptions, *, force: bool
) -> int:
    """Use fenced hosts again; force: without their cells' reports, after a prompt. Returns the exit status."""
    ask = "End the fence, without their cells' report, of" if force else ""
    return await _decide(settings, names, AdminState.ENABLED, reason, decision, force=force, ask=ask)


async def delete_hosts(settings: Settings, names: Hosts, reason: Reason, *, decision: FinalOptions) -> int:
    """Delete these decommissioned hosts: their providers leave placement, their decisions the record.

    Refused while something shows that a host may still exist: a compute service that is up reports it, instances are on
    record there, consumers have allocations on it, it is fenced, or it is being drained.
    """
    check_names("host", names, reason)
    await _ask_about_hosts(settings, "Delete for good", names, decision)

    def delete(berth: BuildClient, name: str) -> Awaitable[HostDeleted]:
        command = DeleteHost(host=name, reason=reason, by=decided_by(decision.by), cell=decision.cell)
        return berth.delete_host(command, timeout_s=decision.timeout)

    return finish("host", *await _delete_each(settings, names, decision, delete), show_deleted, decision.form)


async def delete_services(
    settings: Settings,
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
        async with client(settings) as berth:
            page = await berth.services(limit=MAX_HOSTS, cell=decision.cell, timeout_s=QUERY_TIMEOUT_S)
        places = {name: {one.cell for one in page.services if one.name == name} for name in names}
        _ask("Delete for good, with all machines that they may have had,", places, "service", decision)

    def delete(berth: BuildClient, name: str) -> Awaitable[ServiceDeleted]:
        command = DeleteService(service=name, reason=reason, by=decided_by(decision.by), cell=decision.cell)
        return berth.delete_service(command, timeout_s=decision.timeout)

    done = await _delete_each(settings, names, decision, delete)
    return finish("service", *done, show_deleted_service, decision.form)


def check_names(kind: str, names: Sequence[str], reason: str) -> None:
    """Raises BadParameter when there are too many names, or the reason is too long."""
    check_reason(reason)
    if len(names) > MAX_NAMED:
        raise typer.BadParameter(f"at most {MAX_NAMED} {kind}s", param_hint=kind.upper())


async def _ask_about_hosts(settings: Settings, verb: str, names: Sequence[str], decision: FinalOptions) -> None:
    """Raises Stop."""
    if decision.yes:
        return
    async with client(settings) as berth:
        page = await berth.hosts(limit=MAX_HOSTS, cell=decision.cell, timeout_s=QUERY_TIMEOUT_S)
    places = {name: {one.cell for one in page.hosts if name in (one.uuid, one.name)} for name in names}
    _ask(verb, places, "host", decision)


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
        except (Transient, BusError) as fault:
            refused.append((name, fault if isinstance(fault, Fault) else Transient(str(fault), code="bus.unavailable")))
            silent += 1
        except (RequestRefused, FencingFailed) as fault:
            refused.append((name, fault))
            silent = 0
        except asyncio.CancelledError:
            refused.append((name, Fault("interrupted: it may be done, or half done", code="command.interrupted")))
            silent = MAX_SILENT
    return done, refused


async def _delete_each(
    settings: Settings, names: Sequence[str], decision: HostOptions, delete: Callable[[BuildClient, str], Awaitable[T]]
) -> tuple[list[T], Refused]:
    async with client(settings) as berth:
        await check_cell(berth, settings, decision.cell)
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
    settings: Settings,
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
    if ask and isinstance(decision, FinalOptions):
        await _ask_about_hosts(settings, ask, names, decision)
    of: dict[str, Any] = {
        "state": state,
        "reason": reason,
        "by": decided_by(decision.by),
        "cell": decision.cell,
        "force": force,
    }
    commands = [SetAdminState(host=name, **of) for name in dict.fromkeys(names)]
    done = await _set_states(settings, commands, decision.timeout, switch_off=switch_off)
    return finish("host", *done, show_decision, decision.form)


def show_deleted(one: HostDeleted) -> None:
    """Print a host that is deleted, and the aggregates that named it."""
    what = "deleted" if one.removed else "nothing of it was on record"
    if one.removed and one.aggregates:
        what = f"{what}; removed from {', '.join(one.aggregates)}"
    print_line(f"{one.host}: {what}")


async def _set_states(
    settings: Settings, commands: Sequence[SetAdminState], timeout_s: float, *, switch_off: bool
) -> tuple[list[HostAdminState], list[tuple[str, Fault]]]:
    """(the states that were set, the hosts whose state was refused with the reason), one host after the other."""
    async with contextlib.AsyncExitStack() as stack:
        clock, fencer = SystemClock(), None
        plugin = load(settings.fencing, clock=clock) if switch_off else None
        berth = await stack.enter_async_context(client(settings))
        await check_cell(berth, settings, commands[0].cell)
        if plugin is not None:
            stack.push_async_callback(plugin.close)
            fencer = Fencer(berth, plugin, settings.fencing, clock=clock)
        by_name = {command.host: command for command in commands}

        async def decide(name: str) -> HostAdminState:
            command = by_name[name]
            if fencer is None:
                return await berth.set_admin_state(command, timeout_s=timeout_s)
            host = await named_host(berth, name, command.cell)
            return await fencer.fence(host, command.reason, by=command.by, force=command.force, cell=command.cell)

        return await _each(by_name, decide)


async def named_host(berth: BuildClient, name: str, cell: str | None) -> HostRecord:
    """The host of this name or UUID. Raises RequestRefused (`host.unknown`, `host.ambiguous`)."""
    page = await berth.hosts(limit=MAX_HOSTS, cell=cell, timeout_s=QUERY_TIMEOUT_S)
    found = [host for host in page.hosts if name == host.uuid]  # another host may call itself so
    found = found or [host for host in page.hosts if name == host.name]
    if not found and cell is not None:  # nothing may show its cell; then the operator states it with the UUID
        page = await berth.hosts(limit=MAX_HOSTS, timeout_s=QUERY_TIMEOUT_S)
        found = [host for host in page.hosts if name == host.uuid and host.cell is None]
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
