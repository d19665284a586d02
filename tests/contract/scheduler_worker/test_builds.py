"""One suite for both keepers of build requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from bus.contracts.actions import ActionKind, ActionQuery, ActionState, CellAction, CellTransferOut, Condition
from bus.contracts.build import AttemptRecord, BuildEvent, BuildQuery, BuildRequest, BuildState, TimelineEntry
from bus.faults import DatabaseUnavailable
from bus.persistence.database import Database
from bus.persistence.guarded_statement import Conflict
from bus.persistence.outbox import OutboxMessage, Sweep
from bus.persistence.unit_of_work import OptimisticFirst
from scheduler_worker.records.action_record import RecordedAction, Transfer
from scheduler_worker.records.build_record import BuildUpdate, Gang, NewBuild, RecordedBuild, SinceBuild
from scheduler_worker.store.port import FIRST_UUID, BuildUnit, SchedulerStore
from scheduler_worker.store.postgres import PostgresBuilds
from scheduler_worker.upkeep.purge import purge
from tests.kit.sent import Sent

T = TypeVar("T")
Make = Callable[[], SchedulerStore]
FOURTH = "d0000000-0000-4000-8000-000000000000"
A, B, C, HOST, OTHER = (f"{n}0000000-0000-4000-8000-000000000000" for n in "abc12")


def new(uuid: str, digest: bytes = b"1") -> NewBuild:
    request = BuildRequest(instance_uuid=uuid, flavor="f", project_id="p", name="n")
    line = TimelineEntry(at=1.0, actor="w", what="requested")
    build = RecordedBuild(instance_uuid=uuid, project_id="p", digest=digest, state=BuildState.ACCEPTED, sequence=1)
    return NewBuild(request=request, build=build, timeline=(line,))


def ended(new_build: NewBuild, state: BuildState = BuildState.REFUSED) -> NewBuild:
    return replace(new_build, build=replace(new_build.build, state=state, terminal=True))


def placed(uuid: str, cell: str = "c1") -> BuildUpdate:
    build = RecordedBuild(
        instance_uuid=uuid,
        project_id="p",
        state=BuildState.SCHEDULED,
        sequence=2,
        cell=cell,
        host="h",
        host_uuid=HOST,
        reason="r",
    )
    return BuildUpdate(build=build)


async def insert(store: SchedulerStore, *builds: NewBuild, now: float = 1.0) -> set[str]:
    async with store.unit(durable=False) as unit:
        return await unit.insert(builds, now)


async def decide(store: SchedulerStore, *decisions: BuildUpdate) -> set[str]:
    async with store.unit() as unit:
        return await unit.write_decisions(decisions, 2.0)


async def test_a_request_is_recorded_once(make: Make, store: SchedulerStore) -> None:
    other = make()
    await other.open()
    both = await asyncio.gather(insert(store, new(A), new(B)), insert(other, new(B), new(A)))
    assert sorted(uuid for one in both for uuid in one) == [A, B]
    async with store.unit() as unit:
        known = await unit.read([A, C])
    assert list(known) == [A]
    assert (known[A].state, known[A].digest) == (BuildState.ACCEPTED, b"1")


async def test_a_decision_of_another_run_than_that_of_the_record_is_not_written(store: SchedulerStore) -> None:
    """The record of that run is lost, and what it has claimed is none of this one's."""
    await insert(store, replace(new(A), build=replace(new(A).build, claim_owner="later")))
    assert await decide(store, placed(A)) == set()
    mine = replace(placed(A).build, claim_owner="later")
    async with store.unit() as unit:
        assert ((await unit.read([A]))[A].claim_owner, (await unit.lock([A]))[A].claim_owner) == ("later", "later")
    assert await decide(store, replace(placed(A), build=mine)) == {A}
    async with store.unit() as unit:
        assert (await unit.lock([A]))[A].claim_owner == "later"


async def test_two_schedulers_dispatch_a_request_once(make: Make, store: SchedulerStore) -> None:
    other = make()
    await other.open()
    await insert(store, new(A), new(B))
    both = await asyncio.gather(decide(store, placed(A), placed(B)), decide(other, placed(B, "c2"), placed(A, "c2")))
    assert sorted(uuid for one in both for uuid in one) == [A, B]


