"""Ironic in the simulated world: a process of its own with nodes, a REST API, and notifications that get lost."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import httpx

from bus.clock import Clock, new_uuid
from bus.transport import Outgoing, PublishRefused, QueueMissing
from compute_agent.driver import Build, ChangeFault, ChangeOrder, ChangeResult
from compute_agent.drivers.ironic.driver import IronicDriver
from compute_sim.ironic_stand_in import Behaviour, IronicStandIn
from compute_sim.ironic_stand_in.node_pool import NodePool, RequestError
from lab.simulation.event_log import EventLog
from lab.simulation.harm_watch import HarmWatch
from lab.simulation.loop import Process
from lab.simulation.network import Broker, NetworkFaults
from lab.simulation.plan import Order
from lab.simulation.watch import Breach

EXCHANGE = "ironic"
URL = "http://ironic"
CLASSES = ("baremetal-gold", "baremetal-silver")
# A notification that was sent twice comes again within this.
DOUBLE_S = 5.0
# An operator who meets a node that is on its way, or an Ironic that is unavailable, tries again after this; and gives
# up then.
RETRY_S = 0.7
TRIES = 40
BLINKS, BLINK_S = 8, 0.003
AGAIN = 4
# Verbs of lab/simulation/widening.py.
OF_OTHERS = frozenset(
    {"take", "ambush", "free", "set", "clear", "swap", "undeploy", "again", "rescue", "service", "rebuild", "fault"}
)


OF_USED = frozenset({"clear", "swap", "undeploy", "rescue", "service", "rebuild", "fault"})


class FaultyNotifications:
    """Ironic's way to its exchange: fire and forget, so what a fault takes is gone."""

    def __init__(self, broker: Broker, network_faults: NetworkFaults) -> None:
        self._broker = broker
        self._network_faults = network_faults

    async def open(self) -> None:
        """Declare the exchange as Ironic does."""
        self._broker.declare_exchange(EXCHANGE)

    async def publish(self, routing_key: str, body: bytes) -> None:
        """Publish one notification, or not."""
        network_faults = self._network_faults
        message = Outgoing(exchange=EXCHANGE, routing_key=routing_key, body=body, mandatory=False)
        if network_faults.strikes(network_faults.rates.notice_lost):
            return
        self._send(network_faults.latency(), message)
        if network_faults.strikes(network_faults.rates.duplicate):
            self._send(network_faults.between(0.0, DOUBLE_S), message)

    async def close(self) -> None:
        """Nothing to close."""

    def _send(self, later_s: float, message: Outgoing) -> None:
        asyncio.get_running_loop().call_later(later_s, self._arrive, message, context=self._broker.context)

    def _arrive(self, message: Outgoing) -> None:
        if not self._broker.up:
            return
        try:
            self._broker.route(message)
        except (PublishRefused, QueueMissing):
            return


# The actions of operators on a node that has an instance: {verb: (states it may be in, states on the way, where it
# ends)}.
WAYS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "rescue": (("active",), ("rescuing", "rescue wait"), "rescue"),
    "unrescue": (("rescue",), ("unrescuing",), "active"),
    "service": (("active",), ("servicing", "service wait"), "active"),
    "rebuild": (("active",), ("deploying", "wait call-back"), "active"),
}


class WatchedNodePool(NodePool):
    """A node pool that reports when a machine is deployed on a node, and when a node changes its instance."""

    deployed: Callable[[str, str], None]
    power_failed: dict[str, float]  # when a power action on a node has failed last
    changed_hands: Callable[[str, str | None, str | None], None] = staticmethod(lambda _node, _before, _after: None)

    def occupy(self, instances: Sequence[str], classes: tuple[str, ...]) -> None:
        """Nodes that others have had for long."""
        for number, instance in enumerate(instances):
            grade = classes[number % len(classes)]
            self.add(provision_state="active", power_state="power on", resource_class=grade, instance_uuid=instance)

    def fail_power(self, node: dict[str, Any], at: float) -> None:
        """An operator's power action on it fails. Its error stays until Ironic takes the next one up."""
        self._check_unlocked(node)
        self.power_failed[node["uuid"]] = at
        self._change(node, last_error="Failed to set node power state: the BMC does not answer")

    def walk(self, node: dict[str, Any], verb: str, request_id: str, seconds: float) -> None:
        """An operator's act on a node with an instance; the node is locked until it has ended."""
        self._check_unlocked(node)
        begins, between, ends = WAYS[verb]
        if node["provision_state"] not in begins:
            raise RequestError(400, f"{verb} can not be performed in {node['provision_state']!r}")
        node["reservation"] = "operator"
        steps = self._walk(node, (*between, ends), request_id, seconds / len(between))
        task = asyncio.get_running_loop().create_task(self._hold(node, steps))
        self._tasks[node["uuid"]] = task
        task.add_done_callback(lambda _: self._tasks.pop(node["uuid"], None))

    async def _walk(self, node: dict[str, Any], states: Sequence[str], request_id: str, each_s: float) -> None:
        for state in states[:-1]:
            await self._move(node, state, "start", "operator", request_id, target=states[-1])
            await self._clock.sleep(each_s)
        await self._move(node, states[-1], "end", "done", request_id)

    def _change(self, node: dict[str, Any], **changes: Any) -> None:
        before = node["instance_uuid"]
        super()._change(node, **changes)
        if node["instance_uuid"] != before or changes.get("provision_state") == "cleaning":
            # Undeploying takes the instance away without a notification here.
            self.changed_hands(node["uuid"], before, node["instance_uuid"])
        # An operator who clears `instance_uuid` during the deployment leaves the mark (seed 92864).
        instance = node["instance_uuid"] or node["instance_info"].get("berth", {}).get("instance")
        if changes.get("provision_state") == "active" and instance:
            self.deployed(node["uuid"], instance)


