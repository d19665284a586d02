"""Operators' objects: what a change does to those on record, and the configuration that they add up to."""

from __future__ import annotations

from typing import Any

import pytest

from bus.clock import SystemClock
from bus.consuming.stall_watch import StallWatch
from bus.contracts.groups import GroupPolicy
from bus.contracts.objects import (
    Aggregate,
    Flavor,
    GroupDefinition,
    ObjectChange,
    ObjectKind,
    ObjectsChange,
)
from bus.service.settings import SettingsError
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.objects import ObjectRegistry, check_objects
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from tests.unit.scheduler.hosts import Hosts

RACK = "10000000-0000-4000-8000-000000000000"


def change(kind: ObjectKind, name: str, body: dict[str, Any] | None = None, **more: Any) -> ObjectChange:
    return ObjectChange(kind=kind, name=name, body=body, **more)


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
