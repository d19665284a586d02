"""A compute service on a real broker, which goes away in the middle."""

from __future__ import annotations

import asyncio

import pytest

from berth.trial.embedded.rabbitmq import RabbitMQ
from bus.contracts.cell import ComputeOutcome
from compute_sim.config import ComputeConfig
from compute_sim.domain.faults import Faults
from compute_sim.fleet import Fleet
from tests.integration.compute.harness import Cell, Life, cell_on, planned

pytestmark = pytest.mark.rabbitmq

CONFIG = ComputeConfig(hosts=20, heartbeat_interval_s=0.2)


async def fleet_on(cell: Cell, config: ComputeConfig) -> tuple[Fleet, Life, list[str]]:
    """A service whose hosts are known, and its hosts."""
    await cell.open()
    fleet = planned(config)
    life = await cell.compute(config, fleet)
    await cell.until(lambda: cell.announced() and len(cell.inventory()) >= 20)
    return fleet, life, [host.plan.uuid for host in fleet.hosts]


async def test_a_thousand_builds_a_kill_and_a_restart(amqp: tuple[str, str]) -> None:
    cell = cell_on(*amqp)
    fleet, life, hosts = await fleet_on(cell, CONFIG)
    builds = [(hosts[n % 20], cell.instance()) for n in range(1000)]
    await asyncio.gather(*(cell.spawn(host, instance) for host, instance in builds[:500]))
    await life.kill()
    await asyncio.gather(*(cell.spawn(host, instance) for host, instance in builds[500:]))
    await cell.compute(CONFIG, fleet)
    await cell.until(lambda: len({r.instance_uuid for r in cell.results()}) == 1000)
    assert {r.outcome for r in cell.results()} == {ComputeOutcome.ACTIVE}
    assert sorted((host, guest.instance_uuid) for host, guest in fleet.guests()) == sorted(builds)
    await asyncio.gather(*(cell.destroy(host, instance) for host, instance in builds))
    await cell.until(
        lambda: len({r.instance_uuid for r in cell.results() if r.outcome is ComputeOutcome.DESTROYED}) == 1000
    )
    assert list(fleet.guests()) == []
    await cell.close()


async def test_results_of_builds_that_end_while_the_broker_is_down_are_published_when_it_is_back(
    own_broker: RabbitMQ,
) -> None:
    config = ComputeConfig(hosts=20, heartbeat_interval_s=0.2, faults=Faults(delay_min_s=1.0, delay_max_s=3.0))
    cell = cell_on(own_broker.url())
    fleet, _, hosts = await fleet_on(cell, config)
    builds = [(hosts[n % 20], cell.instance()) for n in range(50)]
    await asyncio.gather(*(cell.spawn(host, instance) for host, instance in builds))
    await cell.until(lambda: fleet.records.accepted == 50)  # heartbeats make it look again
    # Shut down, not killed: a killed broker of this version may forget a queue as young as these.
    await asyncio.to_thread(own_broker.shut_down)
    announced = len(cell.inventory())
    await asyncio.to_thread(own_broker.start)
    await cell.until(lambda: len({r.instance_uuid for r in cell.results()}) == 50)
    assert {r.outcome for r in cell.results()} == {ComputeOutcome.ACTIVE}
    await cell.until(lambda: len(cell.inventory()) >= announced + 20)  # published again after the reconnection
    assert len(list(fleet.guests())) == 50
    await cell.close()
