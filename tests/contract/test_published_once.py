"""A public event that is alone leaves as one broker message, for listeners of single events and of batches."""

from __future__ import annotations

import json

import pytest
from msgspec import structs

from bus.bus import FEW, Bus
from bus.consuming.dead_letters import list_dead, replay
from bus.consuming.outcome import Done, Outcome, Received, Refuse, Retry
from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.catalogue import BUILD_EVENTS, BY_QUEUE, EVENTS
from bus.contracts.moves import MoveEvent, MoveKind, MoveState
from bus.port import CC, Outgoing, Transport
from bus.wire import BATCH
from tests.contract.house import KINDS, Answering, House, boot, settled
from tests.contract.rig import Collector, until

pytestmark = KINDS

FEED = "client.feed.{process}"
RECORD = "client.record.{process}"
SINGLES = "client.builds.{process}"


def event(sequence: int = 1, state: BuildState = BuildState.ACCEPTED, project: str = "p") -> BuildEvent:
    return BuildEvent(instance_uuid=boot().instance_uuid, project_id=project, state=state, sequence=sequence)


def watched(transport: Transport) -> list[Outgoing]:
    """The messages that leave on this transport from now on."""
    sent: list[Outgoing] = []
    publish = transport.publish

    async def watch(message: Outgoing) -> None:
        sent.append(message)
        await publish(message)

    transport.publish = watch  # type: ignore[method-assign]
    return sent


async def foreign(bus: Bus) -> Collector:
    """A program that is not ours, and receives every event singly."""
    queue = await bus.declare(SINGLES, process="foreign")
    got = Collector()
    await bus.transport.consume(queue, got, prefetch=1000)
    return got


def sequences(received: list[Received]) -> list[int]:
    return [one.message.sequence for one in received]  # type: ignore[attr-defined]


async def test_an_event_that_is_alone_leaves_once_and_both_receive_it(house: House) -> None:
    bus = await house.bus()
    client, everybodys = Answering(), await foreign(bus)
    await house.consume(bus, FEED, client)
    sent = watched(bus.transport)
    await bus.publish(event(1), cause="why")
    await bus.publish_all([(event(2, BuildState.SCHEDULED), "why")])
    assert await bus.publish_each([(event(3, BuildState.ACTIVE), "why")]) == [None]
    assert [(one.routing_key, one.also, one.mandatory) for one in sent] == [
        (f"build.event.{state}.p", BUILD_EVENTS, False) for state in ("accepted", "scheduled", "active")
    ]
    received = await client.wait(3)
    assert sequences(received) == [1, 2, 3]
    assert {one.meta.cause for one in received} == {"why"}
    singles = await everybodys.wait(3)
    assert [json.loads(one.body)["sequence"] for one in singles] == [1, 2, 3]
    assert [one.content_type for one in singles] == ["application/json"] * 3
    assert [one.message_id for one in singles] == [one.meta.id for one in received]
    assert bus.publisher.waiting == 0


@pytest.mark.parametrize("count", [1, FEW + 3])
async def test_a_full_queue_of_another_program_refuses_no_event_for_the_others(house: House, count: int) -> None:
    """A project may bind a queue that refuses all: two malformed requests stopped every scheduler for ever."""
    bus = await house.bus()
    client = Answering()
    await house.consume(bus, FEED, client)
    row = structs.replace(BY_QUEUE[RECORD], max_length=1)
    await bus.transport.declare_queue(
        row, "client.record.full", ((EVENTS, "build.event.#"), (EVENTS, "instance.event.#"))
    )
    await bus.publish(event(1))
    await bus.publish_all([(event(number), "") for number in range(2, 2 + count)])
    assert await bus.publish_each([(event(2 + count), ""), (event(3 + count), "")]) == [None, None]
    await until(lambda: set(sequences(client.got)) == set(range(1, 4 + count)))
    move = MoveEvent(
        request_id=boot().instance_uuid,
        instance_uuid=boot().instance_uuid,
        project_id="p",
        kind=MoveKind.STOP,
        state=MoveState.DONE,
        sequence=1,
    )
    await bus.publish(move)
    assert 0 < await bus.transport.depth("client.record.full") < 4 + count  # a quorum queue's bound is not exact


async def test_a_few_of_one_call_leave_once_each_and_at_once(house: House) -> None:
    bus = await house.bus()
    client = Answering()
    await house.consume(bus, FEED, client)
    sent = watched(bus.transport)
    few = [(event(number), "") for number in range(FEW)]
    await bus.publish_all(few)
    assert [one.also for one in sent] == [BUILD_EVENTS] * FEW
    assert sequences(await client.wait(FEW)) == list(range(FEW))


async def test_a_burst_still_leaves_in_batches_and_probes_for_single_listeners(house: House) -> None:
    bus = await house.bus()
    client = Answering()
    await house.consume(bus, FEED, client)
    sent = watched(bus.transport)
    await bus.publish_all([(event(number), "") for number in range(FEW + 1)])
    assert sorted((one.routing_key, one.also, one.mandatory, one.content_type == BATCH) for one in sent) == [
        ("build.event.accepted.p", "", True, False),
        (BUILD_EVENTS, "", False, True),
    ]
    assert sequences(await client.wait(FEW + 1)) == list(range(FEW + 1))


async def test_without_single_listeners_only_the_client_gets_a_copy(house: House) -> None:
    """The client's copy is routed; that answers no question about those behind it under the single key."""
    bus = await house.bus()
    client = Answering()
    await house.consume(bus, FEED, client)
    sent = watched(bus.transport)
    await bus.publish(event(0))
    await bus.publish_all([(event(number), "") for number in range(1, 101)])
    assert [one.mandatory for one in sent if one.also] == [False]
    assert [one.mandatory for one in sent if not one.also and one.routing_key != BUILD_EVENTS] == [True]
    assert sequences(await client.wait(101)) == list(range(101))


async def test_without_any_listener_it_is_no_error(house: House) -> None:
    bus = await house.bus()
    sent = watched(bus.transport)
    await bus.publish(event())
    assert len(sent) == 1


async def test_retried_or_replayed_it_is_not_published_again_to_the_others(house: House) -> None:
    bus = await house.bus()
    answers: list[Outcome] = [Retry("not yet"), Refuse("test.no", "never"), Done()]
    recorder, client = Answering(lambda _: answers.pop(0)), Answering()
    everybodys = await foreign(bus)
    consumer = await house.consume(bus, RECORD, recorder)
    await house.consume(bus, FEED, client)
    await bus.publish(event())
    await settled(bus, consumer.queue, dead=1)
    (letter,) = await list_dead(bus.transport, consumer.queue)
    assert CC not in letter.headers and letter.code == "test.no"
    await settled(bus, consumer.queue, dead=1)  # the letter is back where it was
    assert len(await replay(bus.transport, consumer.queue)) == 1
    await settled(bus, consumer.queue)
    await until(lambda: len(recorder.got) == 3)
    await bus.publish(event(2))
    assert sequences(await client.wait(2)) == [1, 2]
    assert [json.loads(one.body)["sequence"] for one in await everybodys.wait(2)] == [1, 2]
