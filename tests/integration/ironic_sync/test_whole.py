"""The whole ironic-sync: notifications in, inventory updates out, each recorded scenario too."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import pytest
import uvloop

import ironic_sync.app
import placement_worker.app
import scheduler_worker.app
from berth.up.embedded.rabbitmq import RabbitMQ
from berth.up.local_workers import InProcessWorkers
from berth.up.worker_processes import NO_TLS
from bus.clock import SystemClock, new_uuid
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.build import HostsPage, HostsQuery
from bus.contracts.placement import InventoryUpdate
from bus.memory import MemoryBroker, MemoryTransport
from bus.rabbitmq.transport import RabbitTransport
from bus.service.environment import Environment
from bus.service.service import WorkerRuntime
from bus.transport import Transport
from compute_sim.ironic_stand_in import (
    AmqpAnnouncer,
    Behaviour,
    IronicStandIn,
    MemoryAnnouncer,
    NotificationAnnouncer,
    replay,
    shapes,
)
from ironic_sync.app import build
from ironic_sync.config import IronicSyncConfig, NotificationBroker
from placement_worker.config import PlacementConfig
from placement_worker.replica.replica import Replica
from scheduler_worker.config import SchedulerConfig
from tests.kit.waiting import until
from tests.unit.ironic_sync.world import EXPECTED, RECORDINGS, SCENARIOS

# --- The whole process: notifications in, inventory updates out, over real HTTP, PostgreSQL and a broker.


LIMIT_S = 60.0


@dataclass
class Site:
    """Where things are: how to connect, and which microversion is used."""

    transports: Callable[[str], Transport]
    announcer: NotificationAnnouncer
    exchange: str
    database_url: str


@pytest.fixture(params=["memory", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)])
def site(request: pytest.FixtureRequest, postgres_url: str) -> Site:
    if request.param == "memory":
        broker = MemoryBroker(SystemClock())
        return Site(partial(MemoryTransport, broker), MemoryAnnouncer(broker), "ironic", postgres_url)
    url, prefix = request.getfixturevalue("amqp")
    return _on_rabbitmq(url, prefix, postgres_url)


def _on_rabbitmq(url: str, prefix: str, database_url: str) -> Site:
    exchange = f"{prefix}ironic"
    return Site(
        lambda name: RabbitTransport(url, name=name, prefix=prefix),
        AmqpAnnouncer(url, exchange),
        exchange,
        database_url,
    )


class Placement:
    """Takes inventory updates off the bus as a placement worker does."""

    def __init__(self) -> None:
        self.newest: dict[str, InventoryUpdate] = {}
        self.causes: dict[str, str] = {}

    async def take(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        for received in batch:
            update = received.message
            assert isinstance(update, InventoryUpdate)
            known = self.newest.get(update.root_uuid)
            if known is None or update.version > known.version:
                self.newest[update.root_uuid] = update
                self.causes[update.root_uuid] = received.meta.cause
        return [Done()] * len(batch)

    def offered(self) -> set[str]:
        return {
            uuid
            for uuid, update in self.newest.items()
            for report in update.providers
            if any(inventory.reserved == 0 for inventory in report.inventories.values())
        }

    async def until(self, condition: Callable[[], bool]) -> None:
        await until(condition, LIMIT_S)


@asynccontextmanager
async def placement_on(site: Site) -> AsyncIterator[Placement]:
    bus = environment(site, "book").bus()
    await bus.open()
    placement = Placement()
    consumer = Consumer(bus, "placement.inventory", placement.take)
    await consumer.start()
    try:
        yield placement
    finally:
        await consumer.drain(1.0)
        await bus.close()


def environment(site: Site, process: str) -> Environment:
    return Environment(
        process, transports=site.transports, database_url=site.database_url, rng=random.Random(1), pool_size=5
    )


@asynccontextmanager
async def stand_in(site: Site, nodes: int) -> AsyncIterator[IronicStandIn]:
    quick = Behaviour(verify_s=0.01, deploy_s=0.05, undeploy_s=0.01, clean_s=0.05)
    ironic = IronicStandIn(site.announcer, clock=SystemClock(), rng=random.Random(2), behaviour=quick)
    ironic.pool.plan(nodes)
    await ironic.start()
    try:
        yield ironic
    finally:
        await ironic.stop()


@asynccontextmanager
async def running(site: Site, url: str, process: str = "sync", **settings: Any) -> AsyncIterator[WorkerRuntime]:
    config = IronicSyncConfig(url=url, exchange=site.exchange, bind_retry_s=0.05, transient_retry_s=0.2, **settings)
    service, stop = build(environment(site, process), config), asyncio.Event()
    task = asyncio.create_task(service.run(stop))
    try:
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wait([task, asyncio.ensure_future(service.ready.wait())], return_when=asyncio.FIRST_COMPLETED)
            while service.not_ready():
                assert not task.done(), task
                await asyncio.sleep(0.01)
        yield service
    finally:
        stop.set()
        await task


@asynccontextmanager
async def asking(base: str) -> AsyncIterator[Callable[..., Awaitable[None]]]:
    """A client that calls below one address and expects success."""
    async with httpx.AsyncClient(trust_env=False, verify=NO_TLS, timeout=LIMIT_S) as client:

        async def ask(method: str, path: str, content: Any = None) -> None:
            (await client.request(method, base + path, json=content)).raise_for_status()

        yield ask


async def test_a_nodes_life_in_the_book(site: Site) -> None:
    async with (
        stand_in(site, 4) as ironic,
        placement_on(site) as placement,
        running(site, ironic.url, resync_interval_s=3600.0),
    ):
        uuid, *others = ironic.pool.nodes
        await placement.until(lambda: placement.offered() == {uuid, *others})
        async with asking(f"{ironic.url}/v1/nodes/{uuid}") as ask:
            await ask("PUT", "/maintenance", {"reason": "disk"})
            await placement.until(lambda: placement.offered() == set(others))
            assert placement.causes[uuid].startswith("req-")
            await ask("DELETE", "/maintenance")
            await placement.until(lambda: uuid in placement.offered())
            value = "11111111-2222-4333-8444-555555555555"
            await ask("PATCH", "", [{"op": "add", "path": "/instance_uuid", "value": value}])
            await placement.until(lambda: uuid not in placement.offered())
            await ask("PUT", "/states/provision", {"target": "active"})
            await until(lambda: ironic.pool.idle)
            await ask("PUT", "/states/provision", {"target": "deleted"})
            await placement.until(lambda: uuid in placement.offered())
            assert ironic.pool.nodes[uuid]["provision_state"] == "available"
            await ask("PUT", "/traits", {"traits": ["CUSTOM_NEW"]})
            await placement.until(lambda: placement.newest[uuid].providers[0].traits == ("CUSTOM_NEW",))
            await ask("DELETE", "")
            await placement.until(lambda: placement.newest[uuid].providers == ())


GIVEN_AGGREGATE = "7f1c2a44-0000-4000-8000-00000000000a"


class Rest:
    """The Placement REST API of a worker, as an operator uses it."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def ask(self, method: str, path: str, version: str, content: Any = None) -> Any:
        headers = {"OpenStack-API-Version": f"placement {version}", "X-Auth-Token": "admin"}
        answer = await self._client.request(method, path, json=content, headers=headers)
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        answer.raise_for_status()
        return answer.json() if answer.content else {}

    async def reserved(self, node: str) -> int | None:
        """How much of a node is held back; None: placement does not have it."""
        found = await self.ask("GET", f"/resource_providers/{node}/inventories", "1.4")
        return (
            None
            if not found or not found["inventories"]
            else sum(one["reserved"] for one in found["inventories"].values())
        )

    async def until_reserved(self, node: str, wanted: int | None) -> None:
        async def is_so() -> bool:
            return await self.reserved(node) == wanted

        await until(is_so, LIMIT_S)

    async def give(self, node: str) -> None:
        await self.ask("PUT", f"/resource_providers/{node}/aggregates", "1.1", [GIVEN_AGGREGATE])
        await self.ask("PUT", "/traits/CUSTOM_GIVEN", "1.6")
        has = await self.ask("GET", f"/resource_providers/{node}/traits", "1.6")
        has["traits"].append("CUSTOM_GIVEN")
        await self.ask("PUT", f"/resource_providers/{node}/traits", "1.6", has)

    async def given(self, node: str) -> tuple[list[str], bool]:
        aggregates = await self.ask("GET", f"/resource_providers/{node}/aggregates", "1.1")
        traits = await self.ask("GET", f"/resource_providers/{node}/traits", "1.6")
        return aggregates["aggregates"], "CUSTOM_GIVEN" in traits["traits"]


