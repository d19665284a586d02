"""`berth boot`, `delete`, `show` and `list`: a client's requests about its builds."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeGuard
from uuid import UUID

import msgspec
import typer
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.text import Text

from berth.cli.common import Exit, InProject, Instance, Page, Stop, Timeout, parse_uuid
from berth.cli.http import check_cell, connected, each, ended, instance_of, place_of
from berth.cli.output import (
    As,
    Cell,
    Form,
    Id,
    ListedItems,
    ListOutput,
    Table,
    Time,
    out,
    print_data,
    print_line,
    print_list,
)
from berth.client import ApiProblem, AsyncClient
from berth.client.types import Accepted
from berth.text import printable, render_funnel, render_rows, render_scores, render_stages, utc
from bus.clock import new_uuid
from bus.contracts.actions import ActionRecord
from bus.contracts.base import reason_of
from bus.contracts.build import (
    TERMINAL_STATES,
    BuildQuery,
    BuildRecord,
    BuildRequest,
    BuildState,
    FunnelStep,
    TimelineEntry,
)
from bus.contracts.deploy import MAX_USER_DATA, ConfigDrive, ImageSource, NetworkRequest, VolumeRequest
from bus.contracts.deploy import Volumes as VolumeRequests
from bus.contracts.operations import EvacuationPolicy
from bus.contracts.placement import MAX_MEMBERS, GroupPolicy, ServerGroup
from bus.faults import Fault

MAX_COUNT = 100_000


ImageSourceUrl = Annotated[
    str | None, typer.Option("--image-source", help="Where the image is, for bare metal (a URL).")
]
ImageSha256 = Annotated[str | None, typer.Option("--image-sha256", help="Its SHA-256.")]


class RequestOutcome(Struct, frozen=True):
    """What became of a request to build or delete. latency_s: from a build's request until it was active."""

    instance_uuid: str
    name: str = ""
    state: str = "accepted"
    host: str | None = None
    cell: str | None = None
    code: str = ""
    reason: str = ""
    funnel: tuple[FunnelStep, ...] = ()
    latency_s: float | None = None


class BootOptions(Struct, frozen=True, kw_only=True):
    """The build requested, its placement, and the event to wait for."""

    flavor: Annotated[str, typer.Option(help="The flavor to build; `berth flavor list` lists them.")]
    count: Annotated[int, typer.Option(min=1, max=MAX_COUNT, help="How many.")] = 1
    gang: Annotated[
        bool, typer.Option("--gang", help="One request for all of them: they start together or not at all.")
    ] = False
    min_count: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_MEMBERS, help="As --gang, but this many are enough."),
    ] = None
    name: Annotated[str, typer.Option(help="A name; with --count, a number is added.")] = ""
    project: Annotated[
        str | None, typer.Option(help="The project that the instances are for; else your own, or `default`.")
    ] = None
    image: Annotated[str, typer.Option(help="The image's name.")] = ""
    image_source: ImageSourceUrl = None
    image_sha256: ImageSha256 = None
    user_data: Annotated[Path | None, typer.Option(help="A file for cloud-init, for bare metal.")] = None
    key: Annotated[list[Path] | None, typer.Option(help="A file with a public SSH key; repeatable.")] = None
    port: Annotated[
        list[str] | None,
        typer.Option(parser=parse_uuid, metavar="UUID", help="A network port to attach to a node; repeatable."),
    ] = None
    network: Annotated[
        list[str] | None,
        typer.Option(parser=parse_uuid, metavar="UUID", help="A network to make a port on for a node; repeatable."),
    ] = None
    volumes: Annotated[
        Path | None,
        typer.Option(help="A file with the volumes to attach to a node or to boot it from: a JSON list."),
    ] = None
    availability_zone: Annotated[str | None, typer.Option(metavar="ZONE", help="Only hosts of this zone.")] = None
    host: Annotated[str | None, typer.Option(help="Only this host (through the filters).")] = None
    uuid: Annotated[
        str | None,
        typer.Option(parser=parse_uuid, metavar="UUID", help="The instance's UUID, for a request that is repeated."),
    ] = None
    group: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Their server group: the name of one of the project's, or any UUID; a new UUID is a new group.",
        ),
    ] = None
    policy: Annotated[GroupPolicy, typer.Option(help="The policy of a group named by a UUID.")] = (
        GroupPolicy.ANTI_AFFINITY
    )
    max_per_host: Annotated[
        int, typer.Option(min=1, max=1000, help="With anti-affinity: this many may share a host.")
    ] = 1
    different_host: Annotated[
        list[str] | None,
        typer.Option(parser=parse_uuid, metavar="UUID", help="Not where this instance is; repeatable."),
    ] = None
    same_host: Annotated[
        list[str] | None, typer.Option(parser=parse_uuid, metavar="UUID", help="Where this instance is; repeatable.")
    ] = None
    on_host_failure: Annotated[
        EvacuationPolicy | None,
        typer.Option(help="The policy when their host is fenced; default: of the flavor or the settings."),
    ] = None
    wait: Annotated[bool, typer.Option("--wait", help="Wait for each build's end.")] = False
    timeout: Timeout = 300.0
    form: As = Form.TABLE


