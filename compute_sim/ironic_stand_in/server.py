"""The part of Ironic's REST API that berth uses, over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections import deque
from collections.abc import Generator, Mapping
from typing import Any
from urllib.parse import urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from bus.clock import Clock, new_uuid
from compute_sim.ironic_stand_in import shapes
from compute_sim.ironic_stand_in.announcer import NotificationAnnouncer
from compute_sim.ironic_stand_in.node_pool import REBOOTS, Behaviour, NodePool, RequestError

MAX_BODY = 1024 * 1024
MAX_LIMIT = 1000
MAX_RECORDED = 10_000  # changing requests kept for tests to look at
STOP_GRACE_S = 2
# httpx keeps an idle connection for 5 s. A server that closes it at that age, uvicorn's own, fails the next request.
KEEP_ALIVE_S = 75
VERSIONS = {
    "X-OpenStack-Ironic-API-Minimum-Version": "1.1",
    "X-OpenStack-Ironic-API-Maximum-Version": "1.115",
}


class QuietServer(uvicorn.Server):
    """Without uvicorn's signal handlers: signals are the process's own business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone."""
        yield


class IronicStandIn:
    """A small Ironic: nodes, REST API on a loopback port, notifications into an exchange."""

    def __init__(
        self,
        announcer: NotificationAnnouncer,
        *,
        clock: Clock,
        rng: random.Random,
        behaviour: Behaviour | None = None,
        port: int = 0,
    ) -> None:
        self.pool = NodePool(announcer, clock=clock, rng=rng, behaviour=behaviour)
        self.url = ""
        self.requested: deque[tuple[str, str]] = deque(
            maxlen=MAX_RECORDED
        )  # (method, node) of requests that change a node
        self._announcer = announcer
        self._clock = clock
        self._rng = rng
        self._address = ("127.0.0.1", port)
        self._serving: asyncio.Task[None] | None = None
        self._server: QuietServer | None = None

    async def start(self) -> str:
        """Open the exchange, listen, and return the API's address."""
        await self._announcer.open()
        # With the protocol named, asyncio switches Nagle's algorithm off; without it every answer takes 40 ms.
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(self._address)
        listening.listen(256)
        host, port = listening.getsockname()
        self.url = f"http://{host}:{port}"
        config = uvicorn.Config(
            self.app(),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=STOP_GRACE_S,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._server = QuietServer(config)
        self._serving = asyncio.get_running_loop().create_task(self._server.serve(sockets=[listening]))
        return self.url  # connections are taken by the socket from now on and served as soon as the server runs

    async def stop(self) -> None:
        """Stop serving and let go of everything."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
            # One that uvicorn did not close in time would go on being served: the process stays.
            for connection in self._server.server_state.connections:
                if (transport := getattr(connection, "transport", None)) is not None:
                    transport.abort()
        await self.pool.stop()
        await self._announcer.close()

    def app(self) -> Starlette:
        """The API as an ASGI application."""
        routes = [
            Route("/v1/nodes", self._list, methods=["GET"]),
            Route("/v1/nodes/detail", self._list, methods=["GET"]),
            Route("/v1/nodes", self._create, methods=["POST"]),
            Route("/v1/nodes/{ident}", self._get, methods=["GET"]),
            Route("/v1/nodes/{ident}", self._patch, methods=["PATCH"]),
            Route("/v1/nodes/{ident}", self._delete, methods=["DELETE"]),
            Route("/v1/nodes/{ident}/maintenance", self._maintenance, methods=["PUT", "DELETE"]),
            Route("/v1/nodes/{ident}/traits", self._traits, methods=["PUT"]),
            Route("/v1/nodes/{ident}/history", self._history, methods=["GET"]),
            Route("/v1/nodes/{ident}/validate", self._validate, methods=["GET"]),
            Route("/v1/nodes/{ident}/vifs", self._vifs, methods=["GET", "POST"]),
            Route("/v1/nodes/{ident}/vifs/{vif}", self._vifs, methods=["DELETE"]),
            Route("/v1/nodes/{ident}/states", self._states, methods=["GET"]),
            Route("/v1/nodes/{ident}/states/provision", self._provision, methods=["PUT"]),
            Route("/v1/nodes/{ident}/states/power", self._power, methods=["PUT"]),
            Route("/v1/volume/targets", self._volume_targets, methods=["GET", "POST"]),
            Route("/v1/volume/targets/{target}", self._volume_targets, methods=["DELETE"]),
            Route("/v1/allocations/{ident}", self._allocation, methods=["GET"]),
        ]
        return Starlette(routes=routes, exception_handlers={RequestError: _refuse})

    async def _list(self, request: Request) -> Response:
        query = request.query_params
        limit = min(int(query.get("limit", MAX_LIMIT)), MAX_LIMIT)
        nodes = [node for node in self.pool.nodes.values() if _passes(node, query)]
        if "marker" in query:
            after = next((i for i, node in enumerate(nodes) if node["uuid"] == query["marker"]), len(nodes))
            nodes = nodes[after + 1 :]
        detail = query.get("detail", "").lower() == "true" or request.url.path.endswith("/detail")
        default = () if detail else ("uuid", "name", "instance_uuid", "maintenance", "power_state", "provision_state")
        fields = tuple(query["fields"].split(",")) if "fields" in query else default
        if "fields" in query and {"updated_at", "created_at"} & set(fields):
            raise RequestError(400, "Field(s) updated_at, created_at are not valid here.")
        page: dict[str, Any] = {"nodes": [shapes.represent(node, self.url, fields) for node in nodes[:limit]]}
        if len(nodes) > limit:
            again = {**dict(query), "marker": nodes[limit - 1]["uuid"]}
            page["next"] = f"{self.url}/v1/nodes?{urlencode(again)}"
        return _answer(page)

    async def _get(self, request: Request) -> Response:
        return self._shown(self._node(request))

    async def _create(self, request: Request) -> Response:
        return self._shown(await self.pool.create(await _json(request, dict), self._request_id()), 201)

    async def _patch(self, request: Request) -> Response:
        operations = await _json(request, list)
        node = self._node(request)
        changes: dict[str, Any] = {}
        for operation in operations:
            field, _, entry = operation["path"].strip("/").partition("/")
            if field not in shapes.NODE and field not in shapes.REST_ONLY:
                raise RequestError(
                    400, f"Adding a new attribute (/{field}) to the root of the resource is not allowed."
                )
            removes = operation["op"] == "remove"
            if not entry:
                gone: Any = {} if isinstance(node[field], dict) else None
                changes[field] = gone if removes else operation["value"]
                continue
            inside = dict(changes.get(field, node[field]))
            if removes and entry not in inside:
                raise RequestError(400, f"Couldn't apply patch: can't remove a non-existent object '{entry}'")
            inside.pop(entry, None)
            changes[field] = inside if removes else {**inside, entry: operation["value"]}
        await self.pool.patch(node, changes, self._request_id())
        return self._shown(node)

    async def _delete(self, request: Request) -> Response:
        await self.pool.delete(self._node(request), self._request_id())
        return Response(status_code=204, headers=VERSIONS)

    async def _maintenance(self, request: Request) -> Response:
        on = request.method == "PUT"
        body = await request.body() if on else b""
        reason = json.loads(body).get("reason") if body else None
        await self.pool.set_maintenance(self._node(request), on, reason, self._request_id())
        return Response(status_code=202, headers=VERSIONS)

    async def _traits(self, request: Request) -> Response:
        traits = (await _json(request, dict)).get("traits", [])
        await self.pool.patch(self._node(request), {"traits": traits}, self._request_id())
        return Response(status_code=204, headers=VERSIONS)

    async def _states(self, request: Request) -> Response:
        fields = ("provision_state", "target_provision_state", "power_state", "target_power_state", "last_error")
        node = self._node(request)
        return _answer({name: node[name] for name in fields})

    async def _history(self, request: Request) -> Response:
        return _answer({"history": self.pool.history.get(self._node(request)["uuid"], [])})

    async def _validate(self, request: Request) -> Response:
        why = self.pool.invalid.get(self._node(request)["uuid"])
        fine: dict[str, Any] = {"result": True}
        deploy = fine if why is None else {"result": False, "reason": why}
        return _answer({"boot": fine, "deploy": deploy, "network": fine, "power": fine, "storage": fine})

    async def _vifs(self, request: Request) -> Response:
        attached = self.pool.vifs.setdefault(self._node(request)["uuid"], [])
        if request.method == "GET":
            return _answer({"vifs": [{"id": vif} for vif in attached]})
        if request.method == "DELETE":
            attached.remove(request.path_params["vif"])
        else:
            vif = str((await _json(request, dict))["id"])
            if vif in self.pool.no_ports:
                raise RequestError(self.pool.no_ports[vif], f"Port {vif} could not be found.")
            attached.append(vif)
        return Response(status_code=204, headers=VERSIONS)

    async def _volume_targets(self, request: Request) -> Response:
        """As Ironic: a boot index is one target's, and a target goes when its node is switched off."""
        kept = self.pool.volume_targets
        if request.method == "GET":
            node = request.query_params.get("node")
            return _answer({"targets": [one for one in kept.values() if node in (None, one["node_uuid"])]})
        if request.method == "DELETE":
            target = kept.get(request.path_params["target"])
            if target is None:
                raise RequestError(404, "Volume target could not be found.")
            if self.pool.get(target["node_uuid"])["power_state"] != "power off":
                raise RequestError(400, "The node is not powered off.")
            del kept[target["uuid"]]
            return Response(status_code=204, headers=VERSIONS)
        made = {"uuid": new_uuid(self._rng), "extra": {}, **await _json(request, dict)}
        key = (made["node_uuid"], made["boot_index"])
        if any((one["node_uuid"], one["boot_index"]) == key for one in kept.values()):
            raise RequestError(409, f"A volume target with boot index {key[1]} for the same node already exists.")
        kept[made["uuid"]] = made
        return _answer(made, 201)

    async def _provision(self, request: Request) -> Response:
        requested = await _json(request, dict)
        node = self._node(request)
        if requested.get("target") == "rescue" and not str(requested.get("rescue_password") or "").strip():
            raise RequestError(
                400, 'A non-empty "rescue_password" is required when setting target provision state to rescue'
            )
        self.pool.provision(node, str(requested.get("target", "")), self._request_id())
        if "configdrive" in requested:
            self.pool.config_drives[node["uuid"]] = requested["configdrive"]
        return Response(status_code=202, headers=VERSIONS)

    async def _power(self, request: Request) -> Response:
        target = (await _json(request, dict)).get("target")
        if target not in ("power on", "power off", *REBOOTS):
            raise RequestError(400, f"Invalid power state {target!r}")
        await self.pool.set_power(self._node(request), target, self._request_id())
        return Response(status_code=202, headers=VERSIONS)

    async def _allocation(self, request: Request) -> Response:
        ident = request.path_params["ident"]
        for node in self.pool.nodes.values():
            if node["allocation_uuid"] == ident:
                return _answer({"uuid": ident, "state": "active", "node_uuid": node["uuid"]})
        raise RequestError(404, f"Allocation {ident} could not be found.")

    def _node(self, request: Request) -> dict[str, Any]:
        node = self.pool.get(request.path_params["ident"])
        if request.method != "GET":
            self.requested.append((request.method, node["uuid"]))
        return node

    def _shown(self, node: Mapping[str, Any], status: int = 200) -> Response:
        return _answer(shapes.represent(node, self.url), status)

    def _request_id(self) -> str:
        return f"req-{new_uuid(self._rng)}"


def _answer(content: Mapping[str, Any], status: int = 200) -> Response:
    return JSONResponse(content, status_code=status, headers=VERSIONS)


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    text = {"faultcode": "Client", "faultstring": error.text, "debuginfo": None}
    return _answer({"error_message": text}, error.status)


async def _json(request: Request, kind: type) -> Any:
    body = await request.body()
    if len(body) > MAX_BODY:
        raise RequestError(413, "Request body is too large")
    try:
        content = json.loads(body)
    except ValueError:
        raise RequestError(400, "The request body is not JSON") from None
    if not isinstance(content, kind):
        raise RequestError(400, "The request body has the wrong shape")
    return content


def _passes(node: Mapping[str, Any], query: Mapping[str, str]) -> bool:
    """Ironic's filters, as far as they are used here. It lists no child nodes."""
    if node["parent_node"] is not None:
        return False
    requested = {name: query[name] for name in ("provision_state", "resource_class", "instance_uuid") if name in query}
    if any(node[name] != value for name, value in requested.items()):
        return False
    if "maintenance" in query and node["maintenance"] != (query["maintenance"].lower() == "true"):
        return False
    return "associated" not in query or (node["instance_uuid"] is not None) == (query["associated"].lower() == "true")