@asynccontextmanager
async def placement_with_rest(site: Site) -> AsyncIterator[Rest]:
    """A placement worker, and its REST API."""
    applications: list[Any] = []
    worker = placement_worker.app.build(
        environment(site, "placement"), PlacementConfig(), (), answer=applications.append
    )
    workers = InProcessWorkers()
    try:
        await workers.start(("placement", worker))
        asgi = httpx.ASGITransport(app=applications[0])
        async with httpx.AsyncClient(transport=asgi, base_url="http://placement", timeout=LIMIT_S) as client:
            yield Rest(client)
    finally:
        await workers.stop()


async def test_nodes_that_ironic_hides_for_a_while_keep_what_operators_gave_them(site: Site) -> None:
    """The role of ironic-sync's user was taken away for seconds: no node was left, in a list or singly."""
    settings = {"resync_interval_s": 0.05}
    async with stand_in(site, 4) as ironic, placement_with_rest(site) as rest, running(site, ironic.url, **settings):
        nodes = list(ironic.pool.nodes)
        for node in nodes:
            await rest.until_reserved(node, 0)
            await rest.give(node)
        hidden = dict(ironic.pool.nodes)
        ironic.pool.nodes.clear()
        for node in nodes:
            await rest.until_reserved(node, 1)
        ironic.pool.nodes.update(hidden)
        for node in nodes:
            await rest.until_reserved(node, 0)
            assert await rest.given(node) == ([GIVEN_AGGREGATE], True)
        await ironic.pool.delete(ironic.pool.nodes[nodes[0]], "req-1")
        await rest.until_reserved(nodes[0], None)


