"""The bodies and answers of `/api/v1` that are no messages of the bus: the server and the client have the same."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta as Bound
from msgspec import Struct

from bus.contracts.base import Label, Reason, Uuid, Word
from bus.contracts.build import AttemptRecord, BuildRecord, FunnelStep, HostRecord, HostScore
from bus.contracts.drains import AtOnce, DeadlineS, DrainTarget, PerMinute
from bus.contracts.host_metrics import MAX_NAMES, MetricName, MetricSource, MetricValue
from bus.contracts.objects import CellBus, CellState, LinkState, ObjectChange, ObjectKind, StoredObject, TokenRole
from bus.contracts.operations import AdminState
from bus.contracts.placement import ServerGroup
from bus.contracts.placement_queries import TreeConsumer

DrainKind = Literal["live-migrate", "migrate"]


class ProblemBody(Struct, frozen=True, omit_defaults=True):
    """The body of every error. type is always `about:blank`: `code` distinguishes them."""

    title: str
    status: int
    code: str
    detail: str = ""
    type: str = "about:blank"


class Accepted(Struct, frozen=True, omit_defaults=True):
    """The answer to a build or delete that is on record. links: where to look at it, and where to follow it.

    members: of a request for several machines all of them, `instance_uuid` the first.
    """

    instance_uuid: Uuid
    links: dict[str, str]
    members: tuple[Uuid, ...] = ()


class Why(Struct, frozen=True, kw_only=True):
    """Why an instance is as it is. request: of what it is the answer, `build` or a kind of action."""

    instance_uuid: Uuid
    name: str
    project_id: Word
    state: str
    host: str | None
    request: str
    request_id: Uuid
    request_state: str
    since: float  # seconds since the epoch
    code: str
    reason: str
    waiting: str = ""  # for what
    attempts: tuple[AttemptRecord, ...] = ()  # the hosts that were tried, and how each has ended
    funnel: tuple[FunnelStep, ...] = ()  # the hosts that each filter has left
    scores: tuple[HostScore, ...] = ()  # of the hosts that were chosen
    # cause, remedy: of the code
    cause: str = ""
    remedy: str = ""
    next: tuple[str, ...] = ()  # commands


class Builds(Struct, frozen=True):
    """A page of builds, newest first. next: the address of the page after it; null: there is none. total: of all pages;
    null: more than 10,000, or of a search.

    A search looks through so many builds at a time: a page may hold fewer than asked for and still have a next.
    """

    builds: tuple[BuildRecord, ...]
    next: str | None = None
    total: int | None = None


class AdminStateRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a decision about a host. cell: where a name is looked for; the caller's name goes on record.

    force: fence a host although its compute service is up.
    """

    state: AdminState
    reason: Reason = ""
    cell: Word | None = None
    force: bool = False


class RemovalBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to delete a host or a service. cell: where a name is looked up; the caller's name goes on
    record.
    """

    reason: Annotated[Reason, Bound(min_length=1)]
    cell: Word | None = None


class ActionResponse(Struct, frozen=True):
    """The answer to a request that is on record. links: where to look at it and at its instance."""

    request_id: Uuid
    instance_uuid: Uuid
    links: dict[str, str]


class NodesView(Struct, frozen=True, kw_only=True):
    """Nodes by uuid, how many are in each provision state, and flavors that no node can serve."""

    url: str
    states: dict[str, int]
    nodes: tuple[NodeRecord, ...]
    unserved_flavors: tuple[str, ...]


class DrainBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How hosts are to be drained: the fields of drain.start.v1. id: makes it idempotent (else: a new one)."""

    kind: DrainKind = "live-migrate"
    at_once: AtOnce = 4
    per_minute: PerMinute | None = None
    deadline_s: DeadlineS | None = None
    force: bool = False
    reason: Reason = "drain"
    cell: Word | None = None
    id: Uuid | None = None


