"""Requests that came again, that wait, or that are silent."""

from __future__ import annotations

from itertools import pairwise

import pytest
from msgspec.structs import replace

from bus.consuming.given_up import EXPIRED
from bus.consuming.outcome import Done, Received, Wait
from bus.contracts.base import Meta, Refusal
from bus.contracts.build import AttemptRecord, BuildAccepted, BuildEvent, BuildRecord, BuildRequest, BuildState
from bus.contracts.cell import BuildsWaiting, WaitingBuild
from bus.contracts.cell_queries import CellBuildQuery
from bus.contracts.moves import MoveKind, MoveState
from scheduler_worker.config import Flavor, SchedulerConfig
from scheduler_worker.domain import fleet
from scheduler_worker.domain.admission import (
    Admission,
    Answered,
    Continue,
    PendingBuild,
    Start,
    admit_expired,
    admit_known,
    admit_new,
    admit_repeated,
    pending_build,
)
from scheduler_worker.domain.builds import Author, BuildStatus, RecordedBuild
from scheduler_worker.domain.deletes import UNKNOWN
from scheduler_worker.domain.fleet import WaitingTable
from scheduler_worker.domain.recorded_moves import MoveContext, RecordedMove
from scheduler_worker.domain.requests import LETTERS, TOO_OLD, RequestDelivery, delivery_of
from scheduler_worker.domain.unanswered import (
    CELL_SILENT,
    CELL_UNKNOWN,
    MAX_PAUSE_S,
    AwaitedRequest,
    Watching,
    look,
    messages_to_cell,
    open_build,
    open_move,
    silence,
)
from tests.unit.scheduler.hosts import Hosts

# --- The effect of the record on a build request that came again: a table, and nothing else decides it.


NO_FLAVORS = Hosts([]).selector
UUID = "00000000-0000-4000-8000-000000000001"
REQUEST = BuildRequest(instance_uuid=UUID, project_id="p", flavor="m1.small")


def taken(request: BuildRequest = REQUEST, **meta: float) -> PendingBuild:
    received = Received(request, Meta(id="m", **meta), "api", "scheduler.requests")  # type: ignore[arg-type]
    return pending_build(received, delivery_of(received, kept_since=900.0), now=1000.0, flavors=Hosts([]).selector)


def status(state: BuildState = BuildState.ACCEPTED, digest: bytes | None = None, **more: object) -> BuildStatus:
    build = RecordedBuild(instance_uuid=UUID, project_id="p", state=state, sequence=1, **more)  # type: ignore[arg-type]
    return BuildStatus(build, taken().digest if digest is None else digest)


def test_a_new_request_is_accepted_or_refused_at_once() -> None:
    assert admit_new(taken()) == Start()
    for pending, code in ((taken(replace(REQUEST, flavor="f")), "flavor.unknown"), (taken(sent_at=1.0), TOO_OLD.code)):
        outcome = admit_new(pending).outcome
        assert isinstance(outcome, Done) and isinstance(outcome.reply, Refusal) and outcome.reply.code == code
        build = pending.first_record(Author("s", 1.0)).build
        assert (build.state, build.terminal, build.code) == (BuildState.REFUSED, True, code)


def test_a_request_goes_on_under_the_run_of_its_record() -> None:
    """A redelivery repeats its message's id, a copy has another, and a client may set none."""
    assert taken().first_record(Author("s", 1.0)).build.run == taken().run != ""
    assert admit_known(taken(), status(run="r")) == Continue("r")
    later = pending_build(
        Received(REQUEST, Meta(id="m"), "api", "q"), RequestDelivery(), now=1001.0, flavors=NO_FLAVORS
    )
    assert later.run != taken().run, "a record that is lost may have been dispatched: it had another run"
    nameless = [
        pending_build(Received(one, Meta(id=""), "api", "q"), RequestDelivery(), now=1000.0, flavors=NO_FLAVORS).run
        for one in (REQUEST, replace(REQUEST, name="other"))
    ]
    assert len({taken().run, *nameless}) == 3


