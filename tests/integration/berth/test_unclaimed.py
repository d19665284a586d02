"""What an audit reads of whole records: instances that hold nothing, and the members of a gang."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from berth.audit.facts import _gangs, _roots
from berth.audit.invariants import RunningFact
from berth.audit.missing_claims import HostReports, Unclaimed, catch_up, claim_again, find_unclaimed
from berth.cli.claims import placement_audit as book
from berth.cli.claims.placement_audit import audited
from berth.config.settings import DatabaseSettings, Settings
from berth.config.site import Site
from bus.bus import Bus
from bus.clock import SystemClock, new_uuid
from bus.consuming.consumer import Consumer
from bus.contracts.actions import ActionKind, ActionState, CellAction
from bus.contracts.build import BuildRequest, BuildState, DeleteRequest
from bus.contracts.cell import InstanceSpec, Selection
from bus.contracts.placement import ClaimResult, Inventory, InventoryUpdate, ProviderReport, Release
from bus.contracts.placement_queries import ConsumerRecord
from bus.memory import MemoryBroker, MemoryTransport
from bus.persistence.database import Database
from cell_conductor.awaited_request import awaited_request_of
from cell_conductor.placement_client import PendingRequest, PlacementRequests
from cell_conductor.state.desired_state import DESIRED_STATES
from cell_conductor.state.events import ActionRequested
from cell_conductor.state.instance import Instance, State
from cell_conductor.state.ownership_proof import is_provably_ended
from cell_conductor.state.step import StepContext
from cell_conductor.state.unknown_machine import UnknownMachine, UnknownMachineKind
from cell_conductor.store.postgres import MIGRATIONS, PostgresInstances
from cell_conductor.store.postgres_keyed import PostgresKeyed
from cell_conductor.store.tables import INSERT, columns, with_parameters
from cell_conductor.store.unknown_machines import Safety
from cell_conductor.transition import step
from placement_worker.handlers import PlacementHandlers
from placement_worker.operations.audit import generations
from placement_worker.service import PlacementService
from scheduler_worker.build.delete_rules import PendingDelete, plan_deletes
from scheduler_worker.records.action_record import RecordedAction
from scheduler_worker.records.build_record import (
    FAILED_OR_REFUSED,
    SCHEDULED,
    Actor,
    BuildUpdate,
    Gang,
    NewBuild,
    RecordedBuild,
)
from scheduler_worker.requests.request_delivery import RequestDelivery
from scheduler_worker.store.postgres import MIGRATIONS as SCHEDULER_MIGRATIONS
from scheduler_worker.store.postgres import PostgresBuilds
from tests.integration.placement_worker.conftest import PlacementDatabase, claim
from tests.kit.sent import Sent

# --- An instance that runs by its cell's record and holds nothing in placement, as after a restore: it is found and
# claimed again.


pytestmark = pytest.mark.postgres
GRACE_S = 900.0
ASK_S = 60.0
VCPUS = {"VCPU": 2}
HOUR_S = 3600.0


class Restored:
    """A book with two hosts of four VCPUs, and the record of a cell."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.rng = random.Random(7)
        self.book = PlacementDatabase(url)
        self.cell = Database(url, "cell_cell1", pool_size=1)
        self.site = Site(Settings(database=DatabaseSettings(url=url)))
        self.hosts: list[str] = []

    async def instance(
        self,
        *,
        host: int = 0,
        age_s: float = HOUR_S,
        state: State = State.ACTIVE,
        next_state: State | None = None,
        highest_attempt: int = 1,
        amounts: Mapping[str, int] = VCPUS,
    ) -> str:
        """An instance by its cell's record, of two VCPUs unless `amounts` differ."""
        uuid, place = new_uuid(self.rng), self.hosts[host]
        selection = Selection(host_uuid=place, host="h", service="s", allocations={place: dict(amounts)})
        record = Instance(
            uuid=uuid,
            state=state,
            next_state=next_state,
            spec=InstanceSpec(instance_uuid=uuid, project_id="p"),
            selections=(selection,),
            attempt=1,
            highest_attempt=highest_attempt,
            since=SystemClock().time() - age_s,
        )
        async with self.cell.raw() as connection:
            await connection.execute(with_parameters(INSERT), *columns([record]))
        return uuid

    async def found(self) -> set[str]:
        return {each.instance.uuid for each in await find_unclaimed(self.site, self.book.database, GRACE_S)}

    async def repair(self, *machines: RunningFact, silent: Collection[str] = ()) -> list[str]:
        """machines: what the hosts report. silent: hosts that do not."""
        found = await find_unclaimed(self.site, self.book.database, GRACE_S)
        reports = HostReports(machines, {*self.hosts}.difference(silent))
        known, left = await catch_up(self.site, found, reports)
        return left + await claim_again(self.book.store, known)

    async def recorded(self, uuid: str) -> Instance:
        async with PostgresInstances(self.cell).transaction() as transaction:
            return (await transaction.lock([uuid]))[uuid]

    async def ahead(self) -> str:
        """An instance on the first host; placement has carried out a forgotten claim of the second one for it."""
        uuid, [here, there] = await self.instance(highest_attempt=2), self.hosts
        later = replace(claim(uuid, {there: {"VCPU": 2}}, attempt=3), consumer_generation=1, release_first=True)
        for one in (claim(uuid, {here: {"VCPU": 2}}), later):
            [reply] = await self.book.store.apply([one])
            assert isinstance(reply, ClaimResult) and reply.outcome == "claimed"
        return uuid


