"""`berth explain`: how a call of a real Nova was decided, by the logs of the processes in front of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import typer

from berth.cli.common import (
    Exit,
    Stop,
)
from berth.cli.output import (
    As,
    Form,
    out,
    print_data,
    print_line,
)
from berth.text import render_funnel, render_scores
from bus.contracts.build import FunnelStep
from bus.contracts.nova_calls import CallDecision, DecisionStep
from nova_scheduler.decide.decision_log import ANSWERED, EVENTS, NOT_DECIDED, SHADOWED
from scheduler_worker.selection.explain import reason_text

MAX_LINE = 2**20
MAX_FOUND = 100  # calls of one request


async def explain(
    request_id: Annotated[str, typer.Argument(help="Nova's id of the request (`req-...`).")],
    logs: Annotated[
        list[Path] | None, typer.Argument(help="Logs of the processes in front of Nova, as JSON; default: stdin.")
    ] = None,
    form: As = Form.TABLE,
) -> None:
    """Explain how a call of Nova's conductor was decided.

    Names what each step rejected, which hosts, and the reasons. Reads the logs (`telemetry.log_format` = `json`) of all
    processes that answer Nova's calls, as any of them may have answered:
    `journalctl -o cat -u 'berth*' | berth explain req-...`.
    """
    found = list(_found(request_id, logs or ()))
    if not found:
        raise Stop(Exit.NO, "explain.unknown", f"the logs have no call of request {request_id}")
    if form.is_data:
        print_data(found, form)
        return
    for one in found[:MAX_FOUND]:
        _show(one)


def _found(request_id: str, logs: Sequence[Path]) -> Iterator[CallDecision]:
    """The lines about the request, in their order. Raises Stop: a file cannot be read."""
    wanted = request_id.encode()
    if not logs:
        yield from _lines(sys.stdin.buffer, wanted)
    for path in logs:
        try:
            with path.open("rb") as file:
                yield from _lines(file, wanted)
        except OSError as error:
            raise Stop(Exit.USAGE, "explain.unreadable", f"{path}: {error.strerror}") from error


def _lines(file: BinaryIO, wanted: bytes) -> Iterator[CallDecision]:
    decoder = msgspec.json.Decoder(CallDecision)
    while line := file.readline(MAX_LINE):
        if wanted not in line:
            continue
        try:
            one = decoder.decode(line[max(0, line.find(b"{")) :])
        except msgspec.DecodeError:
            continue  # a line of another kind
        if one.event in EVENTS and one.request_id.encode() == wanted:
            yield one


def _show(one: CallDecision) -> None:
    more = f" and {one.count - len(one.instances)} more" if one.count > len(one.instances) else ""
    print_line(f"{one.timestamp} {one.process} {one.event}: {', '.join(one.instances)}{more}")
    if one.event in {SHADOWED.placed, SHADOWED.no_host}:
        print_line("  in the shadow: the stock nova-scheduler has answered the call")
    if one.event in {ANSWERED.placed, SHADOWED.placed}:
        for instance, hosts in zip(one.instances, one.hosts, strict=False):
            print_line(f"  {instance}: {', then '.join(hosts)}")
        if one.scores:
            render_scores([one.scores], out)
    elif one.event == NOT_DECIDED:
        print_line(f"  not decided by berth, but by the fallback, if there is one: {one.reason} {one.detail}".rstrip())
    else:
        print_line(f"  {one.reason}")
        render_funnel([FunnelStep(step=s.step, remaining=s.remaining, rejected=s.rejected) for s in one.funnel], out)
        for step in one.funnel:
            _show_hosts(step)
    for lost in one.lost:
        print_line(f"  claim lost: {lost}")


def _show_hosts(step: DecisionStep) -> None:
    for reason, hosts in step.hosts.items():
        count = step.rejected.get(reason, sum(step.rejected.values()))
        more = f" and {count - len(hosts)} more" if count > len(hosts) else ""
        words = reason_text(step.step, reason) if reason else f"were rejected by {step.step}"
        print_line(f"  {', '.join(hosts)}{more} {words}")
