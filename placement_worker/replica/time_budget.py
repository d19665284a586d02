"""A bound of the duration of a search, for searches that a bound of steps does not keep short enough."""

from __future__ import annotations

from collections.abc import Callable


class TooLong(Exception):
    """The time budget is used up."""

    code = "search.too_long"


class TimeBudget:
    """The time until which a search may run. clock: monotonic seconds.

    keeps_partial: when the budget is used up, the search returns its results so far, as with a budget of steps.
    Otherwise it raises TooLong and returns nothing, so that the caller can start it again elsewhere.
    """

    __slots__ = ("_clock", "_until", "keeps_partial")

    def __init__(self, clock: Callable[[], float], seconds: float, *, keeps_partial: bool) -> None:
        self._clock = clock
        self._until = clock() + seconds
        self.keeps_partial = keeps_partial

    def check(self) -> None:
        """Raise TooLong when the budget is used up."""
        if self._clock() >= self._until:
            raise TooLong
