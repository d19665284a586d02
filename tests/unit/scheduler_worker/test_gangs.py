"""Requests for several machines: their members, and what one member means for the others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid5

import msgspec
import pytest
from msgspec.structs import replace

from bus.clock import new_uuid
from bus.consuming.outcome import Done, Outcome, Received, Retry, RetryWhenAvailable
from bus.contracts.base import Meta, Refusal, encode
from bus.contracts.build import BuildAccepted, BuildRequest, BuildState, FlavorCount, member_uuids
from bus.contracts.cell import CellBuild, CellBuildQuery, Selection
from bus.contracts.deploy import NetworkRequest
from bus.contracts.placement import (
    MAX_GANG_PROVIDERS,
    MAX_MEMBERS,
    Claim,
    ClaimAll,
    ClaimAllResult,
    ClaimOption,
    ClaimOutcome,
    ClaimResult,
    GroupPolicy,
    ServerGroup,
)
from bus.faults import Fault
from scheduler_worker.build.decision import DecidedBuild, PlacedBuild, conclude
from scheduler_worker.build.gang import (
    apply_gang_results,
    by_gang,
    claimable,
    largest_first,
    merged,
    needed,
    outcome_of_gang,
    remaining_gangs,
    share_gang_results,
    within_bounds,
)
from scheduler_worker.build.host_search import (
    GangIncomplete,
    HostClaimed,
    HostSearch,
    HostSearchRefused,
    HostSearchRequest,
    HostSearchResult,
    new_host_search,
)
from scheduler_worker.build.pending_build import Admission, Answered, PendingBuild, Start, expand_gang, pending_build
from scheduler_worker.placement_client import PlacementUnavailable
from scheduler_worker.records.build_record import Actor, Gang, NewBuild, RecordedBuild
from scheduler_worker.requests.request_delivery import MAX_RETRIES, RequestDelivery
from scheduler_worker.selection.request_spec import RelatedInstances, RequestSpec
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts
from tests.unit.scheduler_worker.test_deletes import hold, nowhere
from tests.unit.scheduler_worker.test_placing import cluster
from tests.unit.scheduler_worker.test_without_an_answer import Site, site

__all__ = ["cluster", "site"]  # fixtures

UUID_, OTHER = (f"00000000-0000-4000-8000-00000000000{n}" for n in "12")
REQUEST = BuildRequest(instance_uuid=UUID_, project_id="p", flavor="m1.small")
REFUSED = HostSearchRefused("claim.invalid", "")
CLAIMED = HostClaimed(cell="c1", selections=(), consumer_generation=1, passing_hosts=1, score=0.0, claims=1)
SELECTION = Selection(host_uuid=UUID_, host="h", service="s", allocations={UUID_: {"VCPU": 1}})
UNANSWERED = PlacementUnavailable("away")


def taken(request: BuildRequest) -> PendingBuild:
    received = Received(request, Meta(id="m"), "api", "scheduler.requests")
    return pending_build(received, RequestDelivery(), now=1000.0, config=Hosts([]).selector.config)


AGAIN, WAITS, REFUSAL = Retry("x", ""), RetryWhenAvailable("y", ""), Done(reply=Refusal(code="z", reason=""))


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([Done(), AGAIN, WAITS], AGAIN),
        ([WAITS, AGAIN, Done()], WAITS),
        ([REFUSAL, Done(), Done()], REFUSAL),
        ([Done(), REFUSAL, REFUSAL], Done()),
    ],
)
def test_a_request_is_retried_with_any_of_its_members_and_else_answered_as_its_first(
    outcomes: list[Outcome], expected: Outcome
) -> None:
    members = expand_gang(taken(replace(REQUEST, count=3)), start=5)
    assert outcome_of_gang(members, dict(enumerate(outcomes, 5))) == expected


def test_the_reply_to_a_request_for_several_machines_names_them() -> None:
    members = expand_gang(taken(replace(REQUEST, count=3)), start=0)
    outcomes = {one.batch_index: one.accepted for one in members}
    reply = BuildAccepted(instance_uuid=UUID_, members=tuple(one.instance_uuid for one in members))
    assert outcome_of_gang(members, outcomes) == Done(reply=reply)


def test_members_are_requests_for_one_machine_each_under_uuids_that_follow_from_the_request() -> None:
    request = replace(REQUEST, name="w", count=2, also=(FlavorCount(flavor="m1.large"),), min_count=2)
    members = expand_gang(taken(request), start=100)
    assert [one.batch_index for one in members] == [100, 101, 102]
    assert [one.instance_uuid for one in members] == [UUID_, *(str(uuid5(UUID(UUID_), n)) for n in "12")]
    assert [(one.request.flavor, one.request.name) for one in members] == [
        ("m1.small", "w-1"), ("m1.small", "w-2"), ("m1.large", "w-3"),
    ]  # fmt: skip
    assert all(one.request.members == 1 and one.gang == Gang(uuid=UUID_, size=3, min_count=2) for one in members)
    assert [one.is_later_member for one in members] == [False, True, True]
    assert len({one.digest for one in members}) == 1 and members[0].digest != taken(REQUEST).digest


def test_a_request_for_one_is_no_gang() -> None:
    (only,) = expand_gang(taken(replace(REQUEST, min_count=1)), start=100)
    assert (only.gang, only.batch_index, member_uuids(only.request)) == (None, 100, (UUID_,))


@pytest.mark.parametrize(("name", "names"), [("", ["", ""]), ("x" * 255, [f"{'x' * 253}-1", f"{'x' * 253}-2"])])
def test_members_have_names_that_are_no_longer_than_a_name(name: str, names: list[str]) -> None:
    members = expand_gang(taken(replace(REQUEST, name=name, count=2)), start=0)
    assert [one.request.name for one in members] == names
    assert [one.gang and one.gang.min_count for one in members] == [2, 2]


def test_the_largest_request_is_accepted_with_its_network() -> None:
    request = replace(REQUEST, count=MAX_MEMBERS, networks=(NetworkRequest(network=UUID_),))
    assert msgspec.json.decode(encode(request), type=BuildRequest) == request
    assert len(set(member_uuids(request))) == MAX_MEMBERS


def states(*results: HostSearchResult | None, least: int, gang: bool = True) -> list[HostSearch]:
    hosts, rng = Hosts([PLENTY]), random.Random(1)
    made = []
    for result in results:
        request = replace(REQUEST, instance_uuid=new_uuid(rng))
        spec = hosts.selector.request_spec(request)
        assert isinstance(spec, RequestSpec)
        of = Gang(uuid=UUID_, size=len(results), min_count=least) if gang else None
        made.append(replace(new_host_search(HostSearchRequest(request=request, spec=spec, gang=of), hosts.selector),
                            result=result))  # fmt: skip
    return made


@pytest.mark.parametrize(("policy", "is_shared"), [(GroupPolicy.AFFINITY, True), (GroupPolicy.ANTI_AFFINITY, False)])
def test_members_that_start_on_one_host_share_what_any_of_them_has_found(policy: GroupPolicy, is_shared: bool) -> None:
    """The largest chooses the host for all of them, and placement refuses the first: it may be another one."""
    group = ServerGroup(uuid=UUID_, policy=policy)
    first, second = (
        replace(one, spec=one.spec.with_related(RelatedInstances(server_group=group), one.request.instance_uuid))
        for one in states(None, None, least=2)
    )
    refused = replace(first, rejected={"h1": "claim.no_capacity"}, spec=first.spec.with_members({"h2": 1}))
    for one in share_gang_results([refused, second])[not is_shared :]:
        assert one.spec.related is not None
        found = (dict(one.rejected), dict(one.spec.related.members))
        assert found == (({"h1": "claim.no_capacity"}, {"h2": 1}) if is_shared else ({}, {}))


def results(found: list[HostSearch]) -> list[object]:
    return [one.result for one in found]


@pytest.mark.parametrize(
    ("before", "least", "after"),
    [
        ((None, REFUSED, None), 2, (None, REFUSED, None)),
        ((None, REFUSED, None), 3, ("incomplete", REFUSED, "incomplete")),
        ((None, UNANSWERED, REFUSED), 1, (UNANSWERED, UNANSWERED, REFUSED)),
        ((CLAIMED, None, CLAIMED), 2, (CLAIMED, "left_out", CLAIMED)),
        ((CLAIMED, REFUSED), 2, (CLAIMED, REFUSED)),
        ((CLAIMED, UNANSWERED, None), 1, (CLAIMED, UNANSWERED, UNANSWERED)),
        ((REFUSED, REFUSED), 2, (REFUSED, REFUSED)),
        ((None, None), 2, (None, None)),
    ],
)
def test_what_one_member_means_for_the_others(
    before: tuple[HostSearchResult | None, ...], least: int, after: tuple[object, ...]
) -> None:
    found = results(apply_gang_results(states(*before, least=least)))
    words = {GangIncomplete: "incomplete"}
    plain = ["left_out" if isinstance(one, HostSearchRefused) and one.code == "gang.left_out"
             else words.get(type(one), one) for one in found]  # fmt: skip
    assert tuple(plain) == after


@pytest.mark.parametrize("attempt", [1, 2])
def test_the_cell_of_a_member_that_has_a_claim_is_queried_without_the_others(attempt: int) -> None:
    """A restore: it failed with its gang, and its machine ran on, with its allocation or without."""
    there = replace(CLAIMED, attempt=attempt, selections=(SELECTION,))
    members = expand_gang(taken(replace(REQUEST, count=2, min_count=2)), start=1)
    requests = [HostSearchRequest(request=one.request, spec=Hosts([]).spec(), gang=one.gang) for one in members]
    placed = [
        PlacedBuild(*pair, result)
        for pair, result in zip(zip(members, requests, strict=True), (there, REFUSED), strict=True)
    ]
    around = Actor(name="s", at=1.0)
    (_, first), (_, second) = conclude(placed, around)
    assert isinstance(first, DecidedBuild) and isinstance(second, DecidedBuild)
    ends = [(one.decision.build.state, one.decision.build.cell, one.claimed) for one in (first, second)]
    assert ends == [(BuildState.SCHEDULED, "c1", None), (BuildState.FAILED, None, None)]
    assert first.decision.build.attempt == attempt


def test_a_member_whose_peers_are_not_known_finds_no_members_of_its_group() -> None:
    first, second = states(None, None, least=2)
    group = ServerGroup(uuid=UUID_, policy=GroupPolicy.AFFINITY)
    first = replace(first, spec=first.spec.with_related(RelatedInstances(server_group=group, members={"h": 1}), UUID_))
    after = share_gang_results([first, second])
    assert [one.spec.related and one.spec.related.members for one in after] == [{"h": 1}, None]
    assert share_gang_results([first]) == [first]


def test_an_incomplete_gang_has_the_count_of_members_that_had_a_host_and_each_ones_claims() -> None:
    members = [replace(one, claims=at) for at, one in enumerate(states(None, REFUSED, None, None, least=4))]
    ends = [one for one in results(apply_gang_results(members)) if isinstance(one, GangIncomplete)]
    assert [(one.placed, one.claims, one.gang.size) for one in ends] == [(3, 0, 4), (3, 2, 4), (3, 3, 4)]


def test_members_choose_in_the_order_of_their_sizes_and_gangs_stand_side_by_side() -> None:
    alone, members = states(None, None, least=1, gang=False), states(None, None, None, least=1)
    assert by_gang([alone[0], *members, alone[1]]) == [[alone[0]], members, [alone[1]]]
    sizes = ("m1.small", "m1.large", "m1.tiny")
    mixed = [replace(one, spec=Hosts([PLENTY]).spec(flavor)) for one, flavor in zip(members, sizes, strict=True)]
    assert [one.spec.flavor for one in largest_first(mixed)] == ["m1.large", "m1.small", "m1.tiny"]
    newer = replace(mixed[1], claims=9)
    assert merged(mixed, [newer]) == [mixed[0], newer, mixed[2]]


WAS_RELEASED = HostSearchRefused("claim.consumer_conflict", "", was_deleted=True)


@pytest.mark.parametrize(
    ("size", "least", "found", "count"),
    [
        (3, 3, [None] * 3, 3),
        (3, 2, [None] * 3, 2),
        (3, 3, [WAS_RELEASED, None, None], 2),
        (3, 2, [WAS_RELEASED, None, None], 2),
        (3, 2, [WAS_RELEASED, WAS_RELEASED, None], 1),
        (3, 2, [WAS_RELEASED] * 3, 1),
        (3, 3, [REFUSED, None, None], 3),
        (3, 3, [replace(CLAIMED), None, None], 3),
    ],
)
def test_a_gang_needs_its_least_number_or_all_that_no_delete_has_taken_out(
    size: int, least: int, found: list[HostSearchResult | None], count: int
) -> None:
    assert needed(Gang(uuid=UUID_, size=size, min_count=least), found) == count


def on_record(state: BuildState, cell: str | None = None) -> Answered:
    build = RecordedBuild(instance_uuid=UUID_, project_id="p", state=state, sequence=1, cell=cell)
    return Answered(outcome=Done(), build=build)


GONE, STARTED, ENDED = (
    on_record(state, cell)
    for state, cell in ((BuildState.DELETED, None), (BuildState.ACTIVE, "c1"), (BuildState.FAILED, None))
)


@pytest.mark.parametrize(
    ("others", "deleted", "left"),
    [
        ([Start(), Start()], (), "all"),
        ([Answered(outcome=Done()), ENDED], (), "all"),
        ([GONE, Start()], (), (3, 3)),
        ([on_record(BuildState.DELETING, "c1"), Start()], (), (3, 3)),
        ([Start(), Start()], (1,), (3, 3)),
        ([GONE, Start()], (1,), (3, 3)),
        ([GONE, Start()], (0, 2), (1, 1)),
        # What has started need not start again, and where enough have, each of the others is a build for itself.
        ([STARTED, Start()], (), (3, 2)),
        ([STARTED, GONE], (), (2, 2)),
        ([GONE, STARTED], (), (2, 2)),
        ([STARTED, STARTED], (), (2, 1)),
        ([STARTED, STARTED], (3,), (1, 1)),
        ([STARTED, on_record(BuildState.FAILED, "c1")], (0,), (1, 1)),
    ],
)
def test_what_is_left_of_a_gang_to_start(others: list[Admission], deleted: tuple[int, ...], left: Any) -> None:
    gang = expand_gang(taken(replace(REQUEST, count=4, min_count=3)), start=0)
    alone = taken(replace(REQUEST, instance_uuid=OTHER))
    gone = [OTHER, *(gang[at].instance_uuid for at in deleted)]
    found = remaining_gangs([*gang, alone], [Start(), *others, Start(), GONE], gone)
    assert found == ({} if left == "all" else {UUID_: Gang(uuid=UUID_, size=left[0], min_count=left[1])})


def test_a_gang_of_which_enough_have_started_is_none_any_more() -> None:
    gang = expand_gang(taken(replace(REQUEST, count=4, min_count=2)), start=0)
    assert remaining_gangs(gang, [STARTED, STARTED, Start(), Start()], ()) == {UUID_: None}
    assert remaining_gangs(gang, [STARTED, STARTED, STARTED, Start()], ()) == {UUID_: None}


def test_a_member_of_a_request_that_came_twice_is_withdrawn_once() -> None:
    """Two members were left, and one of them started alone, though all of the gang were to start together."""
    gang = expand_gang(taken(replace(REQUEST, count=3, min_count=3)), start=0)
    again = expand_gang(taken(replace(REQUEST, count=3, min_count=3)), start=3)
    admissions = [*[Start()] * 3, *[Answered(outcome=Done())] * 3]
    found = remaining_gangs([*gang, *again], admissions, {gang[1].instance_uuid})
    assert found == {UUID_: Gang(uuid=UUID_, size=2, min_count=2)}


def test_members_of_no_gang_mean_nothing_for_each_other() -> None:
    assert results(apply_gang_results(states(None, REFUSED, least=2, gang=False))) == [None, REFUSED]


def test_a_gang_is_claimed_when_each_of_its_open_members_has_chosen() -> None:
    waiting = states(None, None, least=2)
    chosen = [replace(one, choice=object()) for one in waiting]  # type: ignore[arg-type]
    alone = replace(states(None, least=1, gang=False)[0], choice=object())  # type: ignore[arg-type]
    assert claimable(waiting) == claimable([chosen[0], waiting[1]]) == claimable([alone]) == []
    assert claimable([*chosen, alone]) == [chosen]


@pytest.mark.parametrize(
    ("members", "options", "providers", "left"),
    [
        (100, 16, 5, 16),
        (100, 16, 20, 4),
        (100, 2, 64, 1),
        (100, 1, 64, 1),
        (100, 2, 100, 1),
        (64, 4, 64, 2),
    ],
)
def test_item_16_the_options_of_a_gang_name_no_more_providers_than_one_message_may(
    members: int, options: int, providers: int, left: int
) -> None:
    """100 claims of 16 options with 64 providers each took placement 130 ms to decode, in one turn of its loop."""
    uuids = [f"{UUID_[:-4]}{number:04d}" for number in range(providers)]
    offered = tuple(ClaimOption(allocations={one: {"VCPU": n + 1} for one in uuids}) for n in range(options))
    claims = [Claim(consumer=UUID_, options=offered, project_id="p")] * members
    sent = within_bounds(claims)
    assert [one.options for one in sent] == [offered[:left]] * members, "the best ones stay, in their order"
    named = sum(len(option.allocations) for one in sent for option in one.options)
    assert (named <= MAX_GANG_PROVIDERS or left == 1) and {one.consumer for one in sent} == {UUID_}


def test_a_member_that_is_released_meanwhile_is_withdrawn_and_the_others_start_without_it() -> None:
    """Its delete has ended it; the record says so, and its gang does not wait for it."""
    assert results(apply_gang_results(states(None, None, WAS_RELEASED, least=3))) == [None, None, WAS_RELEASED]
    left, *_ = results(apply_gang_results(states(None, REFUSED, WAS_RELEASED, least=3)))
    assert isinstance(left, GangIncomplete), "any other refusal leaves the gang short"


@pytest.mark.parametrize("claims", [0, 1])
def test_a_build_releases_its_claims_if_one_was_sent(claims: int) -> None:
    """One that was refused for a quota came to placement once more, and there was room (requests-forgotten, 9)."""
    (pending,) = expand_gang(taken(REQUEST), start=0)
    request = HostSearchRequest(request=pending.request, spec=Hosts([]).spec())
    over = HostSearchRefused("quota.exceeded", "VCPU", claims=claims)
    around = Actor(name="s", at=1.0)
    ((_, decided),) = conclude([PlacedBuild(pending, request, over)], around)
    assert isinstance(decided, DecidedBuild) and decided.decision.build.attempt == claims


# --- Members of a gang that are taken up from their records: how often is counted of the first one alone.


async def gang_of_two(site: Site, first_state: BuildState | None) -> tuple[BuildRequest, BuildRequest]:
    """first_state: None: the record of the first member has been purged."""
    first, second = (nowhere(site.cluster) for _ in range(2))
    gang = Gang(uuid=first.instance_uuid, size=2, min_count=1)
    record = RecordedBuild(
        instance_uuid=second.instance_uuid, project_id=second.project_id, state=BuildState.ACCEPTED, sequence=1,
        digest=b"1", claim_owner="mine",
    )  # fmt: skip
    news = [NewBuild(request=second, build=record, gang=gang)]
    if first_state is not None:
        ended = replace(record, instance_uuid=first.instance_uuid, state=first_state, sequence=4, terminal=True)
        news.append(NewBuild(request=first, build=ended, gang=gang))
    async with site.store.unit() as unit:
        await unit.insert(news, 0.0)
    hold(site.cluster, second, on=-1, claim_owner="mine")  # on a host of no known cell
    return first, second


async def test_a_later_member_of_a_gang_whose_first_has_ended_ends_when_it_was_tried_often_enough(site: Site) -> None:
    _, second = await gang_of_two(site, BuildState.DELETED)
    for tries in range(3 * MAX_RETRIES):
        assert await site.handler.resume({second.instance_uuid: tries}) == set()
    build = await site.build_of(second.instance_uuid)
    assert (build.state, build.code) == (BuildState.FAILED, "claim.unlocatable")


# --- A gang of which enough have started before: only the members of this pass are counted.


async def test_a_member_that_is_placed_after_enough_of_its_gang_have_started_is_built(site: Site) -> None:
    """Two of three were dispatched, and the third was tried again alone, because its claim's host was not reported.
    Now it is: a build without a gang is built there. This one was only queried about, which begins nothing, as if one
    of three had a host; its cell ends it.
    """
    requests = [site.cluster.hosts.request() for _ in range(3)]
    gang = Gang(uuid=requests[0].instance_uuid, size=3, min_count=2)
    third = requests[2]
    record = RecordedBuild(
        instance_uuid=third.instance_uuid, project_id=third.project_id, state=BuildState.ACCEPTED, sequence=1,
        digest=b"1", claim_owner="mine",
    )  # fmt: skip
    begun = [
        replace(record, instance_uuid=one.instance_uuid, state=BuildState.SCHEDULED, sequence=2, cell="c1")
        for one in requests[:2]
    ]
    news = [NewBuild(request=one, build=two, gang=gang) for one, two in zip(requests, [*begun, record], strict=True)]
    async with site.store.unit() as unit:
        await unit.insert(news, 0.0)
    hold(site.cluster, third, claim_owner="mine")
    site.cluster.answer = lambda _: ClaimResult(outcome=ClaimOutcome.CONSUMER_CONFLICT)
    site.cluster.port.submit_gangs = refused_gangs  # type: ignore[method-assign]
    await site.handler.resume({third.instance_uuid: 0})
    assert (await site.build_of(third.instance_uuid)).state is BuildState.SCHEDULED
    assert (len(site.emitted(CellBuild)), len(site.emitted(CellBuildQuery))) == (1, 0)


async def refused_gangs(gangs: Sequence[ClaimAll]) -> list[ClaimAllResult | Fault]:
    changed = ClaimResult(outcome=ClaimOutcome.CONSUMER_CONFLICT)
    return [ClaimAllResult(results=(changed,) * len(one.claims)) for one in gangs]
