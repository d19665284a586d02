"""What is made of one instance after its cell's database was restored: over all that may be recorded, listed and known,
and over histories of which every pair of backups is restored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from typing import Any, TypeAlias

import pytest
from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.actions import ActionKind, Condition
from bus.contracts.listing import ListedMachine
from cell_conductor.rules import reconcile as reconciling
from cell_conductor.rules.instance_facts import DESTROYING_DELETED
from cell_conductor.rules.reconcile import ATTEMPTS_PER_INCARNATION, BlockedReason, reconcile
from cell_conductor.rules.recovery_facts import (
    NO_SERVICE,
    KnownInstance,
    OperatorDecision,
    Reconciled,
    RecoveryCommand,
    RecoveryCommandKind,
    Verb,
)
from cell_conductor.state.commands import commands_of
from cell_conductor.state.desired_state import (
    DELETE_REQUESTED,
    DESIRED,
    DESIRED_STATES,
    IN_OTHER_CELL,
    MachineTarget,
    Work,
    desired_state_of,
    phases_matching,
)
from cell_conductor.state.instance import MACHINE_EXISTS, ActionInProgress, Instance, Phase, Power, State
from cell_conductor.state.ownership_proof import is_provably_ended
from cell_conductor.state.step import StepContext
from tests.unit.cell_conductor.move_scenario import ACTION, OTHER
from tests.unit.cell_conductor.scenario import SPEC, UUID, selection

ON = {name: selection(n) for n, name in enumerate("ABC", start=1)}
INCARNATION = 3
FLOOR = INCARNATION * ATTEMPTS_PER_INCARNATION


def listed(place: str, attempt: int, **other: Any) -> ListedMachine:
    at = ON[place]
    known: dict[str, Any] = {
        "instance_uuid": UUID,
        "host_uuid": at.host_uuid,
        "service": at.service,
        "host": at.host,
        "project_id": SPEC.project_id,
        "spec": SPEC,
        "allocations": at.allocations,
    }
    return ListedMachine(attempt=attempt, **known | other)


def known_at(*places: str, **other: Any) -> KnownInstance:
    known = {"spec": SPEC, "project_id": SPEC.project_id, "selections": tuple(ON[place] for place in places)}
    return KnownInstance(**known | other)


# --- over everything


def record_of(phase: Phase, **other: Any) -> Instance:
    """On A as attempt 1; one that is moved, from there to B as attempt 2."""
    row = DESIRED_STATES[phase]
    made = Instance(
        uuid=UUID, state=phase[0], next_state=phase[1], spec=SPEC, selections=(ON["A"],), attempt=1, sequence=20
    )
    if row.source is not MachineTarget.UNKNOWN or row.work is Work.ACTION:
        action = ActionInProgress(
            request_id=ACTION,
            kind=ActionKind.MIGRATE,
            source=ON["A"],
            source_attempt=1,
            allocation_attempt=1,
            spec=SPEC,
        )
        is_at_source = row.placement_call is not None and row.source in DESIRED and row.current is MachineTarget.ABSENT
        at, attempt = (0, 1) if is_at_source else (1, 2)
        made = replace(made, selections=(ON["A"], ON["B"]), selection_index=at, attempt=attempt, action=action)
    return replace(made, **other)


def refused(phase: Phase) -> Instance:
    """A build of attempt 1 that met a machine in quarantine, and what has come of it."""
    return record_of(
        phase, code=MACHINE_EXISTS, attempt=1, selections=(), selection_index=0, action=None, proves_from=2
    )


WITHOUT_HOST = [
    refused((State.FAILED, None)),
    refused((State.DELETED, None)),
    refused((State.RELEASING, State.FAILED)),
    record_of((State.RELEASING, State.DELETED), attempt=0, highest_attempt=1, selections=()),  # no record had it
]
PHASES = [phase for phase, row in DESIRED_STATES.items() if row.current is not MachineTarget.UNKNOWN]
RECORDS = [
    None,
    *(record_of(phase, **other) for phase, other in product(PHASES, ({}, {"image": "kept"}, {"power": Power.STOPPED}))),
]
ON_A = (
    (),
    (listed("A", 1),),
    (listed("A", 1, runs=False),),
    (listed("A", 1, complete=False),),
    (listed("A", 1, busy=True),),
    (listed("A", 1, foreign=True),),
)
ON_B = (
    (),
    (listed("B", 2),),
    (listed("B", 2, runs=False),),
    (listed("B", 2, complete=False),),
    (listed("B", 9, spec=None, project_id=None),),
)
ON_C = ((), (listed("C", 7),))
MACHINES = [(*a, *b, *c) for a, b, c in product(ON_A, ON_B, ON_C)]
WORDS = (
    None,
    known_at("A", attempt=1, power=Power.RUNNING),
    known_at("B", "A", attempt=2, request_id=ACTION, kind=ActionKind.MIGRATE, power=Power.RUNNING),
    known_at("A", attempt=2, request_id=OTHER, kind=ActionKind.STOP, power=Power.RUNNING),
    known_at("C", attempt=7, is_active=False),
    known_at("A", attempt=1, is_active=False),
    known_at("B", attempt=9, request_id=ACTION, kind=ActionKind.MIGRATE, is_transferred_in=True),
    known_at(attempt=2, is_deleted=True),
    known_at("A", attempt=9, is_deleted=True),
    known_at(attempt=9, is_in_other_cell=True),
    known_at("C", attempt=1, is_deleted=True, is_in_other_cell=True),  # seed 911
    KnownInstance(exists=False),
)
Case: TypeAlias = tuple[Instance | None, Sequence[ListedMachine], KnownInstance | None, frozenset[str]]


def cases(records: Sequence[Instance | None] = RECORDS) -> Iterator[Case]:
    absents = [frozenset[str](), *(frozenset({one.host_uuid}) for one in ON.values())]
    for record, machines, known, absent in product(records, MACHINES, WORDS, absents):
        if not any(one.host_uuid in absent for one in machines):
            yield record, machines, known, absent


def is_deleted_above(known: KnownInstance | None) -> bool:
    return known is not None and known.is_deleted and not known.is_in_other_cell


def is_delete_recorded(record: Instance | None, known: KnownInstance | None) -> bool:
    return (record is not None and record.phase in DELETE_REQUESTED) or is_deleted_above(known)


def wanted_of(result: Reconciled) -> set[tuple[str | None, int]]:
    """The (host, attempt) pairs that the record has machines under."""
    after, places = result.record, set[tuple[str | None, int]]()
    if after is None or result.blocked_reason:
        return places
    if desired_state_of(after).current in DESIRED:
        places.add((after.host_uuid, after.attempt))
    if desired_state_of(after).source is MachineTarget.PRESENT:
        places.add((after.source_host_uuid, after.source_attempt))
    return places


def faults_about_machines(case: Case, result: Reconciled) -> Iterator[str]:
    """What becomes of the machines, and must not."""
    record, machines, known, _ = case
    own = [one for one in machines if not one.foreign]
    ordered = [command.machine for command in result.commands]
    if any(one.foreign for one in ordered):
        yield "a foreign machine is touched"
    if any(o.kind is RecoveryCommandKind.DESTROY for o in result.commands) and not is_delete_recorded(record, known):
        yield "a machine is ordered away without a delete"
    if any(o.kind is RecoveryCommandKind.DESTROY for o in result.commands) and result.record is None:
        yield "nobody awaits that it is destroyed"
    wanted = [one for one in own if (one.host_uuid, one.attempt) in wanted_of(result)]
    running = {one.host_uuid for one in wanted if one.complete and one.runs}
    running |= {command.machine.host_uuid for command in result.commands if command.kind is RecoveryCommandKind.START}
    if len(running) > 1 or len(wanted) > 2:
        yield "two are wanted"
    if any(one.busy for one in own) and result.blocked_reason is not BlockedReason.BUSY:
        yield "what is busy is decided about"
    if not result.blocked_reason and any(one.complete and one not in wanted and one not in ordered for one in own):
        yield "a complete machine is forgotten"


def faults_about_the_record(case: Case, result: Reconciled) -> Iterator[str]:
    """What becomes of the record, and must not."""
    record, machines, known, absent = case
    own, after = [one for one in machines if not one.foreign], result.record
    if after is None or result.blocked_reason:
        return
    if is_deleted_above(known) and desired_state_of(after).current is MachineTarget.ABSENT and own:
        yield "its delete is over, and it has a machine"
    if after.phase in DELETE_REQUESTED and not is_delete_recorded(record, known):
        yield "it is deleted, and its client has not deleted it in this cell"
    if after.phase not in DESIRED_STATES:
        yield "no row of the desired states"
    row = desired_state_of(after)
    is_there = any((one.host_uuid, one.attempt) == (after.host_uuid, after.attempt) and one.complete for one in own)
    if row.current is MachineTarget.RUNNING and not is_there and not absent:
        yield "it runs nowhere"
    if after.phase not in IN_OTHER_CELL and after.last_attempt < max((one.attempt for one in own), default=0):
        yield "a number was seen that is higher"
    if after.phase not in IN_OTHER_CELL | DELETE_REQUESTED and after.last_attempt < FLOOR:
        yield "its numbers are below the floor"
    told = {one.request_id for one in result.ended}
    if after.action is not None and after.action.request_id in told and not after.action.answered:
        yield "a request that has had its end would have another one with its instance"
    is_changed = record is not None and after.phase != record.phase
    is_gone = row.current in (MachineTarget.ABSENT_AFTER_DESTROY, MachineTarget.ABSENT)
    if known is None and is_changed and is_gone:
        yield "it is released without the top's word"


def is_same(again: Reconciled, first: Reconciled) -> bool:
    """An end is announced once; again only where the top still waits for it."""
    return set(again.ended) <= set(first.ended) and replace(again, ended=first.ended) == first


@pytest.mark.parametrize(
    ("record", "verb", "phase", "actions"),
    [
        (record_of((State.FAILED, None)), Verb.ADOPT, (State.ACTIVE, None), {("A", RecoveryCommandKind.QUARANTINE)}),
        (record_of((State.DELETED, None)), Verb.ADOPT, None, set()),  # it contradicts the delete
        (record_of((State.ACTIVE, None)), Verb.DESTROY, (State.ACTIVE, None), {("B", RecoveryCommandKind.DESTROY)}),
        (record_of((State.ACTIVE, None)), None, (State.ACTIVE, None), set()),
    ],
)
def test_an_operator_decides_about_one_machine(
    record: Instance, verb: Verb | None, phase: Phase | None, actions: set[tuple[str, RecoveryCommandKind]]
) -> None:
    decision = None if verb is None else OperatorDecision(verb, ON["B"].host_uuid)
    kept = [ON["B"].host_uuid] if verb is None else []
    machines, known = (listed("A", 1), listed("B", 2)), known_at("A", attempt=2)
    result = reconcile(record, machines, known, frozenset(), decision, incarnation=INCARNATION, protected=kept)
    assert result.record is not None and phase in (None, result.record.phase)
    names = {one.host_uuid: name for name, one in ON.items()}
    assert {(names[o.machine.host_uuid], o.kind) for o in result.commands} == actions
    if verb is Verb.ADOPT and phase is not None:
        assert (result.record.host_uuid, result.record.attempt) == (ON["B"].host_uuid, 2)


def test_a_machine_without_record_and_top_is_taken_up_by_its_spec_and_the_project_of_its_allocations() -> None:
    machine = listed("A", 4)
    for project, taken in ((SPEC.project_id, State.ACTIVE), ("another", None)):
        known = KnownInstance(exists=False, project_id=project)
        result = reconcile(None, (machine,), known, frozenset(), None, incarnation=INCARNATION)
        assert (result.record and result.record.state) == taken
        assert [o.kind for o in result.commands] == ([] if taken else [RecoveryCommandKind.QUARANTINE])


@pytest.mark.parametrize(
    ("known", "phase"),
    [
        (known_at("A", attempt=1), (State.ACTIVE, None)),
        (known_at(attempt=1, is_active=False), (State.RELEASING, State.FAILED)),  # it failed by the map
        (KnownInstance(exists=False), (State.ACTIVE, None)),  # the map has forgotten it (seed 803)
    ],
)
def test_by_a_fence_alone_no_instance_ends(known: KnownInstance, phase: Phase) -> None:
    record, off = record_of((State.ACTIVE, None)), [ON["A"].host_uuid]
    result = reconcile(record, (), known, frozenset(), None, incarnation=INCARNATION, off=off)
    assert result.record is not None and result.record.phase == phase


def shelved_again(image: str) -> Instance:
    """An offloaded instance that is unshelved, whose image was kept when that began."""
    made = record_of((State.REVERTING, None))
    assert made.action is not None
    return replace(made, image=image, action=replace(made.action, kind=ActionKind.UNSHELVE, image="kept"))


@pytest.mark.parametrize(
    ("record", "phase", "image"),
    [
        (record_of((State.DESTROYING, State.DELETED)), (State.RELEASING, State.DELETED), ""),
        (record_of((State.RELEASING, State.DELETED)), (State.RELEASING, State.DELETED), ""),
        (record_of((State.DELETED, None)), (State.DELETED, None), ""),
        (shelved_again(""), (State.OFFLOADED, None), "kept"),
        (shelved_again("newer"), (State.OFFLOADED, None), "newer"),
    ],
)
def test_without_a_machine_a_delete_goes_on_and_an_image_is_kept(record: Instance, phase: Phase, image: str) -> None:
    result = reconcile(record, (), known_at(attempt=2), frozenset(), None, incarnation=INCARNATION)
    assert result.record is not None
    assert (result.record.phase, result.record.image) == (phase, image)


@pytest.mark.parametrize(
    ("service", "machines", "absent", "found"),
    [
        ("s", (listed("A", 1),), (), (State.DESTROYING, State.DELETED)),
        # Seed 20 of cell-restored: its delete released an earlier attempt than placement had.
        ("s", (), (), (State.RELEASING, State.DELETED)),
        ("s", (), ("A",), (State.DESTROYING, State.DELETED)),
        # Seed 39 of service-away: a service of this name was commanded for ever.
        (NO_SERVICE, (), ("A",), BlockedReason.HOST_ABSENT),
    ],
)
def test_a_delete_of_what_no_record_has_is_awaited_while_there_may_be_a_machine(
    service: str, machines: Sequence[ListedMachine], absent: Sequence[str], found: Phase | BlockedReason | None
) -> None:
    known = known_at(attempt=1, is_deleted=True, selections=(replace(ON["A"], service=service),))
    hosts = {ON[one].host_uuid for one in absent}
    result = reconcile(None, machines, known, hosts, None, incarnation=INCARNATION)
    assert (result.blocked_reason or (result.record and result.record.phase)) == found
    again = reconcile(result.record, (listed("A", 1),), known, (), None, incarnation=INCARNATION)
    assert again.record is not None and again.record.phase == (State.DESTROYING, State.DELETED)
    assert again.record.current.service != NO_SERVICE and [one.kind for one in again.commands] == [
        RecoveryCommandKind.DESTROY
    ]


@pytest.mark.parametrize("machines", [(), (listed("B", 1),), (listed("B", 9, complete=False),)])
@pytest.mark.parametrize("record", WITHOUT_HOST)
def test_a_delete_whose_record_names_no_host_waits_for_the_one_that_may_have_its_machine(
    record: Instance, machines: Sequence[ListedMachine]
) -> None:
    """Every event of it failed; or, of a build that was refused, nothing was commanded and it did not end."""
    known, on_a = known_at("A", attempt=9, is_deleted=True), ON["A"].host_uuid
    result = reconcile(record, machines, known, [on_a], None, incarnation=INCARNATION)
    assert (result.record, result.blocked_reason) == (record, BlockedReason.HOST_ABSENT)
    found = reconcile(result.record, (listed("A", 9),), known, (), None, incarnation=INCARNATION).record
    assert found is not None and (found.phase, found.host_uuid, found.code) == (DESTROYING_DELETED, on_a, "")


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("attempt", [1, 2])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((State.FAILED, None), (State.RELEASING, State.DELETED)),  # it was deleted since
        ((State.DELETED, None), (State.DELETED, None)),
        ((State.RELEASING, State.DELETED), (State.RELEASING, State.DELETED)),
    ],
)
def test_what_a_refused_build_has_met_is_left_to_an_operator_also_after_its_delete(
    before: Phase, after: Phase, attempt: int, away: bool
) -> None:
    """It may be another project's: no delete of the build is one of that machine, also where it is listed later."""
    record, machines = refused(before), () if away else (listed("A", attempt),)
    known, absent = known_at("A", attempt=2, is_deleted=True), [ON["A"].host_uuid] if away else []
    result = reconcile(record, machines, known, absent, None, incarnation=INCARNATION)
    assert result.record is not None and (result.record.phase, result.record.code) == (after, MACHINE_EXISTS)
    assert (result.blocked_reason, result.commands) == (None, ())
    later = replace(known, attempt=9)  # one that was built since
    assert bool(reconcile(record, (listed("A", 9),), later, (), None, incarnation=INCARNATION).commands)


