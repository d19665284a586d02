"""Deliberate defects of fences and evacuations (tests/sim/test_mutants_of_fences.py)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from bus.contracts.operations import CellFence, FenceState
from cell_conductor.domain import events as e
from cell_conductor.domain import fence_rules, rules, table
from cell_conductor.domain.fences import Fence
from cell_conductor.domain.instance import State
from cell_conductor.domain.steps import Step
from cell_conductor.domain.table import Rule
from cell_conductor.fences import FenceKeeper
from scheduler_worker.domain import fences
from scheduler_worker.moves import MoveEngine


def fence_never_lifted() -> AbstractContextManager[Any]:
    """A cell gets a fence once more where it should lift it."""
    command = fences.command
    return patch.object(fences, "command", lambda *one: replace(command(*one), lift=False))


def losses_never_forgotten() -> AbstractContextManager[Any]:
    """A machine that a host has destroyed stays on record as its loss."""

    async def keep(self: FenceKeeper, losses: Sequence[Any]) -> None:
        return None

    return patch.object(FenceKeeper, "_delete_losses", keep)


def fence_acknowledged_and_not_recorded() -> AbstractContextManager[Any]:
    """A cell acknowledges a fence, and does not have it on record."""
    take = FenceKeeper.take

    async def acknowledge(self: FenceKeeper, decisions: Sequence[CellFence], engine: Any) -> None:
        await take(self, [one for one in decisions if one.lift], engine)
        for one in decisions:
            if not one.lift:
                fence = Fence(host_uuid=one.host_uuid, host=one.host, version=one.version)
                await self._announce(fence, FenceState.FENCED)

    return patch.object(FenceKeeper, "take", acknowledge)


def delete_on_a_fenced_host_keeps_its_claim() -> AbstractContextManager[Any]:
    """A delete that a fence ends is over at once, and nothing is released."""

    def end(instance: Any, event: Any, context: Any) -> Step:
        ended = fence_rules.end_destroyed(instance, event, context)
        if ended.instance.phase != (State.RELEASING, State.DELETED):
            return ended
        return rules.end_deleted(ended.instance, e.Released(at=event.at, consumer=instance.uuid), context)

    row: Any = table.TABLE[State.DESTROYING]
    cell = row[e.HostFenced]
    return patch.dict(row, {e.HostFenced: replace(cell, otherwise=Rule(end, tuple(State)))})


def choice_never_released() -> AbstractContextManager[Any]:
    """A choice for an evacuation counts as used until the next move."""
    return patch.object(MoveEngine, "_expire_later", lambda self: None)