async def test_what_is_deleted_is_not_dispatched(store: SchedulerStore) -> None:
    await insert(store, new(A))
    async with store.unit() as unit:
        kept = await unit.lock([A, B])
        assert list(kept) == [A]
        await unit.update([BuildUpdate(build=replace(kept[A], state=BuildState.DELETED))], 2.0)
    assert await decide(store, placed(A)) == set()
    async with store.unit() as unit:
        assert (await unit.lock([A]))[A].state is BuildState.DELETED


async def test_a_tombstone_becomes_the_record_of_another_projects_delete(store: SchedulerStore) -> None:
    await insert(store, new(A))
    async with store.unit() as unit:
        after = replace((await unit.lock([A]))[A], project_id="q", state=BuildState.DELETING, cell="c1")
        await unit.update([BuildUpdate(build=after)], 2.0)
    async with store.unit() as unit:
        assert (await unit.lock([A]))[A] == after
    assert [one.instance_uuid for one in await store.builds(BuildQuery(project_id="q"))] == [A]
    assert await store.builds(BuildQuery(project_id="p")) == []


async def test_the_messages_of_a_unit_are_published_when_it_has_committed(store: SchedulerStore, sent: Sent) -> None:
    event = BuildEvent(instance_uuid=A, project_id="p", state=BuildState.ACCEPTED, sequence=1)
    with pytest.raises(RuntimeError):
        async with store.unit() as unit:
            await unit.insert([new(A)], 1.0)
            unit.emit(OutboxMessage("api", event))
            raise RuntimeError
    assert sent.rows == []
    async with store.unit() as unit:
        assert await unit.insert([new(A)], 1.0) == {A}
        unit.emit(OutboxMessage("api", event))
    (((row,), emitted),) = sent.rows
    assert [one.message for one in emitted] == [event]
    assert [found for found, _ in await store.outbox.claim_stale(Sweep(-1.0, 10))] == [row]


async def test_a_record_has_its_timeline(store: SchedulerStore) -> None:
    await insert(store, new(A))
    await decide(store, replace(placed(A), timeline=(TimelineEntry(at=2.0, actor="w", what="chosen"),)))
    async with store.unit() as unit:
        kept = (await unit.lock([A]))[A]
        active = replace(kept, state=BuildState.ACTIVE, sequence=12, terminal=True)
        line = TimelineEntry(at=3.0, actor="conductor", what="active")
        await unit.update([BuildUpdate(build=active, timeline=(line,))], 3.0)
    (record,) = await store.builds(BuildQuery(instance_uuid=A))
    assert (record.state, record.cell, record.host, record.reason) == (BuildState.ACTIVE, "c1", "h", "r")
    assert [entry.what for entry in record.timeline] == ["requested", "chosen", "active"]
    assert (record.created_at, record.updated_at) == (1.0, 3.0)


async def test_the_oldest_lines_of_a_timeline_go_when_it_is_long(store: SchedulerStore) -> None:
    await insert(store, new(A))
    async with store.unit() as unit:
        kept = (await unit.lock([A]))[A]
    for at in range(40):
        async with store.unit() as unit:
            line = TimelineEntry(at=float(at), actor="w", what=f"line {at}", detail="\u00fc" * 2000)
            await unit.update([BuildUpdate(build=kept, timeline=(line,))], 3.0)
    (record,) = await store.builds(BuildQuery(instance_uuid=A))
    assert [entry.what for entry in record.timeline] == [f"line {at}" for at in range(27, 40)]


async def test_builds_are_read_by_name_as_one_by_one(store: SchedulerStore) -> None:
    for at, uuid in enumerate((A, B, C)):
        await insert(store, new(uuid), now=float(at))
    await decide(store, replace(placed(B), timeline=(TimelineEntry(at=2.0, actor="w", what="chosen"),)))
    found = await store.builds_named([A, B, "00000000-0000-4000-8000-000000000000"])
    assert found == {uuid: (await store.builds(BuildQuery(instance_uuid=uuid)))[0] for uuid in (A, B)}
    assert await store.builds_named([]) == {}


async def test_a_page_is_newest_first_and_filtered(store: SchedulerStore) -> None:
    for at, uuid in enumerate((A, B, C)):
        await insert(store, new(uuid), now=float(at))
    await decide(store, placed(B))
    everything = await store.builds(BuildQuery())
    assert [record.instance_uuid for record in everything] == [C, B, A]
    assert [r.instance_uuid for r in await store.builds(BuildQuery(state=BuildState.SCHEDULED))] == [B]
    assert [r.instance_uuid for r in await store.builds(BuildQuery(before=2.0, limit=1))] == [B]
    assert await store.builds(BuildQuery(project_id="q")) == []


