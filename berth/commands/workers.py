"""`berth workers`: every worker whose heartbeat a scheduler has received, and its activity."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.text import Text

from berth.commands.common import EXIT_NO, QUERY_TIMEOUT_S, AsJson, client, out, print_json, run, settings_of
from berth.render import render_rows
from bus.contracts.workers import WorkerRecord, WorkersPage, WorkersQuery


def workers(
    context: typer.Context,
    role: Annotated[str | None, typer.Option(help="Only of this role.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="So many, by role, bus and name.")] = 1000,
    as_json: AsJson = False,
) -> None:
    """List workers by their heartbeats. Exit status 1 when one is silent or not ready.

    A worker that ended on purpose is listed as silent for an hour.
    """

    async def body() -> int:
        async with client(settings_of(context)) as berth:
            query = WorkersQuery(role=role, limit=limit)
            page = await berth.bus.request(query, WorkersPage, timeout_s=QUERY_TIMEOUT_S)
        if as_json:
            print_json(page)
        else:
            headers = [
                "role",
                "worker",
                "bus",
                "host",
                "pid",
                "version",
                "since (UTC)",
                "last seen",
                "state",
                "in hand",
            ]
            render_rows(out, headers, [_row(one) for one in page.workers])
        return EXIT_NO if any(one.silent or one.heartbeat.not_ready for one in page.workers) else 0

    run(body)


def _row(one: WorkerRecord) -> list[str | Text]:
    beat = one.heartbeat
    state = Text(beat.phase, "green") if not beat.not_ready else Text("; ".join(beat.not_ready), "yellow")
    if one.silent:
        state = Text(f"silent, was {beat.phase}", "red")
    in_hand = ", ".join(f"{queue} {count}" for queue, count in sorted(beat.in_hand.items()) if count)
    since = datetime.fromtimestamp(beat.started_at, UTC).strftime("%Y-%m-%d %H:%M:%S")
    last_seen = f"{one.last_seen_s:.0f} s ago"
    return [beat.role, beat.worker, one.bus, beat.host, str(beat.pid), beat.version, since, last_seen, state, in_hand]
