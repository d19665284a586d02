"""What is announced besides hosts, by rows: numbers about hosts, builds that wait, and workers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from bus.contracts.build import AttemptRecord, BuildRecord, BuildState
from bus.contracts.cell import BuildsWaiting, WaitingBuild
from bus.contracts.host_metrics import HostMetrics, HostReading
from bus.contracts.workers import STOPPED, WorkerHeartbeat, WorkersQuery
from scheduler_worker.domain import fleet
from scheduler_worker.domain.fleet import MAX_AHEAD_S, RETENTION_S, HostMetricsTable, WaitingTable, WorkerTable
from tests.unit.scheduler.hosts import PLENTY, Hosts

UUID = "a0000000-0000-4000-8000-000000000001"
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
    assert sorted(table.known_of(index)) == ([] if until is None else ["fan.rpm", WATTS])
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


def test_a_column_grows_with_the_hosts() -> None:
    hosts = Hosts([PLENTY] * 4)
    table = HostMetricsTable(hosts.table, max_age_s=AGE)
    for number in range(3):
        for at, uuid in enumerate(hosts.uuids):
            table.apply(reading(uuid, NOW, power_watts=float(at)), None, now=NOW, now_s=0.0)
        hosts.uuids.append(UUID[:-1] + str(number))
        hosts.announce(["c1"] * len(hosts.uuids), {}, sequence=2 + number)
    assert table.values(WATTS, np.arange(6)).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


# --- builds that wait


def waiting(
    service: str = "s", cell: str = "c1", attempt: int = 1, uuid: str | None = UUID, lasts: float = 10.0
) -> BuildsWaiting:
    some = () if uuid is None else (WaitingBuild(instance_uuid=uuid, attempt=attempt, since=5.0, reason="away"),)
    return BuildsWaiting(service=service, cell=cell, waiting=some, lasts_s=lasts)


@pytest.mark.parametrize(
    ("announced", "build", "now_s", "who"),
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
def test_what_a_build_waits_for(announced: list[BuildsWaiting], build: dict, now_s: float, who: str | None) -> None:  # type: ignore[type-arg]
    table = WaitingTable()
    for one in announced:
        table.apply(one, 0.0)
    history = tuple(AttemptRecord(attempt=at, host="h", outcome=how) for at, how in [build.pop("history", (1, ""))])
    record = BuildRecord(
        **{"instance_uuid": UUID, "project_id": "p", "flavor": "f", "state": BuildState.BUILDING, "cell": "c1"} | build,
        history=history,
    )
    line = table.line_of(record, now_s)
    assert (line and (line.who, line.at, line.detail)) == (who and (f"compute {who}", 5.0, "away"))


def test_services_with_waiting_builds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MAX_SERVICES", 1)
    table = WaitingTable()
    record = BuildRecord(instance_uuid=UUID, project_id="p", flavor="f", state=BuildState.BUILDING, cell="c1")
    table.apply(waiting("z", uuid=None), 0.0)
    for service, at, who in (("a", 0.0, "a"), ("b", 9.0, "a"), ("c", 10.0, "c"), ("c", 11.0, "c")):
        table.apply(waiting(service), at)
        line = table.line_of(record, at)
        assert line is not None and line.who == f"compute {who}"


# --- workers


def beat(worker: str, role: str = "scheduler", phase: str = "ready") -> WorkerHeartbeat:
    return WorkerHeartbeat(
        role=role, worker=worker, host="h", pid=1, version="1", started_at=1.0, phase=phase, every_s=5.0
    )


def test_workers_are_bounded_and_the_silent_ones_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MAX_WORKERS", 2)
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