@pytest.fixture
async def restored(empty_database: str) -> AsyncIterator[Restored]:
    made = Restored(empty_database)
    await made.book.open()
    await PostgresInstances(made.cell).open()
    made.hosts = await made.book.hosts(2, made.rng, VCPU=4)
    yield made
    await made.cell.close()
    await made.book.store.close()


LEFT_ALONE = "left alone, placement has a later attempt and its host does not report it"


@contextlib.asynccontextmanager
async def requests_to(
    store: PlacementService, clock: SystemClock, rng: random.Random
) -> AsyncIterator[PlacementRequests]:
    """A conductor's requests to placement, answered by this book."""
    handlers = PlacementHandlers(store, clock=clock, committed=lambda: None, claimed=lambda: None)
    bus = Bus("cell1", MemoryTransport(MemoryBroker(clock), "cell1"), process="both", clock=clock, rng=rng)
    await bus.open()
    consumer = Consumer(bus, "placement.requests", handlers.requests)
    await consumer.start()
    yield PlacementRequests(bus, clock, ASK_S, lambda: 0, lambda _incarnation: None)
    await consumer.drain(ASK_S)
    await bus.close()


async def test_what_holds_nothing_is_claimed_again_on_its_own_host(restored: Restored) -> None:
    uuid = await restored.instance()
    assert await restored.found() == {uuid}
    assert await restored.repair() == [f"{uuid}: claimed again"]
    assert await restored.book.allocations() == {uuid: {restored.hosts[0]: {"VCPU": 2}}}
    assert await restored.found() == set()
    assert await restored.book.findings() == []


async def test_what_holds_another_host_gives_that_back_and_gets_its_own(restored: Restored) -> None:
    """A request that the broker handed in again was decided anew, on another host than the machine's."""
    uuid = await restored.instance(host=1)
    await restored.book.store.apply([claim(uuid, {restored.hosts[0]: {"VCPU": 2}})])
    assert await restored.repair() == [f"{uuid}: claimed again"]
    assert await restored.book.allocations() == {uuid: {restored.hosts[1]: {"VCPU": 2}}}
    assert await restored.book.findings() == []


async def test_where_there_is_no_room_nothing_is_claimed_and_the_audit_goes_on_saying_so(restored: Restored) -> None:
    uuid, other = await restored.instance(), new_uuid(restored.rng)
    await restored.book.store.apply([claim(other, {restored.hosts[0]: {"VCPU": 3}})])
    assert await restored.repair() == [f"{uuid}: left alone, no_capacity"]
    assert await restored.found() == {uuid}
    assert await restored.book.allocations() == {other: {restored.hosts[0]: {"VCPU": 3}}}


