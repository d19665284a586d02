"""Deletes, how a request came, and what its instance holds already."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec import structs
from msgspec.structs import replace

from bus.clock import new_uuid
from bus.consuming.given_up import EXHAUSTED, EXPIRED, GIVEN_UP
from bus.consuming.outcome import Done, Received, Refuse, Retry
from bus.contracts.base import Meta, Refusal
from bus.contracts.book import HeldAllocation
from bus.contracts.build import BuildEvent, BuildRequest, BuildState, DeleteRequest
from bus.contracts.cell import CellDelete
from bus.contracts.groups import GroupPolicy, ServerGroup
from bus.contracts.placement import ClaimOutcome, ClaimResult, LocatePage, LocateRequest, ReleaseRun
from bus.faults import Fault
from scheduler_worker.domain.builds import STRANDED, Author, Gang, ProjectsBuild, RecordedBuild
from scheduler_worker.domain.deletes import (
    UNKNOWN,
    PendingDelete,
    pending_delete,
    plan_deletes,
    refuse_unknown,
    tombstones,
)
from scheduler_worker.domain.placement import (
    CONSUMER_CHANGED,
    ClaimStranded,
    HostClaimed,
    PlacementRefused,
    PlacementUnavailable,
)
from scheduler_worker.domain.requests import HOSTS_UNKNOWN, LETTERS, OVERTAKES, RETRIES, delivery_of
from scheduler_worker.domain.selector import NoValidHost
from tests.unit.scheduler.hosts import PLENTY, Hosts
from tests.unit.scheduler.test_placing import CONFIG, RUN, Cluster, cluster, nowhere

# --- The effect of a delete, by the state of its build.


UUID = "00000000-0000-4000-8000-000000000001"
AUTHOR = Author("scheduler", 7.0)


def requested(position: int = 0, *, project: str = "p", delivery: int = 0) -> PendingDelete:
    request = DeleteRequest(instance_uuid=UUID, project_id=project)
    received = Received(request, Meta(id="m", attempt=delivery), "api", "scheduler.requests")
    return pending_delete(received, delivery_of(received, is_warming_up=False), position)


def recorded(state: BuildState, cell: str | None = None) -> RecordedBuild:
    return RecordedBuild(instance_uuid=UUID, project_id="p", state=state, sequence=2, cell=cell, run="mine")


GRAVE = {UUID: replace(recorded(BuildState.DELETED), code=UNKNOWN)}


def kept_by(
    run: str, cell: str | None = "c1", attempt: int = 1, project: str = "p"
) -> dict[ProjectsBuild, HeldAllocation]:
    held = HeldAllocation(
        consumer=UUID,
        project_id=project,
        run=run,
        attempt=attempt,
        consumer_generation=1,
        holding={UUID: {"VCPU": 1}},
        hosts=(UUID,),
        cell=cell,
    )
    return {(UUID, project): held}


def test_a_stranded_build_is_fenced_when_its_delete_finds_nothing_any_more() -> None:
    """A claim of its run may still be on its way, and nothing else would refuse it."""
    accepted = recorded(BuildState.ACCEPTED)
    (stranded,) = plan_deletes([requested()], {UUID: accepted}, AUTHOR, kept_by("mine", None)).updates
    plan = plan_deletes([requested()], {UUID: stranded.build}, AUTHOR, {})
    assert [update.build.state for update in plan.updates] == [BuildState.DELETED]
    assert [type(one.message) for one in plan.messages] == [BuildEvent, ReleaseRun]


def test_another_projects_delete_does_nothing() -> None:
    """It is answered as one of an instance that nobody has."""
    builds = {UUID: recorded(BuildState.ACTIVE, "c1")}
    plan = plan_deletes([requested(project="q")], builds, AUTHOR)
    assert isinstance(plan.outcomes[0], Retry)
    assert (plan.accepted, plan.updates, plan.messages, plan.unknown) == (set(), [], [], [])
    late = plan_deletes([requested(project="q", delivery=OVERTAKES)], builds, AUTHOR, kept_by("mine"))
    assert (late.accepted, late.updates, late.messages, tombstones(late.unknown, builds, AUTHOR)) == (set(), [], [], [])
    outcomes, messages = refuse_unknown(late.unknown, builds, AUTHOR, kept_by("mine"))
    assert isinstance(outcomes[0], Refuse) and messages == []


@pytest.mark.parametrize("state", [BuildState.ACCEPTED, BuildState.FAILED, BuildState.DELETED])
def test_another_projects_build_does_not_hide_what_was_claimed_for_the_projects_own(state: BuildState) -> None:
    """The schedulers' database was set back to before the build of p, whose machine runs; q has requested it since."""
    builds = {UUID: replace(recorded(state), project_id="q")}
    queried = plan_deletes([requested(delivery=OVERTAKES)], builds, AUTHOR)
    assert [one.request.project_id for one in queried.unbuilt] == ["p"]
    plan = plan_deletes(queried.unbuilt, builds, AUTHOR, kept_by("lost"))
    _, messages = refuse_unknown(plan.unknown, builds, AUTHOR, kept_by("lost"))
    told = [(one.bus, one.message.project_id) for one in messages if isinstance(one.message, CellDelete)]
    assert told == [("c1", "p")]