async def test_a_node_that_is_absent_for_long_is_removed(site: Site) -> None:
    settings = {"resync_interval_s": 0.05, "absent_retention_s": 0.2}
    async with stand_in(site, 2) as ironic, placement_with_rest(site) as rest, running(site, ironic.url, **settings):
        first, second = ironic.pool.nodes
        await rest.until_reserved(first, 0)
        del ironic.pool.nodes[first]
        await rest.until_reserved(first, None)
        assert await rest.reserved(second) == 0


async def test_a_child_node_is_in_no_list_and_not_offered(site: Site) -> None:
    async with (
        stand_in(site, 2) as ironic,
        placement_on(site) as placement,
        running(site, ironic.url, resync_interval_s=0.05),
    ):
        parent, child = ironic.pool.nodes
        await placement.until(lambda: placement.offered() == {parent, child})
        async with asking(f"{ironic.url}/v1/nodes/{child}") as ask:
            await ask("PATCH", "", [{"op": "add", "path": "/parent_node", "value": parent}])
            await placement.until(lambda: placement.offered() == {parent})
            await ask("PATCH", "", [{"op": "remove", "path": "/parent_node"}])
            await placement.until(lambda: placement.offered() == {parent, child})


async def test_changes_while_no_process_ran_are_found(site: Site) -> None:
    async with stand_in(site, 2) as ironic, placement_on(site) as placement:
        first, second = ironic.pool.nodes
        async with running(site, ironic.url):
            await placement.until(lambda: placement.offered() == {first, second})
        ironic.pool.nodes[first]["maintenance"] = True
        async with running(site, ironic.url):
            await placement.until(lambda: placement.offered() == {second})


