"""The agent over a driver that is slow, breaks, and checks that it is used as the port requires."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.contracts.cell import ComputeOutcome, ComputeResult, Destroy, InstanceSpec, Spawn
from compute_agent.attempts import destroys
from compute_agent.attempts.agent import Agent, Limits
from compute_agent.attempts.destroys import Destroys
from compute_agent.attempts.jobs import Chain, Jobs
from compute_agent.attempts.results import Results
from compute_agent.driver import (
    Build,
    BuildAbort,
    ChangeFault,
    DriverFault,
    DriverHost,
    DriverUnavailable,
    HandOverRefused,
    Machine,
    MachineProtected,
    NotOwned,
    Reschedule,
    Tree,
)
from compute_agent.driver_guard import isolate_driver
from compute_agent.hosts.scan import MachineScanner
from compute_agent.records.attempt import AttemptPhase, HostAttempt
from compute_agent.records.records import Key, Records
from tests.kit.waiting import until

# --- the agent over a driver that is slow, breaks, and checks that it is used as the port requires


HOSTS = tuple(f"00000000-0000-4000-8000-00000000000{n}" for n in range(2))
INSTANCES = tuple(f"00000000-0000-4000-9000-00000000000{n}" for n in range(3))
LIMITS = Limits(per_host=10, builds=100, accepted=100, build_s=30.0)
DESTROY_CALLS = 3


class Instant(SystemClock):
    """Waiting takes turns of the loop, not time."""

    async def sleep(self, seconds: float) -> None:
        for _ in range(3):
            await asyncio.sleep(0)


class Scripted:
    """A driver whose calls take a number of turns of the loop and may fail."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self.machines: dict[Key, int] = {}
        self.busy: dict[Key, str] = {}
        self.building: dict[str, int] = {}
        self.most_building = 0
        self.built: list[tuple[Key, int]] = []
        self.failures = 0  # calls of destroy that fail
        self.protected = False
        self.destroys = 0  # calls of destroy
        self.gate: asyncio.Event | None = None
        self.bug: Exception | None = None
        self.destroy_bug: Exception | None = None
        self.misused: list[str] = []
        self._rng = rng

    def must(self, holds: bool, else_: str) -> None:
        """Write down a breach of the port's promises; raising would look like a driver's own bug, and be survived."""
        if not holds:
            self.misused.append(else_)

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def hosts(self) -> Sequence[DriverHost]:
        return [DriverHost(uuid=uuid, name=uuid[-4:]) for uuid in HOSTS]

    async def inventory(self, hosts: Sequence[str] | None = None) -> Sequence[Tree]:
        return ()

    async def list(self, hosts: Sequence[str] | None = None) -> Mapping[str, Sequence[Machine]]:
        found: dict[str, list[Machine]] = {host: [] for host in HOSTS}
        for (host, instance), attempt in self.machines.items():
            found[host].append(Machine(host, instance, attempt))
        return found

    def on_change(self, callback: Callable[[Sequence[str]], None]) -> None: ...

    async def _turns(self) -> None:
        for _ in range(self._rng.randrange(6) if self._rng else 1):
            await asyncio.sleep(0)

    async def spawn(self, build: Build) -> None:
        key = (build.host_uuid, build.spec.instance_uuid)
        self.must(key not in self.busy, f"{self.busy.get(key)} and spawn at once")
        self.must(key not in self.machines, "built over an older attempt")
        self.busy[key] = "spawn"
        self.building[key[0]] = self.building.get(key[0], 0) + 1
        self.most_building = max(self.most_building, self.building[key[0]])
        try:
            await self._turns()
            if self.gate is not None:
                await self.gate.wait()
            if self.bug is not None:
                raise self.bug
            if self._rng and self._rng.random() < 0.3:
                raise Reschedule("no.luck")
            self.machines[key] = build.attempt
            self.built.append((key, build.attempt))
            await self._turns()
        finally:
            self.busy.pop(key, None)
            self.building[key[0]] -= 1

    async def destroy(self, host_uuid: str, instance_uuid: str, attempt: int, database_id: str | None) -> None:
        key = (host_uuid, instance_uuid)
        self.must(key not in self.busy, f"{self.busy.get(key)} and destroy at once")
        self.busy[key] = "destroy"
        self.destroys += 1
        try:
            await self._turns()
            if self.destroy_bug is not None:
                raise self.destroy_bug
            if self.protected:
                raise MachineProtected("an operator keeps it")
            if self.failures or (self._rng and self._rng.random() < 0.1):
                self.failures = max(0, self.failures - 1)
                raise DriverUnavailable("unavailable")
            if self.machines.get(key, attempt + 1) <= attempt:
                del self.machines[key]
        finally:
            self.busy.pop(key, None)


