"""Operators' objects on real PostgreSQL: in force on every scheduler, edited at once, refused where they harm."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import pytest

from berth.bus_client.object_edits import find_object
from berth.object_changes import MAX_TRIES, ObjectEdit, change_object, merged
from bus.bus import API
from bus.consuming.dead_letters import list_dead, replay
from bus.consuming.outcome import Outcome, Received
from bus.contracts.build import BuildRequest
from bus.contracts.objects import (
    ChangedObject,
    ObjectChange,
    ObjectKind,
    ObjectLogPage,
    ObjectLogQuery,
    ObjectsChange,
    ObjectsChanged,
    ObjectsPage,
    ObjectsQuery,
    StoredObject,
)
from bus.faults import DatabaseUnavailable, RequestRefused
from bus.persistence.database import Database
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.operator_handler import OperatorHandler
from scheduler_worker.records.object_records import ChangeActor
from scheduler_worker.store.postgres import PostgresBuilds
from tests.integration.scheduler_worker.steps import A, F, S, change, code_of, flavor, refused_change
from tests.integration.scheduler_worker.world import World
from tests.kit.sent import Sent
from tests.kit.waiting import PATIENCE_S, until

# --- Operators' objects on real PostgreSQL: in force on every scheduler, kept over restarts, refused where they
# harm.


pytestmark = pytest.mark.postgres
ZONE = "e0000000-0000-4000-8000-000000000000"


async def taken(world: World, request: BuildRequest) -> str:
    """The code of a request's end; "" when it was scheduled."""
    await world.ask(request)
    event = await until(
        lambda: next(
            (
                event
                for event in world.events
                if event.instance_uuid == request.instance_uuid and (event.terminal or event.state == "scheduled")
            ),
            None,
        )
    )
    assert event is not None
    return event.code


@pytest.fixture(autouse=True)
def announced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """No scheduler looks at the revision by itself: what it knows, it was sent."""
    monkeypatch.setattr("scheduler_worker.objects.object_registry.RELOAD_S", 3600.0)


async def test_a_flavor_is_there_on_every_scheduler_without_a_restart(world: World) -> None:
    await world.scheduler("s1")
    await world.scheduler("s2")
    await world.add_hosts("c1", 4)
    assert await taken(world, world.request("new")) == "flavor.unknown"
    changed = await change(world, flavor("new", vcpus=1))
    assert changed.revision == 2, "the first one is the settings"
    # Both take requests from one queue: a request for each, whichever scheduler has it.
    for stopped in ("s1", None):
        while await taken(world, world.request("new")) != "":
            pass  # its notification is on its way; the fixture's limit ends this
        if stopped:
            await world.stop(stopped)
    await change(world, ObjectChange(kind=F, name="new"), force=True)
    assert await taken(world, world.request("new")) == "flavor.unknown"


