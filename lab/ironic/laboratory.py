"""A real Ironic to try berth with: started privately, with a broker of its own, agents that call back, and nodes.

`scripts/nightly ironic` installs it and runs this. Nothing here is needed to run berth.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from msgspec import Struct

from berth.up.embedded.rabbitmq import RabbitMQ
from lab.ironic.agent import BEAT_S, IMAGE_SHA256, Agents
from lab.ironic.server import Ironic

PROGRAMS = "IRONIC_PROGRAMS"
VHOST = "ironic"
VERSION = {"X-OpenStack-Ironic-API-Version": "1.95"}
CLASS = "baremetal-gold"
POLL_S = 0.2
ENROLL_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 60.0
BUSY_TIMEOUT_S = 60.0
# A direct deployment boots a ramdisk from somewhere; fake hardware boots nothing.
RAMDISK = {"deploy_kernel": "http://127.0.0.1/kernel", "deploy_ramdisk": "http://127.0.0.1/ramdisk"}
SETTINGS = """\
# Written by scripts/nightly ironic: a real Ironic with fake hardware at {url}
state_dir = "{state}"

[cells.cell1]

[up]
ironic_url = "{url}"
computes_per_cell = 0

[ironic_sync]
url = "{url}"

[ironic_sync.broker]
url = "{broker}"

[compute.ironic.images.nothing]
source = "{image}"
hash_algorithm = "sha256"
hash_value = "{sha256}"
type = "whole-disk"
"""


class Lab(Struct, frozen=True, kw_only=True):
    """The processes that run: the API's address, the broker of its notifications, the agents."""

    ironic: Ironic
    broker_url: str
    agents: Agents


def programs() -> Path:
    """Where Ironic is installed."""
    return Path(os.environ.get(PROGRAMS) or ".berth/ironic/venv/bin")


@contextlib.asynccontextmanager
async def lab(
    directory: Path | None = None,
    *,
    agents_way: httpx.AsyncBaseTransport | None = None,
    beat_s: float = BEAT_S,
    **more: Any,
) -> AsyncIterator[Lab]:
    """Broker, Ironic and agents, for as long as this context. agents_way: the agents' HTTP transport. beat_s: seconds
    between an agent's calls. more: as for `Ironic`.
    """
    with contextlib.ExitStack() as servers:
        broker = await asyncio.to_thread(
            servers.enter_context, RabbitMQ(None if directory is None else directory / "rabbitmq")
        )
        url = await asyncio.to_thread(broker.add_vhost, VHOST)
        place = None if directory is None else directory / "ironic"
        ironic = await asyncio.to_thread(servers.enter_context, Ironic(programs(), place, broker_url=url, **more))
        agents = Agents(ironic.url, beat_s=beat_s, transport=agents_way)
        await agents.start()
        try:
            yield Lab(ironic=ironic, broker_url=url, agents=agents)
        finally:
            await agents.stop()


