"""Positions under any interleaving of changes, notifications and reads that overtake each other."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from ironic_sync.domain import position as step
from ironic_sync.domain.node import Node, parse_node
from ironic_sync.domain.position import Position, Timing
from ironic_sync.domain.rules import place, reserved

UUID = "8296eb22-b44b-4cba-95b1-3a66b31189a4"
TIMING = Timing()
STATES = ("available", "active", "cleaning", "manageable")


def node(state: str, trait: int) -> Node:
    raw: dict[str, Any] = {"uuid": UUID, "provision_state": state, "power_state": "power off", "resource_class": "x"}
    parsed = parse_node({**raw, "traits": [f"CUSTOM_{trait}"]})
    assert isinstance(parsed, Node)
    return parsed


class Model:
    """One node, its position, reads on their way, and what is certain."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.seq = 0
        self.node = node("available", 0)
        self.position = Position(uuid=UUID)
        self.reads: list[tuple[int, Node]] = []
        self.withdrawn_seen = 0
        self.last_answer = 0
        self.versions: list[int] = []

    def change(self, state: str, trait: int) -> None:
        self.node = node(state, trait)

    def publish(self) -> None:
        self.seq += 1
        withdrawn = reserved(self.node)
        self.withdrawn_seen = self.seq if withdrawn else self.withdrawn_seen
        self._set(step.notified(self.position, taken=withdrawn, seq=self.seq, now=self.now))

    def send(self) -> None:
        self.seq += 1
        self.reads.append((self.seq, self.node))

    def answer(self, which: int) -> None:
        if not self.reads:
            return
        seq, seen = self.reads.pop(which % len(self.reads))
        before = self.position
        self._set(step.apply_read(before, seen, seq=seq, now=self.now, timing=TIMING))
        if seq < self.last_answer:
            assert self.position.report == before.report, "an older read changes nothing"
        self.last_answer = max(self.last_answer, seq)
        gained = _offers(self.position) and not _offers(before)
        assert not gained or seq > self.withdrawn_seen, "given back by a read older than the news that took it away"

    def settle(self) -> None:
        """Answer what is on its way, then read while a read is due."""
        while self.reads:
            self.answer(0)
        for _ in range(100):
            due_at = self.position.due_at
            if due_at is None or due_at > self.now:
                return
            self.send()
            self.answer(0)
        raise AssertionError("it reads for ever")

    def _set(self, after: Position) -> None:
        self.now += 0.001
        if after.report != self.position.report:
            assert after.version > self.position.version
        assert after.version >= self.position.version
        self.position = after


def _offers(position: Position) -> bool:
    report = position.report
    return report is not None and any(inventory.reserved == 0 for inventory in report.inventories.values())


EVENTS = st.one_of(
    st.tuples(st.just("change"), st.sampled_from(STATES), st.integers(0, 2)),
    st.tuples(st.just("publish")),
    st.tuples(st.just("send")),
    st.tuples(st.just("answer"), st.integers(0, 3)),
)


@given(st.lists(EVENTS, max_size=30))
@example([("send",), ("change", "active", 0), ("send",), ("answer", 1), ("answer", 0)])
@example([("change", "active", 0), ("send",), ("publish",), ("change", "active", 1), ("publish",), ("answer", 0)])
def test_it_is_never_free_by_accident_and_ends_as_the_node_is(events: list[tuple[Any, ...]]) -> None:
    model = Model()
    for name, *arguments in events:
        getattr(model, name)(*arguments)
    model.publish()
    model.settle()
    assert model.position.report == place(model.node, None).report
    assert (model.position.due_at is None) == (model.node.provision_state in ("available", "active", "manageable"))


def test_waits_for_a_transient_node_double_up_to_a_bound() -> None:
    position, waits, now = Position(uuid=UUID), [], 0.0
    for seq in range(1, 12):
        position = step.apply_read(position, node("cleaning", 0), seq=seq, now=now, timing=TIMING)
        assert position.due_at is not None
        waits.append(position.due_at - now)
        now = position.due_at
    assert waits[:4] == [1.0, 2.0, 4.0, 8.0]
    assert max(waits) == waits[-1] == TIMING.transient_retry_max_s
