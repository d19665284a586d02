"""Operators of a world: they change hosts and services, empty them, and take them away for good."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from bus.contracts.build import BuildState
from bus.contracts.operations import Losses
from bus.contracts.placement import InventoryUpdate
from cell_conductor.state.instance import State
from cell_conductor.state.unknown_machine import UnknownMachineKind
from cell_conductor.store.keyed_tables import DESTROY, PROTECT, DecidedMachine
from cell_conductor.store.memory import MemoryInstances
from lab.simulation.load import Client
from lab.simulation.plan import SIZES, Action, Order
from lab.simulation.rest import unclearable
from lab.simulation.world import World

POLL_S = 1.0
GO_S = 12.0  # an operator looks at what tripped a breaker for so long
LOOK_S = 60.0  # ... and at a machine that a delete waits for: longer than a delete tries to find out by itself


class Operator:
    """Changes hosts and services as ordered."""

    def __init__(self, world: World, client: Client) -> None:
        self._world = world
        self._client = client
        self._actions: dict[Action, Callable[[Order], Awaitable[None]]] = {
            Action.LATE: self._late,
            Action.LEAVE: self._leave,
            Action.UPGRADE: self._upgrade,
            Action.DIE: self._die,
            Action.DRAIN: self._drain,
            Action.REHOME: self._rehome,
        }

    def order(self, order: Order) -> asyncio.Task[None]:
        """Carry one order about a host or a service out."""
        if order.action is Action.IRONIC:
            assert self._world.ironic is not None
            return self._world.ironic.flip(order)
        return asyncio.create_task(self._carry_out(order), name=f"order {order.action} {order.service}")

    async def reset_breakers(self) -> None:
        """Reset every breaker that has been open for long enough, until cancelled (`berth breaker reset`)."""
        world, since = self._world, dict[tuple[str, str], float]()
        while True:
            await asyncio.sleep(POLL_S)
            for cell, table in world.cells.items():
                for service, breaker in list(table.breakers.items()):
                    if not breaker.is_open:
                        since.pop((cell, service), None)
                    elif world.now() - since.setdefault((cell, service), world.now()) >= GO_S:
                        world.event_log.record("order", f"go {service} {len(breaker.machines)}")
                        world.breaker_watch.go(breaker)
                        store = MemoryInstances(table.session())
                        seen = breaker.tripped_at
                        await store.safety.reset(service, "operator", world.clock.time(), tripped_at=seen)

    async def accept_losses(self) -> None:
        """Accept what each recovery that is stopped would lose, as it is shown, until cancelled (`berth recovery
        accept`).
        """
        world, since = self._world, dict[str, tuple[Losses, float]]()
        while True:
            await asyncio.sleep(POLL_S)
            for cell, table in world.cells.items():
                if not table.recovers or table.accepts or not table.losses.count:
                    since.pop(cell, None)
                    continue
                shown, at = since.setdefault(cell, (table.losses, world.now()))
                if shown != table.losses:
                    since[cell] = table.losses, world.now()
                elif world.now() - at >= GO_S:
                    world.event_log.record("order", f"accept {cell} {shown.count}")
                    async with MemoryInstances(table.session()).transaction() as transaction:
                        await transaction.accept_losses(shown, table.incarnation)

    async def release_quarantine(self) -> None:
        """Decide about what is in quarantine of an instance whose delete has waited long enough: destroy it, or, on
        what has burnt down or left, keep it (`berth quarantine protect`). The cell decides nothing by itself. Until
        cancelled.
        """
        world, since = self._world, dict[tuple[str, str], float]()
        while True:
            await asyncio.sleep(POLL_S)
            for table in world.cells.values():
                for place, one in list(table.unknown_machines.items()):
                    build, is_kept = (
                        world.builds.recorded.get(place[1]),
                        one.machine.kind is UnknownMachineKind.QUARANTINED,
                    )
                    waits = is_kept and build is not None and build.state is BuildState.DELETING and not one.decision
                    if not waits:
                        since.pop(place, None)
                    elif world.now() - since.setdefault(place, world.now()) >= LOOK_S:
                        is_gone = one.service in world.dead or place[0] in world.left  # its host will not report
                        decision = PROTECT if is_gone else DESTROY
                        world.event_log.record("order", f"release {place[1]} {decision}")
                        machine = DecidedMachine(place[1], place[0], one.machine.attempt)
                        safety = MemoryInstances(table.session()).safety
                        await safety.decide([machine], decision, "operator", world.clock.time())

    async def _carry_out(self, order: Order) -> None:
        self._world.event_log.record("order", f"{order.action} {order.service} {order.host} {order.size}")
        action = self._actions.get(order.action)
        if action is not None:
            await action(order)
        elif order.service not in self._world.dead and (host := self._host(order)) is not None:
            self._change(order, host)

    def _change(self, order: Order, host: str) -> None:
        fleet = self._world.fleets[order.service]
        match order.action:
            case Action.RESIZE:
                fleet.resize(host, SIZES[order.size])
            case Action.DISABLE:
                fleet.disable(host)
            case Action.ENABLE:
                fleet.enable(host)
            case _:
                fleet.wipe(host)  # what others had there, too
                world = self._world
                world.foreign = {uuid: at for uuid, at in world.foreign.items() if at != host}

    def _host(self, order: Order) -> str | None:
        """The uuid of the host, unless it has gone by now."""
        hosts = [one.plan.uuid for one in self._world.fleets[order.service].hosts]
        return hosts[order.host] if order.host < len(hosts) else None

    # --- services

    async def _late(self, order: Order) -> None:
        self._start(order.service)

    async def _leave(self, order: Order) -> None:
        await self._stop(order.service)
        await asyncio.sleep(order.seconds)
        self._start(order.service)

    async def _upgrade(self, order: Order) -> None:
        """The new version of the service reports its hosts as trees."""
        await self._stop(order.service)
        self._world.flat.discard(order.service)
        await asyncio.sleep(order.seconds)
        self._start(order.service)

    async def _die(self, order: Order) -> None:
        """The racks burn: the service and all its hosts, not_reported."""
        world, name = self._world, f"compute-{order.service}"
        world.expected_down.add(name)
        world.dead.add(order.service)
        world.kill(name)
        for host in world.fleets[order.service].hosts:
            world.left[host.plan.uuid] = "dead"
            world.move_watch.gone.add(host.plan.uuid)

    async def _stop(self, service: str) -> None:
        world, name = self._world, f"compute-{service}"
        world.expected_down.add(name)
        await world.stop(name)

    def _start(self, service: str) -> None:
        world, name = self._world, f"compute-{service}"
        if service in world.dead or service in world.hosts_off:
            return
        world.expected_down.discard(name)
        if name not in world.lives:
            world.start(name)

    # --- hosts that go

    async def _drain(self, order: Order) -> None:
        """Empty a host, take it out of its service, and its provider out of placement."""
        host = self._host(order)
        if host is None or not await self._emptied(order.service, host):
            return
        world, fleet = self._world, self._world.fleets[order.service]
        world.take_out(order.service, host)
        world.left[host] = "drained"
        version = fleet.records.versions(1, world.clock.time() + world.plan.skew_s)
        await self._client.publish(
            InventoryUpdate(reporter=f"compute-{order.service}", version=version, root_uuid=host)
        )

    async def _rehome(self, order: Order) -> None:
        """Empty a host and give it to the next service of its cell."""
        host = self._host(order)
        services = list(dict(self._world.cell_of(order.service).services))
        other = services[(services.index(order.service) + 1) % len(services)]
        if host is None or other in self._world.dead or not await self._emptied(order.service, host):
            return
        moved = self._world.take_out(order.service, host)
        self._world.fleets[other].adopt(moved)
        self._world.fleets[other].enable(host)

    async def _emptied(self, service: str, host: str) -> bool:
        """No new builds here, what is here is deleted by its owners, and its fence ends. False: the service is no
        more.
        """
        world = self._world
        world.fleets[service].disable(host, "it is to leave")
        while service not in world.dead:
            mine = self._tenants(service, host)
            for uuid in mine:
                self._client.delete(uuid)
            if not mine and not any(host in table.fenced for table in world.cells.values()):
                return True
            await asyncio.sleep(POLL_S)
        return False

    def _moving(self) -> set[str]:
        return {
            uuid
            for table in self._world.cells.values()
            for uuid, one in table.instances.items()
            if one.action is not None and one.phase != (State.DESTROYING, State.DELETED) and not one.blocked_reason
        } - set(self._world.taken_back)

    def _tenants(self, service: str, host: str) -> list[str]:
        """The instances that are on this host, are to be, or hold a part of it."""
        world = self._world
        here = {machine.instance_uuid: None for at, machine in world.fleets[service].machines() if at == host}
        for uuid, instance in world.cells[world.cell_of(service).name].instances.items():
            # The source of a move is held by the migration: its machine may be lost, and the instance goes back there.
            is_here = host in (instance.host_uuid, instance.source_host_uuid)
            if is_here and instance.state.value not in ("failed", "deleted", "tombstone", "transferred"):
                here[uuid] = None
        for uuid, kept in world.placement.consumers.items():
            if any(world.placement.providers[one].root == host for one in kept.consumer.allocations):
                here[uuid] = None
        # Of those that a restored database does not know no client can see the end; of those that can never be cleared
        # away there is none. One that moves to a host that burnt down comes back, or is deleted (seed 1795425973).
        gone = unclearable(world) - self._moving()
        return [uuid for uuid in here if uuid not in gone and world.harm.own(uuid)]
