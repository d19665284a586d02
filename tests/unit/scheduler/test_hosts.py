"""The host table against a cell that makes things up."""

from __future__ import annotations

import pytest

from bus.contracts.cell import ComputeHosts, Heartbeat, HostReport
from scheduler_worker.domain import hosts


def test_services_that_a_cell_makes_up_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "MAX_SERVICES", 3)
    table = hosts.HostTable()
    heard = [table.apply(Heartbeat(service=f"s{n}", cell="c1", epoch=1, sequence=1), 0.0) for n in range(5)]
    assert heard == [True, True, True, False, False]
    assert table.apply(Heartbeat(service="s0", cell="c1", epoch=1, sequence=2), 1.0)
    assert len(table.services) == 3


def report(
    sequence: int, *named: str, began: int = 0, pages: int = 1, complete: bool = False, epoch: int = 1
) -> ComputeHosts:
    listed = tuple(HostReport(uuid=f"{name * 8}-0000-4000-8000-000000000000", name=name) for name in named)
    return ComputeHosts(
        service="s",
        cell="c1",
        epoch=epoch,
        sequence=sequence,
        hosts=listed,
        began=began,
        pages=pages,
        complete=complete,
    )


def managed(table: hosts.HostTable) -> str:
    return "".join(name for index, name in enumerate(table.names) if table.service[index] != hosts.NO_SERVICE)


def test_a_report_of_many_pages_says_who_is_gone_when_all_of_them_were_heard() -> None:
    table = hosts.HostTable()
    for one in (report(1, "a", "b", began=1, pages=2), report(2, "c", "d", began=1, pages=2, complete=True)):
        assert table.apply(one, 0.0)
    assert managed(table) == "abcd"
    table.apply(report(3, "a", began=3, pages=3), 1.0)
    table.apply(report(4, "e"), 1.0)  # a host that is new meanwhile, said alone
    table.apply(report(5, "c", began=3, pages=3), 1.0)
    assert managed(table) == "abcde"
    table.apply(report(6, began=3, pages=3, complete=True), 1.0)
    assert managed(table) == "ace"
    # A page of this one is lost: nobody is taken for gone.
    table.apply(report(7, "a", began=7, pages=3), 2.0)
    table.apply(report(9, "c", began=7, pages=3, complete=True), 2.0)
    assert managed(table) == "ace"
    table.apply(report(10, "c", complete=True), 3.0)  # as services said it that knew no pages
    assert managed(table) == "c"


def test_a_service_that_began_anew_counts_its_pages_anew() -> None:
    """It may have died within a report that had the number of its first one now."""
    table = hosts.HostTable()
    table.apply(report(1, "a", began=1, pages=3), 0.0)
    table.apply(report(1, "b", began=1, pages=2, epoch=2), 1.0)
    table.apply(report(2, "c", began=1, pages=2, epoch=2, complete=True), 1.0)
    assert managed(table) == "bc"


HOST = "10000000-0000-4000-8000-000000000001"


def announce(table: hosts.HostTable, cell: str, sequence: int, now_s: float, service: str = "s") -> str:
    """Announce the host there; returns the cell it is in then."""
    said = (HostReport(uuid=HOST, name="h"),)
    table.apply(ComputeHosts(service=service, cell=cell, epoch=1, sequence=sequence, hosts=said), now_s)
    index = table.index_of(HOST)
    assert index is not None
    return table.cells[table.cell[index]]


def test_a_cell_does_not_announce_another_cells_host_away() -> None:
    table = hosts.HostTable()
    assert announce(table, "c1", 1, 0.0) == "c1"
    assert announce(table, "c2", 1, hosts.CELL_HOLD_S) == "c1"
    assert announce(table, "c1", 2, hosts.CELL_HOLD_S, service="heir") == "c1"
    assert announce(table, "c2", 2, 2 * hosts.CELL_HOLD_S) == "c1"


def test_a_host_whose_service_is_silent_or_gone_may_come_to_another_cell() -> None:
    table = hosts.HostTable()
    announce(table, "c1", 1, 0.0)
    assert announce(table, "c2", 1, hosts.CELL_HOLD_S + 1) == "c2"
    table.apply(Heartbeat(service="s", cell="c2", epoch=1, sequence=2, leaving=True), hosts.CELL_HOLD_S + 2)
    assert announce(table, "c1", 2, hosts.CELL_HOLD_S + 3) == "c1"
