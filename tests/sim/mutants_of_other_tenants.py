"""Deliberate defects that only a world of others meets (tests/sim/test_mutants_of_other_tenants.py)."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from cell_conductor import guard
from cell_conductor.domain import events, table
from cell_conductor.domain.breaker import BreakerVerdict
from cell_conductor.domain.instance import State
from compute_sim import agent
from ironic_sync.domain import position


def overtaken_404_accepted() -> AbstractContextManager[Any]:
    """A node is taken out on a 404 though an event of it came since."""
    apply_removed = position.apply_removed

    def gone(before: Any, *, seq: int, now: float) -> Any:
        return apply_removed(replace(before, notified_seq=0), seq=seq, now=now)

    return patch.object(position, "apply_removed", gone)


def failed_machine_left_running() -> AbstractContextManager[Any]:
    """A failed instance whose machine runs is left alone."""
    rows = {state: dict(row) for state, row in table.TABLE.items()}
    rows[State.FAILED][events.HostRuns] = rows[State.FAILED][events.Spawned] = table.IGNORE
    return patch.object(table, "TABLE", rows)


def survived_machine_kept() -> AbstractContextManager[Any]:
    """A machine that was destroyed and runs again is kept at its service's start."""
    resume = agent.Agent._resume

    def kept(self: Any, key: Any, entry: Any, machine: Any, **more: Any) -> None:
        forgiven = replace(entry, fence=0) if entry.phase is agent.Phase.GONE else entry
        resume(self, key, forgiven, machine, **more)

    return patch.object(agent.Agent, "_resume", kept)


def survived_machine_kept_for_good() -> AbstractContextManager[Any]:
    """As `survived_machine_kept`, and nothing is looked for that is ordered destroyed again: each alone ends it."""
    decide = agent.on_destroy

    def on_destroy(entry: Any, attempt: int, deployment: str | None = None) -> Any:
        if entry is not None and entry.phase is agent.Phase.GONE:
            return agent.DestroyVerdict.STALE, entry
        return decide(entry, attempt, deployment)

    both = ExitStack()
    both.enter_context(survived_machine_kept())
    both.enter_context(patch.object(agent, "on_destroy", on_destroy))
    return both


def breaker_never_trips() -> AbstractContextManager[Any]:
    """However many machines one report has lost, they are lost."""
    return patch.object(guard, "assess", lambda _service, findings, *_, **__: BreakerVerdict(go=tuple(findings)))
