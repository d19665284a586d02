"""Machines that are adopted: a row for each condition that decides whether one is, and what the record becomes."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.base import Refusal
from bus.contracts.cell import FoundMachine, Selection
from cell_conductor.domain import events as e
from cell_conductor.domain.adopt_rules import is_searched, why_not_adoptable, why_not_its_machine
from cell_conductor.domain.fences import Fence
from cell_conductor.domain.instance import Instance, State
from cell_conductor.domain.report import NEWER, Unexplained, UnexplainedKind, is_over
from cell_conductor.domain.steps import StepContext
from cell_conductor.domain.table import step
from tests.unit.conductor.records import ON_1, ON_2, ON_3, Case, after, case, moving, outcome, record
from tests.unit.conductor.scenario import PATIENCE, UUID, claimed, host, on, refused, selection, spawned

S = State
ABSENT = Instance(uuid=UUID)
ON_HOST_3 = FoundMachine(
    instance_uuid=UUID, host_uuid=host(3), host="host-3", service="s1", attempt=5, project_id="p", built=True
)
FIRST = replace(ON_HOST_3, host_uuid=host(1), host="host-1", attempt=1)
PARTED = replace(ON_1, allocations={host(1): {"VCPU": 1}, host(9): {"VF": 1}})


def build(**other: Any) -> e.BuildRequested:
    return replace(on("s1"), **other)


def found(*machines: FoundMachine, by: str = "") -> e.MachineFound:
    return e.MachineFound(at=220.0, machines=machines or (ON_HOST_3,), decided_by=by)


def failing(**other: Any) -> Instance:
    return record(S.CLAIMING, S.BUILDING, **{"doubted": True, **other})


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
    case(ABSENT, build(found=(replace(FIRST, attempt=2),)), "claiming/active"),
    case(ABSENT, build(found=(replace(FIRST, host_uuid=host(2)),)), "claiming/active"),
    case(ABSENT, build(found=(ON_HOST_3, FIRST)), "building", "spawn 1@1", "build: building"),
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
DECIDED_SO = {**TAKEN, "newest": 1005, "order": 1000, "reused_from": 1, "sequence": 1_000_020,
              "selections": (HERE, ON_2)}  # fmt: skip
ANSWERED = {"newest": 5, "since": 111.0, "queried": False, "sequence": 21, "build_sequence": 20, "then": None}
COMES_UP = {**ANSWERED, "state": S.ACTIVE, "deadline": None, "position": 0, "selections": (ON_2,), "answered": True}
BUILDS = {**ANSWERED, "state": S.BUILDING, "deadline": 171.0, "doubted": True}


@pytest.mark.parametrize(
    ("before", "event", "changes"),
    [
        (failing(), found(), {**TAKEN, "selections": (HERE, ON_2), "reused_from": 1}),
        (failing(reused_from=2), found(), {**TAKEN, "selections": (HERE, ON_2)}),
        (failing(), found(replace(ON_HOST_3, project_id="q")),
         {"state": S.RELEASING, "then": S.FAILED, "since": 220.0, "deadline": 235.0, "code": "build.machine_exists",
          "reused_from": 1}),
        (failing(), found(replace(ON_HOST_3, built=False)),
         {**TAKEN, "selections": (HERE, ON_2), "reused_from": 1, "found_built": False}),
        (failing(), found(replace(ON_HOST_3, attempt=9, built=False), ON_HOST_3),
         {**TAKEN, "selections": (HERE, ON_2), "reused_from": 1}),
        (failing(), found(replace(ON_HOST_3, allocations={host(3): {"VCPU": 9}})),
         {**TAKEN, "reused_from": 1, "selections": (replace(HERE, allocations={host(3): {"VCPU": 9}}), ON_2)}),
        (record(S.ACTIVE), found(by="op"), DECIDED_SO),
        (record(S.ACTIVE, reused_from=3), found(by="op"), {**DECIDED_SO, "reused_from": 3}),
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
    got = step(before, event, PATIENCE).instance
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
        (moving(S.CLAIMING, S.PREPARING, doubted=True), False),
        (record(S.CLAIMING, S.DELETED, doubted=True), False),
        (record(S.BUILDING, doubted=True), False),
        (record(S.RELEASING, S.FAILED, doubted=True), True),
        (record(S.RELEASING, S.FAILED, doubted=True, code="build.machine_exists"), False),
        (record(S.RELEASING, S.DELETED, doubted=True), False),
        (record(S.FAILED, doubted=True), False),
    ],
)
def test_services_are_queried_before_another_host_is_claimed_for_a_doubted_build(
    known: Instance, searched: bool
) -> None:
    assert is_searched(known) is searched


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
