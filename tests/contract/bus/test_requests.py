"""Questions and answers over the bus, over both transports alike."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from bus import codec as wire
from bus.consuming.dead_letters import list_dead
from bus.consuming.outcome import Done, Outcome, Received, Refuse, Retry
from bus.contracts.base import DatabaseMark, Message, Refusal
from bus.contracts.build import BuildAccepted, BuildQuery, BuildRequest
from bus.contracts.cell import CellServiceDelete, CellServiceDeleted
from bus.contracts.operations import DeleteHost, HostDeleted
from bus.contracts.queues import BY_QUEUE, COMMANDS, DEAD
from bus.faults import DatabaseUnavailable, RequestRefused, RequestTimeout
from bus.publishing import Waiter
from bus.transport import BusUnavailable, Outgoing, Unroutable
from tests.contract.rig import KINDS, REQUESTS, Answering, Collector, House, accepted, boot, collect, settled
from tests.kit.waiting import PATIENCE_S, until

BEGUN_S = 3.0  # the time-out of a requester whose request has begun by then
pytestmark = KINDS


async def test_a_foreign_client_needs_no_more_than_json_and_a_routing_key(house: House) -> None:
    bus = await house.bus()
    handler = await house.answer(bus, REQUESTS, accepted)
    await bus.transport.declare_reply_queue("client.reply.somebodys")
    answers = await collect(bus.transport, "client.reply.somebodys", 10)
    body = json.dumps({"instance_uuid": boot().instance_uuid, "flavor": "m1.small", "project_id": "p"}).encode()
    for correlation_id in ("1", "2", "3"):
        await bus.transport.publish(
            Outgoing(
                exchange=COMMANDS,
                routing_key="build.request.p",
                body=body,
                reply_to="client.reply.somebodys",
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
    boots = [boot(number, name="no" if number % 10 == 3 else "") for number in range(200)]
    answers = await asker.request_all(boots, BuildAccepted, timeout_s=PATIENCE_S, causes=[""] * 200)
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


async def test_a_reply_of_more_values_than_its_kind_may_have_is_a_refusal_at_once(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unread, and its requester does not wait for the deadline: an answerer of a version before sends it again."""
    monkeypatch.setitem(wire._MAX_REPLY_VALUES, wire.tag(BuildAccepted), 1)
    asker, server = await house.bus(), await house.bus()
    await house.consume(server, REQUESTS, Answering(accepted))
    with pytest.raises(RequestRefused, match="more than 1 values") as refused:
        await asker.request(boot(), BuildAccepted, timeout_s=PATIENCE_S)
    assert refused.value.code == wire.TOO_LARGE
    await settled(server)


async def test_an_answerers_unavailable_database_is_the_same_fault_for_the_requester(house: House) -> None:
    asker, server = await house.bus(), await house.bus()
    await house.consume(server, REQUESTS, Answering(lambda _: Refuse("database.unavailable", "connection refused")))
    with pytest.raises(DatabaseUnavailable, match="connection refused"):
        await asker.request(boot(), BuildAccepted, timeout_s=PATIENCE_S)
    await settled(server)


async def test_no_reply_is_a_timeout_at_the_deadline(house: House) -> None:
    asker, server = await house.bus(), await house.bus()
    await house.consume(server, REQUESTS, Answering())  # Done, but without a reply
    with pytest.raises(RequestTimeout):
        await asker.request(boot(), BuildAccepted, timeout_s=0.05)


async def test_a_request_whose_time_is_over_while_its_reply_queue_is_opened_is_a_timeout(house: House) -> None:
    """On Python 3.11 `asyncio.wait_for`, which aiormq calls, may return instead of being cancelled: it waited for ever,
    68 of 399 where the time was as short as the opening.
    """
    asker, server = await house.bus(), await house.bus()
    await house.consume(server, REQUESTS, Answering())
    declare = asker.transport.declare_reply_queue

    async def returns_instead(name: str) -> None:
        await declare(name)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    asker.transport.declare_reply_queue = returns_instead  # type: ignore[method-assign]
    asking = asyncio.create_task(asker.request(boot(), BuildAccepted, timeout_s=0.05))
    await asyncio.wait([asking], timeout=PATIENCE_S)
    assert isinstance(asking.done() and asking.exception(), RequestTimeout)
    asking.cancel()


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
    await house.answer(server, "scheduler.records", lambda _: Done(Refusal(code="hello")))
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


