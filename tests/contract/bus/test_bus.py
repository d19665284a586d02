"""Published messages and the marks of a bus, over every transport alike; and what a broker in a process adds."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import stat
from collections.abc import AsyncIterator, Iterator, Sequence

import msgspec
import pytest
from msgspec import structs

from bus.bus import Bus
from bus.codec import BATCH
from bus.consuming.dead_letters import list_dead, replay
from bus.consuming.outcome import Done, Outcome, Received, Refuse, Retry
from bus.contracts.actions import ActionEvent, ActionKind, ActionState
from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.cell import CellDelete
from bus.contracts.queues import BY_QUEUE, COMMANDS, EVENTS, QueueKind, QueueRow, Where, project_bus
from bus.local import MAX_CALL, LocalServer
from bus.memory import MemoryTransport
from bus.transport import (
    BusError,
    BusOwned,
    BusUnavailable,
    Outgoing,
    PublishRefused,
    QueueMissing,
    Transport,
    Unroutable,
)
from tests.contract.rig import (
    EVERY_ADAPTER,
    EVERY_ADAPTER_THAT_RECONNECTS,
    KINDS,
    REQUESTS,
    Answering,
    Collector,
    House,
    LocalRig,
    Rig,
    boot,
    collect,
    settled,
    watched,
)
from tests.kit.waiting import PATIENCE_S, until

# --- Published messages: how it travels and what its publisher learns, over both transports alike.


@KINDS
async def test_what_is_published_is_handled_with_its_metadata(house: House) -> None:
    bus = await house.bus()
    handler = await house.answer(bus, REQUESTS)
    await bus.publish(boot(1, name="a"), cause="why", correlation_id="c")
    (received,) = await handler.wait(1)
    assert received.message == boot(1, name="a")
    assert (received.meta.cause, received.meta.correlation_id, received.bus) == ("why", "c", "api")
    assert len(received.meta.id) == 36 and abs(received.meta.sent_at - bus.clock.time()) < 60
    await settled(bus)


@KINDS
async def test_many_travel_together_and_are_handled_in_batches(house: House) -> None:
    bus = await house.bus()
    handler = await house.answer(bus, REQUESTS, concurrency=1, max_batch=64)
    await bus.publish_all([(boot(number), str(number)) for number in range(1000)])
    received = await handler.wait(1000)
    assert [one.meta.cause for one in received] == [str(number) for number in range(1000)]
    assert max(handler.batches) == 64
    assert len({one.meta.id for one in received}) == 1000
    await settled(bus)


@KINDS
async def test_an_unroutable_command_is_its_publishers_error(house: House) -> None:
    bus = await house.bus()
    with pytest.raises(Unroutable):
        await bus.publish(boot())
    with pytest.raises(Unroutable):
        await bus.publish_all([(boot(1), ""), (boot(2), "")])
    errors = await bus.publish_each([(boot(1), ""), (boot(2), "")])
    assert [type(error) for error in errors] == [Unroutable, Unroutable]


@KINDS
async def test_each_of_many_publishes_has_its_own_outcome(house: House) -> None:
    """Some are confirmed, some come back: the publisher knows which, and sends only those again."""
    bus = await house.bus()
    await house.consume(bus, REQUESTS, Answering())
    nowhere = CellDelete(instance_uuid=boot(3).instance_uuid, project_id="p")  # no conductor listens on this bus
    errors = await bus.publish_each([(boot(1), ""), (nowhere, ""), (boot(2), "")])
    assert errors[0] is errors[2] is None and isinstance(errors[1], Unroutable)
    assert await bus.publish_each([]) == []


@KINDS
async def test_publishers_wait_while_too_much_is_gathered(house: House) -> None:
    bus = await house.bus(waiting=10, batch_items=3)
    handler = await house.answer(bus, REQUESTS)
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


@KINDS
async def test_events_of_a_projects_bus_are_one_json_object_each(house: House) -> None:
    bus = await house.bus(project_bus("p"))
    queue = await bus.declare("client.builds.{process}")
    got = await collect(bus.transport, queue, 100)
    await bus.publish_all([(event(3, BuildState.ACTIVE), "why")] * 20)
    for delivery in await got.wait(20):
        assert delivery.content_type == "application/json"
        assert json.loads(delivery.body)["state"] == "active"
        assert (delivery.type, delivery.routing_key) == ("build.event.v1", "build.event.active.p")
        assert delivery.headers["berth-cause"] == "why"


@KINDS
async def test_events_of_the_api_bus_gather_by_their_keys_and_each_leaves_once(house: House) -> None:
    bus = await house.bus()
    client, everybodys = await house.answer(bus, FEED), await foreign(bus)
    sent = watched(bus.transport)
    await bus.publish(event(0))
    await bus.publish_all([(event(number), "why") for number in range(1, 101)])
    assert sorted(sequences(await client.wait(101))) == list(range(101))
    assert {one.routing_key for one in sent} == {"build.event.accepted.p"}
    assert len(sent) < 20 and not any(one.mandatory for one in sent)
    assert (await everybodys.wait(len(sent)))[0].content_type == "application/json"


@KINDS
async def test_close_sends_what_is_gathered(house: House) -> None:
    bus, other = await house.bus(), await house.bus()
    await other.declare(REQUESTS)
    publishing = asyncio.create_task(bus.publish_all([(boot(number), "") for number in range(300)]))
    await asyncio.sleep(0)
    await bus.close()
    await publishing
    handler = await house.answer(other, REQUESTS)
    await handler.wait(300)


@KINDS
async def test_events_of_a_cell_travel_in_batches(house: House) -> None:
    bus = await house.bus("c1")
    queue = await bus.declare("scheduler.builds")
    event = BuildEvent(instance_uuid=boot().instance_uuid, project_id="p", state=BuildState.ACTIVE, sequence=3)
    await bus.publish_all([(event, "why")] * 200)
    assert await bus.transport.depth(queue) < 50
    handler = await house.answer(bus, "scheduler.builds")
    await handler.wait(200)
    await bus.transport.publish(Outgoing(exchange=EVENTS, routing_key="build.event.x", body=b"[]", content_type=BATCH))
    await settled(bus, queue)


# --- Public events, for listeners of berth's and others.


FEED = "client.feed.{process}"
RECORD = "client.record.{process}"
SINGLES = "client.builds.{process}"


def event(sequence: int = 1, state: BuildState = BuildState.ACCEPTED, project: str = "p") -> BuildEvent:
    return BuildEvent(instance_uuid=boot().instance_uuid, project_id=project, state=state, sequence=sequence)


async def foreign(bus: Bus) -> Collector:
    """A program that is not ours, and receives every event singly."""
    queue = await bus.declare(SINGLES, process="foreign")
    got = await collect(bus.transport, queue, 1000)
    return got


def sequences(received: list[Received]) -> list[int]:
    return [one.message.sequence for one in received]  # type: ignore[attr-defined]


@KINDS
@pytest.mark.parametrize("count", [1, 5])
async def test_a_full_queue_of_another_program_refuses_no_event_for_the_others(house: House, count: int) -> None:
    """A project may bind a queue that refuses all: two malformed requests stopped every scheduler for ever."""
    bus = await house.bus(refused_s=0)
    client = await house.answer(bus, FEED)
    row = structs.replace(BY_QUEUE[RECORD], max_length=1)
    await bus.transport.declare_queue(
        row, "client.record.full", ((EVENTS, "build.event.#"), (EVENTS, "instance.event.#"))
    )
    await bus.publish(event(1))
    await bus.publish_all([(event(number), "") for number in range(2, 2 + count)])
    assert await bus.publish_each([(event(2 + count), ""), (event(3 + count), "")]) == [None, None]
    await until(lambda: set(sequences(client.got)) == set(range(1, 4 + count)))
    action = ActionEvent(
        request_id=boot().instance_uuid,
        instance_uuid=boot().instance_uuid,
        project_id="p",
        kind=ActionKind.STOP,
        state=ActionState.DONE,
        sequence=1,
    )
    await bus.publish(action)
    assert 0 < await bus.transport.depth("client.record.full") < 4 + count  # a quorum queue's bound is not exact


@KINDS
async def test_the_first_refusals_of_an_event_are_its_publishers_errors(house: House) -> None:
    """One of berth's own queues may have no leader at the moment: an event was lost there, and nobody learnt of it."""
    bus = await house.bus()
    row = structs.replace(BY_QUEUE[RECORD], max_length=1)
    await bus.transport.declare_queue(row, "client.record.full", ((EVENTS, "build.event.#"),))
    refused: list[BaseException | None] = []
    for _ in range(100):  # a quorum queue's bound is not exact
        refused += await bus.publish_each([(event(number), "") for number in range(20)])
    assert {type(one) for one in refused if one is not None} == {PublishRefused}


