"""A cell recovers: with its handlers, its sweep and its store, over what services list and the schedulers tell."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from bus.clock import SystemClock
from bus.consuming.outcome import Done, Received
from bus.contracts.actions import ActionEvent, ActionKind, ActionState, CellAction, Condition
from bus.contracts.base import DatabaseMark, Message, Meta
from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.cell import CellBuildQuery, CellDelete, ComputeOutcome, ComputeResult, Destroy, Running
from bus.contracts.listing import ListedMachine, ListMachines, MachinesPage
from bus.contracts.operations import CellFence, Losses
from bus.contracts.placement import Release, Restate, RestateResult
from bus.contracts.recovery import CellKnown, CellRecovering, KnownPlace, KnownRecord
from bus.faults import Fault, Transient
from cell_conductor.awaited_request import awaited_request_of
from cell_conductor.config import ConductorConfig
from cell_conductor.engine import context_of
from cell_conductor.hosts.fence_cache import FenceCache
from cell_conductor.hosts.fence_controller import FenceController
from cell_conductor.recovery.known_reader import KnownReader
from cell_conductor.recovery.machine_listing import MAX_TRIES
from cell_conductor.rules.reconcile import ATTEMPTS_PER_INCARNATION, BlockedReason
from cell_conductor.state.database_marks import Stated
from cell_conductor.state.events import Released
from cell_conductor.state.instance import Instance, Power, State
from cell_conductor.state.lease import Lease
from cell_conductor.state.unknown_machine import UnknownMachine, UnknownMachineKind
from cell_conductor.store.keyed import Recovering, Unrecognised
from cell_conductor.store.keyed_tables import ADOPT, DESTROY, PROTECT, DecidedMachine
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable
from cell_conductor.transition import step
from scheduler_worker.records.build_record import RecordedBuild, apply_build_event
from tests.unit.cell_conductor.move_scenario import ACTION
from tests.unit.cell_conductor.records import moving, record
from tests.unit.cell_conductor.scenario import SPEC, UUID, host, selection
from tests.unit.cell_conductor.world import Alone, Relay, engine_of, hosts_of, listing, recovery_of, requests_of

ACTIVE = record(State.ACTIVE, queried=False, deadline=None, code="", reason="", attempt=2, highest_attempt=2)
FLOOR = 2 * ATTEMPTS_PER_INCARNATION
OTHER = "cccccccc-0000-4000-8000-00000000000c"


def listed(n: int, attempt: int, **other: Any) -> ListedMachine:
    known: dict[str, Any] = {
        "instance_uuid": UUID,
        "host_uuid": host(n),
        "host": f"host-{n}",
        "service": f"s{n}",
        "project_id": SPEC.project_id,
        "spec": SPEC,
        "allocations": selection(n).allocations,
    }
    return ListedMachine(attempt=attempt, **known | other)


def known(n: int | None, attempt: int = 2, **other: Any) -> KnownRecord:
    """What the top has: active on host n, claimed there."""
    places = () if n is None else (place(n),)
    made = KnownRecord(
        instance_uuid=UUID, project_id="p", state=BuildState.ACTIVE, cell="c1", attempt=attempt, sequence=40, spec=SPEC
    )
    return replace(made, places=places, **other)


def place(n: int, **other: Any) -> KnownPlace:
    return KnownPlace(
        host_uuid=host(n), host=f"host-{n}", service=f"s{n}", allocations=selection(n).allocations, **other
    )


class World:
    """The cell's bus: services that have these machines, placement, and schedulers that tell this."""

    name, process, rng = "c1", "conductor-1", random.Random(1)

    def __init__(self, *machines: ListedMachine, told: KnownRecord | None = None) -> None:
        self.clock = SystemClock()
        self.no_wait = NoWait()
        self.machines = machines
        self.told = told or KnownRecord(instance_uuid=UUID)
        self.fences: tuple[CellFence, ...] = ()
        self.marks: tuple[DatabaseMark, ...] = ()
        self.services: set[str] = {"s1", "s2", "s3"}
        self.silent: set[str] = set()
        self.also: dict[str, tuple[str, ...]] = {}  # hosts of other uuids that a service lists as its own
        self.page: int | None = None
        self.refused = ""  # how placement answers a restatement
        self.restated: list[Restate] = []
        self.queried: list[ListMachines] = []
        self.placement: list[Any] = []
        self.meanwhile: Callable[[], Awaitable[object]] | None = None  # happens once placement has restated
        self.reader: KnownReader

    async def request_all(self, messages: Sequence[Any], *_: Any, **__: Any) -> list[Any]:
        answers = [self._answer(one) for one in messages]
        if self.meanwhile is not None and any(isinstance(one, Restate) for one in messages):
            await self.meanwhile()
        return answers

    def _answer(self, message: Any) -> Message | Fault:
        if isinstance(message, Restate):
            self.restated.append(message)
            return RestateResult(outcome=self.refused or "restated", consumer_generation=9)
        if not isinstance(message, ListMachines):
            self.placement.append(message)
            return Transient("no answer", code="request.timeout")
        self.queried.append(message)
        if message.service in self.silent:
            return Transient("no answer", code="request.timeout")
        number = int(message.service[1:])
        mine = [one for one in self.machines if one.service == message.service and one.host_uuid >= message.after_host]
        if self.page is None:
            return MachinesPage(machines=tuple(mine), hosts=(host(number), *self.also.get(message.service, ())))
        first, rest = mine[: self.page], mine[self.page :]
        behind = rest[0].host_uuid if rest else ""
        read = (host(number), *(one.host_uuid for one in first))
        return MachinesPage(machines=tuple(first), hosts=read, more=bool(rest), next_host=behind)

    async def publish(self, message: Message, **_: Any) -> None:
        if isinstance(message, CellRecovering):
            wanted = (self.told,) if message.after < UUID else ()
            wanted += tuple(KnownRecord(instance_uuid=one) for one in message.asked if one != self.told.instance_uuid)
            page = CellKnown(
                cell="c1",
                process=self.process,
                query_id=message.query_id,
                instances=wanted,
                fences=() if message.asked else self.fences,
                marks=self.marks,
            )
            received = Received(page, Meta(id="m"), "c1", "conductor.known.conductor-1")
            await self.reader.handle([received])


