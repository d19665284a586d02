"""The host table against a cell that makes things up; health, announcements, and hosts that are forgotten."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from bus.bus import Bus
from bus.clock import SystemClock, new_uuid
from bus.consuming.outcome import Done, Received
from bus.contracts.actions import ActionKind
from bus.contracts.base import Meta
from bus.contracts.cell import HostReport, HostStates
from bus.contracts.drains import DrainRecord, DrainState, DrainTarget
from bus.contracts.host_metrics import HostMetrics, HostReading
from bus.contracts.objects import Aggregate, FenceRecord, HostDecision, ObjectKind, StoredObject
from bus.contracts.operations import AdminState
from bus.memory import MemoryBroker, MemoryTransport
from scheduler_worker.fleet.host_listener import HOSTS_AT_ONCE, HostsListener
from scheduler_worker.fleet.removal import removal_blocker, traces, with_entry
from scheduler_worker.hosts.host_table import HostTable
from scheduler_worker.hosts.service_directory import NO_SERVICE
from scheduler_worker.hosts.waiting_builds import WaitingTable
from scheduler_worker.hosts.worker_table import WorkerTable
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts

# --- The host table against a cell that makes things up.


def report(
    sequence: int, *named: str, first_sequence: int = 0, pages: int = 1, complete: bool = False, epoch: int = 1
) -> HostStates:
    listed = tuple(HostReport(uuid=f"{name * 8}-0000-4000-8000-000000000000", name=name) for name in named)
    return HostStates(
        service="s",
        cell="c1",
        epoch=epoch,
        sequence=sequence,
        hosts=listed,
        first_sequence=first_sequence,
        pages=pages,
        complete=complete,
    )


def managed(table: HostTable) -> str:
    return "".join(name for index, name in enumerate(table.names) if table.service[index] != NO_SERVICE)


def test_a_service_that_began_anew_counts_its_pages_anew() -> None:
    """It may have died within a report that had the number of its first one now."""
    table = HostTable()
    table.apply(report(1, "a", first_sequence=1, pages=3), 0.0)
    table.apply(report(1, "b", first_sequence=1, pages=2, epoch=2), 1.0)
    table.apply(report(2, "c", first_sequence=1, pages=2, epoch=2, complete=True), 1.0)
    assert managed(table) == "bc"


HOST = "10000000-0000-4000-8000-000000000001"


def announce(table: HostTable, cell: str, sequence: int, now_s: float, service: str = "s") -> str:
    """Announce the host there; returns the cell it is in then."""
    reports = (HostReport(uuid=HOST, name="h"),)
    table.apply(HostStates(service=service, cell=cell, epoch=1, sequence=sequence, hosts=reports), now_s)
    index = table.index_of(HOST)
    assert index is not None
    return table.cells[table.cell[index]]


# --- Announcements of many hosts at once, and the event loop that takes them.


SERVICES, HOSTS = 12, 1_000


async def test_item_16_reports_of_very_many_hosts_are_not_taken_in_one_turn_of_the_loop() -> None:
    """The services of 100,000 hosts that answered a scheduler at once were 150 to 250 ms of its loop."""
    clock, rng = SystemClock(), random.Random(1)
    bus = Bus("c1", MemoryTransport(MemoryBroker(clock), "s"), process="s", clock=clock, rng=rng)
    table = HostTable()
    listener = HostsListener(bus, table, WorkerTable(), WaitingTable(), clock=clock, rng=rng, again_s=60.0)
    batch = [
        Received(
            HostStates(
                service=f"s{service}",
                cell="c1",
                epoch=1,
                sequence=1,
                complete=True,
                hosts=tuple(HostReport(uuid=new_uuid(rng), name=f"h{service}-{host}") for host in range(HOSTS)),
            ),
            Meta(id=str(service)),
            "c1",
            "scheduler.hosts.s",
        )
        for service in range(SERVICES)
    ]
    known: list[int] = []
    taking = asyncio.create_task(listener(batch))
    while not taking.done():
        await asyncio.sleep(0)
        known.append(len(table))
    assert await taking == [Done()] * SERVICES and len(table) == SERVICES * HOSTS
    assert max(later - before for before, later in zip([0, *known], known, strict=False)) <= HOSTS_AT_ONCE


# --- Hosts with a warning sink, and come up again when it ends.


LARGE = {**PLENTY, "MEMORY_MB": 131_072}


def best(hosts: Hosts) -> list[str]:
    choice = hosts.selector.rank(hosts.spec(), hosts.rng).pick({}, subset=1, alternates=7)
    assert choice is not None
    return [hosts.name(ranked.row) for ranked in (choice.selected, *choice.alternates)]


def sensors(hosts: Hosts, host: int, at: float, **values: float) -> None:
    named = {name.replace("_", "."): value for name, value in values.items()}
    reading = HostReading(host_uuid=hosts.uuids[host], at=at, values=named)
    hosts.selector.metrics.apply(HostMetrics(source="ironic", readings=(reading,)), None, now=at, now_s=at)


def test_a_warning_or_critical_sensor_counts_until_it_is_too_old() -> None:
    hosts = Hosts([LARGE, PLENTY, LARGE])
    sensors(hosts, 0, 1000.0, sensors_warning=1.0, sensors_critical=0.0)
    sensors(hosts, 2, 1000.0, sensors_warning=0.0, sensors_critical=2.0)
    assert best(hosts)[0] == "h1"
    sensors(hosts, 0, 1010.0, sensors_warning=0.0)
    assert best(hosts)[0] == "h0"
    hosts.selector.metrics.advance(1900.0)
    assert set(best(hosts)[:2]) == {"h0", "h2"}


# --- A host that is forgotten: what keeps it, and what leaves the record with it.


FORGOTTEN_HOST = "10000000-0000-4000-8000-000000000000"
OTHER = "20000000-0000-4000-8000-000000000000"
DRAIN = "d0000000-0000-4000-8000-000000000000"
CELLS = ("c1", "c2")
Key = tuple[ObjectKind, str]


def stored(kind: ObjectKind, name: str, body: Any) -> dict[Key, StoredObject]:
    return {(kind, name): StoredObject(kind=kind, name=name, body=msgspec.to_builtins(body), version=1)}


def fence(**more: Any) -> dict[Key, StoredObject]:
    known = {"host": "h", "cell": "c1", "version": 7, "unfencing": True, "forced": True, "acknowledged": 7, **more}
    return stored(ObjectKind.FENCE, FORGOTTEN_HOST, FenceRecord(**known))


def drained(state: DrainState) -> dict[Key, StoredObject]:
    record = DrainRecord(
        name="h",
        target=DrainTarget.HOST,
        kind=ActionKind.LIVE_MIGRATE,
        by="ann",
        state=state,
        at_once=1,
        started_at=1.0,
        hosts=1,
    )
    decision = HostDecision(host="h", state=AdminState.DISABLED, drain=DRAIN)
    return stored(ObjectKind.DRAIN, DRAIN, record) | stored(ObjectKind.HOST, FORGOTTEN_HOST, decision)


def code(present: Mapping[Key, StoredObject]) -> str | None:
    kept = removal_blocker(present, FORGOTTEN_HOST, CELLS)
    return None if kept is None else kept.code


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        ({}, None),
        (fence(), None),
        (fence(forced=False), "host.fence_open"),
        (fence(forced=False, unfencing=False), "host.fence_open"),
        (fence(acknowledged=6), "host.fence_open"),
        (fence(acknowledged=6, cell=None), "host.fence_open"),
        (fence(acknowledged=0, cell="burnt"), None),
        (drained(DrainState.RUNNING), "host.draining"),
        (drained(DrainState.PAUSED), "host.draining"),
        (drained(DrainState.ENDED), None),
    ],
)
def test_a_fence_and_a_drain_keep_a_host_until_they_have_ended(
    present: Mapping[Key, StoredObject], expected: str | None
) -> None:
    """A forced fence has ended when its cell knows, or cannot know any more."""
    assert code(present) == expected


def test_the_decision_the_fence_and_the_places_in_aggregates_go() -> None:
    present = (
        stored(ObjectKind.HOST, FORGOTTEN_HOST, HostDecision(host="h", state=AdminState.ENABLED))
        | stored(ObjectKind.HOST, OTHER, HostDecision(host="other", state=AdminState.DISABLED))
        | fence()
        | stored(ObjectKind.AGGREGATE, "a", Aggregate(name="a", uuid=OTHER, hosts=("other", "h")))
        | stored(ObjectKind.AGGREGATE, "b", Aggregate(name="b", uuid=DRAIN, hosts=(FORGOTTEN_HOST,)))
        | stored(ObjectKind.AGGREGATE, "c", Aggregate(name="c", uuid=FORGOTTEN_HOST))
    )
    found = {(one.kind, one.name): one.after for one in traces(present, FORGOTTEN_HOST, {FORGOTTEN_HOST, "h"})}
    assert found.keys() == {
        (ObjectKind.HOST, FORGOTTEN_HOST),
        (ObjectKind.FENCE, FORGOTTEN_HOST),
        (ObjectKind.AGGREGATE, "a"),
        (ObjectKind.AGGREGATE, "b"),
    }
    left = [found[ObjectKind.AGGREGATE, name] for name in "ab"]
    assert [one["hosts"] if one else None for one in left] == [("other",), ()]
    assert found[ObjectKind.HOST, FORGOTTEN_HOST] is None and found[ObjectKind.FENCE, FORGOTTEN_HOST] is None


def test_a_name_that_another_host_has_is_left_in_aggregates() -> None:
    present = stored(ObjectKind.AGGREGATE, "a", Aggregate(name="a", uuid=OTHER, hosts=("h",)))
    assert traces(present, FORGOTTEN_HOST, {FORGOTTEN_HOST}) == ()


def test_the_log_names_a_host_that_nothing_was_decided_about() -> None:
    (entry,) = with_entry((), FORGOTTEN_HOST, "h")
    assert (entry.kind, entry.name, entry.before, entry.after) == (
        ObjectKind.HOST,
        FORGOTTEN_HOST,
        {"host": "h", "state": "enabled"},
        None,
    )
    assert with_entry((entry,), FORGOTTEN_HOST, "h") == (entry,)
