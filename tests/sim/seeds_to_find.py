"""How many seeds each deliberate defect survives: prints the table of docs/explanation/reliability.md."""

from __future__ import annotations

import sys

from berth.sim.__main__ import redirect_logs
from berth.sim.run import simulate
from tests.sim.mutants import MUTANTS, UNPROVEN, Mutant

MAX_SEEDS = 60


def seeds_to_find(mutant: Mutant, most: int = MAX_SEEDS) -> tuple[int | None, str]:
    """(the first seed that finds it, the invariant that it breaks)."""
    for seed in range(1, most + 1):
        with mutant():
            result = simulate(seed)
        if result.breach:
            return seed, result.breach
    return None, f"not found in {most}"


def main(names: list[str]) -> None:
    redirect_logs()
    sys.stdout.write("| defect | what it does | found by seed | invariant |\n|---|---|---|---|\n")
    for name in names or list(MUTANTS):
        mutant = (MUTANTS | UNPROVEN)[name]
        seed, breach = seeds_to_find(mutant)
        words = (mutant.__doc__ or "").splitlines()[0]
        sys.stdout.write(f"| {name} | {words} | {seed or '-'} | {breach} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
