"""The objects that operators define at run time: flavors, aggregates, quotas, groups, rules, decisions about hosts and
cells. They are rows of one table in the schedulers' database, versioned by one revision, which every scheduler applies
once it has been announced to it. The settings file holds the initial objects of an empty system.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any
from uuid import UUID, uuid5

import msgspec
from msgspec import Meta as Bound
from msgspec import Struct

from bus.contracts.base import ClassName, Count, Label, Message, Reason, Uuid, Version, Word, Zone, matching, reason_of
from bus.contracts.operations import AdminState
from bus.contracts.placement import GroupPolicy, ServerGroup

# {class or INSTANCES: how much of it}, as claims carry it: under no other name, and for no more of them.
Quota = Annotated[dict[ClassName, Annotated[int, Bound(ge=0, lt=2**31)]], Bound(max_length=64)]

Text = Annotated[str, Bound(max_length=255)]
MAX_CHANGES = 1000
MAX_PAGE = 1000
MAX_AGGREGATE_HOSTS = 1000  # that one aggregate may name
ZONE_KEY = "availability_zone"  # in the metadata of an aggregate: the name of the zone that it makes

DEFAULT_QUOTA = "default"  # the name of the quota of projects that have none of their own
SCHEDULING = "default"  # the name of the one object of its kind


class ObjectKind(StrEnum):
    """The kinds of objects. The body of each is one of the structs below; that of a drain is `DrainRecord`."""

    FLAVOR = "flavor"
    AGGREGATE = "aggregate"
    QUOTA = "quota"
    SCHEDULING = "scheduling"
    HOST = "host"
    FENCE = "fence"
    CELL = "cell"
    DRAIN = "drain"
    GROUP = "group"
    REPAIR = "repair"
    SERVICE = "service"
    TOKEN = "token"


class Flavor(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The sizes and properties that a client requests by a flavor's name."""

    vcpus: Annotated[int, Bound(ge=0, lt=2**31)] = 0
    """CPUs: `VCPU`, unless `extra_specs` override it."""
    memory_mb: Annotated[int, Bound(ge=0, lt=2**31)] = 0
    """MiB: `MEMORY_MB`, unless `extra_specs` override it."""
    disk_gb: Annotated[int, Bound(ge=0, lt=2**31)] = 0
    """GiB: `DISK_GB`, unless `extra_specs` override it."""
    extra_specs: Annotated[dict[Text, Text], Bound(max_length=256)] = {}
    """As in Nova: `resources:CLASS` = amount (0 removes a class), `trait:NAME` = required or forbidden;
    `resources1:CLASS`, `trait_NET:NAME`: the same of a numbered group, all of it from one provider; `group_policy`
    = none or isolate. Beyond Nova: `trait:in:A,B` = required (any of them), `trait:NAME` or `resources:CLASS` =
    preferred (a weight, not a filter), `root_required` = "A,!B", `same_subtree` = "1,_NET" (several sets:
    "1,_A;2,_B"), `in_tree`, `in_tree1` = a provider's uuid; `berth:on_host_failure` = restart, wait or fail: the policy
    for its instances when their host is fenced. Every other key (plain, or `capabilities:name`) is read by filters.
    """
    projects: Annotated[tuple[Text, ...], Bound(max_length=1000)] = ()
    """Projects that may request the flavor. Empty: every project."""


