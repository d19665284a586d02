"""What a trial is beside: a real OpenStack Placement (`scripts/conformance` installs it) on PostgreSQL, a real
RabbitMQ, and a Nova that the test plays, with its stock scheduler, which takes the calls from Nova's queue and claims
over Placement's API.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import aiormq
import httpx
import pytest
import sqlalchemy
from aiormq.abc import DeliveredMessage
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import create_async_engine

from berth.up.embedded.rabbitmq import RabbitMQ
from bus.clock import new_uuid
from nova_scheduler.wire.queues import RabbitOptions, topic_queue
from placement_worker.replica.replica import Replica
from tests.integration.nova_scheduler.world import EXCHANGE
from tests.kit.sources import ROOT
from tests.kit.waiting import until
from tests.unit.nova_scheduler.world import request_spec

PYTHON = ROOT / ".berth" / "conformance" / "bin" / "python"
NEEDS = (
    pytest.mark.rabbitmq,
    pytest.mark.postgres,
    pytest.mark.skipif(not PYTHON.exists(), reason="no OpenStack Placement: scripts/conformance installs it"),
)
ROOM = {"VCPU": 16, "MEMORY_MB": 16384, "DISK_GB": 100}
TAKES = {"VCPU": 1, "MEMORY_MB": 512, "DISK_GB": 1}
VERSION = {"x-auth-token": "admin", "openstack-api-version": "placement 1.36"}

# As Placement itself has written them. The root of a host is the host.
HOST = "INSERT INTO resource_providers (uuid, name, generation, created_at) VALUES (:uuid, :name, 1, now())"
ROOTS = "UPDATE resource_providers SET root_provider_id = id"
INVENTORY = """
INSERT INTO inventories (resource_provider_id, resource_class_id, total, reserved, min_unit, max_unit, step_size,
allocation_ratio, created_at) SELECT p.id, c.id, :total, 0, 1, :total, 1, 1.0, now()
FROM resource_providers p, resource_classes c WHERE c.name = :name
"""
# What the database has of each provider: its usage by class.
USED = """
SELECT p.uuid, c.name, sum(a.used) FROM allocations a JOIN resource_providers p ON p.id = a.resource_provider_id
JOIN resource_classes c ON c.id = a.resource_class_id GROUP BY p.uuid, c.name
"""


@contextlib.contextmanager
def serving(database: str, folder: Path) -> Iterator[str]:
    """The address of a real Placement over an empty PostgreSQL database."""
    port = folder / "port"
    url = make_url(database).set(drivername="postgresql+psycopg2").render_as_string(hide_password=False)
    command = [PYTHON, ROOT / "tests" / "conformance" / "serve.py", port, url]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=folder)
    try:
        while not port.exists():
            assert process.poll() is None, (folder / "log").read_text()[-2000:]
        yield f"http://127.0.0.1:{port.read_text()}"
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


class Cloud:
    """Nova's hosts and servers, its API, and a stock scheduler that claims where it is told."""

    def __init__(self, placement: str, database: str, broker: RabbitMQ, hosts: int) -> None:
        self.rng = random.Random(11)
        self.placement = placement
        self.broker = broker
        self.database = make_url(database).set(drivername="postgresql+asyncpg").render_as_string(hide_password=False)
        self.hosts = [new_uuid(self.rng) for _ in range(hosts)]
        self.tasks: dict[str, str] = {}  # the task state of each server
        self.taken: list[str] = []  # ids of calls that the stock scheduler has taken
        self._client = httpx.AsyncClient(base_url=placement, headers=VERSION)
        self._engine = create_async_engine(self.database, poolclass=sqlalchemy.NullPool)

    async def open(self) -> None:
        async with self._engine.begin() as connection:
            rows = [{"uuid": uuid, "name": f"h{number}.local"} for number, uuid in enumerate(self.hosts)]
            await connection.execute(sqlalchemy.text(HOST), rows)
            await connection.execute(sqlalchemy.text(ROOTS))
            for name, total in ROOM.items():
                await connection.execute(sqlalchemy.text(INVENTORY), {"name": name, "total": total})
        self._connection = await aiormq.connect(self.broker.add_vhost("nova"))
        self._channel = await self._connection.channel()
        queue = topic_queue(RabbitOptions(), EXCHANGE, "scheduler")
        await self._channel.exchange_declare(EXCHANGE, exchange_type="topic")
        await self._channel.queue_declare(queue.name)
        await self._channel.queue_bind(queue.name, EXCHANGE, queue.name)
        await self._channel.basic_consume(queue.name, self._take, no_ack=True)

    async def close(self) -> None:
        await self._client.aclose()
        await self._connection.close()
        await self._engine.dispose()

    async def _take(self, message: DeliveredMessage) -> None:
        self.taken.append(json.loads(json.loads(message.body)["oslo.message"])["_unique_id"])

    async def write(self, method: str, path: str, body: object) -> None:
        """To Placement's API."""
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
                return {"services": [{**service, "host": f"h{number}"} for number in range(len(self.hosts))]}
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
        await self.write("PUT", f"/allocations/{consumer}", body)
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
        await self.write("POST", "/allocations", {new_uuid(self.rng): migration, instance: none})
        number = self.hosts.index(source)
        await self.call(instance, ignore_hosts=[f"h{number}"])
        await self.hold(instance, host)

    async def round(self, alive: list[str], compared: Callable[[], Awaitable[None]]) -> None:
        """Five boots, then a move, and a delete once there are several servers. alive: the servers. compared: waits
        until each call is: of a server that is deleted before, the choice was never seen.
        """
        alive += [await self.boot(self.rng.randrange(len(self.hosts))) for _ in range(5)]
        await compared()
        await self.move(alive[0], self.rng.randrange(1, len(self.hosts)))
        if len(alive) > 5:
            await self.delete(alive.pop(1))
        await compared()

    async def used(self) -> dict[tuple[str, str], int]:
        """By provider and class, as the database has it."""
        async with self._engine.connect() as connection:
            rows = await connection.execute(sqlalchemy.text(USED))
            return {(uuid, name): int(used) for uuid, name, used in rows}


def used_of(replica: Replica, hosts: list[str]) -> dict[tuple[str, str], int]:
    """The same of the replica."""
    found = {}
    for uuid in hosts:
        row = replica.row_of(uuid)
        assert row is not None
        found |= {(uuid, name): used for name, (_, used, _) in replica.inventory_of(row).items() if used}
    return found


@contextlib.asynccontextmanager
async def cloud_of(broker: RabbitMQ, database: str, folder: Path, hosts: int) -> AsyncIterator[Cloud]:
    """A cloud of so many hosts, with nothing on them."""
    with serving(database, folder) as placement:
        made = Cloud(placement, database, broker, hosts)
        await made.open()
        try:
            yield made
        finally:
            await made.close()
