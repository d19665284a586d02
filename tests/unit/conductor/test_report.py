"""The disagreements of a host's report and the record."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.cell import UNKNOWN_ATTEMPT, ComputeHosts, HostReport, Running
from cell_conductor.domain.events import Event, HostMissing, HostRuns
from cell_conductor.domain.instance import Phase, State
from cell_conductor.domain.proof import rescan_id
from cell_conductor.domain.report import UNTRIED, Differences, Newest, Unexplained, UnexplainedKind, differences
from cell_conductor.store.port import Brief
from tests.unit.conductor.scenario import phase_of

HOST = "10000000-0000-4000-8000-000000000001"
OTHER = "10000000-0000-4000-8000-000000000002"
A = "00000000-0000-4000-8000-00000000000a"
SINCE = 100.0
DEPLOYMENT = "dddddddd-0000-4000-8000-000000000001"
ANOTHER = "dddddddd-0000-4000-8000-000000000002"


DELETING: Phase = (State.DESTROYING, State.DELETED)
CONFIRMING: Phase = (State.DESTROYING, State.ACTIVE)


def report(
    *running: tuple[str, int],
    named: bool = True,
    sequence: int = 1,
    epoch: int = 1,
    deployment: str | None = DEPLOYMENT,
    built: bool = True,
    destroying: bool = False,
) -> ComputeHosts:
    runs = tuple(
        Running(instance_uuid=uuid, attempt=attempt, deployment=deployment, built=built, destroying=destroying)
        for uuid, attempt in running
    )
    host = HostReport(uuid=HOST, name="host-1", running=runs if named else None)
    return ComputeHosts(service="s", cell="c", epoch=epoch, sequence=sequence, hosts=(host,))


def compared(made: ComputeHosts, *briefs: Brief, now: float = 201.0) -> Differences:
    return differences(made, briefs, deployment=DEPLOYMENT, now=now, grace_s=30.0)


def found(made: ComputeHosts, *briefs: Brief) -> list[Event]:
    """By a scan from after these records became what they are."""
    differs = compared(replace(made, rescans=tuple(rescan_id(one) for one in briefs)), *briefs)
    return [event for _, event in (*differs.events, *differs.harmful)]


def demanded(differs: Differences) -> tuple[tuple[str, str], ...]:
    """(host, rescan) of all that a later scan has to show."""
    return (*differs.rescans, *differs.harmful_rescans)


def brief(at: State | Phase, host: str = HOST, attempt: int = 1, service: str = "s") -> Brief:
    state, then = phase_of(at)
    return Brief(A, state, host, service, attempt, SINCE, then=then)


def test_agreement_publishes_nothing() -> None:
    assert found(report((A, 1)), brief(State.ACTIVE)) == []
    assert found(report((A, 1)), brief(DELETING)) == []
    assert found(report(named=False), brief(State.ACTIVE)) == []
    assert found(report(), brief(State.BUILDING)) == []
    assert found(report(), brief(State.ACTIVE, host=OTHER)) == []


def test_what_another_service_misses_is_looked_at_again_before_it_is_lost() -> None:
    """Only a scan that began after the record was what it is proves a loss, and no clock shows that."""
    for state in (State.ACTIVE, State.RESIZED, DELETING):
        record = brief(state, service="former")
        differs = compared(report(), record)
        assert (differs.events, differs.harmful, demanded(differs)) == ((), (), ((HOST, rescan_id(record)),))
        looked = compared(replace(report(), rescans=(rescan_id(record),)), record)
        (event,) = [event for _, event in (*looked.events, *looked.harmful)]
        assert isinstance(event, HostMissing) and (event.rescans, demanded(looked)) == ((rescan_id(record),), ())


def test_a_machine_without_our_mark_is_only_reported_whatever_its_uuid() -> None:
    """A client may build under the uuid of another's machine: that machine is never taken for the build's."""
    for deployment in (None, ANOTHER):
        for record in ([], [brief(State.BUILDING)], [brief(State.ACTIVE, OTHER)], [brief(State.FAILED)]):
            differs = compared(report((A, UNKNOWN_ATTEMPT), deployment=deployment), *record)
            assert [event for _, event in (*differs.events, *differs.harmful) if isinstance(event, HostRuns)] == []
            (one,) = differs.unexplained
            assert (one.kind, one.uuid, one.host_uuid) == (UnexplainedKind.FOREIGN, A, HOST)


def test_a_machine_whose_mark_was_removed_is_neither_lost_nor_destroyed() -> None:
    for state in (State.ACTIVE, DELETING):
        assert compared(report((A, 1), deployment=None), brief(state)) == Differences()


def test_a_machine_of_ours_that_no_record_proves_over_is_quarantined() -> None:
    """The record may be a backup: what was commanded after it is not in it."""
    for record, why in (
        ([], "no record"),
        ([brief(State.ACTIVE, attempt=2)], "newer than its record"),
        ([brief(State.FAILED, attempt=2)], "newer than its record"),
        ([brief(State.ACTIVE, OTHER, attempt=3)], "its record has this attempt on another host"),
    ):
        assert compared(report((A, 3)), *record) == Differences(
            (), (), (Unexplained(A, 3, HOST, UnexplainedKind.QUARANTINED, why),)
        )


def test_what_its_host_is_destroying_already_is_no_difference() -> None:
    for record in (
        [],
        [brief(State.FAILED)],
        [brief((State.CLAIMING, State.BUILDING))],
        [brief(State.ACTIVE, attempt=2)],
    ):
        assert compared(report((A, 1), destroying=True), *record) == Differences()


def test_a_machine_that_may_still_be_building_proves_nothing() -> None:
    assert found(report((A, 1), built=False), brief(State.BUILDING)) == []
    assert found(report((A, 1), built=False), brief(State.ACTIVE)) == [], "an operator's rebuild"
    (event,) = found(report((A, 1), built=False), brief(State.FAILED))
    assert isinstance(event, HostRuns)


def test_a_lost_result_a_fenced_attempt_and_a_wrong_host_are_reported() -> None:
    for state, host, attempt in (
        (State.BUILDING, HOST, 1),
        (State.ACTIVE, HOST, 2),
        (State.ACTIVE, OTHER, 2),
        (State.FAILED, HOST, 1),
        (State.DELETED, HOST, 1),
        (State.DELETED, OTHER, 0),
    ):
        (event,) = found(report((A, 1)), brief(state, host, attempt))
        assert isinstance(event, HostRuns) and (event.attempt, event.host_uuid, event.service) == (1, HOST, "s")


def test_a_host_that_changed_its_service_is_reported() -> None:
    """The heir of a dead service: what was sent to the dead one has to be sent again."""
    for state in (State.ACTIVE, DELETING):
        (event,) = found(report((A, 1)), brief(state, service="dead"))
        assert isinstance(event, HostRuns) and event.service == "s"


@pytest.mark.parametrize("service", ["s", "before"])
@pytest.mark.parametrize("state", [State.ACTIVE, DELETING])
def test_what_is_missing_counts_by_a_later_scan_only(state: State | Phase, service: str) -> None:
    record = brief(state, service=service)
    older = compared(report(), record)
    assert (older.events, older.harmful, demanded(older)) == ((), (), ((HOST, rescan_id(record)),))
    (event,) = found(report(), record)
    assert isinstance(event, HostMissing) and event.service == "s"


@pytest.mark.parametrize("made", [report(), report((A, 1))], ids=["missing", "over"])
def test_a_young_record_causes_no_scan(made: ComputeHosts) -> None:
    record = brief(State.ACTIVE, attempt=2)
    assert compared(made, record, now=SINCE + 30.0) == Differences()
    assert compared(made, record, now=SINCE + 30.1).harmful_rescans == ((HOST, rescan_id(record)),)


@pytest.mark.parametrize("made", [report(), report((A, 1))], ids=["missing", "over"])
def test_a_record_of_a_clock_that_was_a_day_ahead_is_no_young_one(made: ComputeHosts) -> None:
    """The machine that its host had lost was not looked for until that day had passed."""
    record = brief(State.ACTIVE, attempt=2)
    assert compared(made, record, now=SINCE - 86_400.0).harmful_rescans == ((HOST, rescan_id(record)),)


@pytest.mark.parametrize("lists", [False, True])
def test_neither_machine_of_a_move_is_missing_where_the_service_on_record_lists_the_host(lists: bool) -> None:
    """Two hosts of one uuid: the brief named no service of a source, so another one's report released it."""
    for record in (
        brief(DELETING, service="other"),
        replace(brief(CONFIRMING, OTHER, 2), source_host_uuid=HOST, source_service="other", source_attempt=1),
    ):
        made = replace(report(), rescans=(rescan_id(record),))
        differs = differences(made, [record], deployment=DEPLOYMENT, now=201.0, grace_s=30.0, may_have=lambda *_: lists)
        assert len(differs.events) == (not lists)


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("state", [State.ACTIVE, DELETING, CONFIRMING])
def test_a_machine_is_not_followed_while_the_service_on_record_lists_its_host(
    state: State | Phase, lists: bool
) -> None:
    """Two services that were up listed the same host: the orders were sent again at each report of one of them."""
    record = brief(state, service="other")
    if state == CONFIRMING:
        record = replace(brief(state, OTHER, 2), source_host_uuid=HOST, source_service="other", source_attempt=1)
    made = replace(report((A, 1)), rescans=(rescan_id(record),))
    differs = differences(made, [record], deployment=DEPLOYMENT, now=201.0, grace_s=30.0, may_have=lambda *_: lists)
    assert bool(differs.events or differs.harmful) is not lists


