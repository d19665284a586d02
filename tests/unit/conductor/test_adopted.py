"""Machines that are adopted: a row for each condition that decides whether one is, and what the record becomes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from unittest.mock import ANY

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from bus.clock import SystemClock
from bus.contracts.base import Refusal
from bus.contracts.cell import FoundMachine, Selection
from bus.contracts.moves import MoveKind
from cell_conductor.config import ConductorConfig
from cell_conductor.domain import events as e
from cell_conductor.domain.adopt_rules import why_not_adoptable, why_not_its_machine
from cell_conductor.domain.doubt import machine_query_of
from cell_conductor.domain.events import Event, InstanceEvent
from cell_conductor.domain.fences import Fence
from cell_conductor.domain.instance import Instance, State
from cell_conductor.domain.report import NEWER, Unexplained, UnexplainedKind, is_over
from cell_conductor.domain.set_back import is_outdated
from cell_conductor.domain.steps import Step, StepContext
from cell_conductor.domain.table import step
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable
from cell_conductor.store.safety import ADOPT, UnexplainedRecord
from tests.kit.virtual_time import on_virtual_time
from tests.unit.conductor.move_scenario import request
from tests.unit.conductor.records import IN_DOUBT, ON_1, ON_2, ON_3, Case, after, case, fenced, moving, outcome, record
from tests.unit.conductor.scenario import (
    MADE,
    PATIENCE,
    S1_SILENT,
    SET_BACK_AT,
    SPEC,
    TIMED_OUT,
    UUID,
    claimed,
    host,
    on,
    queried,
    refused,
    requested,
    run,
    run_after,
    selection,
    spawned,
)
from tests.unit.conductor.scenario import claimed as taken
from tests.unit.conductor.world import Conductor, Queried, Relay, Services, engine_of, insert, opened

S = State
ABSENT = Instance(uuid=UUID)
ON_HOST_3 = FoundMachine(
    instance_uuid=UUID, host_uuid=host(3), host="host-3", service="s1", attempt=5, project_id="p", built=True
)
FIRST = replace(ON_HOST_3, host_uuid=host(1), host="host-1", attempt=1)
PARTED = replace(ON_1, allocations={host(1): {"VCPU": 1}, host(9): {"VF": 1}})


def build(**other: Any) -> e.BuildRequested:
    return replace(on("s1"), **other)


def found(*machines: FoundMachine, by: str = "") -> e.MachineFound | e.InstanceSearched:
    """An operator gives a machine to it, or all services have answered."""
    if by:
        return e.MachineFound(at=220.0, machine=(machines or (ON_HOST_3,))[0])
    return e.InstanceSearched(at=220.0, query=ANY, incarnation=1, machines=machines or (ON_HOST_3,))


def failing(**other: Any) -> Instance:
    return record(S.CLAIMING, S.BUILDING, **{"doubted": True, **other})


def unsure(**other: Any) -> Instance:
    return record(S.RELEASING, S.FAILED, **{"doubted": True, "code": "build.outcome_unknown", **other})


def adopting(**other: Any) -> Instance:
    return record(S.CLAIMING, S.ACTIVE, **other)


def runs(attempt: int, *, built: bool = True) -> e.HostRuns:
    return e.HostRuns(at=220.0, attempt=attempt, host_uuid=host(attempt), service="s1", built=built)


STARTS: list[Case] = [
    case(ABSENT, build(is_query=True), "absent"),
    case(ABSENT, build(is_query=True, found=()), "building", "spawn 1@1", "build: building"),
    case(ABSENT, build(found=()), "building", "spawn 1@1", "build: building"),
    case(ABSENT, build(found=(ON_HOST_3,)), "claiming/active"),
    case(ABSENT, build(found=(FIRST,)), "building", "spawn 1@1", "build: building"),
    # Nor is it passed over because the service that the request has it by is down, or its host is fenced.
    *(
        case(ABSENT, replace(on("s1", "s2"), found=(replace(FIRST, service="s9"),)), "claiming/active", context=context)
        for context in (replace(PATIENCE, down=S1_SILENT), fenced(1))
    ),
    case(ABSENT, build(found=(replace(FIRST, attempt=2),)), "claiming/active"),
    case(ABSENT, build(found=(replace(FIRST, host_uuid=host(2)),)), "claiming/active"),
    # What its first attempt has left is not built again while the cell has a later one: its claim is that one's.
    case(ABSENT, build(found=(ON_HOST_3, FIRST)), "claiming/active"),
    case(ABSENT, build(found=(replace(ON_HOST_3, built=False), FIRST)), "claiming/active"),
    case(ABSENT, build(found=(replace(ON_HOST_3, attempt=1), FIRST)), "building", "spawn 1@1", "build: building"),
    case(ABSENT, build(given_up=Refusal(code="x", reason="y"), found=(FIRST,)), "claiming/active"),
    case(ABSENT, build(found=(replace(ON_HOST_3, project_id="q"),)), "releasing/failed"),
    case(ABSENT, build(found=(replace(ON_HOST_3, project_id=None),)), "releasing/failed"),
    case(ABSENT, build(found=(replace(ON_HOST_3, attempt=0),)), "releasing/failed"),
    case(ABSENT, build(found=(ON_HOST_3,), selections=(PARTED,)), "releasing/failed"),
    case(
        ABSENT,
        build(found=(replace(ON_HOST_3, allocations={host(3): {"VCPU": 1}}),), selections=(PARTED,)),
        "claiming/active",
    ),
    case(ABSENT, build(found=(ON_HOST_3,), selections=(PARTED, ON_3)), "claiming/active"),
    case(ABSENT, build(found=(ON_HOST_3,), selections=()), "releasing/failed"),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), STARTS)
def test_a_build_that_may_have_a_machine(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)


FOUND: list[Case] = [
    case(failing(), found(), "claiming/active"),
    case(failing(doubted=False), found(), "claiming/building"),
    case(failing(), found(replace(ON_HOST_3, attempt=2)), "claiming/active"),
    case(failing(), found(replace(ON_HOST_3, attempt=2, host_uuid=host(2))), "claiming/building"),
    case(failing(), found(replace(ON_HOST_3, attempt=4, host_uuid=host(1))), "claiming/active"),
    case(failing(), found(replace(ON_HOST_3, attempt=5, host_uuid=host(1))), "claiming/active"),
    case(failing(), found(replace(ON_HOST_3, project_id="q")), "releasing/failed"),
    # It was given up because its host did not answer whether it runs: the search has heard that it does.
    case(unsure(), found(replace(ON_HOST_3, attempt=2, host_uuid=host(2))), "claiming/active"),
    case(unsure(), found(replace(ON_HOST_3, attempt=2, host_uuid=host(2), built=False)), "claiming/active"),
    case(unsure(), found(replace(ON_HOST_3, attempt=1, host_uuid=host(1))), "releasing/failed"),
    case(unsure(code="spawn.timeout"), found(replace(ON_HOST_3, attempt=2, host_uuid=host(2))), "releasing/failed"),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), FOUND)
def test_a_machine_that_is_found_for_a_doubted_build(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)


DECIDED: list[Case] = [
    case(record(S.ACTIVE), found(by="op"), "claiming/active"),
    case(record(S.ACTIVE), found(), "active"),
    case(record(S.ACTIVE, spec=None), found(by="op"), "active"),
    case(record(S.FAILED), found(by="op"), "claiming/active"),
    case(record(S.FAILED, selections=(), position=0), found(by="op"), "failed"),
    case(record(S.FAILED, code="build.machine_exists"), found(by="op"), "failed"),
    case(moving(S.ACTIVE), found(by="op"), "active"),
    case(record(S.ACTIVE), found(replace(ON_HOST_3, attempt=2, host_uuid=host(2)), by="op"), "active"),
    case(record(S.ACTIVE), found(replace(ON_HOST_3, attempt=3, host_uuid=host(2)), by="op"), "claiming/active"),
    case(record(S.ACTIVE), found(replace(ON_HOST_3, attempt=2), by="op"), "claiming/active"),
    case(record(S.FAILED), found(replace(ON_HOST_3, attempt=2, host_uuid=host(2)), by="op"), "claiming/active"),
    case(record(S.ACTIVE, selections=(ON_2, PARTED), position=1), found(by="op"), "active"),
    case(record(S.ACTIVE), found(replace(ON_HOST_3, project_id=None), by="op"), "claiming/active"),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), DECIDED)
def test_a_machine_that_an_operator_gives(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)


def test_the_machine_on_record_is_a_loss_of_its_fenced_host_and_stays_on_another() -> None:
    """It started again with its host, beside the one that an operator has given to the instance."""
    fenced = replace(PATIENCE, fences={host(2): Fence(host_uuid=host(2), host="host-2", version=1)})
    lost, kept = (step(record(S.ACTIVE), found(by="op"), context).instance for context in (fenced, PATIENCE))
    assert is_over(lost, 2, host(2)) and not is_over(lost, 3, host(1))
    assert not is_over(kept, 2, host(2))


@pytest.mark.parametrize(
    ("context", "reused_from", "over"),
    [(PATIENCE, 0, []), (PATIENCE, 3, []), (fenced(2), 0, [1, 2]), (fenced(2), 3, [1, 2]), (fenced(2), 2, [1])],
)
def test_a_record_that_goes_on_with_another_machine_proves_no_more_than_before(
    context: StepContext, reused_from: int, over: list[int]
) -> None:
    """What a former set-back left in quarantine stays there, and so does the machine on record, unless it is a loss."""
    known = record(S.ACTIVE, selections=(ON_2,), position=0, reused_from=reused_from)
    decided = step(known, found(by="op"), context).instance
    moved = replace(request(MoveKind.MIGRATE, 1), found=(ON_HOST_3,))
    taking = step(known, moved, replace(context, set_back=IN_DOUBT.set_back)).instance
    for goes_on in (decided, taking):
        assert goes_on.phase == (S.CLAIMING, S.ACTIVE)
        assert [one for one in (1, 2) if is_over(goes_on, one, host(2))] == over


CLAIMED: list[Case] = [
    case(adopting(found_built=True), claimed(5), "active", "build: active"),
    case(adopting(), claimed(5), "building", "build: building"),
    case(adopting(found_built=True), claimed(4), "claiming/active"),
    case(adopting(found_built=True), refused(5), "active", "build: active"),
    case(adopting(), refused(5), "building", "build: building"),
    case(adopting(), refused(4), "claiming/active"),
    case(adopting(), spawned(2), "claiming/active"),
    case(adopting(), spawned(1), "claiming/active", "destroy 1@1"),
    case(adopting(), runs(2), "claiming/active"),
    case(adopting(), runs(2, built=False), "claiming/active"),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), CLAIMED)
def test_the_answers_about_a_machine_that_is_adopted(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    assert outcome(before, event, context) == (phase, commands)


HERE = Selection(host_uuid=host(3), host="host-3", service="s1", allocations={host(3): {"VCPU": 3}})
TAKEN = {"state": S.CLAIMING, "then": S.ACTIVE, "since": 220.0, "deadline": 235.0, "position": 0, "attempt": 5,
         "newest": 5, "found_built": True, "code": ""}  # fmt: skip
SURE = {"doubted": False, "queried": False}
DECIDED_SO = {**TAKEN, "newest": 1005, "order": 1000, "reused_from": 1, "sequence": 10_020,
              "selections": (HERE, ON_2)}  # fmt: skip
ANSWERED = {"newest": 5, "since": 111.0, "queried": False, "sequence": 21, "build_sequence": 20, "then": None}
COMES_UP = {**ANSWERED, "state": S.ACTIVE, "deadline": None, "position": 0, "selections": (ON_2,), "answered": True}
BUILDS = {**ANSWERED, "state": S.BUILDING, "deadline": 171.0}


@pytest.mark.parametrize(
    ("before", "event", "changes"),
    [
        (failing(), found(), {**TAKEN, **SURE, "selections": (HERE, ON_2), "reused_from": 1}),
        (failing(), replace(found(), silent=frozenset({"s9"})),
         {**TAKEN, **SURE, "selections": (HERE, ON_2), "reused_from": 1, "doubted": True}),
        (failing(reused_from=2), found(), {**TAKEN, **SURE, "selections": (HERE, ON_2)}),
        (failing(), found(replace(ON_HOST_3, project_id="q")),
         {"state": S.RELEASING, "then": S.FAILED, "since": 220.0, "deadline": 235.0, "code": "build.machine_exists",
          **SURE, "reused_from": 1}),
        (failing(), found(replace(ON_HOST_3, built=False)),
         {**TAKEN, **SURE, "selections": (HERE, ON_2), "reused_from": 1, "found_built": False}),
        (failing(), found(replace(ON_HOST_3, attempt=9, built=False), ON_HOST_3),
         {**TAKEN, **SURE, "selections": (HERE, ON_2), "reused_from": 1}),
        (failing(), found(replace(ON_HOST_3, allocations={host(3): {"VCPU": 9}})),
         {**TAKEN, **SURE, "reused_from": 1, "selections": (replace(HERE, allocations={host(3): {"VCPU": 9}}), ON_2)}),
        (record(S.ACTIVE), found(by="op"), DECIDED_SO),
        (record(S.ACTIVE, reused_from=3), found(by="op"), DECIDED_SO),
        (record(S.FAILED), found(by="op"), {**DECIDED_SO, "consumer_generation": None}),
        (adopting(found_built=True), claimed(5), {**COMES_UP, "consumer_generation": 9}),
        (adopting(found_built=True), refused(5), {**COMES_UP, "consumer_generation": None}),
        (adopting(found_built=True),
         replace(refused(5), consumer_generation=11, holding={host(2): {"VCPU": 2}}),
         {**COMES_UP, "consumer_generation": 11}),
        (adopting(found_built=True),
         replace(refused(5), consumer_generation=11, holding={host(2): {"VCPU": 1}}),
         {**COMES_UP, "consumer_generation": None}),
        (adopting(), claimed(5), {**BUILDS, "consumer_generation": 9}),
        (adopting(), spawned(2), {"found_built": True}),
        (adopting(), runs(2), {"found_built": True}),
        (adopting(), runs(2, built=False), {}),
        (adopting(found_built=True), runs(2, built=False), {}),
        (adopting(), replace(runs(2, built=False), service="s2"),
         {"selections": (ON_1, replace(ON_2, service="s2"), ON_3)}),
    ],
)  # fmt: skip
def test_a_step_of_an_adoption_changes_this_of_its_record(
    before: Instance, event: e.Event, changes: dict[str, Any]
) -> None:
    if isinstance(event, e.InstanceSearched):
        event = replace(event, incarnation=MADE.set_back.incarnation)
    got = step(before, event, MADE).instance
    assert replace(got, history=(), reason="") == replace(after(before, changes), history=(), reason="")


def test_one_record_has_at_most_ten_hosts() -> None:
    hosts = tuple(selection(n) for n in range(1, 10))
    wanted = build(selections=hosts, found=(replace(ON_HOST_3, host_uuid=host(20), host="host-20"),))
    assert len(step(ABSENT, wanted, PATIENCE).instance.selections) == 10
    wanted = replace(wanted, selections=(*hosts, selection(10)))
    assert len(step(ABSENT, wanted, PATIENCE).instance.selections) == 10


@pytest.mark.parametrize(
    ("known", "searched"),
    [
        (failing(), True),
        (failing(doubted=False), False),
        (moving(S.CLAIMING, S.PREPARING, doubted=True), True),
        (moving(S.RELEASING, S.FAILED, doubted=True), False),
        (record(S.CLAIMING, S.DELETED, doubted=True), False),
        (record(S.BUILDING, doubted=True), True),
        (record(S.RELEASING, S.FAILED, doubted=True), True),
        (record(S.RELEASING, S.DELETED, doubted=True), False),
        (record(S.FAILED, doubted=True), False),
    ],
)
def test_services_are_queried_before_another_host_is_claimed_for_a_doubted_build(
    known: Instance, searched: bool
) -> None:
    assert (machine_query_of(known) is not None) is searched


@pytest.mark.parametrize(
    ("known", "machines", "its_own"),
    [
        (record(S.ACTIVE), (ON_HOST_3,), True),
        (record(S.ACTIVE), (replace(ON_HOST_3, project_id=None),), True),
        (record(S.ACTIVE), (replace(ON_HOST_3, project_id="q"),), False),
        (record(S.ACTIVE), (replace(ON_HOST_3, foreign=True),), False),
        (record(S.ACTIVE), (replace(ON_HOST_3, attempt=1),), True),
        (record(S.ACTIVE), (replace(ON_HOST_3, attempt=0),), False),
        (record(S.ACTIVE), (ON_HOST_3, FIRST), False),
        (record(S.ACTIVE), (), False),
        (record(S.ACTIVE, spec=None), (ON_HOST_3,), False),
        (record(S.ACTIVE, selections=(PARTED,), position=0), (ON_HOST_3,), False),
    ],
)
def test_a_machine_in_quarantine_is_its_instances(
    known: Instance, machines: tuple[FoundMachine, ...], its_own: bool
) -> None:
    kept = Unexplained(UUID, machines[0].attempt if machines else 5, host(3), UnexplainedKind.QUARANTINED, NEWER)
    assert (why_not_its_machine(known, kept, machines) == "") is its_own


@pytest.mark.parametrize(
    ("known", "may_be"),
    [
        (None, False),
        (record(S.ACTIVE), True),
        (record(S.ACTIVE, spec=None), False),
        (record(S.ACTIVE, selections=(), position=0), False),
        (record(S.ACTIVE, code="build.machine_exists"), False),
        (record(S.BUILDING), False),
        (moving(S.ACTIVE), False),
    ],
)
def test_a_record_may_be_given_a_machine(known: Instance | None, may_be: bool) -> None:
    assert (why_not_adoptable(known) == "") is may_be


# --- Builds that were redelivered to a database which has forgotten them: their machine runs, and is not built
# again.


def machine(n: int = 3, attempt: int = 1, **other: object) -> FoundMachine:
    known = FoundMachine(
        instance_uuid=UUID, host_uuid=host(n), host=f"host-{n}", service="s2", attempt=attempt, project_id="p"
    )
    return replace(known, **other)


def seek(*machines: FoundMachine) -> Step:
    """A request for the hosts 1 and 2, decided once more; its cell has these machines of it."""
    return run_after(replace(requested(SET_BACK_AT - 10.0), found=machines))


def test_of_several_the_complete_one_is_adopted_and_no_other_is_destroyed() -> None:
    adopting = seek(machine(n=2, attempt=2, built=False), machine(n=3, attempt=1)).instance
    up = run_after(taken(attempt=2), start=adopting).instance
    assert (up.host_uuid, up.attempt) == (host(3), 1)
    later = run_after(taken(attempt=3), start=seek(machine(n=3, attempt=1), machine(n=2, attempt=2)).instance).instance
    assert (later.host_uuid, later.attempt) == (host(2), 2)
    assert not is_over(later, 1, host(3))


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
    down: Collection[str] = (),
    fenced: Collection[str] = (),
    forgotten: Collection[str] = (),
) -> tuple[dict[str, FoundMachine], str]:
    """(what is adopted, why nothing is)"""
    conductor = Conductor(services, up)
    conductor.down, conductor.fenced, conductor.forgotten = down, fenced, forgotten
    search = conductor.search
    await search._store.open()
    known = {} if record is None else {UUID: record}
    with capture_logs() as logs:
        seek = await search.find_decided({UUID: KEPT}, known)
    (line,) = [one for one in logs if one["event"].startswith("quarantine.")]
    assert line["event"] == ("quarantine.adopted" if seek else "quarantine.not_adopted")
    assert (line["by"], line["host"]) == ("ann", host(3))
    return seek, line["reason"]


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
    seek, reason = await adoption(services)
    assert not seek and why in reason


@pytest.mark.parametrize("up", [("s1", "s2"), ("s2",), None], ids=["silent", "down", "not known yet"])
async def test_the_host_that_the_record_names_has_to_be_looked_at(up: Collection[str] | None) -> None:
    """Its machine may run there."""
    services = Services(s1=(), s2=(quarantined(),))
    services.silent = {"s1"}
    seek, reason = await adoption(services, up=up, down={"s1"} - set(up or ()))
    assert not seek and "answered" in reason
    services.silent, services.hosts = set(), (host(3),)
    seek, reason = await adoption(services)
    assert not seek and "host-1" in reason


async def test_a_service_that_is_down_has_to_answer_before_a_machine_is_adopted() -> None:
    """It went from the host on record over that of the machine to one of a service that was down: two ran."""
    services = Services(s1=(), s2=(quarantined(),), s3=(quarantined(4, 3),))
    services.silent = {"s3"}
    seek, reason = await adoption(services, down={"s3"})
    assert not seek and "s3" in reason
    seek, _ = await adoption(services, down={"s3"}, forgotten={"s3"})
    assert seek


async def test_a_fenced_host_need_not_answer() -> None:
    services = Services(s2=(quarantined(),))
    seek, _ = await adoption(services, up=("s2",), fenced=(host(1),))
    assert seek


@pytest.mark.parametrize(
    "record",
    [None, replace(ACTIVE, state=State.DESTROYING, then=State.DELETED), replace(ACTIVE, state=State.RESIZED)],
    ids=str,
)
async def test_only_an_active_or_a_failed_record_takes_one_over(record: Instance | None) -> None:
    services = Services(s1=(), s2=(quarantined(),))
    seek, reason = await adoption(services, record=record)
    assert not seek and reason and not services.queried


OTHER = UUID[:-1] + ("2" if UUID[-1] == "1" else "1")


async def both(services: Services, place: Selection, fenced: Collection[str] = ()) -> dict[str, FoundMachine]:
    """The instances of two decisions that are adopted; the record of OTHER has this place."""
    conductor = Conductor(services, ("s1", "s2"))
    conductor.fenced, search = fenced, conductor.search
    await search._store.open()
    decisions = {UUID: KEPT, OTHER: replace(KEPT, machine=replace(KEPT.machine, uuid=OTHER))}
    record = replace(ACTIVE, uuid=OTHER, selections=(place,))
    return await search.find_decided(decisions, {UUID: ACTIVE, OTHER: record})


async def test_a_host_of_another_decision_that_nobody_looks_at_delays_none() -> None:
    """Until its service was forgotten, nothing in the cell was adopted."""
    services = Services(s1=(), s2=(quarantined(), quarantined(instance_uuid=OTHER)))
    services.hosts = tuple(one for one in services.hosts if one != host(5))
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
    await insert(store, building)
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


async def test_an_adoption_that_was_set_back_leaves_a_record_that_is_searched_for() -> None:
    """It came to rest after the set-back and counted as certain, though its instance had been moved since the backup:
    the next move was begun beside the machine that its client has.
    """
    conductor = await opened(Services(), ())
    adopting = replace(record(State.CLAIMING, State.ACTIVE), found_built=True, doubted=False, position=0)
    await insert(conductor.store, adopting)
    conductor.table.place += 1
    assert await conductor.engine.sweep() == 0, "it is recognised"
    known = (await conductor.engine.known([UUID]))[UUID]
    answer = e.ClaimRefused(at=conductor.store.set_back.at + 1e4, attempt=known.next_attempt, consumer_changed=True)
    rested = step(known, answer, PATIENCE).instance
    assert rested.state is State.ACTIVE and is_outdated(rested, conductor.store.set_back)
