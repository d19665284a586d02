"""An instance leaves its cell for another one: what schedulers make of the announcement of it. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from bus.contracts.actions import (
    OTHER_ATTEMPT,
    ActionEvent,
    ActionKind,
    ActionState,
    CellAction,
    CellActionQuery,
    CellTransfer,
    CellTransferOut,
    Condition,
)
from bus.contracts.base import MAX_ATTEMPT
from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.cell import CellDelete, InstanceSpec, Selection
from scheduler_worker.cell_events.cell_event_batch import APPLIED, CellEventBatch, transferred
from scheduler_worker.records.action_record import ActionContext, HostsOf, RecordedAction, Transfer, no_hosts
from scheduler_worker.records.build_record import RecordedBuild, SinceBuild

REQUEST = "d0000000-0000-4000-8000-000000000001"
UUID = "a0000000-0000-4000-8000-000000000001"


def on(n: int) -> Selection:
    host = f"b0000000-0000-4000-8000-{n:012}"
    return Selection(host_uuid=host, host=f"host-{n}", service="s2", allocations={host: {"VCPU": 1}})


HOME, THERE = on(1), on(2)
SPEC = InstanceSpec(instance_uuid=UUID, project_id="p", name="n", image="i", flavor="m1.small")
NAMES: dict[str, Any] = {
    "request_id": REQUEST,
    "instance_uuid": UUID,
    "project_id": "p",
    "kind": ActionKind.MIGRATE,
}
DEPARTS = CellTransferOut(**NAMES, to_cell="c2", attempt=4)
BUILD = CellAction(**NAMES, spec=SPEC, selections=(THERE,), limits={"VCPU": 3}, to_cell="c1")
TRANSFER = Transfer(home="c1", away="c2", build=BUILD, command=DEPARTS)
DEPARTURE = CellTransfer(
    cell="c2",
    spec=replace(SPEC, project_id="another"),
    image="snapshot",
    last=HOME,
    attempt=5,
    sequence=20,
    kind=ActionKind.MIGRATE,
)
LEFT = ActionEvent(**NAMES, state=ActionState.MIGRATING, sequence=20, transfer=DEPARTURE)


def on_record(
    *,
    state: BuildState = BuildState.ACTIVE,
    cell: str = "c1",
    sequence: int = 19,
    first_attempt: int = 2,
    transfer: Transfer | None = TRANSFER,
    **action: Any,
) -> ActionContext:
    known = RecordedAction(**NAMES, digest=b"", state=ActionState.SCHEDULED, sequence=2, cell=cell, transfer=transfer)
    build = RecordedBuild(
        instance_uuid=UUID,
        project_id="p",
        state=state,
        sequence=sequence,
        terminal=True,
        cell=cell,
        instance=SinceBuild(condition=Condition.ACTIVE, under_way=REQUEST, first_attempt=first_attempt),
    )
    return ActionContext(action=replace(known, **action), build=build)


def applied(
    known: ActionContext, *events: BuildEvent | ActionEvent, cell: str = "c1", hosts_of: HostsOf = no_hosts
) -> CellEventBatch:
    builds = {} if known.build is None else {UUID: known.build}
    batch = CellEventBatch(builds, {} if known.action is None else {REQUEST: known.action}, 100.0, hosts_of)
    for event in events:
        batch.apply(event, cell)
    return batch


def sent(batch: CellEventBatch, bus: str) -> list[Any]:
    return [one.message for one in batch.messages if one.bus == bus]


def kept(batch: CellEventBatch) -> Transfer:
    transfer = batch.actions[REQUEST].transfer
    assert transfer is not None
    return transfer


# --- it has left its cell


@pytest.mark.parametrize(("first_attempt", "sequence"), [(5, 19), (5, 35), (2, 19), (0, 10**6)])
def test_a_departure_counts_by_its_attempt_whatever_its_number(first_attempt: int, sequence: int) -> None:
    batch = applied(on_record(first_attempt=first_attempt, sequence=sequence), LEFT)
    (command,) = sent(batch, "c2")
    assert (batch.builds[UUID].cell, batch.builds[UUID].current.first_attempt) == ("c2", 6)
    number = max(sequence, 20)
    departure = replace(DEPARTURE, spec=SPEC, sequence=number)
    assert command == replace(BUILD, transfer=departure, sequence=number)
    assert (batch.actions[REQUEST].cell, batch.actions[REQUEST].host) == ("c2", "host-2")
    assert (kept(batch).command, kept(batch).home_hosts) == (command, (HOME,)), (
        "it is commanded again when it is silent"
    )


@pytest.mark.parametrize(("first_attempt", "cell"), [(6, "c1"), (2, "c3")])
def test_a_departure_from_before_it_came_there_or_of_another_cell_counts_for_nothing(
    first_attempt: int, cell: str
) -> None:
    batch = applied(on_record(first_attempt=first_attempt, cell=cell), LEFT)
    assert batch.builds[UUID].cell == cell and sent(batch, "c2") == []


@pytest.mark.parametrize("state", [BuildState.ACTIVE, BuildState.DELETING, BuildState.DELETED])
def test_the_next_cell_deletes_what_is_to_be_deleted(state: BuildState) -> None:
    deletes = [one for one in sent(applied(on_record(state=state), LEFT), "c2") if isinstance(one, CellDelete)]
    wanted = [CellDelete(instance_uuid=UUID, project_id="p", attempt=6)]
    assert deletes == (wanted if state is BuildState.DELETING else [])


@pytest.mark.parametrize(
    "known",
    [
        on_record(terminal=True),
        on_record(transfer=None),
        on_record(transfer=replace(TRANSFER, home="c3", away="c4")),
        replace(on_record(), action=None),
    ],
)
def test_the_next_cell_is_queried_where_no_request_leads_there(known: ActionContext) -> None:
    assert known.build is not None
    action, build, (query,) = transferred(known.action, known.build, LEFT)
    assert (build.cell, build.host, build.host_uuid, action) == ("c2", None, None, known.action)
    assert isinstance(query, CellActionQuery) and query.transfer is not None
    assert (query.request_id, query.kind, query.transfer.spec.project_id) == (REQUEST, ActionKind.MIGRATE, "p")


@pytest.mark.parametrize(("attempt", "sequence"), [(7, 3), (3, 30)])
def test_another_attempt_than_the_newest_is_asked_again_and_no_client_is_told(attempt: int, sequence: int) -> None:
    read = ActionEvent(**NAMES, state=ActionState.SCHEDULED, sequence=sequence, code=OTHER_ATTEMPT, attempt=attempt)
    batch = applied(on_record(), read)
    assert sent(batch, "c1") == [replace(DEPARTS, attempt=attempt)] == [kept(batch).command]
    assert sent(batch, "api") == []
    late = applied(on_record(transfer=replace(TRANSFER, command=BUILD)), read)
    assert late.messages == [], "it has left since"


@pytest.mark.parametrize("message", [LEFT, DEPARTS])
def test_an_attempt_above_all_that_are_given_out_is_not_read(message: ActionEvent | CellTransferOut) -> None:
    """The next one did not fit the cells' records: each delete and build of it was a dead letter."""
    raw = msgspec.to_builtins(message)
    assert msgspec.convert(raw, type(message)) == message
    raw.get("transfer", raw)["attempt"] = MAX_ATTEMPT + 1
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(raw, type(message))


