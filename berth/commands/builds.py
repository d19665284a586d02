"""`berth boot`, `delete`, `show` and `list`: a client's requests."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated
from uuid import UUID

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from berth.client import BuildClient, Track
from berth.commands.common import (
    EXIT_NO,
    EXIT_TIME,
    QUERY_TIMEOUT_S,
    AsJson,
    Stop,
    Timeout,
    client,
    err,
    out,
    parse_uuid,
    print_json,
    run,
    settings_of,
)
from berth.render import printable, render_funnel, render_rows, render_scores, render_stages
from berth.settings import Settings
from bus.clock import new_uuid
from bus.contracts.build import BuildQuery, BuildRecord, BuildRequest, BuildState
from bus.contracts.deploy import MAX_USER_DATA, ConfigDrive, ImageSource, NetworkRequest
from bus.contracts.fences import EvacuationPolicy
from bus.contracts.groups import GroupPolicy, ServerGroup
from bus.contracts.placement import MAX_MEMBERS
from bus.port import BusUnavailable, PublishRefused

MAX_COUNT = 100_000

Instance = Annotated[str, typer.Argument(help="The instance's UUID.", parser=parse_uuid, metavar="UUID")]


def boot(
    context: typer.Context,
    flavor: Annotated[str, typer.Option(help="What to build; `berth config` lists the flavors.")],
    count: Annotated[int, typer.Option(min=1, max=MAX_COUNT, help="How many.")] = 1,
    together: Annotated[
        bool, typer.Option("--together", help="One request for all of them: they start together or not at all.")
    ] = False,
    min_count: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_MEMBERS, help="As --together, but so many are enough."),
    ] = None,
    name: Annotated[str, typer.Option(help="A name; with --count, a number is added.")] = "",
    project: Annotated[str, typer.Option(help="Whose they are.")] = "default",
    image: Annotated[str, typer.Option(help="The image's name.")] = "",
    image_source: Annotated[str | None, typer.Option(help="Where the image is, for bare metal (a URL).")] = None,
    image_sha256: Annotated[str | None, typer.Option(help="Its SHA-256.")] = None,
    user_data: Annotated[Path | None, typer.Option(help="A file for cloud-init, for bare metal.")] = None,
    key: Annotated[list[Path] | None, typer.Option(help="A file with a public SSH key; repeatable.")] = None,
    port: Annotated[
        list[str] | None,
        typer.Option(parser=parse_uuid, metavar="UUID", help="A network port to attach to a node; repeatable."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Only this host (through the filters).")] = None,
    uuid: Annotated[
        str | None,
        typer.Option(parser=parse_uuid, metavar="UUID", help="The instance's UUID, for a request that is repeated."),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Their server group: one of the project's on record, or a UUID, which exists by being named.",
        ),
    ] = None,
    policy: Annotated[
        GroupPolicy, typer.Option(help="What a group named by a UUID wants.")
    ] = GroupPolicy.ANTI_AFFINITY,
    max_per_host: Annotated[int, typer.Option(min=1, max=1000, help="With anti-affinity: so many share a host.")] = 1,
    different_host: Annotated[
        list[str] | None,
        typer.Option(parser=parse_uuid, metavar="UUID", help="Not where this instance is; repeatable."),
    ] = None,
    same_host: Annotated[
        list[str] | None, typer.Option(parser=parse_uuid, metavar="UUID", help="Where this instance is; repeatable.")
    ] = None,
    on_host_failure: Annotated[
        EvacuationPolicy | None,
        typer.Option(help="What becomes of them when their host is fenced; else as in the flavor or the settings."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for each build's end.")] = False,
    timeout: Timeout = 300.0,
    as_json: AsJson = False,
) -> None:
    """Ask for machines. With --wait, exit status 1 when one of them failed."""
    in_group = None if group is None else _group_by_uuid(group, policy, max_per_host)
    of_gang = _is_gang(count, min_count, together=together, uuid=uuid, port=port)
    image_of_its_own, drive = _image_source(image_source, image_sha256), _config_drive(user_data, key or ())
    requests = [
        BuildRequest(
            instance_uuid=uuid or new_uuid(random.SystemRandom()),
            flavor=flavor,
            project_id=project,
            name=(f"{name}-{number}" if name and count > 1 and not of_gang else name),
            image=image,
            host=host,
            server_group=in_group,
            group=group if in_group is None else None,
            different_host=tuple(different_host or ()),
            same_host=tuple(same_host or ()),
            image_source=image_of_its_own,
            config_drive=drive,
            networks=tuple(NetworkRequest(port=one) for one in port or ()),
            on_host_failure=on_host_failure,
            count=count if of_gang else 1,
            min_count=min_count,
        )
        for number in range(1, 2 if of_gang else count + 1)
    ]
    _check(requests[-1])

    run(lambda: _boot(settings_of(context), requests, wait=wait, timeout_s=timeout, as_json=as_json))


async def _boot(
    settings: Settings, requests: Sequence[BuildRequest], *, wait: bool, timeout_s: float, as_json: bool
) -> int:
    """Publish the requests, show what became of them; the exit status."""
    async with client(settings) as berth:
        tracks = await publish_and_follow(berth, requests, timeout_s=timeout_s, as_json=as_json)
        ended = not wait or await berth.wait(timeout_s)
        _show_tracks(tracks, as_json)
    if not ended:
        raise Stop(EXIT_TIME, "timeout", f"{sum(t.ended_at is None for t in tracks)} builds had not ended in time")
    return EXIT_NO if wait and any(t.state != "active" for t in tracks) else 0


def _group_by_uuid(group: str, policy: GroupPolicy, max_per_host: int) -> ServerGroup | None:
    """The server group that a UUID names; None: it is the name of one on record."""
    try:
        uuid = str(UUID(group))
    except ValueError:
        return None
    return ServerGroup(uuid=uuid, policy=policy, max_per_host=max_per_host)


def _is_gang(count: int, min_count: int | None, *, together: bool, uuid: str | None, port: list[str] | None) -> bool:
    """Whether it is one request for all of them. Raises BadParameter for what no gang can be."""
    of_gang = together or min_count is not None
    if uuid is not None and count > 1 and not of_gang:
        raise typer.BadParameter("--uuid names one instance; leave --count away, or add --together")
    if of_gang and count > MAX_MEMBERS:
        raise typer.BadParameter(f"at most {MAX_MEMBERS} start together", param_hint="--count")
    if (min_count or 1) > count:
        raise typer.BadParameter("it is more than --count", param_hint="--min-count")
    if of_gang and count > 1 and port:
        raise typer.BadParameter("a port is one machine's", param_hint="--port")
    return of_gang


def _image_source(source: str | None, sha256: str | None) -> ImageSource | None:
    if source is None:
        if sha256 is not None:
            raise typer.BadParameter("--image-sha256 is of --image-source")
        return None
    if sha256 is None:
        return ImageSource(source=source)
    return ImageSource(source=source, hash_algorithm="sha256", hash_value=sha256)


def _config_drive(user_data: Path | None, keys: Sequence[Path]) -> ConfigDrive | None:
    if user_data is None and not keys:
        return None
    return ConfigDrive(
        user_data="" if user_data is None else _read(user_data), public_keys=tuple(_read(key).strip() for key in keys)
    )


def _read(path: Path) -> str:
    """A small text file. Raises BadParameter."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_USER_DATA + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if len(text) > MAX_USER_DATA:
        raise typer.BadParameter(f"{path} has more than {MAX_USER_DATA} characters")
    return text


