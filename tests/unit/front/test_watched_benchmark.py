"""The parts of lab/benchmarks/watched.py that could be wrong without any notice, and the interval that it prints."""

from __future__ import annotations

import random

import pytest

from lab.benchmarks import watched
from lab.benchmarks.traces import median_interval, summary
from lab.benchmarks.watched import Pair, Turn


def turn(scale: float, web_ms: float = 0.0) -> Turn:
    return Turn(
        boots_per_s=1000 / scale, cpu_ms=1.5 * scale, web_ms=web_ms, viewer_ms=web_ms / 2, followed_ms=2 * scale,
        idle_p50_ms=8 * scale, roles={"scheduler": 0.5 * scale},
    )  # fmt: skip


@pytest.mark.parametrize(("count", "below"), [(6, 0), (8, 0), (9, 1), (24, 6), (100, 39)], ids=str)
def test_the_interval_is_the_one_of_the_sign_test(count: int, below: int) -> None:
    """The ranks are those of the usual tables (of 24: the 7th and the 18th)."""
    values = [float(number) for number in range(count)]
    random.Random(1).shuffle(values)
    assert median_interval(values) == (below, count - 1 - below)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_pairs_have_no_interval(count: int) -> None:
    assert median_interval([1.0] * count) is None
    assert "-inf to inf" in summary([(1.0, 1.0)] * count)
    assert "fewer than 6 pairs" in watched.report([Pair(turn(1.0), turn(1.0))] * count)[2]


@pytest.mark.parametrize("count", [9, 24])
def test_the_interval_holds_the_median_19_times_in_20(count: int) -> None:
    rng = random.Random(count)
    intervals = [median_interval([rng.expovariate(1.0) for _ in range(count)]) for _ in range(2000)]
    held = sum(least <= 0.6931 <= most for least, most in filter(None, intervals))
    assert 0.94 < held / 2000 < 0.99


def test_a_ratio_is_that_of_a_pair_and_not_of_the_medians() -> None:
    """A machine that becomes slower does so for both turns of a pair."""
    pairs = [Pair(turn(slower), turn(slower * 1.1, web_ms=0.3)) for slower in (1.0, 2.0, 3.0, 1.5, 4.0, 1.2, 2.5)]
    rows = {row.split(" | ")[0].strip("| "): row.strip("| ").split(" | ")[1:] for row in watched.report(pairs)}
    assert rows["boots a second"] == ["500.00", "454.55", "0.909", "0.909 to 0.909"]
    assert rows["idle p50, ms"] == ["16.00", "17.60", "1.100", "1.100 to 1.100"]
    assert rows["CPU a boot, ms"][2] == rows["... with what follows"][2] == "1.100"
    assert rows["... with berth web"][:2] == ["3.00", "3.60"]
    assert rows["berth web alone, ms a boot"][:2] == ["0.000", "0.300"]
    assert rows["the viewer alone, ms a boot"][:2] == ["0.000", "0.150"]
    assert rows["scheduler, ms a boot"][:3] == ["1.000", "1.100", "+0.100"]


def test_of_two_successive_rounds_one_has_either_order_and_which_is_drawn() -> None:
    conditions = [watched.OFF, ("page",), ("scrape",), ("traces",)]
    orders = watched.orders(101, conditions, random.Random(1))
    assert len(orders) == 101
    assert all(one == other[::-1] for one, other in zip(orders[:100:2], orders[1::2], strict=True))
    assert all(sorted(one) == sorted(conditions) for one in orders)
    assert len(set(map(tuple, orders[::2]))) > 10


def test_what_is_on_has_its_names() -> None:
    options = watched.parser().parse_args(["--on", "traces+page", "--on", "scrape"])
    assert options.on == [("page", "traces"), ("scrape",)]
    with pytest.raises(SystemExit):
        watched.parser().parse_args(["--on", "page+none"])


def test_by_default_it_takes_ten_minutes_at_most_and_has_an_interval() -> None:
    options = watched.parser().parse_args([])
    assert options.minutes < 10
    assert median_interval([1.0] * options.pairs) is not None
    assert (options.hosts, options.ratio, options.pages) == (2000, 0.05, 1)


@pytest.mark.parametrize("arguments", [["--pairs", "0"], ["--boots", "-1"], ["--idle", "0"], ["--pages", "none"]])
def test_numbers_that_are_none_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        watched.parser().parse_args(arguments)
