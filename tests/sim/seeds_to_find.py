"""Which seed finds each deliberate defect soonest.

`python -m tests.sim.seeds_to_find` prints a table of them. With `--write` the seeds go to
found_by.json, from which the tests take the one that they try first: to be run again when a change of the workers has
moved what the seeds do and the tests have become slow. A seed on record that still finds its defect quickly is kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

from msgspec import Struct

from lab.simulation.__main__ import redirect_logs
from lab.simulation.run import simulate
from tests.sim.mutants import MUTANTS, UNPROVEN

FOUND_BY = Path(__file__).with_name("found_by.json")
MAX_SEEDS = 60
QUICK_S = 3.0  # of processor time: a seed that finds a defect in this is looked for no further


class Found(Struct, frozen=True):
    """The seed that finds a defect in the least time, the invariant that it breaks, and how long it ran (CPU s)."""

    name: str
    seed: int | None
    breach: str
    spent_s: float


def recorded() -> dict[str, int]:
    """The seed on record for each defect."""
    return json.loads(FOUND_BY.read_text())  # type: ignore[no-any-return]


@cache
def _fails_alone(seed: int) -> bool:
    return bool(simulate(seed).breach)


def soonest(name: str, first: int | None, most: int) -> Found:
    """Try the seed on record, then 1 to `most`, until one finds the defect quickly; the quickest of those tried."""
    redirect_logs()
    best: Found | None = None
    for seed in (*([first] if first else []), *range(1, most + 1)):
        began = time.process_time()
        with (MUTANTS | UNPROVEN)[name]():
            breach = simulate(seed).breach
        spent_s = time.process_time() - began
        faster = best is None or spent_s < best.spent_s
        if breach and faster and not _fails_alone(seed):  # what fails by itself finds anything
            best = Found(name, seed, breach, spent_s)
        if best is not None and best.spent_s <= QUICK_S:
            break
    return best or Found(name, None, f"not found in {most}", 0.0)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.seeds_to_find", description=__doc__)
    parser.add_argument("names", nargs="*", help="defects (all that the tests judge)")
    parser.add_argument("--seeds", type=int, default=MAX_SEEDS, help=f"seeds to try for each ({MAX_SEEDS})")
    parser.add_argument("--jobs", type=int, default=1, help="processes (1)")
    parser.add_argument("--write", action="store_true", help=f"put what was found into {FOUND_BY.name}")
    chosen = parser.parse_args(arguments)
    known, names = recorded(), chosen.names or sorted(MUTANTS)
    sys.stdout.write("| defect | what it does | found by seed | CPU s | invariant |\n|---|---|---|---|---|\n")
    with ProcessPoolExecutor(chosen.jobs) as pool:
        for found in pool.map(soonest, names, [known.get(name) for name in names], [chosen.seeds] * len(names)):
            words = ((MUTANTS | UNPROVEN)[found.name].__doc__ or "").splitlines()[0]
            row = f"| {found.name} | {words} | {found.seed or '-'} | {found.spent_s:.1f} | {found.breach} |\n"
            sys.stdout.write(row)
            sys.stdout.flush()
            if chosen.write and found.seed is not None:
                known[found.name] = found.seed
                FOUND_BY.write_text(json.dumps(dict(sorted(known.items())), indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
