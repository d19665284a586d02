"""Ironic with nodes to change at will, for the loop to read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from ironic_sync.domain.node import Allocation, Node, Unreadable, parse_node
from tests.unit.ironic.test_notification import body
from tests.unit.ironic.world import World

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
    held = world.book.seen(uuid)
    assert held is not None
    value = held["reserved"]
    assert isinstance(value, int)
    return value


async def turns(count: int = 60) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
