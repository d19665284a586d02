"""The stand-in's nodes: Ironic's provision state machine as far as berth needs it, notifications included."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Coroutine, Mapping
from typing import Any

from msgspec import Struct

from bus.clock import Clock, new_uuid
from compute_sim.ironic_stand_in import shapes
from compute_sim.ironic_stand_in.announcer import NotificationAnnouncer

REBOOTS = frozenset({"rebooting", "soft rebooting"})  # power actions that leave a node on
MAX_TASKS = 10_000  # nodes on their way at once


class RequestError(Exception):
    """The body of the API's answer: an HTTP status and a text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class Behaviour(Struct, frozen=True, kw_only=True):
    """How long things take, and how often they go wrong (seeded by the pool's rng)."""

    verify_s: float = 0.05
    deploy_s: float = 0.3
    undeploy_s: float = 0.1
    clean_s: float = 0.3
    deploy_fails: float = 0.0
    failure: str = "Timeout reached while waiting for callback"
    rescue_fails: bool = False
    undeploy_fails: bool = False
    power_s: float = 0.0  # 0: at once
    power_fails: bool = False
    lose: float = 0.0  # share of notifications that are never sent


# {verb of PUT states/provision: states it is allowed in}
ALLOWED: Mapping[str, frozenset[str]] = {
    "manage": frozenset({"enroll", "available", "clean failed", "inspect failed", "adopt failed"}),
    "provide": frozenset({"manageable"}),
    "active": frozenset({"available", "deploy failed"}),
    "rebuild": frozenset({"active", "deploy failed", "error"}),
    "rescue": frozenset({"active", "rescue", "rescue failed", "unrescue failed"}),
    "unrescue": frozenset({"rescue", "rescue failed", "unrescue failed"}),
    "service": frozenset({"active", "service failed"}),
    "deleted": frozenset({"active", "deploy failed", "error", "rescue", "rescue failed", "unrescue failed"}),
}


