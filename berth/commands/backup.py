"""`berth backup` and `berth restore`: everything that lasts, out of its database and into an empty one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from berth.backup.copying import save
from berth.backup.manifest import Manifest, read_manifest
from berth.backup.restoring import restore as put_back
from berth.commands.common import AsJson, database_of, make_directory, out, print_json, run, settings_of
from berth.render import render_rows
from berth.settings import EMBEDDED
from berth.site import Site
from berth.trial import up

Limit = Annotated[float, typer.Option("--timeout", min=1, max=86_400, help="Seconds that it may take at most.")]


def backup(
    context: typer.Context,
    directory: Annotated[Path, typer.Argument(help="Made by this command; it appears when the backup is whole.")],
    verify: Annotated[bool, typer.Option("--verify", help="Only check the backup that is there.")] = False,
    timeout: Limit = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Copy everything that lasts into a directory.

    As of one moment, while the workers run: all schemas (the book, builds and objects, each cell's instances,
    positions of ironic-sync), with a manifest and a checksum for each file. Cells with a database of their own: once
    with the settings of each, cells first.
    """

    async def body() -> None:
        if verify:
            _print(await asyncio.to_thread(read_manifest, directory), as_json)
            return
        here = database_of(settings_of(context))
        assert here.database_url is not None
        async with asyncio.timeout(timeout):
            _print(await save(here.database_url, directory), as_json)

    run(body)


def restore(
    context: typer.Context,
    directory: Annotated[Path, typer.Argument(help="A backup made by `berth backup`.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check backup and database; write nothing.")] = False,
    timeout: Limit = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Put a backup into an empty database.

    All of it or nothing. Refused: a file that was altered, a backup of a newer berth, a database that holds something
    of berth. Stop all workers first.
    When they start they notice by themselves that their database was set back; see the guide "Back up and restore".
    """

    async def body() -> None:
        settings = settings_of(context)
        async with asyncio.timeout(timeout):
            if settings.database.url == EMBEDDED and Site(settings).database_url is None:
                make_directory(settings.state)
                async with up.database(settings, durable=True, directory=settings.state / "postgres") as url:
                    manifest = await put_back(url, directory, dry_run=dry_run)
            else:
                url = database_of(settings).database_url or ""
                manifest = await put_back(url, directory, dry_run=dry_run)
        _print(manifest, as_json)
        if not dry_run and not as_json:
            out.print(
                "Start the workers, then list the differences from the machines: berth check, berth hosts --unknown, "
                "berth quarantine list, berth placement audit",
                soft_wrap=True,
            )

    run(body)


def _print(manifest: Manifest, as_json: bool) -> None:
    if as_json:
        print_json(manifest)
        return
    out.print(
        f"as of {manifest.at}, berth {manifest.berth}, PostgreSQL {manifest.server}", markup=False, soft_wrap=True
    )
    rows = [
        [
            schema.schema,
            schema.revision,
            str(len(schema.tables)),
            str(sum(table.rows for table in schema.tables)),
            str(sum(table.bytes for table in schema.tables)),
        ]
        for schema in manifest.schemas
    ]
    render_rows(out, ["schema", "revision", "tables", "rows", "bytes"], rows)
