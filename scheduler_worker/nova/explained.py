"""How a call was decided, for operators: the line of the log that `berth explain` reads.

A front keeps nothing, and any of several answers a call: what it has decided is in its log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct, to_builtins

from bus.contracts.build import HostScore
from scheduler_worker.domain.placement import HostClaimed
from scheduler_worker.domain.selector import NoValidHost

NOT_DECIDED: Final = "nova.not_decided"


class DecisionEvents(Struct, frozen=True):
    """The events of decisions: with hosts, and without."""

    placed: str
    no_host: str


ANSWERED: Final = DecisionEvents("nova.placed", "nova.no_valid_host")
SHADOWED: Final = DecisionEvents("nova.shadow_placed", "nova.shadow_no_valid_host")  # of which Nova learns nothing
EVENTS: Final = frozenset({ANSWERED.placed, ANSWERED.no_host, SHADOWED.placed, SHADOWED.no_host, NOT_DECIDED})

MAX_NAMED = 20  # instances that one line names


class ExplainedStep(Struct, frozen=True, kw_only=True):
    """One step of the funnel: the hosts that it left, those that it rejected by reason, and the first of these by name
    ("": for several reasons).
    """

    step: str
    remaining: int
    rejected: dict[str, int] = {}
    hosts: dict[str, tuple[str, ...]] = {}


class CallExplained(Struct, frozen=True, kw_only=True):
    """One line about a call. hosts: of each of the first instances, the chosen one and its alternates. scores: what
    those of the first weighed.

    reason: why it has no host, or was left to the fallback. lost: claims that got nothing, "host: outcome".
    """

    event: str
    request_id: str
    timestamp: str = ""
    process: str = ""
    instances: tuple[str, ...] = ()
    count: int = 0
    reason: str = ""
    step: str = ""
    detail: str = ""
    lost: tuple[str, ...] = ()
    funnel: tuple[ExplainedStep, ...] = ()
    hosts: tuple[tuple[str, ...], ...] = ()
    scores: tuple[HostScore, ...] = ()


def steps_of(result: NoValidHost, name_of: Callable[[int], str]) -> tuple[ExplainedStep, ...]:
    """The funnel with the names of hosts. name_of: of a row of the replica, as it is now."""
    named: dict[str, dict[str, tuple[str, ...]]] = {}
    for one in result.left_out:
        named.setdefault(one.step, {})[one.reason] = tuple(map(name_of, one.rows))
    return tuple(
        ExplainedStep(
            step=one.step, remaining=one.remaining, rejected=dict(one.rejected), hosts=named.get(one.step, {})
        )
        for one in result.funnel
    )


def placed_fields(instances: Sequence[str], results: Sequence[HostClaimed]) -> dict[str, object]:
    """The fields of a line about instances that have hosts."""
    named = results[:MAX_NAMED]
    return {
        "instances": instances[:MAX_NAMED],
        "count": len(instances),
        "hosts": [[one.host for one in result.selections] for result in named],
        "scores": to_builtins(results[0].scores),
        "lost": [loss.what for result in named for loss in result.lost],
    }
