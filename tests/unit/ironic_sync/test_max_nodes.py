"""Nodes that are gone do not count against max_nodes."""

from __future__ import annotations

import asyncio

import pytest

from ironic_sync.config import IronicSyncConfig
from ironic_sync.domain.node import Node
from ironic_sync.sync_state import SyncState
from tests.unit.ironic_sync.world import VirtualClock

OLD = [f"0000000{n}-0000-4000-8000-000000000000" for n in range(3)]
NEW = [f"1000000{n}-0000-4000-8000-000000000000" for n in range(3)]

MORE = [f"2000000{n}-0000-4000-8000-000000000000" for n in range(2)]


def node(uuid: str) -> Node:
    return Node(uuid=uuid, provision_state="available", power_state="power off", resource_class="gold")


@pytest.mark.parametrize(("absent_retention_s", "old"), [(0.0, []), (30 * 86_400.0, OLD)])
def test_nodes_that_are_gone_leave_room_for_those_that_came(absent_retention_s: float, old: list[str]) -> None:
    async def run() -> list[str]:
        clock = VirtualClock()
        config = IronicSyncConfig(max_nodes=3, absent_retention_s=absent_retention_s)
        state = SyncState({}, {}, clock=clock, config=config)
        for one in OLD:
            state.apply_read(node(one), seq=state.next_seq())
        state.published.update({one: state.positions[one].version for one in OLD})
        for one in OLD:
            state.apply_removed(one, seq=state.next_seq())
        state.published.update({one: state.positions[one].version for one in OLD})
        clock.now += 6 * 86_400
        state.purge(clock.now - 7 * 86_400)
        for one in [*NEW, *MORE]:
            state.apply_read(node(one), seq=state.next_seq())
        assert set(state.problems()) == set(old)
        return state.known()

    assert asyncio.run(run()) == [*old, *NEW]
