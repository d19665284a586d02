"""The history of an instance as one sentence."""

from __future__ import annotations

from .instance import NOT_TRIED, Instance


def summary_of(instance: Instance) -> str:
    """One sentence for people: the tries, and how each ended."""
    tries = "; ".join(
        f"{record.host}: {record.outcome}"
        + (f" ({record.code}{': ' if record.reason else ''}{record.reason})" if record.code else "")
        for record in instance.history
    )
    passed = sum(record.outcome == NOT_TRIED for record in instance.history)
    hosts = len(instance.selections) + sum(
        record.outcome == NOT_TRIED and record.attempt > 1 for record in instance.history
    )
    return f"{len(instance.history) - passed} of {hosts} hosts tried, none is left. {tries}"