async def boot(context: typer.Context, *, options: BootOptions) -> int:
    """Request machines. With --wait, exit status 1 when one of them failed."""
    requests = requests_of(options)
    _check(requests[-1])
    async with connected(context) as berth:
        answers = await each(requests, lambda one: berth.create_build(_body(one)), retry_for_s=options.timeout)
        accepted = [
            RequestOutcome(uuid, _name_of(request, number))
            for request, answer in zip(requests, answers, strict=True)
            if isinstance(answer, Accepted)
            for number, uuid in enumerate(answer.members or (answer.instance_uuid,), 1)
        ]
        outcomes, in_time = accepted, True
        if options.wait:
            try:
                outcomes, in_time = await wait_for(berth, accepted, TERMINAL_STATES, options.timeout)
            except Fault:
                report_requests(accepted, form=options.form)  # they are on record, whatever is away now
                raise
    outcomes += [
        RequestOutcome(request.instance_uuid, request.name, "refused", code=answer.code, reason=answer.reason)
        for request, answer in zip(requests, answers, strict=True)
        if is_refusal(answer)
    ]
    if outcomes:
        report_requests(outcomes, form=options.form)
    for answer in answers:
        if isinstance(answer, Fault) and not is_refusal(answer):
            raise answer
    if not in_time:
        raise Stop(
            Exit.TIME,
            "timeout",
            f"{sum(one.state not in TERMINAL_STATES for one in outcomes)} builds had not ended in time",
        )
    good = {BuildState.ACTIVE} if options.wait else {"accepted"}
    return Exit.NO if any(one.state not in good for one in outcomes) else 0


def is_refusal(answer: object) -> TypeGuard[ApiProblem]:
    """Whether it is an answer about this request, and not about the caller or the server."""
    return isinstance(answer, ApiProblem) and answer.status in (404, 409, 422)


def _body(request: BuildRequest) -> dict[str, object]:
    """The request without what the server fills in: who asks, and whose it is where no project is named."""
    fields: dict[str, object] = msgspec.to_builtins(request)
    of_server = {"type", "by"} if request.project_id else {"type", "by", "project_id"}
    return {name: value for name, value in fields.items() if name not in of_server}


def _name_of(request: BuildRequest, number: int) -> str:
    """As the schedulers name the members of a gang."""
    return f"{request.name}-{number}" if request.name and request.count > 1 else request.name


async def wait_for(
    berth: AsyncClient, outcomes: Sequence[RequestOutcome], ends: Collection[BuildState], timeout_s: float
) -> tuple[list[RequestOutcome], bool]:
    """How each is once it has ended, or the time is over; and whether all have."""
    found, in_time = await ended(
        [one.instance_uuid for one in outcomes],
        berth.show_build,
        lambda record: record.state in ends,
        timeout_s=timeout_s,
    )
    return [_outcome_of(record) for record in found], in_time


