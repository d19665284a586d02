"""Each condition of the admission of builds and moves by itself: what would be decided without it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.consuming.outcome import EXPIRED_WAITING, Done, Received, RetryWhenAvailable
from bus.contracts.base import Meta, Refusal
from bus.contracts.build import BuildAccepted, BuildRequest, BuildState, FlavorCount, TimelineEntry
from bus.contracts.objects import GroupDefinition
from bus.contracts.placement import GroupPolicy, ReleaseByOwner, ServerGroup
from bus.contracts.stages import StageTimes
from scheduler_worker.build.admission import admit, admit_recorded, conflict_with, conflicts_with_first
from scheduler_worker.build.host_search import HostClaimed
from scheduler_worker.build.pending_build import (
    Answered,
    Continue,
    PendingBuild,
    Start,
    admit_expired,
    expand_gang,
    in_batches,
    pending_build,
)
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.records.build_record import ACCEPTED as ACCEPTED_NUMBER
from scheduler_worker.records.build_record import FAILED_OR_REFUSED, Actor, RecordedBuild, releases_of
from scheduler_worker.requests.request_delivery import RequestDelivery, classify_delivery
from scheduler_worker.requests.request_refusal import refused_build
from scheduler_worker.selection.selector_config import SelectorConfig
from tests.unit.scheduler_worker.hosts import Hosts

UUID, MOVE = (f"{n}0000000-0000-4000-8000-000000000001" for n in "0d")
REQUEST = BuildRequest(instance_uuid=UUID, project_id="p", flavor="m1.small")
CONFIG = Hosts([]).selector.config


def taken(
    request: BuildRequest = REQUEST,
    delivery: RequestDelivery | None = None,
    *,
    config: SelectorConfig = CONFIG,
    now: float = 1000.0,
    **meta: Any,
) -> PendingBuild:
    received = Received(request, Meta(**{"id": "m", **meta}), "api", "scheduler.requests")
    return pending_build(received, delivery or RequestDelivery(), now=now, config=config)


def on_record(pending: PendingBuild, state: BuildState = BuildState.ACCEPTED, **more: Any) -> RecordedBuild:
    more = {"project_id": "p", "digest": pending.digest, **more}
    return RecordedBuild(instance_uuid=UUID, state=state, sequence=1, **more)


def test_members_of_a_gang_clash_by_what_is_on_record_of_the_first_alone() -> None:
    gang = expand_gang(taken(replace(REQUEST, count=2)), start=0)
    other = taken(replace(REQUEST, count=3))
    firsts, later = {one.instance_uuid: one for one in gang}, gang[1]
    assert not conflicts_with_first(later, firsts, {})
    assert not conflicts_with_first(later, firsts, {UUID: on_record(gang[0])})
    assert conflicts_with_first(later, firsts, {UUID: on_record(other)})
    assert not conflicts_with_first(later, firsts, {UUID: on_record(other, digest=b"")})


ACCEPTED = BuildAccepted(instance_uuid=UUID)
REPEATED = {"label": "repeated", "reply": ACCEPTED}


@pytest.mark.parametrize(
    ("state", "more", "answer"),
    [
        (None, {}, {"waits": "request.concurrent"}),
        (BuildState.ACCEPTED, {"claim_owner": "r"}, Continue("r")),
        (BuildState.SCHEDULED, {}, REPEATED | {"ends": True}),
        (BuildState.ACTIVE, {}, REPEATED | {"ends": True}),
        (BuildState.FAILED, {}, REPEATED | {"ends": True}),
        (BuildState.DELETING, {}, REPEATED | {"ends": True}),
        (BuildState.DELETED, {}, REPEATED | {"ends": True}),
        (
            BuildState.REFUSED,
            {"code": "group.unknown", "reason": "why"},
            {"reply": Refusal(code="group.unknown", reason="why")},
        ),
        (BuildState.ACCEPTED, {"digest": b"other"}, "request.duplicate"),
        (BuildState.REFUSED, {"digest": b"other"}, "request.duplicate"),
        (
            BuildState.REFUSED,
            {"digest": b"", "code": "instance.unknown"},
            {"label": "deleted", "reply": ACCEPTED},
        ),
        (BuildState.DELETING, {"digest": b""}, {"label": "deleted", "reply": ACCEPTED}),
        (BuildState.REFUSED, {"digest": b"", "code": "instance.unknown", "project_id": "q"}, "request.duplicate"),
    ],
)
@pytest.mark.parametrize("flavor", ["m1.small", "deleted"])
def test_how_a_request_goes_on_that_is_on_record(
    state: BuildState | None, more: dict[str, Any], answer: Any, flavor: str
) -> None:
    """What it would be refused for now counts where it is not on record alone: its flavor may have been deleted."""
    pending = taken(replace(REQUEST, flavor=flavor))
    known = None if state is None else on_record(pending, state, **more)
    found = admit_recorded(pending, known)
    if isinstance(answer, Continue):
        assert found == answer
        return
    assert isinstance(found, Answered)
    if answer == "request.duplicate":
        refusal = Refusal(code="request.duplicate", reason="this instance_uuid is on record with other content")
        assert found == conflict_with(refused_build(UUID, "p", refusal, 1000.0), refusal)
        assert (found.outcome, found.label) == (Done(reply=refusal), "duplicate")
        return
    assert found.label == answer.get("label", "")
    assert found.build is (known if found.label else None)
    released = releases_of(known, pending.claim_owner) if known is not None and answer.get("ends") else []
    assert list(found.messages) == released
    if "waits" in answer:
        assert isinstance(found.outcome, RetryWhenAvailable) and found.outcome.code == answer["waits"]
    else:
        assert found.outcome == Done(reply=answer["reply"])


@pytest.mark.parametrize("refusal", [None, Refusal(code="x.y", reason="")])
def test_a_new_request_is_begun_or_refused(refusal: Refusal | None) -> None:
    pending = replace(taken(), refusal=refusal)
    refused = Answered(outcome=Done(reply=refusal), label="refused")
    assert admit(pending, {UUID: pending}, [UUID], {}) == (Start() if refusal is None else refused)


def test_a_later_member_is_refused_beside_its_first_without_an_event() -> None:
    gang, other = expand_gang(taken(replace(REQUEST, count=2)), start=0), taken(replace(REQUEST, flavor="m1.large"))
    first, later = gang
    firsts = {UUID: other, later.instance_uuid: later}
    alone = [admit(one, firsts, [UUID, later.instance_uuid], {}) for one in (later, first)]
    assert all(isinstance(one, Answered) and one.label == "duplicate" for one in alone)
    assert [not one.messages for one in alone if isinstance(one, Answered)] == [True, False]
    assert admit(later, {one.instance_uuid: one for one in gang}, [later.instance_uuid], {}) == Start()


EXHAUSTED, UNKNOWN = (Refusal(code=code, reason="") for code in ("delivery.limit_reached", "flavor.unknown"))


@pytest.mark.parametrize(
    ("begun", "is_late", "has_requester", "ended", "refusal"),
    [
        ("recorded", True, True, {}, None),
        ("recorded", True, False, {}, None),
        ("held", True, False, {}, None),
        ("", True, True, {}, "left"),
        ("", True, False, {}, EXPIRED_WAITING),
        ("", False, True, {}, None),
        # What no scheduler could handle ends, late or not; what is refused now does not count against a record.
        ("recorded", True, True, {"why": EXHAUSTED}, EXHAUSTED),
        ("held", True, True, {"why": EXHAUSTED, "refusal": UNKNOWN}, EXHAUSTED),
        ("", True, False, {"why": EXHAUSTED}, EXHAUSTED),
        ("recorded", False, False, {"refusal": UNKNOWN}, None),
        ("held", False, False, {"refusal": UNKNOWN}, UNKNOWN),
        ("held", True, False, {"refusal": UNKNOWN}, UNKNOWN),
    ],
)
def test_a_request_that_is_not_to_be_begun_goes_on_if_it_may_be_begun(
    begun: str, is_late: bool, has_requester: bool, ended: dict[str, Refusal], refusal: Any
) -> None:
    delivery = RequestDelivery(is_late=lambda: is_late, has_requester=has_requester, refusal=ended.get("why"))
    pending = replace(taken(delivery=delivery), refusal=ended.get("refusal"))
    found = admit_expired(pending, is_recorded=begun == "recorded", has_claim=begun == "held")
    if refusal == "left":
        assert found == Done()
    else:
        assert isinstance(found, PendingBuild) and (found.delivery.refusal, found.refusal) == (refusal, None)
        assert found.delivery.is_late() is (is_late and not begun)


def test_a_refused_build_is_looked_for_where_an_earlier_delivery_may_have_begun_it() -> None:
    found = [
        replace(taken(), refusal=refusal, attempt=attempt).is_expired
        for refusal in (None, UNKNOWN)
        for attempt in (0, 1)
    ]
    assert found == [False, False, False, True]
    refused = replace(taken(), refusal=UNKNOWN, attempt=1)
    assert admit_expired(refused, is_recorded=False, has_claim=False) == refused
    assert refused.first_record(Actor("s", 1.0)).build.attempt == 1


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


AFFINE = GroupDefinition(policy=GroupPolicy.AFFINITY, uuid=MOVE)
ITS_GROUP = ServerGroup(uuid=MOVE, policy=GroupPolicy.AFFINITY)
WITH_GROUP = Hosts([], config=SchedulerConfig(groups={"p/g": AFFINE, "q/g2": AFFINE})).selector.config


@pytest.mark.parametrize(
    ("names", "code", "group"),
    [
        ({}, None, None),
        ({"group": "g"}, None, ITS_GROUP),
        ({"group": "g2"}, "group.unknown", None),
        ({"group": "g", "server_group": ITS_GROUP}, "group.invalid", ITS_GROUP),
        ({"group": "g2", "server_group": ITS_GROUP}, "group.invalid", ITS_GROUP),
        ({"server_group": ITS_GROUP}, None, ITS_GROUP),
        ({"server_group": replace(ITS_GROUP, uuid=UUID)}, None, replace(ITS_GROUP, uuid=UUID)),
        (
            {"server_group": replace(ITS_GROUP, policy=GroupPolicy.ANTI_AFFINITY)}, "group.invalid",
            replace(ITS_GROUP, policy=GroupPolicy.ANTI_AFFINITY),
        ),
    ],
)  # fmt: skip
def test_a_request_names_a_server_group_that_there_is(
    names: dict[str, Any], code: str | None, group: ServerGroup | None
) -> None:
    pending = taken(replace(REQUEST, **names), config=WITH_GROUP)
    assert (pending.refusal and pending.refusal.code, pending.request.server_group) == (code, group)


@pytest.mark.parametrize(
    ("flavor", "also", "is_old", "group", "code"),
    [
        ("m1.small", (), False, None, None),
        ("no", (), True, "g", "flavor.unknown"),
        ("m1.small", ("no",), True, "g", "flavor.unknown"),
        ("m1.small", ("m1.large",), True, "g", "request.too_old"),
        ("m1.small", (), False, "g", "group.unknown"),
    ],
)
def test_why_a_request_is_refused_at_once(
    flavor: str, also: tuple[str, ...], is_old: bool, group: str | None, code: str | None
) -> None:
    request = replace(REQUEST, flavor=flavor, also=tuple(FlavorCount(flavor=one) for one in also), group=group)
    pending = taken(request, RequestDelivery(is_old=is_old))
    assert (pending.refusal and pending.refusal.code) == code


@pytest.mark.parametrize(("sent_at", "requested_at"), [(0.0, 1000.0), (990.0, 990.0), (1010.0, 1010.0)])
def test_a_request_that_was_received_and_its_first_record(sent_at: float, requested_at: float) -> None:
    pending = taken(sent_at=sent_at)
    assert (pending.batch_index, pending.requested_at, pending.taken_at) == (0, requested_at, 1000.0)
    why = Refusal(code="x.y", reason="why")
    for refusal in (None, why):
        new = replace(pending, refusal=refusal).first_record(Actor("s", 1001.0))
        first = TimelineEntry(at=min(requested_at, 1001.0), actor="s", what="requested", detail="m1.small for p")
        assert (new.request, new.gang, new.timeline[0]) == (pending.request, None, first)
        build = RecordedBuild(
            instance_uuid=UUID,
            project_id="p",
            digest=pending.digest,
            state=BuildState.ACCEPTED,
            sequence=ACCEPTED_NUMBER,
            claim_owner=pending.claim_owner,
        )
        if refusal is None:
            assert (new.build, new.timeline[1:]) == (build, ())
        else:
            refused = {"sequence": FAILED_OR_REFUSED, "terminal": True, "code": "x.y", "reason": "why"}
            assert new.build == replace(build, state=BuildState.REFUSED, **refused)
            assert new.timeline[1:] == (TimelineEntry(at=1001.0, actor="s", what="refused", detail="why"),)


def test_all_deliveries_of_a_message_are_one_run() -> None:
    """If its record is lost, a later one owns what was claimed for it by a process that is dead (seed 4950352)."""
    batching = [taken(id=message, now=now).claim_owner for message in ("m", "n", "") for now in (1.0, 2.0)]
    assert len({*batching}) == 3 and batching[::2] == batching[1::2]
    assert taken(replace(REQUEST, name="x"), id="").claim_owner != taken(id="").claim_owner


@pytest.mark.parametrize(
    ("queue", "redelivered", "retried", "attempt"),
    [
        ("scheduler.requests", False, 0, 0),
        ("scheduler.requests", True, 0, 1),
        ("scheduler.requests", False, 1, 1),
        ("scheduler.dead_letters", False, 0, 1),
    ],
)
def test_an_earlier_delivery_may_have_claimed(queue: str, redelivered: bool, retried: int, attempt: int) -> None:
    received = Received(REQUEST, Meta(id="m", retries=retried), "api", queue, redelivered)
    assert pending_build(received, classify_delivery(received), now=1.0, config=CONFIG).attempt == attempt


def test_a_run_that_finds_its_request_ended_under_another_is_released_with_it() -> None:
    pending = taken()
    found = admit_recorded(pending, on_record(pending, BuildState.FAILED, claim_owner="another"))
    assert isinstance(found, Answered)
    released = [one.message.owner for one in found.messages if isinstance(one.message, ReleaseByOwner)]
    assert released == ["another", pending.claim_owner]


def test_a_copy_that_may_have_claimed_under_a_run_of_its_own_is_looked_at_after_the_other() -> None:
    """It was answered at once, and nothing released what was claimed for it, where the other one ended without a
    host.
    """
    first, copy = taken(id="m"), taken(id="n")
    firsts = {UUID: first}
    assert isinstance(admit(copy, firsts, {UUID}, {}), Answered), "a client's repeat has claimed nothing"
    again = admit(replace(copy, attempt=1), firsts, {UUID}, {})
    assert isinstance(again, Answered) and isinstance(again.outcome, RetryWhenAvailable)
    delivered = admit(replace(copy, attempt=1, claim_owner=first.claim_owner), firsts, {UUID}, {})
    assert isinstance(delivered, Answered) and isinstance(delivered.outcome, Done)


@pytest.mark.parametrize(
    "claimed",
    [
        None,
        HostClaimed(
            cell="c",
            selections=(),
            consumer_generation=1,
            passing_hosts=1,
            score=0.0,
            claims=1,
            decided_at=3.0,
            claimed_at=4.0,
        ),
    ],
)
def test_when_each_stage_has_ended(claimed: HostClaimed | None) -> None:
    decided, at = (9.0, 0.0) if claimed is None else (3.0, 4.0)
    stage_times = taken(sent_at=1.0, now=2.0).stage_times(claimed, 9.0)
    assert stage_times == StageTimes(requested=1.0, queued=2.0, decided=decided, claimed=at)


@pytest.mark.parametrize(
    ("machines", "parts"),
    [
        ([1], [1]),
        ([100] * 5 + [12], [6]),
        ([100] * 5 + [13], [5, 1]),
        ([100] * 11, [5, 5, 1]),
        ([100] * 5 + [13, 100, 100, 100, 100, 99, 1], [5, 6, 1]),
    ],
)
def test_a_batch_is_divided_by_machines_and_never_within_one_request(machines: list[int], parts: list[int]) -> None:
    requests = {at: taken(replace(REQUEST, count=count)) for at, count in enumerate(machines)}
    passes = in_batches(requests)
    assert [len(one) for one in passes] == parts
    assert [pair for one in passes for pair in one.items()] == list(requests.items())