@KINDS
async def test_without_any_listener_it_is_no_error(house: House) -> None:
    bus = await house.bus()
    sent = watched(bus.transport)
    await bus.publish(event())
    assert len(sent) == 1


@KINDS
async def test_retried_or_replayed_it_is_not_published_again_to_the_others(house: House) -> None:
    bus = await house.bus()
    answers: list[Outcome] = [Retry("not yet"), Refuse("test.no", "never"), Done()]
    recorder, client = Answering(lambda _: answers.pop(0)), Answering()
    everybodys = await foreign(bus)
    consumer = await house.consume(bus, RECORD, recorder)
    await house.consume(bus, FEED, client)
    await bus.publish(event())
    await settled(bus, consumer.queue, dead=1)
    (dead_letter,) = await list_dead(bus.transport, consumer.queue)
    assert dead_letter.code == "test.no"
    await settled(bus, consumer.queue, dead=1)  # the letter is back where it was
    assert len(await replay(bus.transport, consumer.queue)) == 1
    await settled(bus, consumer.queue)
    await until(lambda: len(recorder.got) == 3)
    await bus.publish(event(2))
    assert sequences(await client.wait(2)) == [1, 2]
    assert [json.loads(one.body)["sequence"] for one in await everybodys.wait(2)] == [1, 2]


