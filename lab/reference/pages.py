"""Which page is derived by what."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from berth.reference import commands
from lab.reference import codes, messages, metrics, routes, settings, states

PAGES: Mapping[str, Callable[[], str]] = {
    "codes.md": codes.render,
    "commands.md": commands.render,
    "messages.md": messages.render,
    "metrics.md": metrics.render,
    "placement-routes.md": routes.render,
    "settings.md": settings.render,
    "states.md": states.render,
}
