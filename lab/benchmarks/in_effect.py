"""How soon a change is in effect in every scheduler: any of them answers, so several answers in a row have to agree."""

from __future__ import annotations

import argparse
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
import uvloop

from bus.service.telemetry import configure_logging
from lab.benchmarks.street import positive

TIMEOUT_S = 60.0
Figures = dict[str, dict[str, float]]


async def in_effect_ms(agrees: Callable[[], Awaitable[bool]], in_a_row: int, what: str) -> float:
    """Milliseconds from now until the first of so many answers in a row that agree. what: is changed, for a message."""
    changed = since = time.perf_counter()
    agreed = 0
    while agreed < in_a_row:
        if time.perf_counter() - changed > TIMEOUT_S:
            raise SystemExit(f"{what}: not in effect everywhere after {TIMEOUT_S:g} s")
        before = time.perf_counter()
        if not await agrees():
            agreed = 0
            continue
        since = since if agreed else before
        agreed += 1
    return (since - changed) * 1000


def run(measure: Callable[[int, int], Coroutine[Any, Any, Figures]], *, description: str | None, rounds: int) -> int:
    """Measure (rounds, schedulers) as the command line has them, and print. rounds: without `--rounds`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=rounds)
    parser.add_argument("--schedulers", type=positive, default=3)
    options = parser.parse_args()
    configure_logging(process="bench", role="bench", level="error", style="pretty")
    figures = uvloop.run(measure(options.rounds, options.schedulers))
    print(msgspec.json.format(msgspec.json.encode(figures), indent=2).decode())
    return 0
