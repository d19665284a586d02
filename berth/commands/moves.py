"""`berth migrate`, `resize`, `confirm`, `start`, ...: requests about an instance that has been built."""

from __future__ import annotations

import contextlib
import random
import secrets
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
import typer
from rich.text import Text

from berth.client import BuildClient
from berth.client.moves import MoveClient
from berth.commands.common import (
    EXIT_NO,
    EXIT_TIME,
    EXIT_USAGE,
    QUERY_TIMEOUT_S,
    AsJson,
    Stop,
    Timeout,
    client,
    err,
    out,
    pairs_of,
    parse_uuid,
    print_json,
    run,
    settings_of,
)
from berth.render import printable, render_funnel, render_rows
from berth.settings import Settings
from bus.clock import new_uuid
from bus.contracts.build import BuildQuery
from bus.contracts.moves import (
    Condition,
    MoveEvent,
    MoveKind,
    MovePage,
    MoveQuery,
    MoveRecord,
    MoveRequest,
    MoveState,
    ResizePolicy,
)
from bus.contracts.patterns import reason_of

Instance = Annotated[str, typer.Argument(help="The instance's UUID.", parser=parse_uuid, metavar="UUID")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait for the end; exit status 1 when it failed.")]
RequestId = Annotated[
    str | None,
    typer.Option("--id", parser=parse_uuid, metavar="UUID", help="The request's own id, for one that is repeated."),
]
Host = Annotated[str | None, typer.Option("--host", help="Only to this host (through the filters).")]
Attempts = Annotated[
    int | None, typer.Option("--max-attempts", min=1, max=9, help="Hosts tried at most; else the scheduler's setting.")
]
AutoConfirm = Annotated[
    float | None,
    typer.Option(min=0, max=30 * 86_400, help="Seconds after which it is confirmed by itself; 0: at once."),
]


def migrate(
    context: typer.Context,
    uuid: Instance,
    live: Annotated[bool, typer.Option("--live", help="While it runs; nothing to confirm afterwards.")] = False,
    host: Host = None,
    max_attempts: Attempts = None,
    auto_confirm: AutoConfirm = None,
    request_id: RequestId = None,
    wait: Wait = False,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
) -> None:
    """Move an instance to another host of its cell."""
    kind = MoveKind.LIVE_MIGRATE if live else MoveKind.MIGRATE
    if live and auto_confirm is not None:
        raise typer.BadParameter("a live migration has nothing to confirm", param_hint="--auto-confirm")
    fields = {"host": host, "max_attempts": max_attempts, "auto_confirm_s": auto_confirm}
    _ask(context, uuid, kind, fields, request_id=request_id, wait=wait, timeout_s=timeout, as_json=as_json)


def resize(
    context: typer.Context,
    uuid: Instance,
    flavor: Annotated[str, typer.Option(help="The new flavor.")],
    policy: Annotated[ResizePolicy, typer.Option(help="Where it may end.")] = ResizePolicy.ANY,
    host: Host = None,
    max_attempts: Attempts = None,
    auto_confirm: AutoConfirm = None,
    request_id: RequestId = None,
    wait: Wait = False,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
) -> None:
    """Give an instance another flavor.

    On another host, or where it is; confirm or revert follows.
    """
    fields = {
        "flavor": flavor,
        "policy": policy.value,
        "host": host,
        "max_attempts": max_attempts,
        "auto_confirm_s": auto_confirm,
    }
    _ask(context, uuid, MoveKind.RESIZE, fields, request_id=request_id, wait=wait, timeout_s=timeout, as_json=as_json)


def evacuate(
    context: typer.Context,
    uuid: Instance,
    host: Host = None,
    max_attempts: Attempts = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also when its fenced host has reported since that it runs.")
    ] = False,
    request_id: RequestId = None,
    wait: Wait = False,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
) -> None:
    """Build an instance of a dead host again elsewhere.

    An operator has fenced the host before (`berth hosts fence`). Refused when the host has reported since that the
    instance runs there: the fence did not hold. A shelved instance is offloaded instead.
    """
    fields = {"host": host, "max_attempts": max_attempts, "fenced": True, "force": force}
    _ask(context, uuid, MoveKind.EVACUATE, fields, request_id=request_id, wait=wait, timeout_s=timeout, as_json=as_json)


