"""`berth boot`, `delete`, `show`, `list` and `hosts`: what a client asks."""

from __future__ import annotations

import random
import re
from datetime import UTC, datetime
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from berth.client import BuildClient, Track
from berth.commands.common import (
    EXIT_NO,
    EXIT_TIME,
    EXIT_USAGE,
    AsJson,
    Stop,
    Timeout,
    client,
    out,
    print_json,
    run,
    settings_of,
)
from bus.clock import new_uuid
from bus.contracts.base import Uuid
from bus.contracts.build import BuildQuery, BuildRecord, BuildRequest, BuildState

QUERY_TIMEOUT_S = 10.0
MAX_COUNT = 100_000
GOOD_ENDS = {BuildState.ACTIVE, BuildState.DELETED}


def boot(
    context: typer.Context,
    flavor: Annotated[str, typer.Option(help="What to build; `berth config` lists the flavors.")],
    count: Annotated[int, typer.Option(min=1, max=MAX_COUNT, help="How many.")] = 1,
    name: Annotated[str, typer.Option(help="A name; with --count, a number is added.")] = "",
    project: Annotated[str, typer.Option(help="Whose they are.")] = "default",
    image: Annotated[str, typer.Option(help="The image's name.")] = "",
    host: Annotated[str | None, typer.Option(help="Only this host (through the filters).")] = None,
    uuid: Annotated[str | None, typer.Option(help="The instance's UUID, for a request that is repeated.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for each build's end.")] = False,
    timeout: Timeout = 300.0,
    as_json: AsJson = False,
) -> None:
    """Ask for machines. With --wait, exit status 1 when one of them failed."""
    if uuid is not None and count > 1:
        raise typer.BadParameter("--uuid names one instance; leave --count away")
    try:
        requests = [
            BuildRequest(
                instance_uuid=uuid or new_uuid(random.SystemRandom()),
                flavor=flavor,
                project_id=project,
                name=(f"{name}-{number}" if name and count > 1 else name),
                image=image,
                host=host,
            )
            for number in range(1, count + 1)
        ]
        requests = [msgspec.convert(msgspec.to_builtins(request), BuildRequest) for request in requests]
    except msgspec.ValidationError as error:
        raise typer.BadParameter(str(error)) from error

    async def body() -> int:
        async with client(settings_of(context)) as berth:
            tracks = await berth.boot(requests)
            ended = not wait or await _wait(berth, timeout)
            _show_tracks(tracks, as_json)
        if not ended:
            raise Stop(EXIT_TIME, "timeout", f"{sum(t.ended_at is None for t in tracks)} builds had not ended in time")
        return EXIT_NO if wait and any(t.state != "active" for t in tracks) else 0

    run(body)


def delete(
    context: typer.Context,
    uuids: Annotated[list[str], typer.Argument(help="The instances.")],
    wait: Annotated[bool, typer.Option("--wait", help="Wait until they are gone.")] = False,
    timeout: Timeout = 120.0,
    as_json: AsJson = False,
) -> None:
    """Delete machines, or stop their builds wherever they stand."""
    for text in uuids:
        _uuid(text)

    async def body() -> int:
        async with client(settings_of(context)) as berth:
            records = [await _record(berth, uuid) for uuid in uuids]
            for record in records:
                berth.track(_as_request(record))
            await berth.delete([(record.instance_uuid, record.project_id) for record in records])
            tracks = [berth.tracks[uuid] for uuid in uuids]
            ended = not wait or await berth.until(lambda: all(t.state == "deleted" for t in tracks), timeout)
            _show_tracks(tracks, as_json)
        if not ended:
            raise Stop(EXIT_TIME, "timeout", "not all were gone in time")
        return 0

    run(body)


