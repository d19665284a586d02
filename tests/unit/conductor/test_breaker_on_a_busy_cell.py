"""A busy cell's records are ahead of its hosts' reports: that is no loss, and opens no breaker."""

from __future__ import annotations

from typing import cast

import pytest

from bus.bus import Bus
from bus.clock import SystemClock
from bus.contracts.cell import ComputeHosts, HostReport, InstanceSpec, Selection
from cell_conductor.config import ConductorConfig
from cell_conductor.domain.events import Event, HostMissing
from cell_conductor.domain.instance import Instance, ScanId, State
from cell_conductor.domain.report import Differences, differences
from cell_conductor.engine import Engine, Sender
from cell_conductor.guard import Guard
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable

HOST = "bbbbbbbb-0000-4000-8000-000000000000"
SERVICE, CELL, EPOCH, UP_LOOK = "s", "c", 1, 5
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
        up_scan=ScanId(EPOCH, UP_LOOK),
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


@pytest.mark.parametrize(("look", "lost"), [(UP_LOOK - 1, False), (UP_LOOK + 1, True)])
async def test_machines_that_came_up_after_the_look_are_not_counted_as_lost(look: int, lost: bool) -> None:
    """A thousand boots on three hosts opened the breaker: the report was from before thirteen of them."""
    store, guard = await guarded([active(number) for number in range(MANY)])
    report = ComputeHosts(
        service=SERVICE,
        cell=CELL,
        epoch=EPOCH,
        sequence=9,
        hosts=(HostReport(uuid=HOST, name="h", running=()),),
        seen_at=100.0,
        scan=look,
        first_sequence=9,
    )
    briefs = await store.briefs([HOST], [])
    found = differences(report, briefs, now=101.0, seen_at=100.0, grace_s=30.0, deployment=store.deployment)
    assert len(found.harmful) == MANY, "compared without locks, all of them are missing"

    assert await guard.assess(report, found) == (() if not lost else [])

    breakers = await store.safety.breakers()
    assert [breaker.lost for breaker in breakers] == ([MANY] if lost else [])


async def test_machines_that_vanish_in_one_report_each_open_the_breaker() -> None:
    """A service reports a host as soon as it has changed, so a mass loss comes in many reports."""
    limit = ConductorConfig().breaker_limit
    store, guard = await guarded([active(number) for number in range(MANY)])
    taken: list[tuple[str, Event]] = []
    for number in range(MANY):
        missing = HostMissing(at=101.0, host_uuid=HOST, seen_at=100.0, service=SERVICE, scan=ScanId(EPOCH, UP_LOOK + 1))
        report = ComputeHosts(
            service=SERVICE,
            cell=CELL,
            epoch=EPOCH,
            sequence=9 + number,
            hosts=(HostReport(uuid=HOST, name="h", running=()),),
            seen_at=100.0,
            scan=UP_LOOK + 1,
        )
        found = Differences(harmful=((active(number).uuid, missing),))
        taken += await guard.assess(report, found)
    assert len(taken) == limit
    assert [breaker.lost for breaker in await store.safety.breakers()] == [limit + 1]