async def test_one_of_two_processes_works_and_the_other_takes_over(site: Site) -> None:
    async with stand_in(site, 1) as ironic, placement_on(site) as placement:
        (uuid,) = ironic.pool.nodes
        async with running(site, ironic.url, leader_poll_interval_s=0.05) as first:
            async with running(site, ironic.url, "sync2", leader_poll_interval_s=0.05):
                await placement.until(lambda: placement.offered() == {uuid})
                assert first.not_ready() == []
            version = placement.newest[uuid].version
            async with running(site, ironic.url, "sync3", leader_poll_interval_s=0.05):
                await ironic.pool.set_maintenance(ironic.pool.nodes[uuid], True, "x", "req-1")
                await placement.until(lambda: placement.offered() == set())
                assert placement.newest[uuid].version > version


@pytest.mark.rabbitmq
async def test_ironic_has_a_broker_and_a_vhost_of_its_own(own_broker: RabbitMQ, postgres_url: str) -> None:
    """It had to publish into the API bus's vhost. Here nothing of Ironic's is on the API bus."""
    theirs = await asyncio.to_thread(own_broker.add_vhost, "ironic")
    transports = partial(MemoryTransport, MemoryBroker(SystemClock()))
    site = Site(transports, AmqpAnnouncer(theirs), "ironic", postgres_url)
    settings: dict[str, Any] = {"resync_interval_s": 3600.0, "broker": NotificationBroker(url=theirs)}
    async with stand_in(site, 2) as ironic, placement_on(site) as placement, running(site, ironic.url, **settings):
        first, second = ironic.pool.nodes
        await placement.until(lambda: placement.offered() == {first, second})
        await ironic.pool.set_maintenance(ironic.pool.nodes[first], True, "x", "req-1")
        await placement.until(lambda: placement.offered() == {second})
        assert placement.causes[first] == "req-1"


@pytest.mark.rabbitmq
async def test_the_broker_goes_and_comes_back(own_broker: RabbitMQ, postgres_url: str) -> None:
    """Ironic's exchange is gone with it, our binding too: bind again once it is back, and read all."""
    site = _on_rabbitmq(own_broker.url(), "", postgres_url)
    async with (
        stand_in(site, 2) as ironic,
        placement_on(site) as placement,
        running(site, ironic.url, resync_interval_s=3600.0),
    ):
        first, second = ironic.pool.nodes
        await placement.until(lambda: placement.offered() == {first, second})
        await asyncio.to_thread(own_broker.shut_down)
        ironic.pool.nodes[first]["maintenance"] = True
        await asyncio.to_thread(own_broker.start)
        await placement.until(lambda: placement.offered() == {second})
        await ironic.pool.set_maintenance(ironic.pool.nodes[second], True, "x", "req-2")
        await placement.until(lambda: placement.offered() == set())
        assert placement.causes[second] == "req-2", "a notification arrived: the binding is back"


# --- Every recorded scenario through running workers: Ironic's notifications on RabbitMQ and its REST API over
# HTTP, in; what a running scheduler can place on, out. After each step it is what Nova's own code makes of the
# nodes.


PATIENCE_S = 60.0
POLL_S = 0.005
RNG = random.Random(1)


