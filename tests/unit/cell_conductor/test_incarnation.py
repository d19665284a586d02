"""The incarnation of the cell's database: what a conductor does that hears of a later one than its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.consuming.outcome import Received
from bus.contracts.base import MAX_INCARNATION, ORDER_OUTDATED, DatabaseMark, Message, Meta
from bus.contracts.cell import ServiceStates
from bus.contracts.placement import Claim, Release
from bus.faults import RequestRefused
from cell_conductor.awaited_request import awaited_request_of
from cell_conductor.config import ConductorConfig
from cell_conductor.hosts.lease_table import MAX_LISTEN_S
from cell_conductor.hosts.service_state_publisher import SERVICE_STATES_INTERVAL_S, LeaderTerm, ServiceStatePublisher
from cell_conductor.hosts.stated_marks import ASK_AGAIN_S, MAX_RECOVERIES_BY_ONE, RIVAL_S
from cell_conductor.placement_client import PendingRequest, PlacementRequests
from cell_conductor.state.database_marks import Stated
from cell_conductor.state.instance import State
from cell_conductor.state.lease import Lease
from cell_conductor.store.keyed import DatabaseOutdated
from cell_conductor.store.memory import MemoryInstances
from tests.unit.cell_conductor.records import record
from tests.unit.cell_conductor.world import (
    ALONE,
    BUILD,
    Alone,
    Queried,
    Quiet,
    Relay,
    beat,
    engine_of,
    leases_of,
    opened_store,
    put,
    requests_of,
)


class Listener:
    """One conductor's leader of the leases, on a clock that a test moves."""

    def __init__(self, store: MemoryInstances) -> None:
        self.now, self.sequence = 100.0, 0
        waiting = asyncio.Event()
        clock: Any = SimpleNamespace(time=lambda: self.now, monotonic=lambda: self.now, sleep=lambda _: waiting.wait())
        bus: Any = Queried()
        self.keeper, self.marks = leases_of(store, bus, clock, ConductorConfig())
        self.running = asyncio.create_task(self.keeper.run(ALONE))

    async def receive(self, message: Message, incarnation: int = 0) -> None:
        meta = Meta(id="m", database_incarnation=incarnation)
        await self.keeper.handle([Received(message, meta, "c1", "conductor.leases")])

    async def beat(self, service: str, *mark: Any, interval_s: float = 1.0) -> None:
        """A heartbeat that states this mark."""
        self.sequence += 1
        await self.receive(beat(service, 1, self.sequence, interval_s=interval_s, mark=DatabaseMark(*mark)))

    @property
    def may_act(self) -> bool:
        return self.marks.stated().may_act


@pytest.fixture
async def store() -> MemoryInstances:
    return await opened_store()


@pytest.fixture
async def listener(store: MemoryInstances) -> AsyncIterator[Listener]:
    made = Listener(store)
    await asyncio.sleep(0)
    yield made
    made.running.cancel()
    await asyncio.gather(made.running, return_exceptions=True)


@pytest.mark.parametrize(("interval_s", "listens_s"), [(0.0, 15.0), (1.0, 15.0), (60.0, 90.0)])
async def test_what_is_stated_is_known_once_each_service_would_have_been_heard(
    listener: Listener, interval_s: float, listens_s: float
) -> None:
    await listener.beat("s1", 1, (4,), interval_s=interval_s)
    await listener.beat("s2", interval_s=interval_s)
    await listener.receive(ServiceStates(cell="c1", term=1, number=1), 6)
    await listener.receive(replace(beat("s1", 1, 2, mark=DatabaseMark(9)), cell="another"), 9)
    listener.now += listens_s - 1.0
    assert not listener.marks.stated().is_known
    listener.now += 1.0
    known = listener.marks.stated()
    assert (known.marks, known.conductor, known.is_known) == ((DatabaseMark(1, (4,)),), 6, True)


async def test_what_no_database_could_have_had_is_not_believed(listener: Listener) -> None:
    """Nothing could be above it any more."""
    for incarnation in (MAX_INCARNATION, 1002, 2000):
        await listener.beat("s1", incarnation, (1,))
    assert listener.marks.stated().marks == ()
    await listener.beat("s1", 1001)
    assert listener.marks.stated().marks == (DatabaseMark(1001),)


