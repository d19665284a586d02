"""Drivers: how one kind of machine is built, destroyed and counted."""

from __future__ import annotations