@pytest.mark.parametrize(("project", "ends"), [(None, True), (SPEC.project_id, True), ("another", False)])
@pytest.mark.parametrize("record", [None, record_of((State.RELEASING, State.DELETED)), record_of((State.ACTIVE, None))])
def test_a_delete_is_none_of_a_machine_whose_service_has_it_as_another_projects(
    record: Instance | None, project: str | None, ends: bool
) -> None:
    """Another project's client used the uuid again, deleted that, and the next restore destroyed the machine."""
    spec = SPEC if project is None else replace(SPEC, project_id=project)
    machine, known = listed("A", 1, project_id=project, spec=spec), known_at("A", attempt=1, is_deleted=True)
    result = reconcile(record, (machine,), known, (), None, incarnation=INCARNATION)
    assert (bool(result.commands), result.blocked_reason) == (ends, None if ends else BlockedReason.CONFLICT)
    assert result.record is not None and result.record.spec is not None
    assert result.record.spec.project_id == SPEC.project_id
    gone = reconcile(result.record, (), known_at(attempt=1, is_deleted=True), (), None, incarnation=INCARNATION)
    assert gone.record is not None and gone.record.phase == (State.RELEASING, State.DELETED)


@pytest.mark.parametrize("project", [None, "another", SPEC.project_id])
@pytest.mark.parametrize("is_active", [False, True])
def test_what_a_refused_build_has_met_is_neither_over_nor_its_own_where_a_later_one_is_lost(
    *, is_active: bool, project: str | None
) -> None:
    """It was put in quarantine, and the next report destroyed it: the code was lost by which the record kept it."""
    known, machine = known_at("A", attempt=2, is_active=is_active), listed("A", 1, project_id=project)
    record = refused((State.RELEASING, State.FAILED))
    result = reconcile(record, (machine,), known, frozenset(), None, incarnation=INCARNATION)
    assert result.record is not None and result.record.phase == record.phase and result.commands == ()
    assert not is_provably_ended(result.record, machine.attempt, machine.host_uuid)


