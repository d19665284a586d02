"""A sync loop on a virtual clock, fed from the recordings or by nodes to change at will, telling a book."""

from __future__ import annotations

import asyncio
import heapq
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from bus.contracts.base import Message
from bus.contracts.placement import InventoryUpdate, ProviderReport
from bus.memory import MemoryBroker, MemoryTransport
from bus.transport import Outgoing, QueueMissing
from ironic_sync.config import IronicSyncConfig
from ironic_sync.domain.node import Allocation, Node, Unreadable, parse_node
from ironic_sync.loop import SyncLoop
from ironic_sync.source.port import IronicClient
from ironic_sync.store.memory import MemoryPositions, MemoryPositionTable

# --- a sync loop on a virtual clock, fed from the recordings, telling a book that remembers


RECORDINGS = Path(__file__).parents[2] / "data" / "ironic"
SCENARIOS = tuple(sorted(path.stem for path in RECORDINGS.glob("*.jsonl")))
EXPECTED: Mapping[str, list[dict[str, Any]]] = json.loads((RECORDINGS / "nova-expected.json").read_text())
QUIET_TURNS = 40  # turns of the event loop without anything to do, after which nothing will come of itself


# Ironic as it was captured: the `.nodes.json` of a recorded run, stepped through by a test.
UNCHANGED = "unchanged"
PAGE = 2  # small on purpose: the recordings have few nodes and pages must be crossed


class RecordedStep(Struct, frozen=True, kw_only=True):
    """One step of a recorded run, and all nodes as they were right after it."""

    name: str
    at: str
    nodes: Mapping[str, Any]


def load_steps(path: Path) -> list[RecordedStep]:
    """The steps of a recording, each with every node of that moment in full."""
    steps: list[RecordedStep] = []
    nodes: dict[str, Any] = {}
    for raw in msgspec.json.decode(path.read_bytes()):
        changed = {uuid: node for uuid, node in raw["nodes"].items() if node != UNCHANGED}
        nodes = {uuid: node for uuid, node in {**nodes, **changed}.items() if node is not None}
        steps.append(RecordedStep(name=raw["step"], at=raw["at"], nodes=nodes))
    return steps


class RecordedSource:
    """Answers with the nodes of one recorded step; `go_to` moves to another one."""

    def __init__(self, steps: Sequence[RecordedStep]) -> None:
        self._steps = steps
        self._nodes: Mapping[str, Any] = {}

    def go_to(self, index: int) -> None:
        """From now on answer as Ironic did right after this step; before the first one there are no nodes."""
        self._nodes = self._steps[index].nodes if index >= 0 else {}

    async def get_node(self, uuid: str) -> Node | Unreadable | None:
        """One node."""
        raw = self._nodes.get(uuid)
        return None if raw is None else parse_node(raw)

    async def list_nodes(self) -> AsyncIterator[Sequence[Node | Unreadable]]:
        """All nodes."""
        raw = list(self._nodes.values())
        for first in range(0, len(raw), PAGE):
            yield [parse_node(node) for node in raw[first : first + PAGE]]

    async def get_allocation(self, uuid: str) -> Allocation | None:
        """An allocation, as the node that has it shows it (the recordings keep no list of them)."""
        for node_uuid, raw in self._nodes.items():
            if raw.get("allocation_uuid") == uuid:
                return Allocation(uuid=uuid, state="active", node_uuid=node_uuid)
        return None

    async def ping(self) -> None:
        """A recording always answers."""

    async def close(self) -> None:
        """Nothing to let go of."""


class VirtualClock:
    """Time that moves only when the test moves it."""

    def __init__(self, start: float = 1_800_000_000.0) -> None:
        self.now = start
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._number = 0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self._number += 1
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now + seconds, self._number, waiting))
        await waiting

    def advance(self, until: float | None = None) -> None:
        """To the next sleeper, or to a given time (waking one after another all who sleep until then)."""
        while self._sleepers and self._sleepers[0][2].done():
            heapq.heappop(self._sleepers)
        if self._sleepers and (until is None or self._sleepers[0][0] <= until):
            at, _, waiting = heapq.heappop(self._sleepers)
            self.now = max(self.now, at)
            waiting.set_result(None)
        elif until is not None:
            self.now = max(self.now, until)
        else:
            raise AssertionError("no task sleeps, so time would never bring anything")