class Service:
    """An agent with its memory and the results that it sent."""

    def __init__(self, driver: Scripted, records: Records | None = None, limits: Limits = LIMITS) -> None:
        self.results: list[ComputeResult] = []
        self.records = records or Records()
        self.driver = driver
        called = isolate_driver(driver)
        self.scanner = MachineScanner(called, self.records)
        self.jobs, clock = Jobs(), Instant()
        results = Results("s", self.results.append, clock, self.records)
        self.destroys = Destroys(
            service="s",
            driver=called,
            records=self.records,
            results=results,
            jobs=self.jobs,
            clock=clock,
            rng=random.Random(1),
            max_calls=DESTROY_CALLS,
        )
        self.agent = Agent(
            service="s",
            driver=called,
            records=self.records,
            scanner=self.scanner,
            jobs=self.jobs,
            results=results,
            destroys=self.destroys,
            send=self.results.append,
            clock=clock,
            limits=limits,
        )

    async def rest(self) -> None:
        """Until nothing is under way."""
        async with asyncio.timeout(20):
            while self.jobs.tasks:
                await asyncio.wait(self.jobs.tasks)

    async def carry_out(self, *commands: Spawn | Destroy) -> None:
        """Take the commands, and come to rest."""
        self.agent.handle(commands)
        await self.rest()


async def started(driver: Scripted, records: Records | None = None, limits: Limits = LIMITS) -> Service:
    """A service that goes on with what is on record."""
    service = Service(driver, records, limits)
    await service.agent.resume()
    return service


def spawn(number: int, attempt: int = 1, host: int = 0) -> Spawn:
    return Spawn(
        spec=InstanceSpec(instance_uuid=INSTANCES[number], project_id="p"),
        attempt=attempt,
        host_uuid=HOSTS[host],
        allocations={HOSTS[host]: {"VCPU": 1}},
        service="s",
    )


def destroy(number: int, attempt: int = 1, host: int = 0) -> Destroy:
    return Destroy(instance_uuid=INSTANCES[number], attempt=attempt, host_uuid=HOSTS[host], service="s")


COMMAND = st.builds(
    lambda build, number, attempt, host: (spawn if build else destroy)(number, attempt, host),
    st.booleans(),
    st.integers(0, 2),
    st.integers(1, 4),
    st.integers(0, 1),
)
STEP = st.one_of(st.lists(COMMAND, min_size=1, max_size=4), st.integers(1, 8), st.just("restart"))


@given(steps=st.lists(STEP, max_size=25), seed=st.integers(0, 2**16))
def test_any_order_of_commands_and_restarts_ends_in_agreement(steps: list[object], seed: int) -> None:
    with asyncio.Runner() as runner:
        runner.run(_any_order(steps, seed))


async def _any_order(steps: list[object], seed: int) -> None:
    driver = Scripted(random.Random(seed))
    service = await started(driver)
    results: list[ComputeResult] = []
    commands: list[Spawn | Destroy] = []
    for step in steps:
        if isinstance(step, int):
            for _ in range(step):
                await asyncio.sleep(0)
        elif step == "restart":
            await service.jobs.stop(0)
            results += service.results
            service = await started(driver, service.records)
        else:
            assert isinstance(step, list)
            service.agent.handle(step)
            commands += step
    await service.rest()
    while any(entry.phase is AttemptPhase.DESTROYING for _, entry in service.records.entries()):
        for key, entry in service.records.entries():  # what failed for good is asked again, as a conductor would
            if entry.phase is AttemptPhase.DESTROYING:
                service.agent.handle([destroy(INSTANCES.index(key[1]), entry.max_ended_attempt, HOSTS.index(key[0]))])
        await service.rest()
    results += service.results
    _agree(driver, service.records, commands, results)