@pytest.mark.parametrize("record", [None, record_of((State.ACTIVE, None)), record_of((State.RESIZED, None))])
def test_what_is_being_changed_is_waited_for(record: Instance | None) -> None:
    machines, known = (listed("A", 1, busy=True), listed("B", 2)), known_at("B", attempt=2)
    result = reconcile(record, machines, known, frozenset(), None, incarnation=INCARNATION)
    assert (result.blocked_reason, result.commands) == (BlockedReason.BUSY, ())


TO_COME = known_at("A", attempt=1, is_active=False)
ARRIVING = known_at("B", attempt=9, request_id=ACTION, kind=ActionKind.MIGRATE, is_transferred_in=True, cell="c1")


@pytest.mark.parametrize(
    ("record", "machines", "known", "absent", "phase"),
    [
        (None, (), TO_COME, "", None),
        (None, (), replace(TO_COME, attempt=2), "", (State.RELEASING, State.FAILED)),
        (None, (), TO_COME, "A", "host_absent"),
        (None, (listed("A", 1, complete=False),), TO_COME, "", (State.BUILDING, None)),
        (None, (), ARRIVING, "", None),
        (None, (), ARRIVING, "B", "host_absent"),
        (None, (listed("B", 9),), ARRIVING, "", (State.ACTIVE, None)),
        (record_of((State.TRANSFERRED, None)), (), ARRIVING, "", (State.TRANSFERRED, None)),
        (record_of((State.ACTIVE, None)), (), ARRIVING, "", (State.TRANSFERRED, State.ABSENT)),
        (record_of((State.ACTIVE, None)), (), ARRIVING, "B", "host_absent"),
        (record_of((State.ACTIVE, None)), (listed("B", 9),), ARRIVING, "", (State.ACTIVE, None)),
        (record_of((State.DELETED, None)), (), ARRIVING, "", "conflict"),
        (record_of((State.FINISHING, None), image="kept"), (), ARRIVING, "", (State.OFFLOADED, None)),
    ],
)
def test_what_the_schedulers_have_only_just_given_to_the_cell_is_left_to_their_command(
    record: Instance | None,
    machines: Sequence[ListedMachine],
    known: KnownInstance,
    absent: str,
    phase: Phase | str | None,
) -> None:
    """A build whose command waited had failed when that came, and what comes from another cell was lost."""
    hosts = {ON[absent].host_uuid} if absent else set[str]()
    result = reconcile(record, machines, known, hosts, None, incarnation=INCARNATION)
    is_blocked = isinstance(phase, str)
    assert (result.blocked_reason if is_blocked else result.record and result.record.phase) == phase


