"""What the broker has confirmed of a batch's outcomes is not published again when the connection is lost."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from bus import codec as wire
from bus import topology
from bus.bus import Bus
from bus.consuming import dead_letters
from bus.consuming.outcome import Done, Outcome, Received, Refuse, Retry
from bus.contracts.build import DeleteRequest
from bus.contracts.deploy import ConfigDrive
from bus.contracts.queues import BY_QUEUE, DEAD
from bus.memory import MemoryTransport
from bus.transport import BusUnavailable, Outgoing
from tests.contract.rig import REQUESTS, Answering, House, boot
from tests.kit.waiting import until

pytestmark = pytest.mark.parametrize("kind", ["memory"])
COUNT = 10


class Flapping:
    """A transport's publish that is cut off once, at the n-th publish to an exchange of this kind; counts confirms."""

    def __init__(self, publish, is_of, at: int) -> None:  # type: ignore[no-untyped-def]
        self._publish = publish
        self._is_of = is_of
        self._at = at
        self.confirmed = 0
        self.cut = 0

    async def __call__(self, message: Outgoing) -> None:
        if self._is_of(message.exchange):
            if self.confirmed == self._at and not self.cut:
                self.cut += 1
                raise BusUnavailable("the connection was lost before the confirm")
            self.confirmed += 1
        await self._publish(message)


def is_at_rest(bus: Bus) -> bool:
    """Whether no request waits, is delayed, or is in a handler's hands: no copy of one is still to come."""
    transport = bus.transport
    assert isinstance(transport, MemoryTransport)
    names = [REQUESTS, *(topology.delayed_queue(delay_s) for delay_s in topology.DELAYS_S)]
    queues = [transport.broker.queue(transport.names.queue(name)) for name in names]
    return not any(len(one) or any(held.unacked for held in one.consumers) for one in queues)


async def test_letters_that_were_confirmed_are_not_parked_again(house: House) -> None:
    bus = await house.bus()
    flapping = bus.transport.publish = Flapping(  # type: ignore[method-assign]
        bus.transport.publish, lambda exchange: exchange == DEAD, COUNT - 1
    )
    await bus.declare(REQUESTS)
    await bus.publish_all([(boot(number), "") for number in range(COUNT)])
    await house.consume(bus, REQUESTS, Answering(lambda _: Refuse("no")), concurrency=1)
    await until(lambda: flapping.confirmed >= COUNT)
    letters = await dead_letters.list_dead(bus.transport, REQUESTS, limit=1000)
    times = Counter(dead_letter.id for dead_letter in letters)
    assert len(times) == COUNT
    assert set(times.values()) == {1}, f"{len(letters)} letters of {COUNT} messages"


