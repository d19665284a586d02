"""The memory database, retries, and the rows that an optimistic unit of work caches."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping

import pytest

from bus.clock import SystemClock
from bus.contracts.placement import Release
from bus.faults import DatabaseUnavailable, Fault, Transient
from bus.persistence.memory_database import UNFLUSHED_S, MemoryDatabase, MemorySession
from bus.persistence.outbox import OutboxMessage
from bus.persistence.unit_of_work import Committed, OptimisticUnitOfWork, VersionCache, WriteSet
from bus.retrying import Backoff, Retrying, RetryPolicy, is_transient
from bus.transport import BusForbidden, BusUnavailable

# --- The memory database and retries.


# --- locks, circles and lost connections of the in-memory database


async def change(session: MemorySession, rows: list[str], *keys: str) -> None:
    async with session.transaction() as transaction:
        for key in keys:
            await transaction.lock([key])
            await asyncio.sleep(0)
        transaction.will(lambda: rows.append("".join(keys)))


async def test_a_circle_is_noticed_by_who_closes_it() -> None:
    database, rows = MemoryDatabase(SystemClock()), []
    outcomes = await asyncio.gather(
        change(database.session(), rows, "a", "b"), change(database.session(), rows, "b", "a"), return_exceptions=True
    )
    faults = [fault for fault in outcomes if fault is not None]
    assert [getattr(fault, "code", "") for fault in faults] == ["database.deadlock"]
    assert len(rows) == 1
    assert database.deadlocks == 1
    assert not database.is_locked("a")


async def test_a_lost_connection_commits_nothing_and_frees_its_rows() -> None:
    database, rows = MemoryDatabase(SystemClock()), []
    lost = database.session()
    with pytest.raises(DatabaseUnavailable):
        async with lost.transaction() as transaction:
            await transaction.lock(["a"])
            transaction.will(lambda: rows.append("never"))
            lost.disconnect()
    await change(database.session(), rows, "a")
    assert rows == ["a"]


async def test_each_connection_that_ends_is_counted_and_takes_no_earlier_loss_back() -> None:
    """A flush compares: two losses that cancelled each other out would acknowledge what is gone."""
    session, counted = MemoryDatabase(SystemClock()).session(), [0]
    for kind in ("cut", "lost", "cut", "lost"):
        if kind == "cut":
            session.disconnect()
        else:
            with pytest.raises(DatabaseUnavailable):
                async with session.transaction():
                    raise DatabaseUnavailable("away")
        counted.append(session.connection_losses)
    assert counted == [0, 1, 2, 3, 4]


def test_a_later_row_of_the_outbox_has_a_higher_number() -> None:
    database = MemoryDatabase(SystemClock())
    assert [database.next_row() for _ in range(3)] == [1, 2, 3]


async def test_who_waits_is_served_in_order_and_the_cancelled_are_passed_over() -> None:
    database, rows = MemoryDatabase(SystemClock()), []
    async with database.session().transaction() as transaction:
        await transaction.lock(["a"])
        waiting = [asyncio.create_task(change(database.session(), rows, "a", extra)) for extra in "xyz"]
        for _ in range(100):  # each waits by then; nothing but this loop decides when
            await asyncio.sleep(0)
        waiting[0].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert rows == ["ay", "az"]


async def test_a_fault_after_the_commit_leaves_it_committed() -> None:
    async def pause(point: str) -> None:
        if point == "committed":
            raise Transient("lost", code="database.unavailable")

    database, rows = MemoryDatabase(SystemClock()), []
    with pytest.raises(Transient):
        await change(database.session(pause), rows, "a")
    assert rows == ["a"]


class Hands:
    """A clock that is moved by hand."""

    now = 100.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


async def handle(session: MemorySession, message: str, *, durable: bool) -> int:
    async with session.transaction() as transaction:
        transaction.durable = durable
        assert await transaction.first_time("h", [message]) == {message}
    return transaction.number


async def test_a_crash_takes_back_what_is_not_on_disk_and_gives_its_numbers_again() -> None:
    database = MemoryDatabase(Hands())
    session = database.session()
    await handle(session, "kept", durable=True)
    lost = [await handle(session, message, durable=False) for message in ("one", "two")]
    losses = session.connection_losses
    session.disconnect()
    database.crash()
    assert [message for _, message in database.handled] == ["kept"]
    assert database.taken_back == 2
    assert await handle(session, "one", durable=False) == lost[0]
    assert session.connection_losses == losses + 1


@pytest.mark.parametrize("how", ["by a commit that waits for the disk", "by a flush", "by the time"])
async def test_what_has_come_to_the_disk_survives_a_crash(how: str) -> None:
    database = MemoryDatabase(clock := Hands())
    session = database.session()
    await handle(session, "early", durable=False)
    if how == "by the time":
        await clock.sleep(UNFLUSHED_S + 0.1)
    elif how == "by a flush":
        await session.flush()
    else:
        await handle(session, "late", durable=True)
    database.crash()
    assert ("h", "early") in database.handled
    assert database.taken_back == 0


async def test_a_number_of_the_outbox_never_comes_again() -> None:
    """A relay that still holds the old row under it would forget the new one."""
    database = MemoryDatabase(Hands())
    messages = [OutboxMessage("api", Release(consumer="a"))]

    async def notify() -> int | None:
        async with database.session().transaction() as transaction:
            transaction.durable = False
            return await transaction.send_later(messages)

    before = await notify()
    database.crash()
    assert not database.outbox
    assert await notify() != before


# --- trying again: waits that grow to a bound, on a clock of ours, and an end where a policy has one


class Recorded(SystemClock):
    """A clock that moves when something sleeps, at once."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


