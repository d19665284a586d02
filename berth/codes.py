"""The codes of faults and events, with their causes and remedies: the `codes.toml` of each package."""

from __future__ import annotations

from importlib import resources
from typing import Literal

import msgspec
from msgspec import Struct

PACKAGES = (
    *("bus", "placement_worker", "scheduler_worker", "nova_scheduler", "cell_conductor", "compute_agent"),
    *("compute_sim", "ironic_sync", "gateway", "berth"),
)
TABLE = "codes.toml"

CodeKind = Literal["reply", "event", "log", "fault", "exit", "dead letter", "trace", "status"]


class Code(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One code. cause: of its occurrence. remedy: for an operator."""

    kind: tuple[CodeKind, ...]
    cause: str
    remedy: str


def code_table(package: str) -> dict[str, Code]:
    """The codes that a package defines."""
    return msgspec.toml.decode((resources.files(package) / TABLE).read_bytes(), type=dict[str, Code])


def code_named(name: str) -> Code | None:
    """What a code of an event means, else of anything else; None: no package defines it."""
    found = [code for package in PACKAGES if (code := code_table(package).get(name)) is not None]
    return next((one for one in found if "event" in one.kind), found[0] if found else None)
