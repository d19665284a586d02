"""Of which cell the fence is that a decision about a host leads to."""

from __future__ import annotations

import msgspec
import pytest

from bus.contracts.base import Refusal
from bus.contracts.objects import (
    CellBus,
    CellDecision,
    CellState,
    FenceRecord,
    HostDecision,
    ObjectChange,
    ObjectKind,
    ObjectsChange,
    StoredObject,
)
from bus.contracts.operations import AdminState
from scheduler_worker.domain.fences import fence_of, fenced_by
from scheduler_worker.domain.hosts import CELL_UNKNOWN
from scheduler_worker.domain.object_changes import fence_changes
from scheduler_worker.domain.objects import ChangePlan, RecordedObjects, plan

HOST = "10000000-0000-4000-8000-000000000001"


def stored(kind: ObjectKind, name: str, body: object) -> StoredObject:
    return StoredObject(kind=kind, name=name, body=msgspec.to_builtins(body), version=1)


def change(state: AdminState = AdminState.FENCED) -> ObjectsChange:
    body = msgspec.to_builtins(HostDecision(host="h", state=state))
    return ObjectsChange(changes=(ObjectChange(kind=ObjectKind.HOST, name=HOST, body=body),), who="ann")


def cell_of_fence(
    *settings: str, shown: str | None = None, named: str | None = None, objects: tuple[StoredObject, ...] = ()
) -> str | None:
    """The cell on record after the host was fenced; None: that was refused."""
    present = RecordedObjects(1, {(one.kind, one.name): one for one in objects})
    planned = plan(change(), present.objects)
    assert isinstance(planned, ChangePlan)
    made = fence_changes(present, planned, lambda _: shown, named=named, settings=settings, force=False)
    if isinstance(made, Refusal):
        assert (made.code == CELL_UNKNOWN and HOST in made.reason) or "there is no cell" in made.reason
        return None
    (one,) = made
    assert one.after is not None
    return msgspec.convert(one.after, FenceRecord).cell


@pytest.mark.parametrize(
    ("settings", "shown", "named", "cell"),
    [
        (("c1", "c2"), "c2", None, "c2"),
        (("c1", "c2"), "c2", "c1", "c2"),  # it has announced the host
        (("c1", "c2"), None, "c1", "c1"),
        (("c1", "c2"), None, "c3", None),
        (("c1", "c2"), None, None, None),
        (("c1",), None, None, "c1"),
        (("c1",), None, "c2", None),
    ],
)
def test_a_fence_is_of_the_cell_that_something_shows_or_its_operator_names(
    settings: tuple[str, ...], shown: str | None, named: str | None, cell: str | None
) -> None:
    assert cell_of_fence(*settings, shown=shown, named=named) == cell


def test_where_a_cell_was_removed_a_host_may_have_been_in_it() -> None:
    bus = CellBus(url_file="x")
    removed = stored(ObjectKind.CELL, "c2", CellDecision(state=CellState.REMOVED, bus=bus))
    assert cell_of_fence("c1", objects=(removed,)) is None
    assert cell_of_fence("c1", named="c1", objects=(removed,)) == "c1"


def test_a_fence_on_record_shows_its_cell() -> None:
    """One that is being lifted, of a host that is to be fenced again."""
    lifting = stored(ObjectKind.FENCE, HOST, FenceRecord(host="h", cell="c2", version=1, lifting=True))
    assert fence_of(lifting).lifting and cell_of_fence("c1", "c2", objects=(lifting,)) == "c2"


def test_only_decisions_to_fence_need_a_cell() -> None:
    assert fenced_by(change()) == [HOST]
    assert not any(fenced_by(change(state)) for state in AdminState if state is not AdminState.FENCED)
