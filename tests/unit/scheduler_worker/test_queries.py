"""A scheduler's answer about hosts when some of them are queried."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest

from bus.clock import SystemClock
from bus.consuming.outcome import Done, Received, Refuse
from bus.contracts.base import Meta
from bus.contracts.build import BuildPage, BuildQuery, BuildRecord, BuildState, HostsQuery
from bus.contracts.cell import HostReport, HostStates, ServiceDown, ServiceStates
from bus.contracts.host_metrics import HostMetrics, HostReading
from bus.contracts.objects import (
    FenceRecord,
    ObjectKind,
    ObjectLogEntry,
    ObjectLogQuery,
    ObjectsQuery,
    StoredObject,
)
from bus.contracts.operations import AdminState, HostAdminState, ServicesPage, ServicesQuery
from bus.faults import DatabaseUnavailable
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.hosts.host_table import HostTable
from scheduler_worker.hosts.waiting_builds import WaitingTable
from scheduler_worker.queries import status_queries
from scheduler_worker.queries.record_queries import MAX_COUNTED, QueryHandler
from scheduler_worker.queries.status_queries import StatusHandler, hosts_page
from scheduler_worker.records.object_records import RecordedObjects
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts, aggregate


@pytest.mark.parametrize(
    ("query", "names"),
    [
        (HostsQuery(), ["h0", "h1", "h2", "h3", "h4"]),
        (HostsQuery(limit=2), ["h0", "h1"]),
        (HostsQuery(cell="c2"), ["h3", "h4"]),
        (HostsQuery(cell="c2", limit=1), ["h3"]),
        (HostsQuery(cell="c3"), []),
        (HostsQuery(up=True), ["h3", "h4"]),
        (HostsQuery(up=False), ["h0", "h1", "h2"]),
        (HostsQuery(cell="c1", up=True), []),
    ],
)
async def test_hosts_are_those_requested_by_name(query: HostsQuery, names: list[str]) -> None:
    """The bound counts what was requested for, not what comes before it: c1 is silent, c2 is not."""
    hosts = Hosts([PLENTY] * 5, cells=["c1", "c1", "c1", "c2", "c2"])
    down = (ServiceDown(service="compute-c1", epoch=1, code="service.silent"),)
    hosts.table.apply(ServiceStates(cell="c1", term=1, number=1, down=down), 1.0)
    assert [host.name for host in (await hosts_page(query, hosts.selector, {})).hosts] == names


@pytest.mark.parametrize(
    ("query", "names"),
    [
        (ServicesQuery(), ["compute-c1", "compute-c2", "compute-c3"]),
        (ServicesQuery(limit=2), ["compute-c1", "compute-c2"]),
        (ServicesQuery(cell="c2"), ["compute-c2"]),
        (ServicesQuery(cell="c4"), []),
        (ServicesQuery(up=True), ["compute-c2", "compute-c3"]),
        (ServicesQuery(up=False), ["compute-c1"]),
        (ServicesQuery(cell="c1", up=True), []),
    ],
)
async def test_services_are_those_requested_by_cell_and_name(query: ServicesQuery, names: list[str]) -> None:
    hosts = Hosts([PLENTY] * 3, cells=["c1", "c2", "c3"])
    down = (ServiceDown(service="compute-c1", epoch=1, code="service.silent"),)
    hosts.table.apply(ServiceStates(cell="c1", term=1, number=1, down=down), 1.0)
    handler = StatusHandler(hosts.selector, cast("Any", None), cast("Any", None), clock=SystemClock())
    received = Received(message=query, meta=Meta(id="m1"), bus="api", queue="scheduler.status")
    (outcome,) = await handler([received])
    assert isinstance(outcome, Done) and isinstance(outcome.reply, ServicesPage)
    assert [one.name for one in outcome.reply.services] == names


async def test_hosts_follow_the_last_one_of_the_page_before() -> None:
    """By uuid: the names change between the pages, and one host is known by a decision alone."""
    hosts = Hosts([PLENTY] * 4)
    left = "00000002-8000-4000-8000-000000000000"
    hosts.table.apply_decisions({left: HostAdminState(host_uuid=left, host="b", state=AdminState.FENCED)})

    def rename(names: str, sequence: int) -> None:
        reports = tuple(HostReport(uuid=uuid, name=name) for uuid, name in zip(hosts.uuids, names, strict=True))
        message = HostStates(service="compute-c1", cell="c1", epoch=1, sequence=sequence, hosts=reports, complete=True)
        assert hosts.table.apply(message, 0.0)

    rename("abbz", 2)
    assert [host.name for host in (await hosts_page(HostsQuery(), hosts.selector, {})).hosts] == list("abbbz")
    found, query, mores = list[str](), HostsQuery(limit=2, by_uuid=True), []
    while not mores or mores[-1]:
        page = await hosts_page(query, hosts.selector, {})
        found += [host.uuid for host in page.hosts]
        mores.append(page.more)
        query = HostsQuery(limit=2, after_uuid=found[-1])
        rename("qzaa"[len(mores) :] + "qzaa"[: len(mores)], 2 + len(mores))
    assert mores == [True, True, False] and found == sorted([*hosts.uuids, left])


@pytest.mark.parametrize(("limit", "more"), [(4, True), (5, False), (6, False)])
async def test_a_page_of_hosts_shows_whether_others_follow(limit: int, more: bool) -> None:
    hosts = Hosts([PLENTY] * 5)
    assert (await hosts_page(HostsQuery(limit=limit), hosts.selector, {})).more is more


async def test_hosts_have_their_zone_aggregates_and_numbers_that_are_not_too_old() -> None:
    fast, rack = aggregate("fast", ssd="true"), aggregate("rack", availability_zone="east")
    members = {fast.uuid: [0, 1], rack.uuid: [0]}
    hosts = Hosts([PLENTY] * 3, members=members, config=SchedulerConfig(aggregates=(fast, rack)))
    for at, watts in ((0, 300.0), (2, 100.0)):
        reading = HostReading(host_uuid=hosts.uuids[at], at=1_000.0 - 2 * at, values={"power.watts": watts})
        hosts.selector.metrics.apply(HostMetrics(source="test", readings=(reading,)), None, now=1_000.0, now_s=0.0)
    hosts.selector.metrics.advance(hosts.config.metrics.max_age_s - 1.0)  # that of h2 is too old by then
    found = [
        (host.zone, host.aggregates, host.metrics)
        for host in (await hosts_page(HostsQuery(), hosts.selector, {})).hosts
    ]
    assert found == [("east", ("fast", "rack"), {"power.watts": 300.0}), (None, ("fast",), {}), (None, (), {})]


NOT_IN_PLACEMENT, IN_CELL, ENDED = (f"{number:08x}-0000-4000-8000-000000000000" for number in (4, 5, 6))


def not_reported() -> tuple[Hosts, dict[str, FenceRecord]]:
    """h0 and h1 of c1, which h1's service has not reported since this scheduler's start; of h3 to h5 placement has no
    provider, and only decisions are left: h3 and h4 are fenced, h4 in c2, and h5 is enabled.
    """
    hosts = Hosts([PLENTY] * 2, cells=["c1", "c1"])
    hosts.table = hosts.selector.table = HostTable()
    report = HostReport(uuid=hosts.uuids[0], name="h0")
    hosts.table.apply(HostStates(service="s0", cell="c1", epoch=1, sequence=1, hosts=(report,), complete=True), 0.0)
    states = {NOT_IN_PLACEMENT: AdminState.FENCED, IN_CELL: AdminState.FENCED, ENDED: AdminState.ENABLED}
    hosts.table.apply_decisions(
        {
            uuid: HostAdminState(host_uuid=uuid, host=f"h{at}", state=state)
            for at, (uuid, state) in enumerate(states.items(), 3)
        }
    )
    return hosts, {IN_CELL: FenceRecord(host="h4", cell="c2", version=1)}


@pytest.mark.parametrize(
    ("query", "names"),
    [
        (HostsQuery(), ["h0", "h1", "h3", "h4"]),
        (HostsQuery(limit=3), ["h0", "h1", "h3"]),
        (HostsQuery(cell="c2"), ["h4"]),
        (HostsQuery(cell="c1"), ["h0"]),
        (HostsQuery(up=False), ["h1", "h3", "h4"]),
        (HostsQuery(up=True), ["h0"]),
    ],
)
async def test_hosts_that_no_service_has_reported_are_listed_and_those_that_only_a_decision_is_about(
    query: HostsQuery, names: list[str]
) -> None:
    """A host that is enabled and that placement has no more has left."""
    hosts, fences = not_reported()
    assert [host.name for host in (await hosts_page(query, hosts.selector, fences)).hosts] == names


async def test_a_host_that_is_not_reported_differs_from_one_that_is_down() -> None:
    """Right after a scheduler's start that is every host; and a fenced one may never be reported again."""
    hosts, fences = not_reported()
    found = {host.name: host for host in (await hosts_page(HostsQuery(), hosts.selector, fences)).hosts}
    assert {name: (host.reported, host.cell) for name, host in found.items()} == {
        "h0": (True, "c1"),
        "h1": (False, None),
        "h3": (False, None),
        "h4": (False, "c2"),
    }
    assert found["h1"].resources == found["h0"].resources != {}
    assert found["h3"].uuid == NOT_IN_PLACEMENT and not found["h3"].resources and not found["h3"].enabled
    assert found["h3"].admin == hosts.table.decision_of(NOT_IN_PLACEMENT)


