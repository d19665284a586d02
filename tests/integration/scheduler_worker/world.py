"""Schedulers, a real placement, and scripted cells and clients around them, on real PostgreSQL and memory buses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import asyncpg
from msgspec.structs import replace

from bus.bus import API, Bus
from bus.clock import SystemClock, new_uuid
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.actions import (
    ActionEvent,
    ActionKind,
    ActionRequest,
    ActionState,
    CellAction,
    CellActionQuery,
    CellTransferOut,
)
from bus.contracts.base import Message, encode
from bus.contracts.build import BuildEvent, BuildPage, BuildQuery, BuildRecord, BuildRequest, BuildState, DeleteRequest
from bus.contracts.catalogue import routing_key
from bus.contracts.cell import CellBuild, CellBuildQuery, CellDelete, HostReport, HostStates, ReportHosts
from bus.contracts.feed import SnapshotPage, SnapshotRequest
from bus.contracts.objects import CellBus
from bus.contracts.operations import CellFence
from bus.contracts.placement import (
    Claim,
    ClaimOption,
    ClaimOutcome,
    ClaimResult,
    Inventory,
    InventoryResult,
    InventoryUpdate,
    Migration,
    ProviderReport,
    Release,
    ReleaseResult,
)
from bus.contracts.queues import COMMANDS
from bus.memory import MemoryBroker, MemoryTransport
from bus.service.environment import CellAddressInvalid, Environment
from bus.service.service import WorkerRuntime
from bus.transport import Outgoing, Transport
from placement_worker.app import build as build_placement
from placement_worker.config import PlacementConfig
from placement_worker.replica.replica import Replica
from scheduler_worker.app import build as build_scheduler
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.hosts.host_table import HostTable
from tests.kit.waiting import PATIENCE_S, until

CELLS = ("c1", "c2")
R = TypeVar("R", bound=Message)


class World:
    """Everything around the schedulers. Hosts are reported by scripted compute services, one a cell."""

    def __init__(self, postgres_url: str) -> None:
        self.clock = SystemClock()
        self.rng = random.Random(11)
        self.brokers = {name: MemoryBroker(self.clock) for name in (API, *CELLS)}
        self.url = postgres_url
        self.services: dict[str, tuple[WorkerRuntime, asyncio.Event, asyncio.Task[None]]] = {}
        self.replicas: dict[str, Replica] = {}
        self.tables: dict[str, HostTable] = {}
        self.events: list[BuildEvent] = []
        self.action_events: list[ActionEvent] = []
        self.actions: list[tuple[str, CellAction]] = []
        self.departs: list[tuple[str, CellTransferOut]] = []
        self.queries: list[tuple[str, CellActionQuery | CellBuildQuery]] = []
        self.builds: list[tuple[str, CellBuild]] = []
        self.deletes: list[tuple[str, CellDelete]] = []
        self.hosts: dict[str, dict[str, HostReport]] = {cell: {} for cell in CELLS}
        self._named: dict[tuple[str, str], str] = {}  # {(cell, name): uuid}
        self.buses: dict[str, Bus] = {}
        self.fences: list[tuple[str, CellFence]] = []
        self._sequence = 0
        self._version = 0
        self._attempt = 1
        self._consumers: list[Consumer] = []
        self._tasks: list[asyncio.Task[None]] = []

    # --- life

    async def open(self) -> None:
        for name in self.brokers:
            bus = Bus(name, self.transport(name), process="world", clock=self.clock, rng=self.rng)
            await bus.open()
            self.buses[name] = bus
        await self._consume(API, "client.builds.{process}", self._receive)
        for cell in CELLS:
            await self._script(cell)

    async def open_cell(self, name: str) -> None:
        """One more cell, which no worker's settings name."""
        self.brokers[name], self.hosts[name] = MemoryBroker(self.clock), {}
        bus = self.buses[name] = Bus(name, self.transport(name), process="world", clock=self.clock, rng=self.rng)
        await bus.open()
        await self._script(name)

    async def _script(self, cell: str) -> None:
        await self._consume(cell, "conductor.requests", self._command)
        await self._consume(cell, "compute.control.{service}", self._answer, service=f"compute-{cell}", reporter="s")

    async def close(self) -> None:
        for name in reversed(list(self.services)):  # a scheduler waits for the answers of placement when it stops
            await self.stop(name)
        for consumer in self._consumers:
            await consumer.drain(1.0)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for bus in self.buses.values():
            await bus.close()

    def added_cell(self, name: str, where: CellBus) -> Transport:
        """As a worker reaches a cell that is added: by a file's name there must be a broker of that name."""
        found = self.brokers.get(where.url_file or name)
        if found is None:
            raise CellAddressInvalid(f"file {where.url_file} in cells_dir: No such file or directory")
        return MemoryTransport(found, name)

    def transport(self, bus: str) -> Transport:
        """A connection of its own to one of the buses."""
        return MemoryTransport(self.brokers[bus], bus)

    def environment(self, process: str, transports: Callable[[str], Transport] | None = None) -> Environment:
        return Environment(
            process,
            transports=transports or self.transport,
            cell_transports=self.added_cell,
            database_url=self.url,
            cells=CELLS,
            rng=random.Random(self.rng.getrandbits(32)),
        )

    async def placement(self, name: str = "p1") -> WorkerRuntime:
        return await self.start(name, build_placement(self.environment(name), PlacementConfig(), CELLS))

    async def scheduler(self, name: str = "s1", config: SchedulerConfig | None = None) -> WorkerRuntime:
        replica, table = Replica(), HostTable()
        service = build_scheduler(
            self.environment(name), config or SchedulerConfig(), CELLS, replica=replica, table=table
        )
        self.replicas[name], self.tables[name] = replica, table
        return await self.start(name, service)

    async def start(self, name: str, service: WorkerRuntime) -> WorkerRuntime:
        stop = asyncio.Event()
        task = asyncio.create_task(service.run(stop))
        self.services[name] = (service, stop, task)
        ready = asyncio.create_task(service.ready.wait())
        await asyncio.wait([ready, task], timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        assert service.ready.is_set(), service.not_ready()
        return service

    async def stop(self, name: str) -> None:
        _, stop, task = self._gone(name)
        stop.set()
        await task

    async def kill(self, name: str) -> None:
        """End it without draining, or see the end of what has died by itself."""
        _, _, task = self._gone(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def _gone(self, name: str) -> tuple[WorkerRuntime, asyncio.Event, asyncio.Task[None]]:
        self.replicas.pop(name, None)
        self.tables.pop(name, None)
        return self.services.pop(name)

    async def _consume(self, bus: str, queue: str, handler: Callable[..., Any], **fill: str) -> None:
        consumer = Consumer(self.buses[bus], queue, handler, max_batch=1000, concurrency=1, **fill)
        await consumer.start()
        self._consumers.append(consumer)
        self._tasks.append(asyncio.create_task(consumer.run()))

    # --- what the neighbours receive

    async def _receive(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        actions = [received for received in batch if isinstance(received.message, ActionEvent)]
        self.action_events += [received.message for received in actions]
        self.events += [received.message for received in batch if received not in actions]
        return [Done()] * len(batch)

    async def _command(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        for received in batch:
            if isinstance(received.message, CellBuild):
                self.builds.append((received.bus, received.message))
            elif isinstance(received.message, CellDelete):
                self.deletes.append((received.bus, received.message))
            elif isinstance(received.message, CellAction):
                self.actions.append((received.bus, received.message))
            elif isinstance(received.message, CellTransferOut):
                self.departs.append((received.bus, received.message))
            elif isinstance(received.message, CellActionQuery | CellBuildQuery):
                self.queries.append((received.bus, received.message))
            elif isinstance(received.message, CellFence):
                self.fences.append((received.bus, received.message))
        return [Done()] * len(batch)

    async def _answer(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        for received in batch:
            if isinstance(received.message, ReportHosts):  # and not one of this world's own heartbeats
                await self.announce(received.bus)
        return [Done()] * len(batch)

    async def sql(self, query: str, *arguments: Any) -> list[asyncpg.Record]:
        """The rows of a statement, on a connection of its own."""
        connection = await asyncpg.connect(self.url)
        try:
            return await connection.fetch(query, *arguments)
        finally:
            await connection.close()

    # --- hosts

    async def add_hosts(self, cell: str, count: int, *, on: str = API, **inventory: int) -> list[str]:
        """New hosts with these amounts, in placement and reported, and known to every scheduler. Their uuids.

        on: the bus that they are reported on, which placement has as their cell.
        """
        amounts = inventory or {"VCPU": 16, "MEMORY_MB": 32768, "DISK_GB": 500}
        uuids = []
        for _ in range(count):
            uuid = new_uuid(self.rng)
            name = f"{cell}-{len(self.hosts[cell])}"
            self.hosts[cell][uuid] = HostReport(uuid=uuid, name=name)
            await self.report(uuid, name, amounts, on=on)
            uuids.append(uuid)
        await self.announce(cell)
        await until(lambda: all(b.row_of(u) is not None for u in uuids for b in self.replicas.values()))
        await until(lambda: all(t.index_of(u) is not None for u in uuids for t in self.tables.values()))
        return uuids

    async def scheduler_and_hosts(
        self, count: int, config: SchedulerConfig | None = None, *, on: str = API, **inventory: int
    ) -> list[str]:
        """The scheduler s1, and so many hosts of c1."""
        await self.scheduler("s1", config)
        return await self.add_hosts("c1", count, on=on, **inventory)

    async def report(
        self,
        uuid: str,
        name: str,
        amounts: dict[str, int],
        traits: tuple[str, ...] = (),
        aggregates: tuple[str, ...] = (),
        *,
        on: str = API,
    ) -> None:
        self._version += 1
        inventories = {key: Inventory(total=total, max_unit=total) for key, total in amounts.items()}
        provider = ProviderReport(uuid=uuid, name=name, inventories=inventories, traits=traits, aggregates=aggregates)
        update = InventoryUpdate(reporter="world", version=self._version, root_uuid=uuid, providers=(provider,))
        answer = await self.answer(update, InventoryResult, on=on)
        assert answer.outcome == "applied", answer

    def host_named(self, cell: str, name: str | None) -> str | None:
        """The uuid of a host, also of one that its service does not report any more; None: there was none."""
        self._named |= {(cell, one.name): uuid for uuid, one in self.hosts[cell].items()}
        return self._named.get((cell, name or ""))

    async def announce(self, cell: str) -> None:
        self._sequence += 1
        self.host_named(cell, None)
        hosts = tuple(self.hosts[cell].values())
        message = HostStates(
            service=f"compute-{cell}", cell=cell, epoch=1, sequence=self._sequence, hosts=hosts, complete=True
        )
        await self.buses[cell].publish(message)

    # --- clients

    def request(self, flavor: str = "m1.small", **more: Any) -> BuildRequest:
        more.setdefault("instance_uuid", new_uuid(self.rng))
        more.setdefault("project_id", "demo")
        return BuildRequest(flavor=flavor, **more)

    async def answer(self, message: Message, reply: type[R], *, on: str = API) -> R:
        return await self.buses[on].request(message, reply, timeout_s=PATIENCE_S)

    async def ask(self, *messages: Message) -> None:
        await self.buses[API].publish_all([(message, "") for message in messages])

    async def expires(
        self, message: Message, *, sent_at: float | None = None, patience_s: float | None = None, after_s: float = 0.0
    ) -> None:
        """Publish a request that expires after a time; 0: before a scheduler has it. patience_s: as long a client waits
        for its answer; None: nobody does.
        """
        headers = {"berth-sent-at-ms": int((self.clock.time() if sent_at is None else sent_at) * 1000)}
        headers |= {} if patience_s is None else {"berth-timeout-ms": int(patience_s * 1000)}
        outgoing = Outgoing(
            exchange=COMMANDS,
            routing_key=routing_key(message),
            body=encode(message),
            headers=headers,
            reply_to=None if patience_s is None else "client.reply.gone",
            expiration_s=after_s,
        )
        await self.buses[API].transport.publish(outgoing)

    async def until_expired_are_handled(self) -> None:
        """Wait until the schedulers have handled what has expired by now. The first may end amid its batch."""
        for _ in range(2):
            last = self.request()
            await self.expires(last)
            assert (await self.ended(last.instance_uuid)).code == "broker.expired"

    async def ended(self, uuid: str, *states: BuildState) -> BuildEvent:
        """Wait for the event of one of these states (any terminal one when none is given)."""

        def found() -> BuildEvent | None:
            mine = [event for event in self.events if event.instance_uuid == uuid]
            return next((e for e in mine if (e.state in states if states else e.terminal)), None)

        event = await until(found)
        assert event is not None
        return event

    async def queried(self, request: BuildRequest) -> str:
        """The cell that is queried about this build, once it is."""

        def found() -> str | None:
            named = ((cell, one) for cell, one in self.queries if isinstance(one, CellBuildQuery))
            return next((cell for cell, one in named if one.spec.instance_uuid == request.instance_uuid), None)

        cell = await until(found)
        assert cell is not None
        return cell

    async def requested(self, *flavor: str, **more: Any) -> BuildRequest:
        """A build that is requested."""
        request = self.request(*flavor, **more)
        await self.ask(request)
        return request

    async def scheduled(self, *flavor: str, **more: Any) -> BuildRequest:
        """A build that is requested, and has its host."""
        request = await self.requested(*flavor, **more)
        await self.ended(request.instance_uuid, BuildState.SCHEDULED)
        return request

    def states(self, uuid: str) -> list[str]:
        return [event.state.value for event in self.events if event.instance_uuid == uuid]

    async def announced(self, cell: str, request: BuildRequest, state: BuildState, sequence: int, **more: Any) -> None:
        """The reports that the cell's conductor would make."""
        more.setdefault("host_uuid", self.host_named(cell, more.get("host")))
        event = BuildEvent(
            instance_uuid=request.instance_uuid, project_id=request.project_id, state=state, sequence=sequence, **more
        )
        await self.buses[cell].publish(event)

    async def active(self, request: BuildRequest, cell: str = "c1", host: str | None = None) -> str:
        """Ask for a build, and have its cell build it on the host that was chosen; the host's name."""
        await self.ask(request)
        scheduled = await self.ended(request.instance_uuid, BuildState.SCHEDULED)
        more = {"host": host or scheduled.host, "attempt": 1, "terminal": True}
        await self.announced(scheduled.cell or cell, request, BuildState.ACTIVE, 11, **more)
        await self.ended(request.instance_uuid, BuildState.ACTIVE)
        assert scheduled.host is not None
        return scheduled.host

    def action(self, request: BuildRequest, kind: ActionKind, **more: Any) -> ActionRequest:
        return ActionRequest(
            request_id=more.pop("request_id", None) or new_uuid(self.rng),
            instance_uuid=request.instance_uuid,
            project_id=more.pop("project_id", request.project_id),
            kind=kind,
            **more,
        )

    async def moved(self, action: ActionRequest, *states: ActionState) -> ActionEvent:
        """Wait for the event of one of these states (any terminal one when none is given)."""

        def found() -> ActionEvent | None:
            mine = [event for event in self.action_events if event.request_id == action.request_id]
            return next((e for e in mine if (e.state in states if states else e.terminal)), None)

        event = await until(found)
        assert event is not None
        return event

    async def dispatched(self, action: ActionRequest) -> CellAction:
        """Wait for the command to the cell."""
        found = await until(lambda: [one for _, one in self.actions if one.request_id == action.request_id])
        return found[0]

    async def commanded(self, action: ActionRequest) -> CellAction:
        """Ask for a move, and wait for the command to the cell."""
        await self.ask(action)
        return await self.dispatched(action)

    async def action_announced(
        self, cell: str, action: ActionRequest, state: ActionState, sequence: int, **more: Any
    ) -> None:
        """The reports that the cell's conductor would make of a move."""
        more.setdefault("host_uuid", self.host_named(cell, more.get("host")))
        event = ActionEvent(
            request_id=action.request_id,
            instance_uuid=action.instance_uuid,
            project_id=action.project_id,
            kind=action.kind,
            state=state,
            sequence=sequence,
            **more,
        )
        await self.buses[cell].publish(event)

    async def claim_destination(self, action: CellAction) -> None:
        """As the cell does: the instance's allocation is that of its first host, and the migration keeps the source."""
        self._attempt += 1
        claim = Claim(
            consumer=action.instance_uuid,
            attempt=self._attempt,
            consumer_generation=1,
            options=(ClaimOption(allocations=action.selections[0].allocations),),
            project_id=action.project_id,
            migration=Migration(uuid=action.request_id, source=action.selections[0].allocations),
        )
        answer = await self.answer(claim, ClaimResult)
        if answer.outcome is ClaimOutcome.CONSUMER_CONFLICT:
            again = replace(claim, consumer_generation=answer.consumer_generation)
            answer = await self.answer(again, ClaimResult)
        assert answer.outcome is ClaimOutcome.CLAIMED, answer

    async def release(self, consumer: str) -> None:
        """The consumer, an instance or a migration, holds nothing any more."""
        await self.answer(Release(consumer=consumer), ReleaseResult)

    async def show(self, uuid: str) -> BuildRecord | None:
        page = await self.answer(BuildQuery(instance_uuid=uuid), BuildPage)
        return page.builds[0] if page.builds else None

    async def delete(self, request: BuildRequest) -> None:
        await self.ask(DeleteRequest(instance_uuid=request.instance_uuid, project_id=request.project_id))

    async def used(self) -> dict[str, dict[str, int]]:
        """Usage in placement, where there is any: {provider: {class: amount}}."""
        page = await self.answer(SnapshotRequest(limit=5000), SnapshotPage)
        used = {p.uuid: {name: amount for name, amount in p.used.items() if amount} for p in page.providers}
        return {uuid: amounts for uuid, amounts in used.items() if amounts}