def test_over_everything_that_may_be_recorded_listed_and_known() -> None:
    wrong, counted, outcomes = Counter[str](), 0, Counter[str]()
    first: dict[str, Any] = {}
    for case in cases():
        counted += 1
        result = reconcile(*case, None, incarnation=INCARNATION)
        again = reconcile(result.record, *case[1:], None, incarnation=INCARNATION)
        found = [*faults_about_machines(case, result), *faults_about_the_record(case, result)]
        found += ["it comes to another result"] * (not is_same(again, result))
        for fault in found:
            first.setdefault(fault, (case, result, again))
        wrong.update(found)
        outcomes[result.blocked_reason or "decided"] += 1
    assert not wrong, (wrong, next(iter(first.values())))
    assert counted > 90_000 and set(outcomes) == {"decided", *BlockedReason}


def test_what_is_made_of_a_record_without_a_host_commands_none() -> None:
    made = [reconcile(*case, None, incarnation=INCARNATION) for case in cases(WITHOUT_HOST)]
    decided = [one.record for one in made if one.record is not None and not one.blocked_reason]
    assert {len(commands_of(one, StepContext(cell="c1"))) for one in decided if one.selections} == {0, 1}
    assert not any(commands_of(one, StepContext(cell="c1")) for one in decided if not one.selections)


