"""The deploy agent, played: what a booted ramdisk (ironic-python-agent) says to a real Ironic, without a machine.

For every node that waits for a call-back it looks itself up, takes the agent token, sends heartbeats, and answers
Ironic's commands as done at once. What Ironic orders is kept in `orders`: the image and the config drive that a real
agent would write. Faults are planned a node: never call back, or fail a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
from collections import deque
from collections.abc import Generator, Mapping
from typing import Any

import httpx
import structlog
import uvicorn
from msgspec import Struct
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

log = structlog.get_logger()

VERSION = "10.0.0"
MICROVERSION = {"X-OpenStack-Ironic-API-Version": "1.72"}
WAITING = frozenset({"wait call-back", "clean wait", "rescue wait", "service wait"})
BOOTED = WAITING | {"deploying", "cleaning", "rescuing", "servicing"}  # the same ramdisk runs, with the same token
BEAT_S = 0.3
TIMEOUT_S = 60.0  # Ironic gives a token once: an answer that is given up is a token lost, and the deployment with it
HIDDEN_TOKEN = "******"  # what a lookup answers while a token of this boot is out already
MAX_ORDERS = 10_000
IMAGE = "image.raw"
IMAGE_BYTES = b"an image that no machine boots\n"
IMAGE_SHA256 = hashlib.sha256(IMAGE_BYTES).hexdigest()
MANAGER = "GenericHardwareManager"
STEPS: Mapping[str, tuple[dict[str, Any], ...]] = {
    # As ironic-python-agent's generic manager offers it: Ironic's own write_image switches into it.
    "deploy": ({"step": "write_image", "priority": 0, "interface": "deploy", "reboot_requested": False},),
    "clean": (
        {
            "step": "erase_devices_metadata",
            "priority": 10,
            "interface": "deploy",
            "reboot_requested": False,
            "abortable": True,
        },
    ),
    "service": (),
}


class AgentCommand(Struct, frozen=True):
    """One command that Ironic gave the agent of one node: `deploy.execute_deploy_step` and its parameters."""

    node: str
    name: str
    params: dict[str, Any]


class Agents:
    """One agent a node that waits. silent: nodes whose agent never calls. failing: {node: why}, not written."""

    def __init__(self, ironic_url: str, *, headers: Mapping[str, str] | None = None, beat_s: float = BEAT_S) -> None:
        self._client = httpx.AsyncClient(
            base_url=ironic_url, headers={**MICROVERSION, **(headers or {})}, timeout=TIMEOUT_S, trust_env=False
        )
        self.orders: deque[AgentCommand] = deque(maxlen=MAX_ORDERS)
        self.silent: set[str] = set()
        self.failing: dict[str, str] = {}
        self.called: set[str] = set()  # nodes whose agent has called back at least once
        self._beat_s = beat_s
        self.tokens: dict[str, str] = {}  # by node, of the ramdisk that runs
        self._commands: dict[str, list[dict[str, Any]]] = {}
        self._url = ""
        self._server: _Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Serve commands on a loopback port, and call back for every node that waits."""
        listening = socket.create_server(("127.0.0.1", 0))
        self._url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        routes = [
            Route(f"/{IMAGE}", self._image),
            Route("/{node}/v1/commands/", self._command, methods=["GET", "POST"]),
        ]
        config = uvicorn.Config(Starlette(routes=routes), log_config=None, access_log=False, lifespan="off", ws="none")
        self._server = _Server(config)
        self._tasks = [asyncio.create_task(self._server.serve(sockets=[listening])), asyncio.create_task(self._run())]

    async def stop(self) -> None:
        """Fall silent."""
        if self._server is not None:
            self._server.should_exit = True
            self._tasks[1].cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(httpx.HTTPError):  # Ironic is unavailable, as it is for a real agent: again
                await self._beat_all()
            await asyncio.sleep(self._beat_s)

    async def _beat_all(self) -> None:
        answer = await self._client.get("/v1/nodes", params={"fields": "uuid,provision_state"})
        states = {node["uuid"]: node["provision_state"] for node in answer.raise_for_status().json()["nodes"]}
        for gone in [node for node in self.tokens if states.get(node) not in BOOTED]:
            del self.tokens[gone]  # the ramdisk was shut down; the next boot looks itself up again
            self._commands.pop(gone, None)
        for node, state in states.items():
            if state in WAITING and node not in self.silent:
                await self._beat(node)

    async def _beat(self, node: str) -> None:
        if node not in self.tokens:
            found = await self._client.get("/v1/lookup", params={"node_uuid": node})
            if not found.is_success:
                return
            token = found.json()["config"]["agent_token"]
            if token == HIDDEN_TOKEN:
                log.warning("agent.token_lost", node=node)
                return
            self.tokens[node] = token
        body = {"callback_url": f"{self._url}/{node}", "agent_version": VERSION, "agent_token": self.tokens[node]}
        answer = await self._client.post(f"/v1/heartbeat/{node}", json=body)
        if answer.is_success:
            self.called.add(node)
        else:
            if answer.status_code == httpx.codes.BAD_REQUEST:
                # Ironic restarted the node between two beats: its ramdisk booted again and looks itself up again.
                self.tokens.pop(node, None)
            log.debug("agent.not_heard", node=node, status=answer.status_code, answer=answer.text[:300])

    image_sha256 = IMAGE_SHA256

    @property
    def image_url(self) -> str:
        """An image that Ironic finds when it looks whether there is one; its digest is IMAGE_SHA256."""
        return f"{self._url}/{IMAGE}"

    async def _image(self, _: Request) -> Response:
        return Response(IMAGE_BYTES, media_type="application/octet-stream")

    async def _command(self, request: Request) -> Response:
        node = request.path_params["node"]
        kept = self._commands.setdefault(node, [])
        if request.method == "GET":
            return JSONResponse({"commands": kept})
        order = await request.json()
        name, params = order["name"], order.get("params") or {}
        self.orders.append(AgentCommand(node, name, params))
        done = self._carry_out(node, name, params)
        kept.append(done)
        return JSONResponse(done)

    def _carry_out(self, node: str, name: str, params: dict[str, Any]) -> dict[str, Any]:
        short = name.rpartition(".")[2]
        result: dict[str, Any] = {"result": f"{short}: done by no machine"}
        for kind, steps in STEPS.items():
            if short == f"get_{kind}_steps":
                result = {f"{kind}_steps": {MANAGER: list(steps)}, "hardware_manager_version": {MANAGER: "1"}}
            elif short == f"execute_{kind}_step":
                result = {f"{kind}_result": None, f"{kind}_step": params.get("step")}
        done = {
            "id": f"{node}-{len(self.orders)}",
            "command_name": short,
            "command_params": params,
            "command_status": "SUCCEEDED",
            "command_error": None,
            "command_result": result,
        }
        if node in self.failing and short == "execute_deploy_step":
            error = {"type": "CommandExecutionError", "code": 500, "message": self.failing[node], "details": ""}
            done.update(command_status="FAILED", command_error=error, command_result=None)
        return done


class _Server(uvicorn.Server):
    """Without uvicorn's signal handlers: signals are the process's own business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone."""
        yield
