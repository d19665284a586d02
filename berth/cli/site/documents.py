"""`berth permissions`, `asyncapi`: derived from the program and the settings, for others to use."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from berth.asyncapi import document
from berth.cli.common import (
    Exit,
    Stop,
)
from berth.cli.output import (
    As,
    Form,
    err,
    out,
    print_data,
    print_document,
)
from berth.config.settings import Settings
from berth.config.site import Site
from berth.database_rights import statements
from berth.permissions import OF_A_CELL, Grant, PermissionRole, as_plain, commands, definitions, exchanges, of_role
from berth.project_vhost import ending, host_definitions, limiting, making, virtual_host
from bus.contracts.base import reason_of

MAX_USERS_BYTES = 16 * 1024 * 1024


AsDefinitions = Annotated[bool, typer.Option("--definitions", help="As one file for `rabbitmqctl import_definitions`.")]
OfExchanges = Annotated[
    bool,
    typer.Option("--exchanges", help="The exchanges that they name instead, as such a file: for RabbitMQ 4 first."),
]
Users = Annotated[
    Path | None,
    typer.Option(help="What `rabbitmqctl -q list_users --formatter json` prints: each user has to be in it; - reads."),
]
OfDatabase = Annotated[
    bool, typer.Option("--database", help="The rights of each role in PostgreSQL instead, as SQL for psql.")
]


async def permissions(
    settings: Settings,
    role: Annotated[PermissionRole | None, typer.Option(help="Only this role's; default: each role's.")] = None,
    project: Annotated[list[str] | None, typer.Option(help="A project's virtual host; may be repeated.")] = None,
    cell: Annotated[str | None, typer.Option(help="Of conductor and compute: only this cell's.")] = None,
    user: Annotated[str | None, typer.Option(help="The user's name, for one role or project.")] = None,
    as_definitions: AsDefinitions = False,
    of_exchanges: OfExchanges = False,
    users: Users = None,
    of_database: OfDatabase = False,
    remove: Annotated[bool, typer.Option("--remove", help="The end of a project's virtual host.")] = False,
    form: As = Form.TABLE,
) -> None:
    """Print the rights that each user needs.

    Of RabbitMQ as rabbitmqctl commands, for the buses of the settings; of PostgreSQL as SQL. Nothing is changed: the
    administrator of the broker makes the users and runs the commands, or imports the definitions, and the database's
    administrator runs the SQL.
    """
    if of_database:
        if role or project or cell or user or users or as_definitions or of_exchanges or form.is_data:
            raise Stop(Exit.USAGE, "permissions.database", "--database prints all roles of the settings: alone")
        for line in statements(settings):
            out.print(line, markup=False, highlight=False, soft_wrap=True)
        return
    if project or remove:
        is_alone = not (role or cell or of_exchanges or users or (remove and (as_definitions or form.is_data)))
        vhosts = project or () if is_alone else ()
        _print_vhosts(settings, vhosts, user, remove=remove, as_json=as_definitions or form.is_data)
        return
    grants = _grants(settings, role, cell, user)
    if users is not None:
        _check_users(grants, users)
    _print_grants(grants, settings, as_definitions=as_definitions, of_exchanges=of_exchanges, form=form)


def _print_grants(
    grants: Sequence[Grant], settings: Settings, *, as_definitions: bool, of_exchanges: bool, form: Form
) -> None:
    if (as_definitions or of_exchanges) and len({one.broker for one in grants}) > 1:
        raise Stop(Exit.USAGE, "permissions.brokers", "these users are of several brokers: give --role, or --cell")
    if of_exchanges:
        print_document(exchanges(grants, settings))
    elif as_definitions:
        print_document(definitions(grants))
    elif form.is_data:
        print_data(as_plain(grants), form)
    else:
        for line in commands(grants):
            out.print(line, markup=False, soft_wrap=True)


def _print_vhosts(
    settings: Settings, projects: Sequence[str], user: str | None, *, remove: bool, as_json: bool
) -> None:
    """Print the virtual hosts of projects, or their ends. Raises Stop."""
    if not projects:
        message = "the virtual hosts of projects are printed alone: --project ID, by commands or --definitions"
        raise Stop(Exit.USAGE, "permissions.vhosts", message)
    if user is not None and len(projects) > 1:
        raise Stop(Exit.USAGE, "permissions.user", "--user is the name of one: give one --project")
    try:
        hosts = [virtual_host(one, settings, user=user) for one in projects]
    except ValueError as fault:
        raise Stop(Exit.USAGE, "project.invalid", str(fault)) from fault
    if as_json:
        print_document(host_definitions(hosts))
        for host in hosts:  # a definition of a user's limits would take its password away
            err.print(limiting(host), markup=False, soft_wrap=True)
        return
    for host in hosts:
        for line in ending(host, settings) if remove else making(host):
            out.print(line, markup=False, soft_wrap=True)


def _check_users(grants: Sequence[Grant], listed: Path) -> None:
    """Raise Stop when a user is missing: RabbitMQ would set others' permissions, and no topic permissions at all, which
    leaves every key open to them.
    """
    try:
        text = sys.stdin.buffer.read(MAX_USERS_BYTES) if str(listed) == "-" else listed.read_bytes()
        there = {one.user for one in msgspec.json.decode(text, type=list[_ListedUser])}
    except (OSError, msgspec.MsgspecError) as error:
        raise Stop(Exit.USAGE, "permissions.users", f"{listed} is no list of users: {reason_of(error)}") from error
    if missing := sorted({one.user for one in grants} - there):
        raise Stop(Exit.NO, "permissions.user_missing", f"the broker has no user {', '.join(missing)}: make them first")


class _ListedUser(msgspec.Struct):
    user: str


def _grants(settings: Settings, role: PermissionRole | None, cell: str | None, user: str | None) -> list[Grant]:
    """Those of one role, or of every role. Raises Stop and SettingsError."""
    if cell is not None:
        Site(settings).check_cell(cell)
    roles = [role] if role is not None else list(PermissionRole)
    if user is not None and len(roles) != 1:
        raise Stop(Exit.USAGE, "permissions.user", "--user is the name of one: give one --role or one --project")
    if user is not None and role in OF_A_CELL and cell is None and len(settings.cells) > 1:
        raise Stop(Exit.USAGE, "permissions.user", f"--user is one cell's {role}: give its --cell")
    grants: list[Grant] = []
    for one in roles:
        grants += of_role(one, settings, cell=cell, user=user)
    if role is PermissionRole.NOVA_SCHEDULER and not grants:
        raise Stop(Exit.USAGE, "nova.transport_url", "nova.transport_url is needed: where Nova's services meet")
    return grants


def asyncapi(
    public: Annotated[bool, typer.Option("--public", help="Only messages for programs that are not berth's.")] = False,
) -> None:
    """Print the bus as an AsyncAPI 3 document.

    Each message, its key, its fields and its answer. `berth serve web` serves it at /api/v1/asyncapi.json.
    """
    print_document(document(public=public))
