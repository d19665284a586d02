"""Contention widens the choice among near-best hosts: who keeps losing races should look elsewhere."""

from __future__ import annotations

from msgspec import Struct

MEMORY = 0.8  # how much of the past a round of claims leaves: a burst of conflicts is forgotten within some ten rounds


class Spread(Struct, frozen=True):
    """The share of recent claims that were lost to others, 0 to 1, smoothed."""

    lost: float = 0.0

    def after(self, claims: int, lost: int) -> Spread:
        """With one more round of claims."""
        if not claims:
            return self
        return Spread(MEMORY * self.lost + (1.0 - MEMORY) * lost / claims)

    def subset(self, least: int, most: int) -> int:
        """Among how many of the best hosts to choose by chance (N-5)."""
        return max(least, min(max(least, most), round(self.lost * most)))
