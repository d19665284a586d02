"""Small plots as inline SVG: lines over time, bars, ranges on a log axis, a heat map. Places here, markup by templates.

Our own, because a report has to be read in the light and in the dark, show its numbers under the mouse, and open
without a network: colours are the page's CSS variables and tooltips are SVG's <title>. matplotlib's SVG has neither
(its colours are fixed when it is drawn), and would bring nine more packages for five kinds of plot.

Points and cells are bounded by callers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from msgspec import Struct

from lab.load.report.page import number, plot, truncate

WIDTH, HEIGHT = 760.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 22.0, 10.0, 40.0
MARK_ROWS = 3
HEAT_LEGEND = (0.0, 0.02, 0.1, 0.25, 0.5, 0.75, 1.0)
FEW_POINTS = 40  # so few are drawn as dots too


class Size(Struct, frozen=True):
    """Of one plot: `bottom` is that of its rows, `row` the height of one."""

    height: float = HEIGHT
    bottom: float = 0.0
    row: float = 0.0
    width: float = WIDTH
    top: float = TOP


class Series(Struct, frozen=True):
    """One line: a value for every x, None where there is none."""

    name: str
    values: Sequence[float | None]


class Range(Struct, frozen=True):
    """One row of `ranges`: five rising values, and the text under the mouse."""

    name: str
    values: tuple[float, float, float, float, float]
    note: str


class Axis(Struct, frozen=True):
    """A scale from values to pixels, and where its ticks are."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value; what lies outside is drawn at the edge."""
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, max(value, self.floor)))
        share = (value - low) / (high - low)
        return self.start + (self.end - self.start) * min(max(share, 0.0), 1.0)

    @property
    def floor(self) -> float:
        """Nothing below is drawn on a log scale, which has no zero."""
        return self.low if self.log else -math.inf

    def ticks(self) -> list[float]:
        """Round values within the scale: 1, 2 and 5 times powers of ten."""
        if self.log:
            steps = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            few = len(steps) > 4
            found = [m * 10.0**power for power in steps for m in ((1,) if few else (1, 2, 5))]
        else:
            step = rounded((self.high - self.low) / 5)
            found = [step * n for n in range(math.ceil(self.low / step), math.floor(self.high / step + 1e-9) + 1)]
        return [tick for tick in found if self.low * (1 - 1e-9) <= tick <= self.high * (1 + 1e-9)]


