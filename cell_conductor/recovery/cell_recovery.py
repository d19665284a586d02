"""Finds out what is true of a cell whose database was restored, and makes its records that: behind a barrier, while no
request, result or report is taken.
"""

# What the compute services list decides, with what the schedulers and placement have; `reconcile` has the rules. All is
# idempotent: a conductor that dies is followed from the listings on, under the same incarnation of the database. What
# cannot be known keeps a blocked reason, is looked at again and again, and holds up nothing else.

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice

import structlog
from msgspec import Struct, field
from msgspec.structs import replace

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.listing import ListedMachine, ListMachines, MachinesPage
from bus.contracts.operations import CellFence
from bus.contracts.placement import Restate, RestateResult
from bus.faults import Fault, Transient
from bus.persistence.guarded_statement import Conflict
from bus.persistence.outbox import OutboxMessage
from bus.transport import BusError
from cell_conductor import metrics
from cell_conductor.config import ConductorConfig
from cell_conductor.engine import FencePort, Sender
from cell_conductor.hosts.lease_controller import LeaseController
from cell_conductor.recovery.known_reader import MAX_OWN, KnownReader, OwnInstances
from cell_conductor.rules.reconcile import reconcile
from cell_conductor.rules.recovered import Loss, leftovers, loss_of, recovered, restatement
from cell_conductor.rules.recovery_facts import KnownInstance, OperatorDecision, Reconciled, Verb
from cell_conductor.state.fence import fence_of
from cell_conductor.state.instance import BlockedReason, Instance
from cell_conductor.state.step import StepContext
from cell_conductor.store.keyed import MAX_LOSSES_NAMED, Losses, Unrecognised
from cell_conductor.store.keyed_tables import ADOPT, DESTROY, PROTECT, UnknownMachineRecord
from cell_conductor.store.port import InstanceStore, LockingTransaction, UnreadableRecords

log = structlog.get_logger(__name__)

LOOK_S = 0.5  # between two looks whether there is something to do
ACCEPTANCE_POLL_S = 10.0  # until it is looked whether an operator has accepted the losses
AGAIN_S = 2.0  # a server or a service has not answered
LATE_S = 30.0  # between two looks at what is listed late
MAX_TRIES = 5  # a service that is up and does not list is as one that is down
MAX_PAGES = 1_000  # of one service
MAX_BATCH = 200  # instances of one transaction
MAX_BLOCKED = 1_000  # that are looked at at once; others come again with their deadline
LOGGED = 10
VERBS = {DESTROY: Verb.DESTROY, ADOPT: Verb.ADOPT}


class MachineListing(Struct):
    """What the services of a cell have, who were asked under this incarnation of its database."""

    incarnation: int
    machines: dict[str, list[ListedMachine]] = field(default_factory=dict)
    hosts: set[str] = field(default_factory=set)  # the hosts that were read
    silent: set[str] = field(default_factory=set)  # services that have not listed
    without: set[str] = field(default_factory=set)  # services without machines, by an operator's decision

    def add(self, pages: Iterable[MachinesPage]) -> None:
        """Of one service, all of them."""
        for page in pages:
            self.hosts.update(page.hosts)
            for one in page.machines:
                self.machines.setdefault(one.instance_uuid, []).append(one)

    def of(self, services: Collection[str]) -> set[str]:
        """The instances of which these have a machine."""
        return {uuid for uuid, machines in self.machines.items() if any(one.service in services for one in machines)}


