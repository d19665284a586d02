"""`berth why`: why an instance is as it is, in one answer: what happened, what was tried, and what to do."""

from __future__ import annotations

from typing import Annotated

import typer

from berth.cli.common import Exit, InProject, Stop, is_uuid, parse_uuid
from berth.cli.http import connected, instance_of
from berth.cli.output import As, Form, out, print_data, print_line
from berth.client import ApiProblem, AsyncClient
from berth.client.types import Why
from berth.text import printable, render_funnel, render_scores, utc


async def why(
    context: typer.Context,
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
    async with connected(context) as berth:
        found = await _found(berth, instance, project)
    if form.is_data:
        print_data(found, form)
    else:
        _show(found)


async def _found(berth: AsyncClient, text: str, project: str | None) -> Why:
    """Of the instance, by its newest request, or of the request about it that is named. Raises Stop, Fault."""
    try:
        record = await instance_of(berth, text, project)
    except Stop as stop:
        if stop.code != "instance.unknown" or not is_uuid(text):
            raise
        try:
            action = await berth.show_action(parse_uuid(text))
        except ApiProblem as problem:
            if problem.code != "action.unknown":
                raise
            raise stop from None
        if project not in (None, action.project_id):
            raise
        return await berth.explain_build(action.instance_uuid, request=action.request_id)
    return await berth.explain_build(record.instance_uuid)


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