# --- over histories


class Moment(Struct, frozen=True, kw_only=True):
    """What is true, and what the cell and the top have on record. alive: the machine that the client has, as (host,
    attempt) ("": in another cell). off: hosts that are; fenced: of these, whose fence is on record.
    """

    record: Instance | None = None
    known: KnownInstance = KnownInstance(exists=False)
    machines: tuple[ListedMachine, ...] = ()
    alive: tuple[str, int] | None = None
    image: str = ""
    is_deleted: bool = False
    off: frozenset[str] = frozenset()
    fenced: frozenset[str] = frozenset()


NOTHING = Moment()


def history(*changes: dict[str, Any], start: Moment = NOTHING) -> list[Moment]:
    """Each moment is the one before with these changes."""
    moments = [start]
    for change in changes:
        moments.append(replace(moments[-1], **change))
    return moments


def at(place: str, attempt: int, *phase: State, **other: Any) -> Instance:
    """The record of an instance there."""
    state, next_state = phase if len(phase) == 2 else (phase[0], None)
    known = {"state": state, "next_state": next_state, "spec": SPEC, "selections": (ON[place],), "attempt": attempt}
    return Instance(uuid=UUID, **known | other)


def moving(*phase: State, kind: ActionKind = ActionKind.MIGRATE, **other: Any) -> Instance:
    """From A to B."""
    action = ActionInProgress(
        request_id=ACTION, kind=kind, source=ON["A"], source_attempt=1, allocation_attempt=1, spec=SPEC
    )
    is_claimed = phase[0] is not State.CLAIMING
    known = {"selections": (ON["A"], ON["B"]), "selection_index": int(is_claimed), "action": action}
    return replace(at("A", 2 if is_claimed else 1, *phase), **known | other)


def here(place: str, attempt: int) -> tuple[str, int]:
    return ON[place].host_uuid, attempt