def test_an_unknown_instance_is_looked_for_again_and_then_put_on_record_as_deleted() -> None:
    early = plan_deletes([requested()], {}, AUTHOR)
    assert isinstance(early.outcomes[0], Retry) and early.unknown == []
    queried = plan_deletes([requested(delivery=OVERTAKES)], {}, AUTHOR)
    assert len(queried.unbuilt) == 1 and queried.unknown == []
    late = plan_deletes(queried.unbuilt, {}, AUTHOR, {})
    assert late.messages == []
    (tombstone,) = tombstones(late.unknown, (), AUTHOR)
    assert (tombstone.build.state, tombstone.build.terminal) == (BuildState.DELETED, True)
    refused, messages = refuse_unknown(late.unknown, {UUID: tombstone.build}, AUTHOR, {})
    assert list(refused) == [0] and len(messages) == 1
    assert refuse_unknown(late.unknown, {}, AUTHOR, {}) == ({}, []), "its build came in this moment"


@pytest.mark.parametrize("on_record", [{}, GRAVE])
@pytest.mark.parametrize("of", ["p", "another"])
def test_the_cell_of_the_claim_of_an_unknown_instance_is_told_of_its_projects_delete(
    on_record: dict[str, RecordedBuild], of: str
) -> None:
    """The record is lost, and not the claim; its build may run. Another project names it in the same batch."""
    held, deletes = (
        kept_by("lost", project=of),
        [requested(0, delivery=OVERTAKES), requested(1, project="another", delivery=OVERTAKES)],
    )
    plan = plan_deletes(deletes, on_record, AUTHOR, held)
    assert len(plan.unknown) == 2 and plan.messages == []
    _, messages = refuse_unknown(plan.unknown, GRAVE, AUTHOR, held)
    told = [(one.bus, one.message.project_id) for one in messages if isinstance(one.message, CellDelete)]
    assert told == [("c1", of)]
    _, messages = refuse_unknown(plan.unknown, {}, AUTHOR, held)
    assert messages == [], "its build came in this moment"


@pytest.mark.parametrize("build", [None, recorded(BuildState.FAILED)])
def test_a_delete_of_what_no_known_cell_has_waits_for_hosts_and_is_refused(build: RecordedBuild | None) -> None:
    builds, held = {} if build is None else {UUID: build}, kept_by("lost", None)
    late = requested(delivery=OVERTAKES)
    early = replace(late, delivery=replace(late.delivery, awaits_hosts=True))
    waits = plan_deletes([early], builds, AUTHOR, held)
    assert (waits.outcomes, waits.messages, waits.updates) == ({0: HOSTS_UNKNOWN}, [], [])
    plan = plan_deletes([late], builds, AUTHOR, held)
    assert plan.unknown == [], "no tombstone hides it"
    (refused,) = (one.message for one in plan.messages)
    assert isinstance(refused, BuildEvent) and (refused.state, refused.code) == (BuildState.REFUSED, STRANDED)
    outcome = plan.outcomes[0]
    assert isinstance(outcome, Done) and isinstance(outcome.reply, Refusal) and outcome.reply.code == STRANDED


