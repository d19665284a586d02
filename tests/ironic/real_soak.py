"""Deploys and deletes on a real Ironic with failures of each kind; at the end nodes, book and records agree.

IRONIC_CYCLES: how many builds (8; `scripts/ironic test --cycles 500` is the long form).
"""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from bus.contracts.build import BuildRequest
from tests.kit.real_metal import WAIT_S, RealMetal, drive, real_metal, until

CYCLES = int(os.environ.get("IRONIC_CYCLES", "8"))
NODES, AT_ONCE = 6, 4
RESTING = {"available", "active"}
ENDS = {"active", "failed"}


@pytest.mark.timeout(600 + 60 * CYCLES)  # the default for a test, five minutes, ends one of twenty
async def test_whatever_fails_nodes_book_and_records_agree_at_the_end() -> None:
    rng = random.Random(f"soak {CYCLES}")
    async with real_metal(delays={"deploy_delay": 1}) as metal:
        nodes = await metal.nodes.enroll(NODES // 2, direct=True) + await metal.nodes.enroll(NODES - NODES // 2)
        ends: dict[str, int] = {}
        for begun in range(0, CYCLES, AT_ONCE):
            await one_round(metal, nodes, rng, min(AT_ONCE, CYCLES - begun), ends)
        assert ends.get("active", 0) >= CYCLES // 3, ends
        for node in nodes:
            metal.lab.agents.failing.pop(node, None)

        async def at_rest() -> bool:
            states = [await metal.nodes.get(node) for node in nodes]
            for node in states:
                if (
                    node["provision_state"] == "clean failed"
                ):  # Ironic was cut off while it cleaned: not berth's to mend
                    await metal.nodes.repair(node["uuid"])
            return all(node["provision_state"] == "available" and node["instance_uuid"] is None for node in states)

        await until(at_rest)
        assert all([(await metal.nodes.get(node))["instance_info"] == {} for node in nodes])
        await metal.offered(*nodes)
        await metal.all_agree()


async def one_round(metal: RealMetal, nodes: list[str], rng: random.Random, count: int, ends: dict[str, int]) -> None:
    """Some builds at once, with something going wrong; then all that became active is deleted."""
    for node in nodes:
        if (await metal.nodes.get(node))["provision_state"] == "clean failed":
            await metal.nodes.repair(node)
    await metal.offered(*nodes)
    requests = [request(metal, rng) for _ in range(count)]
    broken = rng.choice(nodes)
    metal.lab.agents.failing[broken] = "soak: the disk is broken"
    tracks = await metal.client.boot(requests)
    await fault(metal, nodes, rng)
    assert await metal.client.wait(2 * WAIT_S), [track.state for track in tracks]
    metal.lab.agents.failing.pop(broken)
    for track in tracks:
        assert track.terminals == 1 and track.state in ENDS, track
        ends[track.state] = ends.get(track.state, 0) + 1
    await metal.delete(*(track.instance_uuid for track in tracks if track.state == "active"))


def request(metal: RealMetal, rng: random.Random) -> BuildRequest:
    """With an image, or (on a direct node: not accepted) without."""
    return metal.request(
        image_source=metal.image if rng.random() < 0.8 else None, config_drive=drive() if rng.random() < 0.5 else None
    )


async def fault(metal: RealMetal, nodes: list[str], rng: random.Random) -> None:
    """What an operator or a power cut does while nodes are deployed."""
    node = rng.choice(nodes)
    match rng.choice(("maintenance", "undeploy", "restart", "nothing")):
        case "maintenance":
            await metal.nodes.maintenance(node, on=True)
            await asyncio.sleep(rng.uniform(0.2, 1.0))  # as long as it takes, while the builds go on
            await metal.nodes.maintenance(node, on=False)
        case "undeploy":
            found = await metal.nodes.get(node)
            if found["provision_state"] == "active":
                await metal.nodes.provision(node, "deleted")
        case "restart":
            await asyncio.to_thread(metal.lab.ironic.restart)
        case _:
            return
