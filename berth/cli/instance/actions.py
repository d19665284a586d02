"""`berth instance migrate`, `resize`, `confirm`, `start`, ...: requests about an instance that has been built."""

from __future__ import annotations

import random
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import typer
from msgspec import Struct
from msgspec.structs import asdict
from rich.text import Text

from berth.cli.common import (
    MAX_LIMIT,
    Exit,
    InProject,
    Instance,
    Stop,
    Timeout,
    Wait,
    Yes,
    ask_first,
    further,
    is_uuid,
    one_of,
    pairs_of,
    parse_uuid,
)
from berth.cli.http import connected, each, ended, instance_of
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
from berth.client import AsyncClient
from berth.text import printable, render_funnel
from bus.clock import new_uuid
from bus.contracts.actions import (
    ActionKind,
    ActionRecord,
    ActionRequest,
    ActionState,
    Condition,
    ResizePolicy,
)
from bus.contracts.base import reason_of
from bus.contracts.build import BuildRecord
from bus.faults import Fault


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
    context: typer.Context,
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
    return await _request(context, instance, kind, request, **asdict(to), auto_confirm_s=auto_confirm)


async def resize(
    context: typer.Context,
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
    return await _request(context, instance, ActionKind.RESIZE, request, **fields, **asdict(to))


async def evacuate(
    context: typer.Context,
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
    return await _request(context, instance, ActionKind.EVACUATE, request, **asdict(to), fenced=True, force=force)


async def rebuild(
    context: typer.Context,
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
    return await _request(context, instance, ActionKind.REBUILD, request, **named)


async def reboot(
    context: typer.Context,
    instance: Instance,
    soft: Annotated[bool, typer.Option("--soft", help="Have its own system shut down first; it must run.")] = False,
    *,
    request: RequestOptions,
) -> int:
    """Switch an instance off and on again.

    A stopped one starts.
    """
    return await _request(context, instance, ActionKind.REBOOT, request, soft=soft)


async def rescue(
    context: typer.Context,
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
    return await _request(context, instance, ActionKind.RESCUE, request, rescue_password=chosen)


async def shelve(
    context: typer.Context,
    instance: Instance,
    offload: Annotated[bool, typer.Option("--offload", help="Release its host as well.")] = False,
    *,
    request: RequestOptions,
) -> int:
    """Stop an instance and keep its image. A shelved one that is offloaded later keeps only that."""
    return await _request(context, instance, ActionKind.SHELVE, request, offload=offload)


async def unshelve(
    context: typer.Context, instance: Instance, *, to: DestinationOptions, request: RequestOptions
) -> int:
    """Start a shelved instance again.

    An offloaded one starts on a newly chosen host; one that is not, where it is, and is refused with --host.
    """
    return await _request(context, instance, ActionKind.UNSHELVE, request, **asdict(to))


def _simple(kind: ActionKind, help_text: str) -> Any:
    """A command that takes an instance and nothing else."""

    async def command(context: typer.Context, instance: Instance, *, request: RequestOptions) -> int:
        return await _request(context, instance, kind, request)

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


async def actions(context: typer.Context, *, options: ActionListOptions) -> None:
    """List actions, newest first."""
    async with connected(context) as berth:
        about = None
        if options.instance is not None:
            about = (await instance_of(berth, options.instance, options.project)).instance_uuid

        async def read() -> ListedItems[ActionRecord]:
            found = await berth.list_actions(
                instance=about, project=options.project, under_way=options.under_way, limit=options.limit
            )
            return ListedItems(found, further(found, options.limit))

        await print_list(read, ACTIONS, options)


async def show_action(
    context: typer.Context,
    request_id: Annotated[str, typer.Argument(help="The action's id, or its first letters.", metavar="ACTION")],
    form: As = Form.TABLE,
) -> None:
    """Show one action: its state, and the reason."""
    async with connected(context) as berth:
        if is_uuid(request_id):
            found = await berth.show_action(parse_uuid(request_id))
        else:
            known = {one.request_id: one for one in await berth.list_actions(limit=MAX_LIMIT)}
            kinds = {one.request_id: one.kind.value for one in known.values()}
            found = known[one_of("action", "action.unknown", request_id, kinds)]
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


async def _request(
    context: typer.Context, name: str, kind: ActionKind, options: RequestOptions, **fields: object
) -> int:
    """Request something of one instance and print it, or with --wait its end; returns the exit status."""
    async with connected(context) as berth:
        found = await instance_of(berth, name, options.project)
        return await request_all(berth, kind, [found], options, as_list=False, **fields)


async def request_all(
    berth: AsyncClient,
    kind: ActionKind,
    records: Sequence[BuildRecord],
    options: RequestOptions,
    *,
    as_list: bool = True,
    **fields: object,
) -> int:
    """Request the same of several instances, and print each or its end; returns the exit status. fields: of the
    message. as_list: the form of data.
    """
    if options.request_id is not None and len(records) > 1:
        raise typer.BadParameter("an id is one request's", param_hint="--id")
    requests = [_message(one.instance_uuid, one.project_id, kind, fields, options.request_id) for one in records]
    answers = await each(
        requests, lambda one: berth.create_action(one.instance_uuid, _body(one)), retry_for_s=options.timeout
    )
    faults = [answer for answer in answers if isinstance(answer, Fault)]
    accepted = [one for one, answer in zip(requests, answers, strict=True) if not isinstance(answer, Fault)]
    ends, in_time = list[ActionRecord](), True
    if options.wait:
        ids = [one.request_id for one in accepted]
        try:
            ends, in_time = await ended(ids, berth.show_action, _is_over, timeout_s=options.timeout)
        except Fault:
            await _report(berth, accepted, (), options, as_list=as_list)  # they are on record, whatever is away now
            raise
    await _report(berth, accepted, ends, options, as_list=as_list)
    for fault in faults:
        raise fault
    if not in_time:
        raise Stop(Exit.TIME, "timeout", f"{sum(not _is_over(one) for one in ends)} had not ended in time")
    return Exit.NO if any(end.state is not ActionState.DONE for end in ends) else 0


async def _report(
    berth: AsyncClient,
    accepted: Sequence[ActionRequest],
    ends: Sequence[ActionRecord],
    options: RequestOptions,
    *,
    as_list: bool,
) -> None:
    """Print each request, with its end where they were waited for."""
    outcomes = [(request, ends[at] if ends else None) for at, request in enumerate(accepted)]
    if options.form.is_data:
        plain = [_plain(*both) for both in outcomes]
        print_data(plain if as_list or not plain else plain[0], options.form)
        return
    for request, end in outcomes:
        _show(request, end, await _is_resized(berth, end))


def _is_over(one: ActionRecord) -> bool:
    return one.terminal


async def _is_resized(berth: AsyncClient, end: ActionRecord | None) -> bool:
    """Whether an operator has to confirm or revert now."""
    if end is None or end.state is not ActionState.DONE or end.kind not in (ActionKind.RESIZE, ActionKind.MIGRATE):
        return False
    return (await berth.show_build(end.instance_uuid)).condition == Condition.RESIZED


def _body(request: ActionRequest) -> dict[str, object]:
    """The request without what the server fills in."""
    fields: dict[str, object] = msgspec.to_builtins(request)
    return {name: value for name, value in fields.items() if name not in ("type", "by")}


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
        return msgspec.convert({**of_instance, "kind": kind.value, **named}, ActionRequest)
    except msgspec.ValidationError as error:
        raise Stop(Exit.USAGE, "request.invalid", reason_of(error)) from error


def _show(request: ActionRequest, end: ActionRecord | None, is_resized: bool) -> None:
    state = "accepted" if end is None else end.state.value
    where = f" on {end.host} in {end.cell}" if end is not None and end.host else ""
    suffix = f": {end.reason or end.code}" if end is not None and end.code else ""
    line = Text.assemble(f"{request.instance_uuid} {request.kind} ", _colour(state), printable(f"{where}{suffix}"))
    out.print(line, soft_wrap=True)
    out.print(Text(f"  request {request.request_id}", "dim"), soft_wrap=True)
    if is_resized:
        uuid = request.instance_uuid
        out.print(
            f"  its old allocation stays until `berth instance confirm {uuid}` or `berth instance revert {uuid}`",
            soft_wrap=True,
        )
    if end is not None and end.funnel:
        render_funnel(end.funnel, out)


def _plain(request: ActionRequest, end: ActionRecord | None) -> dict[str, object]:
    of = {"request_id": request.request_id, "instance_uuid": request.instance_uuid, "kind": request.kind.value}
    came = {name: getattr(end, name, None) for name in ("host", "cell")}
    reason = {name: getattr(end, name, "") for name in ("code", "reason")}
    return {**of, "state": "accepted" if end is None else end.state.value, **came, **reason}


_COLOURS = {"done": "green", "failed": "red", "refused": "red"}


def _colour(state: str) -> Text:
    return Text(state, _COLOURS.get(state, "yellow"))