class Cell(Alone):
    """One conductor of a cell. Its leases are given."""

    is_leader = True
    gone: Collection[str] = ()
    states = Stated()

    def __init__(self, world: World, table: MemoryInstanceTable | None = None) -> None:
        bus: Any = world
        clock = world.clock
        self.world = world
        self.table = table or MemoryInstanceTable(clock)
        self.gone: tuple[str, ...] = ()
        self.marks: list[DatabaseMark] = []
        self.store = MemoryInstances(self.table.session())
        self.relay: Any = Relay()
        leases: Any = self
        config = ConductorConfig()
        self.fences = FenceCache(self.store, clock)
        controller = FenceController(self.store, self.fences, bus, clock=clock, config=config, cell="c1")
        world.reader = KnownReader(bus)
        self.recovery = recovery_of(
            self.store,
            bus,
            self.relay,
            clock=world.no_wait,
            config=config,
            known=world.reader,
            leases=leases,
            fences=self.fences,
        )
        self.engine = engine_of(
            store=self.store,
            bus=bus,
            relay=self.relay,
            clock=clock,
            config=config,
            cell="c1",
            leases=leases,
            marks=leases,
            fences=self.fences,
            blocked=self.recovery.note_blocked,
        )
        self.requests = requests_of(self.engine, clock, fences=self.fences, fence_controller=controller)
        self.hosts = hosts_of(
            self.engine, self.store, clock, config, bus, fences=self.fences, leases=leases, marks=leases
        )

    # its leases

    def up(self) -> Collection[str]:
        return self.world.services

    alive_services = up

    def down(self) -> dict[str, Lease]:
        return {one: Lease(service=one, epoch=1) for one in {"s1", "s2", "s3"} - self.world.services}

    def deleted(self) -> Collection[str]:
        return self.gone

    def hear(self, mark: DatabaseMark, *, by: str = "") -> None:
        self.marks.append(mark)

    def is_removed(self, service: str) -> bool:
        return service in self.gone

    def stated(self) -> Stated:
        return replace(self.states, marks=(*self.states.marks, *self.marks))

    # what happens

    async def open(self, *instances: Instance) -> Cell:
        await self.store.open()
        async with self.store.transaction() as transaction:
            await transaction.insert(instances)
        return self

    async def set_back(self) -> None:
        self.table.place += 1
        await self.engine.sweep()
        assert self.store.is_recovering

    async def recover(self) -> Instance | None:
        if not self.store.is_recovering:
            await self.set_back()
        await self.recovery.look()
        assert not self.store.is_recovering
        return await self.recorded()

    async def recorded(self) -> Instance | None:
        async with self.store.transaction() as transaction:
            return (await transaction.lock([UUID])).get(UUID)

    async def look_again(self) -> Instance | None:
        """The blocked instance comes to its deadline, and is looked at."""
        one = await self.recorded()
        assert one is not None and one.blocked_reason
        async with self.store.transaction() as transaction:
            await transaction.update([replace(one, deadline=0.0)])
        await self.engine.sweep()
        await self.recovery.look()
        return await self.recorded()

    def sent(self, kind: type[Any]) -> list[Any]:
        return [one.message for one in self.relay.sent if isinstance(one.message, kind)]


