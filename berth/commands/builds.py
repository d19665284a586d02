"""`berth delete`, `show` and `list`: a client's requests about its builds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated

import msgspec
import typer
from msgspec import Struct
from rich.console import Console
from rich.text import Text

from berth.added_cells import with_added_cells
from berth.audit.invariants import ENDED
from berth.client import BuildClient, Track
from berth.commands.common import (
    EXIT_NO,
    EXIT_TIME,
    QUERY_TIMEOUT_S,
    AsJson,
    Stop,
    Timeout,
    check_cell,
    client,
    err,
    open_in_time,
    out,
    parse_uuid,
    print_json,
    run,
    settings_of,
)
from berth.commands.options import with_options
from berth.render import printable, render_funnel, render_rows, render_scores, render_stages
from berth.site import Site, process_name
from bus.contracts.build import BuildQuery, BuildRecord, BuildRequest, BuildState, TimelineEntry
from bus.contracts.cell import CellDelete
from bus.contracts.patterns import reason_of
from bus.port import BusUnavailable, PublishRefused

Instance = Annotated[str, typer.Argument(help="The instance's UUID.", parser=parse_uuid, metavar="UUID")]


def delete(
    context: typer.Context,
    uuids: Annotated[list[str], typer.Argument(help="The instances' UUIDs.", parser=parse_uuid, metavar="UUID")],
    wait: Annotated[bool, typer.Option("--wait", help="Wait until they are gone.")] = False,
    cell: Annotated[
        str | None,
        typer.Option(
            help="Command this cell itself, as operator: for an instance that it has active though the request has "
            "ended (`unrequested` in `berth audit`)."
        ),
    ] = None,
    timeout: Timeout = 120.0,
    as_json: AsJson = False,
) -> None:
    """Delete machines, or stop their builds wherever they stand."""
    requested = list(dict.fromkeys(uuids))
    if cell is not None and (wait or as_json):
        raise typer.BadParameter("the cell does not answer: leave --wait and --json away", param_hint="--cell")

    async def body() -> int:
        if cell is not None:
            await _delete_in_cell(Site(settings_of(context)), cell, requested)
            return 0
        async with client(settings_of(context)) as berth:
            records = [await _record(berth, uuid) for uuid in requested]
            tracks = await berth.delete(records, retry_for_s=timeout)
            ended = not wait or await berth.wait(timeout)
            report_tracks(tracks, as_json=as_json)
        if not ended:
            raise Stop(EXIT_TIME, "timeout", f"{sum(t.ended_at is None for t in tracks)} were not gone in time")
        return EXIT_NO if wait and any(t.state != "deleted" for t in tracks) else 0

    run(body)


async def _delete_in_cell(site: Site, cell: str, uuids: Sequence[str]) -> None:
    """Command the cell to delete instances whose requests have ended, so that no delete of a client reaches it."""
    if cell not in site.settings.cells:
        site = await with_added_cells(site)
    site.check_cell(cell)
    async with client(site.settings) as berth:
        records = [await _record(berth, uuid) for uuid in uuids]
    for record in records:
        if record.state not in ENDED:
            reason = f"{record.instance_uuid} is {record.state}: delete it without --cell"
            raise Stop(EXIT_NO, "instance.requested", reason)
    bus = site.bus(process_name("operator"), cell)
    await open_in_time(bus.open())
    try:
        commands = [CellDelete(instance_uuid=one.instance_uuid, project_id=one.project_id) for one in records]
        await bus.publish_all([(command, command.instance_uuid) for command in commands])
    finally:
        await bus.close()
    for one in records:
        out.print(f"{one.instance_uuid}: {cell} is commanded to delete it; `berth audit` lists what is left")


def show(
    context: typer.Context,
    uuid: Instance,
    history: Annotated[bool, typer.Option("--history", help="The whole timeline, a line each.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show one build: where it stands, and why."""

    async def body() -> None:
        async with client(settings_of(context)) as berth:
            record = await _record(berth, uuid)
        if as_json:
            print_json(record)
            return
        show_record(record, history=history)

    run(body)


