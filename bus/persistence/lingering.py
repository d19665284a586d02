"""Messages of the outbox that nobody waits for: they linger for a moment, and leave with the next one on their subject.

A message that leaves alone costs a broker message; what lingers shares one, or is dropped because a newer one says the
same and more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from msgspec import Struct

from bus.contracts.base import Message

StreamPosition = tuple[Hashable, int]  # the subject of a message, and its number among the reports on that

Item = TypeVar("Item")


class Lingering(Struct, frozen=True):
    """Which messages wait for the next one on their subject, and how long.

    lingers: messages that are not waited for; each waits for half of `linger_s` or longer, up to all of it, whatever
    else leaves. place: the subject of a message, and its number among the reports on that; None: on nothing, so the
    message waits for no other. When a message with a higher number on the same subject comes meanwhile, the lingering
    one is dropped: its row adds nothing to the newer one's. keeps: instead it leaves together with that one, before it,
    because the receiver records each.
    """

    linger_s: float = 0.0
    lingers: Callable[[Message], bool] = lambda _: False
    place: Callable[[Message], StreamPosition | None] = lambda _: None
    keeps: bool = False


class _Reports(Struct, Generic[Item]):
    """The lingering items on one subject, and the newest one's number. since: how many halves had passed then."""

    number: int
    items: list[Item]
    since: int


class LingeringItems(Generic[Item]):
    """The lingering items of one bus, each with its message. at_once: the process is ending, and nothing lingers."""

    def __init__(self, policy: Lingering, dropped: Callable[[Item], None]) -> None:
        self._policy = policy
        self._dropped = dropped
        # By their subjects, the oldest first; those without one each under a number of its own.
        self._reports: dict[Hashable, _Reports[Item]] = {}
        self._numbers = itertools.count()
        self._halves = 0  # the number of half linger times that have passed
        self.at_once = policy.linger_s <= 0

    def __len__(self) -> int:
        return len(self._reports)

    def put(self, message: Message, item: Item) -> list[Item]:
        """Return the items that are to leave now, in order; none when this one lingers."""
        lingers = not self.at_once and self._policy.lingers(message)
        if not lingers and not self._reports:
            return [item]
        place = self._policy.place(message)
        subject, number = place or (next(self._numbers), 0)
        found = self._reports.get(subject)
        if found is None:
            if lingers:
                self._reports[subject] = _Reports(number, [item], self._halves)
            return [] if lingers else [item]
        if self._policy.keeps:
            found.items.append(item)  # since the first
            return [] if lingers else self._reports.pop(subject).items
        if found.number < number:
            self._drop(self._reports.pop(subject).items)
            if lingers:
                self._reports[subject] = _Reports(number, [item], self._halves)
        elif lingers:
            self._drop([item])
        return [] if lingers else [item]

    def end_half(self) -> list[Item]:
        """Half of the linger time has passed. Returns the items that have lingered for a whole half and a part of
        another.

        If all of them left whenever the time is over, most would have just come, and the ends of those builds would
        follow in a message of their own.
        """
        self._halves += 1
        return self._leave(lambda one: self._halves >= one.since + 2)

    def end_all(self) -> list[Item]:
        """Return all items: they are to leave now."""
        return self._leave(lambda _: True)

    def _leave(self, is_due: Callable[[_Reports[Item]], bool]) -> list[Item]:
        due = [subject for subject, one in self._reports.items() if is_due(one)]
        return [item for subject in due for item in self._reports.pop(subject).items]

    def _drop(self, items: list[Item]) -> None:
        for item in items:
            self._dropped(item)