class NoWait(SystemClock):
    def __init__(self) -> None:
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        """At once."""
        self.slept.append(seconds)


async def cell_of(world: World, *instances: Instance) -> Cell:
    return await Cell(world).open(*instances)


async def test_what_has_come_later_than_the_record_is_recorded_and_placement_follows() -> None:
    world = World(listed(3, 7), told=known(3, 7))
    cell = await cell_of(world, ACTIVE)
    found = await cell.recover()
    assert found is not None
    assert (found.state, found.host_uuid, found.attempt, found.highest_attempt) == (State.ACTIVE, host(3), 7, FLOOR)
    assert found.consumer_generation == 9
    (restated,) = world.restated
    assert (restated.consumer, restated.attempt, restated.allocations) == (UUID, FLOOR, None), "it has that already"
    assert found.sequence > 41 and cell.store.incarnation == 2


@pytest.mark.parametrize("recorded", [(), (ACTIVE,)], ids=["by the map", "by the record"])
async def test_a_machine_that_was_resized_since_has_the_flavor_that_its_host_names(
    recorded: tuple[Instance, ...],
) -> None:
    """Seed 708: its request had not ended above, so that the map had its old one."""
    world = World(listed(2, 2, spec=replace(SPEC, flavor="resized")), told=known(2))
    found = await (await cell_of(world, *recorded)).recover()
    assert found is not None and found.spec is not None
    assert (found.state, found.attempt, found.spec.flavor) == (State.ACTIVE, 2, "resized")


async def test_nothing_is_taken_while_the_cell_recovers_and_nothing_is_lost() -> None:
    world = World(listed(2, 2), told=known(2))
    cell = await cell_of(world, ACTIVE)
    async with cell.store.transaction() as transaction:
        await transaction.send_later([])
    await cell.set_back()
    delete = Received(CellDelete(instance_uuid=UUID, project_id="p"), Meta(id="d"), "c1", "conductor.requests")
    result = ComputeResult(
        instance_uuid=UUID, attempt=2, host_uuid=host(2), service="s2", outcome=ComputeOutcome.DESTROYED
    )
    ended = Received(result, Meta(id="r"), "c1", "conductor.results")
    for handler, received in ((cell.requests.requests, delete), (cell.requests.results, ended)):
        with pytest.raises(Recovering):
            await handler([received])
    with pytest.raises(Recovering):
        await cell.engine.sweep()
    assert await cell.hosts.hosts([Received(listing("s2", 2), Meta(id="h"), "c1", "conductor.hosts")]) == [Done()]
    assert await cell.recorded() == ACTIVE
    await cell.recover()
    await cell.requests.requests([delete])
    deleting = await cell.recorded()
    assert deleting is not None and deleting.next_state is State.DELETED


@pytest.mark.parametrize("may_act", [False, True])
async def test_a_query_waits_for_nothing_before_the_cell_acts(*, may_act: bool) -> None:
    """It ended as lost the build whose command waited before it. It comes again."""
    cell = await cell_of(World())
    cell.states = Stated(may_act=may_act)
    query = Received(CellBuildQuery(spec=SPEC), Meta(id="q"), "c1", "conductor.requests")
    assert await cell.requests.requests([query]) == [Done()]
    recorded = await cell.recorded()
    assert (recorded is not None) is may_act


async def test_a_request_of_which_the_end_is_lost_ends() -> None:
    world = World(listed(2, 2), told=known(2, request_id=ACTION, kind=ActionKind.MIGRATE))
    world.told = replace(world.told, places=(place(2), place(1, migration=ACTION)))
    cell = await cell_of(world, moving(State.FINISHING, attempt=2))
    found = await cell.recover()
    assert found is not None and found.action is None and found.state is State.ACTIVE
    (end,) = cell.sent(ActionEvent)
    assert (end.request_id, end.state, end.terminal) == (ACTION, ActionState.DONE, True)
    assert world.restated[0].migrations == (ACTION,)