def _outcome_of(record: BuildRecord) -> RequestOutcome:
    return RequestOutcome(
        instance_uuid=record.instance_uuid,
        name=record.name,
        state=record.state,
        host=record.host,
        cell=record.cell,
        code=record.code,
        reason=record.reason,
        funnel=record.funnel,
        latency_s=max(0.0, record.updated_at - record.created_at) if record.state is BuildState.ACTIVE else None,
    )


def requests_of(options: BootOptions) -> list[BuildRequest]:
    """One for each machine, or one for all that are to start together. Raises BadParameter."""
    of_gang = _is_gang(options)
    by_uuid = None if options.group is None else _group_by_uuid(options.group, options.policy, options.max_per_host)
    first = BuildRequest(
        instance_uuid=options.uuid or new_uuid(random.SystemRandom()),
        flavor=options.flavor,
        project_id=options.project or "",
        name=options.name,
        image=options.image,
        availability_zone=options.availability_zone,
        host=options.host,
        server_group=by_uuid,
        group=options.group if by_uuid is None else None,
        different_host=tuple(options.different_host or ()),
        same_host=tuple(options.same_host or ()),
        image_source=image_source_of(options.image_source, options.image_sha256),
        config_drive=_config_drive(options.user_data, options.key or ()),
        networks=(
            *(NetworkRequest(port=one) for one in options.port or ()),
            *(NetworkRequest(network=one) for one in options.network or ()),
        ),
        volumes=_volumes(options),
        on_host_failure=options.on_host_failure,
        count=options.count if of_gang else 1,
        min_count=options.min_count,
    )
    if of_gang or options.count == 1:
        return [first]
    return [
        replace(first, instance_uuid=new_uuid(random.SystemRandom()), name=options.name and f"{options.name}-{number}")
        for number in range(1, options.count + 1)
    ]


def _group_by_uuid(group: str, policy: GroupPolicy, max_per_host: int) -> ServerGroup | None:
    """The server group that a UUID names; None: it is the name of one on record."""
    try:
        uuid = str(UUID(group))
    except ValueError:
        return None
    return ServerGroup(uuid=uuid, policy=policy, max_per_host=max_per_host)


def _is_gang(options: BootOptions) -> bool:
    """Whether it is one request for all of them. Raises BadParameter for what no gang can be."""
    of_gang = options.gang or options.min_count is not None
    if options.uuid is not None and options.count > 1 and not of_gang:
        raise typer.BadParameter("--uuid names one instance; leave --count away, or add --gang")
    if of_gang and options.count > MAX_MEMBERS:
        raise typer.BadParameter(f"at most {MAX_MEMBERS} start together", param_hint="--count")
    if (options.min_count or 1) > options.count:
        raise typer.BadParameter("it is more than --count", param_hint="--min-count")
    if of_gang and options.count > 1 and options.port:
        raise typer.BadParameter("a port is one instance's", param_hint="--port")
    return of_gang


def image_source_of(source: str | None, sha256: str | None) -> ImageSource | None:
    """Where the image is. Raises BadParameter."""
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


def _volumes(options: BootOptions) -> tuple[VolumeRequest, ...]:
    """The volumes that a file lists; their properties may contain secrets, and are not shown. Raises BadParameter."""
    path = options.volumes
    if path is None:
        return ()
    if options.count > 1:
        raise typer.BadParameter("a volume is one instance's; leave --count away", param_hint="--volumes")
    try:
        return msgspec.json.decode(_read(path), type=VolumeRequests)
    except msgspec.ValidationError as error:
        raise typer.BadParameter(f"{path}: {reason_of(error)}", param_hint="--volumes") from None
    except msgspec.DecodeError:
        raise typer.BadParameter(f"{path} is not a JSON list of volumes", param_hint="--volumes") from None


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


_UNNAMED = {"project_id": "default"}

