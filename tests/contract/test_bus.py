"""Published messages: how it travels and what its publisher learns, over both transports alike."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest

from bus.consuming.outcome import Received
from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.catalogue import EVENTS
from bus.contracts.cell import CellDelete
from bus.port import Outgoing, Unroutable
from bus.wire import BATCH
from tests.contract.house import KINDS, REQUESTS, Answering, House, boot, settled
from tests.contract.rig import Collector

pytestmark = KINDS


async def test_what_is_published_is_handled_with_its_metadata(house: House) -> None:
    bus = await house.bus()
    handler = Answering()
    await house.consume(bus, REQUESTS, handler)
    await bus.publish(boot(1, name="a"), cause="why", correlation_id="c")
    (received,) = await handler.wait(1)
    assert received.message == boot(1, name="a")
    assert (received.meta.cause, received.meta.correlation_id, received.bus) == ("why", "c", "api")
    assert len(received.meta.id) == 36 and abs(received.meta.sent_at - bus.clock.time()) < 60
    await settled(bus)


async def test_many_travel_together_and_are_handled_in_batches(house: House) -> None:
    bus = await house.bus()
    handler = Answering()
    await house.consume(bus, REQUESTS, handler, concurrency=1, max_batch=64)
    await bus.publish_all([(boot(number), str(number)) for number in range(1000)])
    received = await handler.wait(1000)
    assert [one.meta.cause for one in received] == [str(number) for number in range(1000)]
    assert max(handler.batches) == 64
    assert len({one.meta.id for one in received}) == 1000
    await settled(bus)


async def test_an_unroutable_command_is_its_publishers_error(house: House) -> None:
    bus = await house.bus()
    with pytest.raises(Unroutable):
        await bus.publish(boot())
    with pytest.raises(Unroutable):
        await bus.publish_all([(boot(1), ""), (boot(2), "")])
    errors = await bus.publish_each([(boot(1), ""), (boot(2), "")])
    assert [type(error) for error in errors] == [Unroutable, Unroutable]


async def test_each_of_many_publishes_has_its_own_outcome(house: House) -> None:
    """Some are confirmed, some come back: the publisher knows which, and sends only those again."""
    bus = await house.bus()
    await house.consume(bus, REQUESTS, Answering())
    nowhere = CellDelete(instance_uuid=boot(3).instance_uuid, project_id="p")  # no conductor listens on this bus
    errors = await bus.publish_each([(boot(1), ""), (nowhere, ""), (boot(2), "")])
    assert errors[0] is errors[2] is None and isinstance(errors[1], Unroutable)
    assert await bus.publish_each([]) == []


async def test_publishers_wait_while_too_much_is_gathered(house: House) -> None:
    bus = await house.bus(waiting=10, batch_items=3)
    handler = Answering()
    await house.consume(bus, REQUESTS, handler)
    most = 0

    async def one(number: int) -> None:
        nonlocal most
        await bus.publish(boot(number))
        most = max(most, bus.publisher.waiting)

    await asyncio.gather(*(one(number) for number in range(200)))
    await bus.publish_all([(boot(number), "") for number in range(200, 300)])
    assert sorted(uuids_of(await handler.wait(300))) == sorted(boot(number).instance_uuid for number in range(300))
    assert most <= 10


def uuids_of(received: Sequence[Received]) -> list[str]:
    return [one.message.instance_uuid for one in received]  # type: ignore[attr-defined]


async def test_public_events_of_the_api_bus_are_one_json_object_each(house: House) -> None:
    bus = await house.bus()
    queue = await bus.declare("client.builds.{process}")
    got = Collector()
    await bus.transport.consume(queue, got, prefetch=100)
    event = BuildEvent(instance_uuid=boot().instance_uuid, project_id="p", state=BuildState.ACTIVE, sequence=3)
    await bus.publish_all([(event, "why")] * 20)
    for delivery in await got.wait(20):
        assert delivery.content_type == "application/json"
        assert json.loads(delivery.body)["state"] == "active"
        assert (delivery.type, delivery.routing_key) == ("build.event.v1", "build.event.active.p")
        assert delivery.headers["berth-cause"] == "why"


async def test_public_events_also_travel_in_batches_and_singly_only_where_a_queue_is_bound(house: House) -> None:
    bus = await house.bus()
    sent: list[Outgoing] = []
    publish = bus.transport.publish

    async def counted(message: Outgoing) -> None:
        sent.append(message)
        await publish(message)

    bus.transport.publish = counted  # type: ignore[method-assign]
    handler = Answering()
    await house.consume(bus, "client.feed.{process}", handler)
    everybodys = Collector()
    singles = await bus.declare("client.builds.{process}", process="foreign")
    await bus.transport.consume(singles, everybodys, prefetch=1000)
    event = BuildEvent(instance_uuid=boot().instance_uuid, project_id="p", state=BuildState.ACTIVE, sequence=3)
    await bus.publish_all([(event, "why")] * 100)
    await bus.publish_all([(event, "why")] * 100)
    assert len(await handler.wait(200)) == 200
    assert len(await everybodys.wait(200)) == 200
    assert len([one for one in sent if one.routing_key == "build.event.active.p"]) == 200
    assert len([one for one in sent if one.routing_key == "build.events"]) < 20


async def test_events_that_were_lost_are_queried_once(house: House) -> None:
    bus = await house.bus()
    sent: list[Outgoing] = []
    publish = bus.transport.publish

    async def counted(message: Outgoing) -> None:
        sent.append(message)
        await publish(message)

    bus.transport.publish = counted  # type: ignore[method-assign]
    event = BuildEvent(instance_uuid=boot().instance_uuid, project_id="p", state=BuildState.ACTIVE, sequence=3)
    await bus.publish_all([(event, "why")] * 100)
    assert [(one.routing_key, one.mandatory) for one in sent if one.routing_key != "build.events"] == [
        ("build.event.active.p", True)
    ]
    # A queue is bound: from then on everything arrives.
    singles = await bus.declare("client.builds.{process}")
    got = Collector()
    await bus.transport.consume(singles, got, prefetch=1000)
    await asyncio.gather(*(bus.publish(event) for _ in range(50)))
    await got.wait(50)


async def test_close_sends_what_is_gathered(house: House) -> None:
    bus, other = await house.bus(), await house.bus()
    await other.declare(REQUESTS)
    publishing = asyncio.create_task(bus.publish_all([(boot(number), "") for number in range(300)]))
    await asyncio.sleep(0)
    await bus.close()
    await publishing
    handler = Answering()
    await house.consume(other, REQUESTS, handler)
    await handler.wait(300)


async def test_events_of_a_cell_travel_in_batches(house: House) -> None:
    bus = await house.bus("c1")
    queue = await bus.declare("scheduler.builds")
    event = BuildEvent(instance_uuid=boot().instance_uuid, project_id="p", state=BuildState.ACTIVE, sequence=3)
    await bus.publish_all([(event, "why")] * 200)
    assert await bus.transport.depth(queue) < 50
    handler = Answering()
    await house.consume(bus, "scheduler.builds", handler)
    await handler.wait(200)
    await bus.transport.publish(Outgoing(exchange=EVENTS, routing_key="build.event.x", body=b"[]", content_type=BATCH))
    await settled(bus, queue)
