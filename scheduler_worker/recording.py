"""RECORD: build requests go on record, and what each of them is follows from that: new, repeated, a clash, deleted."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from bus.clock import Clock
from bus.consuming.outcome import Done
from bus.persistence.unit_of_work import run_optimistic
from scheduler_worker import metrics
from scheduler_worker.cancellations import Cancellations
from scheduler_worker.domain.admission import Admission, admit, first_of_each, is_clash_of_first
from scheduler_worker.domain.builds import Author, BuildStatus
from scheduler_worker.domain.decisions import to_clients
from scheduler_worker.domain.pending import PendingBuild, first_event, new_build
from scheduler_worker.store.port import BuildUnit, SchedulerStore

# Requests whose processing has not ended, as far as this process knows; those whose handler crashed stay among them.
MAX_IN_PROGRESS = 10_000


class RequestRecorder:
    """Puts build requests on record, a batch in one transaction. One per scheduler process."""

    def __init__(self, store: SchedulerStore, cancellations: Cancellations, *, clock: Clock, process: str) -> None:
        self._store = store
        self._cancellations = cancellations
        self._clock = clock
        self._who = process
        self._in_progress: dict[str, None] = {}  # ... by instance, in the order in which they came

    async def record(self, builds: Sequence[PendingBuild]) -> list[Admission]:
        """Insert the new requests and separate repeated ones from clashes: one statement each for the whole batch."""
        author, firsts = Author(self._who, self._clock.time()), first_of_each(builds)

        async def insert(unit: BuildUnit) -> list[Admission]:
            return await self._insert(unit, builds, firsts, author)

        # Not durable: until a decision is on disk, the unacknowledged message itself survives a crash.
        admissions = await run_optimistic(
            lambda optimistic: self._store.unit(durable=False, optimistic=optimistic), insert
        )
        for admission in admissions:
            metrics.count_requests("build", admission.label)
        self._remember(firsts)
        if any(isinstance(admission.outcome, Done) for admission in admissions):
            await self._store.flush()  # the record acknowledges those, and nothing more is written
        await self._cancellations.release(
            [pending for pending, one in zip(builds, admissions, strict=True) if one.release]
        )
        return admissions

    def may_have_run(self, pending: PendingBuild) -> bool:
        """Whether an earlier delivery may have come as far as its claim, here or in another scheduler."""
        return pending.redelivered or pending.instance_uuid in self._in_progress

    def finish(self, builds: Iterable[PendingBuild]) -> None:
        """The batch is over, and each of its requests has an outcome."""
        for pending in builds:
            self._in_progress.pop(pending.instance_uuid, None)

    def _remember(self, firsts: Iterable[str]) -> None:
        self._in_progress.update(dict.fromkeys(firsts))
        for oldest in list(itertools.islice(self._in_progress, max(0, len(self._in_progress) - MAX_IN_PROGRESS))):
            del self._in_progress[oldest]

    async def _insert(
        self, unit: BuildUnit, builds: Sequence[PendingBuild], firsts: Mapping[str, PendingBuild], author: Author
    ) -> list[Admission]:
        """The transaction. The record of a gang's first member stands for the whole request, so it goes first."""
        new, known = set[str](), dict[str, BuildStatus]()
        for later in (False, True):
            part = {
                uuid: pending
                for uuid, pending in firsts.items()
                if pending.is_later_member is later and not (later and is_clash_of_first(pending, firsts, known))
            }
            new |= await unit.insert([new_build(pending, author) for pending in part.values()], author.at)
            known |= await unit.read([uuid for uuid in part if uuid not in new])
        for uuid, pending in firsts.items():
            if uuid in new:
                unit.emit(to_clients(first_event(pending, author.at)))
        admissions = [admit(pending, firsts, new, known, may_have_run=self.may_have_run(pending)) for pending in builds]
        for admission in admissions:
            if admission.event is not None:
                unit.emit(to_clients(admission.event))
        return admissions