async def test_a_time_out_whose_cancellation_ends_in_an_error_ends_the_request(house: House) -> None:
    """asyncio.wait_for of Python 3.11 answers a cancellation by the error of what it waited for, if there is one."""
    asker = await house.bus()
    tries = 0

    async def fails(_: str) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        raise BusUnavailable("planted")

    asker.transport.declare_reply_queue = fails  # type: ignore[method-assign]
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(RequestTimeout):
            await asker.request(boot(), BuildAccepted, timeout_s=0.05)


async def test_an_expired_request_is_skipped(house: House) -> None:
    bus = await house.bus()
    handler = Answering()
    queue = await bus.declare(REQUESTS)
    for headers in (late_by(), {}):
        await bus.transport.publish(delete(headers))
    await house.consume(bus, REQUESTS, handler)
    await settled(bus, queue)
    assert len(await handler.wait(1)) == 1


@pytest.mark.parametrize("how", ["retried", "redelivered"])
async def test_an_expired_request_that_may_have_been_begun_goes_on(house: House, how: str) -> None:
    """It may be on record: its requester may repeat it, and other clients follow it."""
    bus = await house.bus()
    handler = Answering()
    queue = await bus.declare(REQUESTS)
    await bus.transport.publish(delete({**late_by(), "berth-retries": int(how == "retried")}))
    if how == "redelivered":
        other = await house.bus()
        taken = await collect(other.transport, REQUESTS, 1, ack=False)
        await taken.wait(1)
        await other.close()  # with the message
    await house.consume(bus, REQUESTS, handler)
    await settled(bus, queue)
    assert len(await handler.wait(1)) == 1


async def test_an_expiration_alone_is_the_patience_of_its_publisher(house: House) -> None:
    bus = await house.bus()
    handler = await house.answer(bus, REQUESTS)
    for expiration_s, headers in ((600.0, {}), (600.0, {"berth-timeout-ms": 60_000}), (None, {})):
        await bus.transport.publish(replace(delete(headers), expiration_s=expiration_s))
    assert [received.meta.timeout_s for received in await handler.wait(3)] == [600.0, 60.0, None]
    assert all(received.remaining_s() <= (received.meta.timeout_s or math.inf) for received in handler.got)


async def test_an_expired_query_is_skipped(house: House) -> None:
    bus = await house.bus()
    handler = Answering()
    queue = await bus.declare("scheduler.records")
    for headers in (late_by(), {}):
        query = replace(delete(headers), routing_key="build.query", body=b'{"type":"build.query.v1"}')
        await bus.transport.publish(query)
    await house.consume(bus, "scheduler.records", handler)
    await settled(bus, queue)
    assert len(await handler.wait(1)) == 1


@pytest.mark.parametrize("how", ["crash", "retries"])
async def test_a_request_that_is_given_up_is_a_dead_letter_and_its_requester_gets_a_refusal(
    house: House, how: str
) -> None:
    """It may be on record already: the owner of the queue ends it by its dead letter."""
    asker, server = await house.bus(), await house.bus()

    def answer(received: Received) -> Outcome:
        if how == "crash":
            raise RuntimeError("planted")
        return Retry("not.yet", "planted")

    await house.consume(server, REQUESTS, Answering(answer))
    if how == "retries":
        got = Collector()
        await asker.transport.declare_reply_queue("client.reply.asker")
        await asker.transport.consume("client.reply.asker", got, prefetch=10)
        last = {"berth-retries": len(BY_QUEUE[REQUESTS].retry_s)}
        await asker.transport.publish(replace(delete(last), reply_to="client.reply.asker"))
        (reply,) = await got.wait(1)
        assert json.loads(reply.body)["code"] == "not.yet"
    else:
        with pytest.raises(RequestRefused) as refused:
            await asker.request(boot(1), BuildAccepted, timeout_s=PATIENCE_S)
        assert refused.value.code == "handler.crashed"
    await settled(server, dead=1)
    (dead_letter,) = await list_dead(server.transport, REQUESTS)
    assert dead_letter.code == ("handler.crashed" if how == "crash" else "not.yet")


FORGET_SERVICE = CellServiceDelete(service="s", reason="r", by="o")
FORGET_HOST = DeleteHost(host="h", reason="r", by="o")


@pytest.mark.parametrize(
    ("bus", "queue", "message", "reply"),
    [
        ("api", "scheduler.changes", FORGET_HOST, HostDeleted),
        ("c1", "conductor.requests", FORGET_SERVICE, CellServiceDeleted),
    ],
)
async def test_a_request_without_an_event_is_refused_alone(
    house: House, bus: str, queue: str, message: Message, reply: type[Message]
) -> None:
    """A dead letter of it would be ended by nothing, and could be replayed when its operator has decided otherwise."""
    asker, server = await house.bus(bus), await house.bus(bus)

    def crashes(_: Received) -> Outcome:
        raise RuntimeError("planted")

    await house.consume(server, queue, Answering(crashes))
    with pytest.raises(RequestRefused):
        await asker.request(message, reply, timeout_s=PATIENCE_S)
    await settled(server, queue)


