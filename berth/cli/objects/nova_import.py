"""`berth nova import`, `berth nova export`: a Nova cloud's definitions as objects, and objects as Nova's."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from berth.cli.common import (
    Exit,
    Stop,
)
from berth.cli.http import connected
from berth.cli.objects.objects import SECTIONS, file_of, read_file
from berth.cli.output import (
    As,
    Form,
    err,
    out,
    print_data,
)
from berth.cli.site.as_toml import as_toml
from berth.nova_objects.cloud import read_cloud
from berth.nova_objects.to_nova import Exported, exported
from berth.nova_objects.to_objects import Imported, imported
from berth.text import printable
from bus.clock import SystemClock
from bus.contracts.objects import MAX_CHANGES
from bus.openstack.login import KeystoneLogin
from nova_scheduler.cloud.api_config import NovaApiConfig
from nova_scheduler.cloud.rest import NovaRest

# The login's fields, by the variables that every client of OpenStack reads.
LOGIN = {
    "OS_AUTH_URL": "auth_url",
    "OS_USERNAME": "username",
    "OS_PASSWORD": "password",
    "OS_PROJECT_NAME": "project_name",
    "OS_USER_DOMAIN_NAME": "user_domain_name",
    "OS_PROJECT_DOMAIN_NAME": "project_domain_name",
    "OS_USER_DOMAIN_ID": "user_domain_id",
    "OS_PROJECT_DOMAIN_ID": "project_domain_id",
    "OS_APPLICATION_CREDENTIAL_ID": "application_credential_id",
    "OS_APPLICATION_CREDENTIAL_NAME": "application_credential_name",
    "OS_APPLICATION_CREDENTIAL_SECRET": "application_credential_secret",
}


def config_of(url: str, environment: Mapping[str, str], *, insecure: bool = False) -> NovaApiConfig:
    """A client's settings by the variables `OS_...`; `OS_TOKEN` is a token instead of a login."""
    given = {field: environment[name] for name, field in LOGIN.items() if environment.get(name)}
    return NovaApiConfig(
        url=url,
        keystone=KeystoneLogin(**given) if "OS_TOKEN" not in environment else KeystoneLogin(),
        token=environment.get("OS_TOKEN", ""),
        ca_file=environment.get("OS_CACERT", ""),
        verify_tls=not insecure,
    )


async def import_nova(
    url: Annotated[str, typer.Argument(help="Nova's endpoint, as http://controller:8774/v2.1.", metavar="URL")],
    output: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="Write the TOML to this file; default: print it.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only report what would be written.")] = False,
    with_hosts: Annotated[
        bool, typer.Option("--with-hosts", help="Name the hosts of aggregates; else they are those in Placement.")
    ] = False,
    project: Annotated[
        list[str] | None, typer.Option(help="A project whose quota is read as well; may be given several times.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Do not verify certificates.")] = False,
    form: As = Form.TABLE,
) -> int:
    """Print a Nova cloud's definitions for `berth apply`.

    Its flavors, aggregates, server groups and quotas, as TOML. Credentials are those of the variables OS_... (or
    OS_TOKEN), of a user that may list these of all projects. What cannot be imported is named on standard error, and
    the exit status is then 1. Nothing is changed in Nova or here.
    """
    config = config_of(url, os.environ, insecure=insecure)
    nova = NovaRest(config, clock=SystemClock(), setting="import-nova")
    try:
        cloud = await read_cloud(nova, os.environ.get("OS_AUTH_URL", ""), project or ())
    finally:
        await nova.close()
    found = imported(cloud, with_hosts=with_hosts)
    parts = parts_of(found)
    if not dry_run and output is not None:
        _write_parts(output, parts)
    if form.is_data:
        print_data({**_report(found), "objects": {} if dry_run else tree_of(found)}, form)
    elif not dry_run and output is None:
        out.print("\n".join(as_toml(part) for part in parts), end="", markup=False, soft_wrap=True)
    if not form.is_data:
        _print_report(found)
    return Exit.NO if found.excluded else 0


def tree_of(found: Imported) -> dict[str, Any]:
    """The objects as a file for `berth apply` has them."""
    return file_of([(kind, name, body) for kind, bodies in found.objects.items() for name, body in bodies.items()])


def parts_of(found: Imported) -> list[dict[str, Any]]:
    """The same in files of no more objects than one change may have."""
    every = [(kind, name, body) for kind, bodies in found.objects.items() for name, body in bodies.items()]
    return [file_of(every[at : at + MAX_CHANGES]) for at in range(0, max(len(every), 1), MAX_CHANGES)]


def names_of(output: Path, count: int) -> list[Path]:
    """The file, or one for each part: `nova.toml`, `nova-2.toml`, ..."""
    return [output if at == 1 else output.with_stem(f"{output.stem}-{at}") for at in range(1, count + 1)]


def _write_parts(output: Path, parts: Sequence[dict[str, Any]]) -> None:
    *names, more = names_of(output, len(parts) + 1)
    if more.exists():  # it would be applied with these
        raise Stop(Exit.USAGE, "import.file", f"{more} is there, a part of an earlier import: nothing is written")
    for name, part in zip(names, parts, strict=True):
        _write(name, as_toml(part))


def _write(name: Path, text: str) -> None:
    try:
        name.write_text(text)
    except OSError as error:
        raise Stop(Exit.USAGE, "import.file", f"cannot write {name}: {error.strerror or error}") from error


def _report(found: Imported | Exported) -> dict[str, Any]:
    counts = {}
    if isinstance(found, Imported):
        counts = {section: len(found.objects.get(kind, {})) for section, kind in SECTIONS.items()}
    return {
        "taken": {name: count for name, count in counts.items() if count},
        "excluded": found.excluded,
        "notes": found.notes,
    }


def _print_report(found: Imported | Exported) -> None:
    report = _report(found)
    for note in found.notes:
        err.print(printable(f"note: {note}"), markup=False, soft_wrap=True)
    for one in found.excluded:
        err.print(
            printable(f"excluded: {one.kind} {one.name}: {one.reason} ({one.code})"), markup=False, soft_wrap=True
        )
    imports = ", ".join(f"{count} {name}" for name, count in report["taken"].items()) or "nothing"
    if isinstance(found, Imported):
        err.print(f"imported: {imports}; excluded: {len(found.excluded)}", markup=False, soft_wrap=True)


async def export_nova(
    context: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(help="TOML as `berth object export` prints it; default: the objects in force.")
    ] = None,
    form: As = Form.TABLE,
) -> int:
    """Print objects as commands of the `openstack` client.

    They define the same in Nova. What Nova does not have is named on standard error, and the exit status is then 1.
    Nothing is changed.
    """
    if file is not None:
        changes, _ = read_file(file)
        objects = [(one.kind, one.name, one.body or {}) for one in changes]
    else:
        async with connected(context) as berth:
            objects = [(one.kind, one.name, one.body) for one in (await berth.list_objects()).objects]
    found = exported(objects)
    if form.is_data:
        print_data({"commands": found.commands, "excluded": found.excluded, "notes": found.notes}, form)
        return Exit.NO if found.excluded else 0
    for command in found.commands:
        out.print(command, markup=False, soft_wrap=True)
    _print_report(found)
    return Exit.NO if found.excluded else 0