RUNNING, A, B = Power.RUNNING, here("A", 1), here("B", 2)
ON_A_1 = known_at("A", attempt=1, power=RUNNING)
ON_B_2 = known_at("B", attempt=2, power=RUNNING)
LEAVING_A = known_at("A", attempt=1, power=RUNNING, request_id=ACTION, kind=ActionKind.MIGRATE)
TO_B = known_at("B", "A", attempt=2, power=RUNNING, request_id=ACTION, kind=ActionKind.MIGRATE)
ACTIVE_ON_A = Moment(record=at("A", 1, State.ACTIVE), known=ON_A_1, machines=(listed("A", 1),), alive=A)
BUILT = history(
    {"known": known_at("A", attempt=1, is_active=False)},
    {"record": at("A", 1, State.BUILDING)},
    {"machines": (listed("A", 1, complete=False),)},
    {"machines": (listed("A", 1),), "alive": A},
    {"record": at("A", 1, State.ACTIVE)},
    {"known": ON_A_1},
)
STOPPED_A, RUNS_B, MADE_B = listed("A", 1, runs=False), listed("B", 2), listed("B", 2, complete=False)
LEFT_A = (
    {"known": LEAVING_A},
    {"record": moving(State.CLAIMING, State.PREPARING)},
    {"known": TO_B},
    {"record": moving(State.PREPARING)},
    {"record": moving(State.HANDING_OVER)},
    {"machines": (listed("A", 1, busy=True),)},
    {"machines": (STOPPED_A,)},
    {"record": moving(State.FINISHING)},
    {"machines": (STOPPED_A, MADE_B)},
)
ARRIVED_ON_B = (
    {"machines": (STOPPED_A, RUNS_B), "alive": B},
    {"record": moving(State.DESTROYING, State.ACTIVE)},
    {"machines": (RUNS_B,)},
    {"record": moving(State.RELEASING, State.ACTIVE)},
    {"known": ON_B_2},
    {"record": at("B", 2, State.ACTIVE)},
)
SHELVED_A = at("A", 1, State.OFFLOADED, power=Power.SHELVED, image="kept")
OFFLOADED = (
    {"record": moving(State.CHANGING, kind=ActionKind.SHELVE, selections=(ON["A"],), selection_index=0, attempt=1)},
    {"machines": (STOPPED_A,)},
    {"record": at("A", 1, State.DESTROYING, State.OFFLOADED, power=Power.SHELVED, image="kept")},
    {"machines": (), "alive": None, "image": "kept"},
    {"record": SHELVED_A},
    {"known": known_at(attempt=1, power=Power.SHELVED, snapshot="kept")},
)
UNSHELVING = ActionInProgress(request_id=OTHER, kind=ActionKind.UNSHELVE, spec=SPEC, power=Power.SHELVED, image="kept")
HISTORIES = {
    "it is built": BUILT,
    "it is built on an alternate": history(
        {"known": known_at("A", attempt=1, is_active=False)},
        {"record": at("A", 1, State.BUILDING)},
        {"machines": (listed("A", 1, complete=False),)},
        {"machines": ()},
        {"record": at("A", 1, State.CLAIMING, State.BUILDING, selections=(ON["A"], ON["B"]))},
        {"known": known_at("B", attempt=2, is_active=False)},
        {"record": at("A", 2, State.BUILDING, selections=(ON["A"], ON["B"]), selection_index=1)},
        {"machines": (MADE_B,)},
        {"machines": (RUNS_B,), "alive": B},
        {"record": at("A", 2, State.ACTIVE, selections=(ON["A"], ON["B"]), selection_index=1)},
        {"known": ON_B_2},
    ),
    "it is deleted": history(
        {"known": replace(ON_A_1, is_deleted=True), "is_deleted": True},
        {"record": at("A", 1, State.DESTROYING, State.DELETED)},
        {"machines": (), "alive": None},
        {"record": at("A", 1, State.RELEASING, State.DELETED)},
        {"known": known_at(attempt=1, is_deleted=True)},
        {"record": at("A", 1, State.DELETED)},
        start=ACTIVE_ON_A,
    ),
    "it is migrated": history(*LEFT_A, *ARRIVED_ON_B, start=ACTIVE_ON_A),
    "its migration fails": history(
        *LEFT_A,
        {"machines": (STOPPED_A,)},
        {"record": moving(State.DESTROYING, State.REVERTING)},
        {"record": moving(State.REVERTING)},
        {"known": LEAVING_A},
        {"record": moving(State.RESTARTING, selections=(ON["A"],), selection_index=0, attempt=1, highest_attempt=2)},
        {"machines": (listed("A", 1),)},
        {"record": at("A", 1, State.ACTIVE, highest_attempt=2)},
        {"known": ON_A_1},
        start=ACTIVE_ON_A,
    ),
    "it is migrated live": history(
        *LEFT_A[:5],
        {"machines": (listed("A", 1, busy=True), MADE_B)},
        {"record": moving(State.FINISHING)},
        {"machines": (listed("A", 1, busy=True, runs=False), listed("B", 2, complete=False, busy=True))},
        *ARRIVED_ON_B,
        start=ACTIVE_ON_A,
    ),
    "it is stopped and started": history(
        {"known": replace(ON_A_1, request_id=ACTION, kind=ActionKind.STOP)},
        {"record": moving(State.CHANGING, kind=ActionKind.STOP, selections=(ON["A"],), selection_index=0, attempt=1)},
        {"machines": (STOPPED_A,)},
        {"record": at("A", 1, State.ACTIVE, power=Power.STOPPED)},
        {"known": replace(ON_A_1, power=Power.STOPPED)},
        {"known": replace(ON_A_1, power=Power.STOPPED, request_id=OTHER, kind=ActionKind.START)},
        {"machines": (listed("A", 1),)},
        {"record": at("A", 1, State.ACTIVE)},
        {"known": ON_A_1},
        start=ACTIVE_ON_A,
    ),
    "it is shelved, and unshelved elsewhere": history(
        {"known": replace(ON_A_1, request_id=ACTION, kind=ActionKind.SHELVE)},
        *OFFLOADED,
        {
            "known": known_at(
                "B", attempt=2, power=Power.SHELVED, snapshot="kept", request_id=OTHER, kind=ActionKind.UNSHELVE
            )
        },
        {"record": at("B", 2, State.FINISHING, power=Power.SHELVED, image="kept", action=UNSHELVING)},
        {"machines": (MADE_B,)},
        {"machines": (RUNS_B,), "alive": B, "image": ""},
        {"record": at("B", 2, State.ACTIVE)},
        {"known": ON_B_2},
        start=ACTIVE_ON_A,
    ),
    "it is evacuated": history(
        {"off": frozenset({A[0]}), "machines": (), "alive": None},
        {"fenced": frozenset({A[0]})},
        {"known": replace(LEAVING_A, kind=ActionKind.EVACUATE)},
        {"known": replace(TO_B, kind=ActionKind.EVACUATE)},
        {"record": moving(State.FINISHING, kind=ActionKind.EVACUATE)},
        {"machines": (MADE_B,)},
        {"machines": (RUNS_B,), "alive": B},
        {"record": at("B", 2, State.ACTIVE)},
        {"known": ON_B_2},
        {"off": frozenset(), "fenced": frozenset()},
        start=ACTIVE_ON_A,
    ),
    "it goes to another cell and comes back": history(
        {"known": replace(LEAVING_A, request_id=OTHER)},
        *OFFLOADED[:-1],
        {"record": at("A", 1, State.TRANSFERRED, image="kept"), "image": ""},
        {"known": known_at(attempt=2, is_in_other_cell=True), "alive": ("", 2)},
        {"known": known_at(attempt=2, is_in_other_cell=True, power=Power.SHELVED), "alive": None},
        {"known": known_at("B", attempt=3, is_active=False)},
        {"record": at("B", 3, State.BUILDING)},
        {"machines": (listed("B", 3),), "alive": here("B", 3)},
        {"record": at("B", 3, State.ACTIVE)},
        {"known": known_at("B", attempt=3, power=RUNNING)},
        start=ACTIVE_ON_A,
    ),
}


