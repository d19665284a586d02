"""Take events to instances: lock, step, record with the outbox in one transaction, then ask placement and step again.

The only place where an instance changes. Everything works on whole batches; several conductors may run side by side.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeVar

import structlog
from msgspec import Struct
from msgspec.structs import replace

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.base import Message
from bus.contracts.build import BuildEvent
from bus.contracts.cell import Spawn
from bus.contracts.moves import MoveEvent
from bus.contracts.placement import (
    Claim,
    ClaimOutcome,
    ClaimResult,
    Release,
    ReleaseResult,
    Revert,
    RevertResult,
)
from bus.faults import Fault, RequestRefused, Transient
from bus.persistence.conflict import Conflict
from bus.persistence.outbox import OutboxMessage
from bus.tracing.context import traceparent_of

from . import metrics
from .config import ConductorConfig
from .domain.events import (
    BuildRequested,
    Claimed,
    ClaimRefused,
    DeleteRequested,
    Event,
    HostFenced,
    MoveRequested,
    Released,
    Reverted,
    TimedOut,
)
from .domain.fences import Fence, Loss, fenced_hosts, losses_of
from .domain.instance import Instance, State
from .domain.leases import Lease
from .domain.steps import Step, StepContext
from .domain.table import IllegalStep, question_of, step
from .store.port import DatabaseChange, InstanceStore, Transaction

R = TypeVar("R", bound=Message)

log = structlog.get_logger(__name__)

# Placement gets requests for one instance at most this often in a row: a claim, then the release of what a delete made
# useless.
MAX_ROUNDS = 4
# How often a batch is decided anew when another conductor recorded one of its new instances first.
MAX_STALE = 5
# How many steps in a row one fence makes an instance take: one for each of its hosts, and what follows from undoing.
MAX_FENCE_STEPS = 4

ENDS = frozenset({State.ACTIVE, State.FAILED, State.DELETED, State.OFFLOADED})


class InstanceEvent(Struct, frozen=True):
    """One event for one instance. message_id: what it came in, "" when it came in none."""

    uuid: str
    event: Event
    message_id: str = ""
    cause: str = ""


class PendingQuestion(Struct, frozen=True):
    """A request to placement for one instance. repeated: placement may have had this very request before."""

    instance: Instance
    message: Claim | Release | Revert
    repeated: bool = False


class Transition(Struct, frozen=True):
    """What one transaction has made of its instances, what it sends, and what is logged after the commit."""

    instances: Mapping[str, Instance]
    outgoing: list[OutboxMessage]
    steps: Counter[tuple[State, str]]
    ended: list[Instance]
    losses: Sequence[Loss] = ()


class FenceView(Protocol):
    """The fences as this conductor knows them (`fences.FenceKeeper`)."""

    @property
    def known(self) -> Mapping[str, Fence]:
        """By host."""

    def invalidate(self) -> None:
        """They are not what is on record any more."""

    def note_losses(self, losses: Sequence[Loss]) -> None:
        """These have just been recorded."""


class NoFences:
    """Where none is ever made."""

    known: Mapping[str, Fence] = {}

    def invalidate(self) -> None:
        """There are none."""

    def note_losses(self, losses: Sequence[Loss]) -> None:
        """There are none."""


class Sender(Protocol):
    """Publishes what an outbox row holds, once it is committed (`bus.persistence.outbox.Relay`)."""

    async def wait_for_capacity(self) -> None:
        """Wait while too much is in flight."""

    def send(self, row_id: int | None, outgoing: Sequence[OutboxMessage]) -> None:
        """Publish soon; delete the row after the confirm."""


class Engine:
    """Moves the instances of one cell."""

    def __init__(
        self,
        *,
        store: InstanceStore,
        bus: Bus,
        relay: Sender,
        clock: Clock,
        config: ConductorConfig,
        cell: str,
        down: Callable[[], Mapping[str, Lease]] = dict,
        fences: FenceView | None = None,
    ) -> None:
        self._store = store
        self._bus = bus
        self._relay = relay
        self._clock = clock
        self._config = config
        self._down = down
        self._fences = fences or NoFences()
        self._requesting: set[str] = set()
        self._unflushed = 0  # commits that did not wait for the disk
        self._context = StepContext(
            cell=cell,
            claim_retry_s=config.claim_retry_s,
            answer_timeout_s=config.answer_timeout_s,
            destroy_retry_s=config.destroy_retry_s,
            destroy_retry_max_s=config.destroy_retry_max_s,
            report_grace_s=config.report_grace_s,
            doubt_limit_s=config.doubt_limit_s,
        )

    async def take(self, incoming: Sequence[InstanceEvent], *, source: str) -> asyncio.Future[None] | None:
        """Apply events, in order for each instance, and follow up with placement.

        Returns what is done once all of it is on disk, before which the events may not be forgotten elsewhere; None: it
        is on disk.
        """
        losses, flushes = self._store.losses, self._unflushed
        with metrics.BATCH_SECONDS.labels(source).time():
            await self._ask_placement(await self._apply(incoming))
        return None if flushes == self._unflushed else self._store.flushed(losses)

    async def effective(self, incoming: Sequence[InstanceEvent]) -> list[InstanceEvent]:
        """Those of these events that the table would act on now; the others are late, doubled or taken care of.

        The rows are locked only to read them: a change that another task is committing is waited for. Read without
        locks it would still look open, and the breaker would count what has been taken care of.
        """
        async with self._store.transaction() as transaction:
            known = await transaction.lock(sorted({one.uuid for one in incoming}))
        context = replace(self._context, deployment=self._store.deployment)
        found: list[InstanceEvent] = []
        for one in incoming:
            instance = known.get(one.uuid)
            if instance is not None:
                stepped = step(instance, one.event, context)
                if stepped.instance is not instance or stepped.commands:
                    found.append(one)
        return found

    async def sweep(self) -> int:
        """Let passed deadlines happen, one bounded batch of them. Returns how many."""
        await self._relay.wait_for_capacity()
        now = self._clock.time()
        if not await self._store.has_due(now):
            return 0
        async with self._store.transaction() as transaction:
            # Before any deadline counts: in a database that was set back it proves nothing.
            change = await transaction.recognise()
            if change is None:
                locked = await transaction.lock_due(now, self._config.sweep_batch)
                due = {instance.uuid: instance for instance in locked}
                if not due:
                    return 0
                incoming = [InstanceEvent(uuid, TimedOut(at=now)) for uuid in due]
                recorded = await self._record(transaction, due, incoming)
        if change is not None:
            _log_change(change, self._context.cell)
            return 0
        self._committed(transaction, recorded)
        for instance in due.values():
            metrics.SWEPT.labels(instance.state).inc()
            log.info("instance.deadline", instance=instance.uuid, state=instance.state, cause=instance.cause)
        with metrics.BATCH_SECONDS.labels("sweep").time():
            await self._ask_placement(_questions(due, recorded.instances, again=due.keys()))
        return len(due)

    async def leave_services(self, incoming: Sequence[InstanceEvent]) -> None:
        """Fail builds over from services that are not waited for: `ServiceLost` for each of them.

        As with deadlines the database is compared first, in the same transaction: in one that was set back the silence
        of a service proves nothing, so its builds are doubted, and wait for their hosts.
        """
        await self._relay.wait_for_capacity()
        async with self._store.transaction() as transaction:
            change = await transaction.recognise()
            if change is None:
                known = await transaction.lock(sorted({one.uuid for one in incoming}))
                recorded = await self._record(transaction, known, [one for one in incoming if one.uuid in known])
        if change is not None:
            _log_change(change, self._context.cell)
            return
        self._committed(transaction, recorded)
        with metrics.BATCH_SECONDS.labels("leases").time():
            await self._ask_placement(_questions(known, recorded.instances, again=()))

    async def _apply(self, incoming: Sequence[InstanceEvent]) -> list[PendingQuestion]:
        """One transaction: what is new of these events, on the locked instances. Returns the requests that follow."""
        await self._relay.wait_for_capacity()
        uuids = sorted({instance_event.uuid for instance_event in incoming})
        new = {instance_event.uuid for instance_event in incoming if isinstance(instance_event.event, BuildRequested)}
        for number in range(MAX_STALE):
            # First on cached instances, in one round trip; with locks after a conflict.
            is_locked = number > 0
            begun = self._store.transaction() if is_locked else self._store.optimistic(new)
            try:
                async with begun as transaction:
                    fresh = await self._fresh(transaction, incoming)
                    known = await transaction.lock(uuids)
                    possible = self._possible(known, fresh) if is_locked else fresh
                    recorded = await self._record(transaction, known, possible)
                    transaction.durable = not _may_be_redone(recorded)
            except Conflict:
                continue
            self._committed(transaction, recorded)
            self._unflushed += not transaction.durable
            # A message seen before: the conductor that took it then may have died before it could ask.
            again = set() if len(fresh) == len(incoming) else {a.uuid for a in incoming} - {a.uuid for a in fresh}
            return _questions(known, recorded.instances, again=again)
        raise Transient("other conductors keep recording these instances first", code="instance.contended")

    @staticmethod
    async def _fresh(transaction: Transaction, incoming: Sequence[InstanceEvent]) -> Sequence[InstanceEvent]:
        ids = [instance_event.message_id for instance_event in incoming if instance_event.message_id]
        if not ids:
            return incoming
        new = await transaction.first_time(ids)
        return [a for a in incoming if not a.message_id or a.message_id in new]

    def _possible(self, known: Mapping[str, Instance], incoming: Sequence[InstanceEvent]) -> list[InstanceEvent]:
        """These, without placement's answers to requests that no record of theirs has made.

        Only a database that was set back or replaced in between does that. What was claimed or released stands in
        placement; what runs and has no record is quarantined with its host's next report.
        """
        context = replace(self._context, deployment=self._store.deployment)
        now, possible = dict(known), []
        for one in incoming:
            before = now.get(one.uuid) or Instance(uuid=one.uuid)
            try:
                now[one.uuid] = step(before, one.event, context).instance
            except IllegalStep as fault:
                if not isinstance(one.event, Claimed | ClaimRefused | Released | Reverted):
                    raise
                kind = type(one.event).__name__
                metrics.UNEXPECTED_ANSWERS.labels(before.state, kind).inc()
                log.error(
                    "cell.answer_unexpected",
                    instance=one.uuid,
                    cause=before.cause or one.uuid,
                    state=before.state,
                    answer=kind,
                    reason=str(fault),
                    hint="the cell's database was set back or replaced under this conductor",
                )
            else:
                possible.append(one)
        return possible

    async def _record(
        self, transaction: Transaction, known: Mapping[str, Instance], incoming: Sequence[InstanceEvent]
    ) -> Transition:
        """Step every event and write down what changed, with what is to be sent."""
        now: dict[str, Instance] = dict(known)
        outgoing: list[OutboxMessage] = []
        steps: Counter[tuple[State, str]] = Counter()
        ended: list[Instance] = []
        context = replace(
            self._context,
            deployment=self._store.deployment,
            set_back_at=self._store.set_back_at,
            down=self._down(),
            fences=self._fences.known,
        )
        ended_by = _FenceSteps()
        for instance_event in incoming:
            before = now.get(instance_event.uuid) or Instance(uuid=instance_event.uuid)
            stepped = step(before, instance_event.event, context)
            if context.fences:
                stepped = ended_by.follow(before, stepped, instance_event.event, context)
            after = now[instance_event.uuid] = _in_its_trace(before, stepped.instance, instance_event)
            cause = after.cause or instance_event.cause
            trace = traceparent_of(cause) or after.traceparent
            outgoing += [OutboxMessage(self._bus.name, command, cause, trace) for command in stepped.commands]
            steps[before.state, type(instance_event.event).__name__] += 1
            if stepped.instance.state is not before.state and stepped.instance.state in ENDS:
                ended.append(stepped.instance)
        changed = [i for uuid, i in now.items() if uuid in known and i is not known[uuid]]
        created = [i for uuid, i in now.items() if uuid not in known and i.state is not State.ABSENT]
        if ended_by.hosts and not await transaction.lose(list(ended_by.hosts), ended_by.losses):
            self._fences.invalidate()
            raise Transient("the fence that this relies on was lifted meanwhile", code="fence.lifted")
        await transaction.insert(created)
        await transaction.update(changed)
        await transaction.send_later(outgoing)
        return Transition(now, outgoing, steps, ended, ended_by.losses)

    def _committed(self, transaction: Transaction, recorded: Transition) -> None:
        """Send, log and count what has been committed."""
        self._relay.send(transaction.row, recorded.outgoing)
        if recorded.losses:
            self._fences.note_losses(recorded.losses)
        _observe_steps(recorded.steps, recorded.ended, recorded.outgoing)

    async def _ask_placement(self, questions: Sequence[PendingQuestion]) -> None:
        """Ask placement, until nothing of this batch waits for it; what gets no answer is left to the sweep.

        A missing answer is no reason to hold the messages back: the request is on record, and repeated until answered.
        """
        for _ in range(MAX_ROUNDS):
            mine = [question for question in questions if question.instance.uuid not in self._requesting]
            if not mine:
                return
            self._requesting.update(question.instance.uuid for question in mine)
            try:
                answers = await self._ask(mine)
            finally:
                self._requesting.difference_update(question.instance.uuid for question in mine)
            if not answers:
                return
            questions = await self._apply(answers)
        log.error("instance.unsettled", instances=[question.instance.uuid for question in questions][:10])

    async def _ask(self, questions: Sequence[PendingQuestion]) -> list[InstanceEvent]:
        """One round of questions, many at once; the answers as events."""
        claims = [(question, question.message) for question in questions if isinstance(question.message, Claim)]
        releases = [(question, question.message) for question in questions if isinstance(question.message, Release)]
        incoming: list[InstanceEvent] = []
        if claims:
            answers = await self._request([c for _, c in claims], ClaimResult, [q.instance.cause for q, _ in claims])
            for (question, claim), answer in zip(claims, answers, strict=True):
                event = self._claim_event(question, claim, answer)
                incoming += [InstanceEvent(question.instance.uuid, event)] if event else []
        if releases:
            queried = [release for _, release in releases]
            replies = await self._request(queried, ReleaseResult, [q.instance.cause for q, _ in releases])
            for (question, release), reply in zip(releases, replies, strict=True):
                if self._is_released(question.instance, reply):
                    released = Released(at=self._clock.time(), consumer=release.consumer)
                    incoming.append(InstanceEvent(question.instance.uuid, released))
        if reverts := [(q, q.message) for q in questions if isinstance(q.message, Revert)]:
            backs = await self._request([r for _, r in reverts], RevertResult, [q.instance.cause for q, _ in reverts])
            for (question, revert), back in zip(reverts, backs, strict=True):
                reverted = self._revert_event(question.instance, revert, back)
                incoming += [InstanceEvent(question.instance.uuid, reverted)] if reverted else []
        return incoming

    async def _request(self, questions: Sequence[Message], reply: type[R], causes: Sequence[str]) -> list[R | Fault]:
        return await self._bus.request_all(questions, reply, timeout_s=self._config.claim_timeout_s, causes=causes)

    def _claim_event(self, question: PendingQuestion, claim: Claim, answer: ClaimResult | Fault) -> Event | None:
        """What placement's answer means to the instance; None: no answer yet."""
        now, instance = self._clock.time(), question.instance
        if isinstance(answer, RequestRefused):
            metrics.ANSWERS.labels("claim", answer.code).inc()
            return ClaimRefused(at=now, attempt=claim.attempt, reason=f"{answer.code}: {answer.reason}")
        if isinstance(answer, Fault):
            self._unanswered(instance, "claim", answer)
            return None
        metrics.ANSWERS.labels("claim", answer.outcome.value).inc()
        log.info(
            "instance.claim",
            instance=instance.uuid,
            attempt=claim.attempt,
            outcome=answer.outcome,
            outcomes=[outcome.value for outcome in answer.outcomes],
            cause=instance.cause,
        )
        if answer.outcome is ClaimOutcome.CLAIMED and answer.option is not None:
            return Claimed(
                at=now,
                attempt=claim.attempt,
                option=answer.option,
                consumer_generation=answer.consumer_generation,
                outcomes=answer.outcomes,
            )
        return _refused(claim, answer, now, question.repeated)

    def _is_released(self, instance: Instance, reply: ReleaseResult | Fault) -> bool:
        if isinstance(reply, Fault):
            self._unanswered(instance, "release", reply)
            return False
        metrics.ANSWERS.labels("release", reply.outcome).inc()
        if reply.outcome == "consumer_changed":
            # A newer attempt than any of ours holds it: not ours to release.
            log.warning("instance.release_foreign", instance=instance.uuid, cause=instance.cause)
        return True

    def _revert_event(self, instance: Instance, revert: Revert, reply: RevertResult | Fault) -> Event | None:
        """What placement's answer means to the instance; None: the request is repeated."""
        if isinstance(reply, Fault):
            self._unanswered(instance, "revert", reply)
            return None
        metrics.ANSWERS.labels("revert", reply.outcome).inc()
        if reply.outcome in ("full", "gone"):
            log.error("instance.revert_refused", instance=instance.uuid, outcome=reply.outcome, reason=reply.reason)
            return None
        if reply.outcome == "consumer_changed":
            log.warning("instance.revert_foreign", instance=instance.uuid, cause=instance.cause, reason=reply.reason)
        return Reverted(at=self._clock.time(), attempt=revert.attempt, consumer_generation=reply.consumer_generation)

    def _unanswered(self, instance: Instance, kind: str, fault: Fault) -> None:
        metrics.ANSWERS.labels(kind, fault.code).inc()
        log.warning("instance.unanswered", instance=instance.uuid, ask=kind, code=fault.code, cause=instance.cause)


