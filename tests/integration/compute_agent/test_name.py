"""One name, one process; hosts that placement has as another service's; and a real broker that goes away."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from msgspec import convert
from msgspec.structs import replace
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from berth.config.settings import ComputeSettings
from berth.up.embedded.rabbitmq import RabbitMQ
from bus.clock import SystemClock
from bus.contracts.base import Word
from bus.contracts.cell import ComputeOutcome, Heartbeat, HostConflict, HostReport, HostsReleased, QueueBarrier
from bus.contracts.placement import InventoryConflict, InventoryUpdate
from compute_agent.config import default_service
from compute_agent.driver import DriverUnavailable
from compute_agent.hosts import startup_gate as offering
from compute_agent.hosts.host_conflicts import HostConflicts
from compute_agent.hosts.pending_reports import PendingHostReports
from compute_agent.hosts.service_name import ServiceNameInUse
from compute_agent.records.attempt import AttemptPhase
from compute_sim.config import SimulatedConfig
from compute_sim.driver import SimulatedDriver
from compute_sim.faults import Faults
from compute_sim.fleet import Fleet
from tests.integration.compute_agent.harness import CELL, SERVICE, Cell, Life, cell_on, planned, spawn
from tests.integration.compute_agent.test_service import config, hosts_of
from tests.integration.compute_agent.victim import config as killed_config
from tests.kit.virtual_time import on_virtual_time
from tests.kit.waiting import PATIENCE_S, until

# --- One name, one process: a second of a name, a successor of a killed one, and what it offers.


# --- a compute service's name belongs to one process: the second of a name touches nothing and ends, with a sentence
SETTINGS = ComputeSettings(simulated=SimulatedConfig(hosts=2), heartbeat_interval_s=0.02, name_wait_s=0.1)
PATIENT = replace(SETTINGS, name_wait_s=PATIENCE_S)


async def ended(life: Life) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await life.task


async def beat(cell: Cell, epoch: int, sequence: int, *, service: str = SERVICE, stopping: bool = False) -> None:
    heartbeat = Heartbeat(service=service, cell=CELL, epoch=epoch, sequence=sequence, stopping=stopping)
    await cell.bus.publish(heartbeat)


async def test_two_services_of_one_name_do_not_run_side_by_side(cell: Cell) -> None:
    """40 hosts were announced as active, 10 machines ran without an allocation, and no log had a line of it."""
    first = await cell.compute(SETTINGS, planned(SETTINGS))
    epochs = {heartbeat.epoch for heartbeat in await until(cell.heartbeats)}
    fleet = planned(SETTINGS)
    with pytest.raises(ServiceNameInUse, match=r"another process runs the compute service 'c1-a' of c1 \(for 0\.1 s\)"):
        await cell.compute(SETTINGS, fleet)
    assert fleet.records.epoch == 0, "the second one has not begun: its machines and memory were not looked at"
    count = len(cell.heartbeats())
    await until(lambda: len(cell.heartbeats()) > count)
    assert {heartbeat.epoch for heartbeat in cell.heartbeats()} == epochs
    assert not first.task.done()


async def test_a_service_waits_for_a_former_one_of_its_name_to_go(cell: Cell) -> None:
    first = await cell.compute(SETTINGS, planned(SETTINGS))
    starting = asyncio.create_task(cell.compute(PATIENT, planned(SETTINGS)))
    await asyncio.sleep(0)
    await first.kill()
    async with asyncio.timeout(PATIENCE_S):
        await starting


async def test_a_service_whose_connection_was_lost_gets_its_name_and_commands_back(cell: Cell) -> None:
    fleet = planned(SETTINGS)
    life = await cell.compute(SETTINGS, fleet)
    cell.broker.drop_connections()
    await until(lambda: life.service.not_ready() == [])
    instance = cell.instance()
    await cell.spawn(next(iter(fleet.hosts)).plan.uuid, instance)
    await cell.outcome(instance, 1)


async def test_a_service_whose_name_was_taken_while_its_connection_was_lost_ends(cell: Cell) -> None:
    life = await cell.compute(SETTINGS, planned(SETTINGS))
    (mine,) = (one for one in cell.broker.transports if one.name == CELL and one is not cell.bus.transport)
    mine.lose()
    second = await cell.compute(SETTINGS, planned(SETTINGS))
    mine.reconnect_soon()
    with pytest.raises(ServiceNameInUse, match="since this one's connection to the bus was lost"):
        await ended(life)
    assert not second.task.done()


async def test_a_service_that_receives_its_name_from_one_started_later_ends(cell: Cell) -> None:
    """Where a broker that was split gave the name to two."""
    fleet = planned(PATIENT)
    life = await cell.compute(PATIENT, fleet)
    later = fleet.records.epoch + 1
    await beat(cell, later, 7)
    await beat(cell, later, 8)
    with pytest.raises(ServiceNameInUse, match=f"its heartbeats have epoch {later}, this one {later - 1}"):
        await ended(life)


async def test_a_service_that_keeps_hearing_its_name_from_one_started_earlier_ends(cell: Cell) -> None:
    fleet = planned(SETTINGS)
    life = await cell.compute(SETTINGS, fleet)
    for sequence in range(1, 1_000_000):
        if life.task.done():
            break
        await beat(cell, fleet.records.epoch - 1, sequence)
        await asyncio.sleep(SETTINGS.heartbeat_interval_s)
    with pytest.raises(ServiceNameInUse):
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
    await until(lambda: len(cell.heartbeats()) > count + 3)
    assert not life.task.done()


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


# --- a service that was away destroys what it is ordered to destroy before it offers the hosts, each for itself
OFFERING_SETTINGS = config(2)


class Gated(SimulatedDriver):
    """Destroys nothing before the gate opens. unavailable: a destruction fails so often before that."""

    def __init__(self, fleet: Fleet, cell: Cell, *, unavailable: bool = False) -> None:
        super().__init__(fleet, OFFERING_SETTINGS.simulated.faults, seed=1, clock=cell.clock, nested=False)
        self.gate = asyncio.Event()
        self.begun = asyncio.Event()
        self._unavailable = unavailable

    async def destroy(self, host_uuid: str, instance_uuid: str, attempt: int, database_id: str | None) -> None:
        self.begun.set()
        if self._unavailable and not self.gate.is_set():
            raise DriverUnavailable("no answer")
        await self.gate.wait()
        await super().destroy(host_uuid, instance_uuid, attempt, database_id)


def newest(cell: Cell, uuid: str) -> HostReport | None:
    reports = [host for report in cell.announced() for host in report.hosts if host.uuid == uuid]
    return reports[-1] if reports else None


def is_offered(cell: Cell, uuid: str) -> bool:
    report = newest(cell, uuid)
    has_inventory = any(one.root_uuid == uuid for one in cell.inventory())
    return report is not None and report.enabled and has_inventory


async def returned(cell: Cell, fleet: Fleet, *, unavailable: bool = False) -> tuple[Gated, str]:
    """A service with a machine on its first host dies, the machine is to be destroyed, and the service comes back."""
    first = hosts_of(fleet)[0]
    life = await cell.compute(OFFERING_SETTINGS, fleet)
    instance = await cell.built(first)
    await life.kill()
    await cell.destroy(first, instance)
    cell.received.clear()
    driver = Gated(fleet, cell, unavailable=unavailable)
    await cell.compute(replace(OFFERING_SETTINGS, destroy_tries=1), fleet, driver=driver)
    return driver, instance


@pytest.mark.parametrize("unavailable", [False, True])
async def test_a_returning_service_offers_a_host_when_it_has_destroyed_what_is_lost_there(
    cell: Cell, unavailable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its driver did not answer for so long that the destruction was given up and is taken up later."""
    monkeypatch.setattr("compute_agent.attempts.destroys.DESTROY_RETRY_S", 0.05)
    fleet = planned(OFFERING_SETTINGS)
    first, second = hosts_of(fleet)
    driver, instance = await returned(cell, fleet, unavailable=unavailable)
    await until(lambda: is_offered(cell, second))
    await driver.begun.wait()
    report = newest(cell, first)
    assert report is not None and (report.enabled, report.disabled_reason) == (False, offering.DESTROYING)
    assert [one.instance_uuid for one in report.running or ()] == [instance]
    assert first not in {one.root_uuid for one in cell.inventory()}
    driver.gate.set()
    await cell.ended(instance, 1, ComputeOutcome.DESTROYED)
    await until(lambda: is_offered(cell, first))
    assert fleet.machine(first, instance) is None