def show(
    context: typer.Context,
    uuid: Annotated[str, typer.Argument(help="The instance.")],
    history: Annotated[bool, typer.Option("--history", help="The whole story, a line each.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show one build: where it stands, and why it failed if it did."""
    _uuid(uuid)

    async def body() -> None:
        async with client(settings_of(context)) as berth:
            record = await _record(berth, uuid)
        if as_json:
            print_json(record)
            return
        _show_record(record, history=history)

    run(body)


def list_builds(
    context: typer.Context,
    project: Annotated[str | None, typer.Option(help="Only of this project.")] = None,
    state: Annotated[BuildState | None, typer.Option(help="Only in this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="The newest so many.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List builds, newest first."""

    async def body() -> None:
        async with client(settings_of(context)) as berth:
            query = BuildQuery(project_id=project, state=state, limit=limit)
            page = await berth.query(query, timeout_s=QUERY_TIMEOUT_S)
        if as_json:
            print_json(page.builds)
            return
        table = Table("instance", "name", "flavor", "state", "cell", "host", "since")
        for build in page.builds:
            table.add_row(
                build.instance_uuid, build.name, build.flavor, _colour(build.state), build.cell or "",
                build.host or "", _when(build.updated_at),
            )  # fmt: skip
        out.print(table)

    run(body)


def hosts(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="So many, by name.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List hosts as a scheduler sees them: up or not, and what is used of each resource."""

    async def body() -> None:
        async with client(settings_of(context)) as berth:
            page = await berth.hosts(limit=limit, timeout_s=QUERY_TIMEOUT_S)
        if as_json:
            print_json(page.hosts)
            return
        table = Table("host", "cell", "service", "", "used / capacity", "failed builds")
        for host in page.hosts:
            up = _UP[host.up, host.enabled]
            used = "  ".join(f"{name} {u:g}/{c:g}" for name, (u, c) in sorted(host.resources.items()))
            table.add_row(host.name, host.cell or "", host.service or "", up, used, str(host.failed_builds or ""))
        out.print(table)

    run(body)


_UP = {
    (True, True): "[green]up[/green]",
    (True, False): "[red]disabled[/red]",
    (False, True): "[red]down[/red]",
    (False, False): "[red]down[/red]",
}


async def _wait(berth: BuildClient, timeout_s: float) -> bool:
    if await berth.wait(timeout_s):
        return True
    await berth.resync()
    return berth.unfinished == 0


async def _record(berth: BuildClient, uuid: str) -> BuildRecord:
    page = await berth.query(BuildQuery(instance_uuid=uuid), timeout_s=QUERY_TIMEOUT_S)
    if not page.builds:
        raise Stop(EXIT_NO, "instance.unknown", f"there is no build {uuid}")
    return page.builds[0]


def _uuid(text: str) -> str:
    try:
        return msgspec.convert(text, Uuid)
    except msgspec.ValidationError:
        raise Stop(EXIT_USAGE, "request.invalid", f"not a UUID in lower case with dashes: {text}") from None


def _as_request(record: BuildRecord) -> BuildRequest:
    return BuildRequest(instance_uuid=record.instance_uuid, project_id=record.project_id, flavor=record.flavor)


def _show_tracks(tracks: list[Track], as_json: bool) -> None:
    if as_json:
        print_json([_plain(track) for track in tracks])
        return
    for track in tracks:
        event = track.last
        where = f" on {event.host} in {event.cell}" if event is not None and event.host else ""
        why = f": {event.reason}" if event is not None and event.reason and track.state != "active" else ""
        took = f" in {1000 * track.latency_s:.0f} ms" if track.latency_s is not None else ""
        out.print(f"{track.instance_uuid} {_colour(track.state)}{where}{took}{why}", soft_wrap=True)


def _plain(track: Track) -> dict[str, object]:
    event = track.last
    return {
        "instance_uuid": track.instance_uuid,
        "state": track.state,
        "host": event.host if event else None,
        "cell": event.cell if event else None,
        "code": event.code if event else "",
        "reason": event.reason if event else "",
        "latency_ms": None if track.latency_s is None else 1000 * track.latency_s,
    }


def _show_record(record: BuildRecord, *, history: bool) -> None:
    out.print(f"{record.instance_uuid} {record.name} {_colour(record.state)}")
    facts = {"flavor": record.flavor, "project": record.project_id, "cell": record.cell, "host": record.host}
    facts |= {"code": record.code, "reason": record.reason, "asked": _when(record.created_at)}
    for name, value in facts.items():
        if value:
            out.print(f"  {name:8} {value}", soft_wrap=True)
    for step in record.funnel:
        fell = ", ".join(f"{count} {reason}" for reason, count in sorted(step.fell.items(), key=lambda item: -item[1]))
        out.print(f"  {step.step:40} {step.left:6} left{'   fell: ' + fell if fell else ''}", soft_wrap=True)
    for attempt in record.history:
        out.print(
            f"  attempt {attempt.attempt} on {attempt.host}: {attempt.outcome} {attempt.code} {attempt.reason}",
            soft_wrap=True,
        )
    if history:
        for line in record.story:
            out.print(f"  {_when(line.at)} {line.who:12} {line.what:12} {line.detail}", soft_wrap=True)


def _colour(state: str) -> str:
    colour = {"active": "green", "failed": "red", "refused": "red", "deleted": "dim"}.get(state, "yellow")
    return f"[{colour}]{re.sub(r'[^a-z_]', '', state)}[/{colour}]"


def _when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S.%f")[:-3] if at else ""