class TargetBody(DrainBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same of a host, a compute service, a cell or an aggregate."""

    name: Label
    target: DrainTarget | None = None


class DrainCommandBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why, and (of a resumed one) how long from now it may begin further moves."""

    reason: Reason = ""
    deadline_s: DeadlineS | None = None


class NodeRecord(Struct, frozen=True, kw_only=True):
    """A node of Ironic's as commands show it. serves: flavors that request its class. ironic_reason: Ironic's text."""

    uuid: str
    name: str
    resource_class: str
    state: str
    power: str
    instance: str
    own: bool
    serves: tuple[str, ...]
    problems: tuple[str, ...]
    ironic_reason: str


class QuotaUse(Struct, frozen=True, kw_only=True):
    """The quota and usage of a project: {class: amount}, INSTANCES: how many instances.

    quota: the name of the quota that applies; "": none does. version: its revision (0: none).
    """

    project: str
    quota: str
    limits: dict[str, int]
    used: dict[str, int]
    version: int = 0


class InventoryView(Struct, frozen=True, kw_only=True):
    """One inventory of a provider, and what is used of it. capacity: (total - reserved) x allocation_ratio."""

    total: int
    reserved: int
    allocation_ratio: float
    capacity: float
    min_unit: int
    max_unit: int
    step_size: int
    used: int


class ProviderView(Struct, frozen=True, kw_only=True):
    """One provider of a host's tree. depth: how far below the root."""

    uuid: str
    name: str
    parent_uuid: str | None
    depth: int
    generation: int
    inventories: dict[str, InventoryView]
    traits: tuple[str, ...]
    aggregates: tuple[str, ...]


class HostDetail(Struct, frozen=True, kw_only=True):
    """One host: schedulers' record of it, its tree from the root down, and who holds what of it.

    more: the tree or its holders are cut off.
    """

    host: HostRecord
    providers: tuple[ProviderView, ...]
    consumers: tuple[TreeConsumer, ...]
    more: bool


class MetricsBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers about a host, as of now. source: who has measured them."""

    values: Annotated[dict[MetricName, MetricValue], Bound(min_length=1, max_length=MAX_NAMES)]
    source: MetricSource = "operator"


class MetricsPublished(Struct, frozen=True):
    """Numbers that were published. at: their time; schedulers know them soon after, if they are the newest."""

    host_uuid: Uuid
    at: float


class FleetPoint(Struct, frozen=True, kw_only=True):
    """The hosts that are not bare metal, at a time. ready: those that take builds. used: {class: (used, of)}. started,
    failed: builds since the point before.
    """

    at: float
    hosts: int
    ready: int
    used: dict[str, tuple[float, float]] = {}
    started: int = 0
    failed: int = 0


class HostClaims(Struct, frozen=True):
    """Consumers with allocations on a host, by UUID. next: the `after` of the next page; null: there is none."""

    claims: tuple[TreeConsumer, ...]
    next: Uuid | None = None


class CellView(Struct, frozen=True, kw_only=True):
    """One cell as schedulers see it. configured: the settings of this server name it.

    state, reason, by, at: what operators have decided, in revision `version` (0: nothing). bus: where that of an added
    cell is; in_use: workers connect to it; link, problem: of the scheduler that answered.
    """

    name: str
    state: CellState = CellState.ENABLED
    reason: str = ""
    version: int = 0
    by: str = ""
    at: float = 0.0
    configured: bool
    in_use: bool = True
    bus: CellBus | None = None
    link: LinkState = LinkState.UP
    problem: str = ""
    services: int = 0
    services_up: int = 0
    hosts: int = 0
    hosts_up: int = 0
    hosts_enabled: int = 0


class ObjectList(Struct, frozen=True):
    """Objects of one kind in order of name, and the revision in force."""

    revision: int
    objects: tuple[StoredObject, ...]


class GroupView(Struct, frozen=True, kw_only=True):
    """A server group and its members: {instance: names of its hosts}. more: there are further ones."""

    name: str
    group: ServerGroup
    members: dict[str, tuple[str, ...]]
    more: bool
    version: int
    changed_at: float
    changed_by: str


class Zone(Struct, frozen=True):
    """An availability zone: the aggregates that make it."""

    name: str
    aggregates: tuple[str, ...]


class ChangeBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Many changes at once, all or none: as `objects.change.v1`; the caller's name goes on record as its `who`."""

    changes: tuple[ObjectChange, ...] = ()
    reason: Reason = ""
    prune: tuple[ObjectKind, ...] = ()
    force: bool = False
    dry_run: bool = False


class CallerView(Struct, frozen=True, kw_only=True):
    """Whom a token is of. project: of role project, the only one that it sees."""

    name: str
    role: TokenRole
    project: str | None = None


class TokenBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A token to make. name: goes on record for what its holder does; reason: in the log of changes."""

    name: Word
    role: TokenRole
    project: Word | None = None
    expires_in_s: Annotated[int, Bound(ge=60, le=315_360_000)] = 7_776_000  # 90 days; at most ten years
    reason: Reason = ""


class TokenView(Struct, frozen=True, kw_only=True):
    """A token on record. expires_at, created_at: seconds since the epoch."""

    name: str
    role: TokenRole
    project: str | None
    expires_at: float
    created_at: float
    created_by: str


class TokenCreated(TokenView, frozen=True, kw_only=True):
    """A token that was made. token: the secret, which nothing else ever shows."""

    token: str


class TokenRevoked(Struct, frozen=True, kw_only=True):
    """A token that is no longer on record."""

    name: str


class NodeMaintenance(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node of Ironic's into maintenance. reason: Ironic shows it."""

    reason: Annotated[Reason, Bound(min_length=1)]
