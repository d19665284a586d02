"""How a build request is admitted: from what is on record, a new one, a redelivery, a repetition or a clash. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from bus.consuming.outcome import Done, Outcome, Retry
from bus.contracts.base import Refusal
from bus.contracts.build import BuildEvent, BuildState
from scheduler_worker.domain.builds import OFF_RECORD, BuildStatus
from scheduler_worker.domain.deletes import UNKNOWN
from scheduler_worker.domain.pending import PendingBuild, accepted
from scheduler_worker.domain.placement import CONSUMER_CHANGED

DUPLICATE = "request.duplicate"


class Admission(Struct, frozen=True, kw_only=True):
    """The consequence of a pending build's record: its outcome, or how to go on.

    label: for the metrics. surely_unclaimed: this delivery put it on record and no earlier one can have claimed.
    cancelled: a delete came before the decision. release: an earlier run may hold a claim that no cell will use.
    recorded_at: when an earlier copy came on record. in_doubt: as in PendingBuild. event: published to the project,
    because no other event of this request will follow. withdrawn: a delete has ended it, or will: its gang does not
    wait for it.
    """

    outcome: Outcome | None = None
    label: str = ""
    surely_unclaimed: bool = False
    cancelled: bool = False
    release: bool = False
    event: BuildEvent | None = None
    withdrawn: bool = False
    recorded_at: float | None = None
    in_doubt: bool = True


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
    *,
    may_have_run: bool,
) -> Admission:
    """How to go on with each request of a batch once the batch is on record.

    firsts: as `first_of_each`. new: instances that this batch has put on record. known: the records of the others.
    may_have_run: an earlier delivery may have come as far as its claim.
    """
    uuid, first = pending.instance_uuid, firsts[pending.instance_uuid]
    if pending.is_later_member and is_clash_of_first(pending, firsts, known):
        return admit_without_first(pending)
    if first is not pending:
        return admit_repeated(pending, first)
    if uuid in new:
        # The record of an earlier run may be lost, but not its claim: they may be in two databases.
        return admit_new(pending, surely_unclaimed=not may_have_run)
    return admit_known(pending, known.get(uuid), may_have_run=may_have_run)


def is_clash_of_first(
    pending: PendingBuild, firsts: Mapping[str, PendingBuild], known: Mapping[str, BuildStatus]
) -> bool:
    """Whether the first member of this one's gang is on record, or in this batch, with other content."""
    assert pending.gang is not None
    first, on_record = firsts[pending.gang.uuid], known.get(pending.gang.uuid)
    return first.digest != pending.digest or (
        on_record is not None and on_record.digest != pending.digest and on_record.code != UNKNOWN
    )


def admit_new(pending: PendingBuild, *, surely_unclaimed: bool) -> Admission:
    """It is newly on record. surely_unclaimed: no earlier run can have claimed for it."""
    if pending.refusal is not None:
        return Admission(outcome=Done(reply=pending.refusal), label="refused", surely_unclaimed=surely_unclaimed)
    return Admission(label="accepted", surely_unclaimed=surely_unclaimed)


def admit_repeated(pending: PendingBuild, first: PendingBuild) -> Admission:
    """The same instance twice in one batch: the first request counts."""
    return Admission(outcome=accepted(pending.instance_uuid)) if pending.digest == first.digest else _clash(pending)


def admit_known(pending: PendingBuild, known: BuildStatus | None, *, may_have_run: bool) -> Admission:
    """It was on record already: a redelivery continues where the earlier delivery ended, a repeated request changes
    nothing. may_have_run: as in `admit`.
    """
    refusal = pending.refusal
    if known is not None and known.state is BuildState.ACCEPTED and refusal is not None:
        # The request is still on record, however old it is, so its record was not purged. If an object that it names
        # has been deleted since, the decision ends it.
        refusal = None
    if known is None:
        # Inserted by a transaction that this one cannot see yet: look again in a moment.
        reason = "the same request is being recorded by another scheduler"
        return Admission(outcome=Retry("request.concurrent", reason))
    if known.code == UNKNOWN and known.project_id == pending.request.project_id:
        # Its delete came first, and its client was answered "no such instance", which stays true. An allocation that it
        # has nevertheless is of a record that is lost, and its machine may run.
        return Admission(outcome=accepted(pending.instance_uuid), label="deleted", release=may_have_run, withdrawn=True)
    if known.digest != pending.digest:
        return _clash(pending)
    if known.state is BuildState.REFUSED and refusal is not None:
        return Admission(outcome=Done(reply=refusal))
    if known.state is not BuildState.ACCEPTED or refusal is not None:
        # The scheduler that wrote this record may have died before it could release the claim. Then its message comes
        # again; a copy that its client has sent finds no claim but that of an earlier request.
        release = may_have_run and is_unused(known) and not known.claim_in_doubt
        withdrawn = known.delete_requested or known.state is BuildState.DELETED
        return Admission(
            outcome=accepted(pending.instance_uuid),
            label="repeated",
            release=release,
            withdrawn=withdrawn,
            in_doubt=False,
        )
    return Admission(
        cancelled=known.delete_requested,
        withdrawn=known.delete_requested,
        recorded_at=known.recorded_at,
        in_doubt=known.claim_in_doubt,
    )


def admit_without_first(pending: PendingBuild) -> Admission:
    """A later member of a request whose first member is on record with other content: no member of
    it is put on record.
    """
    return replace(_clash(pending), event=None)


def _clash(pending: PendingBuild) -> Admission:
    """Its event has the lowest sequence: outdated for a client that follows the request on record."""
    refusal = Refusal(code=DUPLICATE, reason="this instance_uuid is on record with other content")
    event = BuildEvent(
        instance_uuid=pending.instance_uuid,
        project_id=pending.request.project_id,
        state=BuildState.REFUSED,
        sequence=OFF_RECORD,
        terminal=True,
        code=refusal.code,
        reason=refusal.reason,
        at=pending.taken_at,
    )
    return Admission(outcome=Done(reply=refusal), label="duplicate", event=event)


def is_unused(known: BuildStatus) -> bool:
    """Whether no cell has the build, and none will: a claim of it is to be released, unless another client holds it."""
    ended = known.delete_requested or known.state in (BuildState.FAILED, BuildState.DELETED)
    return ended and known.cell is None and known.code != CONSUMER_CHANGED