def rounded(value: float) -> float:
    """The next of 1, 2, 5 times a power of ten, at or above."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= value * (1 - 1e-9))


def linear(high: float, start: float, end: float) -> Axis:
    """From nought to a round number at or above `high`."""
    high = high if high > 0 else 1.0
    step = rounded(high / 5)
    return Axis(0.0, step * math.ceil(high / step - 1e-9), start, end)


def logarithmic(low: float, high: float, start: float, end: float) -> Axis:
    """Around positive values, at least a factor of ten."""
    low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
    return Axis(low, high if high > low else 10 * low, start, end, log=True)


def lines(
    title: str,
    x: Sequence[float],
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    unit: str = "s",
    joined: bool = True,
) -> str:
    """Values over time, or over whatever x is in `unit`; under the mouse all of them at that place.

    joined: nothing is known between two samples of what comes and goes in between, so they are dots; nought is none.
    """
    top = max((v for one in series for v in one.values if v is not None), default=0.0)
    across = Axis(x[0], x[-1] if x[-1] > x[0] else x[0] + 1.0, LEFT, WIDTH - RIGHT)
    up = linear(top, HEIGHT - BOTTOM, TOP)
    places = [across.at(value) for value in x]
    drawn = [(_line if joined else _dots)(one, places, up) for one in series]
    columns = _columns(x, series, across, unit)
    return plot("lines", title, Size(), across, up, drawn, columns, [one.name for one in series], (x_label, y_label))


def bars(title: str, edges: Sequence[float], counts: Sequence[int], marks: dict[str, float], *, x_label: str) -> str:
    """A histogram on a log axis: `counts[i]` lie between `edges[i]` and `edges[i + 1]`; marks are lines with a name."""
    across = logarithmic(edges[0], edges[-1], LEFT, WIDTH - RIGHT)
    up = linear(max(counts), HEIGHT - BOTTOM, TOP + 12 * MARK_ROWS + 4)
    total = sum(counts)
    boxes = [
        (
            across.at(low),
            across.at(high),
            up.at(count),
            f"{number(low)} to {number(high)}: {count:,} ({count / total:.1%})",
        )
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
        if count
    ]
    return plot("bars", title, Size(), across, up, boxes, _marks(across, marks), (x_label, "boots"))


def _marks(across: Axis, marks: dict[str, float]) -> Iterator[tuple[float, int, float, str]]:
    """(place, row, middle of the label, label): in rows, so that neighbours do not cover each other; those at one place
    share a label.
    """
    places: dict[str, list[str]] = {}
    for name, value in marks.items():
        places.setdefault(number(value), []).append(name)
    ended = [-math.inf] * MARK_ROWS  # where the last label of each row did
    for text, names in places.items():
        at, label = across.at(marks[names[0]]), f"{', '.join(names)}: {text}"
        half = 3.2 * len(label)
        row = next((row for row in range(MARK_ROWS) if ended[row] < at - half), MARK_ROWS - 1)
        ended[row] = at + half
        yield at, row, min(max(at, LEFT + half), WIDTH - half), label


def ranges(title: str, rows: Sequence[Range], *, x_label: str) -> str:
    """A row each on a log axis: thin from the first to the last value, thick in between, a dot at the middle one."""
    low = min(row.values[0] for row in rows)
    across = logarithmic(low, max(row.values[-1] for row in rows), LEFT + 60, WIDTH - RIGHT)
    bottom = TOP + 26.0 * len(rows)
    return plot("ranges", title, Size(bottom + BOTTOM, bottom), across, rows, x_label)


def shares(title: str, parts_of: Sequence[tuple[str, float]], *, unit: str) -> str:
    """One bar, cut into the parts of a sum."""
    total = sum(value for _, value in parts_of) or 1.0
    parts, at = [], 0.0
    for name, value in parts_of:
        width = value / total * WIDTH
        parts.append((at, width, f"{name}: {number(value)} {unit}, {value / total:.1%}"))
        at += width
    names = [f"{name} {number(value)} {unit}" for name, value in parts_of]
    return plot("shares", f"{title}, {number(total)} {unit} together", Size(34.0), parts, names)


def heat(
    title: str, x: Sequence[float], rows: Sequence[str], cells: Sequence[Sequence[tuple[float, str]]], *, x_label: str
) -> str:
    """A cell for each row and x: how full (0 to 1) and the text under the mouse. Row names only where one is given.

    The scale is the same in every plot, 0 to 1. Its colour goes with the root, so that hosts at 2 % and at 6 % differ,
    and the legend names them.
    """
    edges = [*x, x[-1] + min((after - at for at, after in itertools.pairwise(x)), default=1.0)]
    size = min(max(360.0 / len(rows), 4.0), 22.0)
    across = Axis(edges[0], edges[-1], LEFT + 40, WIDTH - RIGHT)
    bottom = TOP + size * len(rows)
    places = [(across.at(left), across.at(right) - across.at(left)) for left, right in itertools.pairwise(edges)]
    drawn = [
        (name, TOP + size * at, [(*place, *cell) for place, cell in zip(places, row, strict=False)])
        for at, (name, row) in enumerate(zip(rows, cells, strict=True))
    ]
    return plot("heat", title, Size(bottom + BOTTOM, bottom, size), across, drawn, x_label, HEAT_LEGEND)


Drawn = tuple[str | None, list[tuple[float, float]]]


def _line(one: Series, xs: Sequence[float], up: Axis) -> Drawn:
    """A line with gaps where there is no value; dots where there are few, or one alone, which makes no line."""
    path, dots = [], []
    around = zip(xs, (None, *one.values), one.values, (*one.values[1:], None), strict=False)
    for x, before, value, after in around:
        if value is None:
            continue
        y = up.at(value)
        path.append(f"{'M' if before is None else 'L'}{x:.1f} {y:.1f}")
        if len(xs) <= FEW_POINTS or before is after is None:
            dots.append((x, y))
    return "".join(path), dots


def _dots(one: Series, xs: Sequence[float], up: Axis) -> Drawn:
    return None, [(x, up.at(value)) for x, value in zip(xs, one.values, strict=True) if value]


def _columns(
    x: Sequence[float], series: Sequence[Series], across: Axis, unit: str
) -> Iterator[tuple[float, float, str]]:
    """Invisible columns with the values of all lines at their place."""
    half = (across.end - across.start) / max(len(x) - 1, 1) / 2
    for at, moment in enumerate(x):
        known = [(one.name, one.values[at]) for one in series]
        note = [f"{truncate(name)}: {number(value)}" for name, value in known if value is not None]
        yield across.at(moment) - half, 2 * half, "\n".join([f"at {number(moment)} {unit}", *note])
