"""Bare metal through Ironic's REST API: a small subset of it, the one that deploying a node needs.

Inventory is not reported here: ironic_sync does that, for all nodes, from Ironic's own word. What is at a node is
always read again before acting, because the book may be behind.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import httpx
import msgspec
from msgspec import Meta as Bound
from msgspec import Struct

from bus.clock import Clock
from bus.contracts.base import Uuid, Word
from compute_sim.config import IronicConfig
from compute_sim.driver import Build, DriverHost, DriverUnavailable, Machine, NotOurs, Reschedule, Tree

T = TypeVar("T")

MAX_NODES = 100_000
PAGE = 1000
MAX_BODY = 32 * 2**20
# Servers close a connection that was idle for five seconds; a request that crosses with that would fail a build.
KEEPALIVE_S = 2.0
# Looking for new nodes is to take one part in so many of this service's time, however many nodes there are.
LOOK_SHARE = 20
FIELDS = "uuid,name,provision_state,maintenance,instance_uuid,instance_info"
# Where our mark is on a node. Ironic keeps `instance_info` through rescue and service and empties it together with
# `instance_uuid` when it undeploys a node. An operator who clears `instance_uuid` alone leaves the mark behind: while
# the node is deployed it still says whose machine is on it.
MARK = "/instance_info/berth"

ATTRIBUTES = {"hypervisor_type": "ironic"}
DEPLOYING = frozenset({"deploying", "wait call-back", "deploy hold"})
PASSING = frozenset({401, 403, 408, 429})  # credentials and load are not the build's fault
# From these, Ironic takes the target `deleted`; in any other state the node is on its way already.
DELETABLE = frozenset(
    {
        "active",
        "deploy failed",
        "deploy hold",
        "deploying",
        "error",
        "rescue",
        "rescue failed",
        "rescue wait",
        "service failed",
        "service hold",
        "service wait",
        "unrescue failed",
        "wait call-back",
    }
)
# In these states a node has certainly been deployed. In any other one it may still be, or be deployed anew.
BUILT = frozenset(
    {
        "active",
        "rescue",
        "rescue failed",
        "rescue wait",
        "rescuing",
        "service failed",
        "service hold",
        "service wait",
        "servicing",
        "unrescue failed",
        "unrescuing",
    }
)


# In these a machine may be on a node that carries no instance by Ironic's word.
DEPLOYED = BUILT | DELETABLE


class Mark(Struct, frozen=True):
    """What proves that a node's instance is ours: written in the same PATCH as its `instance_uuid`."""

    deployment: Uuid
    cell: Word
    service: Word
    instance: Uuid
    attempt: Annotated[int, Bound(ge=1)]


class InstanceInfo(Struct, frozen=True):
    """Our entry of a node's `instance_info`; the others are not ours to read."""

    berth: Mark | None = None


class IronicNode(Struct, frozen=True):
    """What of an Ironic node is needed here. Anything else in the answer is ignored."""

    uuid: str
    name: str | None = None
    provision_state: str | None = None
    maintenance: bool = False
    instance_uuid: str | None = None
    instance_info: msgspec.Raw = msgspec.Raw(b"{}")

    @property
    def instance(self) -> str | None:
        """The uuid of the instance that it carries, spelled as everywhere here (Ironic takes other spellings)."""
        if self.instance_uuid is None:
            return None
        with contextlib.suppress(ValueError):
            return str(uuid.UUID(self.instance_uuid))
        return self.instance_uuid

    @property
    def mark(self) -> Mark | None:
        """Our mark for the machine that is on it. Anything that is not one is another's business, and no fault.

        Of a node that carries an instance it counts for that one; of one that carries none, while it is deployed: an
        operator has cleared `instance_uuid` alone, and that does not prove the machine gone.
        """
        if self.instance_uuid is None and self.provision_state not in DEPLOYED:
            return None
        try:
            mark = msgspec.json.decode(self.instance_info, type=InstanceInfo).berth
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return mark if mark is not None and self.instance in (None, mark.instance) else None

    @property
    def machine(self) -> str | None:
        """The uuid of the instance whose machine is on it: by Ironic's word, else by our mark."""
        mark = self.mark
        return self.instance if self.instance is not None or mark is None else mark.instance


