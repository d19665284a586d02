"""A queue of several lines that are served in turn: however long one line is, the others wait for little of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class InTurn(Generic[T]):
    """Items in lines. A line keeps its order, and one item at a time leaves each line that has some."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, deque[T]] = {}  # no empty ones
        self._turns: deque[Hashable] = deque()  # the next line first
        self.count = 0  # of items; to be read only

    def __len__(self) -> int:
        return self.count

    def put(self, line: Hashable, item: T) -> None:
        """Add an item at the end of a line."""
        items = self._lines.get(line)
        if items is None:
            items = self._lines[line] = deque()
            self._turns.append(line)
        items.append(item)
        self.count += 1

    def peek(self) -> T:
        """The item that is taken next. Raises IndexError: there is none."""
        return self._lines[self._turns[0]][0]

    def take(self) -> T:
        """Take the first item of the next line; then it is another line's turn. Raises IndexError: there is none."""
        line = self._turns.popleft()
        items = self._lines[line]
        self.count -= 1
        item = items.popleft()
        if items:
            self._turns.append(line)
        else:
            del self._lines[line]
        return item

    def take_first(self, is_wanted: Callable[[T], bool]) -> Iterator[T]:
        """Take the items at the beginning of each line for which this holds."""
        for line in list(self._turns):
            items = self._lines[line]
            while items and is_wanted(items[0]):
                self.count -= 1
                yield items.popleft()
            if not items:
                del self._lines[line]
                self._turns.remove(line)
