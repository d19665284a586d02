"""The parts of lab/benchmarks/traces_street.py that could be wrong without any notice."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from lab.benchmarks.traces_street import Exported, Turn, middle, report, run_s

BUSY = """
import sys, time
while time.process_time() < 0.2: pass
print(time.process_time(), flush=True)
sys.stdin.read()
"""


def pairs(count: int, ratio: float, seed: int) -> list[tuple[float, float]]:
    """Pairs on a machine whose speed changes, a tenth of them with a turn that took three times as long."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        off, on = rng.lognormvariate(0.0, 0.1), ratio * rng.lognormvariate(0.0, 0.1)
        found.append((off * 3, on) if number % 20 == 0 else (off, on * 3) if number % 20 == 10 else (off, on))
    return found


@pytest.mark.parametrize("ratio", [1.0, 1.02, 1.2])
def test_the_middle_is_the_ratio_whatever_the_outer_pairs_are(ratio: float) -> None:
    found, least, most = middle(pairs(400, ratio, 1))
    assert least < ratio < most
    assert least < found < most
    assert most - least < 0.05


def test_the_interval_holds_the_ratio_about_19_times_in_20() -> None:
    held = [least <= 1.01 <= most for _, least, most in (middle(pairs(40, 1.01, seed)) for seed in range(15))]
    assert sum(held) >= 11


def test_the_cost_of_a_span_is_that_of_a_boot_over_its_spans() -> None:
    off, on = Turn(cpu_ms=2.0, own_ms=1.0, took_ms=1.5), Turn(cpu_ms=2.2, own_ms=1.2, took_ms=1.5)
    lines = report([(off, on)] * 10, Exported(between_ms=0.02, spans=10.0)).splitlines()
    assert lines[0] == "10.000 spans a boot; exports every 5 s: 0.0200 ms a boot"
    assert "with traces 1.1100 of it" in lines[1]
    assert ": 22.0 us a span" in lines[1]
    assert ": 20.0 us a span" in lines[2]
    assert ": 20.0 us a span" in lines[3]
    assert ": 0.0 us a span" in lines[4]


def test_the_processor_time_of_a_process_is_counted() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        used = float(process.stdout.readline())
        found = run_s(process.pid)
        process.communicate("")
    assert used == pytest.approx(found, abs=0.02)
