"""A whole compute service of simulated hosts over the in-process bus."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from berth.config.settings import ComputeSettings
from bus.clock import SystemClock
from bus.contracts.cell import ComputeOutcome
from bus.contracts.host_metrics import HostMetrics, HostReading
from bus.contracts.queues import DEAD_LETTERS
from compute_sim.config import HostSize, SimulatedConfig
from compute_sim.crash_plan import ServiceDied
from compute_sim.faults import Faults
from compute_sim.fleet import Fleet, SimulatedMachine
from compute_sim.host_plan import DISABLED_TRAIT
from tests.integration.compute_agent.harness import CELL, DATABASE_ID, SERVICE, Cell, planned, running, spawn
from tests.kit.waiting import until

ACTIVE, FAILED, DESTROYED = ComputeOutcome.ACTIVE, ComputeOutcome.FAILED, ComputeOutcome.DESTROYED


def config(hosts: int = 4, **faults: Any) -> ComputeSettings:
    return ComputeSettings(
        simulated=SimulatedConfig(hosts=hosts, gpu_share=0.5, faults=Faults(**faults)), heartbeat_interval_s=0.05
    )


def hosts_of(fleet: Fleet) -> list[str]:
    return [host.plan.uuid for host in fleet.hosts]


async def serve(cell: Cell, settings: ComputeSettings | None = None, **faults: Any) -> tuple[Fleet, list[str]]:
    """A service with these faults: its fleet, and the fleet's hosts."""
    settings = settings or config(**faults)
    fleet = planned(settings)
    await cell.compute(settings, fleet)
    return fleet, hosts_of(fleet)


# --- commands and results

# (what goes wrong, by a rate; the commands with their attempts, each with what it is answered, if it is; and how often
# builds were accepted; the attempt whose machine is left, 0: none)
ANSWERS = {
    "a machine is built and destroyed": ({}, [("spawn", 1, ACTIVE, ""), ("destroy", 1, DESTROYED, "")], 1, 0),
    "a repeated spawn gets the same answer": ({}, [("spawn", 1, ACTIVE, "")] * 2, 1, 1),
    "a repeated failure gets the same answer": (
        {"fail_rate": 1.0},
        [("spawn", 1, FAILED, "sim.spawn_failed")] * 2,
        1,
        0,
    ),
    "an abort is final": ({"abort_rate": 1.0}, [("spawn", 1, FAILED, "final")], 1, 0),
    "an ended attempt never starts": (
        {},
        [("destroy", 2, DESTROYED, ""), ("spawn", 2, FAILED, "spawn.attempt_ended")],
        0,
        0,
    ),
    "a destroy ends a build that hangs": (
        {"hang_rate": 1.0},
        [("spawn", 1, None, ""), ("destroy", 1, DESTROYED, "")],
        1,
        0,
    ),
    "a newer attempt replaces the older one, whose destroy comes late": (
        {},
        [("spawn", 1, ACTIVE, ""), ("spawn", 3, ACTIVE, ""), ("destroy", 1, DESTROYED, "")],
        2,
        3,
    ),
}


@pytest.mark.parametrize(("faults", "commands", "accepted", "left"), ANSWERS.values(), ids=ANSWERS)
async def test_commands_are_answered(
    cell: Cell, faults: dict[str, float], commands: list[tuple[str, int, Any, str]], accepted: int, left: int
) -> None:
    fleet, (host, *_) = await serve(cell, **faults)
    instance, count = cell.instance(), 0
    for command, attempt, outcome, code in commands:
        await (cell.spawn if command == "spawn" else cell.destroy)(host, instance, attempt)
        if outcome is None:
            continue
        count += 1
        result = (await until(lambda count=count: cell.results(instance)[count - 1 :]))[0]
        assert (result.attempt, result.outcome, result.host_uuid, result.service) == (attempt, outcome, host, SERVICE)
        assert result.final is (code == "final") and code in {"final", result.code}
    assert len(cell.results(instance)) == count and fleet.records.accepted == accepted
    machine = fleet.machine(host, instance)
    assert (machine.attempt if machine is not None and machine.complete else 0) == left


class Late(SystemClock):
    """Waits of LATE_S end when a test ends them."""

    LATE_S = 61.0  # as long as no other wait: `Destroys.retry` waits 60 s, again and again

    def __init__(self) -> None:
        self.enough = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await (self.enough.wait() if seconds == self.LATE_S else super().sleep(seconds))


async def test_a_wrong_driver_reports_active_after_its_destruction(cell: Cell) -> None:
    cell.clock = late = Late()
    fleet, (host, *_) = await serve(cell, late_rate=1.0, late_s=Late.LATE_S, duplicate_rate=0.0)
    instance = cell.instance()
    await cell.spawn(host, instance)
    await cell.destroyed(host, instance)
    late.enough.set()
    await cell.ended(instance, 1, ACTIVE)
    assert [result.outcome for result in cell.results(instance)] == [DESTROYED, ACTIVE]
    assert fleet.machine(host, instance) is None


