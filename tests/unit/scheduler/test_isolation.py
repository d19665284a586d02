"""Filters and weighers about aggregates and about where others are, and weights as Nova combines them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import scheduler_worker
from bus.clock import new_uuid
from bus.contracts.groups import GroupPolicy, ServerGroup
from bus.contracts.placement import LocatePage
from scheduler_worker.config import Aggregate, Flavor, SchedulerConfig
from scheduler_worker.domain.hosts import Floats
from scheduler_worker.domain.plugins import Filter, Weigher, Weighing, applies_to, reweigh, score
from scheduler_worker.domain.view import HostsView, Peers, RequestSpec, has_peers, peers_of
from scheduler_worker.filters.extra_specs import AggregateInstanceExtraSpecsFilter, AggregateTypeAffinityFilter
from scheduler_worker.filters.group import ServerGroupAffinityFilter, ServerGroupAntiAffinityFilter
from scheduler_worker.filters.hinted_hosts import DifferentHostFilter, SameHostFilter
from scheduler_worker.filters.image import AggregateImagePropertiesIsolation, ImagePropertiesFilter
from scheduler_worker.weighers.free_amounts import CPUWeigher, DiskWeigher, RAMWeigher
from scheduler_worker.weighers.group_members import ServerGroupSoftAffinityWeigher, ServerGroupSoftAntiAffinityWeigher
from scheduler_worker.weighers.host_state import BuildFailureWeigher
from tests.unit.scheduler.hosts import PLENTY, Hosts, aggregate

# --- Isolation by aggregates where several aggregates, properties or traits meet: a rule that knows one would err.


def passing(hosts: Hosts, **request: Any) -> list[str]:
    ranking = hosts.selector.rank(hosts.spec(**request), hosts.rng)
    return sorted(hosts.name(row) for row in ranking.view.rows.tolist())


def test_two_aggregates_that_list_the_same_flavor_both_take_it() -> None:
    one, two = aggregate("one", instance_type="m1.small"), aggregate("two", instance_type="m1.small,m1.large")
    hosts = Hosts([PLENTY] * 2, config=SchedulerConfig(aggregates=(one, two)), members={one.uuid: [0], two.uuid: [1]})
    host_filter = AggregateTypeAffinityFilter().filter
    assert host_filter(hosts.view(), hosts.spec("m1.small")).passed.tolist() == [True, True]


def test_of_several_extra_specs_a_host_must_meet_each_and_falls_for_the_first() -> None:
    ssd, rack = aggregate("ssd", ssd="true"), aggregate("rack", rack="7")
    flavor = Flavor(vcpus=1, extra_specs={"aggregate_instance_extra_specs:ssd": "true", "rack": "7"})
    config = SchedulerConfig(flavors={"f": flavor}, aggregates=(ssd, rack))
    hosts = Hosts([PLENTY] * 4, config=config, members={ssd.uuid: [0, 2], rack.uuid: [1, 2]})
    verdict = AggregateInstanceExtraSpecsFilter().filter(hosts.view(), hosts.spec("f"))
    assert verdict.passed.tolist() == [False, False, True, False]
    assert sum(verdict.rejected.values()) == 3


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("hw_architecture", ("x86_64", "aarch64")),
        ("img_hv_type", ("kvm", "qemu")),
        ("hw_vm_mode", ("hvm", "xen")),
    ],
)
def test_each_property_of_an_image_is_compared_with_its_own_part_of_the_triple(
    name: str, values: tuple[str, str]
) -> None:
    here, there = {"supported_instances": "x86_64/kvm/hvm"}, {"supported_instances": "aarch64/qemu/xen"}
    hosts = Hosts([PLENTY] * 2, reports={0: {"attributes": here}, 1: {"attributes": there}})
    found = [
        ImagePropertiesFilter().filter(hosts.view(), hosts.spec(image_properties={name: value})).passed.tolist()
        for value in values
    ]
    assert found == [[True, False], [False, True]]


def test_of_several_properties_an_image_must_meet_each_that_an_aggregate_names() -> None:
    windows, linux, arm = aggregate("w", os_type="windows"), aggregate("l", os_type="linux"), aggregate("a", arch="arm")
    either = aggregate("e", os_type="linux, windows")
    config = SchedulerConfig(aggregates=(windows, linux, arm, either))
    members = {windows.uuid: [0, 3], linux.uuid: [1, 3], arm.uuid: [1, 2], either.uuid: [5]}
    hosts = Hosts([PLENTY] * 6, config=config, members=members)

    def passing(**properties: str) -> list[int]:
        host_filter = AggregateImagePropertiesIsolation()
        verdict = host_filter.filter(hosts.view(), hosts.spec(image_properties=properties))
        return [at for at, passed in enumerate(verdict.passed.tolist()) if passed]

    # Host 3 is in an aggregate of each kind: one that meets is enough. Host 4 is in none.
    assert passing(os_type="windows", arch="x86") == [0, 3, 4, 5]
    assert passing(os_type="linux", arch="arm") == [1, 2, 3, 4, 5]
    assert passing(os_type="linux", arch="x86") == [3, 4, 5]
    assert passing(os_type="plan9") == [2, 4]


def tenants(*aggregates: Aggregate, **members: list[int]) -> Hosts:
    config = SchedulerConfig(aggregates=aggregates, limit_tenants_to_placement_aggregate=True)
    by_name = {one.name: one.uuid for one in aggregates}
    named = {by_name[name]: rows for name, rows in members.items()}
    return Hosts([PLENTY] * 4, config=config, members=named, filters=())


def test_a_project_with_several_aggregates_may_have_any_of_their_hosts() -> None:
    one, two = aggregate("one", filter_tenant_id="demo"), aggregate("two", filter_tenant_id3="x, demo")
    hosts = tenants(one, two, one=[1], two=[3])
    assert passing(hosts, project_id="demo") == ["h1", "h3"]
    assert passing(hosts, project_id="x") == ["h3"]


def test_a_projects_aggregate_and_a_zone_hold_together() -> None:
    mine, east = aggregate("mine", filter_tenant_id="demo"), aggregate("east", availability_zone="east")
    hosts = tenants(mine, east, mine=[0, 1], east=[1, 2])
    assert passing(hosts, project_id="demo", availability_zone="east") == ["h1"]


def test_a_projects_aggregate_binds_no_project_unless_it_is_switched_on() -> None:
    mine = aggregate("mine", filter_tenant_id="demo")
    hosts = Hosts([PLENTY] * 2, config=SchedulerConfig(aggregates=(mine,)), members={mine.uuid: [1]}, filters=())
    assert passing(hosts, project_id="demo") == ["h0", "h1"]


def isolated(extra_specs: dict[str, str], metadata: dict[str, str]) -> Hosts:
    """Of three hosts, h0 is in an aggregate with this metadata, and h1 in the zone `east`."""
    licensed, east = aggregate("licensed", **metadata), aggregate("east", availability_zone="east")
    flavors = {"f": Flavor(vcpus=1, extra_specs=extra_specs)}
    config = SchedulerConfig(flavors=flavors, aggregates=(licensed, east), enable_isolated_aggregate_filtering=True)
    return Hosts([PLENTY] * 3, config=config, members={licensed.uuid: [0], east.uuid: [1]})


def keeps(extra_specs: dict[str, str], metadata: dict[str, str]) -> bool:
    """Whether such an aggregate is kept from such a flavor."""
    return bool(isolated(extra_specs, metadata).spec("f").query.root_forbidden_aggregates)


LICENSED = {"trait:CUSTOM_WINDOWS": "required"}


@pytest.mark.parametrize(
    ("extra_specs", "kept"),
    [
        ({"trait:CUSTOM_WINDOWS": "required"}, False),
        ({"resources1:VGPU": "1", "trait1:CUSTOM_WINDOWS": "required"}, False),
        ({"trait:in:CUSTOM_WINDOWS,CUSTOM_FAST": "required"}, True),  # the other one would do
        ({"trait:CUSTOM_WINDOWS": "forbidden"}, True),
        ({"root_required": "!CUSTOM_WINDOWS"}, True),
    ],
)
def test_who_requires_the_trait_of_an_isolated_aggregate_and_who_does_not(
    extra_specs: dict[str, str], kept: bool
) -> None:
    assert keeps(extra_specs, LICENSED) is kept


def test_an_isolated_aggregate_and_the_default_zone_both_keep_their_hosts() -> None:
    assert passing(isolated({}, LICENSED), flavor="f", availability_zone="nova") == ["h2"]


def test_an_image_requires_the_trait_of_an_isolated_aggregate() -> None:
    spec = isolated({}, LICENSED).spec("f", image_properties=LICENSED)
    assert spec.query.root_forbidden_aggregates == ()


# --- Filters and weighers about where others are, against Nova's rules.


OURS = (ServerGroupAntiAffinityFilter, ServerGroupAffinityFilter, DifferentHostFilter, SameHostFilter)


def in_group(hosts: Hosts, policy: GroupPolicy, members: Mapping[int, int], **fields: Any) -> RequestSpec:
    group = ServerGroup(uuid=new_uuid(hosts.rng), policy=policy, **fields)
    by_uuid = {hosts.uuids[at]: count for at, count in members.items()}
    return hosts.spec().with_peers(Peers(server_group=group, members=by_uuid), "me")


@pytest.mark.parametrize(
    ("policy", "members", "fields", "passes"),
    [
        (GroupPolicy.ANTI_AFFINITY, {}, {}, [True, True, True]),
        (GroupPolicy.ANTI_AFFINITY, {0: 1}, {}, [False, True, True]),
        (GroupPolicy.ANTI_AFFINITY, {0: 1, 2: 2}, {"max_per_host": 2}, [True, True, False]),
        (GroupPolicy.AFFINITY, {}, {}, [True, True, True]),  # the claim keeps two first members apart
        (GroupPolicy.AFFINITY, {1: 3}, {}, [False, True, False]),
        (GroupPolicy.AFFINITY, {0: 1, 1: 1}, {}, [False, False, False]),  # a member moves: it may end on either
        (GroupPolicy.SOFT_AFFINITY, {1: 3}, {}, [True, True, True]),
        (GroupPolicy.SOFT_ANTI_AFFINITY, {1: 3}, {}, [True, True, True]),
    ],
)
def test_hard_rules(
    policy: GroupPolicy, members: Mapping[int, int], fields: dict[str, int], passes: list[bool]
) -> None:
    hosts = Hosts([PLENTY] * 3)
    spec = in_group(hosts, policy, members, **fields)
    ranking = hosts.selector.rank(spec, hosts.rng)
    passed = {hosts.name(row) for row in ranking.view.rows.tolist()}
    assert [f"h{at}" in passed for at in range(3)] == passes


@pytest.mark.parametrize("host_filter", [ServerGroupAntiAffinityFilter(), ServerGroupAffinityFilter()])
def test_members_on_hosts_that_the_book_lost_exclude_no_host(host_filter: Filter) -> None:
    hosts = Hosts([PLENTY] * 2)
    group = ServerGroup(uuid=new_uuid(hosts.rng), policy=GroupPolicy.ANTI_AFFINITY)
    spec = hosts.spec().with_peers(Peers(server_group=group, members={new_uuid(hosts.rng): 1}), "me")
    if applies_to(host_filter, spec):
        assert host_filter.filter(hosts.view(), spec).passed.all()


def test_wishes_are_weights_of_the_others() -> None:
    hosts = Hosts([PLENTY] * 3)
    together = in_group(hosts, GroupPolicy.SOFT_AFFINITY, {0: 1, 2: 4})
    apart = in_group(hosts, GroupPolicy.SOFT_ANTI_AFFINITY, {0: 1, 2: 4})
    assert ServerGroupSoftAffinityWeigher().weigh(hosts.view(), together).tolist() == [1, 0, 4]
    assert ServerGroupSoftAntiAffinityWeigher().weigh(hosts.view(), apart).tolist() == [1, 0, 4]

    def best(spec: RequestSpec) -> str:
        choice = hosts.selector.rank(spec, hosts.rng).pick({}, subset=1, alternates=0)
        assert choice is not None
        return hosts.name(choice.selected.row)

    assert (best(together), best(apart)) == ("h2", "h1")


def test_hints() -> None:
    hosts = Hosts([PLENTY] * 3)
    here, there, nowhere = (new_uuid(hosts.rng) for _ in range(3))
    page = LocatePage(hosts={here: (hosts.uuids[0],), there: (hosts.uuids[2], "a foreign pool")})

    def passing(host_filter: Filter, **hints: tuple[str, ...]) -> list[bool]:
        request = hosts.request(**hints)
        assert has_peers(request)
        spec = hosts.spec().with_peers(peers_of(request, page), "me")
        assert applies_to(host_filter, spec)
        return [bool(passed) for passed in host_filter.filter(hosts.view(), spec).passed]

    assert passing(DifferentHostFilter(), different_host=(here, there)) == [False, True, False]
    assert passing(DifferentHostFilter(), different_host=(nowhere,)) == [True, True, True]
    assert passing(SameHostFilter(), same_host=(here, nowhere)) == [True, False, False]
    assert passing(SameHostFilter(), same_host=(nowhere,)) == [False, False, False]


def test_a_request_without_a_group_is_not_looked_up_and_pays_for_no_filter() -> None:
    hosts = Hosts([PLENTY] * 2)
    assert not has_peers(hosts.request())
    spec = hosts.spec()
    assert not any(applies_to(one(), spec) for one in OURS)
    steps = [step.step for step in hosts.selector.explain(spec, {}).funnel]
    assert not {one.name for one in OURS} & set(steps)


def test_requests_with_peers_share_no_ranking() -> None:
    """Two members of one group see each other's hosts differently as soon as one of them is placed."""
    hosts = Hosts([PLENTY])
    spec = hosts.spec()
    others = Peers(server_group=ServerGroup(uuid=new_uuid(hosts.rng), policy=GroupPolicy.AFFINITY))
    assert spec.with_peers(others, "a").key != spec.with_peers(others, "b").key != spec.key


