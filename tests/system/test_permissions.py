"""The permissions that `berth permissions` prints, on a real RabbitMQ: users with exactly these, and a whole system."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import uuid
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aio_pika
import msgspec
import pytest
from aiormq.exceptions import ChannelAccessRefused

from berth.config.settings import BusSettings, CellSettings, Settings
from berth.permissions import Grant, PermissionRole, definitions, exchanges, of_role
from berth.project_vhost import host_definitions, virtual_host
from berth.up.servers import API_VHOST, RealServers, variables
from berth.up.worker_processes import WorkerProcesses
from bus.contracts.queues import Where, project_bus
from bus.rabbitmq import transport
from bus.rabbitmq.transport import RabbitTransport
from bus.rights import sample_keys
from bus.transport import BusForbidden, BusRightsMissing, BusTopicsOpen
from gateway.config import GatewayConfig
from tests.kit.forks import ForkedProcess, run_berth
from tests.kit.lent import lent_servers
from tests.kit.web_process import WebProcess
from tests.system.small import PLAN

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "messages.md"
PASSWORD = "secret"
MINE, THEIRS = "demo", "other-project"
PATIENCE_S = 60.0
SOME_UUID = "00000000-0000-4000-8000-00000000000a"

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.timeout(600)]


class Guarded:
    """A system each of whose workers signs in as its own user."""

    def __init__(self, servers: RealServers, directory: Path) -> None:
        self.servers = servers
        self.settings = servers.settings(PLAN)
        compute = msgspec.structs.replace(self.settings.compute, state_dir=str(directory / "machines"))
        self.settings = msgspec.structs.replace(self.settings, compute=compute)
        grants = [grant for role in PermissionRole for grant in of_role(role, self.settings)]
        define(servers, grants, self.settings)
        door = GatewayConfig(projects=(MINE, THEIRS), url=self.url("berth-gateway", ""))
        self.settings = msgspec.structs.replace(self.settings, gateway=door)
        hosts = [virtual_host(project, self.settings) for project in door.projects]
        servers.broker.define(users=[{"name": one.user, "password": PASSWORD, "tags": ""} for one in hosts])
        servers.broker.define(**host_definitions(hosts))
        self.processes = WorkerProcesses(directory, {}, spawn=ForkedProcess)
        self.directory = directory
        self._webs: dict[str, WebProcess] = {}

    def url(self, user: str, vhost: str = API_VHOST) -> str:
        return self.servers.broker.url(vhost, user=user, password=PASSWORD)

    def settings_of(self, user: str) -> Settings:
        """The settings as one user has them: its own name and password everywhere."""
        cells = {cell: CellSettings(url=self.url(user, cell)) for cell in PLAN.cells}
        return msgspec.structs.replace(self.settings, bus=BusSettings(url=self.url(user)), cells=cells)

    def start(self) -> None:
        self.spawn()
        asyncio.run(self.processes.ready())

    def spawn(self) -> None:
        processes = self.processes
        for name, *arguments in (
            ("placement", "placement"),
            ("conductor-cell1", "conductor", "--cell", "cell1"),
            ("compute-cell1", "compute", "--cell", "cell1", "--service", "cell1-c1"),
            ("scheduler", "scheduler"),
            ("gateway", "gateway"),
        ):
            processes.start(name, *arguments, settings=variables(self.settings_of(f"berth-{name}")))

    def web(self, user: str) -> WebProcess:
        """It has an operator's user of the broker, as which it does what others ask. user: its role in the database."""
        if user not in self._webs:
            database = self.settings_of(user).database
            settings = msgspec.structs.replace(self.settings_of("berth-operator"), database=database)
            self._webs[user] = WebProcess(variables(settings), self.directory)
        return self._webs[user]

    def stop(self) -> None:
        """End all of its processes."""
        for web in self._webs.values():
            web.stop()
        self._webs.clear()
        self.processes.stop()

    def berth(
        self, *arguments: str, user: str = "berth-operator", web: str = "berth-web"
    ) -> subprocess.CompletedProcess[str]:
        """A command of the operator's; of one that the HTTP API answers, web: that server's role in the database."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
        env = {**kept, **variables(self.settings_of(user)), **self.web(web).variables}
        return run_berth(*arguments, env=env, timeout_s=2 * PATIENCE_S)


def define(servers: RealServers, grants: list[Grant], settings: Settings) -> None:
    """Make the exchanges and the users, and give each exactly what is granted."""
    servers.broker.define(**exchanges(grants, settings))
    names = sorted({grant.user for grant in grants})
    servers.broker.define(users=[{"name": name, "password": PASSWORD, "tags": ""} for name in names])
    servers.broker.define(**definitions(grants))


@pytest.fixture(scope="module")
def system() -> Iterator[Guarded]:
    with lent_servers(PLAN.cells) as servers, tempfile.TemporaryDirectory(prefix="berth-perms-") as name:
        guarded = Guarded(servers, Path(name))
        try:
            guarded.start()
            yield guarded
        finally:
            guarded.stop()


def key_of(kind: str, project: str) -> str:
    """The routing key of a project's command, as docs/reference/messages.md has it."""
    return f"{kind}.{project}"