async def test_what_runs_on_a_node_is_claimed_though_a_node_in_use_is_reserved(restored: Restored) -> None:
    """Its project's usage was one short until the delete: `left alone, no_capacity`, for ever."""
    node, gold = new_uuid(restored.rng), "CUSTOM_GOLD"
    reserved = Inventory(total=1, reserved=1, max_unit=1)
    report = ProviderReport(uuid=node, name="node", inventories={gold: reserved})
    update = InventoryUpdate(reporter="ironic", version=1, root_uuid=node, providers=(report,))
    await restored.book.store.apply_reports([update])
    restored.hosts.append(node)
    before = await restored.book.store.head()
    uuid = await restored.instance(host=2, amounts={gold: 1})
    assert await restored.repair() == [f"{uuid}: claimed again"]
    assert await restored.book.allocations() == {uuid: {node: {gold: 1}}}
    assert await restored.book.findings() == [], "usage of its project, too"
    page = await restored.book.store.changes(before.sequence, 10)
    assert [(one.used, one.state) for one in page.changes] == [({gold: 1}, None)], "no replica ever sees room there"
    [(capacity, *_)] = [
        one.inventories[gold] for one in (await restored.book.store.snapshot(None, 10)).providers if one.uuid == node
    ]
    assert capacity == 0
    again = await restored.book.store.apply_reports([replace(update, version=2)])
    assert [getattr(one, "outcome", None) for one in again] == ["unchanged"]
    other = await restored.instance(host=2, amounts={gold: 1})
    assert await restored.repair() == [f"{other}: left alone, no_capacity"], "one holds it"


async def test_what_a_pool_shares_is_of_no_host(restored: Restored) -> None:
    """`berth audit` called each instance with a share of a pool doubled, and the proposed repair found nothing."""
    pool = new_uuid(restored.rng)
    shares = {"inventories": {"DISK_GB": Inventory(total=9)}, "traits": ("MISC_SHARES_VIA_AGGREGATE",)}
    report = ProviderReport(uuid=pool, name="pool", **shares)  # type: ignore[arg-type]
    await restored.book.store.apply_reports(
        [InventoryUpdate(reporter="p", version=1, root_uuid=pool, providers=(report,))]
    )
    assert await _roots(restored.book.database) == {host: host for host in restored.hosts}


async def test_what_a_hypervisor_has_reserved_is_not_claimed_for_what_runs_there(restored: Restored) -> None:
    held = restored.book.host(restored.hosts[0], VCPU=4)
    (report,) = held.providers
    kept = replace(report, inventories={"VCPU": Inventory(total=4, reserved=4)})
    await restored.book.store.apply_reports([replace(held, providers=(kept,))])
    uuid = await restored.instance()
    assert await restored.repair() == [f"{uuid}: left alone, no_capacity"]


async def test_what_was_deleted_while_the_audit_read_is_not_claimed(restored: Restored) -> None:
    uuid = await restored.instance()
    seen = await find_unclaimed(restored.site, restored.book.database, GRACE_S)
    await restored.book.store.apply([claim(uuid, {restored.hosts[0]: {"VCPU": 2}})])
    await restored.book.store.apply([Release(consumer=uuid, attempt=2)])  # a deletion ends the last attempt
    assert await claim_again(restored.book.store, seen) == [f"{uuid}: left alone, consumer_conflict"]
    assert await restored.book.allocations() == {}


async def test_what_was_refused_a_claim_by_a_later_attempt_is_claimed_once_there_is_room(restored: Restored) -> None:
    """A machine that is adopted after a restore claims under its next number, which a refusal uses up."""
    uuid, other = await restored.instance(highest_attempt=2), new_uuid(restored.rng)
    full = claim(other, {restored.hosts[0]: {"VCPU": 4}})
    refused = claim(uuid, {restored.hosts[0]: {"VCPU": 2}}, attempt=2, release_first=True)
    await restored.book.store.apply([claim(uuid, {restored.hosts[1]: {"VCPU": 2}}), full])
    async with restored.book.database.raw() as connection:
        known = await generations(connection)
    await restored.book.store.apply([replace(refused, consumer_generation=known[uuid])])
    assert await restored.repair() == [f"{uuid}: left alone, no_capacity"]
    await restored.book.store.apply([Release(consumer=other)])
    assert await restored.repair() == [f"{uuid}: claimed again"]
    assert await restored.book.allocations() == {uuid: {restored.hosts[0]: {"VCPU": 2}}}
    assert await restored.book.findings() == []


