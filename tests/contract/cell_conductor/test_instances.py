"""One suite for both stores of a cell's instances, the outbox and handled messages included."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import product, starmap

import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.contracts.actions import ActionKind
from bus.contracts.base import SENT_SLOTS, DatabaseMark
from bus.contracts.build import AttemptRecord
from bus.contracts.cell import CellDelete, HostReport, HostStates, InstanceSpec, Running, Selection
from bus.contracts.operations import Losses
from bus.faults import DatabaseReplaced, DatabaseUnavailable, Transient
from bus.persistence.database import Database
from bus.persistence.guarded_statement import Conflict
from bus.persistence.outbox import OutboxMessage, Sweep
from cell_conductor.config import ConductorConfig
from cell_conductor.reports.report_diff import Differences, differences
from cell_conductor.state.database_marks import NOTHING, Stated, is_behind
from cell_conductor.state.desired_state import PURGEABLE, PURGEABLE_FAILED
from cell_conductor.state.events import InstanceEvent, ServiceLost
from cell_conductor.state.instance import MACHINE_EXISTS, ActionInProgress, Instance, State
from cell_conductor.state.unknown_machine import UnknownMachine, UnknownMachineKind
from cell_conductor.store.keyed import DatabaseOutdated, Recovering, Unrecognised
from cell_conductor.store.keyed_tables import ADOPT, DESTROY, PROTECT, DecidedMachine
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable
from cell_conductor.store.port import InstanceStore, UnreadableRecords
from cell_conductor.store.postgres import PostgresInstances, PostgresTransaction
from lab.simulation.watch import failed_steps
from tests.kit.waiting import until
from tests.unit.cell_conductor.world import Queried, Relay, engine_of

Make = Callable[[], InstanceStore]
A, B, C, D = (f"{n}0000000-0000-4000-8000-000000000000" for n in "abcd")
HOST = "10000000-0000-4000-8000-000000000000"
SPEC = InstanceSpec(instance_uuid=A, project_id="p")
MESSAGES = [OutboxMessage("c1", CellDelete(instance_uuid=A, project_id="p"), "why")]


@pytest.fixture(params=["memory", pytest.param("postgres", marks=pytest.mark.postgres)])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    """Another store on the same instances, as another conductor has it."""
    made: list[InstanceStore] = []
    table = MemoryInstanceTable(SystemClock())
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else ""

    def another() -> InstanceStore:
        made.append(MemoryInstances(table.session()) if not url else PostgresInstances(Database(url, "cell_c1")))
        return made[-1]

    yield another
    for store in made:
        await store.close()


@pytest.fixture
async def store(make: Make) -> InstanceStore:
    made = make()
    assert not made.ready
    await made.open()
    assert made.ready
    return made


def instance(
    uuid: str, state: State = State.BUILDING, deadline: float | None = None, next_state: State | None = None
) -> Instance:
    here = Selection(host_uuid=HOST, host="h", service="s", allocations={HOST: {"VCPU": 1}})
    return Instance(
        uuid=uuid,
        state=state,
        next_state=next_state,
        spec=SPEC,
        selections=(here,),
        attempt=1,
        deadline=deadline,
        since=3.0,
    )


async def restored(store: InstanceStore) -> None:
    """As an operator restores a backup into another cluster."""
    if isinstance(store, MemoryInstances):
        store._table.place += 1
        return
    assert isinstance(store, PostgresInstances)
    async with store._database.raw() as connection:
        await connection.execute("UPDATE identity SET origin = 'another cluster'")


async def recovered(store: InstanceStore) -> None:
    """Its set-back is recognised, and nothing was found out by that."""
    async with store.transaction() as transaction:
        assert await transaction.recognise() is not None
    async with store.transaction() as transaction:
        await transaction.expect_recovering()
        await transaction.end_recovery()


async def insert(store: InstanceStore, *instances: Instance) -> None:
    async with store.transaction() as transaction:
        await transaction.insert(instances)


async def recorded(store: InstanceStore) -> dict[str, Instance]:
    async with store.transaction() as transaction:
        return await transaction.lock([A, B, C])


async def test_a_nul_in_the_words_of_a_host_leaves_the_records_readable(make: Make) -> None:
    """PostgreSQL reads no record with U+0000 as JSON, nor those beside it."""
    store = make()
    await store.open()
    failed = AttemptRecord(attempt=1, host="h", outcome="failed", code="x", reason="disk\x00 \\u0000", at=1.0)
    await insert(store, replace(instance(A), history=(failed,)), instance(B, State.ACTIVE))
    assert {one.uuid for one in await store.summaries([], [A, B])} == {A, B}
    await restored(store)
    async with store.transaction() as transaction:
        assert await transaction.recognise() is not None
    (record,) = (await recorded(store))[A].history
    assert record.reason.replace("\x00", "") == "disk \\u0000"


@pytest.mark.parametrize(
    ("stated", "started"),
    [
        (NOTHING, 2),
        (Stated((DatabaseMark(1, (9,)),)), 2),
        (Stated((DatabaseMark(2),)), 3),
        (Stated((DatabaseMark(2, (3,)), DatabaseMark(7))), 8),
        (Stated(conductor=4), 5),
    ],
)
async def test_a_set_back_begins_an_incarnation_above_every_known_one(make: Make, stated: Stated, started: int) -> None:
    one, other = make(), make()
    await one.open()
    await other.open()
    assert one.incarnation == 1
    await restored(one)
    with pytest.raises(Unrecognised):  # it is not known yet which ones there were
        async with one.transaction() as transaction:
            await transaction.recognise(replace(stated, is_known=False))
    async with one.transaction() as transaction:
        change = await transaction.recognise(stated)
        assert one.incarnation == 1, "it is none before it is on record"
    assert change is not None and change.incarnation == one.incarnation == started
    assert await other.has_due(0.0)
    with pytest.raises(Recovering):
        async with other.transaction() as transaction:
            await transaction.recognise(stated)
    third = make()
    await third.open()
    assert (other.incarnation, third.incarnation) == (started, started)
    assert other.is_recovering
    await restored(one)
    async with third.transaction() as transaction:
        again = await transaction.recognise()
    assert again is not None and again.incarnation == started + 1, "as this process knows"


async def test_a_cell_that_recovers_takes_no_step_but_those_of_its_recovery(make: Make) -> None:
    one, other = make(), make()
    await one.open()
    await other.open()
    await insert(one, instance(A))
    async with one.transaction() as transaction:
        await transaction.send_later(MESSAGES)
    for store in (one, other, one):  # what has begun goes on
        async with store.transaction() as transaction:
            assert await transaction.begin_recovery(Stated((DatabaseMark(6),))) == 7
    assert one.is_recovering and one.incarnation == 7
    assert await one.outbox.claim_stale(Sweep(0.0, 10)) == []
    assert await other.has_due(0.0)
    for store in (one, other):
        with pytest.raises(Recovering):
            async with store.transaction() as transaction:
                await transaction.recognise()
        with pytest.raises(Conflict):
            async with store.optimistic({B}) as optimistic:
                await optimistic.lock([B])
                await optimistic.insert([instance(B)])
    async with one.transaction() as transaction:
        await transaction.expect_recovering()
        await transaction.lock([A])
        await transaction.update([instance(A, State.ACTIVE)])
        await transaction.end_recovery()
    assert not one.is_recovering
    with pytest.raises(Unrecognised):
        async with one.transaction() as transaction:
            await transaction.expect_recovering()
    for store in (one, other):
        async with store.transaction() as transaction:
            assert await transaction.recognise() is None
        assert not store.is_recovering and store.incarnation == 7
    assert (await recorded(other))[A].state is State.ACTIVE


async def test_a_recovery_waits_for_the_word_on_what_it_would_lose(make: Make) -> None:
    one, operator = make(), make()
    await one.open()
    await operator.open()
    seen, later = Losses(2, (A, B)), Losses(3, (A, B, C))

    async def accepts(losses: Losses) -> bool:
        async with operator.transaction() as transaction:
            return await transaction.accept_losses(losses, one.incarnation)

    async def accepted() -> int:
        async with one.transaction() as transaction:
            await transaction.expect_recovering()
            return await transaction.accepted_losses()

    async def stops(losses: Losses) -> None:
        async with one.transaction() as transaction:
            await transaction.expect_recovering()
            await transaction.stop_recovery(losses)

    assert not await accepts(Losses())
    async with one.transaction() as transaction:
        await transaction.begin_recovery()
    assert not await accepts(Losses()) and not await accepts(seen)
    await stops(seen)
    assert await accepted() == 0 and not await accepts(later)
    assert await accepts(seen) and not await accepts(seen)
    assert await accepted() == 2 and await operator.has_due(0.0)
    await stops(later)
    assert await accepted() == 0, "it was the word on others"
    assert await accepts(later)
    async with one.transaction() as transaction:
        await transaction.expect_recovering()
        await transaction.end_recovery()
    async with one.transaction() as transaction:
        await transaction.begin_recovery()
    assert await accepted() == 0 and not await accepts(later), "of the recovery before"


async def test_services_that_have_not_listed_are_kept_until_they_have(make: Make) -> None:
    one, operator = make(), make()
    await one.open()
    await operator.open()

    async def absent() -> dict[str, bool]:
        async with one.transaction() as transaction:
            return await transaction.absent_services()

    async def ends(silent: Sequence[str], without: Sequence[str] = ()) -> None:
        async with one.transaction() as transaction:
            await transaction.begin_recovery()
        async with operator.transaction() as transaction:
            assert await transaction.state_without("s3")
        async with one.transaction() as transaction:
            await transaction.expect_recovering()
            await transaction.end_recovery(silent, without)

    assert await absent() == {}
    await ends(["s1", "s2", "s3"], ["s4"])
    assert await absent() == {"s1": False, "s2": False, "s3": True, "s4": True}
    async with operator.transaction() as transaction:
        assert await transaction.state_without("s1")
    async with one.transaction() as transaction:
        await transaction.record_listed({"s2", "s9"})
    assert await absent() == {"s1": True, "s3": True, "s4": True}
    await restored(one)
    async with one.transaction() as transaction:
        await transaction.recognise(Stated(is_whole=True))
    assert len(await absent()) == 3, "another server took over"
    await ends(["s1"])
    assert await absent() == {"s1": False}, "s3 has listed, whatever was said"


async def test_a_recovery_that_is_set_back_itself_begins_anew(store: InstanceStore) -> None:
    for started in (2, 3):
        await restored(store)
        async with store.transaction() as transaction:
            assert await transaction.begin_recovery() == started
    assert store.is_recovering


async def test_instances_are_listed_in_the_order_of_their_uuids(store: InstanceStore) -> None:
    await insert(store, instance(C), instance(A), instance(B))
    ranges = [("", "", 9), ("", "", 2), (A, "", 9), (A, B, 9), (C, "", 9)]
    assert [await store.uuids(*one) for one in ranges] == [[A, B, C], [A, B], [B, C], [B], []]


async def lose_commits(store: InstanceStore) -> None:
    """The database has less than has left it."""
    if isinstance(store, PostgresInstances):
        async with store._database.raw() as connection:
            await connection.execute("UPDATE sent SET sequence = 0")
    else:
        store._table.sent = (0,) * SENT_SLOTS  # type: ignore[attr-defined]


async def changed(store: InstanceStore, uuid: str, *, durable: bool = True, locking: bool = False) -> None:
    """One commit."""
    async with store.transaction() if locking else store.optimistic(()) as transaction:
        known = (await transaction.lock([uuid]))[uuid]
        transaction.durable = durable or locking
        await transaction.update([replace(known, attempt=known.attempt + 1, highest_attempt=known.attempt + 1)])
        await transaction.send_later(MESSAGES)


async def test_each_commit_that_waits_for_the_disk_raises_a_counter_by_one(make: Make) -> None:
    one, other = make(), make()
    await one.open()
    await other.open()
    await insert(one, instance(A))
    assert one.mark == DatabaseMark(1, (1,)) and other.mark == DatabaseMark(1)
    for store, durable, locking, number in (
        (one, True, False, 2),
        (one, False, False, 2),
        (other, True, False, 3),
        (one, True, True, 4),
    ):
        await changed(store, A, durable=durable, locking=locking)
        assert store.mark == DatabaseMark(1, (number,))
        recorded = await other.recorded_marks()
        assert recorded.own.sent_sequences == (number, *[0] * (SENT_SLOTS - 1))
    await restored(one)
    async with one.transaction() as transaction:
        assert await transaction.recognise() is not None
    assert one.mark == DatabaseMark(2, (4,))
    assert other.mark == DatabaseMark(1, (3,))
    await changed(one, A, locking=True)
    recorded = await one.recorded_marks()
    assert one.mark == DatabaseMark(2, (5,)) and not recorded.own.is_above(one.mark)
    assert recorded.ended == {}


async def test_commits_at_once_raise_counters_of_their_own_and_do_not_wait(make: Make) -> None:
    one, other = make(), make()
    await one.open()
    await other.open()
    await insert(one, instance(A), instance(B))
    async with one.transaction() as transaction:
        await transaction.update([replace((await transaction.lock([A]))[A], attempt=2)])
        await changed(other, B)
        assert other.mark == DatabaseMark(1, (0, 1)) and one.mark == DatabaseMark(1, (1,)), "it has not committed"
    assert one.mark == DatabaseMark(1, (2,))
    await changed(one, B)
    assert one.mark == DatabaseMark(1, (3,))
    assert (await one.recorded_marks()).own.sent_sequences[:3] == (3, 1, 0)


async def test_what_is_rolled_back_raises_no_counter(store: InstanceStore) -> None:
    await insert(store, instance(A))
    with pytest.raises(ZeroDivisionError):
        async with store.transaction() as transaction:
            await transaction.update(list((await transaction.lock([A])).values()))
            raise ZeroDivisionError
    with pytest.raises(Conflict):
        async with store.optimistic({A}) as optimistic:  # which is on record
            await optimistic.insert([instance(A)])
    assert store.mark == DatabaseMark(1, (1,))
    assert not (await store.recorded_marks()).own.is_above(store.mark)


async def test_more_commits_at_once_than_counters_are_all_counted(make: Make) -> None:
    store = make()
    await store.open()
    uuids = [f"{number:08d}-0000-4000-8000-000000000000" for number in range(2 * SENT_SLOTS)]
    await insert(store, *map(instance, uuids))
    times = 20

    async def commits(number: int, uuid: str) -> None:
        for _ in range(times):
            await changed(store, uuid, locking=number % 2 == 0)

    await asyncio.gather(*starmap(commits, enumerate(uuids)))
    recorded = (await store.recorded_marks()).own
    assert sum(store.mark.sent_sequences) == 1 + times * len(uuids)
    assert not recorded.is_above(store.mark) and not store.mark.is_above(recorded)


@pytest.mark.parametrize("durable", [one for length in range(6) for one in product((False, True), repeat=length)])
async def test_a_crash_of_the_database_never_leaves_it_behind_what_was_stated(durable: Sequence[bool]) -> None:
    table = MemoryInstanceTable(SystemClock())
    store = MemoryInstances(table.session())
    await store.open()
    await insert(store, instance(A))
    for one in durable:
        await changed(store, A, durable=one)
    table.crash()
    assert not is_behind(await store.recorded_marks(), store.mark)
    assert store.mark == DatabaseMark(1, (1 + sum(durable),))


@pytest.mark.parametrize("marks", [(), (DatabaseMark(2),)])
async def test_an_old_copy_of_the_database_is_left_where_another_conductor_goes_by_a_later_one(
    store: InstanceStore, marks: tuple[DatabaseMark, ...]
) -> None:
    with pytest.raises(DatabaseOutdated):
        async with store.transaction() as transaction:
            await transaction.recognise(Stated(marks, conductor=2))
    async with store.transaction() as transaction:
        assert await transaction.recognise(Stated(conductor=1)) is None
    assert store.incarnation == 1


@pytest.mark.parametrize("mark", [DatabaseMark(1, (2,)), DatabaseMark(1, (0, 1)), DatabaseMark(5, (1,))])
async def test_a_mark_above_what_is_on_record_begins_a_recovery_once(make: Make, mark: DatabaseMark) -> None:
    """A volume was copied back under the running server."""
    one, other = make(), make()
    await one.open()
    await other.open()
    await insert(one, instance(A))
    stated = Stated((mark,), is_whole=True)
    with pytest.raises(Unrecognised):  # another conductor may be heard yet
        async with one.transaction() as transaction:
            await transaction.recognise(replace(stated, is_known=False))
    async with one.transaction() as transaction:
        change = await transaction.recognise(stated)
    started = mark.database_incarnation + 1
    assert change is not None and (change.incarnation, change.recovers) == (started, True)
    for store in (one, other):
        with pytest.raises(Recovering):
            async with store.transaction() as transaction:
                await transaction.recognise(stated)
        assert not is_behind(store.recorded, mark)
    async with one.transaction() as transaction:
        await transaction.expect_recovering()
        await transaction.end_recovery()
    later = Stated((DatabaseMark(mark.database_incarnation, (9,)),))
    for store, again in product((one, other), (stated, later)):  # by whoever knows nothing else: it is settled
        async with store.transaction() as transaction:
            assert await transaction.recognise(again) is None
    await restored(one)
    async with one.transaction() as transaction:
        assert await transaction.recognise(Stated(is_whole=True)) is not None
    async with other.transaction() as transaction:
        change = await transaction.recognise(Stated((DatabaseMark(started, (9,)),)))
    assert change is not None and (change.incarnation, change.recovers) == (started + 2, True)


async def test_a_conductor_that_was_paused_through_a_recovery_begins_no_other(make: Make) -> None:
    """What it knows to be on disk, nobody else has heard of."""
    one, other = make(), make()
    await one.open()
    await other.open()
    await insert(one, instance(A))
    await changed(other, A)
    await lose_commits(one)
    async with one.transaction() as transaction:
        assert await transaction.begin_recovery() == 2
        await transaction.end_recovery()
    assert other.mark == DatabaseMark(1, (2,))
    async with other.transaction() as transaction:
        assert await transaction.recognise() is None
    assert other.incarnation == 2


async def test_a_mark_above_that_is_heard_amid_a_recovery_begins_it_anew(store: InstanceStore) -> None:
    async with store.transaction() as transaction:
        assert await transaction.begin_recovery() == 2
    later = Stated((DatabaseMark(4, (1,)),))
    async with store.transaction() as transaction:
        assert await transaction.begin_recovery() == 2
    async with store.transaction() as transaction:
        assert await transaction.begin_recovery(later) == 5
    async with store.transaction() as transaction:
        assert await transaction.begin_recovery(later) == 5
    assert store.is_recovering


@pytest.mark.parametrize(("is_recovering", "conductor"), [(False, 0), (True, 0), (False, 9)])
async def test_another_server_that_lacks_nothing_goes_on_under_the_next_incarnation(
    make: Make, *, is_recovering: bool, conductor: int
) -> None:
    one, other = make(), make()
    await one.open()
    await other.open()
    await insert(one, instance(A))
    async with one.transaction() as transaction:
        await transaction.send_later(MESSAGES)
    if is_recovering:
        async with one.transaction() as transaction:
            await transaction.begin_recovery()
    await restored(one)
    number = max(one.incarnation, conductor) + 1  # which a later one commands by lacks something
    known = Stated(is_whole=True, conductor=conductor)
    async with one.transaction() as transaction:
        change = await transaction.recognise(known)
    assert change is not None and (change.incarnation, change.recovers) == (number, is_recovering or conductor > 0)
    assert one.is_recovering is change.recovers
    if change.recovers:
        return
    assert len(await one.outbox.claim_stale(Sweep(-60.0, 10))) == len(MESSAGES), "what was ordered is ordered"
    for store in (one, other):
        async with store.transaction() as transaction:
            assert await transaction.recognise(known) is None
        assert store.incarnation == number and not store.is_recovering
    assert not is_behind(other.recorded, DatabaseMark(1, (1,))) and is_behind(other.recorded, DatabaseMark(1, (2,)))


async def test_what_is_decided_by_the_incarnation_before_is_not_recorded(make: Make) -> None:
    """Its counter would be above what that incarnation ended with."""
    one, other = make(), make()
    await one.open()
    await other.open()
    await insert(one, instance(A), instance(B))
    async with one.transaction() as transaction:
        await transaction.begin_recovery()
    with pytest.raises(Unrecognised):
        async with other.transaction() as transaction:
            await transaction.update([replace((await transaction.lock([A]))[A], attempt=2)])
    assert (await recorded(one))[A].attempt == 1
    assert other.mark == DatabaseMark(1) and not is_behind(await one.recorded_marks(), other.mark)


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_copy_put_back_under_a_conductor_that_knows_a_later_one_recovers_once_others_would_have_been_heard(
    store: InstanceStore, *, is_known: bool
) -> None:
    await restored(store)
    async with store.transaction() as transaction:
        await transaction.recognise()
    assert store.incarnation == 2
    if isinstance(store, PostgresInstances):
        async with store._database.raw() as connection:
            await connection.execute("UPDATE identity SET database_incarnation = 1")
    else:
        store._table.incarnation = 1  # type: ignore[attr-defined]
    assert await store.has_due(0.0)
    with pytest.raises(DatabaseOutdated):
        async with store.transaction() as transaction:
            await transaction.recognise(Stated(conductor=2, is_known=is_known))
    with pytest.raises(Unrecognised) if not is_known else contextlib.nullcontext():
        async with store.transaction() as transaction:
            await transaction.recognise(Stated(is_known=is_known))
    assert store.incarnation == 2 + is_known


async def test_a_copy_that_lacks_what_a_conductor_has_read_is_one_that_was_set_back(make: Make) -> None:
    """The commits were those of the conductor before it."""
    one, other = make(), make()
    await one.open()
    await other.open()
    await insert(one, instance(A))
    async with other.transaction() as transaction:
        assert await transaction.recognise() is None
    await lose_commits(one)
    async with other.transaction() as transaction:
        change = await transaction.recognise(Stated(is_whole=True))
    assert change is not None and change.recovers


async def test_what_is_recorded_is_found_again_as_it_was(store: InstanceStore) -> None:
    one = instance(A, deadline=7.0)
    await insert(store, one)
    assert await recorded(store) == {A: one}
    async with store.transaction() as transaction:
        await transaction.lock([A])
        await transaction.update([replace(one, state=State.ACTIVE)])
    assert (await recorded(store))[A].state is State.ACTIVE


async def test_an_exception_leaves_nothing_behind(store: InstanceStore) -> None:
    with pytest.raises(RuntimeError):
        async with store.transaction() as transaction:
            await transaction.first_time(["m1"])
            await transaction.insert([instance(A)])
            await transaction.send_later(MESSAGES)
            raise RuntimeError
    assert await recorded(store) == {}
    assert await store.outbox.claim_stale(Sweep(0.0, 10)) == []
    async with store.transaction() as transaction:
        assert await transaction.first_time(["m1"]) == {"m1"}


async def test_the_second_of_two_records_gets_the_conflict(store: InstanceStore) -> None:
    await insert(store, instance(A))
    with pytest.raises(Conflict):
        await insert(store, instance(A), instance(B))
    assert list(await recorded(store)) == [A]


async def test_a_locked_instance_is_waited_for_and_seen_as_it_became(make: Make, store: InstanceStore) -> None:
    other = make()
    await other.open()
    await insert(store, instance(A))
    async with store.transaction() as transaction:
        await transaction.lock([A])
        waiting = asyncio.create_task(recorded(other))
        await asyncio.wait([waiting], timeout=0.05)
        assert not waiting.done()
        await transaction.update([instance(A, State.ACTIVE)])
    assert (await waiting)[A].state is State.ACTIVE


async def test_a_schema_that_was_made_anew_is_reported_and_not_taken_for_its_own(store: InstanceStore) -> None:
    """A conductor that stayed connected went on there, under the new identity."""
    await insert(store, instance(A))
    known = store.database_id
    if isinstance(store, MemoryInstances):
        store._table.database_id = C
    else:
        assert isinstance(store, PostgresInstances)
        async with store._database.raw() as connection:
            await connection.execute("UPDATE identity SET database_id = $1::uuid", C)
    assert await store.has_due(0.0)
    with pytest.raises(DatabaseReplaced, match=f"{C} now and was {known}"):
        async with store.transaction() as transaction:
            await transaction.recognise()
    assert store.database_id == known
    assert not store.is_recovering


async def test_a_sweep_is_due_for_a_passed_deadline_and_for_a_database_that_was_set_back(store: InstanceStore) -> None:
    assert not await store.has_due(10.0)
    await insert(store, instance(A, deadline=5.0), instance(B))
    assert [await store.has_due(now) for now in (4.9, 5.0)] == [False, True]
    await restored(store)
    assert await store.has_due(4.9)
    await recovered(store)
    assert not await store.has_due(4.9)


async def test_an_operators_word_ends_with_the_history_that_it_was_given_in(store: InstanceStore) -> None:
    """Another one may have come since, which the backup has not: but what is kept is kept. No process records anything
    before it has recognised the set-back.
    """
    machines = [UnknownMachine(one, 3, HOST, UnknownMachineKind.QUARANTINED, "newer") for one in (A, B, C)]
    words = dict(zip((A, B, C), (DESTROY, ADOPT, PROTECT), strict=True))
    await store.safety.record("s", machines, 1.0)
    for uuid, decision in words.items():
        await store.safety.decide([DecidedMachine(uuid)], decision, "ann", 2.0)
    assert {one.machine.uuid: one.decision for one in await store.safety.record("s", machines, 3.0)} == words
    await restored(store)
    with pytest.raises(Transient, match="recognised"):
        await store.safety.record("s", machines, 4.0)
    async with store.transaction() as transaction:
        assert await transaction.recognise() is not None
    left = {one.machine.uuid: one.decision for one in await store.safety.record("s", machines, 5.0)}
    assert left == {A: "", B: "", C: PROTECT}
    await store.safety.decide([DecidedMachine(A)], DESTROY, "ann", 6.0)
    assert [one.decision for one in await store.safety.record("s", machines[:1], 7.0)] == [DESTROY]


async def test_what_is_due_is_taken_by_one(make: Make, store: InstanceStore) -> None:
    other = make()
    await other.open()
    await insert(store, instance(A, deadline=5.0), instance(B, deadline=4.0), instance(C, deadline=50.0))
    async with store.transaction() as mine, other.transaction() as others:
        assert [one.uuid for one in await mine.lock_due(10.0, 1)] == [B]
        assert [one.uuid for one in await others.lock_due(10.0, 9)] == [A]


async def test_messages_are_handled_once_by_whichever_consumer_gets_them(make: Make, store: InstanceStore) -> None:
    other = make()
    await other.open()

    async def take(one: InstanceStore) -> set[str]:
        async with one.transaction() as transaction:
            fresh = await transaction.first_time(["m2", "m1", "m1"])
            await asyncio.sleep(0)
            return fresh

    first, second = await asyncio.gather(take(store), take(other))
    assert sorted(map(sorted, (first, second))) == [[], ["m1", "m2"]]


async def test_outbox_rows_are_there_until_they_are_forgotten(store: InstanceStore) -> None:
    async with store.transaction() as transaction:
        assert await transaction.send_later([]) == []
        (row,) = await transaction.send_later(MESSAGES)
    assert await store.outbox.claim_stale(Sweep(60.0, 10)) == []
    ((found, body),) = await store.outbox.claim_stale(Sweep(-1.0, 10))
    assert found == row
    assert b"cell.delete.v1" in body
    await store.outbox.delete([row])
    assert await store.outbox.claim_stale(Sweep(-1.0, 10)) == []


async def test_old_records_of_handled_messages_go(store: InstanceStore) -> None:
    async with store.transaction() as transaction:
        await transaction.first_time(["m1"])
    await store.outbox.purge_handled(3600.0, 10)
    async with store.transaction() as transaction:
        assert await transaction.first_time(["m1"]) == set()
    await store.outbox.purge_handled(-1.0, 10)
    async with store.transaction() as transaction:
        assert await transaction.first_time(["m1"]) == {"m1"}


async def test_briefs_are_of_what_should_be_on_a_host_and_of_what_is_named(store: InstanceStore) -> None:
    await insert(store, instance(A, State.ACTIVE), instance(B, State.FAILED), instance(C, State.BUILDING))
    found = {summary.uuid: summary for summary in await store.summaries([HOST], [B])}
    assert sorted(found) == [A, B]
    assert found[A].service == "s" and found[B].service == "s"
    assert (found[A].state, found[A].host_uuid, found[A].attempt, found[A].since) == (State.ACTIVE, HOST, 1, 3.0)


async def test_briefs_of_a_host_name_what_moves_off_it(store: InstanceStore) -> None:
    moved = instance(A, State.DESTROYING, next_state=State.ACTIVE)
    source = replace(moved.current, host_uuid=B)
    action = ActionInProgress(request_id=C, kind=ActionKind.MIGRATE, source=source, source_attempt=1, spec=SPEC)
    moved = replace(
        moved, selections=(source, moved.current), selection_index=1, attempt=2, highest_attempt=4, action=action
    )
    await insert(store, moved)
    for hosts, named in (([B], []), ([], [A])):
        (found,) = await store.summaries(hosts, named)
        assert (found.host_uuid, found.source_host_uuid, found.source_attempt) == (HOST, B, 1)
        assert (found.attempt, found.last_attempt) == (2, 4)


async def test_a_brief_has_why_what_no_client_wants_any_more_has_failed(store: InstanceStore) -> None:
    refused = replace(instance(A, State.DELETED), code=MACHINE_EXISTS)
    await insert(store, refused, instance(B, State.DELETED), replace(instance(C, State.ACTIVE), code=MACHINE_EXISTS))
    found = {summary.uuid: summary.code for summary in await store.summaries([], [A, B, C])}
    assert found == {A: MACHINE_EXISTS, B: "", C: ""}


async def begin(store: InstanceStore, uuid: str) -> None:
    async with store.optimistic({uuid}) as transaction:
        assert await transaction.recognise() is None
        await transaction.lock([uuid])
        await transaction.insert([instance(uuid)])


async def end(store: InstanceStore, uuid: str) -> None:
    async with store.optimistic(()) as transaction:
        known = await transaction.lock([uuid])
        await transaction.update([replace(one, state=State.FAILED) for one in known.values()])


async def test_no_step_is_recorded_in_a_set_back_database_by_a_process_that_has_not_recognised_it(make: Make) -> None:
    """An instance that was moved since was given up as lost by a report, before any sweep (seed 7, steered)."""
    one, other = make(), make()
    await one.open()
    await other.open()
    await insert(one, instance(C, State.ACTIVE))
    await restored(one)
    for store in (one, other):
        with pytest.raises(Conflict):
            await begin(store, A)
        with pytest.raises(Conflict):
            await end(store, C)
    await recovered(one)
    await begin(one, A)
    for writes in (begin(other, B), end(other, C)):
        with pytest.raises(Conflict):
            await writes
    async with other.transaction() as transaction:
        assert await transaction.recognise() is None
    await begin(other, B)
    await end(other, C)
    assert {uuid: found.state for uuid, found in (await recorded(one)).items()}[C] is State.FAILED


async def step(store: InstanceStore, message_id: str, uuids: list[str], *, new: set[str], state: State) -> set[str]:
    """The engine's operations: optimistic first, with locks after a conflict. Returns which ids were new."""
    for attempt in range(2):
        started = store.transaction() if attempt else store.optimistic(new)
        try:
            async with started as transaction:
                transaction.durable = False
                fresh = await transaction.first_time([message_id])
                known = await transaction.lock(uuids)
                if fresh:
                    await transaction.insert([instance(uuid, state) for uuid in uuids if uuid not in known])
                    await transaction.update([replace(one, state=state) for one in known.values()])
                    await transaction.send_later(MESSAGES)
        except Conflict:
            continue
        await store.flush()
        assert bool(transaction.rows) is bool(fresh)
        return fresh
    raise AssertionError


