"""The engine over the in-process bus and a real PostgreSQL: builds, questions asked twice, and what is purged."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

import pytest
from msgspec.structs import replace

from bus.clock import new_uuid
from bus.consuming.outcome import Outcome, Received
from bus.contracts.base import Meta
from bus.contracts.build import BuildState
from bus.contracts.cell import CellBuild, ComputeHosts, ComputeOutcome, ComputeResult, HostReport, Running
from bus.contracts.placement import Claim, ClaimOutcome, ClaimResult
from bus.faults import Transient
from cell_conductor.domain.events import DeleteRequested, InstanceEvent, SpawnFailed
from cell_conductor.domain.instance import State
from cell_conductor.domain.report import rescan_id
from cell_conductor.engine import Engine
from cell_conductor.handlers import build_requested
from cell_conductor.placement_requests import PendingQuestion, PlacementRequests
from tests.integration.conductor.neighbours import CELL, WAIT_S, Cell
from tests.kit.waiting import until
from tests.unit.conductor.world import engine_of, requests_of

# --- The engine over the in-process bus and a real PostgreSQL, with a scripted placement and compute service.


async def test_many_builds_use_alternates_and_none_is_lost_or_doubled(cell: Cell) -> None:
    cell.around.fails = {cell.host(1), cell.host(4)}
    cell.around.full = {cell.host(2)}
    builds = [cell.build(1, 2, 3) if n % 3 else cell.build(1, 2, 4) for n in range(60)]
    await cell.around.bus.publish_all([(b, "") for b in builds] + [(b, "") for b in builds[:20]])
    await until(lambda: all(cell.around.ends(b.spec.instance_uuid) for b in builds))
    for number, build in enumerate(builds):
        expected = BuildState.ACTIVE if number % 3 else BuildState.FAILED
        # The answer to the second request is the same event once more.
        events = [one for one in cell.around.events if one.instance_uuid == build.spec.instance_uuid and one.terminal]
        assert {(one.sequence, one.state) for one in events} == {(events[0].sequence, expected)}
    failed = next(e for e in cell.around.events if e.state is BuildState.FAILED)
    assert failed.code == "max_retries_exceeded"
    assert [(r.host, r.outcome) for r in failed.history] == [
        ("host-1", "failed"),
        ("host-2", "not_claimed"),
        ("host-4", "failed"),
    ]
    await cell.check_at_rest()


async def test_delete_of_an_active_instance_releases_after_the_destroy(cell: Cell) -> None:
    uuid = await cell.active(1)
    await cell.delete(uuid)
    await until(lambda: cell.around.ends(uuid) == [BuildState.ACTIVE, BuildState.DELETED])
    assert not cell.around.held and not cell.around.running


async def test_a_hung_host_is_left_at_the_deadline_and_its_late_success_destroyed(cell: Cell) -> None:
    cell.around.hangs = {cell.host(1)}
    build = cell.build(1, 2, timeout_s=600.0)
    uuid = build.spec.instance_uuid
    await cell.around.bus.publish(build)
    await until(lambda: len(cell.around.spawns) == 1)
    assert await cell.engine.sweep() == 0
    cell.clock.offset += 601.0
    assert await cell.engine.sweep() == 1
    await until(lambda: cell.around.ends(uuid) == [BuildState.ACTIVE])
    assert [(s.attempt, s.host_uuid) for s in cell.around.spawns] == [(1, cell.host(1)), (2, cell.host(2))]
    # The host did build attempt 1 after all (its fence was lost): it is commanded to destroy it.
    cell.around.running[cell.host(1), uuid] = 1
    before = len(cell.around.destroys)
    late = ComputeResult(
        instance_uuid=uuid, attempt=1, host_uuid=cell.host(1), service="s1", outcome=ComputeOutcome.ACTIVE
    )
    await cell.around.bus.publish(late)
    await until(lambda: len(cell.around.destroys) > before)
    assert cell.around.ends(uuid) == [BuildState.ACTIVE]
    await cell.check_at_rest()


async def test_a_crash_between_claim_and_record_leaks_nothing(cell: Cell) -> None:
    """Placement has released and claimed, the conductor dies before it could write that down."""
    cell.around.fails = {cell.host(1)}
    cell.around.silent_claims = 1
    uuid = await cell.given(1, 2, 3)
    await until(lambda: len(cell.around.destroys) == 1)
    await until(lambda: bool(cell.around.claims))
    assert cell.around.held[uuid][:2] == (2, cell.host(2))
    assert await cell.state(uuid) is State.CLAIMING
    cell.clock.offset += 60.0
    await cell.new_engine().sweep()  # another process, which knows only the record
    await until(lambda: cell.around.ends(uuid) == [BuildState.ACTIVE])
    assert cell.around.claims[0] == cell.around.claims[-1]
    assert [(s.attempt, s.host_uuid) for s in cell.around.spawns] == [(1, cell.host(1)), (2, cell.host(2))]
    await cell.check_at_rest()


async def test_a_lost_answer_without_room_still_ends_as_exhausted(cell: Cell) -> None:
    cell.around.fails, cell.around.full = {cell.host(1)}, {cell.host(2)}
    cell.around.silent_claims = 1
    uuid = await cell.given(1, 2)
    await until(lambda: bool(cell.around.claims))
    cell.clock.offset += 60.0
    await cell.new_engine().sweep()  # another process, which knows only the record
    await until(lambda: cell.around.ends(uuid) == [BuildState.FAILED])
    assert cell.around.events[-1].code == "max_retries_exceeded"
    await cell.check_at_rest()


async def test_an_unanswered_question_waits_its_turn(cell: Cell) -> None:
    cell.around.fails, cell.around.silent_claims = {cell.host(1)}, 2
    build = cell.build(1, 2)
    await cell.around.bus.publish(build)
    await until(lambda: bool(cell.around.claims))
    cell.clock.offset += 60.0
    other = cell.new_engine()  # of another process: this one's question is still open
    assert await other.sweep() == 1
    assert await other.sweep() == 0
    cell.clock.offset += 60.0
    assert await other.sweep() == 1
    await until(lambda: cell.around.ends(build.spec.instance_uuid) == [BuildState.ACTIVE])
    await cell.check_at_rest()


async def test_a_locked_instance_is_read_after_its_holder(cell: Cell) -> None:
    build = cell.build(1, 2)
    uuid = build.spec.instance_uuid
    await cell.engine.take([_build_arrival(build, cell)], source="test")

    async def second() -> State:
        return await cell.state(uuid)

    async with cell.store.transaction() as transaction:
        first = (await transaction.lock([uuid]))[uuid]
        waiting = asyncio.create_task(second())
        async with asyncio.timeout(WAIT_S):
            while not waiting.done() and not await _blocked(cell):
                pass
        await transaction.update([replace(first, state=State.FAILED, deadline=None)])
    assert await waiting is State.FAILED


async def _blocked(cell: Cell) -> bool:
    async with cell.database.raw() as connection:
        return bool(await connection.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"))


async def test_changed_consumer_is_never_built(cell: Cell) -> None:
    """Another client owns the consumer now: the build stops, and its host keeps what it has."""
    cell.around.fails = {cell.host(1)}
    build = cell.build(1, 2)
    uuid = build.spec.instance_uuid
    cell.around.held[uuid] = (1, cell.host(1), 99)
    await cell.around.bus.publish(build)
    await until(lambda: cell.around.ends(uuid) == [BuildState.FAILED])
    assert cell.around.events[-1].code == "placement.consumer_changed"
    assert len(cell.around.spawns) == 1


async def test_reports_repair_lost_results_and_lost_machines_and_leave_what_no_record_knows(cell: Cell) -> None:
    cell.around.hangs = {cell.host(1)}
    quiet, doomed = cell.build(1), cell.build(2)
    orphan, foreign = new_uuid(cell.rng), new_uuid(cell.rng)
    await cell.around.bus.publish_all([(quiet, ""), (doomed, "")])
    await until(lambda: len(cell.around.spawns) == 2 and bool(cell.around.ends(doomed.spec.instance_uuid)))
    cell.around.running = {(cell.host(1), quiet.spec.instance_uuid): 1, (cell.host(1), orphan): 4}
    cell.clock.offset += 40.0
    (lost,) = await cell.store.briefs([], [doomed.spec.instance_uuid])
    report = ComputeHosts(
        service="s1",
        cell=CELL,
        epoch=1,
        sequence=1,
        hosts=(
            HostReport(
                uuid=cell.host(1),
                name="host-1",
                running=(
                    Running(instance_uuid=quiet.spec.instance_uuid, attempt=1, deployment=cell.store.deployment),
                    Running(instance_uuid=orphan, attempt=4, deployment=cell.store.deployment),
                    Running(instance_uuid=foreign, attempt=0),
                ),
            ),
            HostReport(uuid=cell.host(2), name="host-2", running=()),
        ),
        rescans=(rescan_id(lost),),
    )
    await cell.around.bus.publish_all([(report, ""), (report, "")])
    failed = BuildState.FAILED
    await until(
        lambda: (
            any(e.state is failed and e.instance_uuid == doomed.spec.instance_uuid for e in cell.around.events)
            and cell.around.ends(quiet.spec.instance_uuid) == [BuildState.ACTIVE]
        )
    )
    assert cell.around.events[-1].code in {"instance.lost", ""}
    assert {d.instance_uuid for d in cell.around.destroys} == {doomed.spec.instance_uuid}, "what no record knows stays"
    del cell.around.running[cell.host(1), orphan]
    assert cell.around.ends(doomed.spec.instance_uuid) == [BuildState.ACTIVE]
    await cell.check_at_rest()


async def test_two_conductors_sweep_each_instance_once(cell: Cell) -> None:
    cell.around.hangs = {cell.host(1)}
    builds = [cell.build(1, 2, timeout_s=60.0) for _ in range(40)]
    await cell.around.bus.publish_all([(b, "") for b in builds])
    await until(lambda: len(cell.around.spawns) == 40)
    cell.clock.offset += 61.0
    swept = await asyncio.gather(*[engine.sweep() for engine in (cell.engine, cell.new_engine()) for _ in range(4)])
    assert sum(swept) == 40
    await until(lambda: all(cell.around.ends(b.spec.instance_uuid) for b in builds))
    assert len(cell.around.spawns) == 80
    await cell.check_at_rest()


async def test_the_same_build_taken_by_two_conductors_at_once_is_commanded_once(cell: Cell) -> None:
    handlers = [requests_of(engine, cell.clock) for engine in (cell.engine, cell.new_engine())]
    builds = [cell.build(1, 2) for _ in range(30)]

    def received(build: CellBuild) -> Received:
        return Received(message=build, meta=Meta(id=new_uuid(cell.rng)), bus=CELL, queue="conductor.requests")

    takes: list[Awaitable[Sequence[Outcome]]] = [
        handler.requests([received(build) for build in order])
        for handler in handlers
        for order in (builds, builds[::-1])
    ]
    await asyncio.gather(*takes)
    await until(lambda: all(cell.around.ends(b.spec.instance_uuid) for b in builds))
    assert len(cell.around.spawns) == 30
    await cell.check_at_rest()


async def test_nothing_is_recorded_or_sent_when_the_transaction_fails(cell: Cell) -> None:
    build = cell.build(1)
    await _on_outbox_insert(cell, "RAISE EXCEPTION 'the outbox is shut'")
    with pytest.raises(Exception, match="the outbox is shut"):
        await cell.engine.take([_build_arrival(build, cell)], source="test")
    assert await cell.state(build.spec.instance_uuid) is State.ABSENT
    await _calm_outbox(cell)
    await cell.engine.take([_build_arrival(build, cell)], source="test")
    await until(lambda: bool(cell.around.ends(build.spec.instance_uuid)))
    assert len(cell.around.spawns) == 1


async def test_a_killed_connection_is_transient_and_the_batch_can_be_taken_again(cell: Cell) -> None:
    build = cell.build(1)
    await _on_outbox_insert(cell, "PERFORM pg_terminate_backend(pg_backend_pid())")
    with pytest.raises(Transient):
        await cell.engine.take([_build_arrival(build, cell)], source="test")
    await _calm_outbox(cell)
    await cell.engine.take([_build_arrival(build, cell)], source="test")
    await until(lambda: bool(cell.around.ends(build.spec.instance_uuid)))
    await cell.check_at_rest()


async def _on_outbox_insert(cell: Cell, statement: str) -> None:
    async with cell.database.raw() as connection:
        await connection.execute(
            f"CREATE FUNCTION disturb() RETURNS trigger AS $$ BEGIN {statement}; RETURN NEW; END $$ LANGUAGE plpgsql; "
            "CREATE TRIGGER disturb BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION disturb()"
        )


async def _calm_outbox(cell: Cell) -> None:
    await cell.sql("DROP TRIGGER disturb ON outbox")


def _build_arrival(build: CellBuild, cell: Cell) -> InstanceEvent:
    return InstanceEvent(build.spec.instance_uuid, build_requested(build, cell.clock.time(), "why"), "message-1")


# --- Two conductors ask placement the same question at once, and are answered differently.


class Held(PlacementRequests):
    """Every question to placement waits until it is let go."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell.bus, cell.clock, cell.config.claim_timeout_s)
        self.asking, self.go = asyncio.Event(), asyncio.Semaphore(0)

    async def _ask(self, questions: Sequence[PendingQuestion]) -> list[InstanceEvent]:
        self.asking.set()
        await self.go.acquire()
        return await super()._ask(questions)

    async def requested(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.asking.wait()
        self.asking.clear()


async def test_a_question_that_came_twice_may_be_answered_full_and_then_claimed(cell: Cell) -> None:
    """The first asking releases and finds no room; then there is room for the second one (a redelivered message)."""
    uuid = await _building(cell)
    (one, first_held), (two, second_held) = _held(cell), _held(cell)
    failed = InstanceEvent(uuid, SpawnFailed(at=cell.clock.time(), attempt=1, host_uuid=cell.host(1)), "a message")
    cell.around.full = {cell.host(2)}
    cell.around._claim = _placement(cell)  # type: ignore[method-assign]
    first = asyncio.create_task(one.take([failed], source="test"))
    await first_held.requested()
    second = asyncio.create_task(two.take([failed], source="test"))
    await second_held.requested()
    first_held.go.release()  # full: the claim of the first host is released, none is taken
    await first_held.requested()  # it requests a release, of the attempt that may have been claimed too
    assert await cell.state(uuid) is State.RELEASING
    cell.around.full = set()
    second_held.go.release()
    await second
    assert uuid in cell.around.held
    first_held.go.release()
    await first
    assert await cell.state(uuid) is State.FAILED
    await cell.check_at_rest()


def _held(cell: Cell) -> tuple[Engine, Held]:
    made = engine_of(
        store=cell.store, bus=cell.bus, relay=cell.relay, clock=cell.clock, config=cell.config, cell=cell.bus.name
    )
    held = made._placement = Held(cell)
    return made, held


async def _building(cell: Cell) -> str:
    cell.around.hangs = {cell.host(1)}
    build = cell.build(1, 2)
    uuid = build.spec.instance_uuid
    await cell.engine.take([InstanceEvent(uuid, build_requested(build, cell.clock.time(), uuid))], source="test")
    return uuid


def _placement(cell: Cell) -> object:
    """As the real one: a release_first that finds nothing to release may go on."""

    def claim(message: Claim) -> ClaimResult:
        cell.around.held.pop(message.consumer, None)
        (place,) = message.options[0].allocations
        if place in cell.around.full:
            return ClaimResult(outcome=ClaimOutcome.FULL, outcomes=(ClaimOutcome.FULL,))
        cell.around.held[message.consumer] = (message.attempt, place, 2)
        return ClaimResult(
            outcome=ClaimOutcome.CLAIMED, option=0, outcomes=(ClaimOutcome.CLAIMED,), consumer_generation=2
        )

    return claim


# --- The purged records, and the limits of an old report's proof.


async def test_deleted_instances_are_forgotten_after_their_time_and_no_others(cell: Cell) -> None:
    cell.around.fails = {cell.host(3)}
    gone, kept, failed = cell.build(1), cell.build(2), cell.build(3)
    uuids = [build.spec.instance_uuid for build in (gone, kept, failed)]
    tombstone = new_uuid(cell.rng)
    await cell.around.bus.publish_all([(build, "") for build in (gone, kept, failed)])
    await until(lambda: all(cell.around.ends(uuid) for uuid in uuids))
    await cell.delete(uuids[0])
    await until(lambda: BuildState.DELETED in cell.around.ends(uuids[0]))
    await cell.engine.take([InstanceEvent(tombstone, DeleteRequested(at=cell.clock.time()))], source="test")
    day_s = cell.config.deleted_retention_s
    assert await cell.store.purge_deleted(cell.clock.time() - day_s, 10) == 0
    cell.clock.offset += day_s + 1.0
    assert await cell.store.purge_deleted(cell.clock.time() - day_s, 1) == 1
    assert await cell.store.purge_deleted(cell.clock.time() - day_s, 10) == 1
    assert await cell.store.purge_deleted(cell.clock.time() - day_s, 10) == 0
    states = [await cell.state(uuid) for uuid in (*uuids, tombstone)]
    assert states == [State.ABSENT, State.ACTIVE, State.FAILED, State.ABSENT]
