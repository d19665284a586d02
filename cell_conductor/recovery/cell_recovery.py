"""Finds out what is true of a cell whose database was restored, and makes its records that: behind a barrier, while no
request, result or report is taken.
"""

# What the compute services list decides, with what the schedulers and placement have; `reconcile` has the rules. All is
# idempotent: a conductor that dies is followed from the listings on, under the same incarnation of the database. What
# cannot be known keeps a blocked reason, is looked at again and again, and holds up nothing else.

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import islice

import structlog

from bus.clock import Clock
from bus.contracts.operations import CellFence, Losses
from bus.faults import Transient
from bus.transport import BusError
from cell_conductor.config import ConductorConfig
from cell_conductor.engine import FencePort
from cell_conductor.hosts.lease_controller import LeaseController
from cell_conductor.hosts.stated_marks import StatedMarks
from cell_conductor.recovery.known_reader import MAX_OWN, KnownReader, OwnInstances
from cell_conductor.recovery.machine_listing import MachineCollector, MachineListing
from cell_conductor.recovery.record_reconciler import MAX_BATCH, RecordReconciler
from cell_conductor.rules.recovered import Loss, loss_of
from cell_conductor.state.fence import fence_of
from cell_conductor.store.keyed import MAX_LOSSES_NAMED
from cell_conductor.store.port import InstanceStore

log = structlog.get_logger(__name__)

LOOK_S = 0.5  # between two looks whether there is something to do
ACCEPTANCE_POLL_S = 10.0  # until it is looked whether an operator has accepted the losses
AGAIN_S = 2.0  # a server has not answered
LATE_S = 30.0  # between two looks at what is listed late
MAX_BLOCKED = 1_000  # that are looked at at once; others come again with their deadline
LOGGED = 10


