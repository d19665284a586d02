"""One round of decisions and the state of a placement by rows: given, and what is chosen, claimed or answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from bus.contracts.cell import Selection
from bus.contracts.placement import ClaimOption, GroupPolicy, ServerGroup
from bus.contracts.placement_queries import ConsumerRecord
from bus.faults import RequestRefused, RequestTimeout
from scheduler_worker.build import decision_round
from scheduler_worker.build.decision_round import DecisionRound
from scheduler_worker.build.host_search import (
    ClaimsContended,
    ClaimUnlocatable,
    ExternalClaim,
    HostClaimed,
    HostSearch,
    HostSearchRefused,
    HostSearchRequest,
    build_claim,
    has_no_host,
    matches_allocation,
    new_host_search,
    result_of,
    result_of_fault,
    unlocatable_after_fault,
)
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.placement_client import PlacementUnavailable, answer_or_raise, unavailable_from_fault
from scheduler_worker.records.build_record import Gang
from scheduler_worker.selection.choice import Choice, RankedHost
from scheduler_worker.selection.explain import FailedClaim, NoValidHost
from scheduler_worker.selection.ranking import GroupExclusions
from scheduler_worker.selection.request_spec import RelatedInstances, RequestSpec
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts

UUID = "a0000000-0000-4000-8000-000000000001"
AFFINITY, APART = GroupPolicy.AFFINITY, GroupPolicy.ANTI_AFFINITY
SMALL, LARGE = "m1.small", "m1.large"  # one processor, and four


def world(processors: Sequence[int], **more: Any) -> Hosts:
    """Hosts with these processors; the first has most memory, so it is the best."""
    config = SchedulerConfig(enabled_weighers=("scheduler_worker.weighers.free_amounts.RAMWeigher",))
    amounts = [{**PLENTY, "VCPU": many, "MEMORY_MB": 900_000 - 90_000 * at} for at, many in enumerate(processors)]
    return Hosts([{k: v for k, v in one.items() if v} for one in amounts], config=config, **more)


def members(
    hosts: Hosts, flavors: Sequence[str], policy: GroupPolicy | None, *, gang: bool = True, at_most: int = 1,
    known: Mapping[int, int] = {}, related: Mapping[str, Any] = {}, **more: Any,
) -> list[HostSearch]:  # fmt: skip
    """States of one group (policy) and one gang."""
    group = None if policy is None else ServerGroup(uuid=UUID, policy=policy, max_per_host=at_most)
    there = {hosts.uuids[at]: count for at, count in known.items()}
    found = []
    for flavor in flavors:
        request = hosts.request(flavor, server_group=group)
        spec = hosts.selector.request_spec(request)
        assert isinstance(spec, RequestSpec)
        if group is not None:
            spec = spec.with_related(
                RelatedInstances(server_group=group, members=there, **related), request.instance_uuid
            )
        of_gang = Gang(uuid=UUID, size=len(flavors), min_count=1) if gang else None
        asked = HostSearchRequest(request=request, spec=spec, gang=of_gang)
        found.append(replace(new_host_search(asked, hosts.selector), **more))
    return found


def decided(hosts: Hosts, states: Sequence[HostSearch], round_: DecisionRound | None = None) -> list[HostSearch]:
    found: list[HostSearch] = []
    for _ in (round_ or DecisionRound(hosts.selector, hosts.rng, subset=1)).in_parts(states, found):
        pass
    return found


def chosen(hosts: Hosts, states: Sequence[HostSearch]) -> list[str | None]:
    return [None if one.choice is None else hosts.name(one.choice.selected.row) for one in states]


@pytest.mark.parametrize(
    ("processors", "policy", "flavors", "more", "on"),
    [
        # All on the host that has room for all; else on that which takes most, the best first.
        ([2, 3, 1], AFFINITY, [SMALL] * 3, {}, ["h1"] * 3),
        ([2, 2], AFFINITY, [SMALL] * 3, {}, ["h0", "h0", None]),
        ([1, 2], AFFINITY, [SMALL] * 3, {}, ["h1", "h1", None]),
        ([0, 0], AFFINITY, [SMALL] * 2, {}, [None, None]),
        ([3, 3], AFFINITY, [LARGE] * 2, {}, [None, None]),
        ([3, 1], AFFINITY, [LARGE, SMALL], {}, [None, "h0"]),
        ([1, 9], AFFINITY, [SMALL, LARGE, SMALL], {}, ["h1"] * 3),
        ([1, 4], AFFINITY, [SMALL, LARGE], {}, [None, "h1"]),
        ([9, 2], AFFINITY, [SMALL] * 3, {"rejected": {0: "x"}}, ["h1", "h1", None]),
        ([9, 0], AFFINITY, [SMALL] * 3, {"rejected": {0: "x"}}, [None] * 3),
        ([9, 9], AFFINITY, [SMALL] * 2, {"known": {1: 1}}, ["h1", "h1"]),
        # Each by itself, seeing the members before it.
        ([9, 9, 9], APART, [SMALL] * 3, {}, ["h0", "h1", "h2"]),
        ([9, 9], APART, [SMALL] * 3, {}, ["h0", "h1", None]),
        ([9, 9], APART, [SMALL] * 3, {"known": {0: 1}}, ["h1", None, None]),
        ([9], APART, [SMALL] * 2, {"at_most": 2}, ["h0", "h0"]),
        ([9], APART, [SMALL] * 2, {"at_most": 2, "known": {0: 1}}, ["h0", None]),
        # ... and where a filter reads the peers, too.
        ([9], APART, [SMALL] * 3, {"at_most": 2, "related": {"different_hosts": ()}}, ["h0", "h0", None]),
        ([9], APART, [SMALL] * 2, {"at_most": 2, "known": {0: 1}, "related": {"different_hosts": ()}}, ["h0", None]),
        ([9, 9], None, [SMALL, LARGE], {}, ["h0", "h0"]),
        ([4, 1], None, [SMALL, LARGE], {}, ["h1", "h0"]),
        ([9, 9], AFFINITY, [SMALL] * 2, {"gang": False}, ["h0", "h0"]),
        ([9, 9, 9], APART, [SMALL] * 3, {"gang": False, "known": {0: 1}}, ["h1", "h2", None]),
    ],
)
def test_where_the_members_of_a_group_go(
    processors: list[int], policy: GroupPolicy | None, flavors: list[str], more: Any, on: list[str | None]
) -> None:
    hosts = world(processors)
    rejected = {hosts.uuids[at]: refusal for at, refusal in more.get("rejected", {}).items()}
    states = members(hosts, flavors, policy, **{**more, "rejected": rejected, "retried_searches": 1})
    after = decided(hosts, states)
    assert [one.request.instance_uuid for one in after] == [one.request.instance_uuid for one in states]
    assert chosen(hosts, after) == on
    placed = [one.request.instance_uuid for one in after if one.choice is not None]
    assert sorted(hosts.replica.assumptions.keys()) == sorted(placed)
    assert all(one.rejected == rejected for one in after)
    assert [isinstance(one.result, NoValidHost) for one in after] == [host is None for host in on]


@pytest.mark.parametrize(
    ("most", "room", "on"),
    [
        (1, [1, 3, 2], ["h0"]),
        (2, [1, 3, 2], ["h1"] * 3),
        (9, [1, 3, 2], ["h1"] * 3),
        (2, [1, 2, 9], ["h1"] * 2),
        (3, [1, 2, 9], ["h2"] * 4),
        (9, [2, 2, 2], ["h0"] * 2),
    ],
)
def test_so_many_hosts_are_tried_for_a_gang_where_none_is_known_to_be_too_small(
    monkeypatch: pytest.MonkeyPatch, most: int, room: list[int], on: list[str]
) -> None:
    monkeypatch.setattr(decision_round, "MAX_SHARED_HOSTS", most)
    monkeypatch.setattr(
        decision_round, "member_capacity", lambda members, view: np.full(len(view), len(members), dtype=np.intp)
    )
    hosts = world(room)
    after = decided(hosts, members(hosts, [SMALL] * 4, AFFINITY, retried_searches=1))
    assert chosen(hosts, after) == [*on, *[None] * (4 - len(on))]
    assert len(list(hosts.replica.assumptions.keys())) == len(on)
    assert all(not one.rejected for one in after)


@pytest.mark.parametrize("gang", [False, True])
@pytest.mark.parametrize(
    ("newest", "is_move", "ends"), [(True, True, False), (False, True, False), (True, False, True)]
)
def test_no_host_is_left_only_on_the_newest_state_and_beside_no_move(
    newest: bool, is_move: bool, ends: bool, gang: bool
) -> None:
    hosts = world([1])
    held = {hosts.uuids[0]: {"VCPU": 1}}
    if is_move:
        hosts.selector.assumed.add("held", held, 9.0)
    else:
        hosts.replica.assume("held", held)
    (after,) = decided(hosts, members(hosts, [SMALL], None, gang=gang, retried_searches=int(newest)))
    assert after.choice is None and isinstance(after.result, NoValidHost) is ends
    assert after.needs_refresh
    assert list(hosts.replica.assumptions.keys()) == ["held"]


@pytest.mark.parametrize(
    ("known", "placed", "at_most", "full", "counted"),
    [
        ([{}], {}, 1, "", 0),
        ([{0: 1}], {}, 1, "0", 1),
        ([{0: 1}], {}, 2, "", 0),
        ([{0: 1}, {0: 2}], {}, 2, "0", 1),
        ([{0: 2}, {0: 1}], {}, 2, "0", 1),
        ([{0: 2}, {0: 3}, {1: 2}], {}, 2, "01", 2),
        ([{0: 2}, {0: 2}], {}, 2, "0", 1),
        ([{0: 1}], {0: 1, 2: 2}, 2, "02", 0),
    ],
)
def test_which_hosts_are_full_with_a_group(
    known: list[dict[int, int]], placed: dict[int, int], at_most: int, full: str, counted: int
) -> None:
    """known: what placement answered to one member after another. placed: by this round. counted: of the answers."""
    hosts = world([9, 9, 9])
    exclusions = GroupExclusions(hosts.replica, {hosts.uuids[at]: count for at, count in placed.items()}, at_most)
    for of_one in known:
        exclusions.learn({hosts.uuids[at]: count for at, count in of_one.items()})
    assert "".join(str(at) for at, row in enumerate(hosts.view().rows.tolist()) if row in exclusions) == full
    assert exclusions.full_hosts == counted


@pytest.mark.parametrize(
    ("known", "host", "passed"),
    [({}, "h0", 3), ({0: 1}, "h1", 2), ({0: 1, 1: 1}, "h2", 1), ({0: 1, 1: 1, 3: 1, 4: 1}, "h2", 1)],
)
def test_hosts_that_are_full_with_a_group_are_no_candidates(known: dict[int, int], host: str, passed: int) -> None:
    hosts = world([9, 9, 9, 0, 0])
    (after,) = decided(hosts, members(hosts, [SMALL], APART, gang=False, known=known))
    assert after.choice is not None and (hosts.name(after.choice.selected.row), after.choice.passing_hosts) == (
        host,
        passed,
    )


@pytest.mark.parametrize(
    ("is_there", "has_room", "same_host", "host", "refusal"),
    [
        (True, True, True, "h1", {}),
        (True, False, True, "h0", {1: "claim.conflict"}),
        (False, True, True, "h0", {1: "claim.conflict"}),
        (True, True, False, "h0", {}),
    ],
)
def test_a_host_whose_shape_changed_is_chosen_again_while_it_fits(
    is_there: bool, has_room: bool, same_host: bool, host: str, refusal: dict[int, str]
) -> None:
    hosts = world([9, 9])
    (state,) = members(hosts, [SMALL], None, gang=False, rejected={hosts.uuids[0]: "x"})
    first = DecisionRound(hosts.selector, hosts.rng, subset=1).choose(state)
    assert first.choice is not None and first.choice.selected.uuid == hosts.uuids[1]
    hosts.replica.drop_assumed(state.request.instance_uuid)
    if not has_room:
        hosts.replica.assume("another", {hosts.uuids[1]: {"VCPU": 9}})
    if not is_there:
        hosts.replica.load(hosts.states[:1], 1)
    (after,) = decided(hosts, [replace(first, rejected={}, same_host=same_host)])
    assert chosen(hosts, [after]) == [host] and not after.same_host
    assert after.rejected == {hosts.uuids[at]: code for at, code in refusal.items()}


# --- the state of a placement


TIMEOUT, REFUSAL = RequestTimeout("q"), RequestRefused("no")
SELECTED = Selection(host_uuid=UUID, host="h", service="s", allocations={UUID: {"VCPU": 1}})
CLAIMED = HostClaimed(cell="c1", selections=(SELECTED,), consumer_generation=1, passing_hosts=1, score=0.0, claims=1)
AWAY = PlacementUnavailable("away")


def test_what_a_fault_means_for_a_placement() -> None:
    assert unavailable_from_fault(AWAY) is AWAY and isinstance(unavailable_from_fault(TIMEOUT), PlacementUnavailable)
    assert [type(result_of_fault(one)) for one in (TIMEOUT, REFUSAL)] == [PlacementUnavailable, HostSearchRefused]
    assert [type(unlocatable_after_fault(one)) for one in (TIMEOUT, REFUSAL)] == [
        PlacementUnavailable,
        ClaimUnlocatable,
    ]
    assert answer_or_raise(5) == 5
    with pytest.raises(RequestRefused):
        answer_or_raise(REFUSAL)
    with pytest.raises(PlacementUnavailable):
        answer_or_raise(TIMEOUT)


@pytest.mark.parametrize(
    ("result", "is_without"),
    [(None, True), (CLAIMED, False), (AWAY, False), (HostSearchRefused("x", ""), True), (ClaimsContended(1), True)],
)
def test_which_results_leave_a_request_without_a_host(result: Any, is_without: bool) -> None:
    hosts = world([9])
    (state,) = members(hosts, [SMALL], None, result=result, claims=3, lost=(FailedClaim("h: no_capacity"),))
    assert has_no_host(state) is is_without
    ended = result_of(state)
    if result is AWAY:
        assert ended is AWAY
    else:
        assert type(ended) is (ClaimsContended if result is None else type(result))
        assert (ended.claims, ended.lost) == (3, state.lost)


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({}, True),
        ({"project_id": "other"}, False),
        ({"attempt": 2}, False),
        ({"allocations": {UUID: {"VCPU": 2}}}, False),
    ],
)
def test_a_claim_is_as_held_where_project_attempt_and_amounts_are_the_same(changes: Any, is_same: bool) -> None:
    hosts = world([9])
    (state,) = members(hosts, [SMALL], None, result=CLAIMED)
    held = {
        "project_id": state.request.project_id, "attempt": 1, "allocations": SELECTED.allocations, **changes,
    }  # fmt: skip
    found = ConsumerRecord(
        consumer=state.request.instance_uuid, claim_owner="", consumer_generation=1, hosts=(UUID,), cell=None, **held
    )
    assert matches_allocation(state, found) is is_same
    assert not matches_allocation(replace(state, result=AWAY), found)


@pytest.mark.parametrize(("asked", "configured", "alternates"), [(None, 3, 2), (2, 3, 1), (1, 3, 0), (5, 3, 4)])
def test_a_request_names_one_alternate_less_than_its_attempts(
    asked: int | None, configured: int, alternates: int
) -> None:
    hosts = Hosts([PLENTY] * 2, config=SchedulerConfig(max_attempts=configured))
    request = hosts.request(max_attempts=asked, ignore_hosts=("h1", "nowhere"))
    state = new_host_search(HostSearchRequest(request=request, spec=hosts.spec(), claim_owner="r"), hosts.selector)
    assert (state.max_alternates, state.rejected, state.claim_owner) == (
        alternates,
        {hosts.uuids[1]: "host.ignored"},
        "r",
    )
    assert (state.needs_refresh, replace(state, same_host=True).needs_refresh) == (False, True)
    assert replace(state, retried_searches=1).needs_refresh


@pytest.mark.parametrize(("policy", "claim_owner", "host", "by"), [(None, "", None, None), (APART, "r", UUID, "r")])
def test_a_claim_names_its_run_and_of_a_groups_member_the_host(
    policy: GroupPolicy | None, claim_owner: str, host: str | None, by: str | None
) -> None:
    hosts = world([9])
    options = [ClaimOption(allocations={UUID: {"VCPU": 1}}, spec_generations={UUID: 1})] * 2
    choice = Choice(RankedHost(UUID, 0, 0, 0.0, options, "s"), (), 1)
    (state,) = members(hosts, [SMALL], policy, choice=choice, claim_owner=claim_owner)
    claim = build_claim(replace(state, limits={"VCPU": 9}))
    assert ([one.host for one in claim.options], claim.owner, claim.attempt) == ([host] * 2, by, 1)
    assert (claim.server_group, claim.limits) == (state.request.server_group, {"VCPU": 9})
    assert build_claim(replace(state, external=ExternalClaim())).external
