"""Small plots as inline SVG: lines over time, bars, ranges on a log axis, a heat map. Numbers in, markup out.

Our own, because a report has to be read in the light and in the dark, show its numbers under the mouse, and open
without a network: colours are the page's CSS variables and tooltips are SVG's <title>. matplotlib's SVG has neither
(its colours are fixed when it is drawn), and would bring nine more packages for five kinds of plot.

Every text is escaped here, and not by callers. Points and cells are bounded by callers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from html import escape

from msgspec import Struct

WIDTH, HEIGHT = 760.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 22.0, 10.0, 40.0
MARK_ROWS = 3
COLOURS = 8  # the page defines --c0 to --c7
MAX_LABEL = 60  # letters of one name; the tooltip has a few more
HEAT_LEGEND = (0.0, 0.02, 0.1, 0.25, 0.5, 0.75, 1.0)
FEW_POINTS = 40  # so few are drawn as dots too


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


def number(value: float) -> str:
    """A number as a person writes it: three digits that matter, no exponent in between."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "-"
    if abs(value) >= 1e9 or abs(value) < 1e-4:
        return f"{value:.3g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def cut(name: str) -> str:
    """A name from outside, not longer than a plot can bear."""
    return name if len(name) <= MAX_LABEL else name[: MAX_LABEL - 1] + "…"


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
    parts = [*_frame(across, up, x_label, y_label)]
    for at, one in enumerate(series):
        draw = _line if joined else _dots
        parts += draw(one, [across.at(v) for v in x], up, f"c{at % COLOURS}")
    parts += _columns(x, series, across, unit)
    return _figure(title, parts, legend=[one.name for one in series])


def bars(title: str, edges: Sequence[float], counts: Sequence[int], marks: dict[str, float], *, x_label: str) -> str:
    """A histogram on a log axis: `counts[i]` lie between `edges[i]` and `edges[i + 1]`; marks are lines with a name."""
    across = logarithmic(edges[0], edges[-1], LEFT, WIDTH - RIGHT)
    up = linear(max(counts), HEIGHT - BOTTOM, TOP + 12 * MARK_ROWS + 4)
    total = sum(counts)
    parts = [*_frame(across, up, x_label, "boots")]
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        left, y = across.at(low), up.at(count)
        note = f"{number(low)} to {number(high)}: {count:,} ({count / total:.1%})"
        box = _rect(left, y, max(across.at(high) - left - 0.6, 0.6), up.start - y)
        parts.append(f'<rect class="c0 fill" {box}><title>{escape(note)}</title></rect>' if count else "")
    return _figure(title, [*parts, *_marks(across, up, marks)])


def _marks(across: Axis, up: Axis, marks: dict[str, float]) -> Iterator[str]:
    """Lines with names in rows, so that neighbours do not cover each other; those at one place share a label."""
    places: dict[str, list[str]] = {}
    for name, value in marks.items():
        places.setdefault(number(value), []).append(name)
    ended = [-math.inf] * MARK_ROWS  # where the last label of each row did
    for text, names in places.items():
        at, label = across.at(marks[names[0]]), f"{', '.join(names)}: {text}"
        half = 3.2 * len(label)
        row = next((row for row in range(MARK_ROWS) if ended[row] < at - half), MARK_ROWS - 1)
        ended[row] = at + half
        yield f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP + 12 * row + 12}" y2="{up.start:.1f}"/>'
        yield _text(min(max(at, LEFT + half), WIDTH - half), TOP + 8 + 12 * row, label, "middle")


def ranges(title: str, rows: Sequence[Range], *, x_label: str) -> str:
    """A row each on a log axis: thin from the first to the last value, thick in between, a dot at the middle one."""
    low = min(row.values[0] for row in rows)
    across = logarithmic(low, max(row.values[-1] for row in rows), LEFT + 60, WIDTH - RIGHT)
    bottom = TOP + 26.0 * len(rows)
    parts = [*_across(across, bottom, x_label)]
    for at, row in enumerate(rows):
        y, (least, quarter, middle, most, last) = TOP + 26 * at + 13, (across.at(value) for value in row.values)
        colour = f"c{at % COLOURS}"
        parts += [
            _text(LEFT + 52, y + 4, cut(row.name), "end"),
            f'<g><title>{escape(row.note)}</title><rect class="hit" {_rect(LEFT + 60, y - 13, WIDTH, 26)}/>',
            f'<line class="{colour} thin" x1="{least:.1f}" x2="{last:.1f}" y1="{y}" y2="{y}"/>',
            f'<rect class="{colour} fill" {_rect(quarter, y - 5, max(most - quarter, 1), 10)}/>',
            f'<circle class="dot" cx="{middle:.1f}" cy="{y}" r="3.5"/></g>',
        ]
    return _figure(title, parts, height=bottom + BOTTOM)