async def test_a_conductor_acts_once_the_services_on_record_would_have_been_heard(
    store: MemoryInstances, listener: Listener
) -> None:
    await put(store, Lease(service="s1", epoch=1, interval_s=4.0), Lease(service="s2", epoch=1, interval_s=2.0))
    assert not listener.may_act, "it has not read who they are"
    await listener.keeper._renew_leadership()
    await listener.beat("s1", 1, interval_s=4.0)
    assert not listener.marks.stated().is_whole
    await listener.beat("s2", 1, interval_s=2.0)
    assert listener.marks.stated().is_whole
    listener.now += 5.5
    assert not listener.may_act
    listener.now += 0.5
    assert listener.may_act
    store._connections.disconnect()  # type: ignore[attr-defined]
    assert not listener.may_act and not listener.marks.stated().is_whole, "its disk may be another one"
    listener.now += 6.0
    assert not listener.may_act and await store.has_due(0.0), "what is on record there has not been read"
    async with store.transaction() as transaction:
        assert await transaction.recognise(listener.marks.stated()) is None
    assert listener.may_act


async def test_what_the_former_server_had_is_looked_for_on_the_next_one(
    store: MemoryInstances, listener: Listener
) -> None:
    """An older volume, put back while the server was stopped: it has the cluster and the timeline of the newer one."""
    await put(store, Lease(service="s1", epoch=1, interval_s=4.0))
    await listener.keeper._renew_leadership()
    async with store.transaction() as transaction:
        await transaction.insert([record(State.ACTIVE)])
    stated = store.mark.sent_sequences
    store._connections.disconnect()  # type: ignore[attr-defined]
    store._table.sent = (0,) * len(store._table.sent)
    assert not listener.may_act
    await listener.beat("s1", 1, stated, interval_s=4.0)
    listener.now += 60.0
    assert not listener.may_act and await store.has_due(0.0)
    async with store.transaction() as transaction:
        change = await transaction.recognise(listener.marks.stated())
    assert change is not None and change.recovers


async def test_a_service_that_sends_one_heartbeat_an_hour_does_not_close_its_cell_for_so_long(
    store: MemoryInstances, listener: Listener
) -> None:
    await put(store, Lease(service="s1", epoch=1, interval_s=3600.0))
    await listener.keeper._renew_leadership()
    assert not listener.may_act
    listener.now += MAX_LISTEN_S
    assert listener.may_act


async def test_a_cell_that_has_never_had_a_service_waits_for_none(listener: Listener) -> None:
    await listener.keeper._renew_leadership()
    assert listener.may_act


async def test_a_mark_above_that_is_heard_first_is_looked_into_before_anything_is_begun(
    store: MemoryInstances, listener: Listener
) -> None:
    await put(store, Lease(service="s1", epoch=1, interval_s=2.0))
    await listener.keeper._renew_leadership()
    await listener.beat("s1", 1, (3,))
    listener.now += 60.0
    assert not listener.may_act
    async with store.transaction() as transaction:
        change = await transaction.recognise(listener.marks.stated())
    assert change is not None and change.recovers
    assert listener.may_act and listener.marks.stated().marks == ()


async def test_a_later_incarnation_is_a_recovery_unless_another_conductor_goes_by_it(
    store: MemoryInstances, listener: Listener
) -> None:
    await listener.keeper._renew_leadership()
    listener.now += 60.0
    assert listener.may_act
    await listener.beat("s1", 2, (3,))
    assert not listener.may_act and not listener.marks.stated().is_known
    listener.now += RIVAL_S - 0.1
    assert not listener.marks.stated().is_known
    listener.now += 0.1
    stated = listener.marks.stated()
    await listener.receive(ServiceStates(cell="c1", term=1, number=1), 2)
    with pytest.raises(DatabaseOutdated):
        async with store.transaction() as transaction:
            await transaction.recognise(listener.marks.stated())
    async with store.transaction() as transaction:
        change = await transaction.recognise(stated)
    assert change is not None and change.incarnation == 3
    assert listener.may_act