async def test_what_the_audit_has_claimed_can_be_moved(restored: Restored) -> None:
    """Its record has the generation from before, by which every move was refused: `placement.consumer_conflict`."""
    uuid = await restored.instance()
    [record] = await find_unclaimed(restored.site, restored.book.database, GRACE_S)
    assert await restored.repair() == [f"{uuid}: claimed again"]
    there = Selection(host_uuid=restored.hosts[1], host="h2", service="s", allocations={restored.hosts[1]: {"VCPU": 2}})
    request = CellAction(
        request_id=new_uuid(restored.rng),
        instance_uuid=uuid,
        project_id="p",
        kind=ActionKind.MIGRATE,
        selections=(there,),
    )
    context, clock = StepContext(cell="cell1"), SystemClock()
    moving = step(record.instance, ActionRequested(at=clock.time(), request=request), context).instance
    async with requests_to(restored.book.store, clock, restored.rng) as placement:
        for _ in range(2):  # refused for its old generation, then with placement's
            asked = awaited_request_of(moving)
            assert asked is not None
            [answer] = await placement.send([PendingRequest(moving, asked)])
            moving = step(moving, answer.event, context).instance
    assert moving.state is State.PREPARING
    assert await restored.book.allocations() == {
        uuid: {restored.hosts[1]: {"VCPU": 2}},
        request.request_id: {restored.hosts[0]: {"VCPU": 2}},
    }


async def test_a_record_that_the_book_is_ahead_of_takes_a_later_attempt_and_is_claimed_again(
    restored: Restored,
) -> None:
    """A claim of the forgotten history was carried out after the restore: it was left alone for ever."""
    uuid = await restored.ahead()
    there = RunningFact(uuid, 1, restored.hosts[0])
    assert await restored.repair(there) == [f"{uuid}: claimed again"]
    assert await restored.book.allocations() == {uuid: {restored.hosts[0]: {"VCPU": 2}}}
    assert await restored.found() == set()
    assert await restored.book.findings() == []
    record = await restored.recorded(uuid)
    assert (record.attempt, record.next_attempt, record.proves_from) == (1, 4, 4)
    assert not is_provably_ended(record, 3, restored.hosts[1]), "a machine that the forgotten claim led to is kept"
    next_claim = claim(uuid, {restored.hosts[1]: {"VCPU": 2}}, attempt=record.next_attempt, release_first=True)
    async with restored.book.database.raw() as connection:
        known = await generations(connection)
    [reply] = await restored.book.store.apply([replace(next_claim, consumer_generation=known[uuid])])
    assert isinstance(reply, ClaimResult) and reply.outcome == "claimed"


@pytest.mark.parametrize(
    "what", ["not listed", "on the other host", "another attempt", "another deployment's", "stopped", "on both hosts"]
)
async def test_without_its_machine_on_the_host_on_record_no_record_takes_a_later_attempt(
    restored: Restored, what: str
) -> None:
    """It was moved or deleted in the history that the record has lost."""
    uuid, [here, there] = await restored.ahead(), restored.hosts
    machines = {
        "not listed": [RunningFact(new_uuid(restored.rng), 1, here)],
        "on the other host": [RunningFact(uuid, 3, there)],
        "another attempt": [RunningFact(uuid, 3, here)],
        "another deployment's": [RunningFact(uuid, 1, here, has_owner_tag=False)],
        "stopped": [RunningFact(uuid, 1, here, is_stopped=True)],  # kept by a move, until that is confirmed
        "on both hosts": [RunningFact(uuid, 1, here), RunningFact(uuid, 3, there, has_owner_tag=False)],
    }
    record = await restored.recorded(uuid)
    assert await restored.repair(*machines[what]) == [f"{uuid}: {LEFT_ALONE}"]
    assert await restored.recorded(uuid) == record
    assert await restored.book.allocations() == {uuid: {there: {"VCPU": 2}}}


async def test_a_host_that_the_book_has_it_on_and_that_is_silent_proves_nothing(restored: Restored) -> None:
    uuid, [here, there] = await restored.ahead(), restored.hosts
    machine = RunningFact(uuid, 1, here)
    assert await restored.repair(machine, silent=[there]) == [f"{uuid}: {LEFT_ALONE}"]
    assert await restored.book.allocations() == {uuid: {there: {"VCPU": 2}}}
    assert await restored.repair(machine) == [f"{uuid}: claimed again"]