async def test_half_built_leftovers_go_with_the_destroy(cell: Cell) -> None:
    fleet, (host, *_) = await serve(cell, fail_rate=1.0, leftover_rate=1.0)
    instance = cell.instance()
    await cell.spawn(host, instance)
    await cell.ended(instance, 1, FAILED)
    machine = fleet.machine(host, instance)
    assert machine is not None and not machine.complete
    await cell.destroyed(host, instance)
    assert list(fleet.machines()) == []


async def test_strange_commands_are_answered_or_refused(cell: Cell) -> None:
    _, (host, *_) = await serve(cell)
    foreign, lost, elsewhere = cell.instance(), cell.instance(), cell.instance()
    await cell.spawn(foreign, lost)
    assert (await cell.outcome(lost, 1)).code == "host.unknown"
    await cell.destroyed(foreign, lost)
    await cell.bus.publish(msgspec.structs.replace(spawn(host, elsewhere), allocations={foreign: {"VCPU": 1}}))
    ended = await cell.outcome(elsewhere, 1)
    assert (ended.code, ended.final) == ("allocation.elsewhere", False), "an alternate may do"
    assert await cell.bus.transport.depth(DEAD_LETTERS) == 0


async def test_a_vanished_machine_and_an_unknown_one_are_reported_as_they_are(cell: Cell) -> None:
    fleet, (host, other, *_) = await serve(cell)
    stray, foreign = cell.instance(), cell.instance()
    gone = await cell.built(host)
    fleet.wipe(host)
    fleet.put(other, SimulatedMachine(stray, 5, {}, database_id=DATABASE_ID))
    fleet.put(other, SimulatedMachine(foreign, 1, {}))
    page = (await cell.asked())[0]
    assert running([page]).items() >= {host: [], other: [(stray, 5), (foreign, 1)]}.items()
    tags = {one.instance_uuid: one.database_id for host in page.hosts for one in host.running or ()}
    assert tags == {stray: DATABASE_ID, foreign: None}
    await cell.spawn(host, gone)  # a late copy is not answered `active` for what is lost
    assert (await cell.outcome(gone, 1, count=2)).code == "instance.lost"
    await cell.destroyed(other, stray, 5)
    assert fleet.machine(other, stray) is None
    await cell.destroy(other, foreign, 5)
    assert (await cell.ended(foreign, 5, FAILED)).code == "destroy.not_owned"
    await cell.spawn(other, foreign, 6)  # nor is it built over
    assert (await cell.ended(foreign, 6, FAILED)).code == "host.machine_conflict"
    assert fleet.machine(other, foreign) is not None


# --- announcements


async def test_start_publishes_hosts_inventory_and_heartbeats(cell: Cell) -> None:
    settings = config(hosts=10)
    fleet = planned(settings)
    life = await cell.compute(settings, fleet)
    await until(lambda: cell.announced() and len(cell.inventory()) >= 10 and len(cell.heartbeats()) >= 2)
    page, trees = cell.announced()[0], cell.inventory()
    assert (page.complete, page.cell, page.service) == (True, CELL, SERVICE)
    assert [host.uuid for host in page.hosts] == hosts_of(fleet)
    assert {update.root_uuid for update in trees} == set(hosts_of(fleet))
    assert {len(update.providers) for update in trees} == {1, 3}  # half of them have two GPUs
    child = next(update for update in trees if len(update.providers) == 3).providers[1]
    assert child.parent_uuid is not None and child.inventories["VGPU"].total == 8
    assert len({update.version for update in trees}) == 10
    assert {update.reporter for update in trees} == {f"compute-{SERVICE}"}
    sequences = [heartbeat.sequence for heartbeat in cell.heartbeats()]
    assert sequences == sorted(set(sequences))
    await life.stop()
    await until(lambda: cell.heartbeats()[-1].stopping)


async def test_a_request_for_a_report_publishes_everything_again_with_what_runs(cell: Cell) -> None:
    _, (_, host, *_) = await serve(cell)
    first = (await until(cell.announced))[0]
    instance = await cell.built(host)
    page = (await cell.asked())[0]
    assert running([page])[host] == [(instance, 1)] and page.sequence > first.sequence


async def test_a_disabled_or_resized_host_is_announced_at_once_with_higher_versions(cell: Cell) -> None:
    fleet, (host, *_) = await serve(cell)
    await until(lambda: cell.announced() and len(cell.inventory()) >= 4)
    before = max(update.version for update in cell.inventory())
    fleet.disable(host, "a fan is loud")
    page = (await until(lambda: cell.announced()[1:]))[0]
    assert [(h.uuid, h.enabled, h.disabled_reason) for h in page.hosts] == [(host, False, "a fan is loud")]
    assert (page.complete, page.first_sequence) == (False, 0), "it is no report of all hosts"
    update = (await until(lambda: cell.inventory()[4:]))[0]
    assert update.root_uuid == host and update.version > before
    assert DISABLED_TRAIT in update.providers[0].traits
    fleet.enable(host)
    fleet.resize(host, HostSize(vcpus=2))
    healed = await until(lambda: [u for u in cell.inventory() if u.providers[0].inventories["VCPU"].total == 2])
    assert DISABLED_TRAIT not in healed[0].providers[0].traits