async def test_what_runs_on_a_host_that_has_not_listed_is_blocked_until_it_has() -> None:
    world = World(listed(3, 7), told=known(3, 7))
    world.services = {"s1", "s2"}
    cell = await cell_of(world, ACTIVE)
    found = await cell.recover()
    assert found is not None and found.blocked_reason == BlockedReason.HOST_ABSENT
    assert not world.restated and not cell.relay.sent
    again = await cell.look_again()
    assert again is not None and again.blocked_reason == BlockedReason.HOST_ABSENT
    world.services |= {"s3"}
    settled = await cell.look_again()
    assert settled is not None and not settled.blocked_reason
    assert (settled.state, settled.host_uuid, settled.attempt) == (State.ACTIVE, host(3), 7)


async def test_a_delete_of_what_is_blocked_is_recorded_and_carried_out_once_its_host_has_listed() -> None:
    world = World(listed(3, 7), told=known(3, 7))
    world.services = {"s1", "s2"}
    cell = await cell_of(world, ACTIVE)
    await cell.recover()
    delete = CellDelete(instance_uuid=UUID, project_id="p", attempt=7)
    await cell.requests.requests([Received(delete, Meta(id="d"), "c1", "conductor.requests")])
    blocked = await cell.recorded()
    assert blocked is not None and blocked.blocked_reason and blocked.next_state is State.DELETED
    assert not cell.sent(Destroy)
    world.services |= {"s3"}
    settled = await cell.look_again()
    assert settled is not None and (settled.state, settled.blocked_reason) == (State.DESTROYING, "")
    assert [(one.attempt, one.host_uuid) for one in cell.sent(Destroy)] == [(7, host(3))]
    assert not [one for one in world.placement if isinstance(one, Release)]


async def test_what_a_delete_releases_is_above_what_placement_was_restated() -> None:
    """The delete came between the two: placement refuses a release below, and what a conductor that was paused states
    once more of the released attempt would be held by nobody.
    """
    world = World(listed(3, 7), told=known(3, 7))
    world.services = {"s1", "s2"}
    cell = await cell_of(world, ACTIVE)
    await cell.recover()
    delete = CellDelete(instance_uuid=UUID, project_id="p", attempt=7)
    world.meanwhile = lambda: cell.requests.requests([Received(delete, Meta(id="d"), "c1", "conductor.requests")])
    world.services |= {"s3"}
    settled = await cell.look_again()
    assert settled is not None and settled.phase == (State.DESTROYING, State.DELETED)
    assert [one.attempt < settled.next_attempt for one in world.restated] == [True]


@pytest.mark.parametrize(("proves_from", "after"), [(0, FLOOR), (FLOOR + 501, FLOOR + 501)])
async def test_what_is_blocked_once_more_proves_no_more_than_before(proves_from: int, after: int) -> None:
    """Of a machine that an operator gave to it the attempts in between are unknown."""
    world = World(listed(3, 7), told=known(3, 7))
    world.services = {"s1", "s2"}
    found = await (await cell_of(world, replace(ACTIVE, proves_from=proves_from))).recover()
    assert found is not None and (found.blocked_reason, found.proves_from) == (BlockedReason.HOST_ABSENT, after)


async def test_what_is_blocked_is_judged_by_no_report_and_begins_nothing() -> None:
    world = World(listed(3, 7), told=known(3, 7))
    world.services = {"s1", "s2"}
    cell = await cell_of(world, ACTIVE)
    await cell.recover()
    before = await cell.recorded()
    report = listing("s3", 3, runs=(Running(instance_uuid=UUID, attempt=1, database_id=cell.store.database_id),))
    await cell.hosts.hosts([Received(report, Meta(id="h"), "c1", "conductor.hosts")])
    assert await cell.recorded() == before and await cell.store.safety.records() == []
    stop = CellAction(request_id=str(UUID), instance_uuid=UUID, kind=ActionKind.STOP, project_id="p")
    await cell.requests.requests([Received(stop, Meta(id="s"), "c1", "conductor.requests")])
    (refused,) = cell.sent(ActionEvent)
    assert (refused.state, refused.code) == (ActionState.REFUSED, "instance.blocked")


async def test_an_emptied_database_has_what_the_services_list() -> None:
    world = World(listed(2, 5), told=KnownRecord(instance_uuid=UUID, project_id="p"))
    cell = await cell_of(world)
    found = await cell.recover()
    assert found is not None and (found.state, found.attempt, found.highest_attempt) == (State.ACTIVE, 5, FLOOR)
    assert len(world.restated) == 1


