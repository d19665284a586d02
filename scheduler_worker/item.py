"""One build request of a batch: what goes on record of it, and what a repeat is told."""

from __future__ import annotations

from hashlib import blake2b

import msgspec
from msgspec import Struct

from bus.contracts.base import Refusal
from bus.contracts.build import BuildAccepted, BuildEvent, BuildRequest, BuildState
from bus.contracts.stages import Stamps
from bus.outcome import Done, Outcome, Received, Refuse, Retry
from scheduler_worker import metrics
from scheduler_worker.decisions import Author
from scheduler_worker.deleting import UNKNOWN
from scheduler_worker.domain.builds import ACCEPTED, DECIDED, NewBuild, RecordedBuild
from scheduler_worker.endings import CONSUMER_CHANGED, Placed
from scheduler_worker.store.port import BuildStatus

TOO_OLD = "request.too_old"

_encode = msgspec.json.Encoder(order="deterministic").encode


class Item(Struct, kw_only=True):
    """One build request of a batch, on its way to an outcome."""

    request: BuildRequest
    received: Received
    digest: bytes
    taken_at: float
    refused: tuple[str, str] | None = None  # (code, reason): recorded as refused at once
    fresh: bool = False  # nobody can have claimed for it
    cancelled: bool = False  # a delete came before the decision
    doubtful: bool = False  # it has failed, and a claim of another run of it may stand, or may still land
    outcome: Outcome | None = None


def item_of(received: Received, now: float) -> Item:
    """A request that has just been taken."""
    request = received.message
    assert isinstance(request, BuildRequest)
    digest = blake2b(_encode(request), digest_size=16).digest()
    return Item(request=request, received=received, digest=digest, taken_at=now)


def new_build(item: Item, author: Author) -> NewBuild:
    """What goes on record when it is new."""
    code, reason = item.refused or ("", "")
    return NewBuild(
        request=item.request,
        digest=item.digest,
        build=RecordedBuild(
            instance_uuid=item.request.instance_uuid,
            project_id=item.request.project_id,
            state=BuildState.REFUSED if item.refused else BuildState.ACCEPTED,
            sequence=DECIDED if item.refused else ACCEPTED,
            terminal=item.refused is not None,
            code=code,
            reason=reason,
        ),
        story=(author.line("requested", f"{item.request.flavor} for {item.request.project_id}"),)
        + ((author.line("refused", reason),) if item.refused else ()),
    )


def first_event(item: Item, now: float) -> BuildEvent:
    """What its client hears when it is on record: accepted, or refused at once."""
    code, reason = item.refused or ("", "")
    return BuildEvent(
        instance_uuid=item.request.instance_uuid,
        project_id=item.request.project_id,
        state=BuildState.REFUSED if item.refused else BuildState.ACCEPTED,
        sequence=DECIDED if item.refused else ACCEPTED,
        terminal=item.refused is not None,
        code=code,
        reason=reason,
        at=now,
        stamps=stamps_of(item, None, now) if item.refused else None,
    )


def told_at_once(item: Item) -> None:
    """It is newly on record; where it was refused, that is its outcome."""
    metrics.REQUESTS.labels("build", "refused" if item.refused else "accepted").inc()
    if item.refused is not None:
        item.outcome = Done(reply=Refusal(code=item.refused[0], reason=item.refused[1]))


def repeated(item: Item, first: Item) -> None:
    """The same instance twice in one batch: the first counts."""
    if item.digest == first.digest:
        item.outcome = accepted(item.request.instance_uuid)
    else:
        item.outcome = _clash()


def already_on_record(item: Item, known: BuildStatus | None) -> None:
    """It was on record already: a redelivery goes on where it stood, a repeat changes nothing."""
    if known is not None and known.state is BuildState.ACCEPTED and item.refused and item.refused[0] == TOO_OLD:
        item.refused = None  # it is on record, however old: nobody has forgotten it
    if known is None:
        # Inserted by a transaction that this one cannot see yet: look again in a moment.
        item.outcome = Retry("request.concurrent", "the same request is being recorded by another scheduler")
    elif known.code == UNKNOWN and known.project_id == item.request.project_id:
        # Its delete came first, and was told that there is no such instance: so it stays.
        metrics.REQUESTS.labels("build", "deleted").inc()
        item.outcome = accepted(item.request.instance_uuid)
        item.doubtful = True
    elif known.digest != item.digest:
        item.outcome = _clash()
    elif known.state is BuildState.REFUSED and item.refused is not None:
        item.outcome = Done(reply=Refusal(code=item.refused[0], reason=item.refused[1]))
    elif known.state is not BuildState.ACCEPTED or item.refused is not None:
        metrics.REQUESTS.labels("build", "repeated").inc()
        item.outcome = accepted(item.request.instance_uuid)
        item.doubtful = is_undone(known)  # whoever wrote that may have died before it could release
    else:
        item.cancelled = known.delete_requested


def _clash() -> Refuse:
    metrics.REQUESTS.labels("build", "duplicate").inc()
    return Refuse("request.duplicate", "this instance_uuid is on record with other content")


def is_undone(found: BuildStatus) -> bool:
    """It is over, or may only end, and no cell has it: nothing may stay claimed for it, but what is somebody else's."""
    over = found.delete_requested or found.state in (BuildState.FAILED, BuildState.DELETED)
    return over and found.cell is None and found.code != CONSUMER_CHANGED


def stamps_of(item: Item, placed: Placed | None, now: float) -> Stamps:
    """The stages so far; a program that does not say when it asked is taken to have asked just now."""
    asked = item.received.meta.sent_at or item.taken_at
    if placed is None:
        return Stamps(asked=asked, queued=item.taken_at, decided=now)
    return Stamps(asked=asked, queued=item.taken_at, decided=placed.decided_at, claimed=placed.claimed_at)


def accepted(instance_uuid: str) -> Done:
    """It is on record, and acknowledged by that."""
    return Done(reply=BuildAccepted(instance_uuid=instance_uuid))
