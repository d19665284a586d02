"""docs/reference/codes.md, derived from the `codes.toml` of each package: `scripts/nightly docs` writes it."""

from __future__ import annotations

import re
from functools import partial
from typing import get_args

import berth.codes
from berth.codes import CodeKind, code_table

PACKAGES = (*berth.codes.PACKAGES, "lab.load")

# A page, and perhaps a heading of it, as a remedy names them.
_PAGE = re.compile(r'docs/([\w/-]+\.md)(?:, "([^"]+)")?')


def content() -> dict[str, object]:
    """What the page shows, sorted by code."""
    rows = sorted((name, package, one) for package in PACKAGES for name, one in code_table(package).items())
    return {"rows": rows, "kinds": get_args(CodeKind), "link": partial(_PAGE.sub, _link)}


def _link(found: re.Match[str]) -> str:
    page, heading = found.groups()
    if heading is None:
        return f"[{page}](../{page})"
    return f"[{heading}](../{page}#{re.sub(r'[^a-z0-9 -]', '', heading.lower()).replace(' ', '-')})"