class NodePool:
    """Simulated nodes. Calls that take time start it and return, as Ironic's do; `idle` returns when all is done."""

    def __init__(
        self, announcer: NotificationAnnouncer, *, clock: Clock, rng: random.Random, behaviour: Behaviour | None = None
    ) -> None:
        self.nodes: dict[str, dict[str, Any]] = {}
        self.version = 0  # rises with every change
        self.invalid: dict[str, str] = {}  # why a node's deploy interface would not deploy it, by node
        self.history: dict[str, list[dict[str, Any]]] = {}  # as Ironic answers it, by node
        self.vifs: dict[str, list[str]] = {}  # attached network ports, by node
        self.no_ports: dict[str, int] = {}  # network ports that Neutron does not have: the status of Ironic's answer
        self.volume_targets: dict[str, dict[str, Any]] = {}  # by their uuid
        self.config_drives: dict[str, Any] = {}  # of the last deployment, by node
        self.behaviour = behaviour or Behaviour()
        self._announcer = announcer
        self._clock = clock
        self._rng = rng
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def idle(self) -> bool:
        """Whether no node is on its way anywhere."""
        return not self._tasks

    @property
    def in_progress(self) -> int:
        """Nodes on their way."""
        return len(self._tasks)

    def add(self, **fields: Any) -> dict[str, Any]:
        """Add a node that was always there: no notification."""
        now = shapes.timestamp(self._clock.time())
        name = f"node-{len(self.nodes)}"
        node = shapes.new_node(
            **{"uuid": new_uuid(self._rng), "name": name, "created_at": now, "provision_updated_at": now, **fields}
        )
        self.nodes[node["uuid"]] = node
        self.version += 1
        return node

    def plan(self, count: int, classes: tuple[str, ...] = ("baremetal-gold", "baremetal-silver")) -> None:
        """Nodes that are available, of each class in turn."""
        for index in range(count):
            grade = classes[index % len(classes)]
            trait = "CUSTOM_" + grade.rpartition("-")[2].upper().replace(".", "_")
            properties = {"cpus": 32, "memory_mb": 131072, "local_gb": 960, "cpu_arch": "x86_64"}
            self.add(
                provision_state="available",
                power_state="power off",
                resource_class=grade,
                traits=[trait],
                properties=properties,
            )

    def get(self, ident: str) -> dict[str, Any]:
        """A node by uuid or name. Raises RequestError 404."""
        node = self.nodes.get(ident) or next((n for n in self.nodes.values() if n["name"] == ident), None)
        if node is None:
            raise RequestError(404, f"Node {ident} could not be found.")
        return node

    async def create(self, fields: Mapping[str, Any], request_id: str) -> dict[str, Any]:
        """POST /v1/nodes. Raises RequestError 409."""
        ident = str(fields.get("uuid") or new_uuid(self._rng))
        if ident in self.nodes:
            raise RequestError(409, f"A node with UUID {ident} already exists.")
        known = {name: value for name, value in fields.items() if name in shapes.NODE or name in shapes.REST_ONLY}
        node = self.add(**{**known, "uuid": ident, "provision_state": "enroll"})
        await self._publish({**node, "maintenance": None}, "create", "start", request_id)
        await self._publish(node, "create", "end", request_id)
        return node

    async def delete(self, node: dict[str, Any], request_id: str) -> None:
        """DELETE /v1/nodes/{uuid}. Raises RequestError 409; 404: another request has deleted it meanwhile."""
        self._check_unlocked(node)
        await self._publish(node, "delete", "start", request_id)
        if self.get(node["uuid"]) is not node:
            raise RequestError(404, f"Node {node['uuid']} was deleted, and made anew.")
        if node["instance_uuid"] is not None:
            await self._publish(node, "delete", "error", request_id)
            raise RequestError(409, f"Node {node['uuid']} is associated with instance {node['instance_uuid']}.")
        del self.nodes[node["uuid"]]
        await self._publish(node, "delete", "end", request_id)

    async def patch(self, node: dict[str, Any], changes: Mapping[str, Any], request_id: str) -> None:
        """PATCH: the notification of the request comes first, true or not, as with Ironic (README)."""
        requested_target = {**node, **changes}
        await self._publish(requested_target, "update", "start", request_id)
        try:
            self._check_unlocked(node)
            self._check_instance(node, changes)
        except RequestError:
            await self._publish(requested_target, "update", "error", request_id)
            raise
        self._change(node, **changes)
        await self._publish(node, "update", "end", request_id)

    async def set_maintenance(self, node: dict[str, Any], on: bool, reason: str | None, request_id: str) -> None:
        """PUT and DELETE maintenance."""
        requested_target = {"maintenance": on, "maintenance_reason": reason if on else None}
        await self._publish({**node, **requested_target}, "maintenance_set", "start", request_id)
        self._change(node, **requested_target, **({} if on else {"fault": None}))
        await self._publish(node, "maintenance_set", "end", request_id)

    async def set_power(self, node: dict[str, Any], target: str, request_id: str) -> None:
        """PUT states/power."""
        self._check_unlocked(node)
        if self.behaviour.power_s or self.behaviour.power_fails:
            self._start(node, self._power(node, target, request_id))
        else:
            await self._power(node, target, request_id)

    async def _power(self, node: dict[str, Any], target: str, request_id: str) -> None:
        await self._publish(node, "power_set", "start", request_id, to_power=target)
        state = "power on" if target in REBOOTS else target
        if self.behaviour.power_s:
            await self._clock.sleep(self.behaviour.power_s / 2)  # taken up some time after it was accepted
            self._change(node, target_power_state=state, last_error=None)
            await self._clock.sleep(self.behaviour.power_s / 2)
        if self.behaviour.power_fails:
            error = f"Failed to set node power state to {target}."
            self._change(node, target_power_state=None, last_error=error)
            await self._publish(node, "power_set", "error", request_id, to_power=target)
            return
        self._change(node, power_state=state, target_power_state=None, last_error=None)
        await self._publish(node, "power_set", "end", request_id, to_power=target)

    async def lose_power(self, node: dict[str, Any]) -> None:
        """The BMC dies: Ironic's power sync puts the node into maintenance."""
        before = node["power_state"]
        self._change(node, power_state=None, maintenance=True, fault="power failure")
        await self._publish(node, "power_state_corrected", "success", self._request_id(), from_power=before)

    def provision(self, node: dict[str, Any], verb: str, request_id: str) -> None:
        """PUT states/provision: starts it. Raises RequestError 400, 409 or 503."""
        self._check_unlocked(node)
        state = node["provision_state"]
        if verb not in ALLOWED or state not in ALLOWED[verb]:
            raise RequestError(
                400,
                f"The requested action {verb!r} can not be performed on node {node['uuid']} while it is in {state!r}.",
            )
        if verb == "active" and node["maintenance"]:
            raise RequestError(
                400, f"The deploy operation can't be performed on node {node['uuid']} because it's in maintenance mode."
            )
        if len(self._tasks) >= MAX_TASKS:
            raise RequestError(503, "No free conductor workers available")
        steps = {
            "manage": self._manage,
            "provide": self._provide,
            "active": self._deploy,
            "rebuild": self._deploy,  # as a first deployment; what is on the node as instance_info stays
            "rescue": self._rescue,
            "unrescue": self._unrescue,
            "service": self._service,
            "deleted": self._undeploy,
        }
        self._start(node, steps[verb](node, request_id))

    def _start(self, node: dict[str, Any], steps: Coroutine[Any, Any, None]) -> None:
        """An action that takes time holds the node meanwhile."""
        node["reservation"] = "stand-in"
        task = asyncio.get_running_loop().create_task(self._hold(node, steps))
        self._tasks[node["uuid"]] = task
        task.add_done_callback(lambda _: self._tasks.pop(node["uuid"], None))

    async def stop(self) -> None:
        """Drop the action under way."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _hold(self, node: dict[str, Any], steps: Any) -> None:
        try:
            await steps
        finally:
            node["reservation"] = None

    async def _manage(self, node: dict[str, Any], request_id: str) -> None:
        if node["provision_state"] == "available":
            await self._move(node, "manageable", "success", "manage", request_id)
            return
        await self._move(node, "verifying", "start", "manage", request_id, target="manageable")
        await self._clock.sleep(self.behaviour.verify_s)
        if node["power_state"] is None:
            node["power_state"] = "power off"
        await self._move(node, "manageable", "end", "done", request_id)

    async def _provide(self, node: dict[str, Any], request_id: str) -> None:
        await self._move(node, "cleaning", "start", "provide", request_id, target="available")
        await self._clean(node, request_id)

    async def _clean(self, node: dict[str, Any], request_id: str) -> None:
        await self._clock.sleep(self.behaviour.clean_s)
        await self._move(node, "manageable" if node["retired"] else "available", "end", "done", request_id)

    async def _deploy(self, node: dict[str, Any], request_id: str) -> None:
        await self._move(node, "deploying", "start", "deploy", request_id, target="active")
        await self._clock.sleep(self.behaviour.deploy_s)
        if self._rng.random() < self.behaviour.deploy_fails:
            node["last_error"] = self.behaviour.failure
            self._remember(node, "deploying", str(node["last_error"]))
            await self._move(node, "deploy failed", "error", "fail", request_id, target="active")
            return
        node["power_state"] = "power on"
        await self._move(node, "active", "end", "done", request_id)

    def _remember(self, node: Mapping[str, Any], event_type: str, text: str) -> None:
        at = shapes.timestamp(self._clock.time())
        entry = {"created_at": at, "severity": "ERROR", "event_type": event_type, "event": text}
        self.history.setdefault(node["uuid"], []).append(entry)

    async def _rescue(self, node: dict[str, Any], request_id: str) -> None:
        if self.behaviour.rescue_fails:
            await self._move(node, "rescuing", "start", "rescue", request_id, target="rescue")
            await self._clock.sleep(self.behaviour.deploy_s)
            node["last_error"] = "Failed to rescue: the ramdisk does not boot"
            await self._move(node, "rescue failed", "error", "fail", request_id, target="rescue")
            return
        await self._pass_through(node, "rescuing", "rescue", "rescue", request_id)

    async def _unrescue(self, node: dict[str, Any], request_id: str) -> None:
        await self._pass_through(node, "unrescuing", "active", "unrescue", request_id)

    async def _service(self, node: dict[str, Any], request_id: str) -> None:
        await self._pass_through(node, "servicing", "active", "service", request_id)

    async def _pass_through(self, node: dict[str, Any], state: str, target: str, event: str, request_id: str) -> None:
        await self._move(node, state, "start", event, request_id, target=target)
        await self._clock.sleep(self.behaviour.deploy_s)
        await self._move(node, target, "end", "done", request_id)

    async def _undeploy(self, node: dict[str, Any], request_id: str) -> None:
        await self._move(node, "deleting", "start", "delete", request_id, target="available")
        await self._clock.sleep(self.behaviour.undeploy_s)
        node["instance_uuid"] = None
        node["instance_info"] = {}
        self.vifs.pop(node["uuid"], None)
        if self.behaviour.undeploy_fails:
            node["last_error"] = "Failed to tear down: the power supply is broken"
            await self._move(node, "error", "error", "fail", request_id, target="available")
            return
        node["power_state"] = "power off"
        node["last_error"] = None
        await self._move(node, "cleaning", "success", "clean", request_id, target="available")
        await self._clean(node, request_id)

    async def _move(
        self, node: dict[str, Any], state: str, status: str, event: str, request_id: str, *, target: str | None = None
    ) -> None:
        before = {
            "event": event,
            "previous_provision_state": node["provision_state"],
            "previous_target_provision_state": node["target_provision_state"],
        }
        now = shapes.timestamp(self._clock.time())
        self._change(node, provision_state=state, target_provision_state=target, provision_updated_at=now)
        await self._publish(node, "provision_set", status, request_id, **before)

    def _change(self, node: dict[str, Any], **changes: Any) -> None:
        node.update(changes)
        node["updated_at"] = shapes.timestamp(self._clock.time())

    def _check_unlocked(self, node: Mapping[str, Any]) -> None:
        if node["reservation"] is not None:
            raise RequestError(
                409,
                f"Node {node['uuid']} is locked by host {node['reservation']}, "
                "please retry after the current operation is completed.",
            )

    def _check_instance(self, node: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
        wanted = changes.get("instance_uuid")
        if wanted is None:
            return
        if node["instance_uuid"] not in (None, wanted):
            raise RequestError(409, f"Node {node['uuid']} is associated with instance {node['instance_uuid']}.")
        if any(other["instance_uuid"] == wanted and other is not node for other in self.nodes.values()):
            raise RequestError(409, f"Instance {wanted} is already associated with a node.")

    async def _publish(self, node: Mapping[str, Any], action: str, status: str, request_id: str, **extra: Any) -> None:
        self.version += 1  # every change has a notification
        if self._rng.random() < self.behaviour.lose:
            return
        now = self._clock.time()
        await self._announcer.publish(
            *shapes.notification(node, action, status, request_id=request_id, now=now, rng=self._rng, **extra)
        )

    def _request_id(self) -> str:
        return f"req-{uuid.UUID(int=self._rng.getrandbits(128), version=4)}"
