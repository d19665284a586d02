"""A node that Ironic did not have, and of which an event came while that answer was on its way."""

from __future__ import annotations

import pytest

from bus.contracts.placement import Inventory, ProviderReport
from ironic_sync.domain import position as step
from ironic_sync.domain.position import Position

UUID = "8296eb22-b44b-4cba-95b1-3a66b31189a4"
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
