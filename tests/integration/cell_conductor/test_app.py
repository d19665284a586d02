"""The whole conductor as it is wired, its quarantine, and an operator's commands on its schema."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from msgspec.structs import replace
from prometheus_client import REGISTRY

import cell_conductor.app
import compute_agent.app
from berth.audit import quarantine
from berth.config.settings import ComputeSettings
from berth.up.embedded.rabbitmq import RabbitMQ
from bus.bus import API, Bus
from bus.clock import SystemClock
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.base import Message
from bus.contracts.build import BuildState
from bus.contracts.cell import HostStates, InstanceSpec, ReportHosts, Selection
from bus.contracts.operations import Losses
from bus.contracts.placement import InventoryUpdate
from bus.faults import BrokenInvariant, DatabaseUnavailable
from bus.memory import MemoryBroker, MemoryTransport
from bus.persistence.database import Database
from bus.rabbitmq.transport import RabbitTransport
from bus.service.environment import Environment
from bus.transport import BusForbidden, Transport
from cell_conductor.app import build
from cell_conductor.config import ConductorConfig
from cell_conductor.state.breaker import Breaker
from cell_conductor.state.instance import Instance, State
from cell_conductor.state.lease import Lease
from cell_conductor.state.unknown_machine import UnknownMachine, UnknownMachineKind
from cell_conductor.store.keyed_tables import DESTROY, PROTECT, DecidedMachine
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable
from cell_conductor.store.port import InstanceStore
from cell_conductor.store.postgres import PostgresInstances
from cell_conductor.store.postgres_keyed import PostgresKeyed
from cell_conductor.store.unknown_machines import Safety
from compute_agent.records.records import Records
from compute_sim.config import HostSize, SimulatedConfig
from compute_sim.fleet import Fleet, SimulatedMachine
from tests.integration.cell_conductor.neighbours import CELL, WAIT_S, Cell, MovingClock
from tests.integration.compute_agent.harness import Life
from tests.kit.forks import run_berth
from tests.kit.waiting import PATIENCE_S, until
from tests.kit.web_process import served

# --- The whole conductor as it is wired: its lifecycle, its cell's bus, and nothing above.


def environment(url: str, connect: Callable[[str], Transport], requested: list[str]) -> Environment:
    """Surroundings that remember which buses were asked for."""

    def transports(name: str) -> Transport:
        requested.append(name)
        return connect(name)

    return Environment("conductor-1", transports=transports, database_url=url)


async def test_a_conductor_runs_drains_and_opens_its_own_cell_only(postgres_url: str) -> None:
    clock = MovingClock()
    broker, requested = MemoryBroker(clock), list[str]()
    service = build(environment(postgres_url, partial(MemoryTransport, broker), requested), ConductorConfig(), CELL)
    stop = asyncio.Event()
    cell = Cell(postgres_url, partial(MemoryTransport, broker), clock)
    around = cell.around
    around.bus = cell.new_bus("around")
    await around.bus.open()
    reports = asyncio.Event()

    async def report_requested(batch: list[Received]) -> list[Outcome]:
        if any(isinstance(received.message, ReportHosts) for received in batch):
            reports.set()
        return [Done()] * len(batch)

    consumers = [
        Consumer(around.bus, "compute.control.{service}", report_requested, service="s1", reporter="compute-s1"),  # type: ignore[arg-type]
        Consumer(around.bus, "placement.requests", around.placement),
        Consumer(around.bus, "compute.{service}", around.compute, service="s1"),
    ]
    for consumer in consumers:
        await consumer.start()
    running = asyncio.create_task(service.run(stop))
    async with asyncio.timeout(WAIT_S):
        await service.ready.wait()
        await reports.wait()
    assert service.not_ready() == []
    made = cell.build(1)
    await around.bus.publish(made)
    # The scheduler comes late: what was announced before has waited for it.
    await until(lambda: len(around.spawns) == 1)
    late = Consumer(around.bus, "scheduler.builds", around.scheduler)
    await late.start()
    await until(lambda: around.ends(made.spec.instance_uuid) == [BuildState.ACTIVE])
    stop.set()
    async with asyncio.timeout(WAIT_S):
        await running
    for consumer in (*consumers, late):
        await consumer.drain(1.0)
    await around.bus.close()
    await cell.database.close()
    assert requested == [CELL]


def test_a_conductor_of_the_api_bus_is_refused(postgres_url: str) -> None:
    requested: list[str] = []
    with pytest.raises(BrokenInvariant):
        build(
            environment(postgres_url, partial(MemoryTransport, MemoryBroker(SystemClock())), requested),
            ConductorConfig(),
            API,
        )
    assert requested == []


@pytest.mark.rabbitmq
async def test_with_its_cells_credentials_it_builds_and_reaches_nothing_above(
    postgres_url: str, own_broker: RabbitMQ
) -> None:
    """The broker itself refuses what a cell must not do."""
    await asyncio.to_thread(own_broker.add_vhosts, (API, CELL, "c2"))
    await asyncio.to_thread(own_broker.add_user, "cell-c1", "secret", [CELL])

    def as_cell(vhost: str) -> Transport:
        return RabbitTransport(own_broker.url(vhost, user="cell-c1", password="secret"), name=vhost)

    for above in (API, "c2", "/"):
        with pytest.raises(BusForbidden):
            await as_cell(above).open()
    clock = MovingClock()
    service = build(environment(postgres_url, as_cell, []), ConductorConfig(), CELL)
    stop = asyncio.Event()
    running = asyncio.create_task(service.run(stop))
    cell = Cell(postgres_url, lambda name: RabbitTransport(own_broker.url(name), name=name), clock)
    around = cell.around
    around.bus = cell.new_bus("around")
    around.fails = {cell.host(1)}
    await around.bus.open()
    consumers = [
        Consumer(around.bus, "placement.requests", around.placement),
        Consumer(around.bus, "compute.{service}", around.compute, service="s1"),
        Consumer(around.bus, "scheduler.builds", around.scheduler),
    ]
    for consumer in consumers:
        await consumer.start()
    async with asyncio.timeout(WAIT_S):
        await service.ready.wait()
    builds = [cell.build(1, 2) for _ in range(20)]
    await around.bus.publish_all([(made, "") for made in builds])
    await until(lambda: all(around.ends(made.spec.instance_uuid) for made in builds))
    assert len(around.spawns) == 40
    await cell.check_at_rest()
    stop.set()
    async with asyncio.timeout(WAIT_S):
        await running
    for consumer in consumers:
        await consumer.drain(1.0)
    await around.bus.close()
    await cell.database.close()


async def test_the_gauges_show_what_waits_for_a_person(postgres_url: str) -> None:
    clock = MovingClock()
    service = build(
        environment(postgres_url, partial(MemoryTransport, MemoryBroker(clock)), []), ConductorConfig(), "gauged"
    )
    stop = asyncio.Event()
    running = asyncio.create_task(service.run(stop))
    await service.ready.wait()
    database = Database(postgres_url, "cell_gauged", pool_size=1)
    safety = Safety(PostgresKeyed(database))
    hosts = [str(UUID(int=number)) for number in (1, 2)]
    machines = [
        UnknownMachine(str(UUID(int=9)), 1, host, UnknownMachineKind.QUARANTINED, "no record") for host in hosts
    ]

    async def shown() -> tuple[float | None, float | None]:
        await service.refresh()
        found = [
            REGISTRY.get_sample_value(f"berth_conductor_{name}", {"cell": "gauged"})
            for name in ("breakers_open", "machines_in_quarantine")
        ]
        return found[0], found[1]

    try:
        assert await shown() == (0, 0)
        await safety.trip(Breaker(service="s1", tripped_at=1.0))
        await safety.record("s1", machines, 1.0)
        assert await shown() == (1, 2)
        await safety.reset("s1", "ann", 2.0)
        await safety.decide([DecidedMachine(str(UUID(int=9)), hosts[0])], PROTECT, "ann", 2.0)
        assert await shown() == (0, 1)
    finally:
        await database.close()
        stop.set()
        await running


# --- The resources of a machine in quarantine are not offered: a conductor, a compute service, and the inventory it
# reports.


SERVICE = "c1-a"
OURS = "00000000-0000-4000-8000-00000000000a"
CONFIG = ComputeSettings(
    simulated=SimulatedConfig(hosts=1, sizes=(HostSize(vcpus=16, cpu_ratio=1.0),)),
    heartbeat_interval_s=0.1,
    report_interval_s=60.0,
)
LOOKS = 3


class World:
    """A cell's bus with ears on it, a compute service over its machines, and conductors over one store."""

    def __init__(self, url: str | None) -> None:
        self.clock = SystemClock()
        self.rng = random.Random(7)
        self.broker = MemoryBroker(self.clock)
        self.url = url
        self.table = MemoryInstanceTable(self.clock)
        self.fleet = Fleet.planned(CONFIG.simulated, CELL, SERVICE, Records())
        (self.host,) = (host.plan.uuid for host in self.fleet.hosts)
        self.bus = Bus(CELL, MemoryTransport(self.broker, "ears"), process="ears", clock=self.clock, rng=self.rng)
        self.received: list[Message] = []
        self.store: InstanceStore
        self._lives: dict[str, Life] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        await self.bus.open()
        for queue in ("placement.inventory", "conductor.hosts.{process}"):
            consumer = Consumer(self.bus, queue, self._receive, concurrency=1)
            await consumer.start()
            self._tasks.append(asyncio.create_task(consumer.run()))

    async def close(self) -> None:
        for name in list(self._lives):
            await self.stop(name)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.bus.close()

    async def start(self, name: str) -> None:
        env = Environment(name, transports=partial(self._transport, name), clock=self.clock, rng=self.rng)
        if name == "compute":
            service = compute_agent.app.build(
                env, CONFIG, CELL, SERVICE, records=self.fleet.records, driver_state=self.fleet
            )
        else:
            self.store = (
                MemoryInstances(self.table.session())
                if self.url is None
                else PostgresInstances(Database(self.url, f"cell_{CELL}"))
            )
            config = ConductorConfig(report_grace_s=0.001, sweep_interval_s=0.05)
            service = cell_conductor.app.build(env, config, CELL, store=self.store)
        self._lives[name] = Life(service)
        await self._lives[name].ready()

    def _transport(self, name: str, _bus: str) -> MemoryTransport:
        return MemoryTransport(self.broker, name)

    async def stop(self, name: str) -> None:
        await self._lives.pop(name).stop()

    async def _receive(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        self.received += [received.message for received in batch]
        return [Done()] * len(batch)

    async def look(self) -> None:
        """Some whole reports more."""
        for _ in range(LOOKS):
            earlier = len(self.received)
            await self.bus.publish(ReportHosts())
            await until(
                lambda earlier=earlier: any(isinstance(m, HostStates) and m.complete for m in self.received[earlier:])
            )

    def offered(self) -> list[int]:
        """The processors that each inventory update offers, the newest last."""
        updates = [m for m in self.received if isinstance(m, InventoryUpdate)]
        found = [update.providers[0].inventories["VCPU"] for update in updates]
        return [inventory.total - inventory.reserved for inventory in found]

    async def offers(self, processors: int) -> None:
        await until(lambda: self.offered()[-1:] == [processors])

    def put(self, uuid: str = OURS, vcpus: int = 4) -> None:
        """A machine that carries this cell's mark, and of which its record knows nothing."""
        self.fleet.put(
            self.host, SimulatedMachine(uuid, 1, {self.host: {"VCPU": vcpus}}, database_id=self.store.database_id)
        )


@pytest.fixture(params=["memory", "postgres"])
async def world(request: pytest.FixtureRequest, postgres_url: str) -> AsyncIterator[World]:
    made = World(None if request.param == "memory" else postgres_url)
    await made.open()
    yield made
    await made.close()


async def test_its_room_is_not_offered_until_it_is_gone(world: World) -> None:
    """A hypervisor with a machine in quarantine was offered as if it were empty."""
    await world.start("conductor")
    world.put()
    await world.start("compute")
    await world.offers(12)
    world.put(OURS.replace("a", "b"), vcpus=2)
    await world.look()
    await world.offers(10)
    world.fleet.remove(world.host, OURS)
    await world.look()
    await world.offers(14)
    assert [processors for processors, _ in groupby(world.offered())][-3:] == [12, 10, 14]


@pytest.mark.parametrize("decision", [PROTECT, DESTROY])
async def test_an_operators_word_frees_it_with_the_machine_and_not_before(world: World, decision: str) -> None:
    await world.start("conductor")
    world.put()
    await world.start("compute")
    await world.offers(12)
    world.received.clear()
    await until(lambda: world.store.safety.decide([DecidedMachine(OURS)], decision, "op", 1.0))
    await world.look()
    if decision == PROTECT:
        world.put(OURS.replace("a", "b"), vcpus=1)  # what is offered then is reported anew
        await world.look()
        await world.offers(11)
        assert set(world.offered()) <= {12, 11}
    else:
        async with asyncio.timeout(PATIENCE_S):
            while world.fleet.machine(world.host, OURS) is not None:
                assert set(world.offered()) <= {12}
                await world.look()  # a look that began before the operator's word may be the one that is reported
                await asyncio.sleep(0.01)
        await world.look()
        await world.offers(16)


# --- `berth quarantine` and `berth breaker` on a cell's schema, as an operator runs them.


CELL_NAME = "cell1"
COMMAND_TIMEOUT_S = 120.0
ADDED_CELL = (
    "INSERT INTO objects (kind, name, body, version, changed_at, changed_by) VALUES ('cell', 'added', $1, 1, 0, '')"
)
A, B, HOST = (f"{n}0000000-0000-4000-8000-000000000000" for n in "ab1")


@pytest.fixture
def web(postgres_url: str, amqp: tuple[str, str], tmp_path: Path) -> Iterator[dict[str, str]]:
    """A web server on the cells' schemas."""
    url, prefix = amqp
    env = {"BERTH_DATABASE__URL": postgres_url, "BERTH_BUS__URL": url, "BERTH_BUS__PREFIX": prefix}
    with served(env, tmp_path) as found:
        yield found


async def berth(web: dict[str, str], *words: str) -> tuple[int, Any]:
    env = {**os.environ, **web}
    done = await asyncio.to_thread(run_berth, *words, env=env, timeout_s=COMMAND_TIMEOUT_S)
    text = done.stdout
    data = json.loads(text) if text[:1] == "{" else text + done.stderr
    return done.returncode, data["items"] if "-o" in words and "list" in words else data


@pytest.mark.postgres
@pytest.mark.rabbitmq
async def test_an_operator_sees_what_is_kept_and_decides(postgres_url: str, web: dict[str, str]) -> None:
    stores = [PostgresInstances(Database(postgres_url, f"cell_{name}")) for name in ("cell1", "cell2")]
    for store in stores:
        await store.open()
    safety = stores[0].safety
    ours = UnknownMachine(A, 3, HOST, UnknownMachineKind.QUARANTINED, "no record")
    foreign = UnknownMachine(B, 0, HOST, UnknownMachineKind.FOREIGN, "no tag of this database")
    await safety.record("s", [ours, foreign], 1.0)
    await safety.trip(Breaker(service="s", tripped_at=1.0, lost=6))

    status, listed = await berth(web, "quarantine", "list", "--unknown", "--cell", CELL_NAME, "-o", "json")
    assert status == 0 and [one["kind"] for one in listed] == ["quarantined", "foreign"]
    status, listed = await berth(web, "quarantine", "list", "--cell", CELL_NAME, "-o", "json")
    assert status == 0 and [one["instance_uuid"] for one in listed] == [A]
    status, output = await berth(web, "quarantine", "destroy", B, "--cell", CELL_NAME)
    assert status == 1 and "quarantine" in output, "a foreign machine is not for berth to destroy"
    status, output = await berth(web, "quarantine", "destroy", A, "--cell", CELL_NAME)
    assert status == 2 and "command.unconfirmed" in output
    status, _ = await berth(web, "quarantine", "destroy", A, "--cell", CELL_NAME, "--yes")
    assert status == 0 and {(one.decision, one.decided_by) for one in await safety.records()} == {
        ("destroy", "local"),
        ("", ""),
    }

    status, listed = await berth(web, "breaker", "list", "--cell", CELL_NAME, "-o", "json")
    assert status == 0 and listed[0]["lost"] == 6
    status, shown = await berth(web, "breaker", "show", "s", "--cell", CELL_NAME, "-o", "json")
    assert (status, shown) == (0, listed[0])
    status, shown = await berth(web, "quarantine", "show", A[:4], "--cell", CELL_NAME, "-o", "yaml")
    assert status == 0 and f'"instance_uuid": "{A}"' in shown
    status, reset = await berth(web, "breaker", "reset", "s", "--cell", CELL_NAME, "-o", "json", "--yes")
    assert (status, reset) == (0, {"service": "s", "cells": [CELL_NAME]})
    assert (await safety.breakers())[0].reset_by == "local"
    status, output = await berth(web, "breaker", "reset", "s", "--cell", CELL_NAME)
    assert (status == 1 and "not_open" in output) or "is open" in output

    for store in stores:
        await store.close()


@pytest.mark.postgres
@pytest.mark.rabbitmq
async def test_an_operator_sees_what_a_recovery_waits_for_and_decides(postgres_url: str, web: dict[str, str]) -> None:
    stores = [PostgresInstances(Database(postgres_url, f"cell_{name}")) for name in ("cell1", "cell2")]
    for store in stores:
        await store.open()
    status, shown = await berth(web, "recovery", "list", "--cell", CELL_NAME, "-o", "json")
    assert (status, shown[0]["state"]) == (0, "open")
    async with stores[0].transaction() as transaction:
        await transaction.begin_recovery()
    async with stores[0].transaction() as transaction:
        await transaction.stop_recovery(Losses(6, (A, B)))
    status, shown = await berth(web, "recovery", "show", CELL_NAME, "-o", "json")
    assert (status, shown["losses"]["count"]) == (1, 6)
    for losses, says in (("5", "recovery.not_waiting"), ("6", "command.unconfirmed")):
        status, output = await berth(web, "recovery", "accept", CELL_NAME, "--losses", losses)
        assert status and says in output
    schedulers = Database(postgres_url, "scheduler")
    await schedulers.open("scheduler_worker.store.migrations")
    status, _ = await berth(web, "recovery", "accept", CELL_NAME, "--losses", "6", "--reason", "the disk", "--yes")
    async with stores[0].transaction() as transaction:
        assert (status, await transaction.accepted_losses()) == (0, 6)
    term = await stores[0].leases.hold_leadership("p", 60.0, None)
    assert term is not None and await stores[0].leases.record(term, [Lease(service="lives", epoch=1)])
    for service, code, says in (("a b", 2, "1 to 64"), ("lives", 1, "recovery.not_without"), ("gone", 0, "gone")):
        arguments = "recovery", "without", CELL_NAME, service, "--yes"
        status, output = await berth(web, *arguments)
        assert status == code and says in output
    status, shown = await berth(web, "recovery", "list", "--cell", CELL_NAME, "-o", "json")
    assert shown[0]["absent"] == {"gone": True}
    async with schedulers.raw() as connection:
        rows = await connection.fetch("SELECT kind, name, actor, reason FROM object_log ORDER BY revision")
    assert [tuple(row) for row in rows] == [
        ("repair", CELL_NAME, "local", "the disk"),
        ("repair", CELL_NAME, "local", ""),
    ]
    await schedulers.close()
    for store in stores:
        await store.close()


@pytest.mark.postgres
@pytest.mark.rabbitmq
async def test_all_undecided_machines_of_a_service_are_decided_about_by_one_command(
    postgres_url: str, web: dict[str, str]
) -> None:
    """1,218 machines in quarantine were 1,218 commands; those of a cell that was added at run time were not listed."""
    schedulers = Database(postgres_url, "scheduler")
    await schedulers.open("scheduler_worker.store.migrations")
    added = {"state": "enabled", "bus": {"prefix": "added."}}
    async with schedulers.raw() as connection:
        await connection.execute(ADDED_CELL, json.dumps(added))
    store = PostgresInstances(Database(postgres_url, "cell_added"))
    await store.open()
    ours = [
        UnknownMachine(f"{n:08d}-0000-4000-8000-000000000000", 1, HOST, UnknownMachineKind.QUARANTINED, "no record")
        for n in range(1_218)
    ]
    await store.safety.record("s", ours, 1.0)
    await store.safety.record("t", [replace(ours[0], uuid=A)], 1.0)
    await store.safety.decide([DecidedMachine(ours[0].uuid)], "destroy", "ann", 1.0)

    status, listed = await berth(web, "quarantine", "list", "--cell", "added", "-o", "json")
    assert (status, len(listed)) == (0, 1_219)
    assert (await berth(web, "quarantine", "list"))[0] == 3, "the cells of the settings have no record here"
    assert (await berth(web, "quarantine", "protect"))[0] == 2
    words = ("quarantine", "protect", "--service", "s", "-o", "json")
    status, decided = await berth(web, *words)
    assert (status, decided["machines"]) == (0, 1_217)
    decisions = {one.machine.uuid: one.decision for one in await store.safety.records()}
    assert (decisions.pop(A), decisions.pop(ours[0].uuid), set(decisions.values())) == ("", "destroy", {"protect"})
    assert (await berth(web, *words))[0] == 1, "none is undecided"
    status, decided = await berth(web, "quarantine", "protect", A, ours[0].uuid, "-o", "json")
    assert (status, decided["instances"]) == (0, [ours[0].uuid, A])
    # B was reported as kept, by name and by the exit status.
    status, decided = await berth(web, "quarantine", "protect", A, B, "-o", "json")
    assert (status, decided["instances"]) == (1, [A])
    for one in (store, schedulers):
        await one.close()


async def test_a_machine_is_given_back_to_its_instance_by_an_operators_word(
    postgres_url: str, web: dict[str, str]
) -> None:
    first, second = (PostgresInstances(Database(postgres_url, f"cell_{name}")) for name in ("cell1", "cell2"))
    schedulers = Database(postgres_url, "scheduler")
    await schedulers.open("scheduler_worker.store.migrations")
    for store in (first, second):
        await store.open()
    there = UnknownMachine(A, 3, HOST, UnknownMachineKind.QUARANTINED, "newer than its record")
    home = Selection(host_uuid=B, host="home", service="s", allocations={B: {"VCPU": 1}})
    spec = InstanceSpec(instance_uuid=A, project_id="p")
    record = Instance(uuid=A, state=State.ACTIVE, spec=spec, selections=(home,), attempt=1)

    async def adopt(host: str = HOST) -> tuple[int, str]:
        status, output = await berth(web, "quarantine", "adopt", A, "--host", host, "--reason", "moved")
        return status, str(output)

    assert (await adopt())[0] == 1
    await first.safety.record("s", [there], 1.0)
    assert "quarantine.unknown" in (await adopt(B))[1]
    assert "quarantine.not_adoptable" in (await adopt())[1], "the cell has no record of it"
    async with second.transaction() as transaction:
        await transaction.insert([replace(record, state=State.BUILDING)])
    async with first.transaction() as transaction:
        await transaction.insert([replace(record, state=State.DESTROYING, next_state=State.DELETED)])
    assert "it is destroying/deleted" in (await adopt())[1]
    async with first.transaction() as transaction:
        await transaction.lock([A])
        await transaction.update([record])
    assert "quarantine.recorded_elsewhere" in (await adopt())[1]
    async with second.transaction() as transaction:
        await transaction.lock([A])
        await transaction.update([replace(record, state=State.DELETED)])
    await second.safety.record("s", [UnknownMachine(A, 2, B, UnknownMachineKind.QUARANTINED, "no record")], 1.0)
    status, output = await adopt()
    assert status == 1 and "quarantine.several" in output and B in output
    await second.safety.delete(await second.safety.records())
    assert {one.decision for one in await first.safety.records()} == {""}
    status, output = await adopt()
    assert status == 0, output
    assert [(one.decision, one.decided_by) for one in await first.safety.records()] == [("adopt", "local")]
    async with schedulers.raw() as connection:
        logged = [tuple(row) for row in await connection.fetch("SELECT name, actor, reason FROM object_log")]
    assert logged == [(A, "local", "moved")]
    for one in (first, second, schedulers):
        await one.close()


async def test_what_was_decided_in_one_cell_is_told_though_another_does_not_answer(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a fault of all. And an adoption was in the log of changes before, also one that was not decided."""
    monkeypatch.setattr(quarantine, "TIMEOUT_S", 2.0)
    cells = {name: PostgresInstances(Database(postgres_url, f"cell_{name}")) for name in ("cell1", "cell2")}
    schedulers = Database(postgres_url, "scheduler")
    await schedulers.open("scheduler_worker.store.migrations")
    home = Selection(host_uuid=B, host="home", service="s", allocations={B: {"VCPU": 1}})
    at = dict(zip(cells, (A, B), strict=True))
    for name, store in cells.items():
        await store.open()
        spec = InstanceSpec(instance_uuid=at[name], project_id="p")
        await store.safety.record(
            "s", [UnknownMachine(at[name], 3, HOST, UnknownMachineKind.QUARANTINED, "newer")], 1.0
        )
        async with store.transaction() as transaction:
            await transaction.insert(
                [Instance(uuid=at[name], state=State.ACTIVE, spec=spec, selections=(home,), attempt=1)]
            )
        await store.safety.trip(Breaker(service="s", tripped_at=1.0))
    connect = partial(MemoryTransport, MemoryBroker(MovingClock()), "op")
    env = Environment("op", transports=lambda _: connect(), database_url=postgres_url, cells=tuple(cells))
    machines = {name: [DecidedMachine(uuid, HOST)] for name, uuid in at.items()}
    locked = Database(postgres_url, "cell_cell2", pool_size=1)
    async with locked.raw() as connection:
        await connection.execute("LOCK TABLE unknown_machines, breakers IN EXCLUSIVE MODE")
        decided, faults = await quarantine.decide(env, machines, PROTECT, "ann")
        assert (decided, list(faults)) == ({"cell1": [(HOST, A)]}, ["cell2"])
        reset, missed = await quarantine.reset(env, [(name, "s", 1.0) for name in at], "ann")
        assert (reset, list(missed)) == ({("cell1", "s", 1.0): True}, [("cell2", "s", 1.0)])
        adopted, refused = await quarantine.adopt(env, [(HOST, A), (HOST, B)], actor="ann", reason="moved")
        assert (adopted, [one.code for one in refused.values()]) == ({(HOST, A): "cell1"}, ["database.unavailable"])
        with pytest.raises(DatabaseUnavailable):
            await quarantine.decide(env, {"cell2": machines["cell2"]}, PROTECT, "ann")
    async with schedulers.raw() as connection:
        assert [row[0] for row in await connection.fetch("SELECT name FROM object_log")] == [A]
    for one in (*cells.values(), schedulers, locked):
        await one.close()