async def test_the_older_of_two_machines_stays_and_is_quarantined_when_it_is_reported() -> None:
    world = World(listed(1, 1), listed(3, 7), told=known(3, 7))
    cell = await cell_of(world, ACTIVE)
    await cell.recover()
    assert not cell.sent(Destroy)
    report = listing("s1", 1, runs=(Running(instance_uuid=UUID, attempt=1, database_id=cell.store.database_id),))
    await cell.hosts.hosts([Received(report, Meta(id="h"), "c1", "conductor.hosts")])
    assert [one.machine.attempt for one in await cell.store.safety.records()] == [1]
    assert not cell.sent(Destroy)


@pytest.mark.parametrize("decision", [DESTROY, ADOPT, PROTECT])
async def test_of_an_operators_words_only_that_a_machine_is_kept_outlives_a_recovery(decision: str) -> None:
    """The machine may have been given to its instance since, and the restored record has the earlier word."""
    world = World(listed(2, 2), listed(3, 1), told=known(2))
    cell = await cell_of(world, ACTIVE)
    await cell.store.safety.record(
        "s3", [UnknownMachine(UUID, 1, host(3), UnknownMachineKind.QUARANTINED, "older")], 1.0
    )
    await cell.store.safety.decide([DecidedMachine(UUID)], decision, "ann", 2.0)
    found = await cell.recover()
    assert found is not None and (found.host_uuid, found.attempt) == (host(2), 2)
    report = listing("s3", 3, runs=(Running(instance_uuid=UUID, attempt=1, database_id=cell.store.database_id),))
    await cell.hosts.hosts([Received(report, Meta(id="h"), "c1", "conductor.hosts")])
    assert not cell.sent(Destroy)
    assert [one.decision for one in await cell.store.safety.records()] == [PROTECT if decision == PROTECT else ""]


async def test_the_end_of_what_was_lost_reaches_schedulers_that_have_it_as_active() -> None:
    """They ignore numbers that they have had: the cell's own began again from 10."""
    cell = await cell_of(World(told=known(2)))
    found = await cell.recover()
    assert found is not None and found.phase == (State.RELEASING, State.FAILED)
    asked = awaited_request_of(found)
    assert isinstance(asked, Release)
    (event,) = step(found, Released(at=1e9, attempt=asked.attempt or 0), context_of(ConductorConfig(), "c1")).commands
    assert isinstance(event, BuildEvent)
    top = RecordedBuild(instance_uuid=UUID, project_id="p", state=BuildState.ACTIVE, sequence=40, cell="c1")
    assert apply_build_event(top, event)[0].state is BuildState.FAILED


async def test_a_fenced_host_counts_as_empty() -> None:
    world = World(told=known(None))
    world.services = {"s1", "s3"}
    world.fences = (CellFence(host_uuid=host(2), host="host-2", version=1),)
    cell = await cell_of(world, ACTIVE)
    found = await cell.recover()
    assert found is not None and (found.state, found.next_state, found.code) == (
        State.RELEASING,
        State.FAILED,
        "instance.lost",
    )
    assert set(cell.fences.fences) == {host(2)}


async def test_a_service_that_is_up_and_does_not_list_is_tried_again_and_then_counts_as_absent() -> None:
    world = World(told=known(2))
    world.silent = {"s2"}
    cell = await cell_of(world, ACTIVE)
    found = await cell.recover()
    assert found is not None and found.blocked_reason == BlockedReason.HOST_ABSENT
    assert [one.service for one in world.queried].count("s2") == len(world.no_wait.slept) + 1 == MAX_TRIES
    assert [one.service for one in world.queried].count("s1") == 1


async def test_a_listing_of_several_pages_is_read_to_its_end() -> None:
    world = World(listed(3, 7), listed(4, 8, service="s3"), told=known(4, 8))
    world.page = 1
    cell = await cell_of(world, ACTIVE)
    found = await cell.recover()
    assert found is not None and (found.host_uuid, found.attempt) == (host(4), 8)


async def test_placement_that_refuses_leaves_the_machine_to_its_instance() -> None:
    world = World(listed(3, 7), told=known(2))
    world.refused = "no_capacity"
    cell = await cell_of(world, ACTIVE)
    found = await cell.recover()
    assert found is not None and (found.state, found.host_uuid) == (State.ACTIVE, host(3))
    assert world.restated[0].allocations == selection(3).allocations