class Aggregate(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A host aggregate."""

    uuid: str
    """Of the provider aggregate in placement, which has the members."""
    name: str
    """Unique, at most 255 characters."""
    metadata: Annotated[dict[Text, Text], Bound(max_length=256)] = {}
    """`availability_zone` makes the aggregate a zone, and is its name (1 to 255 characters, none of control, and no
    space at either end); other keys are read by filters, weighers and pre-filters.
    """
    hosts: Annotated[tuple[Label, ...], Bound(max_length=MAX_AGGREGATE_HOSTS)] | None = None
    """Its hosts, by name or uuid: schedulers keep the provider aggregate's members as they are here. None: the members
    are set through Placement's API.
    """

    def __post_init__(self) -> None:
        try:
            msgspec.convert(self.metadata.get(ZONE_KEY), Zone | None)
        except msgspec.ValidationError as error:
            raise ValueError(f"{ZONE_KEY}: {reason_of(error)}") from None


# Group names are of their projects; the uuid of a group that states none follows from its name.
GROUP_UUIDS = UUID("8a1f6c0e-5a53-4c5e-9c36-6f1f64bb9a0b")


class GroupDefinition(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A server group that requests name. The object's name is PROJECT/NAME.

    Its members are the instances of requests that name it, for as long as they hold something.
    """

    policy: GroupPolicy
    """The rule for the hosts of its members."""
    max_per_host: Annotated[int, Bound(ge=1, le=1000)] = 1
    """With anti-affinity: this many members may share a host."""
    uuid: Uuid | None = None
    """None: derived from the name, so that one file makes the same group everywhere."""


def group_named(name: str, definition: GroupDefinition) -> ServerGroup:
    """The server group that a definition of this name (PROJECT/NAME) makes."""
    uuid = definition.uuid or str(uuid5(GROUP_UUIDS, name))
    return ServerGroup(uuid=uuid, policy=definition.policy, max_per_host=definition.max_per_host)


class ProjectQuota(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The totals that the instances of one project may hold: {resource class: amount}, and INSTANCES: their number."""

    limits: Quota = {}


class SchedulingRules(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Which filters and weighers run. None: as in the settings of each scheduler."""

    multipliers: Annotated[dict[Text, float], Bound(max_length=256)] | None = None  # by weigher name
    # enabled_filters, enabled_weighers: in order, by class path or by the class's name
    enabled_filters: Annotated[tuple[Text, ...], Bound(max_length=256)] | None = None
    enabled_weighers: Annotated[tuple[Text, ...], Bound(max_length=256)] | None = None
    host_subset_size: Annotated[int, Bound(ge=1, le=1_000_000)] | None = None


class HostDecision(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """An operator's decision about a host. The object's name is the host's uuid."""

    host: Label  # its name at that time
    state: AdminState
    reason: Reason = ""
    drain: Uuid | None = None  # the drain that it belongs to


class FenceRecord(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A host that is kept fenced; the object's name is the host's uuid.

    It follows from decisions about the host and from its cell's answers.
    """

    host: Label
    cell: str | None = None  # where the host is (None: not known yet)
    version: Version  # of the newest decision about it
    unfencing: bool = False  # the host is to be used again, once it has destroyed its stale machines
    # an operator has ended the fence without the cell's acknowledgement; the cell is still commanded to lift it
    forced: bool = False
    acknowledged: Version = 0  # of the newest that the cell has on record
    stale_machines: Count = 0
    token: str = ""  # random; the ids of the evacuations follow from it, so that no client can use one of them before

    @property
    def is_acknowledged(self) -> bool:
        """Whether the cell has the newest decision on record: that the host is fenced, or that it is used again."""
        return self.acknowledged >= self.version


class AuditRepair(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A repair that an audit has made by itself, as the site's policy allows, or an operator's decision that a machine
    in quarantine is its instance. Only in the log of changes, under the consumer's name, as an object that was deleted.
    """

    finding: Label  # its kind
    found: Reason  # what was wrong
    proof: Reason  # why the repair is safe
    held: dict[Uuid, dict[Label, int]] = {}  # the allocation that was released


class DeletedService(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A compute service that was gone for good, and that its cell has forgotten. It is only in the log of changes, as
    an object of the service's name that was there before: none is ever on record.
    """

    cell: Label


LAST_MOMENT = 253_402_300_799.0  # the end of the year 9999, the last that a calendar has


class TokenRole(StrEnum):
    """What the holder of a token may do."""

    PROJECT = "project"  # build, delete and see in its own project
    READER = "reader"  # see everything, change nothing
    OPERATOR = "operator"  # see and do everything


class AccessToken(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A token of the HTTP API. The object's name is what goes on record for what its holder does; only its digest is
    here, so that no record and no backup holds a secret.
    """

    sha256: Annotated[str, matching(r"^[0-9a-f]{64}$(?!\n)", "64 hexadecimal digits in lower case")]
    role: TokenRole
    project: Word | None = None  # of role project, the only one that it sees
    expires_at: Annotated[float, Bound(ge=0.0, le=LAST_MOMENT)]  # seconds since the epoch

    def __post_init__(self) -> None:
        if (self.role is TokenRole.PROJECT) != (self.project is not None):
            raise ValueError("a token of role project has a project, and no other has")


class CellState(StrEnum):
    """Whether builds are placed in a cell. Instances in a disabled cell continue to run, and moves within it continue.

    A removed one is not connected to: schedulers and placement close their connections to its bus.
    """

    ENABLED = "enabled"
    DISABLED = "disabled"
    REMOVED = "removed"


URL_FILE = (
    "the name of a file alone, without a directory: 1 to 64 letters, digits, _, - and ., not beginning with a dot"
)
URL_VARIABLE = "a name of at most 63 capital letters, digits and _ that begins with CELL_"


class CellBus(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Where the bus of a cell is that the settings of running workers do not name. Its URL has a password, so each
    worker reads it from a file or a variable. Without either it is the API bus's broker, with the prefix or the cell's
    name before every name.
    """

    # the name of a file in each worker's `cells_dir` that holds the URL alone, as `bus.url` has it
    url_file: Annotated[str, matching(r"^([A-Za-z0-9_\-][A-Za-z0-9_.\-]{0,63})?$(?!\n)", URL_FILE)] = ""
    # the name of an environment variable of each worker that holds the URL; it begins with `CELL_`
    url_variable: Annotated[str, matching(r"^(CELL_[A-Z0-9_]{1,58})?$(?!\n)", URL_VARIABLE)] = ""
    prefix: Annotated[str, Bound(max_length=64)] = ""  # as `bus.prefix`, on this cell's bus


class CellDecision(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """An operator's decision about a cell. The object's name is the cell's; without one it is enabled."""

    state: CellState
    reason: Reason = ""
    # where it is, for workers whose settings do not name the cell; None: the settings name it
    bus: CellBus | None = None
    abandoned: bool = False  # a removed cell is not connected to although instances are on record there


class ObjectChange(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One object as it is to be; body None: it is deleted. A body replaces the whole of the one before."""

    kind: ObjectKind
    # of a quota, the project or "default"; of the scheduling rules, "default"; of a host, its uuid; of a cell, its
    # name; of a server group, PROJECT/NAME; of a token, who acts by it
    name: Label
    body: dict[str, Any] | None = None
    if_version: Version | None = None  # only if the object has this version (0: only if it does not exist)


class ObjectsChange(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="objects.change.v1"):
    """Change objects, all of them or none. Answered with ObjectsChanged, or with a refusal that names the object.

    Idempotent by the message's id.
    """

    changes: Annotated[tuple[ObjectChange, ...], Bound(max_length=MAX_CHANGES)] = ()
    # actor, reason: kept in the log of changes
    actor: Annotated[str, Bound(min_length=1, max_length=255)]
    reason: Reason = ""
    # objects of these kinds that the changes do not name are deleted
    prune: Annotated[tuple[ObjectKind, ...], Bound(max_length=16)] = ()
    force: bool = False  # also if instances would be left outside of the zone that they requested
    dry_run: bool = False  # only report what would change


class ChangedObject(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An object before and after. None: there was none, or there is none any more."""

    kind: ObjectKind
    name: str
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None


class ObjectsChanged(Message, frozen=True, kw_only=True, tag="objects.changed.v1"):
    """The changes that a command has made, or would make; objects that stay as they are do not appear."""

    revision: Version  # the one in force
    changed: tuple[ChangedObject, ...] = ()


class ObjectsQuery(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="objects.query.v1"):
    """Ask for objects in order of kind and name: all, of one kind, or one."""

    kind: ObjectKind | None = None
    name: Label | None = None
    after: tuple[str, str] | None = None  # (kind, name) of the last known
    limit: Annotated[int, Bound(ge=1, le=MAX_PAGE)] = MAX_PAGE


class StoredObject(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An object on record."""

    kind: ObjectKind
    name: str
    body: dict[str, Any]
    version: Version  # the revision that last changed it
    changed_at: float = 0.0  # seconds since the epoch
    changed_by: str = ""


class ObjectsPage(Message, frozen=True, kw_only=True, tag="objects.page.v1"):
    """Objects, and the revision in force."""

    revision: Version
    objects: tuple[StoredObject, ...] = ()
    more: bool = False  # there are further ones


class ObjectLogQuery(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="objects.log.query.v1"):
    """Ask for the log of changes, newest first; within a revision, in order of kind and name."""

    kind: ObjectKind | None = None
    name: Label | None = None
    before: Version | None = None  # only entries of earlier revisions
    # (kind, name) of a page's last entry, with its revision as `before`, for the page after it: the entries of this
    # revision after this object, too
    before_object: tuple[str, str] | None = None
    limit: Annotated[int, Bound(ge=1, le=MAX_PAGE)] = 100


class ObjectLogEntry(ChangedObject, frozen=True, kw_only=True, omit_defaults=True):
    """One object that a revision has changed."""

    revision: Version
    at: float  # seconds since the epoch
    actor: str
    reason: Reason = ""
    forced: bool = False


class ObjectLogPage(Message, frozen=True, kw_only=True, tag="objects.log.page.v1"):
    """Entries of the log of changes."""

    entries: tuple[ObjectLogEntry, ...] = ()


class ObjectsRevision(Message, frozen=True, kw_only=True, tag="objects.revision.v1"):
    """Objects have changed: schedulers load them. A lost one is made up for by the next look at the database."""

    revision: Version


class LinkState(StrEnum):
    """Of a worker's connection to the bus of a cell."""

    UP = "up"
    CONNECTING = "connecting"
    CLOSED = "closed"


class CellsQuery(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="cells.query.v1"):
    """Query a scheduler for all cells. It loads the newest objects on record before it answers."""


class CellRecord(Struct, frozen=True, kw_only=True):
    """One cell."""

    name: str
    state: CellState = CellState.ENABLED
    reason: Reason = ""
    bus: CellBus | None = None
    configured: bool  # the settings of this scheduler name it
    in_use: bool  # workers connect to its bus
    by: str = ""  # by, at: who decided it and when, in seconds since the epoch (version 0: no operator did)
    at: float = 0.0
    version: Version = 0
    # link, problem: of this scheduler's connection, and why it is not up
    link: LinkState = LinkState.CLOSED
    problem: Reason = ""


class CellsPage(Message, frozen=True, kw_only=True, tag="cells.page.v1"):
    """Reply to a CellsQuery, by name."""

    revision: Version  # of the objects that it follows from
    cells: tuple[CellRecord, ...] = ()
