"""A stand-in for placement's feed: a true list of changes, and an announcer that can be made to lie and lose."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from msgspec import structs

from bus.bus import Bus
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.feed import (
    Change,
    ChangesPage,
    ChangesRequest,
    FeedChanges,
    FeedHead,
    SnapshotPage,
    SnapshotRequest,
    feed_rows,
)
from bus.contracts.placement import ProviderState
from placement_worker.replica.replica import Replica
from tests.unit.replica.worlds import inventory, uuid


class ManualClock:
    """Time that moves when a test moves it."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def time(self) -> float:
        return 1_700_000_000.0 + self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now + seconds, waiter))
        await waiter

    def advance(self, seconds: float) -> None:
        self.now += seconds
        due = [waiter for at, waiter in self._sleepers if at <= self.now]
        self._sleepers = [(at, waiter) for at, waiter in self._sleepers if at > self.now]
        for waiter in due:
            if not waiter.done():
                waiter.set_result(None)


async def until(is_met: Callable[[], bool], clock: ManualClock, *, turns: int = 20_000) -> None:
    """Turn the loop, time creeping on, until it is so."""
    for turn in range(turns):
        if is_met():
            return
        await asyncio.sleep(0)
        if turn % 20 == 19:
            clock.advance(0.05)
    raise AssertionError("it never came true")


class Source:
    """The truth, and what is published of it."""

    def __init__(self, bus: Bus, rng: random.Random) -> None:
        self.bus = bus
        self.rng = rng
        self.states: dict[str, ProviderState] = {}
        self.changes: list[Change] = []
        self.first = 1  # the oldest number still kept
        self.incarnation = "h1"
        self.snapshots = self.pages = 0
        self.on_page: Callable[[], None] = lambda: None
        self.busy = False  # each answer is followed by one more change, published before the answer is sent
        self.unpublished: list[Change] = []
        self._consumer = Consumer(bus, "placement.reads", self._answer)

    def reopen(self) -> None:
        """A new consumer, after close()."""
        self._consumer = Consumer(self.bus, "placement.reads", self._answer)

    async def open(self) -> None:
        await self._consumer.start()

    async def close(self) -> None:
        await self._consumer.drain(0.0)

    @property
    def head(self) -> int:
        return self.first - 1 + len(self.changes)

    def trim(self) -> None:
        """Forget all old changes."""
        self.first, self.changes = self.head + 1, []

    def begin_again(self) -> None:
        """The database was set back: other providers, lower numbers."""
        self.states, self.changes, self.first, self.unpublished = {}, [], 1, []
        self.incarnation = f"h{int(self.incarnation[1:]) + 1}"

    def write(self, count: int = 1) -> None:
        """Random committed changes."""
        for _ in range(count):
            self._write()

    def lose(self, count: int) -> None:
        """Random committed changes that nobody publishes, nor what was to be published before."""
        self.write(count)
        self.unpublished.clear()

    def _write(self) -> None:
        number = self.rng.randrange(30)
        root = number - number % 3
        old = self.states.get(uuid(number))
        if old is not None and self.rng.random() < 0.15:
            del self.states[old.uuid]
            self._commit(Change(sequence=0, provider=old.uuid, generation=old.generation + 1, removed=True))
        elif old is not None and self.rng.random() < 0.7:
            amounts = {"VCPU": self.rng.randint(0, 9)}
            state = structs.replace(old, generation=old.generation + 1, used=amounts)
            self.states[old.uuid] = state
            self._commit(Change(sequence=0, provider=old.uuid, generation=state.generation, used=amounts))
        else:
            state = ProviderState(
                uuid=uuid(number),
                name=f"p{number}",
                root_uuid=uuid(root),
                parent_uuid=None if number == root else uuid(root),
                generation=0 if old is None else old.generation + 1,
                spec_generation=0 if old is None else old.spec_generation + 1,
                inventories={"VCPU": inventory(self.rng.randint(1, 9))},
                used={} if old is None else old.used,
                traits=tuple(sorted(self.rng.sample(("T1", "T2", "T3"), 2))),
            )
            self.states[state.uuid] = state
            self._commit(Change(sequence=0, provider=state.uuid, generation=state.generation, state=state))

    def _commit(self, change: Change) -> None:
        change = structs.replace(change, sequence=self.head + 1)
        self.changes.append(change)
        self.unpublished.append(change)

    async def notify(self) -> None:
        """Announce what is committed and not yet published, as placement does."""
        unpublished, self.unpublished = self.unpublished, []
        if unpublished:
            await self.bus.publish(FeedChanges(rows=feed_rows(unpublished), incarnation=self.incarnation))

    async def announce_badly(self) -> None:
        """Lose, repeat or swap some of it."""
        unpublished, self.unpublished = self.unpublished, []
        parts = [unpublished[at : at + 3] for at in range(0, len(unpublished), 3)]
        if self.rng.random() < 0.5:
            self.rng.shuffle(parts)
        for part in parts:
            for _ in range(self.rng.choice((0, 1, 1, 1, 2))):
                await self.bus.publish(FeedChanges(rows=feed_rows(part), incarnation=self.incarnation))

    async def announce_head(self) -> None:
        await self.bus.publish(FeedHead(sequence=self.head, incarnation=self.incarnation))

    async def _answer(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        replies = [Done(self._page(received.message)) for received in batch]
        if self.busy:
            self.write()
            await self.notify()
        return replies

    def _page(self, request: object) -> ChangesPage | SnapshotPage:
        self.on_page()
        self.pages += 1
        if isinstance(request, ChangesRequest):
            if request.after < self.first - 1 or request.incarnation not in ("", self.incarnation):
                return ChangesPage(head=self.head, too_old=True, incarnation=self.incarnation)
            at = request.after - self.first + 1
            rows = feed_rows(self.changes[at : at + request.limit])
            return ChangesPage(head=self.head, rows=rows, incarnation=self.incarnation)
        assert isinstance(request, SnapshotRequest)
        self.snapshots += request.after is None
        left = sorted(one for one in self.states if request.after is None or one > request.after)
        return SnapshotPage(
            sequence=self.head,
            providers=tuple(self.states[one] for one in left[: request.limit]),
            more=len(left) > request.limit,
            incarnation=self.incarnation,
        )

    def is_held_by(self, replica: Replica) -> bool:
        """Whether placement holds just what is true."""
        if replica.sequence != self.head or len(replica) != len(self.states):
            return False
        return all(_same(replica, state) for state in self.states.values())


def _same(replica: Replica, state: ProviderState) -> bool:
    row = replica.row_of(state.uuid)
    if row is None:
        return False
    announced = {name: (numbers.capacity, used) for name, (numbers, used, _) in replica.inventory_of(row).items()}
    true = {name: (int(numbers[0]), state.used.get(name, 0)) for name, numbers in state.inventories.items()}
    return (
        announced == true
        and replica.traits_of(row) == state.traits
        and replica.generation[row] == state.generation
        and replica.spec_generation_of(row) == state.spec_generation
        and replica.uuid_of(replica.root_of(row)) == state.root_uuid
    )
