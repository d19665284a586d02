"""Counts calls by the turn of the event loop that they are made in."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest


class Turns:
    """Counts calls by the turn of the event loop that they are made in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch | None = None, *counted: tuple[Any, str]) -> None:
        self.turn = 0
        self.calls: dict[str, Counter[int]] = defaultdict(Counter)
        for owner, name in counted:
            assert monkeypatch is not None
            monkeypatch.setattr(owner, name, self.counted(name, getattr(owner, name)))

    def counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **more: Any) -> Any:
            self.calls[name][self.turn] += 1
            return method(*args, **more)

        return counted

    def most(self, name: str) -> int:
        return max(self.calls[name].values(), default=0)

    def total(self, name: str) -> int:
        return self.calls[name].total()

    @asynccontextmanager
    async def counting(self) -> AsyncIterator[None]:
        async def count() -> None:
            while True:
                self.turn += 1
                await asyncio.sleep(0)

        counter = asyncio.create_task(count())
        try:
            yield
        finally:
            counter.cancel()