class CellRecovery:
    """One conductor's. The leader of the leases alone recovers the cell; any looks at what is blocked."""

    def __init__(
        self,
        store: InstanceStore,
        *,
        clock: Clock,
        config: ConductorConfig,
        collector: MachineCollector,
        known: KnownReader,
        reconciler: RecordReconciler,
        leases: LeaseController,
        marks: StatedMarks,
        fences: FencePort,
    ) -> None:
        self._store = store
        self._clock = clock
        self._config = config
        self._collector = collector
        self._known = known
        self._reconciler = reconciler
        self._leases = leases
        self._marks = marks
        self._fences = fences
        self._blocked: dict[str, None] = {}
        # Services that had not listed when the last recovery ended (None: not read yet), of which incarnation.
        self._unlisted: Collection[str] | None = None
        self._unlisted_of = 0
        self._late_at_s = 0.0

    def note_blocked(self, instances: Collection[str]) -> None:
        """They are to be looked at again."""
        room = MAX_BLOCKED - len(self._blocked)
        self._blocked.update(dict.fromkeys(islice(instances, max(0, room))))

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._clock.sleep(LOOK_S)
            try:
                await self.look()
            except (Transient, BusError) as fault:
                log.warning("recovery.waiting", code=fault.code, reason=str(fault))
                await self._clock.sleep(AGAIN_S)

    async def look(self) -> None:
        """One round of `run`. Raises Transient and BusError."""
        if (listening := self._marks.marks_wanted_by()) is not None:
            self._marks.hear_all(await self._known.marks(), listening)
        if self._leases.up() is None:
            return  # a service that is up may not have been heard yet
        if self._store.is_recovering and self._leases.is_leader:
            await self._recover()
        elif not self._store.is_recovering:
            await self._look_again()

    async def _look_again(self) -> None:
        """At what is blocked, and at all that a service has which lists for the first time since the last recovery."""
        late = await self._late() if self._leases.is_leader else set[str]()
        if not self._blocked and not late:
            return
        blocked, self._blocked = set(self._blocked), {}
        listing = await self._collector.collect()
        late -= listing.silent
        self._late_at_s = self._clock.monotonic() + LATE_S
        uuids = sorted(blocked | listing.of(late))
        known = await self._known.asked(uuids)
        made = await self._reconciler.reconcile_all(uuids, known, listing)
        if late:
            async with self._store.transaction() as transaction:
                await transaction.record_listed(late)
            self._unlisted = None
            log.warning("recovery.late", services=sorted(late)[:LOGGED], instances=len(uuids), **made)

    async def _late(self) -> set[str]:
        """The services that have not listed since the last recovery, and are up now."""
        if self._clock.monotonic() < self._late_at_s:
            return set()
        if self._unlisted is None or self._unlisted_of != self._store.incarnation:
            async with self._store.transaction() as transaction:
                self._unlisted = frozenset(await transaction.absent_services())
            self._unlisted_of = self._store.incarnation
        return set(self._unlisted).intersection(self._leases.up() or ())

    async def _recover(self) -> None:
        incarnation = (listing := await self._collector.collect()).incarnation
        log.warning(
            "recovery.listed",
            incarnation=incarnation,
            instances=len(listing.machines),
            hosts=len(listing.hosts),
            silent=sorted(listing.silent)[:LOGGED],
        )
        uuids = sorted(listing.machines)

        async def own(after: str, last: str, limit: int) -> Sequence[str]:
            recorded = await self._store.uuids(after, last, limit)
            first = bisect_right(uuids, after)
            listed = uuids[first : bisect_right(uuids, last) if last else None][:limit]
            return sorted({*recorded, *listed})[:limit]

        async for part in self._known.parts(own):  # hosts and instances have one order: fences first
            await self._put_fences(part.fences)
            for mark in part.marks:
                self._marks.hear(mark)
        async with self._store.transaction() as transaction:
            await transaction.expect_recovering()  # the next leader may have opened the cell meanwhile
            started = await transaction.begin_recovery(self._marks.stated())
        if started != incarnation:
            self._marks.record_recovery()
            return  # what was commanded by a later one than this is refused from now on: anew
        await self._fences.ensure_loaded()
        if await self._waits_for_word(incarnation, listing, own):
            await self._clock.sleep(ACCEPTANCE_POLL_S)
            return
        made = Counter[str]()
        async for part in self._known.parts(own):
            here = sorted({*part.instances, *await own(part.after, part.last, MAX_OWN)})
            made += await self._reconciler.reconcile_all(here, part.instances, listing)
        async with self._store.transaction() as transaction:
            await transaction.expect_recovering()
            await transaction.end_recovery(listing.silent, listing.without)
        self._unlisted = None
        log.warning("recovery.ended", incarnation=incarnation, **made)

    async def _waits_for_word(self, incarnation: int, listing: MachineListing, own: OwnInstances) -> bool:
        """Whether this would end more instances than an operator has accepted: it may be the wrong database."""
        lost: dict[Loss, list[str]] = {Loss.INSTANCE: [], Loss.BUILD: []}
        async for part in self._known.parts(own):
            here = sorted({*part.instances, *await own(part.after, part.last, MAX_OWN)})
            for start in range(0, len(here), MAX_BATCH):
                found = await self._reconciler.reconciled(here[start : start + MAX_BATCH], part.instances, listing)
                for uuid, (before, result) in found.items():
                    if (loss := loss_of(before, result, part.instances.get(uuid))) is not None:
                        lost[loss].append(uuid)
        ended, builds = lost[Loss.INSTANCE], len(lost[Loss.BUILD])
        losses = Losses(len(ended), tuple(ended[:MAX_LOSSES_NAMED]), builds)
        async with self._store.transaction() as transaction:
            await transaction.expect_recovering()
            if losses.count <= max(self._config.breaker_limit, await transaction.accepted_losses()):
                return False
            await transaction.stop_recovery(losses)
        first = losses.instances[:LOGGED]
        log.error("recovery.stopped", incarnation=incarnation, losses=losses.count, builds=builds, first=first)
        return True

    async def _put_fences(self, decisions: Collection[CellFence]) -> None:
        for decision in decisions:
            await self._store.fences.put(fence_of(decision, self._clock.time()))
        if decisions:
            self._fences.invalidate()