async def test_a_scheduler_that_missed_the_event_looks_by_itself(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler that changed it died before it could publish it."""
    monkeypatch.setattr("scheduler_worker.objects.object_registry.RELOAD_S", 0.05)
    monkeypatch.setattr("scheduler_worker.objects.object_registry.RELOAD_CHECK_S", 0.05)
    (host,) = await world.scheduler_and_hosts(1)
    store = PostgresBuilds(Database(world.url, "scheduler"))
    store.publish_through(Sent())  # type: ignore[arg-type]
    await store.open()

    async def write(kind: ObjectKind, name: str, after: dict[str, Any] | None) -> None:
        async with store.operation() as unit:
            await unit.lock_objects()
            await unit.write_objects([ChangedObject(kind=kind, name=name, after=after)], ChangeActor("dead", "", 1.0))

    await write(F, "new", {"vcpus": 1})
    async with asyncio.timeout(PATIENCE_S):
        while await taken(world, world.request("new")) != "":
            pass
    assert await taken(world, world.request("new")) == "", "and from then on"
    table = world.tables["s1"]
    await write(ObjectKind.HOST, host, {"host": "c1-0", "state": "disabled"})
    await until(lambda: table.admin[0])
    assert table.decision_of(host).state == "disabled"  # type: ignore[union-attr]
    await write(ObjectKind.HOST, host, None)
    await until(lambda: table.decision_of(host) is None and not table.admin[0])
    await store.close()


async def test_a_change_that_strands_instances_is_refused_unless_forced(world: World) -> None:
    (host,) = await world.scheduler_and_hosts(1)
    await world.report(host, "c1-0", {"VCPU": 16, "MEMORY_MB": 32768, "DISK_GB": 500}, aggregates=(ZONE,))
    zone = ObjectChange(
        kind=A, name="east", body={"uuid": ZONE, "name": "east", "metadata": {"availability_zone": "east"}}
    )
    await until(lambda: world.replicas["s1"].aggregates_of(world.replicas["s1"].row_of(host) or 0))
    assert await taken(world, world.request()) == ""
    why = await refused_change(world, zone)
    assert (why.code, why.reason) == (
        "object.in_use",
        "1 host with instances would be in another availability zone: c1-0 (nova to east); drain them first, or force "
        "the change",
    )
    why = await refused_change(world, ObjectChange(kind=F, name="m1.small"))
    what_to_do = "delete or resize them first, or force the change"
    assert (why.code, why.reason) == ("object.in_use", f"flavor 'm1.small' has 1 instance: {what_to_do}")
    small = msgspec.to_builtins(SchedulerConfig().flavors["m1.small"])
    for other in ({"vcpus": 9}, {"extra_specs": {"trait:HW_CPU_X86_AVX2": "required"}}):
        why = await refused_change(world, flavor("m1.small", **{**small, **other}))
        assert why.code == "object.in_use" and "whose next moves would claim another size" in why.reason
    assert (await change(world, flavor("m1.small", **{**small, "projects": ["demo"]}), dry_run=True)).changed
    assert (await change(world, zone, ObjectChange(kind=F, name="m1.small"), force=True)).revision == 2
    assert await taken(world, world.request("m1.tiny", availability_zone="east")) == ""
    (entry, _) = (await log(world)).entries[:2]
    assert entry.forced and entry.actor == "operator"


async def log(world: World, **more: Any) -> ObjectLogPage:
    return await world.answer(ObjectLogQuery(**more), ObjectLogPage)


async def test_what_no_scheduler_could_use_is_refused_and_changes_nothing(world: World) -> None:
    await world.scheduler("s1")
    wrong = [
        (flavor("odd", vcpus=1, extra_specs={"resources:VCPU": "many"}), "flavor.invalid"),
        (ObjectChange(kind=S, name="default", body={"enabled_filters": ["NoSuchFilter"]}), "plugin.invalid"),
        (ObjectChange(kind=S, name="default", body={"multipliers": {"nothing": 1.0}}), "plugin.invalid"),
        (ObjectChange(kind=F, name="gone"), "object.unknown"),
    ]
    for one, code in wrong:
        assert (await refused_change(world, flavor("fine", vcpus=1), one)).code == code
    page = await world.answer(ObjectsQuery(kind=F, name="fine"), ObjectsPage)
    assert (page.revision, page.objects) == (1, ())


async def test_a_scheduler_passes_over_objects_of_kinds_that_it_does_not_know(world: World) -> None:
    """One of the next version, side by side with it, has written them."""
    await world.scheduler("s1")
    await world.sql("INSERT INTO scheduler.objects VALUES ('of_tomorrow', 'x', '{}', 1, 1.0, 'me')")
    await world.sql(
        "INSERT INTO scheduler.object_log (revision, kind, name, at, actor, reason, forced)"
        " VALUES (2, 'of_tomorrow', 'x', 1.0, 'me', '', false)"
    )
    await change(world, flavor("new", vcpus=1))
    page = await world.answer(ObjectsQuery(), ObjectsPage)
    assert {"new", "m1.tiny"} <= {one.name for one in page.objects} and "x" not in {one.name for one in page.objects}
    log = await world.answer(ObjectLogQuery(), ObjectLogPage)
    assert log.entries[0].name == "new"


# --- Two operators change one object at once: each names its own fields, and nothing else is changed.


def naming(name: str, **fields: Any) -> ObjectEdit:
    def edit(known: StoredObject | None) -> dict[str, Any]:
        assert known is not None
        return merged(known.body, fields)

    return ObjectEdit(F, name, edit)


async def edited(world: World, edit: ObjectEdit, *, meanwhile: list[ObjectChange], **more: Any) -> ObjectsChanged:
    """An edit; one change of `meanwhile` gets in between its reading and each of its writings."""

    async def send(requested: ObjectChange) -> ObjectsChanged:
        if meanwhile:
            await change(world, meanwhile.pop(0))
        return await change(world, requested)

    return await change_object(partial(find_object, world.buses["api"], timeout_s=PATIENCE_S), edit, send, **more)


async def body_of(world: World, name: str) -> dict[str, Any]:
    found = await find_object(world.buses["api"], F, name, timeout_s=PATIENCE_S)
    assert found is not None
    return found.body


async def test_both_of_two_operators_win(world: World) -> None:
    await world.scheduler()
    await change(world, flavor("raced", vcpus=1, memory_mb=64))
    await asyncio.gather(
        *(edited(world, naming("raced", **{field: 7}), meanwhile=[]) for field in ("vcpus", "memory_mb", "disk_gb"))
    )
    assert await body_of(world, "raced") == {"vcpus": 7, "memory_mb": 7, "disk_gb": 7}


async def test_a_change_in_between_is_kept(world: World) -> None:
    await world.scheduler()
    await change(world, flavor("raced", vcpus=1, memory_mb=64))
    between = [flavor("raced", vcpus=1, memory_mb=128), flavor("raced", vcpus=1, memory_mb=256, disk_gb=4)]
    await edited(world, naming("raced", vcpus=2), meanwhile=between)
    assert (between, await body_of(world, "raced")) == ([], {"vcpus": 2, "memory_mb": 256, "disk_gb": 4})


async def test_one_that_is_always_overtaken_ends_with_a_code(world: World) -> None:
    await world.scheduler()
    await change(world, flavor("raced", vcpus=1))
    between = [flavor("raced", vcpus=1, memory_mb=number + 1) for number in range(MAX_TRIES + 3)]
    with pytest.raises(RequestRefused) as refused:
        await edited(world, naming("raced", vcpus=2), meanwhile=between)
    assert (refused.value.code, len(between)) == ("object.conflict", 3)


async def test_a_version_that_is_named_is_not_read_again(world: World) -> None:
    await world.scheduler()
    made = await change(world, flavor("raced", vcpus=1))
    between = [flavor("raced", vcpus=3)]
    overtaken = edited(world, naming("raced", vcpus=2), meanwhile=between, if_version=made.revision)
    assert await code_of(overtaken) == "object.conflict"


async def test_two_that_make_one_object_do_not_replace_each_other(world: World) -> None:
    await world.scheduler()

    def edit(known: StoredObject | None) -> dict[str, Any]:
        return merged({} if known is None else known.body, {"vcpus": 2})

    await edited(world, ObjectEdit(F, "new", edit), meanwhile=[flavor("new", memory_mb=64)])
    assert await body_of(world, "new") == {"vcpus": 2, "memory_mb": 64}


@pytest.mark.parametrize(
    ("before", "patch", "after"),
    [
        ({"a": 1, "b": 2}, {"a": 3}, {"a": 3, "b": 2}),
        ({"a": {"x": 1, "y": 2}}, {"a": {"y": None, "z": 3}}, {"a": {"x": 1, "z": 3}}),
        ({"a": 1}, {"a": None, "b": None}, {}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"a": 1}, {"a": {"x": None, "y": 1}}, {"a": {"y": 1}}),
        ({"a": 1}, {}, {"a": 1}),
    ],
)
def test_a_merge_patch(before: dict[str, Any], patch: dict[str, Any], after: dict[str, Any]) -> None:
    kept = dict(before)
    assert (merged(before, patch), before) == (after, kept)


# --- Operators' commands that were refused: what is repeated, replayed, or handled once more.


UNKNOWN = ObjectsChange(actor="ann", reason="", changes=(ObjectChange(kind=ObjectKind.FLAVOR, name="small"),))


async def test_a_refused_command_without_a_requester_is_carried_out_when_it_is_replayed(world: World) -> None:
    """Its operator mends the cause and replays it; no requester has its refusal."""
    await world.scheduler()
    await world.ask(UNKNOWN)
    transport = world.buses[API].transport
    await until(lambda: list_dead(transport))
    assert [letter.code for letter in await list_dead(transport)] == ["object.unknown"]
    await change(world, flavor("small", vcpus=1))
    await replay(transport, "scheduler.changes")
    made = flavor("small", vcpus=2)
    await until(lambda: _is_gone(world, made))
    assert await list_dead(transport) == []


async def _is_gone(world: World, made: ObjectChange) -> bool:
    """Whether this object is made anew: there is none of its name."""
    anew = ObjectChange(kind=made.kind, name=made.name, body=made.body, if_version=0)
    try:
        await change(world, anew)
    except RequestRefused:
        return False
    return True


async def test_a_refusal_keeps_its_reason_when_its_batch_is_handled_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another command of the batch met a transient fault."""
    await world.scheduler()
    call, has_failed = OperatorHandler.__call__, False

    async def fails_once(handler: OperatorHandler, batch: Sequence[Received]) -> Sequence[Outcome]:
        nonlocal has_failed
        outcomes = await call(handler, batch)
        if not has_failed:
            has_failed = True
            raise DatabaseUnavailable("planted")
        return outcomes

    monkeypatch.setattr(OperatorHandler, "__call__", fails_once)
    assert await code_of(world.answer(UNKNOWN, ObjectsChanged)) == "object.unknown"