def _agree(driver: Scripted, records: Records, commands: list[Spawn | Destroy], results: list[ComputeResult]) -> None:
    """At rest: the machines are what the records hold, no ended attempt runs, none is built twice, all are answered."""
    running = {key: entry.attempt for key, entry in records.entries() if entry.phase is AttemptPhase.RUNNING}
    assert driver.machines == running
    ended: dict[Key, int] = {}
    answered = {(r.host_uuid, r.instance_uuid, r.attempt, r.outcome) for r in results}
    for command in commands:
        if isinstance(command, Destroy):
            key = (command.host_uuid, command.instance_uuid)
            ended[key] = max(ended.get(key, 0), command.attempt)
    for key, last in ended.items():
        assert running.get(key, last + 1) > last
    for (host, instance), attempt in running.items():
        assert (host, instance, attempt, ComputeOutcome.ACTIVE) in answered
    assert not driver.busy
    assert driver.misused == []


async def test_every_destroy_is_answered_for_its_own_attempt() -> None:
    service = await started(Scripted())
    await service.carry_out(spawn(0), destroy(0, 1), destroy(0, 2), spawn(0, 3), destroy(0, 1))
    destroyed = sorted(r.attempt for r in service.results if r.outcome is ComputeOutcome.DESTROYED)
    assert set(destroyed) == {1, 2}
    assert service.driver.machines == {(HOSTS[0], INSTANCES[0]): 3}
    assert service.driver.misused == []


async def test_a_destroy_that_joins_one_of_an_older_attempt_is_answered_for_its_own() -> None:
    """It was answered when the older one was done, and its machine ran on."""
    driver = Scripted()
    service = await started(driver)
    driver.machines[HOSTS[0], INSTANCES[0]] = 2
    await service.carry_out(destroy(0, attempt=1), destroy(0, attempt=2))
    assert not driver.machines
    assert [(one.attempt, one.outcome) for one in service.results] == [
        (1, ComputeOutcome.DESTROYED),
        (2, ComputeOutcome.DESTROYED),
    ]


@pytest.mark.parametrize("ends", ["works", "hangs"])
async def test_an_older_attempt_is_destroyed_before_a_newer_one_is_built(ends: str) -> None:
    driver = Scripted()
    driver.gate = asyncio.Event()
    service = await started(driver)
    service.agent.handle([spawn(0, 1)])
    for _ in range(10):
        await asyncio.sleep(0)
    if ends == "works":
        driver.gate.set()
        await service.rest()
    service.agent.handle([spawn(0, 2)])
    driver.gate.set()
    await service.rest()
    assert driver.machines == {(HOSTS[0], INSTANCES[0]): 2} and driver.misused == []


async def test_a_host_may_be_offered_while_the_build_after_a_clearance_goes_on() -> None:
    """Seed 1795413329: a build that hung after the older attempt was destroyed kept its host from being offered."""
    driver = Scripted()
    service = Service(driver)
    settled: list[Key] = []
    service.destroys._on_done = settled.append
    await service.agent.resume()
    await service.carry_out(spawn(0, 1))
    settled.clear()
    driver.gate = asyncio.Event()
    service.agent.handle([spawn(0, 2)])
    assert service.destroys.pending() == [(HOSTS[0], INSTANCES[0])]
    await until(lambda: driver.building.get(HOSTS[0], 0) > 0)
    assert settled == [(HOSTS[0], INSTANCES[0])] and service.destroys.pending() == []
    driver.gate.set()
    await service.rest()


async def test_builds_of_one_host_are_bounded_and_do_not_hold_up_another() -> None:
    driver = Scripted()
    driver.gate = asyncio.Event()
    service = await started(driver, limits=Limits(per_host=2, builds=3, accepted=100, build_s=30))
    service.agent.handle([spawn(0), spawn(1), spawn(2), spawn(0, host=1)])
    for _ in range(10):  # turns of the loop are enough: nothing waits for time
        await asyncio.sleep(0)
    assert driver.building[HOSTS[0]] == driver.most_building == 2
    driver.gate.set()
    await service.rest()
    assert len(driver.machines) == 4 and driver.most_building == 2


