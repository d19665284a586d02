"""A compute service's name belongs to one process: the second of a name touches nothing and ends, with a sentence."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import convert
from msgspec.structs import replace

from bus.contracts.base import Word
from bus.contracts.cell import Heartbeat
from compute_sim.config import ComputeConfig, default_service
from compute_sim.fleet import Fleet
from compute_sim.name import NameTaken
from tests.integration.compute.harness import CELL, PATIENCE_S, Cell, Life, settled

SERVICE = "c1-a"
SETTINGS = ComputeConfig(hosts=2, heartbeat_interval_s=0.02, name_wait_s=0.1)
PATIENT = replace(SETTINGS, name_wait_s=PATIENCE_S)


def planned(settings: ComputeConfig = SETTINGS) -> Fleet:
    return Fleet.planned(settings, CELL, SERVICE)


async def ended(life: Life) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await life.task


async def beat(cell: Cell, epoch: int, sequence: int, *, service: str = SERVICE, stopping: bool = False) -> None:
    heartbeat = Heartbeat(service=service, cell=CELL, epoch=epoch, sequence=sequence, stopping=stopping)
    await cell.bus.publish(heartbeat)


async def test_two_services_of_one_name_do_not_run_side_by_side(cell: Cell) -> None:
    """40 hosts were announced as active, 10 machines ran without an allocation, and no log had a line of it."""
    first = await cell.compute(SETTINGS, planned())
    epochs = {heartbeat.epoch for heartbeat in await cell.until(cell.heartbeats)}
    fleet = planned()
    with pytest.raises(NameTaken, match=r"another process runs the compute service 'c1-a' of c1 \(for 0\.1 s\)"):
        await cell.compute(SETTINGS, fleet)
    assert fleet.records.epoch == 0, "the second one has not begun: its machines and memory were not looked at"
    count = len(cell.heartbeats())
    await cell.until(lambda: len(cell.heartbeats()) > count)
    assert {heartbeat.epoch for heartbeat in cell.heartbeats()} == epochs
    assert not first.task.done()
    await first.stop()


async def test_a_service_waits_for_a_former_one_of_its_name_to_go(cell: Cell) -> None:
    first = await cell.compute(SETTINGS, planned())
    starting = asyncio.create_task(cell.compute(PATIENT, planned()))
    await asyncio.sleep(0)
    await first.kill()
    async with asyncio.timeout(PATIENCE_S):
        second = await starting
    await second.stop()


async def test_a_service_whose_connection_was_lost_gets_its_name_and_commands_back(cell: Cell) -> None:
    fleet = planned()
    life = await cell.compute(SETTINGS, fleet)
    cell.broker.drop_connections()
    await settled(lambda: life.service.not_ready() == [])
    instance = cell.instance()
    await cell.spawn(next(iter(fleet.hosts)).plan.uuid, instance)
    await cell.outcome(instance, 1)
    await life.stop()


async def test_a_service_whose_name_was_taken_while_its_connection_was_lost_ends(cell: Cell) -> None:
    life = await cell.compute(SETTINGS, planned())
    (mine,) = (one for one in cell.broker.transports if one.name == CELL and one is not cell.bus.transport)
    mine.lose()
    second = await cell.compute(SETTINGS, planned())
    mine.reconnect_soon()
    with pytest.raises(NameTaken, match="since this one's connection to the bus was lost"):
        await ended(life)
    assert not second.task.done()
    await second.stop()


async def test_a_service_that_receives_its_name_from_one_started_later_ends(cell: Cell) -> None:
    """Where a broker that was split gave the name to two."""
    fleet = planned(PATIENT)
    life = await cell.compute(PATIENT, fleet)
    later = fleet.records.epoch + 1
    await beat(cell, later, 7)
    await beat(cell, later, 8)
    with pytest.raises(NameTaken, match=f"its heartbeats have epoch {later}, ours {later - 1}"):
        await ended(life)


async def test_a_service_that_keeps_hearing_its_name_from_one_started_earlier_ends(cell: Cell) -> None:
    fleet = planned()
    life = await cell.compute(SETTINGS, fleet)
    for sequence in range(1, 1_000_000):
        if life.task.done():
            break
        await beat(cell, fleet.records.epoch - 1, sequence)
        await asyncio.sleep(SETTINGS.heartbeat_interval_s)
    with pytest.raises(NameTaken):
        await ended(life)


async def test_late_heartbeats_of_a_former_life_end_nothing(cell: Cell) -> None:
    fleet = planned(PATIENT)
    life = await cell.compute(PATIENT, fleet)
    own = fleet.records.epoch
    await beat(cell, own + 1, 7)
    await beat(cell, own + 1, 7)  # the same one, doubled
    await beat(cell, own + 1, 6)
    await beat(cell, own + 2, 9, stopping=True)
    await beat(cell, own + 2, 10, stopping=True)
    await beat(cell, own - 1, 1)
    await beat(cell, own - 1, 2)
    count = len(cell.heartbeats())
    await cell.until(lambda: len(cell.heartbeats()) > count + 3)
    assert not life.task.done()
    await life.stop()


@pytest.mark.parametrize(
    ("cell", "host", "name"),
    [
        ("cell1", "node-7.rack2.example.org", "cell1-node-7"),
        ("cell1", "Größe 1", "cell1-Gr--e-1"),
        ("cell1", "", "cell1-localhost"),
        ("c" * 40, "h" * 63, ("c" * 40 + "-" + "h" * 23)),
    ],
)
def test_a_default_name_is_of_the_cell_and_the_machine(cell: str, host: str, name: str) -> None:
    assert default_service(cell, host) == name
    assert convert(name, Word) == name
