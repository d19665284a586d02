"""The whole conductor as it is wired: its lifecycle, its cell's bus, and nothing above."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from uuid import UUID

import pytest
from prometheus_client import REGISTRY

from berth.trial.embedded.rabbitmq import RabbitMQ
from bus.bus import API
from bus.clock import SystemClock
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.build import BuildState
from bus.contracts.cell import ReportHosts
from bus.faults import BrokenInvariant
from bus.memory import MemoryBroker, MemoryTransport
from bus.persistence.database import Database
from bus.port import BusForbidden, Transport
from bus.rabbitmq import RabbitTransport
from bus.service.environment import Environment
from cell_conductor.app import build
from cell_conductor.config import ConductorConfig
from cell_conductor.domain.breaker import Breaker
from cell_conductor.domain.report import Unexplained, UnexplainedKind
from cell_conductor.store.safety import KEEP, DecidedMachine, PostgresSafety
from tests.integration.conductor.neighbours import CELL, WAIT_S, Cell, MovingClock


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
        around.bus.consumer("compute.control.{service}", report_requested, service="s1", source="compute-s1"),  # type: ignore[arg-type]
        around.bus.consumer("placement.requests", around.placement),
        around.bus.consumer("compute.{service}", around.compute, service="s1"),
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
    await around.until(lambda: len(around.spawns) == 1)
    late = around.bus.consumer("scheduler.builds", around.scheduler)
    await late.start()
    await around.until(lambda: around.ends(made.spec.instance_uuid) == [BuildState.ACTIVE])
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
        around.bus.consumer("placement.requests", around.placement),
        around.bus.consumer("compute.{service}", around.compute, service="s1"),
        around.bus.consumer("scheduler.builds", around.scheduler),
    ]
    for consumer in consumers:
        await consumer.start()
    async with asyncio.timeout(WAIT_S):
        await service.ready.wait()
    builds = [cell.build(1, 2) for _ in range(20)]
    await around.bus.publish_all([(made, "") for made in builds])
    await around.until(lambda: all(around.ends(made.spec.instance_uuid) for made in builds))
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
    safety = PostgresSafety(database)
    hosts = [str(UUID(int=number)) for number in (1, 2)]
    machines = [Unexplained(str(UUID(int=9)), 1, host, UnexplainedKind.QUARANTINED, "no record") for host in hosts]

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
        await safety.decide([DecidedMachine(str(UUID(int=9)), hosts[0])], KEEP, "ann", 2.0)
        assert await shown() == (0, 1)
    finally:
        await database.close()
        stop.set()
        await running