class Failing:
    """Fails so many times, and then answers."""

    def __init__(self, times: int, error: Exception | None = None) -> None:
        self.calls = 0
        self._times = times
        self._error = error or Transient("unavailable")

    async def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self._times:
            raise self._error
        return "answer"


EVEN = RetryPolicy(first_s=1.0, longest_s=5.0, least=1.0)


async def test_waits_are_doubled_to_the_longest() -> None:
    clock, reported = Recorded(), []
    answer = await Retrying(EVEN, clock).call(
        Failing(5), on_failure=lambda error, count: reported.append((str(error), count))
    )
    assert (answer, clock.slept) == ("answer", [1.0, 2.0, 4.0, 5.0, 5.0])
    assert reported == [("unavailable", number) for number in range(1, 6)]


async def test_waits_are_drawn_from_the_generator_that_is_given() -> None:
    policy = RetryPolicy(first_s=1.0, longest_s=4.0, least=0.5)

    async def waits(seed: int) -> list[float]:
        clock = Recorded()
        random.seed(clock.now)  # what the process's own generator draws is of no concern
        await Retrying(policy, clock, random.Random(seed)).call(Failing(6))
        return clock.slept

    drawn = await waits(1)
    assert drawn == await waits(1) != await waits(2)
    for bound, wait in zip([1.0, 2.0, 4.0, 4.0, 4.0, 4.0], drawn, strict=True):
        assert bound / 2 <= wait <= bound


@pytest.mark.parametrize(
    ("policy", "calls"),
    [
        pytest.param(RetryPolicy(first_s=1.0, longest_s=1.0, least=1.0, max_calls=3), 3, id="so often"),
        pytest.param(RetryPolicy(first_s=1.0, longest_s=1.0, least=1.0, max_calls=1), 1, id="once"),
        pytest.param(RetryPolicy(first_s=1.0, longest_s=1.0, least=1.0, lasts_s=2.5), 4, id="so long"),
        pytest.param(RetryPolicy(first_s=1.0, longest_s=1.0, least=1.0, lasts_s=0.0), 1, id="no time"),
    ],
)
async def test_a_bounded_policy_ends_with_the_fault(policy: RetryPolicy, calls: int) -> None:
    failing = Failing(100)
    with pytest.raises(Transient, match="unavailable"):
        await Retrying(policy, Recorded()).call(failing)
    assert failing.calls == calls


async def test_the_time_that_the_first_call_takes_counts() -> None:
    clock, calls = Recorded(), []

    async def call() -> None:
        calls.append(clock.now)
        clock.now += 3.0
        raise Transient("unavailable", code="database.unavailable")

    with pytest.raises(Transient):
        await Retrying(RetryPolicy(first_s=1.0, longest_s=1.0, least=1.0, lasts_s=2.5), clock).call(call)
    assert len(calls) == 1


async def test_an_unbounded_policy_stops_when_it_is_cancelled() -> None:
    task = asyncio.create_task(Retrying(EVEN, SystemClock()).call(Failing(10**9)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_does_not_pass_is_raised_at_once() -> None:
    for error in (BusForbidden("no"), Fault("strange"), ValueError("a bug")):
        failing = Failing(1, error)
        with pytest.raises(type(error)):
            await Retrying(EVEN, Recorded()).call(failing)
        assert failing.calls == 1
    assert is_transient(BusUnavailable("unavailable")) and not is_transient(asyncio.CancelledError())


async def test_a_fault_that_follows_one_that_passes_is_raised() -> None:
    faults = iter([Transient("unavailable"), ValueError("a bug")])

    async def call() -> None:
        raise next(faults)

    with pytest.raises(ValueError, match="a bug"):
        await Retrying(EVEN, Recorded()).call(call)


async def test_until_it_is_done_or_the_policy_ends() -> None:
    left = 3

    async def is_done() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    assert await Retrying(EVEN, Recorded()).until(is_done)
    assert not await Retrying(RetryPolicy(first_s=1.0, longest_s=1.0, least=1.0, max_calls=2), Recorded()).until(
        is_done
    )


async def test_a_loops_waits_are_short_again_after_a_success() -> None:
    clock = Recorded()
    backoff = Backoff(EVEN, clock)
    for _ in range(3):
        await backoff.wait()
    backoff.reset()
    await backoff.wait()
    assert clock.slept == [1.0, 2.0, 4.0, 1.0]


# --- The optimistic unit of work: what it caches.


class Server:
    """A server's rows; it crashes once it has answered the first write, and loses that."""

    def __init__(self) -> None:
        self.connection_losses = 0
        self.read_keys: list[str] = []

    async def flush(self) -> None:
        raise NotImplementedError

    async def read(self, keys: Collection[str]) -> Mapping[str, tuple[int, str]]:
        self.read_keys += keys
        return dict.fromkeys(keys, (7, "another process's"))

    async def write(self, writes: WriteSet) -> Committed:
        self.connection_losses += 1
        return Committed(7, ())


class Unit(OptimisticUnitOfWork[str, WriteSet]):
    async def put(self, key: str, row: str) -> None:
        await self._read([key])
        self._after[key] = row

    async def row(self, key: str) -> str:
        return (await self._read([key]))[key]


async def test_a_row_of_a_server_that_was_lost_before_its_answer_was_read_is_not_cached() -> None:
    """The server that follows gives the version again, for another row: the cached one would pass as that."""
    server = Server()
    cache: VersionCache[str] = VersionCache(server)
    async with Unit(server, cache, WriteSet(versions={}, outbox=[])) as unit:
        await unit.put("one", "its own")
    server.read_keys.clear()
    assert await Unit(server, cache, WriteSet(versions={}, outbox=[])).row("one") == "another process's"
    assert server.read_keys == ["one"]
