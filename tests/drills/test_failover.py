"""Several brokers, several databases: the one in use is killed, the workers go on by themselves, nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from berth.audit.gather import gather, rest
from berth.audit.invariants import check_invariants
from berth.load import LoadPlan, LoadReport, run_load
from berth.settings import BusSettings, CellSettings, DatabaseSettings, Settings
from berth.site import Site, process_name
from berth.trial.embedded.postgres import Postgres
from berth.trial.embedded.rabbitmq import RabbitMQ
from berth.trial.servers import API_VHOST, hosts_known, start_all, variables
from berth.trial.worker_processes import WorkerProcesses
from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.queues import COMMANDS, QueueKind, QueueRow, Where
from bus.port import Outgoing, PublishRefused
from bus.rabbitmq.transport import RabbitTransport
from lab.feed_watch import RecordingClient
from tests.kit.forks import ForkedProcess
from tests.kit.lent import BrokerCluster, broker_cluster, database_pair
from tests.kit.waiting import until
from tests.system.small import PLAN

PATIENCE_S = 90.0
BOOTS = 200
(CELL,) = PLAN.cells

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.timeout(600)]


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
    with RabbitMQ() as first, RabbitMQ(beside=first) as second:
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
    """Disturb a load in its middle: each build ends once, active, and all that was confirmed is in the book.

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
        assert await client.until(lambda: 0 < client.unfinished < len(client.tracks), PATIENCE_S)
        await disturb()
        report: LoadReport = await loading
        events = stated_once(client.events) if set_back else client.events
        assert (report.active, report.unfinished) == (BOOTS, 0), report
        assert set_back or not report.more_than_one_terminal, report
        assert await rest(site, timeout_s=PATIENCE_S)
        verdicts = check_invariants(await gather(site, accepted=list(client.tracks), events=events))
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
