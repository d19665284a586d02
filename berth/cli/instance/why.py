"""`berth why`: why an instance is as it is, in one answer: what happened, what was tried, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer
from msgspec import Struct

from berth.bus_client import BuildClient
from berth.cli.common import QUERY_TIMEOUT_S, InProject, Stop, client, instance_of, is_uuid, parse_uuid
from berth.cli.output import As, Form, out, print_data, print_line
from berth.codes import code_named
from berth.config.settings import Settings
from berth.text import printable, render_funnel, render_scores, utc
from bus.contracts.actions import ActionPage, ActionQuery, ActionRecord, ActionState
from bus.contracts.build import TERMINAL_STATES, AttemptRecord, BuildRecord, BuildState, FunnelStep, HostScore

GONE_WRONG = frozenset({ActionState.FAILED, ActionState.REFUSED})


class Why(Struct, frozen=True, kw_only=True):
    """The answer. request: of what it is the answer, `build` or a kind of action."""

    instance_uuid: str
    name: str
    project_id: str
    state: str
    host: str | None
    request: str
    request_id: str
    request_state: str
    since: float  # seconds since the epoch
    code: str
    reason: str
    waiting: str = ""  # for what
    attempts: tuple[AttemptRecord, ...] = ()
    funnel: tuple[FunnelStep, ...] = ()
    scores: tuple[HostScore, ...] = ()  # of the hosts that were chosen
    cause: str = ""
    remedy: str = ""
    next: tuple[str, ...] = ()  # commands


async def why(
    settings: Settings,
    instance: Annotated[
        str,
        typer.Argument(help="Name, UUID or first letters of an instance, or a request's UUID.", metavar="INSTANCE"),
    ],
    project: InProject = None,
    form: As = Form.TABLE,
) -> None:
    """Explain why an instance, or a request about it, is as it is.

    What happened, which hosts were tried, how many hosts each filter left, what it waits for, and the next command. A
    request of Nova is explained by `berth explain`.
    """
    async with client(settings) as berth:
        record, action = await _found(berth, instance, project)
    found = explained(record, action)
    if form.is_data:
        print_data(found, form)
    else:
        _show(found)


async def _found(berth: BuildClient, text: str, project: str | None) -> tuple[BuildRecord, ActionRecord | None]:
    """The instance, and the request about it that is meant: the one that is named, else the newest. Raises Stop."""
    try:
        record = await instance_of(berth, text, project, timeout_s=QUERY_TIMEOUT_S)
    except Stop as stop:
        if stop.code != "instance.unknown" or not is_uuid(text):
            raise
        for action in await _actions(berth, ActionQuery(request_id=parse_uuid(text), project_id=project, limit=1)):
            return await instance_of(berth, action.instance_uuid, action.project_id, timeout_s=QUERY_TIMEOUT_S), action
        raise
    newest = ActionQuery(instance_uuid=record.instance_uuid, project_id=record.project_id, limit=1)
    return record, next(iter(await _actions(berth, newest)), None)


async def _actions(berth: BuildClient, query: ActionQuery) -> tuple[ActionRecord, ...]:
    return (await berth.bus.request(query, ActionPage, timeout_s=QUERY_TIMEOUT_S)).actions


def explained(record: BuildRecord, action: ActionRecord | None) -> Why:
    """The answer. A request explains an instance while it is under way, or where it came to nothing; else its build."""
    of = action if action is not None and (not action.terminal or action.state in GONE_WRONG) else None
    about = of or record
    waits = next((line.detail for line in record.timeline[-1:] if line.what == "waiting"), "") if of is None else ""
    code = None if not about.code else code_named(about.code)
    return Why(
        instance_uuid=record.instance_uuid,
        name=record.name,
        project_id=record.project_id,
        state=record.shown_state,
        host=record.host,
        request="build" if of is None else of.kind.value,
        request_id=record.instance_uuid if of is None else of.request_id,
        request_state=about.state.value,
        since=about.updated_at,
        code=about.code,
        reason=about.reason,
        waiting=waits,
        attempts=about.history,
        funnel=about.funnel,
        scores=() if about.code or record.choice is None else record.choice.scores,
        cause="" if code is None else code.cause,
        remedy="" if code is None else code.remedy,
        next=tuple(_next(record, of)),
    )


def _next(record: BuildRecord, action: ActionRecord | None) -> Iterator[str]:
    if record.state not in TERMINAL_STATES or (action is not None and not action.terminal):
        yield f"berth logs {record.instance_uuid}"
    elif record.state is BuildState.ACTIVE or action is not None:
        yield f"berth show {record.instance_uuid} --history"
    if record.state in (BuildState.FAILED, BuildState.REFUSED):
        yield f"berth flavor show {record.flavor}"
        yield "berth host list"


def _show(found: Why) -> None:
    named = f"{found.name} ({found.instance_uuid})" if found.name else found.instance_uuid
    where = f" on {found.host}" if found.host else ""
    out.print(printable(f"{named} is {found.state}{where}"), style="bold", soft_wrap=True, markup=False)
    request = f"its {found.request}" if found.request == "build" else f"{found.request} {found.request_id}"
    print_line(f"  {request}: {found.request_state} since {utc(found.since)}")
    if found.reason or found.code:
        print_line(f"  why: {found.reason or found.cause}{f' ({found.code})' if found.code else ''}")
    if found.waiting:
        print_line(f"  it waits: {found.waiting}")
    for one in found.attempts:
        outcome = " ".join(part for part in (one.outcome, one.code, one.reason) if part)
        print_line(f"  tried {one.host}: {outcome}")
    render_funnel(found.funnel, out)
    if found.scores:
        render_scores([found.scores], out)
    if found.cause and found.reason:
        print_line(f"  meaning: {found.cause}")
    if found.remedy:
        print_line(f"  what to do: {found.remedy}")
    for command in found.next:
        print_line(f"  next: {command}")
