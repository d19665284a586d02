"""Messages between clients and the scheduler: build, delete, query, and the event stream.

A client's message with a field that does not exist is refused by name: a mistyped `hostt` would build anywhere. Between
workers unknown fields are ignored, so that a newer one may talk to an older one during an upgrade.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated
from uuid import UUID, uuid5

from msgspec import Meta as Bound
from msgspec import Struct, structs

from bus.contracts.base import AskedBy, Attempt, ImageName, Label, Message, Reason, ShownZone, Uuid, Word, Zone
from bus.contracts.deploy import ConfigDrive, ImageSource, Networks
from bus.contracts.deploy import Volumes as VolumeRequests
from bus.contracts.operations import EvacuationPolicy, HostAdminState
from bus.contracts.placement import MAX_MEMBERS, ConflictingConsumer, ServerGroup
from bus.contracts.stages import StageTimes


class BuildState(StrEnum):
    """Where a build request stands, as its client sees it."""

    ACCEPTED = "accepted"
    SCHEDULED = "scheduled"
    BUILDING = "building"
    ACTIVE = "active"
    FAILED = "failed"
    REFUSED = "refused"
    DELETING = "deleting"
    DELETED = "deleted"


TERMINAL_STATES = frozenset({BuildState.ACTIVE, BuildState.FAILED, BuildState.REFUSED, BuildState.DELETED})
# A build in one of these states has no machine and never will.
ENDED_WITHOUT_MACHINE = tuple(one for one in BuildState if one in TERMINAL_STATES - {BuildState.ACTIVE})
# A delete has ended the build, or will.
DELETE_REQUESTED = (BuildState.DELETING, BuildState.DELETED)

MAX_HOSTS = 100_000  # that one query may ask for

# The number of an event about a request that is not on record, or about a refused delete: the lowest, so it is outdated
# for a client that follows what is on record.
OFF_RECORD = 0


Members = Annotated[int, Bound(ge=1, le=MAX_MEMBERS)]


class FlavorCount(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A number of machines of one flavor."""

    flavor: Label
    count: Members = 1


ImageProperties = Annotated[dict[Label, Annotated[str, Bound(max_length=255)]], Bound(max_length=64)]


class MachineSpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a client requests of its machine and its cell is told as it is. See `BuildRequest`."""

    instance_uuid: Uuid
    project_id: Word
    user_id: Word = "unknown"
    name: Annotated[str, Bound(max_length=255)] = ""
    image: ImageName = ""
    # where the image is; without it `image` is a name that the compute service's settings know
    image_source: ImageSource | None = None
    # config_drive, networks, volumes: the configuration of the machine, for drivers that deploy real machines; others
    # ignore it
    config_drive: ConfigDrive | None = None
    networks: Networks = ()
    volumes: VolumeRequests = ()
    # the policy for the instance when its host is fenced (None: as in its flavor, else the setting)
    on_host_failure: EvacuationPolicy | None = None


class BuildRequest(Message, MachineSpec, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="build.request.v1"):
    """Build one instance. `instance_uuid` is chosen by the client and makes the request idempotent."""

    flavor: Label  # a name that the scheduler knows
    availability_zone: Zone | None = None
    host: Annotated[str, Bound(max_length=255)] | None = None  # only this host; filters apply
    forced: bool = False  # with `host`: filters are skipped; the flavor's resources are claimed there all the same
    ignore_hosts: Annotated[tuple[str, ...], Bound(max_length=256)] = ()  # never these
    # hosts tried in all, the first included (1: no alternates; None: the scheduler's setting)
    max_attempts: Annotated[int, Bound(ge=1, le=10)] | None = None
    # how long one attempt may take before the next alternate is tried
    build_timeout_s: Annotated[float, Bound(gt=0, le=86_400)] | None = None
    # whom it wants to be with or apart from; each member is held to the policy that its own request names, even if
    # another member's request names another policy, and no instance is moved for it
    server_group: ServerGroup | None = None
    # instead, the name of a server group on record (`objects.change.v1`), of the request's project
    group: Label | None = None
    # not on a host of any of these instances of the project; instances without a host count for nothing
    different_host: Annotated[tuple[Uuid, ...], Bound(max_length=64)] = ()
    # only on a host of one of these instances of the project
    same_host: Annotated[tuple[Uuid, ...], Bound(max_length=64)] = ()
    # of the image, for filters (hw_architecture, img_hv_type, hw_vm_mode, or any)
    image_properties: ImageProperties = {}
    # count, also: a gang: this many machines of `flavor`, and others of other flavors, at most 100 together, that start
    # together or not at all. Each is an instance of its own from then on (`member_uuids`).
    count: Members = 1
    also: Annotated[tuple[FlavorCount, ...], Bound(max_length=16)] = ()
    min_count: Members | None = None  # this many are enough (None: all); then as many start as find a host
    by: AskedBy = ""  # who asks, for the timeline; the HTTP API and a project's virtual host state it themselves

    def __post_init__(self) -> None:
        if self.count == 1 and not self.also and self.min_count is None:
            return
        if self.members > MAX_MEMBERS:
            raise ValueError(f"a request is for at most {MAX_MEMBERS} machines, and this one is for {self.members}")
        if (self.min_count or 1) > self.members:
            raise ValueError(f"min_count is {self.min_count}, and only {self.members} machines are requested")
        if self.members > 1 and self.volumes:
            raise ValueError("a volume is one instance's, and several are requested")
        if self.members > 1 and any(network.port for network in self.networks):
            raise ValueError("a port is one instance's, and several are requested")

    @property
    def members(self) -> int:
        """How many machines it is for."""
        return self.count + sum(one.count for one in self.also)

    @property
    def weight(self) -> int:
        """A gang is as much work as a request for each of its machines."""
        return self.members


def member_uuids(request: BuildRequest) -> tuple[str, ...]:
    """The instances of a request: its `instance_uuid`, then uuid5(instance_uuid, "1") and so on, flavor by flavor."""
    name = UUID(request.instance_uuid)
    return (request.instance_uuid, *(str(uuid5(name, str(number))) for number in range(1, request.members)))


class DeleteRequest(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="build.delete.v1"):
    """Delete the machine, or stop its build wherever it stands. Idempotent by `instance_uuid`."""

    instance_uuid: Uuid
    project_id: Word
    by: AskedBy = ""  # who asks, for the timeline; the HTTP API and a project's virtual host state it themselves


class BuildAccepted(Message, frozen=True, kw_only=True, tag="build.accepted.v1"):
    """Reply to a build or delete request that carried `reply_to`: it is on record and ends in one terminal event."""

    instance_uuid: Uuid
    # of a request for several machines, all of them; each ends in a terminal event of its own
    members: tuple[Uuid, ...] = ()


class FunnelStep(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step of the search: how many hosts it left, and how many it rejected for which reason ({reason: hosts})."""

    step: str
    remaining: int
    rejected: dict[str, int] = {}


class AttemptRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One try to build on one host: the claimed resources, how it ended."""

    attempt: Attempt
    host: str
    outcome: str
    code: str = ""
    reason: Reason = ""
    at: float = 0.0


class StatusOfInstance(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a request about an instance has gone so far."""

    instance_uuid: Uuid
    host: str | None = None
    code: str = ""  # code, reason: why it failed or was refused
    funnel: tuple[FunnelStep, ...] = ()  # why no host could take the request
    history: tuple[AttemptRecord, ...] = ()  # the attempts of a build, or the hosts tried for a request


class EventOfInstance(StatusOfInstance, frozen=True, kw_only=True, omit_defaults=True):
    """What the events of all requests about an instance state, its build among them."""

    project_id: Word
    terminal: bool = False  # no other terminal event follows for the request that caused it
    cell: Word | None = None
    host_uuid: Uuid | None = None  # of `host`; never on the API bus
    attempt: Attempt = 0
    reason: Reason = ""
    at: float = 0.0
    zone: ShownZone = ""  # the availability zone of its host ("": there are none, or it is not known)


class RecordOfInstance(StatusOfInstance, frozen=True, kw_only=True, omit_defaults=True):
    """What the records of all these requests state, as the scheduler has them."""

    project_id: str
    cell: str | None = None
    reason: str = ""
    created_at: float = 0.0
    updated_at: float = 0.0


class BuildEvent(Message, EventOfInstance, frozen=True, kw_only=True, tag="build.event.v1"):
    """A build changed state. Published by a conductor on its cell's bus, and by the scheduler on the API bus."""

    state: BuildState
    # rises with every state of one instance, so a late event is recognised; a state that the next one overtook is not
    # published, so any but the terminal may be missing. `deleted` is the last state of an instance whatever its number:
    # a cell whose database has crashed may number its events anew.
    sequence: int
    # with the end of a build, when each of its stages ended: [requested, queued, decided, claimed, dispatched, built,
    # announced] in seconds since the epoch, 0 where it never came to that; then how many claims were lost to others
    stage_times: StageTimes | None = None


class EventsMissed(Message, frozen=True, kw_only=True, tag="events.missed.v1"):
    """Some events of the project did not reach its virtual host, which was full or away: the oldest of those that
    waited. A client that follows requests asks for their state (`build.query.v1`, `instance.query.v1`).
    """

    project_id: Word
    at: float = 0.0


class BuildQuery(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="build.query.v1"):
    """Ask the scheduler for one build (with its timeline), or for a page of them, newest first. By cell, host, flavor,
    code and name at most 100,000 builds are looked through.
    """

    instance_uuid: Uuid | None = None
    project_id: Word | None = None
    state: BuildState | None = None
    # before, after: when the build was requested, in seconds since the epoch; `after` itself is included
    before: float | None = None
    # with `before`: also builds requested at that very time with lesser uuids. The last build of a page gives both for
    # the page after it.
    before_instance: Uuid | None = None
    after: float | None = None
    cell: Word | None = None
    host: Label | None = None  # the host that it has, or last had
    flavor: Label | None = None
    code: Label | None = None
    gang: Uuid | None = None  # the members of one request for several
    name: Label | None = None  # a name, or the first letters of a uuid, in lower case
    limit: Annotated[int, Bound(ge=1, le=1000)] = 100
    count: bool = False  # whether the page is to have a total


