"""Drains: begun and commanded by operators, and carried out by any scheduler.

A drain, its hosts' decisions and its instances are on record in one transaction. After that each scheduler looks at it
a few times a second: it locks the drain's row, records how its moves have ended, and requests the next ones, all in one
transaction. A pass keeps no state that it could not read again: a scheduler may end between any two passes, and another
goes on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec
import structlog
from msgspec import Struct
from msgspec.structs import replace

from bus.bus import API
from bus.clock import Clock
from bus.consuming.outcome import never
from bus.contracts.base import MAX_REASON, Refusal
from bus.contracts.drains import (
    MAX_AT_ONCE,
    MAX_PLANNED,
    DrainAction,
    DrainCommand,
    DrainFailure,
    DrainMoveState,
    DrainPlan,
    DrainProgress,
    DrainQuery,
    DrainRecord,
    DrainResult,
    DrainsPage,
    DrainsQuery,
    DrainStart,
    DrainState,
    DrainTerms,
)
from bus.contracts.objects import ChangedObject, HostDecision, ObjectKind
from bus.contracts.operations import AdminState
from bus.faults import RequestRefused, Transient
from bus.persistence.outbox import OutboxMessage
from bus.port import BusError
from scheduler_worker.domain.drains import (
    DONE,
    HOST_FENCED,
    LEFT,
    DrainMove,
    DrainStep,
    Look,
    OpenDrain,
    commanded,
    drain_of,
    drained,
    end_of,
    kind_for,
    looked,
    new_row,
    retried,
    step,
)
from scheduler_worker.domain.object_rules import changed_object
from scheduler_worker.domain.objects import ChangeAuthor, RecordedObjects, drains_of
from scheduler_worker.drain_plan import DrainHolders, DrainPlanner, MadePlan
from scheduler_worker.keepers import changed_within
from scheduler_worker.objects import Made, ObjectRegistry
from scheduler_worker.store.port import OperationUnit, SchedulerStore

log = structlog.get_logger(__name__)

STAGGER_S = 0.25  # schedulers begin at different moments
PASS_S = 0.25  # between two looks while moves are under way or wait
IDLE_S = 2.0  # otherwise: a paused drain may reach its deadline
MAX_OPEN = 16  # drains that have not ended
MAX_ENDED = 200  # ended drains that are kept; the oldest are deleted
TOO_MANY = Refusal(code="drain.too_many", reason=f"{MAX_OPEN} drains are under way: wait for one, or stop it")
NO_LIMIT = 2**31 - 1


class DrainKeeper:
    """The keeper of one scheduler."""

    def __init__(
        self,
        store: SchedulerStore,
        registry: ObjectRegistry,
        holders: DrainHolders,
        planner: DrainPlanner,
        *,
        clock: Clock,
        rng: random.Random,
        process: str = "",
    ) -> None:
        self._store = store
        self._registry = registry
        self._holders = holders
        self._planner = planner
        self._clock = clock
        self._rng = rng
        self._who = process or "scheduler"

    # --- what operators request

    async def plan(self, query: DrainQuery) -> DrainPlan | Refusal:
        """How a target could be drained now; nothing is begun. Raises Transient, or RequestRefused."""
        made = await self._planner.plan(query)
        return made if isinstance(made, Refusal) else made.plan

    async def start(self, command: DrainStart, is_late: Callable[[], bool] = never) -> DrainResult | Refusal:
        """Put a drain on record and disable its hosts, unless an instance cannot move. Raises Transient, or
        RequestRefused.

        is_late: as for `ObjectRegistry.change`.
        """
        known = self._registry.drains.get(command.drain)
        if known is None:
            query = DrainQuery(host=command.name, cell=command.cell, kind=command.kind, target=command.target)
            made = await self._planner.plan(query)
            if isinstance(made, Refusal):
                return made
            if made.stuck and not command.force:
                return _stuck(made)
            begun = _Begun(command, made, self._clock.time())
            written = await self._registry.write(begun.make, is_late)
            if isinstance(written, Refusal):
                return written
            await self._registry.reload()  # another scheduler may have been first
            known = self._registry.drains[command.drain]
            log.warning("drain.begun", drain=command.drain, target=command.name, hosts=known.hosts, by=command.by)
        if known.name != command.name and known.name != self._holders.host(command.name).name:
            return Refusal(code="request.duplicate", reason=f"drain {command.drain} is of {known.name}")
        return DrainResult(drain=await self._progress(command.drain, known))

    async def command(
        self, command: DrainCommand, message_id: str, is_late: Callable[[], bool] = never
    ) -> DrainResult | Refusal:
        """Pause, resume or stop a drain. Raises Transient. is_late: as for `ObjectRegistry.change`."""
        now = self._clock.time()
        author = ChangeAuthor(command.by, command.reason or f"drain {command.action}", now)

        async def make(unit: OperationUnit, present: RecordedObjects) -> Made | Refusal:
            stored = present.objects.get((ObjectKind.DRAIN, command.drain))
            if stored is None:
                return Refusal(code="drain.unknown", reason=f"no drain {command.drain} is on record")
            await unit.lock_drain(command.drain, now, 0)
            record = drain_of(stored)
            after = commanded(record, command, now)
            if isinstance(after, Refusal):
                return after
            begins_again = record.state is DrainState.ENDED and after != record
            if begins_again and len(_going(drains_of(present.objects))) >= MAX_OPEN:
                return TOO_MANY
            if command.action is DrainAction.RESUME:
                moves = await unit.drain_moves(command.drain, NO_LIMIT)
                await unit.put_drain_moves([new for one in moves if (new := retried(one)) != one])
            return [] if after == record else [changed_object(ObjectKind.DRAIN, command.drain, record, after)], author

        written = await self._registry.write(make, is_late, message_id=message_id)
        if isinstance(written, Refusal):
            return written
        await self._registry.reload()  # a repeat changes nothing, and may have been carried out by another scheduler
        known = self._registry.drains.get(command.drain)
        if known is None:
            return Refusal(code="drain.unknown", reason=f"no drain {command.drain} is on record")
        return DrainResult(drain=await self._progress(command.drain, known))

    async def page(self, query: DrainsQuery) -> DrainsPage:
        """One drain with its instances, or all of them, newest first. Raises Transient."""
        await self._registry.reload()  # one round trip; the drain may have been begun by another scheduler just now
        if query.drain is not None:
            known = self._registry.drains.get(query.drain)
            return DrainsPage(drains=() if known is None else (await self._progress(query.drain, known),))
        drains = sorted(self._registry.drains.items(), key=lambda item: (-item[1].started_at, item[0]))[: query.limit]
        async with self._store.operation() as unit:
            counts = await unit.drain_counts([drain for drain, _ in drains])
        return DrainsPage(drains=tuple(_progress(drain, one, counts.get(drain, {})) for drain, one in drains))

    async def _progress(self, drain: str, record: DrainRecord) -> DrainProgress:
        async with self._store.operation() as unit:
            counts = await unit.drain_counts([drain])
            moves = await unit.drain_moves(drain, MAX_PLANNED)
        known = _progress(drain, record, counts.get(drain, {}))
        return _with_moves(known, moves)

    # --- carrying them out

    async def run(self) -> None:
        """Until cancelled."""
        due_s: float | None = None
        while True:
            left_s = None if due_s is None else due_s - self._clock.monotonic()
            await changed_within(self._registry.drains_changed, left_s)
            drains = [one for one, record in self._registry.drains.items() if record.state is not DrainState.ENDED]
            if not drains:
                due_s = None
                continue
            if due_s is None:
                due_s = self._clock.monotonic() + self._rng.uniform(0.0, STAGGER_S)
            if self._clock.monotonic() < due_s:
                continue
            is_busy = False
            for drain in drains:
                try:
                    is_busy |= await self._pass(drain)
                except (Transient, RequestRefused, BusError) as fault:
                    is_busy = True
                    log.warning("drain.waiting", drain=drain, code=fault.code, reason=str(fault))
            due_s = self._clock.monotonic() + (PASS_S if is_busy else IDLE_S)

    async def _pass(self, drain: str) -> bool:
        """Look at one drain once; returns whether the next look is due soon. Raises Transient."""
        passed = await self._step(drain, Look(drain))
        if passed is None or passed[1].changed:
            return passed is not None
        found, done = passed
        code = end_of(found, self._clock.time())
        if code in (DONE, LEFT, None) and await self._review(drain, None if code else done.unclear):
            return True
        if code is not None:
            await self._end(drain, code)
        return found.record.state is not DrainState.PAUSED or bool(found.counts.get(DrainMoveState.UNDER_WAY))

    async def _step(self, drain: str, look: Look) -> tuple[OpenDrain, DrainStep] | None:
        """Decide by the records and a look; None: the drain has ended."""
        now = self._clock.time()
        async with self._store.operation() as unit:
            found = await unit.lock_drain(drain, now, 2 * MAX_AT_ONCE)
            if found is None or found.record.state is DrainState.ENDED:
                return None
            requests = [(one.request_id, one.instance_uuid) for one in found.open]
            known = {uuid: context for (_, uuid), context in (await unit.known(requests)).items()}
            if look.held:
                others = await unit.drain_moves(drain, NO_LIMIT)
                others = [one for one in others if one.instance_uuid in look.held and one.instance_uuid not in known]
                found = replace(found, open=(*found.open, *others))
            hosts = self._holders.of_drain(drain)  # after all that was waited for: a host may have left it meanwhile
            done = step(found, known, hosts, look, now)
            await unit.put_drain_moves(done.changed)
            for request in done.requests:
                unit.emit(OutboxMessage(API, request, request.request_id))
        return found, done

    async def _review(self, drain: str, unclear: Collection[str] | None) -> bool:
        """Look at these hosts, and go on by what they hold. Returns whether there was anything.

        unclear: None: at all of them before the drain ends; then those that the plan's bound left out count too.
        """
        there = [host for uuid, host in self._holders.of_drain(drain).items() if unclear is None or uuid in unclear]
        if not there:
            return False
        held = await self._holders.held_on(there, MAX_PLANNED if unclear is None else 0)
        passed = await self._step(drain, looked(drain, {host.uuid for host in there}, held))
        return passed is not None and bool(passed[1].changed)

    async def _end(self, drain: str, code: str) -> None:
        now = self._clock.time()
        is_first = False

        async def make(unit: OperationUnit, present: RecordedObjects) -> Made | Refusal:
            nonlocal is_first
            author = ChangeAuthor(self._who, code, now)
            found = await unit.lock_drain(drain, now, 0)
            stored = present.objects.get((ObjectKind.DRAIN, drain))
            if found is None or stored is None or end_of(found, now) != code:
                return (), author  # a command, or another scheduler, was first
            after, is_first = replace(found.record, state=DrainState.ENDED, code=code), True
            return [changed_object(ObjectKind.DRAIN, drain, found.record, after)], author

        await self._registry.write(make)
        if is_first:
            log.warning("drain.ended", drain=drain, code=code)


class _Begun(Struct, frozen=True):
    """A drain that is put on record with its hosts' decisions and its instances."""

    command: DrainStart
    made: MadePlan
    now: float

    async def make(self, unit: OperationUnit, present: RecordedObjects) -> Made | Refusal:
        """Refused where another drain that has not ended has one of the hosts."""
        command, plan = self.command, self.made.plan
        author = ChangeAuthor(command.by, command.reason, self.now)
        drains = drains_of(present.objects)
        if command.drain in drains:
            return (), author
        going = _going(drains)
        if len(going) >= MAX_OPEN:
            return TOO_MANY
        changed: list[ChangedObject] = []
        for host in self.made.hosts:
            stored = present.objects.get((ObjectKind.HOST, host.uuid))
            known = None if stored is None else msgspec.convert(stored.body, HostDecision)
            if known is not None and known.drain in going:
                return Refusal(code="drain.overlap", reason=f"host {host.name} belongs to drain {known.drain}")
            if known is None or known.state is not AdminState.FENCED:
                after = drained(known, command.drain, host.name, command.reason)
                changed.append(changed_object(ObjectKind.HOST, host.uuid, known, after))
        record = DrainRecord(
            name=plan.host,
            target=plan.target,
            kind=kind_for(plan.target, command.kind),
            by=command.by,
            reason=command.reason,
            at_once=command.at_once,
            per_minute=command.per_minute,
            started_at=self.now,
            deadline_at=None if command.deadline_s is None else self.now + command.deadline_s,
            hosts=len(changed),
        )
        changed.append(changed_object(ObjectKind.DRAIN, command.drain, None, record))
        old = sorted((one.started_at, drain) for drain, one in drains.items() if drain not in going)
        dropped = [drain for _, drain in old[: max(0, len(old) - MAX_ENDED + 1)]]
        changed += [changed_object(ObjectKind.DRAIN, drain, drains[drain], None) for drain in dropped]
        await unit.drop_drain_moves(dropped)
        await unit.put_drain_moves(self._moves())
        return changed, author

    def _moves(self) -> list[DrainMove]:
        """In the order of the plan, and then the unconfirmed ones. The instances of a fenced host are evacuated, and
        never moved.
        """
        made, drain, kind = self.made, self.command.drain, kind_for(self.made.plan.target, self.command.kind)
        rows = [new_row(drain, kind, one, at) for at, one in enumerate(made.instances)]
        for at, planned in enumerate(made.plan.moves):
            if planned.code == HOST_FENCED:
                rows[at] = replace(rows[at], state=DrainMoveState.FAILED, code=planned.code, reason=planned.reason)
        return rows


