"""The load on a world: a client that never gives up, and the planned faults."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from msgspec.structs import replace

from bus.bus import API, Bus
from bus.contracts.base import Message
from bus.contracts.build import BuildAccepted, BuildRequest, DeleteRequest, member_uuids
from bus.contracts.operations import EvacuationPolicy
from bus.faults import RequestRefused, Transient
from bus.transport import BusError
from lab.simulation.loop import Process
from lab.simulation.network import REPAIR_S, SimTransport
from lab.simulation.plan import MAX_FAULT_S, Action, FaultEvent, FaultType, Order
from lab.simulation.world import World

ANSWER_S = 3.0  # an answer to a decision is waited for so long
RETRY_S = 0.3  # a client whose publish failed publishes again after this
ACCEPTED_POLL_S = 0.1
ACCEPTED_WAIT_S = 30.0  # a client deletes what it knows to be accepted, or after this long without a word


def policy_of(uuid: str) -> EvacuationPolicy | None:
    """The policy for an instance whose host is fenced, in a run where hosts are."""
    policies: tuple[EvacuationPolicy | None, ...] = (*EvacuationPolicy, EvacuationPolicy.RESTART, None)
    return policies[random.Random(f"berth.sim.policy {uuid}").randrange(len(policies))]


def request_of(order: Order) -> BuildRequest:
    """The request that an order is carried out by."""
    return BuildRequest(
        instance_uuid=order.uuid,
        flavor=order.flavor,
        project_id=order.project,
        max_attempts=order.max_attempts,
        server_group=order.group,
        different_host=order.apart_from,
        same_host=order.together_with,
        count=order.count,
        min_count=order.min_count,
    )


class Client:
    """Publishes the orders, until the broker confirms them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._process = Process("client")
        transport = SimTransport(world.brokers[API], self._process, world.network_faults, world.event_log)
        rng = random.Random(f"berth.sim.client {world.plan.seed}")
        self._bus = Bus(API, transport, process="client", clock=world.clock, rng=rng)
        self.confirmed: dict[str, None] = {}
        self.unanswered: dict[str, None] = {}  # builds that their client has given up: they may be on record
        self.deleted: dict[str, None] = {}
        self.flavors: dict[str, str] = {}
        self._projects = {
            uuid: order.project
            for order in world.plan.orders
            if order.action is Action.BUILD
            for uuid in member_uuids(request_of(order))
        }
        self._deleting: dict[str, asyncio.Task[None]] = {}

    async def open(self) -> None:
        """Connect."""
        await self._process.spawn(self._open(), "client opens")

    def order(self, order: Order) -> asyncio.Task[None]:
        """Carry one order out, in the client's own process."""
        return self._process.spawn(self._carry_out(order), f"order {order.action} {order.uuid}")

    def delete(self, uuid: str) -> None:
        """This instance is to be deleted; requested once."""
        if uuid in self._deleting:
            return
        order = Order(at=0.0, action=Action.DELETE, uuid=uuid, project=self._projects[uuid])
        self._deleting[uuid] = self.order(order)

    @property
    def busy(self) -> list[asyncio.Task[None]]:
        """Deletes that are still to be requested."""
        return [task for task in self._deleting.values() if not task.done()]

    async def until_answered(self, message: Message, reply: type[Message]) -> None:
        """Request this until a scheduler has done it; a refusal may be too early."""
        await self._process.spawn(self._until_answered(message, reply), "a decision")

    async def _until_answered(self, message: Message, reply: type[Message]) -> None:
        while True:
            try:
                await self._bus.request(message, reply, timeout_s=ANSWER_S)
            except (BusError, Transient, RequestRefused):
                await asyncio.sleep(ANSWER_S / 3)
            else:
                return

    async def publish(self, message: Message) -> None:
        """An operator publishes on the API bus."""
        await self._process.spawn(self._publish_until_taken(message, "operator"), "the operator publishes")

    async def publish_batch(self, messages: Sequence[Message]) -> None:
        """The same of several messages that travel together."""
        await self._process.spawn(self._publish_batch_until_taken(messages), "the operator publishes")

    async def _publish_batch_until_taken(self, messages: Sequence[Message]) -> None:
        while True:
            try:
                await self._bus.publish_all([(message, "operator") for message in messages])
                return
            except BusError:
                await asyncio.sleep(RETRY_S)

    async def _open(self) -> None:
        while True:
            try:
                await self._bus.open()
                return
            except BusError:
                await asyncio.sleep(RETRY_S)

    async def _carry_out(self, order: Order) -> None:
        if order.action is Action.DELETE:
            if order.uuid not in self._projects:
                return  # its build was cut out of the plan
            await self._on_accepted(order.uuid)
            self._world.harm.delete(order.uuid)
            self._world.gang_watch.deleted(order.uuid)
            if await self._send(DeleteRequest(instance_uuid=order.uuid, project_id=order.project), order):
                self.deleted[order.uuid] = None
            return
        policy = policy_of(order.uuid) if self._world.plan.through_schedulers else None
        request = replace(request_of(order), on_host_failure=policy)
        members = member_uuids(request)
        if len(members) > 1:
            self._world.gang_watch.requested(members, request.min_count or len(members))
        for uuid in members:
            self.flavors[uuid] = order.flavor
            self._projects[uuid] = order.project
            self._world.peer_watch.requested(replace(order, uuid=uuid))
            self._world.harm.requested[uuid] = None
        answered = await self._send(request, order)
        (self.confirmed if answered else self.unanswered).update(dict.fromkeys(members))

    async def _send(self, message: Message, order: Order) -> bool:
        """Publish this, or request it with the order's deadline. False: its client has given it up, and it may be
        carried out.
        """
        if not order.waits_s:
            await self._publish_until_taken(message, order.uuid)
            return True
        waits_s = order.waits_s
        while True:
            try:
                await self._bus.request(message, BuildAccepted, timeout_s=waits_s, cause=order.uuid)
            except (BusError, Transient):
                if order.gives_up:
                    return False
                waits_s *= 2  # a delete of what is not on record is answered after its queue's retries
            except RequestRefused:
                return True  # an answer, and its event follows as without a deadline
            else:
                return True

    async def _on_accepted(self, uuid: str) -> None:
        """No client deletes what was never accepted; a delete that comes first is answered `unknown`, correctly."""
        until = asyncio.get_running_loop().time() + ACCEPTED_WAIT_S
        listener = self._world.listener
        while uuid not in listener.accepted and uuid not in listener.terminals:
            if uuid in self.confirmed | self.unanswered and asyncio.get_running_loop().time() > until:
                return
            await asyncio.sleep(ACCEPTED_POLL_S)

    async def _publish_until_taken(self, message: Message, cause: str) -> None:
        while True:
            try:
                await self._bus.publish(message, cause=cause)
                return
            except BusError:
                await asyncio.sleep(RETRY_S)


