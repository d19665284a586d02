"""Nova as the keeper of facts sees it, in memory."""

from __future__ import annotations

import asyncio

from bus.faults import Fault
from nova_scheduler.cloud.rest import NovaRefused
from nova_scheduler.cloud.state import ComputeNode, NovaAggregate, NovaService, NovaState, host_table

CELL1, CELL2 = "00000000-0000-4000-8000-0000000000c1", "00000000-0000-4000-8000-0000000000c2"


def uuid_of(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012}"


def node(number: int, host: str = "", **more: object) -> ComputeNode:
    return ComputeNode(uuid=uuid_of(number), host=host or f"host{number}", nodename=f"node{number}", **more)  # type: ignore[arg-type]


def up(host: str, **more: object) -> NovaService:
    return NovaService(host=host, is_up=True, **more)  # type: ignore[arg-type]


def down(host: str) -> NovaService:
    return NovaService(host=host, is_up=False)


class World:
    """Facts and their host table; what is announced is read from the table."""

    def __init__(self, *nodes: ComputeNode, cells: dict[str, str] | None = None) -> None:
        self.table = host_table()
        self.facts = NovaState(self.table)
        self.facts.put_services([up(one.host) for one in nodes], complete=True)
        self.facts.put_nodes(nodes, complete=True)
        self.facts.put_cells({one.host: CELL1 for one in nodes} if cells is None else cells)
        self.facts.announce(0.0)

    def states(self) -> dict[str, tuple[str | None, bool, bool]]:
        """{node's uuid: (its live service, whether that is known to be down, whether the host is enabled)}."""
        table = self.table
        return {
            uuid: (table.live_service_of(uuid), table.is_down(uuid), bool(table.enabled[index]))
            for index, uuid in enumerate(table.uuids)
        }


class MemoryNova:
    """What a NovaApi answers; `fails`: with this fault instead."""

    def __init__(self, *nodes: ComputeNode) -> None:
        self.listed = {one.uuid: one for one in nodes}
        self.of_hosts = {one.host: up(one.host) for one in nodes}
        self.groups: dict[str, NovaAggregate] = {}
        self.unreadable: set[str] = set()  # of these, but for their hosts
        self.nameless = False  # one of them tells no hosts either
        self.tasks: dict[str, str] = {}
        self.calls: list[str] = []
        self.fails: Fault | None = None

    async def _called(self, what: str) -> None:
        self.calls.append(what)
        await asyncio.sleep(0)  # it is away
        if self.fails is not None:
            raise self.fails

    async def services(self) -> list[NovaService]:
        await self._called("services")
        return list(self.of_hosts.values())

    async def nodes(self) -> list[tuple[ComputeNode, NovaService]]:
        await self._called("nodes")
        return [(one, self.of_hosts[one.host]) for one in self.listed.values()]

    async def node(self, uuid: str) -> tuple[ComputeNode, NovaService] | None:
        await self._called("node")
        found = self.listed.get(uuid)
        return None if found is None else (found, self.of_hosts[found.host])

    async def aggregates(self) -> list[NovaAggregate]:
        await self._called("aggregates")
        if self.nameless:
            raise NovaRefused("an aggregate names no hosts")
        return [
            NovaAggregate(uuid=uuid, name=uuid, hosts=one.hosts, is_read=False) if uuid in self.unreadable else one
            for uuid, one in self.groups.items()
        ]

    async def task_of(self, instance: str) -> str | None:
        await self._called("task_of")
        return self.tasks.get(instance)
