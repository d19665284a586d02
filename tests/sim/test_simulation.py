"""The system on a virtual clock: the same seed is the same run, and a fixed set of seeds holds every invariant."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from berth.sim.draw import plan_of
from berth.sim.plan import Act, Blow, Kind, Order
from berth.sim.run import run, simulate
from berth.sim.shrink import Shrinker

ROOT = Path(__file__).parents[2]
# About a minute on two idle cores. `scripts/simulate` runs as many as there is time for.
SEEDS = range(1, 41)
REPEATED = (2, 7)

DIGESTS = """
from berth.sim.__main__ import hush
from berth.sim.run import simulate
hush()
print(*(simulate(seed).digest for seed in {seeds}))
"""


def test_a_seed_is_one_run_across_processes_and_hash_seeds() -> None:
    said = {
        subprocess.run(
            [sys.executable, "-c", DIGESTS.format(seeds=REPEATED)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "4242")
    }
    assert said == {" ".join(simulate(seed).digest for seed in REPEATED) + "\n"}


def test_another_seed_is_another_run() -> None:
    assert simulate(1).digest != simulate(2).digest


@pytest.mark.parametrize("seed", SEEDS)
def test_every_invariant_holds(seed: int) -> None:
    result = simulate(seed)
    assert result.breach == "", f"scripts/simulate --seed {seed} --trace: {result.breach}: {result.detail}"


def test_on_a_good_day_everything_that_fits_is_built() -> None:
    result = run(plan_of(1).without_faults())
    assert result.breach == ""
    assert result.states.keys() <= {"active", "deleted", "failed", "refused"}
    assert result.states["active"] > 0
    assert result.rest_s < 5.0


def test_a_failing_plan_is_shrunk_to_what_makes_it_fail() -> None:
    plan = plan_of(3)
    assert len(plan.blows) > 3

    def fails(one: object) -> bool:
        blows: tuple[Blow, ...] = getattr(one, "blows", ())
        orders: tuple[Order, ...] = getattr(one, "orders", ())
        return any(blow.kind is plan.blows[2].kind for blow in blows) and any(o.act is Act.BUILD for o in orders)

    smaller = Shrinker(fails).shrink(plan)
    assert [blow.kind for blow in smaller.blows] == [plan.blows[2].kind]
    assert [order.act for order in smaller.orders] == [Act.BUILD]
    assert isinstance(smaller.blows[0].kind, Kind)
