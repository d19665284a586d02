"""Several brokers, several databases: the one in use is killed, the workers go on by themselves, nothing is lost.

No broker or database: at start the workers wait and report it; in the middle they resume, and nothing is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from berth.audit.facts import gather, rest
from berth.audit.invariants import check_invariants
from berth.config.settings import BusSettings, CellSettings, DatabaseSettings, Settings
from berth.config.site import Site, process_name
from berth.up.embedded.postgres import Postgres
from berth.up.embedded.rabbitmq import RabbitMQ
from berth.up.servers import API_VHOST, hosts_known, start_all, variables
from berth.up.worker_processes import WorkerProcesses
from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.queues import COMMANDS, QueueKind, QueueRow, Where
from bus.rabbitmq.transport import RabbitTransport
from bus.transport import Outgoing, PublishRefused
from lab.feed_watch import RecordingClient
from lab.load import LoadPlan, LoadReport, run_load
from tests.kit.cases import case
from tests.kit.forks import ForkedProcess
from tests.kit.lent import BrokerCluster, broker_cluster, database_pair
from tests.kit.waiting import until, wait_until
from tests.system.small import PLAN, Small, small_processes

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.timeout(600)]


PATIENCE_S = 90.0
BOOTS = 200
(CELL,) = PLAN.cells


@pytest.fixture(scope="module")
def joined() -> Iterator[BrokerCluster]:
    with broker_cluster() as made:
        made.nodes[0].add_vhosts((API_VHOST, CELL))
        yield made


@pytest.fixture
def cluster(joined: BrokerCluster) -> BrokerCluster:
    """A cluster that all its nodes are in."""
    joined.make_whole()
    return joined


def test_a_node_joins_though_its_own_start_has_not_returned() -> None:
    """RabbitMQ answers a second start with `ok` then, and starts nothing: the node stayed stopped."""
    with RabbitMQ() as first, RabbitMQ(peer=first) as second:
        second.evaluate("catch unregister(rabbit_boot), register(rabbit_boot, spawn(fun() -> timer:sleep(3000) end)).")
        second.join()
        BrokerCluster((first, second)).make_whole()


async def test_a_channel_that_met_a_queue_without_a_leader_is_not_refused_for_ever(cluster: BrokerCluster) -> None:
    """RabbitMQ refuses on such a channel for as long as it is open, though the queue has a leader again."""
    other, leader, survivor = cluster.nodes
    row = QueueRow(
        name="waits",
        where=Where.API,
        kind=QueueKind.DURABLE,
        consumer="placement_worker",
        bindings=((COMMANDS, "inventory.update.x"),),
    )
    message = Outgoing(exchange=COMMANDS, routing_key="inventory.update.x", body=b"x", message_id="1")
    declaring, publishing = (
        RabbitTransport(node.url(API_VHOST), name="api", prefix="refused.") for node in (leader, survivor)
    )
    await declaring.open()
    await declaring.declare_shared()
    await declaring.declare_queue(row, row.name, row.bindings)
    await declaring.close()
    await publishing.open()
    try:
        for node in (other, leader):  # in this order the queue's leader is the last to go, and none is elected
            await asyncio.to_thread(node.kill)
        with pytest.raises(PublishRefused):
            await publishing.publish(message)
        await asyncio.to_thread(other.start)

        async def is_taken() -> bool:
            with contextlib.suppress(PublishRefused):
                await publishing.publish(message)
                return True
            return False

        await until(is_taken)
    finally:
        await publishing.close()


def test_the_node_of_a_cluster_that_workers_are_connected_to_is_killed(cluster: BrokerCluster, tmp_path: Path) -> None:
    urls = {vhost: cluster.url(vhost) for vhost in (API_VHOST, CELL)}

    async def kill() -> None:
        busiest = await asyncio.to_thread(cluster.busiest)
        await asyncio.to_thread(busiest.kill)

    with Postgres() as postgres, workers(tmp_path, urls, postgres.url()) as (processes, site):
        asyncio.run(builds_go_on(site, kill))
        assert all(worker.process.running for worker in processes.workers.values())


def test_the_primary_is_killed_and_its_synchronous_stand_by_promoted(tmp_path: Path) -> None:
    with RabbitMQ() as broker, database_pair() as pair:

        async def fail_over() -> None:
            await asyncio.to_thread(pair.primary.kill)
            await asyncio.to_thread(pair.stand_by.promote)

        with workers(tmp_path, broker.add_vhosts((API_VHOST, CELL)), pair.url) as (processes, site):
            asyncio.run(builds_go_on(site, fail_over, set_back=True))
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
    processes = WorkerProcesses(directory, variables(settings), spawn=ForkedProcess)
    try:
        start_all(processes, PLAN)
        asyncio.run(processes.ready())
        yield processes, Site(settings)
    finally:
        processes.stop()


async def builds_go_on(site: Site, disturb: Callable[[], Awaitable[None]], *, set_back: bool = False) -> None:
    """Disturb a load in its middle: each build ends once, active, and all that was confirmed is in placement.

    set_back: the database may lose announcements of the last 0.2 s, and state them again (`stated_once`).
    """
    process = process_name("test")
    # Messages for a private queue while it is away are lost, by design; this test judges every event.
    client = RecordingClient(site.bus(process), clock=site.clock, process=process, durable=True)
    await client.open()
    try:
        await hosts_known(client, PLAN)
        # A broker may refuse what it is given while its queues elect another leader: that is offered again.
        plan = LoadPlan(
            boots=BOOTS, mix={"m1.tiny": 1.0}, rate_per_s=50.0, timeout_s=PATIENCE_S, retry_for_s=PATIENCE_S
        )
        loading = asyncio.create_task(run_load(client, plan, clock=site.clock, rng=random.Random(5)))
        assert await client.until(lambda: 0 < client.unfinished < len(client.watches), PATIENCE_S)
        await disturb()
        report: LoadReport = await loading
        events = stated_once(client.events) if set_back else client.events
        assert (report.active, report.unfinished) == (BOOTS, 0), report
        assert set_back or not report.more_than_one_terminal, report
        assert await rest(site, timeout_s=PATIENCE_S)
        verdicts = check_invariants(await gather(site, accepted=list(client.watches), events=events))
        assert [verdict for verdict in verdicts if not verdict.holds] == []
    finally:
        await client.close()


def stated_once(events: Sequence[BuildEvent]) -> list[BuildEvent]:
    """The events without a second `active` of one attempt on one host.

    A cell that was set back has lost an announcement whose commit was not on disk (decision 0011): what was under way
    goes on with higher numbers, and states it again.
    """
    known: set[tuple[str, str | None, int]] = set()
    kept: list[BuildEvent] = []
    for event in events:
        what = (event.instance_uuid, event.host, event.attempt)
        if event.state is not BuildState.ACTIVE or what not in known:
            kept.append(event)
        if event.state is BuildState.ACTIVE:
            known.add(what)
    return kept


def test_only_an_end_that_is_stated_again_counts_once() -> None:
    def end(sequence: int, state: BuildState = BuildState.ACTIVE, attempt: int = 1) -> BuildEvent:
        return BuildEvent(
            instance_uuid=str(uuid.UUID(int=1)),
            project_id="p",
            state=state,
            sequence=sequence,
            terminal=True,
            host="h1",
            attempt=attempt,
        )

    first, again = end(11), end(1_000_011)
    assert stated_once([first, again]) == [first]
    for other in (end(1_000_011, BuildState.FAILED), end(1_000_011, attempt=2)):
        assert stated_once([first, other]) == [first, other]


# --- no broker or database: the workers wait and report it, and resume; nothing is lost


FEW_BOOTS = 150


def test_workers_wait_for_their_servers_and_outlive_a_restart_of_the_database() -> None:
    with small_processes(start=False) as small:
        small.servers.broker.shut_down()
        small.servers.postgres.shut_down()
        start_all(small.processes, PLAN)
        logs(small, "placement1", "database.waiting")
        logs(small, "scheduler1", "database.waiting", "bus.unavailable")
        logs(small, "conductor-cell1-1", "database.waiting", "bus.unavailable")
        logs(small, "compute-cell1-c1", "bus.unavailable")
        started = small.pids()
        small.servers.postgres.start()
        logs(small, "placement1", "bus.unavailable")
        small.servers.broker.start()
        small.ready()
        assert small.pids() == started, "they waited, and did not die"

        asyncio.run(load_while_the_database_restarts(small))
        assert small.pids() == started

        small.servers.postgres.kill()
        done = berth_list(small)
        small.servers.postgres.start()
        assert (done.returncode, "database.unavailable" in done.stderr) == (3, True), done.stderr


def berth_list(small: Small) -> subprocess.CompletedProcess[str]:
    """It asked "is a scheduler running?", with the status of time that ran out."""
    return subprocess.run(
        [sys.executable, "-m", "berth", "list"],
        env={**os.environ, **small.variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


async def load_while_the_database_restarts(small: Small) -> None:
    process = process_name("test")
    site = small.site
    client = RecordingClient(site.bus(process), clock=site.clock, process=process)
    await client.open()
    try:
        await hosts_known(client, PLAN)
        plan = LoadPlan(boots=FEW_BOOTS, mix={"m1.tiny": 1.0}, rate_per_s=100.0, timeout_s=PATIENCE_S)
        loading = asyncio.create_task(run_load(client, plan, clock=site.clock, rng=random.Random(5)))
        assert await client.until(lambda: 0 < client.unfinished < len(client.watches), PATIENCE_S)
        await asyncio.to_thread(small.servers.postgres.kill)
        await asyncio.to_thread(small.servers.postgres.start)
        report: LoadReport = await loading
        assert (report.active, report.unfinished, report.more_than_one_terminal) == (FEW_BOOTS, 0, 0), report
        assert await rest(site, timeout_s=PATIENCE_S)
        verdicts = check_invariants(await gather(site, accepted=list(client.watches), events=client.events))
        assert [verdict for verdict in verdicts if not verdict.holds] == []
    finally:
        await client.close()


def logs(small: Small, name: str, *events: str) -> None:
    """Wait until a worker's log holds one of these events, and the worker lives."""
    worker = small.processes.workers[name]
    with case(name, events):
        wait_until(lambda: any(f'"event":"{event}"' in worker.log.read_text() for event in events))
    assert worker.process.running, worker.process.tail()
