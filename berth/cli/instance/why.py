"""`berth why`: why an instance is as it is, in one answer: what happened, what was tried, and what to do."""

from __future__ import annotations

from typing import Annotated

import typer

from berth.bus_client import BuildClient
from berth.cli.common import QUERY_TIMEOUT_S, Exit, InProject, Stop, client, instance_of, is_uuid, parse_uuid
from berth.cli.output import As, Form, out, print_data, print_line
from berth.client.types import Why
from berth.config.settings import Settings
from berth.text import printable, render_funnel, render_scores, utc
from berth.why import explained
from bus.contracts.actions import ActionPage, ActionQuery, ActionRecord
from bus.contracts.build import BuildRecord


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
    if instance.startswith("req-"):
        command = f"journalctl -o cat -u 'berth*' | berth explain {instance}"
        raise Stop(Exit.NO, "explain.unknown", f"Nova's requests are in the logs of what answers them: {command}")
    async with client(settings) as berth:
        record, action, is_named = await _found(berth, instance, project)
    found = explained(record, action, is_named=is_named)
    if form.is_data:
        print_data(found, form)
    else:
        _show(found)


async def _found(berth: BuildClient, text: str, project: str | None) -> tuple[BuildRecord, ActionRecord | None, bool]:
    """The instance, the request about it that is named, else the newest, and whether it is named. Raises Stop."""
    try:
        record = await instance_of(berth, text, project, timeout_s=QUERY_TIMEOUT_S)
    except Stop as stop:
        if stop.code != "instance.unknown" or not is_uuid(text):
            raise
        for action in await _actions(berth, ActionQuery(request_id=parse_uuid(text), project_id=project, limit=1)):
            of = await instance_of(berth, action.instance_uuid, action.project_id, timeout_s=QUERY_TIMEOUT_S)
            return of, action, True
        raise
    newest = ActionQuery(instance_uuid=record.instance_uuid, project_id=record.project_id, limit=1)
    return record, next(iter(await _actions(berth, newest)), None), False


async def _actions(berth: BuildClient, query: ActionQuery) -> tuple[ActionRecord, ...]:
    return (await berth.bus.request(query, ActionPage, timeout_s=QUERY_TIMEOUT_S)).actions


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
