"""Gateways as processes on a real RabbitMQ, each user with exactly the printed rights: they die, projects attack."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import aio_pika
import aiormq
import pytest
from aiormq.abc import DeliveredMessage
from aiormq.exceptions import AMQPError, DeliveryError
from pamqp.commands import Basic

from berth.config.settings import BusSettings, Settings
from berth.permissions import PermissionRole, definitions, exchanges, of_role
from berth.project_vhost import MAX_QUEUES, host_definitions, virtual_host
from berth.up.embedded.rabbitmq import RabbitMQ
from berth.up.servers import API_VHOST, variables
from berth.up.worker_processes import WorkerProcesses
from bus.bus import API, Bus
from bus.clock import SystemClock
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.build import BuildAccepted, BuildEvent, BuildRequest, BuildState
from bus.contracts.queues import BY_QUEUE, MAX_PROJECT_BYTES, project_bus
from bus.rabbitmq.transport import RabbitTransport
from gateway.config import GatewayConfig
from gateway.project import MAX_BATCH
from tests.kit.forks import ForkedProcess
from tests.kit.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.rabbitmq, pytest.mark.timeout(300)]

PROJECTS = tuple(f"p{number}" for number in range(6))
PASSWORD = "secret"


# The queue's leader is asked: what `rabbitmqctl list_queues` shows of a quorum queue is some seconds old.
MESSAGES = """
{ok, Queue} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"%s">>, queue, <<"gateway.requests">>)),
{ok, {_, Count}, _} = ra:leader_query(amqqueue:get_pid(Queue), fun rabbit_fifo:query_messages_total/1), Count.
"""


class GuardedDoor:
    """A broker, the users of gateways and projects with the printed rights, and a scheduler that accepts."""

    def __init__(self, broker: RabbitMQ, directory: Path, projects: Sequence[str] = PROJECTS) -> None:
        self.broker = broker
        self.projects = projects
        url = broker.add_vhosts((API_VHOST,))[API_VHOST]
        gateway = GatewayConfig(projects=tuple(projects), url=broker.url("", user="berth-gateway", password=PASSWORD))
        self.settings = Settings(bus=BusSettings(url=url), gateway=gateway)
        hosts = [virtual_host(project, self.settings) for project in projects]
        grants = of_role(PermissionRole.GATEWAY, self.settings)
        names = {grant.user for grant in grants} | {grant.user for host in hosts for grant in host.grants}
        broker.define(users=[{"name": name, "password": PASSWORD, "tags": ""} for name in sorted(names)])
        broker.define(**exchanges(grants, self.settings))
        broker.define(**definitions(grants))
        broker.define(**host_definitions(hosts))
        self.bus = self.bus_of("scheduler-1")
        self.got: list[BuildRequest] = []
        own = Settings(
            bus=BusSettings(url=broker.url(API_VHOST, user="berth-gateway", password=PASSWORD)), gateway=gateway
        )
        self.processes = WorkerProcesses(directory, variables(own), spawn=ForkedProcess)

    def bus_of(self, process: str) -> Bus:
        transport = RabbitTransport(self.settings.bus.url, name=API)
        return Bus(API, transport, process=process, clock=SystemClock(), rng=random.Random(1))

    def url(self, project: str) -> str:
        return self.broker.url(project_bus(project), user=f"berth-project-{project}", password=PASSWORD)

    async def handle(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        outcomes = []
        for one in batch:
            assert isinstance(one.message, BuildRequest)
            self.got.append(one.message)
            outcomes.append(Done(reply=BuildAccepted(instance_uuid=one.message.instance_uuid)))
        return outcomes

    @contextlib.asynccontextmanager
    async def scheduler(self) -> AsyncIterator[None]:
        await self.bus.open()
        consumer = Consumer(self.bus, "scheduler.door", self.handle)
        await consumer.start()
        running = asyncio.create_task(consumer.run())
        try:
            yield
        finally:
            await consumer.drain(0)
            await running
            await self.bus.close()

    async def start(self, *names: str) -> None:
        for name in names:
            self.processes.start(name, "gateway")
        await self.processes.ready(names)
        for project in self.projects:
            await until(lambda project=project: self.is_open(project))  # type: ignore[misc]

    async def is_open(self, project: str) -> bool:
        try:
            async with self.client(project) as client:
                await client.channel.queue_declare("gateway.queries", passive=True)
        except AMQPError:
            return False
        return True

    async def is_idle(self, project: str) -> bool:
        """Whether the broker has no request of a project, neither waiting nor unacknowledged."""
        counted = await asyncio.to_thread(self.broker.evaluate, MESSAGES % project_bus(project))
        return counted.strip() in ("{ok, 0}", "0")  # erl_call's way, rabbitmqctl's

    async def give_back(self, project: str, times: int) -> None:
        """Take a request, and lose it, as a gateway whose connection is lost each time."""
        url = self.broker.url(project_bus(project), user="berth-gateway", password=PASSWORD)
        for _ in range(times):
            async with await aiormq.connect(url) as connection:
                channel, got = await connection.channel(), asyncio.Event()

                async def receive(_: DeliveredMessage, got: asyncio.Event = got) -> None:
                    got.set()

                await channel.basic_consume("gateway.requests", receive)
                await asyncio.wait_for(got.wait(), PATIENCE_S)

    @contextlib.asynccontextmanager
    async def client(self, project: str) -> AsyncIterator[Client]:
        connection = await aiormq.connect(self.url(project))
        try:
            yield Client(await connection.channel(), project)
        finally:
            with contextlib.suppress(AMQPError, RuntimeError, TimeoutError):
                await connection.close()


class Client:
    """A project's program, in its virtual host."""

    def __init__(self, channel: aiormq.abc.AbstractChannel, project: str) -> None:
        self.channel = channel
        self.project = project

    async def boot(self, number: int, *, size: int = 0, expiration: str | None = None, **headers: Any) -> str:
        """Publish a request, with a confirm; returns its instance. number: its name, by which the order is seen. size:
        bytes that its body has besides. expiration: in milliseconds.
        """
        instance = str(uuid.uuid4())
        body = {"instance_uuid": instance, "project_id": "x", "flavor": "f", "name": str(number)}
        answer = await self.channel.basic_publish(
            json.dumps(body).encode() + b" " * size,
            exchange="berth",
            routing_key=f"build.request.{self.project}",
            properties=Basic.Properties(
                content_type="application/json", delivery_mode=2, headers=headers, expiration=expiration
            ),
            mandatory=True,
        )
        assert isinstance(answer, Basic.Ack)
        return instance

    async def ready(self) -> int:
        """Requests that no gateway has."""
        declared = await self.channel.queue_declare("gateway.requests", passive=True)
        return declared.message_count or 0

    async def has_ready(self, count: int) -> bool:
        return await self.ready() == count