async def test_pages_of_builds_that_were_requested_together_leave_none_out(store: SchedulerStore) -> None:
    await insert(store, new(B), new(C), new(A), now=1.0)
    seen: list[str] = []
    query = BuildQuery(limit=1)
    while page := await store.builds(query):
        seen += [record.instance_uuid for record in page]
        query = replace(query, before=page[-1].created_at, before_instance=page[-1].instance_uuid)
    assert seen == sorted((A, B, C), reverse=True)
    assert await store.builds(BuildQuery(before=1.0)) == []


async def test_builds_are_found_by_name_and_by_the_first_letters_of_a_uuid(store: SchedulerStore) -> None:
    other = new(B)
    await insert(store, new(A), replace(other, request=replace(other.request, name="web")), now=1.0)
    await insert(store, new(C), now=2.0)
    await decide(store, placed(A))
    for name, uuids in {"n": [C, A], "web": [B], A[:4]: [A], B: [B], "w": [], "%": [], "_": []}.items():
        assert [one.instance_uuid for one in await store.builds(BuildQuery(name=name))] == uuids, name
    assert await store.builds(BuildQuery(name="web", project_id="q")) == []
    assert await store.searched_to(BuildQuery(name="web")) is None


async def test_builds_are_found_by_host_cell_flavor_code_and_time(store: SchedulerStore) -> None:
    for at, uuid in enumerate((A, B, C)):
        await insert(store, new(uuid), now=float(at))
    await decide(store, placed(B))
    await decide(store, replace(placed(C), build=replace(placed(C).build, host="other", code="x.y")))
    flavor = (await store.builds(BuildQuery(instance_uuid=A)))[0].flavor

    async def found(**fields: Any) -> list[str]:
        return [record.instance_uuid for record in await store.builds(BuildQuery(**fields))]

    assert await found(host="h") == [B]
    assert await found(cell="c1") == [C, B]
    assert await found(cell="c1", code="x.y") == [C]
    assert await found(host="no\x00ne", flavor="\x00", code="x\x00.z") == [], "no database stores that character"
    assert await found(flavor=flavor, limit=2) == [C, B]
    assert await found(flavor="no") == []
    assert await found(after=1.0, before=2.0) == [B]
    assert await found(after=1.0) == [C, B]
    assert await store.searched_to(BuildQuery(flavor=flavor)) is None


async def test_builds_are_counted_on_all_pages_up_to_a_bound(store: SchedulerStore) -> None:
    for at, uuid in enumerate((A, B, C)):
        await insert(store, new(uuid), now=float(at))
    await decide(store, placed(B))
    assert await store.count_builds(BuildQuery(limit=1), 10) == 3
    assert await store.count_builds(BuildQuery(), 2) == 2
    state = (await store.builds(BuildQuery(instance_uuid=B)))[0].state
    assert await store.count_builds(BuildQuery(state=state), 10) == 1
    assert await store.count_builds(BuildQuery(project_id="no"), 10) == 0


async def test_the_members_of_a_gang_are_found_by_it(store: SchedulerStore) -> None:
    gang = Gang(uuid=A, size=2, min_count=1)
    await insert(store, replace(new(A), gang=gang), replace(new(B), gang=gang), new(C))
    found = await store.builds(BuildQuery(gang=A))
    assert {(one.instance_uuid, one.gang, one.gang_min_count) for one in found} == {(A, A, 1), (B, A, 1)}
    (alone,) = await store.builds(BuildQuery(instance_uuid=C))
    assert (alone.gang, alone.gang_min_count) == (None, 0)


async def test_an_optimistic_unit_inserts_in_several_steps(store: SchedulerStore) -> None:
    async with store.unit(optimistic=True) as unit:
        assert await unit.insert([new(A)], 1.0) | await unit.insert([new(B)], 1.0) == {A, B}
    assert len(await store.builds(BuildQuery())) == 2


