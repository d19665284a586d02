"""The messages of a cell's own bus: to its conductor, to its compute services, and their announcements."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta as Bound
from msgspec import Struct

from bus.contracts.base import (
    Allocations,
    Attempt,
    ClassName,
    Count,
    DatabaseMark,
    Epoch,
    Generation,
    GivenAttempt,
    ImageName,
    Label,
    Message,
    Reason,
    Sequence,
    ShownZone,
    TraitName,
    Uuid,
    Word,
)
from bus.contracts.build import MachineSpec
from bus.contracts.placement import ServerGroup
from bus.contracts.stages import StageTimes


class Selection(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One host that was chosen for a build, with the allocation that is (or would be) claimed there."""

    host_uuid: Uuid  # the root provider
    host: Label
    service: Word  # the compute service that manages it
    allocations: Allocations
    spec_generations: dict[Uuid, Generation] = {}  # as in a claim option
    # its availability zone when it was chosen, which the cell announces of the host that it builds on ("": none)
    zone: ShownZone = ""
    mappings: dict[Annotated[str, Bound(max_length=64)], tuple[Uuid, ...]] = {}  # as in a claim option


class InstanceSpec(MachineSpec, frozen=True, kw_only=True, omit_defaults=True):
    """The part of a build that a cell needs."""

    flavor: str = ""
    # root_gb, traits, capabilities: of the flavor (its required traits, and `capabilities:NAME` of its extra specs),
    # for drivers that deploy by them
    root_gb: Count = 0
    traits: Annotated[tuple[TraitName, ...], Bound(max_length=256)] = ()
    capabilities: Annotated[dict[Label, Annotated[str, Bound(max_length=255)]], Bound(max_length=64)] = {}


class CellBuild(Message, frozen=True, kw_only=True, tag="cell.build.v1"):
    """Build one instance: on the first selection, which is claimed under `attempt`, or on an alternate."""

    spec: InstanceSpec
    # the chosen host, then the alternates, all of this cell
    selections: Annotated[tuple[Selection, ...], Bound(min_length=1, max_length=10)]
    consumer_generation: Generation  # after the claim of the first selection
    build_timeout_s: float = 300.0
    requested_at: float = 0.0
    stage_times: StageTimes | None = None  # the stages so far
    server_group: ServerGroup | None = None  # the claims of alternates are held to its rule
    # the quota of the project, as in a claim (Nova's limits are those of filters). Others may meanwhile have taken what
    # this build released before an alternate's claim.
    limits: Annotated[dict[ClassName, Count], Bound(max_length=64)] = {}
    # of the claim: 1 where a scheduler has made it. A higher one is the cell's own: the schedulers have lost their
    # record of the build, and a cell without a record of the instance has lost that, too
    attempt: GivenAttempt = 1


class CellDelete(Message, frozen=True, kw_only=True, tag="cell.delete.v1"):
    """Delete the instance, also while it is building. May arrive before its CellBuild: then that build never starts.

    It is published again while no event of it comes; one under way is announced again.
    """

    instance_uuid: Uuid
    project_id: Word
    # the cell has announced the build or has its claim, or is silent for long: a cell without a record has lost it, and
    # queries its compute services first
    may_have_started: bool = False
    # the highest that the instance has there as far as the schedulers know, at least the first that it may have: one
    # that left with a lower one has come back since, and a cell without a record releases what this one holds
    attempt: Attempt = 0