async def test_too_many_accepted_builds_are_sent_elsewhere() -> None:
    driver = Scripted()
    driver.gate = asyncio.Event()
    service = await started(driver, limits=Limits(per_host=1, builds=1, accepted=2, build_s=30))
    service.agent.handle([spawn(0), spawn(1), spawn(2)])
    assert [(r.instance_uuid, r.code) for r in service.results] == [(INSTANCES[2], "service.busy")]
    driver.gate.set()
    await service.rest()
    await service.carry_out(spawn(2, attempt=1))
    assert len(driver.machines) == 3


async def test_a_drivers_bug_in_a_destruction_is_tried_again_and_ends_no_service() -> None:
    """The destruction is on record: it would have ended each later start of the service as well."""
    driver = Scripted()
    service = await started(driver)
    watching = asyncio.create_task(service.jobs.watch())
    await service.carry_out(spawn(0))
    driver.destroy_bug = ZeroDivisionError("oops")
    await service.carry_out(destroy(0))
    assert not watching.done()
    assert service.results[-1].code == "destroy.failed"
    driver.destroy_bug = None
    service.destroys.resume_owed()
    await service.rest()
    assert service.results[-1].outcome is ComputeOutcome.DESTROYED
    watching.cancel()


async def test_a_drivers_bug_costs_its_build_and_no_more() -> None:
    driver = Scripted()
    driver.bug = ZeroDivisionError("oops")
    service = await started(driver)
    await service.carry_out(spawn(0))
    driver.bug = None
    await service.carry_out(spawn(1))
    assert [(r.outcome, r.code) for r in service.results] == [
        (ComputeOutcome.FAILED, "driver.fault"),
        (ComputeOutcome.ACTIVE, ""),
    ]


async def test_a_build_that_takes_too_long_is_given_up() -> None:
    driver = Scripted()
    driver.gate = asyncio.Event()
    service = await started(driver, limits=Limits(per_host=1, builds=1, accepted=2, build_s=0.0))
    await service.carry_out(spawn(0))
    assert [r.code for r in service.results] == ["build.timeout"]


async def test_a_protected_machine_is_reported_at_once_and_destroyed_when_it_is_not_any_more() -> None:
    driver = Scripted()
    service = await started(driver)
    await service.carry_out(spawn(0))
    driver.protected = True
    await service.carry_out(destroy(0))
    assert (service.results[-1].code, driver.destroys) == ("destroy.protected", 1)
    driver.protected = False
    await service.carry_out(destroy(0))
    assert service.results[-1].outcome is ComputeOutcome.DESTROYED and not driver.machines


async def test_what_could_not_be_destroyed_is_taken_up_again_without_a_command() -> None:
    """Of an instance that has failed no conductor repeats it: what was left of it kept its node until a restart."""
    driver = Scripted()
    service = await started(driver)
    await service.carry_out(spawn(0), spawn(1))
    driver.failures = 3  # every try
    await service.carry_out(destroy(0))
    assert service.results[-1].code == "destroy.failed" and len(driver.machines) == 2
    done = asyncio.Event()
    service.agent._results._send = lambda result: done.set() if result.outcome is ComputeOutcome.DESTROYED else None
    insisting = asyncio.create_task(service.destroys.retry())
    async with asyncio.timeout(20):
        await done.wait()
    insisting.cancel()
    assert list(driver.machines) == [(HOSTS[0], INSTANCES[1])], "and nothing else"
    assert service.records.get((HOSTS[0], INSTANCES[0])) == HostAttempt(1, AttemptPhase.GONE, max_ended_attempt=1)


async def test_a_newer_attempt_is_not_taken_for_what_could_not_be_destroyed() -> None:
    driver = Scripted()
    service = await started(driver)
    driver.failures = 3
    await service.carry_out(destroy(0))
    await service.carry_out(spawn(0, 2))
    destroys_before = driver.destroys
    service.destroys.resume_owed()
    await service.rest()
    assert driver.machines == {(HOSTS[0], INSTANCES[0]): 2} and driver.destroys == destroys_before