class CellRecovery:
    """One conductor's. The leader of the leases alone recovers the cell; any looks at what is blocked."""

    def __init__(
        self,
        store: InstanceStore,
        bus: Bus,
        relay: Sender,
        *,
        clock: Clock,
        config: ConductorConfig,
        known: KnownReader,
        leases: LeaseController,
        fences: FencePort,
        context: StepContext,
    ) -> None:
        self._store = store
        self._bus = bus
        self._relay = relay
        self._clock = clock
        self._config = config
        self._known = known
        self._leases = leases
        self._fences = fences
        self._context = context
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
        if (listening := self._leases.marks_wanted_by()) is not None:
            self._leases.hear_all(await self._known.marks(self._store.incarnation), listening)
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
        listing = await self._list()
        late -= listing.silent
        self._late_at_s = self._clock.monotonic() + LATE_S
        uuids = sorted(blocked | listing.of(late))
        known = await self._known.asked(listing.incarnation, uuids)
        made = await self._reconcile_all(uuids, known, listing)
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
        incarnation = (listing := await self._list()).incarnation
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

        async for part in self._known.parts(incarnation, own):  # hosts and instances have one order: fences first
            await self._put_fences(part.fences)
            for mark in part.marks:
                self._leases.hear(mark)
        async with self._store.transaction() as transaction:
            await transaction.expect_recovering()  # the next leader may have opened the cell meanwhile
            started = await transaction.begin_recovery(self._leases.stated())
        if started != incarnation:
            self._leases.record_recovery()
            return  # what was commanded by a later one than this is refused from now on: anew
        await self._fences.ensure_loaded()
        if await self._waits_for_word(incarnation, listing, own):
            await self._clock.sleep(ACCEPTANCE_POLL_S)
            return
        made = Counter[str]()
        async for part in self._known.parts(incarnation, own):
            here = sorted({*part.instances, *await own(part.after, part.last, MAX_OWN)})
            made += await self._reconcile_all(here, part.instances, listing)
        async with self._store.transaction() as transaction:
            await transaction.expect_recovering()
            await transaction.end_recovery(listing.silent, listing.without)
        self._unlisted = None
        log.warning("recovery.ended", incarnation=incarnation, **made)

    async def _waits_for_word(self, incarnation: int, listing: MachineListing, own: OwnInstances) -> bool:
        """Whether this would end more instances than an operator has accepted: it may be the wrong database."""
        lost: dict[Loss, list[str]] = {Loss.INSTANCE: [], Loss.BUILD: []}
        async for part in self._known.parts(incarnation, own):
            here = sorted({*part.instances, *await own(part.after, part.last, MAX_OWN)})
            for start in range(0, len(here), MAX_BATCH):
                found = await self._reconciled(here[start : start + MAX_BATCH], part.instances, listing)
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

    # --- what the services have

    async def _list(self) -> MachineListing:
        """What each service that is up has. Those that are down, and may have hosts all the same, are silent."""
        failed = set(self._leases.up() or ())
        incarnation, down = self._store.incarnation, set(self._leases.down())
        async with self._store.transaction() as transaction:
            absent = await transaction.absent_services()
        without = {*self._leases.deleted(), *(name for name, has_nothing in absent.items() if has_nothing)} - failed
        silent = (down | absent.keys()) - failed - without
        listing = MachineListing(incarnation, silent=silent, without=without)
        for _ in range(MAX_TRIES):
            left, failed = failed, set[str]()
            pages: dict[str, list[MachinesPage]] = {}
            queries = [ListMachines(service=service, database_id=self._store.database_id) for service in sorted(left)]
            while queries:
                queries = await self._next_pages(queries, pages, failed)
            for service, listed in pages.items():
                if service not in failed:
                    listing.add(listed)
            if not failed:
                return listing
            await self._clock.sleep(AGAIN_S)
        listing.silent |= failed
        return listing

    async def _next_pages(
        self, queries: Sequence[ListMachines], pages: dict[str, list[MachinesPage]], failed: set[str]
    ) -> list[ListMachines]:
        causes = [one.database_id for one in queries]
        answers = await self._bus.request_all(
            queries, MachinesPage, timeout_s=self._config.answer_timeout_s, causes=causes
        )
        following: list[ListMachines] = []
        for query, answer in zip(queries, answers, strict=True):
            if isinstance(answer, Fault):
                log.warning("recovery.not_listed", service=query.service, code=answer.code, reason=str(answer))
                failed.add(query.service)
                continue
            pages.setdefault(query.service, []).append(answer)
            after = answer.next_host, answer.next_instance
            is_further = after > (query.after_host, query.after_instance)
            if answer.more and is_further and len(pages[query.service]) < MAX_PAGES:
                following.append(replace(query, after_host=after[0], after_instance=after[1]))
            elif answer.more:
                failed.add(query.service)  # it would never end
        return following

    # --- what is true by that

    async def _reconcile_all(
        self, instances: Sequence[str], known: Mapping[str, KnownInstance], listing: MachineListing
    ) -> Counter[str]:
        made = Counter[str]()
        for start in range(0, len(instances), MAX_BATCH):
            batch = instances[start : start + MAX_BATCH]
            generations = await self._restate(await self._reconciled(batch, known, listing), known)
            made += await self._record(batch, known, listing, generations)
        return made

    async def _restate(
        self, found: Mapping[str, tuple[Instance | None, Reconciled]], known: Mapping[str, KnownInstance]
    ) -> dict[str, int | None]:
        """Have placement follow what is found; returns the generations of the consumers by that."""
        wanted: list[Restate] = []
        for uuid, (_, result) in found.items():
            if (one := restatement(result, known.get(uuid))) is not None:
                wanted.append(one)
        answers = await self._bus.request_all(
            wanted, RestateResult, timeout_s=self._config.claim_timeout_s, causes=[one.consumer for one in wanted]
        )
        generations: dict[str, int | None] = {}
        for one, answer in zip(wanted, answers, strict=True):
            if isinstance(answer, Fault):
                raise Transient(f"placement has not restated {one.consumer}: {answer}", code=answer.code)
            if answer.over_capacity:
                log.warning("recovery.over_capacity", instance=one.consumer, cause=one.consumer)
            elif answer.outcome != "restated":
                log.error("recovery.not_restated", instance=one.consumer, outcome=answer.outcome, cause=one.consumer)
            generations[one.consumer] = answer.consumer_generation
        return generations

    async def _reconciled(
        self, instances: Sequence[str], known: Mapping[str, KnownInstance], listing: MachineListing
    ) -> dict[str, tuple[Instance | None, Reconciled]]:
        async with self._store.transaction() as transaction:
            return await self._decide(transaction, instances, known, listing)

    async def _decide(
        self,
        transaction: LockingTransaction,
        instances: Sequence[str],
        known: Mapping[str, KnownInstance],
        listing: MachineListing,
    ) -> dict[str, tuple[Instance | None, Reconciled]]:
        """What is found of these, by their records: of all while the cell recovers, else of those that are blocked, and
        the leftovers of the others. Raises Unrecognised: another recovery has begun since the services were asked.
        """
        if listing.incarnation != self._store.incarnation:
            raise Unrecognised
        is_recovering = self._store.is_recovering
        if is_recovering:
            await transaction.expect_recovering()
        else:
            stated = self._leases.stated()
            if await transaction.recognise(stated) is not None or not stated.may_act:
                raise Unrecognised  # a sweep recognises it
        records, unreadable = await _locked(transaction, instances)
        decided = await transaction.unknown_machines(instances)
        decisions, protected = _decisions(decided), {one.location for one in decided if one.decision == PROTECT}
        found: dict[str, tuple[Instance | None, Reconciled]] = {}
        for uuid in instances:
            record = records.get(uuid)
            if uuid in unreadable:
                continue
            hosts = [host for host, instance in protected if instance == uuid]
            if not is_recovering and record is not None and not record.blocked_reason:
                found[uuid] = record, Reconciled(None, leftovers(record, listing.machines.get(uuid, ()), hosts))
                continue
            found[uuid] = record, self._reconcile(uuid, record, known.get(uuid), listing, decisions.get(uuid), hosts)
        return found

    def _reconcile(  # noqa: PLR0917  (one caller)
        self,
        uuid: str,
        record: Instance | None,
        known: KnownInstance | None,
        listing: MachineListing,
        decision: OperatorDecision | None,
        protected: Collection[str],
    ) -> Reconciled:
        """What is found of one, of which what follows can be made. A defect costs no other instance: it would end the
        process at each start, and the cell would stay closed.
        """
        incarnation, machines = self._store.incarnation, listing.machines.get(uuid, ())
        unblocked = None if record is None else replace(record, blocked_reason="")
        absent, off = self._absent(record, machines, known, listing), self._off(listing)
        try:
            result = reconcile(
                unblocked, machines, known, absent, decision, incarnation=incarnation, protected=protected, off=off
            )
            restatement(result, known)
            recovered(record, result, known, self._clock.time(), self._context, incarnation=incarnation)
        except Exception as error:  # any
            metrics.STEPS_FAILED.labels("" if record is None else record.state, "recovery").inc()
            code = getattr(error, "code", type(error).__name__)
            log.exception("recovery.failed", instance=uuid, code=code, cause=uuid)
            return Reconciled(unblocked, blocked_reason=BlockedReason.CONFLICT)
        return result

    def _absent(
        self,
        record: Instance | None,
        machines: Sequence[ListedMachine],
        known: KnownInstance | None,
        listing: MachineListing,
    ) -> set[str]:
        """The hosts that may have a machine of it, and have not listed; "": any of a silent service."""
        # A fenced host is off, and one of a service that has nothing is empty. Two services may have a host of one
        # uuid: another's list is none of a silent one that may have it.
        places = list(known.selections) if known is not None else []
        if record is not None:
            places += record.selections
            if record.action is not None and record.action.source is not None:
                places.append(record.action.source)
        places = [one for one in places if one.service not in listing.without]
        lacking = {one for one in listing.silent if not self._leases.is_removed(one)}
        absent = {one.host_uuid for one in places if one.host_uuid not in listing.hosts or one.service in lacking}
        found = {one.host_uuid for one in machines}
        return (absent - found - self._off(listing)) | ({""} if listing.silent else set())

    def _off(self, listing: MachineListing) -> set[str]:
        """Fenced hosts that have not listed. One whose fence is being ended is on."""
        return {host for host, one in self._fences.fences.items() if not one.unfencing} - listing.hosts

    async def _record(
        self,
        instances: Sequence[str],
        known: Mapping[str, KnownInstance],
        listing: MachineListing,
        generations: Mapping[str, int | None],
    ) -> Counter[str]:
        at, incarnation, context = self._clock.time(), self._store.incarnation, self._context
        context = replace(context, database_id=self._store.database_id)
        made, outgoing = Counter[str](), list[OutboxMessage]()
        inserts, updates = list[Instance](), list[Instance]()
        async with self._store.transaction() as transaction:
            for uuid, (before, result) in (await self._decide(transaction, instances, known, listing)).items():
                step = recovered(before, result, known.get(uuid), at, context, incarnation=incarnation)
                if step is None:
                    continue
                record = step.instance
                if uuid in generations:
                    record = replace(record, consumer_generation=generations[uuid])
                if result.record is None:
                    made.update(one.kind for one in result.commands)
                else:
                    made[result.blocked_reason or record.state] += 1
                    (inserts if before is None else updates).append(record)
                outgoing += [
                    OutboxMessage(self._bus.name, one, record.cause or uuid, record.traceparent, incarnation)
                    for one in step.commands
                ]
            try:
                await transaction.insert(inserts)
            except Conflict:
                raise Transient(
                    "one of the instances has come on record meanwhile", code="instance.contended"
                ) from None
            await transaction.update(updates)
            await transaction.send_later(outgoing)
        self._relay.send(transaction.rows, outgoing)
        return made


async def _locked(
    transaction: LockingTransaction, instances: Sequence[str]
) -> tuple[dict[str, Instance], Collection[str]]:
    """The records of these, and those that cannot be read: nothing is decided about them."""
    try:
        return await transaction.lock(instances), ()
    except UnreadableRecords as error:
        return await transaction.lock(sorted(set(instances) - error.uuids)), error.uuids


def _decisions(machines: Iterable[UnknownMachineRecord]) -> dict[str, OperatorDecision]:
    return {
        one.machine.uuid: OperatorDecision(VERBS[one.decision], one.machine.host_uuid)
        for one in machines
        if one.decision in VERBS
    }