async def test_an_optimistic_transaction_writes_what_is_as_expected(store: InstanceStore) -> None:
    assert await step(store, "m1", [A, B], new={A, B}, state=State.BUILDING) == {"m1"}
    assert await step(store, "m2", [A], new=set(), state=State.ACTIVE) == {"m2"}
    assert await step(store, "m3", [A, B, C], new={C}, state=State.FAILED) == {"m3"}
    assert {uuid: one.state for uuid, one in (await recorded(store)).items()} == dict.fromkeys((A, B, C), State.FAILED)
    assert len(await store.outbox.claim_stale(Sweep(-1.0, 10))) == 3


async def test_an_optimistic_transaction_that_finds_nothing_writes_nothing(store: InstanceStore) -> None:
    """A host's report of an instance that was purged meanwhile: it sent a statement without parts, which is none."""
    async with store.optimistic(set()) as transaction:
        assert await transaction.lock([C]) == {}
    assert not transaction.rows


async def test_a_message_expected_to_be_new_is_handled_once(make: Make, store: InstanceStore) -> None:
    other = make()
    await other.open()
    await step(store, "m1", [A], new={A}, state=State.BUILDING)
    assert await step(other, "m1", [A], new={A}, state=State.FAILED) == set()
    assert (await recorded(store))[A].state is State.BUILDING
    assert len(await store.outbox.claim_stale(Sweep(-1.0, 10))) == 1