async def test_nothing_is_announced_or_begun_before_all_that_waited_in_the_queue_has_been_taken(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The content of the queue is known only when the service's own marker, behind all of it, has come."""
    markers: list[QueueBarrier] = []
    on_barrier = offering.StartupGate.on_barrier
    monkeypatch.setattr(offering.StartupGate, "on_barrier", lambda _self, marker, _owed: markers.append(marker))
    fleet = planned(OFFERING_SETTINGS)
    life, instance = await cell.compute(OFFERING_SETTINGS, fleet), cell.instance()
    doomed = cell.instance()
    await cell.spawn(hosts_of(fleet)[0], instance)
    await cell.spawn(hosts_of(fleet)[0], doomed)
    await until(lambda: fleet.records.accepted == 2)
    await until(lambda: len(cell.heartbeats()) > 2)
    assert markers and cell.announced() == [] and cell.inventory() == []
    assert list(fleet.machines()) == [] and cell.results() == []  # the order that ends a build may be behind it
    await cell.destroy(hosts_of(fleet)[0], doomed)
    await cell.ended(doomed, 1, ComputeOutcome.DESTROYED)
    (made,) = [one.__self__ for one in callbacks(life) if isinstance(one.__self__, offering.StartupGate)]
    on_barrier(made, replace(markers[0], epoch=markers[0].epoch - 1), ())  # of a former life
    assert not made.opened.is_set()
    on_barrier(made, markers[0], ())
    await until(lambda: all(is_offered(cell, uuid) for uuid in hosts_of(fleet)))
    await cell.ended(instance, 1, ComputeOutcome.ACTIVE)
    assert {one.outcome for one in cell.results(doomed)} == {ComputeOutcome.DESTROYED}


def callbacks(life: Life) -> Sequence[object]:
    """The side tasks of a service."""
    return [body for _, body in life.service._task_makers if hasattr(body, "__self__")]


# --- a real process, killed with SIGKILL in the middle of its work, and its successor
ROOT = Path(__file__).parents[3]
ANSWERS_BEFORE_DEATH = 300


def kill_one(state_dir: Path) -> list[list[str]]:
    """Start a victim, let it work, kill it; what it printed."""
    lines: list[str] = []
    victim = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.compute_agent.victim", str(state_dir)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert victim.stdout is not None
    with victim:
        answers = 0
        for line in victim.stdout:
            lines.append(line)
            answers += line.startswith("reported")
            if answers == ANSWERS_BEFORE_DEATH:
                victim.kill()
    assert victim.returncode == -9
    return [line.split() for line in lines if line.endswith("\n")]


async def test_what_was_accepted_outlives_the_process(cell: Cell, tmp_path: Path) -> None:
    reported: dict[tuple[str, str], str] = {}
    took: dict[tuple[str, str], str] = {}
    for what, host, instance, *rest in kill_one(tmp_path):
        if what == "took":
            took[host, instance] = rest[0]
        else:
            reported[host, instance] = rest[1]
    settings = killed_config(str(tmp_path))
    fleet = planned(settings)
    fleet.records.open()
    fleet.open()
    before = dict(fleet.records.entries())
    machines = {(host, machine.instance_uuid) for host, machine in fleet.machines()}
    assert set(took) <= set(before), "accepted, and forgotten"
    assert any(entry.phase is AttemptPhase.BUILDING for entry in before.values()), "killed too late to show anything"
    for key, outcome in reported.items():
        if outcome == "active" and took[key] == "spawn":
            assert key in machines, "reported as running, and does not"
        if outcome == "destroyed":
            assert key not in machines, "reported as gone, and is there"
    fleet.close()
    fleet.records.close()

    life = await cell.compute(settings, planned(settings))
    for (host, instance), command in took.items():
        if command == "destroy":
            await cell.ended(instance, 1, ComputeOutcome.DESTROYED)
            await cell.spawn(host, instance)  # a late copy
            assert (await cell.ended(instance, 1, ComputeOutcome.FAILED)).code == "spawn.attempt_ended"
    # Each build ends as it would have; those that hang do so again, until they are destroyed.
    for (host, instance), command in took.items():
        if command == "spawn":
            await cell.bus.publish(spawn(host, instance))
            await cell.destroy(host, instance)
            await cell.ended(instance, 1, ComputeOutcome.DESTROYED)
    await life.stop()
    after = planned(settings)
    after.records.open()
    after.open()
    assert list(after.machines()) == []
    assert {entry.phase for _, entry in after.records.entries()} == {AttemptPhase.GONE}
    after.close()
    after.records.close()


# --- A compute service's handling of hosts that placement has as another service's, on both transports.


HOST = "10000000-0000-4000-8000-000000000001"
CONFIG = ComputeSettings(simulated=SimulatedConfig(hosts=2), heartbeat_interval_s=0.05, report_interval_s=3600.0)


@pytest.fixture(params=["memory", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)])
async def either(request: pytest.FixtureRequest) -> AsyncIterator[Cell]:
    made = Cell() if request.param == "memory" else cell_on(*request.getfixturevalue("amqp"))
    await made.open()
    yield made
    await made.close()


