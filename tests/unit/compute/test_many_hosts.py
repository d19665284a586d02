"""A service of many hosts looks at so many in one turn of the event loop, and not at all of them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bus.clock import SystemClock
from bus.contracts.base import Message
from bus.contracts.cell import QueueMarker
from bus.contracts.placement import InventoryUpdate
from compute_sim import inventory, reporter, survey
from compute_sim.config import ComputeConfig
from compute_sim.domain.faults import Faults
from compute_sim.drivers import hypervisor
from compute_sim.drivers.hypervisor import Hypervisors
from compute_sim.fleet import Fleet, Guest
from compute_sim.host_changes import HostChanges
from compute_sim.inventory import InventoryReporter
from compute_sim.offering import Offering
from compute_sim.reporter import Reporter
from compute_sim.survey import Survey
from tests.kit.turns import Turns

HOSTS, AT_ONCE = 9, 2


class Service:
    """The parts of a service that report its hosts, each of which has a machine; it is the bus, too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (hypervisor, survey, reporter, inventory):
            monkeypatch.setattr(module, "HOSTS_AT_ONCE", AT_ONCE)
        self.published: list[Message] = []
        self.clock = SystemClock()
        self.fleet = Fleet.planned(ComputeConfig(hosts=HOSTS), "c", "s")
        for host in self.fleet.hosts:
            self.fleet.put(host.plan.uuid, Guest(host.plan.uuid, 1, {}, deployment="d"))
        self.records = self.fleet.records
        self.records.start(self.clock.time())
        self.driver = Hypervisors(self.fleet, Faults(), seed=1, clock=self.clock)
        self.survey = Survey(self.driver, self.records)
        bus: Any = self
        self.offering = Offering(bus, service="s", records=self.records, clock=self.clock, on_offered=lambda _: None)
        common: dict[str, Any] = {
            "service": "s",
            "records": self.records,
            "changes": HostChanges(self.clock),
            "offering": self.offering,
            "clock": self.clock,
            "rng": random.Random(1),
            "report_interval_s": 60.0,
        }
        self.reporter = Reporter(bus, cell="c", survey=self.survey, heartbeat_interval_s=1.0, **common)
        self.inventory = InventoryReporter(bus, driver=self.driver, **common)

    async def publish(self, message: Message, *, cause: str = "") -> None:
        self.published.append(message)

    async def publish_all(self, messages: list[tuple[Message, str]]) -> None:
        self.published += [message for message, _ in messages]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    return Service(monkeypatch)


async def test_item_16_a_whole_report_looks_at_so_many_hosts_in_one_turn(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first report of 20,000 hosts was one turn of 60 to 100 ms."""
    service.offering.begun.set()
    counted = ((hypervisor, "DriverHost"), (hypervisor, "Machine"), (survey, "_running"), (Offering, "offers"))
    turns = Turns(monkeypatch, *counted)
    sizes, note_listed = list[int](), service.survey.note_listed
    monkeypatch.setattr(service.survey, "note_listed", lambda hosts: (sizes.append(len(hosts)), note_listed(hosts)))
    async with turns.counting():
        await service.reporter._publish_hosts(None)
    for _, name in counted:
        assert turns.total(name) == HOSTS and turns.most(name) <= AT_ONCE, name
    assert max(sizes) <= AT_ONCE and len(service.survey.listed()) == HOSTS
    (report,) = service.published
    uuids = [host.plan.uuid for host in service.fleet.hosts]
    assert [host.uuid for host in report.hosts] == uuids  # type: ignore[attr-defined]
    assert [[one.instance_uuid for one in host.running] for host in report.hosts] == [[uuid] for uuid in uuids]  # type: ignore[attr-defined]
    assert service.survey.hosts == frozenset(uuids) and service.survey.name_of(uuids[3]) == "s-00003"


async def test_item_16_inventories_of_so_many_hosts_are_chosen_in_one_turn(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.offering.begun.set()
    turns = Turns(monkeypatch, (Offering, "offers"))
    async with turns.counting():
        await service.inventory._publish(None)
    assert turns.total("offers") == HOSTS and turns.most("offers") <= AT_ONCE
    assert len([one for one in service.published if isinstance(one, InventoryUpdate)]) == HOSTS


async def test_item_16_so_many_hosts_are_measured_in_one_turn(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns(monkeypatch, (hypervisor, "HostReading"))
    async with turns.counting():
        readings = await service.driver.measure(1.0)
    assert len(readings) == HOSTS and turns.most("HostReading") <= AT_ONCE


class CountedHost(str):
    """The uuid of a host that counts what it is compared with."""

    __slots__ = ("compared",)

    def __new__(cls, uuid: str) -> CountedHost:
        made = super().__new__(cls, uuid)
        made.compared = 0
        return made

    def __eq__(self, other: object) -> bool:
        self.compared += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


async def test_item_16_a_host_is_offered_without_a_look_at_all_that_is_to_be_destroyed(service: Service) -> None:
    """1,000 destructions at a start were compared with each of 20,000 hosts, at each report."""
    owed = [(f"h{at}", f"i{at % 2}") for at in range(1000)] + [("h0", "i1")]
    service.offering.on_marker(QueueMarker(service="s", epoch=service.records.epoch), owed)
    host = CountedHost("h1000")
    assert service.offering.offers(host) and host.compared <= 2
    assert not service.offering.offers("h0")
    offered: list[str] = []
    service.offering._on_offered = offered.extend
    for key in (("h0", "i0"), ("h1", "i0"), ("h0", "i1"), ("h0", "i1")):
        service.offering.on_settled(key)
    assert offered == ["h0"] and service.offering.offers("h0") and not service.offering.offers("h1")