def rebuild(
    context: typer.Context,
    uuid: Instance,
    image: Annotated[str, typer.Option(help="The image's name.")],
    properties: Annotated[
        list[str] | None,
        typer.Option(
            "--image-property", metavar="NAME=VALUE", help="A property of the image, for filters; may be repeated."
        ),
    ] = None,
    request_id: RequestId = None,
    wait: Wait = False,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
) -> None:
    """Build an instance again from an image, on the same host.

    Another image is checked by the filters that look at images, as at a build.
    """
    fields = {"image": image, "image_properties": pairs_of(properties, "--image-property") if properties else None}
    _ask(context, uuid, MoveKind.REBUILD, fields, request_id=request_id, wait=wait, timeout_s=timeout, as_json=as_json)


def rescue(
    context: typer.Context,
    uuid: Instance,
    password: Annotated[
        str | None,
        typer.Option(
            envvar="BERTH_RESCUE_PASSWORD",
            show_envvar=True,
            help="The password of the rescue system; without it one is made and printed.",
        ),
    ] = None,
    request_id: RequestId = None,
    wait: Wait = False,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
) -> None:
    """Boot an instance from a rescue system.

    Its own disks are beside it.
    """
    chosen = password or secrets.token_urlsafe(12)
    if password is None:
        err.print(f"password: {chosen}", soft_wrap=True)
    fields = {"rescue_password": chosen}
    _ask(context, uuid, MoveKind.RESCUE, fields, request_id=request_id, wait=wait, timeout_s=timeout, as_json=as_json)


def shelve(
    context: typer.Context,
    uuid: Instance,
    offload: Annotated[bool, typer.Option("--offload", help="Give up its host as well.")] = False,
    request_id: RequestId = None,
    wait: Wait = False,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
) -> None:
    """Stop an instance and keep its image. A shelved one that is offloaded later keeps only that."""
    fields = {"offload": offload}
    _ask(context, uuid, MoveKind.SHELVE, fields, request_id=request_id, wait=wait, timeout_s=timeout, as_json=as_json)


def unshelve(
    context: typer.Context,
    uuid: Instance,
    host: Host = None,
    max_attempts: Attempts = None,
    request_id: RequestId = None,
    wait: Wait = False,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
) -> None:
    """Start a shelved instance again.

    An offloaded one starts on a host that is chosen anew; one that is not, where it is, and is refused with --host.
    """
    fields = {"host": host, "max_attempts": max_attempts}
    _ask(context, uuid, MoveKind.UNSHELVE, fields, request_id=request_id, wait=wait, timeout_s=timeout, as_json=as_json)


def _simple(kind: MoveKind, sentence: str) -> Any:
    """A command that takes an instance and nothing else."""

    def command(
        context: typer.Context,
        uuid: Instance,
        request_id: RequestId = None,
        wait: Wait = False,
        timeout: Timeout = 600.0,
        as_json: AsJson = False,
    ) -> None:
        _ask(context, uuid, kind, {}, request_id=request_id, wait=wait, timeout_s=timeout, as_json=as_json)

    command.__doc__ = sentence
    return command


confirm = _simple(MoveKind.CONFIRM, "Keep a resized or migrated instance where it is.")


def revert(
    context: typer.Context,
    uuid: Instance,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Also when it came from another cell and this one's database was set back since: you have seen that"
            " the former cell still keeps its machine.",
        ),
    ] = False,
    request_id: RequestId = None,
    wait: Wait = False,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
) -> None:
    """Take a resized or migrated instance back to its source."""
    fields = {"force": force}
    _ask(context, uuid, MoveKind.REVERT, fields, request_id=request_id, wait=wait, timeout_s=timeout, as_json=as_json)


abort = _simple(MoveKind.ABORT, "End a move that has not reached its destination.")
offload = _simple(MoveKind.OFFLOAD, "Give up the host of a shelved instance.")
start = _simple(MoveKind.START, "Start an instance.")
stop = _simple(MoveKind.STOP, "Stop an instance; it keeps its allocation.")

unrescue = _simple(MoveKind.UNRESCUE, "Boot a rescued instance from its own disks again.")