class ListOptions(Struct, frozen=True, kw_only=True):
    """The options of `berth list`."""

    project: Annotated[str | None, typer.Option(help="Only of this project.")] = None
    state: Annotated[BuildState | None, typer.Option(help="Only in this state.")] = None
    host: Annotated[str | None, typer.Option(help="Only of the host of this name.")] = None
    cell: Annotated[str | None, typer.Option(help="Only in this cell.")] = None
    flavor: Annotated[str | None, typer.Option(help="Only of this flavor.")] = None
    code: Annotated[str | None, typer.Option(help="Only with this code.")] = None
    gang: Annotated[
        str | None,
        typer.Option(parser=parse_uuid, metavar="UUID", help="Only those that were to start together in this request."),
    ] = None
    after: Annotated[datetime | None, typer.Option(help="Only requested then or later, UTC.")] = None
    before: Annotated[datetime | None, typer.Option(help="Only requested earlier, UTC.")] = None
    limit: Annotated[int, typer.Option(min=1, max=1000, help="The most to list, newest first.")] = 50
    as_json: AsJson = False

    def fields(self) -> dict[str, object]:
        """The states of a BuildQuery."""
        same = {name: getattr(self, name) for name in ("state", "host", "cell", "flavor", "code", "gang", "limit")}
        moments = {
            name: None if at is None else at.replace(tzinfo=UTC).timestamp()
            for name, at in (("after", self.after), ("before", self.before))
        }
        return {"project_id": self.project, **same, **moments}


@with_options
def list_builds(context: typer.Context, *, options: ListOptions) -> None:
    """List builds, newest first."""
    query = _query(options.fields())

    async def body() -> None:
        settings = settings_of(context)
        async with client(settings) as berth:
            page = await berth.query(query, timeout_s=QUERY_TIMEOUT_S)
            if not page.builds:  # else there was the cell, if there is none of this name any more
                await check_cell(berth, settings, query.cell)
        if page.searched_to is not None:
            err.print(f"searched back to {_when(page.searched_to, day=True)} UTC; older ones: --before")
        if options.as_json:
            print_json(page.builds)
        else:
            _show_builds(page.builds)

    run(body)


def _show_builds(builds: Sequence[BuildRecord]) -> None:
    rows: list[list[str | Text]] = [
        [one.instance_uuid, one.name, one.flavor, _colour(one.state), one.cell or "", one.host or "",
         _when(one.updated_at, day=True)]
        for one in builds
    ]  # fmt: skip
    render_rows(out, ["instance", "name", "flavor", "state", "cell", "host", "since (UTC)"], rows)


def _query(fields: Mapping[str, object]) -> BuildQuery:
    try:
        return msgspec.convert(fields, BuildQuery)
    except msgspec.ValidationError as error:
        raise typer.BadParameter(reason_of(error)) from error


async def _record(berth: BuildClient, uuid: str) -> BuildRecord:
    page = await berth.query(BuildQuery(instance_uuid=uuid), timeout_s=QUERY_TIMEOUT_S)
    if not page.builds:
        raise Stop(EXIT_NO, "instance.unknown", f"there is no build {uuid}")
    return page.builds[0]


async def publish_and_follow(
    berth: BuildClient, requests: Sequence[BuildRequest], *, timeout_s: float, as_json: bool
) -> list[Track]:
    """Publish all, waiting for a full queue to have room.

    The builds that were accepted before an end without success are shown.
    """
    try:
        return await berth.boot(requests, retry_for_s=timeout_s)
    except (PublishRefused, BusUnavailable):
        accepted = [track for track in berth.tracks.values() if track.published_at is not None]
        if accepted:
            report_tracks(accepted, as_json=as_json)
        raise


def report_tracks(tracks: Sequence[Track], *, as_json: bool) -> None:
    """As JSON, or a line for each."""
    if as_json:
        print_json([_plain(track) for track in tracks])
        return
    show_tracks(tracks, out)