@pytest.mark.parametrize("leaves_at", [None, 2, 6])
async def test_item_16_hosts_are_listed_in_parts_less_one_that_leaves_placement_meanwhile(
    monkeypatch: pytest.MonkeyPatch, leaves_at: int | None
) -> None:
    """40,000 of them were one turn of 70 to 105 ms. leaves_at: the turn; the sixth is between two parts of records."""
    monkeypatch.setattr(status_queries, "HOSTS_AT_ONCE", 2)
    monkeypatch.setattr(status_queries, "RECORDS_AT_ONCE", 2)
    hosts = Hosts([PLENTY] * 9, cells=["c1"] * 9)
    named = Counter[int]()
    turn, name_of = 0, hosts.selector.name_of

    def counted(uuid: str) -> str:
        named[turn] += 1
        return name_of(uuid)

    monkeypatch.setattr(hosts.selector, "name_of", counted)
    listing = asyncio.create_task(hosts_page(HostsQuery(limit=8), hosts.selector, {}))
    while not listing.done():
        await asyncio.sleep(0)
        turn += 1
        if turn == leaves_at:
            hosts.replica.load(hosts.states[:6] + hosts.states[7:], 2)
    page = await listing
    # Before all are gathered it is one that its service reports and placement does not have.
    gone = {None: "", 2: "", 6: "h6"}[leaves_at]
    assert [host.name for host in page.hosts if host.not_in_placement] == (["h6"] if leaves_at == 2 else [])
    assert max(named.values()) <= 2 and turn >= 8
    assert [host.name for host in page.hosts] == [f"h{at}" for at in range(9) if f"h{at}" != gone][: len(page.hosts)]
    assert len(page.hosts) == {None: 8, 2: 8, 6: 7}[leaves_at]


