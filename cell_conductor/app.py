"""Wiring of one conductor: its cell's bus, its cell's schema, and nothing above."""

from __future__ import annotations

from bus.service.environment import Environment
from bus.service.service import Service

from .config import ConductorConfig


def build(env: Environment, config: ConductorConfig, cell: str) -> Service:
    """A conductor of one cell, ready to run."""
    raise NotImplementedError