def test_a_code_that_is_no_code_is_not_read() -> None:
    raw = msgspec.to_builtins(replace(LEFT, transfer=replace(DEPARTURE, code="x" * 256)))
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(raw, ActionEvent)


# --- the other cell has it


def test_what_has_no_host_has_the_one_that_is_claimed_for_it() -> None:
    """Until then the quota counts it by its record, and from then on by its claim."""
    known = on_record(cell="c2", first_attempt=6, transfer=replace(TRANSFER, command=BUILD))
    claims = ActionEvent(**NAMES, state=ActionState.CLAIMING, sequence=30, host="host-2", host_uuid=THERE.host_uuid)
    assert applied(known, claims, cell="c2").builds[UUID].host_uuid is None
    has = applied(known, claims, replace(claims, state=ActionState.FINISHING, sequence=31), cell="c2")
    assert has.builds[UUID].host_uuid == THERE.host_uuid


BUILT_THERE = replace(BUILD, transfer=DEPARTURE)
AWAY = replace(TRANSFER, command=BUILT_THERE, home_hosts=(HOME,))
DONE = ActionEvent(
    **NAMES, state=ActionState.DONE, sequence=30, terminal=True, condition=Condition.ACTIVE, host="host-2"
)


def of_api(batch: CellEventBatch) -> list[tuple[ActionState, str]]:
    return [(one.state, one.code) for one in sent(batch, "api") if one.terminal]


def test_the_end_of_the_build_is_the_end_of_the_move_and_the_former_cell_may_forget() -> None:
    batch = applied(on_record(cell="c2", first_attempt=6, transfer=AWAY), DONE, cell="c2")
    assert of_api(batch) == [(ActionState.DONE, "")]
    assert sent(batch, "c1") == [replace(DEPARTS, attempt=5, ended=True)]
    assert batch.actions[REQUEST].transfer is None


BACK = replace(DEPARTURE, cell="c1", attempt=9, sequence=40, code="image.broken", reason="why")
COMES_BACK = replace(LEFT, sequence=40, transfer=BACK)