def reports_of(either: Cell, host: str) -> list[InventoryUpdate]:
    return [update for update in either.inventory() if update.root_uuid == host]


async def test_it_builds_nothing_on_a_host_of_another_service_until_it_takes_it_over(either: Cell) -> None:
    fleet = planned(CONFIG)
    contested, own = (host.plan.uuid for host in fleet.hosts)
    await either.compute(CONFIG, fleet)
    await until(lambda: either.announced() and reports_of(either, contested))
    with capture_logs() as logs:
        for source in ("compute-c1-b", "compute-c1-a"):
            taken = InventoryConflict(reporter=source, root_uuid=contested, owner="compute-other")
            await either.bus.publish(taken)
        await until(lambda: newest(either, contested).owner == "other")
    errors = [line for line in logs if line.get("code") == "host.other_service"]
    assert [(line["log_level"], line["host"], line["owner"]) for line in errors] == [("error", contested, "other")]
    assert newest(either, own).owner is None
    assert REGISTRY.get_sample_value("berth_compute_hosts_refused", {"service": "c1-a"}) == 1
    refused, built = either.instance(), either.instance()
    await either.spawn(contested, refused)
    await either.spawn(own, built)
    result = await either.outcome(refused, 1)
    assert (result.outcome, result.code) == (ComputeOutcome.FAILED, "host.other_service")
    assert (await either.outcome(built, 1)).outcome is ComputeOutcome.ACTIVE
    before = len(reports_of(either, contested))
    await either.bus.publish(HostsReleased(service="c1-a", owner="another", hosts=(contested,)))
    await either.bus.publish(HostsReleased(service="c1-a", owner="other", hosts=(contested, own)))
    await until(lambda: len(reports_of(either, contested)) > before)
    await until(lambda: newest(either, contested).owner is None)
    assert [update.former_reporter for update in reports_of(either, contested)[before:]] == ["compute-other"]
    assert REGISTRY.get_sample_value("berth_compute_hosts_refused", {"service": "c1-a"}) == 0
    taken_over = either.instance()
    await either.spawn(contested, taken_over)
    assert (await either.outcome(taken_over, 1)).outcome is ComputeOutcome.ACTIVE
    fleet.disable(contested)
    await until(lambda: len(reports_of(either, contested)) > before + 1)
    assert reports_of(either, contested)[-1].former_reporter is None, "once for each release"


