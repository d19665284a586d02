"""docs/reference/codes.md, derived from the `codes.toml` of each package: `scripts/nightly docs` writes it."""

from __future__ import annotations

import re
from functools import partial
from importlib import resources
from typing import Literal, get_args

import msgspec
from msgspec import Struct

PACKAGES = (
    *("bus", "placement_worker", "scheduler_worker", "nova_scheduler", "cell_conductor", "compute_agent"),
    *("compute_sim", "ironic_sync", "gateway", "berth", "lab.load"),
)
TABLE = "codes.toml"

Kind = Literal["reply", "event", "log", "fault", "exit", "dead letter", "trace", "status"]

# A page, and perhaps a heading of it, as a remedy names them.
_PAGE = re.compile(r'docs/([\w/-]+\.md)(?:, "([^"]+)")?')


class Code(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One code. cause: of its occurrence. remedy: for an operator."""

    kind: tuple[Kind, ...]
    cause: str
    remedy: str


def table(package: str) -> dict[str, Code]:
    """The codes that a package defines."""
    return msgspec.toml.decode((resources.files(package) / TABLE).read_bytes(), type=dict[str, Code])


def content() -> dict[str, object]:
    """What the page shows, sorted by code."""
    rows = sorted((name, package, one) for package in PACKAGES for name, one in table(package).items())
    return {"rows": rows, "kinds": get_args(Kind), "link": partial(_PAGE.sub, _link)}


def _link(found: re.Match[str]) -> str:
    page, heading = found.groups()
    if heading is None:
        return f"[{page}](../{page})"
    return f"[{heading}](../{page}#{re.sub(r'[^a-z0-9 -]', '', heading.lower()).replace(' ', '-')})"
