"""Sending dead letters back, on both buses: they carry their age, and some may not go."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import pytest

from bus.consuming import dead_letters
from bus.consuming.dead_letters import DIED_AT, DeadLetter
from bus.contracts.catalogue import COMMANDS, DEAD, QueueKind, QueueRow, Where
from bus.port import Delivery, Outgoing, Transport
from bus.wire import SENT_AT
from tests.contract.rig import rig_for, until

QUEUE = "work"


@pytest.fixture(params=["memory", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)])
async def transport(request: pytest.FixtureRequest) -> AsyncIterator[Transport]:
    async with rig_for(request.param, lambda: request.getfixturevalue("amqp")) as rig:
        made = await rig.transport()
        row = QueueRow(name=QUEUE, where=Where.BOTH, kind=QueueKind.DURABLE, consumer="tests", bindings=())
        await made.declare_queue(row, QUEUE, ((COMMANDS, "work.#"),))
        yield made


async def park(transport: Transport, name: str, headers: Mapping[str, str | int | float]) -> None:
    letter = Outgoing(
        exchange=DEAD, routing_key=QUEUE, body=b"{}", message_id=name, headers=dict(headers), mandatory=True
    )
    await transport.publish(letter)


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

    def is_new(letter: DeadLetter) -> bool:
        return (letter.sent_at or 0.0) > 5.0

    assert await dead_letters.replay(transport, QUEUE, may_go=is_new) == ["new"]
    assert (await taken(transport)).message_id == "new"
    left = await dead_letters.list_dead(transport, QUEUE)
    assert sorted(letter.id for letter in left) == ["old", "older"]