def _going(drains: Mapping[str, DrainRecord]) -> frozenset[str]:
    """The drains that have not ended."""
    return frozenset(drain for drain, one in drains.items() if one.state is not DrainState.ENDED)


def _stuck(made: MadePlan) -> Refusal:
    """The counts, and the first instances with their reasons; the plan has all of them."""
    stuck = [one for one in made.plan.moves if not one.hosts]
    shown = "; ".join(f"{one.instance_uuid} on {one.source}: {one.code}" for one in stuck[:5])
    reason = f"{len(stuck)} of {len(made.plan.moves)} instances cannot move; nothing was begun (see force): {shown}"
    return Refusal(code="drain.stuck", reason=reason[:MAX_REASON])


def _progress(drain: str, record: DrainRecord, counts: Mapping[DrainMoveState, int]) -> DrainProgress:
    terms: dict[str, Any] = {name: getattr(record, name) for name in DrainTerms.__struct_fields__}
    counted = {state.value: count for state, count in sorted(counts.items())}
    return DrainProgress(**terms, id=drain, host=record.name, planned=sum(counts.values()), counts=counted)


def _with_moves(known: DrainProgress, moves: list[DrainMove]) -> DrainProgress:
    of: dict[DrainMoveState, list[DrainMove]] = {state: [] for state in DrainMoveState}
    for one in moves:
        of[one.state].append(one)
    failed = of[DrainMoveState.FAILED]
    return replace(
        known,
        moved=tuple(one.instance_uuid for one in of[DrainMoveState.MOVED]),
        failed=tuple(DrainFailure(instance_uuid=one.instance_uuid, code=one.code, reason=one.reason) for one in failed),
        under_way=tuple(one.instance_uuid for one in of[DrainMoveState.UNDER_WAY]),
        not_begun=tuple(one.instance_uuid for one in of[DrainMoveState.WAITING]),
        more=known.planned > len(moves),
    )
