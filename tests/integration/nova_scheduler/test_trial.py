"""A trial on a real RabbitMQ, beside a real OpenStack Placement (`scripts/conformance` installs it). The test plays a
stock scheduler: it takes the calls from Nova's queue, and claims over Placement's API.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import aiormq
import httpx
import pytest
from aiormq.abc import AbstractChannel, DeliveredMessage

from berth.config.settings import Settings
from berth.config.site import Brokers, Site
from berth.up.embedded.rabbitmq import RabbitMQ
from bus.clock import SystemClock, new_uuid
from nova_scheduler.cloud.api_config import NovaApiConfig
from nova_scheduler.config import NovaConfig, TrialSettings
from nova_scheduler.trial.app import Trial, build
from nova_scheduler.wire.queues import RabbitOptions, topic_queue
from nova_scheduler.wire.versioned import versioned
from placement_worker.replica.replica import Replica
from scheduler_worker.config import SchedulerConfig
from tests.integration.nova_scheduler.world import EXCHANGE
from tests.kit.answering import answering
from tests.kit.forks import run_berth
from tests.kit.sources import ROOT
from tests.kit.waiting import until
from tests.unit.nova_scheduler.world import CELLS, FLAVOR, group, request_spec

PYTHON = ROOT / ".berth" / "conformance" / "bin" / "python"
pytestmark = [
    pytest.mark.rabbitmq,
    pytest.mark.skipif(not PYTHON.exists(), reason="no OpenStack Placement: scripts/conformance installs it"),
]
HOSTS = 20
ROOM = {"VCPU": 16, "MEMORY_MB": 16384, "DISK_GB": 100}
TAKES = {"VCPU": 1, "MEMORY_MB": 512, "DISK_GB": 1}
# Of the trial's user, as the page docs/operate/trial.md gives them: it may publish nothing to Nova.
OWN = "^scheduler_trial_"
RIGHTS = {"configure": OWN, "write": OWN, "read": "^(nova|scheduler_trial_.*)$"}
VERSION = {"x-auth-token": "admin", "openstack-api-version": "placement 1.36"}

# What the database has of each provider: its usage by class.
USED = """
SELECT p.uuid, c.name, sum(a.used) FROM allocations a JOIN resource_providers p ON p.id = a.resource_provider_id
JOIN resource_classes c ON c.id = a.resource_class_id GROUP BY p.uuid, c.name
"""


@pytest.fixture
def placement(tmp_path: Path) -> Iterator[str]:
    """The address of a real Placement."""
    port = tmp_path / "port"
    command = [PYTHON, ROOT / "tests" / "conformance" / "serve.py", port, tmp_path / "book.sqlite"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=tmp_path)
    try:
        while not port.exists():
            assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
        yield f"http://127.0.0.1:{port.read_text()}"
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


class Cloud:
    """Nova's hosts and servers, its API, and a stock scheduler that claims where it is told."""

    def __init__(self, placement: str, database: Path, channel: AbstractChannel) -> None:
        self.rng = random.Random(11)
        self.hosts = [new_uuid(self.rng) for _ in range(HOSTS)]
        self.tasks: dict[str, str] = {}  # the task state of each server
        self.taken: list[str] = []  # ids of calls that the stock scheduler has taken
        self._client = httpx.AsyncClient(base_url=placement, headers=VERSION)
        self._database = database
        self._channel = channel

    async def open(self) -> None:
        for number, uuid in enumerate(self.hosts):
            await self._write("POST", "/resource_providers", {"name": f"h{number}.local", "uuid": uuid})
            inventories = {name: {"total": total} for name, total in ROOM.items()}
            body = {"resource_provider_generation": 0, "inventories": inventories}
            await self._write("PUT", f"/resource_providers/{uuid}/inventories", body)
        queue = topic_queue(RabbitOptions(), EXCHANGE, "scheduler")
        await self._channel.exchange_declare(EXCHANGE, exchange_type="topic")
        await self._channel.queue_declare(queue.name)
        await self._channel.queue_bind(queue.name, EXCHANGE, queue.name)
        await self._channel.basic_consume(queue.name, self._take, no_ack=True)

    async def close(self) -> None:
        await self._client.aclose()

    async def _take(self, message: DeliveredMessage) -> None:
        self.taken.append(json.loads(json.loads(message.body)["oslo.message"])["_unique_id"])

    async def _write(self, method: str, path: str, body: object) -> None:
        answer = await self._client.request(method, path, json=body)
        assert answer.is_success, answer.text

    # --- Nova

    def answer(self, path: str) -> bytes:
        """Nova's API."""
        url = urlsplit(path)
        asked = {name: values[0] for name, values in parse_qs(url.query).items()}
        return json.dumps(self._answer(url.path.removeprefix("/v2.1"), asked)).encode()

    def _answer(self, path: str, asked: dict[str, str]) -> object:
        service = {"binary": "nova-compute", "state": "up", "status": "enabled"}
        match path:
            case "/os-services":
                return {"services": [{**service, "host": f"h{number}"} for number in range(HOSTS)]}
            case "/os-hypervisors/detail":
                rows = [
                    {"id": uuid, "hypervisor_hostname": f"h{number}.local", "service": {"host": f"h{number}"},
                     "state": "up", "status": "enabled"}
                    for number, uuid in enumerate(self.hosts)
                ]  # fmt: skip
                return {"hypervisors": [] if "marker" in asked else rows}
            case "/os-aggregates":
                return {"aggregates": []}
            case "/servers/detail":
                uuid = asked["uuid"]
                rows = [{"id": uuid, "OS-EXT-STS:task_state": self.tasks[uuid]}] if uuid in self.tasks else []
                return {"servers": rows}
        return {"version": {"version": "2.104", "min_version": "2.1"}}

    async def call(self, *instances: str, **spec: Any) -> None:
        """As nova-conductor calls its scheduler, which has taken it then."""
        for one in instances:
            self.tasks[one] = "scheduling"
        unique = new_uuid(self.rng)
        message = {
            "method": "select_destinations", "version": "4.5", "_msg_id": unique, "_unique_id": unique,
            "_reply_q": "reply_nobody", "_timeout": 60, "_context_request_id": f"req-{unique}",
            "args": {
                "spec_obj": request_spec(**spec), "instance_uuids": list(instances),
                "return_objects": True, "return_alternates": True,
            },
        }  # fmt: skip
        body = json.dumps({"oslo.version": "2.0", "oslo.message": json.dumps(message)}).encode()
        await self._channel.basic_publish(body, exchange=EXCHANGE, routing_key="scheduler")
        await until(lambda: unique in self.taken)

    # --- the stock scheduler, and what is written beside it

    async def held(self, consumer: str) -> dict[str, Any]:
        answer = await self._client.get(f"/allocations/{consumer}")
        return dict(answer.json()["allocations"])

    async def hold(self, consumer: str, *hosts: int) -> None:
        """Claim there, and nowhere else."""
        known = (await self._client.get(f"/allocations/{consumer}")).json()
        body = {
            "allocations": {self.hosts[one]: {"resources": TAKES} for one in hosts},
            "project_id": "p", "user_id": "u", "consumer_generation": known.get("consumer_generation"),
        }  # fmt: skip
        await self._write("PUT", f"/allocations/{consumer}", body)
        self.tasks[consumer] = ""

    async def delete(self, consumer: str) -> None:
        """As Nova deletes a server: no generation moves."""
        await self._client.delete(f"/allocations/{consumer}")
        del self.tasks[consumer]

    async def boot(self, host: int, **spec: Any) -> str:
        instance = new_uuid(self.rng)
        await self.call(instance, **spec)
        await self.hold(instance, host)
        return instance

    async def move(self, instance: str, host: int) -> None:
        """A cold migration: the source is held by the migration, then the instance holds its destination."""
        (source,) = await self.held(instance)
        known = (await self._client.get(f"/allocations/{instance}")).json()
        fields = {"project_id": "p", "user_id": "u"}
        migration = {"allocations": {source: {"resources": TAKES}}, "consumer_generation": None, **fields}
        none = {"allocations": {}, "consumer_generation": known["consumer_generation"], **fields}
        await self._write("POST", "/allocations", {new_uuid(self.rng): migration, instance: none})
        number = self.hosts.index(source)
        await self.call(instance, ignore_hosts=[f"h{number}"])
        await self.hold(instance, host)

    def used(self) -> dict[tuple[str, str], int]:
        """By provider and class, as the database has it."""
        with contextlib.closing(sqlite3.connect(self._database)) as connection:
            return {(uuid, name): used for uuid, name, used in connection.execute(USED)}


