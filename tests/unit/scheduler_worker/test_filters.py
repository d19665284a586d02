"""Filters and extra specs against Nova's rules, those that are enabled by name too."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, ClassVar

import pytest
from msgspec.structs import replace

from bus.contracts.cell import HostReport, HostStates, ServiceDown, ServiceStates
from scheduler_worker import filters, plugins, weighers
from scheduler_worker.config import (
    DEFAULT_FILTERS,
    DEFAULT_WEIGHERS,
    HOST_FACT_FILTERS,
    MORE_FILTERS,
    NOVA_WEIGHERS,
    Flavor,
    SchedulerConfig,
)
from scheduler_worker.filters.extra_specs import (
    AggregateInstanceExtraSpecsFilter,
    AggregateTypeAffinityFilter,
    ComputeCapabilitiesFilter,
)
from scheduler_worker.filters.host_state import ComputeFilter
from scheduler_worker.filters.image import AggregateImagePropertiesIsolation, ImagePropertiesFilter, supports
from scheduler_worker.filters.project import AggregateMultiTenancyIsolation, ProjectHostFilter
from scheduler_worker.hosts.host_table import HostTable
from scheduler_worker.selection.explain import message_of
from scheduler_worker.selection.host_view import HostView, Membership
from scheduler_worker.selection.plugin import HostFilter, applies_to
from scheduler_worker.selection.request_spec import RequestSpec, Unsatisfiable
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts, aggregate

# --- Filters and extra specs against Nova's rules.


def test_compute_filter_wants_enabled_and_a_service_that_is_there() -> None:
    hosts = Hosts([PLENTY] * 3, cells=["c1", "c1", "c2"], reports={0: {"enabled": False}})
    spec = hosts.spec()
    result = ComputeFilter().filter(hosts.view(), spec)
    assert result.passed.tolist() == [False, True, True] and result.rejected == {"host.disabled": 1}
    down = (ServiceDown(service="compute-c1", epoch=1, code="service.silent"),)
    hosts.table.apply(ServiceStates(cell="c1", term=1, number=1, down=down), 50.0)
    result = ComputeFilter().filter(hosts.view(), spec)
    assert result.passed.tolist() == [False, False, True]
    assert result.rejected == {"host.disabled": 1, "service.down": 1}
    hosts.table.apply(ServiceStates(cell="c1", term=1, number=2), 51.0)
    assert ComputeFilter().filter(hosts.view(), spec).passed.tolist() == [False, True, True]


def test_old_reports_lose_and_a_host_moves_between_services() -> None:
    table = HostTable()
    uuid = "00000000-0000-4000-8000-000000000001"
    host = (HostReport(uuid=uuid, name="n1"),)
    off = (HostReport(uuid=uuid, name="n1", enabled=False),)
    assert table.apply(HostStates(service="a", cell="c1", epoch=2, sequence=5, hosts=host, complete=True), 1.0)
    assert not table.apply(HostStates(service="a", cell="c1", epoch=2, sequence=5, hosts=off), 2.0)
    assert not table.apply(HostStates(service="a", cell="c1", epoch=1, sequence=9, hosts=off), 2.0)
    assert table.enabled[0]
    assert table.apply(HostStates(service="b", cell="c1", epoch=1, sequence=1, hosts=host), 2.0)
    assert table.services.states[table.service[0]].name == "a", "it lists the host, and is up"
    assert table.apply(HostStates(service="a", cell="c1", epoch=2, sequence=6, complete=True), 3.0)
    assert table.service[0] == -1
    assert table.apply(HostStates(service="b", cell="c1", epoch=1, sequence=2, hosts=host), 3.0)
    assert table.services.states[table.service[0]].name == "b"
    # A host that b no longer lists has no service; a's own full list without it does not take it from b.
    assert table.apply(HostStates(service="a", cell="c1", epoch=2, sequence=7, complete=True), 3.0)
    assert table.services.states[table.service[0]].name == "b"
    assert table.apply(HostStates(service="b", cell="c1", epoch=1, sequence=3, complete=True), 3.0)
    assert table.service[0] == -1 and table.find("n1") == [uuid]


def test_tenant_isolation() -> None:
    mine = aggregate("mine", filter_tenant_id="demo, other")
    second = aggregate("second", filter_tenant_id_2="third")
    config = SchedulerConfig(aggregates=(mine, second))
    hosts = Hosts([PLENTY] * 4, config=config, members={mine.uuid: [0], second.uuid: [1, 2], "x": [3]})
    host_filter = AggregateMultiTenancyIsolation().filter
    assert host_filter(hosts.view(), hosts.spec(project_id="demo")).passed.tolist() == [True, False, False, True]
    assert host_filter(hosts.view(), hosts.spec(project_id="third")).passed.tolist() == [False, True, True, True]
    no_project = host_filter(hosts.view(), hosts.spec(project_id="nobody"))
    assert no_project.passed.tolist() == [False, False, False, True] and no_project.rejected == {
        "tenant.not_allowed": 3
    }


def test_a_host_that_belongs_to_a_project_takes_builds_of_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def passed(hosts: Hosts, project: str) -> list[bool]:
        result = ProjectHostFilter().filter(hosts.view(), hosts.spec(project_id=project))
        assert sum(result.rejected.values()) == result.passed.tolist().count(False)
        assert set(result.rejected) <= {"host.of_another_project"}
        return [bool(one) for one in result.passed]

    assert passed(Hosts([PLENTY] * 2), "red") == [True, True]
    reports = {0: {"attributes": {"project_id": "red"}}, 1: {"attributes": {"project_id": "blue"}}}
    hosts = Hosts([PLENTY] * 3, reports=reports)
    assert passed(hosts, "red") == [True, False, True]
    assert passed(hosts, "blue") == [False, True, True]
    assert passed(hosts, "green") == [False, False, True]
    hosts.announce(["c1"] * 3, {}, sequence=2)  # the lease is over
    assert passed(hosts, "green") == [True, True, True]
    monkeypatch.setattr("scheduler_worker.hosts.host_table.MAX_PROJECTS", 1)
    few = Hosts([PLENTY] * 3, reports=reports)
    assert passed(few, "red") == [True, False, True] and passed(few, "blue") == [False, False, True], "safe, not open"


def test_capabilities() -> None:
    flavor = Flavor(
        vcpus=1,
        extra_specs={
            "capabilities:cpu_arch": "s== x86_64",
            "gpus": "= 2",
            "aggregate_instance_extra_specs:ssd": "true",  # another filter's
            "hw:cpu_policy": "dedicated",  # another scope
        },
    )
    config = SchedulerConfig(flavors={"f": flavor})
    hosts = Hosts(
        [PLENTY] * 4,
        config=config,
        reports={
            0: {"attributes": {"cpu_arch": "x86_64", "gpus": "4"}},
            1: {"attributes": {"cpu_arch": "x86_64", "gpus": "1"}},
            2: {"attributes": {"cpu_arch": "arm", "gpus": "4"}},
        },
    )
    result = ComputeCapabilitiesFilter().filter(hosts.view(), hosts.spec("f"))
    assert result.passed.tolist() == [True, False, False, False]
    assert result.rejected == {"capability.cpu_arch": 2, "capability.gpus": 1}


def test_an_extra_spec_without_a_scope_concerns_hosts_that_have_the_attribute() -> None:
    """As in Nova. `hide_hypervisor_id=true` of a flavor from a Nova cloud is no attribute of any host."""
    flavor = Flavor(vcpus=1, extra_specs={"hide_hypervisor_id": "true", "ssd": "true"})
    hosts = Hosts(
        [PLENTY] * 3,
        config=SchedulerConfig(flavors={"f": flavor}),
        reports={0: {"attributes": {"ssd": "true"}}, 1: {"attributes": {"ssd": "false"}}},
    )
    result = ComputeCapabilitiesFilter().filter(hosts.view(), hosts.spec("f"))
    assert result.passed.tolist() == [True, False, True]
    assert result.rejected == {"capability.ssd": 1}


class OnlyEven(HostFilter):
    """An operator's own."""

    name: ClassVar[str] = "OnlyEven"

    def rejection_reason(self, host: HostView, spec: RequestSpec) -> str | None:
        """By name."""
        assert host.free("VCPU") == 16 and host.cell == "c1" and host.up
        return None if int(host.name[1:]) % 2 == 0 else "odd"