class SimIronic:
    """The process: it never dies, but it can be away."""

    def __init__(
        self,
        broker: Broker,
        network_faults: NetworkFaults,
        event_log: EventLog,
        clock: Clock,
        *,
        seed: int,
        behaviour: Behaviour,
    ) -> None:
        rng = random.Random(f"berth.sim.ironic {seed}")
        self.process = Process("ironic")
        self.unavailable = 0
        self._event_log = event_log
        self._notifications = FaultyNotifications(broker, network_faults)
        self._stand_in = IronicStandIn(self._notifications, clock=clock, rng=rng, behaviour=behaviour)
        self._stand_in.pool = self.pool = WatchedNodePool(
            self._notifications, clock=clock, rng=rng, behaviour=behaviour
        )
        self.pool.power_failed = {}
        self._app = httpx.ASGITransport(self._stand_in.app(), raise_app_exceptions=False)
        self._rng = rng
        self._ambushes: list[str] = []  # instances of others that take the next free node that is looked at
        self._harm: HarmWatch | None = None
        broker.declare_exchange(EXCHANGE)

    def watch_requests(
        self, harm: HarmWatch, attempt_on: Callable[[str, str], int], fail: Callable[[Breach], None]
    ) -> None:
        """Check every request of our processes from now on; `fail` takes what breaks an invariant."""
        self._harm, self._attempt_on, self._fail = harm, attempt_on, fail

    def check_power_failure(self, node: str, began: float) -> None:
        """A power order fails when Ironic has failed in it, and not by an error from before it."""
        failed = self.pool.power_failed.get(node, -math.inf)
        if failed < began:
            self._fail(
                Breach("power_order_failed_by_itself", f"{node}: ordered at {began:g}, failed last at {failed:g}")
            )

    async def answer(self, request: httpx.Request, process: str) -> httpx.Response:
        """One request, carried out in Ironic's own process whatever becomes of its client."""
        return await asyncio.shield(self.process.spawn(self._answer(request, process, JOB.get()), "ironic answers"))

    async def _answer(self, request: httpx.Request, process: str, job: str) -> httpx.Response:
        node = self.pool.nodes.get(request.url.path.removeprefix("/v1/nodes/").partition("/")[0])
        before = dict(node) if node is not None else None
        response = await self._app.handle_async_request(request)
        content = await response.aread()
        self._event_log.record("ironic", f"{request.method} {request.url.raw_path.decode()} {response.status_code}")
        if response.is_success:
            self._look(request, process, job, before, content)
        return httpx.Response(response.status_code, headers=response.headers, content=content)

    def _look(
        self, request: httpx.Request, process: str, job: str, before: dict[str, Any] | None, content: bytes
    ) -> None:
        harm = self._harm
        if harm is None:
            return
        if request.method == "GET":
            answer = json.loads(content)
            shown = answer.get("nodes", [answer])
            for node in [one for one in shown if "provision_state" in one]:  # a ping requests a uuid alone
                harm.looked(process, node, asyncio.get_running_loop().time(), job)
            if before is not None and free(before) and process.startswith("compute") and self._ambushes:
                self._take(self.pool.nodes[before["uuid"]], self._ambushes.pop(0))
            return
        if before is not None:
            owner = before["instance_uuid"]
            attempt = self._attempt_on(before["uuid"], owner) if owner else None
            try:
                harm.acted(process, request.method, before, attempt or None, request.content, job=job)
            except Breach as breach:
                self._fail(breach)

    def _take(self, node: dict[str, Any], instance: str) -> None:
        """Another tenant takes a node before any other client can."""
        self.process.spawn(self._theirs(node, instance), "others take a node")

    async def _theirs(self, node: dict[str, Any], instance: str) -> None:
        request_id = f"req-{new_uuid(self._rng)}"
        try:
            await self.pool.patch(node, {"instance_uuid": instance}, request_id)
            self.pool.provision(node, "active", request_id)
        except RequestError as refused:
            self._event_log.record("refused", f"ironic take {node['uuid']} {refused.status}")

    # --- what its operators do

    def flip(self, order: Order) -> asyncio.Task[None]:
        """An operator's act on one of the nodes, in Ironic's own process."""
        return self.process.spawn(self._flip(order), f"order ironic {order.verb}")

    async def _flip(self, order: Order) -> None:
        verb, number = order.verb, order.host
        request_id = f"req-{new_uuid(self._rng)}"
        if verb == "add":
            grade = CLASSES[number % len(CLASSES)]
            node = await self.pool.create({"resource_class": grade, "name": f"late-{number}"}, request_id)
            await self._go_through(node, ("manage", "provide"), request_id)
            return
        nodes = list(self.pool.nodes.values())
        if not nodes:
            return
        node = nodes[number % len(nodes)]
        self._event_log.record("order", f"ironic {verb} {node['uuid']} {node['provision_state']}")
        try:
            if verb in OF_OTHERS:
                await self._act_of_others(order, node, request_id)
            else:
                await self._act(verb, node, number, request_id)
        except RequestError as refused:
            self._event_log.record("refused", f"ironic {verb} {node['uuid']} {refused.status}")

    async def _act(self, verb: str, node: dict[str, Any], number: int, request_id: str) -> None:
        pool = self.pool
        match verb:
            case "maintain" | "return":
                await pool.set_maintenance(node, verb == "maintain", "by its operator", request_id)
            case "blink":  # faster than a read
                for turn in range(BLINKS):
                    await pool.set_maintenance(node, turn % 2 == 0, "by its operator", request_id)
                    await asyncio.sleep(self._rng.uniform(0.0, BLINK_S))
            case "power":
                await pool.set_power(node, ("power off", "power on")[number % 2], request_id)
            case "traits":
                await pool.patch(node, {"traits": [f"CUSTOM_T{number % 3}"]}, request_id)
            case "class":
                await pool.patch(node, {"resource_class": CLASSES[number % 2]}, request_id)
            case "remove":
                await pool.delete(node, request_id)
            case _:  # taken out of use, and cleaned before it is put back
                await self._go_through(node, ("manage", "provide"), request_id)

    async def _act_of_others(self, order: Order, node: dict[str, Any], request_id: str) -> None:
        """On a node that has an instance, if there is one; tenants take what is free."""
        pool, verb = self.pool, order.verb
        used = [one for one in pool.nodes.values() if one["instance_uuid"] is not None]
        if verb in OF_USED and used:
            node = used[order.host % len(used)]
        match verb:
            case "take" | "ambush" | "free":
                await self._of_tenants(order, request_id)
            case "set":
                await self._set_for_a_while(order, node, request_id)
            case "clear" | "swap":
                await pool.patch(node, {"instance_uuid": None}, request_id)
                if verb == "swap":
                    await pool.patch(node, {"instance_uuid": order.uuid}, request_id)
            case "undeploy":
                await self._go_through(node, ("deleted",), request_id)
            case "fault":
                pool.fail_power(node, asyncio.get_running_loop().time())
            case "again":
                for _ in range(AGAIN):  # faster than it can be read
                    kept = {name: node[name] for name in ("uuid", "name", "resource_class", "traits")}
                    await pool.delete(node, request_id)
                    await asyncio.sleep(self._rng.uniform(0.0, BLINK_S))
                    node = await pool.create(kept, request_id)
                    await asyncio.sleep(self._rng.uniform(0.0, BLINK_S))
                await self._go_through(node, ("manage", "provide"), request_id)
            case _:
                pool.walk(node, verb, request_id, order.seconds)
                if verb == "rescue":
                    await self._back_from_rescue(node, request_id, order.seconds)

    async def _of_tenants(self, order: Order, request_id: str) -> None:
        """Another tenant takes a node, now or as soon as one of ours looks at it, or frees it."""
        nodes = list(self.pool.nodes.values())
        if order.verb == "ambush":
            self._ambushes.append(order.uuid)
        elif order.verb == "take":
            if there := [one for one in nodes if free(one)]:
                await self._theirs(there[order.host % len(there)], order.uuid)
        else:
            for one in nodes:
                if one["instance_uuid"] == order.uuid:
                    await self._go_through(one, ("deleted",), request_id)

    async def _set_for_a_while(self, order: Order, node: dict[str, Any], request_id: str) -> None:
        """An operator writes an instance on a node that has none, and takes it away again."""
        if node["instance_uuid"] is not None:
            return
        await self.pool.patch(node, {"instance_uuid": order.uuid}, request_id)
        await asyncio.sleep(order.seconds)
        known = self.pool.nodes.get(node["uuid"])
        if known is not None and known["instance_uuid"] == order.uuid:
            await self.pool.patch(known, {"instance_uuid": None}, request_id)

    async def _back_from_rescue(self, node: dict[str, Any], request_id: str, seconds: float) -> None:
        """Its operator has looked at it: back to what it was."""
        await asyncio.sleep(2 * seconds)
        for _ in range(TRIES):
            if node["provision_state"] not in ("rescuing", "rescue wait", "rescue"):
                return
            try:
                self.pool.walk(node, "unrescue", request_id, RETRY_S)
                return
            except RequestError:
                await asyncio.sleep(RETRY_S)

    async def _go_through(self, node: dict[str, Any], verbs: tuple[str, ...], request_id: str) -> None:
        for verb in verbs:
            for _ in range(TRIES):
                try:
                    self.pool.provision(node, verb, request_id)
                    break
                except RequestError as refused:
                    if refused.status != httpx.codes.CONFLICT:
                        raise
                    await asyncio.sleep(RETRY_S)


