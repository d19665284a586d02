"""`berth bus`: where each bus is, whose it is, and taking one over from a deployment that is gone."""

from __future__ import annotations

from typing import Annotated

import typer

from berth.commands.common import EXIT_NO, EXIT_USAGE, AsJson, Stop, open_in_time, out, print_json, run, settings_of
from berth.render import render_rows
from berth.settings import MEMORY
from berth.site import Site
from bus.bus import API
from bus.owner import DEPLOYMENT, OWNERS

app = typer.Typer(no_args_is_help=True, help="The address and owner of each bus; take one over.")

MARKS = (DEPLOYMENT, *OWNERS)

BusName = Annotated[str | None, typer.Option("--bus", help="`api`, or a cell's name; default: all.")]


@app.command()
def owner(context: typer.Context, bus: BusName = None, as_json: AsJson = False) -> None:
    """Show which deployment each bus belongs to: by role, the identity of the database whose workers entered it.

    It is in the table `identity` of the role's schema. `deployment` is the database that all roles above cells share.
    """

    async def body() -> None:
        site = Site(settings_of(context))
        found = [(name, await _owners(site, name)) for name in _buses(site, bus)]
        if as_json:
            print_json([{"bus": name, "owners": owners} for name, owners in found])
            return
        rows = [[name, role, owner] for name, owners in found for role, owner in owners.items()]
        render_rows(out, ["bus", "role", "database"], rows)

    run(body)


@app.command()
def url(
    context: typer.Context,
    bus: Annotated[str, typer.Option("--bus", help="`api`, or a cell's name.")] = API,
    as_json: AsJson = False,
) -> None:
    """Print a bus's AMQP URL, with its password: for a program of your own on this machine.

    It is that of the settings, or of the broker that a running `berth up --processes` has started.
    """

    async def body() -> None:
        site = Site(settings_of(context))
        (name,) = _buses(site, bus)
        found, prefix = site.place_of(name)
        if found == MEMORY:
            why = "it is in the memory of `berth up`: with `--processes` there is a broker"
            raise Stop(EXIT_NO, "bus.in_memory", f"bus {name!r} has no address: {why}")
        if as_json:
            print_json({"bus": name, "url": found, "prefix": prefix})
            return
        typer.echo(found)

    run(body)


@app.command()
def release(
    context: typer.Context,
    bus: Annotated[str, typer.Argument(help="`api`, or a cell's name.")],
    yes: Annotated[bool, typer.Option("--yes", help="No worker of its present owner runs any more.")] = False,
    as_json: AsJson = False,
) -> None:
    """Take a bus from the deployment that has it: the workers that start there next have it then.

    Stop all workers of its present owner first: two deployments on one bus take each other's messages.
    """
    if not yes:
        raise typer.BadParameter("confirm that no worker of its present owner runs any more", param_hint="--yes")

    async def body() -> None:
        site = Site(settings_of(context))
        (name,) = _buses(site, bus)
        released = await _owners(site, name, release=True)
        if not released:
            raise Stop(EXIT_NO, "bus.unowned", f"bus {name!r} belongs to no deployment")
        if as_json:
            print_json({"bus": name, "released": released})
            return
        render_rows(out, ["bus", "role", "was of database"], [[name, *row] for row in released.items()])

    run(body)


def _buses(site: Site, bus: str | None) -> tuple[str, ...]:
    if bus is None:
        return (API, *site.cells)
    if bus != API and bus not in site.cells:
        known = ", ".join((API, *site.cells))
        raise Stop(EXIT_USAGE, "bus.unknown", f"there is no bus {bus!r}; the settings know {known}")
    return (bus,)


async def _owners(site: Site, bus: str, *, release: bool = False) -> dict[str, str]:
    """{role: identity of its database} of one bus; release: and each mark is taken away."""
    transport = site.transport(bus, process="bus")
    await open_in_time(transport.open())
    try:
        owners = {role: owner for role in MARKS if (owner := await transport.owner_of(role))}
        for role in owners if release else ():
            await transport.unmark(role)
    finally:
        await transport.close()
    return owners
