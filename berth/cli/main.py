"""The command line. Each command is a function in `berth.cli`, imported when it is called.

A worker is one of the commands, so imports of the others would slow the start of each worker.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from berth.cli.common import explain, print_stop
from berth.cli.extras import add_absent
from berth.cli.options import as_command

# The command's name: its module in `berth.cli`, and there the function, or the application of several commands.
COMMANDS = {
    "up": ("berth.cli.fleet.status", "up"),
    "run": ("berth.cli.site.run", "run_role"),
    "config": ("berth.cli.fleet.status", "config"),
    "boot": ("berth.cli.instance.instances", "boot"),
    "delete": ("berth.cli.instance.instances", "delete"),
    "show": ("berth.cli.instance.instances", "show"),
    "list": ("berth.cli.instance.instances", "list_builds"),
    "migrate": ("berth.cli.instance.actions", "migrate"),
    "resize": ("berth.cli.instance.actions", "resize"),
    "confirm": ("berth.cli.instance.actions", "confirm"),
    "revert": ("berth.cli.instance.actions", "revert"),
    "abort": ("berth.cli.instance.actions", "abort"),
    "evacuate": ("berth.cli.instance.actions", "evacuate"),
    "rebuild": ("berth.cli.instance.actions", "rebuild"),
    "rescue": ("berth.cli.instance.actions", "rescue"),
    "unrescue": ("berth.cli.instance.actions", "unrescue"),
    "shelve": ("berth.cli.instance.actions", "shelve"),
    "offload": ("berth.cli.instance.actions", "offload"),
    "unshelve": ("berth.cli.instance.actions", "unshelve"),
    "start": ("berth.cli.instance.actions", "start"),
    "stop": ("berth.cli.instance.actions", "stop"),
    "actions": ("berth.cli.instance.actions", "actions"),
    "hosts": ("berth.cli.fleet.hosts", "hosts"),
    "host-metrics": ("berth.cli.fleet.host_metrics", "host_metrics"),
    "fencer": ("berth.cli.site.serving", "fencer"),
    "services": ("berth.cli.fleet.hosts", "services"),
    "workers": ("berth.cli.fleet.hosts", "workers"),
    "drain": ("berth.cli.fleet.drains", "drain"),
    "drains": ("berth.cli.fleet.drains", "drains"),
    "check": ("berth.cli.claims.checks", "check"),
    "audit": ("berth.cli.claims.checks", "audit"),
    "web": ("berth.cli.site.serving", "web"),
    "permissions": ("berth.cli.site.documents", "permissions"),
    "asyncapi": ("berth.cli.site.documents", "asyncapi"),
    "flavors": ("berth.cli.objects.edits", "flavors"),
    "aggregates": ("berth.cli.objects.edits", "aggregates"),
    "quotas": ("berth.cli.objects.edits", "quotas"),
    "groups": ("berth.cli.objects.edits", "groups"),
    "rules": ("berth.cli.objects.edits", "rules"),
    "cells": ("berth.cli.fleet.cells", "cells"),
    "apply": ("berth.cli.objects.objects", "apply"),
    "objects": ("berth.cli.objects.objects", "objects"),
    "audit-log": ("berth.cli.objects.objects", "audit_log"),
    "import-nova": ("berth.cli.objects.nova_import", "import_nova"),
    "export-nova": ("berth.cli.objects.nova_import", "export_nova"),
    "backup": ("berth.cli.site.databases", "backup"),
    "restore": ("berth.cli.site.databases", "restore"),
    "db": ("berth.cli.site.databases", "db"),
    "bus": ("berth.cli.site.databases", "bus"),
    "dead-letters": ("berth.cli.site.dead_letters", "dead_letters"),
    "placement": ("berth.cli.claims.placement", "placement"),
    "nova": ("berth.cli.site.nova", "nova"),
    "explain": ("berth.cli.site.nova_explain", "explain"),
    "quarantine": ("berth.cli.claims.quarantine", "quarantine"),
    "breaker": ("berth.cli.claims.quarantine", "breaker"),
    "recovery": ("berth.cli.claims.recovery", "recovery"),
    "baremetal": ("berth.cli.fleet.baremetal", "baremetal"),
}
PLAIN: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,  # in a table of columns long defaults and examples are cut off
}


class Commands(TyperGroup):
    """The commands by name, each imported when it is looked up."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All names, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command; None when there is none of this name, and then all are there for one to be suggested."""
        for name in [cmd_name] if cmd_name in COMMANDS else COMMANDS:
            if name not in self.commands:
                self.commands[name] = load(name)
        return self.commands.get(cmd_name)


def load(name: str) -> Any:
    """Import a command of COMMANDS."""
    module, attribute = COMMANDS[name]
    alone = typer.Typer(**PLAIN)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as fault:
        add_absent(alone, name, fault)
    else:
        if isinstance(found, typer.Typer):
            alone.add_typer(found, name=name)
        else:
            alone.command(name)(as_command(found))
    return typer.main.get_group(alone).commands[name]


app = typer.Typer(
    name="berth",
    cls=Commands,
    no_args_is_help=True,
    help="Place machines onto hosts, in cells. Exit status: 0 fine, 1 the answer is no, 2 wrong use or settings, "
    "3 bus or database out of reach, 4 time ran out.",
    **{**PLAIN, "add_completion": True},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from berth.version import version  # noqa: PLC0415  (a worker is one of the commands, and starts without it)

        sys.stdout.write(f"berth {version()}\n")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", help="Settings file; else $BERTH_CONFIG, else ./berth.toml.")
    ] = None,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version, and the commit if it is known, and exit.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    del version
    context.obj = config


def main() -> None:
    """Entry point of the `berth` command."""
    try:
        app()
    except ModuleNotFoundError as fault:  # of an extra that is not installed; a defect is re-raised
        found = explain(fault)
        if found is None:
            raise
        print_stop(found)
        sys.exit(found.status)
