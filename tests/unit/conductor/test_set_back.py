"""What a database that was set back proves, and what an event or a state says where it says nothing: tables."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from bus.clock import CLOCKS_APART_S
from bus.contracts.base import Refusal
from bus.contracts.moves import CellMove, Departure, MoveKind
from bus.contracts.stages import Stamps
from cell_conductor.domain import desires
from cell_conductor.domain import events as e
from cell_conductor.domain.desires import in_sql, in_text, states_where
from cell_conductor.domain.instance import Instance, Phase, State
from cell_conductor.domain.set_back import (
    SetBack,
    doubted_from,
    is_doubted_request,
    is_outdated,
    is_unsearched,
    marked_reused,
    numbered_on,
)
from cell_conductor.domain.table import step
from tests.unit.conductor.scenario import DELETE, PATIENCE, SPEC, UUID, queried, selection, spawned

AT = 1000.0
BACK, NEVER = SetBack(AT), SetBack()


@pytest.mark.parametrize(
    ("set_back", "at", "lacks"),
    [
        (NEVER, 0.0, False),
        (NEVER, 20.0, False),
        (SetBack(0.5), 20.0, True),
        (BACK, 0.0, True),
        (BACK, AT + 240.0, True),  # requested before, by a client whose clock is four minutes ahead
        (BACK, AT + CLOCKS_APART_S, True),
        (BACK, AT + CLOCKS_APART_S + 0.1, False),
        (SetBack(made_at=AT), 0.0, False),
        (SetBack(made_at=AT), 0.5, True),
        (SetBack(made_at=AT), AT, True),
        (SetBack(made_at=AT), AT + 0.1, False),
    ],
)
def test_what_a_database_may_have_no_record_of(set_back: SetBack, at: float, lacks: bool) -> None:
    assert set_back.may_lack(at) is lacks


def test_hosts_can_have_answered_since_the_record_and_the_set_back() -> None:
    ages = [BACK.doubted_for_s(since, 1500.0) for since in (900.0, 1200.0)]
    assert ages == [500.0, 300.0]


BEFORE, AFTER = (replace(queried(), requested_at=at) for at in (AT, AT + 999.0))


@pytest.mark.parametrize(
    ("event", "set_back", "doubted"),
    [
        (BEFORE, NEVER, False),
        (BEFORE, BACK, True),
        (AFTER, BACK, False),
        (replace(AFTER, attempt=2), NEVER, True),
        (replace(AFTER, is_query=True), NEVER, True),
        (replace(BEFORE, is_query=True), BACK, True),
        (replace(AFTER, stamps=Stamps(requested=AT)), BACK, True),
        (replace(BEFORE, stamps=Stamps(requested=AT + 999.0)), BACK, True),
        (replace(AFTER, stamps=Stamps(requested=AT + 999.0)), BACK, False),
    ],
)
def test_builds_that_a_lost_record_may_have_had(event: e.BuildRequested, set_back: SetBack, doubted: bool) -> None:
    assert is_doubted_request(event, set_back) is doubted
    unsearched = is_unsearched(UNKNOWN, event, set_back)
    assert unsearched is (doubted or event.is_query), "a query is searched for by the record alone"


KNOWN, UNKNOWN = Instance(uuid=UUID, spec=SPEC, selections=(selection(1),)), Instance(uuid=UUID)
TOMB, LEFT = replace(UNKNOWN, state=State.TOMBSTONE), replace(KNOWN, state=State.DEPARTED, stay=2)
QUERY, BEGUN = replace(AFTER, is_query=True), replace(DELETE, begun=True)


@pytest.mark.parametrize(
    ("known", "event", "set_back", "unsearched"),
    [
        (UNKNOWN, DELETE, BACK, True),
        (UNKNOWN, DELETE, NEVER, False),
        (UNKNOWN, BEGUN, NEVER, True),
        (TOMB, BEGUN, NEVER, True),
        (TOMB, DELETE, BACK, True),
        (KNOWN, BEGUN, BACK, False),
        (LEFT, replace(BEGUN, stay=2), BACK, False),
        (LEFT, replace(BEGUN, stay=3), NEVER, True),
        (LEFT, replace(DELETE, stay=3), NEVER, False),
        (replace(KNOWN, state=State.ACTIVE), replace(BEGUN, stay=3), BACK, False),
        (UNKNOWN, QUERY, NEVER, True),
        (TOMB, QUERY, NEVER, True),
        (KNOWN, QUERY, BACK, False),
        (UNKNOWN, replace(QUERY, found=()), NEVER, False),
        (UNKNOWN, replace(DELETE, found=()), BACK, False),
        (KNOWN, DELETE, BACK, False),
        (UNKNOWN, BEFORE, BACK, True),
        (KNOWN, BEFORE, BACK, True),
        (UNKNOWN, AFTER, BACK, False),
        (UNKNOWN, replace(BEFORE, found=()), BACK, False),
        (UNKNOWN, spawned(), BACK, False),
    ],
)
def test_requests_that_the_services_were_not_queried_about(
    known: Instance, event: e.Event, set_back: SetBack, unsearched: bool
) -> None:
    assert is_unsearched(known, event, set_back) is unsearched


def test_a_machine_that_no_record_explains_has_a_build_searched_for_and_nothing_else() -> None:
    assert is_unsearched(KNOWN, AFTER, NEVER, {UUID})
    assert not is_unsearched(KNOWN, replace(AFTER, found=()), NEVER, {UUID})
    assert not any(is_unsearched(KNOWN, event, NEVER, {UUID}) for event in (DELETE, QUERY, spawned()))


OLD = replace(KNOWN, state=State.ACTIVE, since=AT)
MOVES = e.move_event(CellMove(request_id=UUID, instance_uuid=UUID, project_id="p", kind=MoveKind.STOP), 1.0, "")


@pytest.mark.parametrize(
    ("record", "set_back", "outdated"),
    [
        (OLD, BACK, True),
        (OLD, NEVER, False),
        (replace(OLD, state=State.OFFLOADED), BACK, True),
        (replace(OLD, state=State.RESIZED), BACK, False),
        (replace(OLD, state=State.DEPARTED), BACK, False),
        (replace(OLD, since=AT + 999.0), BACK, False),
        (replace(OLD, since=AT + 999.0, doubted=True), BACK, True),
        (replace(OLD, doubted=True), SetBack(made_at=AT), True),
        (UNKNOWN, BACK, False),
    ],
)
def test_an_instance_at_rest_may_have_been_moved_since_the_backup(
    record: Instance, set_back: SetBack, outdated: bool
) -> None:
    assert is_outdated(record, set_back) is outdated
    assert is_unsearched(record, MOVES, set_back) is outdated
    assert not is_unsearched(record, replace(MOVES, found=()), set_back)
    for event in (e.MoveQueried, e.InstanceArrives):
        assert not is_unsearched(record, event(at=1.0, request=MOVES.request), set_back)


@pytest.mark.parametrize(
    ("set_back", "record", "event", "sequence"),
    [
        (BACK, 10, None, 1_000_000),
        (SetBack(made_at=AT), 10, None, 1_000_000),
        (SetBack(AT, made_at=AT - 1), 10, None, 1_000_000),
        (SetBack(AT - 1, made_at=AT), 10, None, 1_000_000),
        (BACK, 1_000_010, None, 1_010_010),  # by a clock that is behind the one before
        (BACK, 10, replace(AFTER, sequence=1_000_000), 1_000_001),
        (NEVER, 10, None, 10),
        (NEVER, 10, replace(AFTER, sequence=10), 11),
    ],
)
def test_announcements_go_on_above_every_lost_number(
    set_back: SetBack, record: int, event: e.BuildRequested | None, sequence: int
) -> None:
    assert numbered_on(Instance(uuid=UUID, sequence=record), set_back, event).sequence == sequence


def test_what_two_lost_records_announce_has_different_numbers() -> None:
    """Clients ignore a number that they have had (seed 4300411)."""
    query = replace(BEFORE, is_query=True, found=(), sequence=2)
    lost, now = (step(UNKNOWN, query, replace(PATIENCE, set_back=SetBack(AT + ago))) for ago in (0.0, 1.0))
    assert now.instance.sequence > lost.instance.sequence


@pytest.mark.parametrize(
    ("reused_from", "requested_at", "marked"), [(0, AT, 4), (0, AT + 999.0, 0), (2, AT, 2), (1, AT, 1)]
)
def test_the_first_number_that_may_be_given_out_twice_is_recorded_once(
    reused_from: int, requested_at: float, marked: int
) -> None:
    known = replace(KNOWN, attempt=1, newest=3, requested_at=requested_at, reused_from=reused_from)
    assert marked_reused(known, BACK).reused_from == marked


@pytest.mark.parametrize(
    ("doubted", "since", "reused_from", "marked"),
    [(False, AT, 0, 4), (False, AT, 2, 2), (False, AT, 1, 1), (True, AT, 0, None), (False, AT + 999.0, 0, None)],
)
def test_an_instance_that_is_as_before_the_set_back_may_have_been_numbered_on(
    doubted: bool, since: float, reused_from: int, marked: int | None
) -> None:
    known = replace(KNOWN, attempt=1, newest=3, sequence=10, doubted=doubted, since=since, reused_from=reused_from)
    after = doubted_from(known, BACK)
    if marked is None:
        assert after is known
        return
    assert (after.doubted, after.reused_from) == (True, marked)
    assert (after.newest, after.sequence) == (3, BACK.first_number)


# --- Events


def test_an_event_that_does_not_say_so_states_nothing_but_that_a_listed_machine_is_complete() -> None:
    unsaid = {
        (kind.__name__, one.name) for kind in e.EVENTS for one in msgspec.structs.fields(kind) if one.default is True
    }
    assert unsaid == {("HostRuns", "built")}


LEFT = Departure(cell="c2", spec=SPEC, image="i", last=selection(1), selections=(selection(2),), newest=1)


@pytest.mark.parametrize("given_up", [None, Refusal(code="x", reason="y")])
@pytest.mark.parametrize("is_query", [False, True])
@pytest.mark.parametrize("arrives", [False, True])
def test_a_request_begins_unless_it_is_a_query_or_given_up(
    given_up: Refusal | None, is_query: bool, arrives: bool
) -> None:
    message = CellMove(request_id=UUID, instance_uuid=UUID, project_id="p", kind=MoveKind.STOP)
    if arrives:
        message = replace(message, arrival=LEFT)
    kind = e.MoveRequested if given_up is None and not is_query else e.MoveQueried
    assert type(e.move_event(message, 1.0, "", given_up=given_up, is_query=is_query)) is (
        e.InstanceArrives if arrives else kind
    )


def test_a_request_that_does_not_say_so_is_no_query() -> None:
    assert not e.move_event(
        CellMove(request_id=UUID, instance_uuid=UUID, project_id="p", kind=MoveKind.STOP), 1.0, ""
    ).is_query


# --- States


def test_states_are_listed_in_sql_in_the_order_of_the_table() -> None:
    assert in_sql(desires.PURGED) == "'tombstone', 'deleted'"


@pytest.mark.parametrize(
    ("states", "named"),
    [
        (desires.DELETE_REQUESTED, "tombstone deleted claiming/deleted destroying/deleted releasing/deleted"),
        (
            desires.REFUSED,
            "tombstone deleted claiming/deleted destroying/deleted releasing/deleted failed releasing/failed",
        ),
        (desires.AT_REST, "tombstone failed deleted offloaded departed"),
        (desires.PURGED, "tombstone deleted"),
        (desires.PURGED_FAILED, "failed departed"),
        (desires.ELSEWHERE, "departed"),
        (
            desires.IN_DOUBT_AFTER_SET_BACK,
            "building claiming/building claiming/preparing destroying/active destroying/reverting destroying/departed"
            " releasing/active releasing/departed preparing handing_over finishing resized reverting restarting"
            " changing resizing destroying/offloaded releasing/offloaded",
        ),
        (desires.EVACUATED, "destroying/reverting finishing resized"),
        (desires.EVACUATED_IN_DOUBT, "preparing handing_over"),
        (
            desires.EXPECTED_HERE,
            "active resized destroying/deleted destroying/reverting destroying/offloaded",
        ),
        (
            desires.NOT_HERE,
            "tombstone failed deleted claiming/preparing releasing/offloaded offloaded departed",
        ),
        (desires.LEFT_WITH_ITS_SERVICE, "building preparing"),
        (states_where(lambda row: row.ends), "active failed deleted offloaded"),
        (states_where(lambda row: row.takes_machine), "active failed"),
        (states_where(lambda row: row.relies_on_fence), "destroying/offloaded releasing/offloaded finishing"),
    ],
)
def test_what_is_so_in_which_states(states: frozenset[Phase], named: str) -> None:
    assert {in_text(phase) for phase in states} == set(named.split())
