"""`berth nova serve` as an operator runs it: Placement's REST API and the topic in one process, before Nova's own RPC
client and behind a compute API.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from berth.trial.embedded.process import free_port
from berth.trial.embedded.rabbitmq import RabbitMQ
from tests.kit.nova_peer import needs_nova, nova_peer
from tests.kit.waiting import until

pytestmark = [pytest.mark.rabbitmq, needs_nova]
CELL = "ce110000-0000-4000-8000-000000000001"
NODES = [f"{n}0000000-0000-4000-8000-000000000000" for n in (1, 2)]
VMS = [f"c00000{n:02d}-0000-4000-8000-000000000000" for n in range(9)]
HEADERS = {"x-auth-token": "admin", "openstack-api-version": "placement 1.39"}
SERVICES = [
    {"id": f"s{n}", "host": f"h{n}", "binary": "nova-compute", "status": "enabled", "state": "up"} for n in (1, 2)
]
HYPERVISORS = [
    {"id": uuid, "hypervisor_hostname": f"h{n}.local", "service": {"host": f"h{n}"}, "state": "up", "status": "enabled"}
    for n, uuid in enumerate(NODES, 1)
]
LISTS: dict[str, Any] = {
    "/v2.1/": {"version": {"id": "v2.1", "version": "2.104"}},
    "/v2.1/os-services": {"services": SERVICES},
    "/v2.1/os-aggregates": {"aggregates": []},
    "/v2.1/os-hypervisors/detail": {"hypervisors": HYPERVISORS},
    "/v2.1/os-hypervisors": {"hypervisors": [{"id": uuid, "servers": []} for uuid in NODES]},
}


class ComputeApi(BaseHTTPRequestHandler):
    """The lists of two hosts. Of a list in pages the second is empty."""

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        found = LISTS.get(path)
        if found is not None and "marker=" in query:
            found = {key: [] for key in found}
        body = json.dumps(found).encode()
        self.send_response(404 if found is None else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def compute_api() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), ComputeApi)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v2.1"
    server.shutdown()
    server.server_close()
    thread.join()


@contextlib.asynccontextmanager
async def served(vhost: str, compute_api: str, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """`berth nova serve`, and a client of its Placement."""
    address = f"127.0.0.1:{free_port()}"
    settings = {
        "STATE_DIR": str(folder),
        "NOVA__TRANSPORT_URL": vhost.replace("amqp://", "rabbit://"),
        "NOVA__API__URL": compute_api,
        "NOVA__API__CELLS": json.dumps({CELL: ["*"]}),
    }
    env = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
    env |= {f"BERTH_{name}": value for name, value in settings.items()}
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "berth", "nova", "serve", "--memory", "--api", address),
            env=env, cwd=folder, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            async with httpx.AsyncClient(base_url=f"http://{address}", headers=HEADERS) as client:
                yield client
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            assert await process.wait() == 0, (folder / "log").read_text()[-4000:]


async def answers(client: httpx.AsyncClient, path: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return (await client.get(path)).status_code == httpx.codes.OK
    return False


async def report(client: httpx.AsyncClient) -> None:
    """As a nova-compute does."""
    for n, uuid in enumerate(NODES, 1):
        made = await client.post("/resource_providers", json={"uuid": uuid, "name": f"h{n}.local"})
        assert made.status_code == httpx.codes.OK, made.text
        inventories = {name: {"total": 100} for name in ("VCPU", "MEMORY_MB", "DISK_GB")}
        body = {"resource_provider_generation": made.json()["generation"], "inventories": inventories}
        assert (await client.put(f"/resource_providers/{uuid}/inventories", json=body)).status_code == httpx.codes.OK


async def test_one_process_is_placement_and_scheduler(own_broker: RabbitMQ, compute_api: str, tmp_path: Path) -> None:
    vhost = own_broker.add_vhost("nova")
    async with served(vhost, compute_api, tmp_path) as placement, nova_peer("client", vhost) as client:
        await until(lambda: answers(placement, "/"))
        await report(placement)
        found = await client.do("select", uuids=VMS[:2], request_id="req-1")
        assert "result" in found, (found, (tmp_path / "log").read_text()[-4000:])
        assert {host for row in found["result"] for host in row} == {"h1", "h2"}
        for vm, row in zip(VMS, found["result"], strict=False):
            held = (await placement.get(f"/allocations/{vm}")).json()
            (provider,) = held["allocations"]
            assert (held["project_id"], held["consumer_type"]) == ("p", "INSTANCE")
            assert NODES.index(provider) == int(row[0][1:]) - 1
            # Nova's services write it as their own.
            assert (await placement.delete(f"/allocations/{vm}")).status_code == httpx.codes.NO_CONTENT
        too_many = await client.do("select", uuids=[f"{vm[:-3]}{n:03d}" for n in range(70) for vm in VMS[3:6]])
        assert "NoValidHost" in too_many["raised"]["kinds"], too_many
        assert "in use" in too_many["raised"]["text"] or "VCPU" in too_many["raised"]["text"]
        casts = await client.do("casts")
        assert casts["result"] == "sent"
