"""Every step of every recording ends in the inventory that Nova's own code would make of the node."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from ironic_sync.domain.rules import NO_CLASS
from tests.unit.ironic.world import SCENARIOS, Recording, World

Messages = list[tuple[bytes, str]]


def wrong(world: World, expected: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """{node: (held, expected)} where they differ. A node that Nova cannot place keeps the provider it had."""
    differ = {}
    for uuid, answer in expected["nodes"].items():
        held, should = world.book.seen(uuid), answer
        if answer is not None and "error" in answer:
            assert world.loop.problems()[uuid] == NO_CLASS
            should = before.get(uuid)
        if held != should:
            differ[uuid] = (held, should)
    return differ


def assert_no_accidental_offer(world: World, since: int, expected: dict[str, Any], before: dict[str, Any]) -> None:
    """Whatever was published while Ironic stood at this step, it never offered a node that was not free then."""
    for update in world.book.updates[since:]:
        for report in update.providers:
            should = expected["nodes"].get(report.uuid)
            should = before.get(report.uuid) if should is not None and "error" in should else should
            if any(inventory.reserved == 0 for inventory in report.inventories.values()):
                assert should is not None and should["reserved"] == 0, (expected["step"], report)


def state_after(world: World, expected: dict[str, Any]) -> dict[str, Any]:
    return {uuid: world.book.seen(uuid) for uuid in expected["nodes"]}


async def play(recording: Recording, disturb: Callable[[int, Messages], Messages], *, resync: bool) -> None:
    """Step by step: Ironic moves on, its notifications arrive disturbed, everything settles, the book is right."""
    world = World(recording.source)
    before: dict[str, Any] = {}
    async with world.running():
        for index, expected in enumerate(recording.expected):
            recording.source.go_to(index)
            updates_before = len(world.book.updates)
            for body, key in disturb(index, recording.messages[index]):
                await world.notify(body, key)
            await world.settle()
            # A second "start:" brings a node whose making was not recorded: nothing but reading all can find it.
            if resync or (index and expected["step"].startswith("start:")):
                world.loop.read_all()
                await world.settle()
            assert wrong(world, expected, before) == {}, expected["step"]
            assert_no_accidental_offer(world, updates_before, expected, before)
            before = state_after(world, expected)


def test_there_are_recordings() -> None:
    assert len(SCENARIOS) == 23


@pytest.mark.parametrize("name", SCENARIOS)
async def test_each_step_as_it_was(name: str) -> None:
    await play(Recording(name), lambda _, messages: messages, resync=False)


@pytest.mark.parametrize("name", SCENARIOS)
async def test_each_step_with_every_message_twice(name: str) -> None:
    await play(Recording(name), lambda _, messages: [m for m in messages for _ in range(2)], resync=False)


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("seed", range(3))
async def test_each_step_in_any_order(name: str, seed: int) -> None:
    """No order is promised between publishers, hardly any within one; a read settles it."""
    rng = random.Random(seed)

    def shuffled(_: int, messages: Messages) -> Messages:
        return rng.sample(messages, len(messages))

    await play(Recording(name), shuffled, resync=False)


@pytest.mark.parametrize("name", SCENARIOS)
async def test_each_step_with_all_earlier_messages_again(name: str) -> None:
    """Late and doubled: whatever was ever published comes back after what is true now."""
    recording = Recording(name)
    published: Messages = []

    def late(_: int, messages: Messages) -> Messages:
        published.extend(messages)
        return [*messages, *published]

    await play(recording, late, resync=False)


@pytest.mark.parametrize("name", SCENARIOS)
async def test_each_step_with_any_one_message_lost(name: str) -> None:
    """Each message lost in turn: the periodic read repairs it."""
    recording = Recording(name)
    for index, messages in enumerate(recording.messages):
        for lost in range(len(messages)):
            await play(
                recording,
                lambda i, m, index=index, lost=lost: m[:lost] + m[lost + 1 :] if i == index else m,
                resync=True,
            )


@pytest.mark.parametrize("name", SCENARIOS)
async def test_without_any_message(name: str) -> None:
    await play(Recording(name), lambda _, __: [], resync=True)


@pytest.mark.parametrize("name", SCENARIOS)
async def test_one_step_behind(name: str) -> None:
    """Each step's messages arrive only when Ironic has moved on by one step."""
    recording = Recording(name)

    def behind(index: int, _: Messages) -> Messages:
        return recording.messages[index - 1] if index else []

    await play(recording, behind, resync=True)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_wire_bytes_are_the_recorded_ones(name: str) -> None:
    for messages in Recording(name).messages:
        for body, _ in messages:
            assert set(json.loads(body)) == {"oslo.version", "oslo.message"}