# --- Marks on a bus, by which a deployment knows whose it is: asked of every transport alike.


MINE, THEIRS = "3d7f0f5e-0000-4000-8000-000000000001", "3d7f0f5e-0000-4000-8000-000000000002"
LOOK_AGAIN_S = 0.01


async def is_refused(transport: Transport, owner: str) -> str:
    with pytest.raises(BusOwned) as refused:
        await transport.set_owner("scheduler", owner)
    return str(refused.value)


@EVERY_ADAPTER
async def test_a_mark_has_one_owner(rig: Rig) -> None:
    one, other = await rig.transport(), await rig.transport()
    assert await other.owner_of("scheduler") == ""
    await one.set_owner("scheduler", MINE)
    await one.set_owner("scheduler", MINE)
    await other.set_owner("scheduler", MINE)
    assert await is_refused(other, THEIRS) == MINE
    assert await other.owner_of("scheduler") == await one.owner_of("scheduler") == MINE
    await other.set_owner("placement", THEIRS)
    assert await one.owner_of("placement") == THEIRS


@EVERY_ADAPTER
async def test_a_mark_that_was_removed_can_be_anothers(rig: Rig) -> None:
    one, other = await rig.transport(), await rig.transport()
    await one.clear_owner("scheduler")
    await one.set_owner("scheduler", MINE)
    await other.clear_owner("scheduler")
    assert await one.owner_of("scheduler") == ""
    await other.set_owner("scheduler", THEIRS)
    assert await is_refused(one, MINE) == THEIRS


@EVERY_ADAPTER
async def test_of_two_that_come_first_at_once_one_has_the_bus(rig: Rig) -> None:
    transports = [await rig.transport() for _ in range(6)]
    owners = [MINE, THEIRS] * 3
    tried = await asyncio.gather(
        *(one.set_owner("scheduler", owner) for one, owner in zip(transports, owners, strict=True)),
        return_exceptions=True,
    )
    has = await transports[0].owner_of("scheduler")
    assert has in (MINE, THEIRS)
    for owner, result in zip(owners, tried, strict=True):
        assert (result is None) == (owner == has), (owner, result)
        assert result is None or (isinstance(result, BusOwned) and str(result) == has)


@EVERY_ADAPTER
async def test_a_bus_of_another_prefix_is_another_bus(rig: Rig) -> None:
    one, other = await rig.transport(), await rig.transport(prefix="second.")
    await one.set_owner("scheduler", MINE)
    await other.set_owner("scheduler", THEIRS)
    assert (await one.owner_of("scheduler"), await other.owner_of("scheduler")) == (MINE, THEIRS)


@EVERY_ADAPTER_THAT_RECONNECTS
async def test_a_queue_whose_consumption_has_ended_is_not_declared_anew(rig: Rig) -> None:
    """A gateway made the queues of a project again that an operator had removed, and events gathered there."""
    one = await rig.transport()
    await one.declare_shared()
    for name in ("client.feed.removed", "client.feed.kept"):  # they go with their connection
        await one.declare_queue(BY_QUEUE[FEED], name, ())
    removed = await one.consume("client.feed.removed", Collector(), prefetch=1)
    await removed.cancel()
    came = asyncio.Event()
    one.on_reconnect(came.set)
    await rig.part(one)
    await rig.rejoin(one)
    await asyncio.wait_for(came.wait(), PATIENCE_S)
    assert await one.depth("client.feed.kept") == 0
    with pytest.raises(QueueMissing):
        await one.depth("client.feed.removed")


@EVERY_ADAPTER_THAT_RECONNECTS
async def test_a_connection_does_not_come_back_to_a_bus_that_has_become_anothers(rig: Rig) -> None:
    one = await rig.transport()
    await one.set_owner("scheduler", MINE)
    await rig.part(one)
    other = rig.outside("other")
    await other.open()
    await other.clear_owner("scheduler")
    await other.set_owner("scheduler", THEIRS)
    came: list[bool] = []
    one.on_reconnect(lambda: came.append(True))
    await rig.rejoin(one)
    for _ in range(20):  # nothing is announced that does not happen; a slow machine looks for longer, and fails nothing
        await asyncio.sleep(LOOK_AGAIN_S)
        assert not one.connected
    await other.clear_owner("scheduler")
    await until(lambda: came)
    assert await other.owner_of("scheduler") == MINE
    await other.close()


