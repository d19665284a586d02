"""A simulated deploy agent: the messages that a booted ramdisk (ironic-python-agent) sends to a real Ironic, without a
machine.

For every node that waits for a call-back it looks itself up, takes the agent token, sends heartbeats, and answers
Ironic's commands as done at once. Ironic's orders are kept in `orders`: the image and the config drive that a real
agent would write. Faults are planned a node: never call back, or fail a step. A machine whose agent lost its token is
restarted, as an operator would: Ironic gives a token once a boot.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
from collections import deque
from collections.abc import Mapping
from typing import Any

import httpx
import structlog
import uvicorn
from msgspec import Struct
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from compute_sim.ironic_stand_in.server import QuietServer

log = structlog.get_logger()

VERSION = "10.0.0"
MICROVERSION = {"X-OpenStack-Ironic-API-Version": "1.72"}
WAITING = frozenset({"wait call-back", "clean wait", "rescue wait", "service wait"})
BOOTED = WAITING | {"deploying", "cleaning", "rescuing", "servicing"}  # the same ramdisk runs, with the same token
BEAT_S = 0.3
TIMEOUT_S = 60.0  # Ironic gives a token once: an answer that is given up is a token lost, and the deployment with it
HIDDEN_TOKEN = "******"  # what a lookup answers while a token of this boot is out already
REFUSED_TOKEN = "agent token"  # in Ironic's words; its 400 also means that no conductor is there, or an address is new
OTHER_ADDRESS = "callback_url"
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
    """One agent a node that waits.

    silent: nodes whose agent never calls. failing: {node: why}, nothing is written there. unclean: {node: why}, nothing
    is erased there. first_fails: {node: why}, of these the first that is to write anything is failing from then on, and
    the others are not.
    """

    def __init__(
        self,
        ironic_url: str,
        *,
        headers: Mapping[str, str] | None = None,
        beat_s: float = BEAT_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._client = httpx.AsyncClient(
            base_url=ironic_url,
            headers={**MICROVERSION, **(headers or {})},
            timeout=TIMEOUT_S,
            trust_env=False,
            transport=transport,
        )
        self.orders: deque[AgentCommand] = deque(maxlen=MAX_ORDERS)
        self.silent: set[str] = set()
        self.failing: dict[str, str] = {}
        self.unclean: dict[str, str] = {}
        self.first_fails: dict[str, str] = {}
        self.called: set[str] = set()  # nodes whose agent has called back at least once
        self._beat_s = beat_s
        self.tokens: dict[str, str] = {}  # by node, of the ramdisk that runs
        self.restarts = 0  # machines restarted because their agent could not sign in
        self._aborted: set[str] = set()  # nodes whose cleaning was ended for that
        self._commands: dict[str, list[dict[str, Any]]] = {}
        self._url = ""
        self._server: QuietServer | None = None
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
        self._server = QuietServer(config)
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
            # Ironic is unavailable or in trouble, as it is for a real agent: again.
            with contextlib.suppress(httpx.HTTPError, LookupError, ValueError):
                await self._beat_all()
            await asyncio.sleep(self._beat_s)

    async def _beat_all(self) -> None:
        answer = await self._client.get("/v1/nodes", params={"fields": "uuid,provision_state"})
        states = {node["uuid"]: node["provision_state"] for node in answer.raise_for_status().json()["nodes"]}
        for gone in [node for node in self.tokens if states.get(node) not in BOOTED]:
            self._drop(gone)  # the ramdisk was shut down; the next boot looks itself up again
        for node, state in states.items():
            with contextlib.suppress(httpx.HTTPError, LookupError, ValueError):  # one node's trouble is no other's
                if node in self._aborted:
                    await self._clean_again(node, state)
                if state in WAITING and node not in self.silent:
                    await self._beat(node, state)

    async def _beat(self, node: str, state: str) -> None:
        if node not in self.tokens and not await self._sign_in(node, state):
            return
        body = {"callback_url": f"{self._url}/{node}", "agent_version": VERSION, "agent_token": self.tokens[node]}
        answer = await self._client.post(f"/v1/heartbeat/{node}", json=body)
        if answer.is_success:
            self.called.add(node)
            return
        log.debug("agent.heartbeat_refused", node=node, status=answer.status_code, answer=answer.text[:300])
        if answer.status_code == httpx.codes.BAD_REQUEST:
            if REFUSED_TOKEN in answer.text:
                # Ironic restarted the node between two beats: its ramdisk booted again and looks itself up again.
                self._drop(node)
            elif OTHER_ADDRESS in answer.text:
                await self._restart(node, state)

    async def _sign_in(self, node: str, state: str) -> bool:
        """Look the node up; Ironic gives its token once a boot, and an answer may be lost."""
        found = await self._client.get("/v1/lookup", params={"node_uuid": node})
        if not found.is_success:
            return False
        token = str(found.json()["config"]["agent_token"])
        if token == HIDDEN_TOKEN:
            await self._restart(node, state)
            return False
        self.tokens[node] = token
        return True

    async def _restart(self, node: str, state: str) -> None:
        """An operator's remedy for a ramdisk that cannot sign in; Ironic then gives the next boot a token."""
        self._drop(node)
        if state == "clean wait":  # Ironic refuses power actions while it cleans
            self._aborted.add(node)
            path, target = "provision", "abort"
        else:
            path, target = "power", "rebooting"
        answer = await self._client.put(f"/v1/nodes/{node}/states/{path}", json={"target": target})
        self.restarts += answer.is_success
        log.warning("agent.restarted", node=node, state=state, status=answer.status_code)

    async def _clean_again(self, node: str, state: str) -> None:
        verb = {"clean failed": "manage", "manageable": "provide"}.get(state)
        if verb is None:
            return
        answer = await self._client.put(f"/v1/nodes/{node}/states/provision", json={"target": verb})
        if answer.is_success and verb == "provide":
            self._aborted.discard(node)

    def _drop(self, node: str) -> None:
        self.tokens.pop(node, None)
        self._commands.pop(node, None)

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
        if short == "execute_deploy_step" and node in self.first_fails:
            self.failing[node] = self.first_fails[node]
            self.first_fails.clear()
        broken = {"execute_deploy_step": self.failing, "execute_clean_step": self.unclean}.get(short, {})
        if node in broken:
            error = {"type": "CommandExecutionError", "code": 500, "message": broken[node], "details": ""}
            done.update(command_status="FAILED", command_error=error, command_result=None)
        return done
