"""Choices that count as used in the replica before the feed tells of their claims."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from placement_worker.replica.replica import Replica

MAX_ASSUMED = 10_000  # choices that count as used at a time


class _AssumedChoice(Struct, frozen=True):
    allocations: Mapping[str, Mapping[str, int]]
    until: float  # monotonic


class AssumedUsage:
    """Choices that count as used, in order of time: the claim is the cell's, so this process learns of it by the feed
    alone. A hold ends when its providers' usage has risen by its amounts, at its time, and before a decision that no
    host is left.
    """

    # The claim is counted once usage has risen; a hold beside it would count the room twice. Another request's claim of
    # that size ends it early; the move then races as any other.

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._assumed: dict[str, _AssumedChoice] = {}  # by key, the oldest first
        self._keys: dict[str, dict[str, None]] = {}  # {provider: keys}
        self._used: dict[str, dict[str, int]] = {}  # {provider: usage by class as last looked at}

    @property
    def next_until(self) -> float | None:
        """When the oldest ends by its time (monotonic); None: nothing is held."""
        return next(iter(self._assumed.values())).until if self._assumed else None

    def add(self, key: str, allocations: Mapping[str, Mapping[str, int]], until: float) -> None:
        """Count a choice as used, instead of an earlier one of this key. until: monotonic seconds."""
        self._drop(key)
        if len(self._assumed) >= MAX_ASSUMED:
            self._drop(next(iter(self._assumed)))
        self._replica.assume(key, allocations)
        self._assumed[key] = _AssumedChoice(allocations, until)
        for uuid in allocations:
            self._keys.setdefault(uuid, {})[key] = None
            if uuid not in self._used:
                self._used[uuid] = self._usage(uuid)

    def expire(self, now: float) -> None:
        """Drop those whose time is over."""
        while self._assumed and next(iter(self._assumed.values())).until <= now:
            self._drop(next(iter(self._assumed)))

    def drop_confirmed(self) -> None:
        """Drop those whose claims the feed has brought since the last look."""
        risen: dict[str, dict[str, int]] = {}
        for uuid, before in self._used.items():
            after = self._usage(uuid)
            if after != before:
                risen[uuid] = {name: amount - before.get(name, 0) for name, amount in after.items()}
                self._used[uuid] = after
        for key in dict.fromkeys(key for uuid in risen for key in self._keys[uuid]):
            allocations = self._assumed[key].allocations
            if _is_within(allocations, risen):
                for uuid, share in allocations.items():
                    for name, amount in share.items():
                        risen[uuid][name] -= amount
                self._drop(key)

    def release(self) -> None:
        """Drop them all."""
        for key in list(self._assumed):
            self._drop(key)

    def _usage(self, uuid: str) -> dict[str, int]:
        row = self._replica.row_of(uuid)
        return {} if row is None else {name: used for name, (_, used, _) in self._replica.inventory_of(row).items()}

    def _drop(self, key: str) -> None:
        held = self._assumed.pop(key, None)
        if held is None:
            return
        self._replica.drop_assumed(key)
        for uuid in held.allocations:
            keys = self._keys[uuid]
            del keys[key]
            if not keys:
                del self._keys[uuid], self._used[uuid]


def _is_within(allocations: Mapping[str, Mapping[str, int]], risen: Mapping[str, Mapping[str, int]]) -> bool:
    return all(
        risen.get(uuid, {}).get(name, 0) >= amount
        for uuid, share in allocations.items()
        for name, amount in share.items()
    )
