"""The history of an instance as one sentence, and why none of its hosts could be claimed."""

from __future__ import annotations

from bus.contracts.placement import ClaimOutcome

from .events import ClaimRefused
from .instance import NOT_TRIED, Instance

NO_HOST = "max_retries_exceeded"
OVER_QUOTA = "quota.exceeded"


def why_not_claimed(event: ClaimRefused, tries: str) -> tuple[str, str]:
    """Code and reason of a request that ends as no further host could be claimed. tries: how each host's try ended.

    A project's limit is the same on every host: where it was met, it is the reason.
    """
    if ClaimOutcome.OVER_LIMIT in event.outcomes:
        return OVER_QUOTA, event.reason or "the project may not hold so much"
    return NO_HOST, tries


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
