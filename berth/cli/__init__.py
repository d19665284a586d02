"""The commands of `berth`: a folder for each thing they are about, a file for each group of commands."""

from __future__ import annotations
