"""A fence by tables: what decisions and the reports of its cell make of it, and who is evacuated by it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from bus.contracts.actions import Condition
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.objects import (
    ChangedObject,
    FenceRecord,
    Flavor,
    ObjectChange,
    ObjectKind,
    ObjectsChange,
    StoredObject,
)
from bus.contracts.operations import AdminState, CellFence, EvacuationPolicy, FenceState, HostAdminState, HostFence
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.drain.drain_steps import fenced_hosts, is_restarted
from scheduler_worker.objects.fence_rules import (
    acknowledge,
    command,
    fence_after_change,
    fence_from_decision,
    hosts_fenced,
    unfence_unknown,
)
from scheduler_worker.records.action_record import ActionContext
from scheduler_worker.records.build_record import RecordedBuild, SinceBuild
from scheduler_worker.records.drain_record import DrainedHost
from scheduler_worker.records.fence_record import fenced, visible_to_cell

HOST, VM = (f"{n}0000000-0000-4000-8000-000000000001" for n in "1a")
FENCED, ENABLED = AdminState.FENCED, AdminState.ENABLED
FENCE = FenceRecord(host="h", cell="c1", version=4, acknowledged=3, stale_machines=2)
RESTART, WAIT, FAIL = EvacuationPolicy.RESTART, EvacuationPolicy.WAIT, EvacuationPolicy.FAIL


def body(state: AdminState) -> dict[str, Any]:
    return {"host": "now", "state": state.value}


def changed(before: FenceRecord | None, after: FenceRecord | None) -> ChangedObject:
    of = (None if one is None else msgspec.to_builtins(one) for one in (before, after))
    return ChangedObject(kind=ObjectKind.FENCE, name=HOST, before=next(of), after=next(of))


def on_record(fence: FenceRecord | None) -> dict[tuple[ObjectKind, str], StoredObject]:
    if fence is None:
        return {}
    stored = StoredObject(kind=ObjectKind.FENCE, name=HOST, body=msgspec.to_builtins(fence), version=fence.version)
    return {(ObjectKind.FENCE, HOST): stored}


@pytest.mark.parametrize(
    ("kind", "state", "fences"),
    [
        (ObjectKind.HOST, FENCED, True),
        (ObjectKind.HOST, AdminState.DISABLED, False),
        (ObjectKind.HOST, None, False),
        (ObjectKind.FLAVOR, FENCED, False),
    ],
)
def test_a_change_fences_by_a_decision_about_a_host(kind: ObjectKind, state: AdminState | None, fences: bool) -> None:
    one = ObjectChange(kind=kind, name=HOST, body=None if state is None else body(state))
    assert fence_from_decision(ObjectsChange(actor="me", changes=(one,))) == ([HOST] if fences else [])


@pytest.mark.parametrize(
    ("kind", "decided", "known", "fences"),
    [
        (ObjectKind.HOST, FENCED, None, True),
        (ObjectKind.HOST, FENCED, replace(FENCE, unfencing=True), True),
        (ObjectKind.HOST, FENCED, FENCE, False),
        (ObjectKind.HOST, ENABLED, None, False),
        (ObjectKind.HOST, None, None, False),
        (ObjectKind.CELL, FENCED, None, False),
    ],
)
@pytest.mark.parametrize("before", [None, ENABLED, FENCED])
def test_a_host_gets_a_fence_if_it_has_none_whatever_was_decided_before(
    before: AdminState | None, kind: ObjectKind, decided: AdminState | None, known: FenceRecord | None, fences: bool
) -> None:
    bodies = {name: None if one is None else body(one) for name, one in (("before", before), ("after", decided))}
    one = ChangedObject(kind=kind, name=HOST, **bodies)
    assert hosts_fenced([one], on_record(known)) == ([HOST] if fences else [])


OFF = FenceRecord(host="now", version=9)
AGAIN = replace(FENCE, host="now", version=9)
LIFTED = replace(FENCE, version=9, unfencing=True)
HAD = replace(FENCE, acknowledged=4)


@pytest.mark.parametrize(
    ("decided", "known", "of", "after"),
    [
        (FENCED, None, {"cell": "c1"}, replace(OFF, cell="c1")),
        (FENCED, None, {"force": True}, OFF),
        (FENCED, None, {"revision": 1}, replace(OFF, version=1)),
        (FENCED, FENCE, {}, AGAIN),
        (FENCED, replace(FENCE, unfencing=True, forced=True), {"force": True}, AGAIN),
        (FENCED, FENCE, {"cell": "c2"}, replace(AGAIN, cell="c2")),
        (FENCED, FENCE, {"revision": 5}, replace(AGAIN, version=5)),
        (FENCED, FENCE, {"revision": 4}, replace(AGAIN, version=5)),
        (ENABLED, FENCE, {}, replace(LIFTED, host="now")),
        (ENABLED, FENCE, {"force": True}, replace(LIFTED, host="now", forced=True)),
        (ENABLED, replace(FENCE, forced=True), {}, replace(LIFTED, host="now", forced=True)),
        (None, FENCE, {}, LIFTED),
        (ENABLED, None, {"force": True}, None),
        (None, None, {}, None),
        (FENCED, None, {"token": "t"}, replace(OFF, token="t")),
        (FENCED, replace(FENCE, token="s"), {"token": "t"}, replace(AGAIN, version=9, token="s")),
        (FENCED, FENCE, {"kind": ObjectKind.CELL}, None),
    ],
)
def test_what_a_decision_about_a_host_makes_of_its_fence(
    decided: AdminState | None, known: FenceRecord | None, of: dict[str, Any], after: FenceRecord | None
) -> None:
    present = on_record(known)
    decision = None if decided is None else body(decided)
    one = ChangedObject(kind=of.get("kind", ObjectKind.HOST), name=HOST, after=decision)
    kept = {name: of[name] for name in ("force", "token") if name in of}
    others = [replace(one, kind=ObjectKind.CELL), ChangedObject(kind=ObjectKind.HOST, name=VM, after=body(ENABLED))]
    found = fence_after_change([*others, one], present, of.get("revision", 9), {HOST: of.get("cell")}.get, **kept)
    assert found == (() if after is None else (changed(known, after),))


@pytest.mark.parametrize(
    ("known", "state", "version", "after"),
    [
        (FENCE, FenceState.FENCED, 4, replace(FENCE, acknowledged=4, stale_machines=5)),
        (replace(FENCE, cell=None), FenceState.FENCED, 4, replace(FENCE, cell=None, acknowledged=4, stale_machines=5)),
        (replace(FENCE, cell="c2"), FenceState.FENCED, 4, "none"),
        (replace(FENCE, acknowledged=4, stale_machines=5), FenceState.FENCED, 4, "none"),
        (FENCE, FenceState.FENCED, 3, "none"),
        (FENCE, FenceState.FENCED, 7, replace(FENCE, version=8)),
        (FENCE, FenceState.UNFENCED, 7, replace(FENCE, version=8)),
        (HAD, FenceState.FENCED, 7, replace(HAD, version=8)),
        (HAD, FenceState.UNFENCED, 7, replace(HAD, version=8, unfencing=True)),
        (HAD, FenceState.UNFENCING, 7, replace(HAD, version=8, unfencing=True)),
        (replace(HAD, unfencing=True), FenceState.FENCED, 7, replace(HAD, version=8, unfencing=True)),
        (replace(FENCE, unfencing=True), FenceState.UNFENCED, 4, None),
        (FENCE, FenceState.UNFENCED, 4, "none"),
        (
            replace(FENCE, unfencing=True),
            FenceState.UNFENCING,
            4,
            replace(FENCE, unfencing=True, acknowledged=4, stale_machines=5),
        ),
    ],
)
def test_what_the_report_of_a_cell_makes_of_a_fence(
    known: FenceRecord, state: FenceState, version: int, after: Any
) -> None:
    report = HostFence(cell="c1", host_uuid=HOST, version=version, state=state, stale_machines=5)
    assert acknowledge(HOST, known, report) == (None if after == "none" else changed(known, after))


@pytest.mark.parametrize(
    ("state", "version", "revision", "lift"),
    [
        (FenceState.FENCED, 4, 9, 10),
        (FenceState.FENCED, 9, 4, 10),
        (FenceState.UNFENCING, 4, 9, None),
        (FenceState.UNFENCED, 4, 9, None),
    ],
)
def test_a_fence_of_a_cell_that_is_not_on_record_is_lifted(
    state: FenceState, version: int, revision: int, lift: int | None
) -> None:
    report = HostFence(cell="c1", host_uuid=HOST, version=version, state=state, stale_machines=5)
    record = FenceRecord(host="h", cell="c1", version=lift or 0, unfencing=True, acknowledged=version, stale_machines=5)
    assert unfence_unknown(report, revision, "h") == (None if lift is None else changed(None, record))


def test_a_cell_is_told_of_a_fence_why_and_by_whom() -> None:
    decision = HostAdminState(host_uuid=HOST, host="now", state=FENCED, reason="smoke", by="ann", at=7.0)
    told = CellFence(host_uuid=HOST, host="h", version=4, reason="smoke", by="ann", at=7.0)
    assert command(HOST, FENCE, decision) == told
    assert command(HOST, replace(FENCE, unfencing=True), None) == CellFence(
        host_uuid=HOST, host="h", version=4, unfence=True
    )


@pytest.mark.parametrize(
    ("decided", "fence", "shown"),
    [
        (None, {}, {"state": FENCED, "pending": None}),
        (None, {"unfencing": True}, {"state": FENCED, "pending": ENABLED}),
        (FENCED, {}, {"state": FENCED, "pending": None}),
        (AdminState.DISABLED, {"unfencing": True}, {"state": FENCED, "pending": AdminState.DISABLED}),
        (AdminState.DISABLED, {"unfencing": True, "forced": True}, None),
        (None, {"forced": True}, None),
    ],
)
def test_a_fenced_host_is_fenced_whatever_is_decided_until_its_fence_goes(
    decided: AdminState | None, fence: dict[str, Any], shown: dict[str, Any] | None
) -> None:
    decision = HostAdminState(host_uuid=HOST, host="h", state=decided or ENABLED)
    expected = replace(decision, fence=4, acknowledged=3, stale_machines=2, **shown) if shown is not None else decision
    assert fenced(None if decided is None else decision, HOST, replace(FENCE, **fence)) == expected


# --- evacuations


@pytest.mark.parametrize(
    ("acknowledged", "lifting", "found"), [(3, False, False), (4, False, True), (5, False, True), (4, True, False)]
)
def test_the_instances_of_a_host_are_evacuated_once_its_cell_has_its_fence(
    acknowledged: int, lifting: bool, found: bool
) -> None:
    fence = replace(FENCE, acknowledged=acknowledged, unfencing=lifting)
    hosts = fenced_hosts({HOST: fence})
    assert hosts == ({HOST: DrainedHost(HOST, "h", drain=hosts[HOST].drain)} if found else {})
    ids = {
        one[uuid].drain
        for uuid, other in ((HOST, fence), (VM, fence), (HOST, replace(fence, token="of the fence")))
        if (one := fenced_hosts({uuid: other}))
    }
    assert len(ids) == 3 * found, "nobody can guess the ids of the requests"
    again = fenced_hosts({HOST: replace(fence, version=6, acknowledged=6)})
    assert lifting or again[HOST].drain not in ids, "a fence that is decided anew has its own tries"


BUILD = RecordedBuild(instance_uuid=VM, project_id="p", state=BuildState.ACTIVE, sequence=1)
REQUEST = BuildRequest(instance_uuid=VM, project_id="p", flavor="f")
KNOWN = ActionContext(build=BUILD, build_request=REQUEST)
CONFIG = SchedulerConfig(
    flavors={name: Flavor(extra_specs={"berth:on_host_failure": name}) for name in ("restart", "fail")},
    on_host_failure=RESTART,
)


def in_condition(condition: Condition, flavor: str = "") -> ActionContext:
    return replace(KNOWN, build=replace(BUILD, instance=SinceBuild(condition=condition, flavor=flavor)))


@pytest.mark.parametrize(
    ("known", "restarted"),
    [
        (KNOWN, True),
        (replace(KNOWN, build_request=replace(REQUEST, on_host_failure=FAIL)), False),
        (replace(KNOWN, build_request=replace(REQUEST, on_host_failure=WAIT)), False),
        (replace(KNOWN, build_request=replace(REQUEST, flavor="fail")), False),
        (replace(in_condition(Condition.ACTIVE, "restart"), build_request=replace(REQUEST, flavor="fail")), True),
        (ActionContext(build_request=REQUEST), False),
        (replace(KNOWN, build_request=None), False),
        (replace(KNOWN, build=replace(BUILD, state=BuildState.DELETING)), False),
        *(
            (in_condition(one), one in {Condition.ACTIVE, Condition.STOPPED, Condition.SHELVED, Condition.RESCUED})
            for one in Condition
        ),
    ],
)
def test_an_instance_that_is_restarted_elsewhere(known: ActionContext, restarted: bool) -> None:
    assert is_restarted(known, CONFIG) is restarted


def test_a_cell_is_told_of_no_policy_that_waits() -> None:
    assert visible_to_cell(WAIT) is None
