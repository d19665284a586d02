"""The parts of lab/benchmarks/street.py and lab/benchmarks/scale.py that could be wrong without any notice."""

from __future__ import annotations

import argparse
import ast
import inspect
import os
from pathlib import Path

import msgspec
import pytest

from lab.benchmarks import scale, street, street_pair, street_systems
from lab.benchmarks.scale import Run, Scale, parse_parts, read, spread, tables, with_run
from lab.benchmarks.street_report import Result

ROOT = Path(__file__).parents[3]


def result(boots_per_s: float) -> Result:
    empty: dict[str, float] = {}
    return Result(
        system="real", boots=10, hosts=8, cells=4, schedulers=1, boots_per_s=boots_per_s, latency_ms=empty,
        stages_ms={}, spent_ms={}, idle_p50_ms=1.0, idle_p95_ms=1.0, idle_stages_ms=empty, idle_spent_ms=empty,
        invariants_hold=True, active=10,
    )  # fmt: skip


def run(hosts: int, schedulers: int = 1, *, boots_per_s: float | None = None) -> Run:
    found = None if boots_per_s is None else result(boots_per_s)
    return Run(hosts=hosts, schedulers=schedulers, result=found, why_not="" if found else "ended after 1 s")


def test_the_line_that_the_issue_names_is_there_to_be_typed() -> None:
    path = ROOT / "scripts" / "street"
    assert os.access(path, os.X_OK)
    assert "lab.benchmarks.street" in path.read_text()


def test_the_earlier_and_the_present_street_are_compared_by_what_both_have() -> None:
    assert os.access(ROOT / "scripts" / "steps" / "pair", os.X_OK)
    earlier, now = (msgspec.to_builtins(result(rate)) for rate in (1_000.0, 1_500.0))
    now["idle_spent_ms"] = {"queued": 1.0}
    lines = list(street_pair.table(earlier, now))
    assert lines[2:] == [
        "| boots a second, at once | 1000.00 | 1500.00 | 1.50 |",
        "| alone, p50 ms | 1.00 | 1.00 | 1.00 |",
    ]


def test_by_default_the_street_measures_all_that_it_can_in_one_run() -> None:
    options = street.parsed([])
    assert (options.only, options.bare, options.rates, options.statements) == ("real", True, True, True)
    assert (options.hosts, options.cells) == (10_000, 4) and options.boots >= 20_000


def test_a_part_holds_everything_that_the_street_reads() -> None:
    """The street had learned two options that scale did not pass: every part ended in an AttributeError."""
    options = scale.options_of(1000, 2, 50)
    tree = ast.parse(inspect.getsource(street_systems.on_real_servers))
    requested = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "options"
    }
    assert requested and requested <= vars(options).keys()
    assert (options.hosts, options.schedulers, options.boots, options.cells) == (1000, 2, 50, scale.CELLS)


@pytest.mark.parametrize("text", ["", "x", "0x1", "1000x0", "1000x1x1", "many", "1000x1,"])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_parts(text)


def test_parts_are_read() -> None:
    assert parse_parts("1000x1, 20x4,7") == [(1000, 1), (20, 4), (7, 1)]
    assert {hosts for hosts, _ in parse_parts(scale.PARTS)} == {1_000, 10_000, 100_000}


def test_parts_of_several_runs_come_together_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "scale.json"
    found = with_run(Scale(), run(1000, boots_per_s=1000.0))
    assert found.spread is None
    path.write_bytes(msgspec.json.encode(found))
    found = with_run(read(path), run(100_000, boots_per_s=850.0))
    found = with_run(found, run(10_000, 4, boots_per_s=5.0))
    assert [one.part for one in found.runs] == [(1000, 1), (10_000, 4), (100_000, 1)]
    assert found.spread == spread(found.runs)
    assert found.spread is not None and (found.spread.ratio, found.spread.verdict) == (0.85, "within")
    assert "0.85 of the throughput" in tables(found)


def test_a_part_that_failed_removes_no_result() -> None:
    good = run(1000, boots_per_s=1000.0)
    assert with_run(Scale(runs=[good]), run(1000)).runs == [good]
    assert with_run(Scale(runs=[run(1000)]), good).runs == [good]


@pytest.mark.parametrize(
    ("most", "verdict"), [(799.0, "NOT within"), (801.0, "within"), (1249.0, "within"), (1251.0, "NOT within")]
)
def test_how_far_apart_the_fewest_and_the_most_hosts_are(most: float, verdict: str) -> None:
    found = spread(
        [
            run(10, boots_per_s=1000.0),
            run(100, boots_per_s=1.0),
            run(1000, boots_per_s=most),
            run(10, 2, boots_per_s=1.0),
        ]
    )
    assert found is not None and (found.fewest, found.most, found.verdict) == (10, 1000, verdict)


def test_another_file_is_not_taken_for_one_of_these(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('[{"hosts": 1}]')
    with pytest.raises(SystemExit, match="something else"):
        read(path)
    path.write_text("")
    assert read(path) == Scale()
