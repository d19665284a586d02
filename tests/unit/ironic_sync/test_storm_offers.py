"""A node that becomes free while a list runs is offered before that list has ended."""

from __future__ import annotations

import asyncio
import uuid

from tests.unit.ironic_sync import world as worlds

LIST_S = 300.0
NODES = [str(uuid.UUID(int=number)) for number in range(1, 151)]


def test_a_node_that_becomes_free_is_offered_soon() -> None:
    async def run() -> float:
        nodes, here = worlds.world()
        for one in NODES:
            nodes.put(one)
        slow = False

        async def takes() -> None:
            if slow:
                await here.clock.sleep(LIST_S)

        nodes.list_takes = takes
        async with here.running():
            await here.settle()
            slow = True
            nodes.gate.clear()  # Ironic answers the first reads a moment later
            nodes.put(worlds.NODE, provision_state="cleaning")
            await here.notify(worlds.notification("node.provision_set.end", provision_state="cleaning"))
            for one in NODES:  # a rack's power or conductor: all of them change
                nodes.put(one, power_state="error")
                await here.notify(
                    worlds.notification("node.power_state_corrected.success", uuid=one, power_state="error")
                )
            await worlds.turns(500)
            here.loop.read_all()
            await worlds.turns(500)
            assert nodes.lists == 2
            nodes.gate.set()
            await worlds.turns(500)
            nodes.put(worlds.NODE, provision_state="available")
            await here.notify(worlds.notification("node.provision_set.end", provision_state="available"))
            await worlds.turns(500)
            began = here.clock.now
            while worlds.reserved(here) and here.clock.now < began + 5_000:
                here.clock.advance(here.clock.now + 1.0)
                await worlds.turns(200)
            return here.clock.now - began

    took = asyncio.run(run())
    assert took < LIST_S
