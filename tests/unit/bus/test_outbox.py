"""The outbox and its relay: rows, shares, turns, confirms, and a database that is unavailable."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import structlog
from msgspec import structs

from bus.bus import Bus
from bus.clock import Clock, SystemClock
from bus.contracts.base import Message
from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.cell import CellDelete
from bus.memory import MemoryBroker, MemoryTransport
from bus.persistence.outbox import OutboxMessage, Sweep, encode_row
from bus.persistence.relay import (
    MAX_BEHIND,
    MAX_ROWS,
    SWEEP_BATCH,
    UNAVAILABLE_LOG_INTERVAL_S,
    Relay,
)
from bus.persistence.unit_of_work import published
from bus.publishing import BusLimits, Waiter
from bus.transport import BusUnavailable, Outgoing
from tests.contract.rig import boot
from tests.kit.posting import PostedBus
from tests.kit.turns import cancelled
from tests.kit.virtual_time import on_virtual_time
from tests.kit.waiting import until

# --- when an outbox row is deleted

UUID = "0b2d1c9e-6f7a-4d53-9a40-2f1a3b4c5d6e"


class Forgotten:
    """The table of rows: which are deleted, in order."""

    def __init__(self) -> None:
        self.rows: asyncio.Queue[int] = asyncio.Queue()

    async def delete(self, row_ids: Sequence[int]) -> None:
        for row in row_ids:
            self.rows.put_nowait(row)

    async def claim_stale(self, sweep: Sweep) -> list[tuple[int, bytes]]:
        await self.delete(sweep.confirmed)
        return []

    async def purge_handled(self, keep_s: float, limit: int) -> None:
        await asyncio.Event().wait()


async def test_each_row_is_deleted_when_all_of_its_messages_are_confirmed() -> None:
    """Found by nothing before: deleted at the first, a crash in between loses the others."""
    table, fast, slow = Forgotten(), PostedBus("c1"), PostedBus("c2")
    fast.confirms.clear()
    slow.confirms.clear()
    buses: dict[str, Bus] = {"c1": fast, "c2": slow}  # type: ignore[dict-item]
    relay = Relay(table, buses, clock=SystemClock())
    running = asyncio.create_task(relay.run())
    message = CellDelete(instance_uuid=UUID, project_id="p")
    relay.send([1, 2], [OutboxMessage("c1", message), OutboxMessage("c2", message), OutboxMessage("c2", message)])
    async with asyncio.timeout(30):
        await fast.has_some.wait()
        await slow.has_some.wait()
        fast.confirms.set()
        assert await table.rows.get() == 1
        assert table.rows.empty() and relay.held == 1
        slow.confirms.set()
        assert await table.rows.get() == 2
    await cancelled(running)


async def test_a_row_of_which_one_message_waits_for_its_confirm_stays() -> None:
    table, bus = Forgotten(), SlowLast("c1")
    relay = Relay(table, {"c1": bus}, clock=SystemClock())  # type: ignore[dict-item]
    running = asyncio.create_task(relay.run())
    await asyncio.sleep(0)  # it runs: a drain waits for it
    message = CellDelete(instance_uuid=UUID, project_id="p")
    relay.send([1], [OutboxMessage("c1", message), OutboxMessage("c1", message)])
    async with asyncio.timeout(30):
        first, last = bus.waiters
        first.resolve(None)
        await relay.drain(0.05)
        assert table.rows.empty() and relay.held == 1
        last.resolve(None)
        await relay.drain(30)
        assert await table.rows.get() == 1
    await cancelled(running)


class SlowLast(PostedBus):
    """A bus whose confirms the test gives one by one."""

    def post_all(
        self,
        messages: Sequence[tuple[Message, str]],
        traceparents: Sequence[str],
        waiters: Sequence[Waiter],
        line: Callable[[Message], Hashable],
        incarnations: Sequence[int] = (),
    ) -> None:
        for waiter in waiters:
            waiter.pending += 1
        self.waiters = list(waiters)


# --- a bus that is unavailable is logged when it goes, now and then while it stays away, and when it is back

OUTAGE_S = 200.0
OUTGOING = [OutboxMessage("c1", CellDelete(instance_uuid="0b2d1c9e-6f7a-4d53-9a40-2f1a3b4c5d6e", project_id="p"))]


class HandClock(SystemClock):
    """Its sleeps never end."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        await asyncio.Event().wait()


