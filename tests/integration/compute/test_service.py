"""A whole compute service over the in-process bus."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from bus.clock import SystemClock
from bus.contracts.catalogue import DEAD_LETTERS
from bus.contracts.cell import ComputeOutcome
from bus.contracts.host_metrics import HostMetrics, HostReading
from compute_sim import reporter
from compute_sim.config import ComputeConfig, HostSize
from compute_sim.crash_plan import ServiceDied
from compute_sim.domain.faults import Faults
from compute_sim.domain.hosts import DISABLED_TRAIT
from compute_sim.fleet import Fleet, Guest
from tests.integration.compute.harness import CELL, DEPLOYMENT, Cell, settled, spawn

SERVICE = "c1-a"
LATE_S = 61.0  # as long as no other wait: `Agent.insist` waits 60 s, again and again


class Late(SystemClock):
    """Waits of LATE_S end when a test ends them."""

    def __init__(self) -> None:
        self.enough = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await (self.enough.wait() if seconds == LATE_S else super().sleep(seconds))


def config(hosts: int = 4, **faults: object) -> ComputeConfig:
    return ComputeConfig(hosts=hosts, gpu_share=0.5, heartbeat_interval_s=0.05, faults=Faults(**faults))  # type: ignore[arg-type]


def planned(settings: ComputeConfig) -> Fleet:
    return Fleet.planned(settings, CELL, SERVICE)


def hosts_of(fleet: Fleet) -> list[str]:
    return [host.plan.uuid for host in fleet.hosts]


async def test_a_spawn_becomes_a_machine_and_is_answered(cell: Cell) -> None:
    settings = config()
    fleet = planned(settings)
    host = hosts_of(fleet)[0]
    life = await cell.compute(settings, fleet)
    instance = cell.instance()
    await cell.spawn(host, instance)
    result = await cell.outcome(instance, 1)
    assert (result.outcome, result.host_uuid, result.service) == (ComputeOutcome.ACTIVE, host, SERVICE)
    guest = fleet.guest(host, instance)
    assert guest is not None and guest.attempt == 1 and guest.complete
    await cell.destroy(host, instance)
    await cell.ended(instance, 1, ComputeOutcome.DESTROYED)
    assert fleet.guest(host, instance) is None
    await life.stop()


async def test_a_repeated_spawn_gets_the_same_answer_and_one_machine(cell: Cell) -> None:
    settings = config(fail_hosts=(f"{SERVICE}-00001",))
    fleet = planned(settings)
    good, bad = hosts_of(fleet)[:2]
    life = await cell.compute(settings, fleet)
    for host, outcome, code in ((good, ComputeOutcome.ACTIVE, ""), (bad, ComputeOutcome.FAILED, "sim.spawn_failed")):
        instance = cell.instance()
        await cell.spawn(host, instance)
        first = await cell.outcome(instance, 1)
        await cell.spawn(host, instance)
        second = await cell.outcome(instance, 1, count=2)
        assert (first.outcome, first.code) == (second.outcome, second.code) == (outcome, code)
    assert fleet.records.accepted == 2
    await life.stop()


async def test_a_fenced_attempt_never_starts(cell: Cell) -> None:
    settings = config()
    fleet = planned(settings)
    host = hosts_of(fleet)[0]
    life = await cell.compute(settings, fleet)
    instance = cell.instance()
    await cell.destroy(host, instance, attempt=2)
    await cell.ended(instance, 2, ComputeOutcome.DESTROYED)
    await cell.spawn(host, instance, attempt=2)
    result = await cell.ended(instance, 2, ComputeOutcome.FAILED)
    assert result.code == "spawn.fenced"
    assert fleet.guest(host, instance) is None
    await life.stop()


async def test_a_destroy_ends_a_build_that_hangs(cell: Cell) -> None:
    settings = config(hang_rate=1.0)
    fleet = planned(settings)
    host = hosts_of(fleet)[0]
    life = await cell.compute(settings, fleet)
    instance = cell.instance()
    await cell.spawn(host, instance)
    await cell.destroy(host, instance)
    await cell.ended(instance, 1, ComputeOutcome.DESTROYED)
    assert [r.outcome for r in cell.results(instance)] == [ComputeOutcome.DESTROYED]
    await life.stop()


async def test_a_newer_attempt_replaces_the_older_one_on_the_same_host(cell: Cell) -> None:
    settings = config()
    fleet = planned(settings)
    host = hosts_of(fleet)[0]
    life = await cell.compute(settings, fleet)
    instance = cell.instance()
    await cell.spawn(host, instance, attempt=1)
    await cell.outcome(instance, 1)
    await cell.spawn(host, instance, attempt=3)
    await cell.ended(instance, 3, ComputeOutcome.ACTIVE)
    guest = fleet.guest(host, instance)
    assert guest is not None and guest.attempt == 3
    await cell.destroy(host, instance, attempt=1)  # the older attempt's Destroy comes late: the newer one stays
    await cell.ended(instance, 1, ComputeOutcome.DESTROYED)
    assert fleet.guest(host, instance) == guest
    await life.stop()


async def test_a_wrong_driver_reports_active_after_its_destruction(cell: Cell) -> None:
    settings = config(late_rate=1.0, late_s=LATE_S, duplicate_rate=0.0)
    fleet = planned(settings)
    host = hosts_of(fleet)[0]
    cell.clock = late = Late()
    life = await cell.compute(settings, fleet)
    instance = cell.instance()
    await cell.spawn(host, instance)
    await cell.destroy(host, instance)
    await cell.ended(instance, 1, ComputeOutcome.DESTROYED)
    late.enough.set()
    await cell.ended(instance, 1, ComputeOutcome.ACTIVE)
    assert [r.outcome for r in cell.results(instance)] == [ComputeOutcome.DESTROYED, ComputeOutcome.ACTIVE]
    assert fleet.guest(host, instance) is None
    await life.stop()


async def test_results_may_come_twice(cell: Cell) -> None:
    settings = config(duplicate_rate=1.0)
    fleet = planned(settings)
    life = await cell.compute(settings, fleet)
    instance = cell.instance()
    await cell.spawn(hosts_of(fleet)[0], instance)
    assert await cell.outcome(instance, 1) == await cell.outcome(instance, 1, count=2)
    await life.stop()


async def test_half_built_leftovers_go_with_the_destroy(cell: Cell) -> None:
    settings = config(fail_rate=1.0, leftover_rate=1.0)
    fleet = planned(settings)
    host = hosts_of(fleet)[0]
    life = await cell.compute(settings, fleet)
    instance = cell.instance()
    await cell.spawn(host, instance)
    await cell.ended(instance, 1, ComputeOutcome.FAILED)
    guest = fleet.guest(host, instance)
    assert guest is not None and not guest.complete
    await cell.destroy(host, instance)
    await cell.ended(instance, 1, ComputeOutcome.DESTROYED)
    assert list(fleet.guests()) == []
    await life.stop()


async def test_an_abort_is_final_and_a_failure_is_not(cell: Cell) -> None:
    for rates, final in (({"abort_rate": 1.0}, True), ({"fail_rate": 1.0}, False)):
        settings = config(**rates)
        fleet = planned(settings)
        life = await cell.compute(settings, fleet)
        instance = cell.instance()
        await cell.spawn(hosts_of(fleet)[0], instance)
        assert (await cell.outcome(instance, 1)).final is final
        await life.stop()


async def test_strange_commands_are_answered_or_refused(cell: Cell) -> None:
    settings = config()
    fleet = planned(settings)
    host = hosts_of(fleet)[0]
    life = await cell.compute(settings, fleet)
    foreign, lost = cell.instance(), cell.instance()
    await cell.spawn(foreign, lost)
    assert (await cell.outcome(lost, 1)).code == "host.unknown"
    await cell.destroy(foreign, lost)
    await cell.ended(lost, 1, ComputeOutcome.DESTROYED)
    elsewhere = cell.instance()
    command = spawn(host, elsewhere)
    await cell.bus.publish(
        type(command)(spec=command.spec, attempt=1, host_uuid=host, service=SERVICE, allocations={foreign: {"VCPU": 1}})
    )
    assert (await cell.outcome(elsewhere, 1)).code == "allocation.elsewhere"
    assert await cell.bus.transport.depth(DEAD_LETTERS) == 0
    await life.stop()


async def test_start_publishes_hosts_inventory_and_heartbeats(cell: Cell) -> None:
    settings = config(hosts=10)
    fleet = planned(settings)
    life = await cell.compute(settings, fleet)
    await cell.until(lambda: cell.announced() and len(cell.inventory()) >= 10 and len(cell.heartbeats()) >= 2)
    page = cell.announced()[0]
    assert page.complete and len(page.hosts) == 10 and page.cell == CELL and page.service == SERVICE
    assert [host.uuid for host in page.hosts] == hosts_of(fleet)
    trees = cell.inventory()
    assert {update.root_uuid for update in trees} == set(hosts_of(fleet))
    assert {len(update.providers) for update in trees} == {1, 3}  # half of them have two GPUs
    child = next(update for update in trees if len(update.providers) == 3).providers[1]
    assert child.parent_uuid is not None and child.inventories["VGPU"].total == 8
    assert len({update.version for update in trees}) == 10 and all(u.source == f"compute-{SERVICE}" for u in trees)
    beats = cell.heartbeats()
    assert [beat.sequence for beat in beats] == sorted({beat.sequence for beat in beats})
    await life.stop()
    await cell.until(lambda: cell.heartbeats()[-1].stopping)


async def test_more_hosts_than_a_page_holds_are_announced_as_one_report(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter, "HOSTS_PER_PAGE", 4)
    settings = config(hosts=10)
    life = await cell.compute(settings, planned(settings))
    await cell.until(lambda: [page for page in cell.announced() if page.complete])
    pages = cell.announced()[:3]
    assert [len(page.hosts) for page in pages] == [4, 4, 2]
    assert [(page.pages, page.complete) for page in pages] == [(3, False), (3, False), (3, True)]
    assert {page.first_sequence for page in pages} == {pages[0].sequence}
    await life.stop()


async def test_a_request_for_a_report_publishes_everything_again_with_what_runs(cell: Cell) -> None:
    settings = config()
    fleet = planned(settings)
    host = hosts_of(fleet)[1]
    life = await cell.compute(settings, fleet)
    await cell.until(cell.announced)
    instance = cell.instance()
    await cell.spawn(host, instance)
    await cell.outcome(instance, 1)
    await cell.ask()
    page = (await cell.until(lambda: [p for p in cell.announced()[1:] if p.complete]))[0]
    running = {report.uuid: report.running for report in page.hosts}
    assert [(r.instance_uuid, r.attempt) for r in running[host] or ()] == [(instance, 1)]
    assert page.sequence > cell.announced()[0].sequence
    await life.stop()


async def test_a_disabled_or_resized_host_is_announced_at_once_with_higher_versions(cell: Cell) -> None:
    settings = config()
    fleet = planned(settings)
    host = hosts_of(fleet)[0]
    life = await cell.compute(settings, fleet)
    await cell.until(lambda: cell.announced() and len(cell.inventory()) >= 4)
    before = max(update.version for update in cell.inventory())
    fleet.disable(host, "a fan is loud")
    page = (await cell.until(lambda: cell.announced()[1:]))[0]
    assert [(h.uuid, h.enabled, h.disabled_reason) for h in page.hosts] == [(host, False, "a fan is loud")]
    assert (page.complete, page.first_sequence) == (False, 0), "it is no report of all hosts"
    update = (await cell.until(lambda: cell.inventory()[4:]))[0]
    assert update.root_uuid == host and update.version > before
    assert DISABLED_TRAIT in update.providers[0].traits
    fleet.enable(host)
    fleet.resize(host, HostSize(vcpus=2))
    healed = await cell.until(lambda: [u for u in cell.inventory() if u.providers[0].inventories["VCPU"].total == 2])
    assert DISABLED_TRAIT not in healed[0].providers[0].traits
    await life.stop()


async def test_consecutive_failures_are_announced_and_end_with_a_success(cell: Cell) -> None:
    settings = config(fail_rate=0.5, abort_rate=0.0)
    fleet = planned(settings)
    host = hosts_of(fleet)[0]
    life = await cell.compute(settings, fleet)
    expected = 0
    for _ in range(12):
        instance = cell.instance()
        await cell.spawn(host, instance)
        result = await cell.outcome(instance, 1)
        expected = 0 if result.outcome is ComputeOutcome.ACTIVE else expected + 1
        assert fleet.records.failed_builds(host) == expected
    await cell.until(
        lambda: (
            [p for p in cell.announced() for h in p.hosts if h.uuid == host][-1:]
            and [h.failed_builds for p in cell.announced() for h in p.hosts if h.uuid == host][-1] == expected
        )
    )
    await life.stop()


async def test_the_same_fleet_survives_a_killed_service(cell: Cell) -> None:
    settings = config()
    fleet = planned(settings)
    host = hosts_of(fleet)[0]
    first = await cell.compute(settings, fleet)
    runs, fenced = cell.instance(), cell.instance()
    await cell.spawn(host, runs)
    await cell.outcome(runs, 1)
    await cell.destroy(host, fenced, attempt=4)
    await cell.ended(fenced, 4, ComputeOutcome.DESTROYED)
    epoch, versions = fleet.records.epoch, fleet.records.version
    await first.kill()
    waiting = cell.instance()
    await cell.spawn(host, waiting)  # while no service is there
    second = await cell.compute(settings, fleet)
    assert (await cell.ended(waiting, 1, ComputeOutcome.ACTIVE)).host_uuid == host
    assert fleet.records.epoch > epoch
    page = await cell.until(
        lambda: [h for p in cell.announced() if p.epoch > epoch for h in p.hosts if h.uuid == host and h.running]
    )
    assert (runs, 1) in [(r.instance_uuid, r.attempt) for r in page[0].running or ()]
    await cell.until(lambda: [u for u in cell.inventory() if u.version > versions])
    await cell.spawn(host, fenced, attempt=4)
    assert (await cell.ended(fenced, 4, ComputeOutcome.FAILED)).code == "spawn.fenced"
    await cell.destroy(host, runs)
    await cell.ended(runs, 1, ComputeOutcome.DESTROYED)
    await second.stop()


async def test_an_accepted_build_is_finished_by_the_next_life(cell: Cell) -> None:
    slow, quick = config(delay_min_s=3600.0, delay_max_s=3600.0), config()
    fleet = planned(slow)
    host = hosts_of(fleet)[0]
    first = await cell.compute(slow, fleet)
    instance = cell.instance()
    await cell.spawn(host, instance)
    await settled(lambda: fleet.records.accepted == 1)
    await first.kill()
    assert cell.results(instance) == []
    second = await cell.compute(quick, fleet)
    assert (await cell.outcome(instance, 1)).outcome is ComputeOutcome.ACTIVE
    await second.stop()


async def test_a_planned_death_happens_once(cell: Cell) -> None:
    settings = config(die_after=3)
    fleet = planned(settings)
    host = hosts_of(fleet)[0]
    first = await cell.compute(settings, fleet)
    instances = [cell.instance() for _ in range(6)]
    for instance in instances:
        await cell.spawn(host, instance)
    with pytest.raises(ServiceDied):
        await first.task
    second = await cell.compute(settings, fleet)
    for instance in instances:
        assert (await cell.outcome(instance, 1)).outcome is ComputeOutcome.ACTIVE
    assert sorted(guest.instance_uuid for _, guest in fleet.guests()) == sorted(instances)
    await second.stop()


async def test_a_planned_death_is_remembered_by_the_next_process(cell: Cell, tmp_path: Path) -> None:
    settings = ComputeConfig(hosts=1, state_dir=str(tmp_path), faults=Faults(die_after=2))
    first = await cell.compute(settings, planned(settings))
    host = hosts_of(planned(settings))[0]
    instances = [cell.instance() for _ in range(6)]
    for instance in instances[:2]:
        await cell.spawn(host, instance)
    with pytest.raises(ServiceDied):
        await first.task
    second = await cell.compute(settings, planned(settings))  # counts from nought again, as another process would
    for instance in instances[2:]:
        await cell.spawn(host, instance)
    for instance in instances:
        assert (await cell.outcome(instance, 1)).outcome is ComputeOutcome.ACTIVE
    await second.stop()


async def test_a_vanished_machine_and_an_unknown_one_are_reported_as_they_are(cell: Cell) -> None:
    settings = config()
    fleet = planned(settings)
    host, other = hosts_of(fleet)[:2]
    life = await cell.compute(settings, fleet)
    gone, stray = cell.instance(), cell.instance()
    await cell.spawn(host, gone)
    await cell.outcome(gone, 1)
    fleet.lose(host)
    fleet.put(other, Guest(stray, 5, {}, deployment=DEPLOYMENT))
    foreign = cell.instance()
    fleet.put(other, Guest(foreign, 1, {}))
    await cell.ask()
    page = (await cell.until(lambda: [p for p in cell.announced() if any(h.running for h in p.hosts)]))[0]
    running = {h.uuid: [(r.instance_uuid, r.attempt) for r in h.running or ()] for h in page.hosts}
    assert running[host] == [] and running[other] == [(stray, 5), (foreign, 1)]
    marks = {r.instance_uuid: r.deployment for h in page.hosts for r in h.running or ()}
    assert marks == {stray: DEPLOYMENT, foreign: None}
    await cell.spawn(host, gone)  # a late copy is not answered `active` for what is lost
    assert (await cell.outcome(gone, 1, count=2)).code == "instance.lost"
    await cell.destroy(other, stray, attempt=5)
    await cell.ended(stray, 5, ComputeOutcome.DESTROYED)
    assert fleet.guest(other, stray) is None
    await cell.destroy(other, foreign, attempt=5)
    assert (await cell.ended(foreign, 5, ComputeOutcome.FAILED)).code == "destroy.not_ours"
    await cell.spawn(other, foreign, attempt=6)  # nor is it built over
    assert (await cell.ended(foreign, 6, ComputeOutcome.FAILED)).code == "host.taken"
    assert fleet.guest(other, foreign) is not None
    await life.stop()


async def test_measurements_are_published_when_they_are_wanted(cell: Cell) -> None:
    settings = msgspec.structs.replace(config(1200), metrics_interval_s=0.05)
    fleet = planned(settings)
    busy, idle = list(fleet.hosts)[:2]
    fleet.put(busy.plan.uuid, Guest(cell.instance(), 1, {busy.plan.uuid: {"VCPU": 128}}, deployment=DEPLOYMENT))
    await cell.compute(settings, fleet)

    def readings() -> dict[str, HostReading]:
        received = [message for message in cell.received if isinstance(message, HostMetrics)]
        assert all(message.source == f"compute-{SERVICE}" and len(message.readings) <= 1000 for message in received)
        return {one.host_uuid: one for message in received for one in message.readings}

    await cell.until(lambda: len(readings()) == 1200)
    values = [readings()[host.plan.uuid].values for host in (busy, idle)]
    assert [one["temperature.celsius"] for one in values] == [47.0, 24.0]
    assert [one["power.watts"] for one in values] == [255.0, 110.0]


async def test_nothing_is_measured_by_default(cell: Cell) -> None:
    await cell.compute(config(), planned(config()))
    await cell.until(cell.heartbeats)
    await cell.until(lambda: len(cell.heartbeats()) >= 3)
    assert not any(isinstance(message, HostMetrics) for message in cell.received)
