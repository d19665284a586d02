"""A whole running system with its web server, for the tests that call it: without tokens, and with."""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from msgspec import Struct
from msgspec.structs import replace

from berth.config.settings import ComputeSettings, Settings, UpSettings
from berth.config.site import Site
from berth.up.in_one_process import LocalSystem, site
from berth.up.worker_processes import NO_TLS
from berth.web.server import WebServer
from berth.web.sign_in_sessions import Access, read_tokens
from bus.bus import API
from bus.contracts.queues import DEAD
from bus.transport import Outgoing
from compute_sim.config import SimulatedConfig

START_TIMEOUT_S = 120.0
TIMEOUT_S = 60.0
TOKENS = {
    "op": ("operator", None),
    "see": ("reader", None),
    "alice": ("project", "p-alice"),
    "bob": ("project", "p-bob"),
}
JSON = {"content-type": "application/json"}


class Web(Struct):
    """A running system: the address without tokens, and the one with."""

    open_url: str
    tokens_url: str
    site: Site
    loop: asyncio.AbstractEventLoop

    def client(self, token: str = "", **headers: str) -> httpx.Client:
        """A program that calls; with a token at the address that wants one."""
        base = self.tokens_url if token else self.open_url
        auth = {"authorization": f"Bearer {token}"} if token else {}
        return httpx.Client(base_url=base, headers={**auth, **headers}, timeout=TIMEOUT_S, verify=NO_TLS)

    def give_up(self, queue: str, ident: str, body: bytes) -> None:
        """Park a message as the broker does that a queue has given up."""

        async def park() -> None:
            transport = self.site.transport(API, process="test")
            await transport.open()
            headers: dict[str, str | int | float] = {"berth-code": "test.given_up", "berth-reason": "for the test"}
            letter = Outgoing(
                exchange=DEAD, routing_key=queue, body=body, content_type="application/json", message_id=ident,
                type="inventory.update.v1", headers=headers, mandatory=True,
            )  # fmt: skip
            await transport.publish(letter)
            await transport.close()

        asyncio.run_coroutine_threadsafe(park(), self.loop).result(TIMEOUT_S)


def token_file(directory: Path) -> Path:
    lines: list[str] = []
    for name, (role, project) in TOKENS.items():
        digest = hashlib.sha256(name.encode()).hexdigest()
        lines += ["[[tokens]]", f'sha256 = "{digest}"', f'name = "{name}"', f'role = "{role}"']
        lines += [f'project = "{project}"'] if project else []
    path = directory / "tokens.toml"
    path.write_text("\n".join(lines))
    return path


def server(here: Site, name: str, access: Access) -> WebServer:
    return WebServer(here.environment(name), here.settings, host="127.0.0.1", port=0, access=access)


async def serve(directory: Path, found: list[Web], ready: threading.Event, stop: threading.Event) -> None:
    settings = replace(
        Settings(),
        state_dir=str(directory),
        up=UpSettings(schedulers=1, computes_per_cell=1, nodes=0, rest=False),
        compute=ComputeSettings(simulated=SimulatedConfig(hosts=3)),
    )
    async with site(settings, directory=None, seed=1) as here:
        system = LocalSystem(here)
        tokens = Access(read_tokens(token_file(directory)), here.clock)
        servers = [server(here, "web1", Access(None, here.clock)), server(here, "web2", tokens)]
        try:
            await system.start()
            for one in servers:
                await one.open()
            open_url, tokens_url = (one.url for one in servers)
            found.append(Web(open_url, tokens_url, here, asyncio.get_running_loop()))
            ready.set()
            await asyncio.to_thread(stop.wait)
        finally:
            ready.set()
            for one in servers:
                await one.close()
            await system.in_process.stop()


@contextmanager
def running_web() -> Iterator[Web]:
    """The system, for as long as the block runs."""
    found: list[Web] = []
    ready, stop = threading.Event(), threading.Event()
    with tempfile.TemporaryDirectory(prefix="berth-web-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        thread = threading.Thread(target=lambda: asyncio.run(serve(directory, found, ready, stop)))
        thread.start()
        try:
            assert ready.wait(START_TIMEOUT_S) and found
            yield found[0]
        finally:
            stop.set()
            thread.join()


def boot(client: httpx.Client, **fields: Any) -> str:
    answer = client.post("/api/v1/builds", json={"flavor": "m1.tiny", "project_id": "p", **fields})
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == answer.json()["links"]["self"]
    return str(answer.json()["instance_uuid"])


def follow(client: httpx.Client, uuid: str, until: str = "end") -> list[tuple[str, dict[str, Any]]]:
    """All server-sent events of one build, to the end of the stream."""
    events: list[tuple[str, dict[str, Any]]] = []
    with client.stream("GET", f"/api/v1/builds/{uuid}/events", params={"until": until}) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        name = ""
        for line in stream.iter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                events.append((name, json.loads(line[6:])))
    return events


def code_of(answer: httpx.Response, status: int) -> str:
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json"), answer.text
    assert answer.json()["status"] == status
    return str(answer.json()["code"])


def ended(client: httpx.Client, taken: httpx.Response) -> dict[str, Any]:
    """The end of a request about an instance."""
    assert taken.status_code == 202, taken.text
    state: dict[str, Any] = {}
    for _ in range(int(TIMEOUT_S * 20)):
        state = client.get(taken.headers["location"]).json()
        if state.get("terminal"):
            return state
        threading.Event().wait(0.05)
    raise AssertionError(state)
