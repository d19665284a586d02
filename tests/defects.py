"""docs/reference/defects.md: the deliberate defects and what finds each, from where they are defined.

python -m tests.defects        writes the page anew (scripts/nightly docs does)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping

from tests.plants import PLANTS, ROOT
from tests.sim import mutants_of_gangs, mutants_of_moves
from tests.sim.mutants import MUTANTS, UNPROVEN, Mutant
from tests.sim.seeds_to_find import recorded

PAGE = ROOT / "docs" / "reference" / "defects.md"

HEAD = """# Deliberate defects

Derived by `python -m tests.defects` (`scripts/nightly docs`); a test compares. The simulation's checks are in
[Reliability](../explanation/reliability.md).

## Found by the simulation

Each replaces a function or a class while a seed runs. The seed named is tried first, then the first sixty (of moves and
gangs: the first that have some). `scripts/mutants` runs all of them; `python -m tests.sim.seeds_to_find` prints which
invariant each breaks. More stand in `tests/sim/mutants_of_*.py`, or in the tests of what they break
(`tests/sim/test_mutants_of_*.py`).

| defect | what it does | seed |
| --- | --- | --- |
"""
BY_TABLE = """
## Found by tests of the conductor's table

No seed is on record that finds these; `tests/sim/test_mutants_of_moves.py` names the test that does.

| defect | what it does |
| --- | --- |
"""
BY_NONE = """
## Found by no seed

Or by one seed of many: looked for, and what else repairs them or keeps them from being seen stands beside each
(`UNPROVEN` in `tests/sim`).

| defect | what it does |
| --- | --- |
"""
PLANTED = """
## Planted as edits of the source

`python -m tests.plants` plants each in a copy of the tree and runs the named tests, one of which has to fail. It is not
in CI, but that each still applies is a test there. The output of its last run is a [note](../lab/plants.md).

| defect | what it does | where | tests |
| --- | --- | --- | --- |
"""


def render() -> str:
    """The page, whole."""
    of_moves, of_gangs = mutants_of_moves.MUTANTS_OF_MOVES, mutants_of_gangs.MUTANTS_OF_GANGS
    seeds: Mapping[str, int] = {**recorded(), **mutants_of_moves.FOUND_BY, **mutants_of_gangs.FOUND_BY}
    found = (*MUTANTS.values(), *of_moves, *of_gangs)
    rows = [f"| {one.__name__} | {does(one)} | {seeds.get(one.__name__, '-')} |\n" for one in found]
    planted = [
        f"| {one.name} | {one.does} | `{one.file}` | {', '.join(f'`{test}`' for test in one.tests.split())} |\n"
        for one in PLANTS
    ]
    return "".join(
        [
            *(HEAD, *rows),
            *(BY_TABLE, *without_seed(mutants_of_moves.FOUND_BY_THE_TABLE)),
            *(BY_NONE, *without_seed(UNPROVEN.values())),
            *(PLANTED, *planted),
        ]
    )


def without_seed(mutants: Iterable[Mutant]) -> list[str]:
    """Rows of two columns."""
    return [f"| {one.__name__} | {does(one)} |\n" for one in mutants]


def does(mutant: Mutant) -> str:
    """The first line of a mutant's docstring, without its full stop."""
    return (inspect.getdoc(mutant) or "").splitlines()[0].rstrip(".")


if __name__ == "__main__":
    PAGE.write_text(render())
