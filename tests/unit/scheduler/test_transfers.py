"""An instance leaves its cell for another one: what schedulers make of the announcement of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.consuming.outcome import Done, Received
from bus.contracts.base import Meta
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.cell import CellDelete, InstanceSpec, Selection
from bus.contracts.moves import (
    AskedBy,
    CellAsks,
    CellBook,
    CellMove,
    ChangeKind,
    ChangeMachine,
    Condition,
    Departure,
    MachineChanged,
    MoveEvent,
    MoveKind,
    MoveState,
)
from bus.contracts.placement import (
    Claim,
    ClaimOption,
    ClaimOutcome,
    ClaimResult,
    Migration,
    Release,
    ReleaseResult,
)
from bus.faults import RequestRefused, RequestTimeout
from scheduler_worker.cell_asks import CellAsksHandler
from scheduler_worker.domain.builds import NewBuild, RecordedBuild
from scheduler_worker.domain.recorded_moves import InstanceRecord, MoveContext, RecordedMove
from scheduler_worker.domain.transfers import AnnouncedMoves, answered, refused
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from tests.kit.sent import Sent

REQUEST = "d0000000-0000-4000-8000-000000000001"
UUID = "a0000000-0000-4000-8000-000000000001"
HOST = Selection(
    host_uuid="b0000000-0000-4000-8000-000000000001",
    host="there",
    service="s2",
    allocations={"b0000000-0000-4000-8000-000000000001": {"VCPU": 1}},
)
SPEC = InstanceSpec(instance_uuid=UUID, project_id="p", name="n", image="i", flavor="m1.small")
COMMAND = CellMove(
    request_id=REQUEST,
    instance_uuid=UUID,
    project_id="p",
    kind=MoveKind.UNSHELVE,
    spec=SPEC,
    selections=(HOST,),
    limits={"VCPU": 3},
    to_cell="c2",
)
DEPARTURE = Departure(
    cell="c2",
    spec=replace(SPEC, project_id="another"),
    image="snapshot",
    last=HOST,
    selections=(HOST,),
    newest=5,
    sequence=20,
    stay=2,
)
LEFT = MoveEvent(
    request_id=REQUEST,
    instance_uuid=UUID,
    project_id="p",
    kind=MoveKind.UNSHELVE,
    state=MoveState.SCHEDULED,
    sequence=20,
    departure=DEPARTURE,
)


def on_record(
    *, state: BuildState = BuildState.ACTIVE, cell: str = "c1", sequence: int = 19, stay: int = 2
) -> MoveContext:
    return MoveContext(
        move=RecordedMove(
            request_id=REQUEST,
            instance_uuid=UUID,
            project_id="p",
            kind=MoveKind.UNSHELVE,
            digest=b"",
            state=MoveState.SCHEDULED,
            sequence=2,
            cell=cell,
            command=COMMAND,
        ),
        build=RecordedBuild(instance_uuid=UUID, project_id="p", state=state, sequence=11, terminal=True, cell=cell),
        build_request=BuildRequest(instance_uuid=UUID, project_id="p", flavor="m1.small"),
        instance=InstanceRecord(
            instance_uuid=UUID, condition=Condition.OFFLOADED, under_way=REQUEST, sequence=sequence, stay=stay
        ),
    )


def applied(known: MoveContext, event: MoveEvent = LEFT, cell: str = "c1") -> AnnouncedMoves:
    batch = AnnouncedMoves(cell, {REQUEST: known}, 100.0)
    batch.apply(event)
    return batch


def sent(batch: AnnouncedMoves, bus: str) -> list[object]:
    return [one.message for one in batch.messages if one.bus == bus]


@pytest.mark.parametrize(("stay", "sequence"), [(2, 19), (2, 35), (1, 19), (0, 10**6)])
def test_a_departure_counts_by_its_stay_whatever_its_number(stay: int, sequence: int) -> None:
    """Seed 11 of `transfers-restored`: one of a record with old numbers was ignored, and the instance in no cell."""
    batch = applied(on_record(stay=stay, sequence=sequence))
    (command,) = sent(batch, "c2")
    assert isinstance(command, CellMove) and command.arrival is not None
    assert (batch.builds[UUID].cell, batch.instances[UUID].stay, command.arrival.stay) == ("c2", 3, 2)
    number = max(sequence, 20)
    assert (command.arrival.sequence, batch.instances[UUID].sequence) == (number, number), "its next cell goes on there"


def test_one_that_is_being_deleted_is_deleted_in_the_cell_that_has_it() -> None:
    batch = applied(on_record(state=BuildState.DELETING))
    command, delete = sent(batch, "c2")
    assert isinstance(command, CellMove)
    assert delete == CellDelete(instance_uuid=UUID, project_id="p", stay=3)


def test_what_is_silent_is_commanded_again_with_its_departure() -> None:
    """A query would end it as lost, and the instance would be in no cell."""
    command = applied(on_record()).moves[REQUEST].command
    assert command is not None and command.arrival is not None and command.to_cell is None


ASKED = AskedBy(cell="c1", request_id=REQUEST, project_id="p", kind=MoveKind.MIGRATE)
CHANGE = ChangeMachine(
    change=ChangeKind.CHECK,
    spec=SPEC,
    attempt=5,
    order=9,
    host_uuid=HOST.host_uuid,
    service="s2",
    allocations={},
    image="snapshot",
    asked_by=ASKED,
)
ANSWER = MachineChanged(
    instance_uuid=UUID,
    attempt=5,
    order=9,
    host_uuid=HOST.host_uuid,
    service="s2",
    change=ChangeKind.CHECK,
    done=True,
    asked_by=ASKED,
)


CLAIM = Claim(
    consumer=UUID,
    attempt=3,
    consumer_generation=1,
    options=(ClaimOption(allocations=HOST.allocations),),
    project_id="p",
    migration=Migration(uuid=REQUEST, source={"b0000000-0000-4000-8000-000000000009": {"VCPU": 1}}),
)
OTHER = "d0000000-0000-4000-8000-000000000009"


def test_what_an_instance_without_a_record_holds_is_not_known_to_be_another_cells() -> None:
    """The schedulers' database was set back to before its build: the cell took the refusal for a release."""
    release = CellBook(asked_by=ASKED, instance_uuid=UUID, question=Release(consumer=UUID, attempt=4))
    assert refused(release, replace(on_record(), build=None)) is None
    claim = refused(replace(release, question=CLAIM), replace(on_record(), build=None))
    assert claim is not None and isinstance(claim.answer, ClaimResult), "it is begun by nobody"