async def test_item_16_the_lists_of_all_hosts_are_freed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """40,000 hosts were freed in the turn in which the answer was encoded, 15 to 20 ms in all."""
    monkeypatch.setattr(status_queries, "HOSTS_AT_ONCE", 2)
    monkeypatch.setattr(status_queries, "RECORDS_AT_ONCE", 2)
    monkeypatch.setattr(status_queries, "LISTS_FREED_AT_ONCE", 2)
    freed = Counter[int]()
    turn = 0

    class Host:
        def __init__(self, name: str, uuid: str, *, is_in_placement: bool) -> None:
            self.name, self.uuid, self.is_in_placement = name, uuid, is_in_placement

        def __del__(self) -> None:
            freed[turn] += 1

    monkeypatch.setattr(status_queries, "_Host", Host)
    hosts = Hosts([PLENTY] * 20, cells=["c1"] * 20)
    listing = asyncio.create_task(hosts_page(HostsQuery(limit=3), hosts.selector, {}))
    while not listing.done():
        await asyncio.sleep(0)
        turn += 1
    page = await listing
    assert [host.name for host in page.hosts] == ["h0", "h1", "h10"] and page.more
    assert freed.total() == 20 and max(freed.values()) <= 2 * 2 + 2


KNOWN, UNKNOWN, PAGE = (f"{number:08x}-0000-4000-8000-000000000000" for number in (1, 2, 3))


class CountingDatabase:
    """A store that has one build, and keeps what was requested of it."""

    def __init__(self) -> None:
        self.requested: list[object] = []

    async def builds(self, query: BuildQuery) -> list[BuildRecord]:
        self.requested.append(query)
        return []

    async def builds_named(self, instances: Sequence[str]) -> dict[str, BuildRecord]:
        self.requested.append(instances)
        return {KNOWN: BuildRecord(instance_uuid=KNOWN, project_id="p", flavor="f", state=BuildState.ACTIVE)}


async def test_builds_queried_by_name_in_one_batch_are_one_statement() -> None:
    database = CountingDatabase()
    store, nothing = cast("Any", database), cast("Any", None)
    handler = QueryHandler(store, nothing, WaitingTable(), clock=SystemClock(), cells=nothing)
    other = BuildQuery(instance_uuid=PAGE, state=BuildState.FAILED)
    named: list[tuple[BuildQuery, list[str]]] = [
        (BuildQuery(instance_uuid=UNKNOWN, limit=1), []),
        (BuildQuery(instance_uuid=KNOWN), [KNOWN]),
        (BuildQuery(instance_uuid=KNOWN, project_id="p"), [KNOWN]),
        (BuildQuery(instance_uuid=KNOWN, project_id="q"), []),
        (other, []),
    ]
    queries = [query for query, _ in named] * 20
    meta = Meta(id="q", cause="q", sent_at=1.0)
    outcomes = await handler([Received(message=query, meta=meta, bus="api", queue="q") for query in queries])
    assert database.requested == [[KNOWN, UNKNOWN], *[other] * 20]
    found = [[one.instance_uuid for one in outcome.reply.builds] for outcome in outcomes]  # type: ignore[union-attr]
    assert found == [answer for _, answer in named] * 20


