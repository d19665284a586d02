"""Which page is derived by what."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import cell_conductor.domain.render
from berth.reference import commands
from lab.reference import codes, messages, metrics, routes, settings

PAGES: Mapping[str, Callable[[], str]] = {
    "codes.md": codes.render,
    "commands.md": commands.render,
    "messages.md": messages.render,
    "metrics.md": metrics.render,
    "placement-routes.md": routes.render,
    "settings.md": settings.render,
    "states.md": cell_conductor.domain.render.render,
}
