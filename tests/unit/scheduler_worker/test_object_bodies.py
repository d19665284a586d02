"""Operators' objects by tables: the rules of each kind's body, what a change makes of them, and what is in force."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from bus.contracts.actions import ActionKind
from bus.contracts.base import MAX_REASON, Refusal
from bus.contracts.build import BuildRequest
from bus.contracts.drains import DrainRecord, DrainTarget
from bus.contracts.objects import (
    Aggregate,
    ChangedObject,
    FenceRecord,
    Flavor,
    GroupDefinition,
    ObjectChange,
    ObjectKind,
    ObjectsChange,
    StoredObject,
)
from bus.contracts.operations import AdminState, HostAdminState
from bus.contracts.placement import GroupPolicy, ServerGroup
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.objects.change_plan import MAX_OF_KIND, plan
from scheduler_worker.objects.consistency import MAX_COUNTED, broken_rule, counted, named
from scheduler_worker.objects.effective_config import (
    configuration_bodies,
    effective_config,
    seeds,
    unknown_class,
    zone_change_refusal,
)
from scheduler_worker.records.object_records import (
    MAX_BODY_BYTES,
    MAX_ENTRY,
    ChangeActor,
    ChangePlan,
    RecordedObjects,
    applied,
    body_of,
    cells_of,
    disabled_cells,
    drains_of,
    fences_of,
    host_decisions,
)

K = ObjectKind
U1, U2, U3 = (f"{n}b000000-0000-4000-8000-000000000001" for n in "ace")
Body = dict[str, Any]
ENABLED, FENCED = {"host": "h", "state": "enabled"}, {"host": "h", "state": "fenced"}
GROUP = {"policy": "affinity", "uuid": U1}
DEEP: Body = {}
for _ in range(3000):
    DEEP = {"a": DEEP}
LONG_UUID = f"{U1}{'-' * 3000}"


def rack(name: str = "rack", uuid: str = U1, **more: Any) -> Body:
    return {"name": name, "uuid": uuid, **more}


@pytest.mark.parametrize(
    ("kind", "name", "body", "wrong"),
    [
        (K.FLAVOR, "f", {}, None),
        (K.FLAVOR, "a\nb", {}, "control characters"),
        (K.FLAVOR, "f", DEEP, "nested too deeply"),
        (K.FLAVOR, "f", {"vcpus": "x"}, "vcpus"),
        (K.QUOTA, "p", {"limits": {"VCPU": 1, "DISK_GB": -1}}, "(limits.DISK_GB)"),
        (K.QUOTA, "p", {"limits": {"VCPU": 1}, "other": {"a": 1}}, "other"),
        (K.SCHEDULING, "default", {}, None),
        (K.SCHEDULING, "mine", {}, "'default'"),
        (K.AGGREGATE, "rack", rack(), None),
        (K.AGGREGATE, "rack", rack("other"), "'other'"),
        (K.AGGREGATE, "rack", rack(uuid="x"), "'x' is no uuid"),
        (K.AGGREGATE, "rack", rack(uuid=U1.upper()), None),
        (K.AGGREGATE, "rack", rack(uuid=U1.upper(), hosts=[]), "lower case"),
        (K.AGGREGATE, "rack", rack(hosts=["h"]), None),
        (K.HOST, U1, ENABLED, None),
        (K.HOST, U1.upper(), ENABLED, "lower case"),
        (K.HOST, "h", ENABLED, "'h' is no uuid"),
        (K.CELL, "c1", {"state": "enabled"}, None),
        (K.CELL, "c 1", {"state": "enabled"}, "a cell's name"),
        (K.CELL, "api", {"state": "enabled"}, "the bus of clients"),
        (K.CELL, "c1", {"state": "enabled", "bus": {"url_file": "f"}}, None),
        (K.CELL, "c1", {"state": "enabled", "bus": {"url_variable": "CELL_1"}}, None),
        (K.CELL, "c1", {"state": "enabled", "bus": {"url_file": "f", "url_variable": "CELL_1"}}, "not in both"),
        (K.CELL, "c1", {"state": "enabled", "bus": {"url_file": "../secret"}}, "(bus.url_file)"),
        (K.CELL, "c1", {"state": "enabled", "bus": {"url_file": "/etc/passwd"}}, "(bus.url_file)"),
        (K.CELL, "c1", {"state": "enabled", "bus": {"url_file": "f\n"}}, "(bus.url_file)"),
        (K.CELL, "c1", {"state": "enabled", "bus": {"url_variable": "BERTH_BUS__URL"}}, "(bus.url_variable)"),
        (K.CELL, "c1", {"state": "enabled", "bus": {"url": "amqp://u:p@h/"}}, "(bus.url)"),
        (K.GROUP, "p/g", GROUP, None),
        (K.GROUP, "p/g/h", GROUP, None),
        (K.GROUP, "p", GROUP, "PROJECT/NAME"),
        (K.GROUP, "p/", GROUP, "PROJECT/NAME"),
        (K.GROUP, "/g", GROUP, "the project of"),
        (K.GROUP, "p q/g", GROUP, "the project of"),
    ],
)
def test_the_rules_of_each_kind(kind: ObjectKind, name: str, body: Body, wrong: str | None) -> None:
    named = re.escape(f"{kind.value} {name!r}") + ".*" + re.escape(wrong or "")
    with nullcontext() if wrong is None else pytest.raises(ValueError, match=f"^{named}"):
        body_of(kind, name, body)


@pytest.mark.parametrize(
    ("zone", "is_a_zone"),
    [
        *((name, True) for name in ("z", "az.one", "DC1 Rack 2", "zürich", "eu-de-1/a", "z" * 255, "東" * 255)),
        *((name, False) for name in ("", " ", " z", "z ", "z\n", "a\nb", "a\x00b", "a\x85b", "z" * 256)),
    ],
)
def test_a_zone_that_can_be_made_can_be_asked_for_and_no_other(zone: str, is_a_zone: bool) -> None:
    asked = {"type": "build.request.v1", "instance_uuid": U1, "flavor": "f", "project_id": "p"}
    with nullcontext() if is_a_zone else pytest.raises(ValueError, match="availability_zone"):
        body_of(K.AGGREGATE, "rack", rack(metadata={"availability_zone": zone}))
    with nullcontext() if is_a_zone else pytest.raises(msgspec.ValidationError, match="availability_zone"):
        msgspec.json.decode(msgspec.json.encode({**asked, "availability_zone": zone}), type=BuildRequest)
    with nullcontext() if is_a_zone else pytest.raises(msgspec.ValidationError, match="default_availability_zone"):
        msgspec.convert({"default_availability_zone": zone}, SchedulerConfig)


@pytest.mark.parametrize(("size", "is_taken"), [(MAX_BODY_BYTES, True), (MAX_BODY_BYTES + 1, False)])
def test_a_body_has_a_bounded_size(size: int, is_taken: bool) -> None:
    body = rack("x", hosts=["h"], metadata={"key": ""})
    body["name"] += "x" * (size - len('{"hosts":["h"],"metadata":{"key":""},"name":"x","uuid":""}') - len(U1))
    with nullcontext() if is_taken else pytest.raises(ValueError, match="is larger than"):
        body_of(K.AGGREGATE, body["name"], body)


def test_a_refusal_names_an_entry_by_its_beginning() -> None:
    with pytest.raises(ValueError, match="limits") as raised:
        body_of(K.QUOTA, "p", {"limits": {"VCPU": 1, "x" * 300: 1}})
    assert f"({('limits.' + 'x' * 300)[:MAX_ENTRY]})" in str(raised.value)
    with pytest.raises(ValueError, match="uuid") as raised:
        body_of(K.AGGREGATE, "rack", {"name": "rack", "uuid": 5, "metadata": {"a": "b"}})
    assert "(" not in str(raised.value), "no entry is wrong"


# --- changes


def stored(kind: ObjectKind, name: str, body: Body, version: int = 3) -> StoredObject:
    return StoredObject(kind=kind, name=name, body=body, version=version, changed_at=7.0, changed_by="ann")


def present(*objects: StoredObject) -> dict[tuple[ObjectKind, str], StoredObject]:
    return {(one.kind, one.name): one for one in objects}


SMALL, LARGE, RACK = (
    stored(K.FLAVOR, "small", {"vcpus": 1}),
    stored(K.FLAVOR, "z", {}),
    stored(K.AGGREGATE, "rack", rack()),
)
FENCE = stored(K.FENCE, U1, {"host": "h", "version": 4, "acknowledged": 4})
FENCED_HOST = stored(K.HOST, U1, FENCED)
KNOWN = (SMALL, LARGE, RACK, FENCE, FENCED_HOST, stored(K.HOST, U3, ENABLED))


def changed(kind: ObjectKind, name: str, before: Body | None, after: Body | None) -> ChangedObject:
    return ChangedObject(kind=kind, name=name, before=before, after=after)


@pytest.mark.parametrize(
    ("changes", "more", "planned"),
    [
        ([], {}, ()),
        ([(K.FLAVOR, "new", {"vcpus": 2})], {}, (changed(K.FLAVOR, "new", None, {"vcpus": 2}),)),
        ([(K.FLAVOR, "small", {"vcpus": 1})], {}, ()),
        ([(K.FLAVOR, "small", {"vcpus": 1, "memory_mb": 0})], {}, ()),
        ([(K.FLAVOR, "small", None)], {}, (changed(K.FLAVOR, "small", {"vcpus": 1}, None),)),
        ([(K.FLAVOR, "small", None, 3)], {}, (changed(K.FLAVOR, "small", {"vcpus": 1}, None),)),
        ([(K.FLAVOR, "new", {}, 0)], {}, (changed(K.FLAVOR, "new", None, {}),)),
        ([(K.FLAVOR, "small", {}, 2)], {}, "object.conflict"),
        ([(K.FLAVOR, "small", {}, 0)], {}, "object.conflict"),
        ([(K.FLAVOR, "new", None)], {}, "object.unknown"),
        ([(K.FLAVOR, "new", None, 1)], {}, "object.conflict"),
        ([(K.FLAVOR, "new", {}), (K.FLAVOR, "new", {})], {}, "object.invalid"),
        ([(K.FLAVOR, name, {}) for name in "ba"], {}, tuple(changed(K.FLAVOR, name, None, {}) for name in "ab")),
        ([(K.FENCE, U1, None)], {}, "object.invalid"),
        ([(K.DRAIN, U1, None)], {}, "object.invalid"),
        ([(K.REPAIR, U1, {})], {}, "object.invalid"),
        ([(K.SERVICE, "s", {})], {}, "object.invalid"),
        ([(K.AGGREGATE, "b", rack("b", "x" * 3000))], {}, "object.invalid"),
        ([(K.AGGREGATE, name, rack(name, LONG_UUID)) for name in "bc"], {}, "object.invalid"),
        ([(K.HOST, U2, FENCED | {"drain": U1})], {}, "object.invalid"),
        ([(K.HOST, U2, FENCED)], {}, (changed(K.HOST, U2, None, FENCED),)),
        ([(K.HOST, U1, FENCED)], {}, ()),
        ([(K.HOST, U1, FENCED)], {"restates_fences": True}, (changed(K.HOST, U1, FENCED, FENCED),)),
        ([(K.HOST, U1, ENABLED)], {"restates_fences": True}, (changed(K.HOST, U1, FENCED, ENABLED),)),
        ([(K.FLAVOR, "small", {"vcpus": 1})], {"restates_fences": True}, ()),
        ([(K.HOST, U3, ENABLED)], {"restates_fences": True}, ()),
        (
            [(K.FLAVOR, "z", None), (K.FLAVOR, "a", {})], {},
            (changed(K.FLAVOR, "a", None, {}), changed(K.FLAVOR, "z", {}, None)),
        ),
        ([(K.FLAVOR, "small", {"vcpus": 1})], {"prune": (K.FLAVOR,)}, (changed(K.FLAVOR, "z", {}, None),)),
        (
            [], {"prune": (K.FENCE, K.HOST)},
            (changed(K.HOST, U1, FENCED, None), changed(K.HOST, U3, ENABLED, None)),
        ),
    ],
)  # fmt: skip
def test_what_a_change_comes_to(changes: list[Any], more: dict[str, Any], planned: Any) -> None:
    asked = tuple(
        ObjectChange(kind=kind, name=name, body=body, if_version=version[0] if version else None)
        for kind, name, body, *version in changes
    )
    restates = {"restates_fences": True} if more.pop("restates_fences", False) else {}
    found = plan(ObjectsChange(actor="me", changes=asked, **more), present(*KNOWN), **restates)
    if isinstance(planned, str):
        assert isinstance(found, Refusal) and found.code == planned and len(found.reason) <= MAX_REASON
    else:
        assert found == ChangePlan(planned)


@pytest.mark.parametrize(
    ("known", "changes", "is_refused"),
    [
        ((SMALL, LARGE), {"a": {}}, True),
        ((SMALL, RACK), {"a": {}}, False),
        ((SMALL, LARGE), {"small": {}}, False),
        ((SMALL, LARGE), {"a": {}, "small": None}, False),
        ((SMALL, LARGE), {"a": {}, "b": {}, "small": None}, True),
        ((SMALL, RACK), {"a": {}, "b": {}}, True),
        ((SMALL, LARGE), {"quota": {}}, False),
    ],
)
def test_objects_of_one_kind_are_bounded(
    known: tuple[StoredObject, ...], changes: dict[str, Body | None], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_OF_KIND == 10_000
    monkeypatch.setattr("scheduler_worker.objects.change_plan.MAX_OF_KIND", 2)
    kinds = {"quota": K.QUOTA}
    asked = tuple(ObjectChange(kind=kinds.get(name, K.FLAVOR), name=name, body=body) for name, body in changes.items())
    found = plan(ObjectsChange(actor="me", changes=asked), present(*known))
    assert (found.code if isinstance(found, Refusal) else None) == ("object.too_many" if is_refused else None)


OF_GROUP = ServerGroup(uuid=U1, policy=GroupPolicy.AFFINITY)
NOTHING = {"deleted": (), "remade": (), "groups": (), "named": (), "cells": ()}
HOSTS, MORE = rack(hosts=["h1"]), rack(hosts=["h1", "h2"])


@pytest.mark.parametrize(
    ("kind", "before", "after", "leads_to"),
    [
        (K.FLAVOR, {"vcpus": 1}, None, {"deleted": ("p/x",)}),
        (K.FLAVOR, {"vcpus": 1}, {"vcpus": 2}, {"remade": ("p/x",)}),
        (K.FLAVOR, {"vcpus": 1}, {"vcpus": 1, "projects": ["p"]}, {}),
        (K.FLAVOR, None, {"vcpus": 2}, {}),
        (K.QUOTA, {"limits": {}}, {"limits": {"VCPU": 1}}, {}),
        (K.QUOTA, {"limits": {}}, None, {}),
        (K.GROUP, None, GROUP, {}),
        (K.GROUP, GROUP, None, {"groups": (("p/x", OF_GROUP),)}),
        (K.GROUP, GROUP, GROUP | {"max_per_host": 1}, {}),
        (K.GROUP, GROUP, GROUP | {"max_per_host": 2}, {"groups": (("p/x", OF_GROUP),)}),
        (K.AGGREGATE, None, HOSTS, {"named": (("p/x", "h1"),)}),
        (K.AGGREGATE, HOSTS, MORE, {"named": (("p/x", "h2"),)}),
        (K.AGGREGATE, rack(), HOSTS, {"named": (("p/x", "h1"),)}),
        (K.AGGREGATE, HOSTS, rack(), {}),
        (K.AGGREGATE, HOSTS, None, {}),
        (K.CELL, None, {"state": "disabled"}, {"cells": ("p/x",)}),
        (K.CELL, {"state": "disabled"}, None, {"cells": ("p/x",)}),
        (K.CELL, None, {"state": "fenced", "hosts": ["h1"]}, {"cells": ("p/x",)}),
    ],
)
def test_what_a_change_of_one_object_leads_to(
    kind: ObjectKind, before: Body | None, after: Body | None, leads_to: dict[str, Any]
) -> None:
    planned = ChangePlan((changed(kind, "p/x", before, after),))
    assert NOTHING | leads_to == {
        "deleted": planned.flavors_deleted, "remade": planned.flavors_remade, "groups": planned.groups_changed,
        "named": planned.hosts_named, "cells": tuple(one.name for one in planned.cells_decided),
    }  # fmt: skip


def test_objects_after_a_change_have_its_revision_and_its_author() -> None:
    known = RecordedObjects(8, present(SMALL, LARGE))
    changes = [changed(K.FLAVOR, "z", {}, None), changed(K.FLAVOR, "new", None, {}), changed(K.FLAVOR, "no", {}, None)]
    after = applied(known, changes, ChangeActor("bob", "", 9.0))
    new = StoredObject(kind=K.FLAVOR, name="new", body={}, version=9, changed_at=9.0, changed_by="bob")
    assert after == RecordedObjects(9, present(SMALL, new)) and not ChangeActor("bob", "", 9.0).forced
    assert configuration_bodies(known.objects, changes) == {(K.FLAVOR, "small"): {"vcpus": 1}, (K.FLAVOR, "new"): {}}
    others = [stored(kind, "x", {}) for kind in K]
    kept = {K.FLAVOR, K.AGGREGATE, K.QUOTA, K.SCHEDULING, K.GROUP}
    assert {kind for kind, _ in configuration_bodies(present(*others))} == kept


# --- what is in force


def test_the_decisions_in_force() -> None:
    drain = {"name": "d", "target": "host", "kind": "migrate", "by": "ann"}
    cells = (stored(K.CELL, "c1", {"state": "enabled"}), stored(K.CELL, "c2", {"state": "disabled"}))
    removed = stored(K.CELL, "c3", {"state": "removed"})
    other = stored(K.HOST, U2, {"host": "g", "state": "disabled", "reason": "r", "drain": U1})
    objects = present(SMALL, FENCE, stored(K.HOST, U1, ENABLED), other, stored(K.DRAIN, U1, drain), *cells, removed)
    assert fences_of(objects) == {U1: FenceRecord(host="h", version=4, acknowledged=4)}
    assert drains_of(objects) == {U1: DrainRecord(name="d", target=DrainTarget.HOST, kind=ActionKind.MIGRATE, by="ann")}
    assert cells_of(objects) == {"c1": cells[0], "c2": cells[1], "c3": removed}
    assert disabled_cells(objects) == {"c2", "c3"}
    decided = HostAdminState(host_uuid=U1, host="h", state=AdminState.FENCED, by="ann", at=7.0, version=3)
    assert host_decisions(objects) == {
        U1: replace(decided, fence=4, acknowledged=4),
        U2: replace(decided, host_uuid=U2, host="g", state=AdminState.DISABLED, reason="r", drain=U1),
    }
    assert host_decisions(present(SMALL, FENCE))[U1].state is AdminState.FENCED, "without a decision, too"


def test_the_objects_of_settings_and_the_settings_of_objects() -> None:
    flavors, racks = {"f": Flavor(vcpus=1)}, tuple(Aggregate(uuid=uuid, name=uuid) for uuid in (U1, U2))
    group = GroupDefinition(policy=GroupPolicy.AFFINITY)
    quotas = {"p": {"VCPU": 1}}
    settings = SchedulerConfig(
        default_flavors=(), flavors=flavors, aggregates=racks, quotas=quotas, groups={"p/g": group}
    )
    for default in ({}, {"VCPU": 9}):
        seeded = seeds(replace(settings, default_quota=default))
        keys = [(K.AGGREGATE, U1), (K.AGGREGATE, U2), (K.FLAVOR, "f"), (K.GROUP, "p/g")]
        keys += [(K.QUOTA, "default")] * bool(default) + [(K.QUOTA, "p")]
        assert [(one.kind, one.name, one.before) for one in seeded] == [(*key, None) for key in keys]
        found = effective_config(SchedulerConfig(max_attempts=9), configuration_bodies({}, seeded))
        assert found == replace(settings, max_attempts=9, default_quota=default)
    with pytest.raises(ValueError, match="twice"):
        seeds(SchedulerConfig(aggregates=(*racks, replace(racks[1], uuid=U1))))
    rules: Body = {"multipliers": {"ram": 2.0}, "host_subset_size": 3, "enabled_weighers": ["RAMWeigher"]}
    found = effective_config(settings, {(K.SCHEDULING, "default"): rules})
    assert (found.multipliers, found.host_subset_size, found.enabled_weighers) == ({"ram": 2.0}, 3, ("RAMWeigher",))
    assert (found.enabled_filters, found.flavors) == (settings.enabled_filters, {})


# --- rules between objects


@pytest.mark.parametrize(
    ("one", "others", "broken"),
    [
        (changed(K.FLAVOR, "x" * 255, None, {}), (), False),
        (changed(K.FLAVOR, "x" * 256, None, {}), (), True),
        (changed(K.FLAVOR, "", None, {}), (), True),
        (changed(K.FLAVOR, "", {}, {"vcpus": 1}), (), False),
        (changed(K.QUOTA, "p a", None, {}), (), True),
        (changed(K.QUOTA, "p a", {}, {}), (), False),
        (changed(K.QUOTA, "p a", {}, None), (), False),
        (changed(K.QUOTA, "default", None, {}), (), False),
        (changed(K.GROUP, "p a", None, {}), (), False),
        (changed(K.GROUP, "p", None, {"projects": ["p a"]}), (), False),
        (changed(K.FLAVOR, "f", None, {"projects": ["p", "p a"]}), (), True),
        (changed(K.FLAVOR, "f", {"projects": ["p a"]}, {"projects": ["p", "p a"]}), (), False),
        (changed(K.AGGREGATE, "a", None, rack("a")), ("b",), True),
        (changed(K.AGGREGATE, "a", None, rack("a", U1.upper())), ("b",), True),
        (changed(K.AGGREGATE, "a", rack("a", U2), rack("a")), ("b",), True),
        (changed(K.AGGREGATE, "a", rack("a", U1.upper()), rack("a")), ("b",), False),
        (changed(K.AGGREGATE, "a", rack("a"), rack("a")), ("b",), False),
        (changed(K.AGGREGATE, "a", None, rack("a", U2)), ("b",), False),
        (changed(K.AGGREGATE, "a", None, rack("a")), (), False),
        (changed(K.AGGREGATE, "a", rack("a"), None), ("b",), False),
        (changed(K.QUOTA, "a", None, rack("a")), ("b",), False),
    ],
)
def test_rules_between_objects_hold_for_what_is_new(one: ChangedObject, others: tuple[str, ...], broken: bool) -> None:
    after = {(K.AGGREGATE, name): rack(name) for name in others} | {(K.FLAVOR, "u"): {"uuid": U1}}
    if one.after is not None:
        after[one.kind, one.name] = one.after
    kept = [
        changed(K.QUOTA, "p", {}, {}),
        changed(K.AGGREGATE, "no", rack(), None),
        changed(K.AGGREGATE, "b", *[rack()] * 2),
    ]
    refusal = broken_rule(iter([*kept, one]), after)
    assert (refusal is not None) is broken and len(refusal or "") < 400


@pytest.mark.parametrize(
    ("kind", "body", "named_"),
    [
        (K.QUOTA, {}, None),
        (K.QUOTA, {"limits": {"INSTANCES": 1, "VCPU": 1, "CUSTOM_A": 1}}, None),
        (K.QUOTA, {"limits": {"CORES": 1}}, "CUSTOM_"),
        (K.QUOTA, {"limits": {"ZZZ": 1}}, "CUSTOM_"),
        (K.FLAVOR, {}, None),
        (K.FLAVOR, {"limits": {"ZZZ": 1}}, None),
        (K.FLAVOR, {"extra_specs": {"resources:ZZZ": "1"}}, "CUSTOM_"),
        (K.FLAVOR, {"extra_specs": {"resources_X:VGPUS": "1"}}, "CUSTOM_"),
        (K.FLAVOR, {"extra_specs": {"hw:ZZZ": "1", "resources": "2"}}, None),
        (K.AGGREGATE, {"limits": {"ZZZ": 1}, "extra_specs": {"resources:ZZZ": "1"}}, None),
    ],
)
def test_a_class_that_no_provider_can_have_is_reported(kind: ObjectKind, body: Body, named_: str | None) -> None:
    refusal = unknown_class([changed(kind, "x", None, body)])
    assert refusal is None if named_ is None else refusal is not None and refusal.rstrip().endswith(named_)
    assert unknown_class([changed(kind, "x", body, body)]) is None, "what is on record is not judged again"
    assert unknown_class([changed(kind, "x", body, None)]) is None


@pytest.mark.parametrize(
    ("moved", "in_use", "shown"),
    [
        (0, 9, None),
        (1, 9, ["h0"]),
        (9, 0, None),
        (5, 9, ["h0", "h1", "h2", "h3", "h4"]),
        (7, 6, ["h0", "h1", "h2", "h3", "h4"]),
    ],
)
def test_hosts_with_instances_that_change_zone_are_named(moved: int, in_use: int, shown: list[str] | None) -> None:
    before = {f"h{n}": ["nova", "b"] for n in range(9)}
    after = {host: ["b", "east"] if int(host[1]) < moved else ["b", "nova", "c"] for host in before}
    refusal = zone_change_refusal(before, after, [f"h{n}" for n in range(in_use)])
    assert (refusal is None) is (shown is None)
    if refusal is not None and shown is not None:
        count = min(moved, in_use)
        assert refusal.startswith("1 host with" if count == 1 else f"{count} hosts with")
        assert [host for host in before if f"{host} (nova and b to b and east)" in refusal] == shown
        assert (f"and {count - 5} more" in refusal) is (count > 5)


def test_a_bounded_count_and_a_bounded_list_in_words() -> None:
    words = {1: "1 build", 2: "2 builds", MAX_COUNTED - 1: f"{MAX_COUNTED - 1} builds"}
    words[MAX_COUNTED] = f"{MAX_COUNTED} or more builds"
    assert {count: counted(count, "build") for count in words} == words
    many = [changed(K.FLAVOR, f"f{number}", None, {}) for number in range(12)]
    assert named(many) == [f"flavor f{number}" for number in range(10)] and named(many, 1) == ["flavor f0"]
