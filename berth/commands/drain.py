"""`berth drain`: every instance of a host moves elsewhere, a few at a time, by a plan that is made before the start."""

from __future__ import annotations

import asyncio
import signal
from typing import Annotated

import typer
from rich.text import Text

from berth.client import BuildClient
from berth.client_moves import MoveClient
from berth.commands.common import (
    EXIT_NO,
    EXIT_TIME,
    AsJson,
    By,
    Stop,
    Timeout,
    client,
    decided_by,
    out,
    print_json,
    run,
    settings_of,
)
from berth.draining import MAX_AT_ONCE, Drain
from berth.render import printable, render_rows
from bus.contracts.moves import DrainPlan, DrainQuery, MoveKind, PlannedMove
from bus.contracts.operations import AdminState, SetAdminState

PLAN_TIMEOUT_S = 60.0


def drain(
    context: typer.Context,
    host: Annotated[str, typer.Argument(help="The host's name or UUID.")],
    plan: Annotated[bool, typer.Option("--plan", help="Only print what would go where, and what cannot.")] = False,
    cold: Annotated[bool, typer.Option("--cold", help="Stop each instance for its move, instead of live.")] = False,
    at_once: Annotated[int, typer.Option(min=1, max=MAX_AT_ONCE, help="Instances under way at a time.")] = 4,
    force: Annotated[
        bool, typer.Option("--force", help="Begin though the plan has instances that cannot move.")
    ] = False,
    reason: Annotated[str, typer.Option(help="Why, for those who look later.")] = "drain",
    cell: Annotated[str | None, typer.Option("--cell", help="The cell in which a name is looked for.")] = None,
    by: By = None,
    timeout: Timeout = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Move every instance away from a host.

    The host is disabled first; Ctrl-C begins nothing more.

    Run again, it goes on with what is left. Exit status 1 when an instance could not move, or is not begun.
    """
    kind = MoveKind.MIGRATE if cold else MoveKind.LIVE_MIGRATE
    who = decided_by(by)

    async def body() -> int:
        async with client(settings_of(context)) as berth:
            query = DrainQuery(host=host, cell=cell, kind=kind)
            planned = await berth.bus.request(query, DrainPlan, timeout_s=PLAN_TIMEOUT_S)
            stuck = [one for one in planned.moves if not one.hosts]
            if plan or (stuck and not force):
                _show_plan(planned, as_json)
                if stuck and not plan:
                    why = f"{len(stuck)} of {len(planned.moves)} instances cannot move; nothing was begun (see --force)"
                    raise Stop(EXIT_NO, "drain.stuck", why)
                return EXIT_NO if stuck else 0
            disabled = SetAdminState(host=planned.host_uuid, state=AdminState.DISABLED, reason=reason, by=who)
            await berth.set_admin_state(disabled, timeout_s=PLAN_TIMEOUT_S)
            show_end = (lambda *_: None) if as_json else _show_end
            drained = Drain(planned, kind, at_once=at_once, on_end=show_end)
            await _run(drained, berth, timeout)
        if as_json:
            failed = [{"instance_uuid": uuid, "code": code, "reason": reason} for uuid, code, reason in drained.failed]
            ends = {"moved": drained.moved, "failed": failed, "not_begun": drained.not_begun}
            print_json({"host": planned.host, "more": planned.more, **ends})
        else:
            left = len(drained.failed) + len(drained.not_begun)
            out.print(Text(f"{planned.host}: {len(drained.moved)} moved, {left} left"), soft_wrap=True)
        if drained.not_begun and not as_json:
            raise Stop(EXIT_TIME, "drain.stopped", f"{len(drained.not_begun)} instances were not begun; run it again")
        return EXIT_NO if drained.failed or drained.not_begun or planned.more else 0

    run(body)


async def _run(drain: Drain, berth: BuildClient, timeout_s: float) -> None:
    """Carry it out; SIGINT begins nothing more."""
    following = MoveClient(berth.bus, clock=berth.clock, process=berth.process)
    loop = asyncio.get_running_loop()
    await following.open()
    loop.add_signal_handler(signal.SIGINT, drain.stop)
    try:
        await drain.run(following, clock=berth.clock, timeout_s=timeout_s)
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        await following.close()


def _show_end(moved: PlannedMove, state: str, host: str, why: str) -> None:
    text = f"{moved.instance_uuid} {'to ' + host if state == 'done' else state + ': ' + why}"
    out.print(Text(printable(text)), soft_wrap=True)


def _show_plan(planned: DrainPlan, as_json: bool) -> None:
    if as_json:
        print_json(planned)
        return
    rows = [
        [
            one.instance_uuid,
            one.project_id,
            one.flavor,
            ", ".join(one.hosts),
            f"{one.code}: {one.reason}" if one.code else "",
        ]
        for one in planned.moves
    ]
    render_rows(out, ["instance", "project", "flavor", "to, alternates", "cannot"], rows)
    if planned.more:
        out.print(Text(f"... and more than these {len(planned.moves)}"))
