"""The selector and what filters see, by rows: who is meant, who may be chosen, and what a funnel counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
from msgspec.structs import replace

from bus.contracts.build import FunnelStep
from bus.contracts.cell import HostReport, HostStates, ServiceDown, ServiceStates
from bus.contracts.operations import AdminState, HostAdminState
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.selection import assumed_usage
from scheduler_worker.selection.assumed_usage import AssumedUsage
from scheduler_worker.selection.explain import NoValidHost, funnel_step, message_of, nearest_reasons, reason_text
from scheduler_worker.selection.host_view import HostsView
from scheduler_worker.selection.plugin import FilterResult, filter_result_of
from scheduler_worker.selection.request_spec import RequestSpec
from scheduler_worker.selection.selector_config import SelectorConfig
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts, aggregate

UUID, ABSENT = (f"{n}0000000-0000-4000-8000-000000000001" for n in "ab")
OPEN, MASKED, FENCED, DISABLED = AdminState.ENABLED, AdminState.MAINTENANCE, AdminState.FENCED, AdminState.DISABLED


def decide_about(hosts: Hosts, decisions: Mapping[int, AdminState]) -> None:
    hosts.table.apply_decisions(
        {hosts.uuids[at]: HostAdminState(host_uuid=hosts.uuids[at], host=f"d{at}", state=state)
         for at, state in decisions.items()}
    )  # fmt: skip


# --- no valid host


@pytest.mark.parametrize(
    ("funnel", "not_reported", "remaining", "early"),
    [
        ((), 0, 0, False),
        ((), 1, 0, True),
        ((FunnelStep(step="a", remaining=0),), 0, 0, True),
        ((FunnelStep(step="a", remaining=0, rejected={"x": 1}),), 0, 0, False),
        ((FunnelStep(step="a", remaining=1, rejected={"x": 1}),), 0, 1, False),
        ((FunnelStep(step="a", remaining=3), FunnelStep(step="b", remaining=2)), 0, 2, False),
        ((FunnelStep(step="a", remaining=3), FunnelStep(step="b", remaining=2)), 1, 2, True),
    ],
)
def test_what_a_funnel_says_of_no_valid_host(
    funnel: tuple[FunnelStep, ...], not_reported: int, remaining: int, early: bool
) -> None:
    ended = NoValidHost(funnel, not_reported)
    assert (ended.remaining, ended.may_be_out_of_order) == (remaining, early)


def step(name: str, remaining: int, **rejected: int) -> FunnelStep:
    return FunnelStep(step=name, remaining=remaining, rejected=rejected)


@pytest.mark.parametrize(
    ("funnel", "nearest", "end"),
    [
        ((), 3, ": placement has no hosts at all."),
        ((step("a", 0),), 3, ": placement has no hosts at all."),
        ((step("a", 4),), 3, "None of 4 hosts can take m1.small (20 DISK_GB, 2048 MEMORY_MB, 1 VCPU)."),
        ((step("a", 1, x=2), step("b", 0, y=1)), 3, "None of 3 hosts can take m1.small (20 DISK_GB, 2048 MEMORY_MB,"
         " 1 VCPU): 1 were rejected by b (y); 2 were rejected by a (x)."),
    ],
)  # fmt: skip
def test_a_sentence_counts_all_hosts(funnel: tuple[FunnelStep, ...], nearest: int, end: str) -> None:
    assert message_of(Hosts([]).spec(), funnel, nearest).endswith(end)


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (1, ["3 were rejected by b (y)"]),
        (2, ["3 were rejected by b (y)", "1 were rejected by b (x)"]),
        (3, ["3 were rejected by b (y)", "1 were rejected by b (x)", "1 were rejected by b (z)"]),
        (9, ["3 were rejected by b (y)", "1 were rejected by b (x)", "1 were rejected by b (z)", "9 are fenced"]),
    ],
)
def test_the_last_steps_and_the_most_frequent_reasons_come_first(limit: int, words: list[str]) -> None:
    first = FunnelStep(step="a", remaining=5, rejected={"host.fenced": 9})
    assert nearest_reasons((first, step("b", 0, z=1, x=1, y=3)), limit) == words


@pytest.mark.parametrize(
    ("where", "reason", "words"),
    [
        ("x", "host.fenced", "are fenced"),
        ("groups 1, 2", "groups do not fit together", "have room for each of groups 1, 2, but not for all of them"),
        ("group 1", "groups do not fit together", "were rejected by group 1"),
        ("group 1", "in use", "have no provider with enough free for group 1"),
        ("VCPU", "in use", "have too little VCPU free"),
        ("group 1", "host.x", "were rejected by group 1 (host.x)"),
        ("traits", "root lacks X", "lack X on the host itself"),
        ("traits", "lacks X", "lack X"),
        ("aggregates", "in X", "are in aggregate X, which is forbidden"),
        ("aggregates", "lacks X", "were rejected by aggregates (lacks X)"),
        ("ComputeCapabilitiesFilter", "capability.x", "do not have the requested x"),
        ("AggregateInstanceExtraSpecsFilter", "aggregate.x", "are in no aggregate with the requested x"),
        ("AggregateImagePropertiesIsolation", "image.x", "are reserved for images with another x"),
        ("f", "aggregate.excluded", "were rejected by f (aggregate.excluded)"),
        ("f", "f", "were rejected by f"),
    ],
)
def test_a_reason_in_words(where: str, reason: str, words: str) -> None:
    assert reason_text(where, reason).startswith(words)


def test_a_funnel_step_leaves_what_it_did_not_reject() -> None:
    assert funnel_step("a", 5, {"x": 2, "y": 0, "z": 1}) == step("a", 2, x=2, z=1)
    assert funnel_step("a", 3, {"x": 3}).remaining == 0


# --- who may be chosen


class Odd:
    """Rejects the hosts at odd positions, and may count wrongly."""

    name: ClassVar[str] = "Odd"

    def __init__(self, counts: Mapping[str, int]) -> None:
        self.counts = counts

    def filter(self, view: HostsView, spec: RequestSpec) -> FilterResult:
        return FilterResult(np.arange(len(view)) % 2 == 0, self.counts)


@pytest.mark.parametrize(
    ("given", "spec_of", "left", "rejected"),
    [
        ({}, {}, "0123", {}),
        ({"cells": ["c1", "c2", "c1", "c2"], "off": {"c1"}}, {}, "13", {"cell": {"cell.disabled": 2}}),
        ({"cells": ["c1", "c2", "c1", "c2"], "off": {"c9"}}, {}, "0123", {}),
        ({"cells": ["c1", "c2", "c1", "c2"], "off": {"c1"}}, {"cell": "c1"}, "02", {"cell": {"host.other_cell": 2}}),
        ({"cells": ["c1", "c2", "c1", "c2"]}, {"cell": "c9"}, "", {"cell": {"host.other_cell": 4}}),
        ({"about": {0: MASKED}}, {"forced": True}, "123", {"maintenance": {"host.maintenance": 1}}),
        ({"about": {0: FENCED, 1: FENCED}}, {"forced": True}, "23", {"fenced": {"host.fenced": 2}}),
        ({"about": {0: DISABLED}}, {"forced": True}, "0123", {}),
        ({"about": {0: DISABLED}}, {}, "123", None),
        ({"filters": [Odd({"x": 2})]}, {}, "02", {"Odd": {"x": 2}}),
        ({"filters": [Odd({"x": 9})]}, {}, "02", {"Odd": {"Odd": 2}}),
        ({"filters": [Odd({})]}, {"forced": True}, "0123", {}),
        ({"not_reported": True}, {}, "0123", {"reported": {"host.not_reported": 1}}),
    ],
)
def test_which_hosts_pass_and_why_others_do_not(
    given: dict[str, Any], spec_of: dict[str, Any], left: str, rejected: Any
) -> None:
    hosts = Hosts([PLENTY] * 4, cells=given.get("cells", ()), filters=given.get("filters"))
    hosts.table.disabled_cells = frozenset(given.get("off", ()))
    decide_about(hosts, given.get("about", {}))
    if given.get("not_reported"):
        hosts.replica.load([*hosts.states, replace(hosts.states[0], uuid=UUID, root_uuid=UUID, name="x")], 0)
    spec = replace(hosts.spec(), **spec_of)
    ranking = hosts.selector.rank(spec, hosts.rng)
    assert "".join(sorted(hosts.name(row)[1:] for row in ranking.view.rows.tolist())) == left
    funnel = {one.step: dict(one.rejected) for one in ranking.funnel}
    if rejected is not None:
        assert {name: reasons for name, reasons in funnel.items() if reasons} == rejected
        assert {"reported", "cell", "maintenance", "fenced"} & {*funnel} <= {*rejected}
    among = ranking.view.rows[:1]
    assert hosts.selector.rank(spec, hosts.rng, among=among).view.rows.tolist() == among.tolist()
    explained = hosts.selector.explain(spec, {hosts.uuids[int(at)]: "claim.no_capacity" for at in left[:1]})
    assert explained.not_reported == (1 if given.get("not_reported") else 0)
    if left:
        assert (explained.funnel[-1].rejected, explained.remaining) == ({"claim.no_capacity": 1}, len(left) - 1)


# --- who is meant


def named_world() -> Hosts:
    """h0, h1 of c1; h0 of another uuid that has left; h1 in placement under another name; `old` in placement alone."""
    hosts = Hosts([PLENTY] * 2)
    gone = HostStates(service="x", cell="c2", epoch=1, sequence=1, hosts=(HostReport(uuid=ABSENT, name="h0"),))
    hosts.table.apply(gone, 0.0)
    hosts.table.apply(replace(gone, sequence=2, hosts=(), complete=True), 0.0)
    renamed = replace(hosts.states[1], name="book1")
    hosts.replica.load([hosts.states[0], renamed, replace(renamed, uuid=UUID, root_uuid=UUID, name="old")], 1)
    return hosts


@pytest.mark.parametrize(
    ("word", "found", "meant", "warming", "name"),
    [
        ("h0", ["0"], ["0"], ["0"], None),
        ("h1", ["1"], ["1", "f"], ["1"], None),
        ("book1", [], ["1"], [], None),
        ("old", [], [UUID], [], None),
        (UUID, [UUID], [UUID], [UUID], "old"),
        (ABSENT, [ABSENT], [ABSENT], [ABSENT], "h0"),
        ("fenced", [], ["c"], ["c"], None),
        ("enabled", [], ["d"], ["d"], None),
        ("none", [], [], [], "none"),
    ],
)
def test_which_hosts_a_word_means(
    word: str, found: list[str], meant: list[str], warming: list[str], name: str | None
) -> None:
    hosts = named_world()
    known = {"0": hosts.uuids[0], "1": hosts.uuids[1], **{key: UUID[:-1] + key for key in "cdef"}}
    decided = (("c", "fenced", FENCED), ("d", "enabled", OPEN), ("e", "h0", OPEN), ("f", "h1", FENCED))
    hosts.table.apply_decisions({
        known[key]: HostAdminState(host_uuid=known[key], host=host, state=state) for key, host, state in decided
    })  # fmt: skip
    expected = [[known.get(one, one) for one in row] for row in (found, meant, warming)]
    selector = hosts.selector
    answers = [
        selector.uuids_of(word),
        selector.hosts_matching(word),
        selector.hosts_matching(word, is_warming_up=True),
    ]
    assert answers == expected
    if name is not None:
        assert selector.name_of(word) == name
    assert [selector.name_of(known[key]) for key in "01cd"] == ["h0", "h1", "fenced", "enabled"]
    assert [selector.cell_of(one) for one in (known["0"], ABSENT, UUID)] == ["c1", None, None]
    assert selector.rows_of({UUID: "x", ABSENT: "y"}) == {hosts.replica.row_of(UUID): "x"}


def test_hosts_that_a_service_reports_and_placement_does_not_have() -> None:
    hosts = named_world()
    more = HostStates(service="y", cell="c2", epoch=1, sequence=1, hosts=(HostReport(uuid=ABSENT, name="y"),))
    assert hosts.selector.not_in_placement() == []
    hosts.table.apply(more, 0.0)
    assert hosts.selector.not_in_placement() == [ABSENT]
    assert hosts.selector.reported_in_placement().tolist() == [0, 1]
    down = (ServiceDown(service="y", epoch=1, code="x"),)
    hosts.table.apply(ServiceStates(cell="c2", term=1, number=1, down=down), 0.0)
    assert hosts.selector.not_in_placement() == []


def test_a_host_that_is_reported_later_is_found() -> None:
    hosts = Hosts([PLENTY])
    other = replace(hosts.states[0], uuid=UUID, root_uuid=UUID, name="x")
    hosts.replica.load([*hosts.states, other], 1)
    more = HostStates(service="y", cell="c2", epoch=1, sequence=1, hosts=(HostReport(uuid=UUID, name="x"),))
    assert hosts.selector.reported_in_placement().tolist() == [0]
    hosts.table.apply(more, 0.0)
    assert hosts.selector.reported_in_placement().tolist() == [0, 1]


def test_a_claim_of_a_class_that_a_host_did_not_have_ends_a_hold() -> None:
    hosts = Hosts([{"VCPU": 8}])
    holds = AssumedUsage(hosts.replica)
    holds.add("a", {hosts.uuids[0]: {"DISK_GB": 1}}, 9.0)
    for used, left in ((1, None), (2, None)):
        state = replace(hosts.states[0], inventories={"DISK_GB": (9, 0, 1, 9, 1, 0, 1.0)}, used={"DISK_GB": used})
        hosts.replica.load([replace(state, generation=used + 1)], used)
        holds.drop_confirmed()
        assert holds.next_until is left


def test_usage_of_before_a_hold_is_no_part_of_its_rise() -> None:
    hosts = Hosts([{"VCPU": 8}])
    holds = AssumedUsage(hosts.replica)
    for used, left in ((1, 9.0), (2, 9.0), (4, None)):
        hosts.replica.load([replace(hosts.states[0], used={"VCPU": used}, generation=used + 1)], used)
        if used == 1:
            holds.add("a", {hosts.uuids[0]: {"VCPU": 2}}, 9.0)
        holds.drop_confirmed()
        assert holds.next_until == left


@pytest.mark.parametrize("released", [True, False], ids=["used before it was held", "used after, and another has come"])
def test_what_is_used_ends_the_holds_that_were_there_before(released: bool) -> None:
    hosts = Hosts([{"VCPU": 8}])
    holds = AssumedUsage(hosts.replica)
    holds.add("a", {hosts.uuids[0]: {"VCPU": 1}}, 9.0)
    if released:
        holds.release()
    hosts.replica.load([replace(hosts.states[0], used={"VCPU": 1}, generation=2)], 1)
    holds.add("b", {hosts.uuids[0]: {"VCPU": 1}}, 9.0)
    holds.drop_confirmed()
    assert list(hosts.replica.assumptions.keys()) == ["b"]


def test_a_hold_on_a_host_that_placement_does_not_have_stays() -> None:
    hosts = Hosts([{"VCPU": 8}])
    holds = AssumedUsage(hosts.replica)
    holds.add("a", {ABSENT: {"VCPU": 1}}, 9.0)
    holds.drop_confirmed()
    assert holds.next_until == 9.0


def test_the_hosts_that_aggregates_name() -> None:
    hosts = named_world()
    every = [
        replace(aggregate("a"), hosts=("h1", "none", "h0")), replace(aggregate("b"), hosts=()), aggregate("c"),
    ]  # fmt: skip
    assert hosts.selector.members_named(every) == {every[0].uuid: frozenset(hosts.uuids), every[1].uuid: frozenset()}


def test_the_zone_of_a_host() -> None:
    east, other = aggregate("east", availability_zone="e"), aggregate("other", else_="x")
    config = SchedulerConfig(aggregates=(other, east), default_availability_zone="nova")
    hosts = Hosts([PLENTY] * 2, config=config, members={east.uuid: [0], other.uuid: [0, 1]})
    assert [hosts.selector.zone_of(uuid) for uuid in (*hosts.uuids, ABSENT)] == ["e", "nova", "nova"]
    hosts.selector.config.membership.named = {east.uuid: frozenset({hosts.uuids[1]})}
    assert [hosts.selector.zone_of(uuid) for uuid in hosts.uuids] == ["nova", "e"]
    assert hosts.selector.selection_on(hosts.uuids[1], {UUID: {"VCPU": 1}}, {UUID: 2}).zone == "e"
    assert Hosts([PLENTY], config=SchedulerConfig(aggregates=(other,))).selector.zone_of(UUID) == ""


class OnRebuild(Odd):
    run_on_rebuild = True

    def filter(self, view: HostsView, spec: RequestSpec) -> FilterResult:
        return filter_result_of(np.zeros(len(view), dtype=np.bool_), "no")


class OnOtherRebuilds(OnRebuild):
    def applies_to(self, spec: RequestSpec) -> bool:
        return False


@pytest.mark.parametrize(
    ("traits", "image", "filters", "reasons"),
    [
        ((), {}, (), None),
        (("CUSTOM_A",), {"trait:CUSTOM_A": "required"}, (), None),
        ((), {"trait:CUSTOM_A": "required"}, (), {"image.traits": 1}),
        (("CUSTOM_A",), {"trait:CUSTOM_A": "forbidden"}, (), {"image.traits": 1}),
        ((), {"trait:CUSTOM_A": "forbidden"}, (), None),
        ((), {}, (OnRebuild({}),), {"no": 1}),
        ((), {}, (OnOtherRebuilds({}),), None),
        ((), {}, (Odd({}),), None),
    ],
)
def test_which_images_a_host_is_rebuilt_from(traits: Any, image: Any, filters: Any, reasons: Any) -> None:
    hosts = Hosts([PLENTY] * 2, filters=filters)
    child = replace(hosts.states[0], uuid=UUID, name="child", parent_uuid=hosts.uuids[0], traits=traits, inventories={})
    hosts.replica.load([*hosts.states, child], 1)
    answer = hosts.selector.suits_rebuild(hosts.uuids[0], replace(hosts.spec(), image_properties=image))
    assert (answer and (answer.funnel[-1].rejected, answer.remaining)) == (reasons and (reasons, 0))
    assert hosts.selector.suits_rebuild(ABSENT, hosts.spec()) is None
    hosts.replica.load([replace(hosts.states[0], uuid=ABSENT, root_uuid=ABSENT)], 2)
    unknown = hosts.selector.suits_rebuild(ABSENT, hosts.spec())
    assert unknown is not None and (unknown.not_reported, unknown.remaining) == (1, 0)


def test_the_version_changes_with_what_decides_which_hosts_pass() -> None:
    hosts = Hosts([PLENTY] * 2)
    seen = [hosts.selector.version]
    hosts.replica.assume("k", {hosts.uuids[0]: {"VCPU": 1}})
    assert hosts.selector.version == seen[0], "not with usage"
    other = SelectorConfig(hosts.config, flavors={}, filters=(), weighings=(), revision=7)
    changes: tuple[Callable[[], object], ...] = (
        hosts.give_up,
        lambda: setattr(hosts.table, "disabled_cells", frozenset({"c1"})),
        lambda: hosts.replica.load(hosts.states[:1], 5),
        lambda: setattr(hosts.selector, "config", other),
    )
    for change in changes:
        change()
        seen.append(hosts.selector.version)
    assert len(set(seen)) == 5


# --- choices that are held


def test_holds_are_bounded_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assumed_usage, "MAX_ASSUMED", 2)
    hosts = Hosts([{"VCPU": 8}] * 2)
    holds = AssumedUsage(hosts.replica)
    for at, key in enumerate("abc"):
        holds.add(key, {hosts.uuids[0]: {"VCPU": 1}}, float(at))
    assert list(hosts.replica.assumptions.keys()) == ["b", "c"] and holds.next_until == 1.0
    holds.expire(0.9)
    assert list(hosts.replica.assumptions.keys()) == ["b", "c"]
    holds.expire(1.0)
    assert list(hosts.replica.assumptions.keys()) == ["c"]


@pytest.mark.parametrize(
    ("held", "used", "left"),
    [
        ([{0: {"VCPU": 2}}], {0: {"VCPU": 2}}, 0),
        ([{0: {"VCPU": 2}}], {0: {"VCPU": 3}}, 0),
        ([{0: {"VCPU": 2}}], {0: {"VCPU": 1}}, 1),
        ([{0: {"VCPU": 2}}], {1: {"VCPU": 2}}, 1),
        ([{0: {"VCPU": 1, "DISK_GB": 1}}], {0: {"VCPU": 1}}, 1),
        ([{0: {"VCPU": 1}, 1: {"VCPU": 1}}], {0: {"VCPU": 1}}, 1),
        ([{0: {"VCPU": 1}, 1: {"VCPU": 1}}], {0: {"VCPU": 1}, 1: {"VCPU": 1}}, 0),
        ([{0: {"VCPU": 2}}] * 2, {0: {"VCPU": 3}}, 1),
        ([{0: {"VCPU": 2}}] * 2, {0: {"VCPU": 4}}, 0),
        ([{0: {"VCPU": 2}}], {}, 1),
    ],
)
def test_a_hold_ends_when_the_usage_has_risen_by_its_amounts(held: Any, used: Any, left: int) -> None:
    hosts = Hosts([{"VCPU": 8, "DISK_GB": 8}] * 2)
    holds = AssumedUsage(hosts.replica)
    for key, one in enumerate(held):
        holds.add(str(key), {hosts.uuids[at]: share for at, share in one.items()}, 9.0)
    states = [replace(state, used=used.get(at, {}), generation=2) for at, state in enumerate(hosts.states)]
    hosts.replica.load(states, 1)
    holds.drop_confirmed()
    assert (len(list(hosts.replica.assumptions.keys())), holds.next_until is None) == (left, left == 0)
    holds.drop_confirmed()
    assert len(list(hosts.replica.assumptions.keys())) == left, "what has risen counts once"
