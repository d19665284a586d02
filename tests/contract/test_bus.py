"""What the bus, its consumer and its requests do, over the memory and the RabbitMQ transport alike."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest

from bus import dead_letters, metrics, topology
from bus.bus import Bus, BusLimits
from bus.clock import SystemClock
from bus.consumer import Consumer, Malformed
from bus.contracts.base import Message, Refusal
from bus.contracts.build import BuildAccepted, BuildEvent, BuildQuery, BuildRequest, BuildState
from bus.contracts.catalogue import BY_QUEUE, COMMANDS, EVENTS
from bus.contracts.cell import CellDelete
from bus.faults import BrokenInvariant, DatabaseUnavailable, RequestRefused, RequestTimeout
from bus.outcome import Done, Handler, Outcome, Received, Refuse, Retry
from bus.port import BusForbidden, Outgoing, Unroutable, dead_queue
from bus.service.database import DatabaseForbidden
from bus.wire import BATCH
from tests.contract.rig import PATIENCE_S, Collector, Rig, rig_for, until

pytestmark = pytest.mark.parametrize("kind", ["memory", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)])

REQUESTS = "scheduler.requests"


class House:
    """Buses and consumers of one test, put away at its end."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self._closing: list[Callable[[], Awaitable[None]]] = []
        self._count = 0

    async def bus(self, name: str = "api", **limits: int) -> Bus:
        self._count += 1
        transport = self.rig.make(f"{name}-{self._count}")
        bus = Bus(
            name,
            transport,
            process=f"p{self._count}",
            clock=SystemClock(),
            rng=random.Random(self._count),
            limits=BusLimits(**limits),
        )
        await bus.open()
        self._closing.append(bus.close)
        return bus

    async def consume(self, bus: Bus, queue: str, handler: Handler, **options: object) -> Consumer:
        consumer = bus.consumer(queue, handler, **options)  # type: ignore[arg-type]
        await consumer.start()
        self._closing.append(lambda: consumer.drain(0.1))
        return consumer

    async def close(self) -> None:
        for closing in reversed(self._closing):
            await closing()


@pytest.fixture
async def house(kind: str, request: pytest.FixtureRequest) -> AsyncIterator[House]:
    async with rig_for(kind, lambda: request.getfixturevalue("amqp")) as rig:
        made = House(rig)
        try:
            yield made
        finally:
            await made.close()


class Answering:
    """A handler that remembers what it got, and answers as it is told."""

    def __init__(self, answer: Callable[[Received], Outcome] = lambda _: Done()) -> None:
        self.got: list[Received] = []
        self.batches: list[int] = []
        self._answer = answer

    async def __call__(self, received: Sequence[Received]) -> Sequence[Outcome]:
        self.batches.append(len(received))
        outcomes = [self._answer(one) for one in received]
        self.got += received
        return outcomes

    @property
    def uuids(self) -> list[str]:
        return [one.message.instance_uuid for one in self.got]  # type: ignore[attr-defined]

    async def wait(self, count: int) -> list[Received]:
        await until(lambda: len(self.got) >= count)
        return self.got


def boot(number: int = 0, **fields: object) -> BuildRequest:
    return BuildRequest(instance_uuid=str(uuid.UUID(int=number)), flavor="m1.small", project_id="p", **fields)  # type: ignore[arg-type]


def accepted(received: Received) -> Outcome:
    assert isinstance(received.message, BuildRequest)
    return Done(BuildAccepted(instance_uuid=received.message.instance_uuid))


async def settled(bus: Bus, queue: str = REQUESTS, dead: int = 0) -> None:
    """Until the queue is empty and this many dead letters are parked."""

    async def as_said() -> bool:
        depths = await bus.transport.depth(queue), await bus.transport.depth(dead_queue(queue))
        return depths == (0, dead)

    await until(as_said)


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


async def test_of_many_each_is_told_how_it_went(house: House) -> None:
    """Some are confirmed, some come back: whoever publishes knows which, and sends only those again."""
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
    assert sorted(await_uuids(await handler.wait(300))) == sorted(boot(number).instance_uuid for number in range(300))
    assert most <= 10


def await_uuids(received: Sequence[Received]) -> list[str]:
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


async def test_public_events_also_travel_in_batches_and_singly_only_where_somebody_listens(house: House) -> None:
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


