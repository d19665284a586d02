"""Operators' objects: what a change does to those on record, and the configuration that they add up to."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.contracts.actions import ActionKind
from bus.contracts.base import MAX_REASON, Refusal
from bus.contracts.build import AttemptRecord, BuildRecord, BuildState
from bus.contracts.drains import DrainAction, DrainCommand, DrainPlan, DrainRecord, DrainStart, DrainTarget
from bus.contracts.objects import (
    Aggregate,
    CellBus,
    CellRecord,
    CellState,
    ChangedObject,
    Flavor,
    GroupDefinition,
    LinkState,
    ObjectChange,
    ObjectKind,
    ObjectsChange,
    ObjectsChanged,
    StoredObject,
)
from bus.contracts.operations import AdminState, FenceState, HostFence
from bus.contracts.placement import GroupPolicy
from bus.contracts.waiting_builds import BuildsWaiting, WaitingBuild
from bus.faults import DatabaseUnavailable, RequestRefused
from bus.service.settings import SettingsError
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.drain.drain_controller import DrainController
from scheduler_worker.drain.drain_planner import MadePlan
from scheduler_worker.hosts import waiting_builds
from scheduler_worker.hosts.waiting_builds import WaitingTable
from scheduler_worker.objects.cell_consequences import (
    cell_record,
    cells_after_removal,
    cells_in_use,
    known_cells,
    only_cell,
    removed_cells,
    unknown_cell,
)
from scheduler_worker.objects.configured import check_objects
from scheduler_worker.objects.fence_rules import fence_changes
from scheduler_worker.objects.object_registry import ObjectRegistry
from scheduler_worker.objects.operator_changes import OperatorChanges
from scheduler_worker.objects.zone_consequences import (
    zone_conflict,
    zones_after_removal,
    zones_in,
    zones_named,
    zones_of_each,
)
from scheduler_worker.records.drain_record import DrainedHost
from scheduler_worker.records.object_records import ChangeActor, ChangePlan, RecordedObjects, as_stored
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts, aggregate
from tests.unit.scheduler_worker.test_placing import cluster
from tests.unit.scheduler_worker.test_without_an_answer import Site, site

__all__ = ["cluster", "site"]  # fixtures

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
        check_objects(SchedulerConfig(), ObjectsChange(changes=changes, actor="t"), cells=("c1",))

    check(ObjectChange(kind=ObjectKind.FLAVOR, name="m1.tiny", body={"vcpus": 2}))
    with pytest.raises(SettingsError, match="is no amount"):
        check(ObjectChange(kind=ObjectKind.FLAVOR, name="x", body={"extra_specs": {"resources:VCPU": "many"}}))
    with pytest.raises(SettingsError, match="not available"):
        check(ObjectChange(kind=ObjectKind.SCHEDULING, name="default", body={"enabled_filters": ["Nope"]}))
    with pytest.raises(SettingsError, match="no resource class CORES"):
        check(ObjectChange(kind=ObjectKind.QUOTA, name="p", body={"limits": {"CORES": 4}}))
    deep: dict[str, Any] = {}
    for _ in range(3000):
        deep = {"a": deep}
    with pytest.raises(SettingsError, match="nested too deeply"):
        check(ObjectChange(kind=ObjectKind.FLAVOR, name="x", body=deep))
    with pytest.raises(SettingsError, match="there is no cell 'c2'"):
        check(ObjectChange(kind=ObjectKind.CELL, name="c2", body={"state": "disabled", "reason": "x"}))
    # Its databases were refused when it was prepared, and its role's name was cut off.
    check(ObjectChange(kind=ObjectKind.CELL, name="c" * 47, body={"state": "enabled", "bus": {"prefix": "x"}}))
    with pytest.raises(SettingsError, match="1 to 47 letters"):
        check(ObjectChange(kind=ObjectKind.CELL, name="c" * 48, body={"state": "enabled", "bus": {"prefix": "x"}}))


async def test_objects_of_settings_that_cannot_be_used_are_not_written() -> None:
    """Written, they would be there for good: the corrected settings are not read any more."""
    store = MemoryBuilds(MemoryBuildTable(SystemClock()).session())
    await store.open()
    bad = SchedulerConfig(groups={"web": GroupDefinition(policy=GroupPolicy.AFFINITY)})
    with pytest.raises(SettingsError, match="PROJECT/NAME"):
        await ObjectRegistry(store, Hosts([]).selector, bad, clock=SystemClock()).reload()
    found = await store.objects()
    assert found is not None and found.revision == 0
    await store.close()


# --- what a change of objects leads to besides them, by tables: cells, availability zones, and the cells of fences


HOST = "10000000-0000-4000-8000-000000000001"
ENABLED, REMOVED = {"state": "enabled"}, {"state": "removed"}
ADDED = {"bus": {"prefix": "x"}}
ABANDONED = REMOVED | {"abandoned": True}


def decided(name: str, body: dict[str, Any]) -> StoredObject:
    return StoredObject(
        kind=ObjectKind.CELL, name=name, body=body, version=3, changed_by="ann", changed_at=7.0
    )  # fmt: skip


def changed(name: str, before: dict[str, Any] | None, after: dict[str, Any] | None) -> ChangedObject:
    return ChangedObject(kind=ObjectKind.CELL, name=name, before=before, after=after)


# --- cells


@pytest.mark.parametrize(
    ("settings", "decisions", "known", "only", "used_and_removed"),
    [
        ([], {}, (), None, ({}, [])),
        (["c1"], {}, ("c1",), "c1", ({"c1": None}, [])),
        (["c2", "c1"], {}, ("c2", "c1"), None, ({"c2": None, "c1": None}, [])),
        (["c1"], {"c1": ENABLED}, ("c1",), "c1", ({"c1": None}, [])),
        (["c1"], {"c1": ENABLED | ADDED}, ("c1",), "c1", ({"c1": None}, [])),
        (["c1"], {"c2": ENABLED}, ("c1",), None, ({"c1": None}, [])),
        (["c1"], {"c2": ENABLED | ADDED}, ("c1", "c2"), None, ({"c1": None, "c2": CellBus(prefix="x")}, [])),
        ([], {"c3": ENABLED | ADDED, "c2": REMOVED | ADDED}, ("c2", "c3"), None, ({"c3": CellBus(prefix="x")}, ["c2"])),
        (["c1"], {"c1": REMOVED}, ("c1",), "c1", ({}, ["c1"])),
        (["c1"], {"c1": ABANDONED}, ("c1",), "c1", ({}, [])),
        (["c1"], {"c1": {"state": "disabled"}}, ("c1",), "c1", ({"c1": None}, [])),
    ],
)
def test_the_cells_that_there_are_and_that_workers_connect_to(
    settings: list[str], decisions: dict[str, Any], known: Any, only: str | None, used_and_removed: Any
) -> None:
    objects = {name: decided(name, body) for name, body in decisions.items()}
    assert known_cells(settings, objects) == known
    assert only_cell(settings, objects) == only
    assert (cells_in_use(settings, objects), [*removed_cells(objects)]) == used_and_removed
    occupied = cells_in_use(settings, objects, known)
    kept = [name for name in known if decisions.get(name) != ABANDONED]
    assert [*occupied] == kept, "a removed cell is connected to while instances are on record there"


def test_a_cell_is_shown_with_its_link_and_what_was_decided() -> None:
    link = (LinkState.CONNECTING, "w" * (MAX_REASON + 1))
    plain = CellRecord(name="c1", configured=True, in_use=True, link=link[0], problem=link[1][:MAX_REASON])
    assert cell_record("c1", ["c1"], {}, in_use=True, link=link) == plain
    decisions = {"c1": decided("c1", {"state": "disabled", "reason": "r", **ADDED})}
    assert cell_record("c1", ["c2"], decisions, in_use=False, link=link) == replace(
        plain, configured=False, in_use=False, state=CellState.DISABLED, reason="r", bus=CellBus(prefix="x"), by="ann",
        at=7.0, version=3,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "configured", "left"),
    [
        (None, REMOVED, True, True),
        (ENABLED, REMOVED, False, True),
        (REMOVED, REMOVED | {"reason": "r"}, True, False),
        (ENABLED, ENABLED | {"reason": "r"}, False, False),
        (ENABLED, None, True, False),
        (ENABLED, None, False, True),
        (REMOVED, None, False, True),
        (REMOVED, None, True, False),
    ],
)
def test_a_cell_is_taken_out_of_use(before: Any, after: Any, configured: bool, left: bool) -> None:
    one = changed("c2", before, after)
    assert cells_after_removal(["c1", "c2"] if configured else ["c1"], [one]) == (("c2",) if left else ())


@pytest.mark.parametrize(
    ("name", "after", "refused"),
    [("c1", ENABLED, False), ("c2", ENABLED, True), ("c2", ENABLED | ADDED, False), ("c2", None, False)],
)
def test_a_cell_is_decided_about_that_there_is(name: str, after: Any, refused: bool) -> None:
    found = unknown_cell(["c1"], [changed("c1", None, ENABLED), changed(name, ENABLED, after)])
    assert (None if found is None else found.code) == ("object.unknown" if refused else None)
    long = unknown_cell(["c" * MAX_REASON], [changed("c2", None, ENABLED)])
    assert long is not None and len(long.reason) == MAX_REASON


GONE = decided("c2", REMOVED | ADDED)
LIFTED = StoredObject(
    kind=ObjectKind.FENCE, name=HOST, body={"host": "h", "cell": "c2", "version": 1, "unfencing": True}, version=1
)


@pytest.mark.parametrize(
    ("settings", "shown", "named", "on_record", "cell"),
    [
        (["c1", "c2"], "c3", None, (), "c3"),
        (["c1", "c2"], "c2", "c1", (), "c2"),
        (["c1", "c2"], None, "c2", (), "c2"),
        (["c1", "c2"], None, "c3", (), None),
        (["c1", "c2"], None, None, (), None),
        (["c1"], None, None, (), "c1"),
        (["c1"], None, "c2", (), None),
        (["c1"], None, None, (GONE,), None),
        (["c1"], None, "c1", (GONE,), "c1"),
        (["c1", "c2"], None, None, (LIFTED,), "c2"),
        (["c1", "c2"], "c1", None, (LIFTED,), "c1"),
    ],
)
def test_a_host_is_fenced_in_the_cell_that_something_shows_or_its_operator_names(
    settings: list[str], shown: str | None, named: str | None, on_record: tuple[StoredObject, ...], cell: str | None
) -> None:
    """It may have been in one that was removed."""
    fenced = ChangedObject(kind=ObjectKind.HOST, name=HOST, after={"host": "h", "state": "fenced"})
    present = RecordedObjects(4, {(one.kind, one.name): one for one in on_record})
    made = fence_changes(present, ChangePlan((fenced,)), lambda _: shown, named=named, settings=settings, force=False)
    if isinstance(made, Refusal):
        assert (made.code, cell, HOST in made.reason) == ("host.cell_unknown", None, named is None)
    else:
        (one,) = made
        assert one.after is not None and (one.after["cell"], one.after["version"]) == (cell, 5)


@pytest.mark.parametrize(
    ("force", "shown", "after"),
    [(False, None, ("c1", False)), (True, None, ("c1", True)), (False, "c2", ("c2", False))],
)
def test_a_fence_is_lifted_where_its_host_is_and_by_force_where_its_operator_says_so(
    force: bool, shown: str | None, after: tuple[str, bool]
) -> None:
    fence = StoredObject(kind=ObjectKind.FENCE, name=HOST, body={"host": "h", "cell": "c1", "version": 2}, version=2)
    lifted = ChangedObject(kind=ObjectKind.HOST, name=HOST, before={"host": "h", "state": "fenced"})
    made = fence_changes(
        RecordedObjects(4, {(ObjectKind.FENCE, HOST): fence}), ChangePlan((lifted,)), lambda _: shown, named=None,
        settings=["c1"], force=force,
    )  # fmt: skip
    assert not isinstance(made, Refusal)
    assert made[0].after is not None and (made[0].after["cell"], made[0].after.get("forced", False)) == after


# --- availability zones

EAST, WEST, OTHER = (aggregate(name, availability_zone=name) for name in ("east", "west", "other"))
EAST_TOO, RACK_OF_A = aggregate("east too", availability_zone="east"), aggregate("rack", room="a")
ZONES = (RACK_OF_A, EAST, WEST, EAST_TOO)
MEMBERS = {EAST.uuid: [0, 1], WEST.uuid: [1], EAST_TOO.uuid: [1, 2], RACK_OF_A.uuid: [0, 3]}


def zoned() -> Hosts:
    return Hosts([PLENTY] * 4, config=SchedulerConfig(aggregates=ZONES), members=MEMBERS)


def test_the_zones_of_hosts_by_their_aggregates() -> None:
    hosts = zoned()
    view, (h0, h1, h2, _) = hosts.view(), hosts.uuids
    found = {h0: {"east": "east"}, h1: {"east": "east", "west": "west"}, h2: {"east": "east too"}}
    assert zones_in(view) == found
    each = {"h0": ["east"], "h1": ["east", "west"], "h2": ["east"], "h3": ["nova"]}
    assert zones_of_each(view, "nova") == each
    named = [replace(one, hosts=("h1", "h2")) for one in (RACK_OF_A, EAST, EAST_TOO)]
    assert zones_named([*named, replace(WEST, hosts=("h2",)), OTHER]) == {
        "h1": {"east": "east"}, "h2": {"east": "east", "west": "west"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "refused"),
    [
        ({}, {}, False),
        ({}, {"h": ["a"]}, False),
        ({"h": ["a"]}, {"h": ["b"]}, False),
        ({}, {"h": ["a", "b"]}, True),
        ({"h": ["a"]}, {"g": ["a"], "h": ["a", "b"]}, True),
        ({"h": ["a", "b"]}, {"h": ["b", "a"]}, False),
        ({"h": ["a", "b"]}, {"h": ["c", "b", "a"]}, True),
        ({"h": ["a", "b", "c"]}, {"h": ["b", "a"]}, False),
    ],
)
def test_a_host_is_put_into_no_second_zone(before: dict[str, list[str]], after: Any, refused: bool) -> None:
    zones = [{host: dict.fromkeys(names, "of") for host, names in of.items()} for of in (before, after)]
    assert (zone_conflict(zones[0], zones[1]) is not None) is refused


@pytest.mark.parametrize(
    ("used", "after", "kept", "left"),
    [
        ([], (), True, None),
        ([0], ZONES, True, None),
        ([0], (), True, "h0 (east to nova)"),
        ([1], (EAST_TOO,), True, "h1 (east and west to east)"),
        ([2], (EAST_TOO,), True, None),
        ([3], (), True, None),
        ([3], (), False, "h3 (nova to home)"),
        ([3], (replace(OTHER, hosts=("h3",)),), True, "h3 (nova to other)"),
        ([0, 2], (), True, "2 hosts"),
    ],
)
def test_hosts_with_instances_stay_in_their_zones(
    used: list[int], after: tuple[Aggregate, ...], kept: bool, left: str | None
) -> None:
    hosts = zoned()
    hosts.replica.assume("k", {hosts.uuids[at]: {"VCPU": 1} for at in used})
    config = SchedulerConfig(aggregates=after, default_availability_zone="nova" if kept else "home")
    refusal = zones_after_removal(hosts.selector, config)
    assert refusal is None if left is None else refusal is not None and left in refusal


# --- The builds that wait: what is shown of them, for how long, and by whose report.


WAITING_UUID = "10000000-0000-4000-8000-000000000001"
WAITING_BUILD = BuildRecord(
    instance_uuid=WAITING_UUID, project_id="p", flavor="bm.gold", state=BuildState.BUILDING, cell="cell1", host="node1"
)
WAITS = WaitingBuild(instance_uuid=WAITING_UUID, attempt=2, since=990.0, reason="waits for Ironic: ConnectError")
MESSAGE = BuildsWaiting(service="metal1", cell="cell1", waiting=(WAITS,), lasts_s=3.0)


def attempt(number: int) -> AttemptRecord:
    return AttemptRecord(attempt=number, host="node1", outcome="failed")


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
    monkeypatch.setattr(waiting_builds, "MAX_SERVICES", 1)
    table = WaitingTable()
    table.apply(
        replace(MESSAGE, service="other", waiting=(replace(WAITS, instance_uuid=WAITING_BUILD.instance_uuid[::-1]),)),
        10.0,
    )
    table.apply(MESSAGE, 10.0)
    assert table.line_of(WAITING_BUILD, 10.0) is None
    table.apply(MESSAGE, 13.0)  # what was made up is over
    assert table.line_of(WAITING_BUILD, 13.0) is not None


# --- Which objects are newer: a database that was restored gives the number of a revision again.


async def test_objects_of_the_same_revision_of_another_history_are_loaded(site: Site) -> None:
    """A standby was promoted without the last change, and the first change after that got its number. A scheduler that
    had loaded the lost one kept it: a host that is fenced on no record, or one that is fenced and takes builds.
    """
    clock, hosts, store = site.cluster.clock, site.cluster.hosts, site.store
    elsewhere = Hosts([PLENTY] * 6, cells=["c1"] * 3 + ["c2"] * 3, config=hosts.config)
    here, there = (
        ObjectRegistry(store, one.selector, hosts.config, clock=clock, cells=("c1", "c2")) for one in (hosts, elsewhere)
    )
    await here.open()
    await there.open()
    of_here = OperatorChanges(here, store, hosts.selector, clock=clock)
    of_there = OperatorChanges(there, store, elsewhere.selector, clock=clock)
    before = store._table.objects

    def decided(host: int) -> ObjectsChange:
        body = {"host": f"h{host}", "state": AdminState.DISABLED.value}
        return ObjectsChange(
            changes=(ObjectChange(kind=ObjectKind.HOST, name=hosts.uuids[host], body=body),), actor="ann"
        )

    assert isinstance(await of_here.apply(decided(0), "m1"), ObjectsChanged)
    store._table.objects = before
    assert isinstance(await of_there.apply(decided(1), "m2"), ObjectsChanged)
    await here.reload()
    assert [hosts.table.decision_of(uuid) is not None for uuid in hosts.uuids[:2]] == [False, True]


async def test_the_objects_of_the_settings_come_first_in_a_database_that_was_set_back_to_none(site: Site) -> None:
    """A decision about a host that was written first kept every flavor of the settings away, for good."""
    clock, hosts, store = site.cluster.clock, site.cluster.hosts, site.store
    empty = store._table.objects
    registry = ObjectRegistry(store, hosts.selector, hosts.config, clock=clock, cells=("c1",))
    await registry.open()
    seeded, changes = registry.revision, OperatorChanges(registry, store, hosts.selector, clock=clock)
    store._table.objects = empty
    body = {"host": "h0", "state": AdminState.DISABLED.value}
    decided = ObjectsChange(changes=(ObjectChange(kind=ObjectKind.HOST, name=hosts.uuids[0], body=body),), actor="ann")
    with pytest.raises(DatabaseUnavailable):
        await changes.apply(decided, "m1")
    await registry.reload()
    assert registry.revision == seeded > 0
    assert isinstance(await changes.apply(decided, "m1"), ObjectsChanged)


# --- A scheduler of another version, or with other plug-ins, has written objects that this one cannot use.

DRAIN, BEGUN = (f"d000000{number}-0000-4000-8000-000000000000" for number in "12")
NEWER = {"of_a_newer_version": True}
DRAIN_BODY = as_stored(DrainRecord(name="h5", target=DrainTarget.HOST, kind=ActionKind.MIGRATE, by="ann"))


async def stand_still(*_: Any, **__: Any) -> Any:
    raise RequestRefused("placement does not answer here")


def drains_of_site(site: Site) -> DrainController:
    """Its controller, with a plan of the first host."""
    host = DrainedHost(site.cluster.hosts.uuids[0], "h0")

    async def plan(_query: object) -> MadePlan:
        return MadePlan(DrainPlan(host="h0"), (host,))

    inventory: Any = SimpleNamespace(of_drain=lambda _: {}, in_use=list, instances_on=stand_still)
    planner: Any = SimpleNamespace(plan=plan)
    clock, rng, emptier = site.cluster.clock, random.Random(1), None
    return DrainController(site.store, site.registry, inventory, planner, emptier, clock=clock, rng=rng)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "name", "body", "code"),
    [
        (ObjectKind.DRAIN, DRAIN, DRAIN_BODY | NEWER, "object.invalid"),
        (ObjectKind.DRAIN, DRAIN, DRAIN_BODY | {"target": "rack"}, "object.invalid"),
        (ObjectKind.FLAVOR, "big", {"extra_specs": {"trait:HW_X": "perhaps"}}, None),
        (ObjectKind.FENCE, BEGUN, {"host": "h5", "cell": "c1", "version": 1} | NEWER, None),
    ],
)
async def test_what_this_scheduler_cannot_use_is_adopted_in_no_part_and_ends_no_worker(
    site: Site, kind: ObjectKind, name: str, body: dict[str, Any], code: str | None
) -> None:
    """All but the drains were adopted; the start of a drain, and each pass, raised what ends the process."""
    registry, hosts = site.registry, site.cluster.hosts
    await registry.open()
    in_force, drains = registry.revision, drains_of_site(site)
    host = ChangedObject(kind=ObjectKind.HOST, name=hosts.uuids[1], after={"host": "h1", "state": "disabled"})
    fence = ChangedObject(kind=ObjectKind.FENCE, name=hosts.uuids[2], after={"host": "h2", "cell": "c1", "version": 1})
    async with site.store.operation() as unit:
        await unit.lock_objects()
        changed = [host, fence, ChangedObject(kind=kind, name=name, after=body)]
        await unit.write_objects(changed, ChangeActor("ann", "", 1.0))
    await registry.reload()
    assert (registry.revision, registry.fences, registry.decision_of(hosts.uuids[1])) == (in_force, {}, None)
    answers = [
        await drains.start(DrainStart(drain=BEGUN, name="h0", by="ann")),
        await drains.command(DrainCommand(drain=DRAIN if code else BEGUN, action=DrainAction.STOP, by="ann"), "m"),
    ]
    assert [one.code if isinstance(one, Refusal) else None for one in answers] == [code, code]
    report = HostFence(host_uuid=hosts.uuids[2], cell="c1", version=1, state=FenceState.FENCED)
    await registry.record_fences([replace(report, host_uuid=BEGUN), report])
    present = await site.store.objects()
    assert present is not None and present.objects[ObjectKind.FENCE, hosts.uuids[2]].body["acknowledged"] == 1


async def test_a_pass_over_a_drain_that_cannot_be_read_is_refused_with_a_code(site: Site) -> None:
    """Its row is read again under its lock; a newer scheduler may have written it since."""
    await site.registry.open()
    async with site.store.operation() as unit:
        await unit.lock_objects()
        changed = ChangedObject(kind=ObjectKind.DRAIN, name=DRAIN, after=DRAIN_BODY | NEWER)
        await unit.write_objects([changed], ChangeActor("ann", "", 1.0))
    record = DrainRecord(name="h5", target=DrainTarget.HOST, kind=ActionKind.MIGRATE, by="ann")
    async with site.store.operation() as unit:
        with pytest.raises(RequestRefused):
            await drains_of_site(site)._emptied(DRAIN, record).lock(unit)
