"""The derived pages: each a template beside, and what it is filled with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from jinja2 import Environment, PackageLoader, StrictUndefined

from lab.reference import codes, commands, messages, metrics, schemas, settings, states
from placement_worker.rest.routes import ROUTES


def _doc(text: str | None) -> str:
    """A docstring, its lines without their indentation."""
    return "\n".join(line.strip() for line in (text or "").strip().splitlines())


TEMPLATES = Environment(
    loader=PackageLoader("lab.reference"),
    autoescape=False,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
TEMPLATES.filters |= {"doc": _doc, "number": "{:g}".format}


def _page(name: str, content: Callable[[], Mapping[str, object]]) -> str:
    return TEMPLATES.get_template(name).render(content())


CONTENTS: Mapping[str, Callable[[], Mapping[str, object]]] = {
    "codes.md": codes.content,
    "messages.md": messages.content,
    "metrics.md": metrics.content,
    "placement-routes.md": lambda: {"ROUTES": ROUTES},
    "settings.md": settings.content,
    "states.md": states.content,
}
PAGES: Mapping[str, Callable[[], str]] = {
    "commands.md": commands.render,
    **{name: partial(_page, name, content) for name, content in CONTENTS.items()},
    **schemas.PAGES,
}