async def test_a_record_that_has_changed_since_it_was_read_takes_no_later_attempt(restored: Restored) -> None:
    uuid = await restored.ahead()
    found = await find_unclaimed(restored.site, restored.book.database, GRACE_S)
    deleting = replace(await restored.recorded(uuid), state=State.DESTROYING, next_state=State.DELETED)
    store = PostgresInstances(restored.cell)
    await store.identify()
    async with store.transaction() as transaction:
        await transaction.lock([uuid])
        await transaction.update([deleting])
    reports = HostReports([RunningFact(uuid, 1, restored.hosts[0])], restored.hosts)
    assert await catch_up(restored.site, found, reports) == ([], [f"{uuid}: left alone, its record has changed"])
    assert await restored.recorded(uuid) == deleting


async def test_what_changed_its_holding_while_the_audit_read_is_left_alone(restored: Restored) -> None:
    uuid = await restored.instance(host=1)
    await restored.book.store.apply([claim(uuid, {restored.hosts[0]: {"VCPU": 2}})])
    seen = await find_unclaimed(restored.site, restored.book.database, GRACE_S)
    seen = [replace(each, generation=(each.generation or 0) + 1) for each in seen]
    assert await claim_again(restored.book.store, seen) == [f"{uuid}: left alone, consumer_conflict"]
    assert await restored.book.allocations() == {uuid: {restored.hosts[0]: {"VCPU": 2}}}


async def test_what_is_young_or_not_active_is_not_judged(restored: Restored) -> None:
    await restored.instance(age_s=60.0)
    for state in (State.BUILDING, State.DELETED, State.FAILED):
        await restored.instance(state=state)
    await restored.instance(state=State.CLAIMING, next_state=State.BUILDING)
    assert await restored.found() == set()


async def test_what_holds_something_of_its_host_is_left_as_it_is(restored: Restored) -> None:
    uuid = await restored.instance()
    await restored.book.store.apply([claim(uuid, {restored.hosts[0]: {"VCPU": 1}})])
    assert await restored.found() == set()


async def test_what_became_active_a_moment_ago_is_not_called_doubled(restored: Restored) -> None:
    """A restored cell adopts a machine long after placement has the claim of its request, decided for another host."""
    for schema, migrations in (("scheduler", SCHEDULER_MIGRATIONS), ("cell_cell2", MIGRATIONS)):
        database = Database(restored.url, schema, pool_size=1)
        await database.open(migrations)
        await database.close()
    young, old = await restored.instance(host=1, age_s=60.0), await restored.instance(host=1)
    for uuid in (young, old):
        await restored.book.store.apply([claim(uuid, {restored.hosts[0]: {"VCPU": 2}})])
    async with restored.book.database.raw() as connection:
        await connection.execute("UPDATE consumers SET updated_at = updated_at - interval '1 hour'")
    found = await audited(restored.site, repair=False)
    assert [line.split(":")[0] for line in found["doubled"]] == [old]
    assert (await audited(restored.site, repair=True))["doubled"] == []
    assert await restored.book.allocations() == {
        young: {restored.hosts[0]: {"VCPU": 2}},
        old: {restored.hosts[1]: {"VCPU": 2}},
    }


@pytest.mark.parametrize("column", ["under_way", "condition"])
async def test_what_a_move_has_claimed_is_neither_doubled_nor_unclaimed(restored: Restored, column: str) -> None:
    """The scheduler has claimed the destination, and the cell has not read its command: the repair released it."""
    scheduler, cell2 = Database(restored.url, "scheduler", pool_size=1), Database(restored.url, "cell_cell2")
    await scheduler.open(SCHEDULER_MIGRATIONS)
    await cell2.open(MIGRATIONS)
    doubled, bare = await restored.instance(), await restored.instance()
    held = {doubled: {host: {"VCPU": 1} for host in restored.hosts}, bare: {restored.hosts[1]: {"VCPU": 2}}}
    await restored.book.store.apply([claim(uuid, amounts) for uuid, amounts in held.items()])
    async with restored.book.database.raw() as connection:
        await connection.execute("UPDATE consumers SET updated_at = updated_at - interval '1 hour'")
    async with scheduler.raw() as connection:
        for uuid in held:
            moving = new_uuid(restored.rng) if column == "under_way" else None
            condition = "active" if moving else "moving"
            now = json.dumps({"condition": condition, "under_way": moving})
            await connection.execute(
                "INSERT INTO build_requests (instance_uuid, project_id, digest, state, sequence, terminal, created_at,"
                " updated_at, flavor, name, request, claim_owner, instance)"
                " VALUES ($1, 'p', '', 'active', 9, true, 1, 1, 'f', 'n', '{}', '', $2)",
                uuid,
                now,
            )
    found = await audited(restored.site, repair=True)
    await scheduler.close()
    await cell2.close()
    assert not any(found.values())
    assert await restored.book.allocations() == held


