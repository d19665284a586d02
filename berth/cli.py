"""The command line. Each command is a function in `berth.commands`, imported when it is called.

A worker is one of the commands, so imports of the others would slow the start of each worker.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from berth.commands.options import as_command

# The command's name: its module in `berth.commands`, and there the function, or the application of several commands.
COMMANDS = {
    "up": ("processes", "up"),
    "run": ("run", "run_role"),
    "config": ("processes", "config"),
    "boot": ("instances", "boot"),
    "delete": ("instances", "delete"),
    "show": ("instances", "show"),
    "list": ("instances", "list_builds"),
    "migrate": ("moves", "migrate"),
    "resize": ("moves", "resize"),
    "confirm": ("moves", "confirm"),
    "revert": ("moves", "revert"),
    "abort": ("moves", "abort"),
    "evacuate": ("moves", "evacuate"),
    "rebuild": ("moves", "rebuild"),
    "rescue": ("moves", "rescue"),
    "unrescue": ("moves", "unrescue"),
    "shelve": ("moves", "shelve"),
    "offload": ("moves", "offload"),
    "unshelve": ("moves", "unshelve"),
    "start": ("moves", "start"),
    "stop": ("moves", "stop"),
    "actions": ("moves", "actions"),
    "hosts": ("hosts", "hosts"),
    "host-metrics": ("host_metrics", "host_metrics"),
    "fencer": ("serving", "fencer"),
    "services": ("hosts", "services"),
    "workers": ("hosts", "workers"),
    "drain": ("drain", "drain"),
    "drains": ("drain", "drains"),
    "check": ("audits", "check"),
    "audit": ("audits", "audit"),
    "web": ("serving", "web"),
    "permissions": ("documents", "permissions"),
    "asyncapi": ("documents", "asyncapi"),
    "flavors": ("edits", "flavors"),
    "aggregates": ("edits", "aggregates"),
    "quotas": ("edits", "quotas"),
    "groups": ("edits", "groups"),
    "rules": ("edits", "rules"),
    "cells": ("cells", "cells"),
    "apply": ("objects", "apply"),
    "objects": ("objects", "objects"),
    "audit-log": ("objects", "audit_log"),
    "import-nova": ("import_nova", "import_nova"),
    "export-nova": ("import_nova", "export_nova"),
    "backup": ("databases", "backup"),
    "restore": ("databases", "restore"),
    "db": ("databases", "db"),
    "bus": ("databases", "bus"),
    "dead-letters": ("dead_letters", "dead_letters"),
    "placement": ("placement", "placement"),
    "nova": ("nova", "nova"),
    "explain": ("explain", "explain"),
    "quarantine": ("safety", "quarantine"),
    "breaker": ("safety", "breaker"),
    "recovery": ("recovery", "recovery"),
    "baremetal": ("baremetal", "baremetal"),
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
    found = getattr(importlib.import_module(f"berth.commands.{module}"), attribute)
    alone = typer.Typer(**PLAIN)
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
    app()
