"""Operators' objects: what a change does to those on record, and the configuration that they add up to."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import structs

from bus.clock import SystemClock
from bus.consuming.stall_watch import StallWatch
from bus.contracts.base import Refusal
from bus.contracts.groups import GroupPolicy
from bus.contracts.objects import (
    Aggregate,
    ChangedObject,
    Flavor,
    GroupDefinition,
    ObjectChange,
    ObjectKind,
    ObjectsChange,
    StoredObject,
)
from bus.service.settings import SettingsError
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.objects import (
    MAX_BODY_BYTES,
    ChangeAuthor,
    ChangePlan,
    RecordedObjects,
    applied,
    configuration_bodies,
    effective_config,
    plan,
    seeds,
    unknown_class,
    zones_that_move,
)
from scheduler_worker.objects import ObjectRegistry, check_objects
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from tests.unit.scheduler.hosts import Hosts

RACK = "10000000-0000-4000-8000-000000000000"
F, A, Q, S, C = ObjectKind.FLAVOR, ObjectKind.AGGREGATE, ObjectKind.QUOTA, ObjectKind.SCHEDULING, ObjectKind.CELL

TOO_LARGE = {f"key{number}": "x" * 255 for number in range(256)}

PRESENT = {
    (F, "small"): StoredObject(kind=F, name="small", body={"vcpus": 1}, version=3),
    (F, "large"): StoredObject(kind=F, name="large", body={"vcpus": 8}, version=5),
    (Q, "default"): StoredObject(kind=Q, name="default", body={"limits": {"VCPU": 10}}, version=1),
}


def change(kind: ObjectKind, name: str, body: dict[str, Any] | None = None, **more: Any) -> ObjectChange:
    return ObjectChange(kind=kind, name=name, body=body, **more)


def requested(*changes: ObjectChange, **more: Any) -> ObjectsChange:
    return ObjectsChange(who="me", changes=changes, **more)


def test_a_change_shows_what_was_before_and_leaves_out_what_stays() -> None:
    same = change(F, "small", {"vcpus": 1})
    planned = plan(requested(same, change(F, "large", {"vcpus": 16}), change(F, "new", {})), PRESENT)
    assert planned == ChangePlan(
        (
            ChangedObject(kind=F, name="large", before={"vcpus": 8}, after={"vcpus": 16}),
            ChangedObject(kind=F, name="new", before=None, after={}),
        )
    )


def test_prune_deletes_what_is_not_named_of_these_kinds_only() -> None:
    planned = plan(requested(change(F, "small", {"vcpus": 1}), prune=(F,)), PRESENT)
    assert isinstance(planned, ChangePlan)
    assert planned.changed == (ChangedObject(kind=F, name="large", before={"vcpus": 8}, after=None),)
    assert planned.flavors_deleted == ("large",)


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ([change(F, "gone")], "object.unknown", "there is no flavor 'gone'"),
        ([change(F, "small", {}, if_version=2)], "object.conflict", "version 3, not 2"),
        ([change(F, "new", {}, if_version=1)], "object.conflict", "version 0, not 1"),
        ([change(F, "small", {}), change(F, "small")], "object.invalid", "named twice"),
        ([change(F, "small", {"vcpu": 2})], "object.invalid", "vcpu"),
        ([change(F, "small", {"vcpus": -1})], "object.invalid", "flavor 'small'"),
        ([change(ObjectKind.QUOTA, "p", {"limits": {"VCPU": 1, "DISK_GB": -5}})], "object.invalid", "(limits.DISK_GB)"),
        ([change(ObjectKind.QUOTA, "p", {"limits": {"vcpu x": 1}})], "object.invalid", "(limits.vcpu x)"),
        ([change(F, "a\nb", {})], "object.invalid", "control characters"),
        ([change(F, "big", {"extra_specs": TOO_LARGE})], "object.invalid", str(MAX_BODY_BYTES)),
        ([change(A, "rack", {"uuid": "no", "name": "rack"})], "object.invalid", "no uuid"),
        ([change(A, "rack", {"uuid": RACK, "name": "other"})], "object.invalid", "'other'"),
        ([change(Q, "p", {"limits": {"vcpu": 1}})], "object.invalid", "quota 'p'"),
        ([change(S, "mine", {})], "object.invalid", "'default'"),
        ([change(Q, "p a", {"limits": {"VCPU": 1}})], "object.invalid", "project 'p a' is no name"),
        ([change(F, "of", {"projects": ["fine", "p/a"]})], "object.invalid", "project 'p/a' is no name"),
        (
            [change(A, "b", {"uuid": RACK, "name": "b"}), change(A, "a", {"uuid": RACK, "name": "a"})],
            "object.invalid", "aggregate 'a' and aggregate 'b' have one uuid",
        ),
        ([change(C, "c1", {"state": "drained"})], "object.invalid", "cell 'c1'"),
        ([change(C, "c 1", {"state": "disabled"})], "object.invalid", "a cell's name"),
        (
            [change(ObjectKind.HOST, RACK, {"host": "h", "state": "fenced", "drain": RACK})],
            "object.invalid", f"host {RACK!r}: a drain alone writes drain",
        ),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_object(changes: list[ObjectChange], code: str, message: str) -> None:
    refused = plan(requested(change(F, "fine", {}), *changes), PRESENT)
    assert isinstance(refused, Refusal)
    assert refused.code == code
    assert message in refused.reason


def test_objects_on_record_are_not_judged_by_a_newer_rule() -> None:
    """They would stop their scheduler, and the change of another object."""
    bodies: dict[tuple[ObjectKind, str], dict[str, Any]] = {
        (Q, "p a"): {"limits": {"VCPU": 1}},
        (F, "of"): {"projects": ["p a"]},
        **{(A, name): {"uuid": RACK, "name": name} for name in ("a", "b")},
    }
    present = {key: StoredObject(kind=key[0], name=key[1], body=body, version=1) for key, body in bodies.items()}
    assert effective_config(SchedulerConfig(), bodies).quotas == {"p a": {"VCPU": 1}}
    wanted = [change(kind, name, body) for (kind, name), body in bodies.items()]
    assert plan(requested(*wanted), present) == ChangePlan(())
    assert isinstance(plan(requested(change(F, "of", {"vcpus": 2, "projects": ["p a"]})), present), ChangePlan)
    assert isinstance(plan(requested(change(A, "a", {**bodies[A, "a"], "metadata": {"x": "y"}})), present), ChangePlan)
    assert isinstance(plan(requested(change(A, "a"), change(Q, "p a")), present), ChangePlan)


def test_objects_of_a_kind_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_worker.domain.objects.MAX_OF_KIND", 2)
    assert isinstance(plan(requested(change(F, "third", {})), PRESENT), Refusal)
    assert isinstance(plan(requested(change(F, "third", {}), change(F, "small")), PRESENT), ChangePlan)


def test_the_configuration_is_the_settings_with_the_objects_in_their_place() -> None:
    settings = SchedulerConfig(max_attempts=7, quotas={"p": {"VCPU": 1}}, multipliers={"ram": 1.0})
    bodies = {
        (F, "only"): {"vcpus": 2},
        (A, "rack"): {"uuid": RACK, "name": "rack", "metadata": {"availability_zone": "east"}},
        (Q, "default"): {"limits": {"INSTANCES": 5}},
        (Q, "q"): {"limits": {"VCPU": 9}},
        (S, "default"): {"multipliers": {"ram": -1.0}, "enabled_filters": ["ComputeFilter"]},
    }
    config = effective_config(settings, bodies)
    assert config.max_attempts == 7, "what is no object stays as the settings have it"
    assert config.flavors == {"only": Flavor(vcpus=2)}
    assert config.aggregates == (Aggregate(uuid=RACK, name="rack", metadata={"availability_zone": "east"}),)
    assert (config.quota_of("q"), config.quota_of("p")) == ({"VCPU": 9}, {"INSTANCES": 5})
    assert config.multipliers == {"ram": -1.0}
    assert config.enabled_filters == ("ComputeFilter",)
    assert config.enabled_weighers == settings.enabled_weighers, "a rule that is not given is as in the settings"


def test_the_seeds_of_settings_add_up_to_them() -> None:
    settings = SchedulerConfig(
        default_flavors=("m1.small",),
        flavors={"own": Flavor(vcpus=3, projects=("p",))},
        aggregates=(Aggregate(uuid=RACK, name="rack"),),
        default_quota={"VCPU": 10},
        quotas={"p": {"VCPU": 1}},
    )
    config = effective_config(SchedulerConfig(), configuration_bodies({}, seeds(settings)))
    for name in ("flavors", "aggregates", "default_quota", "quotas"):
        assert getattr(config, name) == getattr(settings, name), name


def test_hosts_with_instances_that_change_zone_are_named() -> None:
    before, after = {f"h{n}": ["nova"] for n in range(9)}, {f"h{n}": ["east"] for n in range(9)}
    assert zones_that_move(before, {**before, "h8": ["east"]}, ["h0", "h1"]) is None, (
        "an empty host may change its zone"
    )
    assert zones_that_move({"h": ["a"]}, {"h": ["a", "b"]}, ["h"]) is None, "what was requested in a is still there"
    why = zones_that_move({"h": ["a", "b"]}, {"h": ["a"]}, ["h"])
    assert why is not None and "h (a and b to a)" in why, "an instance there may have requested b"
    assert why.startswith("1 host with") and "more" not in why
    why = zones_that_move(before, after, [f"h{n}" for n in range(7)])
    assert why is not None
    assert why.startswith("7 hosts with instances")
    assert "h0 (nova to east)" in why and "and 2 more" in why


@pytest.mark.parametrize(
    ("settings", "code", "reason"),
    [
        ({"flavors": {"bad": Flavor(extra_specs={"trait:HW_X": "perhaps"})}}, "flavor.invalid", "flavor bad"),
        ({"flavors": {"a\x07b": Flavor()}}, "object.invalid", "control characters"),
        ({"aggregates": (Aggregate(uuid="x", name="rack"),)}, "object.invalid", "'x' is no uuid"),
        ({"aggregates": (Aggregate(uuid=RACK, name="a"), Aggregate(uuid=RACK, name="a"))}, "object.invalid", "twice"),
        ({"aggregates": (Aggregate(uuid=RACK, name="a"), Aggregate(uuid=RACK, name="b"))}, "object.invalid", "'b'"),
        ({"quotas": {"p a": {"VCPU": 1}}}, "object.invalid", "project 'p a' is no name"),
        (
            {
                "aggregates": tuple(
                    Aggregate(uuid=uuid, name=zone, metadata={"availability_zone": zone}, hosts=("h",))
                    for zone, uuid in (("a", RACK), ("b", RACK.replace("1", "2")))
                )
            },
            "aggregate.zone_conflict",
            "host h would be in zone 'a' by aggregate 'a' and in 'b' by aggregate 'b'",
        ),
        ({"groups": {"web": GroupDefinition(policy=GroupPolicy.AFFINITY)}}, "object.invalid", "PROJECT/NAME"),
        ({"enabled_filters": ("NoSuchFilter",)}, "plugin.invalid", "NoSuchFilter"),
        ({"multipliers": {"ram": float("nan")}}, "plugin.invalid", "no finite number: ram"),
        ({"flavors": {"": Flavor(vcpus=1)}}, "object.invalid", "a name has 1 to 255 characters"),
        ({"flavors": {"x" * 256: Flavor(vcpus=1)}}, "object.invalid", "and this has 256"),
    ],
)
def test_objects_of_settings_that_no_scheduler_could_use_are_named(
    settings: dict[str, Any], code: str, reason: str
) -> None:
    with pytest.raises(SettingsError) as raised:
        check_objects(SchedulerConfig(**settings))
    assert raised.value.code == code and reason in str(raised.value)


def test_a_file_of_objects_is_checked_against_those_of_the_settings() -> None:
    def check(*changes: ObjectChange) -> None:
        check_objects(SchedulerConfig(), ObjectsChange(changes=changes, who="t"), cells=("c1",))

    check(ObjectChange(kind=ObjectKind.FLAVOR, name="m1.tiny", body={"vcpus": 2}))
    with pytest.raises(SettingsError, match="is no amount"):
        check(ObjectChange(kind=ObjectKind.FLAVOR, name="x", body={"extra_specs": {"resources:VCPU": "many"}}))
    with pytest.raises(SettingsError, match="not available"):
        check(ObjectChange(kind=ObjectKind.SCHEDULING, name="default", body={"enabled_filters": ["Nope"]}))
    with pytest.raises(SettingsError, match="did you mean VCPU"):
        check(ObjectChange(kind=ObjectKind.QUOTA, name="p", body={"limits": {"CORES": 4}}))
    deep: dict[str, Any] = {}
    for _ in range(3000):
        deep = {"a": deep}
    with pytest.raises(SettingsError, match="nested too deeply"):
        check(ObjectChange(kind=ObjectKind.FLAVOR, name="x", body=deep))
    with pytest.raises(SettingsError, match="there is no cell 'c2'"):
        check(ObjectChange(kind=ObjectKind.CELL, name="c2", body={"state": "disabled", "reason": "x"}))


def test_objects_as_they_are_on_record_are_no_change() -> None:
    """Objects are read from the database by one scheduler and from messages by another."""
    settings = SchedulerConfig(
        flavors={"own": Flavor(vcpus=3, projects=("p",))}, aggregates=(Aggregate(uuid=RACK, name="rack", hosts=("h",)),)
    )
    seeded = seeds(settings)
    read = msgspec.json.decode(msgspec.json.encode(seeded), type=tuple[ChangedObject, ...])
    changes = tuple(ObjectChange(kind=one.kind, name=one.name, body=one.after) for one in read)
    for known in (seeded, read):
        present = applied(RecordedObjects(0, {}), known, ChangeAuthor("t", "", 0.0)).objects
        again = plan(ObjectsChange(changes=changes, who="t"), present)
        assert isinstance(again, ChangePlan) and again.changed == ()


async def test_objects_of_settings_that_cannot_be_used_are_not_written() -> None:
    """Written, they would be there for good: the corrected settings are not read any more."""
    store = MemoryBuilds(MemoryBuildTable(SystemClock()).session())
    await store.open()
    bad = SchedulerConfig(groups={"web": GroupDefinition(policy=GroupPolicy.AFFINITY)})
    with pytest.raises(SettingsError, match="PROJECT/NAME"):
        await ObjectRegistry(store, Hosts([]).selector, bad, clock=SystemClock(), stall_watch=StallWatch()).reload()
    found = await store.objects()
    assert found is not None and found.revision == 0
    await store.close()


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (Q, {"limits": {"INSTANCES": 3, "VCPU": 4, "CUSTOM_GOLD": 1}}, None),
        (Q, {}, None),
        (Q, {"limits": {"CORES": 4}}, "quota 'x': there is no resource class CORES; did you mean VCPU?"),
        (Q, {"limits": {"RAM": 4}}, "did you mean MEMORY_MB?"),
        (Q, {"limits": {"ZZZ": 4}}, "classes of one's own begin with CUSTOM_"),
        (F, {"vcpus": 1, "extra_specs": {"resources:VGPU": "1", "resources1:CUSTOM_GOLD": "1", "hw:x": "1"}}, None),
        (
            F,
            {"extra_specs": {"resources1:VGPUS": "1"}},
            "flavor 'x': there is no resource class VGPUS; did you mean VGPU?",
        ),
    ],
)
def test_a_class_that_no_provider_can_have_is_reported_with_what_is_meant(
    kind: ObjectKind, body: dict[str, Any], message: str | None
) -> None:
    planned = plan(requested(change(kind, "x", body)), {})
    assert isinstance(planned, ChangePlan)
    why = unknown_class(planned.changed)
    assert why is None if message is None else why is not None and message in why, why
    again = [structs.replace(one, before=one.after) for one in planned.changed]
    assert unknown_class(again) is None, "one on record is not judged again"


# --- Quota settings that could never be held to are refused when they are read.


@pytest.mark.parametrize("name", ["vcpu", "VCPU ", "", "VCPU\n", "CPU-CORES", "X" * 256])
def test_a_quota_under_a_name_that_no_claim_may_carry_is_refused(name: str) -> None:
    for raw in ({"default_quota": {name: 1}}, {"quotas": {"p": {name: 1}}}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(raw, SchedulerConfig)


def test_a_quota_of_more_classes_than_a_claim_may_limit_is_refused() -> None:
    raw = {"default_quota": {f"CUSTOM_{number}": 1 for number in range(65)}}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(raw, SchedulerConfig)


def test_quotas_of_classes_and_instances_are_taken() -> None:
    quota = {"VCPU": 5, "CUSTOM_GOLD": 0, "INSTANCES": 2}
    config = msgspec.convert({"default_quota": {"VCPU": 1}, "quotas": {"p": quota}}, SchedulerConfig)
    assert config.quota_of("p") == quota
    assert config.quota_of("q") == {"VCPU": 1}