def test_older_reports_lose() -> None:
    newest = Newest()

    def take(sequence: int, epoch: int = 1) -> bool:
        named = report(sequence=sequence, epoch=epoch)
        is_newer = newest.is_newer(named)
        newest.note(named)
        return is_newer

    assert [take(5), take(5), take(4), take(6)] == [True, False, False, True]
    assert take(1, epoch=2)
    assert not take(7)


def test_a_machine_on_a_host_that_its_record_has_not_tried_is_quarantined() -> None:
    """Seed 13006: attempt 1 counted as over, because the set-back record had passed over its host."""
    for state, at, attempt in (
        ((State.CLAIMING, State.BUILDING), HOST, 1),
        (State.FAILED, HOST, 1),
        (State.ACTIVE, OTHER, 2),
    ):
        record = replace(brief(state, host=at, attempt=attempt), first_not_tried=True)
        differs = compared(report((A, 1)), record)
        assert [(one.kind, one.why) for one in differs.unexplained] == [(UnexplainedKind.QUARANTINED, UNTRIED)]
        assert not differs.harmful and HostRuns not in [type(event) for _, event in differs.events]
    gone = replace(brief(State.DELETED, host=OTHER, attempt=2), first_not_tried=True)
    assert [type(event) for event in found(report((A, 1)), gone)] == [HostRuns]
