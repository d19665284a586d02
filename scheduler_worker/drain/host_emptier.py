"""Requests the next moves of hosts to be emptied, and evacuates the instances of fenced hosts whose policy is
`restart`. Any number of schedulers do so side by side: a pass keeps nothing, reads what hosts hold and the requests on
record, and records the next ones under the lock of the drain's row.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import structlog
from msgspec import Struct
from msgspec.structs import replace

from bus.clock import Clock
from bus.faults import RequestRefused, Transient
from bus.transport import BusError
from scheduler_worker.action.action_engine import ActionEngine
from scheduler_worker.action.pending_action import PendingAction
from scheduler_worker.drain.drain_inventory import DrainInventory
from scheduler_worker.drain.drain_steps import (
    READ_ENDS,
    EmptyingLevel,
    NextMove,
    NextMoves,
    evacuating,
    fenced_hosts,
    free_slots,
    is_restarted,
    next_moves,
    request_id,
)
from scheduler_worker.fleet.host_listener import Warmup
from scheduler_worker.objects.object_registry import ObjectRegistry, changed_within
from scheduler_worker.records.action_record import RequestKey
from scheduler_worker.records.drain_record import BegunMoves, DrainedHost, InstanceOnHost
from scheduler_worker.records.object_records import fences_of
from scheduler_worker.requests.request_delivery import LAST
from scheduler_worker.selection.selector import Selector
from scheduler_worker.store.port import OperationUnit, SchedulerStore

log = structlog.get_logger(__name__)

STAGGER_S = 0.25  # schedulers begin at different moments
LOOK_S = 1.0  # between two passes while instances wait
READ_ALL_S = 10.0  # ... that only the record of all builds has there, which is read as a whole
REST_S = 60.0  # while no instance is to be evacuated: a policy may have been changed since
TAKEN_IDS = 100  # ids that are passed over because other requests have them

# The level as it is on record (None: no move begins any more), and the hosts (uuids) that are still in it.
LockedLevel: TypeAlias = Callable[[OperationUnit], Awaitable[tuple[EmptyingLevel | None, Collection[str]]]]


class HostsToEmpty(Struct, kw_only=True):
    """The hosts of one level."""

    level: EmptyingLevel
    drain: str | None  # None: all fences
    hosts: Mapping[str, DrainedHost]  # by uuid
    lock: LockedLevel  # locks the level
    includes: Callable[[InstanceOnHost], bool] = lambda _: True  # which of what they hold is moved


class HostEmptier:
    """Requests the next moves of levels, for one scheduler."""

    def __init__(
        self,
        store: SchedulerStore,
        actions: ActionEngine,
        inventory: DrainInventory,
        order: Callable[[InstanceOnHost], Any],
        *,
        warmup: Warmup,
        clock: Clock,
    ) -> None:
        self._store = store
        self._actions = actions
        self._inventory = inventory
        self._order = order
        self._warmup = warmup
        self._clock = clock

    async def begun(self, drain: str | None) -> BegunMoves:
        """The requests of a level on record. Raises Transient."""
        async with self._store.operation() as unit:
            return await unit.begun(drain, self._clock.time())

    async def found(
        self, of: HostsToEmpty, level: EmptyingLevel, instances: Iterable[InstanceOnHost], begun: BegunMoves
    ) -> NextMoves:
        """What is next of these instances; nothing is requested. Raises Transient."""
        instances = sorted(filter(of.includes, instances), key=self._order)
        async with self._store.operation() as unit:
            ended = await unit.ended({one.instance_uuid for one in instances}, READ_ENDS)
        return next_moves(level, instances, ended, begun, self._clock.time())

    async def step(self, of: HostsToEmpty, begun: BegunMoves, *, everything: bool = False) -> NextMoves:
        """Request the next moves of a part of the hosts, page after page, until the moves that were not refused before
        fill the free slots. everything: look at all that the hosts hold. Raises Transient, or RequestRefused.
        """
        now = self._clock.time()
        instances: list[InstanceOnHost] = []
        found = NextMoves()
        for page in [list(of.hosts.values())] if everything else self._inventory.pages(of.hosts, now):
            instances += await self._inventory.instances_on(page, everything=everything)
            found = await self.found(of, of.level, instances, begun)
            if sum(not one.refused_at for one in found.moves) >= free_slots(of.level, begun, now):
                break
        if found.moves:
            await self._request(of, found.moves)
        return found

    async def _request(self, of: HostsToEmpty, moves: Sequence[NextMove]) -> None:
        """Put them on record, unless an instance has changed since it was looked at."""
        now, delivery = self._clock.time(), replace(LAST, awaits_hosts=self._warmup.is_on())
        moves = await self._free_ids(moves)
        held = {(one.request.request_id, one.instance.instance_uuid): one.instance for one in moves}

        async def admit(unit: OperationUnit, ready: Sequence[PendingAction]) -> Sequence[PendingAction]:
            level, hosts = await of.lock(unit)
            if level is None:
                return ()
            begun = await unit.begun(of.drain, self._clock.time())
            known = await unit.known([one.key for one in ready], lock=True)
            same = [
                one
                for one in ready
                if held[one.key].source.uuid in hosts and held[one.key].known.build == known[one.key].build
            ]
            return same[: max(0, free_slots(level, begun, self._clock.time()))]

        pending = [
            PendingAction(
                batch_index=at, request=one.request, taken_at=now, delivery=delivery, drain=one.instance.source.drain
            )
            for at, one in enumerate(moves)
        ]
        await self._actions.process(pending, admit)

    async def _free_ids(self, moves: Sequence[NextMove]) -> list[NextMove]:
        """The same moves; of one whose id a client has given to another request, under another id."""
        moves = list(moves)
        for _ in range(TAKEN_IDS):
            keys: list[RequestKey] = [(one.request.request_id, one.request.instance_uuid) for one in moves]
            async with self._store.operation() as unit:
                known = await unit.known(keys)
            taken = [
                known[key].names_instance or (known[key].action is not None and known[key].action_of(key[1]) is None)
                for key in keys
            ]
            if not any(taken):
                break
            moves = [_renamed(one) if is_taken else one for one, is_taken in zip(moves, taken, strict=True)]
        return moves


def _renamed(one: NextMove) -> NextMove:
    ident = request_id(one.instance.source.drain, one.instance.instance_uuid, one.request.request_id)
    return replace(one, request=replace(one.request, request_id=ident))


class EvacuationController:
    """The evacuations of one scheduler: all fences are one level, whose lock is that of all objects."""

    def __init__(
        self,
        registry: ObjectRegistry,
        selector: Selector,
        emptier: HostEmptier,
        *,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._registry = registry
        self._selector = selector
        self._emptier = emptier
        self._clock = clock
        self._rng = rng

    async def run(self) -> None:
        """Until cancelled. A fence more, or less, is looked at at once."""

        def levels() -> set[str]:
            ids = sorted(host.drain for host in fenced_hosts(self._registry.fences).values())
            return {" ".join(ids)} if ids else set()

        await keep_passing(self._registry.fences_changed, levels, self._pass, clock=self._clock, rng=self._rng)

    async def _pass(self, _fences: str) -> float:
        """Look at the fenced hosts once; returns the pause until the next look (s).

        Raises Transient, or RequestRefused.
        """
        level = evacuating(self._selector.config.settings.evacuations_at_once)
        hosts = fenced_hosts(self._registry.fences)
        if not hosts:
            return LOOK_S

        async def lock(unit: OperationUnit) -> tuple[EmptyingLevel, Collection[str]]:
            return level, fenced_hosts(fences_of((await unit.lock_objects()).objects))

        of = HostsToEmpty(
            level=level,
            drain=None,
            hosts=hosts,
            lock=lock,
            includes=lambda one: not one.code and is_restarted(one.known, self._selector.config.settings),
        )
        begun = await self._emptier.begun(of.drain)
        if free_slots(level, begun, self._clock.time()) <= 0:
            return LOOK_S
        found, pause_s = await self._emptier.step(of, begun), LOOK_S
        if not (found.moves or begun.under_way) and all(one.is_last for one in found.waiting):
            found, pause_s = await self._emptier.step(of, begun, everything=True), READ_ALL_S
        if found.moves:
            log.warning("evacuations.requested", count=len(found.moves), waiting=len(found.waiting))
            return LOOK_S
        abandoned = [one for one in found.waiting if one.is_last]
        if begun.under_way or len(abandoned) < len(found.waiting):
            return pause_s
        for one in abandoned:
            log.error(
                "evacuation.failed", instance=one.instance.instance_uuid, host=one.instance.source.name, code=one.code
            )
        return REST_S


async def keep_passing(
    changed: asyncio.Event,
    levels: Callable[[], Collection[str]],
    one_pass: Callable[[str], Awaitable[float]],
    *,
    clock: Clock,
    rng: random.Random,
) -> None:
    """Pass over each of these levels until cancelled, a new one at once. one_pass: returns the pause until its next."""
    due_s: dict[str, float] = {}
    while True:
        await changed_within(changed, min(due_s.values()) - clock.monotonic() if due_s else None)
        due_s = {one: due_s.get(one, clock.monotonic() + rng.uniform(0.0, STAGGER_S)) for one in sorted(levels())}
        for one in [one for one, at_s in due_s.items() if at_s <= clock.monotonic()]:
            try:
                pause_s = await one_pass(one)
            except (Transient, RequestRefused, BusError) as fault:
                pause_s = LOOK_S
                log.warning("drain.waiting", drain=one, code=fault.code, reason=str(fault))
            due_s[one] = clock.monotonic() + pause_s
