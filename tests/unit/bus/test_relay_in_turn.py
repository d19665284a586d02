"""The events of all projects leave by one relay: those of a quiet one wait for few of a noisy one's."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import msgspec

from bus.bus import Bus, BusLimits
from bus.clock import SystemClock
from bus.contracts.build import BuildEvent, BuildState
from bus.memory import MemoryBroker, MemoryTransport
from bus.persistence.outbox import OutboxMessage
from bus.persistence.relay import MAX_BEHIND, Relay
from bus.port import Outgoing
from scheduler_worker.app import project_of_event
from tests.contract.house import boot
from tests.contract.rig import until
from tests.kit.posting import PostedBus
from tests.unit.bus.test_outbox_rows import Forgotten

NOISY = 1_500  # events
LIMITS = BusLimits(in_flight=8, full_in_flight=4)


def event(project: str, number: int) -> BuildEvent:
    return BuildEvent(
        instance_uuid=boot(number).instance_uuid,
        project_id=project,
        state=BuildState.REFUSED,
        sequence=1,
        terminal=True,
        code="no",
    )


async def sent_beside_a_noisy_project(name: str) -> list[list[str]]:
    """The events of each broker message in order, `project.instance`; all are confirmed, as if a queue were bound."""
    sent: list[list[str]] = []
    transport = MemoryTransport(MemoryBroker(SystemClock()), name)

    async def publish(message: Outgoing) -> None:
        body = msgspec.json.decode(message.body)
        items = [one["body"] for one in body] if isinstance(body, list) else [body]
        sent.append([f"{one['project_id']}.{one['instance_uuid']}" for one in items])

    transport.publish = publish  # type: ignore[method-assign]
    bus = Bus(name, transport, process="t", clock=SystemClock(), rng=random.Random(1), limits=LIMITS)
    await bus.open()
    relay = Relay(Forgotten(), {name: bus}, clock=SystemClock(), line=project_of_event)
    relay.send([1], [OutboxMessage(name, event("noisy", number)) for number in range(NOISY)])
    relay.send([2], [OutboxMessage(name, event("quiet", 0))])
    await until(lambda: not relay._tickets)
    await bus.close()
    return sent


async def test_a_quiet_projects_event_is_in_the_next_batch_and_each_project_keeps_its_order() -> None:
    """Thirteen thousand events of refusals stood before it, for 12 s."""
    sent = await sent_beside_a_noisy_project("c1")
    quiet = f"quiet.{boot(0).instance_uuid}"
    (place,) = (number for number, items in enumerate(sent) if quiet in items)
    assert place <= LIMITS.full_in_flight < len(sent) - 1, "after those that had left before it came"
    noisy = [item for items in sent for item in items if item != quiet]
    assert noisy == [f"noisy.{boot(number).instance_uuid}" for number in range(NOISY)]


async def test_a_quiet_projects_event_leaves_alone_before_most_of_a_noisy_ones() -> None:
    """On the clients' bus each event also leaves alone, under its own key: the keys have their turns."""
    sent = await sent_beside_a_noisy_project("api")
    places = [number for number, items in enumerate(sent) if f"quiet.{boot(0).instance_uuid}" in items]
    assert len(places) == 2, "alone, and in a batch"
    assert places[-1] <= LIMITS.in_flight + 2 * 3 < len(sent) / 2, "each of the three links had its turn"


async def test_a_worker_that_is_ahead_of_its_broker_waits() -> None:
    """A scheduler committed 26,000 refusals while it published 12,000."""
    bus = PostedBus("api")
    bus.confirms.clear()
    relay = Relay(Forgotten(), {"api": bus}, clock=SystemClock(), line=project_of_event)  # type: ignore[dict-item]
    running = asyncio.create_task(relay.run())
    await asyncio.wait_for(relay.keep_up("api"), 30)
    for row in range(8):
        relay.send([row], [OutboxMessage("api", event("noisy", number)) for number in range(MAX_BEHIND // 8)])
    await bus.has_some.wait()
    waiting = asyncio.create_task(relay.keep_up("api"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    bus.confirms.set()
    await asyncio.wait_for(waiting, 30)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
