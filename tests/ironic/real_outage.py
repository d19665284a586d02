"""An outage of a real Ironic while builds run and nodes wait: what berth does in it, and right after."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import time
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from prometheus_client import REGISTRY

from bus.contracts.build import BuildState
from tests.kit.real_metal import WAIT_S, RealMetal, real_metal, until

OFFERED_LIMIT_S = 10.0  # 2 s on a machine that does nothing else; before, it took 15 and more
LOOK_S = 0.02
RESYNC_S = 5.0  # so that ironic-sync, which has nothing to read, notices the outage


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def metal() -> AsyncIterator[RealMetal]:
    async with real_metal(sync={"resync_interval_s": RESYNC_S}) as running:
        yield running


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_build_that_is_requested_while_ironic_restarts_ends_on_its_first_node(metal: RealMetal) -> None:
    """It failed with all its alternates within three seconds."""
    nodes = await metal.nodes.enroll(2)
    await metal.offered(*nodes)
    await asyncio.to_thread(metal.lab.ironic.kill)
    request = metal.request()
    (watch,) = await metal.client.boot([request])

    async def is_building() -> bool:
        return watch.state == BuildState.BUILDING

    async def is_shown_waiting() -> bool:
        last = (await metal.record(request.instance_uuid)).timeline[-1]
        return last.what == "waiting" and last.detail.startswith("waits for Ironic: ")

    await until(is_building)
    await until(is_shown_waiting)
    await asyncio.to_thread(metal.lab.ironic.restart)
    assert await metal.client.wait(WAIT_S)
    record = await metal.record(request.instance_uuid)
    assert not [line for line in record.timeline if line.what == "waiting"]
    assert (watch.state, [attempt.outcome for attempt in record.history]) == ("active", ["active"]), record.history
    (active,) = [line for line in record.timeline if line.what == "active"]
    assert "; waited " in active.detail and " s for Ironic (" in active.detail, active
    await metal.delete(request.instance_uuid)
    await metal.all_agree()


async def test_a_node_that_is_free_again_after_an_outage_is_offered_with_the_first_answer(metal: RealMetal) -> None:
    (node,) = await metal.nodes.enroll(1)
    await metal.offered(node)
    await metal.nodes.maintenance(node, on=True)

    async def is_withdrawn() -> bool:
        """By placement and by the compute service."""
        return await metal.takes_builds(node, False) and not await metal.is_free(node)

    await until(is_withdrawn)
    failed = failed_resyncs()

    async def is_noticed() -> bool:
        return failed_resyncs() > failed

    await asyncio.to_thread(metal.lab.ironic.kill)
    # Another API process of the same Ironic ends the maintenance, and no notification of that arrives.
    with sqlite3.connect(metal.lab.ironic.database) as database:
        database.execute("UPDATE nodes SET maintenance = 0, maintenance_reason = NULL WHERE uuid = ?", (node,))
    await until(is_noticed)
    restarting = asyncio.create_task(asyncio.to_thread(metal.lab.ironic.restart))
    first = await first_answer(metal.lab.ironic.url)
    while not await metal.is_offered(node):
        assert time.monotonic() - first < OFFERED_LIMIT_S
        await asyncio.sleep(LOOK_S)  # as long as it takes: another process
    sys.stdout.write(f"offered {time.monotonic() - first:.2f} s after Ironic's first answer\n")
    await restarting
    await metal.all_agree()


def failed_resyncs() -> float:
    """Reads of all nodes by ironic-sync that found no Ironic."""
    return REGISTRY.get_sample_value("berth_ironic_resyncs_total", {"outcome": "ironic.unavailable"}) or 0.0


async def first_answer(url: str) -> float:
    """When Ironic first answered a list of nodes."""
    async with asyncio.timeout(WAIT_S), httpx.AsyncClient(base_url=url, trust_env=False) as client:
        while True:
            try:
                if (await client.get("/v1/nodes")).is_success:
                    return time.monotonic()
            except httpx.HTTPError:
                pass
            await asyncio.sleep(LOOK_S)
