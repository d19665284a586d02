"""Numbers about hosts, the fleet added up, the table of workers, and reasons in words."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterable, Mapping
from types import SimpleNamespace

import pytest
from prometheus_client.core import Metric

from bus.bus import API
from bus.clock import new_uuid
from bus.consuming.outcome import Done, Received
from bus.contracts.base import Meta
from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.cell import ServiceDown, ServiceStates
from bus.contracts.host_metrics import TEMPERATURE_CELSIUS, HostMetrics, HostMetricsQuery, HostReading
from bus.contracts.placement import ProviderState
from bus.contracts.workers import STOPPED, WorkerHeartbeat, WorkersQuery
from scheduler_worker import metrics as metrics_module
from scheduler_worker import plugins
from scheduler_worker.build import build_metrics
from scheduler_worker.config import Aggregate, MetricsConfig, SchedulerConfig
from scheduler_worker.fleet import fleet_metrics as metrics
from scheduler_worker.fleet.fleet_metrics import HELD_S, FleetCollector, summarize
from scheduler_worker.fleet.metrics_listener import HostMetricsListener, age, host_metrics_page
from scheduler_worker.hosts import worker_table
from scheduler_worker.hosts.host_metrics import MAX_METRICS, HostMetricsTable
from scheduler_worker.hosts.worker_table import WorkerTable
from tests.unit.ironic_sync.world import VirtualClock
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts

# --- Numbers about hosts: which are used, until when, and what they weigh.


NOW = 1_000_000.0
HOT = MetricsConfig(weights={TEMPERATURE_CELSIUS: -1.0})


def config(metrics: MetricsConfig = HOT, **more: object) -> SchedulerConfig:
    return SchedulerConfig(metrics=metrics, **more)  # type: ignore[arg-type]


def measured_fleet(count: int = 3, *, settings: SchedulerConfig | None = None, **more: object) -> Hosts:
    return Hosts([PLENTY] * count, config=settings or config(), **more)  # type: ignore[arg-type]


def put(
    hosts: Hosts,
    values: Mapping[int, float],
    *,
    name: str = TEMPERATURE_CELSIUS,
    at: float = NOW,
    now: float = NOW,
    now_s: float = 0.0,
    cell: str | None = None,
    source: str = "bmc",
) -> Mapping[str, int]:
    readings = tuple(HostReading(host_uuid=hosts.uuids[host], at=at, values={name: v}) for host, v in values.items())
    return hosts.selector.metrics.apply(HostMetrics(source=source, readings=readings), cell, now=now, now_s=now_s)


def known(hosts: Hosts, name: str = TEMPERATURE_CELSIUS) -> list[float | None]:
    return [None if math.isnan(value) else value for value in hosts.view().metric(name).tolist()]


def best(hosts: Hosts) -> list[str]:
    choice = hosts.selector.rank(hosts.spec(), hosts.rng).pick({}, subset=1, alternates=7)
    assert choice is not None
    return [hosts.name(ranked.row) for ranked in (choice.selected, *choice.alternates)]


def test_hosts_that_are_not_reported_and_names_without_end_take_no_room() -> None:
    hosts = measured_fleet(1)
    foreign = HostReading(host_uuid=new_uuid(random.Random(1)), at=NOW, values={"power.watts": 1.0})
    assert hosts.selector.metrics.apply(HostMetrics(source="bmc", readings=(foreign,)), None, now=NOW, now_s=0.0) == {
        "unknown_host": 1
    }
    outcomes = [put(hosts, {0: 1.0}, name=f"made.up{number}") for number in range(2 * MAX_METRICS)]
    assert sum("taken" in one for one in outcomes) == MAX_METRICS - 1
    assert put(hosts, {0: 40.0}) == {"taken": 1}  # what the settings name has its place


def test_two_metrics_are_added_by_their_ratios() -> None:
    weights = {TEMPERATURE_CELSIUS: -1.0, "power.watts": -0.1}
    hosts = measured_fleet(settings=config(MetricsConfig(weights=weights)))
    put(hosts, {0: 30.0, 1: 40.0, 2: 50.0})
    put(hosts, {0: 500.0, 1: 100.0, 2: 300.0}, name="power.watts")
    assert best(hosts)[0] == "h1"  # -50, and the others -80 each
    put(hosts, {0: 490.0}, name="power.watts", at=NOW + 1)
    assert best(hosts) == ["h1", "h0", "h2"]


def test_without_weights_nothing_is_weighed() -> None:
    hosts = measured_fleet(settings=SchedulerConfig(shuffle_best_same_weighed_hosts=False))
    put(hosts, {0: 70.0, 1: 30.0, 2: 50.0})
    assert best(hosts) == ["h0", "h1", "h2"]


def test_the_filter_excludes_hosts_whose_number_is_unknown_or_stale() -> None:
    settings = config(enabled_filters=("MetricsFilter",))
    hosts = measured_fleet(settings=settings)
    put(hosts, {0: 70.0, 1: 30.0})
    put(hosts, {1: 30.0}, at=NOW + 500, now=NOW + 500, now_s=500.0)
    hosts.selector.metrics.advance(900.0)
    assert best(hosts) == ["h1"]
    put(hosts, {1: 30.0}, at=NOW + 510, now=NOW + 510, now_s=900.0)
    hosts.selector.metrics.advance(10_000.0)
    funnel = hosts.selector.explain(hosts.spec(), {}).funnel
    assert funnel[-1].rejected == {"metrics.unavailable": 3}


def test_required_metrics_need_the_filter() -> None:
    required = MetricsConfig(weights={TEMPERATURE_CELSIUS: -1.0}, required=True)
    with pytest.raises(plugins.PluginInvalid, match="MetricsFilter"):
        plugins.filters(config(required))
    assert plugins.filters(config(required, enabled_filters=("MetricsFilter",)))


async def test_numbers_get_old_by_the_clock_and_a_query_shows_it() -> None:
    hosts, clock, first = measured_fleet(2), VirtualClock(), asyncio.Event()
    listener = HostMetricsListener(hosts.selector.metrics, API, clock=clock, first=first)
    reading = HostReading(host_uuid=hosts.uuids[0], at=clock.time(), values={TEMPERATURE_CELSIUS: 40.0})
    received = Received(HostMetrics(source="bmc", readings=(reading,)), Meta(id="1"), API, "scheduler.metrics.p")
    aging = asyncio.create_task(age(hosts.selector.metrics, first, clock))
    assert await listener([received]) == [Done()]
    for _ in range(3):
        await asyncio.sleep(0)
    (record,) = host_metrics_page(HostMetricsQuery(host="h0"), hosts.selector).hosts
    assert [(one.name, one.value, one.source, one.fresh) for one in record.metrics] == [
        (TEMPERATURE_CELSIUS, 40.0, "bmc", True)
    ]
    clock.now += 900.0
    clock.advance()
    for _ in range(3):
        await asyncio.sleep(0)
    assert known(hosts) == [None, None]
    (record,) = host_metrics_page(HostMetricsQuery(host="h0"), hosts.selector).hosts
    assert [one.fresh for one in record.metrics] == [False]
    assert host_metrics_page(HostMetricsQuery(host="h9"), hosts.selector).hosts == ()
    aging.cancel()


def test_sources_without_end_take_no_room() -> None:
    hosts = measured_fleet(1)
    table = HostMetricsTable(hosts.table, max_age_s=900.0)
    for number in range(1100):
        reading = HostReading(host_uuid=hosts.uuids[0], at=NOW + number / 100, values={"power.watts": 1.0})
        table.apply(HostMetrics(source=f"s{number}", readings=(reading,)), None, now=NOW, now_s=0.0)
    assert [one.source for one in table.of(0)] == ["other"]


# --- The fleet added up: hosts by state, capacity and use by class, cell and zone; and what is exported of it.


EAST = "00000000-0000-4000-8000-00000000000e"
ZONED = SchedulerConfig(aggregates=(Aggregate(uuid=EAST, name="east", metadata={"availability_zone": "east"}),))


def not_reported(**amounts: int) -> ProviderState:
    """A root provider that no compute service has reported."""
    uuid = "00000000-0000-4000-8000-0000000000aa"
    inventories = {name: (total, 1, total, 1, total, 0, 1.0) for name, total in amounts.items()}
    return ProviderState(
        uuid=uuid, name="more", root_uuid=uuid, generation=1, spec_generation=1, inventories=inventories
    )


def test_hosts_are_counted_by_state_and_classes_added_up() -> None:
    """h0 takes builds, h1 is disabled, h2's service is silent, h3 is in a zone, h4 was reported by no service."""
    hosts = Hosts(
        [{"VCPU": 4}, {"VCPU": 8}, {"VCPU": 16}, {"VCPU": 32}],
        config=ZONED,
        cells=["c1", "c1", "c2", "c1"],
        members={EAST: [3]},
        reports={1: {"enabled": False}},
    )
    hosts.table.apply(
        ServiceStates(
            cell="c2", term=1, number=1, down=(ServiceDown(service="compute-c2", epoch=1, code="service.silent"),)
        ),
        1.0,
    )
    hosts.replica.add([not_reported(VCPU=64)])
    hosts.replica.assume("in-flight", {hosts.uuids[0]: {"VCPU": 3}})
    summary = summarize(hosts.selector.all_hosts(), "nova")
    assert summary.hosts == [
        (("", "nova", "not_reported"), 1),
        (("c1", "east", "up"), 1),
        (("c1", "nova", "up"), 1),
        (("c1", "nova", "disabled"), 1),
        (("c2", "nova", "silent"), 1),
    ]
    vcpus = [
        (cell, zone, capacity, usable, used)
        for ((name, cell, zone), capacity), (_, usable), (_, used) in zip(*summary[1:], strict=True)
        if name == "VCPU"
    ]
    assert vcpus == [
        ("", "nova", 64, 0, 0),
        ("c1", "east", 32, 32, 0),
        ("c1", "nova", 12, 4, 3),
        ("c2", "nova", 16, 0, 0),
    ]