# --- Weights as Nova combines them.


class Given:
    """Weighs hosts by what it was given."""

    name: ClassVar[str] = "given"
    multiplier: ClassVar[float] = 1.0
    sign: ClassVar[float] = 1.0
    minimum: ClassVar[float | None] = None
    maximum: ClassVar[float | None] = None

    def __init__(self, *raw: float) -> None:
        self.raw = raw

    def weigh(self, view: HostsView, spec: RequestSpec) -> Floats:
        """As given."""
        return np.array(self.raw, dtype=np.float64)


class Bounded(Given):
    """With bounds of its own."""

    minimum: ClassVar[float | None] = 0.0
    maximum: ClassVar[float | None] = 10.0


def scores(weigher: Weigher, multiplier: float = 1.0, hosts: Hosts | None = None) -> list[float]:
    raw = getattr(weigher, "raw", ())
    hosts = hosts or Hosts([PLENTY] * len(raw))
    return score(hosts.view(), hosts.spec(), [Weighing(weigher, multiplier)])[0].tolist()


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ((1.0, 3.0, 2.0), [0.0, 1.0, 0.5]),
        ((5.0, 5.0, 5.0), [0.0, 0.0, 0.0]),  # all alike: 0, not 1
        ((-4.0, 0.0), [0.0, 1.0]),
        ((7.0,), [0.0]),  # one host is never weighed
    ],
)
def test_normalised_between_smallest_and_largest(raw: tuple[float, ...], expected: list[float]) -> None:
    assert scores(Given(*raw)) == expected


