"""A node that Ironic shows as free is offered within one read of all nodes, whatever was announced before or lost."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ironic_sync.source.port import SourceUnavailable
from tests.unit.ironic.nodes import FREE, INSTANCE, NODE, OTHER, notification, reserved, turns, world

RESYNC_S = 60.0
ONE_READ_S = RESYNC_S * 1.1 + 5  # its jitter, and the retry of a read that failed
STEPS = 40
CHANGES: tuple[dict[str, Any], ...] = (
    {"power_state": None, "maintenance": True},  # as after a power failure
    {"power_state": None},  # recovered, and read as it was noted: Ironic announces nothing
    {"power_state": "error"},
    {"maintenance": True},
    {"provision_state": "deploying", "instance_uuid": INSTANCE},
    {"provision_state": "active", "instance_uuid": INSTANCE},
    {"provision_state": "cleaning"},
    {"provision_state": "clean failed", "maintenance": True},
    {},
)
EVENTS = (
    "node.power_state_corrected.success",
    "node.provision_set.start",
    "node.provision_set.end",
    "node.provision_set.error",
    "node.update.start",
    "node.update.end",
    "node.maintenance_set.end",
)


class History:
    """Changes of two nodes; of what they announce some is lost, some is late, some comes twice."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.nodes, self.world = world(resync_interval_s=RESYNC_S)
        self.nodes.put(OTHER)
        self.late: list[bytes] = []

    async def happen(self) -> None:
        for _ in range(STEPS):
            node = self.rng.choice((NODE, OTHER))
            self._change(node)
            await self._announce(node)
            await self._disturb()

    def _change(self, node: str) -> None:
        self.nodes.put(node, **{**FREE, **self.rng.choice(CHANGES)})

    async def _announce(self, node: str) -> None:
        seen = {name: value for name, value in self.nodes.nodes[node].items() if name in FREE}
        seen.pop("resource_class")
        body = notification(self.rng.choice(EVENTS), node, **seen)
        match self.rng.choice(("lost", "late", "once", "twice")):
            case "late":
                self.late.append(body)
            case "once":
                await self.world.notify(body)
            case "twice":
                await self.world.notify(body)
                await self.world.notify(body)
            case _:
                pass
        if self.late and self.rng.random() < 0.3:
            await self.world.notify(self.late.pop(self.rng.randrange(len(self.late))))

    async def _disturb(self) -> None:
        """Reads take their time, or fail; time passes."""
        if self.rng.random() < 0.3:
            self.nodes.gate.clear()
            await turns(self.rng.randrange(20))
            return
        self.nodes.fault = SourceUnavailable("down") if self.rng.random() < 0.2 else None
        self.nodes.gate.set()
        await turns(self.rng.randrange(20))
        if self.rng.random() < 0.3:
            self.world.clock.advance(self.world.clock.now + self.rng.uniform(0, 3))


@pytest.mark.parametrize("seed", range(12))
async def test_a_free_node_is_offered_within_one_read_of_all(seed: int) -> None:
    history = History(seed)
    async with history.world.running():
        await history.world.settle()
        await history.happen()
        for node in (NODE, OTHER):
            history.nodes.put(node, **FREE)  # and nothing is announced
        for body in history.late:
            await history.world.notify(body)  # older than that
        history.nodes.fault = None
        history.nodes.gate.set()
        await history.world.pass_time(ONE_READ_S)
        assert [reserved(history.world, node) for node in (NODE, OTHER)] == [0, 0]
