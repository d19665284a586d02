"""The only place where an instance changes. Applies events in batches, in one transaction each: read, step, record with
the outbox. It reads without locks at first, and with them after a conflict. Then it sends the requests to placement and
steps again. Several conductors may run side by side.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import structlog
from msgspec.structs import replace

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.base import DatabaseMark
from bus.faults import Transient
from bus.persistence.guarded_statement import Conflict
from bus.persistence.outbox import OutboxMessage
from bus.tracing.context import traceparent_of
from cell_conductor import metrics
from cell_conductor.awaited_request import awaited_request_of
from cell_conductor.config import ConductorConfig
from cell_conductor.pending_lookups import PendingLookups
from cell_conductor.placement_client import PendingRequest, PlacementRequests, due_requests
from cell_conductor.recorded_changes import RecordedChanges, is_repeatable, observe_steps
from cell_conductor.rules.delete_rules import is_other_project
from cell_conductor.state.commands import next_resend_at
from cell_conductor.state.database_marks import Stated
from cell_conductor.state.desired_state import desired_state_of
from cell_conductor.state.evacuation_proof import lacks_proof
from cell_conductor.state.events import (
    ActionRequested,
    BuildRequested,
    DeleteRequested,
    InstanceEvent,
    SourceQuery,
    TimedOut,
)
from cell_conductor.state.fence import Fence
from cell_conductor.state.instance import Instance, State
from cell_conductor.state.lease import Lease
from cell_conductor.state.step import Step, StepContext
from cell_conductor.state.unknown_machine import UnknownMachineKind
from cell_conductor.store.keyed_tables import PROTECT
from cell_conductor.store.port import DatabaseChange, InstanceStore, Transaction, UnreadableRecords
from cell_conductor.transition import FenceSteps, step

log = structlog.get_logger(__name__)

# Placement gets requests for one instance at most this often in a row: a claim, then the release of a claim that a
# delete made useless.
MAX_ROUNDS = 4
# How often a batch is decided anew when another conductor recorded one of its new instances first.
MAX_STALE = 5


class Listening(Transient):
    """This conductor has started, or its database is on another server, and compute services have not been heard yet:
    they would know if that was restored.
    """

    code = "cell.listening"

    def __init__(self) -> None:
        super().__init__("the compute services have not been heard yet since it was connected to its database")


class LeasePort(Protocol):
    """Which compute services are up, as this conductor knows it (`LeaseController`)."""

    def alive_services(self) -> Collection[str]:
        """Those that certainly are."""

    def down(self) -> Mapping[str, Lease]:
        """Those that take no builds now."""


class MarksPort(Protocol):
    """What others state of the cell's database, as this conductor has heard it (`StatedMarks`)."""

    def stated(self) -> Stated:
        """All of it, now."""

    def hear(self, mark: DatabaseMark, *, by: str = "") -> None:
        """It is stated by a service; "": from above."""

    def record_recovery(self) -> None:
        """The cell recovers by what is stated now."""


class FencePort(Protocol):
    """The fences as this conductor has them (`FenceCache`)."""

    @property
    def fences(self) -> Mapping[str, Fence]:
        """By host. Raises Transient while they are not read."""

    async def ensure_loaded(self) -> None:
        """Read them if they are not read."""

    @property
    def is_recent(self) -> bool:
        """Whether the record was read a moment ago; if it was not, it is read soon."""

    def invalidate(self) -> None:
        """Drop these, which are not on record any more: none is known until they are read again."""

    def reload_soon(self) -> None:
        """They have just been changed on record."""


class Sender(Protocol):
    """Publishes the messages of outbox rows, once they are committed (`bus.persistence.relay.Relay`)."""

    def send(self, rows: Sequence[int], outgoing: Sequence[OutboxMessage]) -> None:
        """Publish soon; delete each row after its confirm."""


def context_of(config: ConductorConfig, cell: str) -> StepContext:
    """What steps depend on in this process."""
    return StepContext(
        cell=cell,
        claim_retry_s=config.claim_retry_s,
        answer_timeout_s=config.answer_timeout_s,
        destroy_retry_s=config.destroy_retry_s,
        destroy_retry_max_s=config.destroy_retry_max_s,
        live_copy_mb_s=config.live_copy_mb_s,
    )