async def test_a_conductor_that_dies_amid_a_recovery_is_followed_under_the_same_incarnation() -> None:
    world = World(listed(3, 7), told=known(3, 7))
    cell = await cell_of(world, ACTIVE)
    await cell.set_back()
    other = await Cell(world, cell.table).open()
    with pytest.raises(Recovering):
        await other.engine.sweep()
    assert other.store.is_recovering
    found = await other.recover()
    assert found is not None and found.host_uuid == host(3) and other.store.incarnation == 2
    assert await cell.engine.sweep() == 0
    assert not cell.store.is_recovering


async def test_losses_above_the_limit_wait_for_an_operators_word() -> None:
    world = World(told=known(2))
    cell = await cell_of(world, ACTIVE)
    cell.recovery._config = replace(ConductorConfig(), breaker_limit=0)
    await cell.set_back()
    await cell.recovery.look()
    assert cell.store.is_recovering and await cell.recorded() == ACTIVE
    assert not world.restated and not cell.relay.sent
    async with cell.store.transaction() as transaction:
        assert await transaction.accept_losses(Losses(1, (UUID,)), 2)
    found = await cell.recover()
    assert found is not None and found.phase == (State.RELEASING, State.FAILED)


async def test_a_build_that_fails_is_no_loss_and_said_beside_the_losses() -> None:
    world = World(told=replace(known(2), state=BuildState.BUILDING))
    building = record(State.BUILDING, highest_attempt=2, image="")
    cell = await cell_of(world, building, replace(ACTIVE, uuid=OTHER))
    cell.recovery._config = replace(ConductorConfig(), breaker_limit=0)
    await cell.set_back()
    await cell.recovery.look()
    assert cell.table.losses == Losses(1, (OTHER,), builds=1)
    alone = await cell_of(world, building)
    alone.recovery._config = replace(ConductorConfig(), breaker_limit=0)
    found = await alone.recover()
    assert found is not None and (found.phase, found.code) == ((State.RELEASING, State.FAILED), "build.lost")


async def test_what_is_listed_late_without_a_record_is_taken_up_by_its_own_spec() -> None:
    world = World(listed(3, 7), told=KnownRecord(instance_uuid=UUID, project_id="p"))
    world.services = {"s1", "s2"}
    cell = await cell_of(world)
    assert await cell.recover() is None
    assert cell.table.absent == {"s3": False}
    world.services |= {"s3"}
    world.silent = {"s3"}  # it is up, and does not list yet
    await cell.recovery.look()
    assert await cell.recorded() is None and cell.table.absent
    world.silent = set()
    cell.recovery._late_at_s = 0.0
    await cell.recovery.look()
    found = await cell.recorded()
    assert found is not None and (found.state, found.host_uuid, found.attempt) == (State.ACTIVE, host(3), 7)
    assert found.last_attempt == FLOOR and cell.table.absent == {}
    before = len(world.queried)
    await cell.recovery.look()
    assert len(world.queried) == before, "it is looked at once"


async def test_a_project_that_has_nothing_there_proves_no_machine_that_is_listed_late() -> None:
    world = World(listed(3, 7))
    world.services = {"s1", "s2"}
    cell = await cell_of(world)
    await cell.recover()
    world.services |= {"s3"}
    with capture_logs() as logged:
        await cell.recovery.look()
    assert await cell.recorded() is None and cell.table.absent == {} and not cell.relay.sent
    (late,) = [one for one in logged if one["event"] == "recovery.late"]
    assert late.get("quarantine") == 1 and "absent" not in late


@pytest.mark.parametrize(
    ("late", "ended"),
    [
        (listed(3, 7), []),
        (listed(3, 7, complete=False, failed=True), [7]),
        (listed(3, 7, complete=False), [7]),
        (listed(3, 7, complete=False, foreign=True), []),
        (listed(3, FLOOR, complete=False), []),  # begun since
        (listed(2, 2, service="s3", complete=False), []),  # where it is by its record
    ],
)
async def test_another_conductor_takes_up_what_is_listed_late_and_an_ordinary_record_is_left_to_reports(
    late: ListedMachine, ended: list[int]
) -> None:
    """What is not complete is ended, as of a service that has listed in time: no report may name it."""
    world, active = World(late, told=known(2)), replace(ACTIVE, proves_from=FLOOR)
    world.services = {"s1", "s2"}
    cell = await cell_of(world)
    await cell.set_back()
    async with cell.store.transaction() as transaction:
        await transaction.expect_recovering()
        await transaction.end_recovery(["s3"])
    async with cell.store.transaction() as transaction:
        await transaction.insert([active])
    other = await Cell(world, cell.table).open()
    world.services |= {"s3"}
    await other.recovery.look()
    assert await other.recorded() == active and cell.table.absent == {} and not world.restated
    assert [(one.attempt, one.host_uuid, one.keep_if_complete) for one in other.sent(Destroy)] == [
        (attempt, host(3), True) for attempt in ended
    ]


