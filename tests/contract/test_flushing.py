"""What is done but not on disk yet: acknowledged after a flush beside the handlers, over both transports alike."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest

from bus import flushing
from bus.bus import Bus
from bus.contracts.catalogue import COMMANDS
from bus.faults import BrokenInvariant, DatabaseUnavailable, Forbidden
from bus.outcome import Done, Outcome, Received, Refuse
from bus.port import Outgoing
from bus.wire import BATCH
from tests.contract.house import KINDS, REQUESTS, Answering, House, boot, depth_is, settled
from tests.contract.rig import PATIENCE_S, until

pytestmark = KINDS


class ScriptedDisk:
    """A disk whose flushes wait for the test, fail as it says, and may forget what was committed before them."""

    def __init__(self) -> None:
        self.losses = 0
        self.begun = 0
        self.done = 0
        self.faults: list[Exception] = []
        self.open = asyncio.Event()

    async def flush(self) -> None:
        self.begun += 1
        if self.faults:
            raise self.faults.pop(0)
        await self.open.wait()
        self.done += 1


def hasty(_: Received) -> Outcome:
    return Done(on_disk=False)


@pytest.fixture
def never_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is flushed only when something hurries it."""
    monkeypatch.setattr(flushing, "LINGER_S", 3600.0)


async def unacknowledged(house: House, bus: Bus, count: int, dead: int = 0) -> None:
    """So many come again to whoever takes the place of this connection."""
    await bus.transport.close()
    other, handler = await house.bus(), Answering()
    await house.consume(other, REQUESTS, handler)
    await handler.wait(count)
    await settled(other, dead=dead)
    assert len(handler.got) == count


async def test_nothing_is_acknowledged_before_the_flush(house: House) -> None:
    bus, disk, handler = await house.bus(), ScriptedDisk(), Answering(hasty)
    await house.consume(bus, REQUESTS, handler, disk=disk)
    await bus.publish(boot(1))
    await until(lambda: disk.begun)
    await unacknowledged(house, bus, 1)


async def test_what_is_flushed_is_acknowledged(house: House) -> None:
    bus, disk, handler = await house.bus(), ScriptedDisk(), Answering(hasty)
    consumer = await house.consume(bus, REQUESTS, handler, disk=disk)
    disk.open.set()
    await bus.publish(boot(1))
    await until(lambda: disk.done)
    await until(lambda: not consumer._in_hand)
    await unacknowledged(house, bus, 0)


async def test_handlers_go_on_and_one_flush_serves_all_that_has_gathered(house: House) -> None:
    bus, disk, handler = await house.bus(), ScriptedDisk(), Answering(hasty)
    consumer = await house.consume(bus, REQUESTS, handler, disk=disk, concurrency=1, max_batch=1)
    await bus.publish(boot(0))
    await until(lambda: disk.begun)
    for number in range(1, 6):  # while that flush is under way
        await bus.publish(boot(number))
    await handler.wait(6)
    assert (len(handler.batches), disk.begun) == (6, 1)
    disk.open.set()
    await until(lambda: not consumer._in_hand)
    assert disk.done == 2, "the first batch's, and one for all that came meanwhile"
    await unacknowledged(house, bus, 0)


async def test_a_commit_during_a_flush_waits_for_the_next(house: House) -> None:
    bus, disk, handler = await house.bus(), ScriptedDisk(), Answering(hasty)
    consumer = await house.consume(bus, REQUESTS, handler, disk=disk, concurrency=1, max_batch=1)
    await bus.publish(boot(1))
    await until(lambda: disk.begun)
    await bus.publish(boot(2))
    await handler.wait(2)
    disk.open.set()
    await until(lambda: disk.done == 1)
    disk.open.clear()
    await until(lambda: disk.begun == 2)
    assert len(consumer._in_hand) == 1
    await unacknowledged(house, bus, 1)


async def test_a_flush_that_fails_is_tried_again(house: House) -> None:
    bus, disk, handler = await house.bus(), ScriptedDisk(), Answering(hasty)
    disk.faults = [DatabaseUnavailable("away"), DatabaseUnavailable("away")]
    consumer = await house.consume(bus, REQUESTS, handler, disk=disk)
    await bus.publish(boot(1))
    await until(lambda: disk.begun == 3)
    assert len(consumer._in_hand) == 1 and len(handler.got) == 1
    disk.open.set()
    await until(lambda: not consumer._in_hand)
    assert (disk.done, handler.batches, consumer.ready) == (1, [1], True)


async def test_what_a_crash_may_have_forgotten_is_handled_again_before_it_is_acknowledged(house: House) -> None:
    """The flush after a crash succeeds, and says nothing about what was committed before it."""
    bus, disk, handler = await house.bus(), ScriptedDisk(), Answering(hasty)
    consumer = await house.consume(bus, REQUESTS, handler, disk=disk, concurrency=1)
    await bus.declare(REQUESTS)
    await bus.publish_all([(boot(number), "") for number in range(3)])
    await handler.wait(3)
    await until(lambda: disk.begun)
    disk.losses += 1
    disk.open.set()
    await handler.wait(6)
    await until(lambda: not consumer._in_hand)
    assert handler.uuids[3:] == handler.uuids[:3], "in the same order"
    assert disk.done >= 2
    await unacknowledged(house, bus, 0)