class LeftRows:
    """The table: the rows that stayed, which are taken when their bus is back."""

    def __init__(self) -> None:
        self.rows: set[int] = set()

    async def delete(self, row_ids: Sequence[int]) -> None:
        self.rows -= set(row_ids)

    async def claim_stale(self, sweep: Sweep) -> list[tuple[int, bytes]]:
        self.rows -= set(sweep.confirmed)
        return [(row, encode_row(OUTGOING)) for row in sorted(self.rows & set(sweep.restored))][: sweep.limit]

    async def purge_handled(self, keep_s: float, limit: int) -> None: ...


async def test_an_outage_is_logged_when_it_begins_at_intervals_and_when_it_ends() -> None:
    clock, bus, table = HandClock(), PostedBus("c1"), LeftRows()
    bus.go()
    relay = Relay(table, {"c1": bus}, clock=clock)  # type: ignore[dict-item]
    with structlog.testing.capture_logs() as lines:
        running = asyncio.create_task(relay.run())
        while clock.now < OUTAGE_S:
            clock.now += 1.0
            table.rows.add(int(clock.now))
            relay.send([int(clock.now)], OUTGOING)
        assert relay.held == 0 and not bus.batches, "the rows stay in the table"
        bus.come_back()
        await asyncio.wait_for(relay.drain(60.0), 60)
        await cancelled(running)
    counts = Counter(line["event"] for line in lines)
    assert 2 <= counts["outbox.bus_unavailable"] <= OUTAGE_S / UNAVAILABLE_LOG_INTERVAL_S + 1
    assert counts["outbox.bus_back"] == 1
    assert len(bus.got) == OUTAGE_S and not table.rows


@on_virtual_time
async def test_a_bus_is_missing_until_what_waits_for_it_is_published() -> None:
    """A cell that was removed was left again while its broker was away, entered for the same row, left, and so on."""
    bus, table = PostedBus("c1"), LeftRows()
    table.rows = {1}
    relay = Relay(table, {}, clock=SystemClock())
    running = asyncio.create_task(relay.run())
    relay.send([1], OUTGOING)
    assert set(relay.missing) == {"c1"}
    bus.go()
    relay.add_bus(bus)  # type: ignore[arg-type]
    await asyncio.sleep(60.0)
    assert set(relay.missing) == {"c1"}
    bus.come_back()
    await asyncio.sleep(60.0)
    assert not relay.missing and not table.rows
    await cancelled(running)


@on_virtual_time
async def test_a_drain_does_not_wait_for_a_bus_that_is_away_but_for_what_goes_on_others() -> None:
    """A worker that stopped while one of its cells was away took its whole grace time."""
    away, there, table = PostedBus("c1"), PostedBus("c2"), LeftRows()
    there.confirms.clear()
    relay = Relay(table, {"c1": away, "c2": there}, clock=SystemClock())  # type: ignore[dict-item]
    running = asyncio.create_task(relay.run())
    away.go()
    relay.send([1], OUTGOING)
    relay.send([2], [structs.replace(OUTGOING[0], bus="c2")])
    draining = asyncio.create_task(relay.drain(60.0))
    await there.has_some.wait()
    await asyncio.sleep(10.0)
    assert not draining.done(), "a row may still be confirmed"
    there.confirms.set()
    began = asyncio.get_running_loop().time()
    await draining
    assert asyncio.get_running_loop().time() - began < 1.0 and not relay.held
    await cancelled(running)


# --- the events of all projects leave by one relay: those of a quiet one wait for few of a noisy one's

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
    relay = Relay(Forgotten(), {name: bus}, clock=SystemClock())
    relay.send([1], [OutboxMessage(name, event("noisy", number)) for number in range(NOISY)])
    relay.send([2], [OutboxMessage(name, event("quiet", 0))])
    await until(lambda: not relay._tickets)
    await bus.close()
    return sent


async def test_a_quiet_projects_event_is_before_most_of_a_noisy_ones_and_each_project_keeps_its_order() -> None:
    """Thirteen thousand events of refusals stood before it, for 12 s. Each key has its turn."""
    sent = await sent_beside_a_noisy_project("api")
    quiet = f"quiet.{boot(0).instance_uuid}"
    (place,) = (number for number, items in enumerate(sent) if quiet in items)
    assert place <= LIMITS.full_in_flight < len(sent) - 1, "after those that had left before it came"
    noisy = [item for items in sent for item in items if item != quiet]
    assert noisy == [f"noisy.{boot(number).instance_uuid}" for number in range(NOISY)]