async def test_events_that_nobody_hears_are_asked_about_once(house: House) -> None:
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
    # Somebody begins to listen: from then on everything arrives.
    singles = await bus.declare("client.builds.{process}")
    got = Collector()
    await bus.transport.consume(singles, got, prefetch=1000)
    await asyncio.gather(*(bus.publish(event) for _ in range(50)))
    await got.wait(50)


async def test_a_foreign_client_needs_no_more_than_json_and_a_routing_key(house: House) -> None:
    bus = await house.bus()
    handler = Answering(accepted)
    await house.consume(bus, REQUESTS, handler)
    await bus.transport.declare_reply_queue("somebodys")
    answers = Collector()
    await bus.transport.consume("somebodys", answers, prefetch=10)
    body = json.dumps({"instance_uuid": boot().instance_uuid, "flavor": "m1.small", "project_id": "p"}).encode()
    for correlation_id in ("1", "2", "3"):
        await bus.transport.publish(
            Outgoing(
                exchange=COMMANDS,
                routing_key="build.request.p",
                body=body,
                reply_to="somebodys",
                correlation_id=correlation_id,
            )
        )
    got = await answers.wait(3)
    assert {delivery.correlation_id for delivery in got} == {"1", "2", "3"}
    assert {delivery.content_type for delivery in got} == {"application/json"}
    assert json.loads(got[0].body)["instance_uuid"] == boot().instance_uuid
    assert len({received.meta.id for received in handler.got}) == 3


async def test_request_and_reply(house: House) -> None:
    asker, server = await house.bus(), await house.bus()
    await house.consume(server, REQUESTS, Answering(accepted))
    reply = await asker.request(boot(5), BuildAccepted, timeout_s=PATIENCE_S, cause="why")
    assert reply == BuildAccepted(instance_uuid=boot(5).instance_uuid)


async def test_many_requests_are_one_round_trip_and_keep_their_places(house: House) -> None:
    asker, server = await house.bus(), await house.bus()

    def answer(received: Received) -> Outcome:
        assert isinstance(received.message, BuildRequest)
        if received.message.name == "no":
            return Refuse("flavor.unknown", "no such flavor")
        return accepted(received)

    await house.consume(server, REQUESTS, Answering(answer))
    asked = [boot(number, name="no" if number % 10 == 3 else "") for number in range(200)]
    answers = await asker.request_all(asked, BuildAccepted, timeout_s=PATIENCE_S, causes=[""] * 200)
    for number, reply in enumerate(answers):
        if number % 10 == 3:
            assert isinstance(reply, RequestRefused) and reply.code == "flavor.unknown"
        else:
            assert reply == BuildAccepted(instance_uuid=boot(number).instance_uuid)


async def test_a_refusal_is_raised_with_its_code(house: House) -> None:
    asker, server = await house.bus(), await house.bus()
    await house.consume(server, REQUESTS, Answering(lambda _: Refuse("flavor.unknown", "no such flavor")))
    with pytest.raises(RequestRefused, match="no such flavor") as refused:
        await asker.request(boot(), BuildAccepted, timeout_s=PATIENCE_S)
    assert refused.value.code == "flavor.unknown"
    await settled(server)


async def test_no_reply_is_a_timeout_at_the_deadline(house: House) -> None:
    asker, server = await house.bus(), await house.bus()
    await house.consume(server, REQUESTS, Answering())  # Done, but says nothing
    with pytest.raises(RequestTimeout):
        await asker.request(boot(), BuildAccepted, timeout_s=0.05)


async def test_a_request_waits_for_the_other_side_to_start(house: House) -> None:
    asker, server = await house.bus(), await house.bus()
    refused = asyncio.Event()
    publish = asker.transport.publish

    async def watched(message: Outgoing) -> None:
        try:
            await publish(message)
        except Unroutable:
            refused.set()
            raise

    asker.transport.publish = watched  # type: ignore[method-assign]
    asking = asyncio.create_task(asker.request(BuildQuery(), Refusal, timeout_s=PATIENCE_S))
    async with asyncio.timeout(PATIENCE_S):
        await refused.wait()
    handler = Answering(lambda _: Done(Refusal(code="hello")))
    await house.consume(server, "scheduler.queries", handler)
    assert (await asking).code == "hello"


