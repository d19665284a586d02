"""Filters that are enabled by name, against Nova's rules."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scheduler_worker import filters, plugins, weighers
from scheduler_worker.config import DEFAULT_FILTERS, Flavor, SchedulerConfig
from scheduler_worker.domain.explain import sentence
from scheduler_worker.domain.plugins import HostFilter, applies_to
from scheduler_worker.domain.request_spec import Unsatisfiable
from scheduler_worker.filters.aggregate_has_extra_specs import AggregateInstanceExtraSpecsFilter
from scheduler_worker.filters.flavor_is_listed import AggregateTypeAffinityFilter
from scheduler_worker.filters.image import AggregateImagePropertiesIsolation, ImagePropertiesFilter, supports
from tests.unit.scheduler.hosts import PLENTY, Hosts, aggregate


def test_aggregates_hold_what_extra_specs_require() -> None:
    fast, slow, both = aggregate("fast", ssd="true"), aggregate("slow", ssd="false"), aggregate("both", ssd="no, true")
    flavor = Flavor(
        vcpus=1,
        extra_specs={
            "aggregate_instance_extra_specs:ssd": "true",
            "capabilities:arch": "x",  # another filter's
        },
    )
    config = SchedulerConfig(flavors={"f": flavor, "plain": Flavor(vcpus=1)}, aggregates=(fast, slow, both))
    members = {fast.uuid: [0, 3], slow.uuid: [1, 3], both.uuid: [2]}
    hosts = Hosts([PLENTY] * 5, config=config, members=members)
    host_filter = AggregateInstanceExtraSpecsFilter()
    verdict = host_filter.filter(hosts.view(), hosts.spec("f"))
    # One of several values is enough (host 3 is in two aggregates); a host without the key (4) falls.
    assert verdict.passed.tolist() == [True, False, True, True, False]
    assert verdict.rejected == {"aggregate.ssd": 2}
    assert not applies_to(host_filter, hosts.spec("plain"))


def test_an_unscoped_extra_spec_with_an_operator_is_the_aggregates_too() -> None:
    rack = aggregate("rack", disks="4")
    flavors = {
        "four": Flavor(vcpus=1, extra_specs={"disks": ">= 4"}),
        "five": Flavor(vcpus=1, extra_specs={"disks": ">= 5"}),
    }
    hosts = Hosts([PLENTY] * 2, config=SchedulerConfig(flavors=flavors, aggregates=(rack,)), members={rack.uuid: [1]})
    host_filter = AggregateInstanceExtraSpecsFilter()
    assert host_filter.filter(hosts.view(), hosts.spec("four")).passed.tolist() == [False, True]
    assert host_filter.filter(hosts.view(), hosts.spec("five")).passed.tolist() == [False, False]


def test_an_aggregate_lists_the_flavors_that_it_takes() -> None:
    small, large = aggregate("small", instance_type="m1.tiny, m1.small"), aggregate("large", instance_type="m1.large")
    config = SchedulerConfig(aggregates=(small, large))
    hosts = Hosts([PLENTY] * 4, config=config, members={small.uuid: [0, 2], large.uuid: [1, 2]})
    host_filter = AggregateTypeAffinityFilter().filter
    assert host_filter(hosts.view(), hosts.spec("m1.small")).passed.tolist() == [True, False, True, True]
    assert host_filter(hosts.view(), hosts.spec("m1.large")).passed.tolist() == [False, True, True, True]
    no_group = host_filter(hosts.view(), hosts.spec("m1.medium"))
    assert no_group.passed.tolist() == [False, False, False, True]
    assert no_group.rejected == {"flavor.not_listed": 3}


@pytest.mark.parametrize(
    ("announced", "requested", "runs"),
    [
        ("x86_64/kvm/hvm", ["x86_64", "", ""], True),
        ("x86_64/kvm/hvm", ["aarch64", "", ""], False),
        ("x86_64/kvm/hvm, i686/kvm/hvm", ["i686", "kvm", "hvm"], True),
        ("x86_64/kvm/hvm, i686/xen/xen", ["i686", "kvm", ""], False),  # no one triple has both
        ("X86_64/KVM/HVM", ["x86_64", "", "hvm"], True),
        ("x86_64", ["x86_64", "", ""], False),  # no triple
        ("", ["x86_64", "", ""], False),
        (None, ["x86_64", "", ""], False),
    ],
)
def test_what_an_image_is_made_for(announced: str | None, requested: list[str], runs: bool) -> None:
    assert supports(announced, requested) is runs


def test_images_run_where_they_can() -> None:
    intel, arm = {"supported_instances": "x86_64/kvm/hvm"}, {"supported_instances": "aarch64/kvm/hvm"}
    hosts = Hosts([PLENTY] * 3, reports={0: {"attributes": intel}, 1: {"attributes": arm}})
    host_filter = ImagePropertiesFilter()
    requested = hosts.spec(image_properties={"hw_architecture": "AARCH64", "os_type": "linux"})
    verdict = host_filter.filter(hosts.view(), requested)
    assert verdict.passed.tolist() == [False, True, False]
    assert verdict.rejected == {"image.not_supported": 2}
    assert not applies_to(host_filter, hosts.spec(image_properties={"os_type": "linux"}))


def test_an_aggregate_is_kept_for_images_with_its_values() -> None:
    windows, any_os = aggregate("w", os_type="windows, reactos"), aggregate("n", rack="7")
    config = SchedulerConfig(aggregates=(windows, any_os))
    hosts = Hosts([PLENTY] * 3, config=config, members={windows.uuid: [0], any_os.uuid: [1]})
    host_filter = AggregateImagePropertiesIsolation()
    linux = host_filter.filter(hosts.view(), hosts.spec(image_properties={"os_type": "linux"}))
    assert linux.passed.tolist() == [False, True, True]
    assert linux.rejected == {"image.os_type": 1}
    assert host_filter.filter(hosts.view(), hosts.spec(image_properties={"os_type": "windows"})).passed.all()
    assert host_filter.filter(hosts.view(), hosts.spec(image_properties={"hw_architecture": "x"})).passed.all()
    assert not applies_to(host_filter, hosts.spec())


def test_they_are_enabled_by_name_and_explain_themselves() -> None:
    names = ("AggregateTypeAffinityFilter", "ImagePropertiesFilter", "AggregateImagePropertiesIsolation")
    config = SchedulerConfig(enabled_filters=(*DEFAULT_FILTERS, "AggregateInstanceExtraSpecsFilter", *names))
    assert [one.name for one in plugins.filters(config)][-4:] == ["AggregateInstanceExtraSpecsFilter", *names]
    hosts = Hosts([PLENTY] * 2, config=config)
    spec = hosts.spec(image_properties={"hw_architecture": "arm"})
    text = sentence(spec, hosts.selector.explain(spec, {}).funnel, 3)
    assert text.endswith(": 2 do not support the image's properties.")


def differ(hosts: Hosts, name: str) -> bool:
    """Whether requests of images that differ in this property are ranked apart."""
    return hosts.spec(image_properties={name: "b"}).key != hosts.spec(image_properties={name: "c"}).key


class AnyFilter(HostFilter):
    """An operator's."""