def moves(
    context: typer.Context,
    instance: Annotated[
        str | None, typer.Option(parser=parse_uuid, metavar="UUID", help="Only about this instance.")
    ] = None,
    project: Annotated[str | None, typer.Option(help="Only of this project.")] = None,
    under_way: Annotated[
        bool | None, typer.Option("--under-way/--ended", help="Only those that have not ended, or have.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="The most to list, newest first.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List moves and other requests, newest first."""

    async def body() -> None:
        async with client(settings_of(context)) as berth:
            query = MoveQuery(instance_uuid=instance, project_id=project, under_way=under_way, limit=limit)
            page = await berth.bus.request(query, MovePage, timeout_s=QUERY_TIMEOUT_S)
        if as_json:
            print_json(page.moves)
            return
        rows: list[list[str | Text]] = [
            [
                one.request_id,
                one.instance_uuid,
                one.kind.value,
                _colour(one.state),
                one.cell or "",
                one.host or "",
                datetime.fromtimestamp(one.updated_at, UTC).strftime("%Y-%m-%d %H:%M:%S"),
                f"{one.code}: {one.reason}" if one.code else "",
            ]
            for one in page.moves
        ]
        render_rows(out, ["request", "instance", "what", "state", "cell", "host", "since (UTC)", "why"], rows)

    run(body)


@contextlib.asynccontextmanager
async def _clients(settings: Settings) -> AsyncIterator[tuple[BuildClient, MoveClient]]:
    async with client(settings) as berth:
        following = MoveClient(berth.bus, clock=berth.clock, process=berth.process)
        await following.open()
        try:
            yield berth, following
        finally:
            await following.close()


def _ask(
    context: typer.Context,
    uuid: str,
    kind: MoveKind,
    fields: dict[str, Any],
    *,
    request_id: str | None,
    wait: bool,
    timeout_s: float,
    as_json: bool,
) -> None:
    async def body() -> int:
        async with _clients(settings_of(context)) as (berth, following):
            page = await berth.query(BuildQuery(instance_uuid=uuid), timeout_s=QUERY_TIMEOUT_S)
            if not page.builds:
                raise Stop(EXIT_NO, "instance.unknown", f"there is no instance {uuid}")
            request = _request(uuid, page.builds[0].project_id, kind, fields, request_id)
            await following.ask(request)
            if not wait:
                _show(request, None, as_json)
                return 0
            if not await following.wait(timeout_s):
                raise Stop(EXIT_TIME, "timeout", f"{kind} {request.request_id} had not ended in time")
            end = following.ended[request.request_id]
        _show(request, end, as_json)
        return 0 if end.state is MoveState.DONE else EXIT_NO

    run(body)


def _request(uuid: str, project: str, kind: MoveKind, fields: dict[str, Any], request_id: str | None) -> MoveRequest:
    """The message. Raises Stop for requests that the scheduler would refuse as malformed."""
    named = {name: value for name, value in fields.items() if value is not None}
    of_whom = {
        "request_id": request_id or new_uuid(random.SystemRandom()),
        "instance_uuid": uuid,
        "project_id": project,
    }
    try:
        return msgspec.convert({**of_whom, "kind": kind.value, **named}, MoveRequest)
    except msgspec.ValidationError as error:
        raise Stop(EXIT_USAGE, "request.invalid", reason_of(error)) from error


def _show(request: MoveRequest, end: MoveEvent | MoveRecord | None, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "request_id": request.request_id,
                "instance_uuid": request.instance_uuid,
                "kind": request.kind.value,
                "state": end.state.value if end is not None else "accepted",
                "host": end.host if end is not None else None,
                "cell": end.cell if end is not None else None,
                "code": end.code if end is not None else "",
                "reason": end.reason if end is not None else "",
            }
        )
        return
    state = "accepted" if end is None else end.state.value
    where = f" on {end.host} in {end.cell}" if end is not None and end.host else ""
    why = f": {end.reason or end.code}" if end is not None and end.code else ""
    line = Text.assemble(f"{request.instance_uuid} {request.kind} ", _colour(state), printable(f"{where}{why}"))
    out.print(line, soft_wrap=True)
    out.print(Text(f"  request {request.request_id}", "dim"), soft_wrap=True)
    if isinstance(end, MoveEvent) and end.condition is Condition.RESIZED:
        uuid = request.instance_uuid
        out.print(f"  it keeps its old room until you `berth confirm {uuid}` or `berth revert {uuid}`", soft_wrap=True)
    if end is not None and end.funnel:
        render_funnel(end.funnel, out)


_COLOURS = {"done": "green", "failed": "red", "refused": "red"}


def _colour(state: str) -> Text:
    return Text(state, _COLOURS.get(state, "yellow"))