@pytest.mark.parametrize("failures", [2, 3])
async def test_destroyed_is_published_only_when_it_is_certain(failures: int) -> None:
    driver = Scripted()
    service = await started(driver)
    await service.carry_out(spawn(0))
    driver.failures = failures  # of three tries
    await service.carry_out(destroy(0))
    last = service.results[-1]
    if failures < 3:
        assert last.outcome is ComputeOutcome.DESTROYED and not driver.machines
        return
    assert (last.outcome, last.code) == (ComputeOutcome.FAILED, "destroy.failed") and driver.machines
    again = Service(driver, service.records)  # the next start tries again without being asked
    await again.agent.resume()
    await again.rest()
    assert [r.outcome for r in again.results] == [ComputeOutcome.DESTROYED] and not driver.machines


async def test_unconfirmed_results_are_published_again_by_the_next_start() -> None:
    driver = Scripted()
    service = await started(driver)
    await service.carry_out(spawn(0), spawn(1))
    service.records.reported([r for r in service.results if r.instance_uuid == INSTANCES[0]])
    again = await started(driver, service.records)
    assert [(r.instance_uuid, r.outcome) for r in again.results] == [(INSTANCES[1], ComputeOutcome.ACTIVE)]


@pytest.mark.parametrize("command", [spawn(0, 2), destroy(0, 2)], ids=["spawn", "destroy"])
async def test_a_machine_on_record_of_another_deployment_is_neither_replaced_nor_reported_destroyed(
    command: Spawn | Destroy,
) -> None:
    service = await started(Scripted())
    mine, other = "10000000-0000-4000-8000-000000000000", "20000000-0000-4000-8000-000000000000"
    await service.carry_out(replace(spawn(0, 1), database_id=other))
    service.results.clear()
    await service.carry_out(replace(command, database_id=mine))
    assert [(one.outcome, one.attempt) for one in service.results] == [(ComputeOutcome.FAILED, 2)]
    assert service.driver.machines == {(HOSTS[0], INSTANCES[0]): 1}
    assert (service.driver.destroys, service.driver.misused) == (0, [])


# --- a Destroy of an attempt that is out of time spares what is complete: only its host knows whether it is


KEY = (HOSTS[0], INSTANCES[0])
ENDED = replace(destroy(0), keep_if_complete=True)


@pytest.mark.parametrize("recorded", [True, False], ids=["on record", "not on record"])
async def test_a_complete_machine_stays_and_is_reported_active_again(recorded: bool) -> None:
    driver = Scripted()
    service = await started(driver)
    if recorded:
        await service.carry_out(spawn(0))
    driver.machines[KEY] = 1
    service.results.clear()
    await service.carry_out(ENDED)
    assert [(one.attempt, one.outcome) for one in service.results] == [(1, ComputeOutcome.ACTIVE)]
    assert driver.machines == {KEY: 1} and not driver.destroys
    assert service.records.is_live(*KEY)


@pytest.mark.parametrize(
    "entry",
    [
        HostAttempt(1, AttemptPhase.GONE, max_ended_attempt=1, reported=True, project="p"),  # older than the machine
        HostAttempt(2, AttemptPhase.RUNNING, max_ended_attempt=1, project="p"),
        HostAttempt(
            3, AttemptPhase.FAILED, max_ended_attempt=1, reported=True, code="instance.lost", project="p"
        ),  # away for a moment
    ],
)
@pytest.mark.parametrize("there", [True, False])
async def test_a_complete_machine_stays_that_the_journal_does_not_have(entry: HostAttempt, there: bool) -> None:
    """A search finds it by its mark; the order that was to spare it destroyed it."""
    driver = Scripted()
    service = await started(driver)
    driver.machines[KEY] = 3 if there else 2
    service.records.put(KEY, entry)
    await service.carry_out(replace(ENDED, attempt=3))
    ended = ComputeOutcome.ACTIVE if there else ComputeOutcome.DESTROYED
    assert [(one.attempt, one.outcome) for one in service.results] == [(3, ended)]
    assert driver.machines == ({KEY: 3} if there else {})
    known = service.records.get(KEY)
    assert known is not None and (known.max_ended_attempt, known.phase) == (
        (1, AttemptPhase.RUNNING) if there else (3, AttemptPhase.GONE)
    )


async def test_one_that_is_being_built_is_ended() -> None:
    driver = Scripted()
    driver.gate = asyncio.Event()
    service = await started(driver)
    await service.carry_out(spawn(0), ENDED)
    assert [(one.attempt, one.outcome) for one in service.results] == [(1, ComputeOutcome.DESTROYED)]
    await service.carry_out(spawn(0))
    assert service.results[-1].code == "spawn.attempt_ended" and not driver.machines