def test_clamped_to_the_weighers_bounds_before_scaling() -> None:
    assert scores(Bounded(-5.0, 5.0, 50.0)) == [0.0, 0.5, 1.0]


def test_a_negative_multiplier_packs() -> None:
    hosts = Hosts([{**PLENTY, "MEMORY_MB": 10_000}, {**PLENTY, "MEMORY_MB": 20_000}])
    assert scores(RAMWeigher(), 1.0, hosts) == [0.5, 1.0]
    assert scores(RAMWeigher(), -2.0, hosts) == [-1.0, -2.0]


def test_free_disk_is_preferred() -> None:
    hosts = Hosts([{**PLENTY, "DISK_GB": 100}, {**PLENTY, "DISK_GB": 400}])
    hosts.book.assume("one", {hosts.uuids[1]: {"DISK_GB": 200}})
    assert scores(DiskWeigher(), 1.0, hosts) == [0.5, 1.0]


def test_ram_alone_does_not_pack_and_the_multipliers_of_the_readme_do() -> None:
    """Weights are added up, as in Nova: two weighers that spread outvote one that packs."""
    used = {"MEMORY_MB": 4096, "VCPU": 2, "DISK_GB": 80}
    readme = (Path(scheduler_worker.__file__).parent / "README.md").read_text()
    found = re.search(r"packed by `(multipliers = .*?)`", readme)
    assert found is not None
    packing = SchedulerConfig(**tomllib.loads(found[1]))
    for config, first in ((SchedulerConfig(multipliers={"ram": -1.0}), "h1"), (packing, "h0")):
        hosts = Hosts([PLENTY, PLENTY], config=config)
        hosts.book.assume("one", {hosts.uuids[0]: used})
        choice = hosts.selector.rank(hosts.spec(), hosts.rng).pick({}, subset=1, alternates=0)
        assert choice is not None and hosts.name(choice.selected.row) == first


