"""`berth zone`: the availability zones that host aggregates make."""

from __future__ import annotations

from typing import Annotated

import typer
from msgspec import Struct

from berth.cli.common import Exit, Stop
from berth.cli.http import connected
from berth.cli.output import As, Form, ListedItems, ListOutput, Table, print_data, print_list, print_one
from berth.client import ApiProblem, AsyncClient
from bus.contracts.build import MAX_HOSTS, HostRecord


class ZoneHosts(Struct, frozen=True, kw_only=True):
    """An availability zone: the aggregates that make it, and the hosts that a scheduler has in it."""

    name: str
    aggregates: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    up: int = 0


def _row(one: ZoneHosts) -> list[str | int]:
    return [one.name, len(one.hosts), one.up, " ".join(one.aggregates), " ".join(one.hosts)]


ZONES = Table("zone hosts up aggregates | names", _row)


async def list_zones(context: typer.Context, *, listing: ListOutput) -> None:
    """List availability zones, with their hosts and aggregates."""
    async with connected(context) as berth:

        async def read() -> ListedItems[ZoneHosts]:
            return ListedItems(await _zones(berth))

        await print_list(read, ZONES, listing)


async def show_zone(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The zone.", metavar="ZONE")],
    form: As = Form.TABLE,
) -> None:
    """Show one availability zone."""
    async with connected(context) as berth:
        found = next((one for one in await _zones(berth) if one.name == name), None)
    if found is None:
        raise Stop(Exit.NO, "zone.unknown", f"there is no availability zone {name!r}")
    if form.is_data:
        print_data(found, form)
    else:
        print_one(ZONES, found)


async def hosts_seen(berth: AsyncClient) -> tuple[HostRecord, ...]:
    """All hosts; none for a project, which sees its zones alone."""
    try:
        return await berth.list_hosts(limit=MAX_HOSTS)
    except ApiProblem as problem:
        if problem.code != "role.forbidden":
            raise
        return ()


async def _zones(berth: AsyncClient) -> list[ZoneHosts]:
    """By name. A host that is in no aggregate with a zone is in none of these."""
    hosts = await hosts_seen(berth)
    aggregates = {one.name: one.aggregates for one in await berth.list_zones()}
    found = {zone: [host for host in hosts if host.zone == zone] for zone in aggregates}
    return [
        ZoneHosts(
            name=zone,
            aggregates=tuple(sorted(aggregates[zone])),
            hosts=tuple(host.name for host in hosts),
            up=sum(host.up and host.enabled for host in hosts),
        )
        for zone, hosts in sorted(found.items())
    ]
