"""The bodies and answers of `/api/v1` that are no messages of the bus: the server and the client have the same."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta as Bound
from msgspec import Struct

from bus.contracts.base import Count, Label, Reason, Uuid, Version, Word
from bus.contracts.build import AttemptRecord, BuildRecord, FunnelStep, HostRecord, HostScore
from bus.contracts.drains import AtOnce, DeadlineS, DrainTarget, PerMinute
from bus.contracts.host_metrics import MAX_NAMES, MetricName, MetricSource, MetricValue
from bus.contracts.objects import CellBus, CellState, LinkState, ObjectChange, ObjectKind, StoredObject, TokenRole
from bus.contracts.operations import AdminState, Losses
from bus.contracts.placement import ServerGroup
from bus.contracts.placement_queries import TreeConsumer

# Of one request: their JSON is within the bound of a body.
MAX_DECIDED = 1_000
MAX_BREAKERS = 1_000

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


class DeadLetterCount(Struct, frozen=True):
    """How many dead letters a queue of a bus has."""

    bus: str
    queue: str
    dead: int


class DeadLetterView(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A dead letter. died_at, sent_at: seconds since the epoch. body: for operators; may hold secrets.
    truncated_from_bytes: the size of the message's body, where the dead letter has only the first bytes. blocks_replay:
    the code for which it is never sent back.
    """

    bus: str
    queue: str
    id: str
    code: str
    reason: str
    type: str
    routing_key: str
    cause: str
    died_at: float | None = None
    sent_at: float | None = None
    body: str = ""
    truncated_from_bytes: int = 0
    blocks_replay: str = ""


class ReplayBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which dead letters go back to their queue. ids: null: all. old: also those whose delete may be forgotten by
    now.
    """

    ids: Annotated[tuple[Label, ...], Bound(min_length=1, max_length=1000)] | None = None
    old: bool = False


class DeadLettersReplayed(Struct, frozen=True):
    """The ids that were sent back, those that are too old and stayed, and those that are never sent back, each with the
    code for it. fault: why those behind the last one that was sent were not looked at; "": they were.
    """

    replayed: tuple[str, ...]
    too_old: tuple[str, ...]
    blocked: dict[str, str]
    fault: str = ""


class DeadLettersPurged(Struct, frozen=True):
    """How many letters were thrown away."""

    purged: int


class QuarantinedMachine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A machine with this database's tag (kind `quarantined`), or another's (`foreign`: it is never touched), that its
    cell's record does not have. reason: in what they differ.

    first_seen, last_seen, decided_at: seconds since the epoch. decision: an operator's, "" until there is one.
    """

    cell: str
    host_uuid: str
    instance_uuid: str
    attempt: int
    service: str
    kind: str
    reason: str
    first_seen: float
    last_seen: float
    decision: str = ""
    decided_by: str = ""
    decided_at: float = 0.0


class QuarantinePage(Struct, frozen=True):
    """Machines in quarantine, by cell, host and instance. count: how many match. next: the `after` of the next page;
    null: there is none. never_started: cells without a record on this database.
    """

    machines: tuple[QuarantinedMachine, ...]
    count: int
    next: str | None = None
    never_started: tuple[str, ...] = ()


class BreakerView(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The breaker of one compute service: the reason of its trip, and whether an operator has reset it since.

    lost, quarantined, over: how many machines were. machines: "INSTANCE@HOST", at most 10,000; of one that is
    shown alone.
    """

    cell: str
    service: str
    open: bool
    tripped_at: float
    lost: int
    quarantined: int
    over: int
    reset_at: float = 0.0
    reset_by: str = ""
    machines: tuple[str, ...] = ()


class SeenMachine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine as it was seen: a decision is for this attempt on this host alone."""

    cell: Word
    host_uuid: Uuid
    instance_uuid: Uuid
    attempt: Count

    @property
    def place(self) -> tuple[str, str]:
        """Where it is."""
        return self.host_uuid, self.instance_uuid


class SeenBreaker(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A breaker as it was seen: one that has tripped again since names other machines."""

    cell: Word
    service: Word
    tripped_at: float

    @property
    def tripped(self) -> tuple[str, str, float]:
        """Which it is."""
        return self.cell, self.service, self.tripped_at


class QuarantineDecision(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What becomes of machines in quarantine: `destroy` by their hosts, `protect` as they are, `adopt` by their
    instances (then with a reason, which the log of changes has).
    """

    decision: Literal["destroy", "protect", "adopt"]
    machines: Annotated[tuple[SeenMachine, ...], Bound(min_length=1, max_length=MAX_DECIDED)]
    reason: Reason = ""


class Undecided(Struct, frozen=True):
    """A machine about which nothing was decided, and the reason."""

    host_uuid: str
    instance_uuid: str
    code: str
    reason: str


class QuarantineDecided(Struct, frozen=True):
    """The instances whose machines were decided about, and what was left as it is."""

    decided: tuple[str, ...]
    undecided: tuple[Undecided, ...]


class BreakersReset(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Breakers to reset."""

    breakers: Annotated[tuple[SeenBreaker, ...], Bound(min_length=1, max_length=MAX_BREAKERS)]


class BreakersAfterReset(Struct, frozen=True):
    """The breakers that were reset, those that are not open, or have tripped at another time, and those whose cell has
    not answered.
    """

    reset: tuple[SeenBreaker, ...]
    not_open: tuple[SeenBreaker, ...]
    no_answer: tuple[SeenBreaker, ...] = ()


class Recovery(Struct, frozen=True):
    """Of one cell. state: open, recovering or accepted. losses: that it waits for, or that were accepted. absent: the
    compute services that have not listed what they have; whether an operator has stated that they have nothing.
    """

    cell: str
    state: str
    database_incarnation: int
    losses: Losses
    absent: dict[str, bool] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether it goes no further without an operator."""
        return self.state == "recovering" and self.losses.count > 0


class WithoutService(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decommissioned compute service that has no machine: what waits for its hosts goes on without them."""

    service: Word
    reason: Reason = ""


class NodeMaintenance(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node of Ironic's into maintenance. reason: Ironic shows it."""

    reason: Annotated[Reason, Bound(min_length=1)]


class LossesAccepted(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The recovery of a cell as it was seen: what it would lose is accepted if it is still this."""

    database_incarnation: Version
    losses: Annotated[int, Bound(ge=1)]
    reason: Reason = ""
