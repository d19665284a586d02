"""Moves in doubt after a set-back: what the answers of all services decide, and that nothing else does."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

import pytest
from msgspec.structs import replace

from bus.contracts.cell import FoundMachine
from bus.contracts.moves import MoveEvent, MoveKind
from bus.contracts.placement import Claim
from cell_conductor.domain import events as e
from cell_conductor.domain.desires import in_text
from cell_conductor.domain.doubt import is_in_doubt, machine_query_of
from cell_conductor.domain.fences import Fence
from cell_conductor.domain.instance import Instance, Power, State
from cell_conductor.domain.report import is_over
from cell_conductor.domain.set_back import FORGOTTEN_ATTEMPTS, is_outdated
from cell_conductor.domain.steps import StepContext
from cell_conductor.domain.table import question_of, step
from tests.unit.conductor.move_scenario import MOVE, OTHER, ended, request, seen
from tests.unit.conductor.records import (
    BY_REVERT,
    GONE,
    IN_DOUBT,
    ON_1,
    ON_2,
    SOURCE_GONE,
    Case,
    at_source,
    brief,
    case,
    changing,
    fenced,
    in_place,
    moving,
    record,
    restarting,
    unshelving,
)
from tests.unit.conductor.scenario import PATIENCE, SPEC, UUID, answering, claimed, host, missed, selection, spawned

K, S = MoveKind, State
PARTED = replace(ON_2, allocations={host(2): {"VCPU": 2}, host(9): {"VF": 1}})
FOUND = FoundMachine(
    instance_uuid=UUID, host_uuid=host(3), host="host-3", service="s1", attempt=5, project_id="p", built=False
)
HOSTS = frozenset(host(n) for n in range(1, 6))


def unsure(state: State, then: State | None = None, move: dict[str, Any] | None = None, **other: Any) -> Instance:
    return unshelving(state, then, move, doubted=True, **other)


def resized(**move: Any) -> Instance:
    return moving(S.RESIZED, move=move, doubted=True, queried=False)


def undone(then: State = S.REVERTING, **move: Any) -> Instance:
    return moving(S.DESTROYING, then, {"lost_code": "x", **move}, doubted=True)


def doubted(state: State, then: State | None = None, move: dict[str, Any] | None = None, **other: Any) -> Instance:
    return moving(state, then, move, doubted=True, **other)


def leaving(state: State, then: State | None = None, move: dict[str, Any] | None = None, **other: Any) -> Instance:
    """For another cell; its host keeps its image, or has."""
    known = {"source": None, "source_attempt": 0, "to_cell": "c2", "offload": True, **(move or {})}
    return doubted(state, then, known, **other)


def runs(attempt: int, n: int | None = None, *, built: bool = True) -> e.HostRuns:
    return e.HostRuns(at=220.0, attempt=attempt, host_uuid=host(n or attempt), service="s1", built=built)


def on(n: int, attempt: int | None = None, **other: Any) -> FoundMachine:
    """A machine there; complete, and of the attempt that has the number of the host."""
    made = replace(FOUND, host_uuid=host(n), host=f"host-{n}", attempt=attempt or n, built=True)
    return replace(made, **other)


def searched(*machines: FoundMachine, hosts: frozenset[str] = HOSTS) -> e.InstanceSearched:
    """All services have answered, as they were asked by whatever record this is."""
    return e.InstanceSearched(
        at=220.0, query=ANY, incarnation=IN_DOUBT.set_back.incarnation, machines=machines, hosts=hosts
    )


WITHOUT_2 = HOSTS - {host(2)}
KEPT = replace(IN_DOUBT, kept={(host(2), UUID): 2})
LATER_KEPT = replace(IN_DOUBT, kept={(host(3), UUID): 5})
FENCED_2 = fenced(2, context=IN_DOUBT)
SOURCE, HERE, PART = on(1), on(2), on(2, built=False)
OFFLOADING = replace(changing(K.SHELVE, offload=True), doubted=True)
RESTARTS = replace(restarting(), doubted=True)
MOVED = "migrate: failed move.in_doubt"
END_2, UNDOING = "end 2@2", "migrate: undoing"

RESOLVED: list[Case] = [
    # The source alone is there: the move goes back.
    *(
        case(before, searched(SOURCE), "reverting", UNDOING, context=IN_DOUBT)
        for before in (at_source(doubted=True), doubted(S.CLAIMING, S.PREPARING))
    ),
    *(
        case(before, searched(*machines), "destroying/reverting", END_2, UNDOING, context=IN_DOUBT)
        for before in (
            doubted(S.PREPARING),
            doubted(S.HANDING_OVER),
            doubted(S.FINISHING, move={"finishing": True}),
            resized(),
            undone(),
        )
        for machines in ((SOURCE,), ())
    ),
    case(undone(), searched(SOURCE, hosts=WITHOUT_2), "destroying/reverting", END_2, UNDOING, context=IN_DOUBT),
    case(doubted(S.REVERTING), searched(SOURCE), "reverting", context=IN_DOUBT),
    # The destination is complete.
    *(
        case(before, searched(SOURCE, HERE), "resized", "migrate: done", context=IN_DOUBT)
        for before in (doubted(S.PREPARING), doubted(S.HANDING_OVER), doubted(S.FINISHING), undone())
    ),
    case(undone(answered=True), searched(SOURCE, HERE), "resized", "migrate: changing", context=IN_DOUBT),
    case(
        undone(**BY_REVERT),
        searched(SOURCE, HERE),
        "resized",
        "revert: failed move.in_doubt",
        "migrate: done",
        context=IN_DOUBT,
    ),
    case(
        doubted(S.FINISHING, move={"auto_confirm_s": 0.0}),
        searched(SOURCE, HERE),
        "destroying/active",
        "destroy 1@1",
        "migrate: done",
        context=IN_DOUBT,
    ),
    case(doubted(S.FINISHING), searched(HERE), "destroying/active", "destroy 1@1", "migrate: done", context=IN_DOUBT),
    case(resized(), searched(SOURCE, HERE), "resized", context=IN_DOUBT),
    case(resized(**BY_REVERT), searched(SOURCE, HERE), "resized", context=IN_DOUBT),
    case(resized(), searched(HERE, hosts=HOSTS - {host(1)}), "resized", context=IN_DOUBT),
    case(resized(), searched(HERE), "destroying/active", "destroy 1@1", context=IN_DOUBT),
    case(
        resized(**BY_REVERT),
        searched(HERE),
        "destroying/active",
        "destroy 1@1",
        "revert: refused move.source_lost",
        context=IN_DOUBT,
    ),
    case(doubted(S.DESTROYING, S.ACTIVE), searched(HERE), "destroying/active", "destroy 1@1", context=IN_DOUBT),
    case(doubted(S.RELEASING, S.ACTIVE), searched(HERE), "releasing/active", context=IN_DOUBT),
    # It is not complete: it is awaited, and ended unless it is complete by then. What is given up is not awaited.
    *(
        case(before, searched(SOURCE, PART), "finishing", END_2, context=IN_DOUBT)
        for before in (doubted(S.PREPARING), doubted(S.FINISHING), resized())
    ),
    case(undone(), searched(SOURCE, PART), "destroying/reverting", END_2, UNDOING, context=IN_DOUBT),
    # A later one is there: of an alternate of this move, or of what came after it.
    case(doubted(S.FINISHING), searched(SOURCE, on(3, 5)), "resized", "migrate: done", context=IN_DOUBT),
    *(
        case(before, searched(*machines, on(4, 5)), "claiming/active", *ended_, MOVED, context=IN_DOUBT)
        for before, ended_ in (
            (at_source(doubted=True), ()),
            (doubted(S.PREPARING), ()),
            (doubted(S.FINISHING), ()),
            (resized(), ()),
            (undone(), ()),
            (undone(**BY_REVERT), ("revert: failed move.in_doubt",)),
            (doubted(S.REVERTING, move={"handed_over": True}), ()),
        )
        for machines in ((SOURCE,), (SOURCE, HERE))
    ),
    case(undone(), searched(SOURCE, on(3, 5)), "claiming/active", MOVED, context=IN_DOUBT),
    *(
        case(before, searched(SOURCE, on(4, 5, built=False)), in_text(before.phase), context=IN_DOUBT)
        for before in (doubted(S.PREPARING), doubted(S.FINISHING), undone(), doubted(S.REVERTING), RESTARTS)
    ),
    case(
        doubted(S.DESTROYING, S.ACTIVE),
        searched(SOURCE, HERE, on(4, 5)),
        "destroying/active",
        "destroy 1@1",
        context=IN_DOUBT,
    ),
    case(
        doubted(S.FINISHING), searched(on(4, 5)), "destroying/active", "destroy 1@1", "migrate: done", context=IN_DOUBT
    ),
    *(
        case(doubted(S.FINISHING), searched(one), "destroying/reverting", END_2, UNDOING, context=IN_DOUBT)
        for one in (on(4, 5, project_id="q"), on(4, 5, foreign=True))
    ),
    # What is left where it was passed over hides no later one.
    *(
        case(before, searched(SOURCE, PART, on(3, 6)), "resized", "migrate: done", context=IN_DOUBT)
        for before in (doubted(S.PREPARING), doubted(S.FINISHING))
    ),
    case(unsure(S.FINISHING), searched(PART, on(3, 6)), "active", "unshelve: done", context=IN_DOUBT),
    case(unsure(S.FINISHING), searched(PART, on(3, 6, project_id="q")), "finishing", context=IN_DOUBT),
    # One machine, which is changed where it is.
    case(in_place(S.RESIZED, doubted=True, queried=False), searched(SOURCE), "resized", context=IN_DOUBT),
    case(in_place(S.RESIZING, doubted=True), searched(SOURCE), "resizing", "resize 1@1", context=IN_DOUBT),
    case(
        in_place(S.DESTROYING, S.REVERTING, doubted=True),
        searched(SOURCE),
        "destroying/reverting",
        "resize 1@1",
        context=IN_DOUBT,
    ),
    case(replace(changing(K.STOP), doubted=True), searched(HERE), "changing", "stop 2@2", context=IN_DOUBT),
    case(RESTARTS, searched(SOURCE), "restarting", "start 1@1", context=IN_DOUBT),
    # It was moved on since: nothing is started beside the later one.
    *(
        case(
            replace(changing(kind), doubted=True),
            searched(*own, on(3, 5)),
            "claiming/active",
            f"{kind}: failed move.in_doubt",
            context=IN_DOUBT,
        )
        for kind in (K.STOP, K.START, K.REBUILD)
        for own in ((), (HERE,))
    ),
    case(RESTARTS, searched(SOURCE, on(3, 5)), "claiming/active", MOVED, context=IN_DOUBT),
    # What the move itself has left is not later, nor is anything looked for in the place of a machine that is gone.
    case(
        replace(RESTARTS, newest=6),
        searched(SOURCE, on(2, 5, built=False)),
        "restarting",
        "start 1@1",
        context=IN_DOUBT,
    ),
    case(replace(changing(K.STOP), doubted=True), searched(), "changing", "stop 2@2", context=IN_DOUBT),
    case(
        in_place(S.RESIZING, doubted=True),
        searched(SOURCE, on(3, 5)),
        "claiming/active",
        "resize: failed move.in_doubt",
        context=IN_DOUBT,
    ),
    # Without a source: from its image.
    case(unsure(S.FINISHING), searched(HERE), "active", "unshelve: done", context=IN_DOUBT),
    case(unsure(S.DESTROYING, S.REVERTING), searched(HERE), "active", "unshelve: done", context=IN_DOUBT),
    case(unsure(S.FINISHING), searched(PART), "finishing", END_2, context=IN_DOUBT),
    *(
        case(before, event, "destroying/reverting", END_2, "unshelve: undoing", context=IN_DOUBT)
        for before in (unsure(S.FINISHING), unsure(S.DESTROYING, S.REVERTING))
        for event in (searched(), searched(hosts=WITHOUT_2))
    ),
    case(unsure(S.FINISHING), searched(), "finishing", context=FENCED_2),
    case(
        unsure(S.CLAIMING, S.PREPARING, position=0, attempt=1),
        searched(),
        "releasing/offloaded",
        "unshelve: undoing",
        context=fenced(1, context=IN_DOUBT),
    ),
    case(unsure(S.RELEASING, S.OFFLOADED), searched(), "releasing/offloaded", context=IN_DOUBT),
    case(unsure(S.RELEASING, S.OFFLOADED), searched(FOUND), "finishing", "end 5@3", context=IN_DOUBT),
    case(unsure(S.RELEASING, S.OFFLOADED), searched(on(3, 5)), "active", "unshelve: done", context=IN_DOUBT),
    case(
        unsure(S.RELEASING, S.OFFLOADED, attempt=6, newest=6),
        searched(on(3, 5)),
        "active",
        "unshelve: done",
        context=IN_DOUBT,
    ),
    case(
        unsure(S.RELEASING, S.OFFLOADED),
        searched(replace(FOUND, attempt=9), on(2, 6)),
        "active",
        "unshelve: done",
        context=IN_DOUBT,
    ),
    *(
        case(unsure(S.RELEASING, S.OFFLOADED), searched(*machines), "releasing/offloaded", context=IN_DOUBT)
        for machines in (
            (replace(FOUND, foreign=True),),
            (replace(FOUND, attempt=4),),
            (replace(FOUND, project_id="q"),),
            (FOUND, on(1, 4)),
            (FOUND, replace(FOUND, foreign=True, host_uuid=host(1))),
        )
    ),
    case(
        unsure(S.RELEASING, S.OFFLOADED, selections=(ON_1, PARTED)),
        searched(FOUND),
        "releasing/offloaded",
        context=IN_DOUBT,
    ),
    case(
        unsure(S.CLAIMING, S.PREPARING, position=0),
        searched(),
        "releasing/offloaded",
        "unshelve: undoing",
        context=IN_DOUBT,
    ),
    # It may be offloaded by now, with an image whose name is forgotten.
    case(OFFLOADING, searched(), "changing", context=IN_DOUBT),
    *(
        case(OFFLOADING, event, "changing", "snapshot 2@2", context=IN_DOUBT)
        for event in (searched(HERE), searched(hosts=WITHOUT_2))
    ),
    case(
        unsure(S.DESTROYING, S.OFFLOADED, {"kind": K.SHELVE}, position=0, selections=(ON_2,)),
        searched(HERE),
        "destroying/offloaded",
        "destroy 2@2",
        context=IN_DOUBT,
    ),
    case(
        unsure(S.DESTROYING, S.OFFLOADED, {"kind": K.SHELVE}, position=0, selections=(ON_2,)),
        searched(HERE, on(3, 5)),
        "active",
        "shelve: done",
        context=IN_DOUBT,
    ),
    # What an operator keeps is not ended, nor is anything begun in its place.
    case(unsure(S.FINISHING), searched(PART), "finishing", context=KEPT),
    case(unsure(S.FINISHING), searched(HERE), "finishing", context=KEPT),
    case(doubted(S.FINISHING), searched(SOURCE, HERE), "finishing", context=KEPT),
    case(unsure(S.RELEASING, S.OFFLOADED), searched(on(3, 5)), "releasing/offloaded", context=LATER_KEPT),
    # It leaves for another cell: without its machine it may have left, with its image under a forgotten name.
    case(leaving(S.CHANGING), searched(HERE), "changing", "snapshot 2@2", context=IN_DOUBT),
    case(leaving(S.CHANGING), searched(), "changing", context=IN_DOUBT),
    case(leaving(S.DESTROYING, S.OFFLOADED), searched(), "destroying/offloaded", "destroy 2@2", context=IN_DOUBT),
    case(leaving(S.RELEASING, S.OFFLOADED), searched(), "releasing/offloaded", context=IN_DOUBT),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), RESOLVED)
def test_the_answers_of_all_services_resolve_a_doubt(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    stepped = step(before, event, context)
    assert (in_text(stepped.instance.phase), brief(stepped)) == (phase, commands)
    if commands:
        assert not is_in_doubt(stepped.instance)
        assert stepped.instance.reused_from > 0
    if is_in_doubt(stepped.instance):
        assert isinstance(question_of(stepped.instance), e.MachineQuery)
        assert stepped.instance.deadline is not None


FAR = (replace(ON_1, service="s7"), ON_2, replace(selection(3), service="s3"))


@pytest.mark.parametrize(
    ("kind", "position", "services"),
    [
        (K.MIGRATE, 1, ("s1", "s7")),
        (K.EVACUATE, 1, ("s1",)),
        (K.MIGRATE, 0, ("s7", "s7", "s1", "s3")),
        (K.EVACUATE, 0, ("s1", "s3")),
    ],
)
def test_the_service_of_a_dead_source_is_not_awaited_without_a_limit(
    kind: MoveKind, position: int, services: tuple[str, ...]
) -> None:
    """By its client's statement it may never be back. A destination that is claimed by the record may run by now, on
    any of the hosts that it was to be tried on.
    """
    state = (S.FINISHING, None) if position else (S.CLAIMING, S.PREPARING)
    query = machine_query_of(doubted(*state, {"kind": kind, "source": FAR[0]}, selections=FAR, position=position))
    assert query is not None and query.awaited is e.Awaited.OF_PLACES
    assert tuple(service for service, _ in query.places) == services


@pytest.mark.parametrize("state", [S.FINISHING, S.REVERTING])
def test_an_instance_that_was_moved_on_is_where_it_was_moved_to(state: State) -> None:
    """What the record knows stays, in quarantine; but on a fenced host it is a loss."""
    before = doubted(state, move={"spec": replace(SPEC, flavor="before")})
    taking = step(before, searched(SOURCE, HERE, on(4, 5)), IN_DOUBT).instance
    claim = question_of(taking)
    assert isinstance(claim, Claim) and (claim.attempt, claim.migration) == (6, None)
    up = step(taking, e.ClaimRefused(at=221.0, attempt=6, consumer_changed=True), IN_DOUBT).instance
    assert (up.state, up.host_uuid, up.attempt, up.move, up.power) == (S.ACTIVE, host(4), 5, None, Power.RUNNING)
    assert up.spec is not None and up.spec.flavor == "before"
    assert is_outdated(replace(up, since=2000.0), IN_DOUBT.set_back)
    assert not any(is_over(replace(up, doubted=False), n, host(n)) for n in (1, 2))
    resized_there = in_place(S.RESIZED, move={"spec": replace(SPEC, flavor="before")}, doubted=True, queried=False)
    assert step(resized_there, searched(on(4, 5)), IN_DOUBT).instance.spec == SPEC
    lost = step(before, searched(SOURCE, on(4, 5)), fenced(1, context=IN_DOUBT)).instance
    assert [is_over(replace(lost, doubted=False), n, host(n)) for n in (1, 2)] == [True, False]


STOP = request(K.STOP, request_id=OTHER)


@pytest.mark.parametrize(
    ("event", "commands"),
    [
        (spawned(2), ()),
        (runs(2), ()),
        (GONE, ()),
        (SOURCE_GONE, ()),
        (e.HostFenced(at=220.0, host_uuid=host(2)), ()),
        (e.ServiceLost(at=220.0, service="s1", code="x"), ()),
        (e.MachineFound(at=220.0, machine=FOUND), ()),
        (STOP, ("stop: refused instance.busy",)),
        (request(K.CONFIRM, request_id=OTHER), ("confirm: refused move.in_doubt",)),
        (request(K.REVERT, request_id=OTHER), ("revert: refused move.in_doubt",)),
        (request(K.ABORT, request_id=OTHER), ("abort: refused move.in_doubt",)),
        (request(K.MIGRATE, request_id=MOVE), ()),
    ],
)
@pytest.mark.parametrize("before", [doubted(S.PREPARING), doubted(S.FINISHING), resized(), undone()])
def test_a_record_in_doubt_is_decided_by_no_single_word(
    before: Instance, event: e.Event, commands: tuple[str, ...]
) -> None:
    stepped = step(before, answering(before, event), IN_DOUBT)
    assert (stepped.instance.phase, brief(stepped)) == (before.phase, commands)


def test_no_client_waits_beyond_the_doubts_limit() -> None:
    """The services are queried on, less and less often."""
    before = undone(**BY_REVERT)
    early = step(before, e.TimedOut(at=1200.0), IN_DOUBT)
    assert (brief(early), early.instance.deadline) == ((), 1400.0)
    late = step(before, e.TimedOut(at=9000.0), IN_DOUBT)
    assert brief(late) == ("migrate: failed move.in_doubt", "revert: failed move.in_doubt")
    assert (late.instance.phase, late.instance.deadline) == (before.phase, 9600.0)
    assert step(late.instance, e.TimedOut(at=9600.0), IN_DOUBT).commands == ()


@pytest.mark.parametrize(
    ("before", "phase", "destroyed"),
    [
        (doubted(S.PREPARING), "destroying/deleted", ("destroy 2@2", "destroy 1@1")),
        (at_source(doubted=True), "destroying/deleted", ("destroy 1@1",)),
        (unsure(S.CLAIMING, S.PREPARING, position=0), "releasing/deleted", ()),
        (unsure(S.PREPARING), "destroying/deleted", ("destroy 2@2",)),
        (resized(), "destroying/deleted", ("destroy 2@2", "destroy 1@1")),
        (leaving(S.CHANGING), "destroying/deleted", ("destroy 2@2",)),
        (leaving(S.DESTROYING, S.OFFLOADED), "destroying/deleted", ("destroy 2@2",)),
    ],
)
def test_a_delete_in_doubt_ends_every_machine_that_the_move_may_have_made(
    before: Instance, phase: str, destroyed: tuple[str, ...]
) -> None:
    stepped = step(before, e.DeleteRequested(at=220.0, project_id="p"), IN_DOUBT)
    orders = tuple(one for one in brief(stepped) if one.startswith(("destroy", "end")))
    assert (in_text(stepped.instance.phase), orders) == (phase, destroyed)


@pytest.mark.parametrize("context", [IN_DOUBT, LATER_KEPT], ids=["", "kept"])
@pytest.mark.parametrize("machines", [(SOURCE,), (SOURCE, HERE), (on(3, 5),)], ids=["source", "both", "later"])
@pytest.mark.parametrize(
    ("before", "phase"),
    [
        (at_source(doubted=True, move={"delete": True}), "destroying/deleted"),
        (doubted(S.CLAIMING, S.PREPARING, {"delete": True}), "destroying/deleted"),
        (unsure(S.CLAIMING, S.PREPARING, {"delete": True}, position=0, attempt=1), "releasing/deleted"),
        (leaving(S.CHANGING, move={"delete": True}), "destroying/deleted"),
    ],
)
def test_what_is_deleted_is_not_continued(
    before: Instance, phase: str, machines: tuple[FoundMachine, ...], context: StepContext
) -> None:
    """Its delete waited for placement when the database was set back. No service is waited for, nor what is kept."""
    assert in_text(step(before, searched(*machines), context).instance.phase) == phase
    assert in_text(step(before, e.TimedOut(at=220.0), context).instance.phase) == phase


@pytest.mark.parametrize(
    "before",
    [
        doubted(S.CLAIMING, S.PREPARING, {"delete": True}),
        at_source(doubted=True, move={"delete": True}),
        leaving(S.PREPARING, move={"delete": True}),
        leaving(S.CLAIMING, S.PREPARING, {"delete": True}),
    ],
)
def test_a_repeated_delete_of_what_is_deleted_in_doubt_is_answered(before: Instance) -> None:
    """The record became `finishing`, which broke an invariant, or `preparing` at its source, which was then checked."""
    stepped = step(before, e.DeleteRequested(at=220.0, project_id="p"), IN_DOUBT)
    assert (stepped.instance.phase, brief(stepped)) == (before.phase, ("build: deleting",))


def test_a_doubt_that_is_resolved_numbers_what_it_gives_out_as_unproved() -> None:
    after = step(doubted(S.PREPARING), searched(SOURCE), IN_DOUBT).instance
    assert (after.doubted, after.reused_from) == (False, 5)
    again = step(doubted(S.PREPARING, reused_from=3), searched(SOURCE), IN_DOUBT).instance
    assert again.reused_from == 3


def test_a_release_without_a_source_is_numbered_above_all_that_is_forgotten() -> None:
    after = step(unsure(S.FINISHING), searched(), IN_DOUBT).instance
    assert after.newest == 4 + FORGOTTEN_ATTEMPTS


# --- A build in doubt


def building(then: State | None = None, **other: Any) -> Instance:
    """Attempt 2 on host 2, or a claim of what follows."""
    return record(S.BUILDING if then is None else S.CLAIMING, then, doubted=True, **other)


CLAIMS = building(S.BUILDING)
SILENT = replace(searched(), silent=frozenset({"s1"}))
OTHERS_SILENT = replace(searched(), silent=frozenset({"s9"}))

BUILDS: list[Case] = [
    # Its host has it.
    case(building(), searched(HERE), "active", "build: active", context=IN_DOUBT),
    case(building(), searched(PART), "building", context=IN_DOUBT),
    case(building(), searched(HERE, on(1, 1)), "active", "build: active", context=IN_DOUBT),
    case(building(), searched(HERE, on(3, 5, built=False)), "active", "build: active", context=IN_DOUBT),
    # Another one has a later one, or one that the record has not tried has any.
    case(building(), searched(HERE, on(3, 5)), "claiming/active", context=IN_DOUBT),
    case(building(), searched(PART, on(3, 5)), "claiming/active", context=IN_DOUBT),
    case(building(), searched(on(3, 1)), "claiming/active", context=IN_DOUBT),
    case(CLAIMS, searched(on(3, 1)), "claiming/active", context=IN_DOUBT),
    case(building(), searched(on(3, 5, project_id="q")), "releasing/failed", context=IN_DOUBT),
    *(
        case(building(), searched(own, on(3, 5, project_id=project)), phase, *announced, context=IN_DOUBT)
        for own, phase, announced in ((HERE, "active", ("build: active",)), (PART, "building", ()))
        for project in ("q", None)
    ),
    case(building(), searched(on(3, 5), on(4, 6, project_id="q")), "claiming/active", context=IN_DOUBT),
    # None has one: its host has the last word, or what it claims is claimed.
    case(building(), searched(), "building", END_2, context=IN_DOUBT),
    case(building(), searched(on(3, 5, foreign=True)), "building", END_2, context=IN_DOUBT),
    case(building(), searched(replace(HERE, foreign=True)), "building", END_2, context=IN_DOUBT),
    case(building(), searched(on(1, 1)), "building", END_2, context=IN_DOUBT),
    case(CLAIMS, searched(HERE), "claiming/building", context=IN_DOUBT),
    # A service was silent until the doubt's limit: it may have one.
    *(
        case(before, event, "releasing/failed", *ended, context=IN_DOUBT)
        for before, event, ended in (
            (building(), SILENT, ()),
            (building(), OTHERS_SILENT, (END_2,)),
            (CLAIMS, SILENT, ()),
            (CLAIMS, OTHERS_SILENT, ()),
        )
    ),
    # One word.
    case(building(), spawned(2), "active", "build: active", context=IN_DOUBT),
    case(building(), runs(2), "active", "build: active", context=IN_DOUBT),
    case(building(), runs(2, built=False), "building", context=IN_DOUBT),
    case(building(), spawned(1), "building", context=IN_DOUBT),
    case(CLAIMS, spawned(2), "claiming/building", context=IN_DOUBT),
    case(building(), GONE, "building", context=IN_DOUBT),
    case(building(), e.TimedOut(at=9e3), "building", context=IN_DOUBT),
    case(building(), e.ServiceLost(at=220.0, service="s1", code="x"), "building", context=IN_DOUBT),
    case(building(), e.HostFenced(at=220.0, host_uuid=host(2)), "building", context=FENCED_2),
    case(building(), STOP, "building", "stop: refused instance.not_active", context=IN_DOUBT),
    case(
        building(),
        e.DeleteRequested(at=220.0, project_id="p"),
        "destroying/deleted",
        "destroy 2@2",
        "build: deleting",
        context=IN_DOUBT,
    ),
]


@pytest.mark.parametrize(("before", "event", "context", "phase", "commands"), BUILDS)
def test_a_build_in_doubt(
    before: Instance, event: e.Event, context: StepContext, phase: str, commands: tuple[str, ...]
) -> None:
    stepped = step(before, event, context)
    assert (in_text(stepped.instance.phase), brief(stepped)) == (phase, commands)


def test_a_host_without_a_build_in_doubt_has_it_searched_for_at_once() -> None:
    assert step(building(), GONE, IN_DOUBT).instance.deadline == GONE.at
    assert step(building(), replace(GONE, attempt=1), IN_DOUBT).instance == building()


@pytest.mark.parametrize("reused_from", [0, 1, 2, 4])
def test_what_a_host_has_ended_after_a_doubt_proves_nothing_about_what_may_run(reused_from: int) -> None:
    """A second service of the same name had answered, and the machine was destroyed when the first one was back."""
    asked = step(building(reused_from=reused_from), searched(), IN_DOUBT).instance
    assert (asked.doubted, asked.queried, asked.reused_from) == (False, True, min(reused_from or 2, 2))
    ended = step(asked, GONE, IN_DOUBT)
    assert (in_text(ended.instance.phase), ended.commands) == ("claiming/building", ())
    assert [one.host_uuid for one in ended.instance.alternates] == [host(3)]
    last = step(replace(asked, selections=(ON_1, ON_2)), GONE, IN_DOUBT).instance
    failed = step(last, answering(last, e.Released(at=330.0, consumer=UUID)), IN_DOUBT).instance
    assert (failed.state, failed.doubted) == (S.FAILED, False)
    claimed_3 = step(ended.instance, answering(ended.instance, claimed(5)), IN_DOUBT).instance
    for known in (asked, claimed_3, last, failed):
        assert not is_over(known, 2, host(2))


@pytest.mark.parametrize("answer_", [spawned(2), runs(2)])
def test_a_destination_that_is_complete_after_all_has_arrived(answer_: e.Event) -> None:
    """The search had come before the command to build, or had asked a second service of the same name."""
    back = step(doubted(S.FINISHING), searched(SOURCE), IN_DOUBT).instance
    stepped = step(back, answer_, IN_DOUBT)
    assert (in_text(stepped.instance.phase), brief(stepped)) == ("resized", ("migrate: done",))
    assert step(back, runs(2, built=False), IN_DOUBT).instance.phase == back.phase
    assert step(back, GONE, IN_DOUBT).instance.state is S.REVERTING


@pytest.mark.parametrize(
    "events",
    [
        (searched(SOURCE, HERE), request(K.REVERT, request_id=OTHER), seen(), GONE),
        (searched(SOURCE, PART), GONE),
    ],
    ids=["reverted", "ended"],
)
def test_the_source_of_a_move_that_went_on_in_doubt_is_started_by_its_way_back(events: tuple[e.Event, ...]) -> None:
    """By the record, which is from before the hand-over, it had not been stopped."""
    now = doubted(S.PREPARING, selections=(ON_1, ON_2))
    for event in (*events, e.Reverted(at=320.0, attempt=5, consumer_generation=9)):
        stepped = step(now, answering(now, event), IN_DOUBT)
        now = stepped.instance
    assert (now.state, brief(stepped)) == (S.RESTARTING, ("start 1@1", "migrate: undoing"))


def test_what_may_be_the_only_machine_is_not_given_up_by_a_fence() -> None:
    back = step(unsure(S.FINISHING), searched(), IN_DOUBT).instance
    assert step(back, e.HostFenced(at=230.0, host_uuid=host(2)), FENCED_2).instance is back
    certain = unshelving(S.DESTROYING, S.REVERTING, queried=False)
    assert step(certain, e.HostFenced(at=230.0, host_uuid=host(2)), FENCED_2).instance is not certain


@pytest.mark.parametrize(("event", "is_sure"), [(searched(HERE), True), (spawned(2), False)])
def test_one_hosts_word_proves_no_more_than_that_its_machine_runs(event: e.Event, is_sure: bool) -> None:
    """A later one may be elsewhere: it is searched for before the next request."""
    up = step(building(), event, IN_DOUBT).instance
    assert up.state is S.ACTIVE and is_outdated(replace(up, since=2000.0), IN_DOUBT.set_back) is not is_sure
    silent = step(building(), replace(searched(HERE), silent=frozenset({"s9"})), IN_DOUBT).instance
    assert silent.doubted


def test_a_machine_that_its_silent_host_may_have_is_kept() -> None:
    ended = step(building(), SILENT, IN_DOUBT).instance
    assert (ended.code, ended.doubted) == ("build.outcome_unknown", True)
    assert not is_over(ended, 2, host(2))
    late = step(ended, searched(HERE), IN_DOUBT).instance
    assert in_text(late.phase) == "claiming/active"


# --- A request for an instance whose record is older than a set-back: its later machine is the instance's

LATER = replace(FOUND, built=True)
REFUSED, BEGUN = ("move.in_doubt",), ("",)


def at_rest(state: State = S.ACTIVE, **other: Any) -> Instance:
    """On host 2 since before the set-back; attempts up to 4 were given out."""
    return record(state, **{"selections": (ON_2,), "position": 0, "deadline": None, "queried": False, **other})


def offloaded(**other: Any) -> Instance:
    return at_rest(S.OFFLOADED, power=Power.SHELVED, image="kept", **other)


@pytest.mark.parametrize(
    ("before", "found", "context", "phase", "codes"),
    [
        (at_rest(), (LATER,), IN_DOUBT, "claiming/active", REFUSED),
        (offloaded(), (LATER,), IN_DOUBT, "claiming/active", REFUSED),
        (at_rest(), (), IN_DOUBT, "claiming/preparing", BEGUN),
        (offloaded(), (), IN_DOUBT, "claiming/preparing", BEGUN),
        (at_rest(), None, IN_DOUBT, "claiming/preparing", BEGUN),
        (at_rest(), (LATER,), PATIENCE, "claiming/preparing", BEGUN),
        (at_rest(since=2000.0), (LATER,), IN_DOUBT, "claiming/preparing", BEGUN),
        (at_rest(since=2000.0, doubted=True), (LATER,), IN_DOUBT, "claiming/active", REFUSED),
        (at_rest(), (replace(LATER, built=False),), IN_DOUBT, "active", REFUSED),
        (at_rest(), (replace(LATER, project_id="q"),), IN_DOUBT, "active", REFUSED),
        (at_rest(selections=(replace(PARTED, host_uuid=host(8)),)), (LATER,), IN_DOUBT, "active", REFUSED),
        (offloaded(), (replace(LATER, project_id=None),), IN_DOUBT, "offloaded", REFUSED),
        (at_rest(), (LATER, replace(LATER, attempt=6, built=False)), IN_DOUBT, "claiming/active", REFUSED),
        (at_rest(), (replace(LATER, attempt=6), replace(LATER, built=False)), IN_DOUBT, "claiming/active", REFUSED),
        (at_rest(), (replace(LATER, attempt=4),), IN_DOUBT, "claiming/preparing", BEGUN),
        (at_rest(reused_from=4), (replace(LATER, attempt=4),), IN_DOUBT, "claiming/active", REFUSED),
        (at_rest(), (replace(LATER, attempt=2, host_uuid=host(2)),), IN_DOUBT, "claiming/preparing", BEGUN),
        (at_rest(), (replace(LATER, attempt=2),), IN_DOUBT, "active", REFUSED),
        (at_rest(reused_from=1), (replace(LATER, attempt=1),), IN_DOUBT, "claiming/preparing", BEGUN),
    ],
)
def test_a_later_machine_than_the_record_has_is_taken_over_before_a_request_begins(
    before: Instance, found: tuple[FoundMachine, ...] | None, context: StepContext, phase: str, codes: tuple[str, ...]
) -> None:
    """A second machine was built beside it (never_two_running, seeds 2, 5 and 10 of `moved_since_the_backup`)."""
    kind = K.UNSHELVE if before.state is S.OFFLOADED else K.MIGRATE
    stepped = step(before, replace(request(kind, 1), found=found), context)
    told = tuple(one.code for one in stepped.commands if isinstance(one, MoveEvent))
    assert (in_text(stepped.instance.phase), told) == (phase, codes)


def test_what_is_later_still_than_the_machine_that_is_taken_over_holds_the_next_request() -> None:
    """It may be left where it was passed over, and never be complete, or be made by a move from the one that is."""
    building = replace(LATER, host_uuid=host(4), attempt=6, built=False)
    now = step(at_rest(), replace(request(K.MIGRATE, 1), found=(LATER, building)), IN_DOUBT).instance
    now = step(now, e.ClaimRefused(at=2001.0, attempt=6, consumer_changed=True), IN_DOUBT).instance
    assert (now.state, now.attempt) == (S.ACTIVE, 5)
    assert is_outdated(replace(now, since=2001.0), IN_DOUBT.set_back)
    again = replace(request(K.MIGRATE, 1, request_id=OTHER), found=(LATER, building))
    assert step(now, again, IN_DOUBT).instance.state is S.ACTIVE


@pytest.mark.parametrize(
    ("before", "power", "image"),
    [
        (offloaded(), Power.RUNNING, ""),
        (at_rest(power=Power.SHELVED, image="kept"), Power.RUNNING, ""),
        (at_rest(power=Power.STOPPED, reused_from=4), Power.STOPPED, ""),
    ],
)
def test_the_instance_goes_on_with_its_later_machine(before: Instance, power: Power, image: str) -> None:
    taking = step(before, replace(request(K.UNSHELVE, 1), found=(LATER,)), IN_DOUBT).instance
    claim = question_of(taking)
    assert isinstance(claim, Claim) and (claim.attempt, claim.migration, taking.move) == (6, None, None)
    up = step(taking, e.ClaimRefused(at=221.0, attempt=6, consumer_changed=True), IN_DOUBT)
    assert (up.instance.state, up.instance.host_uuid, up.instance.attempt) == (S.ACTIVE, host(3), 5)
    assert (up.instance.power, up.instance.image, up.instance.doubted) == (power, image, False)
    assert up.instance.sequence > 1000
    assert not is_over(up.instance, before.attempt, host(2)), "the move that made the later one may have been undone"
    fenced = replace(IN_DOUBT, fences={host(2): Fence(host_uuid=host(2), host="host-2", version=1)})
    lost = step(before, replace(request(K.UNSHELVE, 1), found=(LATER,)), fenced).instance
    assert is_over(lost, before.attempt, host(2)), "its host destroys it before it is used again"
    again = step(up.instance, replace(request(K.MIGRATE, 1, request_id=OTHER), found=()), IN_DOUBT)
    assert again.instance.phase == (S.CLAIMING, S.PREPARING)


@pytest.mark.parametrize(
    ("known", "events", "phase"),
    [
        (record(S.BUILDING, doubted=True), [spawned(2)], "active"),
        (record(S.BUILDING, doubted=True), [runs(2)], "active"),
        (
            moving(S.FINISHING, doubted=True, move={"auto_confirm_s": 0.0}),
            [searched(SOURCE, HERE), SOURCE_GONE],
            "releasing/active",
        ),
        (resized(auto_confirm_s=5.0), [searched(SOURCE, HERE), e.TimedOut(at=2000.0), SOURCE_GONE], "releasing/active"),
        (resized(), [searched(HERE), SOURCE_GONE], "releasing/active"),
        (unshelving(S.FINISHING, doubted=True), [searched(HERE)], "active"),
    ],
)
def test_the_machine_on_record_is_no_proof_that_there_is_no_later_one(
    known: Instance, events: list[e.Event], phase: str
) -> None:
    """Its host had been silent, and the instance was moved, before the database was set back to this record: it came
    up, and when its host had carried out the order to destroy it the claim of the later machine was released.
    """
    now = known
    for event in events:
        now = step(now, event, IN_DOUBT).instance
    assert in_text(now.phase) == phase
    if phase == "releasing/active":
        now = step(now, e.Released(at=2100.0, consumer=MOVE), IN_DOUBT).instance
    assert now.state is S.ACTIVE and is_outdated(replace(now, since=2100.0), IN_DOUBT.set_back)
    lost = step(now, missed(now, 2), IN_DOUBT).instance
    assert in_text(lost.phase) == "releasing/failed" and machine_query_of(lost) is not None


@pytest.mark.parametrize("known", [at_rest(), offloaded(), at_rest(since=2000.0, doubted=True)])
def test_an_instance_is_searched_for_once_after_a_set_back(known: Instance) -> None:
    """Every request for it queried every service, for as long as none of them changed its state."""
    refused = replace(request(K.REVERT), at=2000.0, found=())
    assert is_outdated(known, IN_DOUBT.set_back)
    assert not is_outdated(step(known, refused, IN_DOUBT).instance, IN_DOUBT.set_back)


def test_an_offload_is_no_proof_that_there_is_no_later_machine() -> None:
    """The shelving had failed and it was migrated; set back to the snapshot, and the later host's service is down."""
    now = step(OFFLOADING, replace(searched(HERE), silent=frozenset({"s9"})), IN_DOUBT).instance
    now = step(now, ended(now, 2, 2, image="i"), IN_DOUBT).instance
    now = step(now, GONE, IN_DOUBT).instance
    assert in_text(now.phase) == "releasing/offloaded"
    at_rest = step(now, answering(now, e.Released(at=9000.0, consumer=UUID)), IN_DOUBT).instance
    assert at_rest.state is S.OFFLOADED and is_outdated(at_rest, IN_DOUBT.set_back)