async def test_a_service_that_was_away_with_the_highest_mark_lists_late_and_begins_no_other_recovery() -> None:
    world = World(listed(3, 7), told=known(3, 7))
    world.services = {"s1", "s2"}
    cell = await cell_of(world, ACTIVE)
    found = await cell.recover()
    assert found is not None and found.blocked_reason == BlockedReason.HOST_ABSENT and set(cell.table.absent) == {"s3"}
    world.services |= {"s3"}
    cell.hear(DatabaseMark(1, (1_000,)), by="s3")
    settled = await cell.look_again()
    assert (cell.store.is_recovering, cell.store.incarnation, cell.table.absent) == (False, 2, {})
    assert settled is not None
    assert (settled.state, settled.host_uuid, settled.attempt, settled.blocked_reason) == (State.ACTIVE, host(3), 7, "")


async def test_what_a_service_lists_late_without_it_is_lost_by_its_reports_alone() -> None:
    """Seed 651: a service that came back empty lost all of its instances at once, and no breaker counted them."""
    world = World(told=known(3, 7))
    world.services = {"s1", "s2"}
    at_3 = replace(selection(3), service="s3")
    cell = await cell_of(world, replace(ACTIVE, selections=(at_3,), selection_index=0, attempt=7, highest_attempt=7))
    found = await cell.recover()
    assert found is not None and found.blocked_reason == BlockedReason.HOST_ABSENT
    world.services |= {"s3"}
    settled = await cell.look_again()
    assert settled is not None and cell.table.absent == {}
    assert (settled.phase, settled.blocked_reason, settled.host_uuid) == ((State.ACTIVE, None), "", host(3))


@pytest.mark.parametrize("by", ["without", "forget"])
async def test_a_service_that_has_nothing_by_an_operators_word_is_waited_for_by_nobody(by: str) -> None:
    world = World(told=known(2))
    world.services = {"s1", "s3"}
    cell = await cell_of(world, replace(ACTIVE, selections=(replace(selection(2), service="s2"),), selection_index=0))
    found = await cell.recover()
    assert found is not None and found.blocked_reason == BlockedReason.HOST_ABSENT
    if by == "forget":
        cell.gone = ("s2",)
    else:
        async with cell.store.transaction() as transaction:
            assert await transaction.state_without("s2")
    settled = await cell.look_again()
    assert settled is not None and (settled.phase, settled.code) == ((State.RELEASING, State.FAILED), "instance.lost")


async def test_a_service_that_is_up_has_what_it_lists_whatever_was_said_of_it() -> None:
    world = World(listed(3, 7), told=known(3, 7))
    world.services = {"s1", "s2"}
    cell = await cell_of(world, ACTIVE)
    await cell.set_back()
    async with cell.store.transaction() as transaction:
        await transaction.state_without("s3")
    world.services |= {"s3"}
    found = await cell.recover()
    assert found is not None and (found.state, found.host_uuid) == (State.ACTIVE, host(3))
    assert cell.table.absent == {}


async def test_what_the_top_has_heard_above_begins_the_recovery_anew() -> None:
    """An order by a number that is in use elsewhere would be refused."""
    world = World(listed(3, 7), told=known(3, 7))
    world.marks = (DatabaseMark(5, (1,)), DatabaseMark(1, (1,)))
    cell = await cell_of(world, ACTIVE)
    await cell.set_back()
    await cell.recovery.look()
    assert cell.store.is_recovering and cell.store.incarnation == 6
    assert await cell.recorded() == ACTIVE and not world.restated
    found = await cell.recover()
    assert found is not None and found.last_attempt == 6 * ATTEMPTS_PER_INCARNATION
    assert cell.store.incarnation == 6


