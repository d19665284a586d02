"""The record of a build: announcements in any order, their writer, and the messages that follow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.bus import API
from bus.clock import SystemClock
from bus.codec import Malformed
from bus.consuming.outcome import Done, Received
from bus.contracts.base import Meta
from bus.contracts.build import AttemptRecord, BuildEvent, BuildQuery, BuildRequest, BuildState, FunnelStep
from bus.contracts.cell import CellBuild, CellDelete, InstanceSpec, Selection
from bus.contracts.operations import FenceState, HostFence
from bus.contracts.placement import ReleaseByOwner
from bus.contracts.stages import StageTimes
from bus.faults import BrokenInvariant, DatabaseUnavailable
from scheduler_worker.cell_events.cell_event_batch import APPLIED, AppliedEvent
from scheduler_worker.cell_events.cell_event_recorder import CellEventHandler, CellEventRecorder
from scheduler_worker.records.build_record import (
    UNLOCATABLE,
    NewBuild,
    RecordedBuild,
    apply_build_event,
    effects,
    is_known,
    is_out_of_order,
    is_search,
    releases_of,
)
from scheduler_worker.requests.request_refusal import refused_unreadable
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from tests.kit.sent import Sent

# --- The record of a build under late, doubled and foreign reports.


UUID = "00000000-0000-4000-8000-000000000001"
AT = RecordedBuild(
    instance_uuid=UUID, project_id="demo", state=BuildState.SCHEDULED, sequence=2, terminal=False, cell="c1"
)


def event(state: BuildState, sequence: int, *, terminal: bool = False) -> BuildEvent:
    return BuildEvent(instance_uuid=UUID, project_id="demo", state=state, sequence=sequence, terminal=terminal)


states = st.sampled_from([BuildState.BUILDING, BuildState.ACTIVE, BuildState.FAILED, BuildState.DELETED])


@given(st.lists(st.builds(event, states, st.integers(0, 30), terminal=st.booleans()), max_size=30))
def test_events_rise_and_hold_one_terminal_each(events: list[BuildEvent]) -> None:
    build, published, sequence = AT, [], AT.sequence
    for one in events:
        build, reported = apply_build_event(build, one)
        if reported is not None:
            assert reported.sequence > sequence
            sequence = reported.sequence
            published.append(reported)
    assert sum(reported.terminal and reported.state is not BuildState.DELETED for reported in published) <= 1
    assert sum(reported.state is BuildState.DELETED for reported in published) <= 1


def test_item_7_a_forged_request_is_answered_to_the_project_of_its_key_alone() -> None:
    """A project that names another's machine must not end that machine's build for those who wait for it."""
    body = b'{"instance_uuid":"%s","project_id":"demo","flavor":5}' % UUID.encode()
    for code in ("message.invalid", "message.wrong_key"):
        forged = Malformed(body=body, code=code, reason="", meta=Meta(id="m"), queue="q", key="build.request.evil")
        (published,) = refused_unreadable(forged)
        assert (published.project_id, published.code) == ("evil", code)


# --- Events of several cells at once are one transaction; what one of them reports wrongly is its own.


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
            await unit.insert([NewBuild(request=request, build=build)], 1.0)
    made.units = 0
    made.begun.clear()
    made.go_on.clear()
    return made


async def written_states(store: Counting) -> dict[str, BuildState]:
    async with store.unit() as unit:
        locked = await unit.lock([uuid_of(cell) for cell in CELLS])
    return {cell: locked[uuid_of(cell)].state for cell in CELLS}


async def gathered(store: Counting, writer: CellEventRecorder) -> list[Sequence[AppliedEvent] | BaseException]:
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
    found = await gathered(store, CellEventRecorder(store, clock=SystemClock()))
    assert [[(it.outcome, it.event.cell) for it in one] for one in found] == [[(APPLIED, cell)] for cell in CELLS]  # type: ignore[union-attr]
    assert store.units == 2
    assert await written_states(store) == dict.fromkeys(CELLS, BuildState.ACTIVE)


async def test_a_cell_may_not_end_the_build_of_another(store: Counting) -> None:
    store.go_on.set()
    writer = CellEventRecorder(store, clock=SystemClock())
    found = await asyncio.gather(writer.write("c1", [active("c2")]), writer.write("c3", [active("c3")]))
    assert [it.outcome for one in found for it in one] == ["foreign", APPLIED]
    assert (await written_states(store))["c2"] is BuildState.SCHEDULED


async def test_a_batch_that_cannot_be_written_fails_alone(store: Counting) -> None:
    def broken(written: set[str]) -> None:
        if uuid_of("c3") in written:
            raise BrokenInvariant("c3")

    store.before = broken
    found = await gathered(store, CellEventRecorder(store, clock=SystemClock()))
    assert [isinstance(one, BrokenInvariant) for one in found] == [False, False, True, False]
    store.before = lambda _: None
    assert (await written_states(store)) == {**dict.fromkeys(CELLS, BuildState.ACTIVE), "c3": BuildState.SCHEDULED}


async def test_an_outage_is_every_cells_own_to_wait_for(store: Counting) -> None:
    def unavailable(written: set[str]) -> None:
        raise DatabaseUnavailable("away")

    store.before = unavailable
    writer = CellEventRecorder(store, clock=SystemClock())
    found = await gathered(store, writer)
    assert [type(one) for one in found] == [DatabaseUnavailable] * 4
    store.before = lambda _: None
    assert len(await writer.write("c2", [active("c2")])) == 1, "nothing of the others is left"
    assert (await written_states(store))["c3"] is BuildState.SCHEDULED


async def test_a_writer_that_is_cancelled_leaves_the_others_to_themselves(store: Counting) -> None:
    writer = CellEventRecorder(store, clock=SystemClock())
    first = asyncio.create_task(writer.write("c1", [active("c1")]))
    await store.begun.wait()
    second = asyncio.create_task(writer.write("c2", [active("c2")]))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    store.go_on.set()
    assert [(one.outcome, one.event.cell) for one in await second] == [(APPLIED, "c2")]
    assert (await written_states(store))["c1"] is BuildState.SCHEDULED


async def test_what_a_crash_took_after_its_commit_is_not_acknowledged() -> None:
    """The commit is not on disk yet, and fences are recorded beside it."""
    session = MemoryBuildTable(SystemClock()).session()
    store = MemoryBuilds(session)
    await store.open()

    async def crashes(_: Sequence[HostFence]) -> None:
        session.disconnect()

    handler = CellEventHandler(
        store, CellEventRecorder(store, clock=SystemClock()), "c1", clock=SystemClock(), on_fences=crashes
    )
    fence = HostFence(cell="c1", host_uuid=UUID, version=1, state=FenceState.FENCED, stale_machines=0)
    (done,) = await handler([Received(message=fence, meta=Meta(id="m1"), bus="c1", queue="q")])
    assert isinstance(done, Done) and done.after is not None
    with pytest.raises(DatabaseUnavailable):
        await done.after
    await store.close()


# --- the record of a build, a row for each condition: what a report changes, and which messages follow a
# change


INSTANCE, HOST, OTHER = (f"{n}0000000-0000-4000-8000-000000000001" for n in "abc")
ACCEPTED, SCHEDULED, BUILDING, ACTIVE = (
    BuildState.ACCEPTED,
    BuildState.SCHEDULED,
    BuildState.BUILDING,
    BuildState.ACTIVE,
)
FAILED, REFUSED, DELETING, DELETED = BuildState.FAILED, BuildState.REFUSED, BuildState.DELETING, BuildState.DELETED
TRIED = (AttemptRecord(attempt=1, host="h", outcome="failed"),)
BUILD = RecordedBuild(
    instance_uuid=INSTANCE, project_id="p", state=BUILDING, sequence=9, cell="c1", attempt=2, host="h", host_uuid=HOST,
    code="x", reason="why", history=TRIED, claim_owner="mine",
)  # fmt: skip


def announcement(state: BuildState, sequence: int = 10, **more: Any) -> BuildEvent:
    return BuildEvent(instance_uuid=INSTANCE, project_id="forged", state=state, sequence=sequence, **more)


@pytest.mark.parametrize("name", ["cell", "host", "flavor", "code"])
def test_a_query_by_a_column_without_an_index_is_a_search(name: str) -> None:
    assert is_search(BuildQuery(**{name: "x"})) and is_search(BuildQuery(**{name: ""}))
    assert not is_search(BuildQuery(project_id="p", state=ACTIVE, before=1.0, gang=INSTANCE))


@pytest.mark.parametrize("state", BuildState)
def test_a_decision_is_awaited_by_what_is_accepted_alone(state: BuildState) -> None:
    assert replace(BUILD, state=state).awaits_decision is (state is ACCEPTED)


# --- reports


@pytest.mark.parametrize(
    ("build", "reported", "after"),
    [
        ({}, announcement(BUILDING), (BUILDING, 10, False, False)),
        ({}, announcement(BUILDING, 9), None),
        ({}, announcement(BUILDING, 8), None),
        ({"state": DELETED}, announcement(ACTIVE), None),
        ({"state": DELETED}, announcement(DELETED), None),
        ({}, announcement(ACTIVE, terminal=True), (ACTIVE, 10, True, True)),
        ({}, announcement(ACTIVE), (ACTIVE, 10, True, True)),
        ({}, announcement(FAILED), (FAILED, 10, True, True)),
        ({}, announcement(BUILDING, terminal=True), (BUILDING, 10, True, True)),
        ({"terminal": True}, announcement(FAILED, terminal=True), (FAILED, 10, False, True)),
        ({"terminal": True}, announcement(BUILDING), (BUILDING, 10, False, True)),
        ({"terminal": True}, announcement(DELETED, terminal=True), (DELETED, 10, True, True)),
        ({}, announcement(DELETED, 9), (DELETED, 10, True, True)),
        ({}, announcement(DELETED, 3), (DELETED, 10, True, True)),
        ({}, announcement(DELETED, 12), (DELETED, 12, True, True)),
        ({"state": DELETING}, announcement(ACTIVE), (DELETING, 10, True, True)),
        ({"state": DELETING}, announcement(DELETED), (DELETED, 10, True, True)),
        ({"state": DELETING}, announcement(BUILDING), (DELETING, 10, False, False)),
    ],
)
def test_an_event_by_what_is_on_record(
    build: dict[str, Any], reported: BuildEvent, after: tuple[BuildState, int, bool, bool] | None
) -> None:
    """after: state and number on record, terminal as it is published, and on record."""
    before = replace(BUILD, **build)
    found, published = apply_build_event(before, reported)
    if after is None:
        assert (found, published) == (before, None)
        return
    assert published is not None
    assert (found.state, found.sequence, published.terminal, found.terminal) == after
    assert (published.state, published.sequence) == (reported.state, found.sequence)
    assert (published.cell, published.project_id, published.host_uuid) == ("c1", "p", None)


TRIED_TWICE = (*TRIED, replace(TRIED[0], attempt=2))
OF_EVENT: dict[str, Any] = {"host": "g", "host_uuid": OTHER, "attempt": 3, "history": TRIED_TWICE}


@pytest.mark.parametrize("named", [(), *((name,) for name in OF_EVENT), tuple(OF_EVENT)])
def test_what_an_event_does_not_name_stays_on_record_but_for_its_reason(named: tuple[str, ...]) -> None:
    more = {name: OF_EVENT[name] for name in named}
    after, _ = apply_build_event(BUILD, announcement(BUILDING, **more))
    assert after == replace(BUILD, sequence=10, code="", reason="", **more)
    empty = replace(BUILD, host=None, host_uuid=None, attempt=0, history=())
    after, _ = apply_build_event(empty, announcement(BUILDING, code="y", reason="z", **more))
    assert after == replace(empty, sequence=10, code="y", reason="z", **more)


def test_an_event_that_changes_its_number_alone_is_known() -> None:
    assert is_known(BUILD, replace(BUILD, sequence=99))
    assert not is_known(BUILD, replace(BUILD, sequence=99, host="g"))


@pytest.mark.parametrize(
    ("build", "reported", "early"),
    [
        ({}, announcement(FAILED), True),
        ({}, announcement(FAILED, 9), False),
        ({"state": DELETED}, announcement(FAILED), False),
        ({}, announcement(BUILDING), False),
        ({}, announcement(ACTIVE), False),
        ({}, announcement(FAILED, terminal=True), False),
        ({"terminal": True}, announcement(FAILED), False),
    ],
)
def test_a_failure_that_ends_nothing_is_early_where_the_end_is_not_on_record(
    build: dict[str, Any], reported: BuildEvent, early: bool
) -> None:
    assert is_out_of_order(replace(BUILD, **build), reported) is early


# --- the messages of a change

COMMAND = CellBuild(
    spec=InstanceSpec(instance_uuid=INSTANCE, project_id="p", name="n", image="i", flavor="f"),
    selections=(Selection(host_uuid=HOST, host="h", service="s", allocations={}),),
    consumer_generation=1,
)
NO_CELL: dict[str, Any] = {"cell": None}
STAMPS, FUNNEL = StageTimes(requested=1.0), (FunnelStep(step="s", remaining=1),)


@pytest.mark.parametrize(
    ("before", "state", "more", "command", "sent"),
    [
        (None, ACCEPTED, NO_CELL, None, ["event"]),
        (ACCEPTED, ACCEPTED, NO_CELL, None, []),
        (DELETING, DELETING, {}, None, []),
        (ACCEPTED, SCHEDULED, {}, COMMAND, ["command", "event"]),
        (SCHEDULED, DELETING, {}, None, ["delete"]),
        (BUILDING, DELETING, {}, None, ["delete begun"]),
        (ACTIVE, DELETING, {}, None, ["delete begun"]),
        (ACCEPTED, DELETING, {}, None, ["delete begun"]),
        (None, FAILED, NO_CELL, None, ["event", "release"]),
        (ACCEPTED, FAILED, NO_CELL, None, ["event", "release"]),
        (ACCEPTED, FAILED, NO_CELL | {"attempt": 0}, None, ["event"]),
        (ACCEPTED, FAILED, {}, None, ["event"]),
        (ACCEPTED, FAILED, NO_CELL | {"code": UNLOCATABLE}, None, ["event"]),
        (ACCEPTED, REFUSED, NO_CELL, None, ["event", "release"]),
        (ACCEPTED, DELETED, NO_CELL, None, ["event", "release"]),
        (FAILED, DELETED, NO_CELL, None, ["event"]),
        (REFUSED, DELETED, NO_CELL, None, ["event"]),
        (FAILED, DELETED, NO_CELL | {"code": UNLOCATABLE}, None, ["event", "release"]),
        (ACCEPTED, DELETED, NO_CELL | {"claim_owner": ""}, None, ["event"]),
        (DELETING, DELETED, {}, None, ["event"]),
    ],
)
def test_the_messages_of_a_change(
    before: BuildState | None, state: BuildState, more: dict[str, Any], command: CellBuild | None, sent: list[str]
) -> None:
    messages = effects(before, replace(BUILD, state=state, **more), 7.0, command)
    words = []
    for one in messages:
        message = one.message
        bus, word = API, "event"
        if isinstance(message, CellDelete):
            assert message.project_id == "p"
            bus, word = "c1", "delete begun" if message.may_have_started else "delete"
        elif isinstance(message, ReleaseByOwner):
            assert (message.consumer, message.attempt, message.project_id, message.owner) == (INSTANCE, 1, "p", "mine")
            word = "release"
        elif message is command:
            bus, word = "c1", "command"
        assert one.bus == bus
        words.append(word)
    assert words == sent


@pytest.mark.parametrize(
    ("state", "more", "attempt", "code", "stage_times"),
    [
        (SCHEDULED, {}, 2, "x", None),
        (SCHEDULED, {"host": None}, 0, "x", None),
        (FAILED, {"terminal": True}, 2, "x", STAMPS),
        (DELETED, {"terminal": True}, 2, "", STAMPS),
    ],
)
def test_the_event_of_a_change(
    state: BuildState, more: dict[str, Any], attempt: int, code: str, stage_times: StageTimes | None
) -> None:
    build = replace(BUILD, state=state, **more)
    (sent,) = effects(ACCEPTED, build, 7.0, stage_times=STAMPS, funnel=FUNNEL)
    assert sent.message == BuildEvent(
        instance_uuid=INSTANCE,
        project_id="p",
        state=state,
        sequence=9,
        terminal=build.terminal,
        cell="c1",
        host=build.host,
        attempt=attempt,
        code=code,
        reason="why" if code else "",
        funnel=FUNNEL,
        at=7.0,
        stage_times=stage_times,
    )


@pytest.mark.parametrize("state", BuildState)
def test_no_claim_is_granted_any_more_of_a_run_that_ended_without_a_cell(state: BuildState) -> None:
    build = replace(BUILD, state=state, cell=None)
    assert len(releases_of(build)) == (state in (FAILED, REFUSED, DELETED))
    assert releases_of(replace(build, claim_owner="")) == releases_of(replace(build, cell="c1")) == []
    assert len(releases_of(replace(build, code=UNLOCATABLE))) == (state is DELETED)
