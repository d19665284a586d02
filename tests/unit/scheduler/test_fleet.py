"""The fleet added up: hosts by state, capacity and use by class, cell and zone; and what is exported of it."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import pytest
from prometheus_client.core import Metric

from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.cell import ServiceDown, ServicesDigest
from bus.contracts.placement import ProviderState
from scheduler_worker import metrics
from scheduler_worker.config import Aggregate, SchedulerConfig
from scheduler_worker.metrics import HELD_S, ClassTotal, FleetCollector, HostCount, summarize
from tests.unit.scheduler.hosts import Hosts

EAST = "00000000-0000-4000-8000-00000000000e"
ZONED = SchedulerConfig(aggregates=(Aggregate(uuid=EAST, name="east", metadata={"availability_zone": "east"}),))


def unannounced(**amounts: int) -> ProviderState:
    """A root provider that no compute service has announced."""
    uuid = "00000000-0000-4000-8000-0000000000aa"
    inventories = {name: (total, 1, total, 1, total, 0, 1.0) for name, total in amounts.items()}
    return ProviderState(uuid=uuid, name="more", root_uuid=uuid, generation=1, shape=1, inventories=inventories)


def test_hosts_are_counted_by_state_and_classes_added_up() -> None:
    """h0 takes builds, h1 is disabled, h2's service is silent, h3 is in a zone, h4 was announced by no service."""
    hosts = Hosts(
        [{"VCPU": 4}, {"VCPU": 8}, {"VCPU": 16}, {"VCPU": 32}],
        config=ZONED,
        cells=["c1", "c1", "c2", "c1"],
        members={EAST: [3]},
        reports={1: {"enabled": False}},
    )
    hosts.table.apply(
        ServicesDigest(
            cell="c2", term=1, number=1, down=(ServiceDown(service="compute-c2", epoch=1, code="service.silent"),)
        ),
        1.0,
    )
    hosts.book.add([unannounced(VCPU=64)])
    hosts.book.assume("in-flight", {hosts.uuids[0]: {"VCPU": 3}})
    summary = summarize(hosts.selector.all_hosts(), "nova")
    assert summary.hosts == (
        HostCount("", "nova", "unannounced", 1),
        HostCount("c1", "east", "up", 1),
        HostCount("c1", "nova", "up", 1),
        HostCount("c1", "nova", "disabled", 1),
        HostCount("c2", "nova", "silent", 1),
    )
    assert [total for total in summary.totals if total.resource_class == "VCPU"] == [
        ClassTotal("VCPU", "", "nova", 64, 0, 0),
        ClassTotal("VCPU", "c1", "east", 32, 32, 0),
        ClassTotal("VCPU", "c1", "nova", 12, 4, 3),
        ClassTotal("VCPU", "c2", "nova", 16, 0, 0),
    ]


def test_an_empty_fleet_has_no_figures() -> None:
    summary = summarize(Hosts([]).selector.all_hosts(), "nova")
    assert (summary.hosts, summary.totals) == ((), ())


def test_sums_are_exact_beyond_what_a_float_holds() -> None:
    hosts = Hosts([{"VCPU": 2**31 - 1}] * 3)
    (total,) = summarize(hosts.selector.all_hosts(), "nova").totals
    assert total.capacity == 3 * (2**31 - 1)


def _samples(collected: Iterable[Metric]) -> dict[tuple[str, ...], float]:
    return {(s.name, *s.labels.values()): s.value for family in collected for s in family.samples}


def test_the_collector_exports_what_a_scheduler_sees_while_it_is_open() -> None:
    hosts = Hosts([{"VCPU": 4}, {"VCPU": 4}])
    collector = FleetCollector()
    assert _samples(collector.collect()) == {}
    collector.add(hosts.selector)
    assert _samples(collector.collect()) == {
        ("berth_fleet_hosts", "c1", "nova", "up"): 2,
        ("berth_fleet_capacity", "VCPU", "c1", "nova"): 8,
        ("berth_fleet_usable", "VCPU", "c1", "nova"): 8,
        ("berth_fleet_used", "VCPU", "c1", "nova"): 0,
    }
    collector.remove(hosts.selector)
    assert _samples(collector.collect()) == {}


def test_a_summary_is_used_again_for_a_moment_and_then_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: now_s))
    hosts = Hosts([{"VCPU": 4}])
    collector = FleetCollector()
    collector.add(hosts.selector)
    collector.collect()
    before = collector._summary
    hosts.book.add([unannounced()])
    collector.collect()
    assert collector._summary is before
    now_s += 2 * HELD_S
    assert ("berth_fleet_hosts", "", "nova", "unannounced") in _samples(collector.collect())


def test_builds_are_counted_when_they_end_and_codes_are_bounded() -> None:
    """Codes come from drivers too: a counter child for each text that a driver invents would never be freed."""

    def ended(code: str, *, terminal: bool = True) -> BuildEvent:
        return BuildEvent(
            instance_uuid="00000000-0000-4000-8000-000000000001",
            project_id="p",
            state=BuildState.FAILED,
            sequence=1,
            terminal=terminal,
            code=code,
        )

    def value(code: str) -> float:
        return metrics.BUILDS.labels("failed", code)._value.get()

    before, other = value("test.first"), value(metrics.OTHER)
    metrics.count_ended([ended("test.first"), ended("test.first", terminal=False)])
    assert value("test.first") == before + 1
    metrics.count_ended([ended(f"test.invented.{number}") for number in range(metrics.MAX_CODES + 10)])
    assert value(metrics.OTHER) >= other + 10
    assert len(metrics._codes) == metrics.MAX_CODES
