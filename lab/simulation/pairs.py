"""Counts the pairs of state and event that a run has seen in the cells' table, and how long each state was."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeAlias
from unittest.mock import patch

from cell_conductor import engine, transition
from cell_conductor.state.instance import Instance

Pair: TypeAlias = tuple[str, str]  # (state, with the kind of its move; event)
SHORTEST_S = 0.001  # of a stay in which anything can come


class Stay(NamedTuple):
    """An instance was in a state for a while, in seconds of the run, on a host of this compute service."""

    uuid: str
    state: str
    service: str
    since: float
    until: float


class Seen:
    """The pairs of one run, and its stays."""

    def __init__(self) -> None:
        self.pairs: Counter[Pair] = Counter()
        self.stays: list[Stay] = []
        self._entered: dict[str, tuple[str, float]] = {}

    def note(self, before: Instance, event: Any, after: Instance) -> None:
        """One step."""
        state, now = named(before), asyncio.get_running_loop().time()
        self.pairs[state, type(event).__name__] += 1
        entered, since = self._entered.get(before.uuid, (state, now))
        if entered == state and now - since > SHORTEST_S:
            service = before.current.service if before.selections else ""
            self.stays.append(Stay(before.uuid, state, service, since, now))
        self._entered[before.uuid] = named(after), now


def named(instance: Instance) -> str:
    """The state, and the kind of the move that it is part of."""
    return instance.state.value if instance.action is None else f"{instance.state.value} {instance.action.kind.value}"


@contextmanager
def observed() -> Iterator[Seen]:
    """What cells' instances do meanwhile."""
    seen = Seen()
    with ExitStack() as patched:
        for module in (engine, transition):
            patched.enter_context(patch.object(module, "step", _noting(seen, module.step)))
        yield seen


def _noting(seen: Seen, step: Any) -> Any:
    def stepped(instance: Instance, event: Any, context: Any) -> Any:
        done = step(instance, event, context)
        seen.note(instance, event, done.instance)
        return done

    return stepped
