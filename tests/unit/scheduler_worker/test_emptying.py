"""What a scheduler puts on record to empty hosts: only what still holds in the transaction that writes it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.consuming.outcome import Outcome
from bus.contracts.actions import ActionKind, ActionState, Condition
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.drains import DrainRecord, DrainState, DrainTarget
from bus.contracts.objects import ChangedObject, FenceRecord, ObjectKind
from bus.contracts.operations import EvacuationPolicy
from scheduler_worker.action.action_engine import Admit
from scheduler_worker.action.pending_action import PendingAction
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.drain.drain_controller import DrainController
from scheduler_worker.drain.drain_steps import MAX_REFUSALS, evacuating, fenced_hosts, next_moves, request_id
from scheduler_worker.drain.host_emptier import LOOK_S, EvacuationController, HostEmptier
from scheduler_worker.records.action_record import ActionContext, RecordedAction
from scheduler_worker.records.build_record import BuildUpdate, NewBuild, RecordedBuild, SinceBuild
from scheduler_worker.records.drain_record import BegunMoves, DrainedHost, InstanceOnHost
from scheduler_worker.records.object_records import ChangeActor
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from tests.kit.sent import Sent

MINE, OTHER, LOW, HOST, FENCE = (f"{n}0000000-0000-4000-8000-000000000000" for n in "ab01f")


@pytest.mark.parametrize("squatted", [0, 1, 3])
async def test_a_foreign_request_under_an_evacuations_id_ends_no_pass(squatted: int) -> None:
    """What a client publishes before the fence: refused (no such instance), and on record as terminal all the same."""
    store: Any = MemoryBuilds(MemoryBuildTable(SystemClock()).session())
    store.publish_through(Sent())
    request = BuildRequest(
        instance_uuid=MINE, flavor="m1.small", project_id="p", on_host_failure=EvacuationPolicy.RESTART
    )
    build = RecordedBuild(
        instance_uuid=MINE, project_id="p", state=BuildState.ACTIVE, sequence=9, terminal=True, cell="c1", host="h",
        host_uuid=HOST,
    )  # fmt: skip
    async with store.unit() as unit:
        await unit.insert([NewBuild(request=request, build=build)], 1.0)
    ids = [request_id(FENCE, MINE)]
    for _ in range(3):
        ids.append(request_id(FENCE, MINE, ids[-1]))
    squatters = [
        RecordedAction(
            request_id=one, instance_uuid=OTHER, project_id="p", kind=ActionKind.STOP, digest=b"x",
            state=ActionState.REFUSED, sequence=3, terminal=True, code="instance.unknown", created_at=1.0,
        )
        for one in ids[:squatted]
    ]  # fmt: skip
    async with store.operation() as unit:
        await unit.insert_actions(squatters, 1.0)
        assert await unit.ended([MINE], 5) == {}, "those of another instance are none of this one's"
    none: Any = None
    emptier = HostEmptier(store, none, none, none, warmup=none, clock=SystemClock())
    known = ActionContext(build=build, build_request=request)
    held = InstanceOnHost(instance_uuid=MINE, project_id="p", source=DrainedHost(HOST, "h", drain=FENCE), known=known)
    (action,) = await emptier._free_ids(next_moves(evacuating(1), [held], {}, BegunMoves(), 2.0).moves)
    assert (action.request.request_id, action.request.instance_uuid) == (ids[squatted], MINE)


# --- between the look at a host and the transaction that puts its moves on record


DRAIN = "d0000000-0000-4000-8000-000000000000"
VMS = [f"{n}0000000-0000-4000-8000-00000000000a" for n in "123456"]
RECORD = DrainRecord(name="h", target=DrainTarget.HOST, kind=ActionKind.MIGRATE, by="ann", at_once=3)


class Engine:
    """Asks which moves may begin, as the engine of moves does in its transaction. before: what happens until then.
    ends: when the transaction does.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self.before: Callable[[], Awaitable[None]] | None = None
        self.ends: asyncio.Event | None = None
        self.admitted: list[str] = []

    async def process(self, actions: Sequence[PendingAction], admit: Admit) -> dict[int, Outcome]:
        if self.before is not None:
            await self.before()
        assert len({one.drain for one in actions}) == 1
        async with self._store.operation() as unit:
            self.admitted = [one.request.instance_uuid for one in await admit(unit, actions)]
            if self.ends is not None:
                await self.ends.wait()
        return {}