# A user's possible mistakes, in the words of the command line.
_RULES = {
    "project_id": ("--project", "letters, digits, _ and -, at most 64"),
    "flavor": ("--flavor", "1 to 255 characters"),
    "name": ("--name", "at most 255 characters"),
    "image": ("--image", "at most 255 characters"),
    "host": ("--host", "at most 255 characters"),
    "availability_zone": ("--availability-zone", "1 to 255 characters, none of control, and no space at either end"),
}


def _check(request: BuildRequest) -> None:
    """Refuse here the requests that the scheduler would refuse as malformed. Raises typer.BadParameter."""
    try:
        msgspec.convert({**msgspec.to_builtins(request), **({} if request.project_id else _UNNAMED)}, BuildRequest)
    except msgspec.ValidationError as error:
        name = reason_of(error).rpartition("$.")[2].rstrip("`")
        option, rule = _RULES.get(name, ("", reason_of(error)))
        raise typer.BadParameter(rule, param_hint=option or None) from error


async def show(
    context: typer.Context,
    instance: Instance,
    history: Annotated[bool, typer.Option("--history", help="The whole timeline, a line each.")] = False,
    project: InProject = None,
    form: As = Form.TABLE,
) -> None:
    """Show one build: its state, and the reason."""
    async with connected(context) as berth:
        record = await instance_of(berth, instance, project)
        newest = await berth.list_actions(instance=record.instance_uuid, project=record.project_id, limit=1)
    if form.is_data:
        print_data(record, form)
    else:
        show_record(record, next(iter(newest), None), history=history)


class InstanceListOptions(ListOutput, frozen=True, kw_only=True):
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
    page: Page = None

    def query(self) -> dict[str, Any]:
        """The parameters of the search. Raises BadParameter."""
        same = {name: getattr(self, name) for name in ("state", "host", "cell", "flavor", "code", "gang", "limit")}
        moments: dict[str, Any] = {
            name: None if at is None else at.replace(tzinfo=UTC).timestamp()
            for name, at in (("after", self.after), ("before", self.before))
        }
        if self.page is not None:
            before, _, last = self.page.partition("/")
            try:
                moments |= {"before": float(before), "before_instance": last or None}
            except ValueError:
                raise typer.BadParameter("take it from the list before", param_hint="--page") from None
        _check_query({"project_id": self.project, **same, **moments})
        return {"project": self.project, **same, **moments}


async def list_builds(context: typer.Context, *, options: InstanceListOptions) -> None:
    """List instances, newest first."""
    query = options.query()

    async with connected(context) as berth:

        async def read() -> ListedItems[BuildRecord]:
            page = await berth.list_builds(**query)
            if not page.builds:  # else there was the cell, if there is none of this name any more
                await check_cell(berth, options.cell)
            place = place_of(page)
            further = None if place is None else {"--page": f"{place['before']!r}/{place['before_instance'] or ''}"}
            return ListedItems(page.builds, further, page.total)

        await print_list(read, INSTANCES, options)


def _build_row(one: BuildRecord) -> list[Cell]:
    named: list[Cell] = [Id(one.instance_uuid), one.name, one.flavor, _colour(one.shown_state), one.host or ""]
    return [*named, Time(one.updated_at), one.cell or "", one.project_id, Time(one.created_at), one.code]


INSTANCES = Table("instance name flavor state host since | cell project requested code", _build_row)


def _check_query(fields: Mapping[str, object]) -> None:
    """Raises BadParameter."""
    try:
        msgspec.convert(fields, BuildQuery)
    except msgspec.ValidationError as error:
        raise typer.BadParameter(reason_of(error)) from error


def report_requests(outcomes: Sequence[RequestOutcome], *, form: Form) -> None:
    """As JSON, or a line for each."""
    if form.is_data:
        print_data([_plain(one) for one in outcomes], form)
        return
    show_requests(outcomes, out)


