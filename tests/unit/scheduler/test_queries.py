"""A scheduler's answer about hosts when some of them are queried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from bus.clock import SystemClock
from bus.consuming.outcome import Received, Refuse
from bus.contracts.base import Meta
from bus.contracts.build import BuildQuery, BuildRecord, BuildState, HostsQuery
from bus.contracts.cell import ServiceDown, ServicesDigest
from bus.contracts.host_metrics import HostMetrics, HostReading
from bus.contracts.objects import ObjectLogQuery, ObjectsQuery
from bus.faults import DatabaseUnavailable
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.waiting import WaitingTable
from scheduler_worker.domain.workers import WorkerTable
from scheduler_worker.objects import ObjectRegistry
from scheduler_worker.queries import QueryHandler
from tests.unit.scheduler.hosts import PLENTY, Hosts, aggregate


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
def test_hosts_are_those_requested_by_name(query: HostsQuery, names: list[str]) -> None:
    """The bound counts what was requested for, not what comes before it: c1 is silent, c2 is not."""
    hosts = Hosts([PLENTY] * 5, cells=["c1", "c1", "c1", "c2", "c2"])
    down = (ServiceDown(service="compute-c1", epoch=1, code="service.silent"),)
    hosts.table.apply(ServicesDigest(cell="c1", term=1, number=1, down=down), 1.0)
    handler = QueryHandler(
        cast("Any", None),
        hosts.selector,
        cast("Any", None),
        WorkerTable(),
        WaitingTable(),
        clock=SystemClock(),
        objects=cast("Any", None),
        cells=cast("Any", None),
    )
    assert [host.name for host in handler.hosts(query).hosts] == names


def test_hosts_have_their_zone_aggregates_and_numbers_that_are_not_too_old() -> None:
    fast, rack = aggregate("fast", ssd="true"), aggregate("rack", availability_zone="east")
    members = {fast.uuid: [0, 1], rack.uuid: [0]}
    hosts = Hosts([PLENTY] * 3, members=members, config=SchedulerConfig(aggregates=(fast, rack)))
    for at, watts in ((0, 300.0), (2, 100.0)):
        reading = HostReading(host_uuid=hosts.uuids[at], at=1_000.0 - 2 * at, values={"power.watts": watts})
        hosts.selector.metrics.apply(HostMetrics(source="test", readings=(reading,)), None, now=1_000.0, now_s=0.0)
    hosts.selector.metrics.advance(hosts.config.metrics.max_age_s - 1.0)  # that of h2 is too old by then
    handler = QueryHandler(
        cast("Any", None),
        hosts.selector,
        cast("Any", None),
        WorkerTable(),
        WaitingTable(),
        clock=SystemClock(),
        objects=cast("Any", None),
        cells=cast("Any", None),
    )
    found = [(host.zone, host.aggregates, host.metrics) for host in handler.hosts(HostsQuery()).hosts]
    assert found == [("east", ("fast", "rack"), {"power.watts": 300.0}), (None, ("fast",), {}), (None, (), {})]


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
    hosts, database = Hosts([PLENTY]), CountingDatabase()
    store, nothing = cast("Any", database), cast("Any", None)
    handler = QueryHandler(
        store,
        hosts.selector,
        nothing,
        WorkerTable(),
        WaitingTable(),
        clock=SystemClock(),
        objects=nothing,
        cells=nothing,
    )
    other = BuildQuery(instance_uuid=PAGE, state=BuildState.FAILED)
    queries = [BuildQuery(instance_uuid=UNKNOWN, limit=1), BuildQuery(instance_uuid=KNOWN), other] * 20
    meta = Meta(id="q", cause="q", sent_at=1.0)
    outcomes = await handler([Received(message=query, meta=meta, bus="api", queue="q") for query in queries])
    assert database.requested == [[KNOWN, UNKNOWN], *[other] * 20]
    found = [[one.instance_uuid for one in outcome.reply.builds] for outcome in outcomes]  # type: ignore[union-attr]
    assert found == [[], [KNOWN], []] * 20


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
    hosts = Hosts([PLENTY])
    store, clock = cast("Any", UnavailableDatabase()), SystemClock()
    registry = ObjectRegistry(store, hosts.selector, SchedulerConfig(), clock=clock)
    unused = cast("Any", None)
    handler = QueryHandler(
        store, hosts.selector, unused, WorkerTable(), WaitingTable(), clock=clock, objects=registry, cells=unused
    )
    for query in (BuildQuery(), BuildQuery(instance_uuid=KNOWN), ObjectsQuery(), ObjectLogQuery()):
        requested = Received(message=query, meta=Meta(id="q", cause="q", sent_at=1.0), bus="api", queue="q")
        assert await handler([requested]) == [Refuse("database.unavailable", "connection refused")]