async def test_requests_work_again_after_the_connection_was_lost(house: House) -> None:
    asker, server = await house.bus(), await house.bus()
    await house.consume(server, REQUESTS, Answering(accepted))
    await asker.request(boot(1), BuildAccepted, timeout_s=PATIENCE_S)
    back = [asyncio.Event(), asyncio.Event()]
    asker.transport.on_reconnect(back[0].set)
    server.transport.on_reconnect(back[1].set)
    await house.rig.cut()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(event.wait() for event in back))
    reply = await asker.request(boot(2), BuildAccepted, timeout_s=PATIENCE_S)
    assert reply.instance_uuid == boot(2).instance_uuid


async def test_an_expired_request_is_skipped(house: House) -> None:
    bus = await house.bus()
    handler = Answering()
    late = {"berth-deadline-ms": int(bus.clock.time() * 1000) - 1000}
    queue = await bus.declare(REQUESTS)
    body = b'{"type":"build.delete.v1","instance_uuid":"%s","project_id":"p"}' % boot().instance_uuid.encode()
    for headers in (late, {}):
        await bus.transport.publish(
            Outgoing(exchange=COMMANDS, routing_key="build.delete.p", body=body, headers=headers)
        )
    await house.consume(bus, REQUESTS, handler)
    await settled(bus, queue)
    assert len(await handler.wait(1)) == 1


async def test_a_request_that_cannot_be_served_is_given_up_when_nobody_waits_for_it_any_more(house: House) -> None:
    """A statement that always takes too long is a passing fault, too; it must not hold the queue for ever."""
    asker, server = await house.bus(), await house.bus()

    def answer(received: Received) -> Outcome:
        if received.message == boot(1):
            raise DatabaseUnavailable("again and again")
        return accepted(received)

    await house.consume(server, REQUESTS, Answering(answer), concurrency=1)
    with pytest.raises(RequestTimeout):
        await asker.request(boot(1), BuildAccepted, timeout_s=0.3)
    reply = await asker.request(boot(2), BuildAccepted, timeout_s=PATIENCE_S)
    assert reply.instance_uuid == boot(2).instance_uuid


async def test_a_retry_comes_back_after_its_delay_and_ends_as_a_dead_letter(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    from msgspec import structs  # noqa: PLC0415

    monkeypatch.setitem(BY_QUEUE, REQUESTS, structs.replace(BY_QUEUE[REQUESTS], retry_s=(0.02, 0.03)))
    bus = await house.bus()
    handler = Answering(lambda _: Retry("not.yet", "come back"))
    await house.consume(bus, REQUESTS, handler)
    await bus.publish(boot(1), cause="why")
    await settled(bus, dead=1)
    assert [one.meta.attempt for one in handler.got] == [0, 1, 2]
    assert len({one.meta.id for one in handler.got}) == 1
    (letter,) = await dead_letters.list_dead(bus.transport, REQUESTS)
    assert (letter.code, letter.reason, letter.cause, letter.type) == (
        "not.yet",
        "come back",
        "why",
        "build.request.v1",
    )


async def test_a_refused_command_that_nobody_waits_for_is_a_dead_letter(house: House) -> None:
    bus = await house.bus()
    await house.consume(bus, REQUESTS, Answering(lambda _: Refuse("request.invalid", "because")))
    before = bus.clock.time()
    await bus.publish(boot(1), cause="why")
    await settled(bus, dead=1)
    (letter,) = await dead_letters.list_dead(bus.transport, REQUESTS)
    assert (letter.code, letter.reason, letter.cause) == ("request.invalid", "because", "why")
    assert (letter.exchange, letter.routing_key) == (COMMANDS, "build.request.p")
    assert letter.died_at is not None and abs(letter.died_at - before) < 60
    assert json.loads(letter.body)["flavor"] == "m1.small"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "message.malformed"),
        (b"\xff\xfe", "message.malformed"),
        (b'{"deep":' * 100_000, "message.malformed"),
        (b"[]", "message.invalid"),
        (b'{"type":"no.such.v1"}', "message.unknown_type"),
        (b'{"type":"placement.claim.v1"}', "message.unknown_type"),
        (b'{"type":7}', "message.invalid"),
        (b'{"flavor":"x","project_id":"p","instance_uuid":"short"}', "message.invalid"),
        (b'{"project_id":"p"}', "message.invalid"),
    ],
)
async def test_what_cannot_be_read_is_a_dead_letter_with_its_code(house: House, body: bytes, code: str) -> None:
    bus = await house.bus()
    handler = Answering()
    await house.consume(bus, REQUESTS, handler)
    await bus.transport.publish(Outgoing(exchange=COMMANDS, routing_key="build.request.p", body=body))
    await bus.publish(boot(1))
    await handler.wait(1)
    await settled(bus, dead=1)
    (letter,) = await dead_letters.list_dead(bus.transport, REQUESTS)
    assert (letter.code, letter.body) == (code, body)
    assert handler.uuids == [boot(1).instance_uuid]