@pytest.mark.parametrize("kind", [ActionKind.MIGRATE, ActionKind.UNSHELVE])
@pytest.mark.parametrize("code", ["image.broken", ""])
@pytest.mark.parametrize("fitting", [(), (on(3), HOME, *map(on, range(4, 20)))])
def test_what_the_other_cell_does_not_take_comes_home(
    kind: ActionKind, code: str, fitting: tuple[Selection, ...]
) -> None:
    """To the host that it had, and then to any other one of its cell that fits by now."""
    asked: list[Any] = []

    def fit(*about: Any) -> tuple[Selection, ...]:
        asked.append(about)
        return fitting

    first = applied(on_record(), replace(LEFT, transfer=replace(DEPARTURE, kind=kind)), hosts_of=fit)
    assert asked == []
    known = ActionContext(action=first.actions[REQUEST], build=first.builds[UUID])
    comes_back = replace(COMES_BACK, transfer=replace(BACK, code=code))
    batch = applied(known, comes_back, cell="c2", hosts_of=fit)
    (command,) = sent(batch, "c1")
    others = tuple(one for one in fitting if one != HOME)
    hosts = (HOME, *others) if kind is ActionKind.MIGRATE else fitting
    assert (command.selections, command.to_cell, command.spec) == (hosts[:9], None, None)
    assert asked == [((REQUEST, UUID), "c1")]
    assert (batch.builds[UUID].cell, batch.builds[UUID].current.first_attempt) == ("c1", 10)
    assert command.transfer.code == (code or "max_retries_exceeded"), "with it its cell ends the move"


# --- a cell whose database was restored to before the departure


LOST = BuildEvent(instance_uuid=UUID, project_id="p", state=BuildState.FAILED, sequence=60, terminal=True)


GOES_ON = replace(DONE, terminal=False)
OUTRANKS = replace(LEFT, transfer=replace(DEPARTURE, attempt=1_005))


@pytest.mark.parametrize(
    ("event", "first_attempt", "at_rest", "told"),
    [
        (DONE, 6, False, 5),
        (LOST, 6, False, 5),
        (DONE, 0, False, None),
        (GOES_ON, 6, False, None),
        (GOES_ON, 6, True, 5),
        (LEFT, 6, False, None),
        (LEFT, 6, True, 5),
        (LEFT, 0, True, 5),
        (OUTRANKS, 6, True, 1_005),
    ],
)
def test_a_cell_that_tells_of_what_another_one_has_is_told_that_it_has_given_it_up(
    event: BuildEvent | ActionEvent, first_attempt: int, *, at_rest: bool, told: int | None
) -> None:
    """Schedulers that were restored have no request under way that would tell it at its end."""
    known = on_record(cell="c2", first_attempt=first_attempt, transfer=None if at_rest else AWAY)
    assert known.build is not None and known.build.instance is not None
    if at_rest:
        known = ActionContext(build=replace(known.build, instance=replace(known.build.instance, under_way=None)))
    batch = applied(known, event)
    ends = sent(batch, "c1")
    assert [(one.ended, one.attempt, one.to_cell) for one in ends] == ([] if told is None else [(True, told, "c2")])
    assert sent(batch, "api") == [] and batch.builds[UUID].cell == "c2"


ELSEWHERE = on_record(terminal=True, transfer=None, state=ActionState.FAILED).action


@pytest.mark.parametrize("action", [None, ELSEWHERE])
@pytest.mark.parametrize("under_way", [None, "d0000000-0000-4000-8000-000000000009"])
def test_the_owner_s_word_counts_whatever_is_known_of_its_request(
    under_way: str | None, action: RecordedAction | None
) -> None:
    """Schedulers that were restored have queried it about a request that they do not know; or it was restored to the
    middle of one that has ended in another cell.
    """
    known = on_record(cell="c2", first_attempt=6)
    assert known.build is not None and known.build.instance is not None
    instance = replace(known.build.instance, condition=Condition.MOVING, under_way=under_way)
    known = ActionContext(build=replace(known.build, instance=instance), action=action)
    rests = replace(DONE, state=ActionState.FAILED, condition=Condition.OFFLOADED, host=None)
    for event, host in ((DONE, "host-2"), (rests, None)):
        batch = applied(known, event, cell="c2")
        after = batch.builds[UUID]
        assert (after.current.condition, after.host, after.sequence) == (event.condition, host, 30)
        assert batch.messages == [] and after.current.under_way == under_way
        assert UUID in batch.timelines, "it is written"
    assert applied(known, DONE, cell="c1").builds[UUID] == known.build, "another cell's counts for nothing"
    assert applied(known, replace(DONE, sequence=3), cell="c2").builds[UUID] == known.build, "nor does a late one"


def test_what_a_cell_ends_of_its_own_is_reported() -> None:
    batch = applied(on_record(transfer=None), DONE)
    assert of_api(batch) == [(ActionState.DONE, "")] and sent(batch, "c1") == []
    assert applied(on_record(transfer=None)).messages == [] and APPLIED == "applied"