class Tenant:
    """A project's program in its virtual host, which knows no more than docs/reference/messages.md."""

    def __init__(self, channel: aio_pika.abc.AbstractChannel, project: str) -> None:
        self.channel = channel
        self.project = project
        self.events: list[dict[str, Any]] = []
        self._changed = asyncio.Event()

    async def listen(self) -> None:
        queue = await self.channel.declare_queue(exclusive=True)
        self.queue = queue.name
        await queue.bind("berth.events", f"build.event.*.{self.project}")
        await queue.bind("berth.events", f"instance.event.*.{self.project}")
        await queue.consume(self.receive, no_ack=True)

    async def publish(self, body: dict[str, Any], key: str, *, exchange: str = "berth", **properties: Any) -> None:
        message = aio_pika.Message(json.dumps(body).encode(), content_type="application/json", **properties)
        to = await self.channel.get_exchange(exchange, ensure=False)
        await to.publish(message, key, mandatory=False)

    async def boot(self) -> str:
        """A machine of this project's, active."""
        instance = str(uuid.uuid4())
        body = {"instance_uuid": instance, "project_id": self.project, "flavor": "m1.small"}
        await self.publish(body, key_of("build.request", self.project))
        assert (await self.terminal(instance))["state"] == "active"
        return instance

    async def delete(self, instance: str) -> dict[str, Any]:
        seen = len(self.events)
        body = {"instance_uuid": instance, "project_id": self.project}
        await self.publish(body, key_of("build.delete", self.project))
        return await self.terminal(instance, after=seen)

    async def terminal(self, instance: str, *, after: int = 0) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for event in self.events[after:]:
                    if event["instance_uuid"] == instance and event.get("terminal") and "request_id" not in event:
                        return event
                self._changed.clear()
                await self._changed.wait()

    async def ended(self, instances: set[str]) -> None:
        """Until each of them has a terminal event."""
        left, seen = set(instances), 0
        async with asyncio.timeout(2 * PATIENCE_S):
            while True:
                left -= {event["instance_uuid"] for event in self.events[seen:] if event.get("terminal")}
                seen = len(self.events)
                if not left:
                    return
                self._changed.clear()
                await self._changed.wait()

    async def move(self, instance: str, kind: str, **more: Any) -> dict[str, Any]:
        """Ask for a move; its end."""
        requested = str(uuid.uuid4())
        body = {"request_id": requested, "instance_uuid": instance, "project_id": self.project, "kind": kind, **more}
        await self.publish(body, key_of("instance.action", self.project))
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for event in self.events:
                    if event.get("request_id") == requested and event.get("terminal"):
                        return event
                self._changed.clear()
                await self._changed.wait()

    async def receive(self, message: aio_pika.abc.AbstractIncomingMessage) -> None:
        self.events.append(json.loads(message.body))
        self._changed.set()