async def test_an_instance_that_another_process_moved_is_read_anew(make: Make, store: InstanceStore) -> None:
    other = make()
    await other.open()
    await step(store, "m1", [A, B], new={A, B}, state=State.BUILDING)
    for number, mine in enumerate((other, store, other, store)):
        async with store.transaction() as sweep:  # with locks, as deadlines pass
            swept = await sweep.lock([A])
            await sweep.update([replace(swept[A], attempt=swept[A].attempt + 1)])
        async with contextlib.AsyncExitStack() as stack:
            try:
                transaction = await stack.enter_async_context(mine.optimistic(set()))
                known = await transaction.lock([A, B])
                await transaction.update([replace(one, attempt=one.attempt + 1) for one in known.values()])
                await stack.aclose()
            except Conflict:
                async with mine.transaction() as locked:
                    known = await locked.lock([A, B])
                    await locked.update([replace(one, attempt=one.attempt + 1) for one in known.values()])
        assert {uuid: one.attempt for uuid, one in known.items()} == {A: 2 * number + 2, B: number + 1}
    assert {uuid: one.attempt for uuid, one in (await recorded(store)).items()} == {A: 9, B: 5}


async def test_a_conflict_writes_nothing(make: Make) -> None:
    one, other = make(), make()
    await one.open()
    await other.open()
    await insert(one, instance(C))
    async with one.optimistic({A}) as transaction:
        await transaction.insert([instance(A)])
    await step(other, "m0", [A], new=set(), state=State.ACTIVE)
    for new, uuids in ((set(), [A]), ({C}, [C]), ({B, C}, [B, C])):
        with pytest.raises(Conflict):
            async with one.optimistic(new) as transaction:
                await transaction.first_time(["m1"])
                known = await transaction.lock(uuids)
                await transaction.insert([instance(uuid, State.FAILED) for uuid in uuids if uuid not in known])
                await transaction.update([instance(uuid, State.FAILED) for uuid in known])
                await transaction.send_later(MESSAGES)
    found = await recorded(one)
    assert {uuid: each.state for uuid, each in found.items()} == {A: State.ACTIVE, C: State.BUILDING}
    async with one.transaction() as transaction:
        assert await transaction.first_time(["m1"]) == {"m1"}
    assert len(await one.outbox.claim_stale(Sweep(-1.0, 10))) == 1


