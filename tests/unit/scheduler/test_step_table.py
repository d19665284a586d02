"""The step of a placement, a row for each condition: the state and the commands after each answer to its claim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from bus.clock import new_uuid
from bus.contracts.book import HeldAllocation
from bus.contracts.build import HostScore
from bus.contracts.groups import GroupPolicy, ServerGroup
from bus.contracts.placement import ClaimOption, ClaimOutcome, ClaimResult
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.decision_round import MAX_PARTLY_FULL_RETRIES, found, nothing_fits, refused, step
from scheduler_worker.domain.placement import (
    Assume,
    ClaimStranded,
    HostClaimed,
    PlacementRefused,
    PlacementRequest,
    PlacementState,
    PlacementStep,
    Settle,
    initial_state,
)
from scheduler_worker.domain.ranking import Choice, RankedHost, Weights
from scheduler_worker.domain.recovery import stranded
from scheduler_worker.domain.selector import NoValidHost
from scheduler_worker.domain.view import Peers
from tests.unit.scheduler.hosts import PLENTY, Hosts

CHILD = "c0000000-0000-4000-8000-000000000001"
CLAIMED, CHANGED, FULL = ClaimOutcome.CLAIMED, ClaimOutcome.CONSUMER_CHANGED, ClaimOutcome.FULL


class Case:
    """Hosts 0, 1, 3 and 4 of cell c1 and 2 of c2, and a placement that has chosen host 0, then 1, 3 and 4."""

    def __init__(self, *, policy: GroupPolicy | None = None, options: Sequence[Mapping[str, Any]] = ()) -> None:
        self.hosts = Hosts([PLENTY] * 5, config=SchedulerConfig(raced_retries=2), cells=("c1", "c1", "c2", "c1", "c1"))
        self.uuids = self.hosts.uuids
        request, spec = self.hosts.request(), self.hosts.spec()
        if policy is not None:
            group = ServerGroup(uuid=new_uuid(self.hosts.rng), policy=policy)
            spec = spec.with_peers(Peers(server_group=group, members={self.uuids[2]: 1}), request.instance_uuid)
        initial = initial_state(PlacementRequest(request=request, spec=spec), self.hosts.selector)
        alternates = tuple(self.ranked(at) for at in (1, 3, 4))
        weights: tuple[Weights, ...] = ({"ram": 1.23456}, {}, {"ram": 0.5})
        choice = Choice(self.ranked(0, *options), alternates, 9, weights)
        self.state = replace(initial, choice=choice, decided_at=3.0)

    def ranked(self, at: int, *options: Mapping[str, Any]) -> RankedHost:
        row = self.hosts.book.row_of(self.uuids[at])
        assert row is not None
        offered = [ClaimOption(allocations=dict(one)) for one in options or ({self.uuids[at]: {"VCPU": 1}},)]
        return RankedHost(self.uuids[at], row, at, 2.5, offered)

    def step(self, outcome: ClaimOutcome, *, state: PlacementState | None = None, **more: Any) -> PlacementStep:
        return step(state or self.state, ClaimResult(outcome=outcome, **more), self.hosts.selector, now=7.0)

    def held(self, *at: int, **more: Any) -> HeldAllocation:
        fields: dict[str, Any] = {
            "consumer": self.state.request.instance_uuid,
            "project_id": "demo",
            "attempt": 2,
            "consumer_generation": 3,
            "holding": {self.uuids[one]: {"VCPU": 1} for one in at},
            "hosts": tuple(self.uuids[one] for one in at),
            "cell": "c9",
        }
        return HeldAllocation(**fields | more)


def claimed(stepped: PlacementStep) -> HostClaimed:
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
    assert stepped.commands == ((Assume(taken),) if assumed else ()) + (Settle({}, 9),)
    result = claimed(stepped)
    assert (result.cell, result.selections[0].allocations) == ("c1", taken)
    assert hosts_of(result) == ["h0", "h1", "h3", "h4"]
    assert (result.consumer_generation, result.attempt, result.passed, result.score) == (5, 1, 9, 2.5)
    assert (result.decided_at, result.claimed_at, result.claims, stepped.state.claims) == (3.0, 7.0, 1, 1)
    assert result.scores == (HostScore(host="h0", weights={"ram": 1.235}), HostScore(host="h3", weights={"ram": 0.5}))
    again = case.step(CLAIMED, state=replace(case.state, claims=2), option=option)
    assert (claimed(again).consumer_generation, claimed(again).claims) == (0, 3)


def test_a_host_that_has_left_while_its_claim_was_in_flight_strands_it_and_is_no_alternate() -> None:
    case = Case()
    case.hosts.announce(["c1", "c1", "c1", "c2", "c1"], {}, sequence=2)
    assert hosts_of(claimed(case.step(CLAIMED, option=0))) == ["h0", "h1", "h4"], "h3 is another cell's by now"
    case.hosts.book.load([one for one in case.hosts.states if one.uuid != case.uuids[1]], 1)
    assert hosts_of(claimed(case.step(CLAIMED, option=0))) == ["h0", "h4"]
    case.hosts.give_up(sequence=3)
    assert isinstance(case.step(CLAIMED, option=0).state.result, ClaimStranded)


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
    stepped = case.step(outcome, holding={case.uuids[3]: {"VCPU": 1}}, consumer_generation=6, **more)
    if attempt is None:
        assert isinstance(stepped.state.result, PlacementRefused) and not stepped.state.result.is_fenced
        return
    result = claimed(stepped)
    assert (result.attempt, result.consumer_generation, result.score, result.scores) == (attempt, 6, 0.0, ())
    assert (stepped.state.recovered, result.cell) == ("h3", "c1")
    left = ["h0", "h1"] if outcome is CLAIMED else []
    assert (hosts_of(result), result.passed) == (["h3", *left], len(left) + 1), "one fewer than may be tried"


@pytest.mark.parametrize(("held_by", "alternates"), [(0, ["h1", "h3"]), (1, ["h0", "h3"]), (2, [])])
def test_what_was_chosen_in_the_cell_of_what_is_held_is_tried_next(held_by: int, alternates: list[str]) -> None:
    case = Case()
    result = claimed(case.step(CLAIMED, holding={case.uuids[held_by]: {"VCPU": 1}}))
    assert hosts_of(result) == [f"h{held_by}", *alternates]
    assert (result.consumer_generation, result.passed) == (0, len(alternates) + 1)
    assert result.cell == ("c2" if held_by == 2 else "c1")


@pytest.mark.parametrize(
    ("at", "more", "end"),
    [
        ((1,), {}, "claimed"),
        ((1,), {"attempt": 0}, "claim.consumer_changed"),
        ((1,), {"project_id": "q"}, "claim.consumer_changed"),
        ((1, 3), {}, "stranded"),
        ((), {}, "stranded"),
        ((), {"holding": {CHILD: {"VCPU": 1}}, "hosts": (CHILD,)}, "stranded"),
        ((1,), {"attempt": 1}, "claimed"),
    ],
)
def test_what_is_known_to_be_held_decides_before_any_claim(at: tuple[int, ...], more: dict[str, Any], end: str) -> None:
    case = Case()
    held = case.held(*at, **more)
    stepped = found(case.state, held, case.hosts.selector, now=7.0)
    result = stepped.state.result
    if isinstance(result, HostClaimed):
        assert (end, hosts_of(result), result.attempt, result.consumer_generation, result.passed) == (
            "claimed", ["h1"], held.attempt, 3, 1,
        )  # fmt: skip
        assert (result.claims, stepped.state.claims, result.claimed_at) == (0, 0, 7.0)
    elif isinstance(result, ClaimStranded):
        assert end == "stranded"
        assert (result.cell, result.host_uuid, result.attempt) == ("c9", next(iter(held.hosts), None), 2)
        assert result == stranded(held, result.reason)
    else:
        assert isinstance(result, PlacementRefused) and result.code == end


def test_a_claim_that_is_held_on_a_host_and_a_shared_provider_is_on_that_host() -> None:
    case = Case()
    shared = replace(case.hosts.states[0], uuid=CHILD, root_uuid=CHILD, name="nfs")
    case.hosts.book.load([*case.hosts.states, shared], 0)
    holding = {CHILD: {"DISK_GB": 1}, case.uuids[1]: {"VCPU": 1}}
    (selection,) = claimed(case.step(CHANGED, holding=holding, attempt=1)).selections
    assert (selection.host, selection.allocations) == ("h1", holding)
    assert selection.shapes == {CHILD: 1, case.uuids[1]: 1}


# --- a claim that got nothing


@pytest.mark.parametrize(
    ("outcome", "options", "raced", "after"),
    [
        (ClaimOutcome.RACED, None, 0, {"raced": 1, "same_host": "h0"}),
        (ClaimOutcome.RACED, None, 1, {"raced": 2, "same_host": "h0"}),
        (ClaimOutcome.RACED, None, 2, {"raced": 3, "rejected": "claim.raced"}),
        (ClaimOutcome.RACED, None, 3, {"raced": 4, "rejected": "claim.raced"}),
        (FULL, None, 0, {"rejected": "claim.full"}),
        (FULL, [{"h0": {"VCPU": 1}}, {"h0": {"VCPU": 1}, CHILD: {"VGPU": 1}}], 0,
         {"rejected": "claim.full", "partly_full": True}),
        (FULL, [{CHILD: {"VGPU": 1}}], 0, {"rejected": "claim.full", "partly_full": True}),
        (ClaimOutcome.GONE, [{CHILD: {"VGPU": 1}}], 0, {"rejected": "claim.gone"}),
        (ClaimOutcome.RULED_OUT, None, 0, {"rejected": "claim.ruled_out", "members": 4}),
    ],
)  # fmt: skip
def test_a_lost_claim_by_its_outcome(
    outcome: ClaimOutcome, options: list[dict[str, Any]] | None, raced: int, after: dict[str, Any]
) -> None:
    case = Case(policy=GroupPolicy.ANTI_AFFINITY)
    chosen, other = case.uuids[0], case.uuids[2]
    if options is not None:
        named = [{chosen if uuid == "h0" else uuid: amounts for uuid, amounts in one.items()} for one in options]
        case = Case(policy=GroupPolicy.ANTI_AFFINITY, options=named)
    state = replace(case.state, raced=raced, rejected={other: "x"}, partly_full=(other,))
    stepped = case.step(outcome, state=state, members={other: 4})
    left = stepped.state
    assert (left.result, stepped.commands, left.claims, left.raced) == (None, (), 1, after.get("raced", 0))
    assert left.same_host is ("same_host" in after)
    why = after.get("rejected")
    assert left.rejected == {other: "x"} | ({chosen: why} if why else {})
    assert left.partly_full == ((other, chosen) if "partly_full" in after else (other,))
    assert left.spec.peers is not None and left.spec.peers.members == {other: after.get("members", 1)}
    assert [one.what for one in left.lost] == [f"h0: {outcome.value}"]


@pytest.mark.parametrize(("policy", "same"), [(None, True), (GroupPolicy.AFFINITY, False)])
def test_a_member_of_an_incomplete_gang_stays_where_it_may_unless_all_are_on_one_host(
    policy: GroupPolicy | None, same: bool
) -> None:
    case = Case(policy=policy)
    left = case.step(ClaimOutcome.INCOMPLETE).state
    assert (left.same_host, left.result, left.rejected) == (same, None, {})


@pytest.mark.parametrize(
    ("outcome", "more", "code", "is_fenced"),
    [
        (ClaimOutcome.OVER_LIMIT, {}, "quota.exceeded", False),
        (CHANGED, {}, "claim.consumer_changed", True),
        (CHANGED, {"reason": "x"}, "claim.consumer_changed", False),
        (CHANGED, {"consumer_generation": 0}, "claim.consumer_changed", False),
        (ClaimOutcome.INVALID, {}, "claim.invalid", False),
        (ClaimOutcome.INVALID, {"reason": "x"}, "claim.invalid", False),
    ],
)
def test_a_refused_claim_by_its_outcome(
    outcome: ClaimOutcome, more: dict[str, Any], code: str, is_fenced: bool
) -> None:
    result = Case().step(outcome, **more).state.result
    assert isinstance(result, PlacementRefused) and (result.code, result.is_fenced) == (code, is_fenced)
    assert result.reason and more.get("reason", "") in result.reason


# --- no candidate


@pytest.mark.parametrize(
    ("partly_full", "looked_again", "looks"),
    [
        (False, 0, True),
        (True, 0, True),
        (False, 1, False),
        (True, MAX_PARTLY_FULL_RETRIES - 1, True),
        (True, MAX_PARTLY_FULL_RETRIES, False),
    ],
)
def test_hosts_are_looked_at_again_on_the_newest_state(partly_full: bool, looked_again: int, looks: bool) -> None:
    case = Case()
    rejected = dict.fromkeys(case.uuids, "claim.full")
    given = replace(
        case.state, rejected=rejected, looked_again=looked_again, choice=None,
        partly_full=tuple(case.uuids[:1]) if partly_full else (), claims=2,
    )  # fmt: skip
    after = nothing_fits(given, case.hosts.selector)
    if not looks:
        assert isinstance(after.result, NoValidHost) and after.result.claims == 2
        return
    assert (after.result, after.looked_again, after.partly_full) == (None, looked_again + 1, ())
    assert list(after.rejected) == case.uuids[partly_full:]


def test_a_refused_placement_has_no_choice() -> None:
    after = refused(Case().state, "x", "why")
    assert (after.choice, after.result) == (None, PlacementRefused("x", "why"))
