"""Several brokers, several databases: the one in use is killed, the workers go on by themselves, nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from berth.client import BuildClient
from berth.embedded.postgres import Postgres
from berth.embedded.rabbitmq import RabbitMQ
from berth.gather import gather, rest
from berth.invariants import check_invariants
from berth.load import LoadPlan, LoadReport, run_load
from berth.servers import API_VHOST, start_all, variables
from berth.settings import BusSettings, CellSettings, DatabaseSettings, Settings
from berth.site import Site, process_name
from berth.worker_processes import WorkerProcesses
from tests.kit.clusters import broker_cluster, database_pair
from tests.system.small import PLAN
from tests.system.test_servers_away import hosts_known

PATIENCE_S = 90.0
BOOTS = 200
(CELL,) = PLAN.cells

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.timeout(600)]


@pytest.mark.skipif(
    "BERTH_TEST_CLUSTER" not in os.environ,
    reason="open defect, not understood: beside other tests the two nodes left may refuse publishes for good",
)
def test_the_node_of_a_cluster_that_workers_are_connected_to_is_killed(tmp_path: Path) -> None:
    with broker_cluster() as cluster, Postgres() as postgres:
        cluster.nodes[0].add_vhosts((API_VHOST, CELL))
        urls = {vhost: cluster.url(vhost) for vhost in (API_VHOST, CELL)}

        async def kill() -> None:
            busiest = await asyncio.to_thread(cluster.busiest)
            await asyncio.to_thread(busiest.kill)

        with workers(tmp_path, urls, postgres.url()) as (processes, site):
            asyncio.run(builds_go_on(site, kill))
            assert all(worker.process.running for worker in processes.workers.values())


def test_the_primary_is_killed_and_its_synchronous_stand_by_promoted(tmp_path: Path) -> None:
    with RabbitMQ() as broker, database_pair() as pair:

        async def fail_over() -> None:
            await asyncio.to_thread(pair.primary.kill)
            await asyncio.to_thread(pair.stand_by.promote)

        with workers(tmp_path, broker.add_vhosts((API_VHOST, CELL)), pair.url) as (processes, site):
            asyncio.run(builds_go_on(site, fail_over))
            assert all(worker.process.running for worker in processes.workers.values())


@contextlib.contextmanager
def workers(directory: Path, buses: dict[str, str], database: str) -> Iterator[tuple[WorkerProcesses, Site]]:
    """One worker of each role on these servers, ready."""
    compute = msgspec.structs.replace(PLAN.compute, state_dir=str(directory / "machines"))
    settings = Settings(
        bus=BusSettings(url=buses[API_VHOST]),
        cells={CELL: CellSettings(url=buses[CELL])},
        database=DatabaseSettings(url=database),
        compute=compute,
    )
    processes = WorkerProcesses(directory, variables(settings))
    try:
        start_all(processes, PLAN)
        asyncio.run(processes.ready())
        yield processes, Site(settings)
    finally:
        processes.stop()


async def builds_go_on(site: Site, disturb: Callable[[], Awaitable[None]]) -> None:
    """Disturb a load in its middle: each build ends once, active, and all that was confirmed is in the book."""
    process = process_name("test")
    client = BuildClient(site.bus(process), clock=site.clock, process=process, keep_events=True)
    await client.open()
    try:
        await hosts_known(client)
        # A broker may refuse what it is given while its queues elect another leader: that is offered again.
        plan = LoadPlan(boots=BOOTS, mix={"m1.tiny": 1.0}, rate_per_s=50.0, timeout_s=PATIENCE_S, patience_s=PATIENCE_S)
        loading = asyncio.create_task(run_load(client, plan, clock=site.clock, rng=random.Random(5)))
        assert await client.until(lambda: 0 < client.unfinished < len(client.tracks), PATIENCE_S)
        await disturb()
        report: LoadReport = await loading
        assert (report.active, report.unfinished, report.more_than_one_terminal) == (BOOTS, 0, 0), report
        assert await rest(site, timeout_s=PATIENCE_S)
        verdicts = check_invariants(await gather(site, accepted=list(client.tracks), events=client.events))
        assert [verdict for verdict in verdicts if not verdict.holds] == []
    finally:
        await client.close()