async def test_what_a_failed_optimistic_transaction_has_read_is_read_anew(make: Make) -> None:
    """It decided on the cached instance again and again, and each time raised before the comparison of its commit."""
    one, other = make(), make()
    await one.open()
    await other.open()
    await step(one, "m1", [A], new={A}, state=State.BUILDING)
    await step(other, "m2", [A], new=set(), state=State.ACTIVE)
    seen: list[State] = []
    for _ in range(2):
        with pytest.raises(Transient):
            async with one.optimistic(set()) as transaction:
                seen.append((await transaction.lock([A]))[A].state)
                raise Transient("not on this record", code="test.refused")
    assert seen == [State.BUILDING, State.ACTIVE]


async def test_a_circle_of_waiting_transactions_gets_an_error(make: Make, store: InstanceStore) -> None:
    """One of them, and the other goes on."""
    other = make()
    await other.open()
    await insert(store, instance(A), instance(B))
    both = asyncio.Barrier(2)

    async def lock(mine: InstanceStore, first: str, second: str) -> None:
        async with mine.transaction() as transaction:
            await transaction.lock([first])
            await both.wait()
            found = await transaction.lock([second])
            await transaction.update([replace(one, attempt=9) for one in found.values()])

    outcomes = await asyncio.gather(lock(store, A, B), lock(other, B, A), return_exceptions=True)
    assert [getattr(fault, "code", "") for fault in outcomes if fault is not None] == ["database.deadlock"]
    assert sorted(one.attempt for one in (await recorded(store)).values()) == [1, 9]


