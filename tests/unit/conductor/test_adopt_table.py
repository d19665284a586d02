"""Which machines are adopted, and how: a row for each condition that alone makes the difference."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.base import Allocations, Refusal
from bus.contracts.cell import FoundMachine, Selection
from cell_conductor.domain import events as e
from cell_conductor.domain.adopt_rules import (
    MAX_SELECTIONS,
    adopt_decided,
    adopt_machine,
    end_adopted,
    forgotten_machines,
    is_held,
    is_searched,
    note_built,
    start_or_adopt,
    taken_of,
    why_not_adoptable,
    why_not_its_machine,
)
from cell_conductor.domain.instance import MACHINE_EXISTS, Instance, Move, Phase, State
from cell_conductor.domain.report import NEWER, Unexplained, UnexplainedKind
from cell_conductor.domain.set_back import FORGOTTEN_ATTEMPTS, SET_BACK_GAP
from tests.unit.conductor.scenario import (
    PATIENCE,
    SPEC,
    UUID,
    claimed,
    destroys,
    host,
    phase_of,
    queried,
    refused,
    reported,
    selection,
    spawned,
    spawns,
)
from tests.unit.conductor.test_adopted import machine

ADOPTING, FAILING = (State.CLAIMING, State.ACTIVE), (State.RELEASING, State.FAILED)
# On host 2 under attempt 2; host 3 was not tried.
KNOWN = Instance(
    uuid=UUID,
    state=State.ACTIVE,
    spec=SPEC,
    selections=(selection(1), selection(2), selection(3)),
    position=1,
    attempt=2,
    consumer_generation=7,
    sequence=20,
    order=5,
    build_timeout_s=60.0,
    code="x",
    reason="y",
)


def at(phase: State | Phase, **facts: Any) -> Instance:
    state, then = phase_of(phase)
    return replace(KNOWN, state=state, then=then, **facts)


@pytest.mark.parametrize(
    ("phase", "searched"),
    [
        ((State.CLAIMING, State.BUILDING), True),
        ((State.CLAIMING, State.PREPARING), False),
        ((State.CLAIMING, State.DELETED), False),
        (State.BUILDING, False),
        (FAILING, True),
        ((State.RELEASING, State.DELETED), False),
        (State.FAILED, False),
    ],
)
def test_a_doubted_build_is_searched_for_before_it_fails_over_or_ends(phase: State | Phase, searched: bool) -> None:
    assert is_searched(at(phase, doubted=True)) is searched
    assert not is_searched(at(phase))
    assert is_searched(at(phase, doubted=True, code=MACHINE_EXISTS)) is (searched and phase != FAILING)


@pytest.mark.parametrize(
    ("n", "attempt", "forgotten"),
    [
        (1, 1, False),
        (1, 2, False),
        (1, 3, True),
        (2, 1, False),
        (2, 2, False),
        (2, 3, True),
        (3, 1, True),
        (9, 2, True),
    ],
)
def test_a_machine_that_the_record_does_not_have(n: int, attempt: int, forgotten: bool) -> None:
    one = machine(n, attempt)
    assert forgotten_machines(KNOWN, [one]) == ((one,) if forgotten else ())


def machines_found(*machines: FoundMachine, **fields: Any) -> e.MachineFound:
    return e.MachineFound(at=500.0, machines=machines, **fields)


@pytest.mark.parametrize(
    ("doubted", "machines", "adopts"),
    [(True, (machine(3, 3),), True), (False, (machine(3, 3),), False), (True, (machine(1, 1),), False)],
)
def test_a_forgotten_machine_is_adopted_in_doubt(
    doubted: bool, machines: tuple[FoundMachine, ...], adopts: bool
) -> None:
    known = at((State.CLAIMING, State.BUILDING), doubted=doubted)
    after = adopt_machine(known, machines_found(*machines), PATIENCE).instance
    if not adopts:
        assert after is known
        return
    assert (after.phase, after.host_uuid, after.attempt, after.code, after.reason) == (ADOPTING, host(3), 3, "", "")
    for before, marked in ((0, 1), (3, 3)):
        again = adopt_machine(replace(known, reused_from=before), machines_found(*machines), PATIENCE).instance
        assert again.reused_from == marked


# --- A build that is new here.


FIRST, ELSEWHERE = machine(1, 1), machine(3, 1)
SPAWNED, ADOPTED, UNCHANGED = "spawned", "adopted", "unchanged"


@pytest.mark.parametrize(
    ("newest", "fields", "expected"),
    [
        (0, {}, SPAWNED),
        (0, {"found": ()}, SPAWNED),
        (0, {"is_query": True}, UNCHANGED),
        (0, {"is_query": True, "found": ()}, SPAWNED),
        (0, {"is_query": True, "found": (ELSEWHERE,)}, ADOPTED),
        (0, {"found": (ELSEWHERE,)}, ADOPTED),
        (0, {"found": (FIRST,)}, SPAWNED),
        (0, {"found": (ELSEWHERE, FIRST)}, SPAWNED),
        (0, {"found": (machine(1, 2),)}, ADOPTED),
        (0, {"found": (machine(2, 1),)}, ADOPTED),
        (1, {"found": (FIRST,)}, ADOPTED),
        (1, {"found": (machine(1, 2),), "attempt": 2}, SPAWNED),
        (0, {"found": (FIRST,), "given_up": Refusal(code="x", reason="y")}, ADOPTED),
    ],
)
def test_a_build_whose_machine_was_found_is_not_begun(newest: int, fields: dict[str, Any], expected: str) -> None:
    known = Instance(uuid=UUID, newest=newest)
    after = start_or_adopt(known, replace(queried(), **fields), PATIENCE)
    if expected == UNCHANGED:
        assert after.instance is known
    elif expected == SPAWNED:
        assert (after.instance.state, len(spawns(after))) == (State.BUILDING, 1)
    else:
        assert after.instance.phase == ADOPTING and not after.commands
        assert after.instance.reused_from == 1 and after.instance.sequence > SET_BACK_GAP


# --- An operator's decision.


@pytest.mark.parametrize(
    ("known", "adoptable"),
    [
        (None, False),
        (KNOWN, True),
        (at(State.FAILED), True),
        (at(State.BUILDING), False),
        (at(State.DELETED), False),
        (at(State.FAILED, code=MACHINE_EXISTS), False),
        (at(State.ACTIVE, spec=None), False),
        (at(State.ACTIVE, selections=()), False),
        (at(State.ACTIVE, move=Move(request_id="r", kind="stop", spec=SPEC)), False),  # type: ignore[arg-type]
    ],
)
def test_a_record_that_may_be_given_a_machine(known: Instance | None, adoptable: bool) -> None:
    assert (why_not_adoptable(known) == "") is adoptable


OURS, THEIRS = machine(3, 3), machine(4, 3)


@pytest.mark.parametrize(
    ("known", "found", "its_own"),
    [
        (KNOWN, (OURS,), True),
        (KNOWN, (replace(OURS, project_id=None),), True),
        (KNOWN, (replace(OURS, project_id="q"),), False),
        (KNOWN, (), False),
        (KNOWN, (machine(3, 2),), False),
        (KNOWN, (machine(4, 3),), False),
        (KNOWN, (replace(OURS, foreign=True),), False),
        (KNOWN, (OURS, THEIRS), False),
        (KNOWN, (THEIRS, OURS), False),
        (KNOWN, (OURS, replace(THEIRS, foreign=True)), False),
        (replace(KNOWN, spec=None), (OURS,), False),
        (replace(KNOWN, selections=()), (OURS,), False),
    ],
)
def test_a_machine_that_is_its_instances(known: Instance, found: tuple[FoundMachine, ...], its_own: bool) -> None:
    kept = Unexplained(UUID, 3, host(3), UnexplainedKind.QUARANTINED, NEWER)
    why = why_not_its_machine(known, kept, found)
    assert (why == "") is its_own
    assert ("host-4" in why) is (len(found) > 1) and "host-3" not in why


@pytest.mark.parametrize(("attempt", "its_own"), [(0, False), (1, True)])
def test_a_machine_of_an_unknown_attempt_is_nobodys(attempt: int, its_own: bool) -> None:
    kept = Unexplained(UUID, attempt, host(3), UnexplainedKind.QUARANTINED, NEWER)
    assert (why_not_its_machine(KNOWN, kept, [machine(3, attempt)]) == "") is its_own


@pytest.mark.parametrize(
    ("known", "decided_by", "found", "adopts"),
    [
        (KNOWN, "ann", OURS, True),
        (KNOWN, "", OURS, False),
        (KNOWN, "ann", machine(2, 2), False),
        (KNOWN, "ann", machine(2, 3), True),
        (KNOWN, "ann", machine(3, 2), True),
        (at(State.FAILED), "ann", machine(2, 2), True),
        (at(State.BUILDING), "ann", OURS, False),
        (replace(KNOWN, spec=None), "ann", OURS, False),
        (
            replace(KNOWN, selections=(replace(selection(1), allocations={host(7): {}}),), position=0),
            "ann",
            OURS,
            False,
        ),
    ],
)
def test_a_machine_is_adopted_by_an_operators_word(
    known: Instance, decided_by: str, found: FoundMachine, adopts: bool
) -> None:
    event = machines_found(replace(found, project_id=None), decided_by=decided_by)
    after = adopt_decided(known, event, PATIENCE).instance
    if not adopts:
        assert after is known
        return
    assert (after.phase, after.host_uuid, after.attempt) == (ADOPTING, found.host_uuid, found.attempt)
    assert (after.order, after.sequence) == (5 + FORGOTTEN_ATTEMPTS, 20 + SET_BACK_GAP)
    assert after.newest == max(2, found.attempt) + FORGOTTEN_ATTEMPTS
    assert after.consumer_generation == (7 if known.state is State.ACTIVE else None)
    assert (after.code, after.reason, after.reused_from) == ("", "", 1)
    assert adopt_decided(replace(known, reused_from=2), event, PATIENCE).instance.reused_from == 2


# --- The machine that is adopted, and placement's answer.


def adopted(*found: FoundMachine, known: Instance = KNOWN) -> Instance:
    waiting = replace(known, state=State.CLAIMING, then=State.BUILDING, doubted=True)
    return adopt_machine(waiting, machines_found(*found), PATIENCE).instance


MANY = tuple(selection(n) for n in range(1, MAX_SELECTIONS + 3))


@pytest.mark.parametrize(
    ("found", "n", "attempt"),
    [
        ((machine(3, 3), machine(4, 4)), 4, 4),
        ((machine(3, 3), machine(4, 4, built=False)), 3, 3),
        ((machine(3, 3), machine(4, 3)), 4, 3),
    ],
)
def test_the_complete_one_is_adopted_and_else_the_newest(found: tuple[FoundMachine, ...], n: int, attempt: int) -> None:
    for order in (found, found[::-1]):
        after = adopted(*order)
        assert (after.host_uuid, after.attempt, after.newest, after.position) == (host(n), attempt, attempt, 0)
        assert (after.here.service, after.found_built) == ("s2", True)
    assert not adopted(machine(3, 3, built=False)).found_built


def test_an_adopted_machines_record_keeps_its_numbers_and_the_hosts_that_are_left() -> None:
    one = adopted(machine(3, 3), known=replace(KNOWN, newest=9))
    assert one.newest == 9 and [each.host_uuid for each in one.selections] == [host(3), host(2)]
    many = adopted(machine(3, 3), known=replace(KNOWN, selections=MANY, position=0))
    assert [each.host_uuid for each in many.selections] == [host(n) for n in (3, 1, 2, *range(4, MAX_SELECTIONS + 1))]


@pytest.mark.parametrize(
    ("found", "known"),
    [
        (machine(3, 3, project_id="q"), KNOWN),
        (machine(3, 3, project_id=None), KNOWN),
        (machine(9, 0), KNOWN),
        (machine(9, 3), replace(KNOWN, selections=(replace(selection(1), allocations={host(7): {}}),), position=0)),
    ],
)
def test_a_machine_that_is_not_proved_the_instances_ends_its_build(found: FoundMachine, known: Instance) -> None:
    over = adopted(found, known=known)
    assert (over.phase, over.code, over.doubted) == (FAILING, MACHINE_EXISTS, True)
    assert adopted(machine(9, 1)).phase == ADOPTING


@pytest.mark.parametrize(
    ("selections", "position", "reported_as", "taken"),
    [
        ((selection(1), selection(2)), 0, {host(8): {"VGPU": 1}}, {host(8): {"VGPU": 1}}),
        ((selection(1), selection(3)), 0, None, {host(3): {"VCPU": 3}}),
        ((selection(1), selection(2)), 1, None, {host(3): {"VCPU": 2}}),
        ((selection(1), selection(2)), 1, {}, {host(3): {"VCPU": 2}}),
        ((), 0, None, None),
        ((replace(selection(1), allocations={host(7): {}}),), 0, None, None),
        ((replace(selection(1), allocations={host(1): {}, host(7): {}}),), 0, None, None),
    ],
)
def test_what_a_machine_takes(
    selections: tuple[Selection, ...], position: int, reported_as: Allocations | None, taken: Allocations | None
) -> None:
    known = replace(KNOWN, selections=selections, position=position)
    assert taken_of(known, machine(3, 1, allocations=reported_as)) == taken


HOLDS = replace(refused(attempt=3), consumer_generation=4, holding=selection(3).allocations)


@pytest.mark.parametrize(
    ("event", "held"),
    [(HOLDS, True), (replace(HOLDS, consumer_generation=None), False), (replace(HOLDS, holding={}), False)],
)
def test_a_consumer_that_holds_just_this(event: e.ClaimRefused, held: bool) -> None:
    assert is_held(selection(3), event) is held


ONE = replace(machine(3, 2), allocations=selection(3).allocations)  # attempt 3 is the next


@pytest.mark.parametrize(
    ("event", "generation"),
    [
        (claimed(attempt=3, generation=9), 9),
        (HOLDS, 4),
        (replace(HOLDS, holding={}), None),
        (refused(attempt=3), None),
    ],
)
def test_an_adopted_machine_stays_whatever_placement_answers(
    event: e.Claimed | e.ClaimRefused, generation: int | None
) -> None:
    up, building = adopted(ONE), replace(adopted(replace(ONE, built=False)), doubted=False, queried=True)
    for known in (up, building):
        assert end_adopted(known, replace(event, attempt=4), PATIENCE).instance is known
        assert end_adopted(known, event, PATIENCE).instance.newest == 3
        assert end_adopted(known, event, PATIENCE).instance.consumer_generation == generation
    assert end_adopted(up, event, PATIENCE).instance.phase == (State.ACTIVE, None)
    waits = end_adopted(building, event, PATIENCE).instance
    assert (waits.phase, waits.deadline, waits.since) == ((State.BUILDING, None), event.at + 60.0, event.at)
    assert (waits.doubted, waits.queried) == (True, False)


@pytest.mark.parametrize(
    ("event", "was", "built"),
    [
        (spawned(2, 3), False, True),
        (replace(reported("s2", 2, 3), built=True), False, True),
        (replace(reported("s2", 2, 3), built=False), False, False),
        (replace(reported("s2", 2, 3), built=False), True, True),
    ],
)
def test_an_adopted_machine_is_complete_once_its_host_has_said_so(
    event: e.Spawned | e.HostRuns, was: bool, built: bool
) -> None:
    known = replace(adopted(ONE), found_built=was)
    after = note_built(known, event, PATIENCE).instance
    assert (after.found_built, after.here.service) == (built, event.service)
    for strange in (replace(event, attempt=1), replace(event, host_uuid=host(9))):
        other = note_built(known, strange, PATIENCE)
        assert other.instance == known and not destroys(other)