def test_a_delete_that_ended_its_schedulers_is_not_carried_out() -> None:
    """It was carried out by the last deliveries, too."""
    received = Received(requested().request, Meta(id="m"), "api", "scheduler.requests", exhausted=True)
    exhausted = pending_delete(received, delivery_of(received, is_warming_up=False), 0)
    plan = plan_deletes([exhausted], {UUID: recorded(BuildState.ACTIVE, "c1")}, AUTHOR)
    (end,) = plan.messages
    assert isinstance(end.message, BuildEvent) and end.message.code == EXHAUSTED
    assert (plan.outcomes, plan.accepted, plan.updates) == ({0: Done()}, set(), [])


# --- What the instance of a request that found no host holds already: it is asked, and the build goes there.


__all__ = ["cluster"]  # a fixture


def hold(
    cluster: Cluster,
    *requests: BuildRequest,
    on: int = 4,
    attempt: int = 1,
    run: str = "another",
    cell: str | None = None,
) -> None:
    """Their instances hold something on this host."""
    uuid = cluster.hosts.uuids[on] if on >= 0 else "gone"
    for one in requests:
        cluster.port.held[one.instance_uuid] = HeldAllocation(
            consumer=one.instance_uuid,
            project_id=one.project_id,
            run=run,
            attempt=attempt,
            consumer_generation=2,
            holding={uuid: {"VCPU": 1}},
            hosts=(uuid,),
            cell=cell,
        )


@pytest.mark.parametrize("min_count", [1, 2])
async def test_members_of_a_gang_that_no_host_can_take_are_looked_up_before_they_fail(
    cluster: Cluster, min_count: int
) -> None:
    first = nowhere(cluster)
    second = structs.replace(cluster.hosts.request(), instance_uuid=new_uuid(cluster.hosts.rng))
    gang = Gang(uuid=first.instance_uuid, size=2, min_count=min_count)
    hold(cluster, first, second, attempt=2)
    placed = await cluster.placer.place([structs.replace(cluster.asking(one), gang=gang) for one in (first, second)])
    found = [isinstance(one, HostClaimed) and one.attempt > 1 for one in placed]
    if min_count == 2:
        assert found == [True, True], "the member that has room fails with its gang, and is looked for, too"
    assert found[0] and cluster.port.asked[0] == first.instance_uuid


@pytest.mark.parametrize("is_announced", [True, False])
async def test_what_no_host_can_take_is_looked_up_before_it_fails(cluster: Cluster, *, is_announced: bool) -> None:
    """A restore in a full cloud: what ran failed with `no_valid_host`, and its delete did not reach its cell."""
    ruled_out = nowhere(cluster)
    (failed,) = await cluster.place(ruled_out)
    assert isinstance(failed, NoValidHost) and cluster.claims == []
    assert cluster.port.asked == [ruled_out.instance_uuid]
    hold(cluster, ruled_out, on=4 if is_announced else -1)
    (found,) = await cluster.place(ruled_out)
    assert isinstance(found, HostClaimed if is_announced else ClaimStranded)
    taken = [(one.by, one.takes_over, one.attempt, one.options[0].allocations) for one in cluster.claims]
    holding = cluster.port.held[ruled_out.instance_uuid].holding
    assert taken == [(RUN, "another", 1, holding)], "a late Release of the other run releases nothing"
    hold(cluster, ruled_out, attempt=0)
    (foreign,) = await cluster.place(ruled_out)
    assert isinstance(foreign, PlacementRefused) and foreign.code == CONSUMER_CHANGED
    cluster.port.unavailable = True
    (unanswered,) = await cluster.place(ruled_out)
    assert isinstance(unanswered, PlacementUnavailable), "no answer is not no host"