def _samples(collected: Iterable[Metric]) -> dict[tuple[str, ...], float]:
    return {(s.name, *s.labels.values()): s.value for family in collected for s in family.samples}


async def test_the_collector_exports_what_a_scheduler_sees_while_it_is_open() -> None:
    hosts = Hosts([{"VCPU": 4}, {"VCPU": 4}])
    collector = FleetCollector()
    assert _samples(collector.collect()) == {}
    await collector.add(hosts.selector)
    assert _samples(collector.collect()) == {
        ("berth_fleet_hosts", "c1", "nova", "up"): 2,
        ("berth_fleet_capacity", "VCPU", "c1", "nova"): 8,
        ("berth_fleet_usable", "VCPU", "c1", "nova"): 8,
        ("berth_fleet_used", "VCPU", "c1", "nova"): 0,
    }
    await collector.remove(hosts.selector)
    assert _samples(collector.collect()) == {}


async def test_a_summary_is_used_again_for_a_moment_and_then_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: now_s))
    hosts = Hosts([{"VCPU": 4}])
    collector = FleetCollector()
    await collector.add(hosts.selector)
    collector.collect()
    before = collector._summary
    hosts.replica.add([not_reported()])
    collector.collect()
    assert collector._summary is before
    now_s += 2 * HELD_S
    assert ("berth_fleet_hosts", "", "nova", "not_reported") in _samples(collector.collect())


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
        return metrics_module.BUILDS.labels("failed", code)._value.get()

    before, other = value("test.first"), value(build_metrics.OTHER)
    build_metrics.count_ended([ended("test.first"), ended("test.first", terminal=False)])
    assert value("test.first") == before + 1
    build_metrics.count_ended([ended(f"test.invented.{number}") for number in range(build_metrics.MAX_CODES + 10)])
    assert value(build_metrics.OTHER) >= other + 10
    assert len(build_metrics._codes) == build_metrics.MAX_CODES


