"""A build request without an outcome, made of its message or its record, with its flavor and server group. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b

from msgspec import Struct
from msgspec.structs import replace

from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.base import MAX_REASON, Refusal
from bus.contracts.build import BuildAccepted, BuildRequest, BuildState, FlavorCount, member_uuids
from bus.contracts.stages import StageTimes
from bus.persistence.outbox import OutboxMessage
from scheduler_worker.build.host_search import HostClaimed
from scheduler_worker.records.build_record import (
    ACCEPTED,
    FAILED_OR_REFUSED,
    FIRST_ATTEMPT,
    Actor,
    Gang,
    NewBuild,
    RecordedBuild,
)
from scheduler_worker.records.request_record import DIGEST_BYTES, digest_of
from scheduler_worker.requests.request_delivery import RequestDelivery
from scheduler_worker.requests.request_refusal import TOO_OLD
from scheduler_worker.selection.selector_config import SelectorConfig

DUPLICATE = "request.duplicate"

# The most machines in one call of the engine: a larger batch is divided, and never within one request.
MAX_MACHINES_PER_PASS = 512


class Start(Struct, frozen=True):
    """It is newly on record, and is decided about."""


class Continue(Struct, frozen=True):
    """It is on record and not decided about yet."""

    claim_owner: str  # of its record


class Answered(Struct, frozen=True, kw_only=True):
    """Nothing more is to be done for it."""

    outcome: Outcome
    label: str = ""  # for the metrics
    # its event, if no other of this request will follow, and releases of what another delivery may have claimed since
    # its record ended
    messages: Sequence[OutboxMessage] = ()
    build: RecordedBuild | None = None  # its record, which was there


# The consequence of a pending build's record.
Admission = Start | Continue | Answered


def admit_expired(pending: PendingBuild, *, is_recorded: bool, has_claim: bool) -> PendingBuild | Outcome:
    """A build that `is_expired`, as it is processed; its outcome if its requester has left it. has_claim: an instance
    of it holds what it may have claimed, so its record is lost.
    """
    # With a claim it is built where the claim is, or runs there already; one that is refused now is left to that cell.
    # Any other ends with its event.
    delivery = pending.delivery
    if is_recorded or has_claim:
        refusal = delivery.refusal if is_recorded else delivery.refusal or pending.refusal
        return replace(pending, refusal=None, delivery=replace(delivery.without_deadline(), refusal=refusal))
    return (
        Done()
        if delivery.is_abandoned
        else replace(pending, delivery=replace(delivery, refusal=delivery.ending_refusal()))
    )


FLAVOR_UNKNOWN = "flavor.unknown"
GROUP_UNKNOWN = "group.unknown"
GROUP_INVALID = "group.invalid"
MAX_NAME = 255  # of an instance


class PendingBuild(Struct, frozen=True, kw_only=True):
    """A build request that has no outcome yet, or one member of a request for several."""

    batch_index: int  # among those processed with it; each member of a request for several has one
    request: BuildRequest
    digest: bytes
    # requested_at, taken_at: when it was sent, and when this batch was taken (seconds since the epoch)
    requested_at: float
    taken_at: float
    delivery: RequestDelivery = RequestDelivery()
    refusal: Refusal | None = None  # why it is refused at once, if it is new
    gang: Gang | None = None  # the gang that it is a member of
    claim_owner: str = ""  # as in RecordedBuild
    new_claim_owner: str = ""  # that of its message, where the record was there before it
    attempt: int = 0  # that an earlier delivery may have claimed under its claim owner (0: none)

    @property
    def is_later_member(self) -> bool:
        """Whether it is a member of a gang, and not the first, whose record stands for the whole request."""
        return self.gang is not None and self.gang.uuid != self.instance_uuid

    @property
    def is_expired(self) -> bool:
        """Whether it is not to be begun any more, while an earlier delivery of it may have begun it."""
        return self.delivery.is_late() or (self.refusal is not None and bool(self.attempt))

    @property
    def instance_uuid(self) -> str:
        """The instance that it requests."""
        return self.request.instance_uuid

    @property
    def accepted(self) -> Done:
        """The outcome once it is on record."""
        return Done(reply=BuildAccepted(instance_uuid=self.instance_uuid))

    def first_record(self, actor: Actor) -> NewBuild:
        """The first record of a new request: accepted, or refused at once.

        Its timeline begins when it was sent: it may have waited in its queue. A client's clock may be ahead.
        """
        request, refusal = self.request, self.refusal
        of_gang = "" if self.gang is None else f", one of {self.gang.size} of gang {self.gang.uuid}"
        requested = replace(
            actor.entry("requested", f"{request.flavor} for {request.project_id}{of_gang}", by=request.by),
            at=min(self.requested_at, actor.at),
        )
        return NewBuild(
            request=request,
            build=RecordedBuild(
                digest=self.digest,
                instance_uuid=request.instance_uuid,
                project_id=request.project_id,
                state=BuildState.REFUSED if refusal else BuildState.ACCEPTED,
                sequence=FAILED_OR_REFUSED if refusal else ACCEPTED,
                terminal=refusal is not None,
                code=refusal.code if refusal else "",
                reason=refusal.reason if refusal else "",
                attempt=self.attempt if refusal else 0,
                claim_owner=self.claim_owner,
            ),
            timeline=(requested, actor.entry("refused", refusal.reason)) if refusal else (requested,),
            gang=self.gang,
        )

    def stage_times(self, claimed: HostClaimed | None, now: float) -> StageTimes:
        """When each stage so far has ended."""
        decided_at, claimed_at = (now, 0.0) if claimed is None else (claimed.decided_at, claimed.claimed_at)
        return StageTimes(requested=self.requested_at, queued=self.taken_at, decided=decided_at, claimed=claimed_at)


def pending_build(received: Received, delivery: RequestDelivery, *, now: float, config: SelectorConfig) -> PendingBuild:
    """A request that has just been received."""
    request, meta = received.message, received.meta
    assert isinstance(request, BuildRequest)
    digest, names = digest_of(request), [request.flavor, *(one.flavor for one in request.also)]
    refusal = unknown_flavor(names, request.project_id, config)
    if refusal is None:
        refusal = TOO_OLD if delivery.is_old else _group_refusal(request, config)
    return PendingBuild(
        batch_index=0,
        request=_with_group(request, config),
        digest=digest,
        # A request without a time of sending counts as sent just now.
        requested_at=meta.sent_at or now,
        taken_at=now,
        delivery=delivery,
        refusal=refusal,
        claim_owner=_claim_owner(meta.id or digest.hex()),
        attempt=0 if delivery.is_first else FIRST_ATTEMPT,
    )


def pending_from_record(new: NewBuild, batch_index: int, *, now: float) -> PendingBuild:
    """A build as it is on record, which no delivery of its message carries on."""
    return PendingBuild(
        batch_index=batch_index,
        request=new.request,
        digest=new.build.digest,
        requested_at=new.created_at,
        taken_at=now,
        gang=new.gang,
        claim_owner=new.build.claim_owner,
        attempt=FIRST_ATTEMPT,
    )


def _claim_owner(message: str) -> str:
    """The name of the record that a delivery of this message may make. A later one finds that record, or makes it anew
    when it is lost, and then owns what was claimed for it, also by a process that has died since.
    """
    return blake2b(message.encode(), digest_size=DIGEST_BYTES).hexdigest()


def unknown_flavor(names: Collection[str], project: str, config: SelectorConfig) -> Refusal | None:
    """Why a project may not request these flavors; None: it may."""
    missing = next((name for name in names if not config.allows(name, project)), None)
    if missing is None:
        return None
    reason = f"there is no flavor {missing} (there are: {', '.join(sorted(config.flavors_for(project)))})"
    return Refusal(code=FLAVOR_UNKNOWN, reason=reason[:MAX_REASON])


def _with_group(request: BuildRequest, config: SelectorConfig) -> BuildRequest:
    """The request with the server group that it names; it goes on record so, and keeps that rule."""
    if request.group is None or request.server_group is not None:
        return request
    return replace(request, server_group=config.group_of(request.project_id, request.group))


def _group_refusal(request: BuildRequest, config: SelectorConfig) -> Refusal | None:
    """Why a request cannot be held to the server group that it names; None: it can, or names none."""
    project, stated = request.project_id, request.server_group
    if request.group is not None:
        if stated is not None:
            return Refusal(code=GROUP_INVALID, reason="a request names `group` or `server_group`, not both")
        if config.group_of(project, request.group) is None:
            return Refusal(code=GROUP_UNKNOWN, reason=f"project {project} has no server group {request.group}")
    elif stated is not None and (known := config.group_by_uuid(project, stated.uuid)) is not None:
        name, group = known
        if group != stated:
            rule = f"{group.policy.value}, max_per_host {group.max_per_host}"
            reason = f"{stated.uuid} is server group {name}, and its rule is {rule}"
            return Refusal(code=GROUP_INVALID, reason=reason[:MAX_REASON])
    return None


def expand_gang(pending: PendingBuild, start: int) -> list[PendingBuild]:
    """A request as its members, at positions from `start` on: itself, if it is for one instance.

    Each is a request for one instance, with the digest of the whole; the same request has the same members.
    """
    request = pending.request
    if request.members == 1:
        return [replace(pending, batch_index=start)]
    count = request.min_count
    gang = Gang(uuid=request.instance_uuid, size=request.members, min_count=count or request.members)
    uuids = member_uuids(request)
    flavors = [
        kind.flavor
        for kind in (FlavorCount(flavor=request.flavor, count=request.count), *request.also)
        for _ in range(kind.count)
    ]
    return [
        replace(
            pending,
            batch_index=start + number,
            request=replace(
                request,
                instance_uuid=uuids[number],
                flavor=flavor,
                name=f"{request.name}-{number + 1}"[-MAX_NAME:] if request.name else "",
                count=1,
                also=(),
                min_count=None,
            ),
            gang=gang,
        )
        for number, flavor in enumerate(flavors)
    ]


def in_batches(requests: Mapping[int, PendingBuild]) -> list[dict[int, PendingBuild]]:
    """The requests ({position in the batch: request}) in parts of at most MAX_MACHINES_PER_PASS machines."""
    parts: list[dict[int, PendingBuild]] = []
    machines = MAX_MACHINES_PER_PASS
    for batch_index, pending in requests.items():
        machines += pending.request.members
        if machines > MAX_MACHINES_PER_PASS:
            parts.append({})
            machines = pending.request.members
        parts[-1][batch_index] = pending
    return parts
