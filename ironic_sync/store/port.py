"""The port to the sync positions: which process may write them, and the last report of each node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

from bus.faults import Fault
from ironic_sync.domain.position import Position

# A writer that does not renew its lease is replaced after this (seconds).
LEASE_S: Final = 5.0
PAGE: Final = 1000  # positions that are read at once; the lease is renewed, and all else goes on, between two pages


class NotLeader(Fault):
    """Another process is the writer. This process must end its term and wait."""

    code = "ironic_sync.not_leader"


class Term(Protocol):
    """One term of being the only writer. Every call raises NotLeader once another process has taken over; until
    then a term goes on, even if its lease is over.
    """

    async def load(self) -> tuple[Mapping[str, Position], Mapping[str, int]]:
        """All positions by node, and for each the version that is known to have been published."""

    async def save(self, positions: Sequence[Position]) -> None:
        """Keep these, all or none. Of none, too, the term is compared."""

    async def mark_published(self, versions: Mapping[str, int]) -> None:
        """These were published and confirmed; a newer one may have been saved since."""

    async def purge(self, reported_before: float) -> int:
        """Drop positions of removed nodes last reported before this time; returns how many."""

    async def renew(self) -> None:
        """Keep the lease for LEASE_S from now on."""


class Positions(Protocol):
    """The positions of all nodes. Adapters: `store.memory` (one process), `store.postgres` (several, one writing)."""

    @property
    def database_id(self) -> str:
        """The identity of this database: a uuid made once with its schema. Known once it has been open."""

    def become_leader(self) -> AbstractAsyncContextManager[Term]:
        """Become the only writer, and let go of the lease at the end. Raises NotLeader at once while another is."""
