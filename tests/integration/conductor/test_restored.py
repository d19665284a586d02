"""A cell whose database is set back, emptied or replaced, and a host that changes its service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.base import Meta
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.cell import (
    CellBuild,
    CellDelete,
    ComputeHosts,
    ComputeOutcome,
    ComputeResult,
    HostReport,
    RescanHosts,
    Running,
)
from bus.faults import DatabaseReplaced
from bus.persistence.relay import Relay
from cell_conductor.domain.instance import State
from cell_conductor.domain.report import Unexplained, UnexplainedKind
from cell_conductor.handlers import RETRIES, UNSURE
from cell_conductor.store.safety import ADOPT, DecidedMachine
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.builds import NewBuild, RecordedBuild
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from scheduler_worker.unanswered import UnansweredRequests
from tests.integration.conductor.neighbours import CELL, WAIT_S, Cell
from tests.kit.waiting import until
from tests.unit.conductor.world import requests_of

# --- A conductor's database is set back, emptied or replaced, also under conductors that go on running.


async def _active(cell: Cell) -> tuple[str, str]:
    """An active instance, and its record while it was building."""
    cell.around.hangs = {cell.host(1)}
    uuid = await cell.given(1, 2)
    await until(lambda: bool(cell.around.spawns))
    async with cell.database.raw() as connection:
        before: str = await connection.fetchval("SELECT record::text FROM instances")
    cell.around.hangs = set()
    await cell.around.bus.publish(cell.around.spawns[0])
    await until(lambda: cell.around.ends(uuid) == [BuildState.ACTIVE])
    return uuid, before


async def _set_back(cell: Cell, record: str, *, origin: bool) -> None:
    async with cell.database.raw() as connection:
        await connection.execute(
            "UPDATE instances SET state = 'building', record = $1::text::json,"
            " deadline = ($1::text::json ->> 'deadline')::float",
            record,
        )
        if origin:
            await connection.execute("UPDATE identity SET origin = 'another cluster'")


@pytest.mark.parametrize("origin", [True, False], ids=["restored elsewhere", "disk set back"])
async def test_a_machine_that_became_active_since_the_backup_is_adopted_and_not_destroyed(
    cell: Cell, *, origin: bool
) -> None:
    uuid, record = await _active(cell)
    await _set_back(cell, record, origin=origin)
    cell.clock.offset += 61.0  # its deadline has passed
    with capture_logs() as logs:
        async with asyncio.timeout(WAIT_S):
            while await cell.state(uuid) is State.BUILDING:
                await cell.engine.sweep()
    errors = [line["event"] for line in logs if line["log_level"] == "error"]
    assert errors == (["cell.database_set_back"] if origin else [])
    assert await cell.state(uuid) is State.ACTIVE
    assert cell.around.running == {(cell.host(1), uuid): 1}
    await cell.check_at_rest()


async def test_of_a_doubted_build_nothing_is_destroyed_while_its_host_is_silent(cell: Cell) -> None:
    uuid, record = await _active(cell)
    cell.around.silent = True
    await _set_back(cell, record, origin=True)
    for _ in range(20):
        cell.clock.offset += 61.0
        await cell.engine.sweep()
    assert await cell.state(uuid) is State.BUILDING and not cell.around.fences
    cell.around.silent = False
    cell.clock.offset += 601.0
    await cell.engine.sweep()
    await until(lambda: len(cell.around.ends(uuid)) == 2)  # a second client would receive it, too
    assert await cell.state(uuid) is State.ACTIVE
    await cell.check_at_rest()


@pytest.mark.parametrize("swept", [True, False], ids=["after a sweep", "before every sweep"])
async def test_a_forgotten_build_that_comes_again_for_another_host_is_adopted_where_its_machine_runs(
    cell: Cell, *, swept: bool
) -> None:
    """One drill in four: the second machine was built, and the first one ran on in quarantine."""
    uuid, _ = await _active(cell)
    await cell.sql("DELETE FROM instances", "UPDATE identity SET origin = 'another cluster'")
    if swept:
        await cell.engine.sweep()
    again = cell.build(3, 4)
    again = replace(again, spec=replace(again.spec, instance_uuid=uuid), requested_at=cell.clock.time() - 1.0)
    cell.around.held = {uuid: (1, cell.host(3), 1)}  # the book was restored as well, and has the new claim
    spawns = len(cell.around.spawns)
    await cell.around.bus.publish(again)
    await until(lambda: cell.around.ends(uuid) == [BuildState.ACTIVE, BuildState.ACTIVE])
    assert len(cell.around.spawns) == spawns
    assert cell.around.running == {(cell.host(1), uuid): 1}
    assert cell.around.held == {uuid: (2, cell.host(1), 2)}
    assert await cell.state(uuid) is State.ACTIVE


async def test_a_conductor_survives_an_answer_to_a_question_that_its_emptied_database_does_not_know(cell: Cell) -> None:
    """`Released while absent` ended the process (seed 51)."""
    cell.around.fails = {cell.host(1)}
    build = cell.build(1)
    cell.around.answers.clear()
    await cell.around.bus.publish(build)
    await cell.around.requested.wait()
    await cell.sql("DELETE FROM instances")
    cell.around.answers.set()
    second = cell.build(2)
    await cell.around.bus.publish(second)
    await until(lambda: cell.around.ends(second.spec.instance_uuid) == [BuildState.ACTIVE])
    await cell.drain()


async def test_a_conductor_does_not_go_on_with_the_database_that_replaces_its_own(cell: Cell) -> None:
    before = cell.store.deployment
    await cell.sql("UPDATE identity SET deployment = gen_random_uuid()")
    with pytest.raises(DatabaseReplaced):
        await cell.engine.sweep()
    assert cell.store.deployment == before


@pytest.mark.parametrize("is_lost", [False, True], ids=["its machine runs", "its machine is gone"])
@pytest.mark.parametrize("is_noticed", [False, True], ids=["emptied", "set back"])
async def test_a_delete_of_what_a_cell_has_forgotten_is_answered(
    cell: Cell, *, is_lost: bool, is_noticed: bool
) -> None:
    """It left a tombstone: the client waited for ever, and the machine went on running in quarantine."""
    uuid, _ = await _active(cell)
    if is_lost:
        cell.around.running.clear()
    await cell.sql("DELETE FROM instances")
    if is_noticed:
        await cell.sql("UPDATE identity SET origin = 'another cluster'")
        await cell.engine.sweep()
    await cell.delete(uuid, begun=not is_noticed)
    await until(lambda: cell.around.ends(uuid) == [BuildState.ACTIVE, BuildState.DELETED])
    assert await cell.state(uuid) is State.DELETED
    await cell.check_at_rest()
    assert cell.around.running == {} and cell.around.held == {}


async def test_a_delete_of_an_instance_whose_machine_has_another_databases_mark_leaves_machine_and_claim(
    cell: Cell,
) -> None:
    """It is not ours to destroy, and its room is not free: the delete is logged, and has no end."""
    uuid, _ = await _active(cell)
    theirs = Unexplained(uuid, 1, cell.host(2), UnexplainedKind.FOREIGN, "another deployment's")
    await cell.store.safety.record("s1", [theirs], 1.0)
    held = dict(cell.around.held)
    cell.around.running.clear()
    await cell.sql("DELETE FROM instances")
    handlers = requests_of(cell.engine, cell.clock, search=cell.search)
    message = CellDelete(instance_uuid=uuid, project_id="p", begun=True)
    for attempt, expected in ((0, UNSURE), (RETRIES, Done())):
        meta = Meta(id=f"{attempt}", cause=uuid, sent_at=1.0, attempt=attempt)
        with capture_logs() as logs:
            outcomes = await handlers.requests([Received(message, meta, "c1", "conductor.requests")])
        assert outcomes == [expected]
    assert [line["event"] for line in logs] == ["instance.delete_unanswered"]
    assert cell.around.ends(uuid) == [BuildState.ACTIVE] and cell.around.held == held


@pytest.mark.parametrize("is_ahead", [True, False], ids=["the book has the move", "the book was set back as well"])
async def test_a_machine_in_quarantine_is_given_back_to_its_record_by_an_operators_word(
    cell: Cell, *, is_ahead: bool
) -> None:
    """It was moved after the backup. An operator could destroy it or leave it there for good, and nothing else."""
    uuid, _ = await _active(cell)
    at, book, spawns = cell.host(2), cell.around.held, len(cell.around.spawns)
    del cell.around.running[cell.host(1), uuid]
    cell.around.running[at, uuid] = 2
    if is_ahead:
        book[uuid] = (2, at, 5)
    reports = count(1)

    async def report() -> None:
        ours = Running(instance_uuid=uuid, attempt=2, deployment=cell.store.deployment)
        hosts = (HostReport(uuid=at, name="host-2", running=(ours,)),)
        page = ComputeHosts(service="s1", cell="c1", epoch=1, sequence=next(reports), hosts=hosts)
        await cell.around.bus.publish(page)

    await report()
    await until(lambda: cell.store.safety.decide([DecidedMachine(uuid, at)], ADOPT, "ann", 1.0))
    assert await cell.state(uuid) is State.ACTIVE and cell.around.events[-1].host == "host-1"
    await report()
    await until(lambda: cell.around.events[-1].host == at)  # the neighbour's hosts have no other name
    assert cell.around.ends(uuid) == [BuildState.ACTIVE] * 2 and not cell.around.destroys
    assert (len(cell.around.spawns), cell.around.running) == (spawns, {(at, uuid): 2})
    assert book[uuid][1] == at
    await report()
    async with asyncio.timeout(WAIT_S):
        while await cell.store.safety.records():  # noqa: ASYNC110  (a record explains it now)
            await asyncio.sleep(0.01)
    assert await cell.state(uuid) is State.ACTIVE


# --- A cell whose database was set back to before a delete has it commanded once more by the schedulers' watch.


async def none_is_accepted(instances: Mapping[str, int]) -> set[str]:
    assert not instances
    return set()


@asynccontextmanager
async def the_schedulers(cell: Cell, build: CellBuild) -> AsyncIterator[UnansweredRequests]:
    """The task of a scheduler that has the delete on record, and waits for its end."""
    store = MemoryBuilds(MemoryBuildTable(cell.clock).session())
    buses = {cell.around.bus.name: cell.around.bus}
    relay = Relay(store.outbox, buses, clock=cell.clock)
    store.publish_through(relay)
    await store.open()
    publishing = asyncio.create_task(relay.run())
    uuid = build.spec.instance_uuid
    record = RecordedBuild(
        instance_uuid=uuid, project_id="p", state=BuildState.DELETING, sequence=12, cell=cell.around.bus.name
    )
    request = BuildRequest(instance_uuid=uuid, project_id="p", flavor="m1.small")
    async with store.unit() as unit:
        await unit.insert([NewBuild(request=request, digest=b"", build=record)], cell.clock.time())
    yield UnansweredRequests(
        store, buses, SchedulerConfig, clock=cell.clock, rng=cell.rng, after_s=0.01, resume=none_is_accepted
    )
    publishing.cancel()
    await asyncio.gather(publishing, return_exceptions=True)


@pytest.mark.postgres
async def test_a_delete_is_carried_out_though_the_cell_was_set_back_to_before_it(cell: Cell) -> None:
    build = cell.build(1, 2)
    uuid = build.spec.instance_uuid
    await cell.around.bus.publish(build)
    await until(lambda: cell.around.ends(uuid) == [BuildState.ACTIVE])
    async with cell.database.raw() as connection:
        before = await connection.fetchrow("SELECT state, deadline, record::text FROM instances")
    cell.around.silent = True  # the delete is on record and not carried out
    await cell.delete(uuid, begun=True)
    async with asyncio.timeout(WAIT_S):
        while (  # noqa: ASYNC110  (nothing announces that it is acknowledged)
            await cell.state(uuid) is State.ACTIVE or sum(one.in_hand for one in cell.consumers)
        ):
            await asyncio.sleep(0.01)
    async with cell.database.raw() as connection:
        await connection.execute("UPDATE instances SET state = $1, deadline = $2, record = $3::text::json", *before)
        await connection.execute("UPDATE identity SET origin = 'another cluster'")
    cell.around.silent = False
    before_it = len(cell.around.events)
    async with the_schedulers(cell, build) as watch:
        for _ in range(10):
            cell.clock.offset += 3_601.0
            await cell.engine.sweep()
            await watch.look()
            await asyncio.sleep(0.1)
    assert cell.around.ends(uuid)[-1:] == [BuildState.DELETED], (
        f"ten hours later it is {(await cell.state(uuid)).value}; announced since the set-back:"
        f" {[(one.state.value, one.sequence) for one in cell.around.events[before_it:]]}"
    )


# --- A host changes its compute service while one of its machines is to be deleted.


async def test_a_delete_sent_to_a_dead_service_is_sent_to_its_heir(cell: Cell) -> None:
    """The order lies in a queue without a consumer; the heir, s1, reports the machine."""
    around, host = cell.around, cell.host(1)
    await cell.bus.declare("compute.{service}", service="dead")
    build = cell.build(1)
    uuid = build.spec.instance_uuid
    at_dead = replace(build, selections=tuple(replace(s, service="dead") for s in build.selections))
    await around.bus.publish(at_dead)
    await until(lambda: bool(around.events))
    around.running[host, uuid] = 1
    built = ComputeResult(instance_uuid=uuid, attempt=1, host_uuid=host, service="dead", outcome=ComputeOutcome.ACTIVE)
    await around.bus.publish(built)
    await until(lambda: bool(around.ends(uuid)))
    await around.bus.publish(CellDelete(instance_uuid=uuid, project_id="p"))
    await until(lambda: around.events[-1].state is BuildState.DELETING)
    still = Running(instance_uuid=uuid, attempt=1, deployment=cell.store.deployment)
    report = ComputeHosts(
        service="s1",
        cell=CELL,
        epoch=1,
        sequence=1,
        hosts=(HostReport(uuid=host, name="host-1", running=(still,)),),
    )
    await cell.receive(report)
    await until(lambda: around.events[-1].state is BuildState.DELETED)
    assert [order.service for order in around.destroys] == ["s1"]
    assert await cell.state(uuid) is State.DELETED
    await cell.check_at_rest()


async def test_what_an_heir_misses_is_lost_by_the_scan_that_was_requested_and_by_none_before(cell: Cell) -> None:
    """Seed 61245 at d0562af: by the heir's clock, which was ahead, a scan of before the build was long after it."""
    around, host = cell.around, cell.host(1)
    looks: asyncio.Queue[RescanHosts] = asyncio.Queue()

    async def heir(batch: Sequence[Received]) -> Sequence[Outcome]:
        for received in batch:
            if isinstance(received.message, RescanHosts):
                looks.put_nowait(received.message)
        return [Done()] * len(batch)

    listening = Consumer(around.bus, "compute.control.{service}", heir, service="heir", source="heir")
    await listening.start()
    running = asyncio.create_task(listening.run())
    build = cell.build(1)
    uuid = build.spec.instance_uuid
    await around.bus.publish(build)
    await until(lambda: bool(around.ends(uuid)))
    assert await cell.state(uuid) is State.ACTIVE
    cell.clock.offset += 60.0
    ahead = cell.clock.time() + 3600.0
    report = ComputeHosts(
        service="heir", cell=CELL, epoch=1, sequence=1, seen_at=ahead, scan=1,
        hosts=(HostReport(uuid=host, name="host-1", running=()),),
    )  # fmt: skip
    await cell.receive(report, ahead)
    assert await cell.state(uuid) is State.ACTIVE
    async with asyncio.timeout(60):
        order = await looks.get()
    assert (order.hosts, len(order.rescans)) == ((host,), 1)
    del around.running[host, uuid]  # it is really gone, and the heir looks again
    again = replace(report, sequence=2, scan=2, rescans=order.rescans)
    await cell.receive(again, ahead)
    await until(lambda: BuildState.FAILED in [event.state for event in around.events])
    await listening.drain(5.0)
    await running