async def test_a_search_reads_a_bounded_number_of_builds_and_returns_its_position(
    store: SchedulerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_worker.store.tables.MAX_SEARCHED", 2)
    for at, uuid in enumerate((A, B, C)):
        await insert(store, new(uuid), now=float(at))
    await decide(store, placed(A))
    query = BuildQuery(host="h")
    assert await store.builds(query) == []
    assert await store.searched_to(query) == (1.0, B)
    further = replace(query, before=1.0)
    assert [record.instance_uuid for record in await store.builds(further)] == [A]
    assert await store.searched_to(further) is None
    assert len(await store.builds(BuildQuery())) == 3, "without a search the page alone is the bound"


async def test_what_ended_long_ago_is_purged_and_what_lives_is_kept(store: SchedulerStore) -> None:
    old_uuids = [f"{n:08x}-0000-4000-8000-000000000000" for n in range(5)]
    old = [ended(new(uuid)) for uuid in old_uuids]
    await insert(store, *old, now=1.0)
    await insert(store, new(A), new(B), now=1.0)  # A becomes a machine, B still waits
    await decide(store, placed(A))
    await insert(store, ended(new(C)), now=50.0)
    assert await purge(store, before=1.0, batch=2) == 0
    assert await purge(store, before=10.0, batch=2) == 5
    assert await purge(store, before=10.0, batch=2) == 0
    left = [record.instance_uuid for record in await store.builds(BuildQuery(limit=100))]
    assert sorted(left) == [A, B, C]
    assert await insert(store, new(old_uuids[0])) == {old_uuids[0]}
    async with store.unit() as unit:
        known = await unit.lock([A])
    assert known[A].cell == "c1"


async def test_a_machine_is_purged_after_it_was_deleted_only(store: SchedulerStore) -> None:
    await insert(store, new(A))
    await decide(store, placed(A))
    for state, count in ((BuildState.ACTIVE, 0), (BuildState.DELETING, 0), (BuildState.DELETED, 1)):
        async with store.unit() as unit:
            kept = (await unit.lock([A]))[A]
            await unit.update([BuildUpdate(build=replace(kept, state=state))], 3.0)
        assert await purge(store, before=10.0, batch=10) == count


async def test_what_changed_lately_is_kept_however_old_it_is(store: SchedulerStore) -> None:
    await insert(store, new(A))
    async with store.unit() as unit:
        kept = (await unit.lock([A]))[A]
        over = replace(kept, state=BuildState.FAILED, terminal=True)
        await unit.update([BuildUpdate(build=over)], 30.0)
    assert await purge(store, before=10.0, batch=10) == 0


def event(state: BuildState) -> OutboxMessage:
    return OutboxMessage("api", BuildEvent(instance_uuid=A, project_id="p", state=state, sequence=1))


async def optimistically(
    store: SchedulerStore, work: Callable[[BuildUnit], Awaitable[T]], *, durable: bool = True
) -> T:
    units = OptimisticFirst(lambda optimistic: store.unit(durable=durable, optimistic=optimistic))
    while units.has_next_try():
        async with units as unit:
            result = await work(unit)
    return result


async def put(store: SchedulerStore, *uuids: str) -> set[str]:
    """On record, as the handler does it."""

    async def work(unit: BuildUnit) -> set[str]:
        fresh = await unit.insert([new(uuid) for uuid in uuids], 1.0)
        await unit.read([uuid for uuid in uuids if uuid not in fresh])
        if fresh:
            unit.emit(event(BuildState.ACCEPTED))
        return fresh

    return await optimistically(store, work, durable=False)


async def dispatch(store: SchedulerStore, *uuids: str) -> set[str]:
    async def work(unit: BuildUnit) -> set[str]:
        written = await unit.write_decisions([placed(uuid) for uuid in uuids], 2.0)
        if written:
            unit.emit(event(BuildState.SCHEDULED))
        return written

    return await optimistically(store, work)


async def announce(store: SchedulerStore, *uuids: str) -> dict[str, int]:
    """Raise each build's sequence; returns what it was."""

    async def work(unit: BuildUnit) -> dict[str, int]:
        kept = await unit.lock(uuids)
        emitted = {uuid: one.sequence for uuid, one in kept.items()}
        await unit.update(
            [BuildUpdate(build=replace(one, sequence=one.sequence + 10)) for one in kept.values()],
            3.0,
        )
        unit.emit(event(BuildState.ACTIVE))
        return emitted

    emitted = await optimistically(store, work, durable=False)
    await store.flush()
    return emitted


async def test_an_optimistic_unit_writes_what_is_as_expected(store: SchedulerStore, sent: Sent) -> None:
    assert await put(store, A, B) == {A, B}
    assert await dispatch(store, A, B) == {A, B}
    assert await announce(store, A) == {A: 2}
    assert await announce(store, A, B) == {A: 12, B: 2}
    rows = [row for ids, _ in sent.rows for row in ids]
    assert len(sent.rows) == len(set(rows)) == 4
    assert [found for found, _ in await store.outbox.claim_stale(Sweep(-1.0, 10))] == sorted(rows)
    assert {r.instance_uuid: r.cell for r in await store.builds(BuildQuery())} == {A: "c1", B: "c1"}


async def test_two_optimistic_schedulers_do_everything_once(make: Make, store: SchedulerStore) -> None:
    other = make()
    await other.open()
    both = await asyncio.gather(put(store, A, B), put(other, B, C))
    assert sorted(uuid for one in both for uuid in one) == [A, B, C]
    both = await asyncio.gather(dispatch(store, A, B, C), dispatch(other, C, A))
    assert sorted(uuid for one in both for uuid in one) == [A, B, C]
    for number, mine in enumerate((store, other, other, store)):
        assert await announce(mine, A, B) == dict.fromkeys((A, B), 2 + 10 * number)


async def test_a_conflict_writes_nothing(make: Make, sent: Sent) -> None:
    one, other = make(), make()
    for store in (one, other):
        await store.open()
    await put(one, A, B)
    await announce(other, A)
    before = [row for row, _ in sent.rows if row is not None]
    with pytest.raises(Conflict):
        async with one.unit(optimistic=True) as unit:
            kept = await unit.lock([A, B])
            assert kept[A].sequence == 1  # as this store left it
            await unit.update([BuildUpdate(build=replace(kept[B], reason="changed"))], 5.0)
    with pytest.raises(Conflict):
        async with one.unit(optimistic=True) as unit:
            await unit.insert([new(C), new(A)], 5.0)
            unit.emit(event(BuildState.ACCEPTED))
    async with one.unit() as unit:
        kept = await unit.lock([A, B])
        await unit.update([BuildUpdate(build=replace(kept[B], state=BuildState.DELETED))], 5.0)
    with pytest.raises(Conflict):
        async with other.unit(optimistic=True) as unit:
            await unit.write_decisions([placed(A), placed(B)], 5.0)
            unit.emit(event(BuildState.SCHEDULED))
    assert [row for row, _ in sent.rows if row is not None] == before
    found = await one.builds(BuildQuery())
    assert {r.instance_uuid: (r.state, r.cell) for r in found} == {
        A: (BuildState.ACCEPTED, None),
        B: (BuildState.DELETED, None),
    }


async def test_what_a_failed_optimistic_unit_has_read_is_read_anew(make: Make) -> None:
    one, other = make(), make()
    for store in (one, other):
        await store.open()
    await put(one, A)
    await announce(other, A)
    seen: list[int] = []
    for _ in range(2):
        with pytest.raises(RuntimeError):
            async with one.unit(optimistic=True) as unit:
                seen.append((await unit.lock([A]))[A].sequence)
                raise RuntimeError
    assert seen == [1, 11]


@pytest.mark.postgres
async def test_the_cache_is_dropped_after_a_crash_of_the_database(postgres_url: str, sent: Sent) -> None:
    """It forgets its last commits and gives their numbers again: another's row then had the version of a lost one."""
    store = PostgresBuilds(database := Database(postgres_url, "scheduler"))
    store.publish_through(sent)  # type: ignore[arg-type]
    await store.open()
    await put(store, A)
    cached = store._cache.get(A)
    assert cached is not None
    store._cache.put(cached[0], {A: replace(cached[1], sequence=99)})  # under the version that the row has now
    with pytest.raises(DatabaseUnavailable):
        async with database.single() as connection:
            await connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
    assert await announce(store, A) == {A: 1}
    await store.close()


async def test_a_message_is_handled_the_first_time_only_and_not_in_a_unit_that_fails(store: SchedulerStore) -> None:
    with pytest.raises(RuntimeError):
        async with store.operation() as unit:
            assert await unit.first_time("h", "m1")
            raise RuntimeError
    async with store.operation() as unit:
        assert await unit.first_time("h", "m1")
    async with store.operation() as unit:
        assert not await unit.first_time("h", "m1")
        assert await unit.first_time("h", "m2")


NAMES: dict[str, Any] = {"request_id": B, "instance_uuid": A, "project_id": "p", "kind": ActionKind.UNSHELVE}
LEAVING = Transfer(
    home="c3",
    away="c2",
    build=CellAction(**NAMES, to_cell="c3"),
    command=CellTransferOut(**NAMES, to_cell="c2", attempt=1),
)


def moved(request_id: str = B, uuid: str = A, **more: Any) -> RecordedAction:
    fields: dict[str, Any] = {"state": ActionState.SCHEDULED, "sequence": 2, "cell": "c1", "created_at": 5.0, **more}
    return RecordedAction(
        request_id=request_id, instance_uuid=uuid, project_id="p", kind=ActionKind.MIGRATE, digest=b"d", **fields
    )


async def test_a_cell_that_an_instance_moves_to_has_it(store: SchedulerStore) -> None:
    """`berth cell remove` counted the instances that are there, and removed the cell that a move was going to."""
    async with store.unit() as unit:
        await unit.insert([new(A), new(C)], 1.0)
    leaving = moved(transfer=LEAVING)
    async with store.operation() as unit:
        await unit.insert_actions([leaving, moved(FOURTH, C)], 6.0)
    assert [await store.machines(9, cell=cell) for cell in ("c2", "c3", "c4")] == [1, 1, 0]
    async with store.operation() as unit:
        await unit.known([(B, A)], lock=True)
        await unit.update_actions([replace(leaving, state=ActionState.FAILED, terminal=True)], 7.0)
    assert await store.machines(9, cell="c2") == 0


async def test_a_move_is_on_record_with_what_its_instance_has_become(make: Make, store: SchedulerStore) -> None:
    async with store.unit() as unit:
        await unit.insert([new(A), new(C)], 1.0)
    instance = SinceBuild(
        condition=Condition.STOPPED,
        image="new",
        image_properties={"new": {"hw_vm_mode": "hvm"}, "": {}},
        under_way=B,
    )
    async with store.operation() as unit:
        build = (await unit.known([(B, A)], lock=True))[B, A].build
        assert build is not None and build.instance is None
        assert await unit.insert_actions([moved(transfer=LEAVING)], 6.0) == {B}
        await unit.update([BuildUpdate(build=replace(build, instance=instance))], 6.0)
    with pytest.raises(RuntimeError):
        async with store.operation() as unit:
            await unit.update_actions([moved(state=ActionState.DONE, terminal=True)], 7.0)
            raise RuntimeError
    other = make()
    await other.open()
    async with other.operation() as unit:
        assert await unit.insert_actions([moved(cell="c9")], 7.0) == set()
        found = await unit.known([(B, A), (B, C), (C, B), (A, C)])
    assert found[B, A].action == moved(transfer=LEAVING) and found[B, A].current == instance
    assert not found[B, A].names_instance
    assert found[B, A].build_request == new(A).request and found[B, A].build == replace(build, instance=instance)
    assert found[B, C] == replace(found[A, C], action=found[B, A].action, names_instance=False), "one id, two instances"
    assert (found[C, B].action, found[C, B].build, found[C, B].names_instance) == (None, None, True)
    assert found[A, C].names_instance and found[A, C].build is not None and found[A, C].build.instance_uuid == C
    (record,) = await other.builds(BuildQuery(instance_uuid=A))
    assert (record.flavor, record.condition, record.under_way) == ("f", "stopped", B)
    history = (AttemptRecord(attempt=2, host="h", outcome="failed"),)
    ended = moved(
        state=ActionState.FAILED,
        sequence=20,
        terminal=True,
        host="h\x00",
        host_uuid=HOST,
        code="x",
        reason="y",
        history=history,
    )
    async with other.operation() as unit:
        await unit.known([(B, A)], lock=True)
        await unit.update_actions([ended], 8.0)
        now = replace(instance, flavor="g", under_way=None, condition=Condition.ACTIVE)
        await unit.update([BuildUpdate(build=replace(build, instance=now))], 8.0)
    async with store.operation() as unit:
        known = (await unit.known([(B, A)]))[B, A]
    assert known.action is not None and replace(known.action, host=None) == replace(ended, host=None)
    (record,) = await store.builds(BuildQuery(instance_uuid=A))
    assert (record.flavor, record.condition, record.under_way) == ("g", "active", None)


async def test_moves_that_ended_are_purged_and_no_others(store: SchedulerStore) -> None:
    async with store.operation() as unit:
        await unit.insert_actions([moved(A, terminal=True), moved(B), moved(C, terminal=True, created_at=50.0)], 6.0)
    assert (await store.purge(6.0, 10)).actions == 0  # it changed last at 6
    assert (await store.purge(10.0, 10)).actions == 1
    async with store.operation() as unit:
        found = await unit.known([(one, A) for one in (A, B, C)])
    assert [one for one in (A, B, C) if found[one, A].action is not None] == [B, C]


async def test_the_moves_of_an_instance_that_awaits_its_confirm_are_kept(store: SchedulerStore) -> None:
    """Its migration holds the source: another request under that id would release it."""
    async with store.unit() as unit:
        await unit.insert([new(A)], 1.0)
    async with store.operation() as unit:
        await unit.insert_actions([moved(B, terminal=True)], 2.0)
        known = (await unit.known([(B, A)], lock=True))[B, A]
        assert known.build is not None
        resized = replace(known.build, instance=replace(known.current, condition=Condition.RESIZED))
        await unit.update([BuildUpdate(build=resized)], 2.0)
    assert (await store.purge(10.0, 10)).actions == 0
    async with store.operation() as unit:
        await unit.known([(B, A)], lock=True)
        confirmed = replace(resized, instance=replace(known.current, condition=Condition.ACTIVE))
        await unit.update([BuildUpdate(build=confirmed)], 2.0)
    assert (await store.purge(10.0, 10)).actions == 1


async def test_open_moves_are_those_without_an_end_that_a_cell_has_page_by_page(store: SchedulerStore) -> None:
    async with store.operation() as unit:
        await unit.insert_actions([moved(A), moved(B, terminal=True), moved(C), moved(FOURTH, cell=None)], 6.0)
    assert [one.request_id for one in await store.open_actions(FIRST_UUID, 10)] == sorted((A, C))
    (first,) = await store.open_actions(FIRST_UUID, 1)
    assert [one.request_id for one in await store.open_actions(first.request_id, 10)] == [max(A, C)]


async def test_moves_are_listed_by_their_subject(store: SchedulerStore) -> None:
    async with store.operation() as unit:
        await unit.insert_actions([moved(A, C), moved(B, C, terminal=True, created_at=9.0)], 6.0)
    every = await store.actions(ActionQuery())
    assert [(one.request_id, one.terminal, one.updated_at) for one in every] == [(B, True, 6.0), (A, False, 6.0)]
    for query, found in (
        (ActionQuery(request_id=A), [A]),
        (ActionQuery(instance_uuid=C, limit=1), [B]),
        (ActionQuery(instance_uuid=A), []),
        (ActionQuery(project_id="p", under_way=True), [A]),
        (ActionQuery(project_id="q"), []),
    ):
        assert [one.request_id for one in await store.actions(query)] == found


async def test_requests_about_one_instance_wait_for_each_other(make: Make, store: SchedulerStore) -> None:
    other = make()
    await other.open()
    async with store.unit() as unit:
        await unit.insert([new(A)], 1.0)

    async def begin(keeper: SchedulerStore, request_id: str) -> bool:
        async with keeper.operation() as unit:
            known = (await unit.known([(request_id, A)], lock=True))[request_id, A]
            if known.current.under_way is not None:
                return False
            await asyncio.sleep(0)
            await unit.insert_actions([moved(request_id)], 2.0)
            assert known.build is not None
            begun = replace(known.build, instance=replace(known.current, under_way=request_id))
            await unit.update([BuildUpdate(build=begun)], 2.0)
            return True

    assert sorted(await asyncio.gather(begin(store, B), begin(other, C))) == [False, True]


async def test_the_active_instances_on_hosts_are_those_that_the_record_has_there(store: SchedulerStore) -> None:
    """By the host's uuid: hosts of two cells may have one name."""
    await insert(store, *(new(uuid) for uuid in (A, B, C)))
    async with store.unit() as unit:
        decisions = [placed(A), placed(B), replace(placed(C), build=replace(placed(C).build, host_uuid=OTHER))]
        await unit.write_decisions(decisions, 2.0)
    assert await store.active_on([HOST], 10) == []
    async with store.unit() as unit:
        builds = await unit.lock([A, B, C])
        await unit.update([BuildUpdate(build=replace(one, state=BuildState.ACTIVE)) for one in builds.values()], 3.0)
    assert await store.active_on([HOST], 10) == [A, B]
    assert await store.active_on([HOST, OTHER], 2, after=A) == [B, C]