async def test_a_recovery_that_begins_anew_records_nothing_of_the_one_before() -> None:
    world = World(listed(3, 7), told=known(3, 7))
    cell = await cell_of(world, ACTIVE)
    await cell.set_back()
    listing = await cell.recovery._collector.collect()
    async with cell.store.transaction() as transaction:
        await transaction.begin_recovery(Stated((DatabaseMark(5),)))
    with pytest.raises(Unrecognised):
        await cell.recovery._reconciler.reconcile_all([UUID], {}, listing)
    assert await cell.recorded() == ACTIVE


async def test_what_the_limit_allows_to_be_lost_waits_for_nobody() -> None:
    world = World(told=known(2))
    cell = await cell_of(world, ACTIVE)
    cell.recovery._config = replace(ConductorConfig(), breaker_limit=1)
    found = await cell.recover()
    assert found is not None and found.phase == (State.RELEASING, State.FAILED)


async def test_another_conductor_than_the_keeper_of_the_leases_waits() -> None:
    world = World(listed(3, 7), told=known(3, 7))
    cell = await cell_of(world, ACTIVE)
    await cell.set_back()
    cell.is_leader = False
    await cell.recovery.look()
    assert cell.store.is_recovering and not world.queried


async def test_a_build_that_the_schedulers_do_not_know_to_be_active_is_announced() -> None:
    world = World(listed(2, 2), told=replace(known(2), state=BuildState.BUILDING))
    cell = await cell_of(world, record(State.BUILDING, highest_attempt=2))
    await cell.recover()
    (event,) = cell.sent(BuildEvent)
    assert (event.state, event.terminal, event.host_uuid) == (BuildState.ACTIVE, True, host(2))


@pytest.mark.parametrize(("state", "tells"), [(BuildState.BUILDING, []), (BuildState.ACTIVE, [BuildState.FAILED])])
async def test_of_a_build_that_had_failed_no_end_is_told_that_a_newer_one_would_take_for_its_own(
    state: BuildState, tells: list[BuildState]
) -> None:
    """The newer one waited in the queue: it ended as failed, and was built."""
    failed = record(State.FAILED, attempt=1, highest_attempt=1, queried=False, deadline=None)
    cell = await cell_of(World(told=replace(known(2, 1), state=state)), failed)
    found = await cell.recover()
    assert found is not None and found.state is State.FAILED
    assert [one.state for one in cell.sent(BuildEvent)] == tells


STOPPED, OFFLOADED = replace(ACTIVE, power=Power.STOPPED), replace(ACTIVE, state=State.OFFLOADED, power=Power.SHELVED)


@pytest.mark.parametrize(
    ("before", "machines", "told", "power", "image", "tells"),
    [
        (ACTIVE, (), known(None, condition=Condition.OFFLOADED, snapshot="kept"), Power.SHELVED, "kept", None),
        (ACTIVE, (), known(None, condition=Condition.OFFLOADED), Power.SHELVED, "", None),
        (replace(OFFLOADED, image="kept"), (), known(2), Power.SHELVED, "kept", Condition.OFFLOADED),
        (
            ACTIVE,
            (listed(2, 2, runs=False),),
            known(2, condition=Condition.SHELVED, snapshot="kept"),
            Power.SHELVED,
            "kept",
            None,
        ),
        (STOPPED, (listed(2, 2, runs=False),), known(2), Power.STOPPED, "", Condition.STOPPED),
        (STOPPED, (listed(2, 2),), known(2, condition=Condition.STOPPED), Power.RUNNING, "", Condition.ACTIVE),
        (STOPPED, (listed(2, 2),), known(2, condition=Condition.RESCUED), Power.RESCUED, "", None),
    ],
)
async def test_the_schedulers_learn_what_an_instance_is_and_its_image_is_not_forgotten(  # noqa: PLR0917  (the columns)
    before: Instance,
    machines: Sequence[ListedMachine],
    told: KnownRecord,
    power: Power,
    image: str,
    tells: Condition | None,
) -> None:
    cell = await cell_of(World(*machines, told=told), before)
    found = await cell.recover()
    assert found is not None and not found.blocked_reason
    assert (found.power, found.image) == (power, image)
    assert [one.condition for one in cell.sent(ActionEvent)] == [tells] * (tells is not None)


@pytest.mark.parametrize("kind", [ActionKind.OFFLOAD, ActionKind.MIGRATE])
async def test_an_instance_that_may_have_an_image_under_a_forgotten_name_is_not_lost(kind: ActionKind) -> None:
    told = known(2, condition=Condition.MOVING, request_id=ACTION, kind=kind)
    found = await (await cell_of(World(told=told), ACTIVE)).recover()
    assert found is not None and found.blocked_reason == BlockedReason.CONFLICT