def test_a_claim_that_placement_refuses_for_good_is_not_asked_again() -> None:
    """It was asked each 15 s for ever, and neither an abort nor a delete could end that."""
    claim = CellBook(asked_by=ASKED, instance_uuid=UUID, question=CLAIM)
    got = answered(claim, RequestRefused("too long", code="message.invalid"))
    assert got is not None and isinstance(got.answer, ClaimResult) and got.answer.outcome is ClaimOutcome.INVALID
    assert answered(claim, RequestTimeout("no answer")) is None
    release = replace(claim, question=Release(consumer=UUID, attempt=4))
    assert answered(release, RequestRefused("too long", code="message.invalid")) is None


class Giving:
    """Placement takes back whatever it is asked to."""

    async def ask(self, questions: Sequence[object]) -> list[ReleaseResult]:
        return [ReleaseResult(outcome="released") for _ in questions]


async def test_two_questions_about_one_instance_in_a_batch_are_both_answered_and_no_departure_counts_any_more() -> None:
    """Of two that give its claim back the later one rules out every departure from its stay."""
    known, relay = on_record(), Sent()
    assert known.build is not None and known.move is not None and known.build_request is not None
    store = MemoryBuilds(MemoryBuildTable(SystemClock()).session())
    store.publish_through(relay)  # type: ignore[arg-type]
    async with store.unit() as unit:
        await unit.insert([NewBuild(request=known.build_request, digest=b"1", build=known.build)], 1.0)
    async with store.operation() as operation:
        await operation.insert_moves([known.move], 1.0)
        await operation.put_instances([known.now])
    books = [
        CellBook(asked_by=ASKED, instance_uuid=UUID, question=Release(consumer=UUID, attempt=attempt), stay=stay)
        for attempt, stay in ((5, 3), (4, 2))
    ]
    batch = [Received(CellAsks(message=book), Meta(id=f"m{book.stay}"), "c1", "scheduler.asks") for book in books]
    handler = CellAsksHandler(store, "c1", claims=cast("Any", Giving()))
    assert await handler(batch) == [Done(), Done()]
    sent_back = [one.message for _, rows in relay.rows for one in rows]
    assert sent_back == [replace(book, answer=ReleaseResult(outcome="released")) for book in books]
    async with store.operation() as operation:
        assert (await operation.known({REQUEST: UUID}))[REQUEST].now.stay == 4
