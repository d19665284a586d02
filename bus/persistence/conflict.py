"""The two errors of a write that finds a row in another state than expected. After either, nothing was written."""

from __future__ import annotations


class Conflict(Exception):
    """Another process has written one of the rows first. The work is repeated with locks, where this cannot happen."""


class PreconditionFailed(Conflict):
    """A guarded statement has touched another number of rows than required, and was rolled back."""
