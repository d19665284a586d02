"""The same seeds in other interpreters: a run has to be the same, event for event, whatever Python and hash seed."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from lab.simulation.run import simulate
from lab.simulation.widening import WIDENED, Widening

ROOT = Path(__file__).parents[2]
LIMIT_S = 3600.0  # so long may another interpreter take


def digests(first: int, count: int, kinds: Collection[Widening] = WIDENED) -> dict[int, str]:
    """Of so many seeds from this one on, in this process."""
    return {seed: simulate(seed, kinds).digest for seed in range(first, first + count)}


def digests_of(python: str, first: int, count: int) -> dict[int, str]:
    """The same in a process of another interpreter, under a hash seed of its own."""
    requested = [python, "-m", "lab.simulation", "--digests", "--first-seed", str(first), "--seeds", str(count)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(random.randrange(2**32))}
    output = subprocess.run(
        requested, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=LIMIT_S
    ).stdout
    return {int(seed): digest for seed, digest in (line.split() for line in output.splitlines())}


def differing(here: Mapping[int, str], there: Mapping[int, str]) -> list[int]:
    """The seeds whose runs are not the same."""
    return sorted(seed for seed in here.keys() | there.keys() if here.get(seed) != there.get(seed))


def compare(pythons: Sequence[str], first: int, here: Mapping[int, str]) -> dict[str, list[int]]:
    """{interpreter: seeds that run otherwise there than here}. here: the digests of the seeds from `first` on."""
    return {python: differing(here, digests_of(python, first, len(here))) for python in pythons}