def show_tracks(tracks: Sequence[Track], out: Console) -> None:
    """A line for each build, then each explanation once, with how many builds it is of."""
    explained = [track.last for track in tracks if track.last is not None and track.last.funnel]
    for track in tracks:
        event = track.last
        where = f" on {event.host} in {event.cell}" if event is not None and event.host else ""
        where += f", zone {event.zone}" if where and event is not None and event.zone else ""
        why = f": {event.reason}" if event is not None and event.reason and track.state != "active" else ""
        if event in explained and event is not None:
            why = f": {event.code}, explained below"
        took = f" in {1000 * track.latency_s:.0f} ms" if track.latency_s is not None else ""
        line = Text.assemble(track.instance_uuid, " ", _colour(track.state), printable(f"{where}{took}{why}"))
        out.print(line, soft_wrap=True)
    for reason, funnel in {event.reason: event.funnel for event in explained}.items():
        count = sum(event.reason == reason for event in explained)
        out.print(Text(printable(f"{count} x {reason}" if count > 1 else reason), "bold"), soft_wrap=True)
        render_funnel(funnel, out)


def _plain(track: Track) -> dict[str, object]:
    event = track.last
    return {
        "instance_uuid": track.instance_uuid,
        "state": track.state,
        "host": event.host if event else None,
        "cell": event.cell if event else None,
        "zone": event.zone if event else "",
        "code": event.code if event else "",
        "reason": event.reason if event else "",
        "latency_ms": None if track.latency_s is None else round(1000 * track.latency_s, 3),
    }


def show_record(record: BuildRecord, *, history: bool) -> None:
    """Print one build; history: with its timeline."""
    out.print(Text.assemble(record.instance_uuid, f" {printable(record.name)} ", _colour(record.state)), soft_wrap=True)
    now = record.condition if record.condition != record.state else ""
    waits = next((line for line in record.timeline[-1:] if line.what == "waiting"), None)
    facts = {"now": now, "waiting": f"since {_when(waits.at)}: {waits.detail}" if waits is not None else None}
    facts |= {"request": f"{record.under_way} is under way" if record.under_way else None}
    facts |= {"flavor": record.flavor, "project": record.project_id, "cell": record.cell, "host": record.host}
    facts |= {"gang": f"{record.gang}, {record.gang_min} or more of it start together" if record.gang else None}
    facts |= {"code": record.code, "reason": record.reason, "requested": _when(record.created_at, day=True)}
    for name, value in facts.items():
        if value:
            out.print(Text(f"  {name:8} {printable(value)}"), soft_wrap=True)
    render_funnel(record.funnel, out)
    render_scores([line.scores for line in record.timeline if line.scores][-1:], out)
    for attempt in record.history:
        outcome = " ".join(part for part in (attempt.outcome, attempt.code, attempt.reason) if part)
        out.print(Text(printable(f"  attempt {attempt.attempt} on {attempt.host}: {outcome}")), soft_wrap=True)
    if history:
        out.print()
        rows = [[_when(line.at), line.who, line.what, _detail(line)] for line in record.timeline]
        render_rows(out, ["at (UTC)", "who", "what", ""], rows)
        render_stages([line.stamps for line in record.timeline if line.stamps is not None][-1:], out)


def _detail(line: TimelineEntry) -> str:
    """The entry of the timeline, and who holds what was lost."""
    held_by = ", ".join(one.consumer for one in line.holders)
    return f"{line.detail}; held by {held_by}" if held_by else line.detail


_COLOURS = {"active": "green", "failed": "red", "refused": "red", "deleted": "dim"}


def _colour(state: str) -> Text:
    return Text(printable(state), _COLOURS.get(state, "yellow"))


def _when(at: float, *, day: bool = False) -> str:
    """A time of day with milliseconds, or a day and a time without."""
    if not at:
        return ""
    moment = datetime.fromtimestamp(at, UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S") if day else moment.strftime("%H:%M:%S.%f")[:-3]
