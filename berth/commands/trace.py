"""`berth trace-settings`: a real cluster's files as settings, to replay its requests on hosts like its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from berth.commands.as_toml import as_toml
from berth.commands.common import EXIT_USAGE, Stop, err, out, run
from berth.load import PlanError
from berth.load.fleet import read_hosts, settings_like
from berth.load.trace import read_requests
from berth.settings import Settings

SECTIONS = ("cells", "up", "compute", "scheduler")


def trace_settings(
    hosts: Annotated[Path, typer.Argument(help="CSV of the hosts: cpu_milli, memory_mib, gpu, model.")],
    requests: Annotated[Path, typer.Argument(help="CSV of the requests, as for `berth load --trace`.")],
) -> None:
    """Print settings with a real cluster's hosts and flavors.

    For --config of `berth up` and `berth load --trace`.
    """

    async def body() -> None:
        try:
            known, requested = read_hosts(hosts), read_requests(requests)
            settings = settings_like(known, requested)
        except PlanError as fault:
            raise Stop(EXIT_USAGE, fault.code, str(fault)) from fault
        out.print(as_toml(differing(settings)), end="", markup=False, soft_wrap=True)
        err.print(
            f"{known.total():,} hosts of {len(known)} kinds, {len(requested):,} requests of "
            f"{len(settings.scheduler.flavors)} kinds",
            soft_wrap=True,
        )

    run(body)


def differing(settings: Settings) -> dict[str, object]:
    """The settings that are not default, as plain values."""
    usual, plain = msgspec.to_builtins(Settings()), msgspec.to_builtins(settings)
    found: dict[str, object] = {"cells": plain["cells"]}
    for section in SECTIONS[1:]:
        found[section] = {name: value for name, value in plain[section].items() if value != usual[section][name]}
    return found
