"""Dead letters: looked at, given back, sent back, and those of other programs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from itertools import product

import pytest

from bus import metrics, topology
from bus.bus import Bus
from bus.codec import MAX_DEAD_LETTER_BYTES, SENT_AT
from bus.consuming import dead_letters
from bus.consuming.dead_letters import DIED_AT, DeadLetter
from bus.consuming.outcome import Done, Refuse
from bus.contracts.base import DatabaseMark, encode
from bus.contracts.cell import CellDelete, Destroy
from bus.contracts.queues import COMMANDS, DEAD, DEAD_LETTERS, QueueKind, QueueRow, Where
from bus.topology import delay_exchange
from bus.transport import UNREAD, Delivery, Outgoing, PublishRefused, Transport
from tests.contract.rig import EVERY_ADAPTER, KINDS, REQUESTS, Answering, House, Rig, boot, depth_is, rig_for, settled
from tests.kit.cases import case
from tests.kit.waiting import until

# --- However often dead letters are looked at, none is lost; nor is what another system's queue gives back.


LOOKS = 30
OTHER = "conductor.requests"


async def _count(bus: Bus) -> int:
    return sum((await dead_letters.count(bus.transport)).by_queue.values())


async def _list(bus: Bus) -> int:
    return len(await dead_letters.list_dead(bus.transport))


async def _show(bus: Bus) -> int:
    """As the command and the page show one letter."""
    found = await dead_letters.list_dead(bus.transport, REQUESTS)
    return len(found) if all(dead_letter.body for dead_letter in found) else 0


async def _list_another(bus: Bus) -> int:
    return 3 + len(await dead_letters.list_dead(bus.transport, dead_letters.UNKNOWN))


async def _purge_another(bus: Bus) -> int:
    return 3 - await dead_letters.purge(bus.transport, OTHER)


async def _replay_another(bus: Bus) -> int:
    return 3 - len(await dead_letters.replay(bus.transport, OTHER))


async def _replay_refused(bus: Bus) -> int:
    """As the command does with letters that are too old to go back."""
    return 3 - len(await dead_letters.replay(bus.transport, REQUESTS, may_go=lambda _: False))


LOOKS_AT = {
    "count": _count,
    "list": _list,
    "show": _show,
    "list of another queue": _list_another,
    "purge of another queue": _purge_another,
    "replay of another queue": _replay_another,
    "replay of none": _replay_refused,
}


@pytest.mark.parametrize("kind", ["memory", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)])
async def test_a_letter_that_is_looked_at_often_stays(house: House) -> None:
    """The web page's list of letters is a count, on each view. RabbitMQ 4 dropped all letters at the 21st."""
    bus = await house.bus()
    await house.consume(bus, REQUESTS, Answering(lambda _: Refuse("no")))
    for number in range(3):
        await bus.publish(boot(number))
    await settled(bus, dead=3)
    looks: dict[str, Callable[[Bus], Awaitable[int]]] = LOOKS_AT
    for how, look in product(looks, range(1, LOOKS + 1)):
        with case(how, look):
            assert await looks[how](bus) == 3
            await until(lambda: depth_is(bus, DEAD_LETTERS, 3), 5.0)


@pytest.mark.parametrize("kind", ["memory", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)])
async def test_a_notification_of_another_system_that_is_given_back_often_stays(rig: Rig) -> None:
    """The queue that is bound to Ironic's exchange: its consumer ends, or loses its connection, again and again."""
    transport = await rig.transport()
    await rig.foreign_exchange("foreign.notifications")  # type: ignore[attr-defined]
    await transport.bind_external("ironic.notifications", "foreign.notifications", ["#"])
    await transport.publish(Outgoing(exchange="", routing_key="ironic.notifications", body=b"{}", mandatory=True))

    async def there() -> bool:
        return await transport.depth("ironic.notifications") == 1

    for look in range(1, LOOKS + 1):
        await until(there, 5.0)
        delivery = await transport.get("ironic.notifications")
        assert delivery is not None
        delivery.nack(requeue=True)
        try:
            await until(there, 5.0)
        except TimeoutError:
            pytest.fail(f"it was dropped when it was given back for the {look}th time")


# --- Where a dead letter that was looked at and given back is in line afterwards.