async def test_what_is_not_committed_is_seen_by_no_other_transaction(make: Make, store: InstanceStore) -> None:
    """Not even by an optimistic transaction: it reads without locks, and meets the conflict at its end."""
    other = make()
    await other.open()
    await insert(store, instance(A))
    with pytest.raises(Conflict):
        async with other.optimistic(set()) as optimistic:
            async with store.transaction() as transaction:
                known = await transaction.lock([A])
                await transaction.update([replace(known[A], attempt=2)])
                seen = await optimistic.lock([A])
                assert [summary.attempt for summary in await other.summaries([], [A])] == [1]
            assert seen[A].attempt == 1
            await optimistic.update([replace(seen[A], attempt=7)])
    assert (await recorded(store))[A].attempt == 2


async def test_failed_instances_are_forgotten_on_their_own(store: InstanceStore) -> None:
    await insert(store, instance(A, State.FAILED), instance(B, State.DELETED), instance(C, State.ACTIVE))
    assert await store.purge(PURGEABLE_FAILED, 3.0, 10) == 0  # they failed at 3.0
    assert await store.purge(PURGEABLE_FAILED, 3.5, 10) == 1
    assert sorted(await recorded(store)) == [B, C]
    assert await store.purge(PURGEABLE, 3.5, 10) == 1
    assert sorted(await recorded(store)) == [C]


