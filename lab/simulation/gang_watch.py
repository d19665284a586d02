"""The rules of gangs: never a part of one. Judged by what was requested, what is held and what is on record."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from msgspec import Struct

from bus.contracts.build import BuildRecord
from lab.simulation.watch import Breach
from placement_worker.store.memory_table import MemoryPlacementTable


class RequestedGang(Struct, frozen=True):
    """The members of one request, and how many of them start together at least."""

    members: Sequence[str]
    min_count: int


class GangWatch:
    """Looks after every commit of placement, and at the schedulers' records at rest.

    exempt: instances of which a restored database knows an old truth.
    """

    def __init__(self, placement: MemoryPlacementTable, exempt: Collection[str]) -> None:
        self._placement = placement
        self._exempt = exempt
        self._gangs: dict[str, RequestedGang] = {}
        self._started: dict[str, Sequence[str]] = {}  # by gang, the members that were the first to hold something
        self._withdrawn: dict[str, None] = {}  # instances that their client has deleted

    def requested(self, members: Sequence[str], min_count: int) -> None:
        """A client is about to ask for these, of which so many start together."""
        self._gangs.setdefault(members[0], RequestedGang(members, min_count))

    def deleted(self, uuid: str) -> None:
        """A client is about to delete an instance."""
        self._withdrawn[uuid] = None

    def __call__(self) -> None:
        """After a commit of placement: the first claims of a gang are claims for enough of it. Raises Breach."""
        for uuid, gang in self._gangs.items():
            if uuid in self._started or self._is_exempt(gang):
                continue
            held = [one for one in gang.members if self._holds(one)]
            if not held:
                continue
            self._started[uuid] = held
            if len(held) < (enough := self._enough(gang, held)):
                raise Breach("gang", f"{len(held)} of {uuid} hold something, and {enough} start together: {held}")

    def unsettled(self, records: Mapping[str, BuildRecord]) -> Iterator[str]:
        """At rest: of each gang enough were sent to a cell, or deleted after their claim, or none were sent."""
        for uuid, gang in self._gangs.items():
            sent = {one for one in gang.members if one in records and records[one].cell is not None}
            if not sent or self._is_exempt(gang):
                continue
            started = sent.union(one for one in self._started.get(uuid, ()) if one in self._withdrawn)
            if len(started) < (enough := self._enough(gang, started)):
                yield f"gang: {len(started)} of {uuid} were started, and {enough} start together: {sorted(started)}"

    def _enough(self, gang: RequestedGang, among: Collection[str]) -> int:
        """How many of it are enough, beside those that were deleted instead."""
        gone = sum(one in self._withdrawn and one not in among for one in gang.members)
        return min(gang.min_count, len(gang.members) - gone)

    def _is_exempt(self, gang: RequestedGang) -> bool:
        return any(one in self._exempt for one in gang.members)

    def _holds(self, uuid: str) -> bool:
        kept = self._placement.consumers.get(uuid)
        return kept is not None and bool(kept.consumer.allocations)
