"""Messages to and from placement: inventory updates, claims and the server groups that they are held to."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta as Bound
from msgspec import Struct

from bus.contracts.base import (
    MAX_AMOUNT,
    Allocations,
    Amount,
    Attempt,
    ClassName,
    Count,
    Generation,
    GivenAttempt,
    Label,
    Message,
    Reason,
    TraitName,
    Uuid,
    Version,
    Word,
)

# A compute service named S reports inventory under this and S; a root has one such reporter at a time.
COMPUTE_REPORTER = "compute-"
OTHER_SERVICE = "host.other_service"  # why such a report is refused: the root is another compute service's


class Inventory(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How much of one class a provider has. Capacity = floor((total - reserved) * allocation_ratio)."""

    total: Amount
    reserved: Count = 0
    min_unit: Amount = 1
    max_unit: Amount = MAX_AMOUNT
    step_size: Amount = 1
    allocation_ratio: Annotated[float, Bound(gt=0, le=1e6)] = 1.0


class ProviderReport(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One provider of a reported tree. Class and trait names are normalised on arrival.

    inventories and traits replace those in placement; aggregates too, unless None (left alone).
    """

    uuid: Uuid
    name: Label
    parent_uuid: Uuid | None = None
    inventories: Annotated[
        dict[Annotated[str, Bound(min_length=1, max_length=255)], Inventory], Bound(max_length=256)
    ] = {}
    traits: Annotated[tuple[TraitName, ...], Bound(max_length=1024)] = ()
    aggregates: Annotated[tuple[Uuid, ...], Bound(max_length=256)] | None = None  # None: left alone
    # allocations on that provider, of classes that it no longer has and this one has, move here in the same transaction
    # (an upgrade in place from a flat host to a nested one). Several may take from one; what fits moves whole, largest
    # first.
    receives_from: Uuid | None = None
    # consumers known to use this very provider
    known_consumers: Annotated[tuple[Uuid, ...], Bound(max_length=10_000)] = ()
    # another reporter reports this provider (its host, a network agent's parent). It is named only as the parent of
    # providers below it, must be in placement below the parent that is named, and is left as it is.
    is_reference: bool = False


class InventoryUpdate(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="inventory.update.v1"):
    """The whole tree under one root provider as its reporter sees it now. Idempotent and versioned. An unknown field is
    refused by name.
    """

    reporter: Word
    version: Version  # rises with every report of one reporter about one root; an older one loses
    root_uuid: Uuid
    # the root first (parent_uuid None), a parent before its children. Providers that this reporter reported before
    # under this root and that are absent now are removed. Empty: the tree is removed, but nothing that another reporter
    # has reported since.
    providers: Annotated[tuple[ProviderReport, ...], Bound(max_length=1024)] = ()
    # of the root, named by a reporter above cells, so that no other cell may claim on it (None: any may)
    cell: Word | None = None
    # the compute service that has this root by placement, and is gone for good or has given the host up, as the cell's
    # conductor has announced (`HostsReleased`). It counts only after `InventoryReleased` of that root.
    former_reporter: Word | None = None


class InventoryResult(Message, frozen=True, kw_only=True, tag="inventory.result.v1"):
    """Reply to an InventoryUpdate that carried `reply_to`."""

    # applied | unchanged | stale (an older version lost to `version`) | host.other_service (the root is that of
    # `owner`, another compute service; nothing was changed). Refusals come as `refusal.v1`.
    outcome: str
    sequence: int = 0
    # rows that the report no longer has but a consumer still uses: a provider, or `provider/CLASS`. They take nothing
    # new, and the first report that finds them unused removes them.
    orphaned: tuple[str, ...] = ()
    # the first of those that are neither standard nor custom; the report counts without them
    unknown_traits: tuple[TraitName, ...] = ()
    version: Version = 0
    owner: Word | None = None


class InventoryStale(Message, frozen=True, kw_only=True, tag="inventory.stale.v1"):
    """To a reporter of inventory: its report about this root lost, because placement has one of this version. A late
    copy is detected this way. A reporter whose versions are all lower (its clock was set back, or its records are gone)
    continues above it.
    """

    reporter: Word
    root_uuid: Uuid
    version: Version


class InventoryConflict(Message, frozen=True, kw_only=True, tag="inventory.conflict.v1"):
    """To a compute service: its report about this root was refused, placement has what it names as another's."""

    reporter: Word
    root_uuid: Uuid
    owner: Word | None = None  # with `host.other_service`: the other service's reporter
    # `host.other_service`: placement has the root as another compute service's: two services have a host of one uuid,
    # or the host has passed to the other, which its cell's conductor announces (`HostsReleased`).
    # `provider.name_taken`: another provider has the name of one of the tree; the service repeats its report until the
    # name is free.
    code: Label = OTHER_SERVICE
    reason: Reason = ""


class InventoryReleased(Message, frozen=True, kw_only=True, tag="inventory.released.v1"):
    """From a cell's conductor, which knows the leases and what each service lists: these roots are no longer this
    reporter's, and another compute service may take them over. A later report of `reporter` about a root makes it that
    one's again.
    """

    reporter: Word
    roots: Annotated[tuple[Uuid, ...], Bound(min_length=1, max_length=1000)]


# Hosts that one message adds to an aggregate, and as many that it takes out.
MAX_MEMBERS_CHANGED = 1000


class AggregateMembers(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="inventory.members.v1"):
    """Put hosts into a provider aggregate and take others out; what else they are members of stays. Idempotent."""

    aggregate: Uuid
    joins: Annotated[tuple[Uuid, ...], Bound(max_length=MAX_MEMBERS_CHANGED)] = ()
    leaves: Annotated[tuple[Uuid, ...], Bound(max_length=MAX_MEMBERS_CHANGED)] = ()


class AggregateMembersSet(Message, frozen=True, kw_only=True, tag="inventory.members.set.v1"):
    """Reply to AggregateMembers."""

    unknown: tuple[Uuid, ...] = ()  # those of its hosts that placement does not have


class ProviderTreeDelete(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="inventory.delete.v1"):
    """Delete a host that is gone for good: its root provider and everything below it, of all reporters. Idempotent.
    Refused while a consumer holds something of it (`host.in_use`). A later report of the root makes it anew.
    """

    root_uuid: Uuid


class ProviderTreeDeleted(Message, frozen=True, kw_only=True, tag="inventory.deleted.v1"):
    """Reply to ProviderTreeDelete."""

    removed: bool  # False: placement did not have it


class GroupPolicy(StrEnum):
    """The rule for the hosts of a group's members. The soft rules are weights, not filters."""

    AFFINITY = "affinity"
    ANTI_AFFINITY = "anti-affinity"
    SOFT_AFFINITY = "soft-affinity"
    SOFT_ANTI_AFFINITY = "soft-anti-affinity"


class ServerGroup(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The group that an instance belongs to; it is of the instance's project, and exists by being named. An unknown
    field is refused by name, between workers too: ignoring a newer field of a rule would break the rule.
    """

    uuid: Uuid
    policy: GroupPolicy
    # with anti-affinity, so many members may share a host (Nova's max_server_per_host)
    max_per_host: Annotated[int, Bound(ge=1, le=1000)] = 1


class ClaimOutcome(StrEnum):
    """How a claim ended. Each outcome calls for another reaction (docs/concepts/builds-and-actions.md, "Claims")."""

    CLAIMED = "claimed"
    CONFLICT = "conflict"  # the spec generation it was chosen for has changed: fold in and retry the same host
    NO_CAPACITY = "no_capacity"  # it does not fit: the next candidate
    CONSUMER_CONFLICT = "consumer_conflict"  # another client owns this consumer: stop
    OVER_QUOTA = "over_quota"  # the project may not hold so much: stop
    POLICY_VIOLATED = "policy_violated"  # the server group's rule forbids this host: the next host
    PROVIDER_REMOVED = "provider_removed"  # the provider no longer exists: the next host
    INVALID = "invalid"  # it can never be right (unknown class, off its step): a permanent fault
    INCOMPLETE = "incomplete"  # it would fit, but another claim of its gang does not: claim for all of them again


# In a claim's limits: the number of a project's consumers, beside the amounts of classes that they hold.
INSTANCES = "INSTANCES"

# Hosts of a server group that one answer names; of a larger one some are left out, and only the claim knows them.
MAX_LOCATED_HOSTS = 10_000


class ClaimOption(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One way to satisfy a claim. `spec_generations` = {provider: spec generation it was chosen for}; {} = any spec
    generation.
    """

    allocations: Allocations
    spec_generations: dict[Uuid, Generation] = {}
    host: Uuid | None = None  # whose host this is: its root provider; required in a claim of a server group's member
    # {suffix of a request group: the providers that give it}, as in `GET /allocation_candidates`. Empty without
    # numbered groups: then all of them give the un-numbered one. The claim does not read them.
    mappings: dict[Annotated[str, Bound(max_length=64)], tuple[Uuid, ...]] = {}


class Migration(Struct, frozen=True, kw_only=True):
    """The uuid under which a moving instance keeps its source, and its allocation there."""

    uuid: Uuid  # a consumer of type MIGRATION, of the instance's project and user
    # the instance's allocation when the move began; placement's own record counts where they differ
    source: Allocations


class Claim(Message, frozen=True, kw_only=True, tag="placement.claim.v1"):
    """Claim the first of `options` that fits, for one consumer. Idempotent by (consumer, attempt)."""

    consumer: Uuid
    # the fencing number of the build attempt. A repeated claim with the attempt that already holds an allocation is
    # answered `claimed` with it; one with an older attempt is answered `consumer_conflict`.
    attempt: GivenAttempt = 1
    # the claim owner (a record's), which has the allocation from then on; an allocation of another one is none of this
    # claim's, whatever its attempt. None: the owner stays as it was.
    owner: Word | None = None
    # the claim owner that has the consumer's allocation now. If that is of this attempt, this claim has it from then
    # on, as it stands: no later Release by that owner gives it back.
    transfers_from: Word | None = None
    # None: the consumer must not exist yet; otherwise the generation it must have
    consumer_generation: Generation | None = None
    release_first: bool = False  # release the consumer's allocation whether or not an option fits (one transaction)
    options: Annotated[tuple[ClaimOption, ...], Bound(max_length=16)]
    project_id: Word
    user_id: Word = "unknown"
    consumer_type: Word = "INSTANCE"
    # the consumer is a member for as long as it holds something. A hard rule is checked against all members, those of
    # the same transaction included.
    server_group: ServerGroup | None = None
    # {class: the total that the project's consumers may hold, this claim included}; INSTANCES: how many there may be
    limits: Annotated[dict[ClassName, Count], Bound(max_length=64)] = {}
    # the consumer moves. The instance's allocation goes to the migration in the same transaction, and stays there until
    # the move is confirmed (a Release of the migration) or reverted (Revert); when no option fits, nothing changes.
    # With release_first it is the claim of an alternate: the instance's allocation is released, the migration keeps the
    # source. Amounts that source and destination both take of one provider count once, the larger of the two.
    migration: Migration | None = None
    # for an instance of a control plane that writes its allocations by Placement's API, as Nova does. No attempt ends
    # it, and what the consumer holds is of no attempt from then on; it is idempotent by (consumer, owner). With a
    # consumer_generation the option is added to what the consumer holds, as an evacuation holds its source besides; an
    # amount that both take of one provider counts once. It neither releases first nor moves.
    external: bool = False
    # of an evacuation: hosts where the members of its server group do not hold the place of an affinity group, because
    # the machines there are off
    fenced_hosts: Annotated[tuple[Uuid, ...], Bound(max_length=MAX_LOCATED_HOSTS)] = ()
    # with `external`: further members of its server group, which placement counts from now on if they hold something,
    # whoever claimed it. In a ClaimAll those of any one of its claims.
    group_members: Annotated[tuple[Uuid, ...], Bound(max_length=MAX_LOCATED_HOSTS)] = ()


# Holders that a lost claim names: of one claim, and claims of one group whose holders are looked up.
MAX_CONFLICTING_CONSUMERS = 3
MAX_LOST_NAMED = 8


class ConflictingConsumer(Struct, frozen=True, kw_only=True):
    """A consumer that holds what a claim was to take, and its project as the client of Placement named it."""

    consumer: Uuid
    project_id: str


class ClaimResult(Message, frozen=True, kw_only=True, tag="placement.claim.result.v1"):
    """Reply to a Claim: the overall outcome, which option was taken, and each option's own outcome."""

    outcome: ClaimOutcome
    option: int | None = None
    outcomes: tuple[ClaimOutcome, ...] = ()
    consumer_generation: Generation | None = None  # the generation the consumer has now (None: it holds nothing)
    # {provider: generation after this claim}, so that a replica knows when it has caught up
    generations: dict[Uuid, Generation] = {}
    sequence: int = 0  # the change feed's number of this claim's changes (0: nothing changed)
    reason: Reason = ""
    # of an earlier claim of this attempt, if that is none of the options offered now. With `consumer_conflict`: what
    # the consumer holds, if it is of the claim's project.
    allocations: dict[Uuid, dict[str, Amount]] = {}
    # {host: other members} where the group's rule prevented the claim (on the API bus only); with anti-affinity, of the
    # hosts that the claim named
    members: dict[Uuid, Count] = {}
    # without capacity: the consumers that last changed what they hold of what was lacking, newest first (on the API bus
    # only, at most 3; none where too many hold some of it to look for the newest)
    conflicting_consumers: tuple[ConflictingConsumer, ...] = ()
    # with `consumer_conflict`: the attempt of the claim's project that holds it, a newer one or another claim owner's
    # (0: none does)
    attempt: Attempt = 0


# Members of a gang: instances that one build request may ask for.
MAX_MEMBERS = 100

# Claims of one ClaimAll: a foreign control plane bounds its requests by its own quotas.
MAX_CLAIMS_TOGETHER = 1_000

# Providers that the options of a gang's claims name together, where a claim has more than one option. Placement
# does not take a message of very many values (`MAX_CLAIM_VALUES`).
MAX_GANG_PROVIDERS = 8_192


class ClaimAll(Message, frozen=True, kw_only=True, tag="placement.claim.all.v1"):
    """Claim for every member of a gang or for none, in one transaction. Idempotent as each of its claims is."""

    # each sees the ones before it: capacity, the server group's rule and the project's limits count all of them. Every
    # consumer is named once, and none releases first or moves.
    claims: Annotated[tuple[Claim, ...], Bound(min_length=1, max_length=MAX_CLAIMS_TOGETHER)]


class ClaimAllResult(Message, frozen=True, kw_only=True, tag="placement.claim.all.result.v1"):
    """Reply to a ClaimAll. Unless all results are `claimed` nothing was written."""

    # in the order of the claims: `incomplete`: it would have fitted; `claimed`: an earlier claim of this attempt holds
    # it; any other outcome prevented the gang
    results: tuple[ClaimResult, ...]


class Release(Message, frozen=True, kw_only=True, tag="placement.release.v1"):
    """Give back all that a consumer holds. Each field that is given limits what is released. Idempotent: releasing
    nothing is `absent`, and fine.
    """

    consumer: Uuid
    attempt: GivenAttempt | None = None  # only an allocation of this attempt or an older one
    # only one of this project: a client may make up a uuid under which another client holds something
    project_id: Word | None = None
    # only one of a migration: an instance may have been built under the uuid of a move's request
    of_migration: bool = False
    # only one of this claim owner: another owner's may be of an earlier request for the same uuid, which a restored
    # database may have lost while its instance runs. Later claims of this attempt by this owner are
    # refused.
    owner: Word | None = None


class ReleaseByOwner(Release, frozen=True, kw_only=True, tag="placement.release_by_owner.v1"):
    """A Release that nobody waits for: of what a claim owner has claimed, when its build has ended without a cell. It
    is kept until placement has carried it out; the owner finds only its own claim, and one that is still in
    flight is refused.
    """


class ReleaseResult(Message, frozen=True, kw_only=True, tag="placement.release.result.v1"):
    """Reply to a Release."""

    # released | absent | consumer_conflict (a newer attempt, another claim owner or project, or no migration holds it)
    outcome: str
    sequence: int = 0


class Revert(Message, frozen=True, kw_only=True, tag="placement.revert.v1"):
    """End a move: the instance holds its source again, the migration nothing. Idempotent by (consumer, attempt)."""

    consumer: Uuid
    migration: Migration
    # the attempt that runs on the source. If the consumer is still at it, nothing was ever claimed for the move, and
    # only its end is written.
    source_attempt: Attempt
    attempt: GivenAttempt  # one more than the last that the move has claimed; copies of older claims are refused


class RevertResult(Message, frozen=True, kw_only=True, tag="placement.revert.result.v1"):
    """Reply to a Revert."""

    # reverted | consumer_conflict (a newer attempt, or another client, holds it) | no_capacity or provider_removed (the
    # source's inventory has shrunk or gone meanwhile; nothing was changed, and the same Revert may be repeated)
    outcome: str
    # consumer_generation, allocations: of the instance, where it was reverted
    consumer_generation: Generation | None = None
    allocations: dict[Uuid, dict[str, Amount]] = {}
    sequence: int = 0
    reason: Reason = ""


# Migrations of one instance that a restatement ends.
MAX_RESTATED = 16


class Restate(Message, frozen=True, kw_only=True, tag="placement.restate.v1"):
    """A cell whose database was restored states what one of its instances has. Idempotent by (consumer, attempt). A
    consumer of another project, cell or control plane is left as it is.
    """

    consumer: Uuid
    attempt: GivenAttempt  # the highest of the instance; copies of older claims are refused
    project_id: Word
    user_id: Word = "unknown"
    # what it holds from now on, whatever it held (None: unchanged)
    allocations: dict[Uuid, dict[str, Amount]] | None = None
    # give back what they hold, those that are migrations of its project
    migrations: Annotated[tuple[Uuid, ...], Bound(max_length=MAX_RESTATED)] = ()


class RestateResult(Message, frozen=True, kw_only=True, tag="placement.restate.result.v1"):
    """Reply to a Restate."""

    # restated | consumer_conflict (a newer attempt, or another client, holds it) | provider_removed | no_capacity
    # (nothing of the class is there) | invalid; unless restated nothing was changed
    outcome: str
    over_capacity: bool = False  # its host has less than what is held there by now
    consumer_generation: Generation | None = None  # of the instance now (None: it holds nothing)
    sequence: int = 0


class ConsumerAllocations(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The allocation of one consumer after a Swap; empty allocations remove the consumer (microversion 1.28)."""

    consumer: Uuid
    # of the build that holds it. When given, a consumer that a newer attempt has claimed or released since is left as
    # it is (`consumer_conflict`).
    attempt: GivenAttempt | None = None
    consumer_generation: Generation | None = None
    allocations: dict[Uuid, dict[str, Amount]] = {}
    project_id: Word
    user_id: Word = "unknown"
    consumer_type: Word = "INSTANCE"


class Swap(Message, frozen=True, kw_only=True, tag="placement.swap.v1"):
    """Replace the allocations of several consumers at once, all or none (microversion 1.13: migration allocations)."""

    consumers: Annotated[tuple[ConsumerAllocations, ...], Bound(min_length=1, max_length=256)]


class SwapResult(Message, frozen=True, kw_only=True, tag="placement.swap.result.v1"):
    """outcome as of a claim; `consumer` names the one that stood in the way."""

    outcome: ClaimOutcome
    consumer: str | None = None
    generations: dict[Uuid, Generation] = {}
    sequence: int = 0
    reason: Reason = ""


class ProviderState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A provider's whole state at one generation: a replica's copy of it."""

    uuid: Uuid
    name: str
    parent_uuid: Uuid | None = None
    root_uuid: Uuid
    generation: Generation
    spec_generation: Generation
    # {class: [capacity, min_unit, max_unit, step_size, total, reserved, allocation_ratio]}
    inventories: dict[str, tuple[float, int, int, int, int, int, float]] = {}
    used: dict[str, int] = {}  # {class: amount}, only classes with an inventory or an allocation, absent = 0
    traits: tuple[str, ...] = ()
    aggregates: tuple[str, ...] = ()


# Consumers that one request may ask after.
MAX_NAMED = 256


class LocateRequest(Message, frozen=True, kw_only=True, tag="placement.locate.v1"):
    """Ask on which hosts consumers of a project hold something: those named, and the members of a server group."""

    project_id: Word
    server_group: Uuid | None = None
    excluding: Uuid | None = None  # not this one, the requester
    consumers: Annotated[tuple[Uuid, ...], Bound(max_length=MAX_NAMED)] = ()


class LocatePage(Message, frozen=True, kw_only=True, tag="placement.locate.page.v1"):
    """Reply to a LocateRequest."""

    members: dict[Uuid, Count] = {}  # of the group, by host
    hosts: dict[Uuid, tuple[Uuid, ...]] = {}  # the roots on which each named consumer holds something