@pytest.mark.postgres
async def test_the_cache_is_dropped_after_a_crash_of_the_database(postgres_url: str) -> None:
    """It forgets its last commits and gives their numbers again: another's row then had the version of a lost one."""
    store = PostgresInstances(database := Database(postgres_url, "cell_c1"))
    await store.open()
    await step(store, "m1", [A], new={A}, state=State.BUILDING)
    cached = store._cache.get(A)
    assert cached is not None
    store._cache.put(cached[0], {A: replace(cached[1], attempt=99)})  # under the version that the row has now
    with pytest.raises(DatabaseUnavailable):
        async with database.single() as connection:
            await connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
    async with store.optimistic(set()) as transaction:
        assert (await transaction.lock([A]))[A].attempt == 1
    await store.close()


@pytest.mark.postgres
async def test_an_optimistic_transaction_takes_its_locks_in_the_order_of_a_locking_one(postgres_url: str) -> None:
    """Instances first, and a message that came to two conductors made each of them wait for the other."""
    one, other = (PostgresInstances(Database(postgres_url, "cell_c1")) for _ in range(2))
    await one.open()
    await other.open()
    await step(one, "m0", [A, B], new={A, B}, state=State.BUILDING)

    async def write() -> None:
        with pytest.raises(Conflict):
            async with one.optimistic(set()) as transaction:
                await transaction.first_time(["m1"])
                known = await transaction.lock([A, B])
                await transaction.update([replace(known[A], attempt=2)])

    async with other.transaction() as transaction:
        await transaction.first_time(["m1"])
        writing = asyncio.create_task(write())
        await until(lambda: _waits(transaction))
        known = await transaction.lock([A, B])  # was a deadlock
        await transaction.update([replace(known[B], attempt=3)])
    await writing
    assert {uuid: found.attempt for uuid, found in (await recorded(one)).items()} == {A: 1, B: 3}
    await one.close()
    await other.close()


