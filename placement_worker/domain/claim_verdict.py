"""How a group of claims was decided: each item's verdict, and the rows to write."""

from __future__ import annotations

from msgspec import Struct

from bus.contracts.placement import ClaimHolder, ClaimOutcome
from placement_worker.domain.values import ConsumerState, GroupKey, Holding


class ClaimVerdict(Struct, frozen=True, kw_only=True):
    """How one item ended. `changed`: it wrote something, so its reply carries the transaction's feed number.

    of_gang: of a ClaimAll, how each of its claims ended. lacking: of a claim that is full, (provider, class)
    of which there was too little; holders: who holds that.
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
    lacking: tuple[tuple[str, str], ...] = ()
    holders: tuple[ClaimHolder, ...] = ()


class Decision(Struct, frozen=True):
    """Every item's verdict, and the rows to write: absolute values, each row once.

    consumers: the new state of those that changed; None = the row goes. used, generations: of touched providers.
    joined: who is a member of a server group now, and the host that its claim named.
    """

    verdicts: list[ClaimVerdict]
    consumers: dict[str, ConsumerState | None]
    used: dict[str, dict[str, int]]
    generations: dict[str, int]
    joined: dict[GroupKey, dict[str, str]] = {}