def test_claims_in_flight_count_and_over_full_hosts_clamp_at_zero() -> None:
    hosts = Hosts([{**PLENTY, "VCPU": 8}, {**PLENTY, "VCPU": 8}])
    hosts.book.assume("one", {hosts.uuids[0]: {"VCPU": 6}})
    assert scores(CPUWeigher(), 1.0, hosts) == [0.25, 1.0]
    hosts.book.assume("two", {hosts.uuids[0]: {"VCPU": 6}})
    assert scores(CPUWeigher(), 1.0, hosts) == [0.0, 1.0]


def test_sick_hosts_sink_below_all_others() -> None:
    hosts = Hosts([{**PLENTY, "MEMORY_MB": 10**6}, PLENTY, PLENTY], reports={0: {"failed_builds": 1}})
    ranking = hosts.selector.rank(hosts.spec(), hosts.rng)
    choice = ranking.pick({}, subset=1, alternates=2)
    assert choice is not None
    order = [hosts.name(c.row) for c in (choice.selected, *choice.alternates)]
    assert order[2] == "h0" and choice.alternates[1].score < -999_000


def test_the_smallest_aggregate_multiplier_wins_and_an_unreadable_one_falls_back() -> None:
    low, high = aggregate("low", given_weight_multiplier="2"), aggregate("high", given_weight_multiplier="5")
    bad = aggregate("bad", given_weight_multiplier="much")
    nan = aggregate("nan", given_weight_multiplier="nan")
    config = SchedulerConfig(aggregates=(low, high, bad, nan))
    members = {low.uuid: [0, 1], high.uuid: [1, 2], bad.uuid: [3], nan.uuid: [4]}
    hosts = Hosts([PLENTY] * 6, config=config, members=members)
    assert scores(Given(1.0, 1.0, 1.0, 1.0, 1.0, 0.0), 3.0, hosts) == [2.0, 2.0, 5.0, 3.0, 3.0, 0.0]


