"""`berth instance migrate`, `resize`, `confirm`, `start`, ...: requests about an instance that has been built."""

from __future__ import annotations

import contextlib
import random
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import typer
from msgspec import Struct
from msgspec.structs import asdict, replace
from rich.text import Text

from berth.bus_client import BuildClient
from berth.bus_client.actions import ActionClient
from berth.cli.common import (
    QUERY_TIMEOUT_S,
    Exit,
    InProject,
    Instance,
    Stop,
    Timeout,
    Wait,
    Yes,
    ask_first,
    client,
    decided_by,
    further,
    instance_of,
    is_uuid,
    one_of,
    pairs_of,
    parse_uuid,
)
from berth.cli.instance.instances import ImageSha256, ImageSourceUrl, image_source_of
from berth.cli.output import (
    As,
    Cell,
    Form,
    Id,
    ListedItems,
    ListOutput,
    Table,
    Time,
    err,
    out,
    print_data,
    print_list,
    print_one,
)
from berth.config.settings import Settings
from berth.text import printable, render_funnel
from bus.clock import new_uuid
from bus.contracts.actions import (
    ActionEvent,
    ActionKind,
    ActionPage,
    ActionQuery,
    ActionRecord,
    ActionRequest,
    ActionState,
    Condition,
    ResizePolicy,
)
from bus.contracts.base import reason_of
from bus.contracts.build import BuildRecord


class RequestOptions(Struct, frozen=True, kw_only=True):
    """The options of each request about an instance."""

    project: InProject = None
    request_id: Annotated[
        str | None,
        typer.Option("--id", parser=parse_uuid, metavar="UUID", help="The request's own id, for one that is repeated."),
    ] = None
    wait: Wait = False
    timeout: Timeout = 600.0
    form: As = Form.TABLE


TO_HOST = (
    "Only to this host (through the filters). In another cell (the setting actions_across_cells) it is built from a"
    " snapshot: the disk at the source goes."
)


class DestinationOptions(Struct, frozen=True, kw_only=True):
    """The options of a request that chooses a host."""

    host: Annotated[str | None, typer.Option("--host", help=TO_HOST)] = None
    max_attempts: Annotated[
        int | None,
        typer.Option("--max-attempts", min=1, max=9, help="Hosts tried at most; else the scheduler's setting."),
    ] = None


AutoConfirm = Annotated[
    float | None,
    typer.Option(min=0, max=30 * 86_400, help="Seconds after which it is confirmed by itself; 0: at once."),
]


async def migrate(
    settings: Settings,
    instance: Instance,
    live: Annotated[bool, typer.Option("--live", help="While it runs; nothing to confirm afterwards.")] = False,
    *,
    to: DestinationOptions,
    auto_confirm: AutoConfirm = None,
    request: RequestOptions,
) -> int:
    """Move an instance to another host.

    To one of another cell only where the schedulers' setting `actions_across_cells` allows it (off by default).
    """
    kind = ActionKind.LIVE_MIGRATE if live else ActionKind.MIGRATE
    if live and auto_confirm is not None:
        raise typer.BadParameter("a live migration has nothing to confirm", param_hint="--auto-confirm")
    return await _request(settings, instance, kind, request, **asdict(to), auto_confirm_s=auto_confirm)


async def resize(
    settings: Settings,
    instance: Instance,
    flavor: Annotated[str, typer.Option(help="The new flavor.")],
    policy: Annotated[
        ResizePolicy, typer.Option(help="Which hosts it may end on: any, the same, or another.")
    ] = ResizePolicy.ANY,
    *,
    to: DestinationOptions,
    auto_confirm: AutoConfirm = None,
    request: RequestOptions,
) -> int:
    """Give an instance another flavor.

    On another host, or where it is; confirm or revert follows.
    """
    fields = {"flavor": flavor, "policy": policy.value, "auto_confirm_s": auto_confirm}
    return await _request(settings, instance, ActionKind.RESIZE, request, **fields, **asdict(to))


async def evacuate(
    settings: Settings,
    instance: Instance,
    *,
    to: DestinationOptions,
    force: Annotated[
        bool, typer.Option("--force", help="Also when its fenced host has reported since that it runs.")
    ] = False,
    request: RequestOptions,
) -> int:
    """Build an instance of a dead host again elsewhere.

    An operator has fenced the host before (`berth host fence`). Refused when the host has reported since that the
    instance runs there in spite of the fence. A shelved instance is offloaded instead.
    """
    return await _request(settings, instance, ActionKind.EVACUATE, request, **asdict(to), fenced=True, force=force)


async def rebuild(
    settings: Settings,
    instance: Instance,
    image: Annotated[str, typer.Option(help="The image's name.")],
    properties: Annotated[
        list[str] | None,
        typer.Option(
            "--image-property", metavar="NAME=VALUE", help="A property of the image, for filters; may be repeated."
        ),
    ] = None,
    source: ImageSourceUrl = None,
    sha256: ImageSha256 = None,
    yes: Yes = False,
    *,
    request: RequestOptions,
) -> int:
    """Build an instance again from an image, on the same host.

    The contents of its disk are lost.
    Another image is checked by the filters that look at images, as at a build.
    """
    pairs = pairs_of(properties, "--image-property") if properties else None
    named = {"image": image, "image_properties": pairs, "image_source": image_source_of(source, sha256)}
    ask_first(f"Replace the disk of {instance} by image {image}", yes=yes)
    return await _request(settings, instance, ActionKind.REBUILD, request, **named)