class Workers:
    """Placement, ironic-sync and a scheduler on one broker and one database; the scheduler's replica is `replica`."""

    def __init__(self, url: str, prefix: str, database_url: str) -> None:
        self._url, self._prefix, self._database_url = url, prefix, database_url
        self.announcer = AmqpAnnouncer(url, f"{prefix}ironic")
        self.ironic = IronicStandIn(self.announcer, clock=SystemClock(), rng=RNG)
        self.replica = Replica()

    def environment(self, process: str, cells: tuple[str, ...] = ()) -> Environment:
        def transport(name: str) -> RabbitTransport:
            return RabbitTransport(self._url, name=name, prefix=f"{self._prefix}{name}.")

        return Environment(process, transports=transport, database_url=self._database_url, cells=cells, pool_size=5)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """All of them, ready."""
        sync = IronicSyncConfig(
            url=await self.ironic.start(),
            exchange=f"{self._prefix}ironic",
            bind_retry_s=0.05,
            resync_interval_s=3600.0,  # nothing is found by chance
            announced_retry_s=0.05,
            transient_retry_s=0.05,
            transient_retry_max_s=0.5,
            allocation_retry_s=0.05,
            absent_retention_s=0.0,  # as Nova, which removes what Ironic does not show
        )
        workers = InProcessWorkers()
        cells = ("cell1",)
        placement = placement_worker.app.build(self.environment("placement", cells), PlacementConfig(), cells)
        scheduler = scheduler_worker.app.build(
            self.environment("scheduler", cells), SchedulerConfig(), cells, replica=self.replica
        )
        try:
            await workers.start(("placement", placement))
            reading = ironic_sync.app.build(self.environment("ironic-sync"), sync)
            await workers.start(("ironic-sync", reading), ("scheduler", scheduler))
            yield
        finally:
            await workers.stop()
            await self.ironic.stop()

    async def announce(self, uuid: str) -> None:
        """A node whose making was not recorded."""
        node = self.ironic.pool.nodes[uuid]
        key, body = shapes.notification(
            node, "update", "end", request_id=f"req-{new_uuid(RNG)}", now=SystemClock().time(), rng=RNG
        )
        await self.announcer.publish(key, body)

    def seen(self, uuid: str) -> Any:
        """A provider of the scheduler's replica in the form of nova-expected.json."""
        row = self.replica.row_of(uuid)
        if row is None:
            return None
        traits = list(self.replica.traits_of(row))
        ((name, (numbers, _, _)),) = self.replica.inventory_of(row).items() or [("", (None, 0, 0))]
        if numbers is None:
            return {"resource_class": None, "traits": traits}
        assert numbers.capacity == numbers.total - numbers.reserved
        return {"resource_class": name, "total": numbers.total, "reserved": numbers.reserved, "traits": traits}

    async def reaches(self, expected: dict[str, Any]) -> bool:
        """Whether the scheduler comes to see these providers."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while any(self.seen(uuid) != provider for uuid, provider in expected.items()):  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
                return True
        return False


async def play(workers: Workers, name: str) -> int:
    """One scenario, step by step; how many nodes were compared."""
    held: dict[str, Any] = {}  # a node that Nova cannot place keeps the provider it had
    compared = 0
    steps = iter(EXPECTED[name])
    async for step in replay(RECORDINGS / f"{name}.jsonl", workers.ironic.pool, workers.announcer):
        answers = next(steps)
        assert answers["step"] == step
        if step.startswith("start:"):
            for uuid in answers["nodes"]:
                await workers.announce(uuid)
        held |= {uuid: it for uuid, it in answers["nodes"].items() if it is None or "error" not in it}
        expected = {uuid: held.get(uuid) for uuid in answers["nodes"]}
        assert await workers.reaches(expected), (name, step, {uuid: workers.seen(uuid) for uuid in expected}, expected)
        compared += len(expected)
    return compared


@pytest.mark.rabbitmq
@pytest.mark.postgres
def test_after_every_step_of_every_scenario_the_scheduler_sees_what_nova_would(
    amqp: tuple[str, str], postgres_url: str
) -> None:
    async def body() -> int:
        workers = Workers(*amqp, postgres_url)
        async with workers.running():
            compared = [await play(workers, name) for name in SCENARIOS]
            bus = workers.environment("client", ("cell1",)).bus()
            await bus.open()
            try:
                page = await bus.request(HostsQuery(limit=1000), HostsPage, timeout_s=PATIENCE_S)
            finally:
                await bus.close()
        answered = {host.uuid: sum(most for _, most in host.resources.values()) for host in page.hosts}
        for name in SCENARIOS:
            for uuid, answer in EXPECTED[name][-1]["nodes"].items():
                if answer is not None and "error" not in answer:
                    assert answered[uuid] == answer["total"] - answer["reserved"], (name, uuid)
        return sum(compared)

    assert uvloop.run(body()) == sum(len(step["nodes"]) for name in SCENARIOS for step in EXPECTED[name])
