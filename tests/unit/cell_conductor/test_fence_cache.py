"""One conductor's copy of its cell's fences, and what an old copy must not undo."""

from __future__ import annotations

import asyncio
import math
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from bus.bus import Bus
from bus.clock import SystemClock
from bus.contracts.actions import ActionKind
from bus.contracts.operations import CellFence, FenceState, HostFence
from bus.faults import Transient
from bus.memory import MemoryBroker, MemoryTransport
from bus.transport import BusUnavailable
from cell_conductor.config import ConductorConfig
from cell_conductor.hosts.fence_cache import FenceCache
from cell_conductor.hosts.fence_controller import FenceController
from cell_conductor.hosts.stated_marks import _Listening
from cell_conductor.reports.report_guard import ReportGuard
from cell_conductor.state.events import InstanceEvent
from cell_conductor.state.fence import Fence
from cell_conductor.state.instance import Instance, State
from cell_conductor.state.unknown_machine import NO_RECORD, UnknownMachine, UnknownMachineKind
from cell_conductor.store.memory import MemoryInstances
from tests.unit.cell_conductor.move_scenario import Scenario, active, claimed, ended, request
from tests.unit.cell_conductor.records import ON_1, ON_2, ON_3, moving
from tests.unit.cell_conductor.scenario import PATIENCE, UUID, host
from tests.unit.cell_conductor.test_single_conditions import fences_on
from tests.unit.cell_conductor.world import (
    Queried,
    Quiet,
    Relay,
    down,
    engine_of,
    insert,
    leases_of,
    opened_store,
    put,
)

# --- One conductor's copy of its cell's fences, while reads and decisions overlap.


HOST = "10000000-0000-4000-8000-000000000000"


class HeldReads:
    """The fences of a store; a read's answer is held back until `answer` is set."""

    def __init__(self, store: MemoryInstances) -> None:
        self._fences = store.fences
        self.answer = asyncio.Event()
        self.reading = asyncio.Event()
        self.answer.set()

    async def fences(self) -> list[Fence]:
        rows, held = await self._fences.fences(), self.answer
        self.reading.set()
        await held.wait()
        return rows


def cache_of(reads: HeldReads) -> FenceCache:
    return FenceCache(cast(Any, SimpleNamespace(fences=reads)), SystemClock())


def controller_of(store: MemoryInstances) -> tuple[FenceController, Quiet]:
    clock, sent = SystemClock(), Quiet()
    fences, bus = FenceCache(store, clock), cast(Any, sent)
    return FenceController(store, fences, bus, clock=clock, config=ConductorConfig(), cell="c1"), sent


async def test_an_earlier_read_does_not_replace_what_a_later_one_found() -> None:
    store = await opened_store()
    reads = HeldReads(store)
    fences = cache_of(reads)
    quick, reads.answer = reads.answer, asyncio.Event()
    slow = reads.answer
    first = asyncio.create_task(fences.load())  # sees no fence, and is slow to come back
    await reads.reading.wait()
    await store.fences.put(Fence(host_uuid=HOST, host="h1", version=1))
    reads.answer = quick
    second = asyncio.create_task(fences.load())
    for _ in range(100):  # as far as it gets while the first is out
        await asyncio.sleep(0)
    slow.set()
    await asyncio.gather(first, second)
    assert HOST in fences.fences


async def test_a_lift_and_its_fence_that_two_conductors_take_at_once_leave_no_fence() -> None:
    """One read that there was none, the other recorded it, the first announced it as lifted: nobody lifted it."""
    store = await opened_store()
    controller, sent = controller_of(store)
    nothing: Any = None
    await controller.take([CellFence(host_uuid=HOST, host="h1", version=6, unfence=True)], nothing)
    await store.fences.put(Fence(host_uuid=HOST, host="h1", version=5))
    await controller.look(nothing)
    assert await store.fences.fences() == []
    assert [(type(one), one.version, one.state) for one in sent.published] == [(HostFence, 6, FenceState.UNFENCED)]


