"""The pure step of a placement, runs of one cell, and choices that are held."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from msgspec.structs import replace

from bus.clock import new_uuid
from bus.contracts.build import HostScore
from bus.contracts.placement import ClaimOption, ClaimOutcome, ClaimResult, GroupPolicy, ServerGroup
from bus.contracts.placement_queries import ConsumerRecord
from scheduler_worker.build.claim_answer import (
    MAX_PARTLY_USED_UP_RETRIES,
    apply_answer,
    apply_recovered,
    search_again_or_end,
)
from scheduler_worker.build.decision_round import DecisionRound
from scheduler_worker.build.host_search import (
    ClaimUnlocatable,
    ConfirmedClaim,
    HostClaimed,
    HostSearch,
    HostSearchRefused,
    HostSearchRequest,
    HostSearchStep,
    new_host_search,
)
from scheduler_worker.build.recovered_claim import unlocatable_claim
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.selection.assumed_usage import AssumedUsage
from scheduler_worker.selection.choice import CellBatching, Choice, RankedHost, Weights
from scheduler_worker.selection.explain import NoValidHost
from scheduler_worker.selection.host_view import HostsView
from scheduler_worker.selection.plugin import FilterResult
from scheduler_worker.selection.request_spec import RelatedInstances, RequestSpec
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts
from tests.unit.scheduler_worker.test_placing import Cluster

# --- The pure step of a placement: the answer to its claim decides its next state and its commands.


CONFIG = SchedulerConfig(conflict_retries=2)


class ClaimCase:
    """Three hosts, and a placement that has chosen one of them."""

    def __init__(self) -> None:
        self.hosts = Hosts([PLENTY] * 3, config=CONFIG)
        request = self.hosts.request()
        placement = HostSearchRequest(request=request, spec=self.hosts.spec())
        self.round = DecisionRound(self.hosts.selector, self.hosts.rng, subset=1)
        self.state = self.round.choose(new_host_search(placement, self.hosts.selector))
        assert self.state.choice is not None
        self.chosen = self.state.choice.selected.uuid

    def step(self, outcome: ClaimOutcome, *, state: HostSearch | None = None, **more: Any) -> HostSearchStep:
        answer = ClaimResult(outcome=outcome, **more)
        return apply_answer(state or self.state, answer, self.hosts.selector, now=7.0)


def test_the_only_host_that_passes_is_claimed_without_weights() -> None:
    case = ClaimCase()
    assert case.state.choice is not None
    alone = replace(case.state, choice=replace(case.state.choice, alternates=(), passing_hosts=1, weights=()))
    result = case.step(ClaimOutcome.CLAIMED, state=alone, option=0).state.result
    assert isinstance(result, HostClaimed) and result.scores == ()


def test_like_requests_of_a_batch_are_filtered_once() -> None:
    hosts = Hosts([PLENTY] * 3, config=CONFIG)
    filtered: list[str] = []

    class Counting:
        name: ClassVar[str] = "Counting"

        def filter(self, view: HostsView, spec: RequestSpec) -> FilterResult:
            filtered.append(spec.flavor)
            return FilterResult(np.ones(len(view), dtype=np.bool_), {})

    hosts.selector.config.filters = (Counting(),)
    round_ = DecisionRound(hosts.selector, hosts.rng, subset=1)
    for flavor in ("m1.small", "m1.tiny") * 5:
        request = HostSearchRequest(request=hosts.request(flavor), spec=hosts.spec(flavor))
        assert round_.choose(new_host_search(request, hosts.selector)).choice is not None
    assert filtered == ["m1.small", "m1.tiny"]


PACKED = SchedulerConfig(multipliers={"ram": -1.0, "cpu": -1.0, "disk": -1.0})


def members_of(hosts: Hosts, count: int, at: Mapping[str, int], *, most: int = 1) -> list[HostSearch]:
    group = ServerGroup(uuid=new_uuid(hosts.rng), policy=GroupPolicy.ANTI_AFFINITY, max_per_host=most)
    requests = [hosts.request(server_group=group) for _ in range(count)]
    return [
        new_host_search(
            HostSearchRequest(
                request=one,
                spec=hosts.spec().with_related(RelatedInstances(server_group=group, members=at), one.instance_uuid),
            ),
            hosts.selector,
        )
        for one in requests
    ]


@pytest.mark.parametrize("most", [1, 2])
def test_members_that_stay_apart_share_a_ranking_and_see_each_other(most: int) -> None:
    """Packed, all of them would choose the same host; and each claim but the first would be ruled out."""
    hosts = Hosts([PLENTY] * 4, config=PACKED)
    full = hosts.uuids[1]
    round_ = DecisionRound(hosts.selector, hosts.rng, subset=1)
    chosen = [round_.choose(state) for state in members_of(hosts, 3 * most + 1, {full: most}, most=most)]
    picked = Counter(one.choice.selected.uuid for one in chosen if one.choice is not None)
    assert picked == {uuid: most for uuid in hosts.uuids if uuid != full}
    assert chosen[-1].choice is None and len(round_.rankings) == 1
    assert {one.choice.passing_hosts for one in chosen if one.choice is not None} == {3}


# --- Equal hosts are chosen from one cell at a time, so that what a round sends to a cell is one large batch.


CELLS = ("c1", "c2", "c3", "c4")
FLAVORS = ("m1.tiny", "m1.small")


def equal_hosts(of_each: int, *, config: SchedulerConfig | None = None) -> Hosts:
    """So many in each cell, in no order of cells."""
    return Hosts([PLENTY] * (of_each * len(CELLS)), cells=CELLS * of_each, config=config)


def one_round(hosts: Hosts, batching: CellBatching | None, count: int, flavors: Sequence[str] = FLAVORS) -> list[str]:
    """The cells that one round chooses for requests of two flavors, which have a ranking each."""
    round_ = DecisionRound(hosts.selector, hosts.rng, subset=1, batching=batching)
    chosen = []
    for at in range(count):
        request = hosts.request(flavors[at % len(flavors)])
        spec = hosts.selector.request_spec(request)
        assert isinstance(spec, RequestSpec)
        after = round_.decide(new_host_search(HostSearchRequest(request=request, spec=spec), hosts.selector))
        assert after.choice is not None
        chosen.append(hosts.selector.cell_of(after.choice.selected.uuid) or "")
    return chosen


def test_a_round_stays_in_one_cell_and_the_next_ones_go_to_the_others_in_turn() -> None:
    hosts, batching = equal_hosts(100), CellBatching(64)
    rounds = [set(one_round(hosts, batching, 20)) for _ in range(8)]
    assert all(len(cells) == 1 for cells in rounds)
    turns = [cells.pop() for cells in rounds]
    assert sorted(turns[:4]) == sorted(CELLS) and turns[4:] == turns[:4]
    assert len(set(one_round(equal_hosts(100), None, 20))) == len(CELLS), "without runs they are spread by chance"


def test_the_run_is_kept_where_the_best_are_drawn_from_several() -> None:
    hosts, batching = equal_hosts(100), CellBatching(64)
    ranking = hosts.selector.rank(hosts.spec(), random.Random(2), batching)
    cells = set()
    for _ in range(20):
        choice = ranking.pick({}, subset=4, alternates=2)
        assert choice is not None
        ranking.consumed(choice.selected)
        cells.add(hosts.selector.cell_of(choice.selected.uuid))
    assert len(cells) == 1


@pytest.mark.parametrize("shuffle", [True, False])
def test_where_the_order_is_that_of_the_replica_it_stays_so(shuffle: bool) -> None:
    hosts = equal_hosts(50, config=SchedulerConfig(shuffle_best_same_weighed_hosts=shuffle))
    assert len(set(one_round(hosts, CellBatching(64), 12))) == (1 if shuffle else len(CELLS))


async def test_what_is_placed_together_is_claimed_in_one_cell() -> None:
    hosts = equal_hosts(100)
    cluster = Cluster(hosts, SchedulerConfig())
    for _ in range(2):
        await cluster.placer.place([cluster.asking(hosts.request()) for _ in range(20)])
    cells = [hosts.selector.cell_of(next(iter(claim.options[0].allocations))) for claim in cluster.claims]
    assert len(set(cells[:20])) == len(set(cells[20:])) == 1 and cells[0] != cells[-1]


# --- A choice for a move counts as used until the feed has its claim, and no longer.


EIGHT = {"VCPU": 8}


class Room:
    """Two hosts of 8 VCPU and the holds on them."""

    def __init__(self) -> None:
        self.hosts = Hosts([EIGHT, EIGHT])
        self.replica = self.hosts.replica
        self.holds = AssumedUsage(self.replica)
        self._used = [0, 0]

    def hold(self, key: str, host: int, vcpus: int = 1, until: float = 5.0) -> None:
        self.holds.add(key, {self.hosts.uuids[host]: {"VCPU": vcpus}}, until)

    def claimed(self, host: int, vcpus: int) -> None:
        """A change of the feed: so much more is in use there."""
        self._used[host] += vcpus
        states = [
            replace(state, used={"VCPU": used} if used else {}, generation=state.generation + used)
            for state, used in zip(self.hosts.states, self._used, strict=True)
        ]
        self.replica.load(states, self.replica.sequence + 1)
        self.holds.drop_confirmed()

    def free(self, host: int) -> int:
        row = self.replica.row_of(self.hosts.uuids[host])
        assert row is not None
        return self.replica.inventory_of(row)["VCPU"][2]


def test_a_hold_ends_at_its_time_and_all_end_when_they_are_released() -> None:
    room = Room()
    room.hold("a", 0, until=1.0)
    room.hold("b", 1, until=2.0)
    room.holds.expire(1.0)
    assert (room.free(0), room.free(1)) == (8, 7)
    room.hold("b", 0, until=3.0)
    assert (room.free(0), room.free(1)) == (7, 8), "one request is held once"
    room.holds.release()
    assert (room.free(0), room.free(1)) == (8, 8) and room.holds.next_until is None


# --- the step of a placement, a row for each condition: the state and the commands after each answer to its claim


CHILD = "c0000000-0000-4000-8000-000000000001"
CLAIMED, CHANGED, FULL = ClaimOutcome.CLAIMED, ClaimOutcome.CONSUMER_CONFLICT, ClaimOutcome.NO_CAPACITY


class Case:
    """Hosts 0, 1, 3 and 4 of cell c1 and 2 of c2, and a placement that has chosen host 0, then 1, 3 and 4."""

    def __init__(self, *, policy: GroupPolicy | None = None, options: Sequence[Mapping[str, Any]] = ()) -> None:
        self.hosts = Hosts(
            [PLENTY] * 5, config=SchedulerConfig(conflict_retries=2), cells=("c1", "c1", "c2", "c1", "c1")
        )
        self.uuids = self.hosts.uuids
        request, spec = self.hosts.request(), self.hosts.spec()
        if policy is not None:
            group = ServerGroup(uuid=new_uuid(self.hosts.rng), policy=policy)
            spec = spec.with_related(
                RelatedInstances(server_group=group, members={self.uuids[2]: 1}), request.instance_uuid
            )
        initial = new_host_search(HostSearchRequest(request=request, spec=spec), self.hosts.selector)
        alternates = tuple(self.ranked(at) for at in (1, 3, 4))
        weights: tuple[Weights, ...] = ({"ram": 1.23456}, {}, {"ram": 0.5})
        choice = Choice(self.ranked(0, *options), alternates, 9, weights)
        self.state = replace(initial, choice=choice, decided_at=3.0)

    def ranked(self, at: int, *options: Mapping[str, Any]) -> RankedHost:
        row = self.hosts.replica.row_of(self.uuids[at])
        assert row is not None
        offered = [ClaimOption(allocations=dict(one)) for one in options or ({self.uuids[at]: {"VCPU": 1}},)]
        return RankedHost(self.uuids[at], row, at, 2.5, offered, "s")

    def step(self, outcome: ClaimOutcome, *, state: HostSearch | None = None, **more: Any) -> HostSearchStep:
        return apply_answer(state or self.state, ClaimResult(outcome=outcome, **more), self.hosts.selector, now=7.0)

    def held(self, *at: int, **more: Any) -> ConsumerRecord:
        fields: dict[str, Any] = {
            "consumer": self.state.request.instance_uuid,
            "project_id": "demo",
            "attempt": 2,
            "consumer_generation": 3,
            "allocations": {self.uuids[one]: {"VCPU": 1} for one in at},
            "hosts": tuple(self.uuids[one] for one in at),
            "cell": "c9",
        }
        return ConsumerRecord(**fields | more)


def claimed(stepped: HostSearchStep) -> HostClaimed:
    assert isinstance(stepped.state.result, HostClaimed), stepped.state.result
    return stepped.state.result


def hosts_of(result: HostClaimed) -> list[str]:
    return [one.host for one in result.selections]


# --- a claim that holds


@pytest.mark.parametrize(("option", "assumed"), [(0, False), (1, True)])
def test_a_claim_is_built_where_it_is_with_the_choices_scores(option: int, assumed: bool) -> None:
    first, second = {"VCPU": 1}, {"VCPU": 2}
    case = Case()
    case = Case(options=[{case.uuids[0]: first}, {case.uuids[0]: second}])
    stepped = case.step(CLAIMED, option=option, consumer_generation=5, attempt=4, sequence=9)
    taken = {case.uuids[0]: second if option else first}
    assert stepped.confirmed == ConfirmedClaim({}, 9, taken if assumed else None)
    result = claimed(stepped)
    assert (result.cell, result.selections[0].allocations) == ("c1", taken)
    assert hosts_of(result) == ["h0", "h1", "h3", "h4"]
    assert (result.consumer_generation, result.attempt, result.passing_hosts, result.score) == (5, 1, 9, 2.5)
    assert (result.decided_at, result.claimed_at, result.claims, stepped.state.claims) == (3.0, 7.0, 1, 1)
    assert result.scores == (HostScore(host="h0", weights={"ram": 1.235}), HostScore(host="h3", weights={"ram": 0.5}))
    again = case.step(CLAIMED, state=replace(case.state, claims=2), option=option)
    assert (claimed(again).consumer_generation, claimed(again).claims) == (0, 3)


def test_a_host_that_has_left_while_its_claim_was_in_flight_strands_it_and_is_no_alternate() -> None:
    case = Case()
    case.hosts.announce(["c1", "c1", "c1", "c2", "c1"], {}, sequence=2)
    assert hosts_of(claimed(case.step(CLAIMED, option=0))) == ["h0", "h1", "h4"], "h3 is another cell's by now"
    case.hosts.replica.load([one for one in case.hosts.states if one.uuid != case.uuids[1]], 1)
    assert hosts_of(claimed(case.step(CLAIMED, option=0))) == ["h0", "h4"]
    case.hosts.give_up(sequence=3)
    assert isinstance(case.step(CLAIMED, option=0).state.result, ClaimUnlocatable)


# --- what is held already


@pytest.mark.parametrize(
    ("outcome", "more", "attempt"),
    [
        (CLAIMED, {}, 1),
        (CLAIMED, {"attempt": 1}, 1),
        (CHANGED, {"attempt": 1}, 1),
        (CHANGED, {"attempt": 2}, 2),
        (CHANGED, {"attempt": 0}, None),
        (ClaimOutcome.INVALID, {"attempt": 1}, None),
    ],
)
def test_a_claim_that_this_request_holds_is_recovered_under_its_attempt(
    outcome: ClaimOutcome, more: dict[str, Any], attempt: int | None
) -> None:
    case = Case()
    stepped = case.step(outcome, allocations={case.uuids[3]: {"VCPU": 1}}, consumer_generation=6, **more)
    if attempt is None:
        assert isinstance(stepped.state.result, HostSearchRefused) and not stepped.state.result.was_deleted
        return
    result = claimed(stepped)
    assert (result.attempt, result.consumer_generation, result.score, result.scores) == (attempt, 6, 0.0, ())
    assert (stepped.state.recovered, result.cell) == ("h3", "c1")
    left = ["h0", "h1"] if outcome is CLAIMED else []
    assert (hosts_of(result), result.passing_hosts) == (["h3", *left], len(left) + 1), "one fewer than may be tried"


@pytest.mark.parametrize(("held_by", "alternates"), [(0, ["h1", "h3"]), (1, ["h0", "h3"]), (2, [])])
def test_what_was_chosen_in_the_cell_of_what_is_held_is_tried_next(held_by: int, alternates: list[str]) -> None:
    case = Case()
    result = claimed(case.step(CLAIMED, allocations={case.uuids[held_by]: {"VCPU": 1}}))
    assert hosts_of(result) == [f"h{held_by}", *alternates]
    assert (result.consumer_generation, result.passing_hosts) == (0, len(alternates) + 1)
    assert result.cell == ("c2" if held_by == 2 else "c1")


@pytest.mark.parametrize(
    ("at", "more", "end"),
    [
        ((1,), {}, "claimed"),
        ((1,), {"attempt": 0}, "claim.consumer_conflict"),
        ((1,), {"project_id": "q"}, "claim.consumer_conflict"),
        ((1, 3), {}, "unlocatable"),
        ((), {}, "unlocatable"),
        ((), {"allocations": {CHILD: {"VCPU": 1}}, "hosts": (CHILD,)}, "unlocatable"),
        ((1,), {"attempt": 1}, "claimed"),
    ],
)
def test_what_is_known_to_be_held_decides_before_any_claim(at: tuple[int, ...], more: dict[str, Any], end: str) -> None:
    case = Case()
    held = case.held(*at, **more)
    stepped = apply_recovered(case.state, held, case.hosts.selector, now=7.0)
    result = stepped.state.result
    if isinstance(result, HostClaimed):
        assert (end, hosts_of(result), result.attempt, result.consumer_generation, result.passing_hosts) == (
            "claimed", ["h1"], held.attempt, 3, 1,
        )  # fmt: skip
        assert (result.claims, stepped.state.claims, result.claimed_at) == (0, 0, 7.0)
    elif isinstance(result, ClaimUnlocatable):
        assert end == "unlocatable"
        assert (result.cell, result.host_uuid, result.attempt) == ("c9", next(iter(held.hosts), None), 2)
        assert result == unlocatable_claim(held, result.reason)
    else:
        assert isinstance(result, HostSearchRefused) and result.code == end


def test_a_claim_that_is_held_on_a_host_and_a_shared_provider_is_on_that_host() -> None:
    case = Case()
    shared = replace(case.hosts.states[0], uuid=CHILD, root_uuid=CHILD, name="nfs")
    case.hosts.replica.load([*case.hosts.states, shared], 0)
    holding = {CHILD: {"DISK_GB": 1}, case.uuids[1]: {"VCPU": 1}}
    (selection,) = claimed(case.step(CHANGED, allocations=holding, attempt=1)).selections
    assert (selection.host, selection.allocations) == ("h1", holding)
    assert selection.spec_generations == {CHILD: 1, case.uuids[1]: 1}


# --- a claim that got nothing


@pytest.mark.parametrize(
    ("outcome", "options", "conflicts", "after"),
    [
        (ClaimOutcome.CONFLICT, None, 0, {"conflicts": 1, "same_host": "h0"}),
        (ClaimOutcome.CONFLICT, None, 1, {"conflicts": 2, "same_host": "h0"}),
        (ClaimOutcome.CONFLICT, None, 2, {"conflicts": 3, "rejected": "claim.conflict"}),
        (ClaimOutcome.CONFLICT, None, 3, {"conflicts": 4, "rejected": "claim.conflict"}),
        (FULL, None, 0, {"rejected": "claim.no_capacity"}),
        (FULL, [{"h0": {"VCPU": 1}}, {"h0": {"VCPU": 1}, CHILD: {"VGPU": 1}}], 0,
         {"rejected": "claim.no_capacity", "partly_used_up": True}),
        (FULL, [{CHILD: {"VGPU": 1}}], 0, {"rejected": "claim.no_capacity", "partly_used_up": True}),
        (ClaimOutcome.PROVIDER_REMOVED, [{CHILD: {"VGPU": 1}}], 0, {"rejected": "claim.provider_removed"}),
        (ClaimOutcome.POLICY_VIOLATED, None, 0, {"rejected": "claim.policy_violated", "members": 4}),
    ],
)  # fmt: skip
def test_a_lost_claim_by_its_outcome(
    outcome: ClaimOutcome, options: list[dict[str, Any]] | None, conflicts: int, after: dict[str, Any]
) -> None:
    case = Case(policy=GroupPolicy.ANTI_AFFINITY)
    chosen, other = case.uuids[0], case.uuids[2]
    if options is not None:
        named = [{chosen if uuid == "h0" else uuid: amounts for uuid, amounts in one.items()} for one in options]
        case = Case(policy=GroupPolicy.ANTI_AFFINITY, options=named)
    state = replace(case.state, conflicts=conflicts, rejected={other: "x"}, partly_used_up=(other,))
    stepped = case.step(outcome, state=state, members={other: 4})
    left = stepped.state
    assert (left.result, stepped.confirmed, left.claims, left.conflicts) == (None, None, 1, after.get("conflicts", 0))
    assert left.same_host is ("same_host" in after)
    refusal = after.get("rejected")
    assert left.rejected == {other: "x"} | ({chosen: refusal} if refusal else {})
    assert left.partly_used_up == ((other, chosen) if "partly_used_up" in after else (other,))
    assert left.spec.related is not None and left.spec.related.members == {other: after.get("members", 1)}
    assert [one.what for one in left.lost] == [f"h0: {outcome.value}"]


@pytest.mark.parametrize(("policy", "same"), [(None, True), (GroupPolicy.AFFINITY, False)])
def test_a_member_of_an_incomplete_gang_stays_where_it_may_unless_all_are_on_one_host(
    policy: GroupPolicy | None, same: bool
) -> None:
    case = Case(policy=policy)
    left = case.step(ClaimOutcome.INCOMPLETE).state
    assert (left.same_host, left.result, left.rejected) == (same, None, {})


@pytest.mark.parametrize(
    ("outcome", "more", "code", "was_deleted"),
    [
        (ClaimOutcome.OVER_QUOTA, {}, "quota.exceeded", False),
        (CHANGED, {}, "claim.consumer_conflict", True),
        (CHANGED, {"reason": "x"}, "claim.consumer_conflict", False),
        (CHANGED, {"consumer_generation": 0}, "claim.consumer_conflict", False),
        (ClaimOutcome.INVALID, {}, "claim.invalid", False),
        (ClaimOutcome.INVALID, {"reason": "x"}, "claim.invalid", False),
    ],
)
def test_a_refused_claim_by_its_outcome(
    outcome: ClaimOutcome, more: dict[str, Any], code: str, was_deleted: bool
) -> None:
    result = Case().step(outcome, **more).state.result
    assert isinstance(result, HostSearchRefused) and (result.code, result.was_deleted) == (code, was_deleted)
    assert result.reason and more.get("reason", "") in result.reason


# --- no candidate


@pytest.mark.parametrize(
    ("partly_used_up", "retried_searches", "looks"),
    [
        (False, 0, True),
        (True, 0, True),
        (False, 1, False),
        (True, MAX_PARTLY_USED_UP_RETRIES - 1, True),
        (True, MAX_PARTLY_USED_UP_RETRIES, False),
    ],
)
def test_hosts_are_looked_at_again_on_the_newest_state(
    partly_used_up: bool, retried_searches: int, looks: bool
) -> None:
    case = Case()
    rejected = dict.fromkeys(case.uuids, "claim.no_capacity")
    given = replace(
        case.state, rejected=rejected, retried_searches=retried_searches, choice=None,
        partly_used_up=tuple(case.uuids[:1]) if partly_used_up else (), claims=2,
    )  # fmt: skip
    after = search_again_or_end(given, case.hosts.selector)
    if not looks:
        assert isinstance(after.result, NoValidHost) and after.result.claims == 2
        return
    assert (after.result, after.retried_searches, after.partly_used_up) == (None, retried_searches + 1, ())
    assert list(after.rejected) == case.uuids[partly_used_up:]
