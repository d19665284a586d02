"""The table of workers: the newest heartbeat counts, silence is reported, what a bus makes up is bounded."""

from __future__ import annotations

import pytest

from bus.contracts.workers import STOPPED, WorkerHeartbeat, WorkersQuery
from scheduler_worker.domain import fleet
from scheduler_worker.domain.fleet import WorkerTable


def heartbeat(worker: str = "s1", role: str = "scheduler", phase: str = "ready") -> WorkerHeartbeat:
    return WorkerHeartbeat(
        role=role, worker=worker, host="h", pid=1, version="1", started_at=1.0, phase=phase, every_s=5.0
    )


def test_each_worker_is_listed_once_by_its_newest_heartbeat_until_it_is_long_silent() -> None:
    table = WorkerTable()
    table.apply(heartbeat(phase="opening"), "api", 0.0)
    table.apply(heartbeat("c1", "compute"), "cell1", 1.0)
    table.apply(heartbeat(), "api", 5.0)
    page = table.page(WorkersQuery(), 15.5)
    assert [(one.heartbeat.worker, one.bus, one.heartbeat.phase) for one in page.workers] == [
        ("c1", "cell1", "ready"),
        ("s1", "api", "ready"),
    ]
    assert [(one.last_seen_s, one.silent) for one in page.workers] == [(14.5, False), (10.5, False)]
    assert [one.silent for one in table.page(WorkersQuery(), 17.0).workers] == [True, False]
    assert [one.bus for one in table.page(WorkersQuery(role="scheduler"), 17.0).workers] == ["api"]
    assert table.page(WorkersQuery(limit=1), 17.0).since_s == 17.0
    assert len(table.page(WorkersQuery(), 5.0 + fleet.RETENTION_S).workers) == 1
    assert table.page(WorkersQuery(), 5.1 + fleet.RETENTION_S).workers == ()


def test_workers_that_a_bus_makes_up_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MAX_WORKERS", 3)
    table = WorkerTable()
    for number in range(5):
        table.apply(heartbeat(f"w{number}"), "api", 0.0)
    assert len(table) == 3
    table.apply(heartbeat("w1", phase="draining"), "api", 1.0)
    assert "draining" in {one.heartbeat.phase for one in table.page(WorkersQuery(), 1.0).workers}
    table.apply(heartbeat("w9"), "api", 2.0 + fleet.RETENTION_S)  # the silent ones make room
    assert [one.heartbeat.worker for one in table.page(WorkersQuery(), 2.0 + fleet.RETENTION_S).workers] == ["w9"]


def test_a_worker_that_has_stopped_is_no_longer_listed_and_one_that_restarts_is() -> None:
    table = WorkerTable()
    table.apply(heartbeat(), "api", 0.0)
    table.apply(heartbeat(), "cell1", 0.0)
    table.apply(heartbeat(phase=STOPPED), "api", 1.0)
    assert [one.bus for one in table.page(WorkersQuery(), 1.0).workers] == ["cell1"]
    table.apply(heartbeat(phase=STOPPED), "api", 2.0)  # a copy
    table.apply(heartbeat(phase="opening"), "api", 3.0)
    assert [one.bus for one in table.page(WorkersQuery(), 3.0).workers] == ["api", "cell1"]