@pytest.fixture
def door(own_broker: RabbitMQ) -> Iterator[GuardedDoor]:
    with tempfile.TemporaryDirectory(prefix="berth-door-") as name:
        made = GuardedDoor(own_broker, Path(name))
        try:
            yield made
        finally:
            made.processes.stop()


async def test_of_two_gateways_one_may_be_killed_at_any_time(door: GuardedDoor) -> None:
    await killed_at_random(door, requests=60, kills=2)


@pytest.mark.nightly
async def test_of_10_000_requests_of_50_projects_none_is_lost(own_broker: RabbitMQ) -> None:
    with tempfile.TemporaryDirectory(prefix="berth-door-") as name:
        door = GuardedDoor(own_broker, Path(name), [f"p{number}" for number in range(50)])
        try:
            await killed_at_random(door, requests=200, kills=8)
        finally:
            door.processes.stop()


async def killed_at_random(door: GuardedDoor, *, requests: int, kills: int) -> None:
    """None is lost, none is another's, and what is new of a project comes in its order. One that comes twice was
    confirmed and not acknowledged: it is the same by its id.
    """
    sent, rng = dict[str, list[str]](), random.Random(requests)

    async def publish(project: str) -> None:
        async with door.client(project) as client:
            sent[project] = [await client.boot(number) for number in range(requests)]

    async with door.scheduler():
        await door.start("gateway1", "gateway2")
        publishing = asyncio.gather(*map(publish, door.projects))
        for number in range(kills):
            due = rng.randint(number, number + 1) * len(door.projects) * requests // (kills + 1)
            await until(lambda due=due: len(door.got) >= due)  # type: ignore[misc]
            name = rng.choice(("gateway1", "gateway2"))
            door.processes.kill(name)
            door.processes.restart(name)
        await publishing
        wanted = {instance for project in door.projects for instance in sent[project]}
        await until(lambda: {one.instance_uuid for one in door.got} == wanted)
    assert len(door.got) - len(wanted) <= kills * len(door.projects) * MAX_BATCH
    for project in door.projects:
        first = dict.fromkeys(one.instance_uuid for one in door.got if one.project_id == project)
        assert list(first) == sent[project]


