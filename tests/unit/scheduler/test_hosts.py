"""The host table against a cell that makes things up."""

from __future__ import annotations

import pytest

from bus.contracts.cell import Heartbeat
from scheduler_worker.domain import hosts


def test_services_that_a_cell_makes_up_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "MAX_SERVICES", 3)
    table = hosts.HostTable()
    heard = [table.heard(Heartbeat(service=f"s{n}", cell="c1", epoch=1, sequence=1), 0.0) for n in range(5)]
    assert heard == [True, True, True, False, False]
    assert table.heard(Heartbeat(service="s0", cell="c1", epoch=1, sequence=2), 1.0)
    assert len(table.services) == 3