def used_of(replica: Replica, hosts: list[str]) -> dict[tuple[str, str], int]:
    """The same of the replica."""
    found = {}
    for uuid in hosts:
        row = replica.row_of(uuid)
        assert row is not None
        found |= {(uuid, name): used for name, (_, used, _) in replica.inventory_of(row).items() if used}
    return found


@pytest.fixture
async def cloud(own_broker: RabbitMQ, placement: str, tmp_path: Path) -> AsyncIterator[tuple[Cloud, str]]:
    connection = await aiormq.connect(own_broker.add_vhost("nova"))
    own_broker.add_user("trial", "trial")
    own_broker.set_permissions("trial", "nova", **RIGHTS)
    url = own_broker.url("nova", user="trial", password="trial")
    made = Cloud(placement, tmp_path / "book.sqlite", await connection.channel())
    await made.open()
    yield made, url
    await made.close()
    await connection.close()


@contextlib.asynccontextmanager
async def trial(cloud: Cloud, url: str, placement: str, **given: Any) -> AsyncIterator[Trial]:
    """A trial that listens."""
    async with answering(cloud.answer) as nova:
        config = NovaConfig(
            transport_url=url,
            api=NovaApiConfig(url=f"{nova}/v2.1", token="t", cells={CELLS[0]: ("*",)}),
            trial=TrialSettings(placement_url=placement, token="admin", interval_s=0.2, **given),
        )
        site = Site(Settings(), brokers=Brokers(SystemClock()), database_url="")
        made = build(site.environment("trial", takes_cells=False), config, SchedulerConfig())
        stop = asyncio.Event()
        running = asyncio.create_task(made.service.run(stop))
        try:
            await until(lambda: made.service.ready.is_set() or running.done())
            yield made
        finally:
            stop.set()
            await running


