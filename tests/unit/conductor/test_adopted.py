"""Machines that run and are not on record: adopted, given back by an operator, or running again."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from bus.clock import SystemClock
from bus.contracts.cell import FoundMachine, Selection
from cell_conductor.config import ConductorConfig
from cell_conductor.domain import events as e
from cell_conductor.domain.events import Event, InstanceEvent
from cell_conductor.domain.instance import Instance, State
from cell_conductor.domain.report import NEWER, Unexplained, UnexplainedKind, is_over
from cell_conductor.domain.steps import Step
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable
from cell_conductor.store.safety import ADOPT, UnexplainedRecord
from tests.kit.virtual_time import on_virtual_time
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
from tests.unit.conductor.world import Conductor, Queried, Relay, Services, engine_of

# --- Builds that were redelivered to a database which has forgotten them: their machine runs, and is not built
# again.


def machine(n: int = 3, attempt: int = 1, **other: object) -> FoundMachine:
    known = FoundMachine(
        instance_uuid=UUID, host_uuid=host(n), host=f"host-{n}", service="s2", attempt=attempt, project_id="p"
    )
    return replace(known, **other)


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
    conductor = Conductor(services, up)
    conductor.fenced, search = fenced, conductor.search
    await search._store.open()
    known = {} if record is None else {UUID: record}
    with capture_logs() as logs:
        found = await search.find_decided({UUID: KEPT}, known)
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


OTHER = UUID[:-1] + ("2" if UUID[-1] == "1" else "1")


async def both(services: Services, place: Selection, fenced: Collection[str] = ()) -> dict[str, FoundMachine]:
    """The instances of two decisions that are adopted; the record of OTHER has this place."""
    conductor = Conductor(services, ("s1", "s2"))
    conductor.fenced, search = fenced, conductor.search
    await search._store.open()
    decisions = {UUID: KEPT, OTHER: replace(KEPT, machine=replace(KEPT.machine, uuid=OTHER))}
    record = replace(ACTIVE, uuid=OTHER, selections=(place,))
    return await search.find_decided(decisions, {UUID: ACTIVE, OTHER: record})


async def test_a_dead_host_of_another_decision_delays_none() -> None:
    """Until its service was forgotten, nothing in the cell was adopted."""
    services = Services(s1=(), s2=(quarantined(), quarantined(instance_uuid=OTHER)), s9=())
    services.silent = {"s9"}
    assert set(await both(services, replace(selection(5), service="s9"))) == {UUID}


async def test_a_fenced_host_need_not_be_looked_at_though_its_service_answers() -> None:
    services = Services(s1=(), s2=(quarantined(), quarantined(instance_uuid=OTHER)))
    services.hosts = (host(1), host(3))
    assert set(await both(services, selection(5), fenced=(host(5),))) == {UUID, OTHER}


# --- A cell's database that dies and has forgotten its last commits: what a conductor has had on disk before.


async def after_crash(building: Instance, event: Event) -> Instance:
    """The record, when this has happened and the database has died at once."""
    table, bus, relay = MemoryInstanceTable(clock := SystemClock()), Queried(), Relay()
    store = MemoryInstances(table.session())
    await store.open()
    async with store.transaction() as transaction:
        await transaction.insert([building])
    made: dict[str, Any] = {"store": store, "bus": bus, "relay": relay, "config": ConductorConfig()}
    engine = engine_of(**made, clock=clock, cell="c1")
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
