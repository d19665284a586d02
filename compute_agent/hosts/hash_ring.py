"""Decides which free nodes belong to this service, of those that several services of a cell share. Pure, except for one
event.
"""

# Rendezvous hashing: of a ring's members the one whose hash with the node is highest has the node. A member that comes
# or goes moves the nodes that become or were its own, one part in as many as there are members, and no others. No
# library is needed: a ring of points would have to be tuned for an even spread, and is no smaller.
# The cell's conductor publishes the members (`RingMembers`), so all services with the same number agree. Before the
# first such message no free node belongs to this service.

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from hashlib import blake2b

from bus.contracts.cell import RingMembers

UNKNOWN = (0, 0)
MAX_NODES = 100_000  # the bound of nodes whose owner is cached; for others the owner is computed each time


def owner_of(node: str, members: Sequence[str]) -> str | None:
    """The member that has this node; None: there are no members."""
    return max(members, key=lambda member: (_weight(node, member), member), default=None)


def _weight(node: str, member: str) -> bytes:
    return blake2b(f"{member} {node}".encode(), digest_size=8).digest()


class Ring:
    """One service's view of its ring."""

    def __init__(self, name: str, service: str) -> None:
        self.name = name
        self.known = asyncio.Event()
        self.changed = asyncio.Event()  # set when nodes may have moved; the one who acts on it clears it
        self.version = UNKNOWN
        self.members: tuple[str, ...] = ()
        self._service = service
        self._owned: dict[str, bool] = {}  # of this version

    def apply(self, message: RingMembers) -> bool:
        """Use these members, unless they are older than the known ones. Returns whether the members have changed."""
        version = (message.term, message.number)
        if message.ring != self.name or version <= self.version:
            return False
        self.version = version
        self.known.set()
        if message.members == self.members:
            return False
        self.members, self._owned = message.members, {}
        self.changed.set()
        return True

    def owns(self, node: str) -> bool:
        """Whether a node is this service's while it is free."""
        owned = self._owned.get(node)
        if owned is None:
            if len(self._owned) >= MAX_NODES:
                self._owned.clear()
            owned = self._owned[node] = owner_of(node, self.members) == self._service
        return owned