async def test_a_late_refusal_does_not_undo_a_release() -> None:
    """Seed 16 of same-hosts: each refusal of a report from before a release ended that release, for ever."""
    changes = PendingHostReports(SystemClock())
    hosts = HostConflicts(service="s2", changes=changes, clock=SystemClock())
    taken = InventoryConflict(reporter="compute-s2", root_uuid=HOST, owner="compute-s1")
    hosts.on_inventory_conflict(taken)
    hosts.on_released(HostsReleased(service="s2", owner="s1", hosts=(HOST,)))
    hosts.on_inventory_conflict(taken)
    assert (hosts.owner_of(HOST), hosts.pop_former_reporter(HOST)) == (None, "compute-s1")
    hosts.on_inventory_conflict(taken)
    assert (hosts.owner_of(HOST), hosts.pop_former_reporter(HOST)) == ("s1", None), "its report was refused: ask again"


@on_virtual_time
async def test_a_host_whose_name_is_taken_is_reported_again_until_the_name_is_free() -> None:
    """It stayed out of placement when the name was free, until an operator replayed dead letters."""
    changes = PendingHostReports(SystemClock())
    changes.inventory.take()  # that of the start
    hosts = HostConflicts(service="s2", changes=changes, clock=SystemClock())
    telling = asyncio.create_task(hosts.report_refused())
    for _ in range(2):
        hosts.on_inventory_conflict(
            InventoryConflict(reporter="compute-s2", root_uuid=HOST, code="provider.name_taken", reason="h")
        )
        await changes.inventory.wait(60.0)
        assert changes.inventory.take() == [HOST]
    assert hosts.owner_of(HOST) is None
    await changes.inventory.wait(60.0)
    assert changes.inventory.take() is None, "not refused any more: with all others, in their interval"
    telling.cancel()


