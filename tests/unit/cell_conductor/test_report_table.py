"""A host's report against a record: a row for each condition that alone makes the difference."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.actions import ActionKind
from bus.contracts.build import AttemptRecord
from bus.contracts.cell import UNKNOWN_ATTEMPT, HostReport, HostStates, Running
from cell_conductor.reports import listings
from cell_conductor.reports.listings import NewestReports
from cell_conductor.reports.report_diff import InstanceSummary, differences
from cell_conductor.state import events as e
from cell_conductor.state.instance import ActionInProgress, Instance, Phase, State
from cell_conductor.state.ownership_proof import changed_recently, has_machine_at, is_commanded, rescan_id
from cell_conductor.state.unknown_machine import NEWER, NO_OWNER_TAG, NO_RECORD, ON_OTHER_HOST, UNNUMBERED, UNREADABLE
from tests.unit.cell_conductor.scenario import DATABASE_ID, SPEC, UUID, host, phase_of, selection

HERE, THERE = host(1), host(2)
SINCE, NOW = 100.0, 201.0
OURS = Running(instance_uuid=UUID, attempt=1, database_id=DATABASE_ID, built=True)
SECOND = replace(OURS, attempt=2)
UNMARKED = replace(OURS, database_id=None)
BUILDING = replace(OURS, built=False)
DELETING, CONFIRMING, UNDOING = ((State.DESTROYING, then) for then in (State.DELETED, State.ACTIVE, State.REVERTING))
# The events of a comparison, and what a later scan has to show; those in capitals wait for a breaker.
RUNS, MISSING, RESCAN, HARMFUL_RUNS, LOST, HARMFUL_RESCAN = "runs", "missing", "rescan", "RUNS", "MISSING", "RESCAN"
AGREES = ""


def summary(at: State | Phase, attempt: int = 1, at_host: str = HERE, **others: Any) -> InstanceSummary:
    state, next_state = phase_of(at)
    return replace(InstanceSummary(UUID, state, at_host, "s", attempt, SINCE, next_state=next_state), **others)


def moved(
    at: State | Phase, attempt: int = 2, at_host: str = THERE, source: str = HERE, **others: Any
) -> InstanceSummary:
    """From attempt 1 on `source`."""
    fields = {"source_host_uuid": source, "source_service": "s", "source_attempt": 1, **others}
    return summary(at, attempt, at_host, **fields)


def outcome(
    record: InstanceSummary | None,
    machine: Running | None,
    *,
    later: bool = True,
    listed: bool = False,
    now: float = NOW,
    fenced: tuple[str, ...] = (THERE,),
) -> str:
    """What the report of service "s" about host 1 comes to. later: its scan began after the record became what it is.
    listed: the service on record may have the host.
    """
    running = () if machine is None else (machine,)
    made = HostStates(
        service="s",
        cell="c",
        epoch=1,
        sequence=1,
        hosts=(HostReport(uuid=HERE, name="h", running=running), HostReport(uuid=host(3), name="i", running=None)),
        rescans=(rescan_id(record),) if later and record is not None else (),
    )
    found = differences(
        made,
        [] if record is None else [record],
        database_id=DATABASE_ID,
        now=now,
        grace_s=30.0,
        may_have=lambda *_: listed,
        fenced=fenced,
    )
    words = {e.MachineRunning: RUNS, e.MachineMissing: MISSING}
    return " ".join(
        [
            *(words[type(event)] for _, event in found.events),
            *(words[type(event)].upper() for _, event in found.destructive),
            *(one.reason for one in found.unknown_machines),
            *(RESCAN for _ in found.rescans),
            *(HARMFUL_RESCAN for _ in found.destructive_rescans),
        ]
    )


@pytest.mark.parametrize(
    ("record", "machine", "expected"),
    [
        # Without our mark.
        (None, UNMARKED, NO_OWNER_TAG),
        (summary(State.ACTIVE), UNMARKED, AGREES),
        (summary(State.ACTIVE), replace(UNMARKED, destroying=True), AGREES),
        (summary(State.ACTIVE, at_host=THERE), UNMARKED, NO_OWNER_TAG),
        (summary(State.BUILDING), UNMARKED, NO_OWNER_TAG),
        (summary(State.FAILED), UNMARKED, NO_OWNER_TAG),
        (summary(DELETING), UNMARKED, AGREES),
        (summary(DELETING, at_host=THERE), UNMARKED, NO_OWNER_TAG),
        (summary((State.CLAIMING, State.DELETED)), UNMARKED, NO_OWNER_TAG),
        (summary(UNDOING), UNMARKED, NO_OWNER_TAG),
        (moved(State.RESIZED), UNMARKED, AGREES),
        (moved((State.RELEASING, State.ACTIVE)), UNMARKED, AGREES),
        # With it: what its record does not explain.
        (None, OURS, NO_RECORD),
        (None, replace(OURS, destroying=True), AGREES),
        (summary(State.ABSENT), OURS, UNREADABLE),
        (summary(State.ACTIVE, at_host=THERE), OURS, ON_OTHER_HOST),
        (summary(State.ACTIVE), SECOND, NEWER),
        (summary(State.ACTIVE), replace(OURS, attempt=UNKNOWN_ATTEMPT), UNNUMBERED),
        (moved(State.RESIZED, source=host(3)), OURS, ON_OTHER_HOST),
        (moved(State.RESIZED, source=host(3)), SECOND, ON_OTHER_HOST),
        (moved(State.PREPARING, 2, HERE, host(3)), SECOND, ON_OTHER_HOST),
        (summary(State.FAILED, code="build.machine_exists"), OURS, NO_RECORD),
        (summary(State.FAILED, 2, code="build.machine_exists"), OURS, NO_RECORD),
        (summary(State.DELETED, code="build.machine_exists"), OURS, NO_RECORD),
        # What it explains.
        (summary(State.ACTIVE), OURS, AGREES),
        (summary(State.ACTIVE), BUILDING, AGREES),
        (summary(State.BUILDING), BUILDING, AGREES),
        (summary(State.BUILDING), OURS, RUNS),
        (summary(DELETING), OURS, AGREES),
        (summary((State.CLAIMING, State.DELETED)), OURS, RUNS),
        (summary((State.CLAIMING, State.BUILDING)), OURS, HARMFUL_RUNS),
        (summary(State.FAILED), OURS, HARMFUL_RUNS),
        (summary(State.FAILED), replace(OURS, destroying=True), AGREES),
        (summary(State.ACTIVE, 2), OURS, HARMFUL_RUNS),
        (summary(State.FAILED, highest_attempt=2), SECOND, HARMFUL_RUNS),
        (summary(State.DELETED, 2), OURS, RUNS),
        (summary(UNDOING), OURS, HARMFUL_RUNS),
        (moved(State.RESIZED), OURS, AGREES),
        (moved(CONFIRMING), OURS, HARMFUL_RUNS),
        (moved(DELETING), OURS, RUNS),
        # Before a destination is claimed the source is here; an unshelving has none.
        (summary((State.CLAIMING, State.PREPARING), source_attempt=1), OURS, AGREES),
        (summary((State.CLAIMING, State.PREPARING)), OURS, HARMFUL_RUNS),
    ],
)
def test_a_machine_that_a_host_lists(record: InstanceSummary | None, machine: Running, expected: str) -> None:
    assert outcome(record, machine) == expected
    assert outcome(record, machine, fenced=(HERE,)) == expected.replace(HARMFUL_RUNS, RUNS), "no breaker counts a loss"


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (summary(State.ACTIVE), LOST),
        (summary(State.RESIZED), LOST),
        (summary(DELETING), MISSING),
        (summary(UNDOING), MISSING),
        (summary(State.BUILDING), AGREES),
        (summary(State.FAILED), AGREES),
        (summary(State.ACTIVE, at_host=THERE), AGREES),
        (summary(State.ACTIVE, at_host=host(3)), AGREES),
        (moved(State.RESIZED), AGREES),
        (moved(CONFIRMING), MISSING),
        (moved(DELETING), MISSING),
        (moved((State.RELEASING, State.ACTIVE)), AGREES),
    ],
)
def test_a_machine_that_a_host_does_not_list(record: InstanceSummary, expected: str) -> None:
    assert outcome(record, None) == outcome(record, None, listed=True) == expected
    assert outcome(record, None, fenced=(HERE,)) == expected
    assert outcome(record, None, later=False) == expected.replace(LOST, HARMFUL_RESCAN).replace(MISSING, RESCAN)
    assert outcome(record, None, later=False, now=SINCE + 30.0) == AGREES


@pytest.mark.parametrize(
    ("record", "machine", "expected"),
    [
        (summary(State.ACTIVE, service="other"), OURS, RUNS),
        (summary(State.BUILDING, service="other"), BUILDING, RUNS),
        (moved(State.RESIZED, source_service="other"), OURS, RUNS),
        (moved(State.RESIZED, service="other"), OURS, AGREES),
        (summary(State.ACTIVE, service="other"), None, LOST),
        (moved(CONFIRMING, source_service="other"), None, MISSING),
    ],
)
def test_a_machine_of_another_service(record: InstanceSummary, machine: Running | None, expected: str) -> None:
    assert outcome(record, machine) == expected
    assert outcome(record, machine, listed=True) == AGREES


@pytest.mark.parametrize(
    ("later", "now", "expected"),
    [
        (True, SINCE + 1.0, HARMFUL_RUNS),
        (False, NOW, HARMFUL_RESCAN),
        (False, SINCE, AGREES),
        (False, SINCE + 30.0, AGREES),
        (False, SINCE + 30.1, HARMFUL_RESCAN),
        (False, SINCE - 0.1, HARMFUL_RESCAN),
    ],
)
def test_what_is_over_is_destroyed_by_a_later_scan_and_a_young_record_demands_none(
    later: bool, now: float, expected: str
) -> None:
    over = summary(State.ACTIVE, 2)
    assert outcome(over, OURS, later=later, now=now) == expected
    of_a_loss = expected.replace(HARMFUL_RUNS, RUNS).replace(HARMFUL_RESCAN, RESCAN)
    assert outcome(over, OURS, later=later, now=now, fenced=(HERE,)) == of_a_loss


@pytest.mark.parametrize(("age", "young"), [(-0.1, False), (0.0, True), (30.0, True), (30.1, False)])
def test_what_has_just_changed(age: float, young: bool) -> None:
    assert changed_recently(SINCE, now=SINCE + age, grace_s=30.0) is young


# --- What the record has ordered itself, and where an instance is.


def tried(attempt: int, how: str) -> tuple[AttemptRecord, ...]:
    return (AttemptRecord(attempt=attempt, host="h", outcome=how),)


MOVE = ActionInProgress(request_id="r", kind=ActionKind.MIGRATE, spec=SPEC, source=selection(1), source_attempt=1)
MOVED = Instance(
    uuid=UUID,
    state=State.RESIZED,
    spec=SPEC,
    selections=(selection(1), selection(2)),
    selection_index=1,
    attempt=3,
    action=MOVE,
)
GONE_ON = replace(MOVED, state=State.DESTROYING, next_state=State.ACTIVE)
AT_REST = replace(MOVED, state=State.ACTIVE, action=None)


@pytest.mark.parametrize(
    ("known", "attempt", "n", "ordered"),
    [
        (GONE_ON, 1, 1, True),
        (MOVED, 1, 1, False),
        (GONE_ON, 3, 2, False),
        (GONE_ON, 2, 1, False),
        (replace(AT_REST, ended_attempts=(1,)), 1, 1, True),
        (replace(AT_REST, ended_attempts=(1,)), 2, 1, False),
        (replace(AT_REST, history=tried(2, "failed")), 2, 1, True),
        (replace(AT_REST, history=tried(2, "timed_out")), 2, 1, True),
        (replace(AT_REST, history=tried(2, "lost")), 2, 1, False),
        (replace(AT_REST, history=tried(1, "failed")), 2, 1, False),
        (replace(GONE_ON, action=replace(MOVE, history=tried(2, "failed"))), 2, 1, True),
    ],
)
def test_a_listed_machine_whose_destruction_the_record_has_ordered(
    known: Instance, attempt: int, n: int, ordered: bool
) -> None:
    runs = e.MachineRunning(at=NOW, attempt=attempt, host_uuid=host(n), service="s1")
    assert is_commanded(known, runs) is ordered
    assert not is_commanded(known, e.MachineMissing(at=NOW, host_uuid=host(n), service="s1"))


FROM_S1_TO_S2 = replace(MOVED, selections=(selection(1), replace(selection(2), service="s2")))


@pytest.mark.parametrize(
    ("known", "services"),
    [
        (FROM_S1_TO_S2, "s1 s2"),
        (replace(FROM_S1_TO_S2, state=State.ACTIVE), "s1 s2"),
        (replace(FROM_S1_TO_S2, state=State.ACTIVE, action=None), "s2"),
        (replace(FROM_S1_TO_S2, state=State.ACTIVE, action=None, selection_index=0), "s1"),
        (replace(FROM_S1_TO_S2, action=replace(MOVE, source=None)), "s2"),
        (replace(FROM_S1_TO_S2, state=State.CLAIMING, next_state=State.PREPARING), "s1"),
        (replace(FROM_S1_TO_S2, state=State.OFFLOADED), ""),
        (replace(FROM_S1_TO_S2, state=State.RELEASING, next_state=State.OFFLOADED, action=None), ""),
        (Instance(uuid=UUID), ""),
    ],
)
def test_the_services_that_an_instance_is_at(known: Instance, services: str) -> None:
    assert " ".join(service for service in ("s1", "s2") if has_machine_at(known, service, ())) == services
    assert not has_machine_at(known, "s1", (HERE,)) and not has_machine_at(known, "s2", (THERE,))


# --- The newest report of each service.


def numbered(service: str, epoch: int, sequence: int) -> HostStates:
    return HostStates(service=service, cell="c", epoch=epoch, sequence=sequence)


def test_the_newest_report_of_a_service_stays_so() -> None:
    newest = NewestReports()
    assert newest.epoch("s1") == 0
    for epoch, sequence in ((4, 7), (3, 9), (4, 6)):
        newest.record(numbered("s1", epoch, sequence))
        assert newest.epoch("s1") == 4
    assert [newest.is_newer(numbered("s1", *at)) for at in ((4, 7), (4, 8), (5, 0), (3, 9))] == [
        False, True, True, False,
    ]  # fmt: skip


def test_the_service_that_has_been_quiet_longest_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listings, "MAX_SERVICES", 2)
    newest = NewestReports()
    for service in ("s1", "s2", "s1"):
        newest.record(numbered(service, 1, 1))
    assert [newest.epoch(service) for service in ("s1", "s2")] == [1, 1]
    newest.record(numbered("s3", 1, 1))
    assert [newest.epoch(service) for service in ("s1", "s2", "s3")] == [1, 0, 1]