class BuildRecord(RecordOfInstance, frozen=True, kw_only=True, omit_defaults=True):
    """A build as the scheduler has it on record, with its present host and flavor."""

    flavor: str
    state: BuildState
    name: str = ""
    timeline: tuple[TimelineEntry, ...] = ()
    condition: str = ""  # its state since its build (`instance.event.v1`; "": as it was built)
    under_way: Uuid | None = None  # the request about it that has not ended
    gang: Uuid | None = None  # the first instance of the request for several that it belongs to
    gang_min_count: int = 0  # how many of the gang start together at least

    @property
    def shown_state(self) -> str:
        """For a list: how the instance is now, which its build does not tell once something was done to it."""
        return (self.condition if self.state is BuildState.ACTIVE else "") or self.state.value

    @property
    def by(self) -> str:
        """Who requested it, as its timeline has it ("": it does not say, or is not here)."""
        return next((line.by for line in self.timeline if line.what == "requested"), "")

    @property
    def choice(self) -> TimelineEntry | None:
        """The newest choice of hosts for it: its build's, or that of a request about it."""
        return next((line for line in reversed(self.timeline) if line.scores), None)


class HostScore(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The weights of a host at its choice, by weigher, its multiplier in it; their sum is the score."""

    host: str
    weights: dict[str, float] = {}


class TimelineEntry(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened to a build, in order: `what` is a stable word, `detail` for a person."""

    at: float
    actor: str
    what: str  # `waiting` is the last line, and there only while the build waits for the manager of its host
    detail: str = ""
    by: str = ""  # with a request, a delete and each later request: who asked
    stage_times: StageTimes | None = None  # with the end of the build, when each of its stages ended
    # with each choice (of the build or a later request): of the chosen host, then of its alternates
    scores: tuple[HostScore, ...] = ()
    # of `not_claimed`: the consumers that hold what was lost, newest first; HTTP shows a project its own
    conflicting_consumers: tuple[ConflictingConsumer, ...] = ()


def seen_by(build: BuildRecord, project_id: str) -> BuildRecord:
    """The build as its project may see it: of other projects' instances that it lost claims to, none."""
    if not any(line.conflicting_consumers for line in build.timeline):
        return build
    lines = (
        structs.replace(
            line, conflicting_consumers=tuple(one for one in line.conflicting_consumers if one.project_id == project_id)
        )
        for line in build.timeline
    )
    return structs.replace(build, timeline=tuple(lines))


class BuildPage(Message, frozen=True, kw_only=True, tag="build.page.v1"):
    """Reply to a BuildQuery. Empty when the instance is unknown."""

    builds: tuple[BuildRecord, ...] = ()
    # searched_to, searched_to_instance: the search ended at this build, requested at this time; older ones may match.
    # Ask again with these as `before` and `before_instance`.
    searched_to: float | None = None
    searched_to_instance: Uuid | None = None
    # how many builds match, on this page and others, where it was asked for; null: more than 10,000, or a search by
    # cell, host, flavor, code or name
    total: int | None = None


class HostsQuery(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="hosts.query.v1"):
    """Query a scheduler for the hosts it knows: its replica, what compute services have announced, and operators'
    decisions.
    """

    cell: Word | None = None  # only this cell's
    up: bool | None = None  # only those whose compute service is up, or only those whose is not
    # in the order of uuids, not of names. Schedulers may know a host under different names while one has not received
    # its newest announcement.
    by_uuid: bool = False
    after_uuid: Uuid | None = None  # only those after this uuid, the last of the page before
    # an answer is written and read without a pause, some 20 ms for 20,000 hosts; berth itself asks for 5,000 at a time
    limit: Annotated[int, Bound(ge=1, le=MAX_HOSTS)] = 1000


class HostRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One host as a scheduler sees it; amounts are {class: [used, capacity]} summed over its tree."""

    uuid: Uuid
    name: str
    cell: str | None = None
    service: str | None = None
    # a compute service has announced it since this scheduler's start. Otherwise its service is not known, and its cell
    # only if the host is fenced.
    reported: bool = True
    up: bool = False
    enabled: bool = True  # whether berth may use it: both its compute service and the operator allow it
    resources: dict[str, tuple[float, float]] = {}
    failed_builds: int = 0
    admin: HostAdminState | None = None  # the operator's newest decision about it, if there is one
    zone: str | None = None  # the availability zone that one of its aggregates makes
    aggregates: tuple[str, ...] = ()  # names of the host aggregates that it is in
    metrics: dict[str, float] = {}  # the numbers known of it that are not too old
    claimed_also_by: str | None = None  # another compute service that reports a host of this uuid, and was refused it
    # why placement does not have a host that a service which is up reports ("": it has it, or no such service reports
    # it)
    not_in_placement: str = ""


class HostsPage(Message, frozen=True, kw_only=True, tag="hosts.page.v1"):
    """Reply to a HostsQuery, by host name and uuid, or by uuid."""

    hosts: tuple[HostRecord, ...] = ()
    feed_sequence: int = 0
    more: bool = False  # whether other hosts follow the last one of this page
