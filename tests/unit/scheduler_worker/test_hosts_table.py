"""The host table by rows: what was announced, by whom and when, and what the table says then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bus.contracts.cell import HostReport, HostStates, ServiceDown, ServiceRemoved, ServiceStates
from bus.contracts.operations import AdminState, HostAdminState
from scheduler_worker.hosts import host_table as hosts
from scheduler_worker.hosts.host_table import HostTable
from scheduler_worker.hosts.service_directory import (
    CELL_HOLD_S,
    DOWN_HOLD_S,
    MAX_UNANSWERED,
    NO_SERVICE,
    UNRESPONSIVE,
    ServiceDirectory,
)
from scheduler_worker.selection.host_view import HostsView, Membership

U = {name: f"{name}0000000-0000-4000-8000-000000000001" for name in "abcde"}
A, B = U["a"], U["b"]
SILENT, STOPPED = "service.silent", "service.stopped"
Event = tuple[float, HostStates | ServiceStates | ServiceRemoved | Callable[[HostTable], object]]


def told(
    named: str = "a", service: str = "s", at: float = 0.0, *, owner: str | None = None, ring: tuple[int, int] = (0, 0),
    host: dict[str, Any] | None = None, **more: Any,
) -> Event:  # fmt: skip
    reports = tuple(HostReport(uuid=U[one], name=one, owner=owner, **host or {}) for one in named)
    more = {"cell": "c1", "epoch": 1, "sequence": 1, **more}
    return at, HostStates(service=service, hosts=reports, ring_term=ring[0], ring_number=ring[1], **more)


def listed(*down: str, at: float = 1.0, number: int = 1, code: str = SILENT, epoch: int = 1, **more: Any) -> Event:
    named = tuple(ServiceDown(service=one, epoch=epoch, code=code) for one in down)
    return at, ServiceStates(**{"cell": "c1", "term": 1, "number": number, "down": named, **more})


def gone(service: str, at: float = 1.0, cell: str = "c1") -> Event:
    return at, ServiceRemoved(service=service, cell=cell)


def asked(times: int, cell: str = "c1", at: float = 5.0) -> Event:
    return at, lambda table: [table.services.count_request(cell, at) for _ in range(times)]


def table_of(*events: Event) -> HostTable:
    table = HostTable()
    for at, event in events:
        if isinstance(event, ServiceRemoved):
            table.delete_service(event, at)
        elif isinstance(event, HostStates | ServiceStates):
            table.apply(event, at)
        else:
            event(table)
    return table


def holders(table: HostTable) -> dict[str, str]:
    """{host: cell/service}, of those that a service has."""
    return {
        name: f"{table.cells[table.cell[at]]}/{table.services.states[table.service[at]].name}"
        for at, name in enumerate(table.names)
        if table.service[at] != NO_SERVICE
    }


T = CELL_HOLD_S
OTHER: dict[str, Any] = {"cell": "c2"}


@pytest.mark.parametrize(
    ("events", "holder"),
    [
        # Another cell: while the service, or its cell, was heard of in the last minute.
        ((told(), told(service="t", at=T, **OTHER)), "c1/s"),
        ((told(), told(service="t", at=T + 0.1, **OTHER)), "c2/t"),
        ((told(), listed(at=30.0), told(service="t", at=T + 30.0, **OTHER)), "c1/s"),
        ((told(), listed(at=30.0), told(service="t", at=T + 30.1, **OTHER)), "c2/t"),
        ((listed(at=0.0), told(at=30.0), told(service="t", at=T + 30.0, **OTHER)), "c1/s"),
        ((told(), listed(at=30.0, pages=2), told(service="t", at=T + 0.1, **OTHER)), "c2/t"),
        ((told(), listed(at=30.0, **OTHER), told(service="t", at=T + 0.1, **OTHER)), "c2/t"),
        # ... or for a minute after it was found down, however often that is said; at once where it stopped.
        ((told(), listed("s", at=1.0), told(service="t", at=T + 1.0, **OTHER)), "c1/s"),
        ((told(), listed("s", at=1.0), listed("s", at=30.0, number=2), told(service="t", at=T + 1.1, **OTHER)), "c2/t"),
        ((told(), listed("s", code=STOPPED), told(service="t", at=1.0, **OTHER)), "c2/t"),
        ((told(), gone("s"), told(service="t", at=2.0, **OTHER)), "c2/t"),
        # Another service of the cell: while the holder is up, lists the host, and was heard of.
        ((told(), told(service="t", at=T)), "c1/s"),
        ((told(), told(service="t", at=T + 0.1)), "c1/t"),
        ((told(), listed(at=30.0), told(service="t", at=T + 30.0)), "c1/s"),
        ((told(), listed("s"), told(service="t", at=2.0)), "c1/t"),
        ((told(), gone("s"), told(service="t", at=2.0)), "c1/t"),
        ((told(), told("", sequence=2, complete=True), told(service="t")), "c1/t"),
        ((told(), told("b", sequence=2, first_sequence=2, pages=2), told(service="t")), "c1/t"),
        ((told(complete=True), told("b", sequence=2), told(service="t")), "c1/s"),
        # In a ring, by the newer membership.
        ((told(ring=(1, 2)), told(service="t", ring=(1, 1))), "c1/s"),
        ((told(ring=(1, 2)), told(service="t", ring=(1, 2))), "c1/t"),
        ((told(ring=(1, 2)), told(service="t", ring=(2, 1))), "c1/t"),
        ((told(ring=(2, 1)), told(service="t", ring=(1, 2))), "c1/s"),
        ((told(ring=(1, 2)), told(service="t")), "c1/t"),
        ((told(), told(service="t", ring=(1, 1))), "c1/t"),
        ((told(ring=(1, 2)), told(service="t", ring=(1, 1), at=T + 0.1, **OTHER)), "c2/t"),
        # It is the owner's where placement has it so.
        ((told(), told(service="t", owner="s")), "c1/s"),
        ((told(), told(service="t", owner="u")), "c1/s"),
        ((told(), told(owner="t", sequence=2)), None),
        ((told(service="t"), told("b"), told(service="t", owner="s", sequence=2)), "c1/s"),
        ((told(service="t"), told("b"), gone("s"), told(service="t", owner="s", sequence=2)), None),
        # What is late or said again changes nothing.
        ((told(sequence=2), told("", sequence=1, complete=True)), "c1/s"),
        ((told(sequence=2), told("", sequence=2, complete=True)), "c1/s"),
        ((told(epoch=2), told("", sequence=9, complete=True)), "c1/s"),
        ((told(sequence=9), told("", epoch=2, complete=True)), None),
        # An hour down, and it has no hosts.
        ((told(), listed("s", at=1.0), listed("s", at=1.0 + DOWN_HOLD_S, number=2)), "c1/s"),
        ((told(), listed("s", at=1.0), listed("s", at=1.1 + DOWN_HOLD_S, number=2)), None),
        ((told(), listed("s", at=1.0), listed(at=9e9, number=2)), "c1/s"),
        ((told(), listed("s", at=1.0), listed("s", at=9e9, number=1, **OTHER)), "c1/s"),
        ((told(), listed("t", at=1.0), listed("t", at=9e9, number=2)), "c1/s"),
    ],
)  # fmt: skip
def test_which_service_has_a_host(events: tuple[Event, ...], holder: str | None) -> None:
    table = table_of(*events)
    assert holders(table).get("a") == holder
    assert table.live_service_of(A) in (None, (holder or "/").split("/")[1])


@pytest.mark.parametrize(
    ("events", "left"),
    [
        ((told("ab"), told("a", sequence=2)), "ab"),
        ((told("ab"), told("a", sequence=2, complete=True)), "a"),
        ((told("ab"), told("c", service="t"), told("a", sequence=2, complete=True)), "ac"),
        ((told("ab"), told("a", sequence=2, first_sequence=2, pages=2)), "ab"),
        ((told("ab"), told("a", sequence=2, first_sequence=2)), "ab"),
        ((told("ab"), told("a", sequence=3, first_sequence=2, pages=2, complete=True)), "ab"),
        ((told("a", first_sequence=1, pages=2), told("b", sequence=2, first_sequence=1, pages=2, complete=True)), "ab"),
        ((told("ab"), told("c", service="t"), gone("s")), "c"),
        ((told("ab"), told("c", service="t"), listed("s", at=1.0), listed("s", at=9e9, number=2)), "c"),
    ],
)
def test_which_hosts_a_service_has_after_a_report(events: tuple[Event, ...], left: str) -> None:
    table = table_of(*events)
    assert "".join(holders(table)) == left
    keeps = {index for index in range(len(table)) if table.last_service[index] != NO_SERVICE}
    is_long_down = any(at == 9e9 for at, _ in events)
    assert keeps == ({0, 1, 2} if is_long_down else {table.index_of(U[name]) for name in left})


@pytest.mark.parametrize(
    ("events", "by"),
    [
        ((told(), told(service="t", owner="s")), "t"),
        ((told(), told(service="t", owner="s"), listed("t")), None),
        ((told(), told(service="t", owner="s"), told(service="t", owner="s", sequence=2, complete=True)), "t"),
        ((told(), told(service="t", owner="s"), told("b", service="t", sequence=2)), "t"),
        ((told(), told(service="t", owner="s"), told("", service="t", sequence=2, complete=True)), None),
        ((told(), told(service="t", owner="s"), told("", sequence=2, complete=True)), "t"),
        ((told(), told(service="t", owner="s"), told(service="t", sequence=2)), None),
        ((told(), told(service="t", owner="s"), told(sequence=2)), "t"),
        ((told(),), None),
    ],
)
def test_which_other_service_reports_a_host(events: tuple[Event, ...], by: str | None) -> None:
    assert table_of(*events).claimed_also_by(A) == by


def test_a_refused_host_is_taken_to_be_left_with_its_owner() -> None:
    table = table_of(told(service="t"), told("b"), told(service="t", owner="s", sequence=2))
    assert [table.services.states[at].name for at in table.last_service[:2]] == ["s", "s"]
    table = table_of(told(), told("b", "t"), told(service="t", owner="u", sequence=2))
    assert [table.services.states[at].name for at in table.last_service[:2]] == ["s", "t"]


def test_refused_hosts_are_bounded_and_those_known_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "MAX_HOSTS", 2)
    table = table_of(told("abc"), told("abc", service="t", owner="s"), told("a", service="u", owner="s"))
    assert [table.claimed_also_by(U[one]) for one in "abc"] == ["u", "t", None]
    assert sorted(holders(table)) == ["a", "b"], "so are hosts"


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ((told(), asked(MAX_UNANSWERED)), None),
        ((told(), asked(MAX_UNANSWERED + 1)), UNRESPONSIVE),
        ((told(), asked(MAX_UNANSWERED + 1, cell="c2")), None),
        ((told(), asked(MAX_UNANSWERED), told(sequence=2), asked(MAX_UNANSWERED)), None),
        ((told(), asked(MAX_UNANSWERED + 1), told(sequence=2)), None),
        ((told(), asked(MAX_UNANSWERED + 1), told(sequence=2), listed(at=6.0)), None),
        ((told(), listed("s")), SILENT),
        ((told(), listed("s", term=0, number=0)), SILENT),
        ((told(), listed("s"), asked(MAX_UNANSWERED + 1)), SILENT),
        ((listed("s"), told()), SILENT),
        ((told(epoch=2), listed("s")), None),
        ((told(epoch=2), listed("s", epoch=3)), SILENT),
        ((told(), listed("s", **OTHER)), None),
        ((told(), listed("t")), None),
        ((told(), listed("s"), gone("s", at=2.0), listed(number=2, at=3.0)), "service.deleted"),
        ((told(), listed("s"), gone("s", at=2.0), told(sequence=2), listed(number=2, at=3.0)), None),
        ((told(), listed("s", page=2, pages=2)), None),
        ((told(), listed("s", pages=2)), None),
        ((told(), listed("s", pages=2), listed(page=2, pages=2)), SILENT),
        ((told(), listed("s", pages=2), listed(page=2, pages=2, number=2)), None),
        ((told(), listed("s", pages=2), listed(number=2, pages=2), listed(page=2, pages=2, number=2)), None),
        ((told(), listed("s", pages=2), listed(page=2, pages=2), listed(number=2)), None),
        ((told(), listed("s"), listed(number=2, pages=2), listed(number=2, page=2, pages=2)), None),
        ((told(), listed("s"), listed(number=1)), SILENT),
    ],
)
def test_why_a_service_is_down(events: tuple[Event, ...], code: str | None) -> None:
    table = table_of(*events)
    down = table.services.states[0].down
    assert (down and down.code) == code
    assert table.services.down().tolist() == [code is not None, True]
    assert table.live_service_of(A) == (None if code else "s")
    assert table.is_down(A) is (code not in (None, "service.deleted"))
    assert table.is_down(B) is False


@pytest.mark.parametrize(
    ("events", "now", "more", "complete"),
    [
        ((told(),), 0.0, False, False),
        ((told(), listed(up=2)), 1.0, False, False),
        ((told(), listed(up=1)), 1.0, False, True),
        ((told(), listed(up=1)), 1.0 + T, False, True),
        ((told(), listed(up=1)), 1.1 + T, False, False),
        ((told(), listed(up=0)), 1.0, True, True),
        ((told(), told("b", "t", **OTHER), listed(up=1)), 1.0, False, True),
        ((told(), told("b", "t", **OTHER), listed(up=2)), 1.0, False, False),
        ((told(), told("b", "t"), listed(up=2, pages=2)), 1.0, False, False),
        ((told(), told("b", "t"), listed("t", up=1)), 1.0, False, True),
        ((told(), told("b", "t"), listed("t", up=2)), 1.0, False, False),
        ((told(), listed(up=0, pages=2)), 1.0, False, False),
    ],
)
def test_whether_a_table_has_all_or_more_than_a_cell_counts(
    events: tuple[Event, ...], now: float, more: bool, complete: bool
) -> None:
    table = table_of(*events)
    assert (table.services.knows_more("c1"), table.services.is_complete("c1", now)) == (more, complete)


def decided(state: AdminState = AdminState.DISABLED, name: str = "h", uuid: str = A, **more: Any) -> HostAdminState:
    return HostAdminState(host_uuid=uuid, host=name, state=state, **more)


def test_decisions_of_operators_replace_each_other() -> None:
    table = table_of(told("ab"))
    table.apply_decisions({A: decided(), U["c"]: decided(AdminState.FENCED, "x", drain="d")})
    assert table.admin[:2].tolist() == [1, 0]
    assert [table.decided_about(word) for word in (A, "h", "x", "a")] == [[A], [A], [U["c"]], []]
    assert [list(table.hosts_of_drain(word)) for word in ("d", "e")] == [[U["c"]], []]
    table.apply(told("c", sequence=2)[1], 0.0)  # type: ignore[arg-type]
    assert table.admin[2] == 3, "the host is announced after the decision"
    table.apply_decisions({B: decided(uuid=B)})
    assert table.admin[:3].tolist() == [0, 1, 0] and table.decision_of(A) is None


@pytest.mark.parametrize(
    ("events", "event", "is_changed"),
    [
        ((told(),), told(sequence=2), True),
        ((told(),), told(sequence=1), False),
        ((told(),), gone("s"), True),
        ((told(),), gone("t"), False),
        ((told(),), listed("s"), True),
        ((told(),), listed("t"), False),
        ((told(),), listed(), False),
        ((told(), listed("s")), listed("s", number=2), False),
        ((told(), listed("s")), listed(number=2), True),
        ((told(), listed("s")), listed("s", number=2, at=9e9), True),
        ((told(), asked(MAX_UNANSWERED)), asked(1), True),
        ((told(), asked(MAX_UNANSWERED + 1)), asked(1), False),
        ((told(),), (0.0, lambda table: table.apply_decisions({A: decided()})), True),
        ((told(),), (0.0, lambda table: table.apply_decisions({})), False),
    ],
)
def test_the_revision_rises_where_other_hosts_may_pass(
    events: tuple[Event, ...], event: Event, is_changed: bool
) -> None:
    before = table_of(*events).revision
    assert (table_of(*events, event).revision > before) is is_changed


def test_services_by_name_and_the_dead_that_reported_nothing() -> None:
    table = table_of(told(), told("b", **OTHER), told("c", "t"), listed("s", "dead", epoch=3), listed("x", **OTHER))
    known = table.services
    assert [known.cells_of(name) for name in ("s", "t", "dead", "none")] == [["c1", "c2"], ["c1"], ["c1"], []]
    assert known.dead_not_reported() == [("c1", "dead"), ("c2", "x")]
    assert known.down_of("c1", "dead").epoch == 3
    table.delete_service(ServiceRemoved(service="s", cell="c2"), 1.0)
    assert [known.index_of(cell, "s") for cell in ("c1", "c2", "c3")] == [0, NO_SERVICE, NO_SERVICE]
    assert known.cells_of("s") == ["c1"] and table.cells == ["c1", "c2"]
    assert ServiceDirectory().index_of("c1", "s") == NO_SERVICE


def test_the_cell_of_a_host_is_that_which_reported_it_last_else_that_of_placement() -> None:
    table = table_of(told(), gone("s"))
    table.learn_cell(A, "c9")
    table.learn_cell(B, "c8")
    assert [table.last_cell_of(U[name]) for name in "abc"] == ["c1", "c8", None]
    assert table.indexes_of([B, A]) == [NO_SERVICE, 0]


def test_a_host_is_found_by_its_uuid_or_by_the_name_it_has_now() -> None:
    table = table_of(told("ab"))
    table.apply(HostStates(service="s", cell="c1", epoch=1, sequence=2, hosts=(HostReport(uuid=A, name="b"),)), 0.0)
    assert [table.find(word) for word in ("a", "b", A, "c")] == [[], [B, A], [A], []]
    table.apply(told("b", sequence=3)[1], 0.0)  # type: ignore[arg-type]
    assert table.names == ["b", "b"] and table.find("b") == [B, A], "as announced first"


def test_columns_hold_what_a_service_reports_and_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "INITIAL_CAPACITY", 1)
    monkeypatch.setattr(hosts, "MAX_PROJECTS", 3)
    reports: list[dict[str, Any]] = [
        {"attributes": {"project_id": "x"}},
        {"attributes": {"project_id": "y"}},
        {"enabled": False, "failed_builds": 2, "attributes": {"project_id": "p", "health": "warning"}},
        {"attributes": {"project_id": "q", "health": "fine"}},
        {"attributes": {"project_id": ""}},
    ]
    named = tuple(HostReport(uuid=uuid, name="h", **more) for uuid, more in zip(U.values(), reports, strict=True))
    table = table_of(told("", "other"))
    for sequence, some in ((1, named), (2, named[2:3])):
        table.apply(HostStates(service="s", cell="c1", epoch=1, sequence=sequence, hosts=some), 0.0)
    assert len(table.service) == 8, "by doubling"
    index = np.arange(5)
    view = HostsView(
        None, table, Membership([]), rows=index, index=index, down=table.services.down(), metrics=None,  # type: ignore[arg-type]
    )  # fmt: skip
    columns = view.enabled, view.failed_builds, view.warning, view.open_to("p"), view.open_to("q"), view.service
    assert [column.tolist()[2:] for column in columns] == [
        [False, True, True],
        [2.0, 0.0, 0.0],
        [True, False, False],
        [True, False, True],
        [False, False, True],
        [1, 1, 1],
    ]
    assert table.attributes == [one["attributes"] for one in reports]