class Restored(Struct, frozen=True):
    """A moment, with the record of an earlier one."""

    now: Moment
    record: Instance | None
    known: KnownInstance | None
    fenced: frozenset[str]
    absent: frozenset[str]


def restored(moments: Sequence[Moment]) -> Iterator[Restored]:
    """Every cut, every backup of the cell, with the top's word and without, and every set of hosts that do not list."""
    hosts = [ON["A"].host_uuid, ON["B"].host_uuid]
    for cut, now in enumerate(moments):
        for cell, known in product(range(cut + 1), (now.known, None)):
            fenced = moments[cell].fenced | (frozenset() if known is None else now.fenced)
            for count in range(len(hosts) + 1):
                for absent in combinations(hosts, count):
                    yield Restored(now, moments[cell].record, known, fenced, frozenset(absent))


def follow(machines: Sequence[ListedMachine], orders: Sequence[RecoveryCommand]) -> list[ListedMachine]:
    """The machines when the orders were carried out, and what was under way has ended."""
    left = []
    for one in machines:
        actions = {command.kind for command in orders if command.machine == one}
        if RecoveryCommandKind.DESTROY in actions or (
            RecoveryCommandKind.DESTROY_IF_INCOMPLETE in actions and not one.complete
        ):
            continue
        left.append(replace(one, busy=False, runs=one.runs or RecoveryCommandKind.START in actions))
    return left


def harms_of(case: Restored, before: Sequence[ListedMachine], result: Reconciled) -> Iterator[str]:
    """What a result does to the client's machine."""
    alive, after = case.now.alive, result.record
    if alive is None:
        if case.now.image and not result.blocked_reason and (after is None or after.phase in RELEASED):
            yield "forgotten"
        return
    if not case.now.is_deleted and any(
        (one.host_uuid, one.attempt) == alive for one in before if one not in follow_quiet(before, result)
    ):
        yield "destroyed"
    if after is None or result.blocked_reason or case.now.is_deleted:
        return
    starts = [command.machine for command in result.commands if command.kind is RecoveryCommandKind.START]
    wanted = {(after.host_uuid, after.attempt)} if desired_state_of(after).current in DESIRED else set()
    wanted |= {(one.host_uuid, one.attempt) for one in starts}
    if wanted - {alive} or after.phase in OFFLOADED_PHASES:
        yield "doubled"
    if after.phase in RELEASED and alive[0] != "":
        yield "forgotten"


OFFLOADED_PHASES = phases_matching(lambda row: row.condition is Condition.OFFLOADED)
RELEASED = phases_matching(lambda row: row.condition in (Condition.FAILED, Condition.DELETED))