@KINDS
async def test_the_oldest_letters_are_listed_first_however_often_they_are_looked_at(house: House) -> None:
    bus = await house.bus()
    await house.consume(bus, REQUESTS, Answering(lambda one: Refuse("no", one.message.name)), concurrency=1)  # type: ignore[attr-defined]
    for number in range(6):
        await bus.publish(boot(number, name=str(number)))
        await settled(bus, dead=number + 1)
    seen = []
    for _ in range(4):
        seen.append([dead_letter.reason for dead_letter in await dead_letters.list_dead(bus.transport, limit=2)])
        await settled(bus, dead=6)
    assert seen == [["0", "1"]] * 4


# --- Letters of a queue can be replayed and purged, however many of other queues are before them.


LOOKED_AT = 3


async def behind(house: House) -> Bus:
    """Five letters of scheduler.requests, and then one of conductor.requests."""
    bus = await house.bus("c1")
    await house.consume(bus, REQUESTS, Answering(lambda _: Refuse("no")), concurrency=1)
    await house.consume(bus, OTHER, Answering(lambda _: Refuse("no")), concurrency=1)

    for number in range(5):
        await bus.publish(boot(number))
    await until(lambda: depth_is(bus, DEAD_LETTERS, 5))
    await bus.publish(CellDelete(instance_uuid=boot(9).instance_uuid, project_id="p"))
    await until(lambda: depth_is(bus, DEAD_LETTERS, 6))
    return bus


