"""The effect of the record on a build request that came again: a table, and nothing else decides it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.consuming.outcome import Done, Received, Retry
from bus.contracts.base import Meta, Refusal
from bus.contracts.build import BuildAccepted, BuildRequest, BuildState
from scheduler_worker.domain.admission import Admission, admit_known, admit_new, admit_repeated, is_unused
from scheduler_worker.domain.builds import Author, BuildStatus
from scheduler_worker.domain.deletes import UNKNOWN
from scheduler_worker.domain.pending import CLOCKS_APART_S, TOO_OLD, PendingBuild, as_copy, new_build, pending_build
from tests.unit.scheduler.hosts import Hosts

UUID = "00000000-0000-4000-8000-000000000001"
REQUEST = BuildRequest(instance_uuid=UUID, project_id="p", flavor="m1.small")


def taken(request: BuildRequest = REQUEST, **meta: float) -> PendingBuild:
    received = Received(request, Meta(id="m", **meta), "api", "scheduler.requests")  # type: ignore[arg-type]
    return pending_build(received, 0, now=1000.0, flavors=Hosts([]).selector, max_age_s=100.0)


def status(state: BuildState = BuildState.ACCEPTED, **more: object) -> BuildStatus:
    base = BuildStatus(state=state, digest=taken().digest, delete_requested=False, project_id="p")
    return replace(base, **more)


def test_a_new_request_is_accepted_or_refused_at_once() -> None:
    assert admit_new(taken(), surely_unclaimed=True).outcome is None
    for pending, code in ((taken(replace(REQUEST, flavor="f")), "flavor.unknown"), (taken(sent_at=1.0), TOO_OLD)):
        outcome = admit_new(pending, surely_unclaimed=True).outcome
        assert isinstance(outcome, Done) and isinstance(outcome.reply, Refusal) and outcome.reply.code == code
        build = new_build(pending, Author("s", 1.0)).build
        assert (build.state, build.terminal, build.code) == (BuildState.REFUSED, True, code)


def test_a_run_of_a_request_holds_a_claim_no_longer_than_since_it_was_sent() -> None:
    """An older allocation of its instance is not released with it; the two clocks may differ."""
    assert taken(sent_at=990.0).claimed_within_s == 10.0 + CLOCKS_APART_S
    assert taken(sent_at=5000.0).claimed_within_s == CLOCKS_APART_S, "its client's clock is ahead"
    assert taken(sent_at=1010.0, attempt=1).claimed_within_s == CLOCKS_APART_S, "ahead by no more than clocks differ"
    assert taken(sent_at=5000.0, attempt=1).claimed_within_s is None, "a copy came later than the first by any time"
    assert taken().claimed_within_s is None, "another client's request without a time"


def test_a_copy_may_hold_the_claim_of_the_copy_that_came_on_record_first() -> None:
    """A client that has had no answer publishes its request again, later than the first scheduler's claim."""
    copy = taken(sent_at=990.0)
    admission = admit_known(copy, status(recorded_at=900.0), may_have_run=False)
    assert as_copy(copy, admission.recorded_at).claimed_within_s == 100.0 + CLOCKS_APART_S
    assert as_copy(copy, 995.0) == as_copy(copy, None) == copy
    assert as_copy(taken(), 900.0).claimed_within_s is None
    ended = admit_known(copy, status(state=BuildState.FAILED, recorded_at=900.0), may_have_run=False)
    assert ended.recorded_at is None, "what an audit has claimed since is not the copy's"


def test_a_request_on_record_whose_flavor_was_deleted_since_goes_on_to_its_decision() -> None:
    """It was answered as accepted, and never ended."""
    pending = taken(replace(REQUEST, flavor="deleted"))
    assert pending.refusal is not None
    assert admit_known(pending, status(digest=pending.digest), may_have_run=True).outcome is None


def test_of_the_same_instance_twice_in_a_batch_the_first_counts() -> None:
    assert isinstance(admit_repeated(taken(), taken()).outcome, Done)
    assert_clash(admit_repeated(taken(replace(REQUEST, name="other")), taken()))


def test_other_content_under_a_known_instance_is_a_clash() -> None:
    assert_clash(admit_known(taken(), status(digest=b"other"), may_have_run=False))


def assert_clash(admission: Admission) -> None:
    """Requesters that wait for a reply and listeners to events receive it, and it overtakes nothing."""
    outcome, event = admission.outcome, admission.event
    assert isinstance(outcome, Done) and isinstance(outcome.reply, Refusal) and event is not None
    assert outcome.reply.code == event.code == "request.duplicate"
    assert (event.state, event.terminal, event.sequence) == (BuildState.REFUSED, True, 0)
    assert (event.instance_uuid, event.project_id) == (REQUEST.instance_uuid, REQUEST.project_id)


def test_a_redelivery_goes_on_where_it_was() -> None:
    admission = admit_known(taken(), status(), may_have_run=True)
    assert (admission.outcome, admission.surely_unclaimed, admission.cancelled) == (None, False, False)
    assert admit_known(taken(), status(delete_requested=True), may_have_run=True).cancelled
    old = admit_known(taken(sent_at=1.0), status(), may_have_run=True)
    assert old.outcome is None, "on record, however old: it was not purged"
    assert isinstance(admit_known(taken(), None, may_have_run=True).outcome, Retry)


@pytest.mark.parametrize(
    ("known", "releases"),
    [
        (status(BuildState.ACTIVE, cell="c1"), False),
        (status(BuildState.SCHEDULED, cell="c1"), False),
        (status(BuildState.FAILED), True),
        (status(BuildState.FAILED, code="claim.consumer_changed"), False),  # another client's allocation
        (status(BuildState.DELETED), True),
        (status(BuildState.DELETED, code=UNKNOWN, digest=b""), True),  # its delete came first
    ],
)
@pytest.mark.parametrize("may_have_run", [True, False])
def test_a_repeated_request_changes_nothing_and_a_redelivered_one_leaves_no_claim_behind(
    known: BuildStatus, releases: bool, may_have_run: bool
) -> None:
    """A copy that the client sends anew releases nothing: what its instance holds is of an earlier request."""
    admission = admit_known(taken(), known, may_have_run=may_have_run)
    assert isinstance(admission.outcome, Done) and isinstance(admission.outcome.reply, BuildAccepted)
    assert admission.release is (releases and may_have_run)


def test_a_build_that_a_cell_has_keeps_its_claim() -> None:
    assert is_unused(status(delete_requested=True))
    assert not is_unused(status(delete_requested=True, cell="c1"))
    assert not is_unused(status())
