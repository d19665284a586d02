"""The hosts as filters and weighers see them, and the instances that a request is placed beside, by rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from msgspec.structs import replace

from bus.contracts.build import AttemptRecord, BuildRecord, BuildState
from bus.contracts.cell import ServiceDown, ServiceStates
from bus.contracts.host_metrics import HostMetrics, HostReading
from bus.contracts.operations import AdminState, HostAdminState
from bus.contracts.placement import GroupPolicy, LocatePage, ServerGroup
from bus.contracts.waiting_builds import BuildsWaiting, WaitingBuild
from bus.contracts.workers import STOPPED, WorkerHeartbeat, WorkersQuery
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.hosts import host_metrics as fleet
from scheduler_worker.hosts import waiting_builds, worker_table
from scheduler_worker.hosts.host_metrics import MAX_AHEAD_S, HostMetricsTable
from scheduler_worker.hosts.waiting_builds import WaitingTable
from scheduler_worker.hosts.worker_table import RETENTION_S, WorkerTable
from scheduler_worker.selection.host_view import HostView
from scheduler_worker.selection.plugin import HostFilter
from scheduler_worker.selection.request_spec import (
    RelatedInstances,
    RequestSpec,
    has_related,
    locate_requests,
    member_capacity,
    related_of,
)
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts, aggregate

UUID, ABSENT = (f"{n}0000000-0000-4000-8000-000000000001" for n in "ab")
OPEN, MASKED, FENCED, DISABLED = AdminState.ENABLED, AdminState.MAINTENANCE, AdminState.FENCED, AdminState.DISABLED
GROUP = ServerGroup(uuid=UUID, policy=GroupPolicy.ANTI_AFFINITY)


def decide_about(hosts: Hosts, decisions: Mapping[int, AdminState]) -> None:
    hosts.table.apply_decisions(
        {hosts.uuids[at]: HostAdminState(host_uuid=hosts.uuids[at], host=f"d{at}", state=state)
         for at, state in decisions.items()}
    )  # fmt: skip


def test_the_columns_of_a_view() -> None:
    rack = aggregate("r", rack="1")
    hosts = Hosts(
        [PLENTY, {**PLENTY, "VCPU": 4}, PLENTY], cells=["c1", "c2", "c1"], members={rack.uuid: [1]},
        config=SchedulerConfig(aggregates=(rack,)),
        reports={0: {"enabled": False, "failed_builds": 2}, 1: {"attributes": {"k": "v", "project_id": "p"}}},
    )  # fmt: skip
    decide_about(hosts, {1: MASKED})
    view, first, second = hosts.view(), *hosts.uuids[:2]
    columns = {
        "enabled": view.enabled, "masked": view.is_in(MASKED), "either": view.is_in(MASKED, FENCED),
        "none": view.is_in(FENCED), "cell": view.cell, "in": view.in_cells({"c2", "c9"}), "up": view.up,
        "k": np.array([one is not None for one in view.attribute("k")]), "member": view.member_of(rack.uuid),
        "among": view.among([second, ABSENT]), "counted": view.counted({second: 3, ABSENT: 9}),
        "free": view.free("VCPU"), "known": view.known, "q": view.open_to("q"), "p": view.open_to("p"),
    }  # fmt: skip
    assert {name: [int(one) for one in column] for name, column in columns.items()} == {
        "enabled": [0, 0, 1], "masked": [0, 1, 0], "either": [0, 1, 0], "none": [0, 0, 0], "cell": [0, 1, 0],
        "in": [0, 1, 0], "up": [1, 1, 1], "k": [0, 1, 0], "member": [0, 1, 0], "among": [0, 1, 0],
        "counted": [0, 3, 0], "free": [16, 4, 16], "known": [1, 1, 1], "q": [1, 0, 1], "p": [1, 1, 1],
    }  # fmt: skip
    assert view.subset(np.array([2, 1])).counted({first: 1, second: 2}).tolist() == [0.0, 2.0]
    view.membership.named = {rack.uuid: [first]}
    assert view.member_of(rack.uuid).tolist() == [True, False, False]
    assert Hosts([]).view().counted({}).tolist() == []


def test_a_filter_that_looks_at_one_host_at_a_time() -> None:
    seen: list[HostView] = []

    class One(HostFilter):
        name: ClassVar[str] = "One"

        def rejection_reason(self, host: HostView, spec: RequestSpec) -> str | None:
            seen.append(host)
            return None if host.up and host.enabled else "off"

    hosts = Hosts([PLENTY] * 3, cells=["c1", "c2", "c1"], reports={0: {"enabled": False, "failed_builds": 2}})
    down = (ServiceDown(service="compute-c2", epoch=1, code="x"),)
    hosts.table.apply(ServiceStates(cell="c2", term=1, number=1, down=down), 0.0)
    result = One().filter(hosts.view(), hosts.spec())
    assert (result.passed.tolist(), result.rejected) == ([False, False, True], {"off": 2})
    assert [(one.name, one.cell, one.enabled, one.up, one.failed_builds, one.free("VCPU")) for one in seen] == [
        ("h0", "c1", False, True, 2, 16.0), ("h1", "c2", True, False, 0, 16.0), ("h2", "c1", True, True, 0, 16.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("needs", "room"),
    [([1], 1), ([1, 1, 1], 3), ([5, 1, 4], 3), ([5, 1, 5], 2), ([11], 0), ([10], 1), ([0, 11], 1)],
)
def test_a_host_has_room_for_so_many_of_a_gangs_members(needs: list[int], room: int) -> None:
    hosts = Hosts([{"VCPU": 10, "DISK_GB": 99}])
    query = hosts.spec("m1.small").query
    some = [replace(query, resources={"VCPU": many, "DISK_GB": 1}) for many in needs]
    assert member_capacity(some, hosts.view()).tolist() == [room]
    one, other = replace(query, resources={"VCPU": 1}), replace(query, resources={"DISK_GB": 99})
    assert member_capacity([one, other, other, one], hosts.view()).tolist() == [3]


@pytest.mark.parametrize(
    ("hints", "group", "related", "found", "asked"),
    [
        ({}, None, False, (None, None), ()),
        ({"different_host": (UUID,)}, None, True, (("x", "y"), None), (UUID,)),
        ({"same_host": (UUID, ABSENT)}, None, True, (None, ("x", "y")), (UUID, ABSENT)),
        ({"same_host": (UUID,), "different_host": (UUID,)}, GROUP, True, (("x", "y"), ("x", "y")), (UUID,)),
        ({"same_host": (ABSENT,)}, None, True, (None, ()), (ABSENT,)),
    ],
)
def test_the_instances_that_a_request_is_placed_relative_to(
    hints: Any, group: ServerGroup | None, related: bool, found: Any, asked: tuple[str, ...]
) -> None:
    request = Hosts([]).request(server_group=group, **hints)
    assert has_related(request) is related
    (located,) = locate_requests(request)
    assert (located.consumers, located.server_group) == (asked, group and group.uuid)
    page = LocatePage(members={"x": 2}, hosts={UUID: ("x", "y")})
    assert related_of(request, page) == RelatedInstances(
        server_group=group, members={"x": 2}, different_hosts=found[0], same_hosts=found[1]
    )


def test_a_spec_has_peers_in_its_key_and_newer_members_replace_older_ones() -> None:
    plain = Hosts([]).spec()
    spec = plain.with_related(RelatedInstances(server_group=GROUP, members={"x": 1, "y": 1}), UUID)
    assert spec.key == (*plain.key, UUID) and spec.without_related() == plain
    assert plain.without_related() is plain and plain.with_members({"x": 1}) is plain
    after = spec.with_members({"x": 3}).related
    assert after is not None and after.members == {"x": 3, "y": 1}
    policies = (GroupPolicy.ANTI_AFFINITY, GroupPolicy.AFFINITY)
    assert [[one.has_policy(policy) for policy in policies] for one in (spec, plain)] == [[True, False], [False, False]]
    assert not spec.with_related(RelatedInstances(), UUID).has_policy(GroupPolicy.ANTI_AFFINITY)


# --- what is reported besides hosts, by rows: numbers about hosts, builds that wait, and workers


NOW, AGE = 10_000.0, 900.0
WATTS = "power.watts"


def reading(host: str, at: float, source: str = "s", **values: float) -> HostMetrics:
    named = {name.replace("_", "."): value for name, value in values.items()}
    return HostMetrics(source=source, readings=(HostReading(host_uuid=host, at=at, values=named),))


@pytest.mark.parametrize(
    ("at", "cell", "until", "outcome"),
    [
        (NOW, None, AGE, "taken"),
        (NOW - 100, "c1", AGE - 100, "taken"),
        (NOW - AGE + 1, None, 1.0, "taken"),
        (NOW - AGE, None, None, "stale"),
        (NOW + MAX_AHEAD_S, None, AGE, "taken"),
        (NOW + MAX_AHEAD_S + 1, None, None, "ahead"),
        (NOW, "c2", None, "foreign"),
    ],
)
def test_a_number_counts_until_it_is_too_old(at: float, cell: str | None, until: float | None, outcome: str) -> None:
    hosts = Hosts([PLENTY])
    table = HostMetricsTable(hosts.table, max_age_s=AGE)
    message = reading(hosts.uuids[0], at, power_watts=7.0, fan_rpm=1.0)
    assert table.apply(message, cell, now=NOW, now_s=0.0) == {outcome: 2}
    index = np.array([0, -1, 1])
    for offset in (-0.5, 0.0):
        table.advance((until or 0.0) + offset)
        value = table.values(WATTS, index)
        assert np.isnan(value[1:]).all() and np.isnan(value[0]) == (until is None or offset == 0.0)
        assert [one.fresh for one in table.of(0)] == [offset < 0] * (0 if until is None else 2)
    assert sorted(table.metric_of(index)) == ([] if until is None else ["fan.rpm", WATTS])
    assert len(table) == (0 if until is None else 2)


@pytest.mark.parametrize(
    ("first", "second", "later_s", "taken"),
    [
        (NOW, NOW - 1, 0.0, False),
        (NOW, NOW, 0.0, True),
        (NOW, NOW + 1, 0.0, True),
        (NOW, NOW - 1, AGE - 1, False),
        (NOW, NOW - 1, AGE, True),
    ],
)
def test_of_two_numbers_the_newer_counts_while_it_is_not_too_old(
    first: float, second: float, later_s: float, taken: bool
) -> None:
    hosts = Hosts([PLENTY])
    table = HostMetricsTable(hosts.table, max_age_s=AGE)
    table.apply(reading(hosts.uuids[0], first, "a", power_watts=1.0), None, now=NOW, now_s=0.0)
    found = table.apply(reading(hosts.uuids[0], second, "b", power_watts=2.0), None, now=NOW, now_s=later_s)
    (one,) = table.of(0)
    assert (one.value, one.at, one.source, found) == (
        (2.0, second, "b", {"taken": 1}) if taken else (1.0, first, "a", {"older": 1})
    )


def test_an_older_message_does_not_set_the_clock_back() -> None:
    hosts = Hosts([PLENTY] * 2)
    table = HostMetricsTable(hosts.table, max_age_s=AGE)
    table.apply(reading(hosts.uuids[0], NOW, power_watts=1.0), None, now=NOW, now_s=0.0)
    table.apply(reading(hosts.uuids[1], NOW, power_watts=1.0), None, now=NOW, now_s=AGE)
    table.apply(reading(hosts.uuids[1], NOW, power_watts=1.0), None, now=NOW, now_s=5.0)
    assert np.isnan(table.values(WATTS, np.array([0]))).all() and [one.name for one in table.of(1)] == [WATTS]
    assert HostMetricsTable(hosts.table, max_age_s=AGE).of(0) == ()


@pytest.mark.parametrize(("reserved", "taken"), [((), ["a", "b"]), (("c",), ["a", "c"]), (("c", "d"), ["c", "d"])])
def test_names_are_bounded_less_those_that_are_reserved(
    monkeypatch: pytest.MonkeyPatch, reserved: Sequence[str], taken: list[str]
) -> None:
    monkeypatch.setattr(fleet, "MAX_METRICS", 2)
    hosts = Hosts([PLENTY] * 2)
    table = HostMetricsTable(hosts.table, max_age_s=AGE, reserved=reserved)
    for name in "abcd":
        table.apply(reading(hosts.uuids[0], NOW, "s", **{name: 1.0}), None, now=NOW, now_s=0.0)
    assert ([one.name for one in table.of(0)], table.of(1), table.of(2)) == (taken, (), ())


def test_sources_are_bounded_and_the_last_place_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MAX_SOURCES", 3)
    hosts = Hosts([PLENTY])
    table = HostMetricsTable(hosts.table, max_age_s=AGE)
    named = []
    for at, source in enumerate("abcdab"):
        table.apply(reading(hosts.uuids[0], NOW + at / 10, source, x=1.0), None, now=NOW, now_s=0.0)
        named.append(table.of(0)[0].source)
    assert named == ["a", "b", "other", "other", "a", "b"]


# --- builds that wait


def waiting(
    service: str = "s", cell: str = "c1", attempt: int = 1, uuid: str | None = UUID, lasts: float = 10.0
) -> BuildsWaiting:
    some = () if uuid is None else (WaitingBuild(instance_uuid=uuid, attempt=attempt, since=5.0, reason="away"),)
    return BuildsWaiting(service=service, cell=cell, waiting=some, lasts_s=lasts)


@pytest.mark.parametrize(
    ("reported", "build", "now_s", "who"),
    [
        ([waiting()], {}, 9.9, "s"),
        ([waiting()], {}, 10.0, None),
        ([waiting()], {"state": BuildState.ACTIVE}, 0.0, None),
        ([waiting(cell="c2")], {}, 0.0, None),
        ([waiting(uuid="b" + UUID[1:])], {}, 0.0, None),
        ([waiting(), waiting(uuid=None)], {}, 0.0, None),
        ([waiting(uuid=None), waiting("t")], {}, 0.0, "t"),
        ([waiting(cell="c2"), waiting("t")], {}, 0.0, "t"),
        ([waiting(attempt=2)], {"history": (1, "failed")}, 0.0, "s"),
        ([waiting(attempt=2)], {"history": (2, "failed")}, 0.0, None),
        ([waiting(attempt=2)], {"history": (3, "failed")}, 0.0, None),
        ([waiting(attempt=2)], {"history": (2, "")}, 0.0, "s"),
        ([waiting(), waiting("t", attempt=2)], {"history": (1, "failed")}, 0.0, "t"),
    ],
)
def test_what_a_build_waits_for(reported: list[BuildsWaiting], build: dict, now_s: float, who: str | None) -> None:  # type: ignore[type-arg]
    table = WaitingTable()
    for one in reported:
        table.apply(one, 0.0)
    history = tuple(AttemptRecord(attempt=at, host="h", outcome=how) for at, how in [build.pop("history", (1, ""))])
    record = BuildRecord(
        **{"instance_uuid": UUID, "project_id": "p", "flavor": "f", "state": BuildState.BUILDING, "cell": "c1"} | build,
        history=history,
    )
    line = table.line_of(record, now_s)
    assert (line and (line.actor, line.at, line.detail)) == (who and (f"compute {who}", 5.0, "away"))


def test_services_with_waiting_builds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_builds, "MAX_SERVICES", 1)
    table = WaitingTable()
    record = BuildRecord(instance_uuid=UUID, project_id="p", flavor="f", state=BuildState.BUILDING, cell="c1")
    table.apply(waiting("z", uuid=None), 0.0)
    for service, at, who in (("a", 0.0, "a"), ("b", 9.0, "a"), ("c", 10.0, "c"), ("c", 11.0, "c")):
        table.apply(waiting(service), at)
        line = table.line_of(record, at)
        assert line is not None and line.actor == f"compute {who}"


# --- workers


def beat(
    worker: str, role: str = "scheduler", phase: str = "ready", host: str = "h", started_at: float = 1.0
) -> WorkerHeartbeat:
    return WorkerHeartbeat(
        role=role, worker=worker, host=host, pid=1, version="1", started_at=started_at, phase=phase, every_s=5.0
    )


def test_workers_are_bounded_and_the_silent_ones_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_table, "MAX_WORKERS", 2)
    table = WorkerTable()
    assert table.page(WorkersQuery(), 3.0).since_s == 0.0
    for worker, at in (("a", 1.0), ("b", 2.0), ("c", 1.0 + RETENTION_S), ("a", 2.0)):
        table.apply(beat(worker), "api", at)
    assert len(table) == 2
    table.apply(beat("c"), "api", 2.1 + RETENTION_S)
    page = table.page(WorkersQuery(), 2.1 + RETENTION_S)
    assert [one.heartbeat.worker for one in page.workers] == ["c"] and page.since_s == 1.1 + RETENTION_S
    table.apply(beat("c", phase=STOPPED), "api", 9e9)
    assert len(table) == 0


@pytest.mark.parametrize(
    ("killed", "next_one", "shown"),
    [
        pytest.param(["a"], {}, ["d"], id="its successor"),
        pytest.param(["a", "b"], {}, ["b", "d"], id="of two that were killed one came back"),
        pytest.param(["a"], {"host": "other"}, ["a", "d"], id="on another machine"),
        pytest.param(["a"], {"role": "cell"}, ["d", "a"], id="of another role"),
        pytest.param(["a"], {"started_at": 1.0}, ["a", "d"], id="it ran before"),
    ],
)
def test_a_worker_that_was_killed_gives_place_to_its_successor(
    killed: list[str], next_one: dict[str, Any], shown: list[str]
) -> None:
    """It stayed red for an hour beside the one that its supervisor had started."""
    table = WorkerTable()
    for number, worker in enumerate(killed):
        table.apply(beat(worker), "api", 100.0 + number)
    for at in (110.0, 120.0, 130.0):
        table.apply(beat("d", **{"started_at": 2.0, **next_one}), "api", at)
    for _ in range(2):
        page = table.page(WorkersQuery(), 130.0)
        assert [one.heartbeat.worker for one in page.workers] == shown


@pytest.mark.parametrize(("age", "silent"), [(15.0, False), (15.1, True)])
def test_a_worker_is_silent_after_three_heartbeats(age: float, silent: bool) -> None:
    table = WorkerTable()
    for worker, role, bus in (("b", "scheduler", "api"), ("a", "scheduler", "api"), ("c", "cell", "c1")):
        table.apply(beat(worker, role), bus, 100.0)
    page = table.page(WorkersQuery(), 100.0 + age)
    assert [(one.heartbeat.worker, one.bus, one.silent) for one in page.workers] == [
        ("c", "c1", silent), ("a", "api", silent), ("b", "api", silent),
    ]  # fmt: skip
    few = table.page(WorkersQuery(role="scheduler", limit=1), 100.0)
    assert [one.heartbeat.worker for one in few.workers] == ["a"]
