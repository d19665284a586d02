"""The record of a build: announcements in any order, their writer, and the messages that follow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.clock import SystemClock
from bus.contracts.base import Meta
from bus.contracts.build import BuildEvent, BuildRequest, BuildState
from bus.contracts.moves import Condition, MoveEvent, MoveKind, MoveState
from bus.faults import BrokenInvariant, DatabaseUnavailable
from bus.wire import Malformed
from scheduler_worker.announcements import AnnouncementWriter, AppliedAnnouncements
from scheduler_worker.domain.builds import NewBuild, RecordedBuild, apply_announcement
from scheduler_worker.domain.requests import refused_unreadable
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from tests.kit.sent import Sent

# --- The record of a build under late, doubled and foreign announcements.


UUID = "00000000-0000-4000-8000-000000000001"
AT = RecordedBuild(
    instance_uuid=UUID, project_id="demo", state=BuildState.SCHEDULED, sequence=2, terminal=False, cell="c1"
)


def event(state: BuildState, sequence: int, *, terminal: bool = False) -> BuildEvent:
    return BuildEvent(instance_uuid=UUID, project_id="demo", state=state, sequence=sequence, terminal=terminal)


states = st.sampled_from([BuildState.BUILDING, BuildState.ACTIVE, BuildState.FAILED, BuildState.DELETED])


@given(st.lists(st.builds(event, states, st.integers(0, 30), terminal=st.booleans()), max_size=30))
def test_announcements_rise_and_hold_one_terminal_each(events: list[BuildEvent]) -> None:
    build, published, sequence = AT, [], AT.sequence
    for one in events:
        build, announced = apply_announcement(build, one, "c1")
        if announced is not None:
            assert announced.sequence > sequence
            sequence = announced.sequence
            published.append(announced)
    assert sum(announced.terminal and announced.state is not BuildState.DELETED for announced in published) <= 1
    assert sum(announced.state is BuildState.DELETED for announced in published) <= 1


def test_item_7_a_forged_request_is_answered_to_the_project_of_its_key_alone() -> None:
    """A project that names another's machine must not end that machine's build for those who wait for it."""
    body = b'{"instance_uuid":"%s","project_id":"demo","flavor":5}' % UUID.encode()
    for code in ("message.invalid", "message.wrong_key"):
        forged = Malformed(body=body, code=code, reason="", meta=Meta(id="m"), queue="q", key="build.request.18.evil")
        (published,) = refused_unreadable(forged)
        assert (published.project_id, published.code) == ("evil", code)


# --- Announcements of several cells at once are one transaction; what one of them announces wrongly is its own.


CELLS = ["c1", "c2", "c3", "c4"]


def uuid_of(cell: str) -> str:
    return f"{CELLS.index(cell)}0000000-0000-4000-8000-000000000000"


def active(cell: str) -> BuildEvent:
    return BuildEvent(
        instance_uuid=uuid_of(cell), project_id="p", state=BuildState.ACTIVE, sequence=9, terminal=True, cell=cell
    )


class Counting(MemoryBuilds):
    """A store that counts its units. before: runs in each, with the writes that it will commit."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.units = 0
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        self.before: Callable[[set[str]], None] = lambda _: None

    def unit(self, *, durable: bool = True, optimistic: bool = False) -> Any:
        return self._counted(super().unit(durable=durable, optimistic=optimistic))

    @asynccontextmanager
    async def _counted(self, made: Any) -> AsyncIterator[Any]:
        self.units += 1
        async with made as unit:
            yield unit
            self.begun.set()
            await self.go_on.wait()
            self.before({message.message.instance_uuid for message in unit.outbox})


@pytest.fixture
async def store() -> Counting:
    made = Counting(MemoryBuildTable(SystemClock()).session())
    made.publish_through(Sent())  # type: ignore[arg-type]
    made.go_on.set()
    async with made.unit() as unit:
        for cell in CELLS:
            uuid = uuid_of(cell)
            request = BuildRequest(instance_uuid=uuid, flavor="f", project_id="p", name="n")
            build = RecordedBuild(
                instance_uuid=uuid, project_id="p", state=BuildState.SCHEDULED, sequence=2, cell=cell, host="h"
            )
            await unit.insert([NewBuild(request=request, digest=b"1", build=build)], 1.0)
    made.units = 0
    made.begun.clear()
    made.go_on.clear()
    return made