async def test_a_full_queue_of_requests_refuses_and_keeps_what_it_has_confirmed(door: GuardedDoor) -> None:
    async with door.scheduler():
        await door.start("gateway1")
    door.processes.kill("gateway1")
    sent, refused = list[str](), 0
    async with door.client("p0") as client:
        for number in range(40):
            try:
                sent.append(await client.boot(number, size=MAX_PROJECT_BYTES // 8))
            except DeliveryError:
                refused += 1
        assert await client.ready() == len(sent)
    assert refused


async def test_what_the_api_bus_has_confirmed_is_neither_lost_nor_sent_again(door: GuardedDoor) -> None:
    """As when gateways are restarted while no scheduler answers."""
    async with door.scheduler():
        await door.start("gateway1")
    sent: list[str] = []
    async with door.client("p0") as client:
        for number in range(3):
            sent += [await client.boot(number) for _ in range(4)]
            await until(lambda: client.has_ready(0))
            await until(lambda: door.is_idle("p0"))
            door.processes.kill("gateway1")
            door.processes.restart("gateway1")
    async with door.scheduler():
        await until(lambda: {one.instance_uuid for one in door.got} == {*sent})
    assert [one.instance_uuid for one in door.got] == sent


async def test_what_expires_or_is_lost_too_often_ends_in_an_event(door: GuardedDoor) -> None:
    """The broker had confirmed it and dropped it, and its client waited for ever."""
    async with door.scheduler():
        await door.start("gateway1")
    door.processes.kill("gateway1")
    events: list[dict[str, Any]] = []
    async with door.client("p0") as client:
        declared = await client.channel.queue_declare("", exclusive=True)
        assert declared.queue is not None
        await client.channel.queue_bind(declared.queue, "berth.events", "build.event.*.p0")

        async def receive(message: DeliveredMessage) -> None:
            events.append(json.loads(message.body))

        await client.channel.basic_consume(declared.queue, receive, no_ack=True)
        expired = await client.boot(1, expiration="1")
        await until(lambda: client.has_ready(0))
        lost = await client.boot(2)
        await door.give_back("p0", BY_QUEUE["gateway.requests"].delivery_limit + 1)
        await until(lambda: client.has_ready(0))
        door.processes.restart("gateway1")
        await until(lambda: len(events) == 2)
    codes = {one["instance_uuid"]: one["code"] for one in events}
    assert codes == {expired: "broker.expired", lost: "delivery.limit_reached"}


async def test_long_requests_are_all_taken_by_one_gateway(door: GuardedDoor) -> None:
    """Another one would send what follows before what this one still has."""
    async with door.scheduler():
        await door.start("gateway1", "gateway2")
    async with door.client("p0") as client:
        sent = [await client.boot(number, size=400_000) for number in range(8)]
        await until(lambda: client.has_ready(0))
        for _ in range(100):  # a gateway that ends its consumption has done so by then
            await client.ready()
        sent += [await client.boot(number) for number in range(8)]
        await until(lambda: client.has_ready(0))
    async with door.scheduler():
        await until(lambda: {one.instance_uuid for one in door.got} == {*sent})
    assert list(dict.fromkeys(one.instance_uuid for one in door.got)) == sent


async def test_a_second_key_brings_one_copy_to_nobody_else(door: GuardedDoor) -> None:
    async with door.scheduler(), door.client("p0") as client:
        await door.start("gateway1")
        keys = ["build.request.p0" for lane in range(32)] + ["build.query", "instance.query", "x.y"]
        instance = await client.boot(1, CC=keys)
        await until(lambda: door.got)
        last = await client.boot(2)
        await until(lambda: door.got[-1].instance_uuid == last)
        assert [one.instance_uuid for one in door.got] == [instance, last]


async def test_a_projects_user_has_its_limits_and_no_names_but_its_own(door: GuardedDoor) -> None:
    async with door.scheduler(), door.client("p0") as client:
        await door.start("gateway1")
        made = 0
        with pytest.raises(AMQPError):
            for _ in range(MAX_QUEUES + 1):
                await client.channel.queue_declare("", exclusive=True)
                made += 1
        assert 10 < made < MAX_QUEUES
    refused = {
        "takes requests": lambda channel: channel.basic_consume("gateway.requests", lambda _: None),
        "deletes their queue": lambda channel: channel.queue_delete("gateway.requests"),
        "empties it": lambda channel: channel.queue_purge("gateway.requests"),
        "a name of its own": lambda channel: channel.queue_declare("mine"),
        "an exchange": lambda channel: channel.exchange_declare("mine"),
        "publishes events": lambda channel: channel.basic_publish(b"", exchange="berth.events", routing_key="x"),
        "gives up": lambda channel: channel.basic_publish(b"", exchange="berth.dead", routing_key="gateway.requests"),
        "takes what is given up": lambda channel: channel.basic_consume("gateway.dead_letters", lambda _: None),
        "replies": lambda channel: channel.basic_publish(b"", exchange="berth.replies", routing_key="x"),
        "past exchanges": lambda channel: channel.basic_publish(b"", exchange="", routing_key="gateway.requests"),
    }
    for what, attempt in refused.items():
        async with door.client("p1") as client:
            with pytest.raises(AMQPError):
                await attempt(client.channel)
                await client.channel.queue_declare("")  # a refused publish closes the channel
                pytest.fail(what)
    with pytest.raises(AMQPError):
        await aiormq.connect(door.broker.url(project_bus("p1"), user="berth-project-p0", password=PASSWORD))
    with pytest.raises(AMQPError):
        await aiormq.connect(door.broker.url(API_VHOST, user="berth-project-p0", password=PASSWORD))


async def test_events_and_answers_come_back_and_a_lost_connection_loses_none(door: GuardedDoor) -> None:
    async with door.scheduler():
        await door.start("gateway1")
        connection = await aio_pika.connect(door.url("p0"))
        async with connection:
            channel = await connection.channel()
            queue = await channel.declare_queue(exclusive=True)
            await queue.bind("berth.events", "build.event.*.p0")
            await queue.bind("berth.replies", queue.name)
            got: list[dict[str, Any]] = []

            async def receive(message: aio_pika.abc.AbstractIncomingMessage) -> None:
                got.append({**json.loads(message.body), "correlation": message.correlation_id})

            await queue.consume(receive, no_ack=True)
            instance = str(uuid.uuid4())
            body = {"instance_uuid": instance, "project_id": "p0", "flavor": "f"}
            message = aio_pika.Message(json.dumps(body).encode(), reply_to=queue.name, correlation_id="mine")
            await (await channel.get_exchange("berth", ensure=False)).publish(message, "build.request.p0")
            await until(lambda: got)
            assert (got[0]["instance_uuid"], got[0]["correlation"]) == (instance, "mine")
            events = [
                BuildEvent(instance_uuid=str(uuid.uuid4()), project_id="p0", state=BuildState.ACTIVE, sequence=number)
                for number in range(50)
            ]
            await door.bus.publish_all([(event, "") for event in events[:25]])
            door.processes.kill("gateway1")
            await door.bus.publish_all([(event, "") for event in events[25:]])
            door.processes.restart("gateway1")
            await until(lambda: {one.get("sequence") for one in got} >= set(range(50)))


async def test_a_project_without_its_virtual_host_keeps_no_other_waiting(door: GuardedDoor) -> None:
    door.broker.evaluate('rabbit_vhost:delete(<<"client.p0">>, <<"a test">>).')
    async with door.scheduler():
        door.processes.start("gateway1", "gateway")
        await door.processes.ready(["gateway1"])
        await until(lambda: door.is_open("p1"))
        async with door.client("p1") as client:
            instance = await client.boot(1)
            await until(lambda: door.got)
            assert door.got[0].instance_uuid == instance
        door.broker.define(**host_definitions([virtual_host("p0", door.settings)]))
        await until(lambda: door.is_open("p0"))
