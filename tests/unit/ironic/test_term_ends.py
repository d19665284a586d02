"""What ends a term of the synchronisation when several of its tasks fail at once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bus.faults import BrokenInvariant, DatabaseUnavailable
from tests.unit.ironic.nodes import Nodes
from tests.unit.ironic.world import World


async def test_a_broken_invariant_is_not_hidden_by_a_database_that_goes_away_in_the_same_moment() -> None:
    async def away() -> None:
        raise DatabaseUnavailable("gone")

    async def broken() -> None:
        raise BrokenInvariant("two writers")

    term = SimpleNamespace(
        writer=SimpleNamespace(save=away, publish=broken),
        reader=SimpleNamespace(run=away, run_all=away),
        listener=SimpleNamespace(run=away),
        measurements=SimpleNamespace(run=away),
    )
    with pytest.raises(BrokenInvariant, match="two writers"):
        await World(Nodes()).loop._run_together(term, None)
