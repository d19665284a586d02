"""`berth db`: the schemas of the database, their revisions, and bringing them to this version's."""

from __future__ import annotations

from typing import Annotated

import asyncpg
import typer

from berth.backup.copying import connect
from berth.commands.common import EXIT_NO, EXIT_USAGE, AsJson, Stop, database_of, err, out, print_json, run, settings_of
from berth.render import render_rows
from berth.schemas import (
    BOOK,
    CELL_PREFIX,
    IRONIC_SYNC,
    SCHEDULER,
    SchemaRevision,
    SchemaState,
    assess,
    find_schemas,
    in_order,
    package_of,
)
from berth.site import Site
from bus.persistence.revision import Revisions

app = typer.Typer(no_args_is_help=True, help="The schemas of the database: revisions, check, upgrade.")

# The sentence for a user about a schema that this version cannot use as it is.
SENTENCES = {
    SchemaState.BEHIND: "is at revision {revision} and this berth needs {head}: berth db upgrade",
    SchemaState.NEWER: "was made by a newer berth (revision {revision}, for versions from {oldest} on; this one knows "
    "{head}): run that version",
    SchemaState.UNKNOWN: "has tables that this berth did not make (revision {revision}): name another database",
    SchemaState.ABSENT: "is not there: berth db upgrade, or the start of its worker, makes it",
}


@app.command()
def current(context: typer.Context, as_json: AsJson = False) -> None:
    """Show each schema: its revision, the oldest that runs there, the newest of this version, and how they stand."""

    async def body() -> None:
        _print(await _read(database_of(settings_of(context))), as_json)

    run(body)


@app.command()
def check(context: typer.Context, as_json: AsJson = False) -> None:
    """Print the reason for each schema that this version cannot use. Exit status 1 when there is one."""

    async def body() -> int:
        found = await _read(database_of(settings_of(context)))
        wrong = [each for each in found if each.state in SENTENCES]
        _print(found, as_json)
        for each in wrong:
            why = SENTENCES[each.state].format(
                revision=each.revision or "none", oldest=each.oldest or "none", head=each.head
            )
            err.print(f"schema {each.schema} {why}", markup=False, soft_wrap=True)
        return EXIT_NO if wrong else 0

    run(body)


@app.command()
def upgrade(
    context: typer.Context,
    schema: Annotated[list[str] | None, typer.Option("--schema", help="Only this one; may be given again.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make each schema of the settings, and bring it to the newest revision.

    Each worker does so for its own when it starts; this is for a user with more rights than a worker's, or for before.
    """

    async def body() -> None:
        site = database_of(settings_of(context))
        known = _expected(site)
        if strange := [name for name in schema or () if name not in known]:
            raise Stop(EXIT_USAGE, "schema.unknown", f"no schema {strange[0]}; the settings know {', '.join(known)}")
        for name in known:
            if not schema or name in schema:
                database = site.environment("upgrade").database(name, pool_size=1)
                try:
                    await database.open(package_of(name))
                finally:
                    await database.close()
        _print(await _read(site), as_json)

    run(body)


def _expected(site: Site) -> list[str]:
    """The schemas that the workers of the settings use."""
    return in_order([BOOK, SCHEDULER, IRONIC_SYNC, *(f"{CELL_PREFIX}{cell}" for cell in site.cells)])


async def _read(site: Site) -> list[SchemaRevision]:
    """All schemas that are there or should be. A schema of ironic-sync is needed only where it runs."""
    assert site.database_url is not None
    connection: asyncpg.Connection = await connect(site.database_url, name="berth db")
    try:
        found = {each.schema: each for each in await find_schemas(connection)}
    finally:
        await connection.close()
    for name in _expected(site):
        if name not in found and name != IRONIC_SYNC:
            found[name] = assess(name, Revisions(), is_empty=True)
    return [found[name] for name in in_order(list(found))]


def _print(found: list[SchemaRevision], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    rows = [[each.schema, each.revision, each.oldest, each.head, each.state] for each in found]
    render_rows(out, ["schema", "revision", "runs from", "newest", "is"], rows)
