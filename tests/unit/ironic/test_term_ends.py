"""The end of a term of the synchronisation when several of its tasks fail at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from bus.faults import BrokenInvariant, DatabaseUnavailable
from tests.unit.ironic.nodes import Nodes
from tests.unit.ironic.world import World


async def test_a_broken_invariant_is_not_hidden_by_a_database_that_disconnects_in_the_same_moment() -> None:
    async def unavailable() -> None:
        raise DatabaseUnavailable("gone")

    async def broken() -> None:
        raise BrokenInvariant("two writers")

    term = SimpleNamespace(
        writer=SimpleNamespace(save=unavailable, publish=broken),
        reader=SimpleNamespace(run=unavailable, run_all=unavailable),
        listener=SimpleNamespace(run=unavailable),
        measurements=SimpleNamespace(run=unavailable),
    )
    with pytest.raises(BrokenInvariant, match="two writers"):
        await World(Nodes()).loop._run_together(term, None)


async def test_a_process_that_stops_in_the_moment_in_which_its_term_ends_does_stop() -> None:
    """The end of the term hid that it was cancelled: it went on waiting for the lead, and was never done."""
    world = World(Nodes())
    leading = asyncio.Event()

    @asynccontextmanager
    async def become_leader() -> AsyncIterator[None]:
        leading.set()
        try:
            await asyncio.Event().wait()
            yield
        finally:
            raise DatabaseUnavailable("gone while it was let go of")

    world.loop._positions = SimpleNamespace(become_leader=become_leader)  # type: ignore[assignment]
    running = asyncio.create_task(world.loop.run())
    await leading.wait()
    running.cancel()
    done, _ = await asyncio.wait({running}, timeout=30.0)
    assert done and running.cancelled()