async def test_a_boot_is_one_round_trip_and_what_found_no_host_is_looked_up_in_one_more(cluster: Cluster) -> None:
    requests = [cluster.hosts.request() for _ in range(3)]
    await cluster.place(*requests)
    assert [(claim.consumer, claim.by) for claim in cluster.claims] == [(one.instance_uuid, RUN) for one in requests]
    assert cluster.port.asked == []
    await cluster.place(nowhere(cluster), nowhere(cluster))
    assert len(cluster.port.asked) == 2 and len(cluster.claims) == 3


async def test_a_redelivered_request_without_a_host_queries_whether_it_holds_one(cluster: Cluster) -> None:
    hosts = cluster.hosts
    for at, uuid in enumerate(hosts.uuids):
        hosts.book.assume(f"full {at}", {uuid: {"VCPU": 16}})
    (nothing,) = await cluster.place(hosts.request())
    assert isinstance(nothing, NoValidHost) and cluster.claims == []
    request = hosts.request()
    hold(cluster, request, on=2, run=RUN)
    (placed,) = await cluster.place(request)
    assert isinstance(placed, HostClaimed) and placed.selections[0].host_uuid == hosts.uuids[2]
    assert cluster.claims == []


@pytest.mark.parametrize("policy", [GroupPolicy.ANTI_AFFINITY, GroupPolicy.AFFINITY])
async def test_a_member_whose_earlier_claim_has_the_last_host_is_recovered(policy: GroupPolicy) -> None:
    """It is counted among the others, so its own host may look full of them: its claim is asked for."""
    hosts = Hosts([{**PLENTY, "VCPU": 1}], config=CONFIG)
    cluster = Cluster(hosts, CONFIG)
    request = hosts.request(flavor="m1.tiny", server_group=ServerGroup(uuid=new_uuid(hosts.rng), policy=policy))
    hold(cluster, request, on=0, run=RUN)
    holding = {hosts.uuids[0]: {"VCPU": 1}}
    cluster.answer = lambda _: ClaimResult(outcome=ClaimOutcome.CLAIMED, consumer_generation=1, holding=holding)

    async def on_its_host(requests: Sequence[LocateRequest]) -> list[LocatePage | Fault]:
        return [LocatePage(members={hosts.uuids[0]: 1}) for _ in requests]

    cluster.port.locate = on_its_host  # type: ignore[method-assign]
    (placed,) = await cluster.place(request)
    assert isinstance(placed, HostClaimed) and placed.selections[0].host == "h0"
    assert placed.selections[0].allocations == holding


@pytest.mark.parametrize("attempt", [1, 2])
async def test_whoever_has_claimed_and_ends_without_a_host_is_looked_up_too(cluster: Cluster, attempt: int) -> None:
    """Another scheduler has claimed for it meanwhile. Only an end without any claim was looked up."""
    request = cluster.hosts.request()
    over = ClaimResult(outcome=ClaimOutcome.OVER_LIMIT, reason="VCPU")
    hold(cluster, request, run=RUN, attempt=attempt)
    cluster.answer = lambda _: over
    (placed,) = await cluster.place(request)
    assert isinstance(placed, HostClaimed) and placed.attempt == attempt


async def test_what_is_held_on_a_host_that_nothing_announces_is_left_to_the_cell_that_the_book_knows(
    cluster: Cluster,
) -> None:
    request = nowhere(cluster)
    hold(cluster, request, on=-1, run=RUN, cell="c7")
    (placed,) = await cluster.place(request)
    assert isinstance(placed, ClaimStranded)
    assert (placed.cell, placed.host_uuid, placed.attempt) == ("c7", "gone", 1) and cluster.claims == []


