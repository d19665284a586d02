"""Numbers about hosts: which are used, until when, and what they weigh."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Mapping

import msgspec
import numpy as np
import pytest

from bus.bus import API
from bus.clock import new_uuid
from bus.consuming.outcome import Done, Received
from bus.contracts.base import Meta
from bus.contracts.host_metrics import (
    TEMPERATURE_CELSIUS,
    HostMetrics,
    HostMetricsQuery,
    HostReading,
)
from scheduler_worker import plugins
from scheduler_worker.config import MetricsConfig, SchedulerConfig
from scheduler_worker.domain.fleet import MAX_METRICS, HostMetricsTable
from scheduler_worker.fleet import HostMetricsListener, age, host_metrics_page
from tests.unit.ironic.world import VirtualClock
from tests.unit.scheduler.hosts import PLENTY, Hosts, aggregate

NOW = 1_000_000.0
HOT = MetricsConfig(weights={TEMPERATURE_CELSIUS: -1.0})


def config(metrics: MetricsConfig = HOT, **more: object) -> SchedulerConfig:
    return SchedulerConfig(metrics=metrics, **more)  # type: ignore[arg-type]


def fleet(count: int = 3, *, settings: SchedulerConfig | None = None, **more: object) -> Hosts:
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


def test_the_newest_number_counts_whichever_service_measured_it() -> None:
    hosts = fleet()
    put(hosts, {0: 40.0, 1: 50.0}, at=NOW - 10)
    assert put(hosts, {0: 60.0}, at=NOW - 20, source="late") == {"older": 1}
    assert put(hosts, {1: 70.0}, at=NOW - 5, source="other") == {"taken": 1}
    assert known(hosts) == [40.0, 70.0, None]


def test_a_number_gets_too_old() -> None:
    hosts = fleet()
    put(hosts, {0: 40.0}, at=NOW - 800, now_s=100.0)
    hosts.selector.metrics.advance(199.0)
    assert known(hosts)[0] == 40.0
    hosts.selector.metrics.advance(200.0)
    assert known(hosts)[0] is None
    assert put(hosts, {0: 41.0}, at=NOW - 900, now_s=200.0) == {"stale": 1}


def test_a_number_of_a_clock_that_was_ahead_blocks_no_later_one_for_long() -> None:
    hosts = fleet()
    assert put(hosts, {0: 40.0}, at=NOW + 31) == {"ahead": 1}
    put(hosts, {0: 40.0}, at=NOW)  # and then this host's own clock is set back by a day
    assert put(hosts, {0: 50.0}, at=NOW - 86_400, now=NOW - 86_400, now_s=100.0) == {"older": 1}
    assert put(hosts, {0: 50.0}, at=NOW - 85_400, now=NOW - 85_400, now_s=1000.0) == {"taken": 1}


def test_a_cell_reports_its_own_hosts_only() -> None:
    hosts = fleet(2, cells=["c1", "c2"])
    assert put(hosts, {0: 40.0, 1: 41.0}, cell="c1") == {"taken": 1, "foreign": 1}
    assert known(hosts) == [40.0, None]
    assert put(hosts, {0: 30.0, 1: 31.0}, at=NOW + 1, cell=None) == {"taken": 2}


def test_hosts_that_are_not_announced_and_names_without_end_take_no_room() -> None:
    hosts = fleet(1)
    foreign = HostReading(host_uuid=new_uuid(random.Random(1)), at=NOW, values={"power.watts": 1.0})
    assert hosts.selector.metrics.apply(HostMetrics(source="bmc", readings=(foreign,)), None, now=NOW, now_s=0.0) == {
        "unknown_host": 1
    }
    outcomes = [put(hosts, {0: 1.0}, name=f"made.up{number}") for number in range(2 * MAX_METRICS)]
    assert sum("taken" in one for one in outcomes) == MAX_METRICS - 1
    assert put(hosts, {0: 40.0}) == {"taken": 1}  # what the settings name has its place


@pytest.mark.parametrize(
    "values",
    [
        '{"power.watts": 1e300}',
        '{"power.watts": "hot"}',
        '{"Power Watts": 1.0}',
        '{"power.watts\\n": 1.0}',
        "{}",
        json.dumps({f"m{number}": 1.0 for number in range(33)}),
    ],
)
def test_what_is_no_number_of_a_metric_is_no_message(values: str) -> None:
    uuid = new_uuid(random.Random(1))
    text = '{"source": "bmc", "type": "host.metrics.v1", "readings": [{"host_uuid": "%s", "at": 1.0, "values": %s}]}'
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text % (uuid, values), type=HostMetrics)


def test_hosts_that_are_announced_later_have_a_place() -> None:
    hosts = fleet(2)
    put(hosts, {0: 40.0})
    more = [new_uuid(hosts.rng) for _ in range(5000)]
    hosts.uuids += more
    hosts.announce(["c1"] * len(hosts.uuids), {}, sequence=2)
    assert put(hosts, {5001: 45.0}) == {"taken": 1}
    at = [hosts.table.index_of(hosts.uuids[host]) for host in (0, 1, 5001)]
    values = hosts.selector.metrics.values(TEMPERATURE_CELSIUS, np.array([*at, -1], dtype=np.intp))
    assert values[[0, 2]].tolist() == [40.0, 45.0]
    assert np.isnan(values[[1, 3]]).all()


def test_the_cooler_host_is_chosen() -> None:
    hosts = fleet()
    put(hosts, {0: 70.0, 1: 30.0, 2: 50.0})
    assert best(hosts) == ["h1", "h2", "h0"]


def test_a_host_without_the_number_sinks() -> None:
    hosts = fleet()
    put(hosts, {0: 70.0, 2: 50.0})
    assert best(hosts) == ["h2", "h0", "h1"]


def test_two_metrics_are_added_by_their_ratios() -> None:
    weights = {TEMPERATURE_CELSIUS: -1.0, "power.watts": -0.1}
    hosts = fleet(settings=config(MetricsConfig(weights=weights)))
    put(hosts, {0: 30.0, 1: 40.0, 2: 50.0})
    put(hosts, {0: 500.0, 1: 100.0, 2: 300.0}, name="power.watts")
    assert best(hosts)[0] == "h1"  # -50, and the others -80 each
    put(hosts, {0: 490.0}, name="power.watts", at=NOW + 1)
    assert best(hosts) == ["h1", "h0", "h2"]


def test_an_aggregate_sets_the_multiplier() -> None:
    zone = aggregate("inverted", metrics_weight_multiplier="-1.0")
    settings = config(aggregates=(zone,))
    hosts = fleet(settings=settings, members={zone.uuid: [0, 1, 2]})
    put(hosts, {0: 70.0, 1: 30.0, 2: 50.0})
    assert best(hosts) == ["h0", "h2", "h1"]


def test_without_weights_nothing_is_weighed() -> None:
    hosts = fleet(settings=SchedulerConfig(shuffle_best_same_weighed_hosts=False))
    put(hosts, {0: 70.0, 1: 30.0, 2: 50.0})
    assert best(hosts) == ["h0", "h1", "h2"]


def test_the_filter_excludes_hosts_whose_number_is_unknown_or_stale() -> None:
    settings = config(enabled_filters=("MetricsFilter",))
    hosts = fleet(settings=settings)
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
    hosts, clock, first = fleet(2), VirtualClock(), asyncio.Event()
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
    hosts = fleet(1)
    table = HostMetricsTable(hosts.table, max_age_s=900.0)
    for number in range(1100):
        reading = HostReading(host_uuid=hosts.uuids[0], at=NOW + number / 100, values={"power.watts": 1.0})
        table.apply(HostMetrics(source=f"s{number}", readings=(reading,)), None, now=NOW, now_s=0.0)
    assert [one.source for one in table.of(0)] == ["other"]
