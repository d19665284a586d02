"""`berth db`, `bus`, `backup` and `restore`: what lasts, and to whom it belongs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import asyncpg
import typer
from msgspec import Struct

from berth.backup.copying import connect, save
from berth.backup.manifest import Manifest, SchemaCopy, read_manifest
from berth.backup.restoring import restore as put_back
from berth.cli.common import (
    Exit,
    Stop,
    Yes,
    ask_first,
    database_of,
    make_directory,
    open_in_time,
)
from berth.cli.output import (
    As,
    Cell,
    Form,
    ListedItems,
    ListOutput,
    Table,
    err,
    out,
    print_data,
    print_list,
    print_one,
)
from berth.config.schemas import (
    CELL_PREFIX,
    IRONIC_SYNC,
    PLACEMENT,
    SCHEDULER,
    SchemaRevision,
    SchemaState,
    assess,
    find_schemas,
    in_order,
    package_of,
)
from berth.config.settings import EMBEDDED, MEMORY, Settings
from berth.config.site import Site
from berth.text import render_rows
from berth.up import in_one_process
from bus.bus import API
from bus.bus_ownership import OWNERS, SHARED_DATABASE
from bus.persistence.address import CONNECTION_LOST
from bus.persistence.database_faults import raise_fault
from bus.persistence.revision import Revisions

# The message for a user about a schema that this version cannot use as it is.
MESSAGES = {
    SchemaState.BEHIND: "is at revision {revision} and this berth needs {head}: berth db upgrade",
    SchemaState.NEWER: "was made by a newer berth (revision {revision}, for versions from {oldest} on; this one knows "
    "{head}): run that version",
    SchemaState.UNKNOWN: "has tables that this berth did not make (revision {revision}): name another database",
    SchemaState.ABSENT: "is not there: berth db upgrade, or the start of its worker, makes it",
}


def _schema_cells(one: SchemaRevision) -> list[Cell]:
    return [one.schema, one.revision or "", one.oldest or "", one.head, one.state]


SCHEMAS = Table("schema revision runs-from newest is", _schema_cells)


async def list_schemas(settings: Settings, *, listing: ListOutput) -> None:
    """List the schemas: the revision of each, the oldest that runs there, the newest of this version, and its state."""

    async def read() -> ListedItems[SchemaRevision]:
        return ListedItems(await _read(database_of(settings)))

    await print_list(read, SCHEMAS, listing)


async def show_schema(
    settings: Settings, name: Annotated[str, typer.Argument(help="The schema.")], form: As = Form.TABLE
) -> None:
    """Show one schema."""
    found = next((one for one in await _read(database_of(settings)) if one.schema == name), None)
    if found is None:
        raise Stop(Exit.NO, "schema.unknown", f"there is no schema {name}")
    if form.is_data:
        print_data(found, form)
    else:
        print_one(SCHEMAS, found)


async def check(settings: Settings, *, listing: ListOutput) -> int:
    """Print the reason for each schema that this version cannot use. Exit status 1 when there is one."""
    found = await _read(database_of(settings))
    wrong = [each for each in found if each.state in MESSAGES]
    await _print_schemas(found, listing)
    for each in wrong:
        message = MESSAGES[each.state].format(
            revision=each.revision or "none", oldest=each.oldest or "none", head=each.head
        )
        err.print(f"schema {each.schema} {message}", markup=False, soft_wrap=True)
    return Exit.NO if wrong else 0


async def upgrade(
    settings: Settings,
    schema: Annotated[list[str] | None, typer.Option("--schema", help="Only this one; may be given again.")] = None,
    *,
    listing: ListOutput,
) -> None:
    """Make each schema of the settings, and bring it to the newest revision.

    Each worker does so for its own when it starts; this is for a user with more rights than a worker's, or for before.
    """
    site = database_of(settings)
    known = _expected(site)
    if strange := [name for name in schema or () if name not in known]:
        raise Stop(Exit.USAGE, "schema.unknown", f"no schema {strange[0]}; the settings know {', '.join(known)}")
    for name in known:
        if not schema or name in schema:
            database = site.environment("upgrade").database(name, pool_size=1)
            try:
                await database.open(package_of(name))
            finally:
                await database.close()
    await _print_schemas(await _read(site), listing)


def _expected(site: Site) -> list[str]:
    """The schemas that the workers of the settings use."""
    return in_order([PLACEMENT, SCHEDULER, IRONIC_SYNC, *(f"{CELL_PREFIX}{cell}" for cell in site.cells)])


async def _read(site: Site) -> list[SchemaRevision]:
    """All schemas that are there or should be. A schema of ironic-sync is needed only where it runs."""
    assert site.database_url is not None
    connection: asyncpg.Connection = await connect(site.database_url, name="berth db")
    try:
        schemas = await find_schemas(connection)
    except CONNECTION_LOST as error:
        raise_fault(error, closed=connection.is_closed())
    finally:
        await connection.close()
    found = {each.schema: each for each in schemas if each.state is not SchemaState.ABSENT}
    for name in _expected(site):
        if name not in found and name != IRONIC_SYNC:
            found[name] = assess(name, Revisions(), is_empty=True)
    return [found[name] for name in in_order(list(found))]


async def _print_schemas(found: list[SchemaRevision], listing: ListOutput) -> None:
    async def read() -> ListedItems[SchemaRevision]:
        return ListedItems(found)

    await print_list(read, SCHEMAS, listing)


class BusOwners(Struct, frozen=True, kw_only=True):
    """A bus, and by role the identity of the database whose workers entered it."""

    bus: str
    owners: dict[str, str]


BUSES = Table[BusOwners](
    "bus owners", lambda one: [one.bus, ", ".join(f"{role} {owner}" for role, owner in one.owners.items())]
)


OWNER_NAMES = (SHARED_DATABASE, *OWNERS)

BusName = Annotated[str | None, typer.Option("--bus", help="`api`, or a cell's name; default: all.")]


async def list_buses(settings: Settings, bus_name: BusName = None, *, listing: ListOutput) -> None:
    """List which database each bus belongs to: by role, the identity of the database whose workers entered it.

    It is in the table `identity` of the role's schema. `shared_database` is the one that all roles above cells share.
    """
    site = Site(settings)

    async def read() -> ListedItems[BusOwners]:
        return ListedItems([BusOwners(bus=name, owners=await _owners(site, name)) for name in _buses(site, bus_name)])

    await print_list(read, BUSES, listing)


async def show_bus(
    settings: Settings,
    bus_name: Annotated[str, typer.Argument(help="`api`, or a cell's name.", metavar="BUS")],
    form: As = Form.TABLE,
) -> None:
    """Show which database one bus belongs to, by role."""
    site = Site(settings)
    (name,) = _buses(site, bus_name)
    found = BusOwners(bus=name, owners=await _owners(site, name))
    if form.is_data:
        print_data(found, form)
    else:
        render_rows(out, ["role", "database"], [*found.owners.items()])


async def url(
    settings: Settings,
    bus_name: Annotated[str, typer.Option("--bus", help="`api`, or a cell's name.")] = API,
    form: As = Form.TABLE,
) -> None:
    """Print a bus's AMQP URL, with its password: for a program of your own on this computer.

    It is that of the settings, or of the broker that a running `berth up --processes` has started.
    """
    site = Site(settings)
    (name,) = _buses(site, bus_name)
    found, prefix = site.place_of(name)
    if found == MEMORY:
        reason = "it is in the memory of `berth up`: with `--processes` there is a broker"
        raise Stop(Exit.NO, "bus.in_memory", f"bus {name!r} has no address: {reason}")
    if form.is_data:
        print_data({"bus": name, "url": found, "prefix": prefix}, form)
    else:
        typer.echo(found)


async def disown(
    settings: Settings,
    bus_name: Annotated[str, typer.Argument(help="`api`, or a cell's name.", metavar="BUS")],
    yes: Yes = False,
    form: As = Form.TABLE,
) -> None:
    """Remove the owner of a bus: the database whose workers start there next owns it.

    Stop all workers of its present owner first: two berths on one bus consume each other's messages.
    """
    site = Site(settings)
    (name,) = _buses(site, bus_name)
    ask_first(f"Disown bus {name}: no worker of its owner runs any more", yes=yes)
    disowned = await _owners(site, name, disown=True)
    if not disowned:
        raise Stop(Exit.NO, "bus.unowned", f"bus {name!r} belongs to no database")
    if form.is_data:
        print_data({"bus": name, "disowned": disowned}, form)
        return
    render_rows(out, ["bus", "role", "was of database"], [[name, *row] for row in disowned.items()])


def _buses(site: Site, bus: str | None) -> tuple[str, ...]:
    if bus is None:
        return (API, *site.cells)
    if bus != API and bus not in site.cells:
        known = ", ".join((API, *site.cells))
        raise Stop(Exit.USAGE, "bus.unknown", f"there is no bus {bus!r}; the settings know {known}")
    return (bus,)


async def _owners(site: Site, bus: str, *, disown: bool = False) -> dict[str, str]:
    """{role: identity of its database} of one bus; disown: and each is removed."""
    transport = site.transport(bus, process="bus")
    await open_in_time(transport.open())
    try:
        owners = {role: owner for role in OWNER_NAMES if (owner := await transport.owner_of(role))}
        for role in owners if disown else ():
            await transport.clear_owner(role)
    finally:
        await transport.close()
    return owners


Limit = Annotated[float, typer.Option("--timeout", min=1, max=86_400, help="Seconds that it may take at most.")]


async def backup(
    settings: Settings,
    directory: Annotated[Path, typer.Argument(help="Made by this command; it appears when the backup is whole.")],
    verify: Annotated[bool, typer.Option("--verify", help="Only check the backup that is there.")] = False,
    timeout_s: Limit = 3600.0,
    form: As = Form.TABLE,
) -> None:
    """Copy everything that lasts into a directory.

    As of one moment, while the workers run: all schemas (placement, builds and objects, each cell's instances,
    positions of ironic-sync), with a manifest and a checksum for each file. Cells with a database of their own: once
    with the settings of each, cells first.
    """
    if verify:
        _print_manifest(await asyncio.to_thread(read_manifest, directory), form)
        return
    here = database_of(settings)
    assert here.database_url is not None
    async with asyncio.timeout(timeout_s):
        _print_manifest(await save(here.database_url, directory), form)


async def restore(
    settings: Settings,
    directory: Annotated[Path, typer.Argument(help="A backup made by `berth backup`.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check backup and database; write nothing.")] = False,
    timeout_s: Limit = 3600.0,
    form: As = Form.TABLE,
) -> None:
    """Put a backup into an empty database.

    All of it or nothing. Refused: a file that was altered, a backup of a newer berth, a database that has something
    of berth. Stop all workers first.
    When they start they notice by themselves that their database was restored; see the guide "Back up and restore".
    """
    async with asyncio.timeout(timeout_s):
        if settings.database.url == EMBEDDED and Site(settings).database_url is None:
            make_directory(settings.state)
            async with in_one_process.database(settings, durable=True, directory=settings.state / "postgres") as url:
                manifest = await put_back(url, directory, dry_run=dry_run)
        else:
            url = database_of(settings).database_url or ""
            manifest = await put_back(url, directory, dry_run=dry_run)
    _print_manifest(manifest, form)
    if not dry_run and not form.is_data:
        out.print(
            "Start the workers, then list the differences from the machines: berth check, "
            "berth quarantine list --unknown, berth placement audit",
            soft_wrap=True,
        )


def _print_manifest(manifest: Manifest, form: Form) -> None:
    if form.is_data:
        print_data(manifest, form)
        return
    out.print(
        f"as of {manifest.at}, berth {manifest.berth}, PostgreSQL {manifest.server}", markup=False, soft_wrap=True
    )
    columns = ["schema", "revision", "tables", "rows", "bytes"]
    render_rows(out, columns, [_schema_row(one) for one in manifest.schemas])


def _schema_row(one: SchemaCopy) -> list[str]:
    rows, size = (sum(getattr(table, of) for table in one.tables) for of in ("rows", "bytes"))
    return [one.schema, one.revision, str(len(one.tables)), str(rows), str(size)]
