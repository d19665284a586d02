"""The conclusion about a build by rows: the result of its placement and its delivery, and what follows."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.consuming.outcome import Done
from bus.contracts.base import MAX_REASON, Refusal
from bus.contracts.build import BuildEvent, BuildState, FunnelStep
from bus.contracts.cell import CellBuild, CellBuildQuery, Selection
from bus.contracts.operations import EvacuationPolicy
from bus.contracts.stages import StageTimes
from scheduler_worker.build.decision import (
    DecidedBuild,
    PlacedBuild,
    add_stage_times,
    build_query,
    cell_build,
    conclude,
    conclude_unplaced,
    end_at_claimed_cell,
    group_by_request,
    instance_spec,
    outbox_messages,
)
from scheduler_worker.build.host_search import (
    ClaimsContended,
    ClaimUnlocatable,
    GangIncomplete,
    HostClaimed,
    HostSearchRefused,
    HostSearchRequest,
)
from scheduler_worker.build.pending_build import PendingBuild
from scheduler_worker.config import Flavor, SchedulerConfig
from scheduler_worker.placement_client import PlacementUnavailable
from scheduler_worker.records.build_record import Actor, Gang, RecordedBuild
from scheduler_worker.requests.request_delivery import RequestDelivery
from scheduler_worker.selection.explain import FailedClaim, NoValidHost
from scheduler_worker.selection.request_spec import Unsatisfiable
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts

UUID, HOST = (f"{n}0000000-0000-4000-8000-000000000001" for n in "ab")
AUTHOR = Actor("scheduler", 7.0)
HOSTS = Hosts([PLENTY])
CLAIMED = HostClaimed(
    cell="c1",
    selections=tuple(
        Selection(host_uuid=HOST, host=host, service="s", allocations={HOST: {"VCPU": 1}})
        for host in ("h0", "h1", "h2")
    ),
    consumer_generation=4,
    passing_hosts=9,
    score=0.5,
    claims=2,
    decided_at=5.0,
    claimed_at=6.0,
    attempt=3,
    limits={"INSTANCES": 2},  # an offloaded instance is one more
)
EARLY = NoValidHost((FunnelStep(step="x", remaining=0),), not_reported=1)
NONE = NoValidHost((FunnelStep(step="x", remaining=0, rejected={"y": 1}),))
STRANDED = ClaimUnlocatable("why", "c1", HOST, 2)


def pending(position: int = 0, gang: Gang | None = None, **more: Any) -> PendingBuild:
    request = HOSTS.request(user_id="u")
    return PendingBuild(
        batch_index=position,
        request=request,
        digest=b"",
        requested_at=1.0,
        taken_at=2.0,
        gang=gang,
        claim_owner="r",
        **more,
    )


def placed(result: Any, one: PendingBuild | None = None, **delivery: Any) -> PlacedBuild:
    one = replace(one or pending(), delivery=RequestDelivery(**delivery))
    return PlacedBuild(one, HostSearchRequest(request=one.request, spec=HOSTS.spec()), result)


def outcome(concluded: Any) -> Any:
    """(state, code, cell, host uuid, attempt) of a decision, or the code of a retry or wait; "accepted": it is open."""
    if isinstance(concluded, Done):
        return "accepted"
    if not isinstance(concluded, DecidedBuild):
        return concluded.code
    build = concluded.decision.build
    assert build.claim_owner == "r" and build.terminal is (build.state is BuildState.FAILED)
    return build.state.value, build.code, build.cell, build.host_uuid, build.attempt


FAILED, SCHEDULED = "failed", "scheduled"


@pytest.mark.parametrize(
    ("result", "delivery", "expected"),
    [
        (CLAIMED, {}, (SCHEDULED, "", "c1", HOST, 3)),
        (PlacementUnavailable("away"), {"last": True}, "placement.unavailable"),
        (EARLY, {"awaits_hosts": True}, "hosts.unknown"),
        (EARLY, {}, (FAILED, "no_valid_host", None, None, 0)),
        (NONE, {"awaits_hosts": True}, (FAILED, "no_valid_host", None, None, 0)),
        (replace(NONE, claims=1), {}, (FAILED, "no_valid_host", None, None, 1)),
        (ClaimsContended(3), {}, "claims.contended"),
        (ClaimsContended(3), {"last": True}, (FAILED, "claims.contended", None, None, 1)),
        (STRANDED, {"awaits_hosts": True}, "hosts.unknown"),
        (STRANDED, {}, (SCHEDULED, "", "c1", HOST, 2)),
        (ClaimUnlocatable("why"), {}, "claim.unlocatable"),
        (ClaimUnlocatable("why"), {"last": True}, "accepted"),
        (
            ClaimUnlocatable("why"),
            {"last": True, "has_dead_letter": False},
            (FAILED, "claim.unlocatable", None, None, 0),
        ),
        (ClaimsContended(3), {"last": True, "has_dead_letter": False}, (FAILED, "claims.contended", None, None, 1)),
        (HostSearchRefused("x.y", "why"), {}, (FAILED, "x.y", None, None, 0)),
        (HostSearchRefused("x.y", "why", claims=1), {}, (FAILED, "x.y", None, None, 1)),
        (GangIncomplete(Gang(uuid=UUID, size=3, min_count=2), 1, 1), {}, (FAILED, "gang.incomplete", None, None, 1)),
    ],
)
def test_what_follows_from_the_result_of_a_placement(result: Any, delivery: Any, expected: Any) -> None:
    one = placed(result, **delivery)
    ((of, concluded),) = conclude([one], AUTHOR)
    assert of is one.pending and outcome(concluded) == expected
    if isinstance(concluded, DecidedBuild):
        assert concluded.claimed is (result if result is CLAIMED else None)
        assert concluded.decision.funnel == getattr(result, "funnel", ())
        ((_, again),) = conclude([placed(result, pending(attempt=1), last=True, has_dead_letter=False)], AUTHOR)
        assert outcome(again)[-1] == (expected[-1] or 1), "an earlier delivery may have claimed"


@pytest.mark.parametrize(
    ("results", "least", "delivery", "expected"),
    [
        ([CLAIMED, CLAIMED], 2, {}, [SCHEDULED, SCHEDULED]),
        ([CLAIMED, NONE], 1, {}, [SCHEDULED, FAILED]),
        ([CLAIMED, NONE], 2, {}, [SCHEDULED, FAILED]),
        ([CLAIMED, ClaimsContended(1)], 2, {}, ["claims.contended"] * 2),
        ([CLAIMED, ClaimsContended(1)], 1, {}, [SCHEDULED, FAILED]),
        ([CLAIMED, ClaimsContended(1)], 2, {"last": True}, [SCHEDULED, FAILED]),
        ([NONE, ClaimsContended(1)], 1, {}, ["claims.contended"] * 2),
        ([CLAIMED, PlacementUnavailable("away")], 1, {}, ["placement.unavailable"] * 2),
        ([NONE, NONE], 1, {}, [FAILED, FAILED]),
        ([CLAIMED, ClaimUnlocatable("why")], 2, {"last": True}, ["accepted"] * 2),
        ([CLAIMED, ClaimUnlocatable("why")], 1, {}, [SCHEDULED, "claim.unlocatable"]),
        ([CLAIMED, ClaimUnlocatable("why")], 1, {"last": True}, [SCHEDULED, "accepted"]),
        ([CLAIMED, ClaimUnlocatable("why")], 1, {"last": True, "has_dead_letter": False}, [SCHEDULED, FAILED]),
        ([CLAIMED, STRANDED], 1, {"awaits_hosts": True}, [SCHEDULED, "hosts.unknown"]),
    ],
)
def test_what_follows_for_the_members_of_a_gang(
    results: list[Any], least: int, delivery: Any, expected: list[str]
) -> None:
    gang = Gang(uuid=UUID, size=2, min_count=least)
    members = [placed(one, pending(at, gang), **delivery) for at, one in enumerate(results)]
    concluded = [one for _, one in conclude(members, AUTHOR)]
    found = [outcome(one) for one in concluded]
    assert [one if isinstance(one, str) else one[0] for one in found] == expected
    started = sum(isinstance(one, DecidedBuild) and one.claimed is not None for one in concluded)
    is_short = sum(one is CLAIMED for one in results) < least
    assert started == (0 if is_short else expected.count(SCHEDULED)), "of one that is short the cell is queried"
    assert all(one[2:] == ("c1", HOST, 3) for one in found if one[0] == SCHEDULED)


@pytest.mark.parametrize(
    ("request_of", "delivery", "expected"),
    [
        ({}, {"refusal": Refusal(code="given.up", reason="r")}, (FAILED, "given.up", None, None, 0)),
        ({"host": "nowhere"}, {"awaits_hosts": True}, "hosts.unknown"),
        ({"host": "nowhere"}, {}, (FAILED, "no_valid_host", None, None, 0)),
        ({"availability_zone": "moon"}, {"awaits_hosts": True}, (FAILED, "no_valid_host", None, None, 0)),
    ],
)
def test_what_becomes_of_a_build_that_is_not_placed(request_of: Any, delivery: Any, expected: Any) -> None:
    one = replace(pending(), request=HOSTS.request(**request_of), delivery=RequestDelivery(**delivery))
    spec = HOSTS.selector.request_spec(one.request)
    concluded = conclude_unplaced(one, spec if isinstance(spec, Unsatisfiable) else None, HOSTS.selector, AUTHOR)
    assert outcome(concluded) == expected
    if isinstance(concluded, DecidedBuild) and expected[1] == "no_valid_host":
        assert [(s.remaining, sum(s.rejected.values())) for s in concluded.decision.funnel] == [(0, 1)]


def test_the_members_of_a_gang_are_concluded_together() -> None:
    first, second = (Gang(uuid=uuid, size=2, min_count=1) for uuid in (UUID, HOST))
    alone = [placed(CLAIMED, pending()) for _ in range(2)]
    gangs = [placed(CLAIMED, pending(0, gang)) for gang in (first, first, second)]
    assert [len(one) for one in group_by_request([*alone, *gangs])] == [1, 1, 2, 1]


def test_the_timeline_of_a_decision() -> None:
    lost = (FailedClaim("h9: no_capacity"),)
    ((_, concluded),) = conclude([placed(replace(CLAIMED, lost=lost))], AUTHOR)
    assert isinstance(concluded, DecidedBuild)
    lines = {one.what: one.detail for one in concluded.decision.timeline}
    assert list(lines) == ["not_claimed", "chosen", "claimed", "dispatched"]
    assert lines["not_claimed"] == "h9: no_capacity" and lines["claimed"].endswith("h1, h2")
    assert lines["chosen"].startswith("h0 of 9") and lines["claimed"].startswith("h0 at try 2")
    times = {one.what: one.at for one in concluded.decision.timeline}
    assert times["not_claimed"] == times["chosen"] == times["claimed"] == CLAIMED.claimed_at
    ((_, first),) = conclude([placed(CLAIMED)], AUTHOR)
    assert isinstance(first, DecidedBuild)
    own = [CLAIMED.decided_at, CLAIMED.claimed_at, AUTHOR.at]
    assert [one.at for one in first.decision.timeline] == own and len(set(own)) == 3, "each at its own time"
    stamped = add_stage_times(concluded.decision, StageTimes(requested=1.0)).timeline
    assert [one.stage_times and one.stage_times.requested for one in stamped] == [None, None, None, 1.0]
    ((_, alone),) = conclude([placed(replace(CLAIMED, selections=CLAIMED.selections[:1]))], AUTHOR)
    assert isinstance(alone, DecidedBuild) and alone.decision.timeline[1].detail.endswith("none")
    held = end_at_claimed_cell(pending(), STRANDED, AUTHOR)
    assert isinstance(held, DecidedBuild) and held.claimed is None
    assert outcome(held) == (SCHEDULED, "", "c1", HOST, 2)
    assert outcome(end_at_claimed_cell(pending(), ClaimUnlocatable("why"), AUTHOR)) == "claim.unlocatable"
    ((_, long),) = conclude([placed(HostSearchRefused("x", "y" * 9999))], AUTHOR)
    assert isinstance(long, DecidedBuild) and long.decision.build.reason == "y" * MAX_REASON


@pytest.mark.parametrize(
    ("result", "kinds"),
    [
        (CLAIMED, [CellBuild, BuildEvent]),
        (STRANDED, [CellBuildQuery, BuildEvent]),
        (HostSearchRefused("x", ""), [BuildEvent]),
    ],
)
def test_the_messages_of_a_decision(result: Any, kinds: list[type]) -> None:
    ((_, one),) = conclude([placed(result, last=True)], AUTHOR)
    assert isinstance(one, DecidedBuild)
    messages = outbox_messages(one, one.decision, 5.0, StageTimes(), HOSTS.config)
    assert [type(message.message) for message in messages] == kinds


def test_what_a_cell_needs_of_a_request() -> None:
    specs = {
        "trait:A": "required", "trait:B": "forbidden", "resources:VGPU": "required",
        "capabilities:arch": "x", "berth:on_host_failure": "restart",
    }  # fmt: skip
    config = SchedulerConfig(
        flavors={"f": Flavor(vcpus=1, disk_gb=20, extra_specs=specs)},
        build_timeout_s=30.0,
        quotas={"demo": {"INSTANCES": 5}},
    )
    request = HOSTS.request("f", user_id="u", name="n")
    spec = instance_spec(request, config)
    assert (spec.traits, spec.capabilities, spec.root_gb) == (("A",), {"arch": "x"}, 20)
    assert (spec.user_id, spec.name, spec.on_host_failure) == ("u", "n", EvacuationPolicy.RESTART)
    gone = instance_spec(replace(request, flavor="gone"), config)
    assert (gone.traits, gone.root_gb, gone.on_host_failure) == ((), 0, None)
    stage_times = StageTimes(requested=1.0, lost_claims=0)
    lost = (FailedClaim("h9: no_capacity"),) * 2
    for claimed, count in ((CLAIMED, 0), (replace(CLAIMED, lost=lost), 2)):
        command = cell_build(request, claimed, 5.0, stage_times, config)
        assert (command.attempt, command.consumer_generation, command.limits) == (3, 4, {"INSTANCES": 2})
        assert command.stage_times == replace(stage_times, lost_claims=count)
        assert command.build_timeout_s == 30.0 and command.selections == CLAIMED.selections
    own = replace(request, build_timeout_s=40.0)
    assert cell_build(own, CLAIMED, 5.0, stage_times, config).build_timeout_s == 40.0
    build = RecordedBuild(instance_uuid=UUID, project_id="demo", state=BuildState.SCHEDULED, sequence=2)
    for attempt, expected in ((0, 1), (2, 2)):
        query = build_query(own, replace(build, attempt=attempt), 5.0, config)
        assert (query.attempt, query.build_timeout_s, query.sequence) == (expected, 40.0, 2)
    assert build_query(request, build, 5.0, config).build_timeout_s == 30.0
