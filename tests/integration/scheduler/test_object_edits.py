"""Two operators change one object at once: each names its own fields, and nothing else is changed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from berth.client.object_edits import MAX_TRIES, ObjectEdit, change_object, find_object, merged
from bus.contracts.objects import ObjectChange, ObjectKind, ObjectsChanged, StoredObject
from bus.faults import RequestRefused
from tests.integration.scheduler.test_objects import change, flavor
from tests.integration.scheduler.world import PATIENCE_S, World

pytestmark = pytest.mark.postgres

F = ObjectKind.FLAVOR


@pytest.fixture(autouse=True)
async def scheduler(world: World) -> None:
    await world.scheduler()


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

    return await change_object(world.buses["api"], edit, send, timeout_s=PATIENCE_S, **more)


async def body_of(world: World, name: str) -> dict[str, Any]:
    found = await find_object(world.buses["api"], F, name, timeout_s=PATIENCE_S)
    assert found is not None
    return found.body


async def test_both_of_two_operators_win(world: World) -> None:
    await change(world, flavor("raced", vcpus=1, memory_mb=64))
    await asyncio.gather(
        *(edited(world, naming("raced", **{field: 7}), meanwhile=[]) for field in ("vcpus", "memory_mb", "disk_gb"))
    )
    assert await body_of(world, "raced") == {"vcpus": 7, "memory_mb": 7, "disk_gb": 7}


async def test_a_change_in_between_is_kept(world: World) -> None:
    await change(world, flavor("raced", vcpus=1, memory_mb=64))
    between = [flavor("raced", vcpus=1, memory_mb=128), flavor("raced", vcpus=1, memory_mb=256, disk_gb=4)]
    await edited(world, naming("raced", vcpus=2), meanwhile=between)
    assert (between, await body_of(world, "raced")) == ([], {"vcpus": 2, "memory_mb": 256, "disk_gb": 4})


async def test_one_that_is_always_overtaken_ends_with_a_code(world: World) -> None:
    await change(world, flavor("raced", vcpus=1))
    between = [flavor("raced", vcpus=1, memory_mb=number + 1) for number in range(MAX_TRIES + 3)]
    with pytest.raises(RequestRefused) as refused:
        await edited(world, naming("raced", vcpus=2), meanwhile=between)
    assert (refused.value.code, len(between)) == ("object.conflict", 3)


async def test_a_version_that_is_named_is_not_read_again(world: World) -> None:
    made = await change(world, flavor("raced", vcpus=1))
    with pytest.raises(RequestRefused) as refused:
        await edited(world, naming("raced", vcpus=2), meanwhile=[flavor("raced", vcpus=3)], if_version=made.revision)
    assert refused.value.code == "object.conflict"


async def test_two_that_make_one_object_do_not_replace_each_other(world: World) -> None:
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
