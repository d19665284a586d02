"""The distribution that this program is installed from."""

from __future__ import annotations

from importlib import metadata

DISTRIBUTION = "berth-scheduler"  # on PyPI the name `berth` belongs to another project


def version() -> str:
    """Its version."""
    return metadata.version(DISTRIBUTION)