class Nodes:
    """An operator's actions on nodes, by Ironic's REST API."""

    def __init__(self, url: str) -> None:
        self.client = httpx.AsyncClient(base_url=url, headers=VERSION, timeout=REQUEST_TIMEOUT_S, trust_env=False)

    async def enroll(self, count: int, *, direct: bool = False, **more: Any) -> list[str]:
        """New nodes, made available; their uuids."""
        fields: dict[str, Any] = {"driver": "fake-hardware", "resource_class": CLASS, **more}
        fields.setdefault("properties", {"cpu_arch": "x86_64", "memory_mb": 1024, "cpus": 1, "local_gb": 10})
        if direct:
            fields.update(deploy_interface="direct", management_interface="noop", driver_info=RAMDISK)
        nodes = [str(uuid.uuid4()) for _ in range(count)]
        for node in nodes:
            await self._ask("POST", "/v1/nodes", {**fields, "uuid": node})
        for target, reached in (("manage", "manageable"), ("provide", "available")):
            for node in nodes:
                await self.provision(node, target)
            for node in nodes:
                await self.until(node, reached)
                # Fake power has no state by itself, and a node whose power is not known is not offered.
                await self._ask("PUT", f"/v1/nodes/{node}/states/power", {"target": "power off"})
        return nodes

    async def provision(self, node: str, target: str, **more: Any) -> None:
        """Ask for a provision state."""
        await self._ask("PUT", f"/v1/nodes/{node}/states/provision", {"target": target, **more})

    async def get(self, node: str) -> dict[str, Any]:
        """All fields."""
        found: dict[str, Any] = await self._ask("GET", f"/v1/nodes/{node}")
        return found

    async def list_all(self, fields: str) -> list[dict[str, Any]]:
        """These fields (comma-separated) of every node, by one request; for at most a thousand nodes."""
        found: dict[str, Any] = await self._ask("GET", f"/v1/nodes?fields={fields}&limit=1000")
        return list(found["nodes"])

    async def volume_targets(self, node: str) -> list[dict[str, Any]]:
        """The node's volume targets, with all their fields."""
        found: dict[str, Any] = await self._ask("GET", f"/v1/volume/targets?node={node}&detail=True")
        return list(found["targets"])

    async def repair(self, node: str) -> None:
        """An operator's remedy for a node whose cleaning failed: make it available again."""
        await self.maintenance(node, on=False)
        for target, reached in (("manage", "manageable"), ("provide", "available")):
            await self.provision(node, target)
            await self.until(node, reached)

    async def maintenance(self, node: str, *, on: bool) -> None:
        """Set or unset maintenance."""
        await self._ask("PUT" if on else "DELETE", f"/v1/nodes/{node}/maintenance", {"reason": "tried"} if on else None)

    async def patch(self, node: str, *operations: dict[str, Any]) -> None:
        """Change fields."""
        await self._ask("PATCH", f"/v1/nodes/{node}", list(operations))

    async def until(self, node: str, state: str, *, timeout_s: float = ENROLL_TIMEOUT_S) -> dict[str, Any]:
        """Wait for a provision state; returns the node."""
        async with asyncio.timeout(timeout_s):
            while (found := await self.get(node))["provision_state"] != state:  # noqa: ASYNC110  (another process)
                await asyncio.sleep(POLL_S)
        return found

    async def close(self) -> None:
        """Close the connections."""
        await self.client.aclose()

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        """One request, repeated while the node is locked or Ironic in trouble (SQLite has one writer).

        One that Ironic answered with a fault may have come true: then its repetition is refused, which is fine.
        """
        unsure = False
        limit = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                answer = await self.client.request(method, path, json=body)
            except httpx.TransportError as error:
                status, text = 0, repr(error)
            else:
                status, text = answer.status_code, answer.text[:500]
                if answer.is_success:
                    return answer.json() if answer.content else None
            if unsure and status in {httpx.codes.BAD_REQUEST, httpx.codes.CONFLICT} and method != "GET":
                return None
            unsure = unsure or status == 0 or status >= httpx.codes.INTERNAL_SERVER_ERROR
            passes = status in {0, httpx.codes.CONFLICT} or status >= httpx.codes.INTERNAL_SERVER_ERROR
            if not passes or time.monotonic() > limit:
                raise RuntimeError(f"{method} {path}: {status} {text}")
            await asyncio.sleep(POLL_S)


async def _run(directory: Path) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with lab(directory) as here:
        settings = directory / "berth.toml"
        settings.touch(mode=0o600)  # it holds the broker's password
        settings.write_text(
            SETTINGS.format(
                url=here.ironic.url,
                state=directory / "berth",
                broker=here.broker_url,
                image=here.agents.image_url,
                sha256=IMAGE_SHA256,
            )
        )
        (directory / "url").write_text(here.ironic.url)
        sys.stdout.write(f"Ironic is at {here.ironic.url}; settings for berth: {settings}\n")
        sys.stdout.flush()
        await stop.wait()
        (directory / "url").unlink(missing_ok=True)


async def _enroll(directory: Path, count: int, *, direct: bool) -> None:
    nodes = Nodes((directory / "url").read_text())
    try:
        for node in await nodes.enroll(count, direct=direct):
            sys.stdout.write(f"{node}\n")
    finally:
        await nodes.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """`run` or `enroll`."""
    parser = argparse.ArgumentParser(prog="scripts/nightly ironic", description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path(".berth/ironic/run"))
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (commands.add_parser("run"), commands.add_parser("enroll")):
        command.add_argument("--directory", type=Path, default=argparse.SUPPRESS)
    enrolling = commands.choices["enroll"]
    enrolling.add_argument("count", type=int)
    enrolling.add_argument("--direct", action="store_true")
    given = parser.parse_args(arguments)
    if given.command == "run":
        directory = given.directory.absolute()
        directory.mkdir(parents=True, exist_ok=True)
        asyncio.run(_run(directory))
    elif not (given.directory / "url").exists():
        sys.stderr.write(f"no Ironic runs in {given.directory}: scripts/nightly ironic run\n")
        return 2
    else:
        asyncio.run(_enroll(given.directory, given.count, direct=given.direct))
    return 0


if __name__ == "__main__":
    sys.exit(main())
