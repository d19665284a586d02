"""The commands of `berth`, a file each."""

from __future__ import annotations