# Which build or destruction of a service requests something of Ironic: it acts upon what it has seen itself.
JOB: ContextVar[str] = ContextVar("job", default="")


class WatchedIronicDriver(IronicDriver):
    """The driver, whose requests to Ironic name the job that they belong to. failed: a power order has, by its answer,
    on this node, and began then.
    """

    failed: Callable[[str, float], None]

    async def spawn(self, build: Build) -> str:
        """Build."""
        before = JOB.set(f"spawn {build.host_uuid} {build.spec.instance_uuid} {build.attempt}")
        try:
            return await super().spawn(build)
        finally:
            JOB.reset(before)

    async def destroy(self, host_uuid: str, instance_uuid: str, attempt: int, database_id: str | None) -> None:
        """Destroy."""
        before = JOB.set(f"destroy {host_uuid} {instance_uuid} {attempt}")
        try:
            await super().destroy(host_uuid, instance_uuid, attempt, database_id)
        finally:
            JOB.reset(before)

    async def change(self, change: ChangeOrder) -> ChangeResult:
        """Change it."""
        began = asyncio.get_running_loop().time()
        try:
            return await super().change(change)
        except ChangeFault as fault:
            if fault.code == "node.power_failed":
                self.failed(change.host_uuid, began)
            raise


class IronicTransport(httpx.AsyncBaseTransport):
    """One client's way to Ironic: slow, lost before or after Ironic has the request, or answered with an error."""

    def __init__(self, ironic: SimIronic, process: Process, network_faults: NetworkFaults) -> None:
        self._ironic = ironic
        self._process = process
        self._network_faults = network_faults
        self.answered: Callable[[float, bytes], None] = lambda _at, _body: None
        self.missing: Callable[[float, str], None] = lambda _at, _node: None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send it, wait, and answer."""
        network_faults, rates = self._network_faults, self._network_faults.rates
        await network_faults.maybe_crash(self._process.name)
        await asyncio.sleep(network_faults.latency())
        if self._ironic.unavailable or network_faults.strikes(rates.ironic_lost):
            raise httpx.ConnectError("Ironic is unavailable")
        if network_faults.strikes(rates.ironic_busy):
            return httpx.Response(503, json={"error_message": "busy"})
        response = await self._ironic.answer(request, self._process.name)
        at = asyncio.get_running_loop().time()
        await network_faults.maybe_crash(self._process.name)
        await asyncio.sleep(network_faults.latency())
        if network_faults.strikes(rates.ironic_lost):
            raise httpx.ReadTimeout("the answer was lost")
        if request.method == "GET" and response.is_success:
            self.answered(at, response.content)
        if request.method == "GET" and response.status_code == httpx.codes.NOT_FOUND:
            self.missing(at, request.url.path.removeprefix("/v1/nodes/"))
        return response


def free(node: Mapping[str, Any]) -> bool:
    """Whether Ironic shows the node as one that may be placed on (written independently of ironic_sync)."""
    return (
        node["provision_state"] == "available"
        and not node["maintenance"]
        and node["instance_uuid"] is None
        and node["power_state"] != "error"
    )
