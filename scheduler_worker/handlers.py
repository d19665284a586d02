"""Build and delete requests: put on record, decide, claim, dispatch; each step safe to do twice.

The record comes first and is where a repeat is noticed. The claim is idempotent by (instance, attempt 1). The last
transaction writes the decision, maps the instance to its cell and keeps what is to be published, guarded by the
record's state: whoever else has the same request in hand loses there and does nothing.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence

import structlog

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.base import MAX_REASON
from bus.contracts.build import BuildRequest, BuildState, DeleteRequest
from bus.contracts.catalogue import BY_QUEUE
from bus.contracts.placement import Release, ReleaseResult
from bus.contracts.stages import Stamps
from bus.faults import Fault, Transient
from bus.outbox import Addressed
from bus.outcome import Done, Outcome, Received, Retry
from bus.persistence.unit_of_work import run_optimistic
from bus.port import BusError
from scheduler_worker import metrics
from scheduler_worker.claiming import Claiming
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.decisions import (
    CONTENDED,
    STRANDED,
    Author,
    cell_build,
    decided_event,
    decision,
    exhausted,
    to_clients,
    unsatisfiable,
    with_stages,
)
from scheduler_worker.deleting import delete_all, never_built
from scheduler_worker.domain.builds import BuildDecision
from scheduler_worker.domain.flavors import HOST_UNKNOWN
from scheduler_worker.domain.request_spec import RequestSpec, Unsatisfiable
from scheduler_worker.domain.selector import NoValidHost, Selector
from scheduler_worker.endings import ATTEMPT, CONSUMER_CHANGED, Asking, Away, Contended, Ending, Placed, Stranded, Work
from scheduler_worker.item import (
    TOO_OLD,
    Item,
    accepted,
    already_on_record,
    first_event,
    is_undone,
    item_of,
    new_build,
    repeated,
    stamps_of,
    told_at_once,
)
from scheduler_worker.retention import longest_way_s
from scheduler_worker.store.port import BuildStatus, BuildUnit, SchedulerStore

log = structlog.get_logger(__name__)

WHO = "scheduler"
RETRIES = len(BY_QUEUE["scheduler.requests"].retry_s)
# Requests in hand that are remembered, those too that were given up because they crashed.
MAX_BEGUN = 10_000
FEW = 16  # so many requests choose their hosts while they are recorded; choosing for more takes longer than that
UNHEARD = Retry("hosts.unheard", "not every host has been heard from yet")


class RequestHandler:
    """Handles queue `scheduler.requests`."""

    def __init__(
        self,
        store: SchedulerStore,
        bus: Bus,
        selector: Selector,
        claiming: Claiming,
        *,
        clock: Clock,
        config: SchedulerConfig,
        process: str,
    ) -> None:
        self._store = store
        self._bus = bus
        self._selector = selector
        self._claiming = claiming
        self._clock = clock
        self._config = config
        self._who = process or WHO
        self._started_s: float | None = None  # of the first batch: the loop's clock is not there before
        self._begun: dict[str, None] = {}  # requests of batches that were not finished (yet)

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """Record, then delete, then decide: a delete in the same batch is in time to stop its build."""
        if self._started_s is None:
            self._started_s = self._clock.monotonic()
        now = self._clock.time()
        items = [self._item(received, now) for received in batch if isinstance(received.message, BuildRequest)]
        deletes = [received for received in batch if isinstance(received.message, DeleteRequest)]
        ahead: Mapping[str, Work] = {}
        outcomes: dict[int, Outcome | None] = {}
        try:
            if items:
                started = self._clock.monotonic()
                ahead = await self._recorded(items, alone=not deletes)
                metrics.STAGE_S.labels("record").observe(self._clock.monotonic() - started)
            if deletes:
                done, going = await delete_all(self._store, deletes, self._author())
                outcomes.update(done)
                for item in items:
                    item.cancelled |= item.request.instance_uuid in going
            cancelled = [item for item in items if item.cancelled and item.outcome is None]
            if cancelled:
                await self._cancel(cancelled)
            still = [item for item in items if item.outcome is None]
            if still:
                await self._place(still, ahead)
        finally:
            self._claiming.drop(ahead.values())
        outcomes.update((id(item.received), item.outcome) for item in items)
        for item in items:
            self._begun.pop(item.request.instance_uuid, None)
        return [_settled(outcomes[id(received)]) for received in batch]

    # --- builds

    def _item(self, received: Received, now: float) -> Item:
        item = item_of(received, now)
        item.doubtful = received.exhausted  # an earlier delivery may have claimed for it
        if item.request.flavor not in self._selector.asked:
            known = ", ".join(sorted(self._selector.asked))
            reason = f"there is no flavor {item.request.flavor} (there are: {known})"
            item.refused = ("flavor.unknown", reason[:MAX_REASON])
        elif 0 < received.meta.sent_at < now - longest_way_s(self._config):
            item.refused = (TOO_OLD, "it was sent so long ago that it may have been carried out and forgotten since")
        return item

    async def _recorded(self, items: list[Item], *, alone: bool) -> dict[str, Work]:
        """Put them on record; a few choose their hosts while the database writes. Returns what was chosen, assumed."""
        if not alone or len(items) > FEW or any(item.refused or self._may_have_run(item) for item in items):
            await self._record(items)
            return {}
        recording = asyncio.create_task(self._record(items))
        ahead: dict[str, Work] = {}
        try:
            await asyncio.sleep(0)  # its statement leaves
            spec = [(item, self._selector.want(item.request)) for item in items]
            ahead = self._claiming.choose(
                [Asking(request=i.request, spec=one) for i, one in spec if not isinstance(one, Unsatisfiable)]
            )
            await recording
        except BaseException:
            self._claiming.drop(ahead.values())
            recording.cancel()
            await asyncio.gather(recording, return_exceptions=True)
            raise
        vain = [item.request.instance_uuid for item in items if item.outcome is not None or not item.fresh]
        self._claiming.drop(ahead.pop(uuid) for uuid in vain if uuid in ahead)
        return ahead

    async def _record(self, items: list[Item]) -> None:
        """Put new requests on record and tell repeats from clashes (one statement each for the whole batch)."""
        now = self._clock.time()
        firsts: dict[str, Item] = {}
        for item in items:
            firsts.setdefault(item.request.instance_uuid, item)
        # Not durable: until a decision is on disk, the unacknowledged message itself is what survives a crash.
        fresh, known = await run_optimistic(
            lambda optimistic: self._store.unit(durable=False, optimistic=optimistic),
            lambda unit: self._insert(unit, firsts, now),
        )
        for item in items:
            first = firsts[item.request.instance_uuid]
            if item.request.instance_uuid in fresh and first is item:
                # The record of an earlier run may be forgotten, but not its claim: they may be in two databases.
                item.fresh = not self._may_have_run(item)
                told_at_once(item)
            elif first is not item:
                repeated(item, first)
            else:
                already_on_record(item, known.get(item.request.instance_uuid))
        self._begun.update(dict.fromkeys(firsts))
        for old in list(itertools.islice(self._begun, max(0, len(self._begun) - MAX_BEGUN))):
            del self._begun[old]
        if any(isinstance(item.outcome, Done) for item in items):
            await self._store.flush()  # those are acknowledged by what is on record, and nothing more is written
        await self._release([item for item in items if item.doubtful])

    def _may_have_run(self, item: Item) -> bool:
        """Whether it may have come as far as to its claim before, here or elsewhere."""
        received = item.received
        return received.redelivered or received.meta.attempt > 0 or item.request.instance_uuid in self._begun

    async def _insert(
        self, unit: BuildUnit, firsts: Mapping[str, Item], now: float
    ) -> tuple[set[str], dict[str, BuildStatus]]:
        """(which were new, what is on record of the others)."""
        author = Author(self._who, now)
        fresh = await unit.insert([new_build(item, author) for item in firsts.values()], now)
        known = await unit.read([uuid for uuid in firsts if uuid not in fresh])
        for uuid, item in firsts.items():
            if uuid in fresh:
                unit.emit(to_clients(first_event(item, now)))
        return fresh, known

    async def _place(self, items: list[Item], ahead: Mapping[str, Work]) -> None:
        author = self._author()
        asking: list[tuple[Item, RequestSpec]] = []
        decided = [exhausted(item.request, author) for item in items if item.received.exhausted]
        for item in [item for item in items if not item.received.exhausted]:
            chosen = ahead.get(item.request.instance_uuid)
            spec = self._selector.want(item.request) if chosen is None else chosen.spec
            if isinstance(spec, Unsatisfiable) and spec.code == HOST_UNKNOWN and self._may_wait(item):
                item.outcome = UNHEARD
            elif isinstance(spec, Unsatisfiable):
                hosts = int(self._selector.book.rows_of_roots().size)
                item.doubtful = not item.fresh
                decided.append(unsatisfiable(item.request, spec, hosts, author))
            else:
                asking.append((item, spec))
        endings = await self._claiming.place(
            [Asking(request=item.request, spec=spec, fresh=item.fresh) for item, spec in asking], ahead
        )
        author = self._author()
        placed: dict[str, Placed] = {}
        away: Away | None = None
        for (item, spec), ending in zip(asking, endings, strict=True):
            if isinstance(ending, Away):
                away = ending
            elif isinstance(ending, NoValidHost) and ending.may_be_early and self._may_wait(item):
                item.outcome = UNHEARD
            elif isinstance(ending, Contended) and item.received.meta.attempt < RETRIES:
                item.outcome = Retry(CONTENDED, f"{ending.claims} claims were lost to others")
            elif isinstance(ending, Stranded) and item.received.meta.attempt < RETRIES:
                item.outcome = Retry(STRANDED, ending.reason)
            else:
                item.doubtful = not item.fresh or _has_claimed(ending)
                decided.append(decision(item.request, spec, ending, author, nearest=self._config.max_funnel_nearest))
                if isinstance(ending, Placed):
                    placed[item.request.instance_uuid] = ending
        await self._write(decided, placed, {item.request.instance_uuid: item for item in items})
        if away is not None:
            # After what was decided is written: called again with the same batch, those are repeats.
            raise away

    def _may_wait(self, item: Item) -> bool:
        """Just started: hosts that nobody has reported or announced yet may still be; "no host" would be a guess."""
        started_s = self._clock.monotonic() if self._started_s is None else self._started_s
        warm = self._clock.monotonic() - started_s >= self._config.hosts_warmup_s
        return not warm and item.received.meta.attempt < RETRIES

    async def _write(
        self, decided: list[BuildDecision], placed: Mapping[str, Placed], items: Mapping[str, Item]
    ) -> None:
        """The decisions, the map and what is to be published, in one transaction."""
        if not decided:
            return
        started = self._clock.monotonic()
        stamps: dict[str, Stamps] = {}
        ended_at = self._clock.time()
        decided = [
            with_stages(one, stamps_of(items[one.build.instance_uuid], None, ended_at)) if one.build.terminal else one
            for one in decided
        ]

        async def write(unit: BuildUnit) -> set[str]:
            now = self._clock.time()
            stamps.clear()
            written = await unit.decide(decided, now)
            for one in decided:
                if one.build.instance_uuid in written:
                    item, where = items[one.build.instance_uuid], placed.get(one.build.instance_uuid)
                    stamps[one.build.instance_uuid] = said = stamps_of(item, where, now)
                    self._dispatch(unit, one, item.request, where, said, now)
            return written

        written = await run_optimistic(lambda optimistic: self._store.unit(optimistic=optimistic), write)
        metrics.STAGE_S.labels("write").observe(self._clock.monotonic() - started)
        metrics.decided(list(stamps.values()))
        for one in decided:
            items[one.build.instance_uuid].outcome = accepted(one.build.instance_uuid)
            if one.build.terminal:
                log.info(
                    "build.failed",
                    instance=one.build.instance_uuid,
                    cause=one.build.instance_uuid,
                    code=one.build.code,
                    reason=one.build.reason,
                )
        # Once it has failed nobody dispatches it; the release also fences a claim that is still on its way.
        mine = [one for one in decided if one.build.instance_uuid in written and one.build.terminal]
        await self._release(
            [i for one in mine if (i := items[one.build.instance_uuid]).doubtful and one.build.code != CONSUMER_CHANGED]
        )
        await self._cancel(
            [items[one.build.instance_uuid] for one in decided if one.build.instance_uuid not in written]
        )

    def _dispatch(  # noqa: PLR0917  (hot, so no keywords)
        self,
        unit: BuildUnit,
        one: BuildDecision,
        request: BuildRequest,
        placed: Placed | None,
        stamps: Stamps,
        now: float,
    ) -> None:
        if placed is not None:
            command = cell_build(request, placed, now, stamps, self._config)
            unit.emit(Addressed(placed.cell, command, one.build.instance_uuid))
        unit.emit(to_clients(decided_event(one, now, stamps)))

    async def _cancel(self, items: list[Item]) -> None:
        """Deleted, or decided by somebody else first: free the claim, unless a cell has it.

        Dispatched by another scheduler the claim is the same one, and the cell's: it is held until the machine is gone.
        Freed before it is written down, so that a crash here repeats all of it (C-5, trap 8).
        """
        if not items:
            return
        async with self._store.unit() as unit:
            known = await unit.read([item.request.instance_uuid for item in items])
        if len(known) < len({item.request.instance_uuid for item in items}):
            # A record waits for no disk, and the database has crashed since: the batch is recorded and decided anew.
            raise Transient("a request is not on record any more", code="request.forgotten")
        undone = [item for item in items if is_undone(known[item.request.instance_uuid])]
        await self._release(undone)
        author = self._author()
        async with self._store.unit() as unit:
            kept = await unit.lock([item.request.instance_uuid for item in undone])
            await unit.update(
                [
                    never_built(unit, found, author, "while it was being scheduled")
                    for found in kept.values()
                    if found.delete_requested and found.state is BuildState.ACCEPTED
                ],
                author.at,
            )
        for item in items:
            item.outcome = accepted(item.request.instance_uuid)

    async def _release(self, items: Sequence[Item]) -> None:
        """Give back what a run of ours may have claimed, and fence what it may yet claim."""
        if not items:
            return
        instances = [item.request.instance_uuid for item in items]
        releases = [
            Release(consumer=item.request.instance_uuid, attempt=ATTEMPT, project_id=item.request.project_id)
            for item in items
        ]
        try:
            answers = await self._bus.request_all(
                releases, ReleaseResult, timeout_s=self._config.claim_timeout_s, causes=instances
            )
        except BusError as error:
            raise Away(str(error)) from error
        for answer in answers:
            if isinstance(answer, Fault):
                raise Away(f"{answer.code} {answer.reason}") from answer

    def _author(self) -> Author:
        return Author(self._who, self._clock.time())


def _has_claimed(ending: Ending) -> bool:
    """Whether placement was asked for a host: a claim may have been heard twice, and the second answer by nobody."""
    return not isinstance(ending, NoValidHost) or ending.claims > 0


def _settled(outcome: Outcome | None) -> Outcome:
    assert outcome is not None
    return outcome
