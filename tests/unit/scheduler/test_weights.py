"""Weights as Nova combines them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import scheduler_worker
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.hosts import Floats
from scheduler_worker.domain.plugins import Weigher, Weighing
from scheduler_worker.domain.request_spec import RequestSpec
from scheduler_worker.domain.view import HostsView
from scheduler_worker.domain.weights import reweigh, score
from scheduler_worker.weighers.free_amounts import CPUWeigher, DiskWeigher, RAMWeigher
from scheduler_worker.weighers.recent_build_failures import BuildFailureWeigher
from tests.unit.scheduler.hosts import PLENTY, Hosts, aggregate


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
    (again,) = reweigh(view, spec, scales)
    assert again is not None and again.tolist() == before.tolist() == [0.5, 1.0, 0.75]
    hosts.book.assume("one", {hosts.uuids[1]: {"VCPU": 10}})
    (later,) = reweigh(view.subset(np.array([1])), spec, scales)
    assert later is not None and later.tolist() == [0.5]


@pytest.mark.parametrize("kept", [20_000, 1])
def test_a_choice_keeps_what_each_weigher_gave_its_host_and_the_runners_up(
    monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """Why here, answered like why nowhere; as it was at this choice, the ones just before counted."""
    monkeypatch.setattr("scheduler_worker.domain.weights.KEPT_HOSTS", kept)
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
