"""Two conductors ask placement the same question at once, and are answered differently."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from bus.contracts.placement import Claim, ClaimOutcome, ClaimResult
from cell_conductor.domain.events import InstanceEvent, SpawnFailed
from cell_conductor.domain.instance import State
from cell_conductor.engine import Engine
from cell_conductor.handlers import build_requested
from cell_conductor.placement_requests import PendingQuestion, PlacementRequests
from tests.integration.conductor.neighbours import WAIT_S, Cell, opened


@pytest.fixture
async def cell(postgres_url: str) -> AsyncIterator[Cell]:
    async with opened(postgres_url) as made:
        yield made


class Held(PlacementRequests):
    """Every question to placement waits until it is let go."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell.bus, cell.clock, cell.config.claim_timeout_s)
        self.asking, self.go = asyncio.Event(), asyncio.Semaphore(0)

    async def _ask(self, questions: Sequence[PendingQuestion]) -> list[InstanceEvent]:
        self.asking.set()
        await self.go.acquire()
        return await super()._ask(questions)

    async def requested(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.asking.wait()
        self.asking.clear()


async def test_a_question_that_came_twice_may_be_answered_full_and_then_claimed(cell: Cell) -> None:
    """The first asking releases and finds no room; then there is room for the second one (a redelivered message)."""
    uuid = await _building(cell)
    (one, first_held), (two, second_held) = _held(cell), _held(cell)
    failed = InstanceEvent(uuid, SpawnFailed(at=cell.clock.time(), attempt=1, host_uuid=cell.host(1)), "a message")
    cell.around.full = {cell.host(2)}
    cell.around._claim = _placement(cell)  # type: ignore[method-assign]
    first = asyncio.create_task(one.take([failed], source="test"))
    await first_held.requested()
    second = asyncio.create_task(two.take([failed], source="test"))
    await second_held.requested()
    first_held.go.release()  # full: the claim of the first host is released, none is taken
    await first_held.requested()  # it requests a release, of the attempt that may have been claimed too
    assert await cell.state(uuid) is State.RELEASING
    cell.around.full = set()
    second_held.go.release()
    await second
    assert uuid in cell.around.held
    first_held.go.release()
    await first
    assert await cell.state(uuid) is State.FAILED
    await cell.check_at_rest()


def _held(cell: Cell) -> tuple[Engine, Held]:
    made = Engine(
        store=cell.store, bus=cell.bus, relay=cell.relay, clock=cell.clock, config=cell.config, cell=cell.bus.name
    )
    held = made._placement = Held(cell)
    return made, held


async def _building(cell: Cell) -> str:
    cell.around.hangs = {cell.host(1)}
    build = cell.build(1, 2)
    uuid = build.spec.instance_uuid
    await cell.engine.take([InstanceEvent(uuid, build_requested(build, cell.clock.time(), uuid))], source="test")
    return uuid


def _placement(cell: Cell) -> object:
    """As the real one: a release_first that finds nothing to release may go on."""

    def claim(message: Claim) -> ClaimResult:
        cell.around.held.pop(message.consumer, None)
        (place,) = message.options[0].allocations
        if place in cell.around.full:
            return ClaimResult(outcome=ClaimOutcome.FULL, outcomes=(ClaimOutcome.FULL,))
        cell.around.held[message.consumer] = (message.attempt, place, 2)
        return ClaimResult(
            outcome=ClaimOutcome.CLAIMED, option=0, outcomes=(ClaimOutcome.CLAIMED,), consumer_generation=2
        )

    return claim
