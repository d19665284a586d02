"""Two load runs side by side: differences in the requests, in the results, and which of them are significant.

A percentile of one run is a guess at what the system does. How good a guess is taken from the run itself: it is cut
into blocks of consecutive boots, blocks are drawn again and again, and the spread of the percentile over the draws is
the interval. Blocks, because neighbours wait in the same queues: boots drawn one by one would claim far too much.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from msgspec import Struct

from berth.text import printable_lines
from lab.load.record import STAGES, LoadRecord
from lab.load.report.figures import PERCENTILES, Array, latencies_ms, stages_ms
from lab.load.report.page import number, truncate
from lab.load.report.report import facts

DRAWS = 1000
BINS = 1000  # a percentile is as exact as one in so many
SURE = 0.95
# Fewer blocks do not compare; a percentile with fewer boots beyond it is one boot's luck.
LEAST_BLOCKS, LEAST_BEYOND = 10, 5
# Runs that differ in these are not comparable.
QUESTION = ("mode", "boots", "mix", "rate_per_s", "ramp_from_per_s", "ramp_s", "concurrency", "churn", "trace", "speed")
INTERESTING = ("p50", "p99")
NONE = "-"


class Line(Struct, frozen=True, kw_only=True):
    """One figure of both runs. interval: of the ratio b/a, where the runs are large enough. meaning: what it shows."""

    what: str
    a: float | None
    b: float | None
    interval: tuple[float, float] | None = None
    meaning: str = ""

    @property
    def ratio(self) -> float | None:
        """b over a."""
        return None if not self.a or self.b is None else self.b / self.a


class Comparison(Struct, frozen=True, kw_only=True):
    """The result of `compare`. differences: (what, in a, in b). conclusions: sentences, the weightiest first."""

    names: tuple[str, str]
    differences: tuple[tuple[str, str, str], ...]
    lines: tuple[Line, ...]
    conclusions: tuple[str, ...]
    text: str = ""


def compare(a: LoadRecord, b: LoadRecord, *, names: tuple[str, str] = ("a", "b"), seed: int = 1) -> Comparison:
    """Two runs; `a` is what `b` is measured by. The same records and seed give the same words."""
    rng = np.random.default_rng(seed)
    differences = tuple(_differences(a, b))
    lines = (*_rates(a, b), *_percentiles(a, b, rng), *_stages(a, b, rng), *_per_thousand(a, b))
    if any(what in QUESTION for what, _, _ in differences):
        lines = tuple(
            msgspec.structs.replace(line, meaning=_OTHERWISE.get(line.meaning, line.meaning)) for line in lines
        )
    found = Comparison(names=names, differences=differences, lines=lines, conclusions=())
    found = msgspec.structs.replace(found, conclusions=tuple(_conclusions(found, a, b)))
    return msgspec.structs.replace(found, text=_text(found))


def interval(a: Array, b: Array, share: float, rng: np.random.Generator) -> tuple[float, float] | None:
    """Where the ratio of a percentile (b over a) lies, as sure as SURE; None: too few boots.

    a, b: values in the order in which the boots were meant to leave.
    """
    few = min(a.size, b.size)
    if few < LEAST_BLOCKS**2 or few * (1 - share) < LEAST_BEYOND:
        return None
    ratios = _drawn(b, share, rng) / np.maximum(_drawn(a, share, rng), 1e-9)
    low, high = np.quantile(ratios, ((1 - SURE) / 2, (1 + SURE) / 2)).tolist()
    return low, high


def _drawn(values: Array, share: float, rng: np.random.Generator) -> Array:
    """The percentile of each of DRAWS runs made of blocks of this one.

    Values are counted in bins whose edges are values of the run, each block by itself; a draw is then a weighted sum of
    counts, which costs the same for a thousand boots as for a million.
    """
    edges = np.unique(np.quantile(values, np.linspace(0.0, 1.0, BINS + 1), method="inverted_cdf"))
    places = np.searchsorted(edges, values, side="left")
    blocks = np.array_split(places, math.isqrt(values.size))
    counts = np.array([np.bincount(block, minlength=edges.size) for block in blocks])
    draws = rng.multinomial(len(blocks), np.full(len(blocks), 1 / len(blocks)), size=DRAWS)
    # In 32 bits a count is exact up to 16 million boots.
    upto = draws.astype(np.float32) @ counts.cumsum(axis=1).astype(np.float32)
    return np.asarray(edges[(upto < share * upto[:, -1:]).sum(axis=1)], dtype=np.float64)


def _differences(a: LoadRecord, b: LoadRecord) -> Iterator[tuple[str, str, str]]:
    pairs = ((facts(a.settings), facts(b.settings), ""), (facts(a.machine), facts(b.machine), "machine: "))
    for of_a, of_b, kind in pairs:
        for name in dict.fromkeys([*of_a, *of_b]):
            if of_a.get(name) != of_b.get(name):
                yield kind + name, of_a.get(name, NONE), of_b.get(name, NONE)


def _rates(a: LoadRecord, b: LoadRecord) -> Iterator[Line]:
    yield Line(what="active boots a second", a=a.totals.boots_per_s, b=b.totals.boots_per_s)


def _percentiles(a: LoadRecord, b: LoadRecord, rng: np.random.Generator) -> Iterator[Line]:
    of_a, of_b = latencies_ms(a.boots), latencies_ms(b.boots)
    for name, share in PERCENTILES.items():
        yield _line(f"latency {name}, ms", of_a, of_b, share, rng if name in INTERESTING else None)


def _stages(a: LoadRecord, b: LoadRecord, rng: np.random.Generator) -> Iterator[Line]:
    of_a, of_b = stages_ms(a.boots), stages_ms(b.boots)
    for stage in STAGES:
        if stage in of_a and stage in of_b:
            for name in INTERESTING:
                yield _line(f"{stage} {name}, ms", of_a[stage], of_b[stage], PERCENTILES[name], rng)


def _line(what: str, a: Array, b: Array, share: float, rng: np.random.Generator | None) -> Line:
    one, two = (float(np.quantile(v, share, method="inverted_cdf")) if v.size else None for v in (a, b))
    found = interval(a, b, share, rng) if rng is not None else None
    return Line(what=what, a=one, b=two, interval=found, meaning="" if rng is None else _meaning(found))


# What a figure shows where the requests of the runs differ: higher or lower, and nothing about the system.
_OTHERWISE = {"slower": "higher", "faster": "lower"}


def _meaning(found: tuple[float, float] | None) -> str:
    if found is None:
        return "too few boots to compare"
    low, high = found
    if low > 1:
        return "slower"
    return "faster" if high < 1 else "no difference shown"


def _per_thousand(a: LoadRecord, b: LoadRecord) -> Iterator[Line]:
    def share(record: LoadRecord, count: int | None) -> float | None:
        return None if count is None or not record.totals.boots else 1000 * count / record.totals.boots

    def retried(record: LoadRecord) -> int:
        return sum(attempts > 1 for attempts in record.boots.attempts)

    yield Line(what="claims lost, a 1,000 boots", a=share(a, a.totals.conflicts), b=share(b, b.totals.conflicts))
    yield Line(what="tried on more than one host, a 1,000", a=share(a, retried(a)), b=share(b, retried(b)))
    refused = [share(record, record.totals.backpressure) for record in (a, b)]
    yield Line(what="refused by backpressure, a 1,000", a=refused[0], b=refused[1])
    for outcome in dict.fromkeys([*a.totals.outcomes, *b.totals.outcomes]):
        of_a, of_b = a.totals.outcomes.get(outcome, 0), b.totals.outcomes.get(outcome, 0)
        if of_a or of_b:
            yield Line(what=f"{truncate(outcome)}, a 1,000 boots", a=share(a, of_a), b=share(b, of_b))


def _conclusions(found: Comparison, a: LoadRecord, b: LoadRecord) -> Iterator[str]:
    one, two = (truncate(name) for name in found.names)
    requested = [what for what, _, _ in found.differences if what in QUESTION]
    if requested:
        yield f"The requests differ: {', '.join(requested)}. The differences below may come from that alone."
    elif found.differences:
        yield f"The requests are the same; the differences: {', '.join(what for what, _, _ in found.differences)}."
    else:
        yield "Settings and machine are the same."
    for name in INTERESTING:
        (line,) = (line for line in found.lines if line.what == f"latency {name}, ms")
        yield f"Latency {name}: {_message_of(line, one, two)}"
    if a.totals.outcomes.get("lost") or b.totals.outcomes.get("lost"):
        yield "Boots were lost: look into that before comparing speeds."
    yield (
        f"Intervals are {SURE:.0%}, from {DRAWS} draws of blocks of consecutive boots. They know these two runs only: "
        "run to run a system differs by more, and a rate has no interval at all. Repeat each before trusting a little."
    )


def _message_of(line: Line, one: str, two: str) -> str:
    if line.ratio is None:
        return "not known of both."
    if line.interval is None:
        return f"{two} has {line.ratio:.2f} times that of {one}; {line.meaning}."
    low, high = line.interval
    within = f"(between {low:.2f} and {high:.2f})"
    if line.meaning == "no difference shown":
        return f"no difference shown; {two} has {line.ratio:.2f} times that of {one} {within}."
    if line.meaning in _OTHERWISE.values():
        return f"that of {two} is {line.meaning}, {line.ratio:.2f} times that of {one} {within}; the requests differ."
    return f"{two} is {line.meaning}, {line.ratio:.2f} times that of {one} {within}."


def _cells(found: Comparison) -> list[list[str]]:
    def shown(value: float | None) -> str:
        return NONE if value is None else number(value)

    def ratio(line: Line) -> str:
        return NONE if line.ratio is None else f"{line.ratio:.2f}"

    def within(line: Line) -> str:
        return "" if line.interval is None else "{:.2f} to {:.2f}".format(*line.interval)

    return [[line.what, shown(line.a), shown(line.b), ratio(line), within(line), line.meaning] for line in found.lines]


def _text(found: Comparison) -> str:
    names = [truncate(name) for name in found.names]
    parts = [*found.conclusions, ""]
    if found.differences:
        parts += [*_aligned(["different", *names], found.differences), ""]
    parts += _aligned(["", *names, "ratio", "95 % interval", ""], _cells(found), numbers=True)
    return printable_lines("\n".join(parts)) + "\n"


def _aligned(headers: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False) -> list[str]:
    widths = [max(len(row[at]) for row in (headers, *rows)) for at in range(len(headers))]
    right = range(1, len(headers) - 1) if numbers else range(0)

    def line(row: Sequence[str]) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        return "  ".join(c.rjust(width) if at in right else c.ljust(width) for at, (c, width) in cells).rstrip()

    return [line(row) for row in (headers, *rows)]
