"""Isolation by aggregates where several aggregates, properties or traits meet: a rule that knows one would err."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_worker.config import Aggregate, Flavor, SchedulerConfig
from scheduler_worker.domain.request_spec import Unsatisfiable
from scheduler_worker.filters.aggregate_has_extra_specs import AggregateInstanceExtraSpecsFilter
from scheduler_worker.filters.flavor_is_listed import AggregateTypeAffinityFilter
from scheduler_worker.filters.image import AggregateImagePropertiesIsolation, ImagePropertiesFilter
from tests.unit.scheduler.hosts import PLENTY, Hosts, aggregate


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


def test_an_isolated_aggregate_requires_each_of_its_traits() -> None:
    both = {**LICENSED, "trait:CUSTOM_FAST": "required"}
    assert keeps({"root_required": "CUSTOM_WINDOWS"}, both)
    assert not keeps({"root_required": "CUSTOM_WINDOWS,CUSTOM_FAST"}, both)


def test_an_isolated_aggregate_and_the_default_zone_both_keep_their_hosts() -> None:
    assert passing(isolated({}, LICENSED), flavor="f", availability_zone="nova") == ["h2"]


@pytest.mark.parametrize(
    ("extra_specs", "properties", "required", "forbidden"),
    [
        ({}, {"trait:HW_CPU_X86_SGX": "required"}, (("HW_CPU_X86_SGX",),), ()),
        ({"trait:CUSTOM_A": "required"}, {"trait:CUSTOM_B": "required"}, (("CUSTOM_A",), ("CUSTOM_B",)), ()),
        ({"trait:CUSTOM_A": "required"}, {"trait:CUSTOM_A": "required"}, (("CUSTOM_A",),), ()),
        ({}, {"trait:CUSTOM_A": "forbidden", "os_type": "linux"}, (), ("CUSTOM_A",)),
    ],
)
def test_the_traits_of_an_image_count_as_a_flavors_do(
    extra_specs: dict[str, str], properties: dict[str, str], required: tuple[Any, ...], forbidden: tuple[str, ...]
) -> None:
    """As in Nova. They were ignored without a word."""
    hosts = Hosts([PLENTY], config=SchedulerConfig(flavors={"f": Flavor(vcpus=1, extra_specs=extra_specs)}))
    spec = hosts.spec("f", image_properties=properties)
    assert (spec.query.required, spec.query.forbidden) == (required, forbidden)
    assert spec.key != hosts.spec("f").key or not required or extra_specs == properties


def test_the_traits_of_an_image_are_the_roots_where_only_groups_have_resources() -> None:
    flavor = Flavor(vcpus=0, memory_mb=0, extra_specs={"resources1:VF": "1"})
    hosts = Hosts([PLENTY], config=SchedulerConfig(flavors={"f": flavor}))
    spec = hosts.spec("f", image_properties={"trait:CUSTOM_A": "required"})
    assert spec.query.root_required == (("CUSTOM_A",),)


def test_an_image_requires_the_trait_of_an_isolated_aggregate() -> None:
    spec = isolated({}, LICENSED).spec("f", image_properties=LICENSED)
    assert spec.query.root_forbidden_aggregates == ()


@pytest.mark.parametrize(
    ("extra_specs", "properties"),
    [({}, {"trait:CUSTOM_A": "perhaps"}), ({"trait:CUSTOM_A": "forbidden"}, {"trait:CUSTOM_A": "required"})],
)
def test_traits_of_an_image_that_can_never_be_right_end_the_build(
    extra_specs: dict[str, str], properties: dict[str, str]
) -> None:
    hosts = Hosts([PLENTY], config=SchedulerConfig(flavors={"f": Flavor(vcpus=1, extra_specs=extra_specs)}))
    found = hosts.selector.request_spec(hosts.request("f", image_properties=properties))
    assert isinstance(found, Unsatisfiable) and found.code == "image.traits"
