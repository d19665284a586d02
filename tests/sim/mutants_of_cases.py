"""Deliberate defects that are found in plans made for them (tests/sim/test_mutants_of_cases.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from bus.contracts.operations import CellFence
from bus.persistence.outbox import by_bus
from bus.persistence.relay import Relay
from bus.transport import BusUnavailable
from cell_conductor import table, transition
from cell_conductor.hosts.fence_controller import FenceController
from cell_conductor.reports import report_guard as guard
from cell_conductor.rules import build_end_rules, delete_rules, fence_rules, move_steps
from cell_conductor.state import events
from cell_conductor.state.breaker import BreakerAssessment
from cell_conductor.state.fence import Fence
from cell_conductor.state.instance import State
from cell_conductor.state.step import Step
from cell_conductor.store.fence_rows import FenceStore
from cell_conductor.table import Rule
from compute_agent.attempts import agent, destroys
from compute_agent.drivers.ironic.machine_change import NodeChange
from ironic_sync.domain import position
from scheduler_worker.action.destination import DestinationChooser
from scheduler_worker.objects import fence_rules as fences

# --- fences and evacuations


def fence_never_lifted() -> AbstractContextManager[Any]:
    """A cell gets a fence once more where it should lift it."""
    command = fences.command
    return patch.object(fences, "command", lambda *one: replace(command(*one), unfence=False))


def a_host_never_shown_to_be_empty() -> AbstractContextManager[Any]:
    """What was given up on a host is held against it also after its scan has shown none of that."""

    async def keep(self: FenceStore, *_: Any) -> None:
        return None

    return patch.object(FenceStore, "record_empty", keep)


def fence_acknowledged_and_not_recorded() -> AbstractContextManager[Any]:
    """A cell acknowledges a fence, and does not have it on record."""
    take = FenceController.take

    async def acknowledge(self: FenceController, decisions: Sequence[CellFence], engine: Any) -> None:
        await take(self, [one for one in decisions if one.unfence], engine)
        for one in decisions:
            if not one.unfence:
                fence = Fence(host_uuid=one.host_uuid, host=one.host, version=one.version)
                await self._announce(fence)

    return patch.object(FenceController, "take", acknowledge)


def delete_on_a_fenced_host_keeps_its_claim() -> AbstractContextManager[Any]:
    """A delete that a fence ends is over at once, and nothing is released."""

    def end(instance: Any, event: Any, context: Any) -> Step:
        ended = fence_rules.end_destroyed(instance, event, context)
        if ended.instance.phase != (State.RELEASING, State.DELETED):
            return ended
        return build_end_rules.end_deleted(
            ended.instance, events.Released(at=event.at, consumer=instance.uuid), context
        )

    row: Any = table.TABLE[State.DESTROYING]
    cell = row[events.HostFenced]
    return patch.dict(row, {events.HostFenced: replace(cell, otherwise=Rule(end, tuple(State)))})


def choice_never_released() -> AbstractContextManager[Any]:
    """A choice for an evacuation counts as used until the next move."""
    return patch.object(DestinationChooser, "_expire_later", lambda self: None)


# --- what only a world of others meets


def overtaken_404_accepted() -> AbstractContextManager[Any]:
    """A node is taken out on a 404 though an event of it came since."""
    apply_removed = position.apply_removed

    def gone(before: Any, **arguments: Any) -> Any:
        return apply_removed(replace(before, notified_seq=0), **arguments)

    return patch.object(position, "apply_removed", gone)


def failed_machine_left_running() -> AbstractContextManager[Any]:
    """A failed instance whose machine runs is left alone."""
    rows = {state: dict(row) for state, row in table.TABLE.items()}
    rows[State.FAILED][events.MachineRunning] = rows[State.FAILED][events.Spawned] = table.IGNORE
    return patch.object(transition, "TABLE", rows)


def survived_machine_kept() -> AbstractContextManager[Any]:
    """A machine that was destroyed and runs again is kept at its service's start."""
    resume = agent.Agent._resume

    def kept(self: Any, key: Any, entry: Any, machine: Any, **more: Any) -> None:
        forgiven = replace(entry, max_ended_attempt=0) if entry.phase is agent.AttemptPhase.GONE else entry
        resume(self, key, forgiven, machine, **more)

    return patch.object(agent.Agent, "_resume", kept)


def survived_machine_kept_for_good() -> AbstractContextManager[Any]:
    """As `survived_machine_kept`, and nothing is looked for that is ordered destroyed again: each alone ends it."""
    decide = destroys.on_destroy

    def on_destroy(entry: Any, attempt: int, database_id: str | None = None) -> Any:
        if entry is not None and entry.phase is destroys.AttemptPhase.GONE:
            return destroys.DestroyAction.STALE, entry
        return decide(entry, attempt, database_id)

    both = ExitStack()
    both.enter_context(survived_machine_kept())
    both.enter_context(patch.object(destroys, "on_destroy", on_destroy))
    return both


def breaker_never_trips() -> AbstractContextManager[Any]:
    """However many machines one report has lost, they are lost."""
    return patch.object(
        guard, "assess", lambda _service, findings, *_, **__: BreakerAssessment(effective=tuple(findings))
    )


# --- decisions with two conditions: each needs two rare things at once


def release_under_the_reverts_number() -> AbstractContextManager[Any]:
    """A delete during a revert releases under the revert's own attempt: a late revert holds the source again."""
    leave = move_steps.delete_during_action

    def left(instance: Any, at: float, context: Any) -> Step:
        stepped = leave(instance, at, context)
        return Step(replace(stepped.instance, highest_attempt=instance.highest_attempt), stepped.commands)

    return patch.object(delete_rules, "delete_during_action", left)


@contextmanager
def refused_while_another_bus_is_away() -> Iterator[None]:
    """A transaction's messages go to two buses: one refuses, one is away, and all of them are given up."""
    sent, ended = Relay.send, Relay._end
    others: dict[tuple[int, int], dict[int, str]] = {}  # {(relay, row): the other rows of its transaction}

    def send(self: Relay, rows: Sequence[int], outgoing: Sequence[Any]) -> None:
        buses = dict(zip(rows, by_bus(outgoing), strict=True))
        for row in buses if len(buses) > 1 else ():
            others[id(self), row] = {one: bus for one, bus in buses.items() if one != row}
        sent(self, rows, outgoing)

    def end(self: Relay, ticket: Any) -> None:
        is_refused = ticket.error is not None and not isinstance(ticket.error, BusUnavailable)
        away = [row for row in others.get((id(self), ticket.row_id), {}) if row in self._left]
        if is_refused and away:
            ticket.error = None
            for row in away:
                del self._left[row]
                self._confirmed.append(row)
        ended(self, ticket)

    with patch.object(Relay, "send", send), patch.object(Relay, "_end", end):
        yield


def old_error_ends_a_power_order() -> AbstractContextManager[Any]:
    """Ironic has accepted a power order and not taken it up: the error of an earlier one is taken for its end."""
    power = NodeChange._power

    async def unlocked(self: NodeChange, node: Any, wanted: str, reboot: str | None = None) -> bool:
        return await power(self, replace(node, reservation=None), wanted, reboot)

    return patch.object(NodeChange, "_power", unlocked)