class Placement:
    """Placement that a placement worker would hold: the newest version of each root. Keeps all it was sent."""

    def __init__(self) -> None:
        self.updates: list[InventoryUpdate] = []
        self.causes: list[str] = []
        self.versions: dict[str, int] = {}
        self.providers: dict[str, ProviderReport | None] = {}
        self.fault: Exception | None = None

    async def publish_all(self, messages: Sequence[tuple[Message, str]], traceparents: Sequence[str] = ()) -> None:
        await asyncio.sleep(0)
        if self.fault is not None:
            raise self.fault
        for message, cause in messages:
            assert isinstance(message, InventoryUpdate)
            self.causes.append(cause)
            self.updates.append(message)
            if message.version > self.versions.get(message.root_uuid, 0):
                self.versions[message.root_uuid] = message.version
                self.providers[message.root_uuid] = message.providers[0] if message.providers else None

    def seen(self, uuid: str) -> Any:
        """A provider in the form of nova-expected.json."""
        report = self.providers.get(uuid)
        return None if report is None else as_expected(report)


def as_expected(report: ProviderReport) -> dict[str, Any]:
    (name, inventory), *others = report.inventories.items() or [("", None)]
    assert not others
    if inventory is None:
        return {"resource_class": None, "traits": list(report.traits)}
    assert (inventory.min_unit, inventory.max_unit, inventory.step_size, inventory.allocation_ratio) == (1, 1, 1, 1.0)
    assert (report.name, report.parent_uuid) == (report.uuid, None)
    return {
        "resource_class": name,
        "total": inventory.total,
        "reserved": inventory.reserved,
        "traits": list(report.traits),
    }


