"""Where a dead letter that was looked at and given back is in line afterwards."""

from __future__ import annotations

from bus.consuming import dead_letters
from bus.consuming.outcome import Refuse
from tests.contract.house import KINDS, REQUESTS, Answering, House, boot, settled

pytestmark = KINDS


async def test_the_oldest_letters_are_listed_first_however_often_they_are_looked_at(house: House) -> None:
    bus = await house.bus()
    await house.consume(bus, REQUESTS, Answering(lambda one: Refuse("no", one.message.name)), concurrency=1)  # type: ignore[attr-defined]
    for number in range(6):
        await bus.publish(boot(number, name=str(number)))
        await settled(bus, dead=number + 1)
    seen = []
    for _ in range(4):
        seen.append([letter.reason for letter in await dead_letters.list_dead(bus.transport, limit=2)])
        await settled(bus, dead=6)
    assert seen == [["0", "1"]] * 4
