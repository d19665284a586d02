"""The follower on a real bus (in memory), against a feed that loses, repeats, swaps, trims and goes away."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bus.bus import Bus
from bus.contracts.feed import FeedChanges, feed_rows
from bus.memory import MemoryBroker, MemoryTransport
from placement_worker.replica import catch_up
from placement_worker.replica import follower as follower_of
from placement_worker.replica.catch_up import SnapshotEndless
from placement_worker.replica.follower import Follower
from placement_worker.replica.replica import Replica
from tests.integration.replica.source import ManualClock, Source, until
from tests.unit.replica.worlds import provider, used

HANG_S = 60.0


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catch_up, "PAGE", 4)
    monkeypatch.setattr(follower_of, "MAX_BUFFERED", 50)
    # Requests have the real time: a machine that stood still would make a second one of each.
    monkeypatch.setattr(follower_of, "REQUEST_TIMEOUT_S", HANG_S)


class Stage:
    def __init__(self, seed: int = 1) -> None:
        self.clock = ManualClock()
        self.rng = random.Random(seed)
        self.broker = MemoryBroker(self.clock)
        self.book = Replica()
        self.source = Source(self.bus("placement"), self.rng)

    def bus(self, process: str) -> Bus:
        return Bus("api", MemoryTransport(self.broker, "api"), process=process, clock=self.clock, rng=self.rng)

    def follower(self, bus: Bus) -> Follower:
        return Follower(bus, self.book, process="s1", clock=self.clock)

    def is_true(self) -> bool:
        return self.source.is_held_by(self.book)

    async def until_true(self) -> None:
        """Heads are published each second, as placement does, until placement is right."""
        for _ in range(60):
            await self.source.announce_head()
            for _ in range(300):
                if self.is_true():
                    return
                await asyncio.sleep(0)
            self.clock.advance(1.0)
        raise AssertionError(f"book at {self.book.sequence}, head {self.source.head}")


@asynccontextmanager
async def playing(stage: Stage) -> AsyncIterator[Follower]:
    await stage.source.bus.open()
    bus = stage.bus("s1")
    await bus.open()
    await stage.source.open()
    follower = stage.follower(bus)
    try:
        await follower.start()
        yield follower
    finally:
        await follower.close()
        await stage.source.close()
        await bus.close()
        await stage.source.bus.close()


@asynccontextmanager
async def following(stage: Stage) -> AsyncIterator[Follower]:
    """As `playing`, once it has read its snapshot."""
    async with playing(stage) as follower:
        await until(follower.ready.is_set, stage.clock)
        yield follower


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_snapshot_then_feed() -> None:
    stage = Stage()
    stage.source.write(50)
    stage.source.unpublished.clear()
    async with following(stage) as follower:
        assert stage.is_true()
        assert follower.ready.is_set()
        pages = stage.source.pages
        for _ in range(20):
            stage.source.write()
            await stage.source.notify()
        await until(lambda: follower.replica.sequence >= stage.source.head, stage.clock)
        assert stage.is_true()
        assert stage.source.pages == pages, "a whole feed needs no asking"


async def test_changes_while_the_snapshot_is_being_read() -> None:
    stage = Stage()
    stage.source.write(60)

    stage.source.on_page = lambda: stage.source.write(3)
    async with playing(stage) as follower:
        await until(lambda: stage.source.pages >= 3, stage.clock)
        await stage.source.notify()
        await until(lambda: stage.source.pages >= 6, stage.clock)
        stage.source.on_page = lambda: None
        await stage.source.notify()
        await until(follower.ready.is_set, stage.clock)
        await stage.until_true()
        assert stage.source.snapshots == 1


async def test_a_gap_is_requested_without_waiting_for_a_head() -> None:
    stage = Stage()
    async with following(stage):
        stage.source.lose(1)
        stage.source.write()
        await stage.source.notify()
        before = stage.clock.now
        await until(stage.is_true, stage.clock)
        assert stage.clock.now - before < follower_of.HEAD_LAG_S
        assert stage.source.snapshots == 1


async def test_a_silent_loss_shows_at_the_heads() -> None:
    stage = Stage()
    async with following(stage) as follower:
        stage.source.lose(10)
        await stage.source.announce_head()
        await until(lambda: follower.lag == 10, stage.clock)
        await stage.until_true()
        assert stage.source.snapshots == 1


async def test_silence_makes_it_ask() -> None:
    stage = Stage()
    async with following(stage):
        stage.source.lose(1)
        assert not stage.is_true()
        await until(stage.is_true, stage.clock)  # nothing is ever published
        assert stage.source.snapshots == 1


async def test_too_old_means_a_new_snapshot() -> None:
    stage = Stage()
    async with following(stage):
        stage.source.write(20)
        stage.source.trim()
        stage.source.unpublished.clear()
        await stage.until_true()
        assert stage.source.snapshots == 2


async def test_a_book_that_was_set_back_is_read_anew() -> None:
    stage = Stage()
    stage.source.write(40)
    async with following(stage) as follower:
        stage.source.begin_again()
        stage.source.write(5)
        await stage.source.notify()
        await stage.until_true()
        assert (stage.source.snapshots, follower.lag) == (2, 0)


async def test_a_cut_connection_is_caught_up() -> None:
    stage = Stage()
    async with following(stage) as follower:
        stage.broker.drop_connections()
        stage.source.lose(9)  # published while no listener was there
        before = stage.clock.now
        await until(stage.is_true, stage.clock)
        assert stage.clock.now - before < follower_of.HEAD_LAG_S
        stage.source.write()
        await stage.source.notify()
        await until(lambda: follower.replica.sequence >= stage.source.head, stage.clock)


async def test_placement_unavailable_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_of, "REQUEST_TIMEOUT_S", 0.01)
    stage = Stage()
    await stage.source.bus.open()
    bus = stage.bus("s1")
    await bus.open()
    follower = stage.follower(bus)
    await follower.start()
    stage.source.write()
    await stage.source.notify()
    assert not await follower.refresh(timeout_s=0.05)
    assert not follower.ready.is_set()
    await stage.source.open()
    await until(follower.ready.is_set, stage.clock)
    await stage.until_true()
    await follower.close()
    await stage.source.close()
    await bus.close()
    await stage.source.bus.close()


async def test_a_feed_that_never_rests_is_caught_up_with() -> None:
    """Every answer is followed by one more change, published before the answer arrives."""
    stage = Stage()
    async with following(stage):
        stage.source.lose(1)
        stage.source.busy = True
        stage.source.write()
        pages = stage.source.pages
        await stage.source.notify()
        await until(lambda: stage.source.pages > pages and stage.is_true(), stage.clock)
        await turns(1000)
        assert stage.is_true()
        assert stage.source.pages - pages == 1


async def test_what_cannot_be_folded_in_is_kept_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catch_up, "PAGE", 1000)
    monkeypatch.setattr(follower_of, "REQUEST_TIMEOUT_S", 0.01)
    stage = Stage()
    async with following(stage) as follower:
        await stage.source.close()  # no worker answers
        stage.source.write(200)
        lost, *rest = stage.source.unpublished
        most = 0
        for change in rest:
            await stage.source.bus.publish(FeedChanges(rows=feed_rows([change])))
            await until(lambda number=change.sequence: follower.lag >= number, stage.clock)  # type: ignore[misc]
            most = max(most, len(follower._kept))
        assert most == 50
        assert stage.book.sequence == lost.sequence - 1
        stage.source.reopen()
        await stage.source.open()
        await stage.until_true()


async def test_refresh_requests_at_once_and_many_share_it() -> None:
    stage = Stage()
    async with following(stage) as follower:
        stage.source.lose(1)
        pages = stage.source.pages
        assert all(await asyncio.gather(*(follower.refresh(timeout_s=HANG_S) for _ in range(50))))
        assert stage.is_true()
        assert stage.source.pages - pages <= 2


async def test_a_claim_result_before_and_after_its_change() -> None:
    """The claim counts once at every moment: assumed until the feed has it, used from then on."""
    stage = Stage()
    state = provider(0, generation=3, inventories={"VCPU": 8})
    stage.source.states[state.uuid] = state
    async with following(stage) as follower:
        replica, published = stage.book, []
        roots = replica.rows_of_roots()
        follower.on_change(lambda: published.append(int(replica.free("VCPU", roots)[0])))
        replica.assume("boot", {state.uuid: {"VCPU": 2}})
        assert replica.free("VCPU", roots)[0] == 6
        replica.confirm("boot", {state.uuid: 4})
        assert replica.free("VCPU", roots)[0] == 6
        await stage.source.bus.publish(FeedChanges(rows=feed_rows([used(1, 0, 4, {"VCPU": 2})])))
        await until(lambda: replica.sequence == 1, stage.clock)
        assert replica.free("VCPU", roots)[0] == 6
        assert list(replica.assumptions.keys()) == []
        assert set(published) == {6}


async def test_a_snapshot_without_end_stops_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catch_up, "PAGE", 1)
    monkeypatch.setattr(catch_up, "MAX_PAGES", 3)
    stage = Stage()
    stage.source.write(100)
    async with playing(stage) as follower:
        with pytest.raises(SnapshotEndless):
            async with asyncio.timeout(HANG_S):
                await follower.run()


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_happens_it_ends_true(seed: int) -> None:
    stage = Stage(seed)
    rng = random.Random(seed)
    async with playing(stage) as follower:
        for _ in range(60):
            for _ in range(rng.randrange(8)):
                stage.source.write()
            what = rng.random()
            if what < 0.05:
                stage.broker.drop_connections()
            elif what < 0.1:
                stage.source.trim()
            elif what < 0.2:
                await stage.source.announce_head()
            if rng.random() < 0.7:
                await stage.source.announce_badly()
            await turns(rng.randrange(20))
            stage.clock.advance(rng.random() / 2)
        await stage.until_true()
        assert follower.ready.is_set()
        assert not follower._kept


@pytest.mark.parametrize("announced", ["changes", "head", "nothing"])
@pytest.mark.parametrize("more", [-5, 0, 5])
async def test_a_book_that_was_set_back_is_taken_anew_however_far_it_has_come_since(announced: str, more: int) -> None:
    """Its numbers were given again: a replica that was at 20 took 21 to 25 and dropped what was before, for good."""
    stage = Stage()
    stage.source.write(20)
    async with following(stage) as follower:
        await stage.until_true()
        snapshots = stage.source.snapshots
        stage.source.begin_again()
        stage.source.write(20 + more)
        if announced == "changes":
            await stage.source.notify()
        elif announced == "head":
            stage.source.unpublished.clear()
            await stage.source.announce_head()
        else:
            stage.source.unpublished.clear()
            asking = asyncio.create_task(follower.refresh(timeout_s=HANG_S))
            await until(asking.done, stage.clock)
            assert asking.result()
        await until(stage.is_true, stage.clock)
        assert stage.source.snapshots == snapshots + 1
        assert stage.book.incarnation == "h2"


async def test_a_settled_claim_of_another_history_is_not_waited_for() -> None:
    stage = Stage()
    state = provider(0, generation=3, inventories={"VCPU": 8})
    stage.source.states[state.uuid] = state
    async with following(stage):
        stage.book.assume("boot", {state.uuid: {"VCPU": 2}})
        stage.book.confirm("boot", {state.uuid: 400}, 500)
        stage.source.begin_again()
        stage.source.states[state.uuid] = state
        await stage.source.announce_head()
        await until(lambda: stage.book.incarnation == "h2", stage.clock)
        assert list(stage.book.assumptions.keys()) == []


@pytest.mark.parametrize("announced", ["changes", "head"])
async def test_a_book_that_was_set_back_is_noticed_by_its_feed_alone(announced: str) -> None:
    stage = Stage()
    stage.source.write(20)
    async with following(stage):
        await stage.until_true()
        snapshots = stage.source.snapshots
        stage.source.begin_again()
        stage.source.lose(20)
        for _ in range(200):  # a busy feed: never silent, never behind
            if announced == "changes":
                stage.source.write()
                await stage.source.notify()
            else:
                await stage.source.announce_head()
            await turns(20)
            stage.clock.advance(0.1)
        assert stage.source.snapshots == snapshots + 1
        assert stage.book.incarnation == "h2"


@pytest.mark.parametrize("later", [0, 3], ids=["no change since", "changes since"])
async def test_a_book_that_was_set_back_while_it_was_read_gets_no_change_of_before(later: int) -> None:
    """Changes that came before belong to numbers which placement has given again."""
    stage = Stage()
    source = stage.source
    source.write(60)
    source.unpublished.clear()
    announced_soon: list[asyncio.Task[None]] = []

    def on_page() -> None:
        if source.pages == 1:
            source.write(5)  # 61 to 65, of the former incarnation: kept until the snapshot is read
            announced_soon.append(asyncio.create_task(source.notify()))
        elif source.pages == 4:
            source.begin_again()
            source.write(60)
            source.unpublished.clear()
            source.write(later)  # 61 to 63, of the new one
            announced_soon.append(asyncio.create_task(source.notify()))

    source.on_page = on_page
    async with following(stage):
        await asyncio.gather(*announced_soon)
        for _ in range(100):
            await source.announce_head()
            await turns(20)
            stage.clock.advance(0.1)
        assert stage.book.incarnation == "h2"
        assert stage.is_true(), (stage.book.sequence, source.head)


@pytest.mark.parametrize(("process", "queue"), [("s1", "scheduler.feed.s1"), (None, "scheduler.feed.bus-1")])
async def test_a_follower_has_the_queue_of_the_process_that_it_is_for(process: str | None, queue: str) -> None:
    stage = Stage()
    bus = stage.bus("bus-1")
    await bus.open()
    follower = Follower(bus, stage.book, process=process, clock=stage.clock)
    await follower.start()
    assert follower._consumer.queue == queue and await bus.transport.depth(queue) == 0
    await follower.close()
    await bus.close()
