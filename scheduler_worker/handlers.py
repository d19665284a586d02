"""Build and delete requests: put on record, decide, claim, dispatch; each step safe to do twice.

The record comes first and is where a repeat is noticed. The claim is idempotent by (instance, attempt 1). The last
transaction writes the decision, maps the instance to its cell and keeps what is to be published, guarded by the
record's state: whoever else has the same request in hand loses there and does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

import msgspec
import structlog
from msgspec import Struct
from msgspec.structs import replace

from bus.bus import API, Bus
from bus.clock import Clock
from bus.contracts.base import Refusal
from bus.contracts.build import BuildAccepted, BuildEvent, BuildRequest, BuildState, DeleteRequest, StoryLine
from bus.contracts.catalogue import BY_QUEUE
from bus.contracts.cell import CellBuild, CellDelete, InstanceSpec
from bus.contracts.placement import Release, ReleaseResult
from bus.faults import Fault
from bus.outbox import Addressed
from bus.outcome import Done, Outcome, Received, Refuse, Retry
from bus.port import BusError
from bus.wire import Malformed
from scheduler_worker import metrics
from scheduler_worker.claiming import ATTEMPT, Asking, Away, Claiming, Contended, Ending, Placed, Stopped
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.explain import sentence, step
from scheduler_worker.domain.flavors import HOST_UNKNOWN
from scheduler_worker.domain.records import ACCEPTED, DECIDED, DELETED, MALFORMED, SCHEDULED
from scheduler_worker.domain.select import NoHost, Selector
from scheduler_worker.domain.wanted import Impossible, Wanted
from scheduler_worker.store.port import Change, Decided, Kept, NewBuild, OnRecord, SchedulerStore, Unit

log = structlog.get_logger(__name__)

WHO = "scheduler"
RETRIES = len(BY_QUEUE["scheduler.requests"].retry_s)
# A delete may overtake its build on the way to another scheduler: so often it is looked for again.
DELETE_RETRIES = 2
UNHEARD = Retry("hosts.unheard", "not every host has been heard from yet")

_encode = msgspec.json.Encoder(order="deterministic").encode


class Item(Struct, kw_only=True):
    """One build request of a batch, on its way to an outcome."""

    request: BuildRequest
    received: Received
    digest: bytes
    refused: tuple[str, str] | None = None  # (code, reason): recorded as refused at once
    fresh: bool = False
    cancelled: bool = False  # a delete came before the decision
    outcome: Outcome | None = None


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

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """Record, then delete, then decide: a delete in the same batch is in time to stop its build."""
        if self._started_s is None:
            self._started_s = self._clock.monotonic()
        items = [self._item(received) for received in batch if isinstance(received.message, BuildRequest)]
        deletes = [received for received in batch if isinstance(received.message, DeleteRequest)]
        if items:
            started = self._clock.monotonic()
            await self._record(items)
            metrics.STAGE_S.labels("record").observe(self._clock.monotonic() - started)
        outcomes: dict[int, Outcome | None] = {}
        if deletes:
            outcomes = dict(await self._delete(deletes, items))
        cancelled = [item for item in items if item.cancelled and item.outcome is None]
        if cancelled:
            await self._cancel(cancelled)
        still = [item for item in items if item.outcome is None]
        if still:
            await self._place(still)
        outcomes.update((id(item.received), item.outcome) for item in items)
        return [_settled(outcomes[id(received)]) for received in batch]

    # --- builds

    def _item(self, received: Received) -> Item:
        request = received.message
        assert isinstance(request, BuildRequest)
        digest = blake2b(_encode(request), digest_size=16).digest()
        item = Item(request=request, received=received, digest=digest)
        if request.flavor not in self._selector.asked:
            known = ", ".join(sorted(self._selector.asked))
            item.refused = ("flavor.unknown", f"there is no flavor {request.flavor} (there are: {known})"[:2000])
        return item

    async def _record(self, items: list[Item]) -> None:
        """Put new requests on record and tell repeats from clashes (one statement each for the whole batch)."""
        now = self._clock.time()
        firsts: dict[str, Item] = {}
        for item in items:
            firsts.setdefault(item.request.instance_uuid, item)
        # Not durable: until the decision is written, the unacknowledged message itself is what survives a crash.
        async with self._store.unit(durable=False) as unit:
            fresh = await unit.insert([self._new(item, now) for item in firsts.values()], now)
            known = await unit.read([uuid for uuid in firsts if uuid not in fresh])
            for uuid, item in firsts.items():
                if uuid in fresh:
                    item.fresh = True
                    unit.say(self._say(self._first_event(item, now)))
        for item in items:
            first = firsts[item.request.instance_uuid]
            if item.fresh and first is item:
                self._recorded(item)
            elif item.fresh or first is not item:
                self._repeated(item, first)
            else:
                self._found(item, known.get(item.request.instance_uuid))

    def _new(self, item: Item, now: float) -> NewBuild:
        code, reason = item.refused or ("", "")
        return NewBuild(
            request=item.request,
            digest=item.digest,
            state=BuildState.REFUSED if item.refused else BuildState.ACCEPTED,
            sequence=DECIDED if item.refused else ACCEPTED,
            terminal=item.refused is not None,
            code=code,
            reason=reason,
            story=(self._line(now, "requested", f"{item.request.flavor} for {item.request.project_id}"),)
            + ((self._line(now, "refused", reason),) if item.refused else ()),
        )

    def _first_event(self, item: Item, now: float) -> BuildEvent:
        code, reason = item.refused or ("", "")
        return BuildEvent(
            instance_uuid=item.request.instance_uuid,
            project_id=item.request.project_id,
            state=BuildState.REFUSED if item.refused else BuildState.ACCEPTED,
            sequence=DECIDED if item.refused else ACCEPTED,
            terminal=item.refused is not None,
            code=code,
            reason=reason,
            at=now,
        )

    def _recorded(self, item: Item) -> None:
        metrics.REQUESTS.labels("build", "refused" if item.refused else "accepted").inc()
        if item.refused is not None:
            item.outcome = Done(reply=Refusal(code=item.refused[0], reason=item.refused[1]))

    def _repeated(self, item: Item, first: Item) -> None:
        """The same instance twice in one batch: the first counts."""
        if item.digest == first.digest:
            item.outcome = _accepted(item.request.instance_uuid)
        else:
            item.outcome = self._clash(item)

    def _found(self, item: Item, known: OnRecord | None) -> None:
        """It was on record already: a redelivery goes on where it stood, a repeat changes nothing."""
        if known is None:
            # Inserted by a transaction that this one cannot see yet: look again in a moment.
            item.outcome = Retry("request.concurrent", "the same request is being recorded by another scheduler")
        elif known.digest != item.digest:
            item.outcome = self._clash(item)
        elif known.state is BuildState.REFUSED and item.refused is not None:
            item.outcome = Done(reply=Refusal(code=item.refused[0], reason=item.refused[1]))
        elif known.state is not BuildState.ACCEPTED or item.refused is not None:
            metrics.REQUESTS.labels("build", "repeated").inc()
            item.outcome = _accepted(item.request.instance_uuid)
        else:
            item.cancelled = known.delete_requested

    def _clash(self, item: Item) -> Outcome:
        metrics.REQUESTS.labels("build", "duplicate").inc()
        return Refuse("request.duplicate", "this instance_uuid is on record with other content")

    async def _place(self, items: list[Item]) -> None:
        asking: list[tuple[Item, Wanted]] = []
        decided: list[Decided] = []
        for item in items:
            wanted = self._selector.want(item.request)
            if isinstance(wanted, Impossible) and wanted.code == HOST_UNKNOWN and self._may_wait(item):
                item.outcome = UNHEARD
            elif isinstance(wanted, Impossible):
                decided.append(self._failed_by_rule(item, wanted))
            else:
                asking.append((item, wanted))
        endings = await self._claiming.place(
            [Asking(request=item.request, wanted=wanted, fresh=item.fresh) for item, wanted in asking]
        )
        placed: dict[str, Placed] = {}
        away: Away | None = None
        for (item, wanted), ending in zip(asking, endings, strict=True):
            if isinstance(ending, Away):
                away = ending
            elif isinstance(ending, NoHost) and ending.unannounced and self._may_wait(item):
                item.outcome = UNHEARD
            elif isinstance(ending, Contended) and item.received.meta.attempt < RETRIES:
                item.outcome = Retry("claims.contended", f"{ending.claims} claims were lost to others")
            else:
                decided.append(self._decision(item, wanted, ending))
                if isinstance(ending, Placed):
                    placed[item.request.instance_uuid] = ending
        await self._write(decided, placed, {item.request.instance_uuid: item for item in items})
        if away is not None:
            # After what was decided is written: called again with the same batch, those are repeats.
            raise away

    def _may_wait(self, item: Item) -> bool:
        """Just started: hosts that nobody has announced yet may still be; "no host" would be a guess."""
        started_s = self._clock.monotonic() if self._started_s is None else self._started_s
        warm = self._clock.monotonic() - started_s >= self._config.hosts_warmup_s
        return not warm and item.received.meta.attempt < RETRIES

    def _decision(self, item: Item, wanted: Wanted, ending: Ending) -> Decided:
        now = self._clock.time()
        uuid = item.request.instance_uuid
        if isinstance(ending, Placed):
            main = ending.selections[0]
            alternates = ", ".join(selection.host for selection in ending.selections[1:]) or "none"
            story = (
                self._line(now, "chosen", f"{main.host} of {ending.passed} candidates, weight {ending.score:.4g}"),
                self._line(now, "claimed", f"{main.host} after {ending.claims} claim(s); alternates: {alternates}"),
                self._line(now, "dispatched", f"to cell {ending.cell}"),
            )
            return Decided(
                instance_uuid=uuid,
                state=BuildState.SCHEDULED,
                sequence=SCHEDULED,
                cell=ending.cell,
                host=main.host,
                host_uuid=main.host_uuid,
                story=story,
            )
        if isinstance(ending, NoHost):
            reason = sentence(wanted, ending.funnel, self._config.max_funnel_nearest)
            failed = Decided(
                instance_uuid=uuid,
                state=BuildState.FAILED,
                sequence=DECIDED,
                terminal=True,
                code="no_valid_host",
                reason=reason[:2000],
                funnel=ending.funnel,
            )
        else:
            code, reason = _stopped(ending)
            failed = Decided(
                instance_uuid=uuid,
                state=BuildState.FAILED,
                sequence=DECIDED,
                terminal=True,
                code=code,
                reason=reason[:2000],
            )
        return replace(failed, story=(self._line(now, "failed", f"{failed.code}: {failed.reason}"),))

    def _failed_by_rule(self, item: Item, impossible: Impossible) -> Decided:
        """A request that no host may take as things are configured: a funnel of one step, all hosts fallen."""
        hosts = int(self._selector.book.rows_of_roots().size)
        return Decided(
            instance_uuid=item.request.instance_uuid,
            state=BuildState.FAILED,
            sequence=DECIDED,
            terminal=True,
            code="no_valid_host",
            reason=f"No host can take {item.request.flavor}: {impossible.reason}.",
            funnel=(step(impossible.step, hosts, {impossible.code: hosts}),),
            story=(self._line(self._clock.time(), "failed", impossible.reason),),
        )

    async def _write(self, decided: list[Decided], placed: Mapping[str, Placed], items: Mapping[str, Item]) -> None:
        """The decisions, the map and what is to be published, in one transaction."""
        if not decided:
            return
        started = self._clock.monotonic()
        async with self._store.unit() as unit:
            written = await unit.decide(decided, self._clock.time())
            for one in decided:
                if one.instance_uuid in written:
                    self._say_decision(unit, one, items[one.instance_uuid].request, placed.get(one.instance_uuid))
        metrics.STAGE_S.labels("write").observe(self._clock.monotonic() - started)
        for one in decided:
            items[one.instance_uuid].outcome = _accepted(one.instance_uuid)
            if one.terminal:
                log.info(
                    "build.failed",
                    instance=one.instance_uuid,
                    cause=one.instance_uuid,
                    code=one.code,
                    reason=one.reason,
                )
        beaten = [items[one.instance_uuid] for one in decided if one.instance_uuid not in written]
        if beaten:
            await self._beaten(beaten)

    def _say_decision(self, unit: Unit, one: Decided, request: BuildRequest, placed: Placed | None) -> None:
        now = self._clock.time()
        if placed is not None:
            unit.say(Addressed(placed.cell, self._cell_build(request, placed, now), one.instance_uuid))
        event = BuildEvent(
            instance_uuid=one.instance_uuid,
            project_id=request.project_id,
            state=one.state,
            sequence=one.sequence,
            terminal=one.terminal,
            cell=one.cell,
            host=one.host,
            attempt=ATTEMPT if placed is not None else 0,
            code=one.code,
            reason=one.reason,
            funnel=one.funnel,
            at=now,
        )
        unit.say(self._say(event))

    def _cell_build(self, request: BuildRequest, placed: Placed, now: float) -> CellBuild:
        return CellBuild(
            spec=InstanceSpec(
                instance_uuid=request.instance_uuid,
                project_id=request.project_id,
                user_id=request.user_id,
                name=request.name,
                image=request.image,
                flavor=request.flavor,
            ),
            selections=placed.selections,
            consumer_generation=placed.consumer_generation,
            build_timeout_s=request.build_timeout_s or self._config.build_timeout_s,
            requested_at=now,
        )

    async def _beaten(self, items: list[Item]) -> None:
        """Somebody wrote first. Dispatched by another scheduler: the claim is the same one, leave it. Else: free it."""
        async with self._store.unit() as unit:
            known = await unit.read([item.request.instance_uuid for item in items])
        undone = [
            item
            for item in items
            if (found := known.get(item.request.instance_uuid)) is not None
            and (found.delete_requested or found.state in (BuildState.FAILED, BuildState.DELETED))
        ]
        if undone:
            await self._cancel(undone)

    async def _cancel(self, items: list[Item]) -> None:
        """Deleted while being scheduled: free the claim first, so that a crash here repeats all of it (C-5, trap 8)."""
        await self._release([item.request.instance_uuid for item in items])
        now = self._clock.time()
        async with self._store.unit() as unit:
            kept = await unit.lock([item.request.instance_uuid for item in items])
            for item in items:
                found = kept.get(item.request.instance_uuid)
                if found is not None and found.delete_requested and found.standing.state is BuildState.ACCEPTED:
                    await self._deleted(unit, found, now, "deleted while it was being scheduled")
                item.outcome = _accepted(item.request.instance_uuid)

    async def _release(self, instances: list[str]) -> None:
        releases = [Release(consumer=uuid, attempt=ATTEMPT) for uuid in instances]
        try:
            answers = await self._bus.request_all(
                releases, ReleaseResult, timeout_s=self._config.claim_timeout_s, causes=instances
            )
        except BusError as error:
            raise Away(str(error)) from error
        for answer in answers:
            if isinstance(answer, Fault):
                raise Away(f"{answer.code} {answer.reason}") from answer

    # --- deletes

    async def _delete(self, deletes: Sequence[Received], items: Sequence[Item]) -> dict[int, Outcome]:
        """Deletes, each by where its build stands; builds of the same batch that are not decided yet are cancelled."""
        now = self._clock.time()
        outcomes: dict[int, Outcome] = {}
        stopped: set[str] = set()
        async with self._store.unit() as unit:
            kept = await unit.lock([_uuid(received) for received in deletes])
            for received in deletes:
                request = received.message
                assert isinstance(request, DeleteRequest)
                found = kept.get(request.instance_uuid)
                if found is None:
                    outcomes[id(received)] = self._delete_unknown(unit, request, received, now)
                elif found.standing.project_id != request.project_id:
                    # Not this project's to know about, and no event: the stream of that instance is its owner's.
                    outcomes[id(received)] = Refuse("instance.unknown", "there is no such instance in this project")
                else:
                    kept[request.instance_uuid] = await self._delete_kept(unit, found, now)
                    stopped.add(request.instance_uuid)
                    metrics.REQUESTS.labels("delete", "accepted").inc()
                    outcomes[id(received)] = _accepted(request.instance_uuid)
        for item in items:
            item.cancelled |= item.request.instance_uuid in stopped
        return outcomes

    async def _delete_kept(self, unit: Unit, found: Kept, now: float) -> Kept:
        """What a delete does, by where the build stands."""
        standing = found.standing
        if standing.state in (BuildState.DELETING, BuildState.DELETED):
            return found
        if standing.state is BuildState.ACCEPTED:
            # Whoever decides it sees this before dispatching, frees the claim and says `deleted`.
            if not found.delete_requested:
                await unit.change(
                    [Change(standing=standing, delete_requested=True, story=(self._line(now, "delete_requested"),))],
                    now,
                )
            return Kept(standing=standing, delete_requested=True)
        if standing.cell is None:
            return await self._deleted(unit, found, now, "deleted; it was never built")
        deleting = replace(standing, state=BuildState.DELETING)
        line = self._line(now, "delete_requested", f"passed to cell {standing.cell}")
        await unit.change([Change(standing=deleting, delete_requested=True, story=(line,))], now)
        command = CellDelete(instance_uuid=standing.instance_uuid, project_id=standing.project_id)
        unit.say(Addressed(standing.cell, command, standing.instance_uuid))
        return Kept(standing=deleting, delete_requested=True)

    def _delete_unknown(self, unit: Unit, request: DeleteRequest, received: Received, now: float) -> Outcome:
        if received.meta.attempt < DELETE_RETRIES:
            return Retry("instance.unknown", "not on record (yet)")
        metrics.REQUESTS.labels("delete", "unknown").inc()
        reason = "there is no such instance in this project"
        event = BuildEvent(
            instance_uuid=request.instance_uuid,
            project_id=request.project_id,
            state=BuildState.REFUSED,
            sequence=DELETED,
            terminal=True,
            code="instance.unknown",
            reason=reason,
            at=now,
        )
        unit.say(self._say(event))
        return Done(reply=Refusal(code="instance.unknown", reason=reason))

    async def _deleted(self, unit: Unit, found: Kept, now: float, detail: str) -> Kept:
        """The end of a build that no cell knows of."""
        standing = replace(found.standing, state=BuildState.DELETED, sequence=DELETED, terminal=True)
        await unit.change(
            [Change(standing=standing, delete_requested=True, story=(self._line(now, "deleted", detail),))], now
        )
        event = BuildEvent(
            instance_uuid=standing.instance_uuid,
            project_id=standing.project_id,
            state=BuildState.DELETED,
            sequence=DELETED,
            terminal=True,
            at=now,
        )
        unit.say(self._say(event))
        return Kept(standing=standing, delete_requested=True)

    # --- words

    def _line(self, at: float, what: str, detail: str = "") -> StoryLine:
        return StoryLine(at=at, who=self._who, what=what, detail=detail)

    def _say(self, event: BuildEvent) -> Addressed:
        return Addressed(API, event, event.instance_uuid)


class _Named(Struct):
    """The two fields of an unreadable request that an answer on the event stream needs."""

    instance_uuid: str
    project_id: str


def refused_event(malformed: Malformed) -> Sequence[BuildEvent]:
    """An unreadable request, answered on the event stream when it at least says whose it is.

    Sequence 0 is below everything that a build on record ever announced, so the event of a clash with a good
    request is old news to whoever follows that one.
    """
    try:
        named = msgspec.json.decode(malformed.body, type=_Named)
        event = BuildEvent(
            instance_uuid=named.instance_uuid,
            project_id=named.project_id,
            state=BuildState.REFUSED,
            sequence=MALFORMED,
            terminal=True,
            code=malformed.code,
            reason=malformed.reason[:2000],
        )
        # The names become a routing key: only what the contract allows.
        return (msgspec.convert(msgspec.to_builtins(event), BuildEvent),)
    except msgspec.MsgspecError:
        return ()


def _accepted(instance_uuid: str) -> Done:
    return Done(reply=BuildAccepted(instance_uuid=instance_uuid))


def _stopped(ending: Ending) -> tuple[str, str]:
    if isinstance(ending, Stopped):
        return ending.code, ending.reason
    assert isinstance(ending, Contended), ending
    return "claims.contended", f"{ending.claims} claims in this delivery alone were lost to others; every retry was"


def _uuid(received: Received) -> str:
    assert isinstance(received.message, DeleteRequest)
    return received.message.instance_uuid


def _settled(outcome: Outcome | None) -> Outcome:
    assert outcome is not None
    return outcome