@pytest.mark.usefixtures("never_by_time")
async def test_many_that_wait_are_flushed_at_once(house: House) -> None:
    """As many as may be delivered ahead: without the bound nothing would ever come again."""
    bus, disk, handler = await house.bus(), ScriptedDisk(), Answering(hasty)
    disk.open.set()
    await house.consume(bus, REQUESTS, handler, disk=disk, concurrency=1, max_batch=1, prefetch=8)
    for number in range(20):
        await bus.publish(boot(number))
    await handler.wait(20)
    assert disk.done >= 20 // 2 - 1, "a quarter of eight at a time"


@pytest.mark.usefixtures("never_by_time")
async def test_a_drain_flushes_at_once_and_acknowledges(house: House) -> None:
    bus, disk, handler = await house.bus(), ScriptedDisk(), Answering(hasty)
    consumer = await house.consume(bus, REQUESTS, handler, disk=disk)
    disk.open.set()
    await bus.publish(boot(1))
    await handler.wait(1)
    await consumer.drain(PATIENCE_S)
    assert disk.done == 1
    await unacknowledged(house, bus, 0)


async def test_what_cannot_be_flushed_within_the_grace_time_goes_back(house: House) -> None:
    bus, disk, handler = await house.bus(), ScriptedDisk(), Answering(hasty)
    consumer = await house.consume(bus, REQUESTS, handler, disk=disk)
    await bus.publish(boot(1))
    await handler.wait(1)
    await consumer.drain(0.01)
    await until(lambda: depth_is(bus, REQUESTS, 1))


async def test_other_outcomes_wait_for_no_flush(house: House) -> None:
    bus, disk = await house.bus(), ScriptedDisk()
    answers: dict[int, Outcome] = {1: Done(), 2: Refuse("no"), 3: Done(on_disk=False)}
    handler = Answering(lambda one: answers[int(one.message.instance_uuid[-1])])  # type: ignore[attr-defined]
    await bus.declare(REQUESTS)
    consumer = await house.consume(bus, REQUESTS, handler, disk=disk)
    for number in answers:
        await bus.publish(boot(number))
    await handler.wait(3)
    await settled(bus, dead=1)
    await until(lambda: len(consumer._in_hand) == 1)
    await unacknowledged(house, bus, 1, dead=1)


async def test_a_parcel_is_acknowledged_when_all_of_it_is_on_disk(house: House) -> None:
    bus, disk = await house.bus(), ScriptedDisk()
    handler = Answering(lambda one: Done(on_disk=one.message != boot(2)))
    consumer = await house.consume(bus, REQUESTS, handler, disk=disk)
    items = [
        {
            "meta": {"id": str(number)},
            "body": {
                "type": "build.request.v1",
                "instance_uuid": boot(number).instance_uuid,
                "flavor": "m1.small",
                "project_id": "p",
            },
        }
        for number in (1, 2, 3)
    ]
    await bus.transport.publish(
        Outgoing(exchange=COMMANDS, routing_key="build.request.p", body=json.dumps(items).encode(), content_type=BATCH)
    )
    await until(lambda: disk.begun)
    assert [parcel.open for parcel in consumer._in_hand] == [1]
    disk.open.set()
    await until(lambda: not consumer._in_hand)
    await unacknowledged(house, bus, 0)


@pytest.mark.usefixtures("never_by_time")
async def test_a_broken_invariant_waits_for_what_is_not_on_disk(house: House) -> None:
    bus, disk = await house.bus(), ScriptedDisk()

    async def handle(batch: Sequence[Received]) -> Sequence[Outcome]:
        if any(one.message == boot(13) for one in batch):
            raise BrokenInvariant("thirteen")
        return [Done(on_disk=False)] * len(batch)

    consumer = await house.consume(bus, REQUESTS, handle, disk=disk, max_batch=1)
    running = asyncio.create_task(consumer.run())
    await bus.publish(boot(1))
    await until(lambda: consumer._flushing is not None and not consumer._flushing.idle)
    await bus.publish(boot(13))
    await until(lambda: disk.begun)
    assert not running.done()
    disk.open.set()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(BrokenInvariant, match="thirteen"):
            await running
    await unacknowledged(house, bus, 0, dead=1)


async def test_a_flush_that_is_forbidden_ends_the_consumer_and_not_its_messages(house: House) -> None:
    bus, disk, handler = await house.bus(), ScriptedDisk(), Answering(hasty)
    disk.faults = [Forbidden("no")]
    consumer = await house.consume(bus, REQUESTS, handler, disk=disk)
    running = asyncio.create_task(consumer.run())
    await bus.publish(boot(1))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(Forbidden):
            await running
    await consumer.drain(PATIENCE_S)
    await until(lambda: depth_is(bus, REQUESTS, 1))


async def test_a_handler_may_not_leave_the_flush_to_nobody(house: House) -> None:
    bus = await house.bus()
    await house.consume(bus, REQUESTS, Answering(hasty))
    await bus.publish(boot(1))
    await settled(bus, dead=1)
