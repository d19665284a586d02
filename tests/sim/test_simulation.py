"""The system on a virtual clock: the same seed is the same run, and a fixed set of seeds holds every invariant."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection
from functools import cache
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from bus.persistence.relay import Relay
from lab.simulation.__main__ import compare, differing
from lab.simulation.draw import plan_of
from lab.simulation.event_log import EventLog
from lab.simulation.plan import Action, FaultEvent, FaultType, Order
from lab.simulation.run import Result, _Runner, run
from lab.simulation.run import simulate as simulate_anew
from lab.simulation.shrink import Shrinker
from lab.simulation.widening import WIDENED, Widening
from tests.kit.cases import nightly

# The short form: `.ci/run` runs the same judgement on 60 seeds among others, `scripts/nightly` on 100 alone.
SEED, SEED_ALONE = 1, 2

# Another Python has to run the seeds just so, if it has what they need in the same versions.
VERSIONS = """
from importlib.metadata import version
print([version(name) for name in ("msgspec", "numpy", "httpx", "starlette", "os-traits", "tenacity", "asyncpg")])
"""


@cache
def simulate(seed: int, kinds: Collection[Widening] = frozenset()) -> Result:
    """A run of this process; several tests look at the same one."""
    return simulate_anew(seed, kinds)


def versions_of(python: str) -> str:
    """Of what the simulation needs there; "" when something is not there."""
    return subprocess.run([python, "-c", VERSIONS], check=False, capture_output=True, text=True).stdout


def pythons() -> list[str]:
    """This interpreter, and every other one here that could run berth."""
    others = filter(None, (shutil.which(f"python3.{minor}") for minor in (11, 12, 13, 14)))
    here = versions_of(sys.executable)
    return [sys.executable, *(one for one in others if one != sys.executable and versions_of(one) == here)]


def test_a_seed_is_one_run_across_processes_hash_seeds_and_pythons() -> None:
    """A short form: `.ci/run` compares more seeds."""
    found = compare(pythons(), SEED, {SEED: simulate(SEED, WIDENED).digest})
    assert sys.executable in found
    assert not any(found.values()), found


def test_a_run_that_differs_is_reported() -> None:
    assert differing({1: "a", 2: "b", 3: "c"}, {1: "a", 2: "x"}) == [2, 3]


def test_another_seed_is_another_run() -> None:
    assert simulate(SEED, WIDENED).digest != simulate(SEED_ALONE).digest


@pytest.mark.parametrize("seed", [SEED_ALONE, *nightly(1, 3)])
def test_every_invariant_holds_alone(seed: int) -> None:
    result = simulate(seed)
    assert result.breach == "", f"scripts/simulate --alone --seed {seed} --trace: {result.breach}: {result.detail}"


@pytest.mark.parametrize("seed", [SEED, *nightly(2, 3)])
def test_every_invariant_holds_among_others(seed: int) -> None:
    result = simulate(seed, WIDENED)
    assert result.breach == "", f"scripts/simulate --seed {seed} --trace: {result.breach}: {result.detail}"


def test_each_kind_of_others_can_be_left_out_and_moves_nothing_of_the_rest() -> None:
    """All but fences, which take the place of those that moves draw; and what others exclude: gangs, decided cells.
    Deadlines change the orders themselves.
    """
    kinds = WIDENED - {Widening.FENCES, Widening.HOSTS_DIE_AGAIN, Widening.GANGS, Widening.DECIDED_CELLS}
    kinds -= {Widening.DEADLINES}
    for seed in range(1, 41):
        alone, among = plan_of(seed), plan_of(seed, kinds)
        assert alone.widenings == () and plan_of(seed, ()) == alone
        assert set(alone.orders) <= set(among.orders)
        for kind in among.widenings:
            without = plan_of(seed, kinds - {kind})
            assert set(without.orders) < set(among.orders)
            assert without.widenings == tuple(one for one in among.widenings if one != kind)


def test_deadlines_change_nothing_but_how_long_clients_wait() -> None:
    drawn = 0
    for seed in range(1, 41):
        waiting = plan_of(seed, WIDENED)
        drawn += Widening.DEADLINES in waiting.widenings
        orders = [replace(one, waits_s=0.0, gives_up=False) for one in waiting.orders]
        assert orders == list(plan_of(seed, WIDENED - {Widening.DEADLINES}).orders)
    assert drawn > 4


@pytest.mark.parametrize(("conductors", "factor"), [(1, 0.0), (2, 2.0)])
def test_conductors_whose_clocks_differ_are_given_that_time_to_come_to_rest(conductors: int, factor: float) -> None:
    """Seed 1795460918: one found that a state had lasted as long as their clocks were apart."""
    plan = plan_of(1).without_faults()
    plan = replace(plan, cells=tuple(replace(cell, conductors=conductors) for cell in plan.cells), breaker_limit=0)
    apart = replace(plan, skew_s=100.0)
    assert _Runner(apart, EventLog())._rest_s - _Runner(plan, EventLog())._rest_s == factor * apart.skew_s


def test_on_a_good_day_everything_that_fits_is_built() -> None:
    result = run(plan_of(1).without_faults())
    assert result.breach == ""
    assert result.states.keys() <= {"active", "deleted", "failed", "refused"}
    assert result.states["active"] > 0
    assert result.rest_s < 5.0


def test_a_process_that_never_yields_fails_its_seed_alone() -> None:
    plan = plan_of(1).without_faults()

    async def spin(_relay: Relay) -> None:
        while True:
            pass

    with patch.object(Relay, "run", spin):
        result = run(plan, max_turn_cpu_s=0.2)
    assert result.breach == "endless_turn"
    assert re.search(r"a turn took more than 0\.2 s of CPU: \S+test_simulation\.py:\d+ spin < ", result.detail)
    assert result.detail.split(":")[0] in plan.processes
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)  # the next seed has a limit of its own


def test_a_failing_plan_is_shrunk_to_what_makes_it_fail() -> None:
    plan = plan_of(3)
    assert len(plan.fault_events) > 3

    def fails(one: object) -> bool:
        fault_events: tuple[FaultEvent, ...] = getattr(one, "fault_events", ())
        orders: tuple[Order, ...] = getattr(one, "orders", ())
        return any(fault.kind is plan.fault_events[2].kind for fault in fault_events) and any(
            o.action is Action.BUILD for o in orders
        )

    smaller = Shrinker(fails).shrink(plan)
    assert [fault.kind for fault in smaller.fault_events] == [plan.fault_events[2].kind]
    assert [order.action for order in smaller.orders] == [Action.BUILD]
    assert isinstance(smaller.fault_events[0].kind, FaultType)
