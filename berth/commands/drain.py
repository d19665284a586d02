"""`berth drain`: every instance of a host moves elsewhere, a few at a time, by a plan that is made before the start."""

from __future__ import annotations

import asyncio
import random
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
from berth.render import printable, render_rows
from bus.clock import new_uuid
from bus.contracts.moves import DrainPlan, DrainQuery, MoveKind, MoveRequest, MoveState, PlannedMove
from bus.contracts.operations import AdminState, SetAdminState
from bus.faults import RequestRefused

PLAN_TIMEOUT_S = 60.0
MAX_AT_ONCE = 100
NOT_RUNNING = "instance.not_running"  # a cell's refusal of a live migration


class _Drained:
    """What has become of the instances so far."""

    def __init__(self) -> None:
        self.moved: list[str] = []
        self.failed: list[tuple[str, str, str]] = []  # instance, code, reason
        self.not_begun: list[str] = []

    def as_plain(self) -> dict[str, object]:
        failed = [{"instance_uuid": uuid, "code": code, "reason": reason} for uuid, code, reason in self.failed]
        return {"moved": self.moved, "failed": failed, "not_begun": self.not_begun}


def drain(
    context: typer.Context,
    host: Annotated[str, typer.Argument(help="The host's name or UUID.")],
    plan: Annotated[bool, typer.Option("--plan", help="Only say what would go where, and what cannot.")] = False,
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
            following = MoveClient(berth.bus, clock=berth.clock, process=berth.process)
            await following.open()
            try:
                drained = await _drain(berth, following, planned, kind, at_once, timeout, quiet=as_json)
            finally:
                await following.close()
        if as_json:
            print_json({"host": planned.host, "more": planned.more, **drained.as_plain()})
        else:
            left = len(drained.failed) + len(drained.not_begun)
            out.print(Text(f"{planned.host}: {len(drained.moved)} moved, {left} left"), soft_wrap=True)
        if drained.not_begun and not as_json:
            raise Stop(EXIT_TIME, "drain.stopped", f"{len(drained.not_begun)} instances were not begun; run it again")
        return EXIT_NO if drained.failed or drained.not_begun or planned.more else 0

    run(body)


async def _drain(
    berth: BuildClient,
    following: MoveClient,
    planned: DrainPlan,
    kind: MoveKind,
    at_once: int,
    timeout_s: float,
    *,
    quiet: bool,
) -> _Drained:
    """Move what can be moved, so many at a time, until time runs out or a person stops it.

    What does not run cannot be moved live; its cell says so, and it is moved cold (a stopped one stays stopped).
    """
    drained, waiting = _Drained(), [(one, kind) for one in planned.moves]
    give_up_at = berth.clock.monotonic() + timeout_s
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stopped.set)
    under_way: dict[str, tuple[PlannedMove, MoveKind]] = {}
    rng = random.SystemRandom()
    try:
        while waiting or under_way:
            late = berth.clock.monotonic() >= give_up_at
            while waiting and len(under_way) < at_once and not late and not stopped.is_set():
                one, how = waiting.pop(0)
                request = MoveRequest(
                    request_id=new_uuid(rng),
                    instance_uuid=one.instance_uuid,
                    project_id=one.project_id,
                    kind=how,
                    auto_confirm_s=0.0 if how is MoveKind.MIGRATE else None,
                )
                try:
                    await following.ask(request)
                except RequestRefused as fault:
                    # Its event may have come first; an end of what is not under way would be waited for no longer.
                    following.ended.pop(request.request_id, None)
                    drained.failed.append((one.instance_uuid, fault.code, fault.reason))
                    continue
                under_way[request.request_id] = (one, how)
            if not under_way:
                break
            await following.wait_for_one(give_up_at - berth.clock.monotonic())
            for request_id in [one for one in under_way if one in following.ended]:
                (moved, how), end = under_way.pop(request_id), following.ended.pop(request_id)
                if how is MoveKind.LIVE_MIGRATE and end.code == NOT_RUNNING:
                    waiting.append((moved, MoveKind.MIGRATE))  # asked at most twice: a cold one has no such end
                    continue
                if end.state is MoveState.DONE:
                    drained.moved.append(moved.instance_uuid)
                else:
                    drained.failed.append((moved.instance_uuid, end.code, end.reason))
                if not quiet:
                    _show_end(moved, end.state.value, end.host or "", end.reason or end.code)
            if berth.clock.monotonic() >= give_up_at:
                break
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    drained.not_begun = [one.instance_uuid for one, _ in waiting]
    drained.failed += [(one.instance_uuid, "timeout", "it had not ended in time") for one, _ in under_way.values()]
    return drained


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
