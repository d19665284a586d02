"""Which machines are left on fenced hosts, by the reports of their compute services: without any a fence can end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bus.clock import Clock
from bus.contracts.cell import HostStates, Running
from cell_conductor.config import ConductorConfig
from cell_conductor.hosts.fence_cache import FenceCache
from cell_conductor.state.fence import Fence, prevents_unfencing
from cell_conductor.state.instance import InstanceSummary
from cell_conductor.state.ownership_proof import changed_recently, is_provably_ended
from cell_conductor.store.port import InstanceStore


class StaleMachines:
    """Of one cell, as one conductor records them."""

    def __init__(self, store: InstanceStore, fences: FenceCache, clock: Clock, config: ConductorConfig) -> None:
        self._store = store
        self._fences = fences
        self._clock = clock
        self._config = config

    async def compare(
        self,
        report: HostStates,
        summaries: Sequence[InstanceSummary],
        database_id: str,
        has_passed: Callable[[str, str], bool] = lambda _host, _service: False,
    ) -> list[tuple[str, str]]:
        """Record what a report shows of fenced hosts; returns (host, rescan) of what a later scan has to show.
        summaries: of the instances that it lists. has_passed(host, service): whether the service has given the host
        up, or is gone.
        """
        # The rules of the instances decide what is destroyed, as on any other host. Until a host has passed, the scan
        # of another service shows nothing of the first one's machines: the two may have two hosts of one uuid.
        fences = self._fences.fences  # a fence may be ended meanwhile
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
            mine = [name for name in fence.stale if name == report.service or has_passed(host.uuid, name)]
            shown = [name for name in mine if fence.rescan_for(name) in report.rescans]
            rescans += [
                (host.uuid, fence.rescan_for(name))
                for name in mine
                if name not in shown and not self._changed_recently(fence.stale[name].at)
            ]
            if shown and not any(prevents_unfencing(record, one, host.uuid) for one, record in own):
                await self._store.fences.record_empty(host.uuid, {name: fence.stale[name] for name in shown})
                self._fences.reload_soon()
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
            await self._fences.load()
