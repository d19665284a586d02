"""The output of `berth up` when it is up: for people one short block on standard output, for
programs one JSON object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from berth.rest_address import AtUp
from berth.settings import MEMORY, Settings
from berth.site import Site
from berth.trial.up_processes import ProcessCounts, RunningProcesses
from bus.service.settings import hide_password

NEXT = ("berth boot --flavor m1.small --count 50 --wait", "berth list", "berth hosts", "berth check")
END = "Ctrl-C drains and ends it."


def one_process(here: Site, computes: Sequence[str], ironic_url: str | None, rest: AtUp) -> dict[str, Any]:
    """All in this process."""
    settings = here.settings
    return {
        "up": True,
        "cells": here.cells,
        "computes": computes,
        "socket": str(settings.socket),
        "bus": hide_password(settings.bus.url),
        "durable": _durable(settings, one_process=True),
        **_servers(settings, here.database_url, ironic_url, rest),
    }


def as_processes(started: RunningProcesses, count: ProcessCounts, cpus: int, rest: AtUp) -> dict[str, Any]:
    """Each worker a process."""
    workers = started.processes.workers.values()
    settings = started.site.settings
    return {
        "up": True,
        "cells": started.site.cells,
        "cpus": cpus,
        "numbers": count,
        "workers": {one.name: {"pid": one.process.pid, "port": one.port, "log": str(one.log)} for one in workers},
        "logs": str(started.logs),
        "bus": hide_password(settings.bus.url),
        "durable": _durable(settings, one_process=False),
        **_servers(settings, started.site.database_url, started.ironic_url, rest),
    }


def _durable(settings: Settings, *, one_process: bool) -> str:
    """The parts that outlive the end of this process, however it ends, and those that do not."""
    kept = f"the book, builds and machines are kept below {settings.state}"
    if one_process and settings.bus.url == MEMORY:
        return f"{kept}; messages are not: those under way end with this process"
    return f"{kept}, messages in the broker"


def _servers(settings: Settings, database_url: str | None, ironic_url: str | None, rest: AtUp) -> dict[str, Any]:
    listen = settings.placement.rest.listen
    return {
        "database": hide_password(database_url or ""),
        "placement_api": f"http://{listen}" if listen else None,
        "placement_token": str(rest.token) if rest.token else None,
        "placement_taken": rest.taken or None,
        "ironic": ironic_url or None,
    }


def block(summary: Mapping[str, Any]) -> str:
    """For people: what runs, where it answers, what to type next."""
    workers: Mapping[str, Mapping[str, Any]] = summary.get("workers", {})
    runs = f"{len(workers)} processes for {summary['cpus']} CPUs" if workers else "one process"
    bus = (
        f"in this process; other terminals reach it at {summary['socket']}"
        if summary["bus"] == MEMORY
        else summary["bus"]
    )
    rows = [
        ("cells", ", ".join(summary["cells"])),
        ("computes", ", ".join(summary.get("computes", ()))),
        ("RabbitMQ" if summary["bus"] != MEMORY else "bus", bus),
        ("PostgreSQL", summary["database"]),
        ("durable", summary.get("durable", "")),
        ("pages", summary.get("pages") or ""),
        ("Placement", _placement(summary)),
        ("Ironic", f"{summary['ironic']} (simulated)" if summary["ironic"] else ""),
        ("/metrics", ", ".join(f"{name} {worker['port']}" for name, worker in workers.items())),
        ("logs", summary.get("logs", "")),
    ]
    return _lines(f"berth is up: {runs}", rows)


def _placement(summary: Mapping[str, Any]) -> str:
    if not summary["placement_api"]:
        return "no REST API; BERTH_PLACEMENT__REST__LISTEN=HOST:PORT serves one"
    taken = f" ({summary['placement_taken']} is taken)" if summary["placement_taken"] else ""
    token = f", for the token in {summary['placement_token']}" if summary["placement_token"] else ""
    return f"{summary['placement_api']}{taken}{token}"


def _lines(head: str, rows: Sequence[tuple[str, str]]) -> str:
    shown = [f"  {name:<11} {value}" for name, value in rows if value]
    return "\n".join(["", head, *shown, "", "Next, in another terminal:", *(f"  {one}" for one in NEXT), "", END, ""])
