"""What a failed build costs: how often placement is asked, and what is left in the book."""

from __future__ import annotations

import asyncpg
import pytest

from bus.bus import API
from bus.contracts.build import BuildAccepted, BuildState, DeleteRequest
from bus.contracts.catalogue import BY_QUEUE, BY_TYPE, QueueKind
from bus.contracts.placement import ReleaseRun
from tests.integration.scheduler.test_twins import CONFIG, ROOM_FOR_ONE
from tests.integration.scheduler.world import PATIENCE_S, World

pytestmark = pytest.mark.postgres

QUEUES = ("placement.requests", "placement.reads", "placement.releases")


def asked(world: World) -> list[int]:
    """How many messages each queue of placement has had."""
    return [world.brokers[API].queue(name).next_number for name in QUEUES]


async def consumers(world: World) -> int:
    """How many rows the book has of consumers, fences among them."""
    connection = await asyncpg.connect(world.url)
    found: int = await connection.fetchval("SELECT count(*) FROM placement.consumers")
    await connection.close()
    return found


async def test_a_build_that_no_host_can_take_is_two_reads_and_leaves_no_row_in_the_book(world: World) -> None:
    """The newest changes, and what its instance holds. It was one round trip more, and a fence for a claim that nobody
    had sent.
    """
    await world.scheduler("s1", CONFIG)
    await world.add_hosts("c1", 1, on="c1", **ROOM_FOR_ONE)
    await world.active(world.request())
    book = world.replicas["s1"]
    await world.eventually(lambda: not book.free("VCPU", book.rows_of_roots()).any())
    before, rows = asked(world), await consumers(world)
    request = world.request()
    await world.buses[API].request(request, BuildAccepted, timeout_s=PATIENCE_S)
    assert (await world.ended(request.instance_uuid)).code == "no_valid_host"
    assert [now - then for now, then in zip(asked(world), before, strict=True)] == [0, 2, 0]
    assert await consumers(world) == rows


async def test_a_delete_of_a_build_that_another_scheduler_may_claim_for_is_released_behind_it(world: World) -> None:
    """Nobody waits for that: the message is committed with the delete, and kept until placement has carried it out."""
    await world.scheduler("s1", CONFIG)
    await world.add_hosts("c1", 1, on="c1", **ROOM_FOR_ONE)
    request = world.request()
    before = asked(world)
    await world.ask(request, DeleteRequest(instance_uuid=request.instance_uuid, project_id=request.project_id))
    await world.ended(request.instance_uuid, BuildState.DELETED)
    await world.eventually(lambda: asked(world)[2] == before[2] + 1)
    assert (BY_QUEUE[QUEUES[2]].kind, BY_TYPE[ReleaseRun].reply) == (QueueKind.DURABLE, None)
    assert BY_TYPE[ReleaseRun].persistent and BY_TYPE[ReleaseRun].publishers == ("scheduler_worker",)
