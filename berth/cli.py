"""The command line. Each command is a function in `berth.commands`."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from berth.commands import (
    builds,
    check,
    dead_letters,
    hosts,
    load,
    permissions,
    placement,
    processes,
    safety,
    trace,
    web,
)

app = typer.Typer(
    name="berth",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # in a table of columns long defaults and examples are cut off
    help="Place machines onto hosts, in cells. Exit status: 0 fine, 1 the answer is no, 2 wrong use or settings, "
    "3 bus or database out of reach, 4 time ran out.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"berth {metadata.version('berth')} (Python {platform.python_version()})\n")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", help="Settings file; else $BERTH_CONFIG, else ./berth.toml.")
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    del version
    context.obj = config


app.command("up")(processes.up)
app.command("run")(processes.run_role)
app.command("config")(processes.config)
app.command("boot")(builds.boot)
app.command("delete")(builds.delete)
app.command("show")(builds.show)
app.command("list")(builds.list_builds)
app.add_typer(hosts.app, name="hosts")
app.command("services")(hosts.services)
app.command("load")(load.load)
app.command("trace-settings")(trace.trace_settings)
app.command("check")(check.check)
app.command("web")(web.web)
app.command("permissions")(permissions.permissions)
app.add_typer(dead_letters.app, name="dead-letters")
app.add_typer(placement.app, name="placement")
app.add_typer(safety.quarantine, name="quarantine")
app.add_typer(safety.breaker, name="breaker")


def main() -> None:
    """Entry point of the `berth` command."""
    app()
