"""The events of all projects leave by one relay: those of a quiet one wait for few of a noisy one's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from bus.clock import SystemClock
from bus.contracts.base import Message
from bus.contracts.build import BuildEvent, BuildState
from bus.persistence.outbox import OutboxMessage
from bus.persistence.relay import Relay
from bus.persistence.relay_lane import LANE_BATCH, MAX_BEHIND, Lane, Lingering, Ticket
from tests.contract.house import boot
from tests.contract.rig import until
from tests.unit.bus.test_outbox_rows import Forgotten, HeldBus

IN_TURN = Lingering(line=lambda message: getattr(message, "project_id", ""))


def event(project: str, number: int) -> BuildEvent:
    return BuildEvent(
        instance_uuid=boot(number).instance_uuid,
        project_id=project,
        state=BuildState.REFUSED,
        sequence=1,
        terminal=True,
        code="no",
    )


def queued(project: str, number: int) -> tuple[Ticket, OutboxMessage]:
    return Ticket(number, 1, ()), OutboxMessage("api", event(project, number))


class RecordingBus:
    """A bus that records each batch, and confirms it at once."""

    name = "api"

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []

    async def publish_all(self, messages: Sequence[tuple[Message, str]], traceparents: Sequence[str] = ()) -> None:
        self.batches.append([message for message, _ in messages])


async def test_a_quiet_projects_event_is_in_the_next_batch_and_each_project_keeps_its_order() -> None:
    """Thirteen thousand events of refusals stood before it, for 12 s."""
    bus = RecordingBus()
    lane = Lane(bus, SystemClock(), lambda items, *, failed=False: None, IN_TURN)  # type: ignore[arg-type]
    for number in range(3 * LANE_BATCH):
        lane.put(queued("noisy", number))
    lane.put(queued("quiet", 0))
    running = asyncio.create_task(lane.run())
    await until(lambda: len(bus.batches) == 4)
    running.cancel()
    assert event("quiet", 0) in bus.batches[0]
    sent = [message for batch in bus.batches for message in batch if message.project_id == "noisy"]
    assert sent == [event("noisy", number) for number in range(3 * LANE_BATCH)]


async def test_a_worker_that_is_ahead_of_its_broker_waits() -> None:
    """A scheduler committed 26,000 refusals while it published 12,000."""
    bus = HeldBus("api")
    relay = Relay(Forgotten(), {"api": bus}, clock=SystemClock(), lingering=IN_TURN)  # type: ignore[dict-item]
    running = asyncio.create_task(relay.run())
    await asyncio.wait_for(relay.keep_up("api"), 30)
    for row in range(40):
        relay.send(row, [OutboxMessage("api", event("noisy", number)) for number in range(MAX_BEHIND // 8)])
    await bus.has_some.wait()
    waiting = asyncio.create_task(relay.keep_up("api"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    bus.confirms.set()
    await asyncio.wait_for(waiting, 30)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