def test_a_host_is_in_the_aggregates_whose_hosts_are_named() -> None:
    ours, theirs = aggregate("ours"), aggregate("theirs")
    hosts = Hosts([PLENTY] * 2, config=SchedulerConfig(aggregates=(ours, theirs)), members={theirs.uuid: [0, 1]})
    named = {ours.uuid: {hosts.uuids[1]}, theirs.uuid: {hosts.uuids[0]}}
    view = replace(hosts.view(), membership=Membership((ours, theirs), named))
    for position, expected in ((0, (theirs,)), (1, (ours,))):
        assert view.host(position).aggregates == expected
        assert [bool(view.member_of(one.uuid)[position]) for one in (ours, theirs)] == [
            one in expected for one in (ours, theirs)
        ]


def test_an_operators_filter_is_loaded_by_class_path_and_counts_in_the_funnel() -> None:
    path = f"{__name__}.OnlyEven"
    config = SchedulerConfig(available_filters=(path,), enabled_filters=("ComputeFilter", "OnlyEven"))
    import sys  # noqa: PLC0415

    sys.modules.setdefault(__name__, sys.modules[OnlyEven.__module__])
    hosts = Hosts([PLENTY] * 5, config=config)
    ranking = hosts.selector.rank(hosts.spec(), hosts.rng)
    assert len(ranking) == 3
    assert ranking.funnel[-1].step == "OnlyEven" and ranking.funnel[-1].rejected == {"odd": 2}


