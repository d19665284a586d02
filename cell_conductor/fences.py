"""Keeps the fences of a cell's hosts: takes the operator's decisions, ends steps that wait for a fenced host, lifts
fences.

Every conductor has all fences of its cell; they are few. The effects of a fence are recorded with the host's losses, in
one transaction that holds the fence. The order to destroy a loss waits in the service's queue; a host that comes back
and lists the loss is sent the order again, and a loss is deleted from the record when the host has destroyed it, or
reports without it by a scan from after it. A fence is lifted when its host has no losses left.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter

import structlog
from msgspec import convert
from msgspec.structs import replace

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.cell import ComputeHosts, ComputeOutcome, ComputeResult, Destroy, HostReport, Running
from bus.contracts.operations import CellFence, FenceState, HostFence
from bus.faults import Transient
from bus.port import BusError

from .config import ConductorConfig
from .domain.events import HostFenced, InstanceEvent
from .domain.fences import Fence, Loss
from .domain.report import has_just_changed
from .domain.set_back import SetBack
from .engine import Engine
from .store.port import InstanceStore
from .store.safety import KEEP

log = structlog.get_logger(__name__)

CHECK_S = 0.5  # between two looks at the fences that are to be lifted
RECENT_S = 2.0  # a copy that was read longer ago does not prove that a fence is not on record
RELOAD_S = 30.0  # the record is read again after this, in case an announcement of another conductor was lost
ANNOUNCE_S = 60.0  # between two announcements of all fences on record
NO_UUID = "00000000-0000-0000-0000-000000000000"

_version_of = attrgetter("version")


class FenceKeeper:
    """The fences of one cell as one conductor has them."""

    def __init__(self, store: InstanceStore, bus: Bus, *, clock: Clock, config: ConductorConfig, cell: str) -> None:
        self._store = store
        self._bus = bus
        self._clock = clock
        self._config = config
        self._cell = cell
        self._fences: Mapping[str, Fence] | None = None  # they are not read
        self._losses: Mapping[tuple[str, str], Loss] = {}
        self._listed_by: dict[tuple[str, str], set[str]] = {}  # {loss: services that have reported its machine}
        # {host: the decision whose waiting steps this conductor has ended, and the database's set-back then}
        self._in_effect: dict[str, tuple[int, SetBack]] = {}
        self._asked: dict[str, Fence] = {}  # decisions that came again: what is on record of them is announced soon
        self._is_fresh = False
        self._reload_at = 0.0
        self._read_at = -math.inf
        self._announce_at = clock.monotonic() + ANNOUNCE_S
        self._loading = asyncio.Lock()

    @property
    def known(self) -> Mapping[str, Fence]:
        """Fences by host. Raises Transient while they are not read.

        A fence that this conductor has not received yet is applied late; one that is lifted already is refused.
        """
        if self._fences is None:
            raise Transient("the fences on record are not read yet", code="fence.unread")
        return self._fences

    async def ensure_known(self) -> None:
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

    def note_losses(self, losses: Sequence[Loss]) -> None:
        """These have just been recorded; a read that began before does not have them."""
        self._is_fresh = False
        self._losses = {**self._losses, **{one.place: one for one in losses}}

    async def load(self) -> None:
        """Read the record.

        Reads are done one after another: an earlier one never replaces the result of a later one.
        """
        async with self._loading:
            began = self._clock.monotonic()
            self._is_fresh = True  # before the read: an announcement that comes meanwhile makes another read due
            try:
                fences = {one.host_uuid: one for one in await self._store.fences.fences()}
                losses = {one.place: one for one in await self._store.fences.losses()} if fences else {}
            except BaseException:
                self._is_fresh = False
                raise
            self._fences, self._read_at = fences, began
            self._hold(losses)
            self._reload_at = self._clock.monotonic() + RELOAD_S

    def on_announced(self, change: HostFence) -> None:
        """Note that a conductor of this cell has recorded a change of a fence."""
        known = (self._fences or {}).get(change.host_uuid)
        version = -1 if known is None else known.version
        is_lifted = change.state is FenceState.LIFTED and version == change.version
        if change.cell == self._cell and (is_lifted or version < change.version):
            self._is_fresh = False

    async def run(self, engine: Engine) -> None:
        """Until cancelled: read again the changes that others have recorded, end the steps that wait for their hosts,
        answer decisions that came again, and lift the fences that may be lifted.
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
        await self._put_in_effect(list(self.known.values()), engine)
        if self._clock.monotonic() >= self._announce_at:
            self._announce_at = self._clock.monotonic() + ANNOUNCE_S
            # Schedulers whose record was set back to before a decision do not have the request to lift it.
            for fence in list(self.known.values()):
                await self._announce(fence)
        for fence in [one for one in self.known.values() if one.lifting]:
            await self._lift(fence)
        for asked in list(self._asked.values()):
            await self._announce_known(asked)
            self._asked.pop(asked.host_uuid, None)

    # --- the operator's decisions

    async def take(self, decisions: Sequence[CellFence], engine: Engine) -> None:
        """Queue conductor.requests: record these, end the steps that wait for the hosts, and publish the record.

        Of the decisions about one host the newest alone counts: what it takes back has ended nothing yet. A copy of one
        that is on record, and in effect, reads nothing and is answered by `run`, with all that came meanwhile.
        """
        asked: dict[str, Fence] = {}
        is_new = False
        for decision in {one.host_uuid: one for one in sorted(decisions, key=_version_of)}.values():
            state = FenceState.LIFTING if decision.lift else FenceState.FENCED
            # A lift has a time in any case, by which its record goes; a fence without one proves less.
            at = decision.at or (self._clock.time() if decision.lift else 0.0)
            fence = replace(convert(decision, Fence, from_attributes=True), state=state, at=at)
            on_record = asked[fence.host_uuid] = await self._store.fences.put(fence)
            is_new |= on_record is fence or self._is_due(on_record)
            if on_record is fence:
                log.warning(
                    "host.fenced" if not fence.lifting else "host.fence_lifting",
                    host=fence.host,
                    uuid=fence.host_uuid,
                    by=fence.by,
                    reason=fence.reason,
                    cause=fence.host_uuid,
                )
        if not is_new:
            self._asked.update(asked)
            return
        await self.load()
        if due := [one for host, one in self.known.items() if host in asked and self._is_due(one)]:
            await self._put_in_effect(due, engine)
            await self.load()
        for on_record in asked.values():
            await self._announce_known(on_record)

    def _is_due(self, fence: Fence) -> bool:
        """Whether this conductor has yet to end the steps that wait for the host. A lift ends none.

        Each does once for each decision: another may have ended before it could, or have stepped an instance before it
        knew of the fence.
        """
        return fence.state is FenceState.FENCED and self._in_effect.get(fence.host_uuid) != self._mark_of(fence)

    def _mark_of(self, fence: Fence) -> tuple[int, SetBack]:
        return fence.version, self._store.set_back

    async def _put_in_effect(self, fences: Sequence[Fence], engine: Engine) -> None:
        self._in_effect = {host: mark for host, mark in self._in_effect.items() if host in self.known}
        for fence in filter(self._is_due, fences):
            mark = self._mark_of(fence)
            await self._end_what_waits(fence.host_uuid, engine)
            self._in_effect[fence.host_uuid] = mark

    async def _end_what_waits(self, host_uuid: str, engine: Engine) -> None:
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

    async def _announce_known(self, fence: Fence) -> None:
        await self.ensure_known()
        known = self.known.get(fence.host_uuid)
        if known is not None and known.version < fence.version:
            await self.load()
            known = self.known.get(fence.host_uuid)
        if known is None:
            # Of the newest decision: a scheduler whose record was set back makes its own newer than that.
            await self._announce(replace(fence, state=FenceState.LIFTED))
        elif not known.lifting or not await self._lift(known):
            await self._announce(known)

    async def _lift(self, fence: Fence) -> bool:
        if any(host == fence.host_uuid for host, _ in self._losses):
            return False
        if not await self._store.fences.lift(fence.host_uuid, fence.version, self._clock.time()):
            self._is_fresh = False
            return False
        log.info("host.fence_lifted", host=fence.host, uuid=fence.host_uuid, cause=fence.host_uuid)
        self.invalidate()
        await self._announce(replace(fence, state=FenceState.LIFTED))
        return True

    async def _announce(self, fence: Fence) -> None:
        count = Counter(host for host, _ in self._losses)[fence.host_uuid]
        await self._bus.publish(
            HostFence(
                cell=self._cell,
                host_uuid=fence.host_uuid,
                version=fence.version,
                state=fence.state,
                losses=0 if fence.state is FenceState.LIFTED else count,
                at=self._clock.time(),
            ),
            cause=fence.host_uuid,
        )

    # --- reports of fenced hosts

    async def on_results(self, results: Sequence[ComputeResult]) -> None:
        """Queue conductor.results: a machine that a host has destroyed is no loss any more.

        Only the answer of a service that had the machine counts, by the record or by its report: another one that is
        ordered, or was ordered earlier, answers at once of a machine that it never had. Without that answer a later
        report of the host ends the loss.
        """
        gone = [
            loss
            for one in results
            if one.outcome is ComputeOutcome.DESTROYED
            and (loss := self._losses.get((one.host_uuid, one.instance_uuid))) is not None
            and one.attempt >= loss.attempt
            and (one.service == loss.service or one.service in self._listed_by.get(loss.place, ()))
        ]
        await self._delete_losses(gone)

    async def without_losses(
        self,
        report: ComputeHosts,
        deployment: str,
        has_passed: Callable[[str, str], bool] = lambda _host, _service: False,
    ) -> tuple[ComputeHosts, list[tuple[str, str]]]:
        """A report without the machines that their hosts have lost: these are ordered to be destroyed; and (host,
        rescan) of what a later scan has to show.

        has_passed(host, service): whether that service has given the host up, or is gone for good. Until then the scan
        of another one shows nothing of the first one's machines: the two may have two hosts of one uuid. The fence is
        the proof: no record has to explain them, and no breaker counts them.
        """
        await self.ensure_known()
        fences = self.known  # a fence may be lifted while the losses of its host are looked at
        if not any(host.uuid in fences for host in report.hosts):
            return report, []
        rescans, gone, hosts = list[tuple[str, str]](), list[Loss](), list[HostReport]()
        for host in report.hosts:
            if host.running is None or host.uuid not in fences:
                hosts.append(host)
                continue
            losses = {loss.instance_uuid: loss for place, loss in self._losses.items() if place[0] == host.uuid}
            listed = {one.instance_uuid for one in host.running}
            gone += [losses.pop(uuid) for uuid in await self._kept_on(host.uuid, losses.keys() & listed)]
            kept = await self._destroy_lost(host.running, losses, report.service, deployment)
            if (rescan := fences[host.uuid].rescan) in report.rescans:
                await self._note_running(fences[host.uuid], report.service, kept, deployment, has_passed)
            elif any(one.deployment == deployment for one in kept) or any(
                name == report.service or has_passed(host.uuid, name) for name in fences[host.uuid].running
            ):
                rescans.append((host.uuid, rescan))
            for loss in [loss for uuid, loss in losses.items() if uuid not in listed]:
                if loss.service == report.service or has_passed(host.uuid, loss.service):
                    if loss.rescan in report.rescans:
                        gone.append(loss)
                    elif not has_just_changed(loss.at, now=self._clock.time(), grace_s=self._config.report_grace_s):
                        rescans.append((host.uuid, loss.rescan))
            hosts.append(replace(host, running=tuple(kept)))
        await self._delete_losses(gone)
        return replace(report, hosts=tuple(hosts)), rescans

    async def _kept_on(self, host_uuid: str, lost: Collection[str]) -> list[str]:
        """Those of these instances of which an operator keeps the machine there: it is no loss any more."""
        if not lost:
            return []
        async with self._store.transaction() as transaction:
            found = await transaction.unexplained(lost)
        return [one.machine.uuid for one in found if one.verdict == KEEP and one.machine.host_uuid == host_uuid]

    async def _destroy_lost(
        self, listed: Sequence[Running], losses: Mapping[str, Loss], service: str, deployment: str
    ) -> list[Running]:
        """Order the lost machines of these to be destroyed; the others."""
        kept = []
        for one in listed:
            loss = losses.get(one.instance_uuid)
            if loss is None or one.deployment != deployment or not 0 < one.attempt <= loss.attempt:
                kept.append(one)
                continue
            self._listed_by.setdefault(loss.place, set()).add(service)
            if not one.destroying:
                await self._destroy(loss, service, deployment)
        return kept

    async def _note_running(
        self,
        fence: Fence,
        service: str,
        listed: Sequence[Running],
        deployment: str,
        has_passed: Callable[[str, str], bool],
    ) -> None:
        attempts = {
            one.instance_uuid: one.attempt
            for one in listed
            if one.deployment == deployment and not (one.stopped or one.destroying)
        }
        passed = [name for name in fence.running if has_passed(fence.host_uuid, name)]
        if fence.with_running(service, attempts, passed) != fence:
            await self._store.fences.note_running(fence, service, attempts, passed)
            await self.load()

    async def _destroy(self, loss: Loss, service: str, deployment: str) -> None:
        order = Destroy(
            instance_uuid=loss.instance_uuid,
            attempt=loss.attempt,
            host_uuid=loss.host_uuid,
            service=service,
            deployment=deployment,
        )
        await self._bus.publish(order, cause=loss.instance_uuid)

    async def _delete_losses(self, losses: Sequence[Loss]) -> None:
        if not losses:
            return
        await self._store.fences.delete_losses(losses)
        gone = {loss.place: loss.attempt for loss in losses}
        self._hold({place: loss for place, loss in self._losses.items() if loss.attempt > gone.get(place, -1)})

    def _hold(self, losses: Mapping[tuple[str, str], Loss]) -> None:
        self._losses = losses
        self._listed_by = {place: names for place, names in self._listed_by.items() if place in losses}
