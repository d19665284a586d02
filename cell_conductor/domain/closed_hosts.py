"""Hosts on which nothing is begun now: fenced ones, and those of a compute service that is down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from bus.contracts.build import AttemptRecord
from bus.contracts.cell import Selection

from .fences import FENCED, Fence
from .instance import NOT_TRIED
from .leases import Lease


class Closed(Struct, frozen=True):
    """Why a host is passed over: a stable code, and a sentence."""

    code: str
    reason: str


class ClosedHosts(Struct, frozen=True):
    """down: services that take no builds, by name. fences: of hosts, by uuid."""

    down: Mapping[str, Lease] = {}
    fences: Mapping[str, Fence] = {}

    def why(self, selection: Selection) -> Closed | None:
        """Why nothing is begun on this host now; None: it may be tried."""
        if (fence := self.fences.get(selection.host_uuid)) is not None:
            return Closed(FENCED, f"host {fence.host} is fenced")
        down = self.down.get(selection.service)
        return None if down is None else Closed(down.code, down.reason)

    def passed_over(self, selections: Sequence[Selection], attempt: int, at: float) -> tuple[AttemptRecord, ...]:
        """The closed ones among these, as records of the history."""
        return tuple(
            AttemptRecord(attempt=attempt, host=selection.host, outcome=NOT_TRIED, code=closed.code, at=at)
            for selection in selections
            if (closed := self.why(selection)) is not None
        )
