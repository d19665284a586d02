"""A caller's own request id goes with its write: to the log, and to every follower of the change feed on the bus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import structlog

from bus.bus import Bus
from bus.clock import SystemClock, new_uuid
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.feed import Change, FeedChanges
from bus.memory import MemoryTransport
from placement_worker.domain.trees import CreateProvider
from tests.integration.placement_rest.conftest import Placement, holding, on_postgres

pytestmark = pytest.mark.postgres

PATIENCE_S = 60.0
OURS = "req-11111111-2222-4333-8444-555555555555"
HEADER = {"x_openstack_request_id": OURS}


async def changes(placement: Placement, after: int) -> list[Change]:
    return list((await placement.store.changes(after, 1000)).changes)


async def test_the_callers_id_is_on_every_change_of_its_write(placement: Placement) -> None:
    host, consumer = await placement.host(VCPU=4), new_uuid(placement.rng)
    child = new_uuid(placement.rng)
    start = (await placement.store.head()).sequence
    body = {"name": "child", "uuid": child, "parent_provider_uuid": host}
    await placement.call("POST", "/resource_providers", body, status=200, **HEADER)
    held = holding({host: {"resources": {"VCPU": 1}}}, None)
    await placement.call("PUT", f"/allocations/{consumer}", held, status=204, **HEADER)
    await placement.call("DELETE", f"/allocations/{consumer}", status=204, **HEADER)
    reshape = {
        "inventories": {
            host: {"resource_provider_generation": 2, "inventories": {}},
            child: {"resource_provider_generation": 0, "inventories": {"VCPU": {"total": 4}}},
        },
        "allocations": {},
    }
    await placement.call("POST", "/reshaper", reshape, status=204, x_roles="service", **HEADER)
    found = await changes(placement, start)
    assert len(found) == 5
    assert {change.causes for change in found} == {(OURS,)}


async def test_without_one_it_is_ours_and_what_is_no_id_goes_nowhere(placement: Placement) -> None:
    start = (await placement.store.head()).sequence
    body = {"name": "host", "uuid": new_uuid(placement.rng)}
    answer = await placement.call("POST", "/resource_providers", body, x_openstack_request_id="req-<script>")
    [change] = await changes(placement, start)
    assert change.causes == (answer.headers["x-openstack-request-id"],)


async def test_writes_that_were_written_together_keep_their_own_causes(placement: Placement) -> None:
    hosts = [await placement.host(VCPU=4) for _ in range(8)]
    ids = [f"req-{new_uuid(placement.rng)}" for _ in hosts]
    start = (await placement.store.head()).sequence

    async def claim(host: str, own: str, amount: int) -> int:
        held = holding({host: {"resources": {"VCPU": amount}}}, None)
        path = f"/allocations/{new_uuid(placement.rng)}"
        return (await placement.call("PUT", path, held, x_openstack_request_id=own)).status_code

    refused = [claim(host, f"req-{new_uuid(placement.rng)}", 5) for host in hosts]
    done = [claim(host, own, 1) for host, own in zip(hosts, ids, strict=True)]
    assert await asyncio.gather(*refused, *done) == [409] * 8 + [204] * 8
    found = await changes(placement, start)
    assert {change.provider: change.causes for change in found} == {
        host: (own,) for host, own in zip(hosts, ids, strict=True)
    }


@asynccontextmanager
async def listening(placement: Placement) -> AsyncIterator[asyncio.Queue[Received]]:
    """The messages on the bus."""
    events: asyncio.Queue[Received] = asyncio.Queue()

    async def listen(batch: Sequence[Received]) -> list[Outcome]:
        for received in batch:
            events.put_nowait(received)
        return [Done() for _ in batch]

    bus = Bus(
        "api", MemoryTransport(placement.broker, "listener"), process="listener", clock=SystemClock(), rng=placement.rng
    )
    await bus.open()
    consumer = bus.consumer("scheduler.feed.{process}", listen)
    await consumer.start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield events
    finally:
        await consumer.drain(1.0)
        await bus.close()


async def test_the_bus_carries_it_too(placement: Placement) -> None:
    async with listening(placement) as events:
        body = {"name": "host", "uuid": new_uuid(placement.rng)}
        await placement.call("POST", "/resource_providers", body, status=200, **HEADER)
        while not isinstance((received := await events.get()).message, FeedChanges):
            pass
        assert received.meta.cause == OURS


async def test_a_message_of_several_causes_names_none_of_them_as_its_own(placement: Placement) -> None:
    ids = [f"req-{new_uuid(placement.rng)}" for _ in range(2)]
    writes = [CreateProvider(uuid=new_uuid(placement.rng), name=own, cause=own) for own in ids]
    async with listening(placement) as events:
        await placement.store.write_trees(writes)
        body = {"name": "host", "uuid": new_uuid(placement.rng)}
        await placement.call("POST", "/resource_providers", body, status=200, **HEADER)  # wakes the publisher
        while True:
            received = await events.get()
            if isinstance(received.message, FeedChanges):
                causes = {cause for change in received.message.changes for cause in change.causes}
                assert received.meta.cause == (OURS if causes == {OURS} else "")
                if causes >= set(ids):
                    return


@on_postgres
async def test_the_log_carries_it_too(placement: Placement) -> None:
    async with placement.postgres.rows.database.raw() as connection:
        await connection.execute("ALTER TABLE traits RENAME TO gone")  # something to log
    with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as logs:
        await placement.call("GET", "/traits", status=500, **HEADER)
        await placement.call("GET", "/traits", status=500)
    async with placement.postgres.rows.database.raw() as connection:
        await connection.execute("ALTER TABLE gone RENAME TO traits")
    lines = [line for line in logs if line["event"] == "rest.failed"]
    assert [line.get("global_request_id") for line in lines] == [OURS, None]
    assert all(line["request_id"].startswith("req-") for line in lines)