def test_images_that_differ_in_what_a_filter_reads_share_no_ranking() -> None:
    assert not differ(Hosts([PLENTY]), "a")
    aggregates = (aggregate("windows", os_type="b"),)
    config = SchedulerConfig(enabled_filters=("AggregateImagePropertiesIsolation",), aggregates=aggregates)
    isolated = Hosts([PLENTY], config=config)
    assert differ(isolated, "os_type") and not differ(isolated, "hw_architecture")
    supported = Hosts([PLENTY], config=SchedulerConfig(enabled_filters=("ImagePropertiesFilter",)))
    assert differ(supported, "hw_architecture") and not differ(supported, "os_type")
    assert differ(Hosts([PLENTY], filters=[AnyFilter()]), "a"), "a plug-in may read anything"


@pytest.mark.parametrize("package", [filters, weighers])
def test_each_filter_that_reads_images_names_the_properties(package: ModuleType) -> None:
    for path in Path(package.__path__[0]).glob("*.py"):
        source = path.read_text()
        assert "image_properties" not in source or "def reads_image_property" in source, path.name


def passing(hosts: Hosts, **request: Any) -> list[str]:
    ranking = hosts.selector.rank(hosts.spec(**request), hosts.rng)
    return sorted(hosts.name(row) for row in ranking.view.rows.tolist())


def test_a_forced_host_passes_the_filters_by_and_must_have_room_all_the_same() -> None:
    """No filter runs, the claim is made; and not every project may."""
    config = SchedulerConfig(force_host_projects=("operators",))
    hosts = Hosts([PLENTY, {**PLENTY, "VCPU": 1}], config=config, reports={at: {"enabled": False} for at in (0, 1)})
    assert passing(hosts, flavor="m1.medium", host="h0", project_id="operators") == []
    assert passing(hosts, flavor="m1.medium", host="h0", project_id="operators", forced=True) == ["h0"]
    assert passing(hosts, flavor="m1.medium", host="h1", project_id="operators", forced=True) == []
    for more in ({"host": "h0", "project_id": "demo"}, {"project_id": "operators"}):
        refused = hosts.selector.request_spec(hosts.request(forced=True, **more))
        assert isinstance(refused, Unsatisfiable)
        assert refused.code == "host.not_forced"


def test_isolated_aggregates_are_for_those_who_require_their_traits() -> None:
    """Each required trait of the metadata must be required by the flavor, of the host or of a group."""
    licensed = aggregate("licensed", **{"trait:CUSTOM_WINDOWS": "required", "trait:CUSTOM_FAST": "preferred"})
    flavors = {
        "plain": Flavor(vcpus=1),
        "windows": Flavor(vcpus=1, extra_specs={"root_required": "CUSTOM_WINDOWS"}),
        "other": Flavor(vcpus=1, extra_specs={"root_required": "CUSTOM_OTHER"}),
    }

    def forbidden(flavor: str, *, enabled: bool = True) -> tuple[str, ...]:
        config = SchedulerConfig(flavors=flavors, aggregates=(licensed,), enable_isolated_aggregate_filtering=enabled)
        hosts = Hosts([PLENTY] * 2, config=config, members={licensed.uuid: [0]})
        return hosts.spec(flavor).query.root_forbidden_aggregates

    assert forbidden("plain") == forbidden("other") == (licensed.uuid,)
    assert forbidden("windows") == forbidden("plain", enabled=False) == ()
    config = SchedulerConfig(flavors=flavors, aggregates=(licensed,), enable_isolated_aggregate_filtering=True)
    assert passing(Hosts([PLENTY] * 2, config=config, members={licensed.uuid: [0]}), flavor="plain") == ["h1"]