@pytest.mark.parametrize("cuts", [1, 4])
async def test_retries_that_were_confirmed_are_not_published_again(
    house: House, cuts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each retry leaves in a broker message of its own, as a foreign client's correlation id that is no text makes it.

    cuts: how many of the delays lose the connection at their last retry.
    """
    delays = (0.02, 0.03, 0.04, 0.05)
    monkeypatch.setattr(topology, "DELAYS_S", delays)
    monkeypatch.setitem(BY_QUEUE, REQUESTS, replace(BY_QUEUE[REQUESTS], retries_to="", retry_s=delays))
    bus = await house.bus(batch_items=1)
    handled: Counter[tuple[str, int]] = Counter()

    def answer(received: Received) -> Outcome:
        handled[received.message.instance_uuid, received.meta.retries] += 1  # type: ignore[attr-defined]
        return Retry("not.yet")

    plain, cut = bus.transport.publish, set()

    async def publish(message: Outgoing) -> None:
        delay = message.exchange if topology.is_delay(message.exchange) else ""
        if delay and delay not in cut and len(cut) < cuts and boot(COUNT - 1).instance_uuid in message.body.decode():
            cut.add(delay)
            raise BusUnavailable("the connection was lost before the confirm")
        await plain(message)

    bus.transport.publish = publish  # type: ignore[method-assign]
    await bus.declare(REQUESTS)
    await bus.publish_all([(boot(number), "") for number in range(COUNT)])
    await house.consume(bus, REQUESTS, Answering(answer), concurrency=1)
    uuids = {boot(number).instance_uuid for number in range(COUNT)}

    await until(lambda: is_at_rest(bus))
    calls = {attempt: sum(handled[uuid, attempt] for uuid in uuids) for attempt in range(len(delays) + 1)}
    letters = len(await dead_letters.list_dead(bus.transport, REQUESTS, limit=100_000))
    assert (set(calls.values()), letters) == ({COUNT}, COUNT), f"handled by attempt: {calls}; letters: {letters}"


@pytest.mark.parametrize(("count", "batch_items"), [(10, 128), (200, 128)], ids=["one message", "two messages"])
async def test_with_the_bounds_of_berth_itself(
    house: House, count: int, batch_items: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each retry leaves alone. The one whose connection was lost is published again, and no other."""
    delays = (0.02,)
    monkeypatch.setattr(topology, "DELAYS_S", delays)
    monkeypatch.setitem(BY_QUEUE, REQUESTS, replace(BY_QUEUE[REQUESTS], retries_to="", retry_s=delays))
    bus = await house.bus(batch_items=batch_items)
    handled: Counter[int] = Counter()

    def answer(received: Received) -> Outcome:
        handled[received.meta.retries] += 1
        return Retry("not.yet") if received.meta.retries == 0 else Done()

    plain, cut = bus.transport.publish, [0]

    async def publish(message: Outgoing) -> None:
        if (
            topology.is_delay(message.exchange)
            and not cut[0]
            and boot(count - 1).instance_uuid in message.body.decode()
        ):
            cut[0] += 1
            raise BusUnavailable("the connection was lost before the confirm")
        await plain(message)

    bus.transport.publish = publish  # type: ignore[method-assign]
    await bus.declare(REQUESTS)
    await bus.publish_all([(boot(number), "") for number in range(count)])
    handler = await house.answer(bus, REQUESTS, answer, concurrency=1, max_batch=256, prefetch=1024)
    await until(lambda: is_at_rest(bus))
    assert (dict(handled), cut[0]) == ({0: count, 1: count}, 1), handler.batches


async def test_copies_do_not_double_with_each_delay(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch loses the connection once, at its last retry: the worst flapping."""
    delays = (0.02, 0.03, 0.04, 0.05)
    monkeypatch.setattr(topology, "DELAYS_S", delays)
    monkeypatch.setitem(BY_QUEUE, REQUESTS, replace(BY_QUEUE[REQUESTS], retries_to="", retry_s=delays))
    bus = await house.bus(batch_items=1)
    handled: Counter[int] = Counter()
    left = [0]

    class Arming(Answering):
        async def __call__(self, received):  # type: ignore[no-untyped-def]
            left[0] = len(received) if len(received) > 1 else -1
            return await super().__call__(received)

    def answer(received: Received) -> Outcome:
        handled[received.meta.retries] += 1
        return Retry("not.yet") if received.meta.retries < len(delays) else Done()

    plain = bus.transport.publish

    async def publish(message: Outgoing) -> None:
        if topology.is_delay(message.exchange):
            left[0] -= 1
            if left[0] == 0:
                raise BusUnavailable("the connection was lost before the confirm")
        await plain(message)

    bus.transport.publish = publish  # type: ignore[method-assign]
    await bus.declare(REQUESTS)
    await bus.publish_all([(boot(number), "") for number in range(COUNT)])
    await house.consume(bus, REQUESTS, Arming(answer), concurrency=1)
    await until(lambda: is_at_rest(bus))
    assert set(handled.values()) == {COUNT}, f"handled by attempt: {dict(handled)}"


async def test_a_retry_comes_back_whatever_else_is_retried(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request is one that may be sent, but all together have more values than are read of one message."""
    delays = (0.02,)
    monkeypatch.setattr(topology, "DELAYS_S", delays)
    monkeypatch.setitem(BY_QUEUE, REQUESTS, replace(BY_QUEUE[REQUESTS], retries_to="", retry_s=delays))
    bus = await house.bus()
    numbers = {"network_data": {"n": [1] * (wire.MAX_CLIENT_VALUES // 2 - 100)}}
    heavy = [boot(number, config_drive=ConfigDrive(**numbers)) for number in range(3)]
    innocent = DeleteRequest(instance_uuid=boot(3).instance_uuid, project_id="p")
    await bus.declare(REQUESTS)
    for message in (*heavy, innocent):
        await bus.publish(message)
    once = Retry("not.yet")
    handler = await house.answer(bus, REQUESTS, lambda one: Done() if one.meta.retries else once, concurrency=1)
    await until(lambda: is_at_rest(bus))
    retried = sorted(one.message.instance_uuid for one in handler.got if one.meta.retries == 1)  # type: ignore[attr-defined]
    assert retried == [boot(number).instance_uuid for number in range(4)]
