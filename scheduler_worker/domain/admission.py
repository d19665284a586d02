"""How a build request is admitted: from what is on record, a new one, a redelivery, a repetition or a clash. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from bus.consuming.outcome import Done, Outcome, Retry
from bus.contracts.base import Refusal
from bus.contracts.build import BuildState
from bus.faults import Transient
from bus.persistence.outbox import OutboxMessage
from scheduler_worker.domain.builds import BuildStatus, RecordedBuild
from scheduler_worker.domain.deletes import UNKNOWN
from scheduler_worker.domain.pending import PendingBuild, accepted
from scheduler_worker.domain.requests import refused_build

DUPLICATE = "request.duplicate"


class Start(Struct, frozen=True):
    """It is newly on record, and is decided about."""


class Continue(Struct, frozen=True):
    """It is on record and not decided about yet. run: of its record."""

    run: str


class Answered(Struct, frozen=True, kw_only=True):
    """Nothing more is to be done for it.

    label: for the metrics. ended: its record, if that does not go on: another delivery may have claimed for it since it
    ended. event: published to the project, because no other event of this request will follow. withdrawn: a delete has
    ended it, or will: its gang does not wait for it.
    """

    outcome: Outcome
    label: str = ""
    ended: RecordedBuild | None = None
    event: OutboxMessage | None = None
    withdrawn: bool = False


# The consequence of a pending build's record.
Admission = Start | Continue | Answered


def admit_expired(pending: PendingBuild, *, may_be_begun: bool) -> PendingBuild | None:
    """A build whose time is over, as it is processed; None: it is left by its requester.

    may_be_begun: it is on record, or an instance of it holds what it may have claimed: its record is lost, and where
    that claim is it is built, or runs already. Another one ends with its event.
    """
    delivery = pending.delivery
    if may_be_begun:
        return replace(pending, delivery=delivery.going_on())
    return None if delivery.is_left else replace(pending, delivery=replace(delivery, why=delivery.ends_with()))


def first_of_each(builds: Iterable[PendingBuild]) -> dict[str, PendingBuild]:
    """{instance: the first request for it}, in order: a second one in the same batch changes nothing."""
    firsts: dict[str, PendingBuild] = {}
    for pending in builds:
        firsts.setdefault(pending.instance_uuid, pending)
    return firsts


def admit(
    pending: PendingBuild,
    firsts: Mapping[str, PendingBuild],
    new: Collection[str],
    known: Mapping[str, BuildStatus],
) -> Admission:
    """How to go on with each request of a batch once the batch is on record.

    firsts: as `first_of_each`. new: instances that this batch has put on record. known: the records of the others.
    """
    uuid, first = pending.instance_uuid, firsts[pending.instance_uuid]
    if pending.is_later_member and is_clash_of_first(pending, firsts, known):
        return admit_without_first(pending)
    if first is not pending:
        return admit_repeated(pending, first)
    if uuid in new:
        return admit_new(pending)
    return admit_known(pending, known.get(uuid))


def is_clash_of_first(
    pending: PendingBuild, firsts: Mapping[str, PendingBuild], known: Mapping[str, BuildStatus]
) -> bool:
    """Whether the first member of this one's gang is on record, or in this batch, with other content."""
    assert pending.gang is not None
    first, on_record = firsts[pending.gang.uuid], known.get(pending.gang.uuid)
    return first.digest != pending.digest or (
        on_record is not None and on_record.digest != pending.digest and on_record.build.code != UNKNOWN
    )


def admit_new(pending: PendingBuild) -> Admission:
    """It is newly on record. An earlier record of it may be lost, but not its claim: they may be in two databases."""
    if pending.refusal is not None:
        return Answered(outcome=Done(reply=pending.refusal), label="refused")
    return Start()


def admit_repeated(pending: PendingBuild, first: PendingBuild) -> Answered:
    """The same instance twice in one batch: the first request counts."""
    return Answered(outcome=accepted(pending.instance_uuid)) if pending.digest == first.digest else _clash(pending)


def admit_known(pending: PendingBuild, known: BuildStatus | None) -> Admission:
    """It was on record already: a redelivery continues where the earlier delivery ended, a repeated request changes
    nothing. Raises Transient if another transaction is about to put it on record, and it is not retried any more.
    """
    refusal = pending.refusal
    if known is not None and known.build.state is BuildState.ACCEPTED and refusal is not None:
        # The request is still on record, however old it is, so its record was not purged. If an object that it names
        # has been deleted since, the decision ends it.
        refusal = None
    if known is None:
        # Inserted by a transaction that this one cannot see yet: look again in a moment.
        reason = "the same request is being recorded by another scheduler"
        if pending.delivery.last:
            raise Transient(reason, code="request.concurrent")
        return Answered(outcome=Retry("request.concurrent", reason))
    if known.build.code == UNKNOWN and known.build.project_id == pending.request.project_id:
        # Its delete came first, and its client was answered "no such instance", which stays true. An allocation that it
        # has nevertheless is of a record that is lost, and its machine may run.
        return Answered(outcome=accepted(pending.instance_uuid), label="deleted", withdrawn=True)
    if known.digest != pending.digest:
        return _clash(pending)
    if known.build.state is BuildState.REFUSED and refusal is not None:
        return Answered(outcome=Done(reply=refusal))
    if known.build.state is not BuildState.ACCEPTED or refusal is not None:
        withdrawn = known.build.state in (BuildState.DELETING, BuildState.DELETED)
        repeated = accepted(pending.instance_uuid)
        return Answered(outcome=repeated, label="repeated", ended=known.build, withdrawn=withdrawn)
    return Continue(known.build.run)


def admit_without_first(pending: PendingBuild) -> Answered:
    """A later member of a request whose first member is on record with other content: no member of
    it is put on record.
    """
    return replace(_clash(pending), event=None)


def clash(event: OutboxMessage, why: Refusal) -> Answered:
    """It is refused, and nothing goes on record."""
    return Answered(outcome=Done(reply=why), label="duplicate", event=event)


def _clash(pending: PendingBuild) -> Answered:
    why = Refusal(code=DUPLICATE, reason="this instance_uuid is on record with other content")
    return clash(refused_build(pending.instance_uuid, pending.request.project_id, why, pending.taken_at), why)