async def test_whoever_asks_badly_is_told(house: House) -> None:
    bus = await house.bus()
    await house.consume(bus, REQUESTS, Answering())
    await bus.transport.declare_reply_queue("somebodys")
    answers = Collector()
    await bus.transport.consume("somebodys", answers, prefetch=10)
    await bus.transport.publish(
        Outgoing(exchange=COMMANDS, routing_key="build.request.p", body=b"{}", reply_to="somebodys", correlation_id="1")
    )
    (answer,) = await answers.wait(1)
    assert (answer.type, answer.correlation_id) == ("refusal.v1", "1")
    assert json.loads(answer.body)["code"] == "message.invalid"
    await settled(bus)


async def test_the_owner_of_a_queue_may_answer_what_cannot_be_read(house: House) -> None:
    bus = await house.bus()
    queue = await bus.declare("client.builds.{process}")
    events = Collector()
    await bus.transport.consume(queue, events, prefetch=10)

    def answer(bad: Malformed) -> list[Message]:
        if b"crash" in bad.body:
            raise ValueError("hostile")
        event = BuildEvent(
            instance_uuid=boot().instance_uuid, project_id="p", state=BuildState.REFUSED, sequence=0, code=bad.code
        )
        return [event]

    await house.consume(bus, REQUESTS, Answering(), on_malformed=answer)
    for body in (b'{"crash":1}', b"{}"):
        await bus.transport.publish(Outgoing(exchange=COMMANDS, routing_key="build.request.p", body=body))
    (event,) = await events.wait(1)
    assert json.loads(event.body)["code"] == "message.invalid"
    await settled(bus, dead=1)


async def test_a_bad_item_does_not_fail_its_neighbours(house: House) -> None:
    bus = await house.bus()
    handler = Answering()
    await house.consume(bus, REQUESTS, handler)
    good = [
        json.dumps(
            {
                "meta": {"id": str(number)},
                "body": {"type": "build.delete.v1", "instance_uuid": boot(number).instance_uuid, "project_id": "p"},
            }
        )
        for number in (1, 2)
    ]
    bad = ['{"meta":{"id":7},"body":{}}', '{"meta":{"id":"8"},"body":{"type":"x"}}', '{"meta":{"id":"9"}}', "{}"]
    body = f"[{','.join([good[0], *bad, good[1]])}]".encode()
    await bus.transport.publish(
        Outgoing(exchange=COMMANDS, routing_key="build.request.p", body=body, content_type=BATCH)
    )
    await settled(bus, dead=len(bad))
    await handler.wait(len(good))  # they are handled after the bad ones are parked
    assert handler.uuids == [boot(1).instance_uuid, boot(2).instance_uuid]


@pytest.mark.parametrize(
    "meta",
    [
        {"id": "i" * 300},
        {"id": "ü" * 200},
        {"id": "1", "reply_to": "r" * 256},
        {"id": "1", "correlation_id": "c" * 300},
        {"id": "1", "sent_at": 1e308},
        {"id": "1", "deadline": 1e308},
        {"id": "1", "attempt": 10**24},
        {"id": "1", "attempt": -1},
    ],
    ids="-".join,
)
async def test_metadata_that_cannot_travel_ends_its_message_and_not_the_worker(
    house: House, meta: dict[str, object]
) -> None:
    bus = await house.bus()
    handler = Answering(lambda _: Done(BuildAccepted(instance_uuid=boot(1).instance_uuid)))
    await house.consume(bus, REQUESTS, handler)
    body = {"type": "build.request.v1", "instance_uuid": boot(1).instance_uuid, "flavor": "f", "project_id": "p"}
    packed = json.dumps([{"meta": meta, "body": body}]).encode()
    await bus.transport.publish(
        Outgoing(exchange=COMMANDS, routing_key="build.request.p", body=packed, content_type=BATCH)
    )
    await settled(bus, dead=1)
    (letter,) = await dead_letters.list_dead(bus.transport, REQUESTS)
    assert letter.code == "message.invalid"
    await bus.publish(boot(2))
    assert [one.message for one in await handler.wait(1)] == [boot(2)]


