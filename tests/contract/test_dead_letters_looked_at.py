"""However often dead letters are looked at, none is lost; nor is what another system's queue gives back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from bus.bus import Bus
from bus.consuming import dead_letters
from bus.consuming.outcome import Refuse
from bus.contracts.catalogue import DEAD_LETTERS
from bus.port import Outgoing
from tests.contract.house import REQUESTS, Answering, House, boot, settled
from tests.contract.rig import Rig, until

pytestmark = pytest.mark.parametrize("kind", ["memory", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)])
LOOKS = 30
OTHER = "conductor.requests"


async def _count(bus: Bus) -> int:
    return sum((await dead_letters.count(bus.transport)).by_queue.values())


async def _list(bus: Bus) -> int:
    return len(await dead_letters.list_dead(bus.transport))


async def _show(bus: Bus) -> int:
    """As the command and the page show one letter."""
    found = await dead_letters.list_dead(bus.transport, REQUESTS)
    return len(found) if all(letter.body for letter in found) else 0


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


@pytest.mark.parametrize("how", LOOKS_AT)
async def test_a_letter_that_is_looked_at_often_stays(house: House, how: str) -> None:
    """The web page's list of letters is a count, on each view. RabbitMQ 4 dropped all letters at the 21st."""
    bus = await house.bus()
    await house.consume(bus, REQUESTS, Answering(lambda _: Refuse("no")))
    for number in range(3):
        await bus.publish(boot(number))
    await settled(bus, dead=3)
    look_at: Callable[[Bus], Awaitable[int]] = LOOKS_AT[how]

    async def there() -> bool:
        return await bus.transport.depth(DEAD_LETTERS) == 3

    for look in range(1, LOOKS + 1):
        found = await look_at(bus)
        if found != 3:
            pytest.fail(f"look {look} ({how}) found {found} of 3 letters")
        try:
            await until(there, 5.0)
        except TimeoutError:
            left = await bus.transport.depth(DEAD_LETTERS)
            pytest.fail(f"after look {look} ({how}) {left} of 3 letters are left")


async def test_a_notification_of_another_system_that_is_given_back_often_stays(rig: Rig) -> None:
    """The queue that is bound to Ironic's exchange: its consumer ends, or loses its connection, again and again."""
    transport = await rig.transport()
    await rig.foreign_exchange("foreign.notifications")  # type: ignore[attr-defined]
    await transport.bind_foreign("ironic.notifications", "foreign.notifications", ["#"])
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
