"""A move is rolled back, and placement does not give the instance its source again."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.contracts.actions import ActionEvent, ActionKind, ActionState, Condition
from bus.contracts.placement import RevertResult
from cell_conductor.config import ConductorConfig
from cell_conductor.engine import Engine
from cell_conductor.state import events as e
from cell_conductor.state.instance import Instance, State
from cell_conductor.store.memory import MemoryInstances
from cell_conductor.transition import step
from tests.unit.cell_conductor.move_scenario import ACTION, OTHER
from tests.unit.cell_conductor.records import BY_REVERT, in_place, moving, outcome
from tests.unit.cell_conductor.scenario import PATIENCE, SPEC, UUID, host
from tests.unit.cell_conductor.world import Relay, engine_of, insert, opened_store

SOURCE_REFUSED = "action.source_refused"
BY_ABORT: dict[str, Any] = {
    "rollback_code": "action.aborted",
    "ending_request_id": OTHER,
    "ending_kind": ActionKind.ABORT,
}
FAILED: dict[str, Any] = {"rollback_code": "spawn.no_disk", "rollback_reason": "no_capacity", "handed_over": True}


class Placement:
    """Answers each revert so."""

    name = "c1"

    def __init__(self, outcome: str) -> None:
        self.outcome = outcome

    async def request_all(self, messages: list[Any], *_: Any, **__: Any) -> list[Any]:
        """One answer each."""
        return [RevertResult(outcome=self.outcome, consumer_generation=9, reason="why") for _ in messages]


class Cell:
    """A conductor whose placement answers so, with this on record."""

    def __init__(self, store: MemoryInstances, answered: str) -> None:
        self.store, self.relay, self.placement = store, Relay(), Placement(answered)
        bus: Any = self.placement
        relay: Any = self.relay
        clock, config = SystemClock(), ConductorConfig()
        self.engine: Engine = engine_of(store=store, bus=bus, relay=relay, clock=clock, config=config, cell="c1")

    async def due(self) -> Instance:
        """The record after its deadline, as it is then."""
        async with self.store.transaction() as transaction:
            known = await transaction.lock([UUID])
            await transaction.update([replace(known[UUID], deadline=1.0)])
        await self.engine.sweep()
        return (await self.engine.read_recorded([UUID]))[UUID]

    @property
    def ends(self) -> list[tuple[str, ActionKind, ActionState, str]]:
        """The requests that have ended."""
        sent = [one.message for one in self.relay.sent]  # type: ignore[attr-defined]
        return [(m.request_id, m.kind, m.state, m.code) for m in sent if isinstance(m, ActionEvent) and m.terminal]


async def cell(record: Instance, answered: str) -> Cell:
    """A conductor with this on record."""
    made = Cell(await opened_store(), answered)
    await insert(made.store, record)
    return made


@pytest.mark.parametrize("answered", ["no_capacity", "provider_removed", "invalid"])
async def test_its_request_ends_and_it_goes_back_once_placement_has_room(answered: str) -> None:
    """The requester waited without an end, and placement was asked every 15 s; `invalid` was taken for granted."""
    now = SystemClock().time()
    undone = await cell(moving(State.REVERTING, action=FAILED, since=now), answered)
    for _ in range(2):
        known = await undone.due()
        assert known.state is State.REVERTING and known.deadline is not None
        assert known.deadline >= now + ConductorConfig().destroy_retry_s
        assert undone.ends == [(ACTION, ActionKind.MIGRATE, ActionState.FAILED, "spawn.no_disk")], "once"
    undone.placement.outcome = "reverted"
    assert (await undone.due()).state is State.RESTARTING
    assert len(undone.ends) == 1


async def test_the_repeats_become_rarer_up_to_a_bound() -> None:
    config, now = ConductorConfig(), SystemClock().time()
    for waited, wait_s in ((0.0, config.destroy_retry_s), (100.0, 100.0), (1e6, config.destroy_retry_max_s)):
        known = await (await cell(moving(State.REVERTING, since=now - waited), "no_capacity")).due()
        assert known.deadline is not None and known.deadline == pytest.approx(now + wait_s, abs=5.0)


@pytest.mark.parametrize(
    ("record", "commands"),
    [
        (
            moving(State.REVERTING, action={**BY_REVERT, "answered": True}),
            (f"revert: failed {SOURCE_REFUSED}",),
        ),
        (
            moving(State.REVERTING, action=BY_ABORT),
            ("migrate: failed action.aborted", f"abort: failed {SOURCE_REFUSED}"),
        ),
        (in_place(State.REVERTING, action=FAILED), ("resize: failed spawn.no_disk",)),
        (moving(State.REVERTING, action={**FAILED, "answered": True}), ()),
    ],
)
def test_each_request_that_waits_for_it_ends(record: Instance, commands: tuple[str, ...]) -> None:
    refused = e.RevertRefused(at=221.0, attempt=5, outcome="no_capacity", reason="why")
    assert outcome(record, refused, PATIENCE) == ("reverting", commands)
    assert outcome(record, replace(refused, attempt=4), PATIENCE) == ("reverting", ()), "of another question"


def test_for_its_client_it_is_where_it_goes_back_to() -> None:
    """Schedulers would have had its new flavor, and the host where nothing of it is, until placement has room."""
    larger = replace(SPEC, flavor="large")
    before = moving(State.REVERTING, action=FAILED, spec=larger)
    stepped = step(before, e.RevertRefused(at=221.0, attempt=5, outcome="provider_removed"), PATIENCE)
    (ended,) = stepped.commands
    assert isinstance(ended, ActionEvent) and (ended.host_uuid, ended.flavor) == (host(1), SPEC.flavor)
    assert ended.condition is Condition.MOVING
    after = stepped.instance
    assert (after.selections, after.selection_index, after.attempt, after.spec) == (before.selections, 1, 2, larger)