class ManyBuilds:
    """A store that has so many builds that match whatever is asked."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.counted: list[tuple[float | None, int]] = []

    async def builds(self, query: BuildQuery) -> list[BuildRecord]:
        one = BuildRecord(instance_uuid=KNOWN, project_id="p", flavor="f", state=BuildState.ACTIVE)
        return [one] * min(self.count, query.limit)

    async def searched_to(self, query: BuildQuery) -> None:
        return None

    async def count_builds(self, query: BuildQuery, most: int) -> int:
        self.counted.append((query.before, most))
        return min(self.count, most)


@pytest.mark.parametrize(
    ("query", "count", "total", "is_counted"),
    [
        (BuildQuery(limit=2, count=True), 5, 5, True),
        (BuildQuery(limit=2, count=True, before=9.0, before_instance=KNOWN), 5, 5, True),
        (BuildQuery(limit=2, count=True), MAX_COUNTED, MAX_COUNTED, True),
        (BuildQuery(limit=2, count=True), MAX_COUNTED + 1, None, True),
        (BuildQuery(limit=6, count=True), 5, 5, False),
        (BuildQuery(limit=2, count=True, flavor="f"), 5, None, False),
        (BuildQuery(limit=2), 5, None, False),
    ],
)
async def test_a_page_has_the_total_of_all_pages_where_it_is_cheap(
    query: BuildQuery, count: int, total: int | None, is_counted: bool
) -> None:
    store, unused = ManyBuilds(count), cast("Any", None)
    handler = QueryHandler(cast("Any", store), unused, WaitingTable(), clock=SystemClock(), cells=unused)
    meta = Meta(id="q", cause="q", sent_at=1.0)
    (answer,) = await handler([Received(message=query, meta=meta, bus="api", queue="q")])
    assert isinstance(answer, Done) and isinstance(answer.reply, BuildPage)
    assert answer.reply.total == total
    assert store.counted == ([(None, MAX_COUNTED + 1)] if is_counted else []), "what came before counts, too"


class UnavailableDatabase:
    """A store whose database does not answer."""

    async def builds(self, query: BuildQuery) -> list[BuildRecord]:
        raise DatabaseUnavailable("connection refused")

    async def builds_named(self, instances: Sequence[str]) -> dict[str, BuildRecord]:
        raise DatabaseUnavailable("connection refused")

    async def objects(self, unless: int = -1) -> None:
        raise DatabaseUnavailable("connection refused")

    async def object_log(self, query: ObjectLogQuery) -> None:
        raise DatabaseUnavailable("connection refused")


async def test_a_question_while_the_database_is_unavailable_is_refused_at_once() -> None:
    """Not kept until it is back: the requester would wait in vain, and be answered that there is no scheduler."""
    store, unused = cast("Any", UnavailableDatabase()), cast("Any", None)
    handler = QueryHandler(store, unused, WaitingTable(), clock=SystemClock(), cells=unused)
    for query in (BuildQuery(), BuildQuery(instance_uuid=KNOWN), ObjectsQuery(), ObjectLogQuery()):
        requested = Received(message=query, meta=Meta(id="q", cause="q", sent_at=1.0), bus="api", queue="q")
        assert await handler([requested]) == [Refuse("database.unavailable", "connection refused")]


async def test_the_token_of_a_fence_is_shown_to_nobody() -> None:
    """The ids of the evacuations follow from it: who reads objects could take them before they are made."""
    body = {"host": "h4", "version": 1, "token": "random"}
    stored = StoredObject(kind=ObjectKind.FENCE, name=IN_CELL, body=body, version=1)
    entry = ObjectLogEntry(
        kind=ObjectKind.FENCE, name=IN_CELL, before=body, after=body, revision=1, at=1.0, actor="ann"
    )

    class Store:
        async def objects(self) -> RecordedObjects:
            return RecordedObjects(1, {(ObjectKind.FENCE, IN_CELL): stored})

        async def object_log(self, _query: ObjectLogQuery) -> list[ObjectLogEntry]:
            return [entry]

    unused = cast("Any", None)
    handler = QueryHandler(cast("Any", Store()), unused, WaitingTable(), clock=SystemClock(), cells=unused)
    for query in (ObjectsQuery(), ObjectLogQuery()):
        meta = Meta(id="q", cause="q", sent_at=1.0)
        (answer,) = await handler([Received(message=query, meta=meta, bus="api", queue="q")])
        assert b"h4" in msgspec.json.encode(answer) and b"random" not in msgspec.json.encode(answer)