@pytest.mark.parametrize("enabled", ["NoSuchFilter", "os.path.join", "scheduler_worker.filters.nothing.Nothing"])
def test_an_unknown_filter_fails_the_start(enabled: str) -> None:
    with pytest.raises(plugins.PluginInvalid):
        plugins.filters(SchedulerConfig(enabled_filters=(*DEFAULT_FILTERS, enabled)))
    with pytest.raises(plugins.PluginInvalid, match="PYTHONPATH"):
        plugins.filters(SchedulerConfig(available_filters=("no.such.module.Filter",), enabled_filters=("Filter",)))


@pytest.mark.parametrize("enabled", ["RAMWeigher", "scheduler_worker.weighers.free_amounts.RAMWeigher"])
def test_a_weigher_is_enabled_by_class_name_or_class_path(enabled: str) -> None:
    (weighing,) = plugins.weighings(SchedulerConfig(enabled_weighers=(enabled,)))
    assert weighing.weigher.name == "ram"


@pytest.mark.parametrize("package", [filters, weighers], ids=["filters", "weighers"])
def test_every_filter_and_weigher_of_ours_can_be_enabled_by_its_name(package: ModuleType) -> None:
    listed = {*DEFAULT_FILTERS, *MORE_FILTERS, *HOST_FACT_FILTERS, *DEFAULT_WEIGHERS, *NOVA_WEIGHERS}
    modules = [f"{package.__name__}.{one.name}" for one in iter_modules(package.__path__)]
    made = {
        f"{name}.{kind.__name__}"
        for name in modules
        for kind in vars(import_module(name)).values()
        if isinstance(kind, type) and kind.__module__ == name and "name" in vars(kind)
    }
    assert {path.rpartition(".")[0] for path in made} == set(modules), "a module without a class that has a name"
    assert sorted(made - listed) == [], "its class path goes to scheduler_worker/config.py"


# --- Filters that are enabled by name, against Nova's rules.


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
    result = host_filter.filter(hosts.view(), hosts.spec("f"))
    # One of several values is enough (host 3 is in two aggregates); a host without the key (4) falls.
    assert result.passed.tolist() == [True, False, True, True, False]
    assert result.rejected == {"aggregate.ssd": 2}
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
    ("reported", "requested", "batching"),
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
def test_what_an_image_is_made_for(reported: str | None, requested: list[str], batching: bool) -> None:
    assert supports(reported, requested) is batching


def test_images_run_where_they_can() -> None:
    intel, arm = {"supported_instances": "x86_64/kvm/hvm"}, {"supported_instances": "aarch64/kvm/hvm"}
    hosts = Hosts([PLENTY] * 3, reports={0: {"attributes": intel}, 1: {"attributes": arm}})
    host_filter = ImagePropertiesFilter()
    requested = hosts.spec(image_properties={"hw_architecture": "AARCH64", "os_type": "linux"})
    result = host_filter.filter(hosts.view(), requested)
    assert result.passed.tolist() == [False, True, False]
    assert result.rejected == {"image.not_supported": 2}
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
    text = message_of(spec, hosts.selector.explain(spec, {}).funnel, 3)
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