async def written_states(store: Counting) -> dict[str, BuildState]:
    async with store.unit() as unit:
        locked = await unit.lock([uuid_of(cell) for cell in CELLS])
    return {cell: locked[uuid_of(cell)].state for cell in CELLS}


async def gathered(store: Counting, writer: AnnouncementWriter) -> list[AppliedAnnouncements | BaseException]:
    """The first cell's batch is under way when the others come."""
    tasks = [asyncio.create_task(writer.write("c1", [active("c1")]))]
    await store.begun.wait()
    tasks += [asyncio.create_task(writer.write(cell, [active(cell)])) for cell in CELLS[1:]]
    for _ in range(5):
        await asyncio.sleep(0)
    assert store.units == 1
    store.go_on.set()
    return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)


async def test_what_comes_while_one_cell_is_written_is_one_transaction(store: Counting) -> None:
    found = await gathered(store, AnnouncementWriter(store, clock=SystemClock()))
    assert [[event.cell for event in one.announced] for one in found] == [[cell] for cell in CELLS]  # type: ignore[union-attr]
    assert store.units == 2
    assert await written_states(store) == dict.fromkeys(CELLS, BuildState.ACTIVE)


async def test_a_cell_may_not_end_the_build_of_another(store: Counting) -> None:
    store.go_on.set()
    writer = AnnouncementWriter(store, clock=SystemClock())
    found = await asyncio.gather(writer.write("c1", [active("c2")]), writer.write("c3", [active("c3")]))
    assert [why for one in found for _, why in one.ignored] == ["foreign"]
    assert (await written_states(store))["c2"] is BuildState.SCHEDULED


async def test_a_batch_that_cannot_be_written_fails_alone(store: Counting) -> None:
    def broken(written: set[str]) -> None:
        if uuid_of("c3") in written:
            raise BrokenInvariant("c3")

    store.before = broken
    found = await gathered(store, AnnouncementWriter(store, clock=SystemClock()))
    assert [isinstance(one, BrokenInvariant) for one in found] == [False, False, True, False]
    store.before = lambda _: None
    assert (await written_states(store)) == {**dict.fromkeys(CELLS, BuildState.ACTIVE), "c3": BuildState.SCHEDULED}


async def test_an_outage_is_every_cells_own_to_wait_for(store: Counting) -> None:
    def unavailable(written: set[str]) -> None:
        raise DatabaseUnavailable("away")

    store.before = unavailable
    writer = AnnouncementWriter(store, clock=SystemClock())
    found = await gathered(store, writer)
    assert [type(one) for one in found] == [DatabaseUnavailable] * 4
    store.before = lambda _: None
    assert len((await writer.write("c2", [active("c2")])).announced) == 1, "nothing of the others is left"
    assert (await written_states(store))["c3"] is BuildState.SCHEDULED


async def test_a_writer_that_is_cancelled_leaves_the_others_to_themselves(store: Counting) -> None:
    writer = AnnouncementWriter(store, clock=SystemClock())
    first = asyncio.create_task(writer.write("c1", [active("c1")]))
    await store.begun.wait()
    second = asyncio.create_task(writer.write("c2", [active("c2")]))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    store.go_on.set()
    assert [event.cell for event in (await second).announced] == ["c2"]
    assert (await written_states(store))["c1"] is BuildState.SCHEDULED


# --- A cell's announcements of a request about an instance, applied in any order of their arrival at the scheduler.


MOVE, VM = "40000000-0000-4000-8000-000000000000", "a0000000-0000-4000-8000-000000000000"
CELL, SOURCE, TARGET = "c1", "host-1", "host-2"
HOSTS = {name: f"{name[-1]}0000000-0000-4000-8000-000000000000" for name in (SOURCE, TARGET, "host-3")}


def announced(state: MoveState, sequence: int, *, terminal: bool = False) -> MoveEvent:
    condition = Condition.MOVING if sequence < 12 else Condition.ACTIVE
    return MoveEvent(
        request_id=MOVE, instance_uuid=VM, project_id="p", kind=MoveKind.LIVE_MIGRATE, state=state, sequence=sequence,
        terminal=terminal, condition=condition, host=TARGET, host_uuid=HOSTS[TARGET],
        flavor="large" if terminal else "",
    )  # fmt: skip
