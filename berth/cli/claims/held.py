"""`berth claim`: what placement has allocated on a host, and to whom."""

from __future__ import annotations

from typing import Annotated

import typer
from msgspec import Struct

from berth.cli.common import Exit, InProject, Instance, Stop
from berth.cli.fleet.hosts import InCell, named_host
from berth.cli.http import check_cell, connected, instance_of
from berth.cli.output import As, Cell, Form, Id, ListedItems, ListOutput, Table, print_data, print_list, print_one
from berth.client import AsyncClient
from bus.contracts.placement_queries import TreeConsumer

MAX_CLAIMS = 10_000  # that are read of one host


class HeldClaim(Struct, frozen=True, kw_only=True):
    """The allocations of one consumer on a host."""

    consumer: str
    project_id: str
    consumer_type: str
    host: str
    attempt: int = 0
    amounts: dict[str, int] = {}


def _row(one: HeldClaim) -> list[Cell]:
    amounts = " ".join(f"{name} {amount}" for name, amount in sorted(one.amounts.items()))
    return [Id(one.consumer), one.project_id, one.consumer_type, amounts, one.host, one.attempt]


CLAIMS = Table("consumer project type amounts | host attempt", _row)


async def list_claims(
    context: typer.Context,
    host: Annotated[str, typer.Argument(help="Name or UUID of a host.", metavar="HOST")],
    cell: InCell = None,
    *,
    listing: ListOutput,
) -> None:
    """List what placement has allocated on a host: consumers, projects and amounts."""
    async with connected(context) as berth:
        await check_cell(berth, cell)
        found = await named_host(berth, host, cell)

        async def read() -> ListedItems[HeldClaim]:
            return ListedItems(await _claims(berth, found.uuid, found.name))

        await print_list(read, CLAIMS, listing)


async def show_claim(
    context: typer.Context, instance: Instance, project: InProject = None, form: As = Form.TABLE
) -> None:
    """Show what placement has allocated to an instance on the host that it has."""
    async with connected(context) as berth:
        record = await instance_of(berth, instance, project)
        if record.host is None:
            raise Stop(Exit.NO, "claim.none", f"instance {record.instance_uuid} has no host")
        host = await named_host(berth, record.host, record.cell)
        claims = await _claims(berth, host.uuid, host.name)
    held = next((one for one in claims if one.consumer == record.instance_uuid), None)
    if held is None:
        reason = f"placement has allocated nothing to instance {record.instance_uuid} on {host.name}"
        raise Stop(Exit.NO, "claim.none", reason)
    if form.is_data:
        print_data(held, form)
    else:
        print_one(CLAIMS, held)


async def _claims(berth: AsyncClient, provider: str, host: str) -> list[HeldClaim]:
    found: list[HeldClaim] = []
    after: str | None = None
    while len(found) < MAX_CLAIMS:
        page = await berth.list_claims(provider, after=after)
        found += [_claim(one, host) for one in page.claims]
        if page.next is None:
            break
        after = page.next
    return found


def _claim(one: TreeConsumer, host: str) -> HeldClaim:
    amounts: dict[str, int] = {}
    for of_provider in one.allocations.values():
        for name, amount in of_provider.items():
            amounts[name] = amounts.get(name, 0) + amount
    return HeldClaim(
        consumer=one.consumer,
        project_id=one.project_id,
        consumer_type=one.consumer_type,
        host=host,
        attempt=one.attempt,
        amounts=amounts,
    )