@pytest.mark.parametrize("is_taken", [True, False], ids=["taken over meanwhile", "orphaned"])
async def test_a_repair_releases_only_the_claim_that_it_has_read(
    restored: Restored, monkeypatch: pytest.MonkeyPatch, *, is_taken: bool
) -> None:
    """A client repeats its request while the audit reads. What runs was released without a name."""
    for schema, migrations in (("scheduler", SCHEDULER_MIGRATIONS), ("cell_cell2", MIGRATIONS)):
        database = Database(restored.url, schema, pool_size=1)
        await database.open(migrations)
        await database.close()
    uuid, holds = new_uuid(restored.rng), {restored.hosts[0]: {"VCPU": 2}}
    await restored.book.store.apply([claim(uuid, holds, owner="lost")])
    real = book.find_unclaimed

    async def meanwhile(*arguments: Any) -> list[Unclaimed]:
        if is_taken:
            await restored.book.store.apply([claim(uuid, holds, owner="repeated", transfers_from="lost")])
        return await real(*arguments)

    monkeypatch.setattr(book, "find_unclaimed", meanwhile)
    found = await audited(restored.site, repair=True, grace_s=0.0)
    assert await restored.book.allocations() == ({uuid: holds} if is_taken else {})
    assert found["repaired"] == [f"{uuid}: {'left alone, consumer_conflict' if is_taken else 'released'}"]


OPEN_MOVE = RecordedAction(
    request_id="f0000000-0000-4000-8000-000000000000",
    instance_uuid="f0000000-0000-4000-8000-000000000001",
    project_id="p",
    kind=ActionKind.MIGRATE,
    digest=b"1",
    state=ActionState.CLAIMING,
    sequence=1,
)


@pytest.mark.parametrize("fact", ["active", "deleting", "quarantine", "move", "deleted"])
async def test_a_repair_keeps_the_claim_of_a_machine_that_may_run(restored: Restored, fact: str) -> None:
    """A cell was set back to before a build: its machine ran, in quarantine, and its room was offered to others."""
    uuid = new_uuid(restored.rng)
    if fact == "quarantine":
        kept = UnknownMachine(
            uuid=uuid, host_uuid=restored.hosts[0], attempt=1, kind=UnknownMachineKind.QUARANTINED, reason="w"
        )
        await Safety(PostgresKeyed(restored.cell)).record("s", [kept], 1.0)
    released = await released_of(restored, {uuid: restored.hosts[0]}, None if fact == "quarantine" else fact)
    assert released == ({uuid} if fact == "deleted" else set())


@pytest.mark.parametrize("request_state", ["active", "offloaded", "deleted"])
async def test_a_repair_releases_what_by_its_cells_record_is_over(restored: Restored, request_state: str) -> None:
    """Placement was set back to before an offload: `berth audit` proposed a repair, which repaired nothing. Of what has
    left its cell that record is none: the next cell may have lost its own. Nor is that of an offload, where the
    instance has a machine by the schedulers' record: the cell was set back to before it was unshelved.
    """
    restored.hosts = await restored.book.hosts(len(DESIRED_STATES), restored.rng, VCPU=2)
    phases = {
        await restored.instance(host=host, state=state, next_state=next_state): (state, next_state)
        for host, (state, next_state) in enumerate(DESIRED_STATES)
    }
    released = await released_of(restored, dict(zip(phases, restored.hosts, strict=True)), request_state)
    over = {(one, None) for one in (State.TOMBSTONE, State.FAILED, State.DELETED, State.OFFLOADED)}
    over -= {(State.OFFLOADED, None)} if request_state == "active" else set()
    left = {one for one in DESIRED_STATES if one[0] is State.TRANSFERRED}
    assert {phases[uuid] for uuid in released} == (over | left if request_state == "deleted" else over)


