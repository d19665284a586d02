"""The modules that a `berth` process imports only when it needs them, imported once in a process that others are forked
from.

Typer builds what turns arguments into values when a first command is run, a tenth of a second of processor.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import pkgutil

from berth.cli.main import COMMANDS, app, load

# The first worker of a schema migrates it; one that serves Placement's API has policies.
LATE = ("bus.persistence.migrations", "oslo_config.cfg", "oslo_policy.opts", "oslo_policy.policy")
PLUGINS = ("scheduler_worker.filters", "scheduler_worker.weighers")


def preload(*, workers: bool) -> None:
    """Import every command, and run one that only prints; and what workers import late."""
    for word, entry in COMMANDS.items():
        for verb in ("",) if isinstance(entry, str) else entry.verbs:
            load(word, verb)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        app(["host", "list", "--help"], prog_name="berth")
    if workers:
        found = [f"{name}.{one.name}" for name in PLUGINS for one in pkgutil.iter_modules([*_paths(name)])]
        for name in (*LATE, *found):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is shared with the children stays shared


def _paths(package: str) -> list[str]:
    return list(importlib.import_module(package).__path__)
