"""Others in the same world: tenants, clients and operators who never ask berth (drawn in `widening`)."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from bus.bus import API
from bus.codec import BATCH, JSON, MAX_ID
from bus.contracts.base import Message, Resources
from bus.contracts.objects import ObjectChange, ObjectKind, ObjectsChange, ObjectsChanged
from bus.contracts.placement import Claim, ClaimOption, Inventory, InventoryUpdate, ProviderReport, Release
from bus.contracts.queues import COMMANDS, EVENTS
from bus.persistence.memory_database import MemoryDatabase
from bus.transport import Outgoing, PublishRefused, QueueMissing, Unroutable
from compute_agent.records.attempt import HostAttempt
from compute_agent.records.records import Key
from compute_sim.fleet import Fleet, SimulatedMachine
from lab.simulation.load import Client
from lab.simulation.orders import TAKES_OVER
from lab.simulation.plan import Action, Order
from lab.simulation.rest_client import RestClient
from lab.simulation.world import World

OTHERS = frozenset(
    {
        *(Action.FOREIGN, Action.CELL, Action.SHARES, Action.BACKUP, Action.RESTORE),
        *(Action.COPY, Action.BRING_BACK, Action.DUPLICATE_NAME, Action.SECOND_SERVICE),
        *(Action.MALFORMED, Action.TREE, Action.REST),
    }
)
THEIRS = "theirs"  # another project, another source

# --- what another client may send

KEYS = (
    (COMMANDS, f"build.request.{THEIRS}"),
    (COMMANDS, f"build.delete.{THEIRS}"),
    (COMMANDS, "build.query"),
    (COMMANDS, "placement.claim"),
    (COMMANDS, "placement.release"),
    (COMMANDS, "placement.snapshot"),
    (COMMANDS, "inventory.update.theirs"),
    (COMMANDS, "cell.build"),
    (COMMANDS, "cell.delete"),
    (COMMANDS, "compute.result"),
    (EVENTS, "placement.event.theirs"),
    (EVENTS, "compute.hosts.theirs"),
    (EVENTS, "compute.heartbeat.theirs"),
    (EVENTS, "build.event.active.theirs"),
    (EVENTS, "build.events"),
    (EVENTS, "compute.report"),
    ("", "scheduler.requests"),
    ("", "placement.inventory"),
    ("", "conductor.results"),
    ("", "scheduler.builds"),
)
BODIES = (
    b"",
    b"{not json",
    b"null",
    b"[]",
    b"{}",
    b'"x"',
    b"1e999",
    b"\xff\xfe\x00",
    b"[" * 2000 + b"]" * 2000,
    b'{"type":"build.request.v1"}',
    b'{"type":"build.request.v1","instance_uuid":"no","flavor":7,"project_id":null}',
    b'{"type":"placement.claim.v1","consumer":{}}',
    b'{"type":"inventory.update.v1","reporter":"theirs","version":-1,"root_uuid":"x"}',
    b'{"type":"compute.result.v1","attempt":99999999999999999999}',
    b'{"type":"no.such.v9","body":"' + b"x" * 70_000 + b'"}',
    b'[{"meta":{},"body":{"type":"build.request.v1"}},{"meta":7,"body":null}]',
    b'[{"body":{}},{"body":[]},{"meta":{"id":""},"body":{"type":"placement.release.v1"}}]',
)
WORDS = ("", "x" * MAX_ID, "\ufffd" * 85, "\udcff" * 85, "\x00", "a b\n", "scheduler.requests", "no.such.queue")
NUMBERS: tuple[str | int | float, ...] = (0, -1, 2**31 - 1, 2**63 - 1, -(2**63), "three", 1e308, -0.5, "")
HEADERS = (
    "berth-sent-at-ms",
    "berth-retries",
    "berth-timeout-ms",
    "berth-cause",
    "berth-key",
    "traceparent",
    "x-death",
)
TYPES = (JSON, BATCH, "", "text/plain")

# The part of a database that its server does not keep in tables, and the part that outlives a restore.
KEPT = frozenset(
    {
        "clock",
        "on_commit",
        "deadlocks",
        "taken_back",
        "holding",
        "_locks",
        "_image",
        "_last_row",
        "place",
        "servers",
        "incarnations",
    }
)


def backup_of(table: MemoryDatabase) -> dict[str, Any]:
    """A copy of all rows."""
    return {name: _copied(value) for name, value in vars(table).items() if name not in KEPT}


def restore(table: MemoryDatabase, rows: dict[str, Any]) -> None:
    """All rows as they were; what was written since is gone. Its sessions are to be cut first."""
    table._image = None
    for name, before in rows.items():
        now = getattr(table, name)
        if isinstance(now, dict | set):
            now.clear()
            now.update(_copied(before))
        elif isinstance(now, list):
            now[:] = before
        else:
            setattr(table, name, before)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return value.copy() if isinstance(value, set | list) else value


class ForeignTrees:
    """Another source's hosts, with devices that move between them, and consumers that are not berth's."""

    ROOTS = tuple(f"00000000-0000-4000-a000-00000000000{n}" for n in range(2))
    DEVICES = tuple(f"00000000-0000-4000-b000-00000000000{n}" for n in range(3))

    def __init__(self, world: World, client: Client) -> None:
        self._world = world
        self._client = client
        self._version = 0
        self._claimed: set[str] = set()
        self._at = {device: self.ROOTS[number % 2] for number, device in enumerate(self.DEVICES)}
        world.harm.providers.update(dict.fromkeys((*self.ROOTS, *self.DEVICES)))

    async def action(self, order: Order) -> None:
        """One order."""
        rng = random.Random(order.host)
        match order.verb:
            case "report":
                await self._publish(*(self._report(root) for root in self.ROOTS))
            case "move":
                device = rng.choice(self.DEVICES)
                old = self._at[device]
                new = self._at[device] = next(root for root in self.ROOTS if root != old)
                roots = (old, new) if rng.random() < 0.5 else (new, old)
                await self._publish(*(self._report(root) for root in roots))
            case "again":
                root = rng.choice(self.ROOTS)
                # One SGX unit more or less: the second is not what was taken out.
                await self._publish(self._report(root, gone=True), self._report(root, traits=rng.random() < 0.5))
            case "claim":
                wanted: dict[str, Resources] = {rng.choice(self.DEVICES): {"VGPU": 1}}
                if rng.random() < 0.5:
                    wanted = {rng.choice(self.ROOTS): {"VCPU": rng.randint(1, 4)}}
                self._world.harm.holdings[order.uuid] = {}
                self._claimed.add(order.uuid)
                await self._publish(
                    Claim(consumer=order.uuid, options=(ClaimOption(allocations=wanted),), project_id=THEIRS)
                )
            case _:
                holdings = self._world.harm.holdings
                held = [uuid for uuid, holding in holdings.items() if holding and uuid in self._claimed]
                if held:
                    consumer = rng.choice(held)
                    self._world.harm.may_let_go.add(consumer)
                    await self._publish(Release(consumer=consumer))

    def _report(self, root: str, *, gone: bool = False, traits: bool = True) -> InventoryUpdate:
        self._version += 1
        here = [device for device in self.DEVICES if self._at[device] == root]
        providers = (
            ProviderReport(
                uuid=root,
                name=f"theirs-{root[-1]}",
                inventories={"VCPU": Inventory(total=16), "MEMORY_MB": Inventory(total=65536)},
                traits=("HW_CPU_X86_SGX",) if traits else (),
            ),
            *(
                ProviderReport(
                    uuid=device,
                    name=f"theirs-device-{device[-1]}",
                    parent_uuid=root,
                    inventories={"VGPU": Inventory(total=4)},
                )
                for device in here
            ),
        )
        return InventoryUpdate(
            reporter=THEIRS, version=self._version, root_uuid=root, providers=() if gone else providers
        )

    async def _publish(self, *messages: Message) -> None:
        self._world.publish_foreign(messages)
        await self._client.publish_batch(messages)


class OtherTenants:
    """Carries out what others do."""

    def __init__(self, world: World, client: Client) -> None:
        self._world = world
        self._client = client
        self._trees = ForeignTrees(world, client)
        self._rest = RestClient(world)
        self._backups: dict[str, dict[str, Any]] = {}
        self._copies: dict[str, tuple[list[tuple[str, SimulatedMachine]], list[tuple[Key, HostAttempt]]]] = {}
        self._acts: dict[Action, Callable[[Order], Awaitable[None]]] = {
            Action.FOREIGN: self._foreign,
            Action.CELL: self._cell,
            Action.SHARES: self._shares,
            Action.BACKUP: self._backup,
            Action.RESTORE: self._restore,
            Action.COPY: self._copy,
            Action.BRING_BACK: self._bring_back,
            Action.DUPLICATE_NAME: self._start_duplicate_service,
            Action.SECOND_SERVICE: self._start_second_service,
            Action.MALFORMED: self._send_malformed,
            Action.TREE: self._trees.action,
            Action.REST: self._rest.action,
        }

    def order(self, order: Order) -> asyncio.Task[None]:
        """Carry one order out."""
        return asyncio.create_task(self._carry_out(order), name=f"order {order.action} {order.verb} {order.service}")

    async def _carry_out(self, order: Order) -> None:
        self._world.event_log.record("order", f"{order.action} {order.verb} {order.service} {order.uuid} {order.host}")
        await self._acts[order.action](order)

    # --- machines

    async def _foreign(self, order: Order) -> None:
        """A machine that its owner made with other tools begins, or ends."""
        world, fleet = self._world, self._world.fleets[order.service]
        if order.verb == "boot":
            hosts = [one.plan.uuid for one in fleet.hosts]
            if order.host < len(hosts):
                Fleet.put(fleet, hosts[order.host], SimulatedMachine(order.uuid, 1, {}, True))
                world.foreign[order.uuid] = hosts[order.host]
            return
        world.foreign.pop(order.uuid, None)
        for one in world.fleets.values():
            for host in one.hosts:
                Fleet.remove(one, host.plan.uuid, order.uuid)

    # --- settings

    async def _cell(self, order: Order) -> None:
        """A cell joins, or is taken out of the settings for a while: what is above cells starts again, one by one.

        Or an operator adds it, or removes it and adds it again, and nothing starts again.
        """
        world, cell = self._world, order.service
        if order.verb in ("add", "remove"):
            await self._decided_cell(order)
            return
        if order.verb == "join":
            world.cells_out.discard(cell)
            for name in world.plan.processes_of(cell):
                self._start(name)
            before = self._shares_now()
            world.metal_out.difference_update(world.cell(cell).metal)
            await self._above(cell)
            await self._metal_again(before)
            return
        world.cells_out.add(cell)
        await self._above(cell)
        await asyncio.sleep(order.seconds)
        world.cells_out.discard(cell)
        await self._above(cell)

    async def _decided_cell(self, order: Order) -> None:
        world, cell = self._world, order.service
        if order.verb == "add":
            for name in world.plan.processes_of(cell):
                self._start(name)
            before = self._shares_now()
            world.metal_out.difference_update(world.cell(cell).metal)
            await self._decide(cell, {"state": "enabled", "bus": {}})
            await self._metal_again(before)
            return
        await self._decide(cell, {"state": "removed", "abandoned": True})
        await asyncio.sleep(order.seconds)
        await self._decide(cell, {"state": "enabled"})

    async def _decide(self, cell: str, body: dict[str, Any]) -> None:
        change = ObjectChange(kind=ObjectKind.CELL, name=cell, body=body)
        decision = ObjectsChange(changes=(change,), actor="operator", reason="simulated", force=True)
        await self._client.until_answered(decision, ObjectsChanged)
        self._world.event_log.record("decided", f"{cell} {body['state']}")

    async def _above(self, cell: str) -> None:
        for name in self._world.plan.processes:
            if name.startswith(("scheduler", "placement")):
                await self._again(name)

    async def _shares(self, order: Order) -> None:
        world, service = self._world, order.service
        if order.verb == "away":
            before = self._shares_now()
            world.metal_out.add(service)
            await self._stop(f"compute-{service}")
            await self._metal_again(before)
            await asyncio.sleep(order.seconds)
        before = self._shares_now()
        world.metal_out.discard(service)
        await self._metal_again(before)
        self._start(f"compute-{service}")

    def _shares_now(self) -> dict[str, tuple[int, int]]:
        return {service: self._world.wiring.share_of(service) for _, service in self._world.plan.metal_services}

    async def _metal_again(self, before: Mapping[str, tuple[int, int]]) -> None:
        """A service whose cell has another share now learns that at its next start; within a cell the ring decides."""
        for service, share in self._shares_now().items():
            if service not in self._world.metal_out and share != before[service]:
                await self._again(f"compute-{service}")

    async def _again(self, name: str) -> None:
        world = self._world
        if name in world.lives:
            await self._stop(name)
            self._start(name)

    async def _stop(self, name: str) -> None:
        self._world.expected_down.add(name)
        await self._world.stop(name)

    def _start(self, name: str) -> None:
        service = name.removeprefix("compute-")
        if service in self._world.dead or service in self._world.hosts_off:
            return
        self._world.expected_down.discard(name)
        if name not in self._world.lives:
            self._world.start(name)

    # --- databases

    async def _backup(self, order: Order) -> None:
        self._backups[order.uuid] = backup_of(self._world.databases.tables[order.service])

    async def _restore(self, order: Order) -> None:
        """A server is unavailable and comes back as it once was."""
        world, rows = self._world, self._backups.get(order.uuid)
        if rows is None and order.verb != TAKES_OVER:
            return
        up = world.databases.fall(order.service)
        await asyncio.sleep(order.seconds)
        if rows is None:
            world.take_over(order.service)
        else:
            world.set_back(order.service, partial(restore, world.databases.tables[order.service], rows))
        up()
        if order.size:  # its workers are started anew, too
            for name in world.readers_of(order.service):
                if name in world.lives:
                    world.kill(name)
                    self._start(name)

    # --- hosts

    async def _copy(self, order: Order) -> None:
        fleet = self._world.fleets[order.service]
        self._copies[order.uuid] = (list(fleet.machines()), list(fleet.records.entries()))

    async def _bring_back(self, order: Order) -> None:
        """The disks of a service's hosts are what they were; its owner stopped it for that, and starts it again."""
        world, fleet, copied = self._world, self._world.fleets[order.service], self._copies.get(order.uuid)
        if copied is None:
            return
        await self._stop(f"compute-{order.service}")
        await asyncio.sleep(order.seconds)
        if order.service in world.dead or f"compute-{order.service}" in world.lives:
            return
        machines, entries = copied
        now = {(uuid, machine.instance_uuid): machine for uuid, machine in fleet.machines()}
        for uuid, machine in machines:
            if now.get((uuid, machine.instance_uuid)) != machine:
                world.move_watch.brought_back.add((uuid, machine.instance_uuid, machine.attempt))
            if (uuid, machine.instance_uuid) not in now:
                world.harm.brought_back(uuid, machine.instance_uuid)
        for host in fleet.hosts:
            fleet.wipe(host.plan.uuid)
            world.machines.set_back(host.plan.uuid)
        for uuid, machine in machines:
            if world.harm.own(machine.instance_uuid) or machine.instance_uuid in world.foreign:
                Fleet.put(fleet, uuid, machine)
        for uuid, host_uuid in list(world.foreign.items()):
            if fleet.host(host_uuid) is not None and fleet.machine(host_uuid, uuid) is None:
                del world.foreign[uuid]  # made since the copy, and gone with it
        if order.size:
            for key, entry in entries:
                fleet.records.put(key, entry, fleet.records.spawn_of(key))
        self._start(f"compute-{order.service}")

    # --- a second service of one name

    async def _start_duplicate_service(self, order: Order) -> None:
        """Another machine with the same settings: the same name, the same plan of hosts, other machines."""
        world, name = self._world, f"twin-{order.service}"
        if f"compute-{order.service}" in world.expected_down:
            return  # its operator has just made sure that no service of the name runs (seed 1795411530)
        world.start_duplicate(order.service)
        self._start(name)
        await asyncio.sleep(order.seconds)
        world.expected_down.add(name)
        world.kill(name)

    async def _start_second_service(self, order: Order) -> None:
        """Hosts that were cloned with their uuids, under a service of another name."""
        world, name = self._world, f"second-{order.service}"
        world.seconds.setdefault(order.service, world.second_fleet(order.service))
        self._start(name)
        await asyncio.sleep(order.seconds)
        world.expected_down.add(name)
        world.kill(name)

    # --- messages

    async def _send_malformed(self, order: Order) -> None:
        """Whatever a client of theirs may put into a message."""
        world, rng = self._world, random.Random(order.host)
        exchange, key = rng.choice(KEYS)
        body = rng.choice(BODIES)
        headers = {rng.choice(HEADERS): rng.choice((*NUMBERS, *WORDS)) for _ in range(rng.randrange(4))}
        message = Outgoing(
            exchange=exchange,
            routing_key=key,
            body=body,
            content_type=rng.choice(TYPES),
            message_id=rng.choice(WORDS),
            type=rng.choice((*WORDS, "build.request.v1", "placement.claim.v1")),
            correlation_id=rng.choice((None, *WORDS)),
            reply_to=rng.choice((None, None, *WORDS)),
            headers=headers,
            expiration_s=rng.choice((None, None, 0.0, 3600.0)),
        )
        world.strange.update(dict.fromkeys(_pieces(body)))
        broker = world.brokers[order.service if order.service in world.brokers else API]
        if not broker.up:
            return
        try:
            broker.route(message)
        except (PublishRefused, QueueMissing, Unroutable):
            return


def _pieces(body: bytes) -> list[bytes]:
    """A body, and the bodies in it when it is taken for a batch."""
    try:
        items = json.loads(body)
    except ValueError:
        return [body]
    except RecursionError:
        return [body]
    parts = [one.get("body") for one in items if isinstance(one, dict)] if isinstance(items, list) else []
    return [body, *(json.dumps(part, separators=(",", ":")).encode() for part in parts)]