class Origin(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a machine comes from that is spawned for a move. See `Spawn.origin`."""

    migration: Uuid  # the request's
    host_uuid: Uuid | None = None  # the host that has handed it over (None: none has; it is built from `image` or anew)
    image: ImageName = ""
    runs: bool = True  # whether it is started


class NumberedAttempt(Struct, frozen=True, kw_only=True):
    """Which attempt to build which instance something is about."""

    instance_uuid: Uuid
    attempt: Attempt


class AttemptOnHost(NumberedAttempt, frozen=True, kw_only=True, omit_defaults=True):
    """Which attempt on which host a message is about, and the compute service that manages it."""

    host_uuid: Uuid
    service: Word


class MachineCommand(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A command about the machine of one attempt, with all that its host is to know of the instance. See `Spawn`."""

    spec: InstanceSpec
    attempt: Attempt
    host_uuid: Uuid
    allocations: Allocations
    service: Word
    # the identity of the cell's database that has the record; the machine keeps it as its tag. A command about a
    # machine with another tag, or none, is refused, and the machine left alone.
    database_id: Uuid | None = None


class Spawn(Message, MachineCommand, frozen=True, kw_only=True, tag="compute.spawn.v1"):
    """Build on this host. A host refuses an attempt at or below one that it was commanded to destroy."""

    # the instance has a machine or an image already, which this attempt takes over (None: it is built anew)
    origin: Origin | None = None


class Destroy(Message, AttemptOnHost, frozen=True, kw_only=True, tag="compute.destroy.v1"):
    """Make sure that no attempt up to and including this one runs or will ever run on this host."""

    database_id: Uuid | None = None  # as in MachineCommand
    keep_if_complete: bool = False  # a complete machine of this attempt stays, and the answer is `active` once more


MAX_LOOKUP = 1000
MAX_LOOKUP_AT_ONCE = 500  # instances of one query: two nested machines of each are 10 ms to read


class LookUpMachines(Message, frozen=True, kw_only=True, tag="compute.machines.query.v1"):
    """Queries a compute service: which of these hosts list a complete machine of these instances now, whatever is on
    record. It waits in the service's queue behind the commands that were published before, so those count.
    """

    service: Word
    database_id: Uuid  # as in MachineCommand; machines with another tag are left out
    instance_uuids: Annotated[tuple[Uuid, ...], Bound(min_length=1, max_length=MAX_LOOKUP)]
    on_hosts: Annotated[tuple[Uuid, ...], Bound(min_length=1, max_length=MAX_LOOKUP)]


class MachineLookupResult(Message, frozen=True, kw_only=True, tag="compute.machines.v1"):
    """All that one compute service has of the instances that it was queried about, without what a command has ended."""

    machines: Annotated[tuple[AttemptOnHost, ...], Bound(max_length=10 * MAX_LOOKUP)] = ()
    # those that the service has and has looked at
    hosts: Annotated[tuple[Uuid, ...], Bound(max_length=MAX_LOOKUP)] = ()


class QueueBarrier(Message, frozen=True, kw_only=True, tag="compute.barrier.v1"):
    """A compute service to itself, through its own queue: messages that were waiting there at its start come before
    this.
    """

    service: Word
    epoch: Epoch  # of the process that published it; barriers of earlier ones mean nothing


class ComputeOutcome(StrEnum):
    """A compute service's result of one attempt."""

    ACTIVE = "active"
    FAILED = "failed"
    DESTROYED = "destroyed"


class ComputeResult(Message, AttemptOnHost, frozen=True, kw_only=True, tag="compute.result.v1"):
    """How one attempt ended on its host. May come late, twice, or never."""

    outcome: ComputeOutcome
    code: str = ""
    reason: Reason = ""  # with `active`, a warning of the driver
    at: float = 0.0  # the time of this message
    final: bool = False  # with `failed`, no other host would do better (a broken image): the alternates are not tried
    started_at: float = 0.0  # when the service took the command (0: unknown)
    epoch: Epoch = 0
    # how many scans of its hosts the service had begun then, in this epoch (epoch 0: unknown); see HostStates
    scan: Sequence = 0


class ReportHosts(Message, frozen=True, kw_only=True, tag="compute.report.v1"):
    """Ask every compute service of the cell to announce its hosts now (a listener has just started)."""


MAX_RESCANS = 1000


class RescanHosts(Message, frozen=True, kw_only=True, tag="compute.rescan.v1"):
    """To a compute service: announce these hosts by a scan that has not begun yet. Sent when its report lacks a machine
    that is on record, or has one that is over: the report may be older than the record, and no clock shows it. Repeated
    with the next report.
    """

    service: Word
    hosts: Annotated[tuple[Uuid, ...], Bound(max_length=MAX_RESCANS)]
    # named by the report of that scan (`HostStates.rescans`), which is thereby known to be later than the record
    rescans: Annotated[tuple[Uuid, ...], Bound(max_length=MAX_RESCANS)]


# The attempt of a machine that carries no tag of ours, and that its service has no record of.
UNKNOWN_ATTEMPT = 0


class Running(NumberedAttempt, frozen=True, kw_only=True, omit_defaults=True):
    """One instance that a host carries, and the attempt that built it (0: the host does not know)."""

    database_id: Uuid | None = None  # the identity that its tag names (None: it has no tag of ours)
    built: bool = True  # it is certainly complete
    # the service carries out the order to destroy this attempt, or has done all that it does about it
    destroying: bool = False
    stopped: bool = False  # it does not run: it was stopped by its client, or to be handed over to another host
    reserved: bool = False  # the service keeps its resources out of the host's inventory; see ReserveMachines


class HostReport(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One host as its compute service sees it. `attributes` are what ComputeCapabilities reads (free words); of them
    `project_id`: the host takes builds of that project only.
    """

    uuid: Uuid
    name: Label
    enabled: bool = True
    disabled_reason: str = ""
    attributes: dict[str, str] = {}
    failed_builds: int = 0  # consecutive failures since the last success
    # every machine it carries now, ours or not (None: unknown, which proves nothing)
    running: tuple[Running, ...] | None = None
    # the other compute service that placement has this uuid of (None: this one): this service takes no builds for it,
    # and its reports of it do not count
    owner: Word | None = None


class FromService(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which compute service a message comes from, and its place among those of that service. See `HostStates`."""

    service: Word
    cell: Word
    epoch: Epoch  # rises with every start of the service; a message of an older one loses
    sequence: Sequence  # rises within an epoch; an older one loses


class HostStates(Message, FromService, frozen=True, kw_only=True, tag="compute.hosts.v1"):
    """A compute service announces its hosts: at start, on request, when one changes. Pages of at most 1000."""

    hosts: Annotated[tuple[HostReport, ...], Bound(max_length=1000)] = ()
    complete: bool = False  # this page is the last of a report of all its hosts
    # seconds since the epoch before which the service had not begun this scan (0: when it was sent); machines that came
    # later may be missing here
    seen_at: float = 0.0
    # the sequence of the first page of a report of all its hosts, which has this many `pages` (0: only the listed hosts
    # have changed)
    first_sequence: Sequence = 0
    pages: int = 1
    scan: Sequence = 0  # its number in this epoch (0: unknown): unlike a time, it cannot go back when a clock is set
    # ring_term, ring_number: of the membership that states which free nodes are its own (RingMembers; 0: it shares
    # none). A host is not taken from a service that goes by a newer one.
    ring_term: int = 0
    ring_number: int = 0
    # of each RescanHosts that was received before this scan began
    rescans: Annotated[tuple[Uuid, ...], Bound(max_length=MAX_RESCANS)] = ()


class Heartbeat(Message, FromService, frozen=True, kw_only=True, tag="compute.heartbeat.v1"):
    """A compute service is up."""

    stopping: bool = False  # it stops now, on purpose
    interval_s: Annotated[float, Bound(ge=0, le=3600)] = 0.0  # seconds until the next heartbeat
    # the name shared by the services that divide their free nodes among them (None: it shares none)
    ring: Word | None = None
    mark: DatabaseMark = DatabaseMark()  # of the cell's database, the highest by which it was commanded


MAX_RING_MEMBERS = 1000


class RingMembers(Message, frozen=True, kw_only=True, tag="conductor.ring.v1"):
    """The services of one ring that are up: published when they change, and about every second. (term, number) rises
    with each change, and an older one is ignored. Each service works out by itself which free nodes are its own.
    """

    ring: Word
    term: int
    number: int
    # services beyond the first thousand by name are no members
    members: Annotated[tuple[Word, ...], Bound(max_length=MAX_RING_MEMBERS)] = ()


class ServiceSuperseded(Message, frozen=True, kw_only=True, tag="conductor.service_superseded.v1"):
    """To the process that holds this compute service's name: the cell has received a lower epoch than this one since. A
    process whose epochs are all lower (another had the name meanwhile, with its clock ahead) continues above it,
    because none of its messages counts. A late copy is detected this way.
    """

    service: Word
    epoch: Epoch


class HostConflict(Message, frozen=True, kw_only=True, tag="conductor.host_conflict.v1"):
    """To the compute service that has these hosts: another one which is up reports them, too, and was refused."""

    service: Word
    other: Word
    hosts: Annotated[tuple[Uuid, ...], Bound(max_length=1000)] = ()


class HostsReleased(Message, frozen=True, kw_only=True, tag="conductor.hosts_released.v1"):
    """To a compute service that was refused these hosts: their owner has given them up, or is gone for good. It takes
    them over with its next inventory report. Repeated with the next announcement that names the owner.
    """

    service: Word
    owner: Word
    hosts: Annotated[tuple[Uuid, ...], Bound(max_length=1000)] = ()


MAX_RESERVED_MACHINES = 10_000  # of one host
MAX_RESERVED_AT_ONCE = 1_000  # of one message, unless one host has more


class ReservedMachine(NumberedAttempt, frozen=True, kw_only=True, omit_defaults=True):
    """A machine whose resources are not offered."""

    allocations: Allocations | None = None  # its resources by its record (None: no record has it)


class ReservedOnHost(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All machines of one host whose resources are not offered; () ends that for those that were."""

    host_uuid: Uuid
    machines: Annotated[tuple[ReservedMachine, ...], Bound(max_length=MAX_RESERVED_MACHINES)] = ()


class ReserveMachines(Message, frozen=True, kw_only=True, tag="compute.reserve.v1"):
    """To a compute service: count what these machines take as `reserved` in the inventory of their hosts. They are in
    quarantine: no record explains them, so they may have no claim, and are kept. Repeated with the next report.
    """

    service: Word
    epoch: Epoch
    # epoch, sequence: of the page of a report that disagrees with the record; of two about one host the older page
    # loses
    sequence: Sequence
    # the hosts of one page may come in several messages
    hosts: Annotated[tuple[ReservedOnHost, ...], Bound(max_length=1000)] = ()


class ServiceDown(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A compute service that takes no builds now."""

    service: Word
    epoch: Epoch  # of the process that is down, and of all before it
    code: Label  # `service.silent` or `service.stopped`
    reason: Reason = ""
    since: float = 0.0  # seconds since the epoch


class ServiceStates(Message, frozen=True, kw_only=True, tag="conductor.service_states.v1"):
    """All compute services of a cell that are down: published when that changes, and about every second. (term, number)
    rises; each replaces the one before, and an older one is ignored.
    """

    cell: Word
    term: int
    number: int
    # counts from 1; the pages of one number belong together, each of at most 1000 services
    page: Annotated[int, Bound(ge=1, le=100)] = 1
    pages: Annotated[int, Bound(ge=1, le=100)] = 1
    down: Annotated[tuple[ServiceDown, ...], Bound(max_length=1000)] = ()
    up: Count = 0  # how many services are not down


class CellServiceDelete(Message, frozen=True, kw_only=True, tag="cell.service.delete.v1"):
    """An operator states that a compute service of this cell is gone for good. The conductor refuses it while the
    service is up, or an instance of its record may have a machine there.
    """

    service: Word
    reason: Reason = ""
    by: str = ""


class CellServiceDeleted(Message, frozen=True, kw_only=True, tag="cell.service.deleted.v1"):
    """Reply to a CellServiceDelete."""

    removed: bool  # False: the service was not on record
    at: float  # seconds since the epoch


class AboutService(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an announcement about a compute service of a cell states."""

    cell: Word
    service: Word
    at: float = 0.0  # seconds since the epoch


class ServiceRemoved(Message, AboutService, frozen=True, kw_only=True, tag="conductor.service_removed.v1"):
    """A service of this cell is forgotten: each conductor and scheduler drops it, until it sends something again, or
    service states (`ServiceStates`) have something else of it than before.
    """


MAX_NAMED_MACHINES = 20


class UnknownMachineReport(Struct, frozen=True, kw_only=True):
    """A machine that no record explains."""

    instance_uuid: Uuid
    host_uuid: Uuid
    kind: Word  # `foreign` or `quarantined`
    reason: Reason = ""  # one sentence


class UnknownMachinesFound(Message, AboutService, frozen=True, kw_only=True, tag="conductor.unknown_machines.v1"):
    """Machines that no record explains were put on record: one message a page of a report that brings new ones."""

    # foreign, quarantined: how many are new
    foreign: Count = 0
    quarantined: Count = 0
    # the first of them, quarantined ones before foreign ones; foreign ones beyond those kept on record are left out.
    # Published at most once: `berth quarantine list --unknown` lists all.
    machines: Annotated[tuple[UnknownMachineReport, ...], Bound(max_length=MAX_NAMED_MACHINES)] = ()


class BreakerTripped(Message, AboutService, frozen=True, kw_only=True, tag="conductor.breaker.v1"):
    """More than `limit` machines of one compute service were lost, newly quarantined or over: destruction stops there.

    It takes effect again after `berth breaker reset`. Several conductors that judge one report may each publish it.
    """

    lost: Count = 0
    quarantined: Count = 0
    over: Count = 0
    limit: Count = 0


class CellBuildQuery(Message, frozen=True, kw_only=True, tag="cell.build.query.v1"):
    """Queries the state of a build that has had no event for a long time; begins nothing. The answer is a BuildEvent:
    how far it has come, or its end once more. A cell without a record of the build records that it has failed, so that
    a late CellBuild finds that.
    """

    # spec, build_timeout_s: as of its CellBuild
    spec: InstanceSpec
    # that holds its claim, as far as the schedulers have it. A cell without a record releases what was claimed up to
    # it, unless a host has a machine of the build that no record explains.
    attempt: GivenAttempt = 1
    build_timeout_s: Annotated[float, Bound(gt=0, le=86_400)] = 300.0
    sequence: Sequence = 0  # of the newest event of it that the schedulers have had
    requested_at: float = 0.0  # when this query was decided
