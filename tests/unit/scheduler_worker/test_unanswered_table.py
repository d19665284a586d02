"""Requests that have had no event for too long, a row for each condition: which are watched, queried, and how."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.actions import ActionKind, ActionState, CellAction, CellActionQuery, CellTransfer, CellTransferOut
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.cell import CellBuildQuery, CellDelete, InstanceSpec, Selection
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.records.action_record import ActionContext, RecordedAction, Transfer
from scheduler_worker.records.build_record import RecordedBuild, SinceBuild, effects
from scheduler_worker.upkeep.silence_rules import (
    BUILD,
    CELL_SILENT,
    CELL_UNKNOWN,
    DELETE,
    MAX_PAUSE_S,
    MAX_QUERIES,
    SILENT_AFTER,
    OpenRequest,
    Watched,
    look,
    messages_to_cell,
    open_action,
    open_build,
    open_now,
    silence,
)

UUID, MOVE, HOST = (f"{n}0000000-0000-4000-8000-000000000001" for n in "adb")
RECORD = RecordedBuild(instance_uuid=UUID, project_id="p", state=BuildState.BUILDING, sequence=10, cell="c1", code="x")
RECORDED = RecordedAction(
    request_id=MOVE,
    instance_uuid=UUID,
    project_id="p",
    kind=ActionKind.MIGRATE,
    digest=b"",
    state=ActionState.SCHEDULED,
    sequence=2,
    cell="c1",
    code="y",
)
KNOWN = ActionContext(
    action=RECORDED, build=RECORD, build_request=BuildRequest(instance_uuid=UUID, project_id="p", flavor="m1.small")
)
AWAITED = OpenRequest(MOVE, UUID, ActionKind.MIGRATE, "c1", 2, "y")


# --- what is awaited


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        (BuildState.ACCEPTED, BUILD),
        (BuildState.SCHEDULED, BUILD),
        (BuildState.BUILDING, BUILD),
        (BuildState.ACTIVE, None),
        (BuildState.FAILED, None),
        (BuildState.REFUSED, None),
        (BuildState.DELETING, DELETE),
        (BuildState.DELETED, None),
    ],
)
def test_a_build_is_awaited_by_its_state(state: BuildState, kind: str | None) -> None:
    awaited = open_build(replace(RECORD, state=state))
    assert awaited == (None if kind is None else OpenRequest(UUID, UUID, kind, "c1", 10, "x"))
    if awaited is not None:
        assert awaited.key == (UUID, UUID)
        assert open_build(replace(RECORD, state=state, cell=None)) == replace(awaited, cell="")


@pytest.mark.parametrize(("more", "awaited"), [({}, AWAITED), ({"terminal": True}, None), ({"cell": None}, None)])
def test_a_move_is_awaited_of_its_cell(more: dict[str, Any], awaited: OpenRequest | None) -> None:
    assert open_action(replace(RECORDED, **more)) == awaited and AWAITED.key == (MOVE, UUID)


UNDER_WAY, IDLE = SinceBuild(under_way=MOVE), SinceBuild()


@pytest.mark.parametrize(
    ("state", "instance", "is_open"),
    [
        (BuildState.DELETING, None, True),
        (BuildState.DELETING, IDLE, True),
        (BuildState.DELETING, UNDER_WAY, False),
        (BuildState.SCHEDULED, UNDER_WAY, True),
        (BuildState.ACTIVE, IDLE, False),
        (None, None, False),
    ],
)
def test_a_build_by_its_records_as_they_are_now(
    state: BuildState | None, instance: SinceBuild | None, is_open: bool
) -> None:
    build = None if state is None else replace(RECORD, state=state, instance=instance)
    seen = OpenRequest(UUID, UUID, BUILD, "c1", 3, "")
    now = open_now(seen, replace(KNOWN, build=build, action=None))
    assert now == (None if build is None else open_build(build))
    assert (now is not None) is is_open


@pytest.mark.parametrize(
    ("action", "now"),
    [
        (None, None),
        (RECORDED, AWAITED),
        (replace(RECORDED, terminal=True), None),
        (replace(RECORDED, instance_uuid=HOST), None),
    ],
)
def test_a_move_by_its_records_as_they_are_now(action: RecordedAction | None, now: OpenRequest | None) -> None:
    assert open_now(replace(AWAITED, sequence=1), replace(KNOWN, action=action, build=None)) == now


# --- what a pass finds

PAUSE_S = 60.0
SEEN = Watched(AWAITED, 0.0, 100.0, 0, 0)


@pytest.mark.parametrize(
    ("watched", "now_s", "request_", "after"),
    [
        (None, 5.0, AWAITED, Watched(AWAITED, 5.0, 65.0, 0, 0)),
        (SEEN, 99.0, AWAITED, SEEN),
        (SEEN, 100.0, AWAITED, Watched(AWAITED, 0.0, 220.0, 1, 1)),
        (replace(SEEN, queried=3), 100.0, AWAITED, Watched(AWAITED, 0.0, 100.0 + MAX_PAUSE_S, 4, 1)),
        (replace(SEEN, queried=2), 100.0, AWAITED, Watched(AWAITED, 0.0, 580.0, 3, 1)),
        *((replace(SEEN, queried=2, unanswered=2), 50.0, newer, Watched(newer, 50.0, 290.0, 2, 0))
          for newer in (replace(AWAITED, sequence=3), replace(AWAITED, cell="c2"), replace(AWAITED, kind="confirm"))),
        (replace(SEEN, queried=2), 50.0, replace(AWAITED, code="z"), replace(SEEN, queried=2)),
        (replace(SEEN, queried=2), 100.0, replace(AWAITED, sequence=3),
         Watched(replace(AWAITED, sequence=3), 100.0, 340.0, 2, 0)),
    ],
)  # fmt: skip
def test_a_request_is_queried_when_it_is_due(
    watched: Watched | None, now_s: float, request_: OpenRequest, after: Watched
) -> None:
    seen = {} if watched is None else {AWAITED.key: watched}
    found = look(seen, [request_], now_s=now_s, pause_s=PAUSE_S)
    assert found.watched == {AWAITED.key: after}
    queried = after.queried > (watched.queried if watched else 0)
    assert found.query == ((request_,) if queried else ())


@pytest.mark.parametrize(
    ("unanswered", "more", "silent", "waiting"),
    [
        (SILENT_AFTER - 2, {}, False, 0),
        (SILENT_AFTER - 1, {}, False, 1),
        (SILENT_AFTER, {}, True, 1),
        (SILENT_AFTER + 1, {}, True, 1),
        (SILENT_AFTER, {"code": CELL_SILENT}, False, 1),
        (SILENT_AFTER, {"code": CELL_UNKNOWN}, False, 1),
    ],
)
def test_a_request_is_silent_after_so_many_queries(
    unanswered: int, more: dict[str, Any], silent: bool, waiting: int
) -> None:
    request = replace(AWAITED, **more)
    found = look({request.key: replace(SEEN, unanswered=unanswered)}, [request], now_s=100.0, pause_s=PAUSE_S)
    assert (found.silent, found.waiting) == ((request,) if silent else (), waiting)


def test_no_more_than_a_bounded_number_is_queried_in_one_pass() -> None:
    requests = [replace(AWAITED, request_id=str(number)) for number in range(MAX_QUERIES + 2)]
    watched = {one.key: Watched(one, 0.0, 1.0) for one in requests}
    found = look(watched, requests, now_s=1.0, pause_s=PAUSE_S)
    assert found.query == tuple(requests[:MAX_QUERIES])
    assert [found.watched[one.key].due_s for one in requests[MAX_QUERIES - 1 :]] == [121.0, 1.0, 1.0]


# --- what the cell is sent

AWAY = CellAction(request_id=MOVE, instance_uuid=UUID, project_id="p", kind=ActionKind.UNSHELVE, to_cell="c1")
COMMAND = CellTransferOut(
    request_id=MOVE, instance_uuid=UUID, project_id="p", kind=ActionKind.UNSHELVE, to_cell="c2", attempt=1
)
LAST = Selection(host_uuid=HOST, host="h", service="s", allocations={})
ARRIVAL = replace(
    AWAY,
    transfer=CellTransfer(
        cell="c2", image="i", last=LAST, attempt=1,
        spec=InstanceSpec(instance_uuid=UUID, project_id="p", name="n", image="i", flavor="f"),
    ),
)  # fmt: skip
QUERY = CellActionQuery(request_id=MOVE, instance_uuid=UUID, project_id="p", kind=ActionKind.MIGRATE)
GONE, EARLY = (CellDelete(instance_uuid=UUID, project_id="p", may_have_started=begun) for begun in (True, False))


def leading(command: CellAction | CellTransferOut) -> Transfer:
    return Transfer(home="c1", away="c2", build=AWAY, command=command)


@pytest.mark.parametrize(
    ("command", "state", "sent"),
    [
        (None, BuildState.ACTIVE, (QUERY,)),
        (None, None, (QUERY,)),
        (COMMAND, BuildState.ACTIVE, (COMMAND,)),
        (COMMAND, None, (COMMAND,)),
        (ARRIVAL, BuildState.ACTIVE, (ARRIVAL,)),
        (None, BuildState.DELETING, (GONE, QUERY)),
        (None, BuildState.DELETED, (GONE, QUERY)),
        (COMMAND, BuildState.DELETING, (GONE, QUERY)),
        (ARRIVAL, BuildState.DELETING, (ARRIVAL, EARLY)),
        (ARRIVAL, BuildState.DELETED, (ARRIVAL, EARLY)),
    ],
)
def test_the_cell_of_a_move_by_what_it_has_to_do(
    command: CellAction | CellTransferOut | None, state: BuildState | None, sent: tuple[object, ...]
) -> None:
    build = None if state is None else replace(RECORD, state=state)
    known = replace(KNOWN, action=replace(RECORDED, transfer=command and leading(command)), build=build)
    numbered = tuple(
        replace(one, sequence=10) if build and isinstance(one, CellAction | CellTransferOut) else one for one in sent
    )
    assert messages_to_cell(AWAITED, known, SchedulerConfig(), 5.0) == numbered


def test_what_is_sent_again_has_the_numbers_that_are_on_record_now() -> None:
    build = replace(RECORD, sequence=40, instance=SinceBuild(first_attempt=2))
    known = replace(KNOWN, action=replace(RECORDED, transfer=leading(COMMAND)), build=build)
    assert messages_to_cell(AWAITED, known, SchedulerConfig(), 5.0) == (replace(COMMAND, sequence=40),)
    ended = replace(known, build=replace(build, state=BuildState.DELETING))
    assert messages_to_cell(AWAITED, ended, SchedulerConfig(), 5.0) == (replace(GONE, attempt=2), QUERY)


def test_the_cell_of_a_build_is_queried_and_that_of_a_delete_is_sent_it_again() -> None:
    building, deleting = (
        messages_to_cell(OpenRequest(UUID, UUID, kind, "c1", 10, ""), KNOWN, SchedulerConfig(), 5.0)
        for kind in (BUILD, DELETE)
    )
    assert deleting == (GONE,)
    (query,) = building
    assert isinstance(query, CellBuildQuery) and query.spec.instance_uuid == UUID


def test_a_silent_request_says_of_which_cell_since_when_and_whether_there_is_such_a_cell() -> None:
    watched = Watched(AWAITED, 100.0, 0.0, 9, 4)
    code, reason = silence(watched, 900.0, known=True)
    assert code == CELL_SILENT and all(part in reason for part in ("c1", "4 times", "800 s"))
    assert silence(watched, 900.0, known=False)[0] == CELL_UNKNOWN


# --- The command to delete: the copy that is sent first knows less than the one that is sent again.


def test_a_delete_names_the_first_attempt_of_the_instance_as_its_repeat_does() -> None:
    """A cell that was restored to where the instance had left it learns by that number that it has come back. The first
    command had none, so it answered with a departure that is no news, until a scheduler repeated the delete.
    """
    uuid = "00000000-0000-4000-8000-000000000001"
    build = RecordedBuild(
        instance_uuid=uuid, project_id="p", state=BuildState.DELETING, sequence=9, cell="c1",
        instance=SinceBuild(first_attempt=3),
    )  # fmt: skip
    (sent,) = [one.message for one in effects(BuildState.ACTIVE, build, 1.0)]
    asked = open_build(build)
    assert asked is not None
    (again,) = messages_to_cell(asked, ActionContext(build=build), SchedulerConfig(), 1.0)
    assert isinstance(sent, CellDelete) and isinstance(again, CellDelete)
    assert (sent.attempt, again.attempt) == (3, 3)
