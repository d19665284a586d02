"""Ironic as it was captured: the `.nodes.json` of a recorded run, stepped through by its user."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ironic_sync.domain.node import Allocation, Node, Unreadable, parse_node

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
