"""The two ways in which a write finds a row other than expected. After both nothing was written."""

from __future__ import annotations


class Conflict(Exception):
    """Another process has written one of the rows first. Read again and decide again; with locks it cannot repeat."""


class PreconditionFailed(Conflict):
    """A guarded statement touched another number of rows than it had to, and undid itself."""
