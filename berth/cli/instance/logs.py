"""`berth logs`: the timeline of an instance, followed until it has ended."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from msgspec.structs import asdict

from berth.cli.common import InProject, Instance
from berth.cli.http import connected, instance_of, may_pass
from berth.cli.instance.instances import detail_of
from berth.cli.output import (
    As,
    Form,
    err,
    print_data_line,
    print_line,
    rfc3339,
)
from berth.client import AsyncClient
from bus.contracts.build import TERMINAL_STATES, BuildRecord, TimelineEntry
from bus.faults import Fault

LOOK_AGAIN_S = 1.0


async def logs(
    context: typer.Context,
    instance: Instance,
    project: InProject = None,
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", help="Until nothing about the instance is under way.")
    ] = True,
    form: As = Form.TABLE,
) -> None:
    """Print the timeline of an instance, and follow it.

    It ends when the build has ended and no request about the instance is under way, however long that takes.
    """
    async with connected(context) as berth:
        record = await instance_of(berth, instance, project)
        printed = set[tuple[float, str, str, str]]()
        while True:
            for line in record.timeline:
                key = (line.at, line.actor, line.what, line.detail)
                if key not in printed:
                    printed.add(key)
                    _print(line, form)
            if not follow or (record.state in TERMINAL_STATES and record.under_way is None):
                return
            await asyncio.sleep(LOOK_AGAIN_S)
            record = await _read_again(berth, record)


async def _read_again(berth: AsyncClient, record: BuildRecord) -> BuildRecord:
    """The record as it is now; as it was while nothing answers."""
    try:
        return await berth.show_build(record.instance_uuid)
    except Fault as fault:
        if not may_pass(fault):
            raise
        err.print(f"no answer ({fault.code}); trying again", soft_wrap=True)
        return record


def _print(line: TimelineEntry, form: Form) -> None:
    if form.is_data:
        print_data_line({key: value for key, value in asdict(line).items() if value}, form)
    else:
        print_line(f"{rfc3339(line.at)} {line.actor}: {line.what} {detail_of(line)}".rstrip())
