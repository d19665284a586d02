"""Marks on a bus, by which a deployment knows whose it is: asked of every transport alike."""

from __future__ import annotations

import asyncio

import pytest

from bus.port import BusMarked, Transport
from tests.contract.queues import EVERY_ADAPTER, EVERY_ADAPTER_THAT_RECONNECTS
from tests.contract.rig import Rig, until

MINE, THEIRS = "3d7f0f5e-0000-4000-8000-000000000001", "3d7f0f5e-0000-4000-8000-000000000002"
LOOK_AGAIN_S = 0.01


async def is_refused(transport: Transport, owner: str) -> str:
    with pytest.raises(BusMarked) as refused:
        await transport.mark("scheduler", owner)
    return refused.value.owner


@EVERY_ADAPTER
async def test_a_mark_has_one_owner(rig: Rig) -> None:
    one, other = await rig.transport(), await rig.transport()
    assert await other.owner_of("scheduler") == ""
    await one.mark("scheduler", MINE)
    await one.mark("scheduler", MINE)
    await other.mark("scheduler", MINE)
    assert await is_refused(other, THEIRS) == MINE
    assert await other.owner_of("scheduler") == await one.owner_of("scheduler") == MINE
    await other.mark("placement", THEIRS)
    assert await one.owner_of("placement") == THEIRS


@EVERY_ADAPTER
async def test_a_mark_that_was_removed_can_be_anothers(rig: Rig) -> None:
    one, other = await rig.transport(), await rig.transport()
    await one.unmark("scheduler")
    await one.mark("scheduler", MINE)
    await other.unmark("scheduler")
    assert await one.owner_of("scheduler") == ""
    await other.mark("scheduler", THEIRS)
    assert await is_refused(one, MINE) == THEIRS


@EVERY_ADAPTER
async def test_of_two_that_come_first_at_once_one_has_the_bus(rig: Rig) -> None:
    transports = [await rig.transport() for _ in range(6)]
    owners = [MINE, THEIRS] * 3
    tried = await asyncio.gather(
        *(one.mark("scheduler", owner) for one, owner in zip(transports, owners, strict=True)), return_exceptions=True
    )
    has = await transports[0].owner_of("scheduler")
    assert has in (MINE, THEIRS)
    for owner, result in zip(owners, tried, strict=True):
        assert (result is None) == (owner == has), (owner, result)
        assert result is None or (isinstance(result, BusMarked) and result.owner == has)


@EVERY_ADAPTER
async def test_a_bus_of_another_prefix_is_another_bus(rig: Rig) -> None:
    one, other = await rig.transport(), await rig.transport(prefix="second.")
    await one.mark("scheduler", MINE)
    await other.mark("scheduler", THEIRS)
    assert (await one.owner_of("scheduler"), await other.owner_of("scheduler")) == (MINE, THEIRS)


@EVERY_ADAPTER_THAT_RECONNECTS
async def test_a_connection_does_not_come_back_to_a_bus_that_has_become_anothers(rig: Rig) -> None:
    one = await rig.transport()
    await one.mark("scheduler", MINE)
    await rig.part(one)
    other = rig.outside("other")
    await other.open()
    await other.unmark("scheduler")
    await other.mark("scheduler", THEIRS)
    came: list[bool] = []
    one.on_reconnect(lambda: came.append(True))
    await rig.rejoin(one)
    for _ in range(20):  # nothing is announced that does not happen; a slow machine looks for longer, and fails nothing
        await asyncio.sleep(LOOK_AGAIN_S)
        assert not one.connected
    await other.unmark("scheduler")
    await until(lambda: came)
    assert await other.owner_of("scheduler") == MINE
    await other.close()


@pytest.mark.parametrize("kind", [pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)])
async def test_a_connection_that_is_lost_while_the_owner_is_read_does_not_end_the_worker(rig: Rig) -> None:
    one = await rig.transport()
    await one.mark("scheduler", MINE)
    await rig.part(one)
    await until(lambda: not one.connected)
    reading = asyncio.create_task(one.owner_of("scheduler"))
    await asyncio.sleep(0)
    await rig.rejoin(one)
    assert await reading == MINE
