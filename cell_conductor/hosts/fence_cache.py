"""One conductor's copy of the fences of its cell's hosts. Every conductor has all of them; they are few."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

from bus.clock import Clock
from bus.contracts.operations import FenceState, HostFence
from bus.faults import Transient
from cell_conductor.state.fence import Fence
from cell_conductor.store.port import InstanceStore

RECENT_S = 2.0  # a copy that was read longer ago does not prove that a fence is not on record
RELOAD_S = 30.0  # the record is read again after this, in case a message of another conductor was lost


class FenceCache:
    """The fences of one cell as one conductor has them."""

    def __init__(self, store: InstanceStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._fences: Mapping[str, Fence] | None = None  # they are not read
        self._is_fresh = False
        self._reload_at = 0.0
        self._read_at = -math.inf
        self._loading = asyncio.Lock()

    @property
    def fences(self) -> Mapping[str, Fence]:
        """Fences by host. Raises Transient while they are not read."""
        # A fence that this conductor has not received yet is applied late; one that is ended already is refused.
        if self._fences is None:
            raise Transient("the fences on record are not read yet", code="fence.unread")
        return self._fences

    async def ensure_loaded(self) -> None:
        """Read them if they are not read."""
        if self._fences is None:
            await self.load()

    @property
    def is_recent(self) -> bool:
        """Whether the record was read within RECENT_S; if it was not, it is read soon."""
        is_recent = self._is_fresh and self._clock.monotonic() < self._read_at + RECENT_S
        self._is_fresh &= is_recent
        return is_recent

    def invalidate(self) -> None:
        """Drop these, which are not on record any more: none is known until they are read again."""
        self._fences = None
        self._is_fresh = False

    def reload_soon(self) -> None:
        """They may have been changed on record; a read that began before does not have it."""
        self._is_fresh = False

    async def load(self) -> None:
        """Read the record. Reads go one after another: an earlier one never replaces the result of a later one."""
        async with self._loading:
            started_at = self._clock.monotonic()
            self._is_fresh = True  # before the read: a message that comes meanwhile makes another read due
            try:
                fences = {one.host_uuid: one for one in await self._store.fences.fences()}
            except BaseException:
                self._is_fresh = False
                raise
            self._fences, self._read_at = fences, started_at
            self._reload_at = self._clock.monotonic() + RELOAD_S

    def on_recorded(self, change: HostFence) -> None:
        """Record that a conductor of this cell has recorded a change of a fence."""
        known = (self._fences or {}).get(change.host_uuid)
        version = -1 if known is None else known.version
        is_unfenced = change.state is FenceState.UNFENCED and version == change.version
        if is_unfenced or version < change.version:
            self._is_fresh = False

    async def reload_if_due(self) -> None:
        """Read the record again, if it was changed or was read long ago. Raises Transient."""
        if not self._is_fresh or self._clock.monotonic() >= self._reload_at:
            await self.load()