async def test_all_fences_are_published_soon_where_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = await opened_store()
    controller, sent = controller_of(store)
    nothing: Any = None
    await store.fences.put(Fence(host_uuid=HOST, host="h1", version=5))
    controller._in_effect[HOST] = (5, store.incarnation)
    controller._publish_at = 0.0
    monkeypatch.setattr(sent, "publish", refuses)
    with pytest.raises(BusUnavailable):
        await controller.look(nothing)
    monkeypatch.undo()
    await controller.look(nothing)
    await controller.look(nothing)
    assert [(type(one), one.version) for one in sent.published] == [(HostFence, 5)]  # type: ignore[attr-defined]


async def refuses(*_: object, **__: object) -> None:
    raise BusUnavailable("no broker")


async def test_a_lift_that_came_after_a_copy_was_read_is_answered_by_what_is_on_record() -> None:
    store = await opened_store()
    await store.fences.put(Fence(host_uuid=HOST, host="h1", version=5, state=FenceState.FENCED))
    controller, sent = controller_of(store)
    await controller._fences.load()
    await store.fences.put(Fence(host_uuid=HOST, host="h1", version=6, state=FenceState.UNFENCING))
    assert await store.fences.unfence(HOST, 6, 9.0)
    await controller._publish_recorded(Fence(host_uuid=HOST, host="h1", version=6, state=FenceState.UNFENCED))
    assert [(one.version, one.state) for one in sent.published] == [(6, FenceState.UNFENCED)]


@pytest.mark.parametrize(
    ("known", "state", "version", "is_read"),
    [
        (5, FenceState.UNFENCED, 6, True),
        (5, FenceState.UNFENCED, 5, True),
        (7, FenceState.UNFENCED, 6, False),
        (5, FenceState.FENCED, 5, False),
        (5, FenceState.UNFENCING, 6, True),
        (0, FenceState.FENCED, 1, True),
    ],
)
async def test_a_change_that_another_conductor_announces_is_read_soon(
    known: int, state: FenceState, version: int, *, is_read: bool
) -> None:
    """Of a fence that another lifted at once by a later decision it went on for half a minute."""
    store = await opened_store()
    if known:
        await store.fences.put(Fence(host_uuid=HOST, host="h1", version=known))
    fences = FenceCache(store, SystemClock())
    await fences.load()
    fences.on_recorded(HostFence(cell="c1", host_uuid=HOST, version=version, state=state))
    assert fences._is_fresh is not is_read


async def test_a_machine_given_up_during_a_read_makes_another_read_due() -> None:
    store = await opened_store()
    reads = HeldReads(store)
    fences = cache_of(reads)
    reads.answer.clear()
    reading = asyncio.create_task(fences.load())
    await reads.reading.wait()
    fences.reload_soon()
    reads.answer.set()
    await reading
    assert not fences._is_fresh


# --- A conductor whose copy of the fences may be old does not undo an evacuation: it reads the record first.


SECOND = "00000000-0000-4000-8000-0000000000ff"


def evacuated(uuid: str, source: int) -> Instance:
    """Its destination was claimed, and is checked."""
    made = Scenario(active(), replace(PATIENCE, fences=fences_on(1)))
    made.apply(request(ActionKind.EVACUATE, 2, 3), claimed())
    one = made.instance
    assert one.action is not None and one.action.source is not None and one.spec is not None
    where = replace(one.action.source, host_uuid=host(source), allocations={host(source): {"VCPU": 1}})
    return replace(
        one,
        uuid=uuid,
        spec=replace(one.spec, instance_uuid=uuid),
        selections=(where, *one.selections[1:]),
        action=replace(one.action, source=where, request_id=uuid.replace("0", "d", 1)),
    )


async def test_another_hosts_lifted_fence_does_not_undo_an_evacuation_whose_fence_stands() -> None:
    clock = SystemClock()
    bus = Bus("c1", MemoryTransport(MemoryBroker(clock), "c1"), process="conductor", clock=clock, rng=random.Random(1))
    store = await opened_store(clock)
    fences = FenceCache(store, clock)
    for number in (1, 5):
        await store.fences.put(Fence(host_uuid=host(number), host=f"h{number}", version=1))
    await fences.load()
    config = ConductorConfig(claim_timeout_s=0.05)
    engine = engine_of(store=store, bus=bus, relay=Relay(), clock=clock, config=config, cell="c1", fences=fences)
    first, second = evacuated(UUID, 1), evacuated(SECOND, 5)
    await insert(store, first, second)
    await store.fences.put(Fence(host_uuid=host(1), host="h1", version=2, state=FenceState.UNFENCING))
    assert await store.fences.unfence(host(1), 2, 9.0)  # by another conductor
    with pytest.raises(Transient, match="ended meanwhile"):
        await engine.take([InstanceEvent(UUID, ended(first, 2, 2))], source="results")
    for uuid, one in ((SECOND, second), (UUID, first)):
        await engine.take([InstanceEvent(uuid, ended(one, 2, 2))], source="results")
    async with store.transaction() as transaction:
        states = {uuid: one.state for uuid, one in (await transaction.lock([UUID, SECOND])).items()}
    assert states == {UUID: State.REVERTING, SECOND: State.FINISHING}


