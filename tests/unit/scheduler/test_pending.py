"""The effect of the record on a build request that came again: a table, and nothing else decides it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.consuming.given_up import EXPIRED
from bus.consuming.outcome import Done, Received, Retry
from bus.contracts.base import Meta, Refusal
from bus.contracts.build import BuildAccepted, BuildEvent, BuildRequest, BuildState
from bus.faults import Transient
from scheduler_worker.domain.admission import (
    Admission,
    Answered,
    Continue,
    Start,
    admit_expired,
    admit_known,
    admit_new,
    admit_repeated,
)
from scheduler_worker.domain.builds import Author, BuildStatus, RecordedBuild
from scheduler_worker.domain.deletes import UNKNOWN
from scheduler_worker.domain.delivery import LAST, LETTERS, RequestDelivery, delivery_of
from scheduler_worker.domain.pending import PendingBuild, new_build, pending_build
from scheduler_worker.domain.requests import TOO_OLD
from tests.unit.scheduler.hosts import Hosts

NO_FLAVORS = Hosts([]).selector
UUID = "00000000-0000-4000-8000-000000000001"
REQUEST = BuildRequest(instance_uuid=UUID, project_id="p", flavor="m1.small")


def taken(request: BuildRequest = REQUEST, **meta: float) -> PendingBuild:
    received = Received(request, Meta(id="m", **meta), "api", "scheduler.requests")  # type: ignore[arg-type]
    return pending_build(received, delivery_of(received, kept_since=900.0), now=1000.0, flavors=Hosts([]).selector)


def status(state: BuildState = BuildState.ACCEPTED, digest: bytes | None = None, **more: object) -> BuildStatus:
    build = RecordedBuild(instance_uuid=UUID, project_id="p", state=state, sequence=1, **more)  # type: ignore[arg-type]
    return BuildStatus(build, taken().digest if digest is None else digest)


def test_a_new_request_is_accepted_or_refused_at_once() -> None:
    assert admit_new(taken()) == Start()
    for pending, code in ((taken(replace(REQUEST, flavor="f")), "flavor.unknown"), (taken(sent_at=1.0), TOO_OLD.code)):
        outcome = admit_new(pending).outcome
        assert isinstance(outcome, Done) and isinstance(outcome.reply, Refusal) and outcome.reply.code == code
        build = new_build(pending, Author("s", 1.0)).build
        assert (build.state, build.terminal, build.code) == (BuildState.REFUSED, True, code)


def test_a_request_goes_on_under_the_run_of_its_record() -> None:
    """A redelivery repeats its message's id, a copy has another, and a client may set none."""
    assert new_build(taken(), Author("s", 1.0)).build.run == taken().run != ""
    assert admit_known(taken(), status(run="r")) == Continue("r")
    later = pending_build(
        Received(REQUEST, Meta(id="m"), "api", "q"), RequestDelivery(), now=1001.0, flavors=NO_FLAVORS
    )
    assert later.run != taken().run, "a record that is lost may have been dispatched: it had another run"
    nameless = [
        pending_build(Received(one, Meta(id=""), "api", "q"), RequestDelivery(), now=1000.0, flavors=NO_FLAVORS).run
        for one in (REQUEST, replace(REQUEST, name="other"))
    ]
    assert len({taken().run, *nameless}) == 3


def test_a_request_on_record_whose_flavor_was_deleted_since_goes_on_to_its_decision() -> None:
    """It was answered as accepted, and never ended."""
    pending = taken(replace(REQUEST, flavor="deleted"))
    assert pending.refusal is not None
    assert admit_known(pending, status(digest=pending.digest)) == Continue("")


def test_of_the_same_instance_twice_in_a_batch_the_first_counts() -> None:
    assert isinstance(admit_repeated(taken(), taken()).outcome, Done)
    assert_clash(admit_repeated(taken(replace(REQUEST, name="other")), taken()))


def test_other_content_under_a_known_instance_is_a_clash() -> None:
    assert_clash(admit_known(taken(), status(digest=b"other")))


def assert_clash(admission: Admission) -> None:
    """Requesters that wait for a reply and listeners to events receive it, and it overtakes nothing."""
    assert isinstance(admission, Answered) and admission.event is not None
    outcome, event = admission.outcome, admission.event.message
    assert isinstance(outcome, Done) and isinstance(outcome.reply, Refusal) and isinstance(event, BuildEvent)
    assert outcome.reply.code == event.code == "request.duplicate"
    assert (event.state, event.terminal, event.sequence) == (BuildState.REFUSED, True, 0)
    assert (event.instance_uuid, event.project_id) == (REQUEST.instance_uuid, REQUEST.project_id)


def test_a_redelivery_goes_on_where_it_was() -> None:
    assert admit_known(taken(), status()) == Continue("")
    assert admit_known(taken(sent_at=1.0), status()) == Continue(""), "on record, however old: it was not purged"
    concurrent = admit_known(taken(), None)
    assert isinstance(concurrent, Answered) and isinstance(concurrent.outcome, Retry)
    with pytest.raises(Transient):
        admit_known(replace(taken(), delivery=LAST), None)


@pytest.mark.parametrize("has_requester", [False, True])
def test_a_build_that_expired_goes_on_if_it_was_begun(*, has_requester: bool) -> None:
    """Without a requester it ended, though a scheduler had recorded and claimed for it."""
    reply_to = "client.reply.gone" if has_requester else None
    received = Received(REQUEST, Meta(id="m", reply_to=reply_to), "api", LETTERS, given_up=EXPIRED)
    expired = replace(taken(), delivery=delivery_of(received, is_warming_up=True))
    begun = admit_expired(expired, may_be_begun=True)
    assert begun is not None and begun.delivery.why is None
    assert begun.delivery.last and not begun.delivery.awaits_hosts, "a letter has no letter"
    ended = admit_expired(expired, may_be_begun=False)
    assert ended == (None if has_requester else expired)
    assert expired.delivery.why is not None and expired.delivery.why.code == EXPIRED


@pytest.mark.parametrize(
    ("known", "is_withdrawn"),
    [
        (status(BuildState.ACTIVE, cell="c1"), False),
        (status(BuildState.FAILED), False),
        (status(BuildState.DELETING, cell="c1"), True),
        (status(BuildState.DELETED), True),
    ],
)
def test_a_repeated_request_changes_nothing_and_what_follows_from_its_record_is_done_again(
    known: BuildStatus, is_withdrawn: bool
) -> None:
    """The scheduler that wrote the record may have died before it told placement."""
    admission = admit_known(taken(), known)
    assert isinstance(admission.outcome, Done) and isinstance(admission.outcome.reply, BuildAccepted)
    assert (admission.ended, admission.withdrawn) == (known.build, is_withdrawn)


def test_what_was_deleted_before_it_came_never_had_a_claim() -> None:
    admission = admit_known(taken(), status(BuildState.DELETED, b"", code=UNKNOWN))
    assert isinstance(admission.outcome, Done) and (admission.ended, admission.withdrawn) == (None, True)


@pytest.mark.parametrize(("sent_at", "begins"), [(995.8, 995.8), (0.0, 1000.0), (1030.0, 1000.0)])
def test_the_timeline_begins_when_the_request_was_sent(sent_at: float, begins: float) -> None:
    """It hid how long the request had waited in its queue: 4.2 s of 20.8. A client's clock may be ahead."""
    pending = taken(sent_at=sent_at)
    (line,) = new_build(pending, Author("s", 1000.0)).timeline
    assert (line.what, line.at) == ("requested", begins)