async def _waits(transaction: PostgresTransaction) -> bool:
    waiting: bool = await transaction._connection.fetchval(
        "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() "
        "AND pg_backend_pid() = ANY(pg_blocking_pids(pid)))"
    )
    return waiting


@pytest.mark.postgres
async def test_a_record_that_cannot_be_read_is_left_as_it_is_and_what_is_due_beside_it_is_found(
    postgres_url: str,
) -> None:
    """All deadlines of the cell stopped. Many of them, the oldest ones, would fill every batch."""
    store = PostgresInstances(database := Database(postgres_url, "cell_c1"))
    await store.open()
    await insert(store, instance(A, deadline=4.0), instance(B, deadline=5.0))
    async with database.raw() as connection:
        await connection.execute('UPDATE instances SET record = \'{"state": "later"}\' WHERE uuid = $1', A)
    for found in ([], [B]):
        async with store.transaction() as transaction:
            assert [one.uuid for one in await transaction.lock_due(10.0, 1)] == found
    async with database.raw() as connection:
        record, deadline = await connection.fetchrow("SELECT record, deadline FROM instances WHERE uuid = $1", A)
    assert record == '{"state": "later"}' and deadline > 10.0
    await store.close()


@pytest.mark.postgres
async def test_an_unreadable_record_stops_no_step_of_another_and_its_messages_are_dead_letters(
    postgres_url: str,
) -> None:
    """One ended the task that fails builds over, and with it every conductor of the cell, and each report of its host.

    It is on record: no request about it is answered as if there were none.
    """
    store = PostgresInstances(database := Database(postgres_url, "cell_c1"))
    await store.open()
    hosts = (*instance(A).selections, Selection(host_uuid=C, host="i", service="t", allocations={C: {"VCPU": 1}}))
    await insert(store, *(replace(instance(uuid), selections=hosts) for uuid in (A, B)))
    async with database.raw() as connection:
        await connection.execute("UPDATE instances SET record = '{}', state = 'later' WHERE uuid = $1", A)
    engine = engine_of(
        store=store,
        bus=Queried(),
        relay=Relay(),
        clock=SystemClock(),
        config=ConductorConfig(),
        cell="c1",
    )
    lost = ServiceLost(at=1.0, service=instance(A).service, code="service.silent", reason="")
    before = failed_steps()
    await engine.take([InstanceEvent(A, lost), InstanceEvent(B, lost)], source="leases")
    assert await engine.effective([InstanceEvent(A, lost), InstanceEvent(B, lost)]) == [], "done"
    assert [(one.uuid, one.state is State.ABSENT) for one in await store.summaries([], [A, B])] == [
        (B, False),
        (A, True),
    ]
    assert failed_steps() > before
    assert (await engine.read_recorded([B]))[B].state is not State.BUILDING, "it has failed over"
    with pytest.raises(UnreadableRecords):
        await engine.take([InstanceEvent(A, lost, "m1"), InstanceEvent(B, lost, "m2")], source="requests")
    with pytest.raises(UnreadableRecords):
        await engine.read_recorded([A, B])
    await store.close()


