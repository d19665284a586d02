"""Moves in a world: what a scheduler would command cells to do with instances, and dead hosts that come back."""

from __future__ import annotations

import asyncio
import random

from msgspec.structs import replace

from bus.bus import API, Bus
from bus.contracts.actions import ActionAccepted, ActionKind, ActionRequest, CellAction
from bus.contracts.base import Message
from bus.contracts.build import HostsPage, HostsQuery
from bus.contracts.cell import InstanceSpec, Selection
from bus.contracts.drains import DrainAction, DrainCommand, DrainResult, DrainStart, DrainTarget
from bus.contracts.operations import AdminState, AdminStateSet, HostAdminState, SetAdminState
from bus.faults import RequestRefused, Transient
from bus.transport import BusError
from cell_conductor.state.desired_state import IN_OTHER_CELL
from cell_conductor.state.instance import Instance, Power, State
from cell_conductor.state.lease import LeaseState
from lab.simulation.load import RETRY_S
from lab.simulation.loop import Process
from lab.simulation.network import SimTransport
from lab.simulation.peer_watch import resources_of_flavor
from lab.simulation.plan import Order
from lab.simulation.widening import FORGETFUL, METAL, Widening
from lab.simulation.world import World

STEP_S = 10.0
ABROAD = 0.7  # the share of moves that name a host of another cell, where that is allowed
GOES_ABROAD = frozenset({ActionKind.UNSHELVE, ActionKind.MIGRATE, ActionKind.RESIZE})
MAX_HOSTS_PER_RUN = 3
FENCE = "fence"  # the verb of an order that fences a service's hosts
DRAIN = "drain"  # ... and of one that empties a host; every other verb is a ActionKind
DRAIN_STEP_S = 0.5
DRAIN_DEADLINE_S = 25.0
DRAIN_AT_ONCE = 2  # hosts have a few instances
SEEN_S = 20.0  # after this a silent service is suspected, and its instances are evacuated
DECISION_S = 3.0  # an answer to a decision is waited for so long
MAX_DECISION_TRIES = 20  # of a decision about a host that schedulers may not know
SIZES = ("m1.tiny", "m1.small", "m1.medium")


def _starts_again(instance: Instance | None, host: str, attempt: int) -> bool:
    """Whether this machine was not stopped before its host was: it is active there, or was to be evacuated."""
    if instance is None or instance.state is State.ACTIVE:
        is_here = instance is not None and (instance.host_uuid, instance.attempt) == (host, attempt)
        return is_here and instance is not None and instance.power is Power.RUNNING
    move = instance.action
    is_evacuated = move is not None and move.kind is ActionKind.EVACUATE and move.power is Power.RUNNING
    return is_evacuated and move is not None and (instance.source_host_uuid, move.source_attempt) == (host, attempt)


