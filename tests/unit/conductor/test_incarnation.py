"""The incarnation of the cell's database: what a conductor does that hears of a later one than its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.consuming.outcome import Received
from bus.contracts.base import MAX_INCARNATION, ORDER_OUTDATED, Message, Meta
from bus.contracts.cell import ServicesDigest
from bus.contracts.placement import Claim, Release
from bus.faults import RequestRefused
from cell_conductor.config import ConductorConfig
from cell_conductor.domain.instance import State
from cell_conductor.domain.table import question_of
from cell_conductor.lease_keeper import DIGEST_S, LeaseKeeper, _Term
from cell_conductor.placement_requests import PendingQuestion, PlacementRequests
from cell_conductor.store.keyed import DatabaseOutdated
from tests.unit.conductor.records import record
from tests.unit.conductor.world import (
    ALONE,
    BUILD,
    Alone,
    Queried,
    Quiet,
    Relay,
    beat,
    engine_of,
    opened_store,
    requests_of,
)


@pytest.mark.parametrize(("interval_s", "listens_s"), [(0.0, 15.0), (1.0, 15.0), (60.0, 90.0)])
async def test_the_highest_incarnation_is_known_once_each_service_would_have_been_heard(
    interval_s: float, listens_s: float
) -> None:
    now = 100.0
    waiting = asyncio.Event()
    clock: Any = SimpleNamespace(time=lambda: now, monotonic=lambda: now, sleep=lambda _: waiting.wait())
    bus: Any = Queried()
    keeper = LeaseKeeper(await opened_store(), bus, clock=clock, config=ConductorConfig(), cell="c1", process="p")
    running = asyncio.create_task(keeper.run(ALONE))
    await asyncio.sleep(0)
    heard: list[tuple[Message, int]] = [
        (beat("s1", 1, 1, interval_s=interval_s, database_incarnation=4), 0),
        (beat("s2", 1, 1), 0),
        (ServicesDigest(cell="c1", term=1, number=1), 6),
        (replace(beat("s1", 1, 2, database_incarnation=9), cell="another"), 9),
        (beat("s1", 1, 3, database_incarnation=MAX_INCARNATION), 0),  # nothing could be above it any more
    ]
    for message, number in heard:
        await keeper.handle([Received(message, Meta(id="m", database_incarnation=number), "c1", "conductor.leases")])
    assert keeper.heard_incarnation() is None
    now += listens_s - 1.0
    assert keeper.heard_incarnation() is None
    now += 1.0
    assert keeper.heard_incarnation() == 6
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_conductor_with_an_old_copy_of_the_database_ends_when_it_hears_of_a_later_one() -> None:
    store, leases = await opened_store(), Alone()
    bus: Any = Quiet()
    relay: Any = Relay()
    engine = engine_of(
        store=store, bus=bus, relay=relay, clock=SystemClock(), config=ConductorConfig(), cell="c1", leases=leases
    )
    assert await engine.sweep() == 0
    leases.heard_incarnation = lambda: 2  # type: ignore[method-assign]
    with pytest.raises(DatabaseOutdated):
        await engine.sweep()


class Refusing:
    """A bus on which everything is refused as decided by a lower incarnation."""

    name = "c1"

    def __init__(self) -> None:
        self.requested: list[Message] = []

    async def request_all(self, messages: Sequence[Message], *_: Any, **__: Any) -> list[RequestRefused]:
        self.requested += messages
        return [RequestRefused("there is a later one", code=ORDER_OUTDATED) for _ in messages]


@pytest.mark.parametrize(
    ("waiting", "kind"),
    [(record(State.CLAIMING, State.BUILDING), Claim), (record(State.RELEASING, State.FAILED), Release)],
)
async def test_a_request_that_is_refused_as_outdated_fails_nothing_and_is_sent_once(
    waiting: Any, kind: type[Message]
) -> None:
    bus: Any = Refusing()
    question = question_of(waiting)
    assert isinstance(question, kind)
    assert await PlacementRequests(bus, SystemClock(), 1.0, lambda: 1).ask([PendingQuestion(waiting, question)]) == []
    assert bus.requested == [question]


async def test_what_is_commanded_states_the_incarnation_by_which_it_was_decided() -> None:
    store, relay = await opened_store(), Relay()
    bus: Any = Quiet()
    of_relay: Any = relay
    clock = SystemClock()
    engine = engine_of(store=store, bus=bus, relay=of_relay, clock=clock, config=ConductorConfig(), cell="c1")
    requests = requests_of(engine, clock)
    store._table.place += 1
    await engine.sweep()
    async with store.transaction() as transaction:
        await transaction.end_recovery()
    message = replace(BUILD, requested_at=clock.time() + 1e6)
    await requests.requests([Received(message, Meta(id="m"), "c1", "conductor.requests")])
    assert {one.database_incarnation for one in relay.sent} == {2}  # type: ignore[attr-defined]


class Waiting(Refusing):
    """The same, a while after the request."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go_on = asyncio.Event(), asyncio.Event()

    async def request_all(self, messages: Sequence[Message], *_: Any, **__: Any) -> list[RequestRefused]:
        self.asked.set()
        await self.go_on.wait()
        return await super().request_all(messages)


async def test_what_placement_refused_is_the_incarnation_by_which_it_was_asked() -> None:
    """The next one may have begun while it was asked; and of an instance nothing is asked twice meanwhile."""
    bus, stated = Waiting(), 1
    requests = PlacementRequests(cast("Any", bus), SystemClock(), 1.0, lambda: stated)
    waiting = record(State.CLAIMING, State.BUILDING)
    question = PendingQuestion(waiting, cast("Any", question_of(waiting)))
    asking = asyncio.create_task(requests.ask([question]))
    await bus.asked.wait()
    stated = 5
    assert await asyncio.wait_for(asyncio.create_task(requests.ask([question])), 60) == []
    bus.go_on.set()
    await asking
    assert (requests.heard_incarnation, len(bus.requested)) == (2, 1)
    await requests.ask([question])
    assert (requests.heard_incarnation, len(bus.requested)) == (6, 2)


async def test_the_members_of_rings_are_numbered_in_the_order_of_their_changes() -> None:
    """They are published when they change, and now and then, under the number of their last change."""
    sent: list[tuple[int, int, tuple[str, ...]]] = []

    async def publish(message: Any, **_: Any) -> None:
        sent.append((message.term, message.number, message.members))

    clock = SimpleNamespace(monotonic=lambda: now_s)
    keeper: Any = LeaseKeeper.__new__(LeaseKeeper)
    keeper._clock, keeper._bus, keeper._cell = clock, SimpleNamespace(publish=publish), "c1"
    keeper._keeping = _Term(term=7, until=1000.0)
    for at_s, members in ((0.0, ("a",)), (0.1, ("a",)), (0.2, ("a", "b")), (0.3, ("b",)), (0.3 + DIGEST_S, ("b",))):
        now_s = at_s
        keeper._table = SimpleNamespace(rings=lambda members=members: {"r": members})
        await keeper._publish_rings()
    assert sent == [(7, 1, ("a",)), (7, 2, ("a", "b")), (7, 3, ("b",)), (7, 3, ("b",))]
    keeper._keeping.until = now_s = 0.0  # another conductor may be the keeper by now
    await keeper._publish_rings()
    assert len(sent) == 4
