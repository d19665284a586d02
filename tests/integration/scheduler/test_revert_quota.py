"""A revert names the room that its project's quota has: the cell knows how much larger the instance was."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.moves import MoveKind, MoveState
from tests.integration.scheduler.test_moves import DONE, WARM, one_active
from tests.integration.scheduler.world import World

pytestmark = pytest.mark.postgres


@pytest.mark.parametrize(
    ("quota", "room"),
    [
        ({"VCPU": 4, "INSTANCES": 1, "CUSTOM_GOLD": 2}, {"VCPU": 3, "INSTANCES": 0, "CUSTOM_GOLD": 2}),
        ({"VCPU": 1}, {"VCPU": 0}),
        ({}, {}),
    ],
)
async def test_a_revert_names_the_room_in_the_quota_and_a_confirm_does_not(
    world: World, quota: dict[str, int], room: dict[str, int]
) -> None:
    built = await one_active(world, config=replace(WARM, quotas={"demo": quota} if quota else {}))
    assert built.project_id == "demo"
    for number, kind, expected in ((20, MoveKind.REVERT, room), (30, MoveKind.CONFIRM, {})):
        move = world.move(built, kind)
        await world.ask(move)
        command = await world.dispatched(move)
        assert command.room == expected
        assert not command.limits
        await world.move_announced("c1", move, MoveState.DONE, number, **DONE)
        await world.moved(move)
