"""The decision about a group of claims: the verdict on each item, and the rows to write."""

from __future__ import annotations

from msgspec import Struct

from bus.contracts.placement import ClaimHolder, ClaimOutcome
from placement_worker.domain.values import ConsumerState, GroupKey, Holding

# (provider, class) pairs with too little free.
Lacking = tuple[tuple[str, str], ...]


class ClaimVerdict(Struct, frozen=True, kw_only=True):
    """The result of one item. changed: the item wrote something, so its reply carries the transaction's feed number.

    of_gang: the result of each claim of a ClaimAll. lacking: of a claim that is full. holders: the newest consumers
    that hold allocations of these pairs. attempt: as in ClaimResult.
    """

    outcome: str
    option: int | None = None
    outcomes: tuple[ClaimOutcome, ...] = ()
    consumer: str | None = None
    consumer_generation: int | None = None
    generations: dict[str, int] = {}
    changed: bool = False
    reason: str = ""
    holding: Holding = {}
    members: dict[str, int] = {}
    of_gang: tuple[ClaimVerdict, ...] = ()
    lacking: Lacking = ()
    holders: tuple[ClaimHolder, ...] = ()
    attempt: int = 0


class Decision(Struct, frozen=True):
    """The verdict on every item, and the rows to write. Each row occurs once and has absolute values.

    consumers: the new state of each changed consumer; None: the row is deleted. used, generations: the new values of
    each changed provider. joined: the new members of each server group, with the host that the member's claim named.
    """

    verdicts: list[ClaimVerdict]
    consumers: dict[str, ConsumerState | None]
    used: dict[str, dict[str, int]]
    generations: dict[str, int]
    joined: dict[GroupKey, dict[str, str]] = {}
