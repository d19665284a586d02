"""Operators' commands at a scheduler: keepers, services that are forgotten, and an unavailable database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import pytest
from msgspec.structs import replace

from bus.bus import Bus
from bus.clock import SystemClock
from bus.consuming.outcome import Done, Outcome, Received, Refuse, Retry
from bus.contracts.base import Message, Meta, Refusal
from bus.contracts.build import BuildState
from bus.contracts.cell import (
    CellServiceDelete,
    CellServiceDeleted,
    HostReport,
    HostStates,
    ServiceDown,
    ServiceStates,
)
from bus.contracts.objects import CellState, FenceRecord, ObjectChange, ObjectKind, ObjectsChange, ObjectsChanged
from bus.contracts.operations import (
    AdminState,
    CellFence,
    DeleteHost,
    DeleteService,
    FenceState,
    HostFence,
    ServiceDeleted,
    SetAdminState,
)
from bus.contracts.placement_queries import ServiceHostsPage, ServiceHostsQuery
from bus.faults import DatabaseUnavailable
from bus.transport import BusUnavailable
from lab.simulation.loop import SimClock
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.fleet import fence_publisher
from scheduler_worker.fleet.cell_connections import CHECK_S, CellConnections
from scheduler_worker.fleet.fence_publisher import FencePublisher
from scheduler_worker.fleet.host_listener import MAX_SERVICE_HOSTS, Warmup
from scheduler_worker.fleet.removal import HostRemoval
from scheduler_worker.hosts.host_table import HostTable
from scheduler_worker.hosts.service_directory import DOWN_HOLD_S, NO_SERVICE
from scheduler_worker.objects.consistency import changed_object
from scheduler_worker.objects.object_registry import MakeChange, ObjectRegistry
from scheduler_worker.objects.operator_changes import OperatorChanges
from scheduler_worker.operator_handler import OperatorHandler, RefusedCommands
from scheduler_worker.records.build_record import BuildUpdate, NewBuild, RecordedBuild
from scheduler_worker.records.object_records import ChangeActor
from scheduler_worker.selection.selector import Selector
from scheduler_worker.selection.selector_config import SelectorConfig
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from tests.kit.sent import Sent
from tests.kit.virtual_time import on_virtual_time
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts
from tests.unit.scheduler_worker.test_placing import cluster
from tests.unit.scheduler_worker.test_without_an_answer import Site, site

__all__ = ["cluster", "site"]  # fixtures

# --- Publishing one fence takes time, and cells lift others meanwhile.


PATIENCE_S = 20.0
FENCED = FenceRecord(host="h", cell="c1", version=2)
FIRST, SECOND = (f"{n}0000000-0000-4000-8000-000000000000" for n in "ab")


class FenceBus(Bus):
    """Where commands of fences go. meanwhile: happens while one is published."""

    unavailable_reason = ""

    def __init__(self, meanwhile: Callable[[str], None]) -> None:
        self.name = "c1"
        self._meanwhile = meanwhile

    async def publish(self, message: Message, *, cause: str | None = None) -> None:
        assert isinstance(message, CellFence)
        self._meanwhile(message.host_uuid)


async def test_a_fence_that_is_lifted_while_another_is_published_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 1795360394: the task ended with a KeyError, and its scheduler with it."""
    monkeypatch.setattr(fence_publisher, "REPUBLISH_S", 0.001)
    store = MemoryBuilds(MemoryBuildTable(SystemClock()).session())
    registry = ObjectRegistry(store, Hosts([]).selector, SchedulerConfig(), clock=SystemClock())
    registry.fences = {FIRST: FENCED, SECOND: FENCED}
    published: list[str] = []
    twice = asyncio.Event()

    def lifted(host_uuid: str) -> None:
        published.append(host_uuid)
        registry.fences = {FIRST: FENCED}
        if len(published) == 2:
            twice.set()

    task = asyncio.create_task(FencePublisher(registry, {"c1": FenceBus(lifted)}, clock=SystemClock()).run())
    waiting = asyncio.create_task(twice.wait())
    await asyncio.wait([task, waiting], timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    assert not task.done(), task
    assert published == [FIRST, FIRST]
    task.cancel()
    waiting.cancel()


class BlockedBus(FenceBus):
    """Its broker takes no messages, and confirms none."""

    unavailable_reason = "it is out of memory"

    async def publish(self, message: Message, *, cause: str | None = None) -> None:
        await asyncio.sleep(30.0)
        raise BusUnavailable("no confirm")


@on_virtual_time
async def test_the_fences_of_a_cell_in_reach_do_not_wait_for_one_whose_broker_is_not() -> None:
    """A rack of the one was fenced, and then a host whose cell is not known here."""
    clock, published = SimClock(), asyncio.Queue[str]()
    store = MemoryBuilds(MemoryBuildTable(clock).session())
    registry = ObjectRegistry(store, Hosts([]).selector, SchedulerConfig(), clock=clock)
    rack = {f"{number:08}-0000-4000-8000-000000000000": FENCED for number in range(40)}
    registry.fences = {**rack, FIRST: replace(FENCED, cell=None)}
    cells: dict[str, Bus] = {"c1": BlockedBus(published.put_nowait), "c2": FenceBus(published.put_nowait)}
    task = asyncio.create_task(FencePublisher(registry, cells, clock=clock).run())
    began = clock.monotonic()
    assert await published.get() == FIRST
    assert clock.monotonic() - began <= fence_publisher.REPUBLISH_S
    task.cancel()
    await asyncio.wait([task])


@on_virtual_time
async def test_a_fence_of_which_nothing_changes_is_published_less_and_less_often() -> None:
    """Forty hosts were to be used again before they were switched on: 24 copies came to their cell in a second."""
    clock, published = SimClock(), list[tuple[str, float]]()
    store = MemoryBuilds(MemoryBuildTable(clock).session())
    registry = ObjectRegistry(store, Hosts([]).selector, SchedulerConfig(), clock=clock)
    lifting, settled = (
        replace(FENCED, unfencing=True, acknowledged=2, stale_machines=1),
        replace(FENCED, acknowledged=2),
    )
    registry.fences = {FIRST: lifting, SECOND: settled}
    bus = FenceBus(lambda uuid: published.append((uuid, clock.monotonic() - began)))
    began = clock.monotonic()
    task = asyncio.create_task(FencePublisher(registry, {"c1": bus}, clock=clock).run())
    await clock.sleep(1301.0)
    # The first look comes 5 s after the start; the pause after it is 5 s, and doubled up to 300 s.
    assert [at for uuid, at in published if uuid == FIRST] == [5, 10, 20, 40, 80, 160, 320, 620, 920, 1220]
    assert [at for uuid, at in published if uuid == SECOND] == [5, 305, 605, 905, 1205], "a record may be restored"
    published.clear()
    registry.fences = {FIRST: replace(lifting, stale_machines=0), SECOND: replace(FENCED, version=3, acknowledged=2)}
    await clock.sleep(12.0)
    assert [uuid for uuid, _ in published] == [SECOND, SECOND], "another decision is published at once"
    task.cancel()
    await asyncio.wait([task])


async def test_a_report_that_changes_nothing_of_a_fence_reads_no_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each was put on record under the lock of all operators' changes."""
    store = MemoryBuilds(MemoryBuildTable(SystemClock()).session())
    store.publish_through(Sent())  # type: ignore[arg-type]
    registry = ObjectRegistry(store, Hosts([]).selector, SchedulerConfig(), clock=SystemClock())
    await registry.open()
    decided = changed_object(ObjectKind.FENCE, FIRST, None, FENCED)

    async def fence(_unit: Any, _present: Any) -> Any:
        return (decided,), ChangeActor("ann", "", 1.0)

    await registry.write(fence)
    reads, operation = 0, store.operation

    def counted() -> Any:
        nonlocal reads
        reads += 1
        return operation()

    monkeypatch.setattr(store, "operation", counted)
    report = HostFence(cell="c1", host_uuid=FIRST, version=2, state=FenceState.FENCED, stale_machines=1)
    for _ in range(24):
        await registry.record_fences([report])
    assert reads == 1 and (registry.fences[FIRST].acknowledged, registry.fences[FIRST].stale_machines) == (2, 1)
    await registry.record_fences([report, replace(report, stale_machines=0)])
    await registry.record_fences([replace(report, version=1, stale_machines=7)])
    assert registry.fences[FIRST].stale_machines == 0


# --- A compute service that an operator wants forgotten, at a scheduler: placement's hosts keep it.


NAME = "compute-c1"
COMMAND = DeleteService(service=NAME, reason="burnt", by="ann", cell="c1")


class Answering:
    """A bus of placement and of the cell. hosts: that placement has of the service."""

    def __init__(self, *hosts: str) -> None:
        self.hosts = hosts
        self.removed = True
        self.ordered: list[Message] = []

    async def request_all(self, queries: Sequence[Message], *_: object, **__: object) -> list[Message]:
        """Answer as placement does."""
        assert queries == [ServiceHostsQuery(service=NAME, cell="c1", limit=MAX_SERVICE_HOSTS)]
        return [ServiceHostsPage(hosts={name: name for name in self.hosts})]

    async def request(self, message: Message, *_: object, **__: object) -> Message:
        """Answer as the cell's conductor does."""
        assert isinstance(message, CellServiceDelete)
        self.ordered.append(message)
        return CellServiceDeleted(removed=self.removed, at=1.0)


class Log:
    """A registry that keeps the entries, and the messages that made them."""

    def __init__(self) -> None:
        self.handled: set[str] = set()
        self.entries: list[str] = []

    async def first_time(self, _handler: str, message_id: str) -> bool:
        """As the table of handled messages."""
        is_new = message_id not in self.handled
        self.handled.add(message_id)
        return is_new

    async def write(self, make: MakeChange, *, message_id: str) -> None:
        """Keep the names."""
        nothing: Any = None
        if not await self.first_time("", message_id):
            return
        unit: Any = self
        made = await make(unit, nothing)
        assert not isinstance(made, Refusal)
        self.entries += [one.name for one in made[0]]


def forgetter(known: Hosts, bus: Answering, entries: Log | None = None) -> HostRemoval:
    any_log: Any = entries or Log()
    any_bus: Any = bus
    return HostRemoval(any_log, any_log, known.selector, any_bus, lambda: {"c1": any_bus}, clock=SystemClock())


def down(number: int) -> ServiceStates:
    silent = ServiceDown(service=NAME, epoch=1, code="service.silent")
    return ServiceStates(cell="c1", term=1, number=number, down=(silent,), up=0)


async def test_one_that_is_down_for_long_is_kept_by_the_hosts_that_it_reported() -> None:
    """Its hosts had no service any more, and it was forgotten with 100 of them in placement."""
    known, bus = Hosts([PLENTY] * 2), Answering()
    known.table.apply(down(1), 1.0)
    for number, now_s in enumerate((2.0, 2.0 + DOWN_HOLD_S), start=2):
        known.table.apply(down(number), now_s)
        refused = await forgetter(known, bus).delete_service(COMMAND, "m")
        assert isinstance(refused, Refusal) and refused.code == "service.has_hosts", now_s
    assert known.table.service[0] == NO_SERVICE and bus.ordered == []
    known.give_up()
    assert isinstance(await forgetter(known, bus).delete_service(COMMAND, "m"), ServiceDeleted), (
        "it lists none of them any more"
    )


async def test_of_one_that_was_never_reported_placement_decides() -> None:
    known = Hosts([])
    bus = Answering(*(f"h{number:04}" for number in range(100)))
    refused = await forgetter(known, bus).delete_service(COMMAND, "m")
    assert isinstance(refused, Refusal) and refused.code == "service.has_hosts"
    assert "100, as h0000, h0001" in refused.reason and bus.ordered == []
    bus.hosts = ()
    done = await forgetter(known, bus).delete_service(COMMAND, "m")
    assert isinstance(done, ServiceDeleted) and done.removed, (
        "its hosts are forgotten, and nothing else of it is on record"
    )


async def test_who_forgot_it_is_on_record_though_the_first_answer_was_late() -> None:
    known, bus, entries = Hosts([]), Answering(), Log()
    bus.removed = False  # it has done so, and its answer did not come in time
    for message, expected in (("m", 1), ("m", 1), ("repeated by the operator", 2)):
        done = await forgetter(known, bus, entries).delete_service(COMMAND, message)
        assert isinstance(done, ServiceDeleted) and not done.removed
        assert entries.entries == [NAME] * expected, message


class Occupied(Log):
    """A record with an instance on each host."""

    def cells_in_use(self) -> set[str]:
        """One."""
        return {"c1"}

    async def active_on(self, hosts_: Collection[str], limit: int) -> list[str]:
        """Of each."""
        return [f"vm on {one}" for one in hosts_][:limit]


async def test_what_reports_a_host_keeps_it_before_its_instances_do() -> None:
    """These may be gone, and it is not."""
    known = Hosts([PLENTY])
    command = DeleteHost(host="h0", by="ann", reason="gone")
    refused = await forgetter(known, Answering(), Occupied()).delete_host(command, known.uuids[0], "h0", "m")
    assert isinstance(refused, Refusal) and refused.code == "host.service_up"


# --- The handler of operators' commands while its database is unavailable: a change is refused, a decision waits.


REASON = "connection refused"


class UnavailableRecord:
    """Refused commands, of a database that does not answer."""

    async def find(self, message_id: str) -> Refuse | None:
        raise DatabaseUnavailable(REASON)


def handler() -> OperatorHandler:
    """A handler that reaches nothing but that record."""
    return OperatorHandler(
        *cast("Any", [None] * 5),
        refused=cast("Any", UnavailableRecord()),
        find_cells=cast("Any", None),
        warmup=Warmup(Hosts([]).selector, clock=SystemClock()),
    )


def received(message: Message) -> Received:
    return Received(message=message, meta=Meta(id="m", cause="m", sent_at=1.0), bus="api", queue="scheduler.changes")


async def test_a_change_of_objects_is_refused_at_once() -> None:
    change = received(ObjectsChange(actor="ann", changes=()))
    assert await handler()([change]) == [Refuse(DatabaseUnavailable.code, REASON)]


async def test_a_decision_about_a_host_waits() -> None:
    with pytest.raises(DatabaseUnavailable):
        await handler()([received(SetAdminState(host="h1", state=AdminState.FENCED, by="ann"))])


# --- Cells that are removed, and fences of hosts that may run.


class Wanted:
    """Stands for the links to the cells."""

    def __init__(self) -> None:
        self.cells: set[str] = set()

    def set_cells(self, cells: Mapping[str, object]) -> None:
        self.cells = set(cells)


@on_virtual_time
async def test_a_removed_cell_is_linked_again_whenever_a_build_is_given_to_it() -> None:
    """Placement was away for longer than two minutes. When it was back, the claim of a build that had waited was found
    in the cell, which was empty when it was removed: its command stayed in the outbox until a scheduler started again.
    """
    clock, links = SimClock(), Wanted()
    hosts = Hosts([PLENTY] * 2, cells=["c1", "c2"])
    store = MemoryBuilds(MemoryBuildTable(clock).session())
    store.publish_through(Sent())  # type: ignore[arg-type]
    registry = ObjectRegistry(store, hosts.selector, hosts.config, clock=clock, cells=("c1", "c2"))
    await registry.open()
    body = {"state": CellState.REMOVED.value, "reason": "it left"}
    change = ObjectsChange(changes=(ObjectChange(kind=ObjectKind.CELL, name="c2", body=body),), actor="ann")
    changed = await OperatorChanges(registry, store, hosts.selector, clock=clock).apply(change, "m1")
    assert isinstance(changed, ObjectsChanged)
    awaited: set[str] = set()
    keeper = CellConnections(registry, store, cast("Any", links), ("c1", "c2"), awaited=lambda: awaited)
    task = asyncio.create_task(keeper.run())
    await clock.sleep(1000.0)
    assert links.cells == {"c1"}
    request = hosts.request()
    build = RecordedBuild(
        instance_uuid=request.instance_uuid, project_id="p", state=BuildState.SCHEDULED, sequence=2, cell="c2"
    )
    async with store.unit() as unit:
        await unit.insert([NewBuild(request=request, build=build)], clock.time())
    awaited.add("c2")  # its command is in the outbox
    await clock.sleep(2 * CHECK_S)
    assert links.cells == {"c1", "c2"}
    awaited.clear()
    await clock.sleep(2 * CHECK_S)
    assert links.cells == {"c1", "c2"}, "the build is on record there"
    async with store.unit() as unit:
        await unit.lock([request.instance_uuid])
        await unit.update([BuildUpdate(build=replace(build, state=BuildState.FAILED, terminal=True))], clock.time())
    await clock.sleep(2 * CHECK_S)
    task.cancel()
    await asyncio.wait([task])
    assert links.cells == {"c1"}


async def no_cells(_: Collection[str]) -> None:
    """Placement has no dead service of these hosts."""


async def test_a_host_is_not_fenced_as_long_as_its_service_may_not_have_reported_it_yet(site: Site) -> None:
    """The scheduler that had just started had not heard that the host's service is up, and took the fence, which any
    other one refuses (`host.service_up`): an instance that is evacuated from a running host runs twice. A command to
    forget the host asks whether every service is known here.
    """
    hosts, store = site.cluster.hosts, site.store
    table = HostTable()
    selector = Selector(
        hosts.replica,
        table,
        SelectorConfig(
            hosts.config,
            flavors=hosts.selector.config.flavors,
            filters=hosts.selector.config.filters,
            weighings=[],
        ),
    )
    registry = ObjectRegistry(store, selector, hosts.config, clock=site.cluster.clock, cells=("c1", "c2"))
    await registry.open()
    warmup = Warmup(selector, clock=site.cluster.clock)
    handler = OperatorHandler(
        registry,
        selector,
        OperatorChanges(registry, store, selector, clock=site.cluster.clock),
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        refused=RefusedCommands(store),
        find_cells=no_cells,
        warmup=warmup,
    )
    fence = SetAdminState(host=hosts.uuids[0], state=AdminState.FENCED, reason="mistyped", by="ann")

    async def outcome_of(command: SetAdminState, message_id: str) -> Outcome:
        meta = Meta(id=message_id, reply_to="client.reply.x")
        return (await handler([Received(command, meta, "api", "scheduler.changes")]))[0]

    waiting = await outcome_of(fence, "m1")
    assert isinstance(waiting, Retry) and waiting.code == "host.cell_silent"
    warmup._since_s = -1000.0
    refused = await outcome_of(fence, "m2")
    assert isinstance(refused, Refuse) and refused.code == "host.cell_silent"
    there = (HostReport(uuid=hosts.uuids[0], name="h0"),)
    report = HostStates(service="s1", cell="c1", epoch=1, sequence=1, hosts=there, complete=True)
    table.apply(ServiceStates(cell="c1", term=1, number=1, up=1), site.cluster.clock.monotonic())
    assert isinstance(await outcome_of(fence, "m3"), Refuse)
    table.apply(report, site.cluster.clock.monotonic())
    refused = await outcome_of(fence, "m4")
    assert isinstance(refused, Refuse) and refused.code == "host.service_up"
    dead = ServiceDown(service="s1", epoch=1, code="service.silent")
    table.apply(ServiceStates(cell="c1", term=1, number=2, down=(dead,)), site.cluster.clock.monotonic())
    assert isinstance(await outcome_of(fence, "m5"), Done), "though nothing is known of another cell"
    unknown = replace(fence, host=hosts.uuids[1])
    refused = await outcome_of(unknown, "m6")
    assert isinstance(refused, Refuse) and refused.code == "host.cell_silent" and "c2" in refused.reason
    assert isinstance(await outcome_of(replace(unknown, cell="c1", force=True), "m7"), Done)