@pytest.mark.parametrize("there", [None, 2], ids=["nothing", "a newer attempt"])
async def test_one_that_its_host_does_not_know_is_ended(there: int | None) -> None:
    driver = Scripted()
    service = await started(driver)
    if there is not None:
        driver.machines[KEY] = there
    await service.carry_out(ENDED)
    assert [(one.attempt, one.outcome) for one in service.results] == [(1, ComputeOutcome.DESTROYED)]
    assert driver.machines == ({} if there is None else {KEY: there})


async def test_what_is_commanded_while_its_host_is_looked_at_counts() -> None:
    driver = Scripted()
    service = await started(driver)
    await service.carry_out(ENDED, spawn(0))
    # Unknown when it was to end, and begun since: it is complete or ended, and its host has reported which.
    assert (driver.machines == {KEY: 1}) is (service.results[-1].outcome is ComputeOutcome.ACTIVE)


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("is_restarted", [True, False])
@pytest.mark.parametrize("fault", [DriverUnavailable("away"), None], ids=["unavailable", "left out"])
async def test_a_host_that_cannot_be_read_is_read_later_and_its_machine_is_busy_until_then(
    fault: Exception | None, complete: bool, is_restarted: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The command is acknowledged, and a recovery gives one about a leftover only once."""
    driver, records = Scripted(), Records(tmp_path / "records")
    records.open()
    service = await started(driver, records)
    driver.machines[KEY], faults = 1, [fault] * (1 if fault is None else DESTROY_CALLS)
    settled: list[Key] = []
    service.destroys._on_done = settled.append

    async def scan(hosts: object = None) -> Mapping[str, Sequence[Machine]]:
        if faults:
            if (fault := faults.pop()) is None:
                return {}
            raise fault
        return {HOSTS[0]: [Machine(*KEY, 1, built=complete)]}

    monkeypatch.setattr(driver, "list", scan)
    await service.carry_out(ENDED, ENDED)
    assert not faults and not service.results and not driver.destroys and service.jobs.chain(KEY) is None
    assert service.destroys.pending() == [KEY] and service.destroys.is_busy(KEY) and not settled
    if is_restarted:
        records.close()
        records = Records(tmp_path / "records")
        records.open()
        service = await started(driver, records)
        service.destroys._on_done = settled.append
    else:
        service.destroys.resume_owed()
    await service.rest()
    assert settled == [KEY] and not service.destroys.pending()
    assert [one.outcome for one in service.results] == [ComputeOutcome.ACTIVE if complete else ComputeOutcome.DESTROYED]
    assert driver.machines == ({KEY: 1} if complete else {}) and not records.checks
    records.close()


async def test_destructions_that_fail_for_long_and_looks_take_no_turns_of_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(destroys, "MAX_RETRIES", 1)
    driver = Scripted()
    whole = driver.list
    service = await started(driver)
    await service.carry_out(spawn(0))
    driver.destroy_bug = DriverUnavailable("its node is away")

    async def away(hosts: object = None) -> Mapping[str, Sequence[Machine]]:
        raise DriverUnavailable("away")

    monkeypatch.setattr(driver, "list", away)
    await service.carry_out(destroy(0), replace(destroy(1), keep_if_complete=True))
    monkeypatch.setattr(driver, "list", whole)
    driver.machines[HOSTS[0], INSTANCES[1]] = 1
    service.destroys.resume_owed()
    await service.rest()
    assert service.results[-1].instance_uuid == INSTANCES[0] and not service.records.checks
    assert ComputeOutcome.ACTIVE in [one.outcome for one in service.results if one.instance_uuid == INSTANCES[1]]


async def test_a_command_is_on_record_while_its_host_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The process was killed meanwhile: the command was acknowledged, and nobody knew of it."""
    driver, records = Scripted(), Records(tmp_path / "records")
    records.open()
    killed = await started(driver, records)
    monkeypatch.setattr(driver, "list", pending)
    killed.agent.handle([ENDED])
    await asyncio.sleep(0)
    await killed.jobs.stop(0.0)
    records.close()
    monkeypatch.undo()
    records = Records(tmp_path / "records")
    records.open()
    service = await started(driver, records)
    await service.rest()
    assert [one.outcome for one in service.results] == [ComputeOutcome.DESTROYED]
    records.close()


async def pending(*_: object) -> Mapping[str, Sequence[Machine]]:
    """No answer."""
    await asyncio.Event().wait()
    return {}


class Skipping(Scripted):
    """Its next lists of a host leave that host out."""

    skips = 0
    looks = 0

    async def list(self, hosts: Sequence[str] | None = None) -> Mapping[str, Sequence[Machine]]:
        self.looks += 1
        if hosts is None or not self.skips:
            return await super().list(hosts)
        self.skips -= 1
        return {}


async def test_a_complete_machine_stays_whose_host_is_left_out() -> None:
    """Ironic's list leaves out a node that cannot be read, or has another service's tag: its machine was undeployed."""
    driver = Skipping()
    service = await started(driver)
    driver.machines[KEY], driver.skips, driver.looks = 1, 1, 0
    await service.carry_out(ENDED, ENDED)
    assert (driver.machines, driver.destroys, service.results) == ({KEY: 1}, 0, [])
    assert service.records.get(KEY) is None
    assert driver.looks == 1, "a list may be that of all nodes: neither the pass nor the repeat has read it once more"
    await service.carry_out(ENDED)
    assert [one.outcome for one in service.results] == [ComputeOutcome.ACTIVE]


@pytest.mark.parametrize("complete", [True, False])
async def test_a_host_that_is_left_out_is_looked_at_again(complete: bool) -> None:
    driver = Skipping()
    service = await started(driver)
    driver.machines, driver.skips = ({KEY: 1} if complete else {}), 1
    await service.carry_out(ENDED)
    service.destroys.resume_owed()
    await service.rest()
    assert [one.outcome for one in service.results] == [ComputeOutcome.ACTIVE if complete else ComputeOutcome.DESTROYED]


async def test_what_changes_the_record_while_a_host_is_left_out_counts() -> None:
    driver = Skipping()
    service = await started(driver)
    driver.machines[KEY], driver.skips = 1, 1
    await service.carry_out(ENDED, ENDED, destroy(0))
    assert not driver.machines
    assert {(one.attempt, one.outcome) for one in service.results} == {(1, ComputeOutcome.DESTROYED)}


@pytest.mark.parametrize(
    ("call", "named"),
    [
        ("spawn", (Reschedule("a"), BuildAbort("a"), NotOwned())),
        ("check", (Reschedule("a"), NotOwned())),
        ("destroy", (NotOwned(), MachineProtected())),
        ("change", (ChangeFault("a"), HandOverRefused("a"), NotOwned())),
        ("check_source", (HandOverRefused("a"), ChangeFault("a"))),
        ("list", (DriverUnavailable(),)),
    ],
)
async def test_a_call_raises_what_the_port_names_and_anything_else_as_the_drivers_fault(
    call: str, named: tuple[Exception, ...]
) -> None:
    foreign = [TimeoutError(), KeyError("x"), *([BuildAbort("a")] if call == "change" else [ChangeFault("a")])]
    for fault in [*named, *(one for one in foreign if type(one) not in map(type, named))]:

        class Faulty:
            async def call(self, fault: Exception = fault) -> None:
                raise fault

            def decorated(self) -> Awaitable[None]:
                return self.call()

        for written in (Faulty.call, Faulty.decorated):
            setattr(Faulty, call, written)
            with pytest.raises(Exception) as found:
                await getattr(isolate_driver(Faulty()), call)()
            assert type(found.value) is (type(fault) if fault in named else DriverFault)


def test_a_look_at_what_waits_raises_the_drivers_fault() -> None:
    class Faulty:
        def waiting(self) -> Sequence[object]:
            raise KeyError("x")

    with pytest.raises(DriverFault):
        isolate_driver(Faulty()).waiting()


async def test_a_job_that_fails_before_anyone_watches_ends_the_service_still() -> None:
    jobs = Jobs()

    async def fail() -> None:
        raise ZeroDivisionError

    jobs.start((HOSTS[0], INSTANCES[0]), Chain(), fail())
    await asyncio.wait(jobs.tasks)
    await asyncio.sleep(0)
    with pytest.raises(ZeroDivisionError):
        async with asyncio.timeout(60):
            await jobs.watch()