async def released_of(restored: Restored, holders: Mapping[str, str], request: str | None) -> set[str]:
    """The instances, each on its host, whose claims a repair releases. request: their state at the top."""
    scheduler, cell2 = Database(restored.url, "scheduler", pool_size=1), Database(restored.url, "cell_cell2")
    await scheduler.open(SCHEDULER_MIGRATIONS)
    await cell2.open(MIGRATIONS)
    store = PostgresBuilds(scheduler)
    store.publish_through(Sent())  # type: ignore[arg-type]
    for uuid, host in holders.items():
        await restored.book.store.apply([claim(uuid, {host: {"VCPU": 2}}, owner="run")])
        async with store.unit() as unit:
            if request == "move":  # its source is held by the request, which the cell is about to be commanded again
                await unit.insert_actions([replace(OPEN_MOVE, request_id=uuid)], 1.0)
            elif request is not None:
                new = accepted(uuid)
                state = BuildState.ACTIVE if request == "offloaded" else BuildState(request)
                ended = replace(new.build, state=state, terminal=True, cell="cell1", claim_owner="run")
                await unit.insert([replace(new, build=ended, gang=None)], 1.0)
    if request == "offloaded":
        async with scheduler.raw() as connection:
            await connection.execute("UPDATE build_requests SET instance = $1", json.dumps({"condition": request}))
    found = await audited(restored.site, repair=True, grace_s=0.0)
    await scheduler.close()
    await cell2.close()
    left = await restored.book.allocations()
    assert {*found["repaired"]} == {f"{uuid}: released" for uuid in holders.keys() - left.keys()}
    return holders.keys() - left.keys()


# --- The members of a gang that count as started, as `berth check` reads them from the schedulers' record.


SENT, FAILED, KEPT, KEPT_DELETED, DELETED = (f"{n}0000000-0000-4000-8000-000000000000" for n in "abcde")
GANG = Gang(uuid=SENT, size=5, min_count=3)
AUTHOR = Actor("w", 3.0)


def accepted(uuid: str) -> NewBuild:
    request = BuildRequest(instance_uuid=uuid, flavor="f", project_id="p", name="n")
    build = RecordedBuild(instance_uuid=uuid, project_id="p", state=BuildState.ACCEPTED, sequence=1)
    return NewBuild(request=request, build=build, gang=GANG)


def decided(uuid: str) -> BuildUpdate:
    build = accepted(uuid).build
    if uuid == SENT:
        scheduled = replace(build, state=BuildState.SCHEDULED, sequence=SCHEDULED, cell="c1", host="h")
        return BuildUpdate(build=scheduled, timeline=(AUTHOR.entry("dispatched", "to cell c1"),))
    return BuildUpdate(build=replace(build, state=BuildState.FAILED, sequence=FAILED_OR_REFUSED, terminal=True))


async def test_a_member_that_was_only_given_the_cell_of_an_older_allocation_is_not_started(postgres_url: str) -> None:
    """`gangs_whole` reported a gang of which one member had failed, and an older claim of it was found."""
    database = Database(postgres_url, "scheduler")
    store = PostgresBuilds(database)
    store.publish_through(Sent())  # type: ignore[arg-type]
    await store.open()
    async with store.unit() as unit:
        await unit.insert([accepted(uuid) for uuid in (SENT, FAILED, KEPT, KEPT_DELETED, DELETED)], 1.0)
    async with store.unit() as unit:
        await unit.write_decisions([decided(uuid) for uuid in (SENT, FAILED, KEPT)], 2.0)
        builds = await unit.lock([KEPT, KEPT_DELETED, DELETED])
        held = ConsumerRecord(
            consumer=KEPT,
            project_id="p",
            claim_owner="another",
            attempt=1,
            consumer_generation=1,
            allocations={},
            hosts=(),
            cell="c1",
        )
        kept = {(uuid, "p"): held for uuid in (KEPT, KEPT_DELETED)}
        deletes = [
            PendingDelete(
                batch_index=at, request=DeleteRequest(instance_uuid=uuid, project_id="p"), delivery=RequestDelivery()
            )
            for at, uuid in enumerate((KEPT, KEPT_DELETED, DELETED))
        ]
        await unit.update(plan_deletes(deletes, builds, AUTHOR, kept).updates, 3.0)
    try:
        (gang,) = await _gangs(database, 0.0)
    finally:
        await store.close()
    assert (gang.members, gang.sent, gang.withdrawn) == (5, 1, 3)