async def test_a_worker_that_is_ahead_of_its_broker_waits() -> None:
    """A scheduler committed 26,000 refusals while it published 12,000."""
    bus = PostedBus("api")
    bus.confirms.clear()
    relay = Relay(Forgotten(), {"api": bus}, clock=SystemClock())  # type: ignore[dict-item]
    running = asyncio.create_task(relay.run())
    await asyncio.wait_for(relay.wait_for_backlog("api"), 30)
    for row in range(8):
        relay.send([row], [OutboxMessage("api", event("noisy", number)) for number in range(MAX_BEHIND // 8)])
    await bus.has_some.wait()
    waiting = asyncio.create_task(relay.wait_for_backlog("api"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    bus.confirms.set()
    await asyncio.wait_for(waiting, 30)
    await cancelled(running)


# --- a bus that confirms nothing, or fails what it is given, though it says that it is connected

PATIENCE_S = 30
TURNS = 200  # of the event loop: enough for many sweeps


class Table:
    """The rows that are committed and not deleted. None is old."""

    def __init__(self) -> None:
        self.rows: dict[int, list[OutboxMessage]] = {}

    async def delete(self, row_ids: Sequence[int]) -> None:
        for row in row_ids:
            self.rows.pop(row, None)

    async def claim_stale(self, sweep: Sweep) -> list[tuple[int, bytes]]:
        await asyncio.sleep(0)
        await self.delete(sweep.confirmed)
        taken: Counter[str] = Counter()
        found = []
        for row in sorted(set(sweep.restored) & self.rows.keys()):
            bus = self.rows[row][0].bus
            if bus not in sweep.closed and taken[bus] < sweep.limit:
                taken[bus] += 1
                found.append((row, encode_row(self.rows[row])))
        return found

    async def purge_handled(self, keep_s: float, limit: int) -> None: ...


class FailingBus(PostedBus):
    """Loses each message at once, until it is repaired."""

    is_broken = True

    def fault_of(self, message: Message) -> BaseException | None:
        return BusUnavailable("lost") if self.is_broken else None


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


class World:
    def __init__(self, clock: Clock, *buses: PostedBus) -> None:
        self.table = Table()
        named: Any = {bus.name: bus for bus in buses}
        self.relay = Relay(self.table, named, clock=clock)

    async def commit(self, bus: str, messages: int = 1) -> None:
        """One unit of work, as workers have them."""
        outgoing = [OutboxMessage(bus, CellDelete(instance_uuid=UUID, project_id="p"))] * messages

        @asynccontextmanager
        async def unit() -> AsyncIterator[Any]:
            row = len(self.table.rows) + 1
            self.table.rows[row] = outgoing
            yield SimpleNamespace(rows=[row], outbox=outgoing)

        async with published(self.relay, unit()):
            pass

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        running = asyncio.create_task(self.relay.run())
        try:
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.sleep(0)
                yield
        finally:
            await cancelled(running)


@pytest.mark.parametrize(("max_rows", "messages"), [(60, 1), (MAX_ROWS, 1_000)])
async def test_a_bus_that_confirms_nothing_leaves_room_for_the_others(
    max_rows: int, messages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows filled what the relay holds, and no unit of work began any more."""
    mute, other, late = PostedBus("c1"), PostedBus("c2"), PostedBus("c3")
    mute.confirms.clear()
    late.confirms.clear()
    monkeypatch.setattr("bus.persistence.relay.MAX_ROWS", max_rows)
    world = World(SystemClock(), mute, other, late)
    async with world.running():
        for bus in ("c1", "c3"):
            for _ in range(40):
                await world.commit(bus, messages)
        await world.commit("c2")
        await turns()
        assert len(other.got) == 1
        assert 0 < len(late.got) < len(mute.got) < 40 * messages, "each has a share"
        mute.confirms.set()
        late.confirms.set()
        await world.relay.drain(PATIENCE_S)
    assert not world.table.rows
    assert len(mute.got) == len(late.got) == 40 * messages, "what stayed in the table leaves, once"


async def test_rows_that_a_connected_bus_loses_at_once_wait_for_the_next_sweep() -> None:
    """More of them than one statement takes were published again in each turn of the event loop."""
    bus, rows = FailingBus("c1"), 2 * SWEEP_BATCH + 1
    world = World(HandClock(), bus)
    async with world.running():
        for _ in range(rows):
            await world.commit("c1")
        await turns()
        assert len(bus.got) == rows
        bus.come_back()
        await turns()
        assert len(bus.got) == 2 * rows, "once a sweep"
        bus.is_broken = False
        bus.come_back()
        await world.relay.drain(PATIENCE_S)
    assert not world.table.rows