async def reboot(
    settings: Settings,
    instance: Instance,
    soft: Annotated[bool, typer.Option("--soft", help="Have its own system shut down first; it must run.")] = False,
    *,
    request: RequestOptions,
) -> int:
    """Switch an instance off and on again.

    A stopped one starts.
    """
    return await _request(settings, instance, ActionKind.REBOOT, request, soft=soft)


async def rescue(
    settings: Settings,
    instance: Instance,
    password: Annotated[
        str | None,
        typer.Option(
            envvar="BERTH_RESCUE_PASSWORD",
            show_envvar=True,
            help="The password of the rescue system; without it one is made and printed.",
        ),
    ] = None,
    *,
    request: RequestOptions,
) -> int:
    """Boot an instance from a rescue system.

    Its own disks are attached as well.
    """
    chosen = password or secrets.token_urlsafe(12)
    if password is None:
        err.print(f"password: {chosen}", soft_wrap=True)
    return await _request(settings, instance, ActionKind.RESCUE, request, rescue_password=chosen)


async def shelve(
    settings: Settings,
    instance: Instance,
    offload: Annotated[bool, typer.Option("--offload", help="Release its host as well.")] = False,
    *,
    request: RequestOptions,
) -> int:
    """Stop an instance and keep its image. A shelved one that is offloaded later keeps only that."""
    return await _request(settings, instance, ActionKind.SHELVE, request, offload=offload)


async def unshelve(settings: Settings, instance: Instance, *, to: DestinationOptions, request: RequestOptions) -> int:
    """Start a shelved instance again.

    An offloaded one starts on a newly chosen host; one that is not, where it is, and is refused with --host.
    """
    return await _request(settings, instance, ActionKind.UNSHELVE, request, **asdict(to))


def _simple(kind: ActionKind, help_text: str) -> Any:
    """A command that takes an instance and nothing else."""

    async def command(settings: Settings, instance: Instance, *, request: RequestOptions) -> int:
        return await _request(settings, instance, kind, request)

    command.__doc__ = help_text
    return command


confirm = _simple(ActionKind.CONFIRM, "Keep a resized or migrated instance where it is.")
revert = _simple(ActionKind.REVERT, "Take a resized or migrated instance back to its source.")
abort = _simple(ActionKind.ABORT, "End a move that has not reached its destination.")
offload = _simple(ActionKind.OFFLOAD, "Release the host of a shelved instance.")
start = _simple(ActionKind.START, "Start an instance.")
unrescue = _simple(ActionKind.UNRESCUE, "Boot a rescued instance from its own disks again.")


class ActionListOptions(ListOutput, frozen=True, kw_only=True):
    """The options of `berth action list`."""

    instance: Annotated[
        str | None, typer.Option(metavar="INSTANCE", help="Only about this instance: its name, UUID or first letters.")
    ] = None
    project: Annotated[str | None, typer.Option(help="Only of this project.")] = None
    under_way: Annotated[
        bool | None, typer.Option("--under-way/--ended", help="Only those that have not ended, or have.")
    ] = None
    limit: Annotated[int, typer.Option(min=1, max=1000, help="The most to list, newest first.")] = 50


async def actions(settings: Settings, *, options: ActionListOptions) -> None:
    """List actions, newest first."""
    query = ActionQuery(project_id=options.project, under_way=options.under_way, limit=options.limit)
    async with client(settings) as berth:
        if options.instance is not None:
            found = await instance_of(berth, options.instance, options.project, timeout_s=QUERY_TIMEOUT_S)
            query = replace(query, instance_uuid=found.instance_uuid)

        async def read() -> ListedItems[ActionRecord]:
            page = await berth.bus.request(query, ActionPage, timeout_s=QUERY_TIMEOUT_S)
            return ListedItems(page.actions, further(page.actions, options.limit))

        await print_list(read, ACTIONS, options)


async def show_action(
    settings: Settings,
    request_id: Annotated[str, typer.Argument(help="The action's id, or its first letters.", metavar="ACTION")],
    form: As = Form.TABLE,
) -> None:
    """Show one action: its state, and the reason."""
    async with client(settings) as berth:
        query = ActionQuery(request_id=parse_uuid(request_id)) if is_uuid(request_id) else ActionQuery(limit=1000)
        page = await berth.bus.request(query, ActionPage, timeout_s=QUERY_TIMEOUT_S)
    wanted = one_of("action", "action.unknown", request_id, {one.request_id: one.kind.value for one in page.actions})
    found = next(one for one in page.actions if one.request_id == wanted)
    if form.is_data:
        print_data(found, form)
        return
    print_one(ACTIONS, found)
    render_funnel(found.funnel, out)


