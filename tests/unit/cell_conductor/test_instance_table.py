"""What is read of a record, and the smallest steps: a row for each condition."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.actions import ActionKind
from bus.contracts.base import MAX_REASON
from bus.contracts.build import AttemptRecord, BuildEvent, BuildState
from bus.contracts.cell import Selection
from bus.contracts.placement import ClaimOutcome
from bus.contracts.stages import StageTimes
from cell_conductor.state import events as e
from cell_conductor.state import step as steps
from cell_conductor.state.fence import ClosedHosts, Fence, fenced_hosts, services_of_stale
from cell_conductor.state.instance import (
    FENCED,
    NOT_COMMANDED,
    ActionInProgress,
    Instance,
    State,
    claim_failure_reason,
    summary_of_attempts,
)
from cell_conductor.state.lease import Lease, LeaseState
from cell_conductor.state.ownership_proof import rescan_id
from cell_conductor.state.step import StepContext
from tests.unit.cell_conductor.scenario import DATABASE_ID, SPEC, UUID, host, selection

CONTEXT = StepContext(cell="c1", up=("s1", "s2"), database_id=DATABASE_ID, claim_retry_s=15.0, destroy_retry_s=30.0)


def at_service(n: int, service: str) -> Selection:
    return replace(selection(n), service=service)


def moved(source: int | None = 1, *, selection_index: int = 1, **more: Any) -> Instance:
    """From host 1 (attempt 3), by selections of hosts 1, 2 and 3 (attempt 4)."""
    action = ActionInProgress(
        request_id="m",
        kind=ActionKind.MIGRATE,
        spec=SPEC,
        source=None if source is None else at_service(source, "old"),
        source_attempt=3,
        started_at=100.0,
    )
    fields: dict[str, Any] = {
        "selections": tuple(selection(n) for n in (1, 2, 3)),
        "action": action,
        "attempt": 4,
        **more,
    }
    return Instance(uuid=UUID, state=State.FINISHING, spec=SPEC, selection_index=selection_index, **fields)


BUILT = replace(moved(selection_index=0), state=State.ACTIVE, action=None)
IN_PLACE = moved(2)


@pytest.mark.parametrize(
    ("instance", "is_in_place", "elsewhere", "service", "attempt"),
    [
        (BUILT, False, None, "", 0),
        (moved(), False, 1, "old", 3),
        (moved(selection_index=0), False, None, "old", 3),
        (moved(2, selection_index=0), False, None, "old", 3),
        (IN_PLACE, True, None, "old", 3),
        (moved(None), False, None, "", 3),
    ],
)
def test_where_the_machines_of_a_move_are(
    instance: Instance, is_in_place: bool, elsewhere: int | None, service: str, attempt: int
) -> None:
    assert instance.is_in_place is is_in_place
    assert instance.source_host_uuid == (None if elsewhere is None else host(elsewhere))
    assert (instance.source_service, instance.source_attempt) == (service, attempt)


def test_the_selections_and_attempts_of_a_record() -> None:
    instance = moved(highest_attempt=7)
    assert [one.host for one in instance.current_and_alternates] == ["host-2", "host-3"]
    assert [one.host for one in instance.alternates] == ["host-3"]
    assert (instance.current.host, instance.host_uuid) == ("host-2", host(2))
    assert (instance.last_attempt, instance.next_attempt) == (7, 8)
    assert (replace(instance, highest_attempt=2).last_attempt, replace(instance, highest_attempt=2).next_attempt) == (
        4,
        5,
    )
    assert (Instance(uuid=UUID).host_uuid, instance.phase) == (None, (State.FINISHING, None))


def tried(attempt: int, outcome: str = "failed", **more: Any) -> AttemptRecord:
    return AttemptRecord(attempt=attempt, host=f"host-{attempt}", outcome=outcome, **more)


@pytest.mark.parametrize(
    ("history", "words"),
    [
        ((), "0 of 3 hosts tried, none is left. "),
        ((tried(1),), "1 of 3 hosts tried, none is left. host-1: failed"),
        ((tried(1, NOT_COMMANDED), tried(2)),
         "1 of 3 hosts tried, none is left. host-1: not_commanded; host-2: failed"),
        ((tried(4, NOT_COMMANDED), tried(5, NOT_COMMANDED)), "0 of 5 hosts tried, none is left. host-4: not_commanded; "
         "host-5: not_commanded"),
        ((tried(1, code="x", reason="why"), tried(2, code="y")), "2 of 3 hosts tried, none is left. "
         "host-1: failed, x, why; host-2: failed, y"),
    ],
)  # fmt: skip
def test_the_history_of_an_instance(history: tuple[AttemptRecord, ...], words: str) -> None:
    assert summary_of_attempts(replace(BUILT, history=history)) == words


@pytest.mark.parametrize(
    ("outcomes", "reason", "why"),
    [
        ((ClaimOutcome.NO_CAPACITY,), "its own", ("max_retries_exceeded", "tries")),
        ((ClaimOutcome.NO_CAPACITY, ClaimOutcome.OVER_QUOTA), "its own", ("quota.exceeded", "its own")),
        ((ClaimOutcome.OVER_QUOTA,), "", ("quota.exceeded", "the project may not hold so much")),
    ],
)
def test_why_no_host_could_be_claimed(outcomes: tuple[ClaimOutcome, ...], reason: str, why: tuple[str, str]) -> None:
    event = e.ClaimRefused(at=1.0, attempt=1, outcomes=outcomes, reason=reason)
    assert claim_failure_reason(event, "tries") == why


# --- the smallest steps


STAMPS = StageTimes(requested=1.0)


@pytest.mark.parametrize(
    ("state", "terminal", "has_history", "code", "stage_times", "left"),
    [
        (BuildState.BUILDING, False, False, "given", None, STAMPS),
        (BuildState.BUILDING, True, False, "given", STAMPS, None),
        (BuildState.ACTIVE, True, True, "given", STAMPS, None),
        (BuildState.ACTIVE, False, True, "given", None, STAMPS),
        (BuildState.FAILED, True, True, "own", STAMPS, None),
        (BuildState.DELETED, True, True, "given", None, None),
        (BuildState.DELETING, False, False, "given", None, STAMPS),
    ],
)
def test_an_announcement_takes_the_next_number(  # noqa: PLR0917  (the columns of the table)
    state: BuildState,
    terminal: bool,
    has_history: bool,
    code: str,
    stage_times: StageTimes | None,
    left: StageTimes | None,
) -> None:
    known = replace(BUILT, history=(tried(1),), code="own", reason="its", stage_times=STAMPS, sequence=20)
    first = steps.destroy_current(known, CONTEXT)
    stepped = steps.emit_event(
        known, state, 9.0, CONTEXT, terminal=terminal, first=(first,), detail=("given", "why")
    )  # fmt: skip
    assert stepped.instance == replace(known, sequence=21, build_sequence=20, stage_times=left)
    assert stepped.commands == (first, BuildEvent(
        instance_uuid=UUID, project_id="p", state=state, sequence=20, terminal=terminal, cell="c1", host="host-1",
        host_uuid=host(1), attempt=4, code=code, reason="its" if code == "own" else "why",
        history=known.history if has_history else (), at=9.0, stage_times=stage_times,
    ))  # fmt: skip


def test_an_announcement_names_the_host_and_zone_that_there_are() -> None:
    zoned = replace(BUILT, selections=(replace(selection(1), zone="east"),))
    for known, where in ((zoned, ("host-1", host(1), "east")), (replace(BUILT, selections=()), (None, None, ""))):
        (event,) = steps.emit_event(known, BuildState.BUILDING, 9.0, CONTEXT).commands
        assert isinstance(event, BuildEvent) and (event.host, event.host_uuid, event.zone) == where


# --- whose machine a host reports


@pytest.mark.parametrize(
    ("instance", "attempt", "n", "is_ours", "is_source", "services"),
    [
        (moved(), 4, 2, True, False, ("new", "old")),
        (moved(), 3, 1, False, True, ("s1", "new")),
        (moved(), 4, 1, False, False, ("s1", "old")),
        (moved(), 3, 2, False, False, ("s1", "old")),
        (moved(), 4, 3, False, False, ("s1", "old")),
        (IN_PLACE, 3, 2, False, False, ("s1", "old")),
        (moved(None), 3, 1, False, False, ("s1", "")),
        (BUILT, 4, 1, True, False, ("new", "")),
    ],
)
def test_a_machine_is_followed_to_the_service_that_lists_it(  # noqa: PLR0917  (the columns of the table)
    instance: Instance, attempt: int, n: int, is_ours: bool, is_source: bool, services: tuple[str, str]
) -> None:
    event = e.MachineRunning(at=1.0, attempt=attempt, host_uuid=host(n), service="new")
    assert (steps.is_current_attempt(instance, event), steps.is_source(instance, event)) == (is_ours, is_source)
    assert steps.is_current(instance, attempt, host(n)) is is_ours
    after = steps.with_current_service(instance, event)
    assert (after.current.service, after.source_service) == services
    assert [one.service for one in after.selections if one is not after.current] == ["s1", "s1"]
    assert steps.with_current_service(after, event) is after
    assert (after is instance) is (not is_ours and not is_source)


@pytest.mark.parametrize(
    ("event", "here", "source"),
    [
        (e.Destroyed(at=1.0, attempt=4, host_uuid=host(2), service="s1"), True, False),
        (e.Destroyed(at=1.0, attempt=5, host_uuid=host(2), service="s1"), True, False),
        (e.Destroyed(at=1.0, attempt=3, host_uuid=host(2), service="s1"), False, False),
        (e.Destroyed(at=1.0, attempt=4, host_uuid=host(2), service="s2"), False, False),
        (e.Destroyed(at=1.0, attempt=3, host_uuid=host(1), service="old"), False, True),
        (e.Destroyed(at=1.0, attempt=2, host_uuid=host(1), service="old"), False, False),
        (e.Destroyed(at=1.0, attempt=3, host_uuid=host(1), service="s1"), False, False),
        (e.MachineMissing(at=1.0, host_uuid=host(2), service="x", rescans=(rescan_id(moved()),)), True, False),
        (e.MachineMissing(at=1.0, host_uuid=host(1), service="x", rescans=(rescan_id(moved()),)), False, True),
        (e.MachineMissing(at=1.0, host_uuid=host(2), service="s1", rescans=()), False, False),
        (e.MachineMissing(at=1.0, host_uuid=host(3), service="s1", rescans=(rescan_id(moved()),)), False, False),
    ],
)
def test_a_host_answers_that_no_machine_is_left(
    event: e.Destroyed | e.MachineMissing, here: bool, source: bool
) -> None:
    assert (steps.current_destroyed(moved(), event), steps.source_destroyed(moved(), event)) == (here, source)
    assert not steps.source_destroyed(moved(None), event)


@pytest.mark.parametrize("length", [MAX_REASON - 1, MAX_REASON, MAX_REASON + 1])
def test_a_reason_is_cut_at_its_bound(length: int) -> None:
    reason = "x" * length
    assert steps.truncate(reason) == (reason if length <= MAX_REASON else "x" * (MAX_REASON - 1) + "…")


# --- fences


def fences(*numbers: int) -> dict[str, Fence]:
    return {host(n): Fence(host_uuid=host(n), host=f"host-{n}", version=1) for n in numbers}


@pytest.mark.parametrize(
    ("instance", "numbers", "hosts"),
    [
        (moved(), (1, 2, 3), [2, 1]),
        (moved(), (1,), [1]),
        (moved(), (2,), [2]),
        (moved(), (3,), []),
        (IN_PLACE, (2,), [2]),
        (Instance(uuid=UUID), (1, 2, 3), []),
    ],
)
def test_the_fenced_hosts_of_an_instance(instance: Instance, numbers: tuple[int, ...], hosts: list[int]) -> None:
    assert fenced_hosts(instance, fences(*numbers)) == [host(n) for n in hosts]


DELETED = replace(moved(), state=State.DELETED, action=None)


@pytest.mark.parametrize(
    ("before", "after", "n", "lost"),
    [
        (moved(), DELETED, 2, ["s1"]),
        (moved(), DELETED, 1, ["old"]),
        (moved(), DELETED, 3, []),
        (moved(), moved(), 2, []),
        (IN_PLACE, DELETED, 2, ["s1"]),
        (moved(attempt=0), DELETED, 2, []),
        (Instance(uuid=UUID), DELETED, 2, []),
    ],
)
def test_the_machines_that_a_record_gives_up_on_a_fenced_host(
    before: Instance, after: Instance, n: int, lost: list[str]
) -> None:
    assert services_of_stale(before, after, host(n)) == tuple(lost)


def test_a_host_is_passed_over_while_it_is_fenced_or_its_service_is_down() -> None:
    down = {"s1": Lease(service="s1", epoch=1, state=LeaseState.SILENT)}
    hosts = ClosedHosts(down, fences(1, 2))
    there = [selection(1), at_service(2, "s2"), selection(3), at_service(4, "s2")]
    codes = [None if (why := hosts.closure_of(one)) is None else why.code for one in there]
    assert codes == [FENCED, FENCED, down["s1"].code, None]
    assert hosts.skipped(there, 5, 7.0) == tuple(
        AttemptRecord(attempt=5, host=one.host, outcome=NOT_COMMANDED, code=code, at=7.0)
        for one, code in zip(there, codes, strict=True)
        if code is not None
    )
