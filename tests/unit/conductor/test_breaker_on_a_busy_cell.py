"""A busy cell's records are ahead of its hosts' reports: that is no loss, and opens no breaker."""

from __future__ import annotations

from typing import cast

import pytest
from msgspec.structs import replace

from bus.bus import Bus
from bus.clock import SystemClock
from bus.consuming.outcome import Received
from bus.contracts.base import Meta
from bus.contracts.cell import MAX_RESCANS, ComputeHosts, HostReport, InstanceSpec, RescanHosts, Selection
from cell_conductor.config import ConductorConfig
from cell_conductor.domain.breaker import Breaker
from cell_conductor.domain.events import Event, HostMissing
from cell_conductor.domain.instance import Instance, State
from cell_conductor.domain.proof import rescan_id
from cell_conductor.domain.report import Differences, differences
from cell_conductor.engine import Engine, Sender
from cell_conductor.guard import Guard
from cell_conductor.handlers import HostHandlers
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable

HOST = "bbbbbbbb-0000-4000-8000-000000000000"
SERVICE, CELL, EPOCH = "s", "c", 1
MANY = 10


class Silent:
    """A bus that takes what is published."""

    name = CELL

    async def publish(self, *_: object, **__: object) -> None:
        return None


def active(number: int) -> Instance:
    uuid = f"aaaaaaaa-0000-4000-8000-{number:012d}"
    here = Selection(host_uuid=HOST, host="h", service=SERVICE, allocations={HOST: {"VCPU": 1}})
    return Instance(
        uuid=uuid,
        state=State.ACTIVE,
        spec=InstanceSpec(instance_uuid=uuid, project_id="p"),
        selections=(here,),
        attempt=1,
        since=50.0,
    )


async def guarded(instances: list[Instance]) -> tuple[MemoryInstances, Guard]:
    """A conductor's guard, and its store with these records."""
    clock, config = SystemClock(), ConductorConfig()
    store = MemoryInstances(MemoryInstanceTable(clock).session())
    await store.open()
    async with store.transaction() as transaction:
        await transaction.insert(instances)
    bus = cast(Bus, Silent())
    engine = Engine(store=store, bus=bus, relay=cast(Sender, None), clock=clock, config=config, cell=CELL)
    return store, Guard(store, bus, clock, config, effective=engine.effective, adopt=engine.adopt)


@pytest.mark.parametrize("is_later", [False, True])
async def test_machines_that_came_up_after_the_scan_are_not_counted_as_lost(is_later: bool) -> None:
    """A thousand boots on three hosts opened the breaker: the report was from before thirteen of them."""
    instances = [active(number) for number in range(MANY)]
    store, guard = await guarded(instances)
    report = ComputeHosts(
        service=SERVICE,
        cell=CELL,
        epoch=EPOCH,
        sequence=9,
        hosts=(HostReport(uuid=HOST, name="h", running=()),),
        rescans=tuple(rescan_id(one) for one in instances) if is_later else (),
    )
    briefs = await store.briefs([HOST], [])
    found = differences(report, briefs, now=101.0, grace_s=30.0, deployment=store.deployment)
    assert len(found.harmful) == (MANY if is_later else 0)
    assert len(found.harmful_rescans) == (0 if is_later else MANY), "each is looked for again"

    assert not await guard.assess(report, found)

    breakers = await store.safety.breakers()
    assert [breaker.lost for breaker in breakers] == ([MANY] if is_later else [])


async def test_machines_whose_record_has_changed_since_the_comparison_are_not_counted_as_lost() -> None:
    """Compared without locks they were missing; one that was moved away since is on record elsewhere."""
    instances = [active(number) for number in range(MANY)]
    store, guard = await guarded([replace(one, since=one.since + 1.0) for one in instances])
    rescans = tuple(rescan_id(one) for one in instances)
    missing = HostMissing(at=101.0, host_uuid=HOST, service=SERVICE, rescans=rescans)
    report = ComputeHosts(service=SERVICE, cell=CELL, epoch=EPOCH, sequence=9, rescans=rescans)
    assert not await guard.assess(report, Differences(harmful=tuple((one.uuid, missing) for one in instances)))
    assert not await store.safety.breakers()


async def test_machines_that_vanish_in_one_report_each_open_the_breaker() -> None:
    """A service reports a host as soon as it has changed, so a mass loss comes in many reports."""
    limit = ConductorConfig().breaker_limit
    store, guard = await guarded([active(number) for number in range(MANY)])
    taken: list[tuple[str, Event]] = []
    for number in range(MANY):
        rescans = (rescan_id(active(number)),)
        missing = HostMissing(at=101.0, host_uuid=HOST, service=SERVICE, rescans=rescans)
        report = ComputeHosts(
            service=SERVICE,
            cell=CELL,
            epoch=EPOCH,
            sequence=9 + number,
            hosts=(HostReport(uuid=HOST, name="h", running=()),),
            rescans=rescans,
        )
        found = Differences(harmful=((active(number).uuid, missing),))
        taken += await guard.assess(report, found)
    assert len(taken) == limit
    assert [breaker.lost for breaker in await store.safety.breakers()] == [limit + 1]


class Kept(Silent):
    """A bus that keeps what is published."""

    def __init__(self) -> None:
        self.published: list[object] = []

    async def publish(self, message: object, **_: object) -> None:
        self.published.append(message)


async def test_what_an_open_breaker_holds_takes_no_place_in_a_request_for_rescans() -> None:
    """More losses than a request names were held: no delete of a lost machine on that page ended any more, and a scan
    was requested in answer to each scan.
    """
    clock, config, bus = SystemClock(), ConductorConfig(), Kept()
    store = MemoryInstances(MemoryInstanceTable(clock).session())
    await store.open()
    held = [active(number) for number in range(MAX_RESCANS + 1)]
    last = active(MAX_RESCANS + 1)
    deleting = replace(last, state=State.DESTROYING, then=State.DELETED)
    async with store.transaction() as transaction:
        await transaction.insert([*held, deleting])
    await store.safety.trip(Breaker(service=SERVICE, tripped_at=60.0, lost=len(held)))
    engine = Engine(store=store, bus=cast(Bus, bus), relay=cast(Sender, None), clock=clock, config=config, cell=CELL)
    hosts = HostHandlers(engine, store, clock, config, cast(Bus, bus), outdated=lambda _service, _epoch: None)
    page = HostReport(uuid=HOST, name="h", running=())
    report = ComputeHosts(service=SERVICE, cell=CELL, epoch=EPOCH, sequence=1, hosts=(page,))
    await hosts.hosts([Received(report, Meta(id="m"), CELL, "conductor.hosts")])
    requested = [one.rescans for one in bus.published if isinstance(one, RescanHosts)]
    assert requested == [(rescan_id(deleting),)]
    await store.safety.reset(SERVICE, "ann", clock.time())
    await hosts.hosts([Received(replace(report, sequence=2), Meta(id="n"), CELL, "conductor.hosts")])
    *_, again = [one.rescans for one in bus.published if isinstance(one, RescanHosts)]
    assert len(again) == MAX_RESCANS and again[0] == rescan_id(deleting)
