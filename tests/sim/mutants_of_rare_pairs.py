"""Deliberate defects of decisions with two conditions: each needs two rare things at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from bus.persistence.outbox import by_bus
from bus.persistence.relay import Relay
from bus.port import BusUnavailable
from cell_conductor.domain import delete_rules, move_steps
from cell_conductor.domain.steps import Step
from compute_sim.drivers.ironic.machine_change import NodeChange

Mutant = Callable[[], AbstractContextManager[Any]]


def release_under_the_reverts_number() -> AbstractContextManager[Any]:
    """A delete during a revert releases under the revert's own attempt: a late revert holds the source again."""
    leave = move_steps.leave

    def left(instance: Any, at: float, context: Any) -> Step:
        stepped = leave(instance, at, context)
        return Step(replace(stepped.instance, newest=instance.newest), stepped.commands)

    return patch.object(delete_rules, "leave", left)


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

    async def unlocked(self: NodeChange, node: Any, wanted: str) -> bool:
        return await power(self, replace(node, reservation=None), wanted)

    return patch.object(NodeChange, "_power", unlocked)
