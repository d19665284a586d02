"""A node that Ironic did not have, and of which an event came while that answer was on its way."""

from __future__ import annotations

import contextlib

import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.contracts.placement import Inventory, ProviderReport
from ironic_sync.domain import position as step
from ironic_sync.domain.effect import Effect
from ironic_sync.domain.node import parse_node
from ironic_sync.domain.position import Position, Timing
from ironic_sync.sync_state import SyncState
from tests.unit.ironic.nodes import FREE as FREE_NODE

UUID = "8296eb22-b44b-4cba-95b1-3a66b31189a4"
FREE = parse_node({"uuid": UUID, **FREE_NODE})
FAR = 1e10
REPORTED = ProviderReport(uuid=UUID, name=UUID, inventories={"CUSTOM_X": Inventory(total=1)})


@pytest.mark.parametrize(("notified_seq", "removed"), [(4, True), (6, False)])
def test_a_404_that_was_overtaken_by_a_notification_takes_nothing_out(notified_seq: int, *, removed: bool) -> None:
    """Deleted and created again while the read was under way: it is read again at once, and stays in the book."""
    before = Position(uuid=UUID, version=3, report=REPORTED, notified_seq=notified_seq, read_seq=2)
    after = step.apply_removed(before, seq=5, now=1000.0)
    assert (after.report is None) is removed
    assert (after.version > before.version) is removed
    assert after.due_at == (None if removed else 1000.0)


def test_a_404_of_an_older_read_than_the_last_changes_nothing() -> None:
    before = Position(uuid=UUID, version=3, report=REPORTED, read_seq=7)
    assert step.apply_removed(before, seq=5, now=1000.0) is before


def state() -> SyncState:
    return SyncState({}, {}, clock=SystemClock(), timing=Timing(), max_nodes=10)


async def test_a_node_with_a_read_in_flight_is_not_purged() -> None:
    """A removed node is named by a notification, and created again; an older answer about it must not offer it."""
    kept = state()
    kept.apply_notification(Effect(read=UUID), "first")
    assert kept.pop_due(FAR) == UUID
    with kept.read_in_flight() as seq:
        kept.apply_notification(Effect(read=UUID, reserve_all=True), "second")
        assert kept.pop_due(FAR) == UUID
        kept.purge(FAR)
        kept.apply_read(FREE, seq=seq)
        position = kept.positions[UUID]
    assert position.report is None and position.due_at is not None  # it is read again first
    kept.positions[UUID] = replace(position, due_at=None)
    kept.purge(FAR)
    assert kept.positions == {}


@pytest.mark.parametrize("listed", [True, False])
async def test_the_removal_of_an_unreported_node_is_known_until_older_answers_have_come(*, listed: bool) -> None:
    """A page of a list was on its way when Ironic answered that it has no such node."""
    kept = state()
    with contextlib.ExitStack() as pages:
        page = pages.enter_context(kept.read_in_flight()) if listed else None
        kept.apply_notification(Effect(read=UUID), "created")
        assert kept.pop_due(FAR) == UUID
        with kept.read_in_flight() as seq:
            kept.apply_removed(UUID, seq=seq)
        if page is not None:
            kept.apply_read(FREE, seq=page)
            assert kept.positions[UUID].report is None
    kept.purge(FAR)
    assert kept.positions == {}  # a made-up uuid leaves nothing behind