def test_a_request_on_record_whose_flavor_was_deleted_since_goes_on_to_its_decision() -> None:
    """It was answered as accepted, and never ended."""
    pending = taken(replace(REQUEST, flavor="deleted"))
    assert pending.refusal is not None
    assert admit_known(pending, status(digest=pending.digest)) == Continue("")


def test_of_the_same_instance_twice_in_a_batch_the_first_counts() -> None:
    assert isinstance(admit_repeated(taken(), taken(), Start()).outcome, Done)
    assert_clash(admit_repeated(taken(replace(REQUEST, name="other")), taken(), Start()))


def test_other_content_under_a_known_instance_is_a_clash() -> None:
    assert_clash(admit_known(taken(), status(digest=b"other")))


def assert_clash(admission: Admission) -> None:
    """Requesters that wait for a reply and listeners to events receive it, and it overtakes nothing."""
    assert isinstance(admission, Answered) and admission.event is not None
    outcome, event = admission.outcome, admission.event.message
    assert isinstance(outcome, Done) and isinstance(outcome.reply, Refusal) and isinstance(event, BuildEvent)
    assert outcome.reply.code == event.code == "request.duplicate"
    assert (event.state, event.terminal, event.sequence) == (BuildState.REFUSED, True, 0)
    assert (event.instance_uuid, event.project_id) == (REQUEST.instance_uuid, REQUEST.project_id)


def test_a_redelivery_goes_on_where_it_was() -> None:
    assert admit_known(taken(), status()) == Continue("")
    assert admit_known(taken(sent_at=1.0), status()) == Continue(""), "on record, however old: it was not purged"
    concurrent = admit_known(taken(), None)
    assert isinstance(concurrent, Answered) and isinstance(concurrent.outcome, Wait)


@pytest.mark.parametrize("has_requester", [False, True])
def test_a_build_that_expired_goes_on_if_it_was_begun(*, has_requester: bool) -> None:
    """Without a requester it ended, though a scheduler had recorded and claimed for it."""
    reply_to = "client.reply.gone" if has_requester else None
    received = Received(REQUEST, Meta(id="m", reply_to=reply_to), "api", LETTERS, given_up=EXPIRED)
    expired = replace(taken(), delivery=delivery_of(received, is_warming_up=True))
    begun = admit_expired(expired, may_be_begun=True)
    assert isinstance(begun, PendingBuild) and begun.delivery.why is None
    assert begun.delivery.last and not begun.delivery.awaits_hosts, "a letter has no letter"
    ended = admit_expired(expired, may_be_begun=False)
    assert ended == (Done() if has_requester else expired)
    assert expired.delivery.why is not None and expired.delivery.why.code == EXPIRED


@pytest.mark.parametrize(
    ("known", "is_withdrawn"),
    [
        (status(BuildState.ACTIVE, cell="c1"), False),
        (status(BuildState.FAILED), False),
        (status(BuildState.DELETING, cell="c1"), True),
        (status(BuildState.DELETED), True),
    ],
)
def test_a_repeated_request_changes_nothing_and_what_follows_from_its_record_is_done_again(
    known: BuildStatus, is_withdrawn: bool
) -> None:
    """The scheduler that wrote the record may have died before it told placement."""
    admission = admit_known(taken(), known)
    assert isinstance(admission.outcome, Done) and isinstance(admission.outcome.reply, BuildAccepted)
    assert (admission.ended, admission.withdrawn) == (known.build, is_withdrawn)


def test_what_was_deleted_before_it_came_never_had_a_claim() -> None:
    admission = admit_known(taken(), status(BuildState.DELETED, b"", code=UNKNOWN))
    assert isinstance(admission.outcome, Done) and (admission.ended, admission.withdrawn) == (None, True)


@pytest.mark.parametrize(("sent_at", "begins"), [(995.8, 995.8), (0.0, 1000.0), (1030.0, 1000.0)])
def test_the_timeline_begins_when_the_request_was_sent(sent_at: float, begins: float) -> None:
    """It hid how long the request had waited in its queue: 4.2 s of 20.8. A client's clock may be ahead."""
    pending = taken(sent_at=sent_at)
    (line,) = pending.first_record(Author("s", 1000.0)).timeline
    assert (line.what, line.at) == ("requested", begins)


