"""Long work in parts, between which the event loop runs other tasks."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class InParts(Generic[T]):
    """The items in order, in lists of at most `most`. Other tasks run between two lists.

    It is no generator: one that is left early is closed by a task of its own.
    """

    def __init__(self, items: Iterable[T], most: int) -> None:
        self._rest = iter(items)
        self._most = most
        self._begun = False

    def __aiter__(self) -> InParts[T]:
        return self

    async def __anext__(self) -> list[T]:
        part = list(itertools.islice(self._rest, self._most))
        if not part:
            raise StopAsyncIteration
        if self._begun:
            await asyncio.sleep(0)
        self._begun = True
        return part
