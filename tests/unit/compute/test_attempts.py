"""Fences and repeats: a table of single steps, and a machine of random ones."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bus.contracts.cell import ComputeOutcome
from compute_sim.domain.attempts import (
    DestroyVerdict,
    Entry,
    Phase,
    SpawnVerdict,
    answer,
    built,
    destroyed,
    failed,
    on_destroy,
    on_spawn,
)

B, R, F, D, G = Phase.BUILDING, Phase.RUNNING, Phase.FAILED, Phase.DESTROYING, Phase.GONE


@pytest.mark.parametrize(
    ("entry", "attempt", "verdict", "after"),
    [
        (None, 1, SpawnVerdict.START, Entry(1, B)),
        (Entry(1, B), 1, SpawnVerdict.UNDERWAY, Entry(1, B)),
        (Entry(1, R), 1, SpawnVerdict.REPEAT, Entry(1, R)),
        (Entry(1, F, code="x"), 1, SpawnVerdict.REPEAT, Entry(1, F, code="x")),
        (Entry(1, D, fence=1), 1, SpawnVerdict.FENCED, Entry(1, D, fence=1)),
        (Entry(1, G, fence=3), 2, SpawnVerdict.FENCED, Entry(1, G, fence=3)),
        (Entry(1, G, fence=3), 4, SpawnVerdict.START, Entry(4, B, fence=3)),
        (Entry(3, B), 2, SpawnVerdict.SUPERSEDED, Entry(3, B)),
        (Entry(1, B), 2, SpawnVerdict.REPLACE, Entry(2, B, fence=1)),
        (Entry(1, R), 2, SpawnVerdict.REPLACE, Entry(2, B, fence=1)),
        (Entry(1, F), 2, SpawnVerdict.REPLACE, Entry(2, B, fence=1)),
        (Entry(1, D, fence=2), 3, SpawnVerdict.REPLACE, Entry(3, B, fence=2)),
    ],
)
def test_spawn(entry: Entry | None, attempt: int, verdict: SpawnVerdict, after: Entry) -> None:
    assert on_spawn(entry, attempt) == (verdict, after)


@pytest.mark.parametrize(
    ("entry", "attempt", "verdict", "after"),
    [
        (None, 1, DestroyVerdict.DESTROY, Entry(1, D, fence=1)),
        (Entry(1, B), 1, DestroyVerdict.DESTROY, Entry(1, D, fence=1)),
        (Entry(1, R, reported=True), 2, DestroyVerdict.DESTROY, Entry(1, D, fence=2)),
        (Entry(1, F, code="x"), 1, DestroyVerdict.DESTROY, Entry(1, D, fence=1)),
        (Entry(1, D, fence=1), 1, DestroyVerdict.JOIN, Entry(1, D, fence=1)),
        (Entry(1, D, fence=1), 2, DestroyVerdict.JOIN, Entry(1, D, fence=2)),
        (Entry(1, G, fence=1, reported=True), 1, DestroyVerdict.DESTROY, Entry(1, D, fence=1, reported=True)),
        (Entry(1, G, fence=1, reported=True), 2, DestroyVerdict.DESTROY, Entry(1, D, fence=2)),
        (Entry(3, R, reported=True), 2, DestroyVerdict.STALE, Entry(3, R, fence=2, reported=True)),
        (Entry(3, B, fence=2), 1, DestroyVerdict.STALE, Entry(3, B, fence=2)),
    ],
)
def test_destroy(entry: Entry | None, attempt: int, verdict: DestroyVerdict, after: Entry) -> None:
    assert on_destroy(entry, attempt) == (verdict, after)


def test_a_late_end_of_an_attempt_that_is_no_more_changes_nothing() -> None:
    for entry in (None, Entry(2, B), Entry(1, D, fence=1), Entry(1, G, fence=1), Entry(1, R)):
        assert built(entry, 1) is None
        assert failed(entry, 1, "x", "") is None
    assert destroyed(Entry(2, B, fence=1)) is None


class OneHost(RuleBasedStateMachine):
    """One instance on one host under any mix of commands, against a plain account of what was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.entry: Entry | None = None
        self.fenced = 0  # highest attempt ever asked to be destroyed
        self.started: list[int] = []
        self.ends: dict[int, ComputeOutcome] = {}

    @rule(attempt=st.integers(1, 5))
    def spawn(self, attempt: int) -> None:
        verdict, self.entry = on_spawn(self.entry, attempt)
        if verdict in (SpawnVerdict.START, SpawnVerdict.REPLACE):
            assert attempt > self.fenced, "a destroyed attempt started"
            assert attempt not in self.started, "an attempt started twice"
            assert all(attempt > older for older in self.started), "an older attempt started after a newer one"
            self.started.append(attempt)
        if verdict is SpawnVerdict.REPEAT:
            assert answer(self.entry) == (attempt, self.ends[attempt]), "another answer than the first time"

    @rule(attempt=st.integers(1, 5))
    def destroy(self, attempt: int) -> None:
        before = self.entry
        verdict, self.entry = on_destroy(self.entry, attempt)
        self.fenced = max(self.fenced, attempt)
        if verdict is DestroyVerdict.STALE:
            assert before is not None and before.attempt > attempt
            assert (self.entry.attempt, self.entry.phase) == (before.attempt, before.phase)
        if before is not None and before.phase is G:
            assert verdict is DestroyVerdict.DESTROY, "what is ordered again is looked for again"

    @rule(works=st.booleans(), attempt=st.integers(1, 5))
    def end(self, works: bool, attempt: int) -> None:
        after = built(self.entry, attempt) if works else failed(self.entry, attempt, "no", "")
        if after is not None:
            assert attempt not in self.ends
            self.ends[attempt] = ComputeOutcome.ACTIVE if works else ComputeOutcome.FAILED
            self.entry = after

    @rule()
    def cleared(self) -> None:
        self.entry = destroyed(self.entry) or self.entry

    @invariant()
    def fence_is_kept(self) -> None:
        if self.entry is not None:
            assert self.entry.fence >= self.fenced
            if self.entry.phase in (B, R, F):
                assert self.entry.attempt > self.fenced


OneHost.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestOneHost = OneHost.TestCase
