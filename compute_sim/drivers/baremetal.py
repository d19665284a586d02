"""Bare metal through Ironic's REST API: a small subset of it, the one that deploying a node needs.

Inventory is not reported here: ironic_sync does that, for all nodes, from Ironic's own word. What is at a node is
always read again before acting, because the book may be behind (I-9).
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import httpx
import msgspec
from msgspec import Struct

from bus.clock import Clock
from compute_sim.config import IronicConfig
from compute_sim.driver import Build, DriverHost, DriverUnavailable, Machine, Reschedule, Tree

T = TypeVar("T")

MAX_NODES = 100_000
PAGE = 1000
MAX_BODY = 32 * 2**20
# Servers close a connection that was idle for five seconds; a request that crosses with that would fail a build.
KEEPALIVE_S = 2.0
# Looking for new nodes is to take one part in so many of this service's time, however many nodes there are.
LOOK_SHARE = 20
FIELDS = "uuid,name,provision_state,maintenance,instance_uuid,resource_class"

ATTRIBUTES = {"hypervisor_type": "ironic"}
DEPLOYING = frozenset({"deploying", "wait call-back", "deploy hold"})
PASSING = frozenset({401, 403, 408, 429})  # credentials and load are not the build's fault
# From these, Ironic takes the target `deleted`; in any other state the node is on its way already.
DELETABLE = frozenset({"active", "deploy failed", "wait call-back", "error", "deploy hold", "rescue", "deploying"})


class Node(Struct, frozen=True):
    """What of an Ironic node is needed here. Anything else in the answer is ignored."""

    uuid: str
    name: str | None = None
    provision_state: str | None = None
    maintenance: bool = False
    instance_uuid: str | None = None


class Page(Struct, frozen=True):
    """One page of nodes."""

    nodes: list[Node] = []


class BareMetal:
    """The driver of one service's share of Ironic's nodes."""

    def __init__(
        self, config: IronicConfig, *, clock: Clock, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._config = config
        self._clock = clock
        self._transport = transport
        self._client: httpx.AsyncClient | None = None
        # Of each node whether it is in maintenance: as the first announcement has it, and then as `watch` has told it.
        self._told: dict[str, bool] | None = None
        self._changed: Callable[[Sequence[str]], None] | None = None

    async def open(self) -> None:
        """Make the client; Ironic itself is asked when something is to be known."""
        if self._client is None:
            headers = {"X-OpenStack-Ironic-API-Version": self._config.microversion}
            if self._config.token:
                headers["X-Auth-Token"] = self._config.token
            self._client = httpx.AsyncClient(
                base_url=self._config.url,
                headers=headers,
                timeout=self._config.request_timeout_s,
                limits=httpx.Limits(keepalive_expiry=KEEPALIVE_S),
                transport=self._transport,
            )

    async def close(self) -> None:
        """Close the client."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def hosts(self) -> Sequence[DriverHost]:
        """One host a node, named by its uuid as Nova does; a node in maintenance is not enabled."""
        nodes = await self._nodes()
        if self._told is None:
            self._told = {node.uuid: node.maintenance for node in nodes}
        return [
            DriverHost(
                uuid=node.uuid,
                name=node.uuid,
                enabled=not node.maintenance,
                disabled_reason="maintenance" if node.maintenance else "",
                attributes=ATTRIBUTES,
            )
            for node in nodes
        ]

    async def inventory(self, hosts: Sequence[str] | None = None) -> Sequence[Tree]:
        """None: ironic_sync reports them."""
        return ()

    async def spawn(self, build: Build) -> None:
        """Take the node, deploy it, wait until it is active."""
        node = await self._guarded(build)
        if node.instance_uuid is None:
            await self._take(build)
        async with asyncio.timeout(self._config.deploy_timeout_s):
            while True:
                node = await self._expect(build.host_uuid)
                if node.instance_uuid != build.spec.instance_uuid:
                    raise Reschedule("node.taken", "the node was given to somebody else while it was deployed")
                if node.provision_state == "active":
                    return
                if node.provision_state == "available":
                    await self._deploy(build)
                elif node.provision_state not in DEPLOYING:
                    raise Reschedule("node.deploy_failed", f"the node is in {node.provision_state}")
                await self._clock.sleep(self._config.poll_s)

    async def destroy(self, host_uuid: str, instance_uuid: str, attempt: int) -> None:
        """Undeploy the node when it is this instance's; return when it is not any more (cleaning goes on)."""
        deadline = self._clock.monotonic() + self._config.clean_timeout_s
        while (node := await self._node(host_uuid)) is not None and node.instance_uuid == instance_uuid:
            if self._clock.monotonic() > deadline:
                raise DriverUnavailable(f"the node is still in {node.provision_state}")
            # What Ironic says to these does not matter (the node may be locked just now): the next look tells.
            if node.provision_state == "available":  # taken, and not deployed
                await self._change("PATCH", f"/v1/nodes/{host_uuid}", [{"op": "remove", "path": "/instance_uuid"}])
            elif node.provision_state in DELETABLE:
                await self._change("PUT", f"/v1/nodes/{host_uuid}/states/provision", {"target": "deleted"})
            await self._clock.sleep(self._config.poll_s)

    async def list(self, hosts: Sequence[str] | None = None) -> Mapping[str, Sequence[Machine]]:
        """Active nodes with an instance. Ironic does not know which attempt it was."""
        wanted = None if hosts is None else frozenset(hosts)
        return {
            node.uuid: (Machine(node.uuid, node.instance_uuid, None),)
            for node in await self._nodes()
            if node.instance_uuid and node.provision_state == "active" and (wanted is None or node.uuid in wanted)
        }

    def on_change(self, callback: Callable[[Sequence[str]], None]) -> None:
        """Nodes that came, or whose maintenance changed, as `watch` finds them."""
        self._changed = callback

    async def watch(self) -> None:
        """Look for nodes that nobody has been told of, until cancelled.

        ironic_sync tells the book of a node at once; no build goes there before its compute service has announced it.
        What went is told with the next whole announcement: the book has dropped it already.
        """
        while True:
            began = self._clock.monotonic()
            with contextlib.suppress(DriverUnavailable):  # whoever needs Ironic says so
                nodes = await self._nodes()
                told = self._told or {}
                news = [node.uuid for node in nodes if told.get(node.uuid) != node.maintenance]
                self._told = {node.uuid: node.maintenance for node in nodes}
                if news and self._changed is not None:
                    self._changed(news)
            await self._clock.sleep(max(self._config.watch_s, LOOK_SHARE * (self._clock.monotonic() - began)))

    # --- what spawn is careful about

    async def _guarded(self, build: Build) -> Node:
        """The node, if it can take this build now (I-9); a build that was interrupted finds its own traces."""
        node = await self._expect(build.host_uuid)
        if node.instance_uuid not in (None, build.spec.instance_uuid):
            raise Reschedule("node.taken", "the node has another instance")
        if node.maintenance:
            raise Reschedule("node.maintenance", "the node is in maintenance")
        ours = node.instance_uuid is not None
        if node.provision_state == "available" or (ours and node.provision_state in ("active", *DEPLOYING)):
            return node
        raise Reschedule("node.not_available", f"the node is in {node.provision_state}")

    async def _take(self, build: Build) -> None:
        """Write our instance on the node: Ironic answers 409 when it has another, or is locked."""
        patch = [{"op": "add", "path": "/instance_uuid", "value": build.spec.instance_uuid}]
        answer = await self._change("PATCH", f"/v1/nodes/{build.host_uuid}", patch)
        if answer.status_code == httpx.codes.CONFLICT:
            raise Reschedule("node.taken", "Ironic did not give the node to this instance")
        if answer.is_error:
            raise Reschedule("node.refused", f"Ironic answered {answer.status_code} to taking the node")

    async def _deploy(self, build: Build) -> None:
        """Ask for it. A conflict (the node is locked just now) is seen at the next look, and asked again."""
        answer = await self._change("PUT", f"/v1/nodes/{build.host_uuid}/states/provision", {"target": "active"})
        if answer.is_error and answer.status_code != httpx.codes.CONFLICT:
            raise Reschedule("node.refused", f"Ironic answered {answer.status_code} to deploying the node")

    # --- Ironic's REST API

    async def _nodes(self) -> builtins.list[Node]:
        """This service's share of all nodes, by uuid."""
        nodes: builtins.list[Node] = []
        marker: dict[str, str] = {}
        for _ in range(MAX_NODES // PAGE):
            answer = await self._call("GET", "/v1/nodes", params={"fields": FIELDS, "limit": str(PAGE), **marker})
            page = _parse(answer, Page).nodes
            nodes.extend(node for node in page if self._ours(node.uuid))
            if "next" not in answer.json() or not page:
                break
            marker = {"marker": page[-1].uuid}
        return sorted(nodes, key=lambda node: node.uuid)

    def _ours(self, uuid: str) -> bool:
        return zlib.crc32(uuid.encode()) % self._config.shares == self._config.share

    async def _node(self, uuid: str) -> Node | None:
        answer = await self._call("GET", f"/v1/nodes/{uuid}")
        return None if answer.status_code == httpx.codes.NOT_FOUND else _parse(answer, Node)

    async def _expect(self, uuid: str) -> Node:
        node = await self._node(uuid)
        if node is None:
            raise Reschedule("host.unknown", "Ironic has no such node")
        return node

    async def _change(self, method: str, path: str, body: Any) -> httpx.Response:
        """A request that changes something is never left half-way: cancelled, it could land after its undoing."""
        asking = asyncio.ensure_future(self._call(method, path, body))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            await asyncio.wait({asking})  # bounded by the request's own timeout
            if not asking.cancelled():
                asking.exception()
            raise

    async def _call(
        self, method: str, path: str, body: Any = None, *, params: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """One request. What time or an operator may heal is DriverUnavailable; other answers are the caller's."""
        if self._client is None:
            raise DriverUnavailable("the driver is closed")
        try:
            answer = await self._client.request(method, path, json=body, params=params)
        except httpx.HTTPError as error:
            raise DriverUnavailable(f"Ironic: {type(error).__name__}") from error
        if answer.status_code >= httpx.codes.INTERNAL_SERVER_ERROR or answer.status_code in PASSING:
            raise DriverUnavailable(f"Ironic answered {answer.status_code}")
        return answer


def _parse(answer: httpx.Response, kind: type[T]) -> T:
    if answer.is_error:
        raise DriverUnavailable(f"Ironic answered {answer.status_code}")
    if len(answer.content) > MAX_BODY:
        raise DriverUnavailable("Ironic's answer is too large")
    try:
        return msgspec.json.decode(answer.content, type=kind)
    except msgspec.DecodeError as error:
        raise DriverUnavailable(f"Ironic's answer is not understood: {error}") from error