@pytest.mark.parametrize("kind", [pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)])
async def test_a_connection_that_is_lost_while_the_owner_is_read_does_not_end_the_worker(rig: Rig) -> None:
    one = await rig.transport()
    await one.set_owner("scheduler", MINE)
    await rig.part(one)
    await until(lambda: not one.connected)
    reading = asyncio.create_task(one.owner_of("scheduler"))
    await asyncio.sleep(0)
    await rig.rejoin(one)
    assert await reading == MINE


# --- The socket's own behaviour: who may open it, what it survives, and that its end is noticed.


@pytest.fixture
async def local() -> AsyncIterator[LocalRig]:
    local = LocalRig()
    await local.open()
    try:
        yield local
    finally:
        await local.close()


def frames(*parts: object) -> bytes:
    bodies = [msgspec.msgpack.encode(one) for one in parts]
    return b"".join(len(body).to_bytes(4, "big") + body for body in bodies)


@contextlib.contextmanager
def reported() -> Iterator[list[object]]:
    """What the loop reports of tasks that ended with an error."""
    errors: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    yield errors
    gc.collect()
    loop.set_exception_handler(None)


ROW = QueueRow(
    name="work", where=Where.BOTH, kind=QueueKind.DURABLE, consumer="tests", bindings=((COMMANDS, "work.#"),)
)


def command(body: bytes) -> Outgoing:
    return Outgoing(exchange=COMMANDS, routing_key="work.do", body=body, mandatory=True)


async def test_only_its_user_may_open_the_socket(local: LocalRig) -> None:
    assert stat.S_IMODE(local.socket.stat().st_mode) == 0o600


async def test_a_second_server_is_refused_and_a_dead_ones_socket_is_taken_over(local: LocalRig) -> None:
    second = LocalServer(local.socket, lambda name, prefix: MemoryTransport(local.broker, name, prefix=prefix))
    with pytest.raises(BusError, match="another berth is up"):
        await second.open()
    await local.server.close()
    local.socket.touch()  # left by a process that was killed
    await second.open()
    try:
        assert (await local.transport()).connected
    finally:
        await second.close()


async def test_an_unreachable_server_is_reported_at_once(local: LocalRig) -> None:
    await local.server.close()
    with pytest.raises(BusUnavailable, match="no berth is up"):
        await local.transport()


async def test_the_end_of_the_server_ends_every_call_and_gives_nothing_twice(local: LocalRig) -> None:
    transport = await local.transport()
    await transport.declare_queue(ROW, "work", ROW.bindings)
    got = await collect(transport, "work", 1, ack=False)
    await transport.publish(command(b"1"))
    await got.wait(1)
    await local.server.close()
    await until(lambda: not transport.connected)
    got.got[0].ack()  # of a connection that is no more: does nothing
    with pytest.raises(BusUnavailable):
        await transport.publish(command(b"2"))


async def test_what_is_too_large_is_refused_and_the_connection_stays(local: LocalRig) -> None:
    transport = await local.transport()
    await transport.declare_queue(ROW, "work", ROW.bindings)
    with pytest.raises(PublishRefused):
        await transport.publish(command(bytes(MAX_CALL)))
    await transport.publish(command(b"small"))
    assert await transport.depth("work") == 1


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x01\xc1",
        b"\x00\x00\x00\x01\x90",
        b"",
        b"\x00\x00\x00\x03\x93\x00\x00\x00",
        frames(["api", ""], [0, 0, "nonsense"]),
        frames(["api", ""], [0, 0, "ack"]),
        frames(["api", ""], [0, 0, "depth"]),
        frames(["api", ""], [0, 0, "depth", 7]),
    ],
)
async def test_who_is_no_client_of_ours_is_shown_the_door(local: LocalRig, sent: bytes) -> None:
    with reported() as errors:
        await shown_the_door(local, sent)
    assert errors == []
    assert (await local.transport()).connected


async def test_a_call_with_wrong_arguments_is_answered(local: LocalRig) -> None:
    transport = await local.transport()
    with pytest.raises(BusError):
        await transport.depth(7)  # type: ignore[arg-type]
    with pytest.raises(BusError):
        await transport.consume("work", Collector(), prefetch="all")  # type: ignore[arg-type]
    assert transport.connected


async def shown_the_door(local: LocalRig, sent: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(str(local.socket))
    writer.write(sent)
    writer.write_eof()
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(ConnectionResetError):  # the door closed on what it had not read
            assert await reader.read() == b""
    writer.close()