def shares(title: str, parts_of: Sequence[tuple[str, float]], *, unit: str, longest: float = 0.0) -> str:
    """One bar, cut into the parts of a sum. longest: the sum of the longest of several bars on one scale."""
    total = sum(value for _, value in parts_of) or 1.0
    title = f"{title}, {number(total)} {unit} together"
    parts, at = [], 0.0
    for row, (name, value) in enumerate(parts_of):
        width = value / max(total, longest) * WIDTH
        note = f"{name}: {number(value)} {unit}, {value / total:.1%}"
        box = _rect(at, 2, max(width - 1, 0.5), 30)
        parts.append(f'<rect class="c{row % COLOURS} fill" {box}><title>{escape(note)}</title></rect>')
        at += width
    names = [f"{name} {number(value)} {unit}" for name, value in parts_of]
    return _figure(title, parts, height=34.0, legend=names)


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
    parts = [*_across(across, bottom, x_label)]
    for at, (name, row) in enumerate(zip(rows, cells, strict=True)):
        y = TOP + size * at
        parts.append(_text(LEFT + 34, y + 9, cut(name), "end") if name else "")
        for left, right, (share, note) in zip(edges, edges[1:], row, strict=False):
            box = _rect(across.at(left), y, across.at(right) - across.at(left) + 0.3, size + 0.3)
            parts.append(
                f'<rect class="heat" fill-opacity="{_depth(share)}" {box}><title>{escape(note)}</title></rect>'
            )
    legend = "".join(
        f'<li><i class="heat" style="opacity:{_depth(share)}"></i>{share:.0%}</li>' for share in HEAT_LEGEND
    )
    return _figure(title, parts, height=bottom + BOTTOM, below=f'<ul class="scale">{legend}</ul>')


def _depth(share: float) -> str:
    return f"{math.sqrt(min(max(share, 0.0), 1.0)):.2f}"


def _frame(across: Axis, up: Axis, x_label: str, y_label: str) -> Iterator[str]:
    for tick in up.ticks():
        y = up.at(tick)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(LEFT - 6, y + 4, number(tick), "end")
    middle = (up.start + up.end) / 2
    yield f'<g transform="rotate(-90 12 {middle:.0f})">{_text(12, middle, y_label, "middle", "label")}</g>'
    yield from _across(across, up.start, x_label)


def _across(across: Axis, bottom: float, label: str) -> Iterator[str]:
    for tick in across.ticks():
        x = across.at(tick)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom:.1f}"/>'
        yield _text(x, bottom + 14, number(tick), "middle")
    yield f'<line class="axis" x1="{across.start}" x2="{across.end}" y1="{bottom:.1f}" y2="{bottom:.1f}"/>'
    yield _text((across.start + across.end) / 2, bottom + 32, label, "middle", "label")


def _line(one: Series, xs: Sequence[float], up: Axis, colour: str) -> Iterator[str]:
    """A line with gaps where there is no value; dots where there are few, or one alone, which makes no line."""
    path = []
    around = zip(xs, (None, *one.values), one.values, (*one.values[1:], None), strict=False)
    for x, before, value, after in around:
        if value is None:
            continue
        y = f"{up.at(value):.1f}"
        path.append(f"M{x:.1f} {y}" if before is None else f"L{x:.1f} {y}")
        if len(xs) <= FEW_POINTS or before is after is None:
            yield f'<circle class="{colour} fill" cx="{x:.1f}" cy="{y}" r="2.5"/>'
    yield f'<path class="{colour} line" d="{"".join(path)}"/>'


def _dots(one: Series, xs: Sequence[float], up: Axis, colour: str) -> Iterator[str]:
    for x, value in zip(xs, one.values, strict=True):
        if value:
            yield f'<circle class="{colour} fill" cx="{x:.1f}" cy="{up.at(value):.1f}" r="2.5"/>'


def _columns(x: Sequence[float], series: Sequence[Series], across: Axis, unit: str) -> Iterator[str]:
    """Invisible columns with the values of all lines at their place."""
    half = (across.end - across.start) / max(len(x) - 1, 1) / 2
    for at, moment in enumerate(x):
        known = [(one.name, one.values[at]) for one in series]
        note = "\n".join(f"{cut(name)}: {number(value)}" for name, value in known if value is not None)
        box = _rect(across.at(moment) - half, TOP, 2 * half, HEIGHT - TOP - BOTTOM)
        yield f'<rect class="hit" {box}><title>{escape(f"at {number(moment)} {unit}{chr(10)}{note}")}</title></rect>'


def _rect(x: float, y: float, width: float, height: float) -> str:
    return f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _figure(
    title: str, parts: Sequence[str], *, height: float = HEIGHT, legend: Sequence[str] = (), below: str = ""
) -> str:
    names = "".join(f'<li><i class="c{at % COLOURS}"></i>{escape(cut(name))}</li>' for at, name in enumerate(legend))
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
        f"{f'<ul>{names}</ul>' if names else ''}{below}</figure>"
    )