def follow_quiet(before: Sequence[ListedMachine], result: Reconciled) -> list[ListedMachine]:
    """Those that the orders leave, as they were."""
    left = {(one.host_uuid, one.attempt) for one in follow(before, result.commands)}
    return [one for one in before if (one.host_uuid, one.attempt) in left]


Seen: TypeAlias = tuple[list[ListedMachine], KnownInstance | None]


def recover(case: Restored, see: Callable[[list[ListedMachine], KnownInstance | None], Seen]) -> Iterator[str]:
    """The harms: first with the hosts that list, then with all, until nothing changes."""
    record, machines, now = case.record, list(case.now.machines), case.now
    absent, result = case.absent | now.off, Reconciled(None)
    for round_ in range(6):
        hidden = [one for one in machines if one.host_uuid in absent]
        listing, known = see([one for one in machines if one not in hidden], case.known)
        result = reconcile(record, listing, known, absent - case.fenced, None, incarnation=INCARNATION)
        real = [replace(o, machine=next(m for m in machines if is_one(m, o.machine))) for o in result.commands]
        yield from harms_of(case, machines, replace(result, commands=tuple(real)))
        following = [*follow([one for one in machines if one not in hidden], real), *hidden]
        if round_ and (following, result.record) == (machines, record):
            break
        record, machines, absent = result.record, following, now.off
    else:
        yield "never at rest"
    yield from end_of(case, machines, result)


def is_one(one: ListedMachine, other: ListedMachine) -> bool:
    return (one.host_uuid, one.attempt) == (other.host_uuid, other.attempt)


def end_of(case: Restored, machines: Sequence[ListedMachine], result: Reconciled) -> Iterator[str]:
    """What is wrong at the end, when all hosts that are on have listed."""
    now, after = case.now, result.record
    if now.is_deleted or now.alive is None:
        if case.known is not None and now.is_deleted and machines and not result.blocked_reason:
            yield "kept"
        if now.image and (after is None or (after.image != now.image and not result.blocked_reason)):
            yield "image forgotten"
        return
    is_listed = any((o.machine.host_uuid, o.machine.attempt) == now.alive for o in result.commands)
    is_wanted = now.alive in wanted_of(result) or (
        now.alive[0] == "" and (after is None or after.phase in IN_OTHER_CELL)
    )
    if not (is_wanted or is_listed or result.blocked_reason or now.alive[0] == ""):
        yield "forgotten"
    if case.known is not None and not is_wanted:
        yield "undecided"


def as_seen(machines: list[ListedMachine], known: KnownInstance | None) -> Seen:
    return machines, known


def count_harms(see: Callable[[list[ListedMachine], KnownInstance | None], Seen]) -> tuple[Counter[str], int]:
    harms, counted = Counter[str](), 0
    for name, moments in HISTORIES.items():
        for case in restored(moments):
            counted += 1
            harms.update({f"{harm}: {name}" for harm in recover(case, see)})
    return harms, counted


def test_no_history_ends_with_a_machine_destroyed_doubled_or_forgotten() -> None:
    harms, counted = count_harms(as_seen)
    assert not harms
    assert counted > 5_000


def alone(machines: list[ListedMachine], _known: KnownInstance | None) -> Seen:
    return machines, KnownInstance(exists=False)


def without_places(machines: list[ListedMachine], known: KnownInstance | None) -> Seen:
    return machines, None if known is None else replace(known, selections=())


def as_running(machines: list[ListedMachine], known: KnownInstance | None) -> Seen:
    return [replace(one, runs=True) for one in machines], known


def oldest_of(machines: Sequence[ListedMachine], _base: Instance) -> ListedMachine:
    return machines[0]


def without(rule: reconciling.Rule) -> dict[str, Any]:
    return {"RULES": tuple(one for one in reconciling.RULES if one is not rule)}


# (what is seen otherwise, what is put in place of the module's own, the harm that it does)
DEFECTS: dict[str, tuple[Callable[[list[ListedMachine], KnownInstance | None], Seen], dict[str, Any], str]] = {
    "rule 0: an end without the top's word": (as_seen, {"_ends": lambda _facts, _result: False}, "doubled"),
    "rule 3: departed": (as_seen, without(reconciling.follow_transfer), "doubled"),
    "rule 6: hosts that have not listed": (as_seen, without(reconciling.wait_for_hosts), "doubled"),
    "the newest": (as_seen, {"newest_of": oldest_of}, "doubled"),
    "the top's word": (alone, {}, "forgotten"),
    "the places that the top has": (without_places, {}, "forgotten"),
    "stopped is no running": (as_running, {}, "doubled"),
}


@pytest.mark.parametrize(("see", "patched", "harm"), DEFECTS.values(), ids=DEFECTS)
def test_each_rule_that_is_left_out_does_harm(
    see: Callable[[list[ListedMachine], KnownInstance | None], Seen],
    patched: dict[str, Any],
    harm: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in patched.items():
        monkeypatch.setattr(reconciling, name, value)
    harms, _ = count_harms(see)
    assert any(found.startswith(harm) for found in harms)