@KINDS
@pytest.mark.parametrize("what", ["list", "replay", "purge"])
async def test_a_letter_behind_those_of_other_queues_is_reached(
    house: House, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await behind(house)

    # In RabbitMQ 4.3 what was looked at stays before what was not.
    monkeypatch.setattr(dead_letters, "MAX_COUNTED", LOOKED_AT)
    found = 0
    for _ in range(5):
        if what == "list":
            found += len(await dead_letters.list_dead(bus.transport, OTHER))
        elif what == "replay":
            found += len(await dead_letters.replay(bus.transport, OTHER))
        else:
            found += await dead_letters.purge(bus.transport, OTHER)
        if found:
            break
        await until(lambda: depth_is(bus, DEAD_LETTERS, 6))  # as between two commands, or two views of the page
    assert found == 1


@KINDS
async def test_item_7_a_forged_delete_is_parked_and_replaying_it_does_not_carry_it_out(house: House) -> None:
    """Its body names project p; it came under the key of another, and so a dead letter of it remembers."""
    bus = await house.bus()
    handler = await house.answer(bus, REQUESTS)
    body = json.dumps({"instance_uuid": boot(1).instance_uuid, "project_id": "p"}).encode()
    headers = {"berth-key": "build.delete.p"}
    await bus.transport.publish(
        Outgoing(exchange=COMMANDS, routing_key="build.delete.evil", body=body, headers=headers, message_id="m")
    )
    for _ in range(2):
        await settled(bus, dead=1)
        (dead_letter,) = await dead_letters.list_dead(bus.transport, REQUESTS)
        assert (dead_letter.code, dead_letter.routing_key) == ("message.wrong_key", "build.delete.evil")
        await settled(bus, dead=1)  # what was looked at is given back
        assert await dead_letters.replay(bus.transport, REQUESTS) == ["m"]
    assert handler.got == []


@KINDS
async def test_a_full_queue_of_dead_letters_stops_no_consumer_and_keeps_what_it_has(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that is dropped is reported. No worker that parks may take others' letters out to make room."""
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
    await until(lambda: depth_is(bus, REQUESTS, 0))
    letters = await dead_letters.list_dead(bus.transport, REQUESTS)
    assert 3 <= len(letters) <= 5  # RabbitMQ counts a full queue a moment late
    assert [dead_letter.reason for dead_letter in letters][:3] == ["bad 0", "bad 1", "bad 2"]
    assert dropped() - before == 9 - len(letters)


@KINDS
async def test_dead_letters_can_be_listed_replayed_and_purged(house: House) -> None:
    bus = await house.bus()
    willing = False
    handler = await house.answer(bus, REQUESTS, lambda _: Done() if willing else Refuse("not.now"), concurrency=1)
    bus.states_mark(lambda: DatabaseMark(3))
    await bus.publish_all([(boot(number), str(number)) for number in range(5)])
    await settled(bus, dead=5)
    letters = await dead_letters.list_dead(bus.transport, REQUESTS)
    assert sorted(dead_letter.cause for dead_letter in letters) == ["0", "1", "2", "3", "4"]
    assert len(await dead_letters.list_dead(bus.transport, REQUESTS, limit=2)) == 2
    await settled(bus, dead=5)
    willing = True
    handler.got.clear()
    one = letters[3]
    assert await dead_letters.replay(bus.transport, REQUESTS, [one.id]) == [one.id]
    again = [(one.meta.cause, one.meta.retries, one.meta.database_incarnation) for one in await handler.wait(1)]
    assert again == [(one.cause, 0, 3)]
    await settled(bus, dead=4)
    assert len(await dead_letters.replay(bus.transport, REQUESTS)) == 4
    assert len({received.meta.cause for received in await handler.wait(5)}) == 5
    await settled(bus, dead=0)
    await bus.transport.publish(Outgoing(exchange=COMMANDS, routing_key="build.request.p", body=b"{"))
    await settled(bus, dead=1)
    assert await dead_letters.purge(bus.transport, REQUESTS) == 1


@KINDS
async def test_a_command_that_a_compute_service_gave_up_is_counted_under_its_queue(house: House) -> None:
    """`berth dead-letter list` left the queues of compute services out."""
    bus = await house.bus("c1")
    await house.consume(bus, "compute.{service}", Answering(lambda _: Refuse("compute.misrouted", "why")), service="s1")
    command = Destroy(instance_uuid=boot(1).instance_uuid, attempt=1, host_uuid=boot(2).instance_uuid, service="s1")
    await bus.publish(command, cause="why")
    await settled(bus, queue="compute.s1", dead=1)
    assert (await dead_letters.count(bus.transport)).by_queue == {"compute.s1": 1}
    (dead_letter,) = await dead_letters.list_dead(bus.transport, "compute.s1")
    assert (dead_letter.code, dead_letter.routing_key) == ("compute.misrouted", "compute.destroy.s1")


# --- Sending dead letters back, on both buses: they carry their age, and some may not go.


QUEUE = "work"


@pytest.fixture(params=["memory", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)])
async def transport(request: pytest.FixtureRequest) -> AsyncIterator[Transport]:
    async with rig_for(request.param, lambda: request.getfixturevalue("amqp")) as rig:
        made = await rig.transport()
        row = QueueRow(name=QUEUE, where=Where.BOTH, kind=QueueKind.DURABLE, consumer="tests", bindings=())
        await made.declare_queue(row, QUEUE, ((COMMANDS, "work.#"),))
        yield made


async def park(transport: Transport, name: str, headers: Mapping[str, str | int | float]) -> None:
    dead_letter = Outgoing(
        exchange=DEAD, routing_key=QUEUE, body=b"{}", message_id=name, headers=dict(headers), mandatory=True
    )
    await transport.publish(dead_letter)


async def taken(transport: Transport) -> Delivery:
    found: list[Delivery] = []

    async def there() -> bool:
        delivery = await transport.get(QUEUE)
        found.extend([delivery] if delivery is not None else [])
        return bool(found)

    await until(there)
    found[0].ack()
    return found[0]


@pytest.mark.parametrize(
    ("headers", "sent_at_ms"),
    [
        pytest.param({SENT_AT: 1_000_000, DIED_AT: 2_000_000}, 1_000_000, id="as it was sent"),
        pytest.param({DIED_AT: 2_000_000}, 2_000_000, id="no time of publication, but it was no later than its death"),
        pytest.param({}, None, id="no time at all"),
        pytest.param({SENT_AT: 2**60, DIED_AT: -5}, None, id="nonsense"),
    ],
)
async def test_a_letter_that_is_replayed_carries_its_age(
    transport: Transport, headers: dict[str, str | int | float], sent_at_ms: int | None
) -> None:
    """Without it a request that was deleted and forgotten since was taken for new, and built."""
    await park(transport, "m1", headers)
    assert await dead_letters.replay(transport, QUEUE) == ["m1"]
    assert (await taken(transport)).headers.get(SENT_AT) == sent_at_ms


async def test_what_may_not_go_stays_parked(transport: Transport) -> None:
    for name, at in (("old", 1_000), ("new", 9_000), ("older", 500)):
        await park(transport, name, {SENT_AT: at})

    def is_new(dead_letter: DeadLetter) -> bool:
        return (dead_letter.sent_at or 0.0) > 5.0

    assert await dead_letters.replay(transport, QUEUE, may_go=is_new) == ["new"]
    assert (await taken(transport)).message_id == "new"
    left = await dead_letters.list_dead(transport, QUEUE)
    assert sorted(dead_letter.id for dead_letter in left) == ["old", "older"]


@pytest.mark.parametrize("header", ["x-death", UNREAD])
async def test_what_another_queue_has_parked_is_a_letter_of_none(transport: Transport, header: str) -> None:
    """Sent back it was read as if a worker had read it before: a compute service could command its conductor."""
    await park(transport, "passed on", {header: "x"})
    await park(transport, "ours", {SENT_AT: 1_000})
    assert await dead_letters.replay(transport, QUEUE) == ["ours"]
    assert [dead_letter.id for dead_letter in await dead_letters.list_dead(transport, dead_letters.UNKNOWN)] == [
        "passed on"
    ]


# --- Letters of what other programs publish.


KEY = "build.request.p"
MEGABYTE = 2**20


@EVERY_ADAPTER
async def test_the_letter_of_a_body_beyond_the_bound_is_cut_and_is_not_sent_back(house: House) -> None:
    """376 of a megabyte each stopped the broker for all, by its disk alarm."""
    size = MEGABYTE + 1
    bus = await house.bus()
    await house.consume(bus, REQUESTS, Answering())
    body = b"{" * size
    await bus.transport.publish(Outgoing(exchange=COMMANDS, routing_key=KEY, body=body))
    await settled(bus, dead=1)
    (dead_letter,) = await dead_letters.list_dead(bus.transport, REQUESTS)
    assert (dead_letter.body, dead_letter.truncated_from) == (body[:MAX_DEAD_LETTER_BYTES], size)
    assert dead_letter.blocks_replay == dead_letters.TRUNCATED
    assert await dead_letters.replay(bus.transport, REQUESTS) == []
    await settled(bus, dead=1)
    assert await dead_letters.purge(bus.transport, REQUESTS) == 1


@EVERY_ADAPTER
async def test_a_letter_that_has_all_of_a_clients_message_is_sent_back(house: House) -> None:
    bus = await house.bus()
    await house.consume(bus, REQUESTS, Answering())
    await bus.transport.publish(Outgoing(exchange=COMMANDS, routing_key=KEY, body=b"{" * MAX_DEAD_LETTER_BYTES))
    await settled(bus, dead=1)
    (dead_letter,) = await dead_letters.list_dead(bus.transport, REQUESTS)
    assert (dead_letter.truncated_from, dead_letter.blocks_replay) == (0, "")
    assert await dead_letters.replay(bus.transport, REQUESTS) == [dead_letter.id]
    await settled(bus, dead=1)


@EVERY_ADAPTER
async def test_what_the_broker_gives_up_of_requests_ends_and_becomes_one_letter(house: House) -> None:
    bus = await house.bus()
    await bus.declare(REQUESTS)
    ended = await house.answer(bus, "scheduler.dead_letters")
    request = boot(1, name="n" * 200)
    sound = Outgoing(exchange=COMMANDS, routing_key=KEY, body=encode(request), message_id="sound", expiration_s=0.0)
    await bus.transport.publish(sound)
    (got,) = await ended.wait(1)
    assert (got.message, got.dead_letter_code) == (request, "broker.expired")
    await settled(bus, dead=1)
    (dead_letter,) = await dead_letters.list_dead(bus.transport, REQUESTS)
    assert (dead_letter.code, dead_letter.routing_key, dead_letter.body) == ("broker.expired", KEY, encode(request))
    assert await dead_letters.replay(bus.transport, REQUESTS) == ["sound"]


@EVERY_ADAPTER
async def test_dead_letters_and_what_is_delayed_are_bounded_in_bytes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "MAX_PARKED_BYTES", 1000)
    transport = await rig.transport()
    for exchange in ("berth.dead", delay_exchange(topology.DELAYS_S[-1])):
        with pytest.raises(PublishRefused):
            for _ in range(100):  # a quorum queue notices a little later
                await transport.publish(
                    Outgoing(exchange=exchange, routing_key="gone", body=b"x" * 400, mandatory=True)
                )