class Page(Struct, frozen=True):
    """One page of nodes."""

    nodes: list[IronicNode] = []


class BareMetal:
    """The driver of one service's nodes: those that carry its mark, and its share of those that carry no mark."""

    def __init__(
        self,
        config: IronicConfig,
        *,
        cell: str,
        service: str,
        clock: Clock,
        is_live: Callable[[str, str], bool] = lambda _host, _instance: False,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`is_live(host, instance)`: whether the service's own records hold such a machine."""
        self._config = config
        self._cell = cell
        self._service = service
        self._services = frozenset((service, *config.takes_over))
        self._is_live = is_live
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
        if build.deployment is None:
            raise Reschedule("spawn.unmarked", "the command names no deployment, so the node could not be given back")
        node = await self._guarded(build)
        if node.instance is None:
            await self._take(build)
        async with asyncio.timeout(self._config.deploy_timeout_s):
            while True:
                node = await self._expect(build.host_uuid)
                if not _is_of(node, build):
                    raise Reschedule("node.taken", "the node was given to another while it was deployed")
                if node.provision_state in BUILT:
                    return
                if node.provision_state == "available":
                    await self._deploy(build)
                elif node.provision_state not in DEPLOYING:
                    raise Reschedule("node.deploy_failed", f"the node is in {node.provision_state}")
                await self._clock.sleep(self._config.poll_interval_s)

    async def destroy(self, host_uuid: str, instance_uuid: str, attempt: int, deployment: str | None) -> None:
        """Undeploy the node when its mark says that it is ours; return when it is not any more (cleaning goes on)."""
        deadline = self._clock.monotonic() + self._config.clean_timeout_s
        while (node := await self._node(host_uuid)) is not None and node.instance == instance_uuid:
            mark = node.mark
            if mark is None or mark.deployment != deployment:
                named = "no mark of ours" if mark is None else f"the mark of deployment {mark.deployment}"
                raise NotOurs(f"node {host_uuid} carries instance {instance_uuid} with {named}")
            if mark.attempt > attempt:
                return
            if self._clock.monotonic() > deadline:
                raise DriverUnavailable(f"the node is still in {node.provision_state}")
            # What Ironic says to these does not matter (the node may be locked just now): the next scan tells.
            if node.provision_state == "available":  # taken, and not deployed
                # Removing the mark first fails, and with it the whole PATCH, when the node is not ours any more.
                patch = [{"op": "remove", "path": MARK}, {"op": "remove", "path": "/instance_uuid"}]
                await self._change("PATCH", f"/v1/nodes/{host_uuid}", patch)
            elif node.provision_state in DELETABLE:
                await self._change("PUT", f"/v1/nodes/{host_uuid}/states/provision", {"target": "deleted"})
            await self._clock.sleep(self._config.poll_interval_s)

    async def list(self, hosts: Sequence[str] | None = None) -> Mapping[str, Sequence[Machine]]:
        """What every node carries, whatever its provision state; the mark tells whose it is, and of which attempt."""
        wanted = None if hosts is None else frozenset(hosts)
        nodes = await self._nodes()
        return {node.uuid: _machines(node) for node in nodes if wanted is None or node.uuid in wanted}

    def on_change(self, callback: Callable[[Sequence[str]], None]) -> None:
        """Nodes that came, or whose maintenance changed, as `watch` finds them."""
        self._changed = callback

    async def watch(self) -> None:
        """ScanId for nodes that have not been announced, until cancelled.

        ironic_sync tells the book of a node at once; no build goes there before its compute service has announced it.
        What went is told with the next whole announcement: the book has dropped it already.
        """
        while True:
            began = self._clock.monotonic()
            with contextlib.suppress(DriverUnavailable):  # the call that needs Ironic logs it
                nodes = await self._nodes()
                told = self._told or {}
                news = [node.uuid for node in nodes if told.get(node.uuid) != node.maintenance]
                self._told = {node.uuid: node.maintenance for node in nodes}
                if news and self._changed is not None:
                    self._changed(news)
            await self._clock.sleep(max(self._config.watch_interval_s, LOOK_SHARE * (self._clock.monotonic() - began)))

    # --- what spawn is careful about

    async def _guarded(self, build: Build) -> IronicNode:
        """The node, if it can take this build now; a build that was interrupted finds its own traces."""
        node = await self._expect(build.host_uuid)
        ours = node.instance is not None
        if ours and not _is_of(node, build):
            raise Reschedule("node.taken", "the node carries an instance that this build did not put there")
        if node.maintenance:
            raise Reschedule("node.maintenance", "the node is in maintenance")
        if node.provision_state == "available" or (ours and node.provision_state in BUILT | DEPLOYING):
            return node
        raise Reschedule("node.not_available", f"the node is in {node.provision_state}")

    async def _take(self, build: Build) -> None:
        """Write our instance and our mark on the node: Ironic answers 409 when it has another, or is locked."""
        assert build.deployment is not None
        instance = build.spec.instance_uuid
        mark = Mark(build.deployment, self._cell, self._service, instance, build.attempt)
        patch = [
            {"op": "add", "path": "/instance_uuid", "value": instance},
            {"op": "add", "path": MARK, "value": msgspec.to_builtins(mark)},
        ]
        answer = await self._change("PATCH", f"/v1/nodes/{build.host_uuid}", patch)
        if answer.status_code == httpx.codes.CONFLICT:
            raise Reschedule("node.taken", "Ironic did not give the node to this instance")
        if answer.is_error:
            raise Reschedule("node.refused", f"Ironic answered {answer.status_code} to taking the node")

    async def _deploy(self, build: Build) -> None:
        """Ask for it. A conflict (the node is locked just now) is seen at the next scan, and asked again."""
        answer = await self._change("PUT", f"/v1/nodes/{build.host_uuid}/states/provision", {"target": "active"})
        if answer.is_error and answer.status_code != httpx.codes.CONFLICT:
            raise Reschedule("node.refused", f"Ironic answered {answer.status_code} to deploying the node")

    # --- Ironic's REST API

    async def _nodes(self) -> builtins.list[IronicNode]:
        """This service's nodes, by uuid."""
        nodes: builtins.list[IronicNode] = []
        marker: dict[str, str] = {}
        for _ in range(MAX_NODES // PAGE):
            answer = await self._call("GET", "/v1/nodes", params={"fields": FIELDS, "limit": str(PAGE), **marker})
            page = _parse(answer, Page).nodes
            nodes.extend(node for node in page if self._is_host(node))
            if "next" not in answer.json() or not page:
                break
            marker = {"marker": page[-1].uuid}
        return sorted(nodes, key=lambda node: node.uuid)

    def _is_host(self, node: IronicNode) -> bool:
        """Whether this service announces the node. Shares decide about nodes without a mark only."""
        mark = node.mark
        if mark is not None:
            return mark.cell == self._cell and mark.service in self._services
        if node.instance is not None and self._is_live(node.uuid, node.instance):
            return True
        return zlib.crc32(node.uuid.encode()) % self._config.shares == self._config.share

    async def _node(self, ident: str) -> IronicNode | None:
        answer = await self._call("GET", f"/v1/nodes/{ident}")
        return None if answer.status_code == httpx.codes.NOT_FOUND else _parse(answer, IronicNode)

    async def _expect(self, ident: str) -> IronicNode:
        node = await self._node(ident)
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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DriverUnavailable(f"Ironic's answer is not understood: {error}") from error


def _is_of(node: IronicNode, build: Build) -> bool:
    """Whether the node carries this very build, by its mark."""
    mark = node.mark
    return (
        mark is not None
        and node.instance == build.spec.instance_uuid
        and (mark.deployment, mark.attempt) == (build.deployment, build.attempt)
    )


def _machines(node: IronicNode) -> tuple[Machine, ...]:
    """What is on the node; a text that is no uuid names no instance that a report could name."""
    machine, mark = node.machine, node.mark
    if machine is None or not _is_uuid(machine):
        return ()
    built = node.provision_state in BUILT
    if mark is None:
        return (Machine(node.uuid, machine, None, None, built),)
    return (Machine(node.uuid, machine, mark.attempt, mark.deployment, built),)


def _is_uuid(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False
