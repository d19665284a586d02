"""Keeps a book true: snapshot, then the change feed; a hole is asked for again (signatures; body follows)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from bus.clock import Clock
from placement_worker.replica.book import Book

if TYPE_CHECKING:
    from bus.bus import Bus


class Follower:
    """Follows the change feed on the API bus into one book."""

    ready: asyncio.Event  # the book has been complete once

    def __init__(self, bus: Bus, book: Book, *, process: str, clock: Clock) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        raise NotImplementedError  # queue declared and consumed; snapshot goes on behind

    async def run(self) -> None:
        raise NotImplementedError  # for Service.task: ends only with a fault

    async def close(self) -> None:
        raise NotImplementedError

    def on_change(self, callback: Callable[[], None]) -> None:
        raise NotImplementedError  # the book moved

    async def wait_until(self, sequence: int, *, timeout_s: float) -> bool:
        raise NotImplementedError

    async def refresh(self, *, timeout_s: float) -> bool:
        raise NotImplementedError  # ask for newest changes now (shared)

    @property
    def lag(self) -> int:
        raise NotImplementedError  # changes behind the newest head heard
