"""Requests about dead letters while a broker does not answer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from berth.web import dead_letters
from berth.web.dead_letters import LetterBox
from berth.web.problems import Problem


class Silent:
    """A connection to a broker that does not answer."""

    opened = 0

    async def open(self) -> None:
        Silent.opened += 1
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Nothing is open."""


async def test_each_request_ends_and_none_waits_for_all_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth had its answer after 40 s."""
    monkeypatch.setattr(dead_letters, "OPEN_TIMEOUT_S", 0.1)
    monkeypatch.setattr(Silent, "opened", 0)
    env = SimpleNamespace(cells=(), transport=lambda _bus: Silent())
    box = LetterBox(env, SimpleNamespace())  # type: ignore[arg-type]
    ended = await asyncio.gather(*(box.counts() for _ in range(20)), return_exceptions=True)
    assert [one.status for one in ended if isinstance(one, Problem)] == [503] * 20
    assert Silent.opened < 5, "the others did not wait their turn"
    with pytest.raises(Problem, match="out of reach"):
        await box.counts()
