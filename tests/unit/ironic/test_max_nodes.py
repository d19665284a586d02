"""Nodes that are gone do not count against max_nodes."""

from __future__ import annotations

import asyncio

import pytest

from ironic_sync.config import IronicSyncConfig
from ironic_sync.domain.node import Node
from ironic_sync.sync_state import SyncState
from tests.unit.ironic.world import VirtualClock

OLD = [f"0000000{n}-0000-4000-8000-000000000000" for n in range(3)]
NEW = [f"1000000{n}-0000-4000-8000-000000000000" for n in range(3)]


def node(uuid: str) -> Node:
    return Node(uuid=uuid, provision_state="available", power_state="power off", resource_class="gold")


@pytest.mark.xfail(strict=True, reason="Found B19")
def test_nodes_that_are_gone_leave_room_for_those_that_came() -> None:
    async def run() -> list[str]:
        clock = VirtualClock()
        state = SyncState({}, {}, clock=clock, config=IronicSyncConfig(max_nodes=3))
        for one in OLD:
            state.apply_read(node(one), seq=state.next_seq())
        state.published.update({one: state.positions[one].version for one in OLD})
        for one in OLD:
            state.apply_removed(one, seq=state.next_seq())
        state.published.update({one: state.positions[one].version for one in OLD})
        clock.now += 6 * 86_400
        state.purge(clock.now - 7 * 86_400)
        for one in NEW:
            state.apply_read(node(one), seq=state.next_seq())
        return state.known()

    assert asyncio.run(run()) == NEW
