"""Each condition of the admission of builds and moves by itself: what would be decided without it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.consuming.outcome import Done, Received
from bus.contracts.base import Meta, Refusal
from bus.contracts.build import BuildAccepted, BuildRequest, BuildState
from bus.contracts.groups import GroupPolicy, ServerGroup
from scheduler_worker.domain.admission import (
    Answered,
    PendingBuild,
    Start,
    admit,
    admit_known,
    first_of_each,
    is_clash_of_first,
    members_of,
    pending_build,
)
from scheduler_worker.domain.builds import BuildStatus, RecordedBuild
from scheduler_worker.domain.requests import RequestDelivery
from tests.unit.scheduler.hosts import Hosts

UUID, MOVE = (f"{n}0000000-0000-4000-8000-000000000001" for n in "0d")
REQUEST = BuildRequest(instance_uuid=UUID, project_id="p", flavor="m1.small")
SELECTOR = Hosts([]).selector


def taken(request: BuildRequest = REQUEST, delivery: RequestDelivery | None = None) -> PendingBuild:
    received = Received(request, Meta(id="m"), "api", "scheduler.requests")
    return pending_build(received, delivery or RequestDelivery(), now=1000.0, flavors=SELECTOR)


def on_record(pending: PendingBuild, state: BuildState = BuildState.ACCEPTED, **more: Any) -> BuildStatus:
    build = RecordedBuild(instance_uuid=UUID, project_id="p", state=state, sequence=1, **more)
    return BuildStatus(build, pending.digest)


def test_the_second_of_two_in_a_batch_is_answered_and_not_begun() -> None:
    first, second = taken(), taken()
    firsts = first_of_each([first, second])
    assert [admit(one, firsts, [UUID], {}) == Start() for one in (first, second)] == [True, False]


def test_members_of_a_gang_clash_by_what_is_on_record_of_the_first_alone() -> None:
    gang = members_of(taken(replace(REQUEST, count=2)), start=0)
    other = taken(replace(REQUEST, count=3))
    firsts, later = first_of_each(gang), gang[1]
    assert not is_clash_of_first(later, firsts, {})
    assert not is_clash_of_first(later, firsts, {UUID: on_record(gang[0])})
    assert is_clash_of_first(later, firsts, {UUID: on_record(other)})
    assert not is_clash_of_first(later, firsts, {UUID: on_record(other, code="instance.unknown")})


@pytest.mark.parametrize(
    ("state", "code"),
    [(BuildState.ACCEPTED, None), (BuildState.SCHEDULED, None), (BuildState.REFUSED, "flavor.unknown")],
)
def test_what_a_request_would_be_refused_for_now_counts_only_where_it_is_not_on_record(
    state: BuildState, code: str | None
) -> None:
    """Its flavor has been deleted since."""
    pending = taken(replace(REQUEST, flavor="deleted"))
    admission = admit_known(pending, on_record(pending, state, code=code or ""))
    reply = admission.outcome.reply if isinstance(admission, Answered) and isinstance(admission.outcome, Done) else None
    assert (reply.code if isinstance(reply, Refusal) else None) == code


@pytest.mark.parametrize("flavor", ["m1.small", "deleted"])
def test_a_build_that_was_refused_is_refused_again_as_it_is_on_record(flavor: str) -> None:
    """Its flavor was created since, or another reason holds now: it was answered as accepted, and no event followed."""
    pending = taken(replace(REQUEST, flavor=flavor))
    refused = on_record(pending, BuildState.REFUSED, code="group.unknown")
    admission = admit_known(pending, refused)
    assert isinstance(admission, Answered) and isinstance(admission.outcome, Done)
    assert isinstance(admission.outcome.reply, Refusal) and admission.outcome.reply.code == "group.unknown"
    assert not admission.withdrawn, "no delete has taken it out of its gang"


def test_a_copy_of_a_request_in_its_batch_is_answered_as_the_request_is() -> None:
    """The copy of one that is refused was answered as accepted."""
    first, copy = taken(replace(REQUEST, flavor="deleted")), taken(replace(REQUEST, flavor="deleted"))
    firsts = {UUID: first}
    known = {UUID: on_record(first, BuildState.REFUSED, code="flavor.unknown")}
    for new, records in (({UUID}, {}), (set[str](), known)):
        admission = admit(copy, firsts, new, records)
        assert isinstance(admission, Answered) and isinstance(admission.outcome, Done)
        assert isinstance(admission.outcome.reply, Refusal) and admission.outcome.reply.code == "flavor.unknown"
    accepted = admit(copy, firsts, set(), {UUID: on_record(first, BuildState.ACCEPTED)})
    assert isinstance(accepted, Answered) and isinstance(accepted.outcome, Done)
    assert isinstance(accepted.outcome.reply, BuildAccepted), "one of them is decided about, not both"


def test_a_request_names_a_server_group_that_there_is() -> None:
    stated = ServerGroup(uuid=UUID, policy=GroupPolicy.AFFINITY)
    refusals = [
        taken(replace(REQUEST, **more)).refusal for more in ({"group": "g"}, {"group": "g", "server_group": stated})
    ]
    assert [one is not None and one.code for one in refusals] == ["group.unknown", "group.invalid"]