def show_requests(outcomes: Sequence[RequestOutcome], out: Console) -> None:
    """A line for each build, then each explanation once, with how many builds it is of."""
    for one in outcomes:
        where = f" on {one.host} in {one.cell}" if one.host else ""
        suffix = f": {one.reason}" if one.reason and one.state != "active" else ""
        suffix += f" ({one.code})" if suffix and one.code else ""
        if one.funnel:
            suffix = f": {one.code}, explained below"
        took = f" in {1000 * one.latency_s:.0f} ms" if one.latency_s is not None else ""
        name = f" {printable(one.name)}" if one.name else ""
        line = Text.assemble(one.instance_uuid, f"{name} ", _colour(one.state), printable(f"{where}{took}{suffix}"))
        out.print(line, soft_wrap=True)
    explained = [one for one in outcomes if one.funnel]
    for reason, funnel in {one.reason: one.funnel for one in explained}.items():
        count = sum(one.reason == reason for one in explained)
        out.print(Text(printable(f"{count} x {reason}" if count > 1 else reason), "bold"), soft_wrap=True)
        render_funnel(funnel, out)


def _plain(one: RequestOutcome) -> dict[str, object]:
    return {
        "instance_uuid": one.instance_uuid,
        "state": one.state,
        "host": one.host,
        "cell": one.cell,
        "code": one.code,
        "reason": one.reason,
        "latency_ms": None if one.latency_s is None else round(1000 * one.latency_s, 3),
    }


def show_record(record: BuildRecord, newest: ActionRecord | None = None, *, history: bool) -> None:
    """Print one build. newest: the newest request about it, printed where no host could take that. history: with the
    timeline.
    """
    unplaced = newest if newest is not None and newest.funnel else None
    out.print(Text.assemble(record.instance_uuid, f" {printable(record.name)} ", _colour(record.state)), soft_wrap=True)
    now = record.condition if record.condition != record.state else ""
    waits = next((line for line in record.timeline[-1:] if line.what == "waiting"), None)
    facts = {"now": now, "waiting": f"since {_moment(waits.at)}: {waits.detail}" if waits is not None else None}
    facts |= {"request": f"{record.under_way} is under way" if record.under_way else None}
    facts |= {"flavor": record.flavor, "project": record.project_id, "cell": record.cell, "host": record.host}
    facts |= {"gang": f"{record.gang}, {record.gang_min_count} or more of it start together" if record.gang else None}
    facts |= {"code": record.code, "reason": record.reason, "requested": utc(record.created_at), "by": record.by}
    for name, value in facts.items():
        if value:
            out.print(Text(f"  {name:9} {printable(value)}"), soft_wrap=True)
    if unplaced is not None:
        print_line(f"  {unplaced.kind} {unplaced.state}: {unplaced.reason} (request {unplaced.request_id})")
    render_funnel((unplaced or record).funnel, out)
    if (choice := record.choice) is not None:
        print_line(f"  {choice.what}: {choice.detail}")
        render_scores([choice.scores], out)
    for attempt in record.history:
        outcome = " ".join(part for part in (attempt.outcome, attempt.code, attempt.reason) if part)
        print_line(f"  attempt {attempt.attempt} on {attempt.host}: {outcome}")
    if history:
        out.print()
        rows = [[_moment(line.at), line.actor, line.what, detail_of(line)] for line in record.timeline]
        render_rows(out, ["at (UTC)", "actor", "what", ""], rows)
        render_stages([line.stage_times for line in record.timeline if line.stage_times is not None][-1:], out)


def detail_of(line: TimelineEntry) -> str:
    """The entry of the timeline, who asked, and the consumer of what was lost."""
    held_by = ", ".join(one.consumer for one in line.conflicting_consumers)
    parts = (line.detail, f"by {line.by}" if line.by else "", f"held by {held_by}" if held_by else "")
    return "; ".join(part for part in parts if part)


_COLOURS = {"active": "green", "failed": "red", "refused": "red", "deleted": "dim"}


def _colour(state: str) -> Text:
    return Text(printable(state), _COLOURS.get(state, "yellow"))


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S.%f")[:-3] if at else ""