class Engine:
    """Changes the instances of one cell."""

    def __init__(
        self,
        *,
        store: InstanceStore,
        bus: Bus,
        relay: Sender,
        clock: Clock,
        config: ConductorConfig,
        cell: str,
        leases: LeasePort,
        marks: MarksPort,
        fences: FencePort,
        lookups: PendingLookups,
        blocked: Callable[[Collection[str]], None] = lambda _instances: None,
    ) -> None:
        """`blocked(instances)`: what is true of these is to be found out."""
        self._blocked = blocked
        self._store = store
        self._bus = bus
        self._relay = relay
        self._clock = clock
        self._config = config
        self._leases = leases
        self._marks = marks
        self._fences = fences
        self._placement = PlacementRequests(
            bus,
            clock,
            config.claim_timeout_s,
            lambda: store.incarnation,
            lambda incarnation: marks.hear(DatabaseMark(incarnation)),
        )
        self._lookups = lookups
        self._unflushed = 0  # commits that did not wait for the disk
        self._context = context_of(config, cell)

    @property
    def acts(self) -> bool:
        """Whether it takes requests now: the cell does not recover, and what its services know is heard."""
        return not self._store.is_recovering and self._marks.stated().may_act

    async def take(self, incoming: Sequence[InstanceEvent], *, source: str) -> asyncio.Future[None] | None:
        """Apply events, in order for each instance, and send the requests to placement that follow. Returns an
        awaitable that ends once all is on disk (None: it is); events are acknowledged after that.
        """
        losses, flushes = self._store.connection_losses, self._unflushed
        with metrics.BATCH_SECONDS.labels(source).time():
            await self.advance(incoming)
        return None if flushes == self._unflushed else self._store.flushed(losses)

    async def advance(self, incoming: Sequence[InstanceEvent]) -> None:
        """As `take`, without waiting for the disk: for events that no message brings."""
        await self._request_placement(await self._apply(incoming))

    async def effective(self, incoming: Sequence[InstanceEvent]) -> list[tuple[InstanceEvent, Instance]]:
        """The events among these that the table would act on now, each with its record. The others are late or
        repeated.
        """
        # The rows are locked only to read them: a change that another task is committing is waited for. If they were
        # read without locks they would still look open, and the breaker would count events that have been handled.
        try:
            known = await self.read_recorded({one.uuid for one in incoming})
        except UnreadableRecords as unreadable:
            return await self.effective(_events_of_readable(incoming, unreadable))
        context = replace(self._context, database_id=self._store.database_id)
        found: list[tuple[InstanceEvent, Instance]] = []
        for one in incoming:
            instance = known.get(one.uuid)
            if instance is not None:
                stepped = self._stepped(instance, one, context, None, set())
                if stepped.instance is not instance or stepped.commands:
                    found.append((one, instance))
        return found

    async def sweep(self) -> int:
        """Apply passed deadlines, one bounded batch of them. Returns how many."""
        now, stated = self._clock.time(), self._marks.stated()
        is_newer = stated.conductor > self._store.incarnation
        if not (self._store.is_recovering or stated.marks or is_newer) and not await self._store.has_due(now):
            return 0
        await self._fences.ensure_loaded()
        async with self._store.transaction() as transaction:
            # Before any deadline counts: in a database that was restored it proves nothing.
            stated = self._marks.stated()  # now that there is a connection
            change = await transaction.recognise(stated)
            if change is None and not stated.may_act:
                return 0
            if change is None:
                locked = await transaction.lock_due(now, self._config.sweep_batch)
                due = {instance.uuid: instance for instance in locked}
                if not due:
                    return 0
                incoming = [InstanceEvent(uuid, TimedOut(at=now)) for uuid in due]
                recorded = await self._record(transaction, due, incoming)
        if change is not None:
            self._record_change(change)
            return 0
        self._committed(transaction, recorded)
        self._blocked([uuid for uuid, instance in due.items() if instance.blocked_reason])
        for instance in due.values():
            metrics.SWEPT.labels(instance.state).inc()
            log.info("instance.deadline", instance=instance.uuid, state=instance.state, cause=instance.cause)
        with metrics.BATCH_SECONDS.labels("sweep").time():
            await self._request_placement(due_requests(due, recorded, again=due.keys()))
        return len(due)

    def _record_change(self, change: DatabaseChange) -> None:
        metrics.DATABASE_RESTORES.inc()
        about = {"cell": self._context.cell, "database_id": change.database_id, "incarnation": change.incarnation}
        if not change.recovers:
            log.warning("cell.database_taken_over", **about)
            return
        self._marks.record_recovery()
        log.error(
            "cell.database_restored",
            **about,
            hint="nothing is begun in the cell until its compute services have listed what they have",
        )

    async def _apply(self, incoming: Sequence[InstanceEvent]) -> list[PendingRequest]:
        """One transaction: the new ones of these events, on the locked instances. Returns the requests that follow."""
        await self._fences.ensure_loaded()
        try:
            return await self._apply_all(incoming)
        except UnreadableRecords as unreadable:
            return await self._apply_all(_events_of_readable(incoming, unreadable))

    async def _apply_all(self, incoming: Sequence[InstanceEvent]) -> list[PendingRequest]:
        uuids = sorted({instance_event.uuid for instance_event in incoming})
        new = {one.uuid for one in incoming if isinstance(one.event, BuildRequested) and not one.event.is_query}
        for number in range(MAX_STALE):
            # First on cached instances, in one round trip; with locks after a conflict.
            opened = self._store.transaction() if number else self._store.optimistic(new)
            try:
                async with opened as transaction:
                    stated = self._marks.stated()  # now that there is a connection
                    change = await transaction.recognise(stated)
                    if change is None and not stated.may_act:
                        raise Listening
                    if change is None:
                        fresh = await self._reread(transaction, incoming)
                        known = await transaction.lock(uuids)
                        recorded = await self._record(transaction, known, fresh)
                        transaction.durable = not is_repeatable(recorded, known)
            except Conflict:
                continue
            if change is not None:
                self._record_change(change)
                continue
            self._committed(transaction, recorded)
            self._unflushed += not transaction.durable
            # A message that was seen before: the conductor that took it then may have died before it could send the
            # request.
            again = set() if len(fresh) == len(incoming) else {a.uuid for a in incoming} - {a.uuid for a in fresh}
            return due_requests(known, recorded, again=again)
        raise Transient("other conductors keep recording these instances first", code="instance.contended")

    @staticmethod
    async def _reread(transaction: Transaction, incoming: Sequence[InstanceEvent]) -> Sequence[InstanceEvent]:
        ids = [instance_event.message_id for instance_event in incoming if instance_event.message_id]
        if not ids:
            return incoming
        new = await transaction.first_time(ids)
        return [a for a in incoming if not a.message_id or a.message_id in new]

    async def _record(
        self, transaction: Transaction, known: Mapping[str, Instance], incoming: Sequence[InstanceEvent]
    ) -> RecordedChanges:
        """Apply every event and record the changes, with the messages to send."""
        now: dict[str, Instance] = dict(known)
        outgoing: list[OutboxMessage] = []
        steps: Counter[tuple[State, str]] = Counter()
        ended, failed = list[Instance](), set[str]()
        context, ended_by = await self._context_of(transaction, incoming), FenceSteps()
        for instance_event in incoming:
            before, event = now.get(instance_event.uuid) or Instance(uuid=instance_event.uuid), instance_event.event
            stepped = self._stepped(before, instance_event, context, ended_by, failed)
            if isinstance(event, DeleteRequested) and is_other_project(before, event):
                log.warning("instance.delete_refused", instance=before.uuid, reason="it is of another project")
            after = now[instance_event.uuid] = _in_its_trace(before, stepped.instance, instance_event)
            cause = after.cause or instance_event.cause
            trace = traceparent_of(cause) or after.traceparent
            by = self._store.incarnation
            outgoing += [OutboxMessage(self._bus.name, command, cause, trace, by) for command in stepped.commands]
            steps[before.state, type(event).__name__] += 1
            if stepped.instance.state is not before.state and desired_state_of(stepped.instance).ends:
                ended.append(stepped.instance)
        changed = [i for uuid, i in now.items() if uuid in known and i is not known[uuid]]
        created = [i for uuid, i in now.items() if uuid not in known and i.state is not State.ABSENT]
        if ended_by.hosts and not await transaction.rely_on(
            list(ended_by.hosts), ended_by.stale, self._clock.time(), list(ended_by.proofs)
        ):
            self._fences.invalidate()
            raise Transient("the fence that this relies on was ended meanwhile", code="fence.ended")
        await transaction.insert(created)
        await transaction.update(changed)
        await transaction.send_later(outgoing)
        stepped_on = {uuid: one for uuid, one in now.items() if uuid not in failed}
        asked = {uuid: request for uuid, one in stepped_on.items() if (request := awaited_request_of(one)) is not None}
        return RecordedChanges(stepped_on, asked, outgoing, steps, ended, bool(ended_by.stale))

    def _stepped(
        self,
        before: Instance,
        incoming: InstanceEvent,
        context: StepContext,
        ended_by: FenceSteps | None,
        failed: set[str],
    ) -> Step:
        """The step, with those that fences lead to, and what it asks of placement known to be readable."""
        # If it cannot be made, it is logged and noted in `failed`, and the record stays as it is until its next
        # deadline. A message that crashes is a dead letter; what no message brings has none, and would end the process
        # at each start, and with it the whole cell.
        event = incoming.event
        try:
            stepped = step(before, event, context)
            awaited_request_of(stepped.instance)
            if ended_by is None:
                return stepped
            if lacks_proof(before, stepped.instance) and not self._fences.is_recent:
                raise Transient("the fence may be on record and not read yet", code="fence.unread")
            return ended_by.apply(before, stepped, event, context) if context.fences else stepped
        except Transient:
            raise
        except Exception as error:  # any: it must not stop the other records
            if incoming.message_id:
                raise
            failed.add(before.uuid)
            metrics.STEPS_FAILED.labels(before.state, type(event).__name__).inc()
            code = getattr(error, "code", type(error).__name__)
            log.exception("instance.step_failed", instance=before.uuid, code=code, cause=before.cause)
            is_due = isinstance(event, TimedOut)
            return Step(replace(before, deadline=next_resend_at(before, event.at, context)) if is_due else before)

    async def _context_of(self, transaction: Transaction, incoming: Sequence[InstanceEvent]) -> StepContext:
        context = replace(
            self._context,
            database_id=self._store.database_id,
            up=self._leases.alive_services(),
            down=self._leases.down(),
            fences=self._fences.fences,
        )
        found = await transaction.unknown_machines({one.uuid for one in incoming})
        kept = {one.location: one.machine.attempt for one in found if one.decision == PROTECT}
        unknown = [one.machine for one in found if one.decision != PROTECT]
        quarantined = {one.uuid for one in unknown if one.kind is UnknownMachineKind.QUARANTINED}
        return replace(context, quarantined=quarantined, protected=kept)

    def _committed(self, transaction: Transaction, recorded: RecordedChanges) -> None:
        """Send, log and count the committed changes."""
        self._relay.send(transaction.rows, recorded.outgoing)
        if recorded.leaves_stale:
            self._fences.reload_soon()
        observe_steps(recorded.steps, recorded.ended, recorded.outgoing)

    async def read_recorded(self, instances: Collection[str]) -> Mapping[str, Instance]:
        """The records of these instances, once a change of them that is being committed is on record."""
        if not instances:
            return {}
        async with self._store.transaction() as transaction:
            return await transaction.lock(sorted(instances))

    async def _request_placement(self, requests: Sequence[PendingRequest]) -> None:
        """Send requests to placement until no instance of this batch waits for an answer. The sweep repeats unanswered
        ones.
        """
        # A missing answer is no reason to hold the messages back: the request is on record, and repeated until
        # answered.
        for _ in range(MAX_ROUNDS):
            answers = await self._placement.send(self._of_placement(requests))
            if not answers:
                return
            requests = await self._apply(answers)
        if left := self._of_placement(requests):
            log.error("instance.unresolved", instances=[request.instance.uuid for request in left][:10])

    def _of_placement(self, requests: Sequence[PendingRequest]) -> list[PendingRequest]:
        """The requests to placement; the queries of compute services wait for the next search."""
        for one in requests:
            if isinstance(one.message, SourceQuery):
                self._lookups.add_source(one.instance.uuid)
        return [one for one in requests if not isinstance(one.message, SourceQuery)]


def _events_of_readable(incoming: Sequence[InstanceEvent], unreadable: UnreadableRecords) -> list[InstanceEvent]:
    """The events about other instances. Raises what it is given where a message brings one of its own: that is a dead
    letter, as any that crashes; what no message brings comes again.
    """
    if any(one.message_id and one.uuid in unreadable.uuids for one in incoming):
        raise unreadable
    return [one for one in incoming if one.uuid not in unreadable.uuids]


def _in_its_trace(before: Instance, after: Instance, incoming: InstanceEvent) -> Instance:
    """The instance with the trace of the request that has just changed it."""
    if after is before or not isinstance(incoming.event, BuildRequested | DeleteRequested | ActionRequested):
        return after
    trace = traceparent_of(after.cause or incoming.cause)
    return after if trace == after.traceparent else replace(after, traceparent=trace)