@asynccontextmanager
async def tenant(system: Guarded, project: str = MINE) -> AsyncIterator[Tenant]:
    connection = await aio_pika.connect(system.url(f"berth-project-{project}", project_bus(project)))
    async with connection:
        one = Tenant(await connection.channel(on_return_raises=False), project)
        await one.listen()
        yield one


SIDES = {
    "the API bus": ("berth-publisher", API_VHOST),
    "its virtual host": (f"berth-project-{MINE}", project_bus(MINE)),
}


@pytest.mark.parametrize("side", SIDES)
def test_the_examples_work_unchanged_on_both_sides(system: Guarded, tmp_path: Path, side: str) -> None:
    build, action = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    url = system.url(*SIDES[side])
    instance, state, *_ = run_example(build, url, tmp_path).splitlines()[-1].split()
    assert state == "active"
    assert run_example(action, url, tmp_path, INSTANCE=instance).splitlines()[-1].split()[0] == "done"


def run_example(script: str, url: str, directory: Path, **more: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={"PATH": os.environ["PATH"], "AMQP_URL": url, **more},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_a_project_builds_and_deletes_its_own_and_receives_nothing_else(system: Guarded) -> None:
    async with tenant(system) as mine, tenant(system, THEIRS) as theirs:
        one, two = await mine.boot(), await theirs.boot()
        assert (await mine.delete(one))["state"] == "deleted"
        assert (await theirs.delete(two))["state"] == "deleted"
        assert {event["project_id"] for event in mine.events} == {MINE}
        assert {event["project_id"] for event in theirs.events} == {THEIRS}
        unknown = await mine.delete(str(uuid.uuid4()))  # by way of the retry queues
        assert (unknown["state"], unknown["code"]) == ("refused", "instance.unknown")


async def test_a_project_moves_its_own_and_no_other_machine(system: Guarded) -> None:
    async with tenant(system) as mine, tenant(system, THEIRS) as theirs:
        one, victim = await mine.boot(), await theirs.boot()
        before = len(theirs.events)
        stopped = await mine.move(one, "stop")
        assert (stopped["state"], stopped["condition"]) == ("done", "stopped"), stopped
        assert (await mine.move(one, "start"))["condition"] == "active"
        foreign = await mine.move(victim, "stop")
        assert (foreign["state"], foreign["code"], foreign["condition"]) == ("refused", "instance.unknown", "unknown")
        forged = await mine.move(victim, "stop", project_id=THEIRS)
        assert (forged["code"], forged["project_id"]) == ("instance.unknown", MINE), (
            "its body's project counts for nothing"
        )
        assert [event for event in theirs.events[before:] if event["instance_uuid"] == victim] == []
        assert (await mine.delete(one))["state"] == "deleted"
        assert (await theirs.delete(victim))["state"] == "deleted"


RIGHTS: dict[str, dict[str, Any]] = {
    "a forced revert": {"kind": "revert", "force": True},
    "an evacuation": {"kind": "evacuate", "fenced": True},
    "a forced evacuation": {"kind": "evacuate", "fenced": True, "force": True},
    "a migration": {"kind": "migrate"},
    "a live migration": {"kind": "live-migrate"},
    "a resize past the filters": {"kind": "resize", "flavor": "m1.medium", "host": "x", "forced": True},
}


async def test_a_project_requests_nothing_that_is_an_operators_right(system: Guarded) -> None:
    async with tenant(system) as mine:
        one = await mine.boot()
        for what, fields in RIGHTS.items():
            refused = await mine.move(one, **fields)
            assert (refused["state"], refused["code"], refused["project_id"]) == ("refused", "role.forbidden", MINE), (
                what
            )
        placed = str(uuid.uuid4())
        body = {"instance_uuid": placed, "project_id": MINE, "flavor": "m1.small", "host": "x", "forced": True}
        await mine.publish(body, key_of("build.request", MINE))
        assert (await mine.terminal(placed))["code"] == "role.forbidden"
        moved = await asyncio.to_thread(system.berth, "instance", "migrate", one, "--live", "-o", "json")
        assert moved.returncode == 0, moved.stderr  # the operator's command of the same
        reverted = await asyncio.to_thread(system.berth, "instance", "revert", one, "--force", "-o", "json")
        assert "role.forbidden" not in reverted.stdout + reverted.stderr  # there is no move to revert
        assert (await mine.delete(one))["state"] == "deleted"


@pytest.mark.parametrize("header", [None, "CC", "BCC", "berth-key"])
async def test_item_7_no_project_deletes_anothers_machine(system: Guarded, header: str | None) -> None:
    """The project is that of the virtual host, whatever a body or a header names."""
    async with tenant(system) as mine, tenant(system, THEIRS) as theirs:
        victim = await theirs.boot()
        before = len(theirs.events)
        body = {"instance_uuid": victim, "project_id": THEIRS}
        other = key_of("build.delete", THEIRS)
        headers = {} if header is None else {header: other if header == "berth-key" else [other]}
        with contextlib.suppress(ChannelAccessRefused):  # RabbitMQ 4, of a second key
            await mine.publish(body, key_of("build.delete", MINE), headers=headers)
        # A build after it goes the same way and ends later.
        await theirs.boot()
        assert [event for event in theirs.events[before:] if event["instance_uuid"] == victim] == []
        assert (await theirs.delete(victim))["state"] == "deleted"


@pytest.mark.parametrize("header", ["CC", "BCC"])
async def test_a_second_key_releases_no_allocations(system: Guarded, header: str) -> None:
    """It takes the message past the permissions to placement's queue, on brokers that do not look at second keys."""
    async with tenant(system) as mine, tenant(system, THEIRS) as theirs:
        victim = await theirs.boot()
        release, headers = {"consumer": victim}, {header: ["placement.release"]}
        with contextlib.suppress(ChannelAccessRefused):
            await mine.publish(release, key_of("build.delete", MINE), type="placement.release.v1", headers=headers)
        await theirs.boot()  # its claim comes after that
        check = await asyncio.to_thread(system.berth, "check")
        assert check.returncode == 0, check.stdout
        assert (await theirs.delete(victim))["state"] == "deleted"


Attempt = Callable[[Tenant], Awaitable[object]]


def publishing(key: str, exchange: str = "berth") -> Attempt:
    return lambda one: one.publish({"instance_uuid": SOME_UUID, "project_id": THEIRS}, key, exchange=exchange)


def binding(key: str, exchange: str = "berth.events") -> Attempt:
    async def attempt(one: Tenant) -> None:
        queue = await one.channel.declare_queue(exclusive=True)
        await queue.bind(exchange, key)

    return attempt


def consuming(name: str) -> Attempt:
    async def attempt(one: Tenant) -> None:
        queue = await one.channel.get_queue(name, ensure=False)
        await queue.consume(one.receive)

    return attempt


def getting(name: str) -> Attempt:
    async def attempt(one: Tenant) -> None:
        await (await one.channel.get_queue(name, ensure=False)).get(fail=False, timeout=PATIENCE_S)

    return attempt


def declaring(name: str | None, **arguments: str) -> Attempt:
    return lambda one: one.channel.declare_queue(name, arguments=dict(arguments))


def with_queue(name: str, work: str) -> Attempt:
    async def attempt(one: Tenant) -> None:
        await getattr(await one.channel.get_queue(name, ensure=False), work)()

    return attempt


FORBIDDEN: dict[str, Attempt] = {
    "forges an event": publishing(f"build.event.active.{MINE}", "berth.events"),
    "forges a reply": publishing("amq.gen-TwFY9rzBoMgsQd2aCAsNlQ", "berth.replies"),
    "publishes past exchanges": publishing("gateway.requests", ""),
    "publishes elsewhere": publishing("x", "amq.topic"),
    "binds commands": binding("build.request.#", "berth"),
    "takes requests": consuming("gateway.requests"),
    "reads queries": getting("gateway.queries"),
    "purges": with_queue("gateway.requests", "purge"),
    "deletes a queue": with_queue("gateway.queries", "delete"),
    "declares a queue of ours": declaring("gateway.requests"),
    "declares a name of its own": declaring(f"{MINE}.x"),
    "lets a queue write to queues": declaring(None, **{"x-dead-letter-exchange": ""}),
    "lets a queue reply": declaring(None, **{"x-dead-letter-exchange": "berth.replies"}),
    "lets a queue forge events": declaring(None, **{"x-dead-letter-exchange": "berth.events"}),
    "declares an exchange": lambda one: one.channel.declare_exchange("mine"),
    "declares ours": lambda one: one.channel.declare_exchange("berth", "topic", durable=True),
    "deletes ours": lambda one: one.channel.exchange_delete("berth"),
}


@pytest.mark.parametrize("attempt", FORBIDDEN.values(), ids=FORBIDDEN.keys())
async def test_a_project_may_do_nothing_else(system: Guarded, attempt: Attempt) -> None:
    connection = await aio_pika.connect(system.url(f"berth-project-{MINE}", project_bus(MINE)))
    async with connection:
        one = Tenant(await connection.channel(on_return_raises=False), MINE)
        with pytest.raises(ChannelAccessRefused):
            await attempt(one)


async def _of_all_keys(one: Tenant) -> None:
    await (await one.channel.get_queue("compute.cell1-c1", ensure=False)).bind("berth.dead", "#")


# A compute service is on every host. It uses its cell's shared topology for its own queue and for nothing else. What it
# may publish and bind: tests/integration/berth/test_rights.py.
FORBIDDEN_TO_AN_AGENT: dict[str, Attempt] = {
    "reads dead letters": getting("berth.dead-letters"),
    "consumes dead letters": consuming("berth.dead-letters"),
    "purges dead letters": with_queue("berth.dead-letters", "purge"),
    "deletes the dead letters": with_queue("berth.dead-letters", "delete"),
    "binds what others park": _of_all_keys,
    "reads what is delayed": getting("berth.delayed.200"),
    "purges what is delayed": with_queue("berth.delayed.200", "purge"),
    "deletes what is delayed": with_queue("berth.delayed.200", "delete"),
    "deletes an exchange": lambda one: one.channel.exchange_delete("berth.dead"),
    "takes the bus": lambda one: one.channel.declare_exchange("berth.owner.conductor", "direct", durable=True),
    "frees the bus": lambda one: one.channel.exchange_delete("berth.owner.conductor"),
}


@pytest.mark.parametrize("attempt", FORBIDDEN_TO_AN_AGENT.values(), ids=FORBIDDEN_TO_AN_AGENT.keys())
async def test_an_agent_has_what_its_bus_shares_for_its_own_queue_alone(system: Guarded, attempt: Attempt) -> None:
    connection = await aio_pika.connect(system.url("berth-compute-cell1", "cell1"))
    async with connection:
        one = Tenant(await connection.channel(on_return_raises=False), MINE)
        for exchange in ("berth.dead", "berth.delay.200"):
            await publishing("compute.cell1-unknown", exchange)(one)
        with pytest.raises(ChannelAccessRefused):
            await attempt(one)


async def test_what_an_agent_may_not_make_it_finds_when_another_worker_has_been_there(
    system: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a virtual host where no worker has been yet it gets that answer, as when its broker is unavailable. RabbitMQ
    4.3 tells it nothing of a queue that it has no permission of: there it goes on.
    """
    monkeypatch.setattr(transport, "SET_UP", msgspec.structs.replace(transport.SET_UP, lasts_s=0.0))
    vhost = "cell-new"
    await asyncio.to_thread(system.servers.broker.add_vhost, vhost)
    (grant,) = of_role(PermissionRole.COMPUTE, system.settings, cell="cell1")
    define(system.servers, [msgspec.structs.replace(grant, vhost=vhost)], system.settings)
    agent, maker = (RabbitTransport(url, name=vhost) for url in (
        system.url("berth-compute-cell1", vhost), system.servers.broker.url(vhost)))  # fmt: skip
    await agent.open()
    version = await asyncio.to_thread(system.servers.broker.control, "version")
    with contextlib.nullcontext() if version >= "4.3" else pytest.raises(BusRightsMissing, match="has not yet"):
        await agent.declare_shared()
    await maker.open()
    await maker.declare_shared()
    await agent.declare_shared()
    await agent.close()
    await maker.close()


@pytest.mark.parametrize(
    ("changed", "raised"),
    [
        ({}, None),
        ({"topics": {}}, BusTopicsOpen),
        ({"open": "berth.replies"}, BusTopicsOpen),
        ({"write": "^$"}, BusRightsMissing),
        ({"configure": ".*", "write": ".*", "read": ".*", "topics": {}}, None),
    ],
    ids=["as printed", "no topic permissions", "none of one exchange", "no exchange", "all of everything"],
)
async def test_a_user_is_checked_for_what_it_may_publish_before_it_does(
    system: Guarded, changed: dict[str, Any], raised: type[BusRightsMissing] | None
) -> None:
    changed = dict(changed)
    grants = [one for one in of_role(PermissionRole.CONDUCTOR, system.settings) if one.vhost == "cell1"]
    user, open_ = f"tried-{zlib.crc32(repr(changed).encode())}", changed.pop("open", "")
    if open_:
        changed["topics"] = {name: topic for name, topic in grants[0].topics.items() if name != open_}
    define(system.servers, [msgspec.structs.replace(one, user=user, **changed) for one in grants], system.settings)
    bus = RabbitTransport(system.url(user, "cell1"), name="cell1")
    await bus.open()
    keys = sample_keys("cell_conductor", Where.CELL)
    assert keys
    with contextlib.nullcontext() if raised is None else pytest.raises(raised):
        await bus.check_publishes(keys)
    await bus.close()


async def test_a_project_enters_no_cells_bus(system: Guarded) -> None:
    mine = f"berth-project-{MINE}"
    for user, vhost in ((mine, "cell1"), (mine, API_VHOST), (mine, project_bus(THEIRS)),
                        ("berth-conductor-cell1", API_VHOST), ("berth-compute-cell1", API_VHOST),
                        ("berth-ironic", "cell1")):  # fmt: skip
        transport = RabbitTransport(system.url(user, vhost), name="x")
        with pytest.raises(BusForbidden):
            await transport.open()
        await transport.close()


@pytest.mark.parametrize("queue", ["placement.requests", "berth.dead-letters", "placement.inventory"])
async def test_item_7_no_worker_writes_for_a_project_into_a_queue_that_is_not_for_replies(
    system: Guarded, queue: str
) -> None:
    async with tenant(system) as mine:
        instance = str(uuid.uuid4())
        body = {"instance_uuid": instance, "project_id": MINE, "flavor": "m1.small"}
        await mine.publish(body, key_of("build.request", MINE), reply_to=queue, correlation_id="1")
        ended = await mine.terminal(instance)
        assert (ended["state"], ended["code"]) == ("refused", "message.reply_to")


async def test_a_project_is_answered_on_its_own_queue_that_it_has_bound(system: Guarded) -> None:
    """Direct reply-to is refused: replies to it go by the default exchange, which no worker may write to."""
    connection = await aio_pika.connect(system.url(f"berth-project-{MINE}", project_bus(MINE)))
    async with connection:
        channel = await connection.channel()
        answers: asyncio.Queue[Any] = asyncio.Queue()
        own = await channel.declare_queue(exclusive=True)
        direct = await channel.get_queue("amq.rabbitmq.reply-to", ensure=False)
        await own.bind("berth.replies", own.name)
        for queue in (own, direct):
            await queue.consume(answers.put, no_ack=True)
        one = Tenant(channel, MINE)
        await one.listen()
        mine, refused = str(uuid.uuid4()), str(uuid.uuid4())
        for instance, queue in ((refused, direct), (mine, own)):
            body = {"instance_uuid": instance, "project_id": MINE, "flavor": "m1.small"}
            await one.publish(body, key_of("build.request", MINE), reply_to=queue.name, correlation_id=instance)
        async with asyncio.timeout(PATIENCE_S):
            answer = await answers.get()
        assert (answer.type, answer.correlation_id) == ("build.accepted.v1", mine)
        assert (await one.terminal(refused))["code"] == "message.reply_to"


@pytest.mark.parametrize(
    ("into", "way", "kind", "key"),
    [
        ("berth", "placement.claim", "placement.claim.v1", "placement.claim"),
        ("berth.delay.200", "placement.inventory", "inventory.members.v1", "inventory.members"),
    ],
)
async def test_what_an_agent_publishes_by_an_exchange_of_its_own_is_not_read(
    system: Guarded, into: str, way: str, kind: str, key: str
) -> None:
    """It may give an exchange the name of one of its queues, and bind that to ours: RabbitMQ checks no key there. A
    delivery names the exchange that it was published to.
    """
    agent = await aio_pika.connect(system.url("berth-compute-cell1", "cell1"))
    watcher = await aio_pika.connect(system.servers.broker.url("cell1"))
    async with agent, watcher:
        looking, channel = await watcher.channel(), await agent.channel(on_return_raises=False)
        answers = await looking.declare_queue("berth.reply.cli-watcher.0a", exclusive=True)
        await answers.bind("berth.replies", answers.name)
        got: asyncio.Queue[Any] = asyncio.Queue()
        await answers.consume(got.put, no_ack=True)

        def asking(user: str) -> aio_pika.Message:
            properties = {"type": kind, "reply_to": answers.name, "correlation_id": user}
            return aio_pika.Message(b"{}", content_type="application/json", **properties)

        own = await channel.declare_exchange("compute.evil", "topic", auto_delete=True)
        await (await channel.get_underlay_channel()).exchange_bind(into, own.name, "#")
        await own.publish(asking("agent"), way, mandatory=False)
        delayed = await looking.declare_queue("berth.delayed.200", passive=True)
        while delayed.declaration_result.message_count:
            delayed = await looking.declare_queue("berth.delayed.200", passive=True)
        await (await looking.get_exchange("berth", ensure=False)).publish(asking("watcher"), key)
        async with asyncio.timeout(PATIENCE_S):
            assert (await got.get()).correlation_id == "watcher"
        await own.delete(if_unused=False)


def test_an_operator_does_all_of_an_operators_work(system: Guarded) -> None:
    asyncio.run(_park_a_forged_letter(system))
    for arguments in (
        ("boot", "--flavor", "m1.small", "--count", "2", "--wait", "--project", MINE),
        ("list", "-o", "json"),
        ("host", "list"),
        ("dead-letter", "list", "scheduler.requests"),
        ("dead-letter", "replay", "scheduler.requests", "--all"),
        ("dead-letter", "delete", "scheduler.requests", "--yes"),
        ("bus", "list"),
        ("check",),
    ):
        done = system.berth(*arguments)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)


def test_every_command_about_instances_and_objects_is_allowed_to_all_who_carry_it_out(system: Guarded) -> None:
    """The commands, and what workers send because of them: a drain's look into placement, a revert's under a quota."""

    def berth(*arguments: str) -> Any:
        done = system.berth(*arguments, "-o", "json")
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return json.loads(done.stdout)

    berth("flavor", "set", "m1.large", "--vcpus", "2", "--memory-mb", "1024", "--reason", "test")
    berth("quota", "set", MINE, "INSTANCES=20", "VCPU=40", "--reason", "test")
    berth("group", "create", f"{MINE}/web", "--policy", "anti-affinity")
    berth("rule", "set", "--host-subset-size", "2")
    (booted,) = berth("boot", "--flavor", "m1.small", "--wait", "--project", MINE)["items"]
    uuid, host = booted["instance_uuid"], booted["host"]
    berth("aggregate", "create", "rack", "--host", host)
    for words in (
        ("instance", "resize", uuid, "--flavor", "m1.large", "--wait"),
        ("instance", "revert", uuid, "--wait"),
        ("instance", "migrate", uuid, "--wait"),
        ("instance", "confirm", uuid, "--wait"),
        ("instance", "migrate", uuid, "--live", "--wait"),
        ("instance", "stop", uuid, "--wait"),
        ("instance", "start", uuid, "--wait"),
        ("instance", "shelve", uuid, "--offload", "--wait"),
        ("instance", "unshelve", uuid, "--wait"),
        ("instance", "rebuild", uuid, "--image", "debian", "--wait", "--yes"),
        ("host", "drain", host),
        ("drain", "list"),
        ("host", "enable", host),
        ("host", "maintenance", host, "--reason", "test"),
        ("host", "enable", host),
        ("group", "show", f"{MINE}/web"),
        ("quota", "list"),
        ("service", "list"),
        ("worker", "list"),
        ("action", "list"),
        ("quarantine", "list"),
        ("breaker", "list"),
        ("event", "list"),
        ("delete", uuid, "--wait", "--yes"),
        ("aggregate", "delete", "rack"),
        ("group", "delete", f"{MINE}/web"),
        ("quota", "delete", MINE),
        ("flavor", "delete", "m1.large"),
    ):
        berth(*words)


async def _park_a_forged_letter(system: Guarded) -> None:
    """One that names no uuid, so that no project can be answered."""
    connection = await aio_pika.connect(system.url("berth-publisher"))
    async with connection:
        one = Tenant(await connection.channel(), MINE)
        await one.publish({"project_id": THEIRS}, key_of("build.delete", MINE))


async def test_ironics_notifications_reach_the_sync(system: Guarded) -> None:
    config = system.settings.ironic_sync
    ironic = await aio_pika.connect(system.url("berth-ironic"))
    sync = RabbitTransport(system.url("berth-ironic-sync"), name="api")
    async with ironic:
        channel = await ironic.channel()
        exchange = await channel.declare_exchange(config.exchange, "topic", durable=False)
        await sync.open()
        try:
            await sync.declare_shared()
            await sync.bind_external(config.queue, config.exchange, [f"{topic}.*" for topic in config.topics])
            await exchange.publish(aio_pika.Message(b"{}"), f"{config.topics[0]}.info")
            got: asyncio.Queue[Any] = asyncio.Queue()
            await sync.consume(config.queue, got.put_nowait, prefetch=1)
            async with asyncio.timeout(PATIENCE_S):
                (await got.get()).ack()
            with pytest.raises(ChannelAccessRefused):
                await (await channel.get_exchange("berth", ensure=False)).publish(
                    aio_pika.Message(b""), "placement.claim"
                )
        finally:
            await sync.close()


def test_an_operator_may_read_every_part_of_the_status(system: Guarded) -> None:
    rows = json.loads(system.berth("status", "-o", "json").stdout)["rows"]
    assert [row for row in rows if row["severity"] == "not_known"] == []


def test_no_worker_was_refused_anything(system: Guarded) -> None:
    """The last of this module: what the workers did for all the others, they were allowed to."""
    logs = {name: worker.log.read_text() for name, worker in system.processes.workers.items()}
    assert len(logs) == 5
    for name, text in logs.items():
        assert "ACCESS_REFUSED" not in text and "bus.forbidden" not in text, (name, text[-4000:])
        assert system.processes.workers[name].process.running