OUR_MACHINE = UnknownMachine(A, 1, HOST, UnknownMachineKind.QUARANTINED, "newer")


@pytest.mark.postgres
@pytest.mark.parametrize(
    "record",
    [
        '{"blocked_reason": 7}',
        '{"proves_from": "many"}',
        '{"proves_from": 1e99}',
        '{"history": [{"outcome": "not_commanded", "attempt": {}}]}',
        '{"history": [{"outcome": "not_commanded"}]}',
        '{"sequence": 1e300}',
        '"x"',
        "[]",
    ],
)
async def test_a_record_of_another_type_costs_no_other_its_comparison(postgres_url: str, record: str) -> None:
    """One failed each report of its host, and the sweep that recognises a set-back: the cell stood still."""
    store = PostgresInstances(database := Database(postgres_url, "cell_c1"))
    await store.open()
    await insert(store, instance(A), instance(B))
    await store.safety.record("s", [OUR_MACHINE], 1.0)
    await store.safety.decide([DecidedMachine(A)], PROTECT, "op", 2.0)
    async with database.raw() as connection:
        await connection.execute("UPDATE instances SET record = $2::text::json WHERE uuid = $1", A, record)
    found = {one.uuid: one for one in await store.summaries([HOST], [A, B])}
    assert set(found) == {A, B} and found[B].state is State.BUILDING and list(found[A].protected_hosts) == [HOST]
    await restored(store)
    async with store.transaction() as transaction:
        assert await transaction.recognise() is not None
    await store.close()


@pytest.mark.postgres
async def test_a_machine_whose_record_cannot_be_read_is_neither_explained_nor_over(postgres_url: str) -> None:
    """It counted as one without a record: an operator who saw that had it destroyed."""
    store = PostgresInstances(database := Database(postgres_url, "cell_c1"))
    await store.open()
    await insert(store, instance(A, State.DELETED))
    async with database.raw() as connection:
        await connection.execute("UPDATE instances SET state = 'later' WHERE uuid = $1", A)
    runs = Running(instance_uuid=A, attempt=1, database_id="d")
    host = HostReport(uuid=HOST, name="h", running=(runs,))
    report = HostStates(service="s", cell="c1", epoch=1, sequence=1, hosts=(host,))
    found = differences(report, await store.summaries([HOST], [A]), database_id="d", now=9.0, grace_s=1.0)
    assert found == Differences(
        unknown_machines=(UnknownMachine(A, 1, HOST, UnknownMachineKind.QUARANTINED, "its record cannot be read"),)
    )
    await store.close()
