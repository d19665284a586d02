"""`berth boot`: a client's build requests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from uuid import UUID

import msgspec
import typer
from msgspec import Struct
from msgspec.structs import replace

from berth.commands.builds import publish_and_follow, report_tracks
from berth.commands.common import EXIT_NO, EXIT_TIME, AsJson, Stop, Timeout, client, parse_uuid, run, settings_of
from berth.commands.options import with_options
from berth.settings import Settings
from bus.clock import new_uuid
from bus.contracts.build import BuildRequest
from bus.contracts.deploy import MAX_USER_DATA, ConfigDrive, ImageSource, NetworkRequest, VolumeRequest
from bus.contracts.deploy import Volumes as VolumeRequests
from bus.contracts.fences import EvacuationPolicy
from bus.contracts.groups import GroupPolicy, ServerGroup
from bus.contracts.patterns import reason_of
from bus.contracts.placement import MAX_MEMBERS

MAX_COUNT = 100_000


class BootOptions(Struct, frozen=True, kw_only=True):
    """The build requested, its placement, and the event to wait for."""

    flavor: Annotated[str, typer.Option(help="The flavor to build; `berth config` lists the flavors.")]
    count: Annotated[int, typer.Option(min=1, max=MAX_COUNT, help="How many.")] = 1
    together: Annotated[
        bool, typer.Option("--together", help="One request for all of them: they start together or not at all.")
    ] = False
    min_count: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_MEMBERS, help="As --together, but this many are enough."),
    ] = None
    name: Annotated[str, typer.Option(help="A name; with --count, a number is added.")] = ""
    project: Annotated[str, typer.Option(help="Whose they are.")] = "default"
    image: Annotated[str, typer.Option(help="The image's name.")] = ""
    image_source: Annotated[str | None, typer.Option(help="Where the image is, for bare metal (a URL).")] = None
    image_sha256: Annotated[str | None, typer.Option(help="Its SHA-256.")] = None
    user_data: Annotated[Path | None, typer.Option(help="A file for cloud-init, for bare metal.")] = None
    key: Annotated[list[Path] | None, typer.Option(help="A file with a public SSH key; repeatable.")] = None
    port: Annotated[
        list[str] | None,
        typer.Option(parser=parse_uuid, metavar="UUID", help="A network port to attach to a node; repeatable."),
    ] = None
    volumes: Annotated[
        Path | None,
        typer.Option(help="A file with the volumes to attach to a node or to boot it from: a JSON list."),
    ] = None
    host: Annotated[str | None, typer.Option(help="Only this host (through the filters).")] = None
    uuid: Annotated[
        str | None,
        typer.Option(parser=parse_uuid, metavar="UUID", help="The instance's UUID, for a request that is repeated."),
    ] = None
    group: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Their server group: one of the project's on record, or a UUID, which exists by being named.",
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
    as_json: AsJson = False


@with_options
def boot(context: typer.Context, *, options: BootOptions) -> None:
    """Ask for machines. With --wait, exit status 1 when one of them failed."""
    requests = requests_of(options)
    _check(requests[-1])
    run(lambda: _boot(settings_of(context), requests, options))


def requests_of(options: BootOptions) -> list[BuildRequest]:
    """One for each machine, or one for all that are to start together. Raises BadParameter."""
    of_gang = _is_gang(options)
    by_uuid = None if options.group is None else _group_by_uuid(options.group, options.policy, options.max_per_host)
    first = BuildRequest(
        instance_uuid=options.uuid or new_uuid(random.SystemRandom()),
        flavor=options.flavor,
        project_id=options.project,
        name=options.name,
        image=options.image,
        host=options.host,
        server_group=by_uuid,
        group=options.group if by_uuid is None else None,
        different_host=tuple(options.different_host or ()),
        same_host=tuple(options.same_host or ()),
        image_source=_image_source(options.image_source, options.image_sha256),
        config_drive=_config_drive(options.user_data, options.key or ()),
        networks=tuple(NetworkRequest(port=one) for one in options.port or ()),
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


async def _boot(settings: Settings, requests: Sequence[BuildRequest], options: BootOptions) -> int:
    """Publish the requests, show what became of them; the exit status."""
    async with client(settings) as berth:
        tracks = await publish_and_follow(berth, requests, timeout_s=options.timeout, as_json=options.as_json)
        ended = not options.wait or await berth.wait(options.timeout)
        report_tracks(tracks, as_json=options.as_json)
    if not ended:
        raise Stop(EXIT_TIME, "timeout", f"{sum(t.ended_at is None for t in tracks)} builds had not ended in time")
    return EXIT_NO if options.wait and any(t.state != "active" for t in tracks) else 0


def _group_by_uuid(group: str, policy: GroupPolicy, max_per_host: int) -> ServerGroup | None:
    """The server group that a UUID names; None: it is the name of one on record."""
    try:
        uuid = str(UUID(group))
    except ValueError:
        return None
    return ServerGroup(uuid=uuid, policy=policy, max_per_host=max_per_host)


def _is_gang(options: BootOptions) -> bool:
    """Whether it is one request for all of them. Raises BadParameter for what no gang can be."""
    of_gang = options.together or options.min_count is not None
    if options.uuid is not None and options.count > 1 and not of_gang:
        raise typer.BadParameter("--uuid names one instance; leave --count away, or add --together")
    if of_gang and options.count > MAX_MEMBERS:
        raise typer.BadParameter(f"at most {MAX_MEMBERS} start together", param_hint="--count")
    if (options.min_count or 1) > options.count:
        raise typer.BadParameter("it is more than --count", param_hint="--min-count")
    if of_gang and options.count > 1 and options.port:
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


def _volumes(options: BootOptions) -> tuple[VolumeRequest, ...]:
    """The volumes that a file lists; their properties may hold secrets, and are not shown. Raises BadParameter."""
    path = options.volumes
    if path is None:
        return ()
    if options.count > 1:
        raise typer.BadParameter("a volume is one machine's; leave --count away", param_hint="--volumes")
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


# A user's possible mistakes, in the words of the command line.
_RULES = {
    "project_id": ("--project", "letters, digits, _ and -, at most 64"),
    "flavor": ("--flavor", "1 to 255 characters"),
    "name": ("--name", "at most 255 characters"),
    "image": ("--image", "at most 255 characters"),
    "host": ("--host", "at most 255 characters"),
}


def _check(request: BuildRequest) -> None:
    """Refuse here the requests that the scheduler would refuse as malformed. Raises typer.BadParameter."""
    try:
        msgspec.convert(msgspec.to_builtins(request), BuildRequest)
    except msgspec.ValidationError as error:
        name = reason_of(error).rpartition("$.")[2].rstrip("`")
        option, rule = _RULES.get(name, ("", reason_of(error)))
        raise typer.BadParameter(rule, param_hint=option or None) from error
