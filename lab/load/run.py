"""Fires a plan: offers each build at its intended time, follows it to its end, deletes what is to be deleted."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from berth.bus_client import SILENCE_S, BuildClient, RequestWatch
from bus.clock import Clock
from bus.contracts.build import BuildEvent, BuildRequest, DeleteRequest
from bus.contracts.stages import durations
from bus.faults import Transient
from bus.transport import BusError, BusUnavailable, PublishRefused
from lab.load.ledger import LoadLedger
from lab.load.plan import Arrival, LoadPlan, draw
from lab.load.report.figures import stages_ms, summary
from lab.load.report.summary import LoadReport, sum_up

# With a rate, what fell due while the publisher was busy leaves together, at most so many ...
MAX_BURST = 500
# ... and at most so many such slices wait for the broker's confirms at once; past it the rest is late, and counted so.
MAX_SLICES = 8
# At its very time a request is due, whatever floating point makes of it.
A_HAIR = 1e-6
# However long until the next arrival: so often it is looked whether the run was interrupted.
LOOK_S = 0.1
# A refused request is offered again after so long, halved at random.
AGAIN_S = 0.25
# Interrupted, what is under way may still end for so long.
INTERRUPT_GRACE_S = 3.0
PROGRESS_EVERY_S = 0.25


class Offer(Struct):
    """One build or delete to be published: when it was meant to leave, and until when it is offered again."""

    request: BuildRequest | DeleteRequest
    flavor: str
    intended: float
    row: int
    retry_until: float


class LoadRun:
    """One run of a plan. `boots` and `deletes` have at any time what became of each.

    rng draws the requests; chance the rest (uuids, how long to wait), where a run that is repeated with the same
    seed must not ask for the same instances: those there are already, and nothing would be built.
    """

    def __init__(
        self,
        client: BuildClient,
        plan: LoadPlan,
        *,
        clock: Clock,
        rng: random.Random,
        chance: random.Random | None = None,
        keep_watches: bool = True,
    ) -> None:
        self.plan = plan
        self.boots = LoadLedger()
        self.deletes = LoadLedger()
        self.duplicates = 0
        self.refusals = 0
        self.retries = 0
        self.conflicts: int | None = None
        self.interrupted = False
        self.started = clock.monotonic()
        self.started_at = clock.time()
        self.last_end = self.started
        self.latencies: list[float] = []  # of the boots that ended since `drain_latencies`
        self._client = client
        self._clock = clock
        self._rng = rng
        self._chance = chance or rng
        self._keep_watches = keep_watches
        self._lifetimes: dict[int, float] = {}
        self._to_delete: list[tuple[float, int]] = []  # (due, row of the boot), a heap
        self._abandoned = 0  # boots that are not sent and will not be
        self._changed = asyncio.Event()
        self._slices = asyncio.Semaphore(MAX_SLICES)
        self._send_lock = asyncio.Lock()
        self._refused = False  # whether the newest offer met a full queue, or no broker
        self._offering: set[asyncio.Task[None]] = set()
        self._fault: BaseException | None = None
        self._last_sent = self.started
        client.on_event(self._on_event)
        client.on_end(self._on_end)

    @property
    def in_flight(self) -> int:
        """Boots that were sent and have not ended."""
        return self.boots.counts["open"]

    def interrupt(self) -> None:
        """Offer nothing more; what is under way gets a short grace."""
        self.interrupted = True
        self._to_delete.clear()
        self._changed.set()

    def drain_latencies(self) -> list[float]:
        """Seconds from the intended time to the end of each boot that became active since the last call."""
        found, self.latencies = self.latencies, []
        return found

    async def go(self) -> None:
        """Fire all, wait for every end. Raises what publishing raises when requests are not taken at all."""
        self.started, self.started_at = self._clock.monotonic(), self._clock.time()
        self.boots.start = self.deletes.start = self.last_end = self._last_sent = self.started
        tasks = [asyncio.create_task(part()) for part in (self._fire, self._until_stopped, self._reap)]
        firing, stopped, _ = tasks
        try:
            await asyncio.wait({firing, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if self._fault is None and not firing.done():
                await asyncio.wait({firing}, timeout=INTERRUPT_GRACE_S)
            if self._fault is not None:
                raise self._fault
            if firing.done():
                firing.result()
        finally:
            tasks += self._offering
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for ledger in (self.boots, self.deletes):
            ledger.abandon(self._unended)

    async def _fire(self) -> None:
        drawn = draw(self.plan, self._rng, self._chance)
        await (self._closed_loop(drawn) if self.plan.mode == "closed" else self._open_loop(drawn))
        while self._offering:
            await asyncio.wait(self._offering)
        await self._ends(self.plan.timeout_s)

    def _unended(self, uuid: str) -> str:
        if self.interrupted:
            return "open"
        watch = self._client.watches.get(uuid)
        return "late" if watch is not None and watch.under_way else "lost"

    async def _open_loop(self, drawn: Iterator[tuple[Arrival, BuildRequest]]) -> None:
        """Offer each at its time; a late publisher does not shift the intentions after it."""
        ahead = next(drawn, None)
        while ahead is not None and not self._stopped:
            elapsed = self._clock.monotonic() - self.started
            part: list[tuple[Arrival, BuildRequest]] = []
            while ahead is not None and ahead[0].at_s <= elapsed + A_HAIR and len(part) < MAX_BURST:
                part.append(ahead)
                ahead = next(drawn, None)
            if part:
                await self._send(
                    [self._boot(request, arrival, self.started + arrival.at_s) for arrival, request in part]
                )
            elif ahead is not None:
                await self._clock.sleep(min(ahead[0].at_s - elapsed, LOOK_S))

    async def _closed_loop(self, drawn: Iterator[tuple[Arrival, BuildRequest]]) -> None:
        """Keep so many in flight; each is meant to leave when its place is free."""
        more = True
        while more and not self._stopped:
            self._changed.clear()
            room = min(self.plan.concurrency - self.in_flight - self._unsent, MAX_BURST)
            now = self._clock.monotonic()
            part: list[Offer] = []
            while len(part) < room and (found := next(drawn, None)) is not None:
                part.append(self._boot(found[1], found[0], now))
            more = len(part) == max(room, 0)
            if part:
                await self._send(part)
            elif more and not await self._change(self.plan.timeout_s):
                return  # nothing ended for so long: the rest is not even sent

    @property
    def _unsent(self) -> int:
        return self.boots.counts["unsent"] - self._abandoned

    @property
    def _stopped(self) -> bool:
        return self.interrupted or self._fault is not None

    def _boot(self, request: BuildRequest, arrival: Arrival, intended: float) -> Offer:
        row = self.boots.add(request.instance_uuid, request.flavor, intended)
        if arrival.lifetime_s is not None:
            self._lifetimes[row] = arrival.lifetime_s
        retry_until = self._clock.monotonic() + self.plan.offers_again_s
        return Offer(request=request, flavor=request.flavor, intended=intended, row=row, retry_until=retry_until)

    async def _send(self, offers: list[Offer], ledger: LoadLedger | None = None) -> None:
        """Offer in the background, so that a slow confirm delays no other; at most MAX_SLICES at once."""
        await self._slices.acquire()
        task = asyncio.create_task(self._offer(offers, self.boots if ledger is None else ledger))
        self._offering.add(task)
        task.add_done_callback(self._on_offered)

    def _on_offered(self, task: asyncio.Task[None]) -> None:
        self._offering.discard(task)
        self._slices.release()
        if not task.cancelled() and task.exception() is not None:
            self._fault = self._fault or task.exception()
        self._changed.set()

    async def _offer(self, offers: list[Offer], ledger: LoadLedger) -> None:
        """Until each is confirmed, or given up. Raises what is neither a full queue nor a bus that is unavailable.

        Refused requests are offered again one slice at a time: a full queue is not to be kept busy with refusing.
        """
        if self._refused and self.plan.offers_again_s > 0:
            offers = await self._offer_again(offers, ledger)
        else:
            offers = await self._offer_once(offers, ledger)
        while offers:
            offers = await self._offer_again(offers, ledger)

    async def _offer_again(self, offers: list[Offer], ledger: LoadLedger) -> list[Offer]:
        async with self._send_lock:
            if self._refused:
                await self._clock.sleep(AGAIN_S * (0.5 + self._chance.random() / 2))
            return await self._offer_once(offers, ledger)

    async def _offer_once(self, offers: list[Offer], ledger: LoadLedger) -> list[Offer]:
        """Returns those to be offered again."""
        # The end may come of one whose confirm was lost: it arrived, and no other event follows.
        offers = [offer for offer in offers if ledger.is_unsent(offer.row)]
        errors = await self._client.submit(
            [offer.request for offer in offers],
            intended_at=[offer.intended for offer in offers],
            flavors=[offer.flavor for offer in offers],
        )
        self._refused = any(error is not None for error in errors)
        return self._settle(offers, errors, ledger)

    def _settle(
        self, offers: Sequence[Offer], errors: Sequence[BaseException | None], ledger: LoadLedger
    ) -> list[Offer]:
        """Handle the broker's answer to each; returns those to be offered again."""
        now = self._clock.monotonic()
        again: list[Offer] = []
        for offer, error in zip(offers, errors, strict=True):
            if error is None:
                ledger.mark_confirmed(offer.row, now)
                self._last_sent = now
            elif isinstance(error, PublishRefused):
                self.refusals += 1
                if now < offer.retry_until and not self.interrupted:
                    again.append(offer)
                else:
                    ledger.set_outcome(offer.row, "backpressure")
            elif isinstance(error, BusUnavailable):
                if not ledger.is_unsent(offer.row):
                    continue
                if now < offer.intended + self.plan.timeout_s and not self.interrupted:
                    again.append(offer)
                else:  # it may have arrived: its end may still come
                    self._client.unfollow(offer.request.instance_uuid)
                    self._abandoned += ledger is self.boots
            else:
                raise error
        for offer in again:
            ledger.again[offer.row] += 1
        return again

    async def _ends(self, timeout_s: float) -> None:
        """Wait until everything has ended, or nothing can be hoped for any more. Whatever is due later is sent first:
        each deletion has its time, and each offer its limit.
        """
        while True:
            while self._sends_more or self.boots.counts["open"] or self.deletes.counts["open"]:
                left = self._last_sent + timeout_s - self._clock.monotonic()
                if left <= 0 and not self._sends_more:
                    break
                if await self._client.wait(max(left, SILENCE_S)) and self._sends_more:
                    await self._clock.sleep(LOOK_S)
            if self._client.unfinished:
                with contextlib.suppress(Transient, BusError):  # no scheduler to ask: they count as lost
                    await self._client.resync(at_most=self._client.unfinished)
            if not self._sends_more:
                return  # else one was found active, and is to be deleted

    @property
    def _sends_more(self) -> bool:
        return bool(self._offering or self._to_delete)

    async def _until_stopped(self) -> None:
        while not self._stopped:
            self._changed.clear()
            await self._changed.wait()

    async def _change(self, timeout_s: float) -> bool:
        """Wait for an end or a confirm."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
                return True
        return False

    async def _reap(self) -> None:
        """Delete what is due. Its latency, too, is counted from when it was meant to leave."""
        while not self._stopped:
            now = self._clock.monotonic()
            part: list[Offer] = []
            while self._to_delete and self._to_delete[0][0] <= now + A_HAIR and len(part) < MAX_BURST:
                part.append(self._delete(*heapq.heappop(self._to_delete)))
            if part:
                await self._send(part, self.deletes)
            elif self._to_delete:
                await self._clock.sleep(min(self._to_delete[0][0] - now, LOOK_S))
            else:
                self._changed.clear()
                await self._changed.wait()

    def _delete(self, due: float, boot: int) -> Offer:
        uuid = self.boots.uuids[boot]
        flavor = self.boots.flavors.names[self.boots.flavor[boot]]
        row = self.deletes.add(uuid, flavor, due)
        request = DeleteRequest(instance_uuid=uuid, project_id=self.plan.project_id)
        retry_until = self._clock.monotonic() + self.plan.timeout_s
        return Offer(request=request, flavor=flavor, intended=due, row=row, retry_until=retry_until)

    def _on_event(self, event: BuildEvent) -> None:
        if event.sequence:  # the first event of what is on record: `accepted` itself may have been overtaken
            row = self.boots.rows.get(event.instance_uuid)
            if row is not None and math.isnan(self.boots.accepted[row]):
                self.boots.accepted[row] = self._clock.monotonic()

    def _on_end(self, watch: RequestWatch) -> None:
        ledger = self.deletes if watch.deleting else self.boots
        row = ledger.rows.get(watch.instance_uuid)
        if row is None or watch.ended_at is None:
            return
        if watch.terminals > 1:
            self.duplicates += 1
            return
        self._note_end(ledger, row, watch)
        if watch.state == "active":
            self.latencies.append(watch.ended_at - ledger.intended[row])
            lifetime_s = self._lifetimes.pop(row, None)
            if lifetime_s is not None and not self._stopped:
                due = max(watch.ended_at, ledger.intended[row] + lifetime_s)
                heapq.heappush(self._to_delete, (due, row))
        if not self._keep_watches:  # what is of interest is in its row
            watch.last = None
            watch.stages = {}
        self._changed.set()

    def _note_end(self, ledger: LoadLedger, row: int, watch: RequestWatch) -> None:
        """Write down how one ended."""
        ledger.ended[row] = self.last_end = watch.ended_at or 0.0
        ledger.set_outcome(row, watch.state)
        event = watch.last
        if event is None:  # learned by a query: its last event never came
            return
        ledger.attempts[row] = event.attempt
        ledger.code[row] = ledger.codes.index(event.code)
        ledger.cell[row] = ledger.cells.index(event.cell or "")
        ledger.host[row] = ledger.hosts.index(event.host or "")
        self.retries += max(event.attempt - 1, 0)
        if watch.deleting:
            return
        if event.stage_times is None:
            return
        ledger.conflicts[row] = event.stage_times.lost_claims
        self.conflicts = (self.conflicts or 0) + event.stage_times.lost_claims
        # By the client's own wall clock: so the stages add up to the latency, whatever the clocks of others show.
        wall = self.started_at - self.started
        spent = durations(event.stage_times, since=ledger.intended[row] + wall, until=ledger.ended[row] + wall)
        for stage, seconds in spent.items():
            ledger.record_stage(row, stage, seconds)


async def run_load(
    client: BuildClient,
    plan: LoadPlan,
    *,
    clock: Clock,
    rng: random.Random,
    progress: Callable[[int, int], None] = lambda done, requested: None,
) -> LoadReport:
    """Fire the plan, wait for every end, and sum up what the client saw. Raises what publishing raises."""
    run = LoadRun(client, plan, clock=clock, rng=rng)
    ticker = asyncio.create_task(_tick(run, clock, progress))
    try:
        await run.go()
    finally:
        ticker.cancel()
    progress(_done(run), plan.boots)
    watches = [client.watches[uuid] for uuid in run.boots.uuids if uuid in client.watches]
    found = sum_up(watches, started=run.started, now=clock.monotonic())
    spent = stages_ms(run.boots.operations())
    return replace(found, spent_ms={stage: summary(values) for stage, values in spent.items()})


def _done(run: LoadRun) -> int:
    return len(run.boots) - run.boots.counts["open"] - run.boots.counts["unsent"]


async def _tick(run: LoadRun, clock: Clock, progress: Callable[[int, int], None]) -> None:
    while True:
        progress(_done(run), run.plan.boots)
        await clock.sleep(PROGRESS_EVERY_S)
