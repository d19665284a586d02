"""A request that its cell has acknowledged and forgotten (its database was set back) still comes to an end."""

from __future__ import annotations

import asyncio

import pytest

from bus.bus import API
from bus.contracts.build import BuildAccepted, BuildState
from scheduler_worker.config import SchedulerConfig
from tests.integration.scheduler.world import PATIENCE_S, World

pytestmark = pytest.mark.postgres
# A request under way is looked after five times a second, as moves are.
CONFIG = SchedulerConfig(hosts_warmup_s=0.001, move_query_s=0.2)
SOON_S = 8.0


async def soon(condition) -> bool:  # type: ignore[no-untyped-def]
    try:
        async with asyncio.timeout(SOON_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("is_lost", [False, True], ids=["its machine runs", "its machine is gone"])
@pytest.mark.parametrize("repeats", [0, 1])
async def test_4_a_delete_that_its_cell_has_forgotten_is_carried_out(
    world: World, repeats: int, *, is_lost: bool
) -> None:
    """The scripted cell has acknowledged it and announces nothing: its record is `active` again."""
    await world.scheduler("s1", CONFIG)
    await world.add_hosts("c1", 1)
    request = world.request()
    host = await world.active(request)
    await world.delete(request)
    await world.until(lambda: world.deletes)
    assert (await world.show(request.instance_uuid)).state is BuildState.DELETING  # type: ignore[union-attr]
    world.deletes.clear()
    for _ in range(repeats):
        await world.delete(request)
    # The announcement of a cell whose record of the instance was set back, under a higher number.
    state, more = (BuildState.FAILED, {"code": "instance.lost"}) if is_lost else (BuildState.ACTIVE, {})
    await world.announced("c1", request, state, 1_000_011, host=host, attempt=1, **more)
    reached = await soon(lambda: world.deletes or BuildState.DELETED in world.states(request.instance_uuid))
    record = await world.show(request.instance_uuid)
    assert record is not None
    assert reached, (
        f"{repeats} repeats: no delete has reached the cell in {SOON_S} s; on record: {record.state.value},"
        f" events: {world.states(request.instance_uuid)}"
    )


@pytest.mark.parametrize("state", [BuildState.SCHEDULED, BuildState.BUILDING])
@pytest.mark.parametrize("repeats", [0, 1])
async def test_5_a_build_that_its_cell_has_forgotten_has_an_end(world: World, state: BuildState, repeats: int) -> None:
    await world.scheduler("s1", CONFIG)
    (host,) = await world.add_hosts("c1", 1)
    request = world.request()
    await world.ask(request)
    await world.until(lambda: world.builds)
    if state is BuildState.BUILDING:
        await world.announced("c1", request, BuildState.BUILDING, 10, host="c1-0", attempt=1)
    await world.ended(request.instance_uuid, state)
    world.builds.clear()
    for _ in range(repeats):
        answer = await world.buses[API].request(request, BuildAccepted, timeout_s=PATIENCE_S)
        assert answer.instance_uuid == request.instance_uuid

    def cares() -> object:
        """The cell has the build again or is queried about it, or it has an end."""
        return world.builds or world.queries or any(event.terminal for event in world.events)

    found = await soon(cares)
    record = await world.show(request.instance_uuid)
    assert record is not None
    assert found, (
        f"{repeats} repeats: nothing in {SOON_S} s; on record: {record.state.value}, host {host} holds"
        f" {(await world.used()).get(host)}; events: {world.states(request.instance_uuid)}"
    )