class _FenceSteps:
    """What fences end in one transaction: on which hosts, and what these have lost by it."""

    def __init__(self) -> None:
        self.hosts: dict[str, None] = {}
        self.losses: list[Loss] = []

    def follow(self, before: Instance, stepped: Step, event: Event, context: StepContext) -> Step:
        """The step, and those that the fences of the instance's hosts lead to."""
        at, commands = event.at, stepped.commands
        fenced = {*fenced_hosts(before, context.fences), *fenced_hosts(stepped.instance, context.fences)}
        after = stepped.instance
        if isinstance(event, HostFenced) and after is not before:
            self.hosts[event.host_uuid] = None
        for _ in range(MAX_FENCE_STEPS):
            was = after
            for host in fenced_hosts(after, context.fences):
                then = step(after, HostFenced(at=at, host_uuid=host), context)
                if then.instance is not after:
                    self.hosts[host] = None
                    after, commands = then.instance, (*commands, *then.commands)
            if after is was:
                break
        if after is not before:
            for host in sorted(fenced):
                self.losses += losses_of(before, after, host, at)
        self.hosts.update(dict.fromkeys(loss.host_uuid for loss in self.losses))
        return Step(after, commands)


def _may_be_redone(recorded: Transition) -> bool:
    """Whether it may leave before it is on disk: the message that caused it is acknowledged after that.

    A database that forgets it in a crash is given the message again, and announces the same again; see
    docs/decisions/0011-what-waits-for-the-disk.md. What commands a host or goes to placement is on disk first; so is
    the end of a request: forgotten, a refusal could be carried out after all, and what was done could fail (seed 116).
    """
    if any(question_of(instance) is not None for instance in recorded.instances.values()):
        return False
    outgoing = [addressed.message for addressed in recorded.outgoing]
    if any(isinstance(message, MoveEvent) and message.terminal for message in outgoing):
        return False
    return all(isinstance(message, BuildEvent | MoveEvent) for message in outgoing)


