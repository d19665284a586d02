"""A node that has a parent node is not offered, as Nova never sees it."""

from __future__ import annotations

import asyncio

from tests.unit.ironic_sync import world as worlds
from tests.unit.ironic_sync.world import OTHER, Nodes, notification, turns, world  # noqa: F401


def test_a_child_node_is_not_offered() -> None:
    async def run() -> object:
        nodes, here = worlds.world()
        everything = nodes.list_nodes

        async def parents_only():
            async for page in everything():
                yield [node for node in page if node.uuid != OTHER]

        nodes.list_nodes = parents_only
        async with here.running():
            await here.settle()
            nodes.put(OTHER, parent_node=worlds.NODE)
            await here.notify(worlds.notification("node.provision_set.end", uuid=OTHER))
            await here.settle()
            await here.pass_time(7200)  # a list or two go by
            return here.placement.seen(OTHER)

    seen = asyncio.run(run())
    assert seen is None or seen["reserved"] == 1, f"a child node is on offer: {seen}"