async def test_what_cannot_be_taken_over_is_tried_again(cluster: Cluster) -> None:
    request = nowhere(cluster)
    hold(cluster, request)
    cluster.answer = lambda _: ClaimResult(outcome=ClaimOutcome.CONSUMER_CHANGED)
    (placed,) = await cluster.place(request)
    assert isinstance(placed, PlacementUnavailable)


async def test_a_run_whose_record_was_made_anew_takes_nothing_from_the_run_after_it(cluster: Cluster) -> None:
    request = nowhere(cluster)
    hold(cluster, request, run="newer")
    cluster.on_record[request.instance_uuid] = "newer"
    (placed,) = await cluster.place(request)
    assert isinstance(placed, PlacementUnavailable) and cluster.claims == []


# --- How a request came, as one description.


REQUESTS = "scheduler.requests"
REQUEST = DeleteRequest(instance_uuid="00000000-0000-4000-8000-000000000001", project_id="p")


def came(
    queue: str = REQUESTS,
    attempt: int = 0,
    *,
    waits: bool = False,
    left_s: float = 9.0,
    exhausted: bool = False,
    given_up: str = "",
) -> Received:
    meta = Meta(id="m", attempt=attempt, reply_to="client.reply.x" if waits else None)
    return Received(REQUEST, meta, "api", queue, exhausted=exhausted, given_up=given_up, left_s=lambda: left_s)


@pytest.mark.parametrize(
    ("received", "last", "code", "is_left"),
    [
        (came(), False, None, False),
        (came(attempt=RETRIES - 1), False, None, False),
        (came(attempt=RETRIES), True, None, False),
        (came(exhausted=True), True, EXHAUSTED, False),
        (came(left_s=-1.0), False, EXPIRED, False),  # the end of one that is not on record
        (came(left_s=-1.0, waits=True), False, EXPIRED, True),
        (came(LETTERS, given_up=EXPIRED), True, EXPIRED, False),
        (came(LETTERS, given_up=EXPIRED, waits=True), True, EXPIRED, True),
        (came(LETTERS, given_up="handler.crashed", waits=True), True, GIVEN_UP, False),
        (came(LETTERS, given_up="broker.delivery_limit"), True, EXHAUSTED, False),
        (came(LETTERS, exhausted=True, given_up=EXPIRED), True, EXHAUSTED, False),
        (came(LETTERS), True, GIVEN_UP, False),
    ],
)  # fmt: skip
def test_how_a_request_came(received: Received, last: bool, code: str | None, is_left: bool) -> None:
    delivery = delivery_of(received, is_warming_up=True)
    why = delivery.ends_with()
    assert (delivery.last, None if why is None else why.code, delivery.is_left) == (last, code, is_left)
    assert delivery.awaits_hosts is not last, "there is no retry in which they may be known"
    assert not delivery_of(received).awaits_hosts


def test_what_a_request_refers_to_is_looked_for_again_a_few_times() -> None:
    assert [delivery_of(came(attempt=number)).may_be_early for number in range(OVERTAKES + 1)] == [True, True, False]
    assert not delivery_of(came(LETTERS, given_up=EXPIRED)).may_be_early


def test_a_letter_that_goes_on_is_its_last_delivery_and_one_that_crashes_ends() -> None:
    expired = delivery_of(came(LETTERS, given_up=EXPIRED, waits=True))
    begun, crashed = expired.going_on(), expired.crashed()
    assert expired.is_late() and begun.last and begun.ends_with() is None
    assert crashed.why is not None and crashed.why.code == GIVEN_UP
    assert not crashed.is_left, "it is on record by now, and has an event"


@pytest.mark.parametrize(("sent_at", "is_old"), [(0.0, False), (99.0, True), (100.0, False)])
def test_a_request_is_old_if_its_record_may_be_purged(sent_at: float, is_old: bool) -> None:
    received = Received(REQUEST, Meta(id="m", sent_at=sent_at), "api", REQUESTS)
    assert delivery_of(received, kept_since=100.0).is_old is is_old