async def test_only_the_item_that_crashes_the_handler_is_given_up(house: House) -> None:
    bus = await house.bus()

    def answer(received: Received) -> Outcome:
        if received.message == boot(7):
            raise KeyError("seven")
        return Done()

    handler = Answering(answer)
    await bus.declare(REQUESTS)
    await bus.publish_all([(boot(number), "") for number in range(20)])
    await house.consume(bus, REQUESTS, handler)
    await handler.wait(19)  # an empty queue says only that all are fetched
    await settled(bus, dead=1)
    (letter,) = await dead_letters.list_dead(bus.transport, REQUESTS)
    assert letter.code == "handler.crashed"
    assert letter.reason == "KeyError: 'seven'"
    assert sorted(handler.uuids) == sorted(boot(number).instance_uuid for number in range(20) if number != 7)


async def test_a_passing_fault_uses_up_no_retry(house: House) -> None:
    bus = await house.bus()
    calls: list[Sequence[Received]] = []

    async def handler(received: Sequence[Received]) -> Sequence[Outcome]:
        calls.append(received)
        if len(calls) < 4:
            raise DatabaseUnavailable("away")
        return [Done()] * len(received)

    consumer = await house.consume(bus, REQUESTS, handler, concurrency=1)
    await bus.publish(boot(1))
    await until(lambda: len(calls) == 4)
    await settled(bus)
    assert all(call == calls[0] for call in calls)
    assert calls[3][0].meta.attempt == 0
    assert consumer.ready


async def test_a_broken_invariant_ends_the_consumer(house: House) -> None:
    bus = await house.bus()

    def answer(_: Received) -> Outcome:
        raise BrokenInvariant("two owners")

    consumer = await house.consume(bus, REQUESTS, Answering(answer))
    running = asyncio.create_task(consumer.run())
    await bus.publish(boot(1))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(BrokenInvariant, match="two owners"):
            await running
    await consumer.drain(0.1)
    await settled(bus, dead=1)
    (letter,) = await dead_letters.list_dead(bus.transport, REQUESTS)
    assert (letter.code, letter.reason) == ("invariant.broken", "two owners")


async def test_a_message_that_breaks_an_invariant_takes_no_neighbour_along(house: House) -> None:
    """Of one batch, of the batches that had been fetched with it, and in the other worker's hand."""
    bus = await house.bus()
    done: Counter[str] = Counter()
    held = asyncio.Event()

    async def all_fetched() -> bool:
        return await bus.transport.depth(REQUESTS) == 0

    async def handle(batch: Sequence[Received]) -> Sequence[Outcome]:
        uuids = [one.message.instance_uuid for one in batch]  # type: ignore[attr-defined]
        if boot(13).instance_uuid in uuids:
            await until(all_fetched)
            held.set()
            raise BrokenInvariant("thirteen")
        await held.wait()  # everything is fetched before anything is settled
        done.update(uuids)
        return [Done()] * len(batch)

    await bus.declare(REQUESTS)
    await bus.publish_all([(boot(number), "") for number in range(60)])
    consumer = await house.consume(bus, REQUESTS, handle, concurrency=2, max_batch=8, prefetch=64)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(BrokenInvariant, match="thirteen"):
            await consumer.run()
    await settled(bus, dead=1)
    (letter,) = await dead_letters.list_dead(bus.transport, REQUESTS)
    assert boot(13).instance_uuid in letter.body.decode()
    assert done == Counter(boot(number).instance_uuid for number in range(60) if number != 13)


async def test_when_only_a_whole_batch_breaks_an_invariant_nothing_is_given_up(house: House) -> None:
    bus = await house.bus()
    alone: list[str] = []

    async def handle(batch: Sequence[Received]) -> Sequence[Outcome]:
        if len(batch) > 1:
            raise BrokenInvariant("together")
        alone.append(batch[0].message.instance_uuid)  # type: ignore[attr-defined]
        return [Done()]

    await bus.declare(REQUESTS)
    await bus.publish_all([(boot(number), "") for number in range(5)])
    consumer = await house.consume(bus, REQUESTS, handle, concurrency=1)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(BrokenInvariant, match="together"):
            await consumer.run()
    assert alone == [boot(number).instance_uuid for number in range(5)]
    await settled(bus)


