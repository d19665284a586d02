"""The extras of the distribution: what a command needs beyond the client, and which `pip install` brings it."""

from __future__ import annotations

import re
from importlib import metadata
from typing import NoReturn

import typer

from bus.distribution import DISTRIBUTION

EXTRAS = ("server", "embedded")
ABSENT = "command.extra_absent"
REQUIREMENT = re.compile(r"""([A-Za-z0-9._-]+)[^;]*;.*extra == ["'](\w+)["']""")


def absent_extra(fault: ModuleNotFoundError) -> str:
    """The extra that brings the module; "": none does, so its absence is a defect.

    An imported name is the distribution's, with underscores: so it is for all that the extras name.
    """
    module = (fault.name or "").partition(".")[0].lower()
    try:
        found = [REQUIREMENT.match(one) for one in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:  # a tree that was never installed
        return ""
    named = {(re.sub(r"[-.]", "_", one[1].lower()), one[2]) for one in found if one}
    return next((extra for extra in EXTRAS if (module, extra) in named), "")


def extra_message(extra: str) -> str:
    """What a user is told: a sentence with the command to type."""
    return f"this command needs more than the client: pip install '{DISTRIBUTION}[{extra}]'"


def add_absent(app: typer.Typer, name: str, fault: ModuleNotFoundError) -> None:
    """Add what stands for a command that cannot be imported: the help lists it, and with any arguments it raises the
    fault, which names the extra. Raises the fault at once where no extra brings the module.
    """
    extra = absent_extra(fault)
    if not extra:
        raise fault

    @app.command(
        name,
        short_help=f"(needs {DISTRIBUTION}[{extra}])",
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def stand_in() -> NoReturn:
        raise fault
