"""Keeps the fences of a cell's hosts: takes the operator's decisions, ends steps that wait for a fenced host, ends
fences.
"""

# Every conductor has all fences of its cell; they are few. The effects of a fence are recorded in one transaction that
# holds the fence, and counts the machines that are abandoned. The command to destroy one waits in the service's queue;
# a host that comes back and lists a machine which its record proves over is sent the command again. A fence is ended
# when a scan of its host from after the last one that was abandoned lists no such machine.

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

import structlog
from msgspec.structs import replace

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.cell import HostStates, Running
from bus.contracts.operations import CellFence, FenceState, HostFence
from bus.faults import Transient
from bus.transport import BusError
from cell_conductor.config import ConductorConfig
from cell_conductor.engine import Engine
from cell_conductor.state.events import HostFenced, InstanceEvent
from cell_conductor.state.fence import Fence, fence_of, prevents_unfencing
from cell_conductor.state.instance import InstanceSummary
from cell_conductor.state.ownership_proof import changed_recently, is_provably_ended
from cell_conductor.store.port import InstanceStore

log = structlog.get_logger(__name__)

CHECK_S = 0.5  # between two looks at the fences that are to be ended
RECENT_S = 2.0  # a copy that was read longer ago does not prove that a fence is not on record
RELOAD_S = 30.0  # the record is read again after this, in case a message of another conductor was lost
PUBLISH_S = 60.0  # between two messages about all fences on record
NO_UUID = "00000000-0000-0000-0000-000000000000"

_version_of = attrgetter("version")


class FenceController:
    """The fences of one cell as one conductor has them."""

    def __init__(self, store: InstanceStore, bus: Bus, *, clock: Clock, config: ConductorConfig, cell: str) -> None:
        self._store = store
        self._bus = bus
        self._clock = clock
        self._config = config
        self._cell = cell
        self._fences: Mapping[str, Fence] | None = None  # they are not read
        # {host: the decision whose waiting steps this conductor has ended, and the database's incarnation then}
        self._in_effect: dict[str, tuple[int, int]] = {}
        self._repeated: dict[str, Fence] = {}  # decisions that came again: what is on record of them is published soon
        self._is_fresh = False
        self._reload_at = 0.0
        self._read_at = -math.inf
        self._publish_at = clock.monotonic() + PUBLISH_S
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
        """They have just been changed on record; a read that began before does not have it."""
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
        if change.cell == self._cell and (is_unfenced or version < change.version):
            self._is_fresh = False

    async def run(self, engine: Engine) -> None:
        """Until cancelled: read again the changes that others have recorded, end the steps that wait for their hosts,
        answer decisions that came again, and end the fences that may be ended.
        """
        while True:
            await self._clock.sleep(CHECK_S)
            try:
                await self.look(engine)
            except (Transient, BusError) as fault:
                self._is_fresh = False
                log.warning("fences.waiting", code=fault.code, reason=str(fault))

    async def look(self, engine: Engine) -> None:
        """One round of `run`. Raises Transient or BusError."""
        if not self._is_fresh or self._clock.monotonic() >= self._reload_at:
            await self.load()
        await self._put_in_effect(list(self.fences.values()), engine)
        if self._clock.monotonic() >= self._publish_at:
            self._publish_at = self._clock.monotonic() + PUBLISH_S
            # Schedulers whose record was restored to before a decision do not have the request to end it.
            for fence in list(self.fences.values()):
                await self._announce(fence)
        for fence in [one for one in self.fences.values() if one.unfencing]:
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
        await self.load()
        if due := [one for host, one in self.fences.items() if host in asked and self._is_due(one)]:
            await self._put_in_effect(due, engine)
            await self.load()
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
        self._in_effect = {host: key for host, key in self._in_effect.items() if host in self.fences}
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
        await self.ensure_loaded()
        known = self.fences.get(fence.host_uuid)
        if known is not None and known.version < fence.version:
            await self.load()
            known = self.fences.get(fence.host_uuid)
        if known is None:
            # Of the newest decision: a scheduler whose record was restored makes its own newer than that.
            await self._announce(replace(fence, state=FenceState.UNFENCED))
        elif not known.unfencing or not await self._unfence(known):
            await self._announce(known)

    async def _unfence(self, fence: Fence) -> bool:
        if fence.abandoned:
            return False
        if not await self._store.fences.unfence(fence.host_uuid, fence.version, self._clock.time()):
            self._is_fresh = False
            return False
        log.info("host.unfenced", host=fence.host, uuid=fence.host_uuid, cause=fence.host_uuid)
        self.invalidate()
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

    # --- reports of fenced hosts

    async def compare(
        self,
        report: HostStates,
        summaries: Sequence[InstanceSummary],
        database_id: str,
        has_passed: Callable[[str, str], bool] = lambda _host, _service: False,
    ) -> list[tuple[str, str]]:
        """Record what a report shows of fenced hosts; returns (host, rescan) of what a later scan has to show. briefs:
        of instances that it lists. has_passed(host, service): whether the service has given the host up, or is gone.
        """
        # The rules of the instances decide what is destroyed, as on any other host. Until a host has passed, the scan
        # of another service shows nothing of the first one's machines: the two may have two hosts of one uuid.
        fences = self.fences  # a fence may be ended meanwhile
        by_uuid = {one.uuid: one for one in summaries}
        rescans = list[tuple[str, str]]()
        for host in report.hosts:
            if host.running is None or (fence := fences.get(host.uuid)) is None:
                continue
            own = [(one, by_uuid.get(one.instance_uuid)) for one in host.running if one.database_id == database_id]
            left = [
                one for one, record in own if record is None or not is_provably_ended(record, one.attempt, host.uuid)
            ]
            if fence.rescan in report.rescans:
                await self._record_running(fence, report.service, left, has_passed)
            elif left or any(name == report.service or has_passed(host.uuid, name) for name in fence.running):
                rescans.append((host.uuid, fence.rescan))
            mine = [name for name in fence.abandoned if name == report.service or has_passed(host.uuid, name)]
            shown = [name for name in mine if fence.rescan_for(name) in report.rescans]
            rescans += [
                (host.uuid, fence.rescan_for(name))
                for name in mine
                if name not in shown and not self._changed_recently(fence.abandoned[name].at)
            ]
            if shown and not any(prevents_unfencing(record, one, host.uuid) for one, record in own):
                await self._store.fences.record_empty(host.uuid, {name: fence.abandoned[name] for name in shown})
                self._is_fresh = False
        return rescans

    def _changed_recently(self, at: float) -> bool:
        return changed_recently(at, now=self._clock.time(), grace_s=self._config.report_grace_s)

    async def _record_running(
        self,
        fence: Fence,
        service: str,
        listed: Sequence[Running],
        has_passed: Callable[[str, str], bool],
    ) -> None:
        attempts = {one.instance_uuid: one.attempt for one in listed if not (one.stopped or one.destroying)}
        passed = [name for name in fence.running if has_passed(fence.host_uuid, name)]
        if fence.with_running(service, attempts, passed) != fence:
            await self._store.fences.record_running(fence, service, attempts, passed)
            await self.load()
