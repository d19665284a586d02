"""Amounts beside random inventories, for the rule of units."""

from __future__ import annotations

import random


def amounts_and_units(number: int, seed: int = 1) -> list[tuple[int, int, int, int]]:
    """Rows of (amount, min_unit, max_unit, step_size), many at the edges of what is allowed."""
    rng = random.Random(f"units {seed}")
    rows = []
    for _ in range(number):
        low, step = rng.choice((1, 2, 7, rng.randint(1, 500))), rng.choice((1, 2, 3, rng.randint(1, 400)))
        high = rng.choice((low, low + step, rng.randint(1, 2000), 2**31 - 1))
        near = rng.choice((low, high, step, step * rng.randint(1, 9), rng.randint(1, 2000)))
        rows.append((max(1, near + rng.choice((-1, 0, 0, 1))), low, high, step))
    return rows