async def test_a_full_queue_of_dead_letters_stops_nobody_and_keeps_the_newest(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology, "MAX_PARKED", 3)
    bus = await house.bus()

    def dropped() -> float:
        return metrics.DEAD_DROPPED.labels(bus.name, REQUESTS)._value.get()

    before = dropped()
    bad = Answering(lambda one: Refuse("bad", one.message.name) if one.message.name else Done())  # type: ignore[attr-defined]
    await house.consume(bus, REQUESTS, bad, concurrency=1, max_batch=1)
    for number in range(9):
        await bus.publish(boot(number, name=f"bad {number}"))
    await bus.publish(boot(99))
    await bad.wait(10)
    await until(lambda: _depth(bus, REQUESTS, 0))
    letters = await dead_letters.list_dead(bus.transport, REQUESTS)
    assert 3 <= len(letters) <= 5  # RabbitMQ counts a full queue a moment late
    assert letters[-1].reason == "bad 8"
    assert dropped() - before == 9 - len(letters)


@pytest.mark.parametrize("fault", [BusForbidden("no"), DatabaseForbidden("no")], ids=["bus", "database"])
async def test_credentials_that_are_turned_down_end_the_consumer_and_not_its_messages(
    house: House, fault: Exception
) -> None:
    bus = await house.bus()

    def answer(_: Received) -> Outcome:
        raise fault

    consumer = await house.consume(bus, REQUESTS, Answering(answer))
    running = asyncio.create_task(consumer.run())
    await bus.publish(boot(1))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(type(fault)):
            await running
    await consumer.drain(0.1)
    await until(lambda: _depth(bus, REQUESTS, 1))
    assert await dead_letters.list_dead(bus.transport, REQUESTS) == []


async def test_drain_finishes_what_is_in_hand_and_gives_back_the_rest(house: House) -> None:
    bus = await house.bus("c1")
    go, entered = asyncio.Event(), asyncio.Event()

    async def handler(received: Sequence[Received]) -> Sequence[Outcome]:
        entered.set()
        await go.wait()
        return [Done()] * len(received)

    consumer = await house.consume(bus, "conductor.requests", handler, max_batch=1, concurrency=1)
    for number in range(5):
        await bus.publish(CellDelete(instance_uuid=boot(number).instance_uuid, project_id="p"))
    await entered.wait()
    running = asyncio.create_task(consumer.run())
    draining = asyncio.create_task(consumer.drain(10))
    await asyncio.sleep(0)
    go.set()
    async with asyncio.timeout(PATIENCE_S):
        await draining
        await running
    await until(lambda: _depth(bus, "conductor.requests", 4))


async def test_what_is_not_finished_within_the_grace_time_goes_back(house: House) -> None:
    bus = await house.bus()
    entered = asyncio.Event()

    async def handler(received: Sequence[Received]) -> Sequence[Outcome]:
        entered.set()
        await asyncio.Event().wait()
        return []

    consumer = await house.consume(bus, REQUESTS, handler)
    await bus.publish(boot(1))
    await entered.wait()
    await consumer.drain(0.01)
    await until(lambda: _depth(bus, REQUESTS, 1))


async def test_dead_letters_can_be_listed_replayed_and_purged(house: House) -> None:
    bus = await house.bus()
    willing = False
    handler = Answering(lambda _: Done() if willing else Refuse("not.now"))
    await house.consume(bus, REQUESTS, handler, concurrency=1)
    await bus.publish_all([(boot(number), str(number)) for number in range(5)])
    await settled(bus, dead=5)
    letters = await dead_letters.list_dead(bus.transport, REQUESTS)
    assert sorted(letter.cause for letter in letters) == ["0", "1", "2", "3", "4"]
    assert len(await dead_letters.list_dead(bus.transport, REQUESTS, limit=2)) == 2
    await settled(bus, dead=5)
    willing = True
    handler.got.clear()
    one = letters[3]
    assert await dead_letters.replay(bus.transport, REQUESTS, [one.id]) == [one.id]
    assert [(received.meta.cause, received.meta.attempt) for received in await handler.wait(1)] == [(one.cause, 0)]
    await settled(bus, dead=4)
    assert len(await dead_letters.replay(bus.transport, REQUESTS)) == 4
    assert len({received.meta.cause for received in await handler.wait(5)}) == 5
    await settled(bus, dead=0)
    await bus.transport.publish(Outgoing(exchange=COMMANDS, routing_key="build.request.p", body=b"{"))
    await settled(bus, dead=1)
    assert await dead_letters.purge(bus.transport, REQUESTS) == 1


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


async def _depth(bus: Bus, queue: str, count: int) -> bool:
    return await bus.transport.depth(queue) == count
