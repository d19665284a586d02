"""Hosts with a warning sink, and come up again when it ends."""

from __future__ import annotations

from bus.contracts.host_metrics import HostMetrics, HostReading
from tests.unit.scheduler.hosts import PLENTY, Hosts

LARGE = {**PLENTY, "MEMORY_MB": 131_072}


def best(hosts: Hosts) -> list[str]:
    choice = hosts.selector.rank(hosts.spec(), hosts.rng).pick({}, subset=1, alternates=7)
    assert choice is not None
    return [hosts.name(ranked.row) for ranked in (choice.selected, *choice.alternates)]


def sensors(hosts: Hosts, host: int, at: float, **values: float) -> None:
    named = {name.replace("_", "."): value for name, value in values.items()}
    reading = HostReading(host_uuid=hosts.uuids[host], at=at, values=named)
    hosts.selector.metrics.apply(HostMetrics(source="ironic", readings=(reading,)), None, now=at, now_s=at)


def test_a_warning_of_its_service_puts_a_host_below_those_without_and_above_failed_builds() -> None:
    warned = {"attributes": {"health": "warning"}}
    hosts = Hosts([LARGE, PLENTY, LARGE], reports={0: warned, 2: {"failed_builds": 1}})
    assert best(hosts) == ["h1", "h0", "h2"]
    hosts.announce(["c1"] * 3, {}, sequence=2)
    assert best(hosts)[-1] == "h1"


def test_a_warning_or_critical_sensor_counts_until_it_is_too_old() -> None:
    hosts = Hosts([LARGE, PLENTY, LARGE])
    sensors(hosts, 0, 1000.0, sensors_warning=1.0, sensors_critical=0.0)
    sensors(hosts, 2, 1000.0, sensors_warning=0.0, sensors_critical=2.0)
    assert best(hosts)[0] == "h1"
    sensors(hosts, 0, 1010.0, sensors_warning=0.0)
    assert best(hosts)[0] == "h0"
    hosts.selector.metrics.advance(1900.0)
    assert set(best(hosts)[:2]) == {"h0", "h2"}


def test_an_attribute_of_another_value_is_no_warning() -> None:
    hosts = Hosts([LARGE, PLENTY], reports={0: {"attributes": {"health": "fine"}}})
    assert best(hosts) == ["h0", "h1"]
