"""`berth man`: the manual page, made of the command line itself, in roff's man macros."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from berth.reference.commands import argument_of, leaves

STATUSES = (
    ("0", "fine"),
    ("1", "the answer is no: a build failed, an invariant is broken"),
    ("2", "wrong use or settings"),
    ("3", "bus or database out of reach"),
    ("4", "time ran out"),
    ("130", "interrupted"),
)
VARIABLES = (
    ("BERTH_CONFIG", "The settings file, when --config does not name one; else ./berth.toml."),
    ("BERTH_SECTION__NAME", "Any setting, as BERTH_BUS__URL; it goes before the file's."),
    ("BERTH_CLI_LOG", "The lowest level of the log lines that a command shows: debug, info, warning or error."),
)


def render() -> str:
    """The whole page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield f'.TH BERTH 1 "" "berth {_text(metadata.version("berth"))}" "User Commands"'
    yield from (".SH NAME", "berth \\- place machines, virtual and bare metal, onto hosts, in cells")
    yield from (".SH SYNOPSIS", ".B berth", "[\\-\\-config FILE] COMMAND [ARGUMENTS]")
    yield from (".SH DESCRIPTION",)
    yield _text(
        "berth is OpenStack's Placement, the Nova scheduler, the Cells v2 conductor and the Ironic-to-Placement path "
        "as one event-driven system on RabbitMQ and PostgreSQL. Its workers are commands, too: see berth run."
    )
    yield ".SH COMMANDS"
    for path, command in leaves():
        arguments = " ".join(argument_of(one) for one in command.params if one.param_type_name == "argument")
        yield ".TP"
        yield f'.B "{_text(path)}"' if not arguments else f'.BR "{_text(path)} " "{_text(arguments)}"'
        yield _text(command.help)
        for option in (one for one in command.params if one.param_type_name == "option" and one.name != "help"):
            yield ".RS"
            yield ".TP"
            yield ".B " + _text(", ".join((*option.opts, *option.secondary_opts)))
            yield _text(getattr(option, "help", "")) or "\\&"
            yield ".RE"
    yield ".SH EXIT STATUS"
    yield from _table(STATUSES)
    yield ".SH ENVIRONMENT"
    yield from _table(VARIABLES)


def _table(rows: tuple[tuple[str, str], ...]) -> Iterator[str]:
    for name, meaning in rows:
        yield from (".TP", f".B {_text(name)}", _text(meaning))


def _text(text: str | None) -> str:
    """One line of running text that roff takes as it is."""
    plain = " ".join((text or "").split()).replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq")
    return f"\\&{plain}" if plain.startswith((".", "'")) else plain