async def test_consecutive_failures_are_announced_and_end_with_a_success(cell: Cell) -> None:
    fleet, (host, *_) = await serve(cell, fail_rate=0.5, abort_rate=0.0)
    expected = 0
    for _ in range(12):
        instance = cell.instance()
        await cell.spawn(host, instance)
        result = await cell.outcome(instance, 1)
        expected = 0 if result.outcome is ACTIVE else expected + 1
        assert fleet.records.failed_builds(host) == expected

    def announced() -> list[int]:
        return [one.failed_builds for page in cell.announced() for one in page.hosts if one.uuid == host]

    await until(lambda: announced()[-1:] == [expected])


async def test_measurements_are_published_when_they_are_wanted(cell: Cell) -> None:
    settings = msgspec.structs.replace(config(1200), metrics_interval_s=0.05)
    fleet = planned(settings)
    busy, idle = hosts_of(fleet)[:2]
    fleet.put(busy, SimulatedMachine(cell.instance(), 1, {busy: {"VCPU": 128}}, database_id=DATABASE_ID))
    await cell.compute(settings, fleet)

    def readings() -> dict[str, HostReading]:
        received = [message for message in cell.received if isinstance(message, HostMetrics)]
        assert all(message.source == f"compute-{SERVICE}" and len(message.readings) <= 1000 for message in received)
        return {one.host_uuid: one for message in received for one in message.readings}

    await until(lambda: len(readings()) == 1200)
    values = [readings()[host].values for host in (busy, idle)]
    assert [(one["temperature.celsius"], one["power.watts"]) for one in values] == [(47.0, 255.0), (24.0, 110.0)]


async def test_nothing_is_measured_by_default(cell: Cell) -> None:
    await serve(cell)
    await until(lambda: len(cell.heartbeats()) >= 3)
    assert not any(isinstance(message, HostMetrics) for message in cell.received)


# --- lives of a service


async def test_the_same_fleet_survives_a_killed_service(cell: Cell) -> None:
    settings = config()
    fleet = planned(settings)
    host = hosts_of(fleet)[0]
    first = await cell.compute(settings, fleet)
    runs, ended, waiting = await cell.built(host), cell.instance(), cell.instance()
    await cell.destroyed(host, ended, 4)
    epoch, versions = fleet.records.epoch, fleet.records.version
    await first.kill()
    await cell.spawn(host, waiting)  # while no service is there
    await cell.compute(settings, fleet)
    assert (await cell.ended(waiting, 1, ACTIVE)).host_uuid == host
    assert fleet.records.epoch > epoch
    await until(lambda: (runs, 1) in running([p for p in cell.announced() if p.epoch > epoch]).get(host, []))
    await until(lambda: [update for update in cell.inventory() if update.version > versions])
    await cell.spawn(host, ended, 4)
    assert (await cell.ended(ended, 4, FAILED)).code == "spawn.attempt_ended"
    await cell.destroyed(host, runs)


async def test_an_accepted_build_is_finished_by_the_next_life(cell: Cell) -> None:
    slow, quick = config(delay_min_s=3600.0, delay_max_s=3600.0), config()
    fleet = planned(slow)
    first = await cell.compute(slow, fleet)
    instance = cell.instance()
    await cell.spawn(hosts_of(fleet)[0], instance)
    await until(lambda: fleet.records.accepted == 1)
    await first.kill()
    assert cell.results(instance) == []
    await cell.compute(quick, fleet)
    assert (await cell.outcome(instance, 1)).outcome is ACTIVE


@pytest.mark.parametrize("kept", [False, True], ids=["one process", "two processes"])
async def test_a_planned_death_happens_once(cell: Cell, tmp_path: Path, kept: bool) -> None:
    """Another process counts from nought again, and knows of it from its file."""
    settings = msgspec.structs.replace(config(hosts=1, die_after=3), state_dir=str(tmp_path) if kept else "")
    fleet = planned(settings)
    host = hosts_of(fleet)[0]
    first = await cell.compute(settings, fleet)
    instances = [cell.instance() for _ in range(6)]
    for instance in instances:
        await cell.spawn(host, instance)
    with pytest.raises(ServiceDied):
        await first.task
    fleet = planned(settings) if kept else fleet
    await cell.compute(settings, fleet)
    for instance in instances:
        assert (await cell.outcome(instance, 1)).outcome is ACTIVE
    assert sorted(machine.instance_uuid for _, machine in fleet.machines()) == sorted(instances)
