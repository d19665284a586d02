"""Keeps the facts fresh: polls Nova's REST API, takes the fanout casts of its services, asks for unknown hosts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

# The casts of topic `scheduler` that are facts; every scheduler receives them by its fanout queue.
CASTS = frozenset(
    {
        "update_aggregates",
        "delete_aggregate",
        "update_instance_info",
        "delete_instance_info",
        "sync_instance_info",
    }
)


class FactsSource(Protocol):
    """What the RPC server and the placer need of the keeper (`FactsKeeper`)."""

    def apply_cast(self, method: str, arguments: Mapping[str, object]) -> bool:
        """Take one cast of CASTS in. False: it cannot be read; it is counted and logged, and changes nothing."""
        ...

    async def ask(self, unknown: Collection[str] = ()) -> bool:
        """Read services and aggregates now, and the compute nodes of these root providers; whether a fact has changed.

        Before "no valid host" is final. Callers at the same time share one read, and reads are a second apart at
        least. False also when Nova does not answer in time: what is known counts.
        """
        ...
