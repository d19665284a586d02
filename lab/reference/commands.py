"""docs/reference/commands.md: every command with its arguments and options, read from the command line itself.

Typer carries its own copy of click, whose types are not public: commands and parameters are `Any` here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from berth.cli.main import app

HEAD = """\
# Commands

Derived from the command line by `scripts/nightly docs`; do not edit by hand. `berth COMMAND --help` prints the same.

| exit status | meaning |
| --- | --- |
| 0 | fine |
| 1 | the answer is no: a build failed, an invariant is broken |
| 2 | wrong use or settings |
| 3 | bus or database out of reach |
| 4 | time ran out |
| 130 | interrupted |

**Names.** An instance is named by its name, its UUID or the first four or more letters of that; `--project` looks in
one project. Where several are meant they are listed, and the exit status is 1. Hosts are named by name or UUID.

**Forms.** `-o` (`--output`) chooses the form: `table` (as wide as the terminal, 80 columns elsewhere; identifiers by
their first letters, ages), `wide` (all columns, nothing cut), `json`, `yaml`, `name` or `value` (a line each, for
scripts). As JSON and YAML a list is `{"items": [...], "next": OPTIONS}`, and times are RFC 3339. A list takes
`-c COLUMN`, `--sort COLUMN` or `-COLUMN`, `--filter COLUMN=PATTERN` or `COLUMN!=PATTERN`, and `--watch`. Where it ends
before all is listed it prints the command that goes on. A list that was read ends with 0.
"""


def render() -> str:
    """The whole page."""
    sections = [line for path, command in leaves() for line in _section(command, path)]
    return "\n".join([HEAD, *sections]).rstrip() + "\n"


# The commands that one types all day, and what each is short for.
SHORT = {f"berth {word}": f"berth instance {word}" for word in ("list", "show", "delete", "logs")}
SHORT["berth boot"] = "berth instance create"


def leaves() -> Iterator[tuple[str, Any]]:
    """Every command that does something, with how it is called (`berth bus list`), by name."""
    yield from _leaves(typer.main.get_command(app), "berth")


def _leaves(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "list_commands"):
        yield path, command
        return
    context = typer.Context(command)
    for name in sorted(command.list_commands(context)):
        yield from _leaves(command.get_command(context, name), f"{path} {name}")


def _section(command: Any, path: str) -> Iterator[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    usage = " ".join([path, *(["[OPTIONS]"] if options else []), *(argument_of(a) for a in arguments)])
    yield f"## `{path}`\n"
    if path in SHORT:
        yield f"Short for `{SHORT[path]}`.\n"
        return
    yield f"    {usage}\n"
    yield f"{_text(command.help)}\n"
    if options:
        yield "| option | | default |"
        yield "| --- | --- | --- |"
        yield from (_option(o) for o in options)
        yield ""


def argument_of(parameter: Any) -> str:
    """An argument as a usage line shows it: `NAME`, `[NAME]` when it may be left out, `NAME...` for several."""
    name = (parameter.metavar or parameter.name or "").strip("[]").upper().removesuffix("...")
    shown = name if parameter.required else f"[{name}]"
    return f"{shown}..." if parameter.nargs == -1 else shown


def _option(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    default = parameter.default
    plain = default is None or callable(default) or str(default) in ("", "()", "[]", "Sentinel.UNSET")
    shown = "" if plain else f"`{default}`"
    return f"| {names} | {_text(getattr(parameter, 'help', ''))} | {shown} |"


def _text(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|").replace("<", "&lt;")
