"""A limit for a turn of the loop that never ends: code that goes round without giving the event loop away.

Virtual time stands still meanwhile, so only CPU time shows it. The limit is far above what any turn takes, so that a
slower machine fails no seed.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# The longest turn of an honest run takes 0.2 s of CPU, most of it the garbage collector's.
MAX_TURN_CPU_S = 10.0
MAX_FRAMES = 6  # of the stack, the innermost


class EndlessTurn(Exception):
    """One turn of the loop took more than its limit of CPU time. The text names the process and the place."""


class _Interrupted(BaseException):
    """Raised wherever the endless turn is, so that it ends; not an Exception, which a retry would take for a fault."""


class TurnLimit:
    """Interrupts a turn that takes longer than a limit of CPU time, and remembers where it was.

    Every max_cpu_s of CPU time the number of the turn is compared with that of the last time: a turn is interrupted
    after one to two times the limit. A turn costs nothing.
    """

    def __init__(self, turn: Callable[[], int], process: Callable[[], str], *, max_cpu_s: float) -> None:
        self._turn = turn
        self._process = process
        self._max_cpu_s = max_cpu_s
        self._last = -1
        self._found = ""

    def check(self) -> None:
        """Called by the loop between two turns. Raises EndlessTurn when the one before was interrupted."""
        if self._found:
            found, self._found = self._found, ""
            raise EndlessTurn(found)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """For as long as the block runs. Only in the main thread: it is where Python handles signals."""
        handled = signal.signal(signal.SIGPROF, self._on_time)
        signal.setitimer(signal.ITIMER_PROF, self._max_cpu_s, self._max_cpu_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            signal.signal(signal.SIGPROF, handled)

    def _on_time(self, _number: int, frame: FrameType | None) -> None:
        turn = self._turn()
        if turn != self._last:
            self._last = turn
            return
        if not self._found:  # else an endless turn goes on after it was interrupted: its first place is the one to know
            self._found = f"{self._process()}: a turn took more than {self._max_cpu_s:g} s of CPU: {_place(frame)}"
        raise _Interrupted


def _place(frame: FrameType | None) -> str:
    """`file:line function` of the innermost frames, the innermost first."""
    stack = reversed(traceback.extract_stack(frame)[-MAX_FRAMES:])
    return " < ".join(f"{one.filename}:{one.lineno} {one.name}" for one in stack)