class Mover:
    """Chooses hosts and commands the cells, as a scheduler does."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._process = Process("mover")
        self._rng = random.Random(f"berth.sim.mover {world.plan.seed}")
        self._buses: dict[str, Bus] = {}
        self._starting: list[asyncio.Task[None]] = []  # guests of hosts that are no longer fenced
        self._to_enable: dict[str, dict[str, None]] = {}  # {service: its hosts that an operator has fenced}
        # {service}: of its hosts one operator decides at a time, so that none is enabled that another has just fenced.
        self._deciding: dict[str, asyncio.Lock] = {}

    async def open(self) -> None:
        """Connect to every cell's bus."""
        world = self._world
        for cell in (API, *world.cells):
            transport = SimTransport(world.brokers[cell], self._process, world.network_faults, world.event_log)
            self._buses[cell] = Bus(cell, transport, process="mover", clock=world.clock, rng=self._rng)
        await self._process.spawn(self._open(), "the mover opens")

    async def _open(self) -> None:
        for bus in self._buses.values():
            while True:
                try:
                    await bus.open()
                    break
                except BusError:
                    await asyncio.sleep(RETRY_S)

    def order(self, order: Order) -> asyncio.Task[None]:
        """Carry one order out."""
        plan = self._world.plan
        fence = self._fence_by_decision if plan.through_schedulers else self._fence
        drain = self._drain_by_schedulers if plan.drains_by_schedulers else self._drain
        work = {FENCE: fence, DRAIN: drain}.get(order.verb, self._move)(order)
        return self._process.spawn(work, f"order {order.verb} {order.uuid or order.service}")

    async def _move(self, order: Order) -> None:
        # The request's id is drawn with its order; the instance is chosen among those there are.
        there = [
            (cell, uuid)
            for cell, table in sorted(self._world.cells.items())
            for uuid, one in sorted(table.instances.items())
            if one.state in (State.ACTIVE, State.RESIZED, State.OFFLOADED)
            or (one.action is not None and one.phase not in IN_OTHER_CELL)
        ]
        if order.service == METAL:
            there = [(cell, uuid) for cell, uuid in there if self._is_on_metal(self._world.cells[cell].instances[uuid])]
        else:
            there = [(cell, uuid) for cell, uuid in there if self._may_move(cell, uuid)]
        there = [(cell, uuid) for cell, uuid in there if order.instance in ("", uuid)]
        if not there:
            return
        kind, plan = _kind_of(order), self._world.plan
        fitting = [
            (cell, uuid)
            for cell, uuid in there
            if (self._world.cells[cell].instances[uuid].state is State.RESIZED)
            is (kind in (ActionKind.CONFIRM, ActionKind.REVERT))
        ]
        if plan.actions_across_cells and kind is ActionKind.UNSHELVE:
            offloaded = self._world.cells
            fitting = [(cell, uuid) for cell, uuid in there if offloaded[cell].instances[uuid].state is State.OFFLOADED]
        chosen = fitting or there
        cell, uuid = chosen[order.host % len(chosen)]
        await self._ask(cell, self._world.cells[cell].instances[uuid], order, kind)

    def _may_move(self, cell: str, uuid: str) -> bool:
        """Machines of metal, those of others and those that no watch judges any more stay where they are."""
        world = self._world
        instance = world.cells[cell].instances.get(uuid)
        if instance is None:
            return False  # it was deleted and forgotten while a drain waited
        is_judged = world.plan.judges_machines or uuid not in world.taken_back
        return world.harm.own(uuid) and is_judged and not self._is_on_metal(instance)

    def _is_on_metal(self, instance: Instance) -> bool:
        ironic = self._world.ironic
        return ironic is not None and instance.host_uuid in ironic.pool.nodes

    async def _ask(self, cell: str, instance: Instance, order: Order, kind: ActionKind) -> None:
        rng = random.Random(f"berth.sim.move {order.uuid}")
        spec = instance.spec
        assert spec is not None
        if self._world.plan.through_schedulers:
            await self._ask_scheduler(cell, instance, order, kind, rng)
            return
        if kind is ActionKind.RESIZE:
            spec = replace(spec, flavor=rng.choice(SIZES))
        if kind is ActionKind.REBUILD:
            spec = replace(spec, image=f"image-{order.uuid[:4]}")
        request = CellAction(
            request_id=order.uuid,
            instance_uuid=instance.uuid,
            project_id=spec.project_id,
            kind=kind,
            spec=spec if kind in (ActionKind.RESIZE, ActionKind.REBUILD) else None,
            expected_flavor="" if kind is ActionKind.RESIZE else spec.flavor,
            selections=self._selections(cell, instance, spec, kind, rng),
            limits=self._world.plan.quota_of(spec.project_id),
            auto_confirm_s=rng.choice((0.0, 2.0, 10.0, 15.0)),
            offload=rng.random() < 0.5,
            soft=kind is ActionKind.REBOOT and int(order.uuid[:8], 16) % 2 == 0,
            fenced=order.verb == FENCE
            or (kind is ActionKind.EVACUATE and rng.random() < 0.7 and self._is_up(cell, instance)),
            step_timeout_s=STEP_S,
        )
        await self._send(cell, request)
        if rng.random() < 0.1:
            await self._send(cell, request)  # the same once more

    def _is_up(self, cell: str, instance: Instance) -> bool:
        """Whether the cell has to refuse the false statement that this host is off. While its service is silent, the
        statement is all the proof that there can be (seed 1795400627).
        """
        lease = self._world.cells[cell].leases.get(instance.current.service)
        return lease is not None and lease.state is LeaseState.UP

    async def _ask_scheduler(
        self, cell: str, instance: Instance, order: Order, kind: ActionKind, rng: random.Random
    ) -> None:
        """As a client requests it. It states no fence, and no host but one of another cell to go to."""
        assert instance.spec is not None
        host = None
        if self._world.plan.actions_across_cells and kind in GOES_ABROAD and rng.random() < ABROAD:
            host = self._host_abroad(cell, rng)
        request = ActionRequest(
            request_id=order.uuid,
            instance_uuid=instance.uuid,
            project_id=instance.spec.project_id,
            kind=kind,
            flavor=rng.choice(SIZES) if kind is ActionKind.RESIZE else None,
            image=f"image-{order.uuid[:4]}" if kind is ActionKind.REBUILD else None,
            auto_confirm_s=rng.choice((0.0, 2.0, 10.0, 15.0)),
            offload=rng.random() < 0.5,
            soft=kind is ActionKind.REBOOT and int(order.uuid[:8], 16) % 2 == 0,
            timeout_s=STEP_S,
            host=host,
        )
        self._world.event_log.record("order", f"{kind.value} {instance.uuid} {host or ''}")
        self._world.move_watch.sent[request.request_id] = instance.uuid
        for _ in range(1 + (rng.random() < 0.1)):
            if order.waits_s:
                await self._request(request, order)
            else:
                await self._publish(API, request)

    async def _request(self, request: ActionRequest, order: Order) -> None:
        """Until it is answered. One that its client gives up has an end only if it is on record."""
        waits_s = order.waits_s
        while True:
            try:
                await self._buses[API].request(request, ActionAccepted, timeout_s=waits_s)
            except (BusError, Transient):
                if order.gives_up:
                    self._world.move_watch.sent.pop(request.request_id, None)
                    return
                waits_s *= 2
            except RequestRefused:
                return  # an answer, and its event follows as without a deadline
            else:
                return

    def _host_abroad(self, cell: str, rng: random.Random) -> str | None:
        """The name of a host of another cell."""
        world = self._world
        services = [name for home, name in world.plan.services if home != cell and name not in world.dead]
        names = [host.plan.name for name in services for host in world.fleets[name].hosts]
        return rng.choice(names) if names else None

    def _selections(
        self, cell: str, instance: Instance, spec: InstanceSpec, kind: ActionKind, rng: random.Random
    ) -> tuple[Selection, ...]:
        """Hosts of the cell, with what the flavor requests, all of it at the root."""
        if kind not in (
            ActionKind.MIGRATE,
            ActionKind.LIVE_MIGRATE,
            ActionKind.RESIZE,
            ActionKind.EVACUATE,
            ActionKind.UNSHELVE,
        ):
            return ()
        if kind is ActionKind.UNSHELVE and instance.state is not State.OFFLOADED:
            return ()
        world = self._world
        amounts = resources_of_flavor(spec.flavor)
        found = []
        for service, _ in world.cell(cell).services:
            for host in world.fleets[service].hosts if service not in world.dead else ():
                root = world.placement.providers.get(host.plan.uuid)
                if root is None or host.plan.uuid in world.left or not host.enabled:
                    continue
                if kind is not ActionKind.RESIZE and host.plan.uuid == instance.host_uuid:
                    continue
                if all(name in root.inventories for name in amounts):
                    found.append(
                        Selection(
                            host_uuid=host.plan.uuid,
                            host=host.plan.name,
                            service=service,
                            allocations={host.plan.uuid: dict(amounts)},
                        )
                    )
        rng.shuffle(found)
        return tuple(found[:MAX_HOSTS_PER_RUN])

    async def _drain(self, order: Order) -> None:
        """An operator disables a host, has what runs there moved away, one after the other, and enables it again."""
        world, fleet = self._world, self._world.fleets[order.service]
        hosts = [one.plan.uuid for one in fleet.hosts]
        if order.service in world.dead or order.host >= len(hosts):
            return
        host, cell = hosts[order.host], world.cell_of(order.service).name
        world.event_log.record("order", f"drain {host}")
        fleet.disable(host, "it is drained")
        for uuid, instance in sorted(world.cells[cell].instances.items()):
            if instance.host_uuid == host and instance.state is State.ACTIVE and self._may_move(cell, uuid):
                live = instance.power is Power.RUNNING
                request = order.uuid[:24] + uuid[24:]
                kind = ActionKind.LIVE_MIGRATE if live else ActionKind.MIGRATE
                await self._ask(cell, instance, replace(order, uuid=request), kind)
                await asyncio.sleep(DRAIN_STEP_S)
        await asyncio.sleep(order.seconds)
        if order.service not in world.dead and fleet.host(host) is not None:
            fleet.enable(host)

    async def _drain_by_schedulers(self, order: Order) -> None:
        """An operator has the schedulers empty a host, and enables it again once that has ended, or after a while."""
        world, fleet = self._world, self._world.fleets[order.service]
        hosts = [host.plan.uuid for host in fleet.hosts]
        if order.service in world.dead or order.host >= len(hosts):
            return
        host = hosts[order.host]
        world.event_log.record("order", f"drain {host}")
        start = DrainStart(
            drain=order.uuid,
            name=host,
            target=DrainTarget.HOST,
            by="operator",
            at_once=DRAIN_AT_ONCE,
            deadline_s=DRAIN_DEADLINE_S,
            force=True,
        )
        if not await self._answered(start, DrainResult, MAX_DECISION_TRIES):
            return
        await asyncio.sleep(order.seconds)
        if order.host % 2:
            stop = DrainCommand(drain=order.uuid, action=DrainAction.STOP, by="operator")
            await self._answered(stop, DrainResult, None)
        async with self._deciding.setdefault(order.service, asyncio.Lock()):
            if order.service not in world.hosts_off and host not in self._to_enable.get(order.service, {}):
                await self._decide(host, world.cell_of(order.service).name, AdminState.ENABLED, MAX_DECISION_TRIES)

    async def _fence(self, order: Order) -> None:
        """The hosts of a service die and are fenced; what they had is evacuated; they come back later, off."""
        world, name = self._world, f"compute-{order.service}"
        if not self._can_be_off(order.service):
            return
        world.expected_down.add(name)
        world.kill(name)
        fleet, cell = world.fleets[order.service], world.cell_of(order.service).name
        world.move_watch.fenced.update(host.plan.uuid for host in fleet.hosts)
        for host, machine in list(fleet.machines()):
            if world.harm.own(machine.instance_uuid):
                fleet.put(host, replace(machine, runs=False))
        await asyncio.sleep(SEEN_S)
        hosts = {host.plan.uuid for host in fleet.hosts}
        for uuid, instance in sorted(world.cells[cell].instances.items()):
            if instance.host_uuid in hosts and instance.state is State.ACTIVE and self._may_move(cell, uuid):
                rng = random.Random(f"berth.sim.evacuation {order.uuid} {uuid}")
                request = order.uuid[:24] + uuid[24:]
                await self._ask(cell, instance, replace(order, uuid=request), ActionKind.EVACUATE)
                await asyncio.sleep(rng.uniform(0.0, 0.5))
        await asyncio.sleep(order.seconds)
        if order.service not in world.dead:
            world.expected_down.discard(name)
            if name not in world.lives:
                world.start(name)

    def _can_be_off(self, service: str) -> bool:
        """Whether an operator can know that a service's hosts are off: not those of two services of one name (seed
        1795411530).
        """
        world, name = self._world, f"compute-{service}"
        is_one = service not in world.dead and service not in world.duplicates
        return is_one and name not in world.expected_down and name in world.lives

    async def _fence_by_decision(self, order: Order) -> None:
        """The hosts of a service die, an operator confirms it, and they come back later, off, and are enabled again."""
        world, name = self._world, f"compute-{order.service}"
        if not self._can_be_off(order.service):
            return
        world.expected_down.add(name)
        world.hosts_off.add(order.service)
        world.kill(name)
        fleet, cell = world.fleets[order.service], world.cell_of(order.service).name
        hosts = [host.plan for host in fleet.hosts]
        world.move_watch.fenced.update(host.uuid for host in hosts)
        for host, machine in list(fleet.machines()):
            if world.harm.own(machine.instance_uuid):
                fleet.put(host, replace(machine, runs=False))
        decided = {}
        fenced = self._to_enable.setdefault(order.service, {})
        async with self._deciding.setdefault(order.service, asyncio.Lock()):
            for dead in hosts:
                if (decision := await self._decide(dead.uuid, cell, AdminState.FENCED, MAX_DECISION_TRIES)) is not None:
                    decided[dead.uuid] = decision.fence
                    fenced[dead.uuid] = None
        await asyncio.sleep(order.seconds)
        for uuid, fence in decided.items():
            await self._acknowledged(uuid, fence, order.service)
        if order.service in world.dead:
            world.move_watch.gone.update(decided)
            return
        world.hosts_off.discard(order.service)
        world.expected_down.discard(name)
        if name not in world.lives:
            world.start(name)
        await asyncio.sleep(random.Random(f"berth.sim.enabled {order.uuid}").uniform(0.0, 5.0))
        for host in list(fenced):
            if order.service in world.hosts_off:  # they have died again: who fences them enables them (seed 1795407741)
                return
            fenced.pop(host, None)
            await self._decide(host, cell, AdminState.ENABLED, None)
        world.event_log.record("order", f"fenced hosts of {cell} {order.service} are enabled")
        starting = self._resume_machines(order.service, cell, set(decided))
        self._starting.append(self._process.spawn(starting, f"the guests of {order.service} start"))

    async def _resume_machines(self, service: str, cell: str, hosts: set[str]) -> None:
        """Once its fence is lifted, a host starts the machines that it still has, as hypervisors do after a restart:
        those that its cell has given up are gone by then.
        """
        world, table = self._world, self._world.cells[cell]
        if FORGETFUL & {Widening(one) for one in world.plan.widenings}:
            return  # a record from before may have a machine here that has left since
        while waits := hosts & table.fenced.keys():
            evacuated = [one for one in table.instances.values() if one.source_host_uuid in waits]
            if service in world.hosts_off | world.dead or any(one.current.service in world.dead for one in evacuated):
                return
            await asyncio.sleep(RETRY_S)
        fleet = world.fleets[service]
        for host, machine in list(fleet.machines()):
            instance = table.instances.get(machine.instance_uuid)
            if (
                host in hosts
                and machine.complete
                and not machine.runs
                and _starts_again(instance, host, machine.attempt)
            ):
                world.event_log.record("order", f"{machine.instance_uuid} starts again on {host}")
                fleet.put(host, replace(machine, runs=True))

    async def _decide(self, host: str, cell: str, state: AdminState, tries: int | None) -> HostAdminState | None:
        """An operator decides, who knows that the host is off. tries: at most; None: until it is decided.

        A fence is ended without force, by its cell: force is for a cell that is gone for good, and cells are back here.
        """
        force = state is AdminState.FENCED
        command = SetAdminState(host=host, state=state, reason="dead", by="operator", force=force)
        answer = await self._answered(command, AdminStateSet, tries)
        if answer is None:  # its operator knows the cell of a host that was never announced
            command = replace(command, cell=cell)
            answer = await self._answered(command, AdminStateSet, tries)
        return answer.host if isinstance(answer, AdminStateSet) else None

    async def _acknowledged(self, host: str, fence: int, service: str) -> None:
        """An operator leaves a host off until its cell has acknowledged the fence (seed 1795360866: it built there).

        A decision that the schedulers' restored record does not have is made again.
        """
        unknown = 0
        while service not in self._world.dead:
            page = await self._answered(HostsQuery(), HostsPage, 1)
            if isinstance(page, HostsPage):
                admin = next((one.admin for one in page.hosts if one.uuid == host), None)
                is_known = admin is not None and admin.fence >= fence
                if is_known and admin is not None and admin.is_fence_acknowledged:
                    return
                unknown = 0 if is_known else unknown + 1
            if unknown > MAX_DECISION_TRIES:
                cell = self._world.cell_of(service).name
                again = await self._decide(host, cell, AdminState.FENCED, 1)
                unknown, fence = (0, again.fence) if again is not None else (unknown, fence)
            await asyncio.sleep(RETRY_S)

    async def _answered(self, command: Message, reply: type[Message], tries: int | None) -> Message | None:
        """The reply of a scheduler, once it has done it; a refusal may be too early. tries: at most; None: any number.

        None: no scheduler has done it.
        """
        bus, tried = self._buses[API], 0
        while tries is None or tried < tries:
            tried += 1
            try:
                return await bus.request(command, reply, timeout_s=DECISION_S)
            except (BusError, Transient, RequestRefused):
                await asyncio.sleep(RETRY_S)
        return None

    async def _send(self, cell: str, request: CellAction) -> None:
        self._world.event_log.record("order", f"{request.kind.value} {request.instance_uuid}")
        self._world.move_watch.sent[request.request_id] = request.instance_uuid
        await self._publish(cell, request)

    async def _publish(self, cell: str, message: Message) -> None:
        while True:
            try:
                await self._buses[cell].publish(message, cause="mover")
                return
            except BusError:
                await asyncio.sleep(RETRY_S)


def _kind_of(order: Order) -> ActionKind:
    """A third of the orders to start or stop reboot instead, by their uuid: the draws of a seed stay as they are."""
    kind = ActionKind(order.verb)
    is_power = kind in (ActionKind.START, ActionKind.STOP)
    return ActionKind.REBOOT if is_power and int(order.uuid[:8], 16) % 3 == 0 else kind
