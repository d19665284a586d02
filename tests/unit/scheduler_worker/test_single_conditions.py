"""Decisions with several conditions: a row for each condition that alone makes the difference."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import REGISTRY

from bus.consuming.outcome import Retry
from bus.contracts.actions import ActionState
from bus.contracts.base import Refusal
from bus.contracts.build import FunnelStep
from bus.contracts.cell import HostReport, HostStates, ServiceRemoved
from bus.contracts.operations import AdminState, HostAdminState
from bus.contracts.placement import ClaimOutcome, ClaimResult, GroupPolicy, ServerGroup
from bus.faults import DatabaseUnavailable
from scheduler_worker.build import build_metrics
from scheduler_worker.build.claim_answer import DELETED, FOREIGN
from scheduler_worker.build.decision import DecidedBuild, PlacedBuild, conclude, conclude_unplaced
from scheduler_worker.build.host_search import HostClaimed, HostSearchRefused, HostSearchRequest
from scheduler_worker.build.pending_build import expand_gang
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.hosts.host_table import HostTable
from scheduler_worker.records.build_record import Actor
from scheduler_worker.requests.request_delivery import MAX_RETRIES, resumed_delivery
from scheduler_worker.selection.choice import Spread
from scheduler_worker.selection.explain import NoValidHost, reason_text
from scheduler_worker.selection.host_view import Membership
from scheduler_worker.selection.request_spec import RelatedInstances, Unsatisfiable
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts, aggregate
from tests.unit.scheduler_worker.test_gangs import REQUEST as BUILD_REQUEST
from tests.unit.scheduler_worker.test_gangs import SELECTION, taken
from tests.unit.scheduler_worker.test_hosts import announce
from tests.unit.scheduler_worker.test_step import ClaimCase
from tests.unit.scheduler_worker.test_transfers import LEFT, applied, on_record

HOST, UUID, REQUEST = (f"{n}0000000-0000-4000-8000-000000000001" for n in "1ad")


# --- hosts


@pytest.mark.parametrize("is_decided", [False, True])
def test_of_hosts_with_one_name_one_counts_that_has_left_while_a_decision_about_it_is_on_record(
    is_decided: bool,
) -> None:
    hosts = Hosts([PLENTY])
    hosts.table.apply(
        HostStates(service="old", cell="c1", epoch=1, sequence=1, hosts=(HostReport(uuid=HOST, name="h0"),)), 0.0
    )
    hosts.table.delete_service(ServiceRemoved(service="old", cell="c1", at=1.0), 0.0)
    if is_decided:
        decision = HostAdminState(host_uuid=HOST, host="h0", state=AdminState.DISABLED)
        hosts.table.apply_decisions({HOST: decision})
    assert hosts.selector.uuids_of("h0") == [hosts.uuids[0], *([HOST] if is_decided else [])]


@pytest.mark.parametrize("is_warming_up", [False, True])
def test_a_host_is_meant_by_the_decision_about_it_where_nothing_else_names_it(is_warming_up: bool) -> None:
    hosts = Hosts([PLENTY])
    hosts.table.apply_decisions({HOST: HostAdminState(host_uuid=HOST, host="gone", state=AdminState.ENABLED)})
    assert hosts.selector.hosts_matching("gone", is_warming_up=is_warming_up) == [HOST]
    assert hosts.selector.hosts_matching("nothing", is_warming_up=is_warming_up) == []


def test_a_host_that_is_looked_at_alone_has_its_aggregates() -> None:
    rack, other = aggregate("a"), aggregate("b")
    config = SchedulerConfig(aggregates=(rack, other))
    view = Hosts([PLENTY] * 2, config=config, members={rack.uuid: [1]}).view()
    assert [view.host(at).aggregates for at in range(2)] == [(), (rack,)]


@pytest.mark.parametrize(("not_reported", "early"), [(0, False), (1, True)])
def test_no_host_is_early_while_one_is_not_reported(not_reported: int, early: bool) -> None:
    funnel = (FunnelStep(step="reported", remaining=1),)
    assert NoValidHost(funnel, not_reported).may_be_out_of_order is early
    assert NoValidHost((FunnelStep(step="reported", remaining=0),), 0).may_be_out_of_order, "no host is in placement"


def test_the_aggregates_with_a_key_are_those_whose_metadata_has_it() -> None:
    zoned, other = aggregate("a", zone="z"), aggregate("b", other="z")
    assert Membership([other, zoned]).with_key("zone") == [zoned]


@pytest.mark.parametrize(("is_warming_up", "found"), [(False, True), (True, False)])
def test_a_host_of_placement_is_meant_by_its_name_once_no_other_may_be_reported(
    is_warming_up: bool, found: bool
) -> None:
    hosts = Hosts([PLENTY])
    hosts.replica.load([replace(hosts.states[0], uuid=HOST, root_uuid=HOST, name="dead"), *hosts.states], 0)
    meant = hosts.selector.hosts_matching("dead", is_warming_up=is_warming_up)
    assert meant == ([HOST] if found else [])
    assert hosts.selector.cell_of(HOST) is None, "no service has announced it"


# --- claims and hosts


@pytest.mark.parametrize(
    ("answer", "lost"),
    [
        (ClaimResult(outcome=ClaimOutcome.NO_CAPACITY), True),
        (ClaimResult(outcome=ClaimOutcome.CLAIMED), False),
        (ClaimResult(outcome=ClaimOutcome.OVER_QUOTA), False),
        (DatabaseUnavailable("away"), False),
    ],
)
def test_the_answers_to_claims_are_counted_and_those_after_which_a_request_claims_again(
    answer: Any, lost: bool
) -> None:
    named = answer.outcome.value if isinstance(answer, ClaimResult) else answer.code

    def counted() -> list[float]:
        names = (("berth_scheduler_claims_total", "outcome"), ("berth_scheduler_claim_retries_total", "outcome"))
        return [REGISTRY.get_sample_value(name, {label: named}) or 0.0 for name, label in names]

    claims, again = counted()
    build_metrics.count_claims([answer, answer])
    assert counted() == [claims + 2, again + 2 * lost]


def test_the_share_of_lost_claims_fades_and_never_exceeds_one() -> None:
    spread = Spread()
    for _ in range(50):
        spread = spread.after(4, 4)
    assert spread.lost == pytest.approx(1.0, abs=0.001)
    assert spread.after(4, 0).lost == pytest.approx(0.8, abs=0.001) and spread.after(0, 0) is spread


def test_a_host_is_shown_as_its_service_reported_it() -> None:
    hosts = Hosts([PLENTY, PLENTY, PLENTY], reports={1: {"enabled": False}})
    hosts.table.apply_decisions(
        {hosts.uuids[2]: HostAdminState(host_uuid=hosts.uuids[2], host="h2", state=AdminState.DISABLED)}
    )
    view = hosts.view()
    assert [view.host(at).enabled for at in range(3)] == [True, False, False]


def test_a_decision_about_a_host_that_nobody_reports_is_about_no_other_one() -> None:
    hosts = Hosts([PLENTY])
    other = HostAdminState(host_uuid=HOST, host="gone", state=AdminState.DISABLED)
    hosts.table.apply_decisions({HOST: other})
    assert hosts.view().host(0).enabled


# --- gangs and claims


@pytest.mark.parametrize(("policy", "stays"), [(GroupPolicy.AFFINITY, False), (GroupPolicy.ANTI_AFFINITY, True)])
def test_a_member_whose_gang_did_not_fit_stays_on_its_host_unless_all_share_one(
    policy: GroupPolicy, stays: bool
) -> None:
    case = ClaimCase()
    related = RelatedInstances(server_group=ServerGroup(uuid=UUID, policy=policy))
    state = replace(case.state, spec=replace(case.state.spec, related=related))
    after = case.step(ClaimOutcome.INCOMPLETE, state=state).state
    assert after.same_host is stays


@pytest.mark.parametrize(
    ("more", "reason"), [({}, DELETED), ({"consumer_generation": 3}, FOREIGN), ({"reason": "its own"}, "its own")]
)
def test_a_consumer_that_is_not_the_requests_is_refused_with_why(more: dict[str, Any], reason: str) -> None:
    result = ClaimCase().step(ClaimOutcome.CONSUMER_CONFLICT, **more).state.result
    assert isinstance(result, HostSearchRefused) and result.reason == reason


@pytest.mark.parametrize(("least", "queried"), [(1, False), (2, True)])
def test_members_that_have_claims_start_when_enough_of_them_have(least: int, queried: bool) -> None:
    members = expand_gang(taken(replace(BUILD_REQUEST, count=2, min_count=least)), start=0)
    claimed = HostClaimed(
        cell="c1", selections=(SELECTION,), consumer_generation=1, passing_hosts=1, score=0.0, claims=1
    )
    spec = Hosts([]).spec()
    placed = [
        PlacedBuild(one, HostSearchRequest(request=one.request, spec=spec), result)
        for one, result in zip(members, (claimed, HostSearchRefused("claim.invalid", "")), strict=True)
    ]
    (_, first), _ = conclude(placed, Actor(name="s", at=1.0))
    assert isinstance(first, DecidedBuild) and (first.claimed is None) is queried


@pytest.mark.parametrize("attempt", [0, 1])
def test_what_an_earlier_delivery_may_have_claimed_is_on_record_at_the_end(attempt: int) -> None:
    pending = taken(BUILD_REQUEST)
    ended = replace(pending, attempt=attempt, delivery=replace(pending.delivery, refusal=Refusal(code="x", reason="")))
    concluded = conclude_unplaced(ended, None, Hosts([PLENTY]).selector, Actor("s", 1.0))
    assert isinstance(concluded, DecidedBuild) and concluded.decision.build.attempt == attempt


def test_a_build_that_is_carried_on_without_its_message_has_no_dead_letter() -> None:
    assert [
        (one.retries, one.has_dead_letter, one.last, one.awaits_hosts)
        for one in (resumed_delivery(tries, is_warming_up=True) for tries in (0, MAX_RETRIES - 1, MAX_RETRIES))
    ] == [(0, False, False, True), (MAX_RETRIES - 1, False, False, True), (MAX_RETRIES, False, True, False)]


@pytest.mark.parametrize(("host", "waits"), [("nowhere", True), ("nowhere", False)])
def test_a_host_that_nobody_reports_is_waited_for_while_hosts_may_still_be_reported(host: str, waits: bool) -> None:
    pending = taken(replace(BUILD_REQUEST, host=host))
    delivery = replace(pending.delivery, awaits_hosts=waits)
    selector = Hosts([PLENTY]).selector
    spec = selector.request_spec(pending.request)
    assert isinstance(spec, Unsatisfiable)
    concluded = conclude_unplaced(replace(pending, delivery=delivery), spec, selector, Actor("s", 1.0))
    assert isinstance(concluded, Retry) is waits


# --- reports


def test_an_event_that_comes_late_is_reported_to_nobody() -> None:
    late = replace(LEFT, transfer=None, state=ActionState.CHANGING, sequence=1)
    batch = applied(on_record(), late)
    assert ([one.message for one in batch.messages], [*batch.changed]) == ([], [])


def test_a_service_that_is_not_heard_any_more_loses_its_host_to_another_of_its_cell() -> None:
    table = HostTable()
    assert announce(table, "c1", 1, 0.0, "s1") == "c1"
    announce(table, "c1", 1, 100_000.0, "s2")
    assert table.services.states[int(table.service[0])].name == "s2"


def test_of_two_hosts_with_one_name_the_one_in_placement_counts_though_no_service_has_it() -> None:
    hosts = Hosts([PLENTY])
    other = HostStates(
        service="other", cell="c2", epoch=1, sequence=1, hosts=(HostReport(uuid=HOST, name="h0"),), complete=True
    )
    hosts.table.apply(other, 0.0)
    hosts.table.apply(replace(other, sequence=2, hosts=()), 0.0)
    hosts.give_up()
    assert hosts.selector.uuids_of("h0") == [hosts.uuids[0]]


def test_a_rebuild_is_held_to_the_filters_of_images_alone() -> None:
    hosts = Hosts([PLENTY], reports={0: {"enabled": False}})
    spec = hosts.spec()
    assert hosts.selector.suits_rebuild(hosts.uuids[0], spec) is None


def test_a_source_that_is_gone_has_one_line_in_its_own_cell() -> None:
    gone = replace(LEFT, transfer=None, state=ActionState.SOURCE_DESTROYED, sequence=50)
    lines = [line.what for line in applied(on_record(), gone).timelines.get(LEFT.instance_uuid, ())]
    assert lines.count("migrate source-destroyed") == len(lines) == 1


# --- words


@pytest.mark.parametrize(
    ("step_name", "reason", "part"),
    [
        ("groups _A and _B", "groups do not fit together", "each of groups _A and _B"),
        ("other", "groups do not fit together", "rejected by other"),
        ("groups _A", "else", "rejected by groups _A (else)"),
        ("filter", "filter", "rejected by filter"),
    ],
)
def test_each_reason_has_its_own_words(step_name: str, reason: str, part: str) -> None:
    assert reason_text(step_name, reason).endswith(part) or part in reason_text(step_name, reason)
