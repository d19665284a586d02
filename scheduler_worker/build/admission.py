"""Whether a build request is new, a redelivery, a repetition or a clash, by what is on record. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec.structs import replace

from bus.consuming.outcome import Done, RetryWhenAvailable
from bus.contracts.base import Refusal
from bus.contracts.build import BuildState
from bus.persistence.outbox import OutboxMessage
from scheduler_worker.build.pending_build import DUPLICATE, Admission, Answered, Continue, PendingBuild, Start
from scheduler_worker.records.build_record import RecordedBuild, releases_of
from scheduler_worker.requests.request_refusal import refused_build

CONCURRENT = RetryWhenAvailable(
    "request.concurrent", "the same request is being recorded by another scheduler, or message"
)


def admit(
    pending: PendingBuild,
    firsts: Mapping[str, PendingBuild],
    new: Collection[str],
    known: Mapping[str, RecordedBuild],
) -> Admission:
    """How to go on with each request of a batch that is on record. new: instances that this batch has put on record.
    known: the records of the others. firsts: {instance: its first request}; a second one in the batch changes nothing,
    and is answered as the first.
    """
    uuid, first = pending.instance_uuid, firsts[pending.instance_uuid]
    if pending.is_later_member and conflicts_with_first(pending, firsts, known):
        return replace(_conflict(pending), messages=())  # no member of its request is put on record
    if first is not pending:
        if pending.digest != first.digest:
            return _conflict(pending)
        if (
            pending.attempt and pending.claim_owner != first.claim_owner
        ):  # what was claimed for it is released with the record's end
            return Answered(outcome=CONCURRENT)
        counts = admit(first, firsts, new, known)
        return Answered(outcome=counts.outcome if isinstance(counts, Answered) else pending.accepted)
    if uuid not in new:
        return admit_recorded(pending, known.get(uuid))
    if pending.refusal is not None:
        return Answered(outcome=Done(reply=pending.refusal), label="refused")
    return Start()


def conflicts_with_first(
    pending: PendingBuild, firsts: Mapping[str, PendingBuild], known: Mapping[str, RecordedBuild]
) -> bool:
    """Whether the first member of this one's gang is on record, or in this batch, with other content. Of a gang that is
    taken up from the record it may be purged.
    """
    assert pending.gang is not None
    first, on_record = firsts.get(pending.gang.uuid, pending), known.get(pending.gang.uuid)
    return first.digest != pending.digest or (on_record is not None and on_record.digest not in (pending.digest, b""))


def admit_recorded(pending: PendingBuild, build: RecordedBuild | None) -> Admission:
    """It was on record already: a redelivery continues where the earlier delivery ended, a repeated request changes
    nothing. What it would be refused for now does not count: it was not purged, however old it is, and if an object
    that it names has been deleted since, the decision ends it.
    """
    if build is None:
        # Inserted by a transaction that this one cannot see yet: look again in a moment.
        return Answered(outcome=CONCURRENT)
    repeated = pending.accepted
    if not build.digest and build.project_id == pending.request.project_id:
        # Its delete came first, and its client was answered "no such instance", which stays true. An allocation that it
        # has nevertheless is of a record that is lost, and its machine may run.
        return Answered(outcome=repeated, label="deleted", build=build)
    if build.digest != pending.digest:
        return _conflict(pending)
    if build.state is BuildState.ACCEPTED:
        return Continue(build.claim_owner)
    if build.state is BuildState.REFUSED:
        return Answered(outcome=Done(reply=Refusal(code=build.code, reason=build.reason)))
    return Answered(outcome=repeated, label="repeated", messages=releases_of(build, pending.claim_owner), build=build)


def conflict_with(event: OutboxMessage, refusal: Refusal) -> Answered:
    """It is refused, and nothing goes on record."""
    return Answered(outcome=Done(reply=refusal), label="duplicate", messages=(event,))


def _conflict(pending: PendingBuild) -> Answered:
    refusal = Refusal(code=DUPLICATE, reason="this instance_uuid is on record with other content")
    return conflict_with(
        refused_build(pending.instance_uuid, pending.request.project_id, refusal, pending.taken_at), refusal
    )