class Holders:
    """One host, which holds what is on record as active there."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.there = {HOST: DrainedHost(HOST, "h", drain=DRAIN)}

    def of_drain(self, drain: str) -> dict[str, DrainedHost]:
        assert drain == DRAIN
        return self.there

    def pages(self, hosts: dict[str, DrainedHost], _now: float) -> list[list[DrainedHost]]:
        return [list(hosts.values())]

    def in_use(self, hosts: Iterable[DrainedHost]) -> list[DrainedHost]:
        return list(hosts)

    async def instances_on(self, hosts: list[DrainedHost], *, everything: bool = False) -> list[InstanceOnHost]:
        async with self._store.operation() as unit:
            known = await unit.known([(uuid, uuid) for uuid in VMS])
        return [
            InstanceOnHost(instance_uuid=uuid, project_id="p", source=hosts[0], known=found)
            for (uuid, _), found in known.items()
            if found.build is not None and found.build.host_uuid == HOST
        ]


class Emptying:
    """A drain of six instances that may move three at a time."""

    def __init__(self, table: MemoryBuildTable | None = None) -> None:
        self.store: Any = MemoryBuilds((table or MemoryBuildTable(SystemClock())).session())
        self.store.publish_through(Sent())
        self.engine, self.holders = Engine(self.store), Holders(self.store)
        none: Any = None
        warmup: Any = SimpleNamespace(is_on=lambda: False)
        engine, holders, clock = cast("Any", self.engine), cast("Any", self.holders), SystemClock()
        self.emptier = HostEmptier(
            self.store, engine, holders, lambda one: one.instance_uuid, warmup=warmup, clock=clock
        )
        self.drains = DrainController(self.store, none, holders, none, self.emptier, clock=clock, rng=random.Random(1))

    async def put(self, record: DrainRecord | None) -> None:
        """The drain as it is on record."""
        async with self.store.operation() as unit:
            present = await unit.lock_objects()
            before = present.objects.get((ObjectKind.DRAIN, DRAIN))
            body = None if record is None else msgspec.to_builtins(record)
            drain = ChangedObject(
                kind=ObjectKind.DRAIN, name=DRAIN, before=None if before is None else before.body, after=body
            )
            await unit.write_objects([drain], ChangeActor("ann", "", 1.0))

    async def built(self) -> None:
        new = []
        for uuid in VMS:
            build = RecordedBuild(
                instance_uuid=uuid, project_id="p", state=BuildState.ACTIVE, sequence=9, terminal=True, cell="c1",
                host="h", host_uuid=HOST,
            )  # fmt: skip
            new.append(NewBuild(request=BuildRequest(instance_uuid=uuid, flavor="f", project_id="p"), build=build))
        async with self.store.unit() as unit:
            await unit.insert(new, 1.0)

    async def begins(self, uuid: str, *, drain: str | None = DRAIN, ended: bool = False) -> None:
        """A request is on record."""
        action = RecordedAction(
            request_id=uuid.replace("a", "b"), instance_uuid=uuid, project_id="p", kind=ActionKind.MIGRATE, digest=b"",
            state=ActionState.FAILED if ended else ActionState.SCHEDULED, sequence=2, terminal=ended, drain=drain,
            code="image.broken" if ended else "",
        )  # fmt: skip
        async with self.store.operation() as unit:
            await unit.insert_actions([action], 2.0)

    async def departs(self, uuid: str) -> None:
        """No host of another cell has taken it, nor any of its own."""
        async with self.store.operation() as unit:
            build = (await unit.lock([uuid]))[uuid]
            rests = replace(build, host=None, host_uuid=None, instance=SinceBuild(condition=Condition.OFFLOADED))
            await unit.update([BuildUpdate(build=rests)], 2.0)

    async def changes(self, uuid: str) -> None:
        """A client has requested something of the instance."""
        async with self.store.operation() as unit:
            build = (await unit.lock([uuid]))[uuid]
            await unit.update([BuildUpdate(build=replace(build, sequence=10))], 2.0)

    async def leaves(self) -> None:
        """An operator enables the host again."""
        self.holders.there = {}


async def nothing(_: Emptying) -> None:
    pass


BEFORE: list[tuple[str, Callable[[Emptying], Awaitable[None]], list[int]]] = [
    ("nothing", nothing, [0, 1, 2]),
    ("another scheduler begins one", lambda it: it.begins(VMS[5]), [0, 1]),
    ("one has ended", lambda it: it.begins(VMS[5], ended=True), [0, 1, 2]),
    ("one of a client", lambda it: it.begins(VMS[5], drain=None), [0, 1, 2]),
    ("one of another drain", lambda it: it.begins(VMS[5], drain=FENCE), [0, 1, 2]),
    ("an instance changes", lambda it: it.changes(VMS[1]), [0, 2]),
    ("its host leaves the drain", lambda it: it.leaves(), []),
    ("it is paused", lambda it: it.put(replace(RECORD, state=DrainState.PAUSED)), []),
    ("it is stopped", lambda it: it.put(replace(RECORD, state=DrainState.STOPPING)), []),
    ("its deadline", lambda it: it.put(replace(RECORD, deadline_at=1.0)), []),
    ("it is deleted", lambda it: it.put(None), []),
]


@pytest.mark.parametrize(("what", "before", "admitted"), BEFORE, ids=[one[0] for one in BEFORE])
async def test_what_has_happened_since_the_look_counts(
    what: str, before: Callable[[Emptying], Awaitable[None]], admitted: list[int]
) -> None:
    it = Emptying()
    await it.put(RECORD)
    await it.built()
    it.engine.before = partial(before, it)
    of = it.drains._emptied(DRAIN, RECORD)
    found = await it.emptier.step(of, await it.emptier.begun(of.drain))
    assert (len(found.moves), len(found.waiting)) == (3, 3)
    assert it.engine.admitted == [VMS[at] for at in admitted], what


async def test_the_look_goes_on_behind_what_was_refused() -> None:
    """Of two pages the first is full of what is refused for ever, and due with every slot."""
    it, record = Emptying(), replace(RECORD, per_minute=1)
    await it.put(record)
    await it.built()
    for uuid in VMS[:3]:
        await it.begins(uuid, ended=True)
    whole, pages = it.holders.instances_on, [[DrainedHost(HOST, name, drain=DRAIN)] for name in ("h", "i")]

    async def instances_on(hosts: list[DrainedHost], *, everything: bool = False) -> list[InstanceOnHost]:
        found = await whole(hosts, everything=everything)
        return found[:3] if hosts == pages[0] else found[3:]

    it.holders.pages, it.holders.instances_on = lambda *_: pages, instances_on  # type: ignore[method-assign]
    await it.emptier.step(it.drains._emptied(DRAIN, record), BegunMoves(0, 2.0))
    assert it.engine.admitted == [VMS[3]]


class Fenced:
    """A fenced host with six instances to restart, of which some may be evacuated at a time."""

    def __init__(self, at_once: int, table: MemoryBuildTable | None = None) -> None:
        self.it = Emptying(table)
        fence = FenceRecord(host="h", version=1, acknowledged=1, token="t")
        self.registry = SimpleNamespace(fences={HOST: fence})
        config = SchedulerConfig(evacuations_at_once=at_once, on_host_failure=EvacuationPolicy.RESTART)
        registry = cast("Any", self.registry)
        selector = cast("Any", SimpleNamespace(config=SimpleNamespace(settings=config)))
        self.evacuations = EvacuationController(
            registry, selector, self.it.emptier, clock=SystemClock(), rng=random.Random(1)
        )

    @property
    def drain(self) -> str:
        """What the requests under the fence have on record as theirs."""
        return fenced_hosts(self.registry.fences)[HOST].drain

    async def on_record(self) -> None:
        await self.it.built()
        await self.put(self.registry.fences)

    async def put(self, fences: Mapping[str, FenceRecord]) -> None:
        """These are on record."""
        async with self.it.store.operation() as unit:
            present = await unit.lock_objects()
            changed = [
                ChangedObject(
                    kind=ObjectKind.FENCE,
                    name=host,
                    before=None if (before := present.objects.get((ObjectKind.FENCE, host))) is None else before.body,
                    after=msgspec.to_builtins(fence),
                )
                for host, fence in fences.items()
            ]
            await unit.write_objects(changed, ChangeActor("ann", "", 1.0))

    async def requested(self, uuid: str, number: int, *, ended: bool) -> None:
        action = RecordedAction(
            request_id=f"{number:08}{uuid[8:]}",
            instance_uuid=uuid,
            project_id="p",
            kind=ActionKind.EVACUATE,
            digest=b"",
            state=ActionState.FAILED if ended else ActionState.SCHEDULED,
            sequence=2,
            terminal=ended,
            drain=self.drain,
            code="no_valid_host" if ended else "",
            created_at=float(number),
        )
        async with self.it.store.operation() as unit:
            await unit.insert_actions([action], float(number))


async def test_an_instance_that_was_given_up_keeps_no_other_from_its_evacuation() -> None:
    """Of many fenced hosts a pass sees a part: it rested for a minute because all that it saw was given up."""
    fenced = Fenced(6)
    it = fenced.it
    await fenced.on_record()
    for number in range(MAX_REFUSALS):
        await fenced.requested(VMS[0], number, ended=True)
    whole = it.holders.instances_on

    async def instances_on(hosts: list[DrainedHost], *, everything: bool = False) -> list[InstanceOnHost]:
        return (await whole(hosts, everything=everything))[: 6 if everything else 1]

    it.holders.instances_on = instances_on  # type: ignore[method-assign]
    assert await fenced.evacuations._pass("") == LOOK_S
    assert it.engine.admitted == VMS[1:]


@pytest.mark.parametrize(("at_once", "admitted"), [(2, 0), (3, 1)])
async def test_evacuations_under_a_fence_that_was_put_on_again_count(at_once: int, admitted: int) -> None:
    """As many as may be under way were begun a second time, because a new fence has other ids."""
    fenced = Fenced(at_once)
    await fenced.on_record()
    for number in (0, 1):
        await fenced.requested(VMS[number], number, ended=False)
    fence = fenced.registry.fences[HOST]
    fenced.registry.fences = {HOST: replace(fence, version=3, acknowledged=3)}
    await fenced.evacuations._pass("")
    assert len(fenced.it.engine.admitted) == admitted


@pytest.mark.parametrize(("unfencing", "admitted"), [(LOW, VMS), (HOST, [])])
async def test_what_is_on_record_of_the_fences_counts(unfencing: str, admitted: list[str]) -> None:
    fenced = Fenced(6)
    fence = fenced.registry.fences[HOST]
    fenced.registry.fences = {LOW: replace(fence, host="low"), HOST: fence}
    fenced.it.holders.there = {HOST: fenced_hosts(fenced.registry.fences)[HOST]}
    fenced.it.holders.pages = lambda *_: [list(fenced.it.holders.there.values())]  # type: ignore[method-assign]
    await fenced.on_record()
    await fenced.put({unfencing: replace(fence, version=2, unfencing=True)})
    await fenced.evacuations._pass("")
    assert fenced.it.engine.admitted == admitted


async def test_schedulers_that_know_of_different_fences_wait_for_each_other() -> None:
    """Both began as many evacuations as may be under way at once."""
    table = MemoryBuildTable(SystemClock())
    one, other = Fenced(3, table), Fenced(3, table)
    await one.on_record()
    fence = one.registry.fences[HOST]
    await one.put({LOW: replace(fence, host="low")})
    other.registry.fences = {LOW: replace(fence, host="low"), HOST: fence}
    other.it.holders.pages = lambda *_: [[fenced_hosts(other.registry.fences)[HOST]]]  # type: ignore[method-assign]
    whole = other.it.holders.instances_on

    async def others(hosts: list[DrainedHost], *, everything: bool = False) -> list[InstanceOnHost]:
        return (await whole(hosts, everything=everything))[3:]

    other.it.holders.instances_on = others  # type: ignore[method-assign]
    one.it.engine.ends = asyncio.Event()
    passes = [asyncio.create_task(each.evacuations._pass("")) for each in (one, other)]
    for _ in range(100):
        await asyncio.sleep(0)
    assert one.it.engine.admitted and not other.it.engine.admitted
    one.it.engine.ends.set()
    await asyncio.gather(*passes)
    assert len(other.it.engine.admitted) == 3


@pytest.mark.parametrize("target", [DrainTarget.CELL, DrainTarget.HOST])
async def test_what_a_drain_has_done_is_read_from_its_requests_and_its_hosts(target: DrainTarget) -> None:
    """Of a cell also what is left without a host: it ended as done over an instance that no host has."""
    it, record = Emptying(), replace(RECORD, target=target)
    await it.put(record)
    await it.built()
    await it.begins(VMS[0])
    await it.begins(VMS[1], ended=True)
    await it.begins(VMS[2], ended=True)
    await it.departs(VMS[2])
    seen = await it.drains._progress(DRAIN, record)
    failed = {(VMS[2], "image.broken")} if target is DrainTarget.CELL else set()
    assert {(one.instance_uuid, one.code) for one in seen.failed} == failed
    assert (seen.under_way, seen.not_started, seen.moved) == ((VMS[0],), (VMS[1], *VMS[3:]), ())
    counts = {"waiting": 4, "under-way": 1, "failed": len(failed)}
    assert seen.counts == {state: count for state, count in counts.items() if count}
    assert (seen.planned, seen.more) == (5 + len(failed), False)
