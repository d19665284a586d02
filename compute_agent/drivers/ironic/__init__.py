"""Bare metal through Ironic's REST API: a small subset of it, the one that deploying a node needs."""

from __future__ import annotations