async def test_the_owner_logs_who_was_refused_and_announces_its_host_once_more(either: Cell) -> None:
    fleet = planned(CONFIG)
    (host, _) = (one.plan.uuid for one in fleet.hosts)
    await either.compute(CONFIG, fleet)
    await until(lambda: either.announced() and reports_of(either, host))
    count = len(either.announced())
    with capture_logs() as logs:
        for _ in range(2):
            await either.bus.publish(HostConflict(service="c1-a", other="c1-b", hosts=(host,)))
        await until(lambda: len(either.announced()) > count)
    assert newest(either, host).owner is None
    errors = [(line["code"], line["other"]) for line in logs if line["event"] == "host.conflict"]
    assert errors == [("host.other_service", "c1-b")], "not with each message"


# --- A compute service on a real broker, which goes away in the middle.


ON_BROKER = ComputeSettings(simulated=SimulatedConfig(hosts=20), heartbeat_interval_s=0.2)


async def fleet_on(cell: Cell, config: ComputeSettings) -> tuple[Fleet, Life, list[str]]:
    """A service whose hosts are known, and its hosts."""
    await cell.open()
    fleet = planned(config)
    life = await cell.compute(config, fleet)
    await until(lambda: cell.announced() and len(cell.inventory()) >= 20)
    return fleet, life, [host.plan.uuid for host in fleet.hosts]


@pytest.mark.rabbitmq
async def test_a_thousand_builds_a_kill_and_a_restart(amqp: tuple[str, str]) -> None:
    cell = cell_on(*amqp)
    fleet, life, hosts = await fleet_on(cell, ON_BROKER)
    builds = [(hosts[n % 20], cell.instance()) for n in range(1000)]
    await asyncio.gather(*(cell.spawn(host, instance) for host, instance in builds[:500]))
    await life.kill()
    await asyncio.gather(*(cell.spawn(host, instance) for host, instance in builds[500:]))
    await cell.compute(ON_BROKER, fleet)
    await until(lambda: len({r.instance_uuid for r in cell.results()}) == 1000)
    assert {r.outcome for r in cell.results()} == {ComputeOutcome.ACTIVE}
    assert sorted((host, machine.instance_uuid) for host, machine in fleet.machines()) == sorted(builds)
    await asyncio.gather(*(cell.destroy(host, instance) for host, instance in builds))
    await until(lambda: len({r.instance_uuid for r in cell.results() if r.outcome is ComputeOutcome.DESTROYED}) == 1000)
    assert list(fleet.machines()) == []
    await cell.close()


@pytest.mark.rabbitmq
async def test_results_of_builds_that_end_while_the_broker_is_down_are_published_when_it_is_back(
    own_broker: RabbitMQ,
) -> None:
    config = ComputeSettings(
        simulated=SimulatedConfig(hosts=20, faults=Faults(delay_min_s=1.0, delay_max_s=3.0)), heartbeat_interval_s=0.2
    )
    cell = cell_on(own_broker.url())
    fleet, _, hosts = await fleet_on(cell, config)
    builds = [(hosts[n % 20], cell.instance()) for n in range(50)]
    await asyncio.gather(*(cell.spawn(host, instance) for host, instance in builds))
    await until(lambda: fleet.records.accepted == 50)  # heartbeats make it look again
    # Shut down, not killed: a killed broker of this version may forget a queue as young as these.
    await asyncio.to_thread(own_broker.shut_down)
    announced = len(cell.inventory())
    await asyncio.to_thread(own_broker.start)
    await until(lambda: len({r.instance_uuid for r in cell.results()}) == 50)
    assert {r.outcome for r in cell.results()} == {ComputeOutcome.ACTIVE}
    await until(lambda: len(cell.inventory()) >= announced + 20)  # published again after the reconnection
    assert len(list(fleet.machines())) == 50
    await cell.close()