def test_the_build_failure_multiplier_of_an_aggregate_is_written_as_a_positive_number() -> None:
    shy = aggregate("shy", build_failure_weight_multiplier="10")
    hosts = Hosts(
        [PLENTY] * 3,
        config=SchedulerConfig(aggregates=(shy,)),
        members={shy.uuid: [0]},
        reports={0: {"failed_builds": 4}, 1: {"failed_builds": 4}},
    )
    assert scores(BuildFailureWeigher(), 1_000_000.0, hosts) == [-10.0, -1_000_000.0, 0.0]


def test_a_later_score_is_on_the_same_scales() -> None:
    hosts = Hosts([{**PLENTY, "VCPU": 10}, {**PLENTY, "VCPU": 20}, {**PLENTY, "VCPU": 15}])
    view, spec = hosts.view(), hosts.spec()
    before, scales = score(view, spec, [Weighing(CPUWeigher(), 1.0)])
    ((_, again),) = reweigh(view, spec, scales)
    assert again is not None and again.tolist() == before.tolist() == [0.5, 1.0, 0.75]
    hosts.book.assume("one", {hosts.uuids[1]: {"VCPU": 10}})
    ((_, later),) = reweigh(view.subset(np.array([1])), spec, scales)
    assert later is not None and later.tolist() == [0.5]


@pytest.mark.parametrize("kept", [20_000, 1])
def test_a_choice_keeps_what_each_weigher_gave_its_host_and_the_runners_up(
    monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """Why here, answered like why nowhere; as it was at this choice, the ones just before counted."""
    monkeypatch.setattr("scheduler_worker.domain.plugins.KEPT_HOSTS", kept)
    monkeypatch.setattr("scheduler_worker.domain.ranking.KEPT_HOSTS", kept)
    hosts = Hosts([PLENTY] * 3)
    hosts.book.assume("one", {hosts.uuids[0]: {"VCPU": 4}})
    hosts.book.assume("two", {hosts.uuids[1]: {"VCPU": 8}})
    ranking = hosts.selector.rank(hosts.spec(), hosts.rng)
    choice = ranking.pick({}, subset=1, alternates=2)
    assert choice is not None
    order = [choice.selected, *choice.alternates]
    assert [hosts.name(host.row) for host in order] == ["h2", "h0", "h1"]
    assert [weights["cpu"] for weights in choice.weights] == [1.0, 0.75, 0.5]
    assert {name for weights in choice.weights for name in weights} == {"ram", "cpu", "disk"}, "nothing of idle ones"
    assert [host.score for host in order] == pytest.approx([sum(weights.values()) for weights in choice.weights])
    hosts.book.assume("three", {hosts.uuids[2]: {"VCPU": 12}})
    ranking.consumed(choice.selected)
    again = ranking.pick({}, subset=1, alternates=2)
    assert again is not None and hosts.name(again.alternates[1].row) == "h2"
    assert again.weights[2]["cpu"] == 0.25