@pytest.mark.parametrize("says", [(0, (10**9,)), (1, ())], ids=["sequence", "incarnation"])
async def test_one_service_that_is_wrong_begins_no_recoveries_for_ever(
    store: MemoryInstances, listener: Listener, says: tuple[int, tuple[int, ...]]
) -> None:
    """The same again is harmless; and what is above that, each time, is believed so many times."""
    engine = engine_of(
        store=store, bus=cast(Any, Quiet()), relay=cast(Any, Relay()), clock=SystemClock(), config=ConductorConfig(),
        cell="c1", leases=listener.keeper, marks=listener.marks,
    )  # fmt: skip
    await listener.keeper._renew_leadership()
    started = list[int]()
    above, sequences = says
    for number in range(3 * MAX_RECOVERIES_BY_ONE):
        own = store.incarnation
        mark = own + above, tuple(one + number for one in sequences)
        for _ in range(2):
            await listener.beat("s1", *mark)
            listener.now += 60.0
            listener.marks.stated()
            listener.now += 60.0
            await engine.sweep()
            if store.is_recovering:
                started.append(store.incarnation)
                async with store.transaction() as transaction:
                    await transaction.expect_recovering()
                    await transaction.end_recovery()
    assert started == sorted(set(started)) and len(started) == MAX_RECOVERIES_BY_ONE
    await listener.beat("s2", store.incarnation, (10**12,))
    await engine.sweep()
    assert store.is_recovering, "another one is believed"


async def test_a_conductor_with_an_old_copy_of_the_database_ends_when_it_hears_of_a_later_one() -> None:
    store, marks = await opened_store(), Alone()
    bus: Any = Quiet()
    relay: Any = Relay()
    engine = engine_of(
        store=store, bus=bus, relay=relay, clock=SystemClock(), config=ConductorConfig(), cell="c1", marks=marks
    )
    assert await engine.sweep() == 0
    marks.stated = lambda: Stated(conductor=2)  # type: ignore[method-assign]
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
    query = awaited_request_of(waiting)
    assert isinstance(query, kind)
    assert (
        await PlacementRequests(bus, SystemClock(), 1.0, lambda: 1, [].append).send([PendingRequest(waiting, query)])
        == []
    )
    assert bus.requested == [query]


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
    bus, stated, heard = Waiting(), 1, list[int]()
    requests = PlacementRequests(cast("Any", bus), SystemClock(), 1.0, lambda: stated, heard.append)
    waiting = record(State.CLAIMING, State.BUILDING)
    query = PendingRequest(waiting, cast("Any", awaited_request_of(waiting)))
    asking = asyncio.create_task(requests.send([query]))
    await bus.asked.wait()
    stated = 5
    assert await asyncio.wait_for(asyncio.create_task(requests.send([query])), 60) == []
    bus.go_on.set()
    await asking
    assert (heard, len(bus.requested)) == ([2], 1)
    await requests.send([query])
    assert (heard, len(bus.requested)) == ([2, 6], 2)


async def test_the_members_of_rings_are_numbered_in_the_order_of_their_changes() -> None:
    """They are published when they change, and now and then, under the number of their last change."""
    sent: list[tuple[int, int, tuple[str, ...]]] = []

    async def publish(message: Any, **_: Any) -> None:
        sent.append((message.term, message.number, message.members))

    clock = SimpleNamespace(monotonic=lambda: now_s)
    table, bus, term = SimpleNamespace(), SimpleNamespace(publish=publish), LeaderTerm(term=7, until=1000.0)
    publisher = ServiceStatePublisher(cast(Any, table), cast(Any, bus), clock=cast(Any, clock), cell="c1")
    for at_s, members in (
        (0.0, ("a",)),
        (0.1, ("a",)),
        (0.2, ("a", "b")),
        (0.3, ("b",)),
        (0.3 + SERVICE_STATES_INTERVAL_S, ("b",)),
    ):
        now_s = at_s
        table.rings = lambda members=members: {"r": members}
        await publisher._publish_rings(term)
    assert sent == [(7, 1, ("a",)), (7, 2, ("a", "b")), (7, 3, ("b",)), (7, 3, ("b",))]
    term.until = now_s = 0.0  # another conductor may be the leader by now
    await publisher._publish_rings(term)
    assert len(sent) == 4


@pytest.mark.parametrize("moves", [False, True])
async def test_those_above_are_asked_again_until_they_answer(
    moves: bool, listener: Listener, store: MemoryInstances
) -> None:
    """They may start after the conductor, as after an outage of all. To another server they have not answered."""
    marks = listener.marks
    first = marks.marks_wanted_by()
    assert first is not None and marks.marks_wanted_by() is None
    marks.hear_all((), first)
    listener.now += ASK_AGAIN_S
    asked = marks.marks_wanted_by()
    assert asked is not None
    if moves:
        store._connections.disconnect()  # type: ignore[attr-defined]
        marks.stated()
    marks.hear_all((DatabaseMark(1, (3,)), DatabaseMark()), asked)
    assert marks.stated().marks == (DatabaseMark(1, (3,)),)
    listener.now += ASK_AGAIN_S
    assert (marks.marks_wanted_by() is not None) is moves
