"""The order of a chaos run's parts."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from lab.chaos.plan import ChaosPlan
from lab.chaos.run import Run

HANGS_S = 20.0


async def test_no_fault_is_begun_while_the_last_drain_ends() -> None:
    """It ends by its deadline and is undone; new faults until then kept a run going for minutes after its load."""
    stopped = asyncio.Event()

    async def disturb(*_: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async def at_once() -> None:
        pass

    async def for_ever() -> None:
        await asyncio.Event().wait()

    parts: dict[str, Any] = {
        "plan": ChaosPlan(),
        "injector": SimpleNamespace(disturb=disturb, watch=for_ever),
        "_schedule": None,
        "_print_load": for_ever,
        "churn": SimpleNamespace(run=at_once),
        "moving": SimpleNamespace(run=at_once),
        "draining": SimpleNamespace(run=stopped.wait, stop=lambda: None),  # ends once faults have stopped
    }
    run = Run.__new__(Run)
    for name, part in parts.items():
        setattr(run, name, part)
    async with asyncio.timeout(HANGS_S):
        await run._storm()
    assert stopped.is_set()
