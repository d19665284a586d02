"""Two compute services of different names report hosts of one uuid: it is noticed, and costs no instance."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from bus.clock import SystemClock
from bus.consuming.outcome import Received
from bus.contracts.base import Meta
from bus.contracts.cell import ComputeHosts, HostReport, RescanHosts, Running
from cell_conductor.config import ConductorConfig
from cell_conductor.domain.instance import Instance, Phase, State
from cell_conductor.domain.listings import Listings
from cell_conductor.domain.proof import rescan_id
from cell_conductor.domain.report import differences
from cell_conductor.engine import Engine
from cell_conductor.handlers import HostHandlers
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable
from cell_conductor.store.port import Brief
from tests.unit.conductor.scenario import SPEC, UUID, host, phase_of, selection
from tests.unit.conductor.test_set_back import Queried, Relay

BOTH = ("s1", "s2")


def listing(service: str, *hosts: int, sequence: int = 1, runs: tuple[Running, ...] = (), **other: Any) -> ComputeHosts:
    reports = tuple(HostReport(uuid=host(n), name=f"host-{n}", running=runs) for n in hosts)
    made = ComputeHosts(service=service, cell="c1", epoch=1, sequence=sequence, hosts=reports, complete=True)
    return replace(made, **other)


def listings_of(*reports: ComputeHosts) -> Listings:
    listings = Listings()
    for report in reports:
        listings.note(report)
    return listings


def test_a_host_that_two_services_list_is_contested_while_the_other_one_is_up() -> None:
    second = listing("s2", 1, 2)
    listings = listings_of(listing("s1", 1), second)
    assert listings.contested(second, BOTH) == {host(1): "s1"}
    assert listings.contested(second, ("s2",)) == {}
    listings.note(listing("s1", 3, sequence=2))
    assert listings.contested(second, BOTH) == {}, "it has handed it over"


def test_services_of_a_ring_hand_their_free_hosts_over() -> None:
    second = listing("s2", 1, ring_term=1, ring_number=2)
    assert listings_of(listing("s1", 1, ring_term=1, ring_number=1), second).contested(second, BOTH) == {}
    assert listings_of(listing("s1", 1), second).contested(second, BOTH) == {host(1): "s1"}


def test_a_service_has_left_a_host_out_only_when_all_pages_of_a_report_came() -> None:
    listings = listings_of(listing("s1", 1, 2))
    last = listing("s1", 2, sequence=3, first_sequence=2, pages=2)
    listings.note(last)
    listings.note(last)
    assert listings.may_have("s1", host(1)), "a page is missing"
    listings.note(listing("s1", 3, sequence=2, first_sequence=2, pages=2, complete=False))
    listings.note(last)
    assert not listings.may_have("s1", host(1)) and listings.may_have("s1", host(3))
    assert listings.may_have("s9", host(1)), "nothing came from it yet"
    listings.note(listing("s1", 3, epoch=2, complete=False))
    assert listings.may_have("s1", host(2)), "it has started again, and has not listed all its hosts"


@pytest.mark.parametrize("at", [State.ACTIVE, (State.DESTROYING, State.DELETED)])
def test_nothing_is_missing_by_the_report_of_one_while_the_other_one_may_have_it(at: State | Phase) -> None:
    state, then = phase_of(at)
    record = Brief(UUID, state, host(1), "s1", 1, 100.0, then=then)
    report = replace(listing("s2", 1), rescans=(rescan_id(record),))
    found = {
        may_have: differences(
            report,
            [record],
            deployment="d",
            now=300.0,
            grace_s=30.0,
            may_have=lambda _service, _host, may_have=may_have: may_have,  # type: ignore[misc]
        )
        for may_have in (True, False)
    }
    assert not (found[True].events or found[True].harmful or found[True].rescans or found[True].harmful_rescans)
    assert found[False].events or found[False].harmful


class Quiet(Queried):
    """A bus that keeps what is published."""

    def __init__(self) -> None:
        self.published: list[object] = []

    async def publish(self, message: object, **_: Any) -> None:
        """Keep it."""
        self.published.append(message)


@pytest.mark.parametrize("up", [BOTH, ("s2",)], ids=["both are up", "the first one is down"])
async def test_an_active_instance_is_not_lost_by_the_report_of_a_second_service(up: Collection[str]) -> None:
    """It was lost after the rescan, and destroyed at its own service."""
    table, relay, bus, clock = MemoryInstanceTable(SystemClock()), Relay(), Quiet(), SystemClock()
    store = MemoryInstances(table.session())
    await store.open()
    config, common = ConductorConfig(), {"bus": bus, "clock": clock}
    engine = Engine(store=store, relay=relay, config=config, cell="c1", **common)  # type: ignore[arg-type]
    hosts = HostHandlers(
        engine,
        store,
        clock,
        config,
        bus,  # type: ignore[arg-type]
        outdated=lambda _service, _epoch: None,
        up=lambda: up,
    )
    record = Instance(
        uuid=UUID, state=State.ACTIVE, spec=SPEC, selections=(selection(1),), attempt=1, since=clock.time() - 3600.0
    )
    async with store.transaction() as transaction:
        await transaction.insert([record])

    async def report(page: ComputeHosts) -> None:
        page = replace(page, seen_at=clock.time())
        await hosts.hosts([Received(page, Meta(id="m", sent_at=clock.time()), "c1", "conductor.hosts")])

    runs = (Running(instance_uuid=UUID, attempt=1, deployment=store.deployment),)
    await report(listing("s1", 1, runs=runs))
    with capture_logs() as logs:
        await report(listing("s2", 1, 2))
        await report(listing("s2", 1, 2, sequence=2))
    logged = [(line["service"], line["other"], line["host"]) for line in logs if line["event"] == "host.reported_twice"]
    contested = REGISTRY.get_sample_value("berth_conductor_hosts_reported_twice", {"service": "s2"})
    rescans = [one for one in bus.published if isinstance(one, RescanHosts)]
    if up == BOTH:
        assert logged == [("s2", "s1", host(1))] and contested == 1 and not rescans
    else:
        assert not logged and rescans
    await report(listing("s2", 1, 2, sequence=3, rescans=(rescan_id(record),)))
    async with store.transaction() as transaction:
        now = (await transaction.lock([UUID]))[UUID]
    assert (now.state is State.ACTIVE) is (up == BOTH)
    await report(listing("s2", 2, sequence=4))
    if up == BOTH:
        assert REGISTRY.get_sample_value("berth_conductor_hosts_reported_twice", {"service": "s2"}) == 0
