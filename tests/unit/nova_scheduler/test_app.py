"""The wiring of a frontend of Nova."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from bus.bus import API, Bus
from bus.clock import SystemClock
from bus.contracts.host_metrics import TEMPERATURE_CELSIUS, HostMetrics, HostReading
from bus.memory import MemoryBroker, MemoryTransport
from bus.service.environment import Environment
from bus.service.service import WorkerRuntime
from nova_scheduler import app
from nova_scheduler.cloud.api_config import NovaApiConfig
from nova_scheduler.config import NovaConfig
from nova_scheduler.decide.decision_log import CallRecorder
from placement_worker.replica.follower import Follower
from placement_worker.replica.replica import Replica
from scheduler_worker import plugins
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.fleet.metrics_listener import add_host_metrics
from scheduler_worker.placement_client import BusClaims
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts

CELL = "ce110000-0000-4000-8000-000000000001"
COUNTING = ("ComputeFilter", "NumInstancesFilter")
DATABASES = {CELL: "postgresql+asyncpg://berth@127.0.0.1:1/nova_cell1"}


@pytest.mark.parametrize(
    ("databases", "fallback", "enabled", "lacking"),
    [
        (DATABASES, "", COUNTING, ()),
        (DATABASES, "amqp://stock", COUNTING, ()),
        ({}, "amqp://stock", COUNTING[:1], COUNTING[1:]),
    ],
)
def test_a_filter_of_what_is_not_read_is_left_to_the_fallback(
    databases: dict[str, str], fallback: str, enabled: tuple[str, ...], lacking: tuple[str, ...]
) -> None:
    config = NovaConfig(enabled_filters=COUNTING, fallback_url=fallback, api=NovaApiConfig(cell_databases=databases))
    found, left = app._scheduler_settings(SchedulerConfig(), config)
    assert (found.enabled_filters, left) == (enabled, lacking)
    assert [one.name for one in plugins.filters(found)] == list(enabled)
    assert {"io_ops", "hypervisor_version"} <= {one.weigher.name for one in plugins.weighings(found)}


@pytest.mark.parametrize("databases", [{}, DATABASES], ids=["none", "one"])
def test_a_front_reads_the_cells_databases_that_are_named(databases: dict[str, str]) -> None:
    """A task that ends is the end of its service."""
    clock, rng, broker = SystemClock(), random.Random(1), MemoryBroker(SystemClock())
    env = Environment("nova", transports=lambda _: MemoryTransport(broker, "nova"), clock=clock, rng=rng)
    api = NovaApiConfig(cells={CELL: ("h0",)}, cell_databases=databases)
    service = app.build(env, NovaConfig(transport_url="amqp://nova.invalid", api=api), SchedulerConfig())
    assert ("host facts" in {name for name, _ in service._task_makers}) == bool(databases)


@pytest.mark.parametrize(
    ("databases", "fallback", "pci", "expected"),
    [
        (DATABASES, "", {}, (["ComputeFilter", "NUMATopologyFilter", "PciPassthroughFilter"], True, True)),
        (DATABASES, "amqp://stock", {}, (["ComputeFilter", "NUMATopologyFilter", "PciPassthroughFilter"], True, True)),
        ({}, "", {}, (["ComputeFilter"], False, False)),
        ({}, "amqp://stock", {"pci": 2.0}, (["ComputeFilter"], False, True)),
    ],
)
def test_numa_and_pci_are_decided_where_the_cells_databases_are_read(
    databases: dict[str, str], fallback: str, pci: dict[str, float], expected: tuple[list[str], bool, bool]
) -> None:
    clock, rng, broker = SystemClock(), random.Random(1), MemoryBroker(SystemClock())
    env = Environment("nova", transports=lambda _: MemoryTransport(broker, "nova"), clock=clock, rng=rng)
    bus, replica = env.bus(API), Replica()
    config = NovaConfig(
        enabled_filters=("ComputeFilter", "NUMATopologyFilter", "PciPassthroughFilter"),
        fallback_url=fallback,
        api=NovaApiConfig(cells={CELL: ("h0",)}, cell_databases=databases),
    )
    follower = Follower(bus, replica, process="nova", clock=clock)
    decides = app.deciding(
        env,
        config,
        SchedulerConfig(multipliers=pci),
        app.PlacementAccess(replica, follower, BusClaims(bus, timeout_s=1.0)),
        notifier=app.notifier_of(env, config, MemoryTransport(broker, "x")),  # type: ignore[arg-type]
        recorder=CallRecorder(),
    )
    selector = decides.selector
    weighers = {one.weigher.name for one in selector.config.weighings}
    found = [one.name for one in selector.config.filters], selector.in_flight is not None, "pci" in weighers
    assert found == expected


async def test_a_frontend_takes_metrics_of_hosts() -> None:
    """It took none: with a metric that is weighed `MetricsFilter` rejected every host."""
    clock, rng, broker = SystemClock(), random.Random(1), MemoryBroker(SystemClock())
    env = Environment("nova", transports=lambda _: MemoryTransport(broker, "nova"), clock=clock, rng=rng)
    config = NovaConfig(transport_url="amqp://nova.invalid", api=NovaApiConfig(cells={"h0": CELL}))
    service = app.build(env, config, SchedulerConfig())
    assert [one._row.name for one in service._consumers] == ["scheduler.metrics.{process}"]

    bus, hosts = Bus(API, MemoryTransport(broker, "x"), process="x", clock=clock, rng=rng), Hosts([PLENTY] * 2)
    taking = WorkerRuntime("taking", clock=clock)
    measured = add_host_metrics(taking, bus, hosts.selector)
    (consumer,) = taking._consumers
    await bus.open()
    await consumer.start()
    running = asyncio.create_task(consumer.run())
    reading = HostReading(host_uuid=hosts.uuids[1], at=clock.time(), values={TEMPERATURE_CELSIUS: 40.0})
    await bus.publish(HostMetrics(source="bmc", readings=(reading,)))
    await measured.wait()
    assert np.isnan(hosts.view().metric(TEMPERATURE_CELSIUS)).tolist() == [True, False]
    await consumer.drain(1.0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await bus.close()
