"""Drains: begun and commanded by operators, and carried out by any scheduler (`HostEmptier`)."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from typing import Any

import structlog
from msgspec import Struct
from msgspec.structs import replace

from bus.clock import Clock
from bus.consuming.outcome import never
from bus.contracts.actions import ActionState
from bus.contracts.base import MAX_REASON, Refusal
from bus.contracts.drains import (
    MAX_PLANNED,
    DrainCommand,
    DrainFailure,
    DrainPlan,
    DrainProgress,
    DrainQuery,
    DrainRecord,
    DrainResult,
    DrainsPage,
    DrainsQuery,
    DrainStart,
    DrainState,
    DrainTarget,
    DrainTerms,
)
from bus.contracts.drains import DrainMoveState as State
from bus.contracts.objects import ChangedObject, HostDecision, ObjectKind
from bus.contracts.operations import AdminState
from bus.faults import RequestRefused, Transient
from bus.transport import BusError
from scheduler_worker.drain.drain_inventory import DrainInventory
from scheduler_worker.drain.drain_planner import DrainPlanner, MadePlan
from scheduler_worker.drain.drain_steps import (
    DONE,
    EmptyingLevel,
    NextMoves,
    commanded,
    drained,
    end_of,
    free_slots,
    is_down,
    kind_for,
    level_of,
)
from scheduler_worker.drain.host_emptier import LOOK_S, READ_ALL_S, HostEmptier, HostsToEmpty, keep_passing
from scheduler_worker.objects.consistency import changed_object
from scheduler_worker.objects.object_registry import Made, ObjectRegistry
from scheduler_worker.records.drain_record import BegunMoves
from scheduler_worker.records.object_records import ChangeActor, RecordedObjects, body_of, drain_of, drains_of
from scheduler_worker.store.port import OperationUnit, SchedulerStore

log = structlog.get_logger(__name__)

PASS_S = 0.25  # between two passes while moves begin, or as many are under way as may be
IDLE_S = 2.0  # while a drain is paused: it may reach its deadline
MAX_OPEN = 16  # drains that have not ended
MAX_ENDED = 200  # ended drains that are kept; the oldest are deleted
TOO_MANY = Refusal(code="drain.too_many", reason=f"{MAX_OPEN} drains are under way: wait for one, or stop it")


class DrainController:
    """The drains of one scheduler."""

    def __init__(
        self,
        store: SchedulerStore,
        registry: ObjectRegistry,
        inventory: DrainInventory,
        planner: DrainPlanner,
        emptier: HostEmptier,
        *,
        clock: Clock,
        rng: random.Random,
        process: str = "",
    ) -> None:
        self._store = store
        self._registry = registry
        self._inventory = inventory
        self._planner = planner
        self._emptier = emptier
        self._clock = clock
        self._rng = rng
        self._who = process or "scheduler"

    # --- what operators request

    async def plan(self, query: DrainQuery) -> DrainPlan | Refusal:
        """How a target could be drained now; nothing is begun. Raises Transient, or RequestRefused."""
        made = await self._planner.plan(query)
        return made if isinstance(made, Refusal) else made.plan

    async def start(self, command: DrainStart, is_late: Callable[[], bool] = never) -> DrainResult | Refusal:
        """Put a drain on record and disable its hosts, unless an instance cannot move. is_late: as for
        `ObjectRegistry.write`. Raises Transient, or RequestRefused.
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
            known = drain_of(command.drain, written.objects[ObjectKind.DRAIN, command.drain].body)
            log.warning("drain.begun", drain=command.drain, target=command.name, hosts=known.hosts, by=command.by)
        if known.name != command.name and known.name != self._inventory.host(command.name).name:
            return Refusal(code="request.duplicate", reason=f"drain {command.drain} is of {known.name}")
        return DrainResult(drain=await self._progress(command.drain, known))

    async def command(
        self, command: DrainCommand, message_id: str, is_late: Callable[[], bool] = never
    ) -> DrainResult | Refusal:
        """Pause, resume or stop a drain. Raises Transient. is_late: as for `ObjectRegistry.write`."""
        now = self._clock.time()
        actor = ChangeActor(command.by, command.reason or f"drain {command.action}", now)

        async def make(unit: OperationUnit, present: RecordedObjects) -> Made | Refusal:
            stored = present.objects.get((ObjectKind.DRAIN, command.drain))
            if stored is None:
                return Refusal(code="drain.unknown", reason=f"no drain {command.drain} is on record")
            await unit.lock_object(ObjectKind.DRAIN, command.drain)
            record = drain_of(command.drain, stored.body)
            after = commanded(record, command, now)
            if isinstance(after, Refusal):
                return after
            begins_again = record.state is DrainState.ENDED and after != record
            if begins_again and len(_going(drains_of(present.objects))) >= MAX_OPEN:
                return TOO_MANY
            return [] if after == record else [changed_object(ObjectKind.DRAIN, command.drain, record, after)], actor

        written = await self._registry.write(make, is_late, message_id=message_id)
        if isinstance(written, Refusal):
            return written
        await self._registry.reload()  # a repeat changes nothing, and may have been carried out by another scheduler
        stored = written.objects.get((ObjectKind.DRAIN, command.drain))
        if stored is None:
            return Refusal(code="drain.unknown", reason=f"no drain {command.drain} is on record")
        return DrainResult(drain=await self._progress(command.drain, drain_of(command.drain, stored.body)))

    async def page(self, query: DrainsQuery) -> DrainsPage:
        """One drain with its instances, or all of them, newest first. Raises Transient."""
        await self._registry.reload()  # one round trip; the drain may have been begun by another scheduler just now
        if query.drain is not None:
            known = self._registry.drains.get(query.drain)
            return DrainsPage(drains=() if known is None else (await self._progress(query.drain, known),))
        drains = sorted(self._registry.drains.items(), key=lambda item: (-item[1].started_at, item[0]))[: query.limit]
        async with self._store.operation() as unit:
            counts = await unit.moved_counts([drain for drain, _ in drains])
        return DrainsPage(
            drains=tuple(
                _progress(
                    drain, one, {State.MOVED: counts.get((drain, True)), State.UNDER_WAY: counts.get((drain, False))}
                )
                for drain, one in drains
            )
        )

    async def _progress(self, drain: str, record: DrainRecord) -> DrainProgress:
        """What the drain has moved, by the record; and what its hosts hold now. Raises Transient."""
        of = self._emptied(drain, record)
        left, is_known = NextMoves(), True
        try:
            instances = await self._inventory.instances_on(self._inventory.in_use(of.hosts.values()))
            left = await self._emptier.found(of, replace(of.level, begins=False), instances, BegunMoves())
        except (Transient, RequestRefused, BusError) as fault:
            is_known = False
            log.warning("drain.waiting", drain=drain, code=fault.code, reason=str(fault))
        async with self._store.operation() as unit:
            moves = {one.instance_uuid: one for one in await unit.newest(drain, MAX_PLANNED)}
            known = await unit.known([(one.request_id, uuid) for uuid, one in moves.items()])
        under_way = {uuid for uuid, one in moves.items() if not one.terminal}
        waiting = [one for one in left.waiting if one.instance.instance_uuid not in under_way]
        there = under_way.union(one.instance.instance_uuid for one in waiting)
        moved = [uuid for uuid, one in moves.items() if one.state is ActionState.DONE and uuid not in there]
        # What has left its cell and found no host holds nothing, and no pass finds it any more.
        leaves = record.target is DrainTarget.CELL
        down = [one for key, found in known.items() if leaves and (one := moves[key[1]]).terminal and is_down(found)]
        failed = [
            DrainFailure(instance_uuid=uuid, code=code, reason=reason)
            for uuid, code, reason in (
                *((one.instance.instance_uuid, one.code, one.reason) for one in waiting if one.is_stuck),
                *((one.instance_uuid, one.code, one.reason) for one in down if one.state is not ActionState.DONE),
            )
        ]
        not_started = [one.instance.instance_uuid for one in waiting if not one.is_stuck]
        counts = dict(zip(State, map(len, (not_started, under_way, moved, failed)), strict=True))
        return replace(
            _progress(drain, record, counts),
            moved=tuple(moved),
            failed=tuple(failed[:MAX_PLANNED]),
            under_way=tuple(sorted(under_way)),
            not_started=tuple(not_started[:MAX_PLANNED]),
            more=not is_known or max(len(moves), len(failed), len(not_started)) >= MAX_PLANNED,
        )

    # --- carrying them out

    async def run(self) -> None:
        """Until cancelled."""
        await keep_passing(
            self._registry.drains_changed,
            lambda: _going(self._registry.drains),
            self._pass,
            clock=self._clock,
            rng=self._rng,
        )

    async def _pass(self, drain: str) -> float:
        """Look at one drain once; returns the pause until the next look (s). Raises Transient, or RequestRefused."""
        record = self._registry.drains.get(drain)
        if record is None:
            return IDLE_S
        of, is_running = self._emptied(drain, record), record.state is DrainState.RUNNING
        begun = await self._emptier.begun(drain)
        found, is_empty, pause_s = NextMoves(), False, PASS_S if is_running else IDLE_S
        has_slots = free_slots(of.level, begun, self._clock.time()) > 0
        if is_running and has_slots:
            found, pause_s = await self._emptier.step(of, begun), LOOK_S
        if is_running and (has_slots or not of.level.begins) and not (found.moves or found.waiting or begun.under_way):
            found, pause_s = await self._emptier.step(of, begun, everything=True), READ_ALL_S
            is_empty = not (found.moves or found.waiting)
        code = None if found.moves else end_of(record, begun, self._clock.time(), is_empty=is_empty)
        if code is not None:
            await self._end(drain, code)
        return PASS_S if found.moves or code is not None else pause_s

    def _emptied(self, drain: str, record: DrainRecord) -> HostsToEmpty:
        async def lock(unit: OperationUnit) -> tuple[EmptyingLevel | None, Collection[str]]:
            body = await unit.lock_object(ObjectKind.DRAIN, drain)
            level = None if body is None else level_of(drain_of(drain, body), self._clock.time())
            return level, self._inventory.of_drain(drain)

        return HostsToEmpty(
            level=level_of(record, self._clock.time()),
            drain=drain,
            hosts=self._inventory.of_drain(drain),
            lock=lock,
        )

    async def _end(self, drain: str, code: str) -> None:
        now = self._clock.time()
        is_first = False

        async def make(unit: OperationUnit, present: RecordedObjects) -> Made | Refusal:
            nonlocal is_first
            actor = ChangeActor(self._who, code, now)
            body = await unit.lock_object(ObjectKind.DRAIN, drain)
            record = None if body is None else drain_of(drain, body)
            if record is None or end_of(record, await unit.begun(drain, now), now, is_empty=code == DONE) != code:
                return (), actor  # a command, or another scheduler, was first
            after, is_first = replace(record, state=DrainState.ENDED, code=code), True
            return [changed_object(ObjectKind.DRAIN, drain, record, after)], actor

        await self._registry.write(make)
        if is_first:
            log.warning("drain.ended", drain=drain, code=code)


