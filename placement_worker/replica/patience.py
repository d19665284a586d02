"""How long a search may take, for searches whose number of steps says little about their time."""

from __future__ import annotations

from collections.abc import Callable


class TooLong(Exception):
    """The time is over."""

    code = "search.too_long"


class Patience:
    """Time until which a search may go on. clock: monotonic seconds.

    settles: when it is over, what has been found is taken, as with a budget that ran out; otherwise the search raises
    TooLong and has found nothing, so that it may be done elsewhere from the start.
    """

    __slots__ = ("_clock", "_until", "settles")

    def __init__(self, clock: Callable[[], float], seconds: float, *, settles: bool) -> None:
        self._clock = clock
        self._until = clock() + seconds
        self.settles = settles

    def check(self) -> None:
        """Raise TooLong once the time is over."""
        if self._clock() >= self._until:
            raise TooLong
