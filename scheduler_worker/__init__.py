"""Chooses hosts for instances: searches a replica of Placement, claims, and hands the build to the host's cell."""

from __future__ import annotations