class _Begun(Struct, frozen=True):
    """A drain that is put on record with its hosts' decisions."""

    command: DrainStart
    made: MadePlan
    now: float

    async def make(self, _unit: OperationUnit, present: RecordedObjects) -> Made | Refusal:
        """Refused where another drain that has not ended has one of the hosts."""
        command, plan = self.command, self.made.plan
        actor = ChangeActor(command.by, command.reason, self.now)
        drains = drains_of(present.objects)
        if command.drain in drains:
            return (), actor
        going = _going(drains)
        if len(going) >= MAX_OPEN:
            return TOO_MANY
        changed: list[ChangedObject] = []
        for host in self.made.hosts:
            stored = present.objects.get((ObjectKind.HOST, host.uuid))
            known = None if stored is None else body_of(ObjectKind.HOST, host.uuid, stored.body)
            assert known is None or isinstance(known, HostDecision)
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
        return changed, actor


def _going(drains: Mapping[str, DrainRecord]) -> frozenset[str]:
    """The drains that have not ended."""
    return frozenset(drain for drain, one in drains.items() if one.state is not DrainState.ENDED)


def _stuck(made: MadePlan) -> Refusal:
    """The counts, and the first instances with their reasons; the plan has all of them."""
    stuck = [one for one in made.plan.moves if not one.hosts]
    shown = "; ".join(f"{one.instance_uuid} on {one.source}: {one.code}" for one in stuck[:5])
    reason = f"{len(stuck)} of {len(made.plan.moves)} instances cannot move; nothing was begun (see force): {shown}"
    return Refusal(code="drain.stuck", reason=reason[:MAX_REASON])


def _progress(drain: str, record: DrainRecord, counts: Mapping[State, int | None]) -> DrainProgress:
    terms: dict[str, Any] = {name: getattr(record, name) for name in DrainTerms.__struct_fields__}
    counted = {state.value: count for state, count in sorted(counts.items()) if count}
    return DrainProgress(**terms, id=drain, host=record.name, planned=sum(counted.values()), counts=counted)