class World:
    """One broker, one Ironic, one loop, one book."""

    def __init__(self, source: IronicClient, *, positions: MemoryPositions | None = None, **settings: Any) -> None:
        self.clock = VirtualClock()
        self.broker = MemoryBroker(self.clock)
        self.broker.declare_exchange("ironic")
        self.source = source
        self.placement = Placement()
        self.config = msgspec.convert({"resync_interval_s": 3600.0, **settings}, IronicSyncConfig)
        self.positions = positions or MemoryPositions(MemoryPositionTable(self.clock).session())
        self.transport = MemoryTransport(self.broker, "ironic_sync")
        self.ironic = MemoryTransport(self.broker, "ironic")
        self.loop = self.make_loop()

    def make_loop(self) -> SyncLoop:
        return SyncLoop(
            self.source,
            self.positions,
            self.transport,
            self.placement.publish_all,
            clock=self.clock,
            rng=random.Random(1),
            config=self.config,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[World]:
        await self.transport.open()
        await self.ironic.open()
        task = asyncio.create_task(self.loop.run())
        try:
            yield self
            assert not task.done(), task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.transport.close()
            await self.ironic.close()

    async def notify(self, body: bytes, key: str = "ironic_versioned_notifications.info") -> None:
        await self.ironic.publish(Outgoing(exchange="ironic", routing_key=key, body=body))

    async def settle(self, tries: int = 200) -> None:
        """Until all that was received is done with; time moves only while something is left to do."""
        for _ in range(tries):
            if await self._quiet():
                return
            self.clock.advance()
        raise AssertionError("it never settles")

    async def pass_time(self, seconds: float) -> None:
        """Let time pass, everything taking its turn."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            await self._quiet()
            self.clock.advance(until)
        await self.settle()

    async def _quiet(self) -> bool:
        quiet = 0
        for _ in range(2000):
            await asyncio.sleep(0)
            quiet = quiet + 1 if self.loop.idle and await self._drained() else 0
            if quiet >= QUIET_TURNS:
                return True
        return False

    async def _drained(self) -> bool:
        try:
            return await self.transport.depth(self.config.queue) == 0
        except QueueMissing:
            return True


@cache
def _recorded(name: str) -> tuple[list[RecordedStep], list[list[tuple[bytes, str]]]]:
    """The steps of a scenario, and what had arrived by each. Both are only read."""
    steps = load_steps(RECORDINGS / f"{name}.nodes.json")
    lines = [json.loads(line) for line in (RECORDINGS / f"{name}.jsonl").read_text().splitlines()]
    messages: list[list[tuple[bytes, str]]] = []
    for step in steps:
        at = datetime.fromisoformat(step.at).timestamp()
        arrived = [line for line in lines if line["received"] <= at]
        lines = lines[len(arrived) :]
        messages.append([(json.dumps(line["body"]).encode(), line["routing_key"]) for line in arrived])
    assert not lines
    return steps, messages


class Recording:
    """One recorded scenario: its steps, and the notifications that had arrived by each."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.steps, self.messages = _recorded(name)
        self.source = RecordedSource(self.steps)
        self.expected = EXPECTED[name]


TOKEN = "gAAAA-a-live-token"


def body(event: str, data: dict[str, Any], **inner: Any) -> bytes:
    message = {
        "message_id": "m1",
        "publisher_id": "ironic-api.host",
        "event_type": f"baremetal.{event}",
        "payload": {"ironic_object.namespace": "ironic", "ironic_object.name": "X", "ironic_object.data": data},
        "_context_request_id": "req-1",
        "_context_auth_token": TOKEN,
        **inner,
    }
    return json.dumps({"oslo.version": "2.0", "oslo.message": json.dumps(message)}).encode()


# --- ironic with nodes to change at will, for the loop to read


NODE = "8296eb22-b44b-4cba-95b1-3a66b31189a4"
OTHER = "05dcdb28-1788-4480-9281-af335fc32c9f"
INSTANCE = "11111111-2222-4333-8444-555555555555"
FREE: dict[str, Any] = {
    "provision_state": "available",
    "power_state": "power off",
    "maintenance": False,
    "instance_uuid": None,
    "resource_class": "gold",
    "traits": [],
}


class Nodes:
    """Ironic with nodes to change at will. A read answers with what was true when it was sent; `gate` holds answers."""

    def __init__(self, **nodes: dict[str, Any]) -> None:
        self.nodes: dict[str, dict[str, Any]] = {}
        self.allocations: dict[str, dict[str, Any]] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.fault: Exception | None = None
        self.reads = 0
        self.lists = 0
        self.pings = 0
        self.list_fault: Exception | None = None
        self.list_takes: Callable[[], Awaitable[None]] | None = None
        self.under_way = 0
        self.most_under_way = 0

    def put(self, uuid: str = NODE, **fields: Any) -> None:
        self.nodes[uuid] = {**FREE, **self.nodes.get(uuid, {}), "uuid": uuid, **fields}

    async def get_node(self, uuid: str) -> Node | Unreadable | None:
        self.reads += 1
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        raw = dict(self.nodes[uuid]) if uuid in self.nodes else None
        try:
            await self.gate.wait()
        finally:
            self.under_way -= 1
        if self.fault is not None:
            raise self.fault
        return None if raw is None else parse_node(raw)

    async def list_nodes(self) -> AsyncIterator[Sequence[Node | Unreadable]]:
        self.lists += 1
        raw = [dict(node) for node in self.nodes.values()]
        await self.gate.wait()
        if self.list_takes is not None:
            await self.list_takes()
        fault = self.fault or self.list_fault
        if fault is not None:
            raise fault
        yield [parse_node(node) for node in raw]

    async def ping(self) -> None:
        self.pings += 1
        if self.fault is not None:
            raise self.fault

    async def get_allocation(self, uuid: str) -> Allocation | None:
        raw = self.allocations.get(uuid)
        return None if raw is None else Allocation(uuid=uuid, **raw)

    async def close(self) -> None:
        pass


def world(**settings: Any) -> tuple[Nodes, World]:
    nodes = Nodes()
    nodes.put()
    return nodes, World(nodes, **settings)


def notification(event: str, uuid: str = NODE, **data: Any) -> bytes:
    return body(event, {**{k: v for k, v in FREE.items() if k != "resource_class"}, "uuid": uuid, **data})


def reserved(world: World, uuid: str = NODE) -> int:
    held = world.placement.seen(uuid)
    assert held is not None
    value = held["reserved"]
    assert isinstance(value, int)
    return value


async def turns(count: int = 60) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