def _row(one: ActionRecord) -> list[Cell]:
    reason = f"{one.code}: {one.reason}" if one.code else ""
    of: list[Cell] = [Id(one.request_id), Id(one.instance_uuid), one.kind.value, _colour(one.state), one.host or ""]
    return [*of, Time(one.updated_at), reason, one.cell or "", one.project_id, Time(one.created_at)]


ACTIONS = Table("action instance what state host since reason | cell project requested", _row)


@contextlib.asynccontextmanager
async def _clients(settings: Settings) -> AsyncIterator[tuple[BuildClient, ActionClient]]:
    async with client(settings) as berth:
        following = ActionClient(berth.bus, clock=berth.clock, process=berth.process)
        await following.open()
        try:
            yield berth, following
        finally:
            await following.close()


async def _request(settings: Settings, name: str, kind: ActionKind, options: RequestOptions, **fields: object) -> int:
    """Publish a request and print it, or with --wait its end; the exit status. fields: of the message."""
    async with _clients(settings) as (berth, following):
        found = await instance_of(berth, name, options.project, timeout_s=QUERY_TIMEOUT_S)
        request = _message(found.instance_uuid, found.project_id, kind, fields, options.request_id)
        await following.ask(request)
        if not options.wait:
            _show(request, None, options.form)
            return 0
        if not await following.wait(options.timeout):
            raise Stop(Exit.TIME, "timeout", f"{kind} {request.request_id} had not ended in time")
        end = following.ended[request.request_id]
    _show(request, end, options.form)
    return 0 if end.state is ActionState.DONE else Exit.NO


async def request_all(
    settings: Settings, kind: ActionKind, records: Sequence[BuildRecord], options: RequestOptions
) -> int:
    """Publish the same request about several instances, and print each or its end; returns the exit status."""
    if options.request_id is not None and len(records) > 1:
        raise typer.BadParameter("an id is one request's", param_hint="--id")
    async with _clients(settings) as (_, following):
        requests = [_message(one.instance_uuid, one.project_id, kind, {}, options.request_id) for one in records]
        for request in requests:
            await following.ask(request)
        ended = not options.wait or await following.wait(options.timeout)
    ends = [following.ended.get(request.request_id) if options.wait else None for request in requests]
    if options.form.is_data:
        print_data([_plain(*both) for both in zip(requests, ends, strict=True)], options.form)
    else:
        for request, end in zip(requests, ends, strict=True):
            _show(request, end, options.form)
    if not ended:
        raise Stop(Exit.TIME, "timeout", f"{sum(end is None for end in ends)} had not ended in time")
    failed = options.wait and any(end is None or end.state is not ActionState.DONE for end in ends)
    return Exit.NO if failed else 0


def _message(
    uuid: str, project: str, kind: ActionKind, fields: Mapping[str, object], request_id: str | None
) -> ActionRequest:
    """The message. Raises Stop for requests that the scheduler would refuse as malformed."""
    named = {name: value for name, value in fields.items() if value is not None}
    of_instance = {
        "request_id": request_id or new_uuid(random.SystemRandom()),
        "instance_uuid": uuid,
        "project_id": project,
    }
    try:
        by = {"by": decided_by(None)}
        return msgspec.convert({**of_instance, **by, "kind": kind.value, **named}, ActionRequest)
    except msgspec.ValidationError as error:
        raise Stop(Exit.USAGE, "request.invalid", reason_of(error)) from error


def _show(request: ActionRequest, end: ActionEvent | ActionRecord | None, form: Form) -> None:
    if form.is_data:
        print_data(_plain(request, end), form)
        return
    state = "accepted" if end is None else end.state.value
    where = f" on {end.host} in {end.cell}" if end is not None and end.host else ""
    suffix = f": {end.reason or end.code}" if end is not None and end.code else ""
    line = Text.assemble(f"{request.instance_uuid} {request.kind} ", _colour(state), printable(f"{where}{suffix}"))
    out.print(line, soft_wrap=True)
    out.print(Text(f"  request {request.request_id}", "dim"), soft_wrap=True)
    if isinstance(end, ActionEvent) and end.condition is Condition.RESIZED:
        uuid = request.instance_uuid
        out.print(
            f"  its old allocation stays until `berth instance confirm {uuid}` or `berth instance revert {uuid}`",
            soft_wrap=True,
        )
    if end is not None and end.funnel:
        render_funnel(end.funnel, out)


def _plain(request: ActionRequest, end: ActionEvent | ActionRecord | None) -> dict[str, object]:
    of = {"request_id": request.request_id, "instance_uuid": request.instance_uuid, "kind": request.kind.value}
    came = {name: getattr(end, name, None) for name in ("host", "cell")}
    reason = {name: getattr(end, name, "") for name in ("code", "reason")}
    return {**of, "state": "accepted" if end is None else end.state.value, **came, **reason}


_COLOURS = {"done": "green", "failed": "red", "refused": "red"}


def _colour(state: str) -> Text:
    return Text(state, _COLOURS.get(state, "yellow"))
