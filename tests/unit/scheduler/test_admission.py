"""Each condition of the admission of builds and moves by itself: what would be decided without it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.consuming.outcome import Done, Received
from bus.contracts.base import Meta, Refusal
from bus.contracts.build import BuildAccepted, BuildRequest, BuildState
from bus.contracts.groups import GroupPolicy, ServerGroup
from bus.contracts.moves import Condition, MoveKind, MoveRequest
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
from scheduler_worker.domain.gangs import withdrawn_by_gang
from scheduler_worker.domain.moves import check_move, chooses_hosts, pending_move, under_way
from scheduler_worker.domain.recorded_moves import InstanceRecord, MoveContext, RecordedMove
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


def test_members_that_a_delete_takes_out_are_counted_for_their_gang() -> None:
    gang, alone = members_of(taken(replace(REQUEST, count=2)), start=0), taken()
    both = [Start(), Start()]
    assert withdrawn_by_gang(gang, both, [gang[1].instance_uuid]) == {UUID: 1}
    assert withdrawn_by_gang(gang, [Start(), Answered(outcome=Done(), withdrawn=True)], []) == {UUID: 1}
    assert withdrawn_by_gang(gang, both, []) == {} == withdrawn_by_gang([alone], [Start()], [UUID])


def test_a_request_names_a_server_group_that_there_is() -> None:
    stated = ServerGroup(uuid=UUID, policy=GroupPolicy.AFFINITY)
    refusals = [
        taken(replace(REQUEST, **more)).refusal for more in ({"group": "g"}, {"group": "g", "server_group": stated})
    ]
    assert [one is not None and one.code for one in refusals] == ["group.unknown", "group.invalid"]


# --- moves

ACTIVE = RecordedBuild(
    instance_uuid=UUID, project_id="p", state=BuildState.ACTIVE, sequence=9, terminal=True, cell="c", host="h"
)


def checked(
    kind: MoveKind = MoveKind.STOP,
    *,
    move: dict[str, Any] | None = None,
    condition: Condition = Condition.ACTIVE,
    of: str = "p",
    **more: Any,
) -> Answered | Refusal | None:
    """of: the project that has the instance."""
    request = MoveRequest(request_id=MOVE, instance_uuid=UUID, project_id="p", kind=kind, **more)
    pending = pending_move(Received(request, Meta(id="m"), "api", "q"), RequestDelivery(), 0, now=1000.0)
    recorded = None
    if move is not None:
        known = {"digest": pending.digest, "project_id": "p", "state": "scheduled", "sequence": 2, **move}
        recorded = RecordedMove(request_id=MOVE, instance_uuid=UUID, kind=kind, **known)
    now = InstanceRecord(instance_uuid=UUID, condition=condition)
    context = MoveContext(move=recorded, build=replace(ACTIVE, project_id=of), instance=now, build_request=REQUEST)
    return check_move(pending, context, SELECTOR, same_host=True)


def test_a_move_is_the_same_by_its_content_and_its_project() -> None:
    def replied(**move: Any) -> str:
        answer = checked(move=move)
        assert isinstance(answer, Answered) and isinstance(answer.outcome, Done)
        return answer.label

    assert replied() != "duplicate"
    assert replied(digest=b"other") == replied(project_id="other") == "duplicate"


@pytest.mark.parametrize(
    ("flavor", "code"),
    [("m1.small", "flavor.same"), ("m1.large", None), ("no.such", "flavor.unknown"), (None, "request.incomplete")],
)
def test_a_resize_names_another_flavor_that_there_is(flavor: str | None, code: str | None) -> None:
    answer = checked(MoveKind.RESIZE, flavor=flavor)
    assert (answer.code if isinstance(answer, Refusal) else answer) == code


@pytest.mark.parametrize(
    ("kind", "condition", "chosen"),
    [
        (MoveKind.UNSHELVE, Condition.SHELVED, False),
        (MoveKind.UNSHELVE, Condition.OFFLOADED, True),
        (MoveKind.MIGRATE, Condition.ACTIVE, True),
        (MoveKind.STOP, Condition.ACTIVE, False),
    ],
)
def test_hosts_are_chosen_for_what_does_not_start_where_it_is(
    kind: MoveKind, condition: Condition, chosen: bool
) -> None:
    request = MoveRequest(request_id=MOVE, instance_uuid=UUID, project_id="p", kind=kind)
    instance = InstanceRecord(instance_uuid=UUID, condition=condition)
    assert chooses_hosts(request, MoveContext(build=ACTIVE, instance=instance, build_request=REQUEST)) is chosen


@pytest.mark.parametrize(("of", "code"), [("p", None), ("q", "instance.unknown")])
def test_an_instance_of_another_project_is_unknown(of: str, code: str | None) -> None:
    answer = checked(of=of)
    assert (answer.code if isinstance(answer, Refusal) else answer) == code


@pytest.mark.parametrize(
    ("kind", "force", "before", "after"),
    [
        (MoveKind.STOP, False, None, MOVE),
        (MoveKind.ABORT, False, None, None),
        (MoveKind.ABORT, False, "another", "another"),
        (MoveKind.REVERT, True, None, MOVE),
    ],
)
def test_a_request_that_ends_another_leaves_that_one_under_way(
    kind: MoveKind, force: bool, before: str | None, after: str | None
) -> None:
    request = MoveRequest(request_id=MOVE, instance_uuid=UUID, project_id="p", kind=kind, force=force)
    instance = InstanceRecord(instance_uuid=UUID, under_way=before)
    known = MoveContext(build=ACTIVE, instance=instance, build_request=REQUEST)
    assert under_way(request, known).under_way == after


@pytest.mark.parametrize(
    ("kind", "host", "condition", "code"),
    [
        (MoveKind.UNSHELVE, "h", Condition.SHELVED, "instance.not_offloaded"),
        (MoveKind.UNSHELVE, None, Condition.SHELVED, None),
        (MoveKind.UNSHELVE, "h", Condition.OFFLOADED, None),
        (MoveKind.MIGRATE, "h", Condition.SHELVED, None),
    ],
)
def test_a_shelved_instance_starts_where_it_is(
    kind: MoveKind, host: str | None, condition: Condition, code: str | None
) -> None:
    answer = checked(kind, host=host, condition=condition)
    assert (answer.code if isinstance(answer, Refusal) else answer) == code


def test_an_instance_that_has_ended_is_refused_by_its_condition() -> None:
    answer = checked(condition=Condition.DELETED)
    assert isinstance(answer, Refusal) and answer.code == "instance.not_active" and answer.reason.endswith("deleted")


@pytest.mark.parametrize(("password", "code"), [("", "request.incomplete"), ("secret", None)])
def test_a_rescue_names_a_password(password: str, code: str | None) -> None:
    answer = checked(MoveKind.RESCUE, rescue_password=password)
    assert (answer.code if isinstance(answer, Refusal) else answer) == code
