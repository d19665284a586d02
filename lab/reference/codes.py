"""docs/reference/codes.md, derived from the `codes.toml` of each package: `scripts/nightly docs` writes it."""

from __future__ import annotations

import re
from importlib import resources
from typing import Literal, get_args

import msgspec
from msgspec import Struct

PACKAGES = ("bus", "placement_worker", "scheduler_worker", "cell_conductor", "compute_sim", "ironic_sync", "berth")
TABLE = "codes.toml"

Kind = Literal["reply", "event", "log", "fault", "exit", "letter", "trace"]

HEAD = """\
# Codes

Derived from the `codes.toml` of each package by `scripts/nightly docs`; do not edit by hand.

A code is stable, and the text beside it is not: programs compare codes. `berth list --code CODE` lists the builds that
ended with one. A `*` stands for the part of a code that is not known before. A row is of the package that defines the
code; others may pass it on. An operator's own drivers, filters and plug-ins may have further codes.

| kind | a code of this kind is |
| --- | --- |
| `reply` | the answer to a request: a refusal on the bus, a problem over HTTP |
| `event` | in an event, a record or the history of a build, an instance, a move or a drain, or a reason of a funnel |
| `log` | the name of a log line from `warning` up, or its `code` |
| `fault` | that of a fault which delays or ends work: in `code` of log lines, and in metrics |
| `exit` | printed by a command or a worker, which ends with a status other than 0 |
| `letter` | in the header `berth-code` of a dead letter |
| `trace` | the error of a span |

"""

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


def render() -> str:
    """The whole page, sorted by code."""
    rows = sorted((name, package, one) for package in PACKAGES for name, one in table(package).items())
    lines = ["| code | package | kind | cause | remedy |", "| --- | --- | --- | --- | --- |"]
    for name, package, one in rows:
        kinds = ", ".join(kind for kind in get_args(Kind) if kind in one.kind)
        lines.append(f"| `{name}` | {package} | {kinds} | {one.cause} | {_PAGE.sub(_link, one.remedy)} |")
    return HEAD + "\n".join(lines) + "\n"


def _link(found: re.Match[str]) -> str:
    page, heading = found.groups()
    if heading is None:
        return f"[{page}](../{page})"
    return f"[{heading}](../{page}#{re.sub(r'[^a-z0-9 -]', '', heading.lower()).replace(' ', '-')})"