# --- How long a request has been silent is counted by this process alone, and it is queried about less and less
# often.


SILENT_UUID = "c0000000-0000-4000-8000-000000000001"
RECORDED = RecordedMove(
    request_id="d0000000-0000-4000-8000-000000000001",
    instance_uuid=SILENT_UUID,
    project_id="p",
    kind=MoveKind.MIGRATE,
    digest=b"",
    state=MoveState.SCHEDULED,
    sequence=2,
    cell="c1",
)
SILENT_BUILD = RecordedBuild(
    instance_uuid=SILENT_UUID, project_id="p", state=BuildState.BUILDING, sequence=10, attempt=2, cell="c1"
)
KNOWN = MoveContext(
    build=SILENT_BUILD, build_request=BuildRequest(instance_uuid=SILENT_UUID, project_id="p", flavor="f", image="i")
)
CONFIG = SchedulerConfig(flavors={"f": Flavor(vcpus=1, disk_gb=7)}, build_timeout_s=90.0)


def opened(of: RecordedMove | RecordedBuild) -> AwaitedRequest:
    found = open_move(of) if isinstance(of, RecordedMove) else open_build(of)
    assert found is not None
    return found


MOVE = opened(RECORDED)


def queried_at(requests: list[tuple[float, AwaitedRequest]]) -> list[float]:
    found, watching = [], Watching({})
    for now_s, one in requests:
        watching = look(watching.watched, [one], now_s=now_s, pause_s=60.0)
        found += [now_s] if watching.query else []
    return found


def test_a_silent_request_is_queried_about_again_after_twice_as_long_up_to_a_bound() -> None:
    times = queried_at([(float(second), MOVE) for second in range(0, 4000, 10)])
    assert times[:5] == [60.0, 180.0, 420.0, 900.0, 1500.0]
    assert {later - earlier for earlier, later in pairwise(times[3:])} == {MAX_PAUSE_S}


def test_an_event_of_it_begins_the_wait_anew() -> None:
    later = replace(MOVE, sequence=11)
    assert queried_at([(0.0, MOVE), (50.0, MOVE), (55.0, later), (70.0, later), (114.0, later), (115.0, later)]) == [
        115.0
    ]


def test_the_pause_grows_until_the_request_ends_though_each_query_is_answered() -> None:
    """A delete that its host cannot carry out was queried about, and announced, 1,150 times a day."""
    watching, sequence, count = Watching({}), 10, 0
    for second in range(0, 86_400, 15):
        deleting = opened(replace(SILENT_BUILD, state=BuildState.DELETING, sequence=sequence))
        watching = look(watching.watched, [deleting], now_s=float(second), pause_s=60.0)
        count += len(watching.query)
        sequence += len(watching.query)  # it is answered by an event
        assert not watching.silent
    assert count <= 86_400 / MAX_PAUSE_S + 5


def test_after_questions_in_vain_it_is_to_be_marked_once() -> None:
    watching, silent = Watching({}), []
    for now_s in (0.0, 60.0, 180.0, 420.0, 900.0):
        watching = look(watching.watched, [MOVE], now_s=now_s, pause_s=60.0)
        silent += [now_s] if watching.silent else []
    assert silent[0] == 420.0 and watching.waiting == 1
    watched = replace(watching.watched[MOVE.key], since_s=100.0)
    assert silence(watched, 900.0, known=True) == (
        CELL_SILENT,
        "nothing is received of it from cell c1: queried 4 times in 800 s",
    )
    assert silence(watched, 900.0, known=False)[0] == CELL_UNKNOWN
    marked = replace(MOVE, code=CELL_SILENT)
    assert look(watching.watched, [marked], now_s=5000.0, pause_s=60.0).silent == ()


