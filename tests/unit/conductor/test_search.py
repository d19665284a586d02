"""Searches for machines that no record explains, by all services, and what is adopted of them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from bus.clock import SystemClock
from bus.consuming.outcome import Done, Retry
from bus.contracts.base import Message
from bus.contracts.cell import CellDelete, FindMachines, FoundMachine, Selection
from bus.contracts.moves import AskedBy, CellBook, ChangeMachine
from bus.contracts.placement import Claim, ClaimOutcome, ClaimResult, ReleaseResult
from bus.faults import Transient
from bus.persistence.outbox import OutboxMessage
from bus.port import PublishRefused
from cell_conductor import engine
from cell_conductor.app import search_forever
from cell_conductor.config import ConductorConfig
from cell_conductor.domain import events as e
from cell_conductor.domain.desires import in_text
from cell_conductor.domain.events import Event, InstanceEvent
from cell_conductor.domain.instance import Instance, Phase, State
from cell_conductor.domain.leases import LISTEN_BEATS, LeaseTable
from cell_conductor.domain.report import NEWER, Unexplained, UnexplainedKind, is_over
from cell_conductor.domain.steps import Step
from cell_conductor.domain.table import question_of
from cell_conductor.engine import Engine
from cell_conductor.handlers import RETRIES
from cell_conductor.placement_requests import PendingQuestion, PlacementRequests
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable
from cell_conductor.store.safety import ADOPT, UnexplainedRecord
from tests.kit.virtual_time import on_virtual_time
from tests.unit.conductor.move_scenario import OTHER
from tests.unit.conductor.scenario import (
    SET_BACK_AT,
    SPEC,
    TIMED_OUT,
    UUID,
    host,
    queried,
    requested,
    run,
    run_after,
    selection,
    spawned,
)
from tests.unit.conductor.scenario import claimed as taken
from tests.unit.conductor.test_transfers import held, leaving
from tests.unit.conductor.world import BUILD, Conductor, Queried, Relay, Services

# --- The cell's compute services are queried before a doubted build is begun; without their answers nothing is
# begun.


def machine(n: int = 3, attempt: int = 1, **other: object) -> FoundMachine:
    known = FoundMachine(
        instance_uuid=UUID, host_uuid=host(n), host=f"host-{n}", service="s2", attempt=attempt, project_id="p"
    )
    return replace(known, **other)


async def test_every_service_that_is_up_is_queried_and_the_machine_of_one_is_adopted() -> None:
    services = Services(s1=(), s2=(machine(),), s3=())
    conductor = Conductor(services, ("s3", "s1", "s2"))
    assert isinstance(await conductor.take(), Done)
    assert [(one.service, one.instance_uuids) for one in services.queried] == [(s, (UUID,)) for s in ("s1", "s2", "s3")]
    assert {one.deployment for one in services.queried} == {conductor.store.deployment}
    recorded = await conductor.recorded()
    assert recorded is not None and recorded.phase == (State.CLAIMING, State.ACTIVE) and not conductor.relay.sent


@pytest.mark.parametrize("up", [("s1", "s2"), None], ids=["one does not answer", "who is up is not known yet"])
async def test_nothing_is_begun_while_a_service_that_is_up_has_not_answered(up: Collection[str] | None) -> None:
    services = Services(s1=(), s2=(machine(),))
    services.silent = {"s2"}
    conductor = Conductor(services, up)
    outcome = await conductor.take()
    assert isinstance(outcome, Retry) and outcome.code == "build.search_unanswered"
    assert await conductor.recorded() is None and not conductor.relay.sent
    assert isinstance(await conductor.take(attempt=RETRIES), Done), "that wait is bounded"
    recorded = await conductor.recorded()
    assert recorded is not None and recorded.state is State.BUILDING and recorded.doubted


async def test_it_is_begun_when_all_have_answered_that_they_have_nothing() -> None:
    conductor = Conductor(Services(s1=()), ("s1",))
    assert isinstance(await conductor.take(), Done)
    recorded = await conductor.recorded()
    assert recorded is not None and recorded.state is State.BUILDING and recorded.doubted


async def test_no_service_is_queried_about_a_build_that_is_not_doubted() -> None:
    services = Services(s1=(machine(),))
    conductor = Conductor(services, ("s1",))
    assert isinstance(await conductor.take(set_back=False), Done)
    assert not services.queried
    later = Conductor(services, ("s1",))
    await later.take(replace(BUILD, requested_at=SystemClock().time() + 3600.0))
    assert not services.queried


@pytest.mark.parametrize("by_another", [False, True], ids=["before every sweep", "after another conductor's sweep"])
@pytest.mark.parametrize(
    ("message", "phase"),
    [
        (BUILD, (State.CLAIMING, State.ACTIVE)),
        (CellDelete(instance_uuid=UUID, project_id=SPEC.project_id), (State.DESTROYING, State.DELETED)),
    ],
    ids=["a build", "a delete"],
)
async def test_a_request_between_a_set_back_and_the_next_sweep_is_begun_only_after_a_search(
    message: Message, phase: Phase, *, by_another: bool
) -> None:
    """It was begun as a new one: a second machine, or a delete without an answer (builds-forgotten, seed 7)."""
    services = Services(s2=(machine(),))
    conductor = Conductor(services, ("s2",))
    await conductor.store.open()
    conductor.table.place += 1
    if by_another:
        other = MemoryInstances(conductor.table.session())
        await other.open()
        async with other.transaction() as transaction:
            await transaction.recognise()
    with pytest.raises(Transient) as raised:
        await conductor.request(message)
    assert raised.value.code == "cell.database_set_back"
    assert await conductor.recorded() is None and not conductor.relay.sent and not services.queried
    assert isinstance(await conductor.request(message), Done)
    recorded = await conductor.recorded()
    assert recorded is not None and recorded.phase == phase and services.queried


async def test_a_request_is_searched_for_if_the_set_back_is_recognised_while_it_is_taken() -> None:
    conductor = Conductor(Services(s2=(machine(),)), ("s2",))
    await conductor.store.open()
    search = conductor.requests._searched

    async def swept(*arguments: Any) -> Any:
        found = await search(*arguments)
        if conductor.table.place == 1:
            conductor.table.place += 1
            await conductor.engine.sweep()
        return found

    conductor.requests._searched = swept  # type: ignore[method-assign]
    with pytest.raises(Transient):
        await conductor.request(BUILD)
    assert await conductor.recorded() is None and not conductor.relay.sent
    assert isinstance(await conductor.request(BUILD), Done)
    recorded = await conductor.recorded()
    assert recorded is not None and recorded.phase == (State.CLAIMING, State.ACTIVE)


async def test_a_request_whose_instance_has_a_machine_in_quarantine_is_doubted_whenever_it_was_sent() -> None:
    """A client that requests its build again, after a restore, has sent it since."""
    services = Services(s1=(replace(machine(), service="s1"),))
    conductor = Conductor(services, ("s1",), unexplained={UUID})
    await conductor.take(replace(BUILD, requested_at=SystemClock().time() + 3600.0), set_back=False)
    recorded = await conductor.recorded()
    assert recorded is not None and recorded.phase == (State.CLAIMING, State.ACTIVE)


@pytest.mark.parametrize("phase", [(State.CLAIMING, State.BUILDING), (State.RELEASING, State.FAILED)], ids=in_text)
async def test_a_doubted_record_fails_over_or_ends_only_when_all_have_answered(phase: Phase) -> None:
    """A record that was set back claimed an alternate, while the forgotten attempt 2 ran on a third host."""
    services = Services(s1=(), s2=(replace(machine(), attempt=2),))
    conductor = Conductor(services, ("s1", "s2"))
    await conductor.store.open()
    over = Instance(
        uuid=UUID,
        state=phase[0],
        then=phase[1],
        spec=SPEC,
        selections=BUILD.selections,
        attempt=1,
        consumer_generation=7,
        doubted=True,
        deadline=1.0,
        since=SystemClock().time(),
    )
    async with conductor.store.transaction() as transaction:
        await transaction.insert([over])
    services.silent = {"s1", "s2"}
    assert await conductor.engine.sweep() == 1
    await conductor.engine.search()
    assert (await conductor.recorded() or over).phase == phase
    services.silent = set()
    async with conductor.store.transaction() as transaction:
        await transaction.lock([UUID])
        await transaction.update([over])
    assert await conductor.engine.sweep() == 1
    await conductor.engine.search()
    recorded = await conductor.recorded()
    assert recorded is not None and (recorded.phase, recorded.attempt) == ((State.CLAIMING, State.ACTIVE), 2)


def test_who_is_up_is_not_known_before_a_heartbeat_of_each_was_due() -> None:
    table = LeaseTable(missed_heartbeats=5)
    table.advance_clock(0.0)
    assert table.up is None
    table.renew("s1", 1, 1, at=0.0, interval_s=1.0)
    assert table.up is None
    table.advance_clock(LISTEN_BEATS * 1.0)
    table.renew("s2", 1, 1, at=0.0, interval_s=1.0)
    table.renew("s3", 1, 1, at=0.0, interval_s=1.0, stopping=True)
    assert set(table.up or ()) == {"s1", "s2"}


async def test_item_16_the_hosts_that_were_looked_at_are_read_in_pages() -> None:
    """Of each service on their own; a machine that every page names is one."""
    services = Services(s1=(machine(),), s2=())
    services.page = 4
    conductor = Conductor(services, ("s1", "s2"))
    await conductor.store.open()
    searched = await conductor.search.find((UUID,), thorough=True)
    assert [(one.service, one.hosts_after) for one in services.queried] == [
        (service, after) for after in (0, 4, 8) for service in ("s1", "s2")
    ]
    assert searched.hosts == set(services.hosts or ()) and not searched.missing
    assert searched.of(UUID) == (machine(),)


async def test_a_service_without_all_of_its_pages_has_not_answered() -> None:
    services = Services(s1=())
    services.page = 0
    conductor = Conductor(services, ("s1",))
    await conductor.store.open()
    assert (await conductor.search.find((UUID,), thorough=True)).missing == ("s1",)
    assert len(services.queried) == 1


# --- The search for machines that a database which was set back may have forgotten holds up nothing else.


async def conductor_of(services: Services, *instances: Instance) -> Conductor:
    conductor = Conductor(services, ("s1",))
    await conductor.store.open()
    async with conductor.store.transaction() as transaction:
        await transaction.insert([replace(one, deadline=1.0) for one in instances])
    return conductor


class Silent(Services):
    """A service that is up takes no queries; placement answers at once."""

    def __init__(self) -> None:
        super().__init__(s1=())
        self.under_way = 0
        self.most = 0
        self.released: list[str] = []
        self.has_begun, self.answers, self.all_released = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def request_all(self, messages: Sequence[Any], *_: Any, **__: Any) -> list[Any]:
        if not all(isinstance(one, FindMachines) for one in messages):
            self.released += [one.consumer for one in messages]
            if len(self.released) == 3:
                self.all_released.set()
            return [ReleaseResult(outcome="released") for _ in messages]
        self.under_way += 1
        self.has_begun.set()
        self.most = max(self.most, self.under_way)
        await self.answers.wait()
        self.under_way -= 1
        return await super().request_all(messages)


async def test_a_service_that_does_not_answer_holds_up_no_other_instance() -> None:
    """Each sweep with such a move waited for it, 10 of each 15 s."""
    first, second = (replace(held().instance, uuid=f"{UUID[:-1]}{n}") for n in (7, 8))
    conductor = await conductor_of(services := Silent(), first, replace(first, uuid=OTHER, doubted=False))
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        searching = group.create_task(search_forever(conductor.engine, SystemClock()))
        await conductor.engine.sweep()
        assert services.released == [OTHER]
        await services.has_begun.wait()
        async with conductor.store.transaction() as transaction:
            await transaction.insert([replace(second, deadline=1.0)])
        await conductor.engine.sweep()
        for _ in range(100):
            await asyncio.sleep(0)
        assert (services.most, services.released) == (1, [OTHER])
        services.answers.set()
        await services.all_released.wait()
        searching.cancel()
    assert services.most == 1


async def test_what_has_changed_during_the_search_is_not_requested_any_more() -> None:
    conductor = await conductor_of(services := Silent(), held().instance)
    await conductor.engine.sweep()
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        group.create_task(conductor.engine.search())
        await services.has_begun.wait()
        async with conductor.store.transaction() as transaction:
            (now,) = (await transaction.lock([UUID])).values()
            await transaction.update([replace(now, newest=now.newest + 5)])
        services.answers.set()
    assert services.released == []


async def test_a_bounded_number_of_instances_waits_for_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MAX_UNSEARCHED", 2)
    three = [replace(held().instance, uuid=f"{UUID[:-1]}{n}") for n in range(3)]
    conductor = await conductor_of(services := Silent(), *three)
    await conductor.engine.sweep()
    services.answers.set()
    await conductor.engine.search()
    assert [len(one.instance_uuids) for one in services.queried] == [2] and len(services.released) == 2


# --- What is asked of placement by way of the schedulers, of instances that leave for another cell.


class Full(Services):
    """The queue of the schedulers is full; placement releases at once."""

    def __init__(self) -> None:
        super().__init__()
        self.published = 0

    async def publish_all(self, messages: Sequence[Any], *_: Any) -> None:
        self.published += len(messages)
        raise PublishRefused("the queue is full")

    async def request_all(self, messages: Sequence[Any], *_: Any, **__: Any) -> list[Any]:
        return [ReleaseResult(outcome="released") for _ in messages]


async def test_a_full_queue_of_the_schedulers_holds_up_no_other_question() -> None:
    there, here = leaving().instance, replace(held().instance, uuid=OTHER, doubted=False)
    questions = [PendingQuestion(one, question_of(one), repeated=False) for one in (there, here)]
    bus = Full()
    requests = PlacementRequests(bus, SystemClock(), 1.0)  # type: ignore[arg-type]
    for asked in (1, 2):
        assert [one.uuid for one in await requests.ask(questions)] == [OTHER]
        assert bus.published == asked, "it is asked again"


async def test_two_answers_about_one_instance_in_a_batch_count_once() -> None:
    there = leaving().instance
    conductor = await conductor_of(Services(), there)
    claim = question_of(there)
    assert isinstance(claim, Claim) and there.move is not None
    answer = ClaimResult(outcome=ClaimOutcome.CLAIMED, option=0, outcomes=(ClaimOutcome.CLAIMED,))
    asked_by = AskedBy(cell="c1", request_id=there.move.request_id, project_id="p", kind=there.move.kind)
    book = CellBook(asked_by=asked_by, instance_uuid=UUID, question=claim, answer=answer)
    await conductor.engine.answered([book, replace(book, repeated=True)])
    recorded = await conductor.recorded()
    assert recorded is not None and (recorded.state, recorded.attempt) == (State.HANDING_OVER, claim.attempt)
    orders = [one.message for one in conductor.relay.sent if isinstance(one, OutboxMessage)]
    assert len([one for one in orders if isinstance(one, ChangeMachine)]) == 1


# --- Builds that were redelivered to a database which has forgotten them: their machine runs, and is not built
# again.


def found(*machines: FoundMachine) -> Step:
    """A request for the hosts 1 and 2, decided once more; its cell has these machines of it."""
    return run_after(replace(requested(SET_BACK_AT - 10.0), found=machines))


def test_of_several_the_complete_one_is_adopted_and_no_other_is_destroyed() -> None:
    adopting = found(machine(n=2, attempt=2, built=False), machine(n=3, attempt=1)).instance
    up = run_after(taken(attempt=2), start=adopting).instance
    assert (up.host_uuid, up.attempt) == (host(3), 1)
    later = run_after(taken(attempt=3), start=found(machine(n=3, attempt=1), machine(n=2, attempt=2)).instance).instance
    assert (later.host_uuid, later.attempt) == (host(2), 2)
    assert not is_over(later, 1, host(3))


def decided(*machines: FoundMachine) -> e.MachineFound:
    return e.MachineFound(at=9e3, machines=machines, decided_by="ann")


# --- An operator has decided that a machine in quarantine is its instance's: the conductor queries the hosts first.


KEPT = UnexplainedRecord(
    machine=Unexplained(UUID, 2, host(3), UnexplainedKind.QUARANTINED, NEWER),
    service="s2",
    first_seen=1.0,
    last_seen=1.0,
    verdict=ADOPT,
    decided_by="ann",
)
ACTIVE = Instance(
    uuid=UUID, state=State.ACTIVE, spec=SPEC, selections=(selection(1),), attempt=1, consumer_generation=7
)


def quarantined(n: int = 3, attempt: int = 2, **other: object) -> FoundMachine:
    known = FoundMachine(
        instance_uuid=UUID, host_uuid=host(n), host=f"host-{n}", service="s2", attempt=attempt, project_id="p"
    )
    return replace(known, **other)


async def adoption(
    services: Services,
    *,
    record: Instance | None = ACTIVE,
    up: Collection[str] | None = ("s1", "s2"),
    fenced: Collection[str] = (),
) -> tuple[dict[str, FoundMachine], str]:
    """(what is adopted, why nothing is)"""
    search = Conductor(services, up).search
    await search._store.open()
    known = {} if record is None else {UUID: record}
    with capture_logs() as logs:
        found = await search.find_decided({UUID: KEPT}, known, fenced)
    (line,) = [one for one in logs if one["event"].startswith("quarantine.")]
    assert line["event"] == ("quarantine.adopted" if found else "quarantine.not_adopted")
    assert (line["by"], line["host"]) == ("ann", host(3))
    return found, line["reason"]


async def test_the_only_machine_of_the_instance_is_adopted() -> None:
    services = Services(s1=(), s2=(quarantined(),))
    assert await adoption(services) == ({UUID: quarantined()}, "")
    assert all(one.thorough for one in services.queried), "another deployment's machines count, too"


@pytest.mark.parametrize(
    ("services", "why"),
    [
        (Services(s1=(), s2=()), "does not report it"),
        (Services(s1=(), s2=(quarantined(attempt=3),)), "does not report it"),
        (Services(s1=(), s2=(quarantined(foreign=True),)), "does not report it"),
        (Services(s1=(quarantined(1, 1),), s2=(quarantined(),)), "another machine of it on host-1"),
        (Services(s1=(quarantined(4, 2, foreign=True),), s2=(quarantined(),)), "another machine of it on host-4"),
        (Services(s1=(), s2=(quarantined(project_id="theirs"),)), "another project"),
    ],
)
async def test_what_the_hosts_do_not_confirm_is_left_in_quarantine(services: Services, why: str) -> None:
    found, reason = await adoption(services)
    assert not found and why in reason


@pytest.mark.parametrize("up", [("s1", "s2"), ("s2",), None], ids=["silent", "down", "not known yet"])
async def test_the_host_that_the_record_names_has_to_be_looked_at(up: Collection[str] | None) -> None:
    """Its machine may run there."""
    services = Services(s1=(), s2=(quarantined(),))
    services.silent = {"s1"}
    found, reason = await adoption(services, up=up)
    assert not found and "answered" in reason
    services.silent, services.hosts = set(), (host(3),)
    found, reason = await adoption(services)
    assert not found and "host-1" in reason


async def test_a_fenced_host_need_not_answer() -> None:
    services = Services(s2=(quarantined(),))
    found, _ = await adoption(services, up=("s2",), fenced=(host(1),))
    assert found


@pytest.mark.parametrize(
    "record",
    [None, replace(ACTIVE, state=State.DESTROYING, then=State.DELETED), replace(ACTIVE, state=State.RESIZED)],
    ids=str,
)
async def test_only_an_active_or_a_failed_record_takes_one_over(record: Instance | None) -> None:
    services = Services(s1=(), s2=(quarantined(),))
    found, reason = await adoption(services, record=record)
    assert not found and reason and not services.queried


ANOTHER = UUID[:-1] + ("2" if UUID[-1] == "1" else "1")


async def both(services: Services, place: Selection, fenced: Collection[str] = ()) -> dict[str, FoundMachine]:
    """The instances of two decisions that are adopted; the record of OTHER has this place."""
    search = Conductor(services, ("s1", "s2")).search
    await search._store.open()
    decisions = {UUID: KEPT, ANOTHER: replace(KEPT, machine=replace(KEPT.machine, uuid=ANOTHER))}
    record = replace(ACTIVE, uuid=ANOTHER, selections=(place,))
    return await search.find_decided(decisions, {UUID: ACTIVE, ANOTHER: record}, fenced)


async def test_a_dead_host_of_another_decision_delays_none() -> None:
    """Until its service was forgotten, nothing in the cell was adopted."""
    services = Services(s1=(), s2=(quarantined(), quarantined(instance_uuid=ANOTHER)), s9=())
    services.silent = {"s9"}
    assert set(await both(services, replace(selection(5), service="s9"))) == {UUID}


async def test_a_fenced_host_need_not_be_looked_at_though_its_service_answers() -> None:
    services = Services(s1=(), s2=(quarantined(), quarantined(instance_uuid=ANOTHER)))
    services.hosts = (host(1), host(3))
    assert set(await both(services, selection(5), fenced=(host(5),))) == {UUID, ANOTHER}


# --- A cell's database that dies and has forgotten its last commits: what a conductor has had on disk before.


async def after_crash(building: Instance, event: Event) -> Instance:
    """The record, when this has happened and the database has died at once."""
    table, bus, relay = MemoryInstanceTable(clock := SystemClock()), Queried(), Relay()
    store = MemoryInstances(table.session())
    await store.open()
    async with store.transaction() as transaction:
        await transaction.insert([building])
    made: dict[str, Any] = {"store": store, "bus": bus, "relay": relay, "config": ConductorConfig()}
    engine = Engine(**made, clock=clock, cell="c1")
    await engine._apply([InstanceEvent(UUID, event)])
    assert relay.sent, "the client is informed"
    assert table.instances[UUID].state is State.ACTIVE
    table.crash()
    return table.instances[UUID]


@pytest.mark.parametrize(("late", "kept"), [(False, State.BUILDING), (True, State.ACTIVE)])
@on_virtual_time
async def test_the_answer_of_a_host_that_was_queried_in_vain_is_on_disk(late: bool, kept: State) -> None:
    """The message of a result comes again, and a build has time for that. One whose host was queried because it was
    late was given up before, and its machine, of which the client was informed, destroyed (seed 41019 of 2026-11-22).
    """
    building = run(queried(), *([TIMED_OUT] if late else [])).instance
    assert building.queried is late
    assert (await after_crash(building, spawned())).state is kept
