"""A report that was on its way while machines were moved: their sources are gone by now, and open no breaker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

import pytest
from msgspec.structs import replace

from bus.bus import Bus
from bus.clock import SystemClock
from bus.contracts.cell import ComputeHosts, HostReport, InstanceSpec, Running, Selection
from cell_conductor.config import ConductorConfig
from cell_conductor.domain.instance import Instance, State
from cell_conductor.domain.proof import rescan_id
from cell_conductor.domain.report import NO_RECORD, Differences, Unexplained, UnexplainedKind, differences
from cell_conductor.engine import Engine, Sender
from cell_conductor.guard import Guard
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable
from tests.unit.conductor.test_breaker_on_a_busy_cell import Silent

SOURCE, DESTINATION = "bbbbbbbb-0000-4000-8000-000000000000", "bbbbbbbb-0000-4000-8000-000000000001"
SERVICE, CELL, EPOCH, MOVED_AT = "s", "c", 1, 1000.0
MANY = 8
CONFIG = ConductorConfig()


def moved(number: int, service: str) -> Instance:
    """Attempt 2, on the destination; attempt 1 was destroyed on the source before MOVED_AT."""
    uuid = f"aaaaaaaa-0000-4000-8000-{number:012d}"
    here = Selection(host_uuid=DESTINATION, host="h", service=service, allocations={DESTINATION: {"VCPU": 1}})
    return Instance(
        uuid=uuid,
        state=State.ACTIVE,
        spec=InstanceSpec(instance_uuid=uuid, project_id="p"),
        selections=(here,),
        attempt=2,
        since=MOVED_AT,
    )


@asynccontextmanager
async def guarded(instances: Sequence[Instance]) -> AsyncIterator[tuple[MemoryInstances, Guard]]:
    """A conductor's store that has these instances, and its guard."""
    clock = SystemClock()
    store = MemoryInstances(MemoryInstanceTable(clock).session())
    await store.open()
    async with store.transaction() as transaction:
        await transaction.insert(instances)
    bus = cast(Bus, Silent())
    relay = cast(Sender, None)
    engine = Engine(store=store, bus=bus, relay=relay, clock=clock, config=CONFIG, cell=CELL)
    yield store, Guard(store, bus, clock, CONFIG, effective=engine.effective, adopt=engine.adopt)
    await store.close()


def report_of_source(instances: Sequence[Instance], deployment: str, *, is_later: bool = True) -> ComputeHosts:
    """Attempt 1 of each still runs on the source, by this report. is_later: of a scan that began after their records
    became what they are.
    """
    machines = tuple(Running(instance_uuid=one.uuid, attempt=1, deployment=deployment) for one in instances)
    return ComputeHosts(
        service=SERVICE,
        cell=CELL,
        epoch=EPOCH,
        sequence=9,
        hosts=(HostReport(uuid=SOURCE, name="h", running=machines),),
        rescans=tuple(rescan_id(one) for one in instances) if is_later else (),
    )


@pytest.mark.parametrize("is_later", [False, True])
@pytest.mark.parametrize("destination", [SERVICE, "other"])
async def test_sources_that_are_gone_since_the_report_are_not_counted_as_over(destination: str, is_later: bool) -> None:
    """A chaos run with moves opened a breaker: a report of before an outage listed eight sources of moves."""
    instances = [moved(number, destination) for number in range(MANY)]
    async with guarded(instances) as (store, guard):
        report = report_of_source(instances, store.deployment, is_later=is_later)
        briefs = await store.briefs([SOURCE], [one.uuid for one in instances])
        found = differences(report, briefs, now=MOVED_AT + 60, grace_s=30.0, deployment=store.deployment)
        assert len(found.harmful) == (MANY if is_later else 0)
        assert len(found.harmful_rescans) == (0 if is_later else MANY), "each is looked for again"
        assert not await guard.assess(report, found)
        assert [breaker.over for breaker in await store.safety.breakers()] == ([MANY] if is_later else [])


async def test_a_service_below_the_epoch_under_which_its_machine_was_built_is_believed() -> None:
    """A second service of its name had built the machine and was gone: it stayed active for ever (seed 1795360595)."""
    instance = moved(0, SERVICE)
    async with guarded([instance]) as (store, guard):
        empty = HostReport(uuid=DESTINATION, name="h", running=())
        report = replace(report_of_source([], ""), epoch=0, hosts=(empty,), rescans=(rescan_id(instance),))
        briefs = await store.briefs([DESTINATION], [])
        found = differences(report, briefs, now=MOVED_AT + 99, grace_s=30.0, deployment=store.deployment)
        assert [uuid for uuid, _ in await guard.assess(report, found)] == [instance.uuid]


async def test_a_machine_that_a_backup_has_on_record_again_is_taken_off_with_its_next_report() -> None:
    """A simulated cell was set back to while a machine of a move was in quarantine: it stayed listed for ever."""
    instances = [moved(0, SERVICE)]
    (one,) = instances
    strange = Unexplained(one.uuid, 1, SOURCE, UnexplainedKind.QUARANTINED, NO_RECORD)
    async with guarded(instances) as (store, guard):
        report = report_of_source(instances, store.deployment)
        await guard.assess(report, Differences(unexplained=(strange,)))
        assert guard.unexplained == {one.uuid}
        await guard.assess(report, Differences())
        assert not guard.unexplained
        await store.safety.record(SERVICE, [strange], MOVED_AT)  # the backup has it
        store._table.place += 1
        async with store.transaction() as transaction:
            assert await transaction.recognise() is not None
        await guard.assess(report, Differences())
        assert not await store.safety.records()
        assert not guard.unexplained