def test_what_has_ended_is_forgotten() -> None:
    first = look({}, [MOVE], now_s=0.0, pause_s=60.0)
    assert look(first.watched, [], now_s=60.0, pause_s=60.0) == Watching({})


def test_a_build_that_no_cell_has_is_watched_and_its_silence_is_no_cells() -> None:
    """A database that was set back has it as accepted, and its message was acknowledged."""
    accepted = opened(replace(SILENT_BUILD, state=BuildState.ACCEPTED, cell=None))
    assert queried_at([(float(second), accepted) for second in range(0, 500, 10)]) == [60.0, 180.0, 420.0]
    watching = Watching({})
    for second in range(0, 2000, 10):
        watching = look(watching.watched, [accepted], now_s=float(second), pause_s=60.0)
        assert not watching.silent


def test_a_build_is_queried_with_what_its_command_named_and_the_attempt_on_record() -> None:
    (query,) = messages_to_cell(opened(SILENT_BUILD), KNOWN, CONFIG, 5.0)
    assert isinstance(query, CellBuildQuery)
    assert (query.spec.instance_uuid, query.spec.project_id, query.requested_at) == (SILENT_UUID, "p", 5.0)
    assert (query.spec.image, query.spec.root_gb, query.build_timeout_s) == ("i", 7, 90.0)
    assert (query.attempt, query.sequence) == (2, 10)


# --- The builds that wait: what is shown of them, for how long, and by whose announcement.


WAITING_UUID = "10000000-0000-4000-8000-000000000001"
WAITING_BUILD = BuildRecord(
    instance_uuid=WAITING_UUID, project_id="p", flavor="bm.gold", state=BuildState.BUILDING, cell="cell1", host="node1"
)
WAITS = WaitingBuild(instance_uuid=WAITING_UUID, attempt=2, since=990.0, reason="waits for Ironic: ConnectError")
MESSAGE = BuildsWaiting(service="metal1", cell="cell1", waiting=(WAITS,), lasts_s=3.0)


def attempt(number: int) -> AttemptRecord:
    return AttemptRecord(attempt=number, host="node1", outcome="failed")


def test_a_build_that_waits_has_that_as_its_last_line_until_it_is_announced_no_more() -> None:
    table = WaitingTable()
    table.apply(MESSAGE, 10.0)
    line = table.line_of(WAITING_BUILD, 12.9)
    assert line is not None
    assert (line.at, line.who, line.what) == (990.0, "compute metal1", "waiting")
    assert line.detail == "waits for Ironic: ConnectError"
    assert table.line_of(WAITING_BUILD, 13.0) is None  # the service has been silent for too long
    table.apply(replace(MESSAGE, waiting=()), 11.0)
    assert table.line_of(WAITING_BUILD, 11.0) is None


@pytest.mark.parametrize(
    "build",
    [
        replace(WAITING_BUILD, state=BuildState.ACTIVE),
        replace(WAITING_BUILD, cell="cell2"),
        replace(WAITING_BUILD, instance_uuid="20000000-0000-4000-8000-000000000001"),
        replace(WAITING_BUILD, history=(attempt(1), attempt(2))),
    ],
    ids=["has ended", "of another cell", "another instance", "the attempt has ended"],
)
def test_nothing_is_shown_of_a_build_that_does_not_wait(build: BuildRecord) -> None:
    table = WaitingTable()
    table.apply(MESSAGE, 10.0)
    assert table.line_of(build, 10.0) is None
    assert table.line_of(replace(WAITING_BUILD, history=(attempt(1),)), 10.0) is not None


def test_services_that_a_bus_makes_up_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MAX_SERVICES", 1)
    table = WaitingTable()
    table.apply(
        replace(MESSAGE, service="other", waiting=(replace(WAITS, instance_uuid=WAITING_BUILD.instance_uuid[::-1]),)),
        10.0,
    )
    table.apply(MESSAGE, 10.0)
    assert table.line_of(WAITING_BUILD, 10.0) is None
    table.apply(MESSAGE, 13.0)  # what was made up is over
    assert table.line_of(WAITING_BUILD, 13.0) is not None
