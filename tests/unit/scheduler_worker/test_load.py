"""What a host's compute service does, as filters and weighers judge it, against Nova's rules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from bus.contracts.host_metrics import NUM_INSTANCES, NUM_IO_OPS
from scheduler_worker import plugins
from scheduler_worker.config import HOST_FACT_FILTERS, NOVA_WEIGHERS, Aggregate, MetricsConfig, SchedulerConfig
from scheduler_worker.filters.load import UNKNOWN
from scheduler_worker.selection.host_view import VERSION
from scheduler_worker.selection.weighing import score
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts, aggregate

NAN = math.nan


def fleet(config: SchedulerConfig, numbers: Mapping[str, Sequence[float]], **more: Any) -> Hosts:
    """A host for each number."""
    known = replace(config, available_filters=HOST_FACT_FILTERS)
    hosts = Hosts([PLENTY] * max(map(len, numbers.values())), config=known, **more)
    for name, values in numbers.items():
        index = np.array(hosts.table.indexes_of(hosts.uuids), dtype=np.intp)
        hosts.selector.metrics.put_column(name, index, np.array(values), at=0.0, source="nova", expires_s=60.0)
    return hosts


IO, COUNT = "max_io_ops_per_host", "max_instances_per_host"
BOUNDS: tuple[tuple[str, str, dict[str, int], tuple[tuple[list[int], str], ...], list[float], str], ...] = (
    # name, filter, settings, aggregates (hosts, their bound), numbers, which hosts pass ("?": not known)
    ("the default", "IoOpsFilter", {}, (), [0, 7, 8, 9, NAN], "yynn?"),
    ("a bound", "IoOpsFilter", {IO: 2}, (), [1, 2, -1], "yny"),
    ("none at all", "IoOpsFilter", {IO: 0}, (), [0, NAN], "n?"),
    ("no aggregate counts", "IoOpsFilter", {}, (([0], "1"),), [1], "y"),
    ("the default of instances", "NumInstancesFilter", {}, (), [49, 50, NAN], "yn?"),
    ("a bound of instances", "NumInstancesFilter", {COUNT: 1}, (), [0, 1], "yn"),
    ("an aggregate's", "AggregateIoOpsFilter", {}, (([0, 1], "3"),), [2, 3, 7], "yny"),
    ("more than the option", "AggregateIoOpsFilter", {IO: 1}, (([0, 1], "30"),), [29, 30, 1], "ynn"),
    ("the smallest", "AggregateIoOpsFilter", {}, (([0, 1], "3"), ([1], "2"), ([0], " 9 ")), [2, 2], "yn"),
    ("no number", "AggregateIoOpsFilter", {}, (([0, 1], "x"), ([1], "1"), ([0], "9")), [7, 7, 8], "yyn"),
    ("a part of one", "AggregateIoOpsFilter", {}, (([0], "1.5"),), [7], "y"),
    ("of hundreds of digits", "AggregateIoOpsFilter", {}, (([0], "9" * 400), ([1], "-" + "9" * 400)), [9, -9], "yn"),
    ("not known", "AggregateIoOpsFilter", {}, (([0], "3"),), [NAN], "?"),
    ("an aggregate's, of instances", "AggregateNumInstancesFilter", {}, (([0, 1], "3"),), [2, 3, 49, 50], "ynyn"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "settings", "aggregates", "numbers", "expected"),
    [row[1:] for row in BOUNDS],
    ids=[row[0] for row in BOUNDS],
)
def test_bounds(
    name: str,
    settings: dict[str, int],
    aggregates: Sequence[tuple[list[int], str]],
    numbers: list[float],
    expected: str,
) -> None:
    option, metric = (IO, NUM_IO_OPS) if "IoOps" in name else (COUNT, NUM_INSTANCES)
    known = [aggregate(f"a{at}", **{option: bound}) for at, (_, bound) in enumerate(aggregates)]
    config = SchedulerConfig(enabled_filters=(name,), aggregates=tuple(known), **settings)  # type: ignore[arg-type]
    members = {one.uuid: rows for one, (rows, _) in zip(known, aggregates, strict=True)}
    hosts = fleet(config, {metric: numbers}, members=members)
    (one,) = hosts.selector.config.filters
    result = one.filter(hosts.view(), hosts.spec())

    assert result.passed.tolist() == [word == "y" for word in expected]
    assert result.rejected.get(UNKNOWN, 0) == expected.count("?")
    assert sum(result.rejected.values()) == len(expected) - expected.count("y")


def test_numbers_that_are_too_old_are_not_known() -> None:
    hosts = fleet(SchedulerConfig(enabled_filters=("NumInstancesFilter",)), {NUM_INSTANCES: [1, 2]})
    hosts.selector.metrics.advance(59.0)
    assert len(hosts.selector.passing(hosts.spec())) == 2
    hosts.selector.metrics.advance(60.0)
    assert hosts.selector.explain(hosts.spec(), {}).funnel[-1].rejected == {UNKNOWN: 2}


ISOLATED: tuple[tuple[str, tuple[str, ...], tuple[str, ...], bool, str, str], ...] = (
    # name, isolated cells' services, images, whether other images are kept away, image, hosts of (c1, c2) that pass
    ("nothing is isolated", (), (), True, "i", "yy"),
    ("hosts without images", ("compute-c1",), (), True, "i", "ny"),
    ("not restricting", ("compute-c1",), (), False, "i", "yy"),
    ("an isolated image", ("compute-c1",), ("i", "j"), True, "i", "yn"),
    ("another image", ("compute-c1",), ("i",), True, "k", "ny"),
    ("no image", ("compute-c1",), ("i",), True, "", "ny"),
    ("an isolated image, not restricting", ("compute-c1",), ("i",), False, "i", "yn"),
    ("another image, not restricting", ("compute-c1",), ("i",), False, "k", "yy"),
    ("an image without hosts", (), ("i",), True, "i", "nn"),
)


@pytest.mark.parametrize(
    ("isolated", "images", "restricts", "image", "expected"),
    [row[1:] for row in ISOLATED],
    ids=[r[0] for r in ISOLATED],
)
def test_isolated_hosts(
    isolated: tuple[str, ...], images: tuple[str, ...], restricts: bool, image: str, expected: str
) -> None:
    config = SchedulerConfig(
        enabled_filters=("IsolatedHostsFilter",),
        isolated_hosts=isolated,
        isolated_images=images,
        restrict_isolated_hosts_to_isolated_images=restricts,
    )
    hosts = Hosts([PLENTY] * 2, config=config, cells=["c1", "c2"])
    (one,) = hosts.selector.config.filters
    result = one.filter(hosts.view(), replace(hosts.spec(), image=image))
    assert result.passed.tolist() == [word == "y" for word in expected]
    assert sum(result.rejected.values()) == expected.count("n")


WEIGHED: tuple[tuple[str, str, dict[str, float], dict[str, list[float]], list[str | None], list[float]], ...] = (
    # name, weigher, multipliers, numbers, versions, weights
    ("few", "IoOpsWeigher", {}, {NUM_IO_OPS: [4, 0, NAN, 2]}, [], [-1.0, 0.0, 0.0, -0.5]),
    ("many", "IoOpsWeigher", {"io_ops": 2.0}, {NUM_IO_OPS: [4, 0, 2, 2]}, [], [2.0, 0.0, 1.0, 1.0]),
    ("from 0 on", "IoOpsWeigher", {}, {NUM_IO_OPS: [4, 2, -3, 2]}, [], [-1.0, -0.5, 0.0, -0.5]),
    ("off", "NumInstancesWeigher", {}, {NUM_INSTANCES: [4, 0, 1, 2]}, [], [0.0, 0.0, 0.0, 0.0]),
    ("spread", "NumInstancesWeigher", {"num_instances": -1.0}, {NUM_INSTANCES: [5, 1, 3, 1]}, [], [-1, 0, -0.5, 0]),
    ("newer", "HypervisorVersionWeigher", {}, {}, ["8002000", "4001000", None, "x"], [1.0, 4001 / 8002, 0.0, 0.0]),
    ("of one version", "HypervisorVersionWeigher", {}, {}, ["8002000"] * 4, [0.0] * 4),
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "multipliers", "numbers", "versions", "expected"),
    [row[1:] for row in WEIGHED],
    ids=[r[0] for r in WEIGHED],
)
def test_weighers(
    name: str,
    multipliers: dict[str, float],
    numbers: dict[str, list[float]],
    versions: list[str | None],
    expected: list[float],
) -> None:
    config = SchedulerConfig(enabled_weighers=(name,), multipliers=multipliers)
    reports = {at: {"attributes": {VERSION: word}} for at, word in enumerate(versions) if word is not None}
    hosts = fleet(config, numbers or {NUM_IO_OPS: [0] * 4}, reports=reports)
    scores, _ = score(hosts.view(), hosts.spec(), hosts.selector.config.weighings)
    assert scores.tolist() == pytest.approx(expected)


def test_a_multiplier_of_one_of_novas_weighers_counts_only_where_it_is_enabled() -> None:
    config = SchedulerConfig(multipliers={"io_ops": -2.0})
    assert "io_ops" not in {one.weigher.name for one in plugins.weighings(config)}
    enabled = replace(config, enabled_weighers=NOVA_WEIGHERS, aggregates=(Aggregate(uuid="", name="a"),))
    assert {one.weigher.name: one.multiplier for one in plugins.weighings(enabled)} == {
        "io_ops": -2.0,
        "hypervisor_version": 1.0,
    }


def test_a_metric_may_be_missing_where_its_ratio_or_the_hosts_multiplier_is_0() -> None:
    off = aggregate("off", metrics_weight_multiplier="0")
    metrics = MetricsConfig(weights={"a": 0.0, "b": 1.0, "c": 2.0})
    config = SchedulerConfig(metrics=metrics, enabled_weighers=("MetricsWeigher",), aggregates=(off,))
    hosts = fleet(config, {"b": [2.0, 1.0, NAN, NAN], "c": [1.0, NAN, 1.0, 1.0]}, members={off.uuid: [3]})
    (weighing,) = hosts.selector.config.weighings
    assert weighing.weigher.weigh(hosts.view(), hosts.spec()).tolist() == [4.0, -10_000.0, -10_000.0, 2.0]