async def test_a_dead_letter_is_handled_however_late_it_is(house: House) -> None:
    bus = await house.bus()
    handler = Answering()
    queue = await bus.declare("scheduler.dead_letters")
    await bus.transport.publish(replace(delete({**late_by(), "berth-code": "c"}), exchange=DEAD, routing_key=REQUESTS))
    await house.consume(bus, "scheduler.dead_letters", handler)
    await settled(bus, queue, dead=1)
    assert [received.dead_letter_code for received in await handler.wait(1)] == ["c"]


async def test_a_request_that_was_begun_goes_on_when_its_client_has_stopped_waiting(house: House) -> None:
    """It was acknowledged as if it were done, whatever was on record of it."""
    asker, server = await house.bus(), await house.bus()
    is_there = False
    begun: list[Received] = []

    def answer(received: Received) -> Outcome:
        begun.append(received)
        if not is_there:
            raise DatabaseUnavailable("away")
        return accepted(received)

    handler = await house.answer(server, REQUESTS, answer)
    asking = asyncio.create_task(asker.request(boot(1), BuildAccepted, timeout_s=BEGUN_S))
    await until(lambda: begun)
    with pytest.raises(RequestTimeout):
        await asking
    is_there = True
    await settled(server)
    assert [received.message for received in await handler.wait(1)] == [boot(1)]


async def test_a_query_that_cannot_be_served_is_given_up_when_its_client_has_stopped_waiting(house: House) -> None:
    """A statement that always takes too long is a passing fault, too; it must not hold the queue for ever."""
    asker, server = await house.bus(), await house.bus()

    def answer(received: Received) -> Outcome:
        if received.message == BuildQuery(limit=1):
            raise DatabaseUnavailable("again and again")
        return Done(Refusal(code="hello"))

    await house.consume(server, "scheduler.records", Answering(answer), concurrency=1)
    with pytest.raises(RequestTimeout):
        await asker.request(BuildQuery(limit=1), Refusal, timeout_s=0.3)
    assert (await asker.request(BuildQuery(), Refusal, timeout_s=PATIENCE_S)).code == "hello"


def late_by(s: float = 1.0) -> dict[str, int]:
    """The headers of a message whose requester has stopped waiting so long ago."""
    return {"berth-timeout-ms": 0, "berth-waited-ms": int(s * 1000)}


def delete(headers: Mapping[str, int | str]) -> Outgoing:
    body = b'{"type":"build.delete.v1","instance_uuid":"%s","project_id":"p"}' % boot().instance_uuid.encode()
    return Outgoing(
        exchange=COMMANDS, routing_key="build.delete.p", body=body, headers=headers, reply_to="client.reply.gone"
    )


async def test_each_message_states_the_mark_of_when_it_was_decided(house: House) -> None:
    """Also one that an earlier process has left in the outbox, and one that is asked again or replayed."""
    asker, server = await house.bus(), await house.bus()
    handler = await house.answer(server, REQUESTS, accepted)
    await asker.publish(boot(0))
    marks = iter((DatabaseMark(7, (5,)), DatabaseMark(8, (0, 6))))
    asker.states_mark(lambda: next(marks, DatabaseMark(9, (1, 2, 3))))
    await asker.publish(boot(1))
    await asker.request(boot(2), BuildAccepted, timeout_s=PATIENCE_S)
    await asker.publish_all([(boot(number), "") for number in range(3, 6)])
    waiter = Waiter()
    asker.post_all([(boot(number), "") for number in (6, 7, 8)], [""] * 3, [waiter] * 3, [3, 0, 9])
    await waiter.wait()
    await until(lambda: len(handler.got) == 9)
    stated = {int(one.message.instance_uuid[-1]): one.meta.mark for one in handler.got}  # type: ignore[attr-defined]
    now = DatabaseMark(9, (1, 2, 3))
    assert stated == {
        0: DatabaseMark(),
        1: DatabaseMark(7, (5,)),
        2: DatabaseMark(8, (0, 6)),
        **dict.fromkeys((3, 4, 5, 8), now),
        6: DatabaseMark(3),
        7: DatabaseMark(),
    }
