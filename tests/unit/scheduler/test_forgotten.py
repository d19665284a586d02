"""A host that is forgotten: what keeps it, and what leaves the record with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from bus.contracts.drains import DrainRecord, DrainState, DrainTarget
from bus.contracts.moves import MoveKind
from bus.contracts.objects import Aggregate, FenceRecord, HostDecision, ObjectKind, StoredObject
from bus.contracts.operations import AdminState
from scheduler_worker.forgetting import kept_by_record, traces, with_entry

HOST = "10000000-0000-4000-8000-000000000000"
OTHER = "20000000-0000-4000-8000-000000000000"
DRAIN = "d0000000-0000-4000-8000-000000000000"
CELLS = ("c1", "c2")
Key = tuple[ObjectKind, str]


def stored(kind: ObjectKind, name: str, body: Any) -> dict[Key, StoredObject]:
    return {(kind, name): StoredObject(kind=kind, name=name, body=msgspec.to_builtins(body), version=1)}


def fence(**more: Any) -> dict[Key, StoredObject]:
    known = {"host": "h", "cell": "c1", "version": 7, "lifting": True, "forced": True, "acknowledged": 7, **more}
    return stored(ObjectKind.FENCE, HOST, FenceRecord(**known))


def drained(state: DrainState) -> dict[Key, StoredObject]:
    record = DrainRecord(
        name="h",
        target=DrainTarget.HOST,
        kind=MoveKind.LIVE_MIGRATE,
        by="ann",
        state=state,
        at_once=1,
        started_at=1.0,
        hosts=1,
    )
    decision = HostDecision(host="h", state=AdminState.DISABLED, drain=DRAIN)
    return stored(ObjectKind.DRAIN, DRAIN, record) | stored(ObjectKind.HOST, HOST, decision)


def code(present: Mapping[Key, StoredObject]) -> str | None:
    kept = kept_by_record(present, HOST, CELLS)
    return None if kept is None else kept.code


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        ({}, None),
        (fence(), None),
        (fence(forced=False), "host.fence_open"),
        (fence(forced=False, lifting=False), "host.fence_open"),
        (fence(acknowledged=6), "host.fence_open"),
        (fence(acknowledged=6, cell=None), "host.fence_open"),
        (fence(acknowledged=0, cell="burnt"), None),
        (drained(DrainState.RUNNING), "host.draining"),
        (drained(DrainState.PAUSED), "host.draining"),
        (drained(DrainState.ENDED), None),
    ],
)
def test_a_fence_and_a_drain_keep_a_host_until_they_have_ended(
    present: Mapping[Key, StoredObject], expected: str | None
) -> None:
    """A forced fence has ended when its cell knows, or cannot know any more."""
    assert code(present) == expected


def test_the_decision_the_fence_and_the_places_in_aggregates_go() -> None:
    present = (
        stored(ObjectKind.HOST, HOST, HostDecision(host="h", state=AdminState.ENABLED))
        | stored(ObjectKind.HOST, OTHER, HostDecision(host="other", state=AdminState.DISABLED))
        | fence()
        | stored(ObjectKind.AGGREGATE, "a", Aggregate(name="a", uuid=OTHER, hosts=("other", "h")))
        | stored(ObjectKind.AGGREGATE, "b", Aggregate(name="b", uuid=DRAIN, hosts=(HOST,)))
        | stored(ObjectKind.AGGREGATE, "c", Aggregate(name="c", uuid=HOST))
    )
    found = {(one.kind, one.name): one.after for one in traces(present, HOST, {HOST, "h"})}
    assert found.keys() == {
        (ObjectKind.HOST, HOST),
        (ObjectKind.FENCE, HOST),
        (ObjectKind.AGGREGATE, "a"),
        (ObjectKind.AGGREGATE, "b"),
    }
    left = [found[ObjectKind.AGGREGATE, name] for name in "ab"]
    assert [one["hosts"] if one else None for one in left] == [("other",), ()]
    assert found[ObjectKind.HOST, HOST] is None and found[ObjectKind.FENCE, HOST] is None


def test_a_name_that_another_host_has_is_left_in_aggregates() -> None:
    present = stored(ObjectKind.AGGREGATE, "a", Aggregate(name="a", uuid=OTHER, hosts=("h",)))
    assert traces(present, HOST, {HOST}) == ()


def test_the_log_names_a_host_that_nothing_was_decided_about() -> None:
    (entry,) = with_entry((), HOST, "h")
    assert (entry.kind, entry.name, entry.before, entry.after) == (
        ObjectKind.HOST,
        HOST,
        {"host": "h", "state": "enabled"},
        None,
    )
    assert with_entry((entry,), HOST, "h") == (entry,)
