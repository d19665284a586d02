"""Two results of lab/benchmarks/street.py that were measured at the same time, side by side, for scripts/steps/pair.

`python -m lab.benchmarks.street_pair EARLIER.json NOW.json` prints the table again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

Figures = Mapping[str, Any]  # as the JSON has them: an earlier version has fewer


def main() -> int:
    """Print a table of Markdown."""
    earlier, now = (msgspec.json.decode(Path(name).read_bytes()) for name in sys.argv[1:3])
    for line in table(earlier, now):
        print(line)
    return 0


def table(earlier: Figures, now: Figures) -> Iterator[str]:
    """The figures that both have, and how many times the earlier one the present one is."""
    yield "| figure | earlier | now | ratio |"
    yield "| --- | --- | --- | --- |"
    before = dict(rows(earlier))
    for name, value in rows(now):
        if name in before:
            ratio = f"{value / before[name]:.2f}" if before[name] else ""
            yield f"| {name} | {before[name]:.2f} | {value:.2f} | {ratio} |"


def rows(figures: Figures) -> Iterator[tuple[str, float]]:
    """The compared figures, by name."""
    yield "boots a second, at once", figures["boots_per_s"]
    yield "alone, p50 ms", figures["idle_p50_ms"]
    for stage, ms in figures.get("idle_spent_ms", {}).items():
        yield f"alone, ms {stage}", ms
    costs = {"alone": figures.get("costs_alone"), "at once": figures.get("costs")}
    for share, held in figures.get("at_rates", {}).items():
        yield f"at {share}, p50 ms", held["p50"]
        yield f"at {share}, p99 ms", held["p99"]
    costs |= {f"at {share}": one for share, one in figures.get("costs_at_rates", {}).items()}
    for load, one in costs.items():
        if one is not None:
            yield f"{load}, CPU ms a boot", one["cpu_s_per_1000_boots_all"]
            yield f"{load}, broker messages a boot", one["broker_messages_per_boot"]
            yield f"{load}, transactions a boot", one["transactions_per_boot"]


if __name__ == "__main__":
    sys.exit(main())