async def settled(made: Trial) -> None:
    await until(lambda: made.comparison.in_flight == 0)
    await made.mirror.next_pass()


async def test_calls_among_deletes_and_moves_and_the_replica_after_each_pass(
    cloud: tuple[Cloud, str], placement: str
) -> None:
    here, url = cloud
    async with trial(here, url, placement, whole_s=0.2) as made:
        await until(lambda: not made.service.not_ready())
        alive: list[str] = []
        for _ in range(3):
            alive += [await here.boot(here.rng.randrange(HOSTS)) for _ in range(5)]
            await here.move(alive[0], here.rng.randrange(1, HOSTS))
            if len(alive) > 5:
                await here.delete(alive.pop(1))
            await settled(made)
            assert used_of(made.mirror.replica, here.hosts) == here.used()
    counts = made.comparison.counts()
    assert counts.keys() <= {"same", "other host"} and sum(counts.values()) == len(here.taken) == 18
    berth_s, stock_s = made.comparison.mean_s()
    assert 0 < berth_s < stock_s


async def test_what_would_have_been(cloud: tuple[Cloud, str], placement: str) -> None:
    here, url = cloud

    async def told(made: Trial) -> dict[str, int]:
        await settled(made)
        found = Counter(made.comparison.counts()) - before
        before.update(found)
        return dict(found)

    before = Counter[str]()
    async with trial(here, url, placement, whole_s=0.2) as made:
        first = await here.boot(3)
        members = group("anti-affinity", [first])
        await told(made)

        await here.boot(3, instance_group=members)
        assert await told(made) == {"rule broken": 1}

        refused = new_uuid(here.rng)
        await here.call(refused)
        here.tasks[refused] = ""  # an error: no valid host was found
        assert await told(made) == {"would fit": 1}

        lacking = versioned("Flavor", "1.2", {**FLAVOR, "extra_specs": {"trait:CUSTOM_GOLD": "required"}})
        await here.boot(4, flavor=lacking)
        assert await told(made) == {"would fail": 1}

        await here.call(first, ignore_hosts=["h3"])  # an evacuation: it holds its source until it has moved
        await here.hold(first, 3, 7)
        assert (await told(made)).keys() <= {"same", "other host"}

        deleted = new_uuid(here.rng)
        await here.call(deleted)
        del here.tasks[deleted]
        assert await told(made) == {"stock failed": 1}


NOVA_CONF = """
[DEFAULT]
transport_url = rabbit://%s
[filter_scheduler]
enabled_filters = ComputeFilter,ServerGroupAntiAffinityFilter
"""
REST = """
[nova.api]
url = "%s/v2.1"
token = "t"
cells = { "ce110000-0000-4000-8000-000000000001" = ["*"] }

[nova.trial]
placement_url = "%s"
token = "admin"
interval_s = 0.2

[telemetry]
http_port = %d
"""


async def test_as_an_operator_runs_it(cloud: tuple[Cloud, str], placement: str, tmp_path: Path) -> None:
    """As docs/operate/trial.md has it."""
    here, url = cloud
    conf, file = tmp_path / "nova.conf", tmp_path / "berth.toml"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    conf.write_text(NOVA_CONF % url.removeprefix("amqp://"))
    translated = await asyncio.to_thread(run_berth, "nova", "settings", str(conf), env=os.environ, timeout_s=60.0)
    assert translated.returncode == 0, translated.stderr
    async with answering(here.answer) as nova, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        file.write_text(translated.stdout + REST % (nova, placement, port))
        command = [sys.executable, "-m", "berth", "--config", str(file), "nova", "trial", "-o", "json"]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        try:
            await answered(http, "/readyz", '"ready":true')
            await here.boot(3)
            await answered(http, "/metrics", 'berth_nova_shadow_seconds_count{by="stock"} 1.0')
            process.terminate()
            said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
    told = json.loads(said)
    assert process.returncode == 0 and sum(told["calls"].values()) == 1
    assert told["calls"]["same"] + told["calls"]["other host"] == 1 and told["mean_s"]["stock"] > 0


async def answered(http: httpx.AsyncClient, path: str, text: str) -> None:
    """Until the process answers so."""
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if text in (await http.get(path)).text:
                return
        await asyncio.sleep(0.1)