# --- A conductor that has just started: what it does not know yet is neither up, nor free of a fence.


def _resized() -> Instance:
    """An automatic confirm is due; the destination is s2's."""
    there = replace(ON_2, service="s2")
    action = {"auto_confirm_s": 5.0, "answered": True}
    return moving(State.RESIZED, action=action, selections=(ON_1, there, ON_3), queried=False)


async def test_a_conductor_that_has_just_started_gives_up_no_source_for_a_service_that_is_silent() -> None:
    """Its sweep begins before it has service states, or has read the leases."""
    store = await opened_store()
    await put(store, down("s2"))  # on record, by the former process, whose term lasts
    await insert(store, _resized())
    clock, bus, config = SystemClock(), cast(Bus, Queried()), ConductorConfig()
    leases, marks = leases_of(store, bus, clock, config)
    engine = engine_of(
        store=store,
        bus=bus,
        relay=cast(Any, Relay()),
        clock=clock,
        config=config,
        cell="c1",
        leases=leases,
        marks=marks,
    )
    assert leases.up() is None, "it is not known yet which are"
    assert await engine.sweep() == 0, "nor what they state of the database"
    marks._listening = _Listening(store.servers, math.inf, may_act=True)
    assert await engine.sweep() == 1
    assert store._table.instances[UUID].state is State.RESIZED


async def test_a_conductor_that_has_not_read_its_fences_gives_up_no_source_for_a_fenced_host() -> None:
    """The side tasks run beside the preparations; and all fences are dropped where one was ended meanwhile."""
    store = await opened_store()
    await store.fences.put(Fence(host_uuid=host(2), host="host-2", version=1, at=1.0))
    await insert(store, _resized())
    clock, bus, config = SystemClock(), cast(Bus, Queried()), ConductorConfig()
    fences = FenceCache(store, clock)
    engine = engine_of(
        store=store, bus=bus, relay=cast(Any, Relay()), clock=clock, config=config, cell="c1", fences=fences
    )
    await engine.sweep()
    assert store._table.instances[UUID].state is State.RESIZED


ON_HOST = "f0000000-0000-4000-8000-000000000000"


@pytest.mark.parametrize(("state", "stale_machines"), [(FenceState.FENCED, 7), (FenceState.UNFENCED, 0)])
async def test_a_fence_that_is_lifted_is_announced_without_losses(state: FenceState, stale_machines: int) -> None:
    sent: list[HostFence] = []

    async def publish(message: HostFence, **_: object) -> None:
        sent.append(message)

    controller: Any = FenceController.__new__(FenceController)
    controller._bus, controller._cell, controller._clock = SimpleNamespace(publish=publish), "c1", SystemClock()
    await controller._announce(SimpleNamespace(host_uuid=ON_HOST, version=3, state=state, stale_machines=7))
    assert [(one.state, one.stale_machines, one.version) for one in sent] == [(state, stale_machines, 3)]


def test_a_machine_that_stays_unexplained_is_logged_once() -> None:
    guard: Any = ReportGuard.__new__(ReportGuard)
    guard._known = {}
    machines = [
        UnknownMachine(
            f"{at}0000000-0000-4000-8000-000000000000", 1, ON_HOST, UnknownMachineKind.QUARANTINED, NO_RECORD
        )
        for at in (1, 2)
    ]
    with capture_logs() as logged:
        for seen in (machines[:1], machines[:1], machines, machines):
            guard._log("s", seen)
    shown = [one["instance"] for one in logged if one["event"] == "machine.unknown"]
    assert shown == [one.uuid for one in machines]