def delete(
    context: typer.Context,
    uuids: Annotated[list[str], typer.Argument(help="The instances' UUIDs.", parser=parse_uuid, metavar="UUID")],
    wait: Annotated[bool, typer.Option("--wait", help="Wait until they are gone.")] = False,
    timeout: Timeout = 120.0,
    as_json: AsJson = False,
) -> None:
    """Delete machines, or stop their builds wherever they stand."""
    requested = list(dict.fromkeys(uuids))

    async def body() -> int:
        async with client(settings_of(context)) as berth:
            records = [await _record(berth, uuid) for uuid in requested]
            tracks = await berth.delete(records, retry_for_s=timeout)
            ended = not wait or await berth.wait(timeout)
            _show_tracks(tracks, as_json)
        if not ended:
            raise Stop(EXIT_TIME, "timeout", f"{sum(t.ended_at is None for t in tracks)} were not gone in time")
        return EXIT_NO if wait and any(t.state != "deleted" for t in tracks) else 0

    run(body)


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
        _show_record(record, history=history)

    run(body)


def list_builds(
    context: typer.Context,
    project: Annotated[str | None, typer.Option(help="Only of this project.")] = None,
    state: Annotated[BuildState | None, typer.Option(help="Only in this state.")] = None,
    host: Annotated[str | None, typer.Option(help="Only of the host of this name.")] = None,
    cell: Annotated[str | None, typer.Option(help="Only in this cell.")] = None,
    flavor: Annotated[str | None, typer.Option(help="Only of this flavor.")] = None,
    code: Annotated[str | None, typer.Option(help="Only with this code.")] = None,
    gang: Annotated[
        str | None,
        typer.Option(parser=parse_uuid, metavar="UUID", help="Only those that were to start together in this request."),
    ] = None,
    after: Annotated[datetime | None, typer.Option(help="Only requested then or later, UTC.")] = None,
    before: Annotated[datetime | None, typer.Option(help="Only requested earlier, UTC.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="The newest so many.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List builds, newest first."""
    query = _query(
        {
            "project_id": project,
            "state": state,
            "host": host,
            "cell": cell,
            "flavor": flavor,
            "code": code,
            "gang": gang,
            "after": None if after is None else after.replace(tzinfo=UTC).timestamp(),
            "before": None if before is None else before.replace(tzinfo=UTC).timestamp(),
            "limit": limit,
        }
    )

    async def body() -> None:
        async with client(settings_of(context)) as berth:
            page = await berth.query(query, timeout_s=QUERY_TIMEOUT_S)
        if page.searched_to is not None:
            err.print(f"searched back to {_when(page.searched_to, day=True)} UTC; older ones: --before")
        if as_json:
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
        raise typer.BadParameter(str(error)) from error


async def _record(berth: BuildClient, uuid: str) -> BuildRecord:
    page = await berth.query(BuildQuery(instance_uuid=uuid), timeout_s=QUERY_TIMEOUT_S)
    if not page.builds:
        raise Stop(EXIT_NO, "instance.unknown", f"there is no build {uuid}")
    return page.builds[0]


# What a user may get wrong, in the words of the command line; the contract's own words are patterns.
_RULES = {
    "project_id": ("--project", "letters, digits, _ and -, at most 64"),
    "flavor": ("--flavor", "1 to 255 characters"),
    "name": ("--name", "at most 255 characters"),
    "image": ("--image", "at most 255 characters"),
    "host": ("--host", "at most 255 characters"),
}


def _check(request: BuildRequest) -> None:
    """Refuse here what the scheduler would refuse as malformed. Raises typer.BadParameter."""
    try:
        msgspec.convert(msgspec.to_builtins(request), BuildRequest)
    except msgspec.ValidationError as error:
        name = str(error).rpartition("$.")[2].rstrip("`")
        option, rule = _RULES.get(name, ("", str(error)))
        raise typer.BadParameter(rule, param_hint=option or None) from error


async def publish_and_follow(
    berth: BuildClient, requests: Sequence[BuildRequest], *, timeout_s: float, as_json: bool
) -> list[Track]:
    """Publish all, waiting for a full queue to have room. What was accepted before an end without success is shown."""
    try:
        return await berth.boot(requests, retry_for_s=timeout_s)
    except (PublishRefused, BusUnavailable):
        accepted = [track for track in berth.tracks.values() if track.published_at is not None]
        if accepted:
            _show_tracks(accepted, as_json)
        raise


def _show_tracks(tracks: Sequence[Track], as_json: bool) -> None:
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


def _show_record(record: BuildRecord, *, history: bool) -> None:
    out.print(Text.assemble(record.instance_uuid, f" {printable(record.name)} ", _colour(record.state)), soft_wrap=True)
    now = record.condition if record.condition != record.state else ""
    facts = {"now": now, "request": f"{record.under_way} is under way" if record.under_way else None}
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
        rows = [[_when(line.at), line.who, line.what, line.detail] for line in record.timeline]
        render_rows(out, ["at (UTC)", "who", "what", ""], rows)
        render_stages([line.stamps for line in record.timeline if line.stamps is not None][-1:], out)


_COLOURS = {"active": "green", "failed": "red", "refused": "red", "deleted": "dim"}


def _colour(state: str) -> Text:
    return Text(printable(state), _COLOURS.get(state, "yellow"))


def _when(at: float, *, day: bool = False) -> str:
    """A time of day with milliseconds, or a day and a time without."""
    if not at:
        return ""
    moment = datetime.fromtimestamp(at, UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S") if day else moment.strftime("%H:%M:%S.%f")[:-3]
