"""The port to Ironic: reading nodes. The adapter: `source.rest` (HTTP)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from bus.faults import Fault, Transient
from ironic_sync.domain.node import Allocation, Node, Unreadable


class IronicUnavailable(Transient):
    """Ironic cannot be reached, is overloaded or answers with a server error. Try again later."""

    code = "ironic.unavailable"


class IronicRefused(Fault):
    """Ironic answers, but refuses the request: wrong credentials, version or address. For an operator."""

    code = "ironic.refused"


class IronicClient(Protocol):
    """Reads nodes. Every call is bounded in time; a fault is IronicUnavailable or IronicRefused."""

    async def get_node(self, uuid: str) -> Node | Unreadable | None:
        """One node; None: Ironic itself answers that it does not exist."""

    def list_nodes(self) -> AsyncIterator[Sequence[Node | Unreadable]]:
        """All nodes, a page at a time."""

    async def get_allocation(self, uuid: str) -> Allocation | None:
        """One of Ironic's allocations; None: it does not exist, or this Ironic has none."""

    async def ping(self) -> None:
        """Ask something small, to learn whether Ironic answers."""

    async def close(self) -> None:
        """Let go of connections."""
