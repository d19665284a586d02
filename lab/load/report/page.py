"""The elements of every page, made by the templates beside: each text is escaped there, and not by callers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader

MAX_LABEL = 60  # letters of one name; the tooltip has a few more


def number(value: float) -> str:
    """A number as a person writes it: three digits that matter, no exponent in between."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "-"
    if abs(value) >= 1e9 or abs(value) < 1e-4:
        return f"{value:.3g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def truncate(name: str) -> str:
    """A name from outside, not longer than a plot can bear."""
    return name if len(name) <= MAX_LABEL else name[: MAX_LABEL - 1] + "…"


def _templates() -> Environment:
    environment = Environment(loader=PackageLoader("lab.load"), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "number": number,
        "cut": truncate,
        "px": "{:.1f}".format,
        "at": lambda value, axis: axis.at(value),
        "depth": lambda share: f"{math.sqrt(min(max(share, 0.0), 1.0)):.2f}",
    }
    return environment


TEMPLATES = _templates()
_PARTS: Any = TEMPLATES.get_template("parts.html").module

table: Callable[..., str] = _PARTS.table  # headers, rows; caption; words: so many first columns, the others numbers
tiles: Callable[..., str] = _PARTS.tiles  # large numbers: (value, what it is, "good", "bad" or "")
section: Callable[..., str] = _PARTS.section  # title, parts: side by side where there is room; nothing without parts
stack: Callable[..., str] = _PARTS.stack  # parts, one above the other in one place of a section
note: Callable[..., str] = _PARTS.note  # a sentence in small


def plot(kind: str, *arguments: object) -> str:
    """A plot of `charts`, by the template of its name."""
    drawn: str = getattr(_PARTS, kind)(*arguments)
    return drawn


def page(title: str, body: Sequence[str]) -> str:
    """The whole file."""
    return TEMPLATES.get_template("page.html").render(title=title, body=body)
