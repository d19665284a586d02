"""A flavor is in use by the instances that have it now."""

from __future__ import annotations

from msgspec.structs import replace

from bus.clock import SystemClock
from bus.contracts.base import Refusal
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.objects import ObjectChange, ObjectKind, ObjectsChange
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.objects.object_registry import ObjectRegistry
from scheduler_worker.objects.operator_changes import OperatorChanges
from scheduler_worker.records.build_record import BuildUpdate, NewBuild, RecordedBuild, SinceBuild
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from tests.kit.sent import Sent
from tests.unit.scheduler_worker.hosts import Hosts

VM = "a0000000-0000-4000-8000-000000000000"


async def resized_store() -> MemoryBuilds:
    store = MemoryBuilds(MemoryBuildTable(SystemClock()).session())
    store.publish_through(Sent())  # type: ignore[arg-type]
    await store.open()
    request = BuildRequest(instance_uuid=VM, flavor="m1.small", project_id="p")
    build = RecordedBuild(
        instance_uuid=VM, project_id="p", state=BuildState.ACTIVE, sequence=9, terminal=True, cell="c1", host="h0"
    )
    async with store.unit() as unit:
        await unit.insert([NewBuild(request=request, build=build)], 1.0)
    async with store.operation() as unit:
        held = (await unit.lock([VM]))[VM]
        await unit.update([BuildUpdate(build=replace(held, instance=SinceBuild(flavor="m1.large")))], 2.0)
    return store


async def test_an_instance_counts_for_the_flavor_that_it_has_now() -> None:
    store = await resized_store()
    assert await store.machines(10, flavor="m1.large") == 1
    assert await store.machines(10, flavor="m1.small") == 0


async def test_a_flavor_that_an_instance_was_resized_to_is_not_remade_without_force() -> None:
    store = await resized_store()
    selector, clock = Hosts([]).selector, SystemClock()
    registry = ObjectRegistry(store, selector, SchedulerConfig(), clock=clock)
    await registry.open()
    found = await store.objects()
    assert found is not None
    large = found.objects[ObjectKind.FLAVOR, "m1.large"]
    body = {**large.body, "vcpus": 1}
    change = ObjectsChange(
        actor="ann", reason="", changes=(ObjectChange(kind=ObjectKind.FLAVOR, name="m1.large", body=body),)
    )
    answer = await OperatorChanges(registry, store, selector, clock=clock).apply(change, "m1")
    assert isinstance(answer, Refusal) and answer.code == "object.in_use", answer
