"""The log of a run: a digest of every event and, on demand, the events themselves as text."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from typing import Any

# Lines kept for the trace of a run; a longer one keeps its end, where the breach is.
MAX_LINES = 200_000


class EventLog:
    """The event log. `record` takes what two replays must agree on; `log` takes text for people only."""

    def __init__(self, *, keep: bool = False) -> None:
        self.keep = keep
        self.lines: deque[str] = deque(maxlen=MAX_LINES)
        self.counts: Counter[str] = Counter()
        self.now: Any = lambda: 0.0
        self._hash = hashlib.blake2b(digest_size=16)

    def record(self, what: str, detail: str = "", body: bytes = b"") -> None:
        """One event of the simulated world."""
        self.counts[what] += 1
        at = self.now()
        self._hash.update(f"{at:.9f} {what} {detail} ".encode())
        self._hash.update(body)
        if self.keep:
            self.lines.append(f"{at:10.4f}  {what:<10} {detail}  {body[:300].decode(errors='replace')}".rstrip())

    def log(self, process: str, words: str) -> None:
        """Something a worker logged."""
        if self.keep:
            self.lines.append(f"{self.now():10.4f}  {process:<10} {words}")

    @property
    def digest(self) -> str:
        """Of every event so far: equal digests mean equal runs."""
        return self._hash.hexdigest()
