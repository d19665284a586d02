"""Contention widens the choice among near-best hosts: a scheduler that keeps losing claims chooses others."""

from __future__ import annotations

from msgspec import Struct

MEMORY = 0.8  # the weight of the past after a round of claims: a burst of conflicts fades within some ten rounds


class Spread(Struct, frozen=True):
    """The share of recent claims that were lost to others, 0 to 1, smoothed."""

    lost: float = 0.0

    def after(self, claims: int, lost: int) -> Spread:
        """The share after one more round of claims."""
        if not claims:
            return self
        return Spread(MEMORY * self.lost + (1.0 - MEMORY) * lost / claims)

    def subset(self, least: int, most: int) -> int:
        """How many of the best hosts a choice is drawn from."""
        return max(least, min(max(least, most), round(self.lost * most)))
