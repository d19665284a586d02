"""A redelivery releases nothing that the first run kept because it was an earlier request's."""

from __future__ import annotations

import asyncio

import pytest

from bus.contracts.catalogue import lane_of
from scheduler_worker.domain import delivery
from scheduler_worker.engine import SchedulingEngine
from tests.integration.scheduler.test_forgotten_claims import running
from tests.integration.scheduler.test_twins import CONFIG, Gate
from tests.integration.scheduler.world import World

pytestmark = pytest.mark.postgres


async def test_a_redelivered_request_that_sent_no_claim_releases_none(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As test_a_request_that_has_sent_no_claim_releases_none, and its scheduler dies before the acknowledgement."""
    monkeypatch.setattr(delivery, "RETRIES", 0)
    request, host = await running(world)
    await world.stop("s1")
    del world.hosts["c1"][host]
    await world.scheduler("s2", CONFIG)
    book = world.replicas["s2"]
    await world.eventually(lambda: book.row_of(host) is not None)
    ended = Gate(monkeypatch, SchedulingEngine, "_withdraw")
    await world.ask(request)
    await ended.wait()  # its end here is on record, and the message is not acknowledged
    cell = await world.queried(request)
    assert host in await world.used()
    await world.kill("s2")
    queue = world.brokers["api"].queue(f"scheduler.requests.{lane_of(request.project_id)}")
    await world.eventually(lambda: len(queue) == 1)
    await world.scheduler("s3", CONFIG)
    await world.eventually(lambda: len(queue) == 0 and not any(one.unacked for one in queue.consumers))
    await asyncio.sleep(0.2)
    used = await world.used()
    assert (cell, host in used) == ("c1", True), f"the host of the running instance has {used.get(host)}"