def _in_its_trace(before: Instance, after: Instance, incoming: InstanceEvent) -> Instance:
    """The instance with the trace of the request that has just changed it."""
    if after is before or not isinstance(incoming.event, BuildRequested | DeleteRequested | MoveRequested):
        return after
    trace = traceparent_of(after.cause or incoming.cause)
    return after if trace == after.traceparent else replace(after, traceparent=trace)


def _questions(
    before: Mapping[str, Instance], after: Mapping[str, Instance], *, again: Collection[str]
) -> list[PendingQuestion]:
    """The requests to placement that are due: those that have just come up, and those of `again` once more.

    An instance that was waiting all along is another task's: two requests at the same time would be answered twice.
    """
    found: list[PendingQuestion] = []
    for uuid, instance in after.items():
        message = question_of(instance)
        if message is None:
            continue
        known = before.get(uuid)
        is_new = known is None or question_of(known) != message
        if is_new or uuid in again:
            found.append(PendingQuestion(instance, message, repeated=not is_new))
    return found


def _refused(claim: Claim, answer: ClaimResult, now: float, repeated: bool) -> ClaimRefused:
    """A claim that took nothing.

    When the same request was sent before (a crash, a lost answer), a consumer that is gone is our own doing: the
    first request released it and found no room. It differs from a consumer that another client holds.
    """
    ours = repeated and answer.consumer_generation is None
    return ClaimRefused(
        at=now,
        attempt=claim.attempt,
        consumer_changed=answer.outcome is ClaimOutcome.CONSUMER_CHANGED and not ours,
        outcomes=answer.outcomes,
        reason=answer.reason,
    )


def _log_change(change: DatabaseChange, cell: str) -> None:
    metrics.DATABASE_CHANGES.inc()
    log.error(
        "cell.database_set_back",
        cell=cell,
        deployment=change.deployment,
        doubted=change.doubted,
        hint="no build that was under way is timed out before its host has reported what became of it",
    )


def _observe_steps(
    steps: Counter[tuple[State, str]], ended: Sequence[Instance], outgoing: Sequence[OutboxMessage]
) -> None:
    """Count a batch, and log each instance that came to an end."""
    for (state, event), times in steps.items():
        metrics.STEPS.labels(state, event).inc(times)
    for instance in ended:
        metrics.ENDED.labels(instance.state).inc()
        write = log.info if instance.state is State.FAILED else log.debug
        write(
            "instance.ended",
            instance=instance.uuid,
            state=instance.state,
            attempt=instance.attempt,
            code=instance.code,
            reason=instance.reason,
            cause=instance.cause,
        )
    metrics.ALTERNATES.inc(sum(isinstance(a.message, Spawn) and a.message.attempt > 1 for a in outgoing))
    metrics.stages([a.message for a in outgoing])
