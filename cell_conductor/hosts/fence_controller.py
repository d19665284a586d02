"""Keeps the fences of a cell's hosts: takes the operator's decisions, ends steps that wait for a fenced host, ends
fences.
"""

# Every conductor has all fences of its cell; they are few. The effects of a fence are recorded in one transaction that
# holds the fence, and counts the machines that are stale. The command to destroy one waits in the service's queue;
# a host that comes back and lists a machine which its record proves over is sent the command again. A fence is ended
# when a scan of its host from after the last one that became stale lists no such machine.

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import structlog
from msgspec.structs import replace

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.operations import CellFence, FenceState, HostFence
from bus.faults import Transient
from bus.transport import BusError
from cell_conductor.config import ConductorConfig
from cell_conductor.engine import Engine
from cell_conductor.hosts.fence_cache import FenceCache
from cell_conductor.state.events import HostFenced, InstanceEvent
from cell_conductor.state.fence import Fence, fence_of
from cell_conductor.store.port import InstanceStore

log = structlog.get_logger(__name__)

CHECK_S = 0.5  # between two looks at the fences that are to be ended
PUBLISH_S = 60.0  # between two messages about all fences on record
NO_UUID = "00000000-0000-0000-0000-000000000000"

_version_of = attrgetter("version")


class FenceController:
    """What one conductor does about the fences of its cell."""

    def __init__(
        self, store: InstanceStore, fences: FenceCache, bus: Bus, *, clock: Clock, config: ConductorConfig, cell: str
    ) -> None:
        self._store = store
        self._fences = fences
        self._bus = bus
        self._clock = clock
        self._config = config
        self._cell = cell
        # {host: the decision whose waiting steps this conductor has ended, and the database's incarnation then}
        self._in_effect: dict[str, tuple[int, int]] = {}
        self._repeated: dict[str, Fence] = {}  # decisions that came again: what is on record of them is published soon
        self._publish_at = clock.monotonic() + PUBLISH_S

    async def run(self, engine: Engine) -> None:
        """Until cancelled: read again the changes that others have recorded, end the steps that wait for their hosts,
        answer decisions that came again, and end the fences that may be ended.
        """
        while True:
            await self._clock.sleep(CHECK_S)
            try:
                await self.look(engine)
            except (Transient, BusError) as fault:
                self._fences.reload_soon()
                log.warning("fences.waiting", code=fault.code, reason=str(fault))

    async def look(self, engine: Engine) -> None:
        """One round of `run`. Raises Transient or BusError."""
        await self._fences.reload_if_due()
        await self._put_in_effect(list(self._fences.fences.values()), engine)
        if self._clock.monotonic() >= self._publish_at:
            # Schedulers whose record was restored to before a decision do not have the request to end it.
            for fence in list(self._fences.fences.values()):
                await self._announce(fence)
            self._publish_at = self._clock.monotonic() + PUBLISH_S
        for fence in [one for one in self._fences.fences.values() if one.unfencing]:
            await self._unfence(fence)
        for asked in list(self._repeated.values()):
            await self._publish_recorded(asked)
            self._repeated.pop(asked.host_uuid, None)

    # --- the operator's decisions

    async def take(self, decisions: Sequence[CellFence], engine: Engine) -> None:
        """Queue conductor.requests: record these, end the steps that wait for the hosts, and publish the record."""
        # Of the decisions about one host the newest alone counts: what it takes back has ended nothing yet. A copy of
        # one that is on record, and in effect, reads nothing and is answered by `run`, with all that came meanwhile.
        asked: dict[str, Fence] = {}
        is_new = False
        for decision in {one.host_uuid: one for one in sorted(decisions, key=_version_of)}.values():
            fence = fence_of(decision, self._clock.time())
            on_record = asked[fence.host_uuid] = await self._store.fences.put(fence)
            is_new |= on_record is fence or self._is_due(on_record)
            if on_record is fence:
                log.warning(
                    "host.fenced" if not fence.unfencing else "host.unfencing",
                    host=fence.host,
                    uuid=fence.host_uuid,
                    by=fence.by,
                    reason=fence.reason,
                    cause=fence.host_uuid,
                )
        if not is_new:
            self._repeated.update(asked)
            return
        await self._fences.load()
        if due := [one for host, one in self._fences.fences.items() if host in asked and self._is_due(one)]:
            await self._put_in_effect(due, engine)
            await self._fences.load()
        for on_record in asked.values():
            await self._publish_recorded(on_record)

    def _is_due(self, fence: Fence) -> bool:
        """Whether this conductor has yet to end the steps that wait for the host. An end of a fence ends none."""
        # Each does once for each decision: another may have ended before it could, or have stepped an instance before
        # it knew of the fence.
        return fence.state is FenceState.FENCED and self._in_effect.get(fence.host_uuid) != self._effect_key(fence)

    def _effect_key(self, fence: Fence) -> tuple[int, int]:
        return fence.version, self._store.incarnation

    async def _put_in_effect(self, fences: Sequence[Fence], engine: Engine) -> None:
        self._in_effect = {host: key for host, key in self._in_effect.items() if host in self._fences.fences}
        for fence in filter(self._is_due, fences):
            key = self._effect_key(fence)
            await self._end_waiting_steps(fence.host_uuid, engine)
            self._in_effect[fence.host_uuid] = key

    async def _end_waiting_steps(self, host_uuid: str, engine: Engine) -> None:
        last = NO_UUID
        while True:
            uuids = await self._store.fences.touching(host_uuid, last, self._config.max_batch)
            if not uuids:
                return
            at = self._clock.time()
            events = [InstanceEvent(uuid, HostFenced(at=at, host_uuid=host_uuid)) for uuid in uuids]
            flushed = await engine.take(events, source="fences")
            if flushed is not None:
                await flushed
            last = uuids[-1]

    async def _publish_recorded(self, fence: Fence) -> None:
        await self._fences.ensure_loaded()
        known = self._fences.fences.get(fence.host_uuid)
        if known is not None and known.version < fence.version:
            await self._fences.load()
            known = self._fences.fences.get(fence.host_uuid)
        if known is None:
            # Of the newest decision: a scheduler whose record was restored makes its own newer than that.
            await self._announce(replace(fence, state=FenceState.UNFENCED))
        elif not known.unfencing or not await self._unfence(known):
            await self._announce(known)

    async def _unfence(self, fence: Fence) -> bool:
        if fence.stale:
            return False
        if not await self._store.fences.unfence(fence.host_uuid, fence.version, self._clock.time()):
            self._fences.reload_soon()
            return False
        log.info("host.unfenced", host=fence.host, uuid=fence.host_uuid, cause=fence.host_uuid)
        self._fences.invalidate()
        await self._announce(replace(fence, state=FenceState.UNFENCED))
        return True

    async def _announce(self, fence: Fence) -> None:
        await self._bus.publish(
            HostFence(
                cell=self._cell,
                host_uuid=fence.host_uuid,
                version=fence.version,
                state=fence.state,
                stale_machines=0 if fence.state is FenceState.UNFENCED else fence.stale_machines,
                at=self._clock.time(),
            ),
            cause=fence.host_uuid,
        )