# --- The table of workers: the newest heartbeat counts, silence is reported, what a bus makes up is bounded.


def heartbeat(worker: str = "s1", role: str = "scheduler", phase: str = "ready") -> WorkerHeartbeat:
    return WorkerHeartbeat(
        role=role, worker=worker, host="h", pid=1, version="1", started_at=1.0, phase=phase, every_s=5.0
    )


def test_each_worker_is_listed_once_by_its_newest_heartbeat_until_it_is_long_silent() -> None:
    table = WorkerTable()
    table.apply(heartbeat(phase="opening"), "api", 0.0)
    table.apply(heartbeat("c1", "compute"), "cell1", 1.0)
    table.apply(heartbeat(), "api", 5.0)
    page = table.page(WorkersQuery(), 15.5)
    assert [(one.heartbeat.worker, one.bus, one.heartbeat.phase) for one in page.workers] == [
        ("c1", "cell1", "ready"),
        ("s1", "api", "ready"),
    ]
    assert [(one.last_seen_s, one.silent) for one in page.workers] == [(14.5, False), (10.5, False)]
    assert [one.silent for one in table.page(WorkersQuery(), 17.0).workers] == [True, False]
    assert [one.bus for one in table.page(WorkersQuery(role="scheduler"), 17.0).workers] == ["api"]
    assert table.page(WorkersQuery(limit=1), 17.0).since_s == 17.0
    assert len(table.page(WorkersQuery(), 5.0 + worker_table.RETENTION_S).workers) == 1
    assert table.page(WorkersQuery(), 5.1 + worker_table.RETENTION_S).workers == ()


def test_workers_that_a_bus_makes_up_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_table, "MAX_WORKERS", 3)
    table = WorkerTable()
    for number in range(5):
        table.apply(heartbeat(f"w{number}"), "api", 0.0)
    assert len(table) == 3
    table.apply(heartbeat("w1", phase="draining"), "api", 1.0)
    assert "draining" in {one.heartbeat.phase for one in table.page(WorkersQuery(), 1.0).workers}
    table.apply(heartbeat("w9"), "api", 2.0 + worker_table.RETENTION_S)  # the silent ones make room
    assert [one.heartbeat.worker for one in table.page(WorkersQuery(), 2.0 + worker_table.RETENTION_S).workers] == [
        "w9"
    ]


def test_a_worker_that_has_stopped_is_no_longer_listed_and_one_that_restarts_is() -> None:
    table = WorkerTable()
    table.apply(heartbeat(), "api", 0.0)
    table.apply(heartbeat(), "cell1", 0.0)
    table.apply(heartbeat(phase=STOPPED), "api", 1.0)
    assert [one.bus for one in table.page(WorkersQuery(), 1.0).workers] == ["cell1"]
    table.apply(heartbeat(phase=STOPPED), "api", 2.0)  # a copy
    table.apply(heartbeat(phase="opening"), "api", 3.0)
    assert [one.bus for one in table.page(WorkersQuery(), 3.0).workers] == ["api", "cell1"]