class Chaos:
    """Carries out the planned faults, and repairs what they broke."""

    def __init__(self, world: World) -> None:
        self._world = world

    def inject(self, fault: FaultEvent) -> asyncio.Task[None]:
        """One fault, from its beginning to its end."""
        self._world.event_log.record("fault", f"{fault.kind} {fault.target} {fault.seconds:.3f}")
        what = {
            FaultType.CRASH: self._crash,
            FaultType.PAUSE: self._pause,
            FaultType.SLOW: self._slow,
            FaultType.CUT: self._cut,
            FaultType.BROKER: self._broker,
            FaultType.DATABASE: self._database,
            FaultType.IRONIC: self._ironic,
            FaultType.FULL: self._full,
            FaultType.CLOCK: self._clock,
            FaultType.MUTE: self._mute,
        }[fault.kind]
        return asyncio.create_task(what(fault.target, fault.seconds), name=f"fault {fault.kind} {fault.target}")

    def one_last_change_unannounced(self) -> None:
        """At rest: every scheduler is cut off while a host changes, and no other change follows to show a gap."""
        for name, life in self._world.lives.items():
            if name.startswith("scheduler"):
                for transport in life.transports:
                    transport.cut(REPAIR_S)
        for service, fleet in self._world.fleets.items():
            for host in fleet.hosts if service not in self._world.dead else ():
                (fleet.disable if host.enabled else fleet.enable)(host.plan.uuid)
                return

    async def _crash(self, name: str, seconds: float) -> None:
        world = self._world
        if name in world.expected_down or name not in world.lives:
            return
        world.kill(name)
        await asyncio.sleep(seconds)
        if name not in world.lives and name not in world.expected_down:
            world.start(name)

    async def _cut(self, name: str, seconds: float) -> None:
        life = self._world.lives.get(name)
        for transport in life.transports if life else ():
            transport.cut(min(seconds, REPAIR_S))

    async def _broker(self, name: str, seconds: float) -> None:
        broker = self._world.brokers[name]
        if broker.up:
            broker.stop()
            await asyncio.sleep(seconds)
            broker.start()

    async def _database(self, name: str, seconds: float) -> None:
        up = self._world.databases.fall(name)
        await asyncio.sleep(seconds)
        up()

    async def _ironic(self, _: str, seconds: float) -> None:
        ironic = self._world.ironic
        assert ironic is not None
        ironic.unavailable += 1
        await asyncio.sleep(seconds)
        ironic.unavailable -= 1

    async def _full(self, name: str, seconds: float) -> None:
        empty = self._world.brokers[name].fill(self._world.rng)
        await asyncio.sleep(seconds)
        empty()

    async def _clock(self, name: str, seconds: float) -> None:
        life = self._world.lives.get(name)
        if life is not None:
            life.clock.skew_s = self._world.plan.skew_s * (2 * seconds / MAX_FAULT_S - 1)

    async def _mute(self, name: str, seconds: float) -> None:
        life = self._world.lives.get(name)
        for transport in life.transports if life else ():
            transport.muted = True
        await asyncio.sleep(seconds)
        for transport in life.transports if life else ():
            transport.muted = False

    async def _pause(self, name: str, seconds: float) -> None:
        life = self._world.lives.get(name)
        if life is not None and not life.process.paused:
            life.process.paused = True
            await asyncio.sleep(seconds)
            life.process.resume()

    async def _slow(self, name: str, seconds: float) -> None:
        life = self._world.lives.get(name)
        for transport in life.transports if life else ():
            transport.slow_s = 0.2
        await asyncio.sleep(seconds)
        for transport in life.transports if life else ():
            transport.slow_s = 0.0
