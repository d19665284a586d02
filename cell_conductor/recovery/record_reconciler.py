"""Makes the records of a cell, and placement, what is true by the machines that its compute services have listed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import structlog
from msgspec.structs import replace

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.listing import ListedMachine
from bus.contracts.placement import Restate, RestateResult
from bus.faults import Fault, Transient
from bus.persistence.guarded_statement import Conflict
from bus.persistence.outbox import OutboxMessage
from cell_conductor import metrics
from cell_conductor.config import ConductorConfig
from cell_conductor.engine import FencePort, MarksPort, Sender
from cell_conductor.hosts.lease_controller import LeaseController
from cell_conductor.recovery.machine_listing import MachineListing
from cell_conductor.rules.reconcile import reconcile
from cell_conductor.rules.recovered import Loss, leftovers, loss_of, recovered, restatement
from cell_conductor.rules.recovery_facts import KnownInstance, OperatorDecision, Reconciled, Verb
from cell_conductor.state.desired_state import MachineTarget, desired_state_of
from cell_conductor.state.instance import BlockedReason, Instance
from cell_conductor.state.step import StepContext
from cell_conductor.store.keyed import Unrecognised
from cell_conductor.store.keyed_tables import ADOPT, DESTROY, PROTECT, UnknownMachineRecord
from cell_conductor.store.port import InstanceStore, LockingTransaction, UnreadableRecords

log = structlog.get_logger(__name__)

MAX_BATCH = 200  # instances of one transaction
VERBS = {DESTROY: Verb.DESTROY, ADOPT: Verb.ADOPT}


class RecordReconciler:
    """One conductor's. It decides by the records, has placement follow, and writes what was decided again by then."""

    def __init__(
        self,
        store: InstanceStore,
        bus: Bus,
        relay: Sender,
        *,
        clock: Clock,
        config: ConductorConfig,
        leases: LeaseController,
        marks: MarksPort,
        fences: FencePort,
        context: StepContext,
    ) -> None:
        self._store = store
        self._bus = bus
        self._relay = relay
        self._clock = clock
        self._config = config
        self._leases = leases
        self._marks = marks
        self._fences = fences
        self._context = context

    async def reconcile_all(
        self, instances: Sequence[str], known: Mapping[str, KnownInstance], listing: MachineListing
    ) -> Counter[str]:
        """Make the records of these, and placement, what is true; returns how many became what. Raises Transient."""
        made = Counter[str]()
        for start in range(0, len(instances), MAX_BATCH):
            batch = instances[start : start + MAX_BATCH]
            generations = await self._restate(await self.reconciled(batch, known, listing), known)
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

    async def reconciled(
        self, instances: Sequence[str], known: Mapping[str, KnownInstance], listing: MachineListing
    ) -> dict[str, tuple[Instance | None, Reconciled]]:
        """Their records, and what is found of them; nothing changes. Raises Transient."""
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
            stated = self._marks.stated()
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
            result = self._reconcile(uuid, record, known.get(uuid), listing, decisions.get(uuid), hosts)
            lost = result.record if loss_of(record, result, known.get(uuid)) is Loss.INSTANCE else None
            if not is_recovering and record is not None and lost is not None and _is_reported(record, listing):
                # As of any instance: nobody accepts what is lost now, and its service's breaker counts it.
                result = Reconciled(replace(record, blocked_reason="", highest_attempt=lost.last_attempt))
            found[uuid] = record, result
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


def _is_reported(record: Instance, listing: MachineListing) -> bool:
    """Whether reports of its host show that this instance is lost."""
    is_expected = desired_state_of(record).current is MachineTarget.RUNNING and record.action is None
    is_listed = record.host_uuid in listing.hosts and record.service not in listing.silent | listing.without
    return is_expected and is_listed


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
