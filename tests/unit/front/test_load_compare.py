"""Two runs side by side: what differs, and that no more is claimed than two runs can show."""

from __future__ import annotations

import re

import numpy as np
import pytest
from msgspec.structs import replace

from berth.load.compare import Comparison, Line, compare, interval
from tests.unit.front.load_records import made_up
from tests.unit.front.test_load_report import HOSTILE, Page


def line(found: Comparison, what: str) -> Line:
    (one,) = (line for line in found.lines if line.what == what)
    return one


def test_a_run_that_is_slower_is_called_slower_and_the_faster_one_faster() -> None:
    calm, slow = made_up(5_000, seed=1), made_up(5_000, seed=2, slower=1.3)
    found = compare(calm, slow, names=("calm", "slow"))
    for what in ("latency p50, ms", "latency p99, ms", "queued p50, ms", "announced p99, ms"):
        one = line(found, what)
        assert one.word == "slower" and one.interval is not None and one.ratio is not None
        assert 1 < one.interval[0] < one.ratio < one.interval[1], what
        assert one.interval[0] < 1.3 < one.interval[1], what
    assert line(compare(slow, calm), "latency p50, ms").word == "faster"
    assert found.verdict[0] == "Settings and machine are the same."
    assert found.verdict[1].startswith("Latency p50: slow is slower, 1.3")


@pytest.mark.parametrize("share", [0.5, 0.99])
def test_the_same_system_twice_is_rarely_distinguished(share: float) -> None:
    """At 95 per cent one pair in twenty is, by bad luck; a method that claims too much distinguishes far more."""
    rng = np.random.default_rng(1)
    found = [interval(rng.gamma(2.0, 0.02, 600), rng.gamma(2.0, 0.02, 600), share, rng) for _ in range(60)]
    apart = [pair for pair in found if pair is not None and not pair[0] <= 1 <= pair[1]]
    assert None not in found and len(apart) <= 6


def test_boots_that_wait_in_one_queue_are_not_counted_as_many_witnesses() -> None:
    """Latency that wanders slowly: neighbours are alike, so the interval is far wider than shuffled boots claim."""
    rng = np.random.default_rng(4)
    wander = np.exp(0.5 * np.sin(np.arange(10_000) / 400) + rng.normal(0, 0.02, 10_000))
    other = np.exp(0.5 * np.sin(np.arange(10_000) / 400 + 1) + rng.normal(0, 0.02, 10_000))
    honest = interval(wander, other, 0.5, np.random.default_rng(1))
    shuffled = interval(rng.permutation(wander), rng.permutation(other), 0.5, np.random.default_rng(1))
    assert honest is not None and shuffled is not None
    assert honest[1] - honest[0] > 3 * (shuffled[1] - shuffled[0])


def test_few_boots_prove_nothing() -> None:
    found = compare(made_up(99), made_up(99, slower=3.0))
    assert line(found, "latency p50, ms").word == line(found, "latency p99, ms").word == "too few boots to compare"
    found = compare(made_up(300), made_up(300, slower=3.0))
    assert line(found, "latency p50, ms").word == "slower"
    assert line(found, "latency p99, ms").word == "too few boots to compare", "three boots beyond it"
    empty = compare(made_up(0), made_up(0))
    assert line(empty, "latency p50, ms").ratio is None and "not known" in empty.text


def test_other_requests_are_named_first() -> None:
    one = made_up(500)
    other = replace(one, settings=replace(one.settings, rate_per_s=500.0), machine=replace(one.machine, cpus=8))
    found = compare(one, other)
    assert found.verdict[0].startswith("The requests differ: rate_per_s.")
    assert ("rate_per_s", "1,000", "500") in found.differences
    assert ("machine: cpus", "2", "8") in found.differences
    moved = compare(one, replace(one, machine=other.machine))
    assert moved.verdict[0] == "The requests are the same; the differences: machine: cpus."


def test_no_run_is_faster_at_requests_that_the_other_did_not_have() -> None:
    calm, slow = made_up(5_000, seed=1), made_up(5_000, seed=2, slower=1.3)
    calm = replace(calm, settings=replace(calm.settings, rate_per_s=500.0))
    for found, word in ((compare(calm, slow), "higher"), (compare(slow, calm), "lower")):
        assert line(found, "latency p50, ms").word == word
        assert "faster" not in found.text + found.html and "slower" not in found.text + found.html
        assert "the requests differ" in found.verdict[1]


def test_stage_bars_of_two_runs_are_on_one_scale() -> None:
    """Both filled the width, so that a run of 30 ms and one of 60 ms looked alike."""
    html = compare(made_up(500, seed=1), made_up(500, seed=1, slower=2.0), names=("a", "b")).html
    figures = re.findall(
        r"<figcaption>Mean time in each stage: (.), ([0-9.]+) ms together</figcaption>(.*?)</figure>", html, re.DOTALL
    )
    ends = {
        name: max(float(x) + float(w) for x, w in re.findall(r'x="([0-9.]+)" y="2.0" width="([0-9.]+)"', drawn))
        for name, _, drawn in figures
    }
    assert ends["b"] > 755 and ends["a"] / ends["b"] == pytest.approx(0.5, abs=0.02)


def test_the_same_records_and_seed_give_the_same() -> None:
    one, other = made_up(600, seed=1), made_up(600, seed=2)
    assert compare(one, other).html == compare(one, other).html
    assert compare(one, other, seed=1).text != compare(one, other, seed=2).text


@pytest.mark.parametrize("boots", [0, 1, 3_000])
def test_both_forms_are_whole_and_names_are_only_text(boots: int) -> None:
    record = made_up(boots, name=HOSTILE)
    record = replace(record, totals=replace(record.totals, outcomes={HOSTILE + "\x1b[31m": 5}))
    found = compare(record, made_up(boots), names=(HOSTILE, "b\x1b[2J"))
    page = Page(found.html)
    assert page.open == [] and page.reaching_out == [] and "script" not in page.seen and "img" not in page.seen
    assert "\x1b" not in found.text
    assert ("Latency at each percentile" in page.text) == (boots > 0)
    widths = [len(row) for row in found.text.splitlines() if "ms  " in row]
    assert widths


def test_what_was_counted_is_a_share_of_the_boots() -> None:
    found = compare(made_up(1_000), made_up(2_000))
    assert line(found, "claims lost, a 1,000 boots").a == 30
    assert line(found, "failed, a 1,000 boots").b == 20
    assert line(found, "active boots a second").ratio == pytest.approx(1.0, abs=0.1)
